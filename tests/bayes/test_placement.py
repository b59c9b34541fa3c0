"""Where drawn weights lie changes nothing but the time a step takes."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.data import DataLoader, TensorDataset

import bayesrnn as br
from bayesrnn.bayes import placement as placement_module
from bayesrnn.bayes.placement import Frame

PRIORS = {
    "by input": br.ScaleMixture(0.5, 0.8, 0.05, "input"),
    "by tensor": br.ScaleMixture(0.5, 0.8, 0.05, "tensor"),
    "normal": br.Normal(0.1, 0.7),
    "fitted": br.Normal("fit", "fit"),
    "laplace": br.Laplace(0.0, 0.4),
}
NETS: dict[str, Any] = {
    "lstm": lambda: nn.LSTM(5, 7, 2),
    "gru": lambda: nn.GRU(5, 7, 2),
    "rnn": lambda: nn.RNN(5, 7, 2),
    "relu": lambda: nn.RNN(5, 7, nonlinearity="relu"),
    "no bias": lambda: nn.LSTM(5, 7, bias=False),
    "batch first": lambda: nn.LSTM(5, 7, batch_first=True),
    "aligned already": lambda: nn.LSTM(8, 4, 2),
    "both ways": lambda: nn.LSTM(5, 7, 2, bidirectional=True),
    "projected": lambda: nn.LSTM(5, 7, proj_size=3),
}


class Net(nn.Module):
    def __init__(self, kind: str, freeze: bool = False) -> None:
        super().__init__()
        self.rnn = NETS[kind]()
        out = self.rnn.proj_size or self.rnn.hidden_size
        self.embedding = nn.Embedding(11, self.rnn.input_size)
        self.decoder = nn.Linear(out * (1 + self.rnn.bidirectional), 3)
        if freeze and self.rnn.bias:
            for name, parameter in self.rnn.named_parameters():
                parameter.requires_grad_("bias_hh" not in name)

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        hidden, state = self.rnn(self.embedding(x), state)
        return self.decoder(hidden), state


def step(model: br.Bayesian, tuned: bool, passes: int = 1) -> tuple[list[Tensor], Tensor]:
    """Everything a step gives: outputs, states, figures, gradients; and log of the loss."""
    x = torch.arange(24).view(6, 4) % 11
    objective = br.FreeEnergy(DataLoader(TensorDataset(x), batch_size=4))
    model.zero_grad()
    torch.manual_seed(3)
    context = model.tuned() if tuned else model.hold()
    with context:
        model.resample()
        state = None
        with model.hold():
            for _ in range(passes):
                y, state = model(x, state)
        loss = objective(model, y.square().sum(), [x[:4]])
        loss.backward()
        model.join()
    states = state if isinstance(state, tuple) else (state,)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [y, *states, loss.error, loss.complexity, *gradients], loss.total


@pytest.mark.parametrize("prior", PRIORS.values(), ids=PRIORS.keys())
@pytest.mark.parametrize("freeze", [True, False], ids=["frozen", "free"])
@pytest.mark.parametrize("kind", NETS)
def test_a_tuned_step_is_the_ordinary_step(kind: str, freeze: bool, prior: br.Prior) -> None:
    torch.manual_seed(1)
    model = br.bayesianize(Net(kind, freeze).double(), br.Gaussian((0.05, 0.3)), prior)
    for passes in (1, 2):  # the second one from a carried state
        found, _ = step(model, True, passes)
        expected, _ = step(model, False, passes)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_weights_are_really_laid_out_wider(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    pad = placement_module._pad

    def watched(x: Any, own: int, size: int) -> Any:
        sizes.append(size)
        return pad(x, own, size)

    monkeypatch.setattr(placement_module, "_pad", watched)
    step(br.bayesianize(Net("lstm").double()), True)
    assert set(sizes) == {8}  # 32 bytes of doubles: 5 and 7 both become 8


def test_a_frozen_bias_that_is_not_zero_still_counts() -> None:
    torch.manual_seed(1)
    net = Net("lstm", freeze=True).double()
    model = br.bayesianize(net, br.Gaussian(0.1))
    with torch.no_grad():
        model.module.rnn.bias_hh_l1.fill_(0.7)
    one, other = (step(model, tuned)[1].item() for tuned in (True, False))
    assert one == pytest.approx(other, rel=1e-12)
    with torch.no_grad():
        model.module.rnn.bias_hh_l1.zero_()
    assert step(model, True)[1].item() != pytest.approx(one, rel=1e-6)


def test_a_bias_thawed_later_gets_its_gradient() -> None:
    model = br.bayesianize(Net("lstm", freeze=True).double(), br.Gaussian(0.1))
    with model.tuned():
        model(torch.zeros(2, 1, dtype=torch.int64))
        model.module.rnn.bias_hh_l0.requires_grad_()
        model(torch.zeros(2, 1, dtype=torch.int64))[0].sum().backward()
    assert model.module.rnn.bias_hh_l0.grad.abs().sum() > 0


def test_the_mean_is_laid_out_too_and_can_be_differentiated() -> None:
    torch.manual_seed(1)
    model = br.bayesianize(Net("gru").double(), br.Gaussian(0.1))
    x = torch.arange(6).view(3, 2)
    found = []
    for tuned in (True, False):
        model.zero_grad()
        with model.tuned() if tuned else model.hold(), model.weights("mean"):
            y = model(x)[0]
            y.square().sum().backward()
        found.append([y, *(p.grad for p in model.parameters() if p.grad is not None)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_packed_sequences_of_several_lengths() -> None:
    torch.manual_seed(1)
    model = br.bayesianize(nn.LSTM(5, 7).double(), br.Gaussian(0.1))
    x = torch.randn(4, 3, 5, dtype=torch.float64)
    packed = pack_padded_sequence(x, torch.tensor([4, 2, 1]))
    found = []
    with model.hold():
        for tuned in (True, False):
            with model.tuned() if tuned else model.hold():
                y, (h, c) = model(packed)
            found.append((pad_packed_sequence(y)[0], h, c))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_bfloat16_computes_in_it_and_learns_in_float32() -> None:
    torch.manual_seed(1)
    model = br.bayesianize(Net("lstm", freeze=True), br.Gaussian(0.05), where="*weight*")
    x = torch.arange(24).view(6, 4) % 11
    with model.hold():
        exact = model(x)[0]
        with model.tuned(torch.bfloat16):
            y = model(x)[0]
            assert y.dtype == torch.bfloat16
            y.float().square().sum().backward()
    assert torch.linalg.vector_norm(y.float() - exact) < 0.02 * torch.linalg.vector_norm(exact)
    learnt = [p for p in model.parameters() if p.grad is not None]
    assert {p.dtype for p in learnt} == {p.grad.dtype for p in learnt} == {torch.float32}
    assert any(p is model.module.decoder.bias for p in learnt)  # an ordinary one as well
    assert model(x)[0].dtype == torch.float32


def test_bfloat16_needs_no_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, which then passes over the weights piece by piece."""
    monkeypatch.setattr("bayesrnn.bayes.block.PIECE", 32)
    torch.manual_seed(1)
    model = br.bayesianize(Net("lstm", freeze=True), br.Gaussian(0.05), br.ScaleMixture())
    x = torch.arange(24).view(6, 4) % 11
    found = []
    for aligned in (False, True):
        model.zero_grad()
        torch.manual_seed(3)
        with model.tuned(torch.bfloat16, aligned=aligned):
            loss = model(x)[0].float().square().mean() + 1e-4 * model.kl()
            assert any(b.placement is not None for b in model.each_block()) == aligned
            loss.backward()
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    for one, other in zip(*found, strict=True):
        assert torch.linalg.vector_norm(one - other) < 0.02 * torch.linalg.vector_norm(other)


