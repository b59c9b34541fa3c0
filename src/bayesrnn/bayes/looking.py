"""A look at the data (sharpening): from the gradient of the batch's loss at the draw phi to theta
(Fortunato 2017, Algorithm 1), and what of theta's gradient comes back through it."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bayesrnn.bayes.block import Block, add_gradient
from bayesrnn.bayes.gradients import lay
from bayesrnn.bayes.passes import clip_pass, gather_pass
from bayesrnn.bayes.placement import GATES
from bayesrnn.bayes.posterior import Tensors
from bayesrnn.models.dropout import Mask

Leaves = Mapping[Block, Tensors]
"""Weights by block and name, in the place of draws, that gradients can be taken at."""
Gradients = Mapping[Block, Sequence[Tensor | None]]
"""By block, a tensor a weight; None where the loss does not depend on it."""


@dataclass(frozen=True)
class Look:
    """A look at the data: the batch's mean loss, what its gradient was multiplied with to clip it,
    and the noise of each block that looked."""

    nll: Callable[[], Tensor]
    factor: Tensor | float
    noise: Mapping[Block, Tensors]


def leaves_of_draw(block: Block) -> dict[str, Tensor]:
    """The draw as tensors that gradients can be taken at, and what is frozen beside them."""
    assert block.noise is not None
    with torch.no_grad():
        found = block.draw_from(block.parameters_by_name, block.noise, None)
    return _as_leaves(block, dict(zip(block.placed_names(), found, strict=True)))


def _as_leaves(block: Block, tensors: Tensors) -> dict[str, Tensor]:
    drawn = [w.name for w in block.layout.weights]
    return {n: t.detach().requires_grad_() if n in drawn else t for n, t in tensors.items()}


def refine(gradients: Gradients, number: int = 1) -> Tensor | float:
    """Let each block's noise see the gradient of the loss at its draw, clipped over all of them
    together: that of look `number`, averaged with those before. Returns what it was multiplied
    with to clip it."""
    bound = min(block.posterior.largest_look for block in gradients)
    factor: Tensor | float = 1.0
    if math.isfinite(bound):
        every = [g for own in gradients.values() for g in own if g is not None]
        norm = torch.nn.utils.get_total_norm(every)
        factor = next(iter(gradients)).run(clip_pass)(norm, bound)
    for block, own in gradients.items():
        assert block.noise is not None
        seen = _gathered(block, own, factor)
        if number > 1:
            seen = torch.lerp(block.noise["gradient"], seen, 1 / number)
        block.noise = block.posterior.refine(block.noise, seen)
    return factor


def bend(
    look: Look,
    local: float,
    others: Sequence[nn.Parameter],
    gradients_at: Callable[[Leaves], tuple[Gradients, Sequence[Tensor | None]]],
) -> None:
    """Add to the gradients what comes through a look at the batch (the second order of
    sharpening): the Hessian at phi times one direction v, by a central difference.

    `others` are learnt too, and the batch's loss depends on them, though they do not look.
    `gradients_at` gives the gradients of that loss at other weights, and those of `others`.
    """
    with torch.no_grad():
        phi, v = _direction(look, local)
        dtype = next(iter(v.values())).dtype
        length = torch.nn.utils.get_total_norm(list(v.values()))
        size = torch.nn.utils.get_total_norm(list(phi.values()))
        r = torch.finfo(dtype).eps ** (1 / 3) * (1 + size)
        r = r / length.clamp_min(torch.finfo(dtype).tiny)
    ends = []
    with without_noise(r.device):  # not at the look itself, where masks that are held are drawn
        for sign in (1, -1):
            with torch.no_grad():
                leaves = {b: _as_leaves(b, lay(b, phi[b] + sign * r * v[b])) for b in phi}
            ends.append(gradients_at(leaves))
    with torch.no_grad():
        for block, noise in look.noise.items():
            if not block.posterior.second_order:
                continue
            parameters = block.parameters_by_name
            plus, minus = (_gathered(block, end[block]) for end, _ in ends)
            of_phi = {"eps": noise["eps"]}
            lifted = block.posterior.lift(parameters, of_phi, (plus - minus) / (2 * r))
            block.add_gradients(block.posterior.chain(parameters, *lifted))
        for parameter, one, other in zip(others, *(found for _, found in ends), strict=True):
            if one is not None and other is not None:
                add_gradient(parameter, (one - other) / (2 * r))


def _direction(look: Look, local: float) -> tuple[dict[Block, Tensor], dict[Block, Tensor]]:
    """phi, and the direction v that the Hessian there is multiplied with: 0 for a block that looks
    to the first order only."""
    phi: dict[Block, Tensor] = {}
    v: dict[Block, Tensor] = {}
    for block, noise in look.noise.items():
        parameters = block.parameters_by_name
        phi[block] = block.kept(block.posterior.draw(parameters, {"eps": noise["eps"]}))
        of_loss, block.of_loss = block.of_loss, None
        v[block] = torch.zeros_like(phi[block])
        if block.posterior.second_order:
            given = v[block] if of_loss is None else of_loss
            bent = block.posterior.bend(block.spread(parameters), noise, given, local)
            v[block] = look.factor * bent
    return phi, v


def keep_only(block: Block, gradients: Sequence[Tensor | None]) -> None:
    """Set to 0 what these gradients of a draw say of pruned weights."""
    if block.keep is None:
        return
    left = block.layout.split(block.keep).values()
    for corner, keep in zip(block.corners(gradients, block.placement), left, strict=True):
        if corner is not None:
            corner.mul_(keep.view(corner.shape))


@torch.no_grad()
def _gathered(
    block: Block, gradients: Sequence[Tensor | None], factor: Tensor | float = 1.0
) -> Tensor:
    """These gradients of a draw, times the factor, in one flat tensor."""
    flat = torch.empty_like(block.parameters_by_name["loc"], requires_grad=False)
    for padding in block.layout.pads(flat):
        padding.zero_()
    run = block.run(gather_pass)
    corners = block.corners(gradients, block.placement)
    for corner, out in zip(corners, block.layout.cut(flat, None), strict=True):
        if corner is None:
            out.zero_()
        else:
            run(corner, factor, out.view(corner.shape))
    return flat


@contextmanager
def differentiable(module: nn.Module) -> Iterator[None]:
    """Recurrent layers in train mode, but without dropout where they were not: cuDNN runs backward
    in that mode alone."""
    layers = [m for m in module.modules() if isinstance(m, nn.RNNBase) and type(m) in GATES]
    before = [(layer, layer.dropout) for layer in layers if not layer.training]
    for layer, _ in before:
        layer.training, layer.dropout = True, 0.0
    try:
        yield
    finally:
        for layer, dropout in before:
            layer.training, layer.dropout = False, dropout


NOT_REPEATABLE = (
    "the second order of sharpening compares two forward passes, but dropout (or other noise) that "
    'is drawn anew in each makes them differ; use order="first", or variational dropout'
)


def check_repeatable(module: nn.Module) -> None:
    """Refuse the second order of sharpening where a forward cannot be repeated."""
    for part in module.modules():
        if (
            (isinstance(part, Mask) and part.per_step and part.rate > 0)
            or (isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0 and part.training)
            or (isinstance(part, nn.RNNBase) and part.dropout > 0 and part.training)
        ):
            raise RuntimeError(NOT_REPEATABLE)


@contextmanager
def without_noise(device: torch.device) -> Iterator[None]:
    """Refuse it where the passes inside have drawn random numbers of torch's, whatever for. (Not
    asked while a step is recorded: the same was run as it is before.)"""
    recorded = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    before = None if recorded else _random_state(device)
    yield
    if before is not None and _random_state(device) != before:
        raise RuntimeError(NOT_REPEATABLE)


def _random_state(device: torch.device) -> list[bytes]:
    """Of torch's generators, on the CPU and on the device."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return [state.numpy().tobytes() for state in states]
