"""Where autograd meets a block: its draw, its KL, what a look costs, each with its gradient in
closed form."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bayesrnn.bayes.hyper import Hyper
from bayesrnn.bayes.kl import Estimator
from bayesrnn.bayes.passes import local_pass
from bayesrnn.bayes.posterior import Tensors
from bayesrnn.bayes.prior import Number, Prior
from bayesrnn.engine import beside

if TYPE_CHECKING:
    from bayesrnn.bayes.block import Block


@dataclass
class Charge:
    """A KL term whose gradient is to be added, once, to that of the loss."""

    hyper: Hyper
    estimator: Estimator
    noise: Tensors
    values: dict[str, Number] = field(default_factory=dict)
    state: list[tuple[int, int]] = field(default_factory=list)
    weight: float | Tensor = 1.0
    local: float = 0.0  # of the part that each batch is charged in full
    precisions: dict[str, Tensor] = field(default_factory=dict)
    done: bool = False


class DrawTheta(torch.autograd.Function):
    """theta = posterior.draw(...), a tensor a weight; its gradient is the posterior's, and a
    charged KL's with it."""

    @staticmethod
    def forward(
        block: "Block", prior: Prior | None, noise: Tensors, *parameters: Tensor
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
            joined = block.joined(parameters, of_losses)
            pulled = block.collected(block.posterior.pull(block.spread(parameters), noise, joined))
            return None, None, None, *(pulled[name] for name in block.parameter_names)
        charge.done = True
        if block.posterior.second_order:
            block.of_loss = block.kept(block.joined(parameters, of_losses))
        with beside(block.tuning.stream):
            result = block.gradients(parameters, charge, of_losses)
        if block.tuning.stream is not None:
            block.held.extend(gradients)
        return None, None, None, *(result[name] for name in block.parameter_names)


class Lay(torch.autograd.Function):
    """A flat tensor of weights, laid where the block's placement says."""

    @staticmethod
    def forward(block: "Block", flat: Tensor) -> tuple[Tensor, ...]:
        return block.laid(block.layout.split(flat))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.block, flat = inputs
        ctx.placement = ctx.block.placement
        ctx.save_for_backward(flat)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        block: Block = ctx.block
        (flat,) = ctx.saved_tensors
        return None, block.joined({"loc": flat}, block.corners(gradients, ctx.placement))


class Complexity(torch.autograd.Function):
    """KL[q || p] of a block at its present draw, with its gradient in closed form."""

    @staticmethod
    def forward(
        ctx: Any, block: "Block", hyper: Hyper, estimator: Estimator, *tensors: Tensor
    ) -> Tensor:
        count = len(block.parameter_names)
        learnt = () if torch.is_inference_mode_enabled() else hyper.learnt()
        assert block.noise is not None
        ctx.block = block
        ctx.charge = block.last_charge = Charge(hyper, estimator, block.noise)
        by_prior: tuple[Tensor, ...] = ()
        with torch.set_grad_enabled(bool(learnt)):  # of the prior's few numbers: autograd does
            value = block.divergence(block.named(tensors[:count]), ctx.charge)
            if learnt:
                by_prior = torch.autograd.grad(value, learnt)
        ctx.save_for_backward(*tensors[:count], *by_prior)
        return value.detach()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        block: Block = ctx.block
        count = len(block.parameter_names)
        saved = ctx.saved_tensors
        result = block.gradients(block.named(saved[:count]), ctx.charge)
        return None, None, None, *(gradients[0] * g for g in (*result.values(), *saved[count:]))


class Local(torch.autograd.Function):
    """The KL a batch is charged in full, with its gradient in closed form."""

    @staticmethod
    def forward(ctx: Any, block: "Block", *tensors: Tensor) -> Tensor:
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


def _same(one: Tensors, other: Tensors) -> bool:
    """Whether it is the same noise (by place: a graph hands out new tensors on old memory)."""
    return all(one[name].data_ptr() == other[name].data_ptr() for name in one)
