"""What the weights are measured against: the prior p(theta).

A prior is a frozen, stateless dataclass (a recipe's `[prior]` table is one). Each of its parameters
is one of these:

- a number
- "fit": the closed-form optimum over all weights that the object covers, recomputed each time the
  KL is computed (Graves 2011, eqs. 7, 8, 15)
- "learn": learnt by gradient, together with the posterior
- "start", where the prior allows it: a value for each weight, from where it began

The methods get the current values as `values`: numbers or 0-d tensors, and those of "start" with
the shape of `theta`.

- Build: the dataclass.
- State: `domains`, `start`.
- Use: `log_prob`, `score`, `fit`. A prior that takes whole groups of weights together has `gather`,
  `sums` and `settle` too, so that it can see a weight piece by piece.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from bayesrnn.errors import Invalid, require

Number = float | Tensor
Values = Mapping[str, Number]
Setting = float | Literal["fit", "learn"]
OwnSetting = Setting | Literal["start"]
Domain = Literal["real", "positive", "unit"]

LOG_2PI = math.log(2 * math.pi)


def _log(x: Number) -> Number:
    return x.log() if isinstance(x, Tensor) else math.log(x)


def _over(theta: Tensor, each: Number) -> Number:
    """Summed over all weights: one number for all of them, or each one's own."""
    if isinstance(each, Tensor) and each.dim():
        return each.sum()
    return theta.numel() * each


def _positive(scale: Tensor) -> Tensor:
    """A fitted scale that stays above 0 where all weights are equal (biases that start at 0)."""
    return scale.clamp_min(torch.finfo(scale.dtype).eps)


class Prior(ABC):
    """The base class of priors: the methods that a KL term calls.

    `theta` has the weight's own shape. `axis` is the axis of the weight's input units (None if it
    has none, as a bias), and only a grouped prior looks at it.
    """

    kind: ClassVar[str]
    domains: ClassVar[Mapping[str, Domain]]
    """The parameters that may be fitted or learnt, and the domain of each."""
    start: ClassVar[Mapping[str, float]]
    """Where a learnt parameter starts."""
    from_start: ClassVar[tuple[str, ...]] = ()
    """The parameters that may be "start": a value for each weight, from where it began."""
    proper: ClassVar[bool] = True
    """Whether the prior can be normalised, so that bits can be counted against it."""

    @abstractmethod
    def log_prob(self, theta: Tensor, axis: int | None, values: Values) -> Tensor:
        """log p(theta), summed over the weights."""

    @abstractmethod
    def score(
        self, theta: Tensor, axis: int | None, values: Values, precision: Tensor | None = None
    ) -> Tensor:
        """d log p / d theta; `precision` is what `settle` found, if groups reach over rows."""

    @property
    def grouped(self) -> bool:
        """Whether weights are taken together in groups, and `sums` and `settle` exist."""
        return False

    def reaches(self, shape: torch.Size, axis: int | None) -> bool:
        """Whether the density of some rows depends on the weight's other rows."""
        return False

    def group_size(self, shape: torch.Size, axis: int | None) -> int:
        """How many weights a group has."""
        return 1

    def gather(self, values: Tensor, axis: int | None) -> Tensor:
        """The sum over each group of some rows, broadcastable to them.

        Where the prior reaches over rows, the sums of several pieces add up.
        """
        raise TypeError(f"a {self.kind} prior has no groups")

    def sums(self, theta: Tensor, axis: int | None) -> Tensor:
        """What `settle` needs of some rows."""
        return self.gather(theta.square(), axis)

    def settle(self, sums: Tensor, count: int | Tensor, values: Values) -> tuple[Tensor, Tensor]:
        """log p, summed, and the precision of each group, from the sums of `count` weights each.

        `count` is a tensor where groups differ in size.
        """
        raise TypeError(f"a {self.kind} prior has no groups")

    def fit(
        self, means: Sequence[Tensor], scales: Sequence[Tensor | None], values: Values
    ) -> dict[str, Tensor]:
        """The optimum of the parameters set to "fit", for these posterior means and scales.

        Where `loc` is "start", `means` are those of the distance from the start.
        """
        raise Invalid(
            [
                (name, f'of {self.kind} has no closed-form optimum: set a number or "learn"')
                for name in self.named("fit")
            ]
        )

    def named(self, word: Literal["fit", "learn", "start"]) -> list[str]:
        """The parameters that are set to this word.

        >>> Normal(loc=0.0, scale="fit").named("fit")
        ['scale']
        """
        return [name for name in self.domains if getattr(self, name) == word]

    def _check(self) -> None:
        checks = []
        for name, domain in self.domains.items():
            value = getattr(self, name)
            if isinstance(value, str):
                words = ["fit", "learn", *(["start"] if name in self.from_start else [])]
                *most, last = (f'"{word}"' for word in words)
                said = f"must be a number, {', '.join(most)} or {last}, got {value!r}"
                checks.append((value in words, name, said))
                continue
            inside, where = {
                "real": (math.isfinite(value), "a finite number"),
                "positive": (value > 0 and math.isfinite(value), "a finite number above 0"),
                "unit": (0 < value < 1, "between 0 and 1"),
            }[domain]
            checks.append((inside, name, f"must be {where}, got {value}"))
        require(*checks)


