"""The free energy: shares that sum to one, sums by hand, and counts that are checked."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributions as td
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
)

from bayesrnn.bayes import (
    Bayesian,
    Delta,
    Gaussian,
    Normal,
    ScaleMixture,
    Uniform,
    bayesianize,
)
from bayesrnn.data import StreamLoader
from bayesrnn.errors import Invalid
from bayesrnn.objective import FreeEnergy


def regression(count: int = 10) -> TensorDataset:
    return TensorDataset(
        torch.randn(count, 3, dtype=torch.float64), torch.randn(count, 1, dtype=torch.float64)
    )


def linear(posterior: Any = None, prior: Any = None) -> Bayesian:
    return bayesianize(
        nn.Linear(3, 1).double(), posterior or Gaussian(0.3), prior or Normal(0.1, 0.5)
    )


def error(model: nn.Module, batch: Any) -> Tensor:
    """The negative log-likelihood with unit noise, without its constant, one entry a sequence."""
    x, y = batch
    return 0.5 * (model(x) - y).square()[:, 0]


def run(objective: FreeEnergy, model: Bayesian, loader: Any) -> list[Any]:
    return [objective(model, error(model, batch), batch) for batch in loader]


# --- shares ------------------------------------------------------------------------------------


@given(
    count=st.integers(1, 40),
    size=st.integers(1, 15),
    drop_last=st.booleans(),
    shuffle=st.booleans(),
)
def test_the_shares_of_a_dataloader_sum_to_one(
    count: int, size: int, drop_last: bool, shuffle: bool
) -> None:
    if drop_last and count < size:
        size = count
    loader = DataLoader(regression(count), size, shuffle=shuffle, drop_last=drop_last)
    objective = FreeEnergy(loader)
    losses = run(objective, linear(), loader)
    assert sum(loss.share for loss in losses) == pytest.approx(1, abs=1e-12)
    used = count - count % size if drop_last else count
    assert [loss.share for loss in losses] == [len(b[0]) / used for b in loader]
    assert objective.epoch.share == pytest.approx(1, abs=1e-12)
    assert objective.epoch.targets == used


def test_a_short_last_batch_has_a_smaller_share() -> None:
    loader = DataLoader(regression(10), batch_size=4)
    shares = [loss.share for loss in run(FreeEnergy(loader), linear(), loader)]
    assert shares == [0.4, 0.4, 0.2]


@pytest.mark.parametrize("unroll", [3, 5, 35])
@pytest.mark.parametrize("drop_last", [False, True])
def test_the_shares_of_a_text_sum_to_one(unroll: int, drop_last: bool) -> None:
    loader = StreamLoader(np.arange(200) % 7, streams=4, unroll=unroll, drop_last=drop_last)
    model = bayesianize(nn.Embedding(7, 7))
    objective = FreeEnergy(loader)
    shares = []
    for batch in loader:
        nll = nn.functional.cross_entropy(
            model(batch.x).flatten(0, 1), batch.y.flatten(), reduction="sum"
        )
        loss = objective(model, nll, batch)
        assert loss.share == pytest.approx(batch.share)
        assert loss.streams == 4
        shares.append(loss.share)
    assert sum(shares) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize(
    "sampler",
    [
        lambda data: SubsetRandomSampler(range(7)),
        lambda data: RandomSampler(data, num_samples=23, replacement=True),
    ],
    ids=["subset", "with replacement"],
)
def test_the_sampler_says_how_long_an_epoch_is(sampler: Any) -> None:
    data = regression(10)
    loader = DataLoader(data, batch_size=4, sampler=sampler(data))
    losses = run(FreeEnergy(loader), linear(), loader)
    assert sum(loss.share for loss in losses) == pytest.approx(1)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("subset", [range(10), range(7)])
def test_a_batch_sampler_of_ones_own_says_how_long_an_epoch_is(
    subset: range, drop_last: bool
) -> None:
    data = regression(10)
    batches = BatchSampler(SubsetRandomSampler(subset), 4, drop_last)
    loader = DataLoader(data, batch_sampler=batches)
    losses = run(FreeEnergy(loader), linear(), loader)
    assert sum(loss.share for loss in losses) == pytest.approx(1)


@dataclass
class Captions:
    """A batch that counts for itself."""

    x: Tensor
    y: Tensor
    targets: int
    streams: int

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.x, self.y))


class CaptionLoader:
    targets = 50

    def __iter__(self) -> Iterator[Captions]:
        for targets, streams in ((30, 4), (20, 6)):
            x, y = torch.randn(streams, 4, dtype=torch.float64).split([3, 1], dim=1)
            yield Captions(x, y, targets, streams)


def test_a_loader_that_counts_for_itself_is_believed() -> None:
    loader = CaptionLoader()
    losses = run(FreeEnergy(loader), linear(), loader)
    assert [(loss.share, loss.streams) for loss in losses] == [(0.6, 4), (0.4, 6)]


@pytest.mark.parametrize("batch", ["list", "dict", "nested", "tensor"])
def test_the_examples_of_a_plain_batch_are_counted_by_its_first_tensor(batch: str) -> None:
    x = torch.randn(4, 3, dtype=torch.float64)
    given_batch = {
        "list": [x, x[:2]],
        "dict": {"x": x, "n": 3},
        "nested": ({"x": [x]}, 1),
        "tensor": x,
    }[batch]
    model = linear()
    loss = FreeEnergy(SimpleNamespace(targets=16))(model, model(x).sum(), given_batch)
    assert (loss.share, loss.streams) == (0.25, 4)


# --- the sum over an epoch ---------------------------------------------------------------------


@pytest.mark.parametrize("kl", ["auto", "exact", "sample"])
def test_an_epochs_free_energy_is_the_nll_plus_the_kl(kl: str) -> None:
    data = regression(10)
    loader = DataLoader(data, batch_size=4)
    model, objective = linear(), FreeEnergy(loader, kl=kl)
    with model.hold():  # one draw, so that the whole data set has one free energy
        losses = run(objective, model, loader)
        theta = {}
        eps = model.blocks[0].layout.split(model.blocks[0].noise["eps"])
        by_hand = 0.0
        for name, (loc, scale) in model.moments().items():
            theta[name] = loc + scale * eps[name]
            q = td.Normal(loc, scale)
            p = td.Normal(*torch.tensor([0.1, 0.5], dtype=torch.float64))
            term = td.kl_divergence(q, p)
            if kl == "sample":
                term = q.log_prob(theta[name]) - p.log_prob(theta[name])
            by_hand += term.sum().item()
    x, y = data.tensors
    nll = 0.5 * (x @ theta["weight"].T + theta["bias"] - y).square().sum().item()
    total = sum(loss.total.item() for loss in losses)
    assert total == pytest.approx(nll + by_hand, rel=1e-10)
    nats = objective.epoch.nats
    assert nats.error == pytest.approx(nll, rel=1e-10)
    assert nats.complexity == pytest.approx(by_hand, rel=1e-10)
    assert nats.total == pytest.approx(nll + by_hand, rel=1e-10)
    assert objective.epoch.penalty == nats.complexity


def test_the_epochs_gradient_is_that_of_the_free_energy_over_the_streams() -> None:
    data = regression(12)
    loader = DataLoader(data, batch_size=4)
    model, objective = linear(), FreeEnergy(loader)
    with model.hold():
        for loss in run(objective, model, loader):
            loss.backward()
        found = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        ((error(model, data.tensors).sum() + model.kl()) / 4).backward()
    for gradient, parameter in zip(found, model.parameters(), strict=True):
        assert torch.allclose(gradient, parameter.grad, rtol=1e-10)


@pytest.mark.parametrize("warmth", [0.0, 0.3, torch.tensor(0.3, dtype=torch.float64)])
@pytest.mark.parametrize(
    ("posterior", "prior"),
    [
        (Gaussian(0.3), Normal(0.1, 0.5)),
        (Gaussian(0.3), Normal(0.1, "learn")),  # whose gradient is in the graph
        (Gaussian(0.3), ScaleMixture()),
        (Gaussian(0.3, estimator="fisher"), Normal(0.1, 0.5)),
    ],
    ids=["normal", "learnt", "mixture", "fisher"],
)
def test_while_it_warms_up_a_part_of_the_kl_counts(
    posterior: Any, prior: Any, warmth: float | Tensor
) -> None:
    loader = DataLoader(regression(10), batch_size=4)
    batch = next(iter(loader))
    model, objective = linear(posterior, prior), FreeEnergy(loader, "sample")
    found: dict[float, list[Tensor]] = {}
    figures = set()
    with model.hold():
        for part in (0.0, 1.0, warmth):
            objective.warmth = part
            model.zero_grad()
            loss = objective(model, error(model, batch), batch)
            loss.backward()
            figures.add((loss.nats, objective.epoch.penalty))
            objective.restart()
            found[float(part)] = [p.grad.clone() for p in model.parameters()]
    assert len(figures) == 1  # which are of the whole KL
    part = float(warmth)
    for none, whole, some in zip(found[0.0], found[1.0], found[part], strict=True):
        assert not torch.allclose(none, whole)
        assert torch.allclose(some, none + part * (whole - none), rtol=1e-10)


def test_a_loss_is_its_parts() -> None:
    loader = DataLoader(regression(10), batch_size=4)
    batch = next(iter(loader))
    model, objective = linear(), FreeEnergy(loader)
    losses = error(model, batch)
    loss = objective(model, losses, batch)
    assert loss.error.item() == pytest.approx(losses.sum().item())
    assert loss.complexity.item() == pytest.approx(0.4 * model.kl().item())
    assert loss.total.item() == pytest.approx(loss.error.item() + loss.complexity.item())
    assert loss.objective.item() == pytest.approx(loss.total.item() / 4)
    assert loss.nats == pytest.approx(
        (loss.error.item(), loss.complexity.item(), loss.total.item())
    )


def test_a_vector_of_losses_and_their_sum_are_the_same() -> None:
    loader = DataLoader(regression(10), batch_size=4)
    batch = next(iter(loader))
    model = linear()
    with model.hold():
        vector = FreeEnergy(loader)(model, error(model, batch), batch)
        summed = FreeEnergy(loader)(model, error(model, batch).sum(), batch)
    assert vector.total.item() == summed.total.item()


def test_bits_are_nats_over_ln_2() -> None:
    loader = DataLoader(regression(10), batch_size=5)
    model, objective = linear(), FreeEnergy(loader)
    loss = run(objective, model, loader)[-1]
    for lengths in (loss, objective.epoch):
        for name in ("error", "complexity", "total"):
            bits, nats = getattr(lengths.bits, name), getattr(lengths.nats, name)
            assert bits == pytest.approx(nats / math.log(2), rel=1e-12)


@pytest.mark.parametrize(
    ("posterior", "prior"),
    [(Delta(), Normal()), (Gaussian(), Uniform()), ({"weight": Gaussian(), "*": Delta()}, None)],
)
def test_undefined_description_lengths_are_none(posterior: Any, prior: Any) -> None:
    loader = DataLoader(regression(10), batch_size=5)
    model, objective = linear(posterior, prior), FreeEnergy(loader)
    loss = run(objective, model, loader)[-1]
    for lengths in (loss.nats, loss.bits, objective.epoch.nats, objective.epoch.bits):
        assert lengths.error > 0
        assert lengths.complexity is None
        assert lengths.total is None
    penalty = model.kl().item()  # optimised all the same
    assert objective.epoch.penalty == pytest.approx(penalty, rel=1e-10)
    assert loss.complexity.item() == pytest.approx(0.5 * penalty, rel=1e-10)


# --- several draws -----------------------------------------------------------------------------


def test_several_draws_a_step_are_averaged() -> None:
    loader = DataLoader(regression(10), batch_size=5)
    model, objective = linear(prior=ScaleMixture(0.3, 0.9, 0.15)), FreeEnergy(loader)
    errors, terms, expected = [], [], [torch.zeros_like(p) for p in model.parameters()]
    for batch in loader:
        for _ in range(3):
            loss = objective(model, error(model, batch), batch, draws=3)
            errors.append(loss.error.item())
            terms.append(model.kl().item())
            alone = torch.autograd.grad(loss.total, list(model.parameters()), retain_graph=True)
            for total, gradient in zip(expected, alone, strict=True):
                total += gradient / (5 * 3)
            loss.backward()
    epoch = objective.epoch
    assert epoch.share == pytest.approx(1)
    assert epoch.targets == 10
    assert epoch.nats.error == pytest.approx(sum(errors) / 3, rel=1e-10)
    assert epoch.nats.complexity == pytest.approx(0.5 * sum(terms) / 3, rel=1e-10)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert torch.allclose(parameter.grad, gradient, rtol=1e-10)


# --- counts that do not fit --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("targets", "streams", "draws", "message"),
    [
        (-5, 1, 1, "targets of a batch must be a whole number, 0 or above, got -5"),
        (2.5, 1, 1, "targets of a batch must be a whole number, 0 or above, got 2.5"),
        (5, 0, 1, "streams of a batch must be a whole number, 1 or above, got 0"),
        (5, -1, 1, "streams of a batch must be a whole number, 1 or above, got -1"),
        (5, 1, -1, "draws must be at least 1, got -1"),  # gradients would point uphill
        (5, 1, 0, "draws must be at least 1, got 0"),
    ],
)
def test_counts_that_are_none_are_refused(
    targets: float, streams: int, draws: int, message: str
) -> None:
    model, objective = bayesianize(nn.Linear(3, 1)), FreeEnergy(SimpleNamespace(targets=10))
    batch = SimpleNamespace(targets=targets, streams=streams)
    with pytest.raises(Invalid, match=message):
        objective(model, model(torch.ones(1, 3)).sum(), batch, draws)
    with pytest.raises(Invalid, match="targets of an epoch must be at least 1, got 0"):
        FreeEnergy(SimpleNamespace(targets=0))


def test_an_epoch_begins_anew_after_a_full_one() -> None:
    loader = DataLoader(regression(10), batch_size=4)
    model, objective = linear(), FreeEnergy(loader)
    for _ in range(3):
        run(objective, model, loader)
        assert objective.epoch.share == pytest.approx(1)
    run(objective, model, [next(iter(loader))])
    assert objective.epoch.share == pytest.approx(0.4)
    assert objective.epoch.targets == 4


def test_more_batches_than_the_loader_has_raise() -> None:
    loader = DataLoader(regression(10), batch_size=4)
    first = next(iter(loader))
    model, objective = linear(), FreeEnergy(loader)
    run(objective, model, [first, first])
    with pytest.raises(ValueError, match=r"more targets \(12\) than the loader's epoch \(10\)"):
        run(objective, model, [first])


def test_an_epoch_that_is_a_sample_of_the_data() -> None:
    """As docs/gotchas.md says."""
    data = regression(10)
    loader = DataLoader(data, batch_size=4, sampler=RandomSampler(data, num_samples=7))
    model, objective = linear(), FreeEnergy(SimpleNamespace(targets=len(data)))
    for _ in range(3):
        objective.restart()
        run(objective, model, loader)
        assert objective.epoch.share == 0.7


def test_a_broken_off_epoch_needs_a_restart() -> None:
    loader = DataLoader(regression(10), batch_size=4)
    model, objective = linear(), FreeEnergy(loader)
    run(objective, model, list(loader)[:2])
    with pytest.raises(ValueError, match=r"objective\.restart\(\)"):
        run(objective, model, loader)
    objective.restart()
    assert objective.epoch.nats == (0, 0, 0)
    run(objective, model, loader)
    assert objective.epoch.share == pytest.approx(1)


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[Tensor]:
        yield from torch.randn(6, 3)


@pytest.mark.parametrize(
    "loader",
    [
        [torch.zeros(3)],
        DataLoader(Stream(), batch_size=2),
        DataLoader(regression(10), batch_size=None),
        DataLoader(regression(10), batch_sampler=[[0, 1], [2]]),
    ],
    ids=["a list", "a stream", "unbatched", "unknown batches"],
)
def test_a_loader_whose_length_is_unknown_is_refused(loader: object) -> None:
    with pytest.raises(TypeError, match=f"an epoch of {type(loader).__name__}.*`targets`"):
        FreeEnergy(loader)


def test_a_loader_without_a_batch_is_refused() -> None:
    with pytest.raises((TypeError, ValueError)):
        FreeEnergy(DataLoader(regression(3), batch_size=4, drop_last=True))


@pytest.mark.parametrize("batch", [None, "text", [], {}, [[]]], ids=repr)
def test_a_batch_without_a_tensor_is_refused(batch: object) -> None:
    loader = DataLoader(regression(10), batch_size=4)
    model = linear()
    nll = error(model, next(iter(loader)))
    with pytest.raises(TypeError, match=f"a batch of {type(batch).__name__}"):
        FreeEnergy(loader)(model, nll, batch)


def test_a_plain_module_is_refused() -> None:
    loader = DataLoader(regression(10), batch_size=4)
    net = nn.Linear(3, 1).double()
    batch = next(iter(loader))
    with pytest.raises(TypeError, match="made by bayesianize, got Linear"):
        FreeEnergy(loader)(net, error(net, batch), batch)


def test_a_refused_batch_is_not_counted() -> None:
    loader = DataLoader(regression(10), batch_size=5)
    model, objective = linear(), FreeEnergy(loader)
    batch = next(iter(loader))
    with model.weights("mean"), pytest.raises(RuntimeError, match="the mean was used"):
        objective(model, error(model, batch), batch)
    run(objective, model, loader)
    assert objective.epoch.share == pytest.approx(1)


# --- several processes -------------------------------------------------------------------------


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("count", [12, 13])
def test_under_a_distributed_sampler_the_shares_of_all_ranks_sum_to_one(
    count: int, drop_last: bool
) -> None:
    data = regression(count)
    shares = 0.0
    for rank in range(2):
        sampler = DistributedSampler(data, num_replicas=2, rank=rank, shuffle=False)
        loader = DataLoader(data, batch_size=4, sampler=sampler, drop_last=drop_last)
        objective, model = FreeEnergy(loader), linear()
        for _ in range(2):  # and each rank's epoch ends by itself
            losses = run(objective, model, loader)
        assert objective.epoch.share == pytest.approx(0.5)
        shares += sum(loss.share for loss in losses)
    assert shares == pytest.approx(1)


def test_the_mean_of_the_ranks_gradients_is_that_of_the_whole_free_energy() -> None:
    data = regression(12)
    model = linear()
    with model.hold():
        gradients = []
        for rank in range(2):
            sampler = DistributedSampler(data, num_replicas=2, rank=rank, shuffle=False)
            loader = DataLoader(data, batch_size=3, sampler=sampler)
            model.zero_grad()
            for loss in run(FreeEnergy(loader), model, loader):
                loss.backward()
            gradients.append([p.grad.clone() for p in model.parameters()])
        model.zero_grad()
        # a step of both ranks has 6 streams
        ((error(model, data.tensors).sum() + model.kl()) / 6).backward()
    for one, other, parameter in zip(*gradients, model.parameters(), strict=True):
        assert torch.allclose((one + other) / 2, parameter.grad, rtol=1e-10)


# --- saving ------------------------------------------------------------------------------------


@pytest.mark.parametrize("posterior", [Gaussian(0.3), Delta()])
def test_a_restored_objective_goes_on_where_it_was(posterior: Any) -> None:
    loader = DataLoader(regression(10), batch_size=4)
    model, one = linear(posterior), FreeEnergy(loader)
    batches = list(loader)
    run(one, model, batches[:2])
    state = one.state_dict()
    assert all(type(value) in (int, float, bool, str) for value in state.values())
    two = FreeEnergy(loader)
    two.load_state_dict(state)
    assert two.epoch == one.epoch
    with model.hold():
        for objective in (one, two):
            run(objective, model, batches[2:])
    assert two.epoch == one.epoch
    assert two.epoch.share == pytest.approx(1)


def test_a_sampler_in_order_is_counted_too() -> None:
    data = regression(10)
    loader = DataLoader(data, batch_size=4, sampler=SequentialSampler(data))
    losses = run(FreeEnergy(loader), linear(), loader)
    assert sum(loss.share for loss in losses) == pytest.approx(1)


def test_a_nan_in_the_data_is_refused_before_it_spoils_the_weights() -> None:
    data = regression()
    data.tensors[0][7, 1] = math.nan
    loader = DataLoader(data, batch_size=5)
    model, objective = linear(), FreeEnergy(loader)
    first, second = loader
    objective(model, error(model, first), first)
    with pytest.raises(ValueError, match=r"nll is nan.*look for NaN in the data"):
        objective(model, error(model, second), second)
    assert math.isfinite(objective.epoch.nats.error)
