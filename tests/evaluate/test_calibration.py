"""Calibration figures against torchmetrics, slow direct sums, and cases known by hand."""

import math
import random
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bayesrnn.errors import Invalid
from bayesrnn.evaluate.calibration import (
    brier,
    calibration,
    calibration_of_top,
    classwise_error,
    reliability,
    risk_coverage,
)

N, CLASSES = 500, 6


@pytest.fixture
def probabilities() -> Tensor:
    torch.manual_seed(3)
    return (3 * torch.randn(N, CLASSES, dtype=torch.float64)).softmax(dim=1)


@pytest.fixture
def targets(probabilities: Tensor) -> Tensor:
    """Right more often than by chance, and less often than the probabilities say."""
    return probabilities.sqrt().multinomial(1).squeeze(1)


def slow_error(confidence: Tensor, correct: Tensor, bins: int) -> float:
    """Prediction by prediction, in bins of equal width."""
    found: dict[int, list[tuple[float, float]]] = {}
    for p, right in zip(confidence.tolist(), correct.tolist(), strict=True):
        found.setdefault(min(int(p * bins), bins - 1), []).append((p, float(right)))
    return sum(abs(sum(r for _, r in b) - sum(p for p, _ in b)) for b in found.values()) / len(
        confidence
    )


def slow_adaptive(confidence: Tensor, correct: Tensor, bins: int) -> float:
    pairs = sorted(zip(confidence.tolist(), correct.double().tolist(), strict=True))
    total = 0.0
    for b in range(bins):
        part = pairs[-(-b * len(pairs) // bins) : -(-(b + 1) * len(pairs) // bins)]
        total += abs(sum(r for _, r in part) - sum(p for p, _ in part))
    return total / len(pairs)


@pytest.mark.parametrize("bins", [1, 4, 15, 40])
def test_calibration_errors_equal_torchmetrics(
    bins: int, probabilities: Tensor, targets: Tensor, other_metrics: ModuleType
) -> None:
    found = calibration(probabilities, targets, bins)
    columns = probabilities.t().contiguous()
    top = other_metrics.multiclass_calibration_error(probabilities, targets, CLASSES, bins)
    by_class = [
        other_metrics.binary_calibration_error(columns[c], (targets == c).long(), bins)
        for c in range(CLASSES)
    ]
    assert found.ece == pytest.approx(top.item(), abs=1e-6)
    assert found.classwise_ece == pytest.approx(torch.stack(by_class).mean().item(), abs=1e-6)
    accuracy = other_metrics.multiclass_accuracy(probabilities, targets, CLASSES, average="micro")
    assert found.accuracy == pytest.approx(accuracy.item(), abs=1e-6)


def test_the_brier_score_equals_torchmetrics_squared_error(
    probabilities: Tensor, targets: Tensor, other_metrics: ModuleType
) -> None:
    from torchmetrics.functional import mean_squared_error

    one_hot = torch.nn.functional.one_hot(targets, CLASSES).double()
    expected = CLASSES * mean_squared_error(probabilities.flatten(), one_hot.flatten()).item()
    assert calibration(probabilities, targets).brier == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("bins", [1, 4, 15, 40])
def test_calibration_errors_equal_direct_sums(
    bins: int, probabilities: Tensor, targets: Tensor
) -> None:
    found = calibration(probabilities, targets, bins)
    confidence, predicted = probabilities.max(dim=1)
    correct = predicted == targets
    assert found.ece == pytest.approx(slow_error(confidence, correct, bins))
    assert found.adaptive_ece == pytest.approx(slow_adaptive(confidence, correct, bins))
    columns = [(probabilities[:, c], targets == c) for c in range(CLASSES)]
    expected = sum(slow_error(p, y, bins) for p, y in columns) / CLASSES
    assert found.classwise_ece == pytest.approx(expected)
    expected = sum(slow_adaptive(p, y, bins) for p, y in columns) / CLASSES
    adaptive = classwise_error(probabilities, targets, bins, "count")
    assert adaptive == pytest.approx(expected)


def test_scores_equal_direct_sums(probabilities: Tensor, targets: Tensor) -> None:
    found = calibration(probabilities, targets)
    one_hot = torch.nn.functional.one_hot(targets, CLASSES)
    assert found.predictions == N
    assert found.brier == pytest.approx((probabilities - one_hot).square().sum(1).mean().item())
    expected = torch.nn.functional.nll_loss(probabilities.log(), targets).item()
    assert found.nll == pytest.approx(expected)
    assert found.accuracy == (probabilities.argmax(1) == targets).double().mean().item()
    assert found.confidence == pytest.approx(probabilities.max(1).values.mean().item())


def test_the_most_probable_class_is_enough_for_all_but_the_classwise_error(
    probabilities: Tensor, targets: Tensor
) -> None:
    whole = calibration(probabilities, targets)
    confidence, predicted = probabilities.max(dim=1)
    nll = -probabilities.gather(1, targets[:, None]).squeeze(1).log()
    scores = brier(probabilities, targets)
    top = calibration_of_top(nll, scores, confidence, predicted == targets)
    assert top.classwise_ece is None
    assert (top.nll, top.brier, top.ece) == (whole.nll, whole.brier, whole.ece)
    assert (top.adaptive_ece, top.aurc) == (whole.adaptive_ece, whole.aurc)


def test_certainty_that_is_right_costs_nothing_and_that_is_wrong_costs_all() -> None:
    sure = torch.eye(3)[[0, 1, 2, 0]]
    right = calibration(sure, torch.tensor([0, 1, 2, 0]))
    assert (right.nll, right.brier, right.ece, right.adaptive_ece, right.aurc) == (0, 0, 0, 0, 0)
    wrong = calibration(sure, torch.tensor([1, 2, 0, 1]))
    assert (wrong.nll, wrong.brier, wrong.ece, wrong.adaptive_ece) == (math.inf, 2, 1, 1)
    assert wrong.aurc == 1


def test_probabilities_that_are_true_are_calibrated() -> None:
    torch.manual_seed(1)
    p = torch.rand(200_000, dtype=torch.float64)
    came = torch.rand_like(p) < p
    diagram = reliability(p, came, 10)
    assert diagram.error < 0.01
    torch.testing.assert_close(diagram.accuracy, diagram.confidence, atol=0.02, rtol=0)


def test_a_reliability_diagram_leaves_empty_bins_out_and_counts_all() -> None:
    confidence = torch.tensor([0.0, 0.25, 0.3, 1.0], dtype=torch.float64)
    diagram = reliability(confidence, torch.tensor([False, True, False, True]), 4)
    assert diagram.count.tolist() == [1, 2, 1]
    assert diagram.confidence.tolist() == pytest.approx([0.0, 0.275, 1.0])
    assert diagram.accuracy.tolist() == [0.0, 0.5, 1.0]


@pytest.mark.parametrize(("count", "bins"), [(10, 3), (3, 10), (15, 15), (1, 15)])
def test_adaptive_bins_hold_as_many_predictions_each(count: int, bins: int) -> None:
    diagram = reliability(torch.rand(count), torch.rand(count) > 0.5, bins, "count")
    assert int(diagram.count.sum()) == count
    assert len(diagram.count) == min(count, bins)
    assert int(diagram.count.max() - diagram.count.min()) <= 1
    assert torch.equal(diagram.confidence, diagram.confidence.sort().values)


@given(st.lists(st.tuples(st.integers(0, 4), st.floats(0, 1)), min_size=1, max_size=6))
def test_the_risk_coverage_curve_is_the_mean_over_all_orders_of_ties(
    pairs: list[tuple[int, float]],
) -> None:
    from itertools import permutations

    uncertainty = torch.tensor([u for u, _ in pairs])
    curve = risk_coverage(uncertainty, torch.tensor([x for _, x in pairs], dtype=torch.float64))
    orders = [o for o in permutations(pairs) if [u for u, _ in o] == sorted(u for u, _ in o)]
    for k in range(1, len(pairs) + 1):
        expected = sum(sum(x for _, x in order[:k]) / k for order in orders) / len(orders)
        assert curve.risk[k - 1].item() == pytest.approx(expected, abs=1e-12)
        assert curve.coverage[k - 1].item() == pytest.approx(k / len(pairs))
    assert curve.area == pytest.approx(curve.risk.mean().item())


def test_better_uncertainty_has_the_smaller_area() -> None:
    wrong = torch.tensor([0.0, 0.0, 1.0, 1.0])
    good, none, bad = (risk_coverage(u, wrong).area for u in (wrong, torch.zeros(4), 1 - wrong))
    assert good < none == 0.5 < bad


def test_logits_and_targets_that_are_no_classes_are_refused() -> None:
    logits, targets = torch.tensor([[2.0, -1.0, 0.5], [0.1, 0.2, 0.3]]), torch.tensor([0, 2])
    for score in (calibration, brier, classwise_error):
        score(logits.softmax(1).half(), targets)
        for wrong in (logits, logits.abs(), logits.softmax(0)):
            with pytest.raises(Invalid, match=r"probabilities must be 0 or above and sum to 1"):
                score(wrong, targets)
        for label in (-1, 3):
            with pytest.raises(Invalid, match="targets must be the places of classes, 0 to 2"):
                score(logits.softmax(1), torch.tensor([0, label]))


def test_impossible_inputs_are_refused() -> None:
    p, y = torch.full((3, 2), 0.5), torch.tensor([0, 1, 0])
    with pytest.raises(Invalid, match="bins must be at least 1"):
        calibration(p, y, 0)
    with pytest.raises(Invalid, match=r"\[N, classes\] with targets \[N\], got \[3, 2\] and \[2\]"):
        calibration(p, y[:2])
    with pytest.raises(Invalid, match="at least one prediction"):
        reliability(p[:0, 0], y[:0])
    with pytest.raises(Invalid, match="correct must be of confidence's shape"):
        reliability(p[:, 0], y[:2])
    with pytest.raises(Invalid, match="binning must be one of"):
        reliability(p[:, 0], y, 3, "height")  # type: ignore[arg-type]
    with pytest.raises(Invalid, match="loss must be of uncertainty's shape"):
        risk_coverage(p[:, 0], y[:2])


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=20), st.randoms())
def test_adaptive_bins_do_not_depend_on_the_order_of_the_data(
    pairs: list[tuple[int, bool]], chance: random.Random
) -> None:
    shuffled = chance.sample(pairs, len(pairs))
    found = []
    for each in (pairs, shuffled):
        confidence = torch.tensor([place / 3 for place, _ in each])
        correct = torch.tensor([right for _, right in each])
        found.append(reliability(confidence, correct, 5, "count"))
    assert torch.equal(found[0].count, found[1].count)
    assert torch.allclose(found[0].accuracy, found[1].accuracy)
    assert torch.allclose(found[0].confidence, found[1].confidence)


def test_half_right_at_one_half_is_calibrated_in_any_order() -> None:
    confidence, correct = torch.full((300,), 0.5), torch.arange(300) < 150
    assert reliability(confidence, correct, 15, "count").error == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bins", [3, 7, 10, 15])
def test_a_bin_of_equal_width_holds_its_lower_edge(bins: int, dtype: torch.dtype) -> None:
    edges = torch.tensor([place / bins for place in range(bins)], dtype=dtype)
    diagram = reliability(edges, torch.ones(bins, dtype=torch.bool), bins)
    assert diagram.count.tolist() == [1] * bins
