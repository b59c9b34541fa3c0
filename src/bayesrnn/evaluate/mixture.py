"""The distribution of a number, averaged over draws: a mixture of Normals."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bayesrnn.errors import require

HALVINGS = 64
"""Of a quantile's bracket: what is left of it is less than rounding."""


@dataclass(frozen=True, eq=False)
class NormalMixture:
    """The average of Normals, one per draw: F = 1/D sum_i N(mu_i, s_i^2).

    `means` and `scales` are those of D draws, [D, ...] each. Everything is computed in double
    precision. A scale of 0 is the limit: a step at the mean.
    """

    means: Tensor
    scales: Tensor

    def __post_init__(self) -> None:
        require(
            (
                self.means.dim() > 0 and len(self.means) > 0,
                "means",
                f"must be of one draw or more along the first axis, got {list(self.means.shape)}",
            ),
            (
                self.scales.shape == self.means.shape,
                "scales",
                f"must be of means' shape {list(self.means.shape)}, got {list(self.scales.shape)}",
            ),
            (not bool((self.scales < 0).any()), "scales", "must be 0 or above"),
        )

    @property
    def mean(self) -> Tensor:
        """The mean of the mixture."""
        return self.means.double().mean(dim=0)

    def nll(self, target: Tensor) -> Tensor:
        """-log of the density at `target`, in nats."""
        z, scales = self._standard(target)
        log_p = -z.square() / 2 - scales.log() - math.log(2 * math.pi) / 2
        return math.log(len(log_p)) - log_p.logsumexp(dim=0)

    def cdf(self, target: Tensor) -> Tensor:
        """F(y), the cumulative distribution function of the mixture at `target`.

        For numbers that came, it is the probability integral transform (PIT), which is uniform
        where the mixture is right.
        """
        return torch.special.ndtr(self._standard(target)[0]).mean(dim=0)

    def quantile(self, p: float) -> Tensor:
        """The least y with F(y) >= p, by bisection between the draws' own quantiles."""
        require((0 < p < 1, "p", f"must be between 0 and 1, got {p}"))
        means, scales = self._double()
        own = means + scales * torch.special.ndtri(means.new_tensor(p))
        low, high = own.amin(dim=0), own.amax(dim=0)
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            below = self.cdf(middle) < p
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return high

    def interval(self, level: float) -> tuple[Tensor, Tensor]:
        """The two ends of the central interval that holds the part `level` of the mixture."""
        require((0 < level < 1, "level", f"must be between 0 and 1, got {level}"))
        return self.quantile((1 - level) / 2), self.quantile((1 + level) / 2)

    def crps(self, target: Tensor) -> Tensor:
        """The continuous ranked probability score: the integral of (F(x) - 1[y <= x])^2 dx.

        It is in the target's unit. In closed form (Grimit et al. 2006) it is

            1/D sum_i A(y - mu_i, s_i^2) - 1/(2 D^2) sum_ij A(mu_i - mu_j, s_i^2 + s_j^2)
            A(m, v) = 2 sqrt(v) phi(m / sqrt(v)) + m (2 Phi(m / sqrt(v)) - 1)

        where A(m, v) is the mean size of a N(m, v).
        """
        check_shapes(self.means[0], target)
        means, scales = self._double()
        away = _mean_size(target - means, scales).mean(dim=0)
        apart = torch.zeros_like(means[0])
        for mean, scale in zip(means, scales, strict=True):  # [D, ...] at a time, not [D, D, ...]
            apart += _mean_size(means - mean, scales.hypot(scale)).mean(dim=0)
        return away - apart / (2 * len(means))

    def _double(self) -> tuple[Tensor, Tensor]:
        """Means and scales; the least scale there is stands for 0, so that nothing is 0 / 0."""
        return self.means.double(), self.scales.double().clamp_min(torch.finfo(torch.double).tiny)

    def _standard(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """z = (y - mu) / s of each draw, and the scales."""
        check_shapes(self.means[0], target)
        means, scales = self._double()
        return (target - means) / scales, scales


def check_shapes(mean: Tensor, target: Tensor) -> None:
    """torch would spread [N, 1] and [N] to [N, N] without a word."""
    if target.dim() and mean.shape != target.shape:
        raise ValueError(
            f"the means have shape {tuple(mean.shape)} and the targets {tuple(target.shape)}: give "
            "both the same (a last axis of 1 goes with squeeze(-1))"
        )


def _mean_size(mean: Tensor, scale: Tensor) -> Tensor:
    """E |x| of a Normal."""
    z = mean / scale
    density = (-z.square() / 2).exp() / math.sqrt(2 * math.pi)
    return 2 * scale * density + mean * torch.erf(z / math.sqrt(2))
