"""The KL by pair: torch.distributions, numerical integration, and Monte Carlo."""

import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.distributions as td
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, stats
from torch import Tensor, nn

from bayes.reference import axes, last_draw, log_prior
from bayesrnn.bayes import (
    Bayesian,
    Delta,
    Gaussian,
    Laplace,
    Normal,
    Posterior,
    Prior,
    ScaleMixture,
    Uniform,
    bayesianize,
)
from bayesrnn.bayes.kl import EXACT, Draw, log_q, sampled_gradient
from bayesrnn.errors import Invalid


class Term(NamedTuple):
    """A KL and its gradient."""

    value: Tensor
    d_loc: Tensor
    d_scale: Tensor


def closed_form_with(prior: type[Prior]) -> Callable[[Tensor, Tensor, dict[str, float]], Term]:
    exact = EXACT[Gaussian, prior]
    return lambda *given: Term(exact.value(*given), *exact.gradient(*given))


gaussian_normal = closed_form_with(Normal)
gaussian_laplace = closed_form_with(Laplace)
gaussian_uniform = closed_form_with(Uniform)


def sampled(draw: Draw, prior: Prior, axis: int | None, values: dict[str, float]) -> Term:
    value = log_q(draw) - prior.log_prob(draw.theta, axis, values)
    return Term(value, *sampled_gradient(draw, prior, axis, values))


EXACT_PAIRS = {
    "normal": (gaussian_normal, Normal(0.3, 0.6)),
    "laplace": (gaussian_laplace, Laplace(-0.2, 0.4)),
    "uniform": (gaussian_uniform, Uniform()),
}
every_pair = pytest.mark.parametrize("pair", EXACT_PAIRS.values(), ids=EXACT_PAIRS.keys())
means, scales = st.floats(-3, 3), st.floats(1e-3, 5)


def values_of(prior: Prior) -> dict[str, float]:
    return {name: getattr(prior, name) for name in prior.domains}


