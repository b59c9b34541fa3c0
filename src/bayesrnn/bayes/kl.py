"""KL[q || p] of one weight tensor, with its gradient in closed form.

Exact by pair of types where a closed form exists, otherwise log q - log p at the draw. Both give
the gradient with respect to (loc, scale) directly: no graph is ever built through log q or log p.
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
    Prior,
    ScaleMixture,
    Uniform,
    Values,
    _log,
)
from bayesrnn.errors import Invalid

Estimator = Literal["auto", "exact", "sample"]


class Divergence(NamedTuple):
    """KL (up to a constant for a Delta or a Uniform) and its gradient."""

    value: Tensor
    d_loc: Tensor
    d_scale: Tensor | None


class Draw(NamedTuple):
    """One weight tensor of a draw: theta = loc + scale * eps; scale and eps None for a point."""

    theta: Tensor
    loc: Tensor
    scale: Tensor | None
    eps: Tensor | None


def one_sample(draw: Draw, prior: Prior, axis: int | None, values: Values) -> Divergence:
    """log q(theta) - log p(theta) (Fortunato 2017, Algorithm 2).

    Its terms g_theta + g_mu reduce to -d log p / d theta, and (g_theta) eps + g_sigma to
    -(d log p / d theta) eps - 1 / sigma: the parts of log q cancel.
    """
    log_p, score = prior.score(draw.theta, axis, values)
    if draw.scale is None or draw.eps is None:
        return Divergence(-log_p, -score, None)
    log_q = -(0.5 * draw.eps.square() + draw.scale.log()).sum() - 0.5 * LOG_2PI * score.numel()
    return Divergence(log_q - log_p, -score, -(score * draw.eps + draw.scale.reciprocal()))


def gaussian_normal(loc: Tensor, scale: Tensor, values: Values) -> Divergence:
    """Graves 2011, eqs. 13 and 14 (the latter with respect to sigma, not sigma^2)."""
    m, s = values["loc"], values["scale"]
    d_loc = (loc - m) / (s * s)
    ratio = scale / s
    half_squares = 0.5 * (((loc - m) / s).square() + ratio.square() - 1.0)
    value = (half_squares - ratio.log()).sum()
    return Divergence(value, d_loc, scale / (s * s) - scale.reciprocal())


def gaussian_laplace(loc: Tensor, scale: Tensor, values: Values) -> Divergence:
    """E|theta - m| of a Gaussian is that of a folded normal, so this has a closed form too."""
    m, b = values["loc"], values["scale"]
    z = (loc - m) / scale
    inside = torch.erf(z / math.sqrt(2.0))  # d E|theta - m| / d loc
    edge = math.sqrt(2.0 / math.pi) * torch.exp(-0.5 * z.square())  # d E|theta - m| / d scale
    distance = scale * edge + (loc - m) * inside
    entropy = scale.log() + 0.5 * (1.0 + LOG_2PI)
    value = (distance / b - entropy).sum() + loc.numel() * _log(2 * b)
    return Divergence(value, inside / b, edge / b - scale.reciprocal())


def gaussian_uniform(loc: Tensor, scale: Tensor, values: Values) -> Divergence:
    """Minus the entropy: the prior's density is taken as 1."""
    value = -(scale.log() + 0.5 * (1.0 + LOG_2PI)).sum()
    return Divergence(value, torch.zeros_like(loc), -scale.reciprocal())


EXACT: dict[tuple[type, type], Callable[[Tensor, Tensor, Values], Divergence]] = {
    (Gaussian, Normal): gaussian_normal,
    (Gaussian, Laplace): gaussian_laplace,
    (Gaussian, Uniform): gaussian_uniform,
}


def is_exact(posterior: Posterior, prior: Prior) -> bool:
    """Whether the pair has a closed form (a point's log p always is one)."""
    return isinstance(posterior, Delta) or (type(posterior), type(prior)) in EXACT


def divergence(
    posterior: Posterior,
    prior: Prior,
    draw: Draw,
    axis: int | None,
    values: Values,
    estimator: Estimator,
) -> Divergence:
    """KL of one tensor by the chosen estimator; "auto" takes the exact one where there is one."""
    exact = EXACT.get((type(posterior), type(prior)))
    if estimator == "sample" or exact is None or draw.scale is None:
        return one_sample(draw, prior, axis, values)
    return exact(draw.loc, draw.scale, values)


def check_pair(posterior: Posterior, prior: Prior) -> None:
    """Refuse pairs that make no sense, saying why."""
    if isinstance(prior, Laplace) and prior.named("fit") and not isinstance(posterior, Delta):
        raise Invalid(
            [
                (
                    name,
                    'of a laplace prior can be "fit" only with a delta posterior: for a '
                    'spread-out one the optimum has no closed form; set a number or "learn"',
                )
                for name in prior.named("fit")
            ]
        )
    if isinstance(prior, ScaleMixture) and prior.named("learn") and isinstance(posterior, Delta):
        raise Invalid(
            [
                (
                    name,
                    'of a scale_mixture prior cannot be "learn" with a delta posterior: nothing '
                    "keeps a component from collapsing onto the weights, where log p is unbounded",
                )
                for name in prior.named("learn")
            ]
        )


def check_estimator(estimator: str, posterior: Posterior, prior: Prior) -> None:
    """Refuse an exact KL where there is none."""
    if estimator not in ("auto", "exact", "sample"):
        raise Invalid([("kl", f'must be "auto", "exact" or "sample", got {estimator!r}')])
    if estimator == "exact" and not is_exact(posterior, prior):
        raise Invalid(
            [
                (
                    "kl",
                    f'cannot be "exact": a {posterior.kind} posterior with a {prior.kind} prior '
                    'has no closed form; use "auto" or "sample"',
                )
            ]
        )
