"""A block: many weights in one flat tensor, with one posterior and one prior.

A training step makes two passes over a block: the draw, with what a grouped prior's KL needs, and
all gradients, those of the loss and of the KL together. On a CPU each pass goes piece by piece, so
that what is in between stays in the cache; the padding between weights never enters a KL, a
gradient or a count.
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
            wide = [_wide(mean) for mean in means]
            spread = [None if scale is None else _wide(scale) for scale in scales]
            for name, value in self.prior.fit(wide, spread, self.values()).items():
                getattr(self, name).copy_(value)


@dataclass
class Charge:
    """A KL term whose gradient is to be added, once, to that of the loss."""

    hyper: Hyper
    estimator: Estimator
    noise: Tensors
    values: dict[str, Number] = field(default_factory=dict)
    state: list[tuple[int, int]] = field(default_factory=list)
    weight: float = 1.0
    precisions: dict[str, Tensor] = field(default_factory=dict)
    done: bool = False


class Summary:
    """What the KL with a grouped prior needs of a draw: log q, and the sums of each group."""

    def __init__(self, parameters: Tensors, noise: Tensors) -> None:
        self._noise = noise  # held, so that no other noise can take its place in memory
        self._state = _state(parameters)
        self._parts: dict[str, list[Tensor]] = {}
        self.log_q: Tensor | float = 0.0

    def fits(self, parameters: Tensors, noise: Tensors) -> bool:
        """Whether it is the same noise, and the learnt tensors have not changed since."""
        return self._noise is noise and self._state == _state(parameters)

    def add(self, piece: Piece, draw: Draw, prior: Prior) -> None:
        self.log_q = self.log_q + log_q(draw).double()
        part = prior.sums(draw.theta.view(piece.shape), piece.weight.axis)
        parts = self._parts.setdefault(piece.weight.name, [])
        if parts and prior.reaches(piece.weight.shape, piece.weight.axis):
            parts[0] = parts[0] + part
        else:
            parts.append(part)

    def sums(self, weight: Weight) -> Tensor:
        parts = self._parts[weight.name]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _state(parameters: Tensors) -> list[tuple[int, int]]:
    """Where the learnt tensors are, and how often each was written to."""
    return [
        (tensor.data_ptr(), -1 if tensor.is_inference() else tensor._version)
        for tensor in parameters.values()
    ]


class _DrawTheta(torch.autograd.Function):
    """theta = posterior.draw(...), a view a weight; its gradient is the posterior's, and a charged
    KL's with it."""

    @staticmethod
    def forward(
        block: "Block", prior: Prior | None, noise: Tensors, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        theta = block.draw_from(block.named(parameters), noise, prior)
        return tuple(block.layout.split(theta).values())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.block, _, noise, *parameters = inputs
        ctx.noise_names = tuple(noise)
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
        charge = block.charge
        if charge is None or charge.done or not _same(charge.noise, noise):
            named = {
                weight.name: parameters["loc"].new_zeros(weight.shape) if g is None else g
                for weight, g in zip(block.layout.weights, gradients, strict=True)
            }
            pulled = block.posterior.pull(parameters, noise, block.layout.join(named))
            return None, None, None, *(pulled[name] for name in block.parameter_names)
        charge.done = True
        result = block.gradients(parameters, charge, gradients)
        return None, None, None, *(result[name] for name in block.parameter_names)


class _Complexity(torch.autograd.Function):
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
        self.summary: Summary | None = None  # of the last draw made with gradients on
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
        self.summary = None
        with torch.inference_mode(False), torch.no_grad():
            self.noise = self.posterior.noise(self.parameters_by_name, generator)

    def draw(self, prior: Prior | None = None) -> dict[str, Tensor]:
        """theta of the present noise, rebuilt from it (so an update in between is seen).

        Given the prior, what its KL needs is found in the same pass, where gradients are on.
        """
        assert self.noise is not None
        parameters = self.parameters_by_name
        wanted = prior if torch.is_grad_enabled() else None
        theta = _DrawTheta.apply(self, wanted, self.noise, *parameters.values())
        return {w.name: view for w, view in zip(self.layout.weights, theta, strict=True)}

    def draw_from(self, parameters: Tensors, noise: Tensors, prior: Prior | None) -> Tensor:
        """The posterior's draw, flat and without a graph."""
        limit = _limit(parameters["loc"])
        self.summary = None
        if "eps" not in noise or limit is None or self.posterior.looks_at_data:
            return self.posterior.draw(parameters, noise).detach()
        theta = torch.empty_like(parameters["loc"])
        summary = Summary(parameters, noise)
        for out, (piece, _, draw) in zip(
            self.layout.cut(theta, limit), self._pieces(parameters, noise), strict=True
        ):
            out.copy_(draw.theta)
            if prior is not None and prior.grouped:
                summary.add(piece, draw, prior)
        if prior is not None and prior.grouped:
            self.summary = summary
        return theta

    def flat_draw(self) -> Tensor:
        """The same, flat and without a graph, in memory of its own."""
        assert self.noise is not None
        return self.posterior.draw(self.parameters_by_name, self.noise).detach().clone()

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
        charge.values = {name: _frozen(value) for name, value in values.items()}
        charge.state = _state(parameters)
        exact = exact_pair(self.posterior, prior, charge.estimator)
        total = parameters["loc"].new_zeros((), dtype=torch.float64)
        wide = torch.promote_types(parameters["loc"].dtype, torch.float32)
        if prior.grouped:
            if self.summary is None or not self.summary.fits(parameters, charge.noise):
                self.summary = Summary(parameters, charge.noise)
                for piece, _, draw in self._pieces(parameters, charge.noise):
                    self.summary.add(piece, draw, prior)
            total = total + self.summary.log_q
            for weight in self.layout.weights:
                count = prior.group_size(weight.shape, weight.axis)
                log_p, precision = prior.settle(self.summary.sums(weight), count, values)
                total = total - log_p
                if prior.reaches(weight.shape, weight.axis):
                    charge.precisions[weight.name] = precision.detach()
            return total.to(wide)
        for piece, _, draw in self._pieces(parameters, charge.noise):
            if exact is not None and draw.scale is not None:
                total = total + exact.value(draw.loc, draw.scale, values)
            else:
                theta = draw.theta.view(piece.shape)
                total = total + log_q(draw) - prior.log_prob(theta, piece.weight.axis, values)
        return total.to(wide)

    @torch.no_grad()
    def gradients(
        self, parameters: Tensors, charge: Charge, losses: Sequence[Tensor | None] = ()
    ) -> dict[str, Tensor]:
        """The KL's gradient, times the charge's weight, plus that of the loss, in one pass.

        `losses` are the loss's gradients with respect to each weight (none: the KL's alone).
        """
        prior, values = charge.hyper.prior, charge.values
        exact = exact_pair(self.posterior, prior, charge.estimator)
        limit = _limit(parameters["loc"])
        result = {name: torch.empty_like(value) for name, value in parameters.items()}
        for flat in result.values():
            for padding in self.layout.pads(flat):
                padding.zero_()
        outs = {name: self.layout.cut(flat, limit) for name, flat in result.items()}
        of_losses = self.layout.cut_each(losses, limit)
        for i, (piece, given, draw) in enumerate(self._pieces(parameters, charge.noise)):
            if exact is not None and draw.scale is not None:
                d_loc, d_scale = exact.gradient(draw.loc, draw.scale, values)
            else:
                precision = charge.precisions.get(piece.weight.name)
                d_loc, d_scale = sampled_gradient(
                    draw.view(piece.shape), prior, piece.weight.axis, values, precision
                )
                d_loc = d_loc.flatten()
                d_scale = None if d_scale is None else d_scale.flatten()
            of_loss = of_losses[i]
            if of_loss is not None:
                random = {} if draw.eps is None else {"eps": draw.eps}
                of_loc, of_scale = self.posterior.lift(given, random, of_loss)
                d_loc = torch.add(of_loc, d_loc, alpha=charge.weight)
                if of_scale is not None and d_scale is not None:
                    d_scale = torch.add(of_scale, d_scale, alpha=charge.weight)
            elif charge.weight != 1.0:
                d_loc = charge.weight * d_loc
                d_scale = None if d_scale is None else charge.weight * d_scale
            for name, value in self.posterior.chain(given, d_loc, d_scale).items():
                outs[name][i].copy_(value)
        return result

    def settle_charge(self) -> None:
        """Add the charged KL's gradient by itself, where the loss did not depend on this block."""
        charge = self.charge
        if charge is None or charge.done:
            return
        charge.done = True
        parameters = self.parameters_by_name
        if charge.state != _state(parameters):
            raise RuntimeError("the weights were changed between the forward and the backward pass")
        for name, gradient in self.gradients(parameters, charge).items():
            parameter: nn.Parameter = getattr(self, name)
            if parameter.requires_grad:
                old = parameter.grad
                parameter.grad = gradient if old is None else old + gradient

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


def _frozen(value: Number) -> Number:
    """A prior's value as it is now."""
    return value.detach().clone() if isinstance(value, Tensor) else value


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
