"""A block: many weights in one flat tensor, with one posterior and one prior.

A training step makes three passes over a block: the draw, the KL's value, and all gradients, those
of the loss and of the KL together. On a CPU each pass goes piece by piece, so that what is in
between stays in the cache; the padding between weights never enters a KL, a gradient or a count.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from bayesrnn.bayes.kl import (
    Draw,
    Estimator,
    check_estimator,
    exact_pair,
    log_q,
    sampled_gradient,
)
from bayesrnn.bayes.layout import PIECE, Layout, Piece, Weight
from bayesrnn.bayes.posterior import Posterior, Tensors
from bayesrnn.bayes.prior import Number, Prior


class Hyper(nn.Module):
    """The present values of one prior object's parameters: numbers, fitted, or learnt.

    Fitted ones are buffers, learnt ones parameters in an unconstrained form (log of a scale, logit
    of a probability), so both are saved with the model.
    """

    def __init__(self, prior: Prior, like: Tensor) -> None:
        super().__init__()
        self.prior = prior
        for name in prior.named("fit"):
            self.register_buffer(name, like.new_tensor(prior.start[name]))
        for name in prior.named("learn"):
            start = torch.tensor(prior.start[name], dtype=torch.float64)
            raw = {"real": start, "positive": start.log(), "unit": start.logit()}
            value = raw[prior.domains[name]].to(like)
            self.register_parameter(name, nn.Parameter(value))

    def values(self) -> dict[str, Number]:
        """Numbers and 0-d tensors by parameter name, constrained."""
        values: dict[str, Number] = {}
        for name, domain in self.prior.domains.items():
            setting = getattr(self.prior, name)
            if setting == "learn":
                raw: Tensor = getattr(self, name)
                values[name] = {"real": raw, "positive": raw.exp(), "unit": raw.sigmoid()}[domain]
            else:
                values[name] = getattr(self, name) if setting == "fit" else float(setting)
        return values

    def learnt(self) -> tuple[Tensor, ...]:
        """The parameters that move by gradient (none, where all are numbers, fitted or frozen)."""
        return tuple(p for p in self.parameters() if p.requires_grad)

    @torch.no_grad()
    def fit(self, means: Sequence[Tensor], scales: Sequence[Tensor | None]) -> None:
        """Set the fitted values to their optimum for these posteriors."""
        if self.prior.named("fit"):
            for name, value in self.prior.fit(means, scales, self.values()).items():
                getattr(self, name).copy_(value)


@dataclass
class Charge:
    """A KL term whose gradient is to be added, once, to that of the loss."""

    hyper: Hyper
    estimator: Estimator
    noise: Tensors
    weight: float = 1.0
    precisions: Mapping[str, Tensor] = field(default_factory=dict)
    done: bool = False


class _DrawTheta(torch.autograd.Function):
    """theta = posterior.draw(...); its gradient is the posterior's, and a charged KL's with it."""

    @staticmethod
    def forward(block: "Block", noise: Tensors, *parameters: Tensor) -> Tensor:
        return block.draw_from(block.named(parameters), noise)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.block, noise, *parameters = inputs
        ctx.noise_names = tuple(noise)
        ctx.save_for_backward(*noise.values(), *parameters)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
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
        charge = block.charge
        if charge is None or charge.done or not _same(charge.noise, noise):
            pulled = block.posterior.pull(parameters, noise, gradients[0])
        else:
            charge.done = True
            pulled = block.gradients(parameters, charge, gradients[0])
        return None, None, *(pulled[name] for name in block.parameter_names)


class _Complexity(torch.autograd.Function):
    """KL[q || p] of a block at its present draw, with its gradient in closed form."""

    @staticmethod
    def forward(
        ctx: Any, block: "Block", hyper: Hyper, estimator: Estimator, *tensors: Tensor
    ) -> Tensor:
        count = len(block.parameter_names)
        learnt = hyper.learnt()
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
        by_name = block.gradients(block.named(saved[:count]), ctx.charge)
        by_parameter = [by_name[name] for name in block.parameter_names]
        return None, None, None, *(gradients[0] * g for g in (*by_parameter, *saved[count:]))


class Block(nn.Module):
    """Weights that share a posterior and a prior object, laid out in one flat tensor."""

    def __init__(
        self,
        weights: Sequence[Weight],
        tensors: Mapping[str, Tensor],
        posterior: Posterior,
        prior: int,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.layout = Layout(weights)
        self.posterior = posterior
        self.prior = prior  # which of the model's prior objects
        self.noise: Tensors | None = None  # neither parameter nor buffer: DDP would share it
        self.one_sequence = False  # set while gradients of single sequences are taken
        self.charge: Charge | None = None  # set while the KL's gradient rides on the loss's
        self.last_charge: Charge | None = None  # the last `kl`
        with torch.no_grad():
            loc = self.layout.join(tensors)
            learnt = posterior.init(loc, generator)
        self.parameter_names = tuple(learnt)
        for name, value in learnt.items():
            self.register_parameter(name, nn.Parameter(value))

    @property
    def parameters_by_name(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in self.parameter_names}

    def named(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        return dict(zip(self.parameter_names, tensors, strict=True))

    # --- the draw ------------------------------------------------------------------------------

    def resample(self, generator: torch.Generator | None) -> None:
        with torch.inference_mode(False), torch.no_grad():
            self.noise = self.posterior.noise(self.parameters_by_name, generator)

    def draw(self) -> Tensor:
        """Flat theta of the present noise, rebuilt from it (so an update in between is seen)."""
        assert self.noise is not None
        return _DrawTheta.apply(self, self.noise, *self.parameters_by_name.values())

    def draw_from(self, parameters: Tensors, noise: Tensors) -> Tensor:
        """The posterior's draw, without a graph."""
        if not noise or _limit(parameters["loc"]) is None:
            theta = self.posterior.draw(parameters, noise)
            return theta.view_as(theta)
        theta = torch.empty_like(parameters["loc"])
        for out, given, random in zip(
            theta.split(PIECE), _split(parameters), _split(noise), strict=True
        ):
            out.copy_(self.posterior.draw(given, random))
        return theta

    def mean(self) -> Tensor:
        return self.posterior.mean(self.parameters_by_name)

    @torch.no_grad()
    def moments(self) -> dict[str, tuple[Tensor, Tensor | None]]:
        """Each weight's mean and standard deviation (None for a point), by name."""
        loc = self.layout.split(self.mean().detach())
        flat = self.posterior.std(self.parameters_by_name)
        scale = {} if flat is None else self.layout.split(flat.detach())
        return {name: (loc[name], scale.get(name)) for name in loc}

    # --- the KL --------------------------------------------------------------------------------

    def kl(self, hyper: Hyper, estimator: Estimator = "auto") -> Tensor:
        """KL[q || p], summed over the weights, at the present draw where it is sampled."""
        check_estimator(estimator, self.posterior, hyper.prior)
        tensors = (*self.parameters_by_name.values(), *hyper.learnt())
        return _Complexity.apply(self, hyper, estimator, *tensors)

    def divergence(self, parameters: Tensors, charge: Charge) -> Tensor:
        """The KL's value; what its gradient needs of whole groups is left in `charge`."""
        prior, values = charge.hyper.prior, charge.hyper.values()
        exact = exact_pair(self.posterior, prior, charge.estimator)
        total = parameters["loc"].new_zeros((), dtype=torch.float64)
        sums: dict[str, Tensor] = {}
        for piece, _, draw in self._pieces(parameters, charge.noise):
            weight = piece.weight
            if exact is not None and draw.scale is not None:
                total = total + exact.value(draw.loc, draw.scale, values)
                continue
            total = total + log_q(draw)
            theta = draw.theta.view(piece.shape)
            if prior.reaches(weight.shape, weight.axis):
                part = prior.sums(theta, weight.axis)
                sums[weight.name] = sums[weight.name] + part if weight.name in sums else part
            else:
                total = total - prior.log_prob(theta, weight.axis, values)
        precisions: dict[str, Tensor] = {}
        for weight in self.layout.weights:
            if weight.name in sums:
                count = prior.group_size(weight.shape, weight.axis)
                log_p, precision = prior.settle(sums[weight.name], count, values)
                precisions[weight.name] = precision.detach()
                total = total - log_p
        charge.precisions = precisions
        return total.to(torch.promote_types(parameters["loc"].dtype, torch.float32))

    @torch.no_grad()
    def gradients(
        self, parameters: Tensors, charge: Charge, loss: Tensor | None = None
    ) -> dict[str, Tensor]:
        """The KL's gradient, times the charge's weight, plus that of the loss, in one pass.

        `loss` is the gradient with respect to theta (None: the KL's gradient alone).
        """
        prior, values = charge.hyper.prior, charge.hyper.values()
        exact = exact_pair(self.posterior, prior, charge.estimator)
        limit = _limit(parameters["loc"])
        result = {name: torch.empty_like(value) for name, value in parameters.items()}
        for flat in result.values():
            for padding in self.layout.pads(flat):
                padding.zero_()
        outs = {name: self.layout.cut(flat, limit) for name, flat in result.items()}
        losses = None if loss is None else self.layout.cut(loss, limit)
        for i, (piece, given, draw) in enumerate(self._pieces(parameters, charge.noise)):
            if exact is not None and draw.scale is not None:
                d_loc, d_scale = exact.gradient(draw.loc, draw.scale, values)
            else:
                shaped = draw.view(piece.shape)
                precision = charge.precisions.get(piece.weight.name)
                d_loc, d_scale = sampled_gradient(
                    shaped, prior, piece.weight.axis, values, precision
                )
            d_loc = d_loc.flatten()
            d_scale = None if d_scale is None else d_scale.flatten()
            if losses is not None:
                random = {} if draw.eps is None else {"eps": draw.eps}
                of_loc, of_scale = self.posterior.lift(given, random, losses[i])
                d_loc = torch.add(of_loc, d_loc, alpha=charge.weight)
                if of_scale is not None and d_scale is not None:
                    d_scale = torch.add(of_scale, d_scale, alpha=charge.weight)
            for name, value in self.posterior.chain(given, d_loc, d_scale).items():
                outs[name][i].copy_(value)
        return result

    def settle_charge(self) -> None:
        """Add the charged KL's gradient by itself, where the loss did not depend on this block."""
        charge = self.charge
        if charge is None or charge.done:
            return
        charge.done = True
        for name, gradient in self.gradients(self.parameters_by_name, charge).items():
            parameter: nn.Parameter = getattr(self, name)
            if parameter.requires_grad:
                scaled = charge.weight * gradient
                parameter.grad = scaled if parameter.grad is None else parameter.grad + scaled

    def _pieces(self, parameters: Tensors, noise: Tensors) -> Iterator[tuple[Piece, Tensors, Draw]]:
        """Each piece with its learnt tensors and its draw, at least in single precision (so that
        sums over many half-precision weights hold), all of one dimension and without a graph."""
        limit = _limit(parameters["loc"])
        given = {name: self.layout.cut(flat.detach(), limit) for name, flat in parameters.items()}
        eps = self.layout.cut(noise["eps"], limit) if "eps" in noise else None
        for i, piece in enumerate(self.layout.pieces(limit)):
            tensors = {name: _wide(cuts[i]) for name, cuts in given.items()}
            random = None if eps is None else _wide(eps[i])
            loc, scale = self.posterior.mean(tensors), self.posterior.std(tensors)
            if scale is None or random is None:
                yield piece, tensors, Draw(loc, loc, None, None)
            else:
                theta = torch.addcmul(loc, scale, random)
                yield piece, tensors, Draw(theta, loc, scale, random)

    def _apply(self, fn: Any, recurse: bool = True) -> "Block":
        super()._apply(fn, recurse)
        if self.noise is not None:
            self.noise = {name: fn(value) for name, value in self.noise.items()}
        return self


def _limit(flat: Tensor) -> int | None:
    """How large a piece may be: on a GPU whole weights, there is nothing to gain by less."""
    return PIECE if flat.device.type == "cpu" else None


def _same(one: Tensors, other: Tensors) -> bool:
    """Whether it is the same noise (by place: a graph hands out new tensors on old memory)."""
    return all(one[name].data_ptr() == other[name].data_ptr() for name in one)


def _split(flats: Tensors) -> list[dict[str, Tensor]]:
    """Named flat tensors in pieces, whatever the weights (for what is done to each number)."""
    cuts = {name: flat.split(PIECE) for name, flat in flats.items()}
    return [dict(zip(cuts, piece, strict=True)) for piece in zip(*cuts.values(), strict=True)]


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
