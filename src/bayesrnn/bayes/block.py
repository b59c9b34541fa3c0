"""A block: many weights in one flat tensor, with one posterior and one prior.

One elementwise pass over a block draws all its weights. Each weight is a named view at a
64-byte-aligned offset; the padding between views is never read and never enters a KL, a gradient
or a count.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bayesrnn.bayes.kl import Draw, Estimator, check_estimator, divergence
from bayesrnn.bayes.posterior import Posterior, Tensors
from bayesrnn.bayes.prior import Number, Prior

ALIGNMENT = 32
"""Elements: 64 bytes for 2-byte numbers, more for wider ones."""


@dataclass(frozen=True)
class Weight:
    """One weight tensor of a block: where it is, and where its input units are."""

    name: str
    shape: torch.Size
    axis: int | None


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


class _DrawTheta(torch.autograd.Function):
    """theta = posterior.draw(...), with posterior.pull as its gradient."""

    @staticmethod
    def forward(block: "Block", noise: Tensors, *parameters: Tensor) -> Tensor:
        theta = block.posterior.draw(block.named(parameters), noise)
        return theta.view_as(theta)

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
        pulled = block.posterior.pull(parameters, noise, gradients[0])
        return None, None, *(pulled[name] for name in block.parameter_names)


class _Complexity(torch.autograd.Function):
    """KL[q || p] of a block, with its closed-form gradient found in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any, block: "Block", hyper: Hyper, estimator: Estimator, *tensors: Tensor
    ) -> Tensor:
        count = len(block.parameter_names)
        parameters = block.named(tensors[:count])
        learnt = hyper.learnt()
        if not learnt:
            value, gradients = block.divergence(parameters, hyper, estimator)
            by_prior: tuple[Tensor, ...] = ()
        else:  # the prior's own parameters: a handful of numbers, so autograd does
            with torch.enable_grad():
                value, gradients = block.divergence(parameters, hyper, estimator)
                by_prior = torch.autograd.grad(value, learnt)
        ctx.save_for_backward(*(gradients[n].detach() for n in block.parameter_names), *by_prior)
        return value.detach()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, None, None, *(gradients[0] * saved for saved in ctx.saved_tensors)


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
        self.weights = tuple(weights)
        self.posterior = posterior
        self.prior = prior  # which of the model's prior objects
        self.noise: Tensors | None = None  # neither parameter nor buffer: DDP would share it
        self.one_sequence = False  # set while gradients of single sequences are taken
        self.sizes = [
            size
            for weight in self.weights
            for size in (weight.shape.numel(), -weight.shape.numel() % ALIGNMENT)
        ]
        with torch.no_grad():
            loc = self.join({w.name: tensors[w.name] for w in self.weights})
            learnt = posterior.init(loc, generator)
        self.parameter_names = tuple(learnt)
        for name, value in learnt.items():
            self.register_parameter(name, nn.Parameter(value))

    @property
    def count(self) -> int:
        """How many weights, the padding left out."""
        return sum(weight.shape.numel() for weight in self.weights)

    @property
    def parameters_by_name(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in self.parameter_names}

    def named(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        return dict(zip(self.parameter_names, tensors, strict=True))

    def split(self, flat: Tensor) -> dict[str, Tensor]:
        """Named views of a flat tensor, by one `split` (its backward is a single pass)."""
        pieces = flat.split(self.sizes)[::2]
        return {
            weight.name: piece.view(weight.shape)
            for weight, piece in zip(self.weights, pieces, strict=True)
        }

    def join(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The flat tensor of these named ones; the inverse of `split`, padding zero."""
        pieces: list[Tensor] = []
        for weight, padding in zip(self.weights, self.sizes[1::2], strict=True):
            tensor = tensors[weight.name]
            pieces += [tensor.reshape(-1), tensor.new_zeros(padding)]
        return torch.cat(pieces)

    def resample(self, generator: torch.Generator | None) -> None:
        with torch.inference_mode(False), torch.no_grad():
            self.noise = self.posterior.noise(self.parameters_by_name, generator)

    def draw(self) -> Tensor:
        """Flat theta of the present noise, rebuilt from it (so an update in between is seen)."""
        assert self.noise is not None
        return _DrawTheta.apply(self, self.noise, *self.parameters_by_name.values())

    def mean(self) -> Tensor:
        return self.posterior.mean(self.parameters_by_name)

    @torch.no_grad()
    def moments(self) -> dict[str, tuple[Tensor, Tensor | None]]:
        """Each weight's mean and standard deviation (None for a point), by name."""
        loc = self.split(self.mean().detach())
        flat = self.posterior.std(self.parameters_by_name)
        scale = {} if flat is None else self.split(flat.detach())
        return {name: (loc[name], scale.get(name)) for name in loc}

    def kl(self, hyper: Hyper, estimator: Estimator = "auto") -> Tensor:
        """KL[q || p], summed over the weights, at the present draw where it is sampled."""
        check_estimator(estimator, self.posterior, hyper.prior)
        tensors = (*self.parameters_by_name.values(), *hyper.learnt())
        return _Complexity.apply(self, hyper, estimator, *tensors)

    def divergence(
        self, parameters: Tensors, hyper: Hyper, estimator: Estimator
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The KL and its gradient with respect to each learnt tensor, tensor by tensor."""
        assert self.noise is not None
        values = hyper.values()

        def views(flat: Tensor | None) -> dict[str, Tensor]:
            """In at least single precision, so that sums over many half-precision weights hold."""
            wide = None if flat is None else flat.to(torch.promote_types(flat.dtype, torch.float32))
            return {} if wide is None else self.split(wide)

        with torch.no_grad():
            theta = views(self.posterior.draw(parameters, self.noise))
            loc = views(self.posterior.mean(parameters))
            scale = views(self.posterior.std(parameters))
            eps = views(self.noise.get("eps"))
        total = loc[self.weights[0].name].new_zeros(())
        d_loc: dict[str, Tensor] = {}
        d_scale: dict[str, Tensor] = {}
        for weight in self.weights:
            name = weight.name
            draw = Draw(theta[name], loc[name], scale.get(name), eps.get(name))
            term = divergence(self.posterior, hyper.prior, draw, weight.axis, values, estimator)
            total = total + term.value
            d_loc[name] = term.d_loc
            if term.d_scale is not None:
                d_scale[name] = term.d_scale
        joined = self.join(d_scale) if d_scale else None
        return total, self.posterior.chain(parameters, self.join(d_loc), joined)

    def _apply(self, fn: Any, recurse: bool = True) -> "Block":
        super()._apply(fn, recurse)
        if self.noise is not None:
            self.noise = {name: fn(value) for name, value in self.noise.items()}
        return self
