"""Where autograd meets a block: its draw, its KL, what a look costs, each with its gradient in
closed form."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bayesrnn.bayes.block import Block
from bayesrnn.bayes.charge import Charge, Summary, state_of
from bayesrnn.bayes.hyper import Hyper
from bayesrnn.bayes.kl import Draw, Estimator, check_estimator, exact_pair, log_q
from bayesrnn.bayes.layout import Layout, Piece
from bayesrnn.bayes.passes import (
    local_pass,
    look,
    settle_pass,
    sums_pass,
    value_pass,
    viewed,
    weigh_pass,
    widened,
)
from bayesrnn.bayes.posterior import Tensors
from bayesrnn.bayes.prior import Number, Prior, Values
from bayesrnn.engine import beside, untraced


def draw_of(block: Block, prior: Prior | None = None) -> dict[str, Tensor]:
    """theta of the present noise, rebuilt from it (so an update in between is seen).

    Given the prior, what its KL needs is found in the same pass, where gradients are on.
    """
    assert block.noise is not None
    parameters = block.parameters_by_name
    wanted = prior if torch.is_grad_enabled() else None
    frozen = not any(p.requires_grad for p in parameters.values())
    if frozen and block.posterior.second_order and torch.is_grad_enabled():
        # Its gradient at theta is wanted all the same: what it sees depends on other weights.
        parameters["loc"] = parameters["loc"].detach().requires_grad_()
    theta = DrawTheta.apply(block, wanted, block.noise, *parameters.values())
    return dict(zip(block.placed_names(), theta, strict=True))


def lay(block: Block, flat: Tensor) -> dict[str, Tensor]:
    """These weights, flat, where the block's draws lie; differentiable."""
    if block.placement is None:
        dtype = block.tuning.dtype
        return block.layout.split(flat if dtype is None else flat.to(dtype))
    return dict(zip(block.placed_names(), Lay.apply(block, flat), strict=True))


def kl_of(block: Block, hyper: Hyper, estimator: Estimator = "auto") -> Tensor:
    """KL[q || p], summed over the weights left, at the present draw where it is sampled."""
    check_estimator(estimator, block.posterior, hyper.prior)
    tensors = (*block.parameters_by_name.values(), *hyper.learnt())
    return Complexity.apply(block, hyper, estimator, *tensors)


def local_kl_of(block: Block) -> Tensor:
    """The part of the KL that this batch is charged in full."""
    return Local.apply(block, *block.parameters_by_name.values())


@torch.no_grad()
def local_log_ratio_of(block: Block) -> Tensor:
    """log q - log p of what this draw has seen of the batch, summed in double."""
    assert block.noise is not None
    parameters, posterior = block.parameters_by_name, block.posterior
    terms = [
        posterior.local_log_ratio(given, noise).double()
        for _, given, noise in block.cut(parameters, block.noise)
    ]
    return torch.stack(terms).sum()


class DrawTheta(torch.autograd.Function):
    """theta = posterior.draw(...), a tensor a weight; its gradient is the posterior's, and a
    charged KL's with it."""

    @staticmethod
    def forward(
        block: Block, prior: Prior | None, noise: Tensors, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        return block.draw_from(block.named(parameters), noise, prior)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.block, _, noise, *parameters = inputs
        ctx.noise_names = tuple(noise)
        ctx.placement = ctx.block.placement
        ctx.save_for_backward(*noise.values(), *parameters)
        ctx.set_materialize_grads(False)

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, block: Block, prior: Any, noise: Tensors, *parameters: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[None, ...]]:
        """One draw for all that is mapped over, whose gradients differ."""
        if any(dim is not None for dim in in_dims[-len(parameters) :]):
            raise RuntimeError(
                "vmap over a model's own tensors is not available where its weights are drawn, "
                'only over what it reads: use weights("mean"), or one call for each'
            )
        theta = DrawTheta.apply(block, prior, noise, *parameters)
        return theta, (None,) * len(theta)

    @staticmethod
    @untraced
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        block: Block = ctx.block
        count = len(ctx.noise_names)
        saved = ctx.saved_tensors  # asked for once: checkpointing allows no second time
        noise = dict(zip(ctx.noise_names, saved[:count], strict=True))
        parameters = block.named(saved[count:])
        if block.posterior.per_sequence and not block.one_sequence:
            raise RuntimeError(
                "the Fisher estimate of sigma's gradient needs the gradient of one sequence at a "
                "time: give FreeEnergy a vector with one loss a sequence and call its "
                'loss.backward(), or use Gaussian(estimator="reparameterised")'
            )
        of_losses = block.corners(gradients, ctx.placement)
        charge = block.charge
        if charge is None or charge.done or not _same(charge.noise, noise):
            joined = _joined(block.layout, parameters["loc"], of_losses)
            if block.posterior.second_order and "gradient" in noise:
                if charge is None or block.of_loss is None or not _same(charge.noise, noise):
                    raise RuntimeError(
                        "the second order of sharpening is more than autograd finds: call "
                        'loss.backward() of what FreeEnergy gives, or use order="first"'
                    )
                block.of_loss = block.of_loss + block.kept(joined)
            pulled = _pulled(block, parameters, noise, joined)
            return None, None, None, *map(pulled.get, block.parameter_names)
        charge.done = True
        if block.posterior.second_order:
            block.of_loss = block.kept(_joined(block.layout, parameters["loc"], of_losses))
        with beside(block.tuning.stream):
            result = block.gradients(parameters, charge, of_losses)
        if block.tuning.stream is not None:
            block.held.extend(gradients)
        return None, None, None, *map(result.get, block.parameter_names)


