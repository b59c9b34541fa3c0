"""Calibration of numbers: against counting, samples of the very mixture, and cases by hand."""

import math

import pytest
import torch
from torch import Tensor

from bayesrnn.errors import Invalid
from bayesrnn.evaluate import NormalMixture, calibration_of_numbers, coverage
from bayesrnn.evaluate.intervals import LEVELS

D, N = 5, 20_000


@pytest.fixture(scope="module")
def mixture() -> NormalMixture:
    torch.manual_seed(1)
    return NormalMixture(torch.randn(D, N), 0.1 + torch.rand(D, N))


@pytest.fixture(scope="module")
def sampled(mixture: NormalMixture) -> Tensor:
    """A target of each mixture: a draw at random, then its Normal."""
    torch.manual_seed(2)
    of, at = torch.randint(D, (N,)), torch.arange(N)
    return mixture.means[of, at] + mixture.scales[of, at] * torch.randn(N)


def test_samples_of_the_mixture_are_covered_as_often_as_they_should_be(
    mixture: NormalMixture, sampled: Tensor
) -> None:
    found = calibration_of_numbers(mixture, sampled)
    assert found.predictions == N
    assert found.coverage_50 == pytest.approx(0.5, abs=0.015)  # 4 standard errors
    assert found.coverage_90 == pytest.approx(0.9, abs=0.009)
    assert found.calibration_error < 0.01
    assert mixture.cdf(sampled).mean().item() == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize(("times", "sign"), [(0.4, -1), (2.5, 1)])
def test_too_sure_covers_too_little_and_too_unsure_too_much(
    times: float, sign: int, mixture: NormalMixture, sampled: Tensor
) -> None:
    other = NormalMixture(mixture.means, times * mixture.scales)
    gaps = sign * (coverage(other.cdf(sampled)).share - torch.tensor(LEVELS))
    assert (gaps > 0).all()
    right, found = calibration_of_numbers(mixture, sampled), calibration_of_numbers(other, sampled)
    assert found.calibration_error > 5 * right.calibration_error
    assert found.calibration_error == pytest.approx(gaps.mean().item(), rel=1e-6)
    assert sign * (found.width_90 - right.width_90) > 0
    assert found.crps > right.crps  # proper scores
    assert found.nll > right.nll


def test_coverage_is_the_share_between_the_quantiles(
    mixture: NormalMixture, sampled: Tensor
) -> None:
    few = NormalMixture(mixture.means[:, :300], mixture.scales[:, :300])
    targets = 1.3 * sampled[:300]
    shares = []
    for level in LEVELS:
        lower, upper = few.quantile((1 - level) / 2), few.quantile((1 + level) / 2)
        shares.append(((lower <= targets) & (targets <= upper)).double().mean().item())
    diagram = coverage(few.cdf(targets))
    assert diagram.share.tolist() == pytest.approx(shares, abs=1e-12)
    assert diagram.level.tolist() == pytest.approx([0.05 * place for place in range(1, 20)])
    found = calibration_of_numbers(few, targets)
    assert (found.coverage_50, found.coverage_90) == (shares[9], shares[17])
    expected = sum(abs(s - x) for s, x in zip(shares, LEVELS, strict=True)) / 19
    assert found.calibration_error == pytest.approx(expected, abs=1e-12)


def test_scores_are_means_over_the_targets(mixture: NormalMixture, sampled: Tensor) -> None:
    found = calibration_of_numbers(mixture, sampled)
    log_p = torch.distributions.Normal(mixture.means.double(), mixture.scales.double())
    nll = math.log(D) - log_p.log_prob(sampled.double()).logsumexp(dim=0).mean().item()
    assert found.nll == pytest.approx(nll)
    away = mixture.means.double().mean(dim=0) - sampled
    assert found.rmse == pytest.approx(away.square().mean().sqrt().item())
    assert found.crps == pytest.approx(mixture.crps(sampled).mean().item())


def test_the_width_of_one_normal_is_known() -> None:
    scales = torch.tensor([[0.5, 1.0, 3.0]])
    found = calibration_of_numbers(NormalMixture(torch.zeros(1, 3), scales), torch.zeros(3))
    assert found.width_90 == pytest.approx(1.5 * 2 * 1.6448536269514722)
    assert (found.coverage_50, found.rmse) == (1, 0)


def test_levels_may_be_chosen_and_targets_have_any_shape(
    mixture: NormalMixture, sampled: Tensor
) -> None:
    found = calibration_of_numbers(mixture, sampled, levels=[0.5])
    assert found.calibration_error == pytest.approx(abs(found.coverage_50 - 0.5))
    shape = (D, N // 4, 4)  # steps in time, and channels
    folded = NormalMixture(mixture.means.view(shape), mixture.scales.view(shape))
    assert calibration_of_numbers(folded, sampled.view(shape[1:]), levels=[0.5]) == found


def test_certainty_without_noise_is_covered_where_it_is_right_and_is_never_nan() -> None:
    points = NormalMixture(torch.tensor([[1.0, 2.0]]), torch.zeros(1, 2))
    found = calibration_of_numbers(points, torch.tensor([1.0, 5.0]))
    assert (found.coverage_50, found.coverage_90, found.width_90) == (0.5, 0.5, 0)
    assert (found.crps, found.nll) == (1.5, math.inf)


def test_impossible_inputs_are_refused() -> None:
    pit = torch.tensor([0.2])
    with pytest.raises(Invalid, match="pit must hold at least one prediction"):
        coverage(pit[:0])
    with pytest.raises(Invalid, match="levels must hold at least one level"):
        coverage(pit, [])
    with pytest.raises(Invalid, match=r"levels must be between 0 and 1, got \[0\.5, 1\]"):
        coverage(pit, [0.5, 1])