def test_a_weight_that_learns_but_is_not_drawn_stays_where_it_is() -> None:
    torch.manual_seed(1)
    model = br.bayesianize(Net("lstm").double(), br.Gaussian(0.1), where="rnn.weight*")
    found, _ = step(model, True)
    expected, _ = step(model, False)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_tied_weights_stay_where_they_are() -> None:
    torch.manual_seed(1)
    net = br.LanguageModel(11, 7, 7, 1, tied=True).double()
    model = br.bayesianize(net, br.Gaussian(0.1))
    x = torch.arange(6).view(3, 2)
    found = []
    with model.hold():
        for tuned in (nullcontext(), model.tuned()):
            model.zero_grad()
            with tuned:
                logits = model(x)[0]
                logits.square().sum().backward()
            found.append(
                [logits.detach(), *(p.grad for p in model.parameters() if p.requires_grad)]
            )
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_a_frame_holds_each_gate_in_a_corner() -> None:
    frame = Frame("w", (8, 4), gates=2)
    outer = torch.zeros(8, 4)
    weight = torch.arange(1.0, 19.0).view(6, 3)
    frame.corner(outer, weight.shape).copy_(weight.view(frame.split(weight.shape)))
    assert torch.equal(outer[[0, 1, 2, 4, 5, 6], :3], weight)
    assert outer[[3, 7]].sum() == 0
    assert outer[:, 3].sum() == 0


def test_a_frozen_bias_is_cast_with_the_rest_and_comes_back() -> None:
    model = br.bayesianize(Net("lstm", freeze=True), br.Gaussian(0.05))
    bias = model.module.rnn.bias_hh_l0
    x = torch.arange(6).view(3, 2)
    for dtype in (torch.bfloat16, None, torch.bfloat16):
        with model.tuned(dtype):
            assert model(x)[0].dtype == (dtype or torch.float32)
        assert model.module.rnn.bias_hh_l0 is bias
        assert model.module.rnn._flat_weights[3] is bias
        assert not model.module.rnn._weights_have_changed()


@pytest.mark.parametrize("size", [4, 6, 8, 9])
@pytest.mark.parametrize("net", [nn.LSTM(5, 10), nn.Linear(5, 3)], ids=["lstm", "linear"])
def test_an_input_of_the_wrong_size_is_refused_as_ever(net: nn.Module, size: int) -> None:
    model = br.bayesianize(net)
    model(torch.zeros(4, 2, 5))
    for tuned in (False, True):
        with model.tuned() if tuned else nullcontext(), pytest.raises(RuntimeError):
            model(torch.zeros(4, 2, size))


def test_a_state_of_the_wrong_size_is_refused_as_ever() -> None:
    model, state = br.bayesianize(nn.GRU(5, 10)), torch.zeros(1, 2, 12)
    for tuned in (False, True):
        with model.tuned() if tuned else nullcontext(), pytest.raises(RuntimeError):
            model(torch.zeros(4, 2, 5), state)
