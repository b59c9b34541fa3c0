"""Whether probabilities can be taken at their word: scores, calibration errors and their curves.

All are functions of plain tensors, from whatever model.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from bayesrnn.errors import require

Binning = Literal["width", "count"]
"""Bins of equal width, or adaptive ones that hold the same number of predictions each."""
BINS = 15
SUM_OFF = 0.02
"""By how much probabilities of half precision may miss a sum of 1."""


@dataclass(frozen=True)
class Calibration:
    """The scores and calibration errors of N predictions.

    `ece` and `adaptive_ece` are of the most probable class, in bins of equal width and of equal
    count. `classwise_ece` is None where only that class is known. `confidence` is the mean
    probability of the most probable class, `accuracy` the share of predictions in which it is
    right.
    """

    predictions: int
    nll: float
    brier: float
    accuracy: float
    confidence: float
    ece: float
    adaptive_ece: float
    classwise_ece: float | None
    aurc: float
    """The area under the risk-coverage curve, with the share of errors as the risk."""


@dataclass(frozen=True, eq=False)
class Reliability:
    """A reliability diagram: each bin's count, mean confidence and share that was right.

    Bins without predictions are left out.
    """

    count: Tensor
    confidence: Tensor
    accuracy: Tensor

    @property
    def error(self) -> float:
        """The expected calibration error: |accuracy - confidence|, averaged over predictions."""
        gaps = (self.accuracy - self.confidence).abs()
        return ((gaps * self.count).sum() / self.count.sum()).item()


@dataclass(frozen=True, eq=False)
class RiskCoverage:
    """Selective prediction: `risk` is the mean loss of the surest `coverage` of all predictions."""

    coverage: Tensor
    risk: Tensor

    @property
    def area(self) -> float:
        """The mean risk over all coverages."""
        return self.risk.mean().item()


def calibration(probabilities: Tensor, targets: Tensor, bins: int = BINS) -> Calibration:
    """Scores and calibration errors of probabilities [N, classes], given targets [N].

    The NLL is infinite where the probability of a target is 0. If a small probability became 0,
    `evaluate_labelled` has the NLL from its logarithm.

    >>> calibration(torch.tensor([[0.75, 0.25], [0.25, 0.75]]), torch.tensor([0, 0])).ece
    0.25
    """
    _check(probabilities, targets)
    confidence, predicted = probabilities.max(dim=1)
    of_target = probabilities.gather(1, targets[:, None]).squeeze(1).double()
    return calibration_of_top(
        -of_target.log(),
        brier(probabilities, targets),
        confidence,
        predicted == targets,
        bins,
        classwise_error(probabilities, targets, bins),
    )


def calibration_of_top(
    nll: Tensor,
    brier: Tensor,
    confidence: Tensor,
    correct: Tensor,
    bins: int = BINS,
    classwise: float | None = None,
) -> Calibration:
    """`calibration`, where only each prediction's scores and most probable class were kept.

    `nll` and `brier` are the scores [N], `confidence` is the probability of the most probable
    class, and `correct` whether it was right. `classwise` is the classwise error, if it is known.
    """
    return Calibration(
        len(nll),
        nll.double().mean().item(),
        brier.double().mean().item(),
        correct.double().mean().item(),
        confidence.double().mean().item(),
        reliability(confidence, correct, bins).error,
        reliability(confidence, correct, bins, "count").error,
        classwise,
        risk_coverage(-confidence, ~correct).area,
    )


def brier(probabilities: Tensor, targets: Tensor) -> Tensor:
    """Each prediction's squared distance from what came, summed over classes: 0 to 2.

    >>> brier(torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([0, 1])).tolist()
    [0.0, 2.0]
    """
    _check(probabilities, targets)
    p = probabilities.double()
    return p.square().sum(dim=1) - 2 * p.gather(1, targets[:, None]).squeeze(1) + 1


def reliability(
    confidence: Tensor, correct: Tensor, bins: int = BINS, binning: Binning = "width"
) -> Reliability:
    """A reliability diagram, from each prediction's confidence and whether it was right.

    `binning` is "width" or "count". A bin of equal width holds its lower edge, and the last one
    both of its edges. With bins of equal count, all predictions of one confidence are in the same
    bin, that of their middle one, so the order of the data does not matter.
    """
    require(
        (bins >= 1, "bins", f"must be at least 1, got {bins}"),
        (len(confidence) > 0, "confidence", "must hold at least one prediction"),
        (
            confidence.shape == correct.shape,
            "correct",
            f"must be of confidence's shape {list(confidence.shape)}, got {list(correct.shape)}",
        ),
        (
            binning in ("width", "count"),
            "binning",
            f"must be one of width, count, got {binning!r}",
        ),
    )
    if binning == "width":
        edges = torch.arange(1, bins, dtype=torch.float64, device=confidence.device) / bins
        place = torch.bucketize(confidence, edges.to(confidence.dtype), right=True)
    else:
        _, of_value, sizes = confidence.unique(return_inverse=True, return_counts=True)
        middle = sizes.cumsum(0) - sizes + (sizes - 1) // 2
        place = (middle * bins // len(confidence))[of_value]

    def summed(values: Tensor) -> Tensor:
        return torch.bincount(place, values.double(), bins)

    count = torch.bincount(place, minlength=bins)
    used = count > 0
    count = count[used]
    return Reliability(count, summed(confidence)[used] / count, summed(correct)[used] / count)


def classwise_error(
    probabilities: Tensor, targets: Tensor, bins: int = BINS, binning: Binning = "width"
) -> float:
    """The expected calibration error of each class's probability, averaged over the classes."""
    _check(probabilities, targets)
    errors = [
        reliability(of_class.contiguous(), targets == label, bins, binning).error
        for label, of_class in enumerate(probabilities.unbind(dim=1))
    ]
    return sum(errors) / len(errors)


