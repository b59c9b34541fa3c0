"""A prior that is each weight's own, from where it began, and a model that gets another prior."""

import copy
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributions as td
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import bayesrnn as br
from bayes.reference import central_differences, last_draw, learnt, relative_error
from bayesrnn.bayes import block as block_module
from bayesrnn.bayes.kl import Estimator
from bayesrnn.errors import Invalid, UserError

START = br.Normal("start", "start")
GAUSSIAN = br.Gaussian((0.05, 0.3))


def small_net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def moved(model: br.Bayesian) -> br.Bayesian:
    """The same model, having learnt something."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return model.train()


def after_start(
    prior: br.Prior = START, posterior: br.Posterior = GAUSSIAN
) -> tuple[br.Bayesian, dict[str, tuple[Tensor, Tensor | None]]]:
    """A model that has moved away from where it began, and its moments there."""
    torch.manual_seed(1)
    model = moved(br.bayesianize(small_net(), posterior))
    model = br.with_prior(model, prior)
    begun = {
        name: (loc.clone(), None if scale is None else scale.clone())
        for name, (loc, scale) in model.moments().items()
    }
    return moved(model), begun


def kl_to(
    model: br.Bayesian, begun: dict[str, tuple[Tensor, Tensor | None]], scale: float | None
) -> Tensor:
    """By torch.distributions."""
    terms = []
    for name, (loc, sigma) in model.moments().items():
        mean, width = begun[name]
        assert sigma is not None
        assert width is not None
        there = td.Normal(mean, width if scale is None else torch.full_like(width, scale))
        terms.append(td.kl_divergence(td.Normal(loc, sigma), there).sum())
    return torch.stack(terms).sum()


def run(model: br.Bayesian) -> Tensor:
    out: Tensor = model(torch.ones(4, 3, dtype=torch.float64))
    return out.square().sum()


@pytest.mark.parametrize("estimator", ["exact", "sample"])
def test_where_a_model_begins_its_kl_to_the_start_is_zero_and_pulls_nowhere(
    estimator: Estimator,
) -> None:
    torch.manual_seed(1)
    model = br.bayesianize(small_net(), br.Gaussian((0.05, 0.3)), START)
    run(model)
    kl = model.kl(estimator)
    assert kl.item() == pytest.approx(0.0, abs=1e-12)
    kl.backward()
    if estimator == "exact":
        for gradient in learnt(model)[1]:
            torch.testing.assert_close(gradient, torch.zeros_like(gradient))


@pytest.mark.parametrize("scale", [None, 0.4])
def test_the_exact_kl_to_the_start_is_that_of_two_gaussians(scale: float | None) -> None:
    model, begun = after_start(br.Normal("start", "start" if scale is None else scale))
    run(model)
    torch.testing.assert_close(model.kl("exact"), kl_to(model, begun, scale))


def test_the_sampled_kl_is_log_q_minus_log_p_of_the_draw() -> None:
    model, begun = after_start()
    run(model)
    expected = torch.zeros((), dtype=torch.float64)
    for name, theta in last_draw(model).items():
        q, p = (td.Normal(*moment) for moment in (model.moments()[name], begun[name]))
        expected += (q.log_prob(theta) - p.log_prob(theta)).sum()
    torch.testing.assert_close(model.kl("sample"), expected)


@pytest.mark.parametrize("piece", [1, 7, 1 << 16])
@pytest.mark.parametrize(
    ("prior", "estimator"),
    [
        (START, "exact"),
        (START, "sample"),
        (br.Normal("start", 0.3), "sample"),
        (br.Normal("start", "fit"), "exact"),
        (br.Normal("start", "learn"), "sample"),
        (br.Laplace("start", 0.3), "exact"),
    ],
)
def test_every_gradient_is_that_of_finite_differences(
    prior: br.Prior, estimator: Estimator, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a loss and its KL together, however the weights are cut into pieces."""
    monkeypatch.setattr(block_module, "PIECE", piece)
    model, _ = after_start(prior)
    loader = DataLoader(TensorDataset(torch.ones(4, 3, dtype=torch.float64)), batch_size=4)
    objective = br.FreeEnergy(loader, kl=estimator)

    def loss() -> br.Loss:
        objective.restart()
        return objective(model, run(model), [torch.ones(4, 3)])

    with model.hold():
        loss().backward()
        views, found = learnt(model)
        expected = central_differences(lambda: loss().objective, views)
    assert relative_error(found, expected) < 1e-7


