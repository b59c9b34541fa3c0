"""A GRU that forecasts a noisy sensor, and says where it has never been.

Trained on oscillations around 0, then asked about a sensor whose zero has drifted by 3: the noise
(aleatoric) stays the same, what the draws disagree about (epistemic) grows.
"""

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import bayesrnn as br

NOISE = 0.1


class Forecaster(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(1, 24, batch_first=True)
        self.out = nn.Linear(24, 1)

    def forward(self, x: Tensor) -> Tensor:  # [batch, time] -> the next value at each step
        return self.out(self.rnn(x[..., None])[0]).squeeze(-1)


def oscillations(count: int, length: int = 40) -> tuple[Tensor, Tensor]:
    """Inputs and targets: a sine of random phase, with noise."""
    phase = 6.28 * torch.rand(count, 1)
    clean = torch.sin(phase + 0.2 * torch.arange(length + 1))
    noisy = clean + NOISE * torch.randn(count, length + 1)
    return noisy[:, :-1], noisy[:, 1:]


def main(epochs: int = 150) -> tuple[float, float]:
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(*oscillations(64)), batch_size=16, shuffle=True)
    model = br.bayesianize(Forecaster(), br.Gaussian(scale=0.02), br.Normal(0.0, "fit"))
    objective = br.FreeEnergy(loader)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(epochs):
        for batch in loader:
            x, y = batch
            nll = (0.5 * ((model(x) - y) / NOISE).square()).sum()  # up to a constant
            optimizer.zero_grad()
            objective(model, nll, batch).backward()
            optimizer.step()
    x, _ = oscillations(100)
    known, drifted = (
        br.predict(model, signal, samples=50, output=br.outputs.Normal(NOISE)).epistemic.sqrt()
        for signal in (x, x + 3.0)
    )
    scores = known.mean().item(), drifted.mean().item()
    print(f"noise {NOISE}; the draws differ by {scores[0]:.3f}, by {scores[1]:.3f} after the drift")
    return scores


if __name__ == "__main__":
    main()
