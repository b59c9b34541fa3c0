"""Whether intervals of numbers can be taken at their word: scores, coverage and its error."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bayesrnn.errors import require
from bayesrnn.evaluate.mixture import NormalMixture

LEVELS = tuple(place / 20 for place in range(1, 20))
"""Of the central intervals that are compared with what they hold."""


@dataclass(frozen=True)
class NumberCalibration:
    """The scores and calibration of N predicted numbers.

    The NLL is in nats; RMSE, CRPS and the width are in the targets' unit.
    """

    predictions: int
    nll: float
    rmse: float
    crps: float
    coverage_50: float
    """The share of targets in their central 50 % intervals."""
    coverage_90: float
    width_90: float
    """The mean width of the central 90 % intervals."""
    calibration_error: float
    """The `error` of `Coverage`."""


@dataclass(frozen=True, eq=False)
class Coverage:
    """A reliability diagram of numbers: the share of targets in each level's central interval."""

    level: Tensor
    share: Tensor

    @property
    def error(self) -> float:
        """|share - level|, averaged over levels."""
        return (self.share - self.level).abs().mean().item()


def calibration_of_numbers(
    mixture: NormalMixture, targets: Tensor, levels: Sequence[float] = LEVELS
) -> NumberCalibration:
    """Scores and calibration of predicted numbers: a mixture [D, ...], given targets [...].

    >>> mixture = NormalMixture(torch.zeros(1, 3), torch.ones(1, 3))
    >>> calibration_of_numbers(mixture, torch.tensor([-1.0, 0.0, 2.0])).coverage_90
    0.6666666666666666
    """
    pit = mixture.cdf(targets)
    half, most = coverage(pit, (0.5, 0.9)).share.tolist()
    lower, upper = mixture.interval(0.9)
    return NumberCalibration(
        pit.numel(),
        mixture.nll(targets).mean().item(),
        (mixture.mean - targets).square().mean().sqrt().item(),
        mixture.crps(targets).mean().item(),
        half,
        most,
        (upper - lower).mean().item(),
        coverage(pit, levels).error,
    )


def coverage(pit: Tensor, levels: Sequence[float] = LEVELS) -> Coverage:
    """The share of targets that the central intervals of `levels` hold.

    `pit` is F(y) of each target, as `NormalMixture.cdf` gives it.

    >>> coverage(torch.tensor([0.5, 0.3, 0.99]), [0.5, 0.9]).share.tolist()
    [0.6666666666666666, 0.6666666666666666]
    """
    require(
        (pit.numel() > 0, "pit", "must hold at least one prediction"),
        (len(levels) > 0, "levels", "must hold at least one level"),
        (
            all(0 < level < 1 for level in levels),
            "levels",
            f"must be between 0 and 1, got {list(levels)}",
        ),
    )
    level = torch.tensor(levels, dtype=torch.float64, device=pit.device)
    needed, _ = (2 * pit.double() - 1).abs().flatten().sort()  # levels that just hold a target
    held = torch.searchsorted(needed, level, right=True)
    return Coverage(level, held.double() / len(needed))
