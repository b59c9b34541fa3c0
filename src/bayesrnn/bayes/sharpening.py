"""Sharpening: the posterior that looks at the data (Fortunato 2017, Section 4), and a way to let
any trained Gaussian model look, whether or not it was trained to."""

import math
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import ClassVar, Literal

import torch
from torch import Tensor

from bayesrnn.bayes.bayesian import Bayesian, check_bayesian
from bayesrnn.bayes.bayesianize import copied
from bayesrnn.bayes.posterior import Gaussian, Tensors, fill_normal
from bayesrnn.errors import Invalid, require


@dataclass(frozen=True)
class Sharpened(Gaussian):
    """A Gaussian that looks at each batch before the batch is scored (Fortunato 2017, Section 4).

    phi is drawn from the Gaussian. The weights are theta = phi - eta * g + sigma0 * eps0 (eq. 7),
    with g the gradient of the batch's mean loss at phi. The prior of theta is N(phi, sigma0^2), so
    a batch is charged, in full, KL = sum (eta g)^2 / (2 sigma0^2); the KL of phi is that of any
    Gaussian.

    Its arguments beside those of `Gaussian` (whose `estimator` must be "reparameterised"):

    - `sigma0`: the standard deviation of the noise around a look.
    - `eta`: where eta starts. It is learnt for each weight tensor and stays between 0 and twice
      this start (unbounded, it overshoots). Its natural size is streams * sigma0^2, where a look
      gains most over what it costs; at twice that, to first order, nothing is gained. With 0 it
      stays 0, which leaves weight noise of sigma0.
    - `clip`: a bound on the norm of g over all weights together (0: off). Rare, huge gradients cost
      a KL of many orders of magnitude, and any function of the batch is a valid centre.
    - `order`: how phi gets its gradient. "first" takes g as a constant; a step costs one more
      forward and backward pass than an ordinary one. "second" also goes through g: its derivative,
      the Hessian, is multiplied with one direction only, by finite differences, in two further
      passes. (The factor of the clipping is a constant in both. In bfloat16 the differences are
      rough.)
    - `relative`: take sigma0 in units of each weight's own sigma, and eta in units of sigma^2, so
      that weights that must be exact get less noise and a shorter step. This is not in the paper.
    """

    sigma0: float = 0.02
    eta: float = 0.008
    clip: float = 10.0
    order: Literal["first", "second"] = "first"
    relative: bool = False
    kind: ClassVar[str] = "sharpened"
    looks_at_data: ClassVar[bool] = True
    further: ClassVar[tuple[str, ...]] = ("eta",)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            (
                0 < self.sigma0 < math.inf,
                "sigma0",
                f"must be a finite number above 0, got {self.sigma0}",
            ),
            (
                0 <= self.eta < math.inf,
                "eta",
                f"must be a finite number, 0 or above, got {self.eta}",
            ),
            (0 <= self.clip < math.inf, "clip", f"must be 0 (off) or above, got {self.clip}"),
            (
                self.order in ("first", "second"),
                "order",
                f'must be "first" or "second", got {self.order!r}',
            ),
            (
                self.estimator == "reparameterised",
                "estimator",
                'must be "reparameterised": the Fisher estimate knows nothing of the batch',
            ),
        )

    @property
    def largest_look(self) -> float:
        return self.clip or math.inf

    @property
    def second_order(self) -> bool:
        return self.order == "second"

    def bend(self, parameters: Tensors, noise: Tensors, gradient: Tensor, local: float) -> Tensor:
        """-eta * (gradient at theta) + local * eta^2 g / sigma0^2."""
        eta = self.rate(parameters)
        steps = eta / self.width(parameters)
        return local * steps.square() * noise["gradient"] - eta * gradient

    def rate(self, parameters: Tensors) -> Tensor:
        """eta of each weight."""
        return self._shared_rate(parameters) * self._unit(parameters) ** 2

    def width(self, parameters: Tensors) -> Tensor | float:
        """sigma0 of each weight."""
        return self.sigma0 * self._unit(parameters)

    def _shared_rate(self, parameters: Tensors) -> Tensor:
        return 2 * self.eta * torch.sigmoid(parameters["eta"])

    def _unit(self, parameters: Tensors) -> Tensor | float:
        return self.std(parameters) if self.relative else 1.0

    def move(self, phi: Tensor, parameters: Tensors, noise: Tensors) -> Tensor:
        if "gradient" not in noise:  # q(phi) alone
            return phi
        centre = torch.addcmul(phi, self.rate(parameters), noise["gradient"], value=-1)
        if "eps0" not in noise:  # between two looks
            return centre
        return centre + self.width(parameters) * noise["eps0"]

    def lift(
        self, parameters: Tensors, noise: Tensors, gradient: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """With `relative`, sigma is also in the noise and the step:
        theta = mu + sigma (eps + sigma0 eps0) - eta sigma^2 g."""
        d_loc, d_scale = super().lift(parameters, noise, gradient)
        if d_scale is None or not self.relative or "gradient" not in noise:
            return d_loc, d_scale
        steps = 2 * self._shared_rate(parameters) * self.std(parameters) * noise["gradient"]
        return d_loc, d_scale + gradient * (self.sigma0 * noise["eps0"] - steps)

    def look_noise(self, noise: Tensors, generator: torch.Generator | None) -> dict[str, Tensor]:
        return {**noise, "eps0": fill_normal(torch.empty_like(noise["eps"]), generator)}

    def refine(self, noise: Tensors, gradient: Tensor) -> dict[str, Tensor]:
        return {**noise, "gradient": gradient}

    def local_kl(self, parameters: Tensors, noise: Tensors) -> Tensor:
        """KL[q(theta | phi, batch) || p(theta | phi)] of two Gaussians of one width, exact."""
        if "gradient" not in noise:
            return super().local_kl(parameters, noise)
        return self._steps(parameters, noise).square().sum() / 2

    def local_log_ratio(self, parameters: Tensors, noise: Tensors) -> Tensor:
        """log N(theta | phi - eta g, sigma0^2) - log N(theta | phi, sigma0^2): with a = eta g /
        sigma0 that is a^2 / 2 - a eps0."""
        if "gradient" not in noise:
            return super().local_log_ratio(parameters, noise)
        steps = self._steps(parameters, noise)
        return (steps * (steps / 2 - noise["eps0"])).sum()

    def _steps(self, parameters: Tensors, noise: Tensors) -> Tensor:
        """How far the look has moved each weight, in units of its sigma0."""
        return self.rate(parameters) * noise["gradient"] / self.width(parameters)

    def pull_local(self, parameters: Tensors, noise: Tensors, local: float) -> Tensor | None:
        """With `relative` the KL is (eta sigma g)^2 / (2 sigma0^2)."""
        if not (self.relative and self.learn_scale and "gradient" in noise):
            return None
        steps = self._shared_rate(parameters) * noise["gradient"] / self.sigma0
        return local * steps.square() * self.std(parameters)

    def pull_further(
        self, parameters: Tensors, noise: Tensors, gradient: Tensor | None, local: float
    ) -> dict[str, Tensor]:
        """d eta = -g * (gradient at theta) + local * eta g^2 / sigma0^2."""
        if "gradient" not in noise:  # nothing looked, so nothing is learnt of it
            return {}
        eta, unit = self._shared_rate(parameters), self._unit(parameters)
        g = unit**2 * noise["gradient"]
        d_eta = local * eta * (g / self.width(parameters)).square()
        if gradient is not None:
            d_eta = d_eta - g * gradient
        slope = eta * torch.sigmoid(-parameters["eta"])
        return {"eta": d_eta * slope}


def sharpen(
    model: Bayesian,
    where: str,
    sigma0: float,
    eta: float,
    relative: bool = False,
    clip: float = 0.0,
) -> Bayesian:
    """A copy of `model` in which the weights that `where` names look at the data, and no others do
    (Fortunato 2017, Section 4).

    What phi has learnt stays; eta is the given one. `where` is a name pattern, and must name whole
    layers that are Gaussian. The other arguments are those of `Sharpened`.

    Sharpening belongs to how a batch is scored, so its width need not be that of the training, if
    it had one: each choice gives a bound of its own. Choose it on a validation set.

    >>> from torch import nn
    >>> from bayesrnn.bayes import bayesianize
    >>> model = bayesianize(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)))
    >>> looking = sharpen(model, "1.*", sigma0=0.1, eta=0.2)
    >>> [block.posterior.kind for block in looking.each_block()]
    ['gaussian', 'sharpened']
    """
    check_bayesian(model)
    model = copied(model)
    found = False
    for block in model.each_block():
        chosen = {weight.name: fnmatchcase(weight.name, where) for weight in block.layout.weights}
        old = block.posterior
        looks, known = any(chosen.values()), type(old) in (Gaussian, Sharpened)
        if looks and not (all(chosen.values()) and known):
            some = ", ".join(name for name in chosen if chosen[name])
            kind = old.kind if known or not isinstance(old, Gaussian) else type(old).__name__
            said = f"of {', '.join(chosen)}, which are {kind}, {where!r} names {some}"
            raise Invalid([("where", f"must name whole layers that are Gaussian; {said}")])
        if not isinstance(old, Gaussian) or not (looks or isinstance(old, Sharpened)):
            continue
        own = (old.scale, old.learn_scale)
        found = found or looks
        block.take(
            Sharpened(*own, sigma0=sigma0, eta=eta, clip=clip, relative=relative)
            if looks
            else Gaussian(*own)
        )
    if not found:
        listed = ", ".join(w.name for b in model.each_block() for w in b.layout.weights)
        raise Invalid([("where", f"must name some weight; {where!r} names none of {listed}")])
    model.forget_draw()  # it was another posterior's
    return model