@dataclass(frozen=True)
class Uniform(Prior):
    """The same density everywhere (improper): maximum likelihood, or plain weight noise.

    log p is taken as 0, so with a learnt Gaussian the KL is minus its entropy, not 0.
    """

    kind: ClassVar[str] = "uniform"
    domains: ClassVar[Mapping[str, Domain]] = {}
    start: ClassVar[Mapping[str, float]] = {}
    proper: ClassVar[bool] = False

    def log_prob(self, theta: Tensor, axis: int | None, values: Values) -> Tensor:
        return theta.new_zeros(())

    def score(
        self, theta: Tensor, axis: int | None, values: Values, precision: Tensor | None = None
    ) -> Tensor:
        return torch.zeros_like(theta)


@dataclass(frozen=True)
class Normal(Prior):
    """A Gaussian around `loc` with the standard deviation `scale` (Graves 2011, eqs. 8, 13-15).

    Each is a number, "fit", "learn" or "start"; `scale` can be "start" only if `loc` is.
    `Normal("start", "start")` is the posterior that the model began with; for a trained model
    (`with_prior`), what it had learnt by then. With `loc` alone at "start" (the L2-SP of Li et al.
    2018), weights are held near those of a network that was trained before.
    """

    loc: OwnSetting = 0.0
    scale: OwnSetting = 1.0
    kind: ClassVar[str] = "normal"
    domains: ClassVar[Mapping[str, Domain]] = {"loc": "real", "scale": "positive"}
    start: ClassVar[Mapping[str, float]] = {"loc": 0.0, "scale": 1.0}
    from_start: ClassVar[tuple[str, ...]] = ("loc", "scale")

    def __post_init__(self) -> None:
        self._check()
        alone = self.scale == "start" and self.loc != "start"
        require((not alone, "scale", f'can be "start" only with a loc that is, got {self.loc!r}'))

    def log_prob(self, theta: Tensor, axis: int | None, values: Values) -> Tensor:
        m, s = values["loc"], values["scale"]
        z = (theta - m) / s
        return -0.5 * z.square().sum() - _over(theta, _log(s) + 0.5 * LOG_2PI)

    def score(
        self, theta: Tensor, axis: int | None, values: Values, precision: Tensor | None = None
    ) -> Tensor:
        return (values["loc"] - theta) / (values["scale"] * values["scale"])

    def fit(
        self, means: Sequence[Tensor], scales: Sequence[Tensor | None], values: Values
    ) -> dict[str, Tensor]:
        """mu = mean of mu_i; sigma^2 = mean of sigma_i^2 + (mu_i - mu)^2 (eqs. 8 and 15)."""
        count = sum(mean.numel() for mean in means)
        fitted: dict[str, Tensor] = {}
        m = values.get("loc", 0.0)
        if self.loc == "fit":
            m = fitted["loc"] = torch.stack([mean.sum() for mean in means]).sum() / count
        if self.scale == "fit":
            squares = [(mean - m).square().sum() for mean in means]
            squares += [scale.square().sum() for scale in scales if scale is not None]
            fitted["scale"] = _positive((torch.stack(squares).sum() / count).sqrt())
        return fitted


