"""What a network's output means, so that draws of it can be averaged and taken apart.

An output turns one draw's raw output into moments that are averaged over draws. Write your own by
giving an object the two methods of `Output`.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from bayesrnn.errors import require


class Prediction(NamedTuple):
    """A model average and its uncertainty: total = aleatoric + epistemic.

    Categorical: probabilities, and entropies in nats. Normal: the mean, and variances. Epistemic is
    what the draws disagree about: it is what more data would settle.
    """

    mean: Tensor
    total: Tensor
    aleatoric: Tensor
    epistemic: Tensor


class Output(Protocol):
    """How to average: `moments` of one draw are averaged, `predict` reads off the result."""

    def moments(self, raw: Tensor) -> tuple[Tensor, ...]: ...

    def predict(self, averages: tuple[Tensor, ...]) -> Prediction: ...


@dataclass(frozen=True)
class Categorical:
    """Raw output: logits over the last axis.

    The total uncertainty is the entropy of the averaged probabilities, the aleatoric part the
    average of the draws' entropies, the epistemic part the mutual information between the two.
    """

    def moments(self, raw: Tensor) -> tuple[Tensor, ...]:
        log_p = raw.log_softmax(dim=-1)
        p = log_p.exp()
        return p, torch.special.entr(p).sum(dim=-1)

    def predict(self, averages: tuple[Tensor, ...]) -> Prediction:
        p, aleatoric = averages
        total = torch.special.entr(p).sum(dim=-1)
        return Prediction(p, total, aleatoric, (total - aleatoric).clamp_min(0.0))


@dataclass(frozen=True)
class Normal:
    """Raw output: means, all with the noise `scale`; or, with scale None, the last axis holds
    (mean, s) with the noise softplus(s).

    The law of total variance: aleatoric is the average noise variance, epistemic the variance of
    the means.
    """

    scale: float | None = None

    def __post_init__(self) -> None:
        ok = self.scale is None or self.scale >= 0
        require((ok, "scale", f"must be 0 or above, got {self.scale}"))

    def moments(self, raw: Tensor) -> tuple[Tensor, ...]:
        if self.scale is None:
            if raw.shape[-1:] != (2,):
                raise ValueError(
                    "Normal() reads (mean, s) from a last axis of 2, got shape "
                    f"{tuple(raw.shape)}; for means alone give Normal(scale=...)"
                )
            mean, variance = raw[..., 0], F.softplus(raw[..., 1]).square()
        else:
            mean, variance = raw, torch.full_like(raw, self.scale**2)
        mean = mean.double()  # the square of a mean is subtracted from a mean of squares
        return mean, mean.square(), variance

    def predict(self, averages: tuple[Tensor, ...]) -> Prediction:
        mean, square, aleatoric = averages
        epistemic = (square - mean.square()).clamp_min(0.0).to(aleatoric.dtype)
        return Prediction(mean.to(aleatoric.dtype), aleatoric + epistemic, aleatoric, epistemic)
