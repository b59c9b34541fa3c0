"""The fused step (one pass for all gradients, piece by piece) against the plain one."""

import copy
import math
import os
import signal
import warnings
import weakref
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten
from torch.utils.data import DataLoader, TensorDataset

import bayesrnn as br
from bayesrnn.bayes import bayesian as bayesian_module
from bayesrnn.bayes import block as block_module
from bayesrnn.bayes import posterior as posterior_module
from bayesrnn.bayes.layout import ALIGNMENT, Layout, Weight
from bayesrnn.bayes.posterior import NOISE_PIECE, Tensors, fill_normal

PRIORS = {
    "normal": br.Normal(0.1, 0.7),
    "fitted": br.Normal("fit", "fit"),
    "laplace": br.Laplace(0.0, 0.4),
    "uniform": br.Uniform(),
    "by weight": br.ScaleMixture(0.5, 0.8, 0.05, "weight"),
    "by input": br.ScaleMixture(0.5, 0.8, 0.05, "input"),
    "by tensor": br.ScaleMixture(0.5, 0.8, 0.05, "tensor"),
}
POSTERIORS = {
    "learnt": br.Gaussian((0.05, 0.3)),
    "fixed": br.Gaussian(0.1, learn_scale=False),
}


class Net(nn.Module):
    """Rows, columns, a vector, a convolution; `spare` is never used by the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 5)
        self.rnn = nn.LSTM(5, 6)
        self.conv = nn.Conv1d(6, 3, 2)
        self.spare = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.rnn(self.embedding(x.T))
        return self.conv(hidden.permute(1, 2, 0)).sum(dim=(1, 2))


def gradients(model: br.Bayesian, fused: bool) -> dict[str, Tensor]:
    loader = DataLoader(TensorDataset(torch.arange(42).view(6, 7) % 11), batch_size=4)
    objective = br.FreeEnergy(loader)
    model.zero_grad()
    torch.manual_seed(3)
    batch = next(iter(loader))
    loss = objective(model, model(batch[0]).square(), batch)
    loss.backward() if fused else loss.objective.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("piece", [1, 7, 64, 1 << 16])
@pytest.mark.parametrize("posterior", POSTERIORS.values(), ids=POSTERIORS.keys())
@pytest.mark.parametrize("prior", PRIORS.values(), ids=PRIORS.keys())
def test_the_fused_step_gives_the_gradients_of_the_graph(
    prior: br.Prior, posterior: br.Posterior, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    model = br.bayesianize(Net().double(), posterior, prior)
    reference = gradients(model, fused=False)
    monkeypatch.setattr(block_module, "PIECE", piece)
    found = gradients(model, fused=True)
    assert found.keys() == reference.keys()
    for name, gradient in reference.items():
        error = (found[name] - gradient).norm() / gradient.norm().clamp_min(1e-12)
        assert error < 1e-10, name


def test_with_a_grouped_prior_sigma_is_found_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draw's serves its gradients; after an update, with the noise held, it is found anew."""
    torch.manual_seed(1)
    model = br.bayesianize(Net().double(), br.Gaussian((0.05, 0.3)), PRIORS["by input"])
    counted: list[int] = []
    softplus = torch.nn.functional.softplus

    def counting(x: Tensor) -> Tensor:
        counted.append(x.numel())
        return softplus(x)

    monkeypatch.setattr(posterior_module.F, "softplus", counting)
    gradients(model, fused=True)
    unused = 4 * 3 + 3  # `spare`: its KL is charged by itself
    assert sum(counted) == model.weight_count + unused
    counted.clear()
    loader = DataLoader(TensorDataset(torch.arange(42).view(6, 7) % 11), batch_size=4)
    batch = next(iter(loader))
    found: list[list[Tensor]] = []
    for fused in (True, False):
        copied = copy.deepcopy(model)
        torch.manual_seed(5)
        objective, rate = br.FreeEnergy(loader), torch.optim.SGD(copied.parameters(), lr=0.1)
        with copied.hold():
            for step in range(2):
                loss = objective(copied, copied(batch[0]).square(), batch)
                rate.zero_grad()
                loss.backward() if fused or step == 0 else loss.objective.backward()
                rate.step()
                objective.restart()
        found.append([p.grad for p in copied.parameters() if p.grad is not None])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_a_kl_after_an_update_that_torch_does_not_count_has_the_new_sigma() -> None:
    """Fused optimisers, and `.data`, leave a tensor's version as it is."""
    torch.manual_seed(1)
    model = br.bayesianize(nn.Linear(30, 20).double(), br.Gaussian((0.05, 0.3)), br.ScaleMixture())
    x = torch.randn(4, 30, dtype=torch.float64)
    with model.hold():
        model(x).square().sum().backward()
        model.kl("sample")
        for parameter in model.parameters():
            parameter.data.add_(1.0)
        model.zero_grad()
        model.kl("sample").backward()
        found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        model(x)  # which finds all of it anew
        model.kl("sample").backward()
    for one, parameter in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(one, parameter.grad)