def risk_coverage(uncertainty: Tensor, loss: Tensor) -> RiskCoverage:
    """The mean loss of the surest part of all predictions, by the size of that part.

    Equally sure predictions come in random order: each of them counts with their mean loss, which
    is the expected curve.

    >>> risk_coverage(torch.tensor([0.1, 0.9]), torch.tensor([0.0, 1.0])).risk.tolist()
    [0.0, 0.5]
    """
    require(
        (len(loss) > 0, "loss", "must hold at least one prediction"),
        (
            uncertainty.shape == loss.shape,
            "loss",
            f"must be of uncertainty's shape {list(uncertainty.shape)}, got {list(loss.shape)}",
        ),
    )
    _, place, sizes = uncertainty.unique(return_inverse=True, return_counts=True)
    shared = torch.bincount(place, loss.double()) / sizes
    counts = torch.arange(1, len(loss) + 1, dtype=torch.float64, device=loss.device)
    risk = shared.repeat_interleave(sizes).cumsum(0) / counts
    return RiskCoverage(counts / len(loss), risk)


def _check(probabilities: Tensor, targets: Tensor) -> None:
    fits = probabilities.dim() == 2 and targets.shape == probabilities.shape[:1]
    require(
        (
            fits,
            "probabilities",
            "must be [N, classes] with targets [N], got "
            f"{list(probabilities.shape)} and {list(targets.shape)}",
        )
    )
    sums = probabilities.sum(dim=1)
    require(
        (
            not bool((probabilities < 0).any() or ((sums - 1).abs() > SUM_OFF).any()),
            "probabilities",
            "must be 0 or above and sum to 1 over the classes (logits: take their softmax first)",
        ),
        (
            not bool(((targets < 0) | (targets >= probabilities.shape[1])).any()),
            "targets",
            f"must be the places of classes, 0 to {probabilities.shape[1] - 1}",
        ),
    )