class Lay(torch.autograd.Function):
    """A flat tensor of weights, laid where the block's placement says."""

    @staticmethod
    def forward(block: Block, flat: Tensor) -> tuple[Tensor, ...]:
        return block.laid(block.layout.split(flat))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.block, flat = inputs
        ctx.placement = ctx.block.placement
        ctx.save_for_backward(flat)
        ctx.set_materialize_grads(False)

    @staticmethod
    @untraced
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        block: Block = ctx.block
        (flat,) = ctx.saved_tensors
        return None, _joined(block.layout, flat, block.corners(gradients, ctx.placement))


class Complexity(torch.autograd.Function):
    """KL[q || p] of a block at its present draw, with its gradient in closed form."""

    @staticmethod
    def forward(
        ctx: Any, block: Block, hyper: Hyper, estimator: Estimator, *tensors: Tensor
    ) -> Tensor:
        count = len(block.parameter_names)
        learnt = () if torch.is_inference_mode_enabled() else hyper.learnt()
        assert block.noise is not None
        ctx.block = block
        ctx.charge = block.last_charge = Charge(hyper, estimator, block.noise)
        by_prior: tuple[Tensor, ...] = ()
        with torch.set_grad_enabled(bool(learnt)):  # of the prior's few numbers: autograd does
            value = _divergence(block, block.named(tensors[:count]), ctx.charge)
            if learnt:
                by_prior = torch.autograd.grad(value, learnt)
        ctx.save_for_backward(*tensors[:count], *by_prior)
        return value.detach()

    @staticmethod
    @untraced
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        block: Block = ctx.block
        count = len(block.parameter_names)
        saved = ctx.saved_tensors
        result = block.gradients(block.named(saved[:count]), ctx.charge)
        own = [*map(result.get, block.parameter_names), *saved[count:]]
        return None, None, None, *(None if g is None else gradients[0] * g for g in own)


class Local(torch.autograd.Function):
    """The KL a batch is charged in full, with its gradient in closed form."""

    @staticmethod
    def forward(ctx: Any, block: Block, *tensors: Tensor) -> Tensor:
        assert block.noise is not None
        ctx.block, ctx.noise = block, block.noise
        ctx.save_for_backward(*tensors)
        parameters = block.named(tensors)
        total = tensors[0].new_zeros((), dtype=torch.float64)
        run = block.run(local_pass)
        for _, given, noise in block.cut(parameters, block.noise):
            total = total + run(block.posterior, given, noise)
        return total.to(torch.promote_types(tensors[0].dtype, torch.float32))

    @staticmethod
    @untraced
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        block: Block = ctx.block
        parameters = block.named(ctx.saved_tensors)
        posterior, spread = block.posterior, block.spread(parameters)
        pulled = posterior.pull_further(spread, ctx.noise, None, 1.0)
        d_scale = posterior.pull_local(spread, ctx.noise, 1.0)
        if d_scale is not None:
            pulled |= posterior.chain(spread, torch.zeros_like(d_scale), d_scale)
        found = block.collected(pulled)
        return None, *(
            gradients[0] * found[name] if name in found else None for name in block.parameter_names
        )


def _divergence(block: Block, parameters: Tensors, charge: Charge) -> Tensor:
    """The KL's value; what its gradient needs of whole groups is left in `charge`."""
    values = charge.hyper.values()
    charge.values = {name: _frozen(value) for name, value in values.items()}
    charge.state = state_of(parameters)
    by = _by_groups if charge.hyper.prior.grouped else _by_weights
    wide = torch.promote_types(parameters["loc"].dtype, torch.float32)
    return by(block, parameters, charge, values).to(wide)


