"""The slow, obvious versions that the library is compared with.

Everything here goes through torch.distributions, plain loops or finite differences; nothing calls
the closed forms under test.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributions as td
from torch import Tensor, nn
from torch.func import functional_call

from bayesrnn.bayes import Bayesian, Laplace, Normal, Prior, ScaleMixture, Uniform


def log_prior(
    prior: Prior, theta: Tensor, axis: int | None, values: Mapping[str, float | Tensor]
) -> Tensor:
    """log p(theta), summed: torch.distributions, and a loop over the groups of a mixture."""
    if isinstance(prior, Uniform):
        return theta.new_zeros(())
    numbers = {
        name: value if isinstance(value, Tensor) else theta.new_tensor(value)
        for name, value in values.items()
    }
    if isinstance(prior, Normal):
        return td.Normal(numbers["loc"], numbers["scale"]).log_prob(theta).sum()
    if isinstance(prior, Laplace):
        return td.Laplace(numbers["loc"], numbers["scale"]).log_prob(theta).sum()
    assert isinstance(prior, ScaleMixture)
    chances = torch.stack([numbers["pi"], 1 - numbers["pi"]])
    widths = torch.stack([numbers["sigma1"], numbers["sigma2"]])
    if prior.group == "weight":
        each = td.Normal(torch.zeros_like(widths), widths)
        return td.MixtureSameFamily(td.Categorical(chances), each).log_prob(theta).sum()
    groups = [theta]
    if prior.group == "input" and axis is not None:
        groups = [theta.select(axis, i) for i in range(theta.shape[axis])]
    total = theta.new_zeros(())
    for group in groups:
        joint = [
            chance.log() + td.Normal(0.0, width).log_prob(group).sum()
            for chance, width in zip(chances, widths, strict=True)
        ]
        total = total + torch.logsumexp(torch.stack(joint), 0)
    return total


def relative_error(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The norm of the difference over the norm of what was expected, all tensors together."""
    a = torch.cat([t.detach().reshape(-1) for t in found])
    b = torch.cat([t.detach().reshape(-1) for t in expected])
    return float((a - b).norm() / b.norm())


def central_differences(
    f: Callable[[], Tensor], parameters: Sequence[Tensor], step: float = 1e-4
) -> list[Tensor]:
    """d f / d each element, by central differences of two steps (Richardson's extrapolation)."""
    gradients = []
    for parameter in parameters:
        gradient = torch.zeros_like(parameter)
        flat, out = parameter.detach().view(-1), gradient.view(-1)  # flat shares its memory
        for i in range(flat.numel()):
            start = flat[i].item()
            slopes = []
            for h in (step, step / 2):
                flat[i] = start + h
                above = f().item()
                flat[i] = start - h
                below = f().item()
                slopes.append((above - below) / (2 * h))
            flat[i] = start
            out[i] = (4 * slopes[1] - slopes[0]) / 3
        gradients.append(gradient)
    return gradients


class TinyTagger(nn.Module):
    """An embedding, a recurrent layer and a decoder, small enough for finite differences."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 3)
        self.rnn = nn.LSTM(3, 2)
        self.decoder = nn.Linear(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.rnn(self.embedding(x))[0])


def tiny_batch(steps: int = 3, streams: int = 2) -> tuple[Tensor, Tensor]:
    """Token ids and targets for a `TinyTagger`, [steps, streams]."""
    return torch.randint(4, (steps, streams)), torch.randint(4, (steps, streams))


def losses(logits: Tensor, y: Tensor) -> Tensor:
    """The negative log-likelihood of each sequence, by torch.distributions."""
    return -td.Categorical(logits=logits).log_prob(y).sum(0)


def plain_losses(net: nn.Module, theta: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    """The same of the plain network, with its weights replaced by `theta`."""
    return losses(functional_call(net, dict(theta), (x,)), y)


def by_name(model: Bayesian, which: str) -> dict[str, Tensor]:
    """A learnt tensor ("loc", "rho") or a noise ("eps") of all blocks, by the weights' names."""
    pieces: dict[str, Tensor] = {}
    for block in model.blocks:
        flat = block.noise[which] if which == "eps" else getattr(block, which)
        pieces.update(block.layout.split(flat.detach()))
    return pieces


def gradient_by_name(model: Bayesian, which: str) -> dict[str, Tensor]:
    """The gradient of a learnt tensor of all blocks, by the weights' names."""
    pieces: dict[str, Tensor] = {}
    for block in model.blocks:
        pieces.update(block.layout.split(getattr(block, which).grad))
    return pieces


def learnt(model: Bayesian) -> tuple[list[Tensor], list[Tensor]]:
    """Views of all that is learnt, without the padding, and their gradients."""
    inside = {p for block in model.blocks for p in block.parameters()}
    views, gradients = [], []
    for block in model.blocks:
        for parameter in block.parameters():
            views += block.layout.split(parameter.detach()).values()
            gradients += block.layout.split(parameter.grad).values()
            assert parameter.grad.count_nonzero() <= block.layout.count  # none in the padding
    for parameter in model.parameters():
        if parameter.requires_grad and parameter not in inside:
            views.append(parameter.detach())
            gradients.append(parameter.grad)
    return views, gradients


def last_draw(model: Bayesian) -> dict[str, Tensor]:
    """theta of the last draw by name, rebuilt from the noise with torch's own softplus."""
    drawn = {}
    for name, (loc, scale) in model.moments().items():
        drawn[name] = loc if scale is None else loc + scale * by_name(model, "eps")[name]
    return drawn


def axes(model: Bayesian) -> dict[str, int | None]:
    """The axis of the input units of each weight, as the model has them."""
    return {weight.name: weight.axis for block in model.blocks for weight in block.layout.weights}
