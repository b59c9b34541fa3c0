"""What a network's output means, so that draws of it can be averaged and their uncertainty split.

An output turns one draw's raw output into moments, which are averaged over draws. To write your
own, give an object the two methods of `Output`.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from bayesrnn.errors import require
from bayesrnn.evaluate.mixture import NormalMixture, check_shapes
from bayesrnn.evaluate.perplexity import check_temperatures, tempered, token_losses


class Prediction(NamedTuple):
    """A prediction averaged over draws, and its uncertainty: total = aleatoric + epistemic.

    For `Categorical`, `mean` holds probabilities, and the uncertainties are entropies in nats. For
    `Normal`, `mean` is the mean, and they are variances. Epistemic is what the draws disagree
    about: it is what more data would settle.
    """

    mean: Tensor
    total: Tensor
    aleatoric: Tensor
    epistemic: Tensor


class Output(Protocol):
    """How draws are averaged: their `moments` are, and `predict` reads off the result."""

    def moments(self, raw: Tensor) -> tuple[Tensor, ...]: ...

    def predict(self, averages: tuple[Tensor, ...]) -> Prediction: ...


class Likelihood(Output, Protocol):
    """An output that can also be scored, and so trained."""

    def nll(self, raw: Tensor, target: Tensor) -> Tensor:
        """-log p of each target, in nats."""

    def error(self, prediction: Prediction, target: Tensor) -> dict[str, float]:
        """How far predictions are off, in the usual unit, by the name of the figure."""


@dataclass(frozen=True)
class Categorical:
    """Classes: the raw output is logits over the last axis.

    The total uncertainty is the entropy of the averaged probabilities, the aleatoric part is the
    average of the draws' entropies, and the epistemic part is their difference: the mutual
    information between the class and the weights. Logits are divided by `temperature` before the
    softmax of each draw (see `search_temperature`).
    """

    temperature: float = 1.0

    def __post_init__(self) -> None:
        check_temperatures([self.temperature])

    def moments(self, raw: Tensor) -> tuple[Tensor, ...]:
        if raw.dim() == 0 or raw.shape[-1] < 2:
            raise ValueError(
                "Categorical() reads logits of two or more classes from the last axis, got shape "
                f"{tuple(raw.shape)}; for numbers give output=br.outputs.Normal(scale=...)"
            )
        p = tempered(raw, self.temperature).softmax(dim=-1)
        return p, torch.special.entr(p).sum(dim=-1)

    def predict(self, averages: tuple[Tensor, ...]) -> Prediction:
        p, aleatoric = averages
        total = torch.special.entr(p).sum(dim=-1)
        return Prediction(p, total, aleatoric, (total - aleatoric).clamp_min(0.0))

    def nll(self, raw: Tensor, target: Tensor) -> Tensor:
        return token_losses(raw, target, self.temperature)

    def error(self, prediction: Prediction, target: Tensor) -> dict[str, float]:
        """The share of targets that are not the most probable class, in percent."""
        wrong = prediction.mean.argmax(dim=-1) != target
        return {"error_percent": 100 * wrong.double().mean().item()}


@dataclass(frozen=True)
class Normal:
    """Numbers: the raw output is means with a fixed noise, or means and the noise of each.

    With a number as `scale`, the raw output is means, all with the noise `scale`. With `scale`
    None, the last axis holds (mean, s), with the noise softplus(s).

    By the law of total variance, aleatoric is the average noise variance, and epistemic the
    variance of the means.
    """

    scale: float | None = None

    def __post_init__(self) -> None:
        ok = self.scale is None or self.scale >= 0
        require((ok, "scale", f"must be 0 or above, got {self.scale}"))

    def read(self, raw: Tensor) -> tuple[Tensor, Tensor]:
        """The means, and the scales of the noise."""
        if self.scale is None:
            if raw.shape[-1:] != (2,):
                raise ValueError(
                    "Normal() reads (mean, s) from a last axis of 2, got shape "
                    f"{tuple(raw.shape)}; for means alone give Normal(scale=...)"
                )
            return raw[..., 0], F.softplus(raw[..., 1])
        return raw, torch.full_like(raw, self.scale)

    def moments(self, raw: Tensor) -> tuple[Tensor, ...]:
        mean, scale = self.read(raw)
        mean = mean.double()  # the square of a mean is subtracted from a mean of squares
        return mean, mean.square(), scale.square()

    def predict(self, averages: tuple[Tensor, ...]) -> Prediction:
        mean, square, aleatoric = averages
        epistemic = (square - mean.square()).clamp_min(0.0).to(aleatoric.dtype)
        return Prediction(mean.to(aleatoric.dtype), aleatoric + epistemic, aleatoric, epistemic)

    def nll(self, raw: Tensor, target: Tensor) -> Tensor:
        mean, scale = self.read(raw.to(torch.promote_types(raw.dtype, torch.float32)))
        check_shapes(mean, target)
        scale = scale.clamp_min(torch.finfo(scale.dtype).tiny)  # softplus may give 0
        return ((target - mean) / scale).square() / 2 + scale.log() + math.log(2 * math.pi) / 2

    def error(self, prediction: Prediction, target: Tensor) -> dict[str, float]:
        """The root mean squared error."""
        check_shapes(prediction.mean, target)
        square = (prediction.mean.double() - target).square().mean().item()
        return {"rmse": math.sqrt(square)}

    def mixture(self, raw: Tensor) -> NormalMixture:
        """The distribution that averages the draws, from their raw outputs, [D, ...]."""
        return NormalMixture(*self.read(raw.to(torch.promote_types(raw.dtype, torch.float32))))