@pytest.mark.parametrize("family", [br.Normal, br.Laplace])
def test_points_are_held_near_their_start(family: Callable[..., br.Prior]) -> None:
    model, begun = after_start(family("start", 0.7), br.Delta())
    run(model)
    kind = td.Normal if family is br.Normal else td.Laplace
    p = [kind(begun[n][0], 0.7).log_prob(loc).sum() for n, (loc, _) in model.moments().items()]
    torch.testing.assert_close(model.kl(), -torch.stack(p).sum())


@pytest.mark.parametrize(
    ("prior", "posterior"),
    [
        (br.Normal("start", "fit"), br.Gaussian((0.05, 0.3))),
        (br.Normal("start", "fit"), br.Delta()),
        (br.Laplace("start", "fit"), br.Delta()),
    ],
)
def test_a_scale_around_the_start_is_fitted_to_its_optimum(
    prior: br.Prior, posterior: br.Posterior
) -> None:
    model, _ = after_start(prior, posterior)
    run(model)
    best = model.kl().item()
    fitted = float(model.priors[0].values()["scale"])
    for factor in (0.98, 1.02):
        near = copy.deepcopy(model)
        number = type(prior)("start", fitted * factor)
        for block, mine in zip(near.each_block(), model.each_block(), strict=True):
            block.noise = mine.noise
        near.priors = nn.ModuleList([type(model.priors[0])(number, torch.zeros(()).double())])
        run(near)
        assert near.kl().item() > best


def test_of_a_pruned_model_only_the_weights_left_have_a_start() -> None:
    model, begun = after_start()
    br.prune(model, fraction=0.5)
    run(model)
    expected = torch.zeros((), dtype=torch.float64)
    for block in model.each_block():
        assert block.keep is not None
        for name, keep in block.layout.split(block.keep).items():
            q, p = (td.Normal(*(t[keep] for t in m)) for m in (model.moments()[name], begun[name]))
            expected += td.kl_divergence(q, p).sum()
    torch.testing.assert_close(model.kl("exact"), expected)
    model.kl("exact").backward()
    for block in model.each_block():
        assert block.loc.grad[~block.keep].count_nonzero() == 0


