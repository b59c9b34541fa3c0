"""What the weights are drawn from: the posterior q(theta).

Every posterior here is a location-scale family over one flat block of weights,
theta = loc + scale * eps, with one independent eps per weight. A posterior is a frozen, stateless
dataclass (a recipe's `[posterior]` table is one). The tensors that it works on live in the block
and are passed to it, so that the eager path and a compiled one call the very same methods.

- Build: the dataclass.
- State: `init`.
- Use: `noise`, `draw`, `mean`, `std`; with a look at the data also `look_noise`, `refine`.
- Gradients: `lift` (from theta to loc and scale) and `chain` (on to the learnt tensors).
"""

import functools
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from numbers import Real
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from bayesrnn.errors import require

Tensors = Mapping[str, Tensor]

SMALLEST_SCALE = 1e-5
NOISE_PIECE = 1 << 18


def softplus_inverse(y: Tensor) -> Tensor:
    """The x with softplus(x) = y > 0, without overflow for large y.

    >>> x = torch.tensor([-3.0, 0.0, 50.0])
    >>> torch.allclose(softplus_inverse(F.softplus(x)), x)
    True
    """
    return y + torch.log(-torch.expm1(-y))


def fill_normal(out: Tensor, generator: torch.Generator | None) -> Tensor:
    """Fill a tensor with standard normal noise.

    torch fills a CPU tensor on one core. A large one is filled here in pieces by all cores, each
    piece from a seed of its own that comes from the generator: the same noise however many cores.
    """
    if out.device.type != "cpu" or out.numel() <= NOISE_PIECE:
        return out.normal_(generator=generator)
    pieces = out.split(NOISE_PIECE)
    seeds = torch.randint(2**63 - 1, (len(pieces),), generator=generator).tolist()

    def fill(piece: Tensor, seed: int) -> None:
        piece.normal_(generator=torch.Generator().manual_seed(seed))

    list(_pool(torch.get_num_threads()).map(fill, pieces, seeds))
    return out


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """Kept: for a small network, to start threads anew costs what they gain."""
    return ThreadPoolExecutor(threads)


if hasattr(os, "register_at_fork"):  # a forked process has the pool, but not its threads
    os.register_at_fork(after_in_child=_pool.cache_clear)