@dataclass(frozen=True)
class Half(br.Gaussian):
    """Of half the spread that it would have."""

    def std(self, parameters: Tensors) -> Tensor:
        return 0.5 * super().std(parameters)

    def chain(
        self, parameters: Tensors, d_loc: Tensor, d_scale: Tensor | None
    ) -> dict[str, Tensor]:
        return super().chain(parameters, d_loc, None if d_scale is None else 0.5 * d_scale)


def test_a_posterior_of_ones_own_may_build_on_anothers_sigma() -> None:
    torch.manual_seed(1)
    model = br.bayesianize(Net().double(), Half((0.05, 0.3)), PRIORS["by input"])
    reference = gradients(model, fused=False)
    for name, gradient in gradients(model, fused=True).items():
        torch.testing.assert_close(gradient, reference[name], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("piece", [1, 7, 64])
@pytest.mark.parametrize("prior", PRIORS.values(), ids=PRIORS.keys())
def test_the_kl_and_the_draw_do_not_depend_on_the_pieces(
    prior: br.Prior, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = br.bayesianize(Net().double(), br.Gaussian((0.05, 0.3)), prior)
    x = torch.arange(14).view(2, 7) % 11
    with model.hold():
        whole = model(x), model.kl("sample")
        monkeypatch.setattr(block_module, "PIECE", piece)
        in_pieces = model(x), model.kl("sample")
    # the last bit may differ where a piece is no multiple of the processor's vectors
    torch.testing.assert_close(in_pieces[0], whole[0], rtol=1e-12, atol=1e-12)
    assert in_pieces[1].item() == pytest.approx(whole[1].item(), rel=1e-12)


def test_a_draw_used_twice_in_one_loss_is_charged_its_kl_once() -> None:
    model = br.bayesianize(nn.Linear(3, 1).double(), br.Gaussian(0.2), br.Normal(0.0, 0.5))
    x = torch.randn(4, 3, dtype=torch.float64)
    loader = DataLoader(TensorDataset(x), batch_size=4)
    found = []
    for fused in (True, False):
        torch.manual_seed(5)
        model.zero_grad()
        with model.hold():
            nll = (model(x) - model(2 * x)).square().sum()
            loss = br.FreeEnergy(loader)(model, nll, [x])
        loss.backward() if fused else loss.objective.backward()
        found.append([p.grad.clone() for p in model.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_pieces_are_whole_rows_that_make_up_the_weight() -> None:
    shapes = {"a": (10, 3), "b": (7,), "c": (2, 3, 4), "d": ()}
    layout = Layout([Weight(name, torch.Size(shape), None) for name, shape in shapes.items()])
    flat = torch.randn(
        sum(-(-torch.Size(s).numel() // ALIGNMENT) * ALIGNMENT for s in shapes.values())
    )
    named = layout.split(flat)
    for limit in (1, 6, 100, None):
        rebuilt: dict[str, list[Tensor]] = {name: [] for name in shapes}
        for piece, cut in zip(layout.pieces(limit), layout.cut(flat, limit), strict=True):
            rebuilt[piece.weight.name].append(cut.view(piece.shape))
            row = piece.weight.shape[1:].numel()
            assert limit is None or cut.numel() <= max(limit, row)
        for name, rows in rebuilt.items():
            assert torch.equal(torch.cat(rows).view(named[name].shape), named[name])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_draws_noise_too() -> None:
    """Its parent's threads are not there: it must not wait for them."""

    def drawn() -> Tensor:
        return fill_normal(torch.empty(2 * NOISE_PIECE + 8), torch.Generator().manual_seed(4))

    before = drawn()  # the pool has its threads now
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork with threads: what is tested
        child = os.fork()
    if child == 0:
        signal.alarm(20)
        same = np.array_equal(drawn().numpy(), before.numpy())  # no threads of OpenMP, either
        os._exit(0 if same else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_large_noise_is_the_same_however_many_threads_fill_it() -> None:
    size = 3 * NOISE_PIECE + 64
    before = torch.get_num_threads()
    drawn = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            generator = torch.Generator().manual_seed(4)
            drawn.append(fill_normal(torch.empty(size), generator))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(drawn[0], drawn[1])
    assert torch.equal(drawn[0], drawn[2])


def test_large_noise_is_standard_normal_and_new_in_every_piece() -> None:
    noise = fill_normal(torch.empty(2 * NOISE_PIECE), torch.Generator().manual_seed(4))
    count = noise.numel()
    assert abs(noise.double().mean().item()) < 5 / count**0.5
    assert abs(noise.double().var().item() - 1) < 5 * (2 / count) ** 0.5
    first, second = noise.double().split(NOISE_PIECE)
    assert abs((first * second).mean().item()) < 5 / NOISE_PIECE**0.5


def test_a_kl_asked_for_after_an_update_is_that_of_the_new_weights() -> None:
    model = br.bayesianize(Net().double(), br.Gaussian(0.2), br.ScaleMixture(0.5, 0.8, 0.05))
    x = torch.arange(14).view(2, 7) % 11
    with model.hold():
        model(x)
        before = model.kl().item()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1)
        after = model.kl().item()
        model(x)
        assert after == pytest.approx(model.kl().item(), rel=1e-12)
    assert after != pytest.approx(before, rel=1e-3)


def test_the_sums_of_a_draw_fit_that_draw_and_those_weights_alone() -> None:
    model = br.bayesianize(nn.Linear(4, 3), br.Gaussian(0.2), br.ScaleMixture(0.5, 0.8, 0.05))
    model(torch.zeros(1, 4))
    block = model.blocks[0]
    summary, noise = block.summary, block.noise
    assert summary.fits(block.parameters_by_name, noise)
    assert not summary.fits(block.parameters_by_name, dict(noise))  # same memory, another draw
    model.resample()
    assert not summary.fits(block.parameters_by_name, block.noise)
    with torch.no_grad():
        block.rho.add_(0.1)
    assert not summary.fits(block.parameters_by_name, noise)


def test_what_a_draw_has_noted_stays_until_the_next_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the KL reads it on another stream: were it let go here, its memory would be written
    to before that."""
    monkeypatch.setattr(block_module.Block, "limit", lambda self, flat: None)
    model = br.bayesianize(Net(), br.Gaussian(0.2), br.ScaleMixture(0.5, 0.8, 0.05))
    model.resample()
    model.prepare()
    leaves, _ = tree_flatten([dict(vars(block.summary)) for block in model.each_block()])
    noted = [weakref.ref(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
    assert len(noted) > len(list(model.each_block()))
    del leaves
    model.kl()
    assert all(note() is not None for note in noted)


@pytest.mark.parametrize("posterior", ["gaussian", "sharpened"])
def test_weights_made_ahead_of_the_forward_change_nothing_but_the_order(
    posterior: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: whole weights at a time, and the KL asked for before the forward. Of a weight
    whose groups are rows the draw notes the sums; of others they are taken of the draw as it lies,
    or, where that has moved since, by a pass of their own."""
    torch.manual_seed(1)
    q = br.Gaussian((0.05, 0.3)) if posterior == "gaussian" else br.Sharpened((0.05, 0.3), eta=0.1)
    prior = br.ScaleMixture(0.5, 0.8, 0.05)
    model = br.bayesianize(Net().double(), {"spare.*": br.Delta(), "*": q}, prior)
    x = torch.arange(42).view(6, 7) % 11
    loader = DataLoader(TensorDataset(x), batch_size=6)

    def step(ahead: bool) -> list[Tensor]:
        model.zero_grad()
        torch.manual_seed(3)
        model.resample(nll=lambda: model(x).square().sum() / 6)
        early = []
        if ahead:
            model.prepare()
            for block in model.each_block():
                for weight in block.layout.weights:
                    by_rows, summary = weight.name == "embedding.weight", block.summary
                    if block.posterior == br.Delta():
                        assert summary is None
                    else:
                        assert summary.lacks(weight) != by_rows
                        in_theta = weight.name in summary.theta
                        assert in_theta == (posterior == "gaussian" and not by_rows)
            early = [model.kl()]
        loss = br.FreeEnergy(loader)(model, model(x).square(), [x])
        loss.backward()
        return [
            *(early or [loss.complexity / loss.share]),
            loss.error,
            *(p.grad for p in model.parameters() if p.grad is not None),
        ]

    usual = step(ahead=False)
    monkeypatch.setattr(block_module.Block, "limit", lambda self, flat: None)
    for one, other in zip(step(ahead=True), usual, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("pruned", [False, True])
def test_a_kl_asked_for_where_weights_are_cut_otherwise_than_by_the_draw(
    pruned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draw that lies in frames notes whole weights; outside of `tuned` they are in pieces."""
    monkeypatch.setattr(block_module, "PIECE", 40)
    torch.manual_seed(1)
    model = br.bayesianize(nn.LSTM(5, 10).double(), br.Gaussian((0.05, 0.3)), br.ScaleMixture())
    if pruned:
        br.prune(model, 0.4)
    x = torch.randn(6, 2, 5, dtype=torch.float64)
    loader = DataLoader(TensorDataset(x), batch_size=6)
    found = []
    for tuned in (False, True):
        torch.manual_seed(2)
        model.zero_grad()
        with model.tuned() if tuned else nullcontext():
            nll = model(x)[0].square().sum()
        loss = br.FreeEnergy(loader)(model, nll, [x])
        loss.backward()
        found.append([loss.complexity, *(p.grad for p in model.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_weights_made_ahead_are_used_once_and_forgotten_by_another_draw(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = br.bayesianize(nn.Linear(3, 2), br.Gaussian(0.5))
    x = torch.ones(1, 3)
    model.prepare()
    with monkeypatch.context() as patch:
        patch.setattr(bayesian_module, "draw_of", None)
        model(x)  # makes none of its own
    with model.hold():
        model.resample()
        model.prepare()
        drawn = model(x)
        assert torch.equal(drawn, model(x))
        model.prepare()
        with model.weights("mean"):
            mean = model(x)
        assert torch.equal(mean, model.eval()(x))
        model.train().prepare()
        model.resample()
        assert not torch.equal(drawn, model(x))


def test_weights_made_ahead_are_made_again_where_something_has_changed() -> None:
    torch.manual_seed(1)
    model = br.bayesianize(nn.Linear(3, 2), br.Gaussian(0.5))
    x = torch.ones(1, 3)
    mean = model.eval()(x)
    model.train().prepare()
    assert torch.equal(model.eval()(x), mean)  # the other mode
    with torch.no_grad():
        model.train().prepare()
    assert model(x).requires_grad
    model.prepare()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    block = model.blocks[0]
    theta = block.layout.split(block.noise["eps"] * (math.log(2) + 1e-5))
    torch.testing.assert_close(model(x), x @ theta["weight"].T + theta["bias"])


def test_weights_made_ahead_are_those_of_their_kl_whatever_comes_between() -> None:
    model = br.bayesianize(nn.Linear(3, 2), br.Gaussian(0.5))
    x = torch.ones(1, 3)
    model.prepare()
    early = model.kl("sample").item()
    with model.weights("mean"):
        model(x)
        model.prepare()  # and the mean is not left for the forward outside
    drawn = model(x)
    assert model.kl("sample").item() == pytest.approx(early)
    assert not torch.equal(drawn, model(x))