def double(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


class Odd(nn.Module):
    """Weights of odd shapes, none of which fills its place in a block."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.randn(()))
        self.one = nn.Parameter(torch.randn(1))
        self.vector = nn.Parameter(torch.randn(33))
        self.cube = nn.Parameter(torch.randn(3, 1, 7))
        self.embedding = nn.Embedding(5, 3)
        self.rnn = nn.GRU(3, 2)

    def forward(self) -> Tensor:
        return self.scalar * self.one + self.vector.sum() + self.cube.sum()


def drawn(posterior: Posterior, prior: Prior) -> Bayesian:
    model = bayesianize(Odd().double(), posterior, prior)
    model()
    return model


# --- closed forms ------------------------------------------------------------------------------


@given(loc=means, scale=scales)
def test_the_kl_of_a_gaussian_to_itself_is_zero(loc: float, scale: float) -> None:
    value = gaussian_normal(double(loc), double(scale), {"loc": loc, "scale": scale})
    assert value.value.item() == pytest.approx(0, abs=1e-12)
    assert value.d_loc.item() == pytest.approx(0, abs=1e-12)
    assert value.d_scale.item() == pytest.approx(0, abs=1e-9 / scale)


def test_a_models_kl_to_its_own_posterior_is_zero_and_positive_elsewhere() -> None:
    net = nn.Linear(3, 2).double()
    nn.init.constant_(net.weight, 0.25)
    nn.init.constant_(net.bias, 0.25)
    same = bayesianize(net, Gaussian(0.5), Normal(0.25, 0.5))
    same.resample()
    assert same.kl("exact").item() == pytest.approx(0, abs=1e-12)
    other = bayesianize(net, Gaussian(0.5), Normal(0.25, 0.6))
    other.resample()
    assert other.kl("exact").item() > 0.1


@given(loc=means, scale=scales, m=means, s=st.floats(0.05, 3))
def test_gaussian_to_normal_is_torchs(loc: float, scale: float, m: float, s: float) -> None:
    value = gaussian_normal(double(loc), double(scale), {"loc": m, "scale": s}).value
    expected = td.kl_divergence(td.Normal(double(loc), double(scale)), td.Normal(*double(m, s)))
    assert value.item() == pytest.approx(expected.item(), rel=1e-9, abs=1e-9)


@every_pair
@pytest.mark.parametrize(("loc", "scale"), [(0.0, 1.0), (-0.2, 0.3), (2.0, 0.05), (-1.0, 4.0)])
def test_the_closed_form_is_the_integral_of_q_log_q_over_p(
    pair: tuple[object, Prior], loc: float, scale: float
) -> None:
    closed_form, prior = pair
    density = {
        "normal": lambda x: stats.norm.logpdf(x, 0.3, 0.6),
        "laplace": lambda x: stats.laplace.logpdf(x, -0.2, 0.4),
        "uniform": lambda x: 0.0,
    }[prior.kind]

    def integrand(x: float) -> float:
        log_q = stats.norm.logpdf(x, loc, scale)
        return math.exp(log_q) * (log_q - density(x))

    low, high = loc - 12 * scale, loc + 12 * scale
    kinks = sorted({p for p in (loc, -0.2, 0.3) if low < p < high})
    expected, _ = integrate.quad(integrand, low, high, points=kinks, limit=400)
    value = closed_form(double(loc), double(scale), values_of(prior)).value.item()
    assert value == pytest.approx(expected, rel=1e-7, abs=1e-8)


@given(loc=st.lists(means, min_size=1, max_size=5), scale=scales)
def test_against_a_uniform_prior_the_kl_is_minus_the_entropy(
    loc: list[float], scale: float
) -> None:
    scale_tensor = torch.full((len(loc),), scale, dtype=torch.float64)
    value = gaussian_uniform(double(*loc), scale_tensor, {}).value
    entropy = td.Normal(double(*loc), scale_tensor).entropy().sum()
    assert value.item() == pytest.approx(-entropy.item(), rel=1e-12, abs=1e-12)


@every_pair
@given(loc=st.floats(-2, 2), scale=st.floats(0.05, 3))
def test_the_gradients_of_a_closed_form_are_its_slopes(
    pair: tuple[object, Prior], loc: float, scale: float
) -> None:
    closed_form, prior = pair
    values = values_of(prior)
    found = closed_form(double(loc), double(scale), values)
    h = 1e-4 * scale

    def value(x: float, s: float) -> float:
        return closed_form(double(x), double(s), values).value.item()

    d_loc = (value(loc + h, scale) - value(loc - h, scale)) / (2 * h)
    d_scale = (value(loc, scale + h) - value(loc, scale - h)) / (2 * h)
    assert found.d_loc.item() == pytest.approx(d_loc, rel=1e-5, abs=1e-6)
    assert found.d_scale.item() == pytest.approx(d_scale, rel=1e-5, abs=1e-6)


# --- one sample --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prior",
    [
        Normal(0.3, 0.6),
        Laplace(-0.2, 0.4),
        Uniform(),
        ScaleMixture(0.3, 0.9, 0.15, group="weight"),
        ScaleMixture(0.3, 0.9, 0.15, group="input"),
        ScaleMixture(0.3, 0.9, 0.15, group="tensor"),
    ],
    ids=lambda prior: getattr(prior, "group", prior.kind),
)
def test_the_sampled_kl_is_log_q_minus_log_p_at_the_last_draw(prior: Prior) -> None:
    model = drawn(Gaussian((0.05, 0.5)), prior)
    theta, axis = last_draw(model), axes(model)
    expected = 0.0
    for name, (loc, scale) in model.moments().items():
        log_q = td.Normal(loc, scale).log_prob(theta[name]).sum()
        expected += (log_q - log_prior(prior, theta[name], axis[name], values_of(prior))).item()
    assert model.kl("sample").item() == pytest.approx(expected, rel=1e-10)


@every_pair
def test_the_average_of_samples_converges_to_the_closed_form(
    pair: tuple[object, Prior],
) -> None:
    closed_form, prior = pair
    count = 200_000
    loc, scale = double(0.4).expand(count), double(0.7).expand(count)
    eps = torch.randn(count, dtype=torch.float64)
    draw = Draw(loc + scale * eps, loc, scale, eps)
    found = sampled(draw, prior, None, values_of(prior))
    exact = closed_form(double(0.4), double(0.7), values_of(prior))
    # the spread of one sample, for a tolerance of five standard errors
    log_q = td.Normal(0.4, 0.7).log_prob(draw.theta)
    log_p = torch.stack([log_prior(prior, t, None, values_of(prior)) for t in draw.theta[:2000]])
    error = 5 * (log_q[:2000] - log_p).std().item() / math.sqrt(count)
    assert found.value.item() / count == pytest.approx(exact.value.item(), abs=error)
    # and so do the gradients, whatever the part of log q that cancels
    for name in ("d_loc", "d_scale"):
        samples = getattr(found, name)
        bound = 5 * samples.std().item() / math.sqrt(count) + 1e-12
        assert samples.mean().item() == pytest.approx(getattr(exact, name).item(), abs=bound)


def test_the_average_over_draws_of_a_model_converges_to_its_exact_kl() -> None:
    model = drawn(Gaussian(0.3), Laplace(0.1, 0.5))
    exact = model.kl("exact").item()
    samples = []
    for _ in range(600):
        model.resample()
        samples.append(model.kl("sample").item())
    spread = torch.tensor(samples).std().item()
    assert spread > 0.1
    error = 5 * spread / math.sqrt(600)
    assert sum(samples) / 600 == pytest.approx(exact, abs=error)


def test_the_sampled_kl_to_a_mixture_converges_to_numerical_integration() -> None:
    net = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(net.weight, 0.2)
    model = bayesianize(net, Gaussian(0.4), ScaleMixture(0.3, 0.9, 0.15))

    def integrand(x: float) -> float:
        log_q = stats.norm.logpdf(x, 0.2, 0.4)
        p = 0.3 * stats.norm.pdf(x, 0, 0.9) + 0.7 * stats.norm.pdf(x, 0, 0.15)
        return math.exp(log_q) * (log_q - math.log(p))

    expected, _ = integrate.quad(integrand, -4, 4.4, points=[0.0, 0.2])
    samples = []
    for _ in range(3000):
        model.resample()
        samples.append(model.kl().item())
    error = 5 * torch.tensor(samples).std().item() / math.sqrt(3000)
    assert sum(samples) / 3000 == pytest.approx(expected, abs=error)


# --- which of the two --------------------------------------------------------------------------


def test_auto_is_exact_where_it_can_be_and_does_not_depend_on_the_draw() -> None:
    model = drawn(Gaussian(0.3), Normal(0.0, 0.5))
    first = model.kl().item()
    sampled = model.kl("sample").item()
    model()
    assert model.kl().item() == first
    assert model.kl("exact").item() == first
    assert model.kl("sample").item() != sampled


def test_auto_samples_where_there_is_no_closed_form() -> None:
    model = drawn(Gaussian(0.3), ScaleMixture())
    assert model.kl().item() == model.kl("sample").item()
    first = model.kl().item()
    model()
    assert model.kl().item() != first


def test_an_exact_kl_is_refused_where_there_is_none() -> None:
    model = drawn(Gaussian(), ScaleMixture())
    with pytest.raises(Invalid, match=r'"exact": a gaussian posterior with a scale_mixture prior'):
        model.kl("exact")


def test_a_points_log_p_is_exact_with_every_prior() -> None:
    for prior in (Uniform(), Normal(), Laplace(), ScaleMixture()):
        model = drawn(Delta(), prior)
        assert model.kl("exact").item() == model.kl("sample").item()


def test_an_unknown_estimator_is_refused() -> None:
    with pytest.raises(Invalid, match="got 'exactly'"):
        drawn(Gaussian(), Normal()).kl("exactly")


# --- sums over a module ------------------------------------------------------------------------


@pytest.mark.parametrize("posterior", [Delta(), Gaussian((0.05, 0.5)), Gaussian(0.2, False)])
@pytest.mark.parametrize("prior", [Normal(0.3, 0.6), Laplace(-0.2, 0.4), Uniform()])
def test_padding_never_enters_the_kl(posterior: Posterior, prior: Prior) -> None:
    model = drawn(posterior, prior)
    assert sum(block.loc.numel() for block in model.blocks) > model.weight_count
    for block in model.blocks:  # whatever lies between the weights
        with torch.no_grad():
            gaps = torch.ones_like(block.loc)
            for view in block.layout.split(gaps).values():
                view.zero_()
            for name in block.parameter_names:
                getattr(block, name).add_(100 * gaps)
    expected = 0.0
    for loc, scale in model.moments().values():
        if scale is None:
            expected -= log_prior(prior, loc, None, values_of(prior)).item()
        elif isinstance(prior, Uniform):
            expected -= td.Normal(loc, scale).entropy().sum().item()
        else:
            for m, s in zip(loc.reshape(-1), scale.reshape(-1), strict=True):
                term = {"normal": gaussian_normal, "laplace": gaussian_laplace}[prior.kind]
                expected += term(m, s, values_of(prior)).value.item()
    assert model.kl().item() == pytest.approx(expected, rel=1e-10)
    model.kl().backward()
    for block in model.blocks:
        for name in block.parameter_names:
            gradient = getattr(block, name).grad
            assert gradient.count_nonzero() <= block.layout.count


def test_a_fixed_scale_of_zero_has_an_infinite_kl_to_every_proper_prior() -> None:
    assert drawn(Gaussian(0.0, learn_scale=False), Normal()).kl().item() == math.inf


def test_blocks_of_different_posteriors_and_priors_add_up() -> None:
    net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 3)).double()
    model = bayesianize(
        net, {"0.*": Gaussian(0.2), "*": Delta()}, {"*weight": Normal(0, 0.5), "*": Laplace(0, 2.0)}
    )
    model(torch.zeros(1, 3, dtype=torch.float64))
    normal, laplace = td.Normal(*double(0, 0.5)), td.Laplace(*double(0, 2))
    weight, bias = net[0].weight.detach(), net[0].bias.detach()
    scale = double(0.2)
    folded = [gaussian_laplace(b, scale, {"loc": 0.0, "scale": 2.0}).value.sum() for b in bias]
    expected = td.kl_divergence(td.Normal(weight, scale), normal).sum() + sum(folded)
    expected = expected - normal.log_prob(net[1].weight).sum() - laplace.log_prob(net[1].bias).sum()
    assert model.kl().item() == pytest.approx(expected.item(), rel=1e-9)
