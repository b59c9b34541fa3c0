"""KL[q || p] of some weights, and its gradient, both in closed form.

Exact by pair of types where a closed form exists, otherwise log q - log p at the draw. The gradient
is with respect to (loc, scale) directly: no graph is ever built through log q or log p.
"""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from bayesrnn.bayes.posterior import Delta, Gaussian, Posterior
from bayesrnn.bayes.prior import (
    LOG_2PI,
    Laplace,
    Normal,
    Number,
    Prior,
    ScaleMixture,
    Uniform,
    Values,
    _log,
)
from bayesrnn.errors import Invalid, require

Estimator = Literal["auto", "exact", "sample"]


class Draw(NamedTuple):
    """Some weights of a draw: theta = loc + scale * eps; scale and eps None for a point."""

    theta: Tensor
    loc: Tensor
    scale: Tensor | None
    eps: Tensor | None


class Gradient(NamedTuple):
    """d KL / d loc and d KL / d scale (None for a point)."""

    loc: Tensor
    scale: Tensor | None


def log_q(draw: Draw, total: Callable[[Tensor], Tensor] = torch.sum) -> Tensor:
    """log q(theta) at the draw, summed by `total`, wholly or by parts that are as large as each
    other; 0 for a point, whose density is a constant."""
    if draw.scale is None or draw.eps is None:
        return draw.theta.new_zeros(())
    terms = torch.addcmul(draw.scale.log(), draw.eps, draw.eps, value=0.5)
    found = total(terms)
    return -found - 0.5 * LOG_2PI * (terms.numel() // found.numel())


def sampled_gradient(
    draw: Draw, prior: Prior, axis: int | None, values: Values, precision: Tensor | None = None
) -> Gradient:
    """Of log q(theta) - log p(theta) (Fortunato 2017, Algorithm 2).

    Its terms g_theta + g_mu reduce to -d log p / d theta, and (g_theta) eps + g_sigma to
    -(d log p / d theta) eps - 1 / sigma: the parts of log q cancel.
    """
    score = prior.score(draw.theta, axis, values, precision)
    if draw.scale is None or draw.eps is None:
        return Gradient(-score, None)
    return Gradient(-score, -torch.addcmul(draw.scale.reciprocal(), score, draw.eps))


class Exact(NamedTuple):
    """A pair's KL in closed form, and its gradient, from (loc, scale, the prior's values)."""

    value: Callable[[Tensor, Tensor, Values], Tensor]
    gradient: Callable[[Tensor, Tensor, Values], Gradient]


def _gaussian_normal(loc: Tensor, scale: Tensor, values: Values) -> Tensor:
    """Graves 2011, eq. 13."""
    m, s = values["loc"], values["scale"]
    ratio = scale / s
    return (0.5 * (((loc - m) / s).square() + ratio.square() - 1.0) - ratio.log()).sum()


def _gaussian_normal_gradient(loc: Tensor, scale: Tensor, values: Values) -> Gradient:
    """Graves 2011, eq. 14 (with respect to sigma, not sigma^2)."""
    m, variance = values["loc"], values["scale"] * values["scale"]
    return Gradient((loc - m) / variance, scale / variance - scale.reciprocal())


def _folded(loc: Tensor, scale: Tensor, m: Number) -> tuple[Tensor, Tensor]:
    """d E|theta - m| / d loc and / d scale of a Gaussian theta: |theta - m| is a folded normal."""
    z = (loc - m) / scale
    inside = torch.erf(z / math.sqrt(2.0))
    return inside, math.sqrt(2.0 / math.pi) * torch.exp(-0.5 * z.square())


def _gaussian_laplace(loc: Tensor, scale: Tensor, values: Values) -> Tensor:
    """E|theta - m| / b + log 2b - the Gaussian's entropy."""
    m, b = values["loc"], values["scale"]
    inside, edge = _folded(loc, scale, m)
    distance = scale * edge + (loc - m) * inside
    entropy = scale.log() + 0.5 * (1.0 + LOG_2PI)
    return (distance / b - entropy).sum() + loc.numel() * _log(2 * b)


def _gaussian_laplace_gradient(loc: Tensor, scale: Tensor, values: Values) -> Gradient:
    inside, edge = _folded(loc, scale, values["loc"])
    b = values["scale"]
    return Gradient(inside / b, edge / b - scale.reciprocal())


def _gaussian_uniform(loc: Tensor, scale: Tensor, values: Values) -> Tensor:
    """Minus the entropy: the prior's density is taken as 1."""
    return -(scale.log() + 0.5 * (1.0 + LOG_2PI)).sum()


def _gaussian_uniform_gradient(loc: Tensor, scale: Tensor, values: Values) -> Gradient:
    return Gradient(torch.zeros_like(loc), -scale.reciprocal())


EXACT: dict[tuple[type, type], Exact] = {
    (Gaussian, Normal): Exact(_gaussian_normal, _gaussian_normal_gradient),
    (Gaussian, Laplace): Exact(_gaussian_laplace, _gaussian_laplace_gradient),
    (Gaussian, Uniform): Exact(_gaussian_uniform, _gaussian_uniform_gradient),
}


def exact_pair(posterior: Posterior, prior: Prior, estimator: Estimator) -> Exact | None:
    """The closed form to use; None: one sample (for a point, that is exact)."""
    if estimator == "sample":
        return None
    kind = Gaussian if isinstance(posterior, Gaussian) else type(posterior)  # of phi, if sharpened
    return EXACT.get((kind, type(prior)))


def check_pair(posterior: Posterior, prior: Prior) -> None:
    """Refuse pairs that make no sense, saying why."""
    point = isinstance(posterior, Delta)
    rules: tuple[tuple[bool, Literal["fit", "learn"], str], ...] = (
        (
            posterior.second_order,
            "learn",
            'of a prior cannot be "learn" with sharpening of the second order: set a number or '
            '"fit", or order = "first"',
        ),
        (
            isinstance(prior, Laplace) and not point,
            "fit",
            'of a laplace prior can be "fit" only with a delta posterior: for a spread-out one the '
            'optimum has no closed form; set a number or "learn"',
        ),
        (
            isinstance(prior, ScaleMixture) and point,
            "learn",
            'of a scale_mixture prior cannot be "learn" with a delta posterior: nothing keeps a '
            "component from collapsing onto the weights, where log p is unbounded",
        ),
    )
    for refused, word, why in rules:
        require(*((not refused, name, why) for name in prior.named(word)))
    none = (
        'cannot be "start" with a delta posterior, which has none: set a number, "fit" or "learn"'
    )
    require((not (point and "scale" in prior.named("start")), "scale", none))


def check_estimator(estimator: str, posterior: Posterior, prior: Prior) -> None:
    """Refuse an exact KL where there is none."""
    known = estimator in ("auto", "exact", "sample")
    require((known, "kl", f'must be "auto", "exact" or "sample", got {estimator!r}'))
    has_one = isinstance(posterior, Delta) or exact_pair(posterior, prior, "auto") is not None
    if estimator == "exact" and not has_one:
        raise Invalid(
            [
                (
                    "kl",
                    f'cannot be "exact": a {posterior.kind} posterior with a {prior.kind} prior '
                    'has no closed form; use "auto" or "sample"',
                )
            ]
        )