@dataclass(frozen=True)
class Laplace(Prior):
    """exp(-|theta - loc| / scale) / (2 scale): L1 regularisation (Graves 2011, eq. 7).

    `loc` is a number, "fit", "learn" or "start", `scale` a number, "fit" or "learn". "fit" needs a
    `Delta` posterior.
    """

    loc: OwnSetting = 0.0
    scale: Setting = 1.0
    kind: ClassVar[str] = "laplace"
    domains: ClassVar[Mapping[str, Domain]] = {"loc": "real", "scale": "positive"}
    start: ClassVar[Mapping[str, float]] = {"loc": 0.0, "scale": 1.0}
    from_start: ClassVar[tuple[str, ...]] = ("loc",)

    def __post_init__(self) -> None:
        self._check()

    def log_prob(self, theta: Tensor, axis: int | None, values: Values) -> Tensor:
        m, b = values["loc"], values["scale"]
        return -(theta - m).abs().sum() / b - theta.numel() * _log(2 * b)

    def score(
        self, theta: Tensor, axis: int | None, values: Values, precision: Tensor | None = None
    ) -> Tensor:
        return (values["loc"] - theta).sign() / values["scale"]

    def fit(
        self, means: Sequence[Tensor], scales: Sequence[Tensor | None], values: Values
    ) -> dict[str, Tensor]:
        """loc = the median weight; scale = the mean distance from it (below eq. 7)."""
        weights = torch.cat([mean.reshape(-1) for mean in means])
        fitted: dict[str, Tensor] = {}
        m = values.get("loc", 0.0)
        if self.loc == "fit":
            m = fitted["loc"] = weights.median()
        if self.scale == "fit":
            fitted["scale"] = _positive((weights - m).abs().mean())
        return fitted


@dataclass(frozen=True)
class ScaleMixture(Prior):
    """A mixture of two zero-mean Gaussians, one wide and one narrow (Fortunato 2017, eq. 18).

    - `pi`: the weight of the wide one.
    - `sigma1`, `sigma2`: the standard deviations of the wide and of the narrow one. All three are
      numbers or "learn".
    - `group`: what one choice between the two covers: each "weight" (eq. 18 as it is written), all
      weights that leave one "input" unit (what the published numbers were made with, and what
      works), or a whole "tensor".

    With S the sum of squares of a group of n weights, component k has
    log pi_k - n log(sigma_k sqrt(2 pi)) - S / (2 sigma_k^2).
    """

    pi: Setting = 0.25
    sigma1: Setting = math.exp(-1)
    sigma2: Setting = math.exp(-7)
    group: Literal["weight", "input", "tensor"] = "input"
    kind: ClassVar[str] = "scale_mixture"
    domains: ClassVar[Mapping[str, Domain]] = {
        "pi": "unit",
        "sigma1": "positive",
        "sigma2": "positive",
    }
    start: ClassVar[Mapping[str, float]] = {
        "pi": 0.25,
        "sigma1": math.exp(-1),
        "sigma2": math.exp(-7),
    }

    def __post_init__(self) -> None:
        self._check()
        require(
            (
                self.group in ("weight", "input", "tensor"),
                "group",
                f'must be "weight", "input" or "tensor", got {self.group!r}',
            )
        )
        if self.named("fit"):
            self.fit([], [], {})

    def log_prob(self, theta: Tensor, axis: int | None, values: Values) -> Tensor:
        return self.settle(self.sums(theta, axis), self.group_size(theta.shape, axis), values)[0]

    def score(
        self, theta: Tensor, axis: int | None, values: Values, precision: Tensor | None = None
    ) -> Tensor:
        if precision is None:
            sums, count = self.sums(theta, axis), self.group_size(theta.shape, axis)
            precision = self.settle(sums, count, values)[1]
        return theta * -precision

    @property
    def grouped(self) -> bool:
        return self.group != "weight"

    def reaches(self, shape: torch.Size, axis: int | None) -> bool:
        return self.group != "weight" and len(shape) > 0 and (self.group == "tensor" or axis != 0)

    def gather(self, values: Tensor, axis: int | None) -> Tensor:
        if self.group == "weight" or values.dim() == 0:
            return values
        if self.group == "tensor" or axis is None:
            return values.sum()
        others = [d for d in range(values.dim()) if d != axis]
        return values.sum(dim=others, keepdim=True) if others else values

    def settle(self, sums: Tensor, count: int | Tensor, values: Values) -> tuple[Tensor, Tensor]:
        """log p of all groups, and the precision r / sigma1^2 + (1 - r) / sigma2^2 of each, with r
        the responsibility of the wide component."""
        pi, sigma1, sigma2 = values["pi"], values["sigma1"], values["sigma2"]

        def log_joint(weight: Number, sigma: Number) -> Tensor:
            each = _log(sigma) + 0.5 * LOG_2PI
            return _log(weight) - count * each - sums / (2 * sigma * sigma)

        wide, narrow = log_joint(pi, sigma1), log_joint(1 - pi, sigma2)
        r = torch.sigmoid(wide - narrow)
        precision = r / (sigma1 * sigma1) + (1 - r) / (sigma2 * sigma2)
        return torch.logaddexp(wide, narrow).sum(), precision

    def group_size(self, shape: torch.Size, axis: int | None) -> int:
        if self.group == "weight" or len(shape) == 0:
            return 1
        if self.group == "tensor" or axis is None:
            return shape.numel()
        return shape.numel() // shape[axis]