class Posterior(ABC):
    """The base class of posteriors: the methods that a block of weights calls.

    `parameters` are the learnt tensors, by name; `noise` is what is random in the present draw. All
    tensors are flat and of one length (but see `further`).
    """

    kind: ClassVar[str]
    looks_at_data: ClassVar[bool] = False
    """Whether `refine` needs the gradient of the batch's loss at the draw (sharpening)."""
    further: ClassVar[tuple[str, ...]] = ()
    """The names of what else is learnt: one number per weight tensor, which starts at 0.

    These numbers do not show in the mean and the standard deviation, so they are saved apart. The
    methods get one number, or the numbers spread over the weights.
    """
    proper: ClassVar[bool] = True
    """Whether q has a density, so that its weights have a cost in bits."""

    @property
    def second_order(self) -> bool:
        """Whether the gradient also goes through what `refine` was given (see `bend`)."""
        return False

    def bend(self, parameters: Tensors, noise: Tensors, gradient: Tensor, local: float) -> Tensor:
        """d objective / d (the gradient that `refine` was given).

        `gradient` is that of the loss at theta, and `local` the weight of `local_kl`.
        """
        raise TypeError(f"a {self.kind} posterior does not look at the data")

    @property
    def largest_look(self) -> float:
        """The norm that the gradient for `refine`, over all weights together, is clipped to."""
        return math.inf

    @property
    def per_sequence(self) -> bool:
        """Whether `pull` needs the gradient of one sequence at a time (Graves 2011, eq. 17)."""
        return False

    @abstractmethod
    def init(self, loc: Tensor, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """The learnt tensors, by name, for weights that start at `loc`."""

    @abstractmethod
    def noise(self, parameters: Tensors, generator: torch.Generator | None) -> dict[str, Tensor]:
        """What is random in one draw, by name; a block keeps it between forwards."""

    @abstractmethod
    def draw(self, parameters: Tensors, noise: Tensors) -> Tensor:
        """theta, from the learnt tensors and the noise."""

    @abstractmethod
    def lift(
        self, parameters: Tensors, noise: Tensors, gradient: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Turn the gradient with respect to theta into that with respect to (loc, scale)."""

    @abstractmethod
    def chain(
        self, parameters: Tensors, d_loc: Tensor, d_scale: Tensor | None
    ) -> dict[str, Tensor]:
        """Turn the gradient with respect to (loc, scale) into that of the learnt tensors."""

    @abstractmethod
    def std(self, parameters: Tensors) -> Tensor | None:
        """The standard deviation of each weight; None if there is none."""

    @abstractmethod
    def restore(self, loc: Tensor, scale: Tensor | None) -> dict[str, Tensor]:
        """The learnt tensors that have this mean and scale: the inverse of `mean` and `std`."""

    def mean(self, parameters: Tensors) -> Tensor:
        """The mean of each weight."""
        return parameters["loc"]

    def pull(self, parameters: Tensors, noise: Tensors, gradient: Tensor) -> dict[str, Tensor]:
        """Pull the gradient with respect to theta back to the learnt tensors."""
        own = self.chain(parameters, *self.lift(parameters, noise, gradient))
        return own | self.pull_further(parameters, noise, gradient, 0.0)

    def pull_further(
        self, parameters: Tensors, noise: Tensors, gradient: Tensor | None, local: float
    ) -> dict[str, Tensor]:
        """The gradient of the `further` numbers, still to be summed over the weights.

        It is that of the loss, plus `local` times that of `local_kl`. Numbers that this draw does
        not depend on are left out.
        """
        return {}

    def local_kl(self, parameters: Tensors, noise: Tensors) -> Tensor:
        """The part of the KL that every batch is charged in full (sharpening), summed."""
        return parameters["loc"].new_zeros(())

    def local_log_ratio(self, parameters: Tensors, noise: Tensors) -> Tensor:
        """log q - log p of this very draw, summed; its expectation is `local_kl`."""
        return self.local_kl(parameters, noise)

    def pull_local(self, parameters: Tensors, noise: Tensors, local: float) -> Tensor | None:
        """`local` times the gradient of `local_kl` with respect to the scale, or None."""
        return None

    def move(self, phi: Tensor, parameters: Tensors, noise: Tensors) -> Tensor:
        """theta, from phi, the draw that has not looked at the data."""
        return phi

    def look_noise(self, noise: Tensors, generator: torch.Generator | None) -> dict[str, Tensor]:
        """The noise, and what else is random in a draw that looks at the data."""
        return dict(noise)

    def refine(self, noise: Tensors, gradient: Tensor) -> dict[str, Tensor]:
        """The noise after a look at the batch.

        `gradient` is that of the batch's mean loss at the draw (with several looks, their average).
        """
        return dict(noise)


@dataclass(frozen=True)
class Delta(Posterior):
    """A point: the weights of an ordinary network (Graves 2011, Section 5.1).

    With a prior, training is penalised maximum likelihood: Normal gives weight decay, Laplace L1.
    """

    kind: ClassVar[str] = "delta"
    proper: ClassVar[bool] = False

    def init(self, loc: Tensor, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        return {"loc": loc}

    def noise(self, parameters: Tensors, generator: torch.Generator | None) -> dict[str, Tensor]:
        return {}

    def draw(self, parameters: Tensors, noise: Tensors) -> Tensor:
        return parameters["loc"]

    def lift(
        self, parameters: Tensors, noise: Tensors, gradient: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        return gradient, None

    def chain(
        self, parameters: Tensors, d_loc: Tensor, d_scale: Tensor | None
    ) -> dict[str, Tensor]:
        return {"loc": d_loc}

    def std(self, parameters: Tensors) -> None:
        return None

    def restore(self, loc: Tensor, scale: Tensor | None) -> dict[str, Tensor]:
        return {"loc": loc}


@dataclass(frozen=True)
class Gaussian(Posterior):
    """Independent Gaussians, theta = mu + sigma * eps (Fortunato 2017, Algorithm 2).

    - `scale`: where sigma starts: a number, or a range (low, high), within which sigma =
      softplus(rho) starts at random, uniform in rho.
    - `learn_scale`: learn sigma, as softplus(rho) + 1e-5. With False, sigma stays at the number:
      weight noise (Graves 2011, Section 5.2). It may then be 0, so that every draw is the mean and
      the KL is infinite (for a penalised point, use `Delta`).
    - `estimator`: how sigma gets its gradient from the loss: "reparameterised" (unbiased, through
      the draw) or "fisher" (Graves' eq. 12). "fisher" needs one gradient per sequence: pass
      `FreeEnergy` a vector of losses, and call `loss.backward()`.
    """

    scale: float | tuple[float, float] = 0.05
    learn_scale: bool = True
    estimator: Literal["reparameterised", "fisher"] = "reparameterised"
    kind: ClassVar[str] = "gaussian"

    def __post_init__(self) -> None:
        if isinstance(self.scale, list):
            object.__setattr__(self, "scale", tuple(self.scale))
        ends = self.scale if isinstance(self.scale, tuple) else (self.scale, self.scale)
        numbers = len(ends) == 2 and all(isinstance(end, Real) for end in ends)
        require((numbers, "scale", f"must be a number or a pair of them, got {self.scale!r}"))
        low = SMALLEST_SCALE if self.learn_scale else 0.0
        require(
            (
                all(math.isfinite(s) for s in ends) and ends[0] <= ends[1],
                "scale",
                f"must be a finite number or an increasing pair, got {self.scale}",
            ),
            (
                ends[0] > low or (not self.learn_scale and ends[0] == 0),
                "scale",
                f"must be above {low:g}, got {self.scale}",
            ),
            (
                self.learn_scale or not isinstance(self.scale, tuple),
                "scale",
                "must be one number where learn_scale is false",
            ),
            (
                self.estimator in ("reparameterised", "fisher"),
                "estimator",
                f'must be "reparameterised" or "fisher", got {self.estimator!r}',
            ),
            (
                self.learn_scale or self.estimator == "reparameterised",
                "estimator",
                '"fisher" estimates the gradient of a learnt scale: it needs learn_scale = true',
            ),
        )

    @property
    def per_sequence(self) -> bool:
        return self.estimator == "fisher"

    def init(self, loc: Tensor, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        if not self.learn_scale:
            return {"loc": loc}
        ends = self.scale if isinstance(self.scale, tuple) else (self.scale, self.scale)
        low, high = softplus_inverse(
            torch.tensor(ends, dtype=torch.float64) - SMALLEST_SCALE
        ).tolist()
        if low == high:
            return {"loc": loc, "rho": torch.full_like(loc, low)}
        return {"loc": loc, "rho": torch.empty_like(loc).uniform_(low, high, generator=generator)}

    def noise(self, parameters: Tensors, generator: torch.Generator | None) -> dict[str, Tensor]:
        eps = torch.empty_like(parameters["loc"], requires_grad=False)
        return {"eps": fill_normal(eps, generator)}

    def draw(self, parameters: Tensors, noise: Tensors) -> Tensor:
        phi = torch.addcmul(parameters["loc"], self.std(parameters), noise["eps"])
        return self.move(phi, parameters, noise)

    def lift(
        self, parameters: Tensors, noise: Tensors, gradient: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        if not self.learn_scale:
            return gradient, None
        if self.estimator == "fisher":
            # eq. 12: d L / d sigma^2 = g_n^2 / 2, hence d L / d sigma = sigma g_n^2
            return gradient, self.std(parameters) * gradient.square()
        return gradient, gradient * noise["eps"]

    def chain(
        self, parameters: Tensors, d_loc: Tensor, d_scale: Tensor | None
    ) -> dict[str, Tensor]:
        if not self.learn_scale:
            return {"loc": d_loc}
        assert d_scale is not None
        return {"loc": d_loc, "rho": d_scale * torch.sigmoid(parameters["rho"])}

    def std(self, parameters: Tensors) -> Tensor:
        if self.learn_scale:
            return F.softplus(parameters["rho"]) + SMALLEST_SCALE
        loc = parameters["loc"]
        return loc.new_full((), float(self.scale)).expand_as(loc)  # type: ignore[arg-type]

    def restore(self, loc: Tensor, scale: Tensor | None) -> dict[str, Tensor]:
        if not self.learn_scale:
            return {"loc": loc}
        assert scale is not None
        smallest = torch.finfo(torch.float32).tiny
        rho = softplus_inverse((scale.double() - SMALLEST_SCALE).clamp_min(smallest))
        return {"loc": loc, "rho": rho.to(loc.dtype)}