@pytest.mark.parametrize("exact", [True, False])
def test_the_bits_of_single_weights_add_up_to_the_kl(
    exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, begun = after_start()
    if not exact:
        monkeypatch.setattr("bayesrnn.bayes.cost.exact_pair", lambda *_: None)
    bits = br.weight_bits(model, samples=1 if exact else 1000)
    total = sum(float(cost.sum()) for cost in bits.values())
    tolerance = 1e-6 if exact else 0.1
    assert total == pytest.approx(kl_to(model, begun, None).item() / math.log(2), rel=tolerance)


def test_learning_from_one_half_after_the_other_is_learning_from_both() -> None:
    """Bayes' rule, where everything is known: a Gaussian mean, noise of variance 1. At the
    posterior of all the data the free energy of the second half, with that of the first as the
    prior, has no slope, and nowhere else."""
    torch.manual_seed(1)
    halves = torch.randn(2, 6, 1, dtype=torch.float64) + 0.7

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.m = nn.Parameter(torch.zeros(1, dtype=torch.float64))

        def forward(self, y: Tensor) -> Tensor:
            return 0.5 * (y - self.m).square()

    def posterior(data: Tensor) -> tuple[float, float]:  # the prior is N(0, 1)
        precision = 1.0 + len(data)
        return float(data.sum()) / precision, precision**-0.5

    def at(model: br.Bayesian, loc: float, scale: float) -> br.Bayesian:
        block = next(model.each_block())
        values = block.posterior.restore(*torch.tensor([[loc], [scale]], dtype=torch.float64))
        with torch.no_grad():
            for name, value in values.items():
                getattr(block, name)[0] = value[0]
        return model

    first = at(br.bayesianize(Mean(), br.Gaussian(), br.Normal()), *posterior(halves[0]))
    second = br.with_prior(first, START).train()

    def slope(loc: float, scale: float) -> Tensor:
        """Its expectation: of a square two points say all."""
        at(second, loc, scale).zero_grad()
        for eps in (-1.0, 1.0):
            second.resample()
            block = next(second.each_block())
            assert block.noise is not None
            block.noise["eps"].fill_(eps)
            loss = second(halves[1]).sum()
            (loss + second.kl("exact")).backward()
        return torch.stack([p.grad[0] for p in second.parameters()]) / 2

    both = posterior(halves.reshape(-1))
    torch.testing.assert_close(slope(*both), torch.zeros(2).double(), atol=1e-9, rtol=0)
    assert slope(both[0] + 0.1, both[1]).abs().max() > 0.1
    assert slope(both[0], both[1] * 1.1).abs().max() > 0.1


def test_a_model_is_saved_with_its_start_and_loaded_again(tmp_path: Path) -> None:
    model, _ = after_start()
    for fraction in (0.0, 0.5):
        br.prune(model, fraction=fraction)
        br.save(model, tmp_path / "model")
        again = br.load(tmp_path / "model", small_net())
        for one in (model, again):
            one.train().zero_grad()
            run(one)
            one.kl("exact").backward()
        torch.testing.assert_close(again.kl("exact"), model.kl("exact"))
        torch.testing.assert_close(learnt(again)[1], learnt(model)[1])
    br.save(model, tmp_path / "means", mean_only=True)
    assert br.load(tmp_path / "means", small_net()).all_points
    with pytest.raises(UserError, match="cannot round a model whose prior is its start"):
        br.save(model, tmp_path / "rounded", step=0.1)
    other = br.bayesianize(small_net(), br.Gaussian((0.05, 0.3)), START)
    other.load_state_dict(model.state_dict())
    for block, mine in zip(other.each_block(), model.each_block(), strict=True):
        torch.testing.assert_close(block.start, mine.start, rtol=0, atol=0)


def test_with_prior_leaves_the_model_as_it_was_and_takes_one_prior_a_layer() -> None:
    torch.manual_seed(1)
    model = moved(br.bayesianize(small_net(), br.Gaussian(0.1), br.Normal(0.0, 2.0)))
    run(model)
    before = model.kl("exact")
    wide = br.Normal(0.0, 5.0)
    other = br.with_prior(model, {"0.*": START, "*": wide})
    assert [other.hyper(block).prior for block in other.each_block()] == [START, wide]
    with pytest.raises(RuntimeError, match="there is none"):
        other.kl()
    torch.testing.assert_close(other.moments(), model.moments())
    torch.testing.assert_close(model.kl("exact"), before)
    with pytest.raises(ValueError, match=r"0\.weight and 0\.bias are of one layer"):
        br.with_prior(model, {"*.weight": START, "*": wide})
    with pytest.raises(ValueError, match=r"pattern 'rnn\.\*' matches no trainable parameter"):
        br.with_prior(model, {"rnn.*": START})
    with pytest.raises(TypeError, match="expected a model made by bayesianize"):
        br.with_prior(small_net(), START)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: br.Normal(0.0, "start"), 'scale can be "start" only with a loc that is'),
        (lambda: br.Laplace(0.0, "start"), 'scale must be a number, "fit" or "learn"'),
        (lambda: br.Normal("begin"), 'loc must be a number, "fit", "learn" or "start"'),
        (lambda: br.ScaleMixture("start"), 'pi must be a number, "fit" or "learn"'),
        (lambda: br.bayesianize(small_net(), br.Delta(), START), "delta posterior, which has none"),
    ],
)
def test_what_has_no_start_is_refused(make: Callable[[], object], said: str) -> None:
    with pytest.raises(Invalid, match=said):
        make()
