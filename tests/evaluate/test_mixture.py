"""The mixture of the draws' Normals against torch.distributions, integrals and known limits."""

import math

import pytest
import torch
import torch.distributions as td
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate
from torch import Tensor

from bayesrnn.errors import Invalid
from bayesrnn.evaluate import NormalMixture, outputs

D, N = 7, 40


@pytest.fixture
def mixture() -> NormalMixture:
    """Some draws far apart, some alike; some sharp, some wide."""
    torch.manual_seed(5)
    scales = torch.rand(D, N, dtype=torch.float64).square() * 2 + 0.02
    return NormalMixture(3 * torch.randn(D, N, dtype=torch.float64), scales)


@pytest.fixture
def targets() -> Tensor:
    torch.manual_seed(6)
    return 4 * torch.randn(N, dtype=torch.float64)


def theirs(mixture: NormalMixture) -> td.MixtureSameFamily:
    means, scales = mixture.means.movedim(0, -1), mixture.scales.movedim(0, -1)
    alike = td.Categorical(probs=torch.ones_like(means))
    return td.MixtureSameFamily(alike, td.Normal(means, scales))


def one(mean: float, scale: float) -> NormalMixture:
    return NormalMixture(torch.tensor([[mean]]).double(), torch.tensor([[scale]]).double())


def integrated_crps(mixture: NormalMixture, targets: Tensor) -> Tensor:
    """The integral of (F(x) - 1[y <= x])^2 by Simpson's rule, on both sides of y."""
    distribution = theirs(mixture)
    reach = 10 * mixture.scales.amax(dim=0) + 1
    left = torch.minimum(mixture.means.amin(dim=0) - reach, targets)
    right = torch.maximum(mixture.means.amax(dim=0) + reach, targets)
    share = torch.linspace(0, 1, 20_001, dtype=torch.float64)[:, None]
    total = torch.zeros_like(targets)
    for start, end, came in ((left, targets, 0), (targets, right, 1)):
        x = start + (end - start) * share
        gap = (distribution.cdf(x) - came).square()
        total += torch.from_numpy(integrate.simpson(gap.numpy(), x=x.numpy(), axis=0))
    return total


def test_the_crps_is_the_integral_that_defines_it(mixture: NormalMixture, targets: Tensor) -> None:
    expected = integrated_crps(mixture, targets)
    torch.testing.assert_close(mixture.crps(targets), expected, rtol=1e-8, atol=1e-8)


def test_the_crps_of_one_normal_is_the_known_form(mixture: NormalMixture, targets: Tensor) -> None:
    """Gneiting and Raftery 2007, eq. 21: s (z (2 Phi(z) - 1) + 2 phi(z) - 1 / sqrt(pi))."""
    first = NormalMixture(mixture.means[:1], mixture.scales[:1])
    normal = td.Normal(0.0, torch.ones((), dtype=torch.float64))
    mean, scale = mixture.means[0], mixture.scales[0]
    z = (targets - mean) / scale
    density = normal.log_prob(z).exp()
    expected = scale * (z * (2 * normal.cdf(z) - 1) + 2 * density - 1 / math.sqrt(math.pi))
    torch.testing.assert_close(first.crps(targets), expected, rtol=1e-12, atol=1e-12)
    alike = NormalMixture(mixture.means[:1].expand(5, -1), mixture.scales[:1].expand(5, -1))
    torch.testing.assert_close(alike.crps(targets), expected, rtol=1e-12, atol=1e-12)


def test_one_draw_is_its_normal(mixture: NormalMixture, targets: Tensor) -> None:
    first = NormalMixture(mixture.means[:1], mixture.scales[:1])
    normal = td.Normal(mixture.means[0], mixture.scales[0])
    torch.testing.assert_close(first.nll(targets), -normal.log_prob(targets))
    torch.testing.assert_close(first.cdf(targets), normal.cdf(targets))
    torch.testing.assert_close(first.quantile(0.3), normal.icdf(torch.tensor(0.3).double()))
    torch.testing.assert_close(first.mean, normal.mean)


def test_density_and_cdf_are_the_distributions(mixture: NormalMixture, targets: Tensor) -> None:
    expected = theirs(mixture)
    torch.testing.assert_close(mixture.nll(targets), -expected.log_prob(targets))
    torch.testing.assert_close(mixture.cdf(targets), expected.cdf(targets))
    torch.testing.assert_close(mixture.mean, expected.mean)


@pytest.mark.parametrize("p", [1e-6, 0.05, 0.31, 0.5, 0.95, 1 - 1e-6])
def test_quantiles_are_where_the_distributions_cdf_is_p(p: float, mixture: NormalMixture) -> None:
    found = theirs(mixture).cdf(mixture.quantile(p))
    torch.testing.assert_close(found, torch.full_like(found, p), rtol=1e-9, atol=1e-14)


@given(
    st.lists(st.tuples(st.floats(-50, 50), st.floats(0.5, 20)), min_size=1, max_size=6),
    st.floats(-30, 30),
)
def test_a_quantile_of_the_cdf_is_where_one_began(
    draws: list[tuple[float, float]], y: float
) -> None:
    means, scales = torch.tensor(draws, dtype=torch.float64).unbind(dim=1)
    mixture, target = NormalMixture(means, scales), torch.tensor(y, dtype=torch.float64)
    p = mixture.cdf(target).item()
    if 1e-3 < p < 1 - 1e-3:
        density = mixture.nll(target).neg().exp().item()
        assert mixture.quantile(p).item() == pytest.approx(y, abs=1e-9 + 1e-14 / density)


