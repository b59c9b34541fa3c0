"""What a pass over the weights does to one piece of them: functions of tensors and nothing else, so
that the same code runs piece by piece on a CPU and is compiled into one kernel on a GPU."""

from collections.abc import Sequence

import torch
from torch import Tensor

from bayesrnn.bayes.kl import Draw, Exact, log_q, sampled_gradient
from bayesrnn.bayes.posterior import Posterior, Tensors
from bayesrnn.bayes.prior import Prior, Values


def draw_pass(
    posterior: Posterior,
    tensors: Tensors,
    noise: Tensors,
    out: Tensor,
    prior: Prior | None = None,
    axis: int | None = None,
    shape: Sequence[int] = (),
    std: Tensor | None = None,
) -> tuple[Tensor, Tensor] | None:
    """theta into `out`; given a grouped prior, also log q and what `settle` needs, and the standard
    deviations into `std`."""
    if prior is None:
        out.copy_(posterior.draw(viewed(tensors, out.shape), viewed(noise, out.shape)))
        return None
    draw = look(posterior, viewed(tensors, shape), viewed(noise, shape))
    theta = posterior.move(draw.theta, viewed(tensors, shape), viewed(noise, shape))
    out.copy_(theta.view(out.shape))
    if std is not None and draw.scale is not None:
        std.copy_(draw.scale.view(std.shape))
    return weigh(draw, prior, axis)


def draw_row_pass(posterior: Posterior, tensors: Tensors, noise: Tensors, out: Tensor) -> Tensor:
    """theta into `out`, and log q of each row that is written."""
    draw = look(posterior, viewed(tensors, out.shape), viewed(noise, out.shape))
    out.copy_(draw.theta)
    return log_q(draw, lambda terms: terms.sum(-1))


def sums_pass(prior: Prior, theta: Tensor, axis: int | None, shape: Sequence[int]) -> Tensor:
    """What `settle` needs of a draw, from the draw as it lies."""
    return prior.sums(widened(theta).reshape(shape), axis)


def look(posterior: Posterior, tensors: Tensors, noise: Tensors, std: Tensor | None = None) -> Draw:
    """The draw, from its standard deviations `std` where they are known."""
    loc, eps = posterior.mean(tensors), noise.get("eps")
    scale = posterior.std(tensors) if std is None else std
    if scale is None or eps is None:
        return Draw(loc, loc, None, None)
    return Draw(torch.addcmul(loc, scale, eps), loc, scale, eps)


def weigh_pass(
    posterior: Posterior, tensors: Tensors, noise: Tensors, prior: Prior, axis: int | None
) -> tuple[Tensor, Tensor]:
    return weigh(look(posterior, tensors, noise), prior, axis)


def weigh(draw: Draw, prior: Prior, axis: int | None) -> tuple[Tensor, Tensor]:
    """log q of each group, and its sums (both over the same axes, so that one kernel does)."""
    return log_q(draw, lambda terms: prior.gather(terms, axis)), prior.sums(draw.theta, axis)


def local_pass(posterior: Posterior, tensors: Tensors, noise: Tensors) -> Tensor:
    return posterior.local_kl(tensors, noise)


def settle_pass(
    prior: Prior, sums: Tensor, count: int | Tensor, values: Values
) -> tuple[Tensor, Tensor]:
    return prior.settle(sums, count, values)


def value_pass(
    posterior: Posterior,
    tensors: Tensors,
    noise: Tensors,
    prior: Prior,
    exact: Exact | None,
    axis: int | None,
    values: Values,
) -> Tensor:
    """The KL of some weights, in closed form or at the draw."""
    draw = look(posterior, tensors, noise)
    if exact is not None and draw.scale is not None:
        return exact.value(draw.loc, draw.scale, values)
    return log_q(draw) - prior.log_prob(draw.theta, axis, values)


def gradient_pass(
    posterior: Posterior,
    tensors: Tensors,
    noise: Tensors,
    prior: Prior,
    exact: Exact | None,
    axis: int | None,
    values: Values,
    precision: Tensor | None,
    weight: float | Tensor,
    local: float,
    of_loss: Tensor | None,
    outs: Tensors,
    std: Tensor | None = None,
) -> dict[str, Tensor]:
    """The loss's gradient, `weight` times the KL's and `local` times that of the part every batch
    is charged in full, of the flat learnt tensors, into `outs`; returns those of the numbers that
    all these weights share, added up along the rows that are written."""
    draw = look(posterior, tensors, noise, std)
    if exact is not None and draw.scale is not None:
        d_loc, d_scale = exact.gradient(draw.loc, draw.scale, values)
    else:
        d_loc, d_scale = sampled_gradient(draw, prior, axis, values, precision)
    of_loss = None if of_loss is None else widened(of_loss)
    if of_loss is not None:
        of_loc, of_scale = posterior.lift(tensors, noise, of_loss)
        d_loc = plus(of_loc, d_loc, weight)
        if of_scale is not None and d_scale is not None:
            d_scale = plus(of_scale, d_scale, weight)
    elif isinstance(weight, Tensor) or weight != 1.0:
        d_loc = weight * d_loc
        d_scale = None if d_scale is None else weight * d_scale
    of_local = posterior.pull_local(tensors, noise, local)
    if of_local is not None and d_scale is not None:
        d_scale = d_scale + of_local
    for name, value in posterior.chain(tensors, d_loc, d_scale).items():
        outs[name].copy_(value)
    shared = posterior.pull_further(tensors, noise, of_loss, local)
    return {name: value.sum(-1).sum() for name, value in shared.items()}


def clip_pass(norm: Tensor, bound: float) -> Tensor:
    """What gradients of this norm are multiplied with, so that it is at most `bound`."""
    return (bound / (norm + 1e-6)).clamp(max=1.0)


def gather_pass(gradient: Tensor, factor: Tensor | float, out: Tensor) -> None:
    """A clipped gradient of the draw into `out`."""
    out.copy_(widened(gradient) * factor)


def plus(one: Tensor, other: Tensor, weight: float | Tensor) -> Tensor:
    """one + weight * other; a weight that differs from step to step is a tensor."""
    if isinstance(weight, Tensor):
        return one + weight * other
    return torch.add(one, other, alpha=weight)


def viewed(tensors: Tensors, shape: Sequence[int]) -> dict[str, Tensor]:
    """In this shape; what all the weights share stays one number."""
    return {name: t.view(shape) if t.dim() else t for name, t in tensors.items()}


def widened(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