def _by_groups(block: Block, parameters: Tensors, charge: Charge, values: Values) -> Tensor:
    """log q - log p at the draw, where a prior takes weights together."""
    prior, loc = charge.hyper.prior, parameters["loc"]
    summary = _summary(block, parameters, charge.noise, prior)
    total = summary.log_q()
    if block.keep is not None:  # each pruned one adds the same
        pruned = block.layout.count - block.count
        total = total - pruned * log_q(_pruned(block, parameters, charge.noise))
    whole = block.limit(loc) is None or block.keep is not None
    wide = torch.promote_types(loc.dtype, torch.float32)
    keep = None if block.keep is None else block.layout.split(block.keep)
    settle = block.run(settle_pass)
    for weight in block.layout.weights:
        count: int | Tensor = prior.group_size(weight.shape, weight.axis)
        if keep is not None:
            count = prior.gather(keep[weight.name].to(wide), weight.axis)
        log_p, precision = settle(prior, summary.sums(weight), count, values)
        total = total - log_p
        if whole or prior.reaches(weight.shape, weight.axis):
            charge.precisions[weight.name] = precision.detach()
    return total


def _summary(block: Block, parameters: Tensors, noise: Tensors, prior: Prior) -> Summary:
    """What the draw has noted of its groups; the rest is found here."""
    summary = block.summary
    if summary is None or not summary.fits(parameters, noise):
        summary = block.summary = Summary(parameters, noise)
    elif summary.asked:  # fused optimisers write to weights without a word since
        summary = Summary(parameters, noise)
    summary.asked = True
    for weight in block.layout.weights:
        theta = summary.theta.get(weight.name)
        if theta is not None and summary.lacks(weight):  # whole, however it is cut at present
            part = block.run(sums_pass)(prior, theta, weight.axis, weight.shape)
            summary.add(Piece(weight, tuple(weight.shape)), None, part, prior)
    lacking = [weight for weight in block.layout.weights if summary.lacks(weight)]
    if not lacking:
        return summary
    for piece, tensors, random in block.cut(parameters, noise):
        if piece.weight in lacking:
            shaped = viewed(tensors, piece.shape), viewed(random, piece.shape)
            found = block.run(weigh_pass)(block.posterior, *shaped, prior, piece.weight.axis)
            summary.add(piece, *found, prior)
    return summary


def _pruned(block: Block, parameters: Tensors, noise: Tensors) -> Draw:
    """One pruned weight as the passes see it, in double."""
    zero = parameters["loc"].new_zeros(1, dtype=torch.float64)
    return look(block.posterior, dict.fromkeys(parameters, zero), dict.fromkeys(noise, zero))


def _by_weights(block: Block, parameters: Tensors, charge: Charge, values: Values) -> Tensor:
    """In closed form or at the draw, where each weight is by itself."""
    prior = charge.hyper.prior
    total = parameters["loc"].new_zeros((), dtype=torch.float64)
    exact = exact_pair(block.posterior, prior, charge.estimator)
    value = block.run(value_pass)
    if block.keep is not None:  # so those left can be taken by themselves
        where = block.where_left()
        learnt = block.flat(parameters)
        left = {name: widened(flat.detach()[where]) for name, flat in learnt.items()}
        random = {name: widened(flat[where]) for name, flat in charge.noise.items()}
        begun = {name: widened(flat[where]) for name, flat in block.start.items()}
        return value(block.posterior, left, random, prior, exact, None, {**values, **begun})
    starts = block.starts(block.limit(parameters["loc"]))
    for i, (piece, tensors, noise) in enumerate(block.cut(parameters, charge.noise)):
        shaped = viewed(tensors, piece.shape), viewed(noise, piece.shape)
        own = {**values, **viewed(starts[i], piece.shape)}
        total = total + value(block.posterior, *shaped, prior, exact, piece.weight.axis, own)
    return total


def _pulled(block: Block, parameters: Tensors, noise: Tensors, gradient: Tensor) -> Tensors:
    """The loss's gradient at theta, pulled back to the learnt tensors.

    The Fisher estimate squares the gradient of a whole sequence: where several forwards of one draw
    have read it, each adds what the square gains by it. Another draw has a square of its own.
    """

    def pull(given: Tensor) -> Tensors:
        return block.collected(block.posterior.pull(block.spread(parameters), noise, given))

    if not block.posterior.per_sequence:
        return pull(gradient)
    draw = tuple(tensor.data_ptr() for tensor in noise.values())
    before = block.of_sequence.get(draw)
    whole = block.of_sequence[draw] = gradient if before is None else before + gradient
    if before is None:
        return pull(whole)
    old = pull(before)
    return {name: new - old[name] for name, new in pull(whole).items()}


def _joined(layout: Layout, like: Tensor, gradients: Sequence[Tensor | None]) -> Tensor:
    """The gradients of all weights in one flat tensor; zeros where there is none."""
    return layout.join(
        {
            weight.name: like.new_zeros(weight.shape) if g is None else g.to(like.dtype)
            for weight, g in zip(layout.weights, gradients, strict=True)
        }
    )


def _frozen(value: Number) -> Number:
    """A prior's value as it is now."""
    return value.detach().clone() if isinstance(value, Tensor) else value


def _same(one: Tensors, other: Tensors) -> bool:
    """Whether it is the same noise (by place: a graph hands out new tensors on old memory)."""
    return all(one[name].data_ptr() == other[name].data_ptr() for name in one)