def test_an_interval_leaves_as_much_on_either_side(mixture: NormalMixture) -> None:
    lower, upper = mixture.interval(0.8)
    torch.testing.assert_close(theirs(mixture).cdf(lower), torch.full((N,), 0.1).double())
    torch.testing.assert_close(theirs(mixture).cdf(upper), torch.full((N,), 0.9).double())


def test_targets_may_have_any_shape(mixture: NormalMixture, targets: Tensor) -> None:
    folded = NormalMixture(mixture.means.view(D, 8, 5), mixture.scales.view(D, 8, 5))
    y = targets.view(8, 5)
    for of_all, of_each in (
        (folded.nll(y), mixture.nll(targets)),
        (folded.cdf(y), mixture.cdf(targets)),
        (folded.crps(y), mixture.crps(targets)),
        (folded.quantile(0.2), mixture.quantile(0.2)),
    ):
        assert torch.equal(of_all, of_each.view(8, 5))
    single = NormalMixture(mixture.means[:, 0], mixture.scales[:, 0])
    assert single.crps(targets[0]).item() == pytest.approx(mixture.crps(targets)[0].item())


def test_draws_without_noise_are_steps_and_nothing_is_nan() -> None:
    means = torch.tensor([[0.0], [1.0], [4.0], [4.0]])
    steps = NormalMixture(means, torch.zeros_like(means))
    for y, below in ((-1.0, 0.0), (0.0, 0.125), (0.5, 0.25), (2.0, 0.5), (4.0, 0.75), (5.0, 1.0)):
        target = torch.tensor([y])
        assert steps.cdf(target).item() == below
        expected = (y - means).abs().mean() - (means - means.squeeze(1)).abs().mean() / 2
        assert steps.crps(target).item() == pytest.approx(expected.item(), abs=1e-12)
    found = [steps.quantile(p).item() for p in (0.1, 0.3, 0.6, 0.99)]
    assert found == pytest.approx([0, 1, 4, 4], abs=1e-15)
    assert steps.nll(torch.tensor([0.5])).item() == math.inf
    assert steps.nll(torch.tensor([1.0])).item() < -600
    both = NormalMixture(torch.tensor([0.0, 0.0]), torch.tensor([0.0, 1.0]))
    assert both.nll(torch.tensor(1.0)).item() == pytest.approx(
        math.log(2) + 0.5 + math.log(2 * math.pi) / 2
    )


@pytest.mark.parametrize("y", [-0.7, 0.0, 1.3])
def test_a_scale_of_0_is_the_limit_of_small_ones(y: float) -> None:
    target = torch.tensor([y], dtype=torch.float64)
    point, sharp = one(0.0, 0.0), one(0.0, 1e-12)
    assert point.crps(target).item() == pytest.approx(sharp.crps(target).item(), abs=1e-11)
    assert point.cdf(target).item() == sharp.cdf(target).item()
    assert point.quantile(0.9).item() == pytest.approx(sharp.quantile(0.9).item(), abs=1e-11)


def test_single_precision_is_widened_before_anything_is_lost() -> None:
    means = torch.tensor([[1000.0], [1000.5]])
    mixture = NormalMixture(means, torch.full_like(means, 1e-3))
    wide = NormalMixture(means.double(), torch.full_like(means, 1e-3).double())
    target = torch.tensor([1000.2])
    for found, expected in (
        (mixture.nll(target), wide.nll(target.double())),
        (mixture.crps(target), wide.crps(target.double())),
        (mixture.quantile(0.4), wide.quantile(0.4)),
    ):
        assert found.dtype == torch.float64
        assert torch.equal(found, expected)


def test_a_mixture_is_read_off_the_raw_outputs_of_draws() -> None:
    raw = torch.randn(D, N, 2)
    mixture = outputs.Normal().mixture(raw)
    assert torch.equal(mixture.means, raw[..., 0])
    torch.testing.assert_close(mixture.scales, raw[..., 1].exp().log1p())
    known = outputs.Normal(scale=0.3).mixture(raw[..., 0])
    assert torch.equal(known.scales, torch.full((D, N), 0.3))


def test_impossible_mixtures_and_targets_are_refused() -> None:
    means = torch.zeros(3, 4)
    with pytest.raises(Invalid, match=r"scales must be of means' shape \[3, 4\], got \[3\]"):
        NormalMixture(means, torch.ones(3))
    with pytest.raises(Invalid, match="scales must be 0 or above"):
        NormalMixture(means, torch.full((3, 4), -1.0))
    with pytest.raises(Invalid, match=r"one draw or more along the first axis, got \[0, 4\]"):
        NormalMixture(means[:0], means[:0])
    mixture = NormalMixture(means, torch.ones(3, 4))
    for p in (0.0, 1.0, math.nan):
        with pytest.raises(Invalid, match="p must be between 0 and 1"):
            mixture.quantile(p)
    with pytest.raises(Invalid, match=r"level must be between 0 and 1, got 1\.5"):
        mixture.interval(1.5)
    for score in (mixture.nll, mixture.cdf, mixture.crps):
        with pytest.raises(ValueError, match=r"\(4,\) and the targets \(4, 1\).*squeeze"):
            score(torch.zeros(4, 1))
