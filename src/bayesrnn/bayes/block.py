"""A block: many weights in one flat tensor, with one posterior and one prior.

A training step makes few passes over a block: the draw, what a grouped prior's KL needs (on a CPU
together with the draw), and all gradients, those of the loss and of the KL together. On a CPU each
pass goes piece by piece, so that what is in between stays in the cache; on a GPU weight by weight,
compiled into one kernel and beside the network's own kernels where it is tuned so. The padding
between weights never enters a KL, a gradient or a count.

A block may be pruned: `keep` says which weights are left. In every pass the learnt tensors of the
others read as 0, as do their noise and their gradients, and the KL is that of the weights left.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from bayesrnn.bayes.charge import Charge, Summary, state_of
from bayesrnn.bayes.kl import exact_pair
from bayesrnn.bayes.layout import ALIGNMENT, PIECE, Layout, Piece, Weight
from bayesrnn.bayes.passes import (
    draw_pass,
    draw_row_pass,
    gradient_pass,
    viewed,
    widened,
)
from bayesrnn.bayes.placement import Placement
from bayesrnn.bayes.posterior import Posterior, Tensors
from bayesrnn.bayes.prior import Prior
from bayesrnn.engine import Tuning, compiled

P = ParamSpec("P")
R = TypeVar("R")


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
        self.one_sequence = False  # set while the gradient of a single sequence is taken
        self.of_sequence: dict[tuple[int, ...], Tensor] = {}  # that gradient so far, by draw
        self.charge: Charge | None = None  # set while the KL's gradient rides on the loss's
        self.last_charge: Charge | None = None  # the last `kl`
        self.of_loss: Tensor | None = None  # the loss's gradient at theta, for the second order
        self.summary: Summary | None = None  # of the last draw made with gradients on
        self.placement: Placement | None = None  # where draws lie, if not as the layout says
        self.tuning = Tuning()
        self.held: list[Tensor | None] = []  # what its stream reads, until that was waited for
        with torch.no_grad():
            loc = self.layout.join(tensors)
            learnt = posterior.init(loc, generator)
            learnt |= {name: loc.new_zeros(len(weights)) for name in posterior.further}
        self.parameter_names = tuple(learnt)
        for name, value in learnt.items():
            self.register_parameter(name, nn.Parameter(value))
        self.register_buffer("keep", None)  # flat, bool: which weights are left; None: all
        self.keep: Tensor | None
        self._left: Tensor | None = None  # where `keep` is set
        self.register_buffer("start_loc", None)  # flat, where the prior is the start
        self.register_buffer("start_scale", None)

    def __getstate__(self) -> dict[str, Any]:
        """For a copy: without what belongs to one forward, or to a `with` block."""
        apart: dict[str, Any] = {"tuning": Tuning(), "placement": None, "charge": None, "held": []}
        return {**self.__dict__, **apart}

    def take(self, posterior: Posterior) -> None:
        """Another posterior over the same loc and scale; what it learns besides starts anew."""
        self.posterior, self.noise, self.summary = posterior, None, None
        loc = self.parameters_by_name["loc"]
        kept = [name for name in self.parameter_names if name in ("loc", "rho")]
        for name in set(self.parameter_names) - set(kept):
            del self._parameters[name]
        for name in posterior.further:
            zeros = loc.detach().new_zeros(len(self.layout.weights))
            self.register_parameter(name, nn.Parameter(zeros))
        self.parameter_names = (*kept, *posterior.further)

    @property
    def parameters_by_name(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in self.parameter_names}

    def named(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        return dict(zip(self.parameter_names, tensors, strict=True))

    def flat(self, parameters: Tensors) -> dict[str, Tensor]:
        """Without those that hold a number a weight tensor."""
        return {n: tensor for n, tensor in parameters.items() if n not in self.posterior.further}

    def spread(self, parameters: Tensors) -> dict[str, Tensor]:
        """All flat: a number a weight tensor is spread over the weights."""
        numbers = {name: parameters[name] for name in self.posterior.further}
        return self.flat(parameters) | {n: self.layout.spread(x) for n, x in numbers.items()}

    def collected(self, gradients: Tensors) -> dict[str, Tensor]:
        """Gradients with respect to what `spread` gave, as those of the learnt tensors."""
        kept = {name: self.kept(flat) for name, flat in gradients.items()}
        numbers = {name: kept[name] for name in self.posterior.further if name in kept}
        return kept | {name: self.layout.sums(flat) for name, flat in numbers.items()}

    # --- pruning --------------------------------------------------------------------------------

    def mask(self, keep: Tensor | None) -> None:
        """Leave these weights (flat, bool; None: all); what is learnt of the others stays."""
        if keep is not None:
            with torch.no_grad():
                for padding in self.layout.pads(keep):
                    padding.fill_(False)
        self.keep, self._left, self.summary = keep, None, None
        if self.noise is not None:
            self.noise = {name: self.kept(value) for name, value in self.noise.items()}

    @torch.no_grad()
    def prune(self, keep: Tensor) -> None:
        """Leave these weights (flat, bool) and forget the others."""
        self.mask(keep)
        for tensor in self.flat(self.parameters_by_name).values():
            tensor.mul_(keep)

    def kept(self, flat: Tensor) -> Tensor:
        """A flat tensor with 0 at the weights that were pruned."""
        return flat if self.keep is None else flat * self.keep

    @property
    def count(self) -> int:
        """How many weights are left."""
        return self.layout.count if self.keep is None else len(self.where_left())

    def where_left(self) -> Tensor:
        """The places of the weights left (found once: a recorded step may not wait for it)."""
        assert self.keep is not None
        if self._left is None or self._left.device != self.keep.device:
            self._left = self.keep.nonzero().flatten()
        return self._left

    def left(self) -> list[tuple[Tensor, Tensor | None]]:
        """Mean (where the prior is around the start: its distance from there) and standard
        deviation (None for a point) of the weights left."""
        begun = self.start.get("loc")
        if self.keep is None:
            moments = self.moments()
            starts = {} if begun is None else self.layout.split(begun)
            return [
                (loc - starts[name] if starts else loc, scale)
                for name, (loc, scale) in moments.items()
            ]
        parameters = self.parameters_by_name
        mean = self.posterior.mean(parameters)
        flat = mean if begun is None else mean - begun, self.posterior.std(parameters)
        loc, scale = (None if f is None else f.detach()[self.where_left()] for f in flat)
        assert loc is not None
        return [(loc, scale)]

    # --- the start ------------------------------------------------------------------------------

    @torch.no_grad()
    def begin(self, names: Sequence[str]) -> None:
        """Here begins what a prior takes of the start: "loc", "scale", both or nothing."""
        now = {"loc": self.mean(), "scale": self.posterior.std(self.parameters_by_name)}
        for name, flat in now.items():
            assert flat is not None or name not in names  # `check_pair` has refused it
            begun = None if flat is None or name not in names else flat.detach().clone()
            self.register_buffer(f"start_{name}", begun)

    @property
    def start(self) -> dict[str, Tensor]:
        """What the prior takes of it, flat."""
        both = {"loc": self.start_loc, "scale": self.start_scale}
        return {name: flat for name, flat in both.items() if isinstance(flat, Tensor)}

    def starts(self, limit: int | None) -> list[dict[str, Tensor]]:
        """The same of each piece, as `cut` gives them."""
        cuts = {name: self.layout.cut(flat, limit) for name, flat in self.start.items()}
        return [
            {name: widened(flat[i]) for name, flat in cuts.items()}
            for i in range(len(self.layout.pieces(limit)))
        ]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """With the weights' names and shapes, which the flat tensors do not tell."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if hasattr(destination, "_metadata"):
            destination._metadata[prefix[:-1]]["weights"] = self._weights()

    def _weights(self) -> list[list[Any]]:
        return [[weight.name, list(weight.shape)] for weight in self.layout.weights]

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any
    ) -> None:
        """A state tells whether it is pruned by having a mask (one without this block says
        nothing of it)."""
        there, here = local_metadata.get("weights"), self._weights()
        if there not in (None, here):
            errors: list[str] = args[-1]
            errors.append(f"{prefix[:-1]} holds {there} there and {here} here.")
            return
        keep = state_dict.get(f"{prefix}keep")
        loc = self.parameters_by_name["loc"]
        told = keep is not None or f"{prefix}loc" in state_dict
        if told and (keep is None or keep.shape == loc.shape):
            self.keep = None if keep is None else torch.zeros_like(loc, dtype=torch.bool)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)
        self.mask(self.keep)

    # --- the draw -------------------------------------------------------------------------------

    def resample(self, generator: torch.Generator | None) -> None:
        self.summary = None
        with torch.inference_mode(False), torch.no_grad():
            noise = self.posterior.noise(self.parameters_by_name, generator)
            self.noise = {name: self.kept(value) for name, value in noise.items()}

    def _apply(self, fn: Any, recurse: bool = True) -> "Block":
        super()._apply(fn, recurse)
        if self.noise is not None:
            self.noise = {name: fn(value) for name, value in self.noise.items()}
        return self

    def mean(self) -> Tensor:
        return self.kept(self.posterior.mean(self.parameters_by_name))

    @torch.no_grad()
    def moments(self) -> dict[str, tuple[Tensor, Tensor | None]]:
        """Each weight's mean and standard deviation (None for a point), by name; both 0 where it
        was pruned."""
        loc = self.layout.split(self.mean().detach())
        flat = self.posterior.std(self.parameters_by_name)
        scale = {} if flat is None else self.layout.split(self.kept(flat.detach()))
        return {name: (loc[name], scale.get(name)) for name in loc}

    def draw_from(
        self, parameters: Tensors, noise: Tensors, prior: Prior | None
    ) -> tuple[Tensor, ...]:
        """The posterior's draw without a graph, a tensor a weight (then what is frozen)."""
        self.summary = None
        loc = parameters["loc"]
        if not noise and self.placement is None and self.tuning.dtype in (None, loc.dtype):
            flat = self.kept(self.posterior.draw(parameters, noise).detach())
            return tuple(self.layout.split(flat).values())
        outers, outs = self._new_theta(loc)
        summary = None
        if prior is not None and prior.grouped and "eps" in noise:
            summary = Summary(parameters, noise)
        limit = self.limit(loc)
        stds: Sequence[Tensor | None] = [None] * len(outs)
        if summary is not None and limit is not None:  # a GPU finds them sooner than it reads them
            wide = torch.promote_types(loc.dtype, torch.float32)
            summary.std = torch.empty_like(loc, dtype=wide, requires_grad=False)
            stds = self.layout.cut(summary.std, limit)
        for i, (piece, tensors, random) in enumerate(self.cut(parameters, noise)):
            weight, given = piece.weight, (self.posterior, tensors, random, outs[i])
            if summary is None or prior is None:
                self.run(draw_pass)(*given)
            elif limit is not None or not prior.reaches(weight.shape, weight.axis):
                found = self.run(draw_pass)(*given, prior, weight.axis, piece.shape, stds[i])
                assert found is not None
                summary.add(piece, *found, prior)
            elif self.posterior.looks_at_data:
                self.run(draw_pass)(*given)  # and the KL is not that of what lies there
            else:  # a kernel that adds up columns draws slowly: that can wait
                summary.lay(weight, self.run(draw_row_pass)(*given), outs[i])
        self.summary = summary
        return outers

    # --- where a draw lies ----------------------------------------------------------------------

    def placed_names(self) -> list[str]:
        """Of what a draw gives: the weights, then what is frozen beside them."""
        frozen = () if self.placement is None else self.placement.frozen
        return [*(weight.name for weight in self.layout.weights), *frozen]

    def _dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(self, self.parameter_names[0]).dtype
        return dtype if self.tuning.dtype is None else self.tuning.dtype

    def _new_theta(self, loc: Tensor) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """Memory for a draw: a tensor a weight, and the places to write its pieces to."""
        if self.placement is None:
            flat = torch.empty_like(loc, dtype=self._dtype(), requires_grad=False)
            return tuple(self.layout.split(flat).values()), self.layout.cut(flat, self.limit(loc))
        outers = self.placement.outers(loc, self._dtype(), self.tuning.compiled)
        outs = [self.placement.corner(outers[w.name], w.name, w.shape) for w in self.layout.weights]
        return tuple(outers[name] for name in self.placed_names()), outs

    def laid(self, tensors: Tensors) -> tuple[Tensor, ...]:
        """These named weights, copied to where draws lie."""
        assert self.placement is not None
        outers = self.placement.outers(next(iter(tensors.values())), self._dtype())
        for weight in self.layout.weights:
            corner = self.placement.corner(outers[weight.name], weight.name, weight.shape)
            corner.copy_(tensors[weight.name].view(corner.shape))
        return tuple(outers[name] for name in self.placed_names())

    def corners(
        self, gradients: Sequence[Tensor | None], placement: Placement | None
    ) -> list[Tensor | None]:
        """Each weight's own part of the gradients of what `draw` gave."""
        own = zip(self.layout.weights, gradients, strict=False)
        if placement is None:
            return [g for _, g in own]
        return [None if g is None else placement.corner(g, w.name, w.shape) for w, g in own]

    # --- the gradients --------------------------------------------------------------------------

    @torch.no_grad()
    def gradients(
        self, parameters: Tensors, charge: Charge, losses: Sequence[Tensor | None] = ()
    ) -> dict[str, Tensor]:
        """The KL's gradient, times the charge's weight, plus that of the loss, in one pass.

        `losses` are the loss's gradients with respect to each weight (none: the KL's alone).
        """
        prior = charge.hyper.prior
        exact = exact_pair(self.posterior, prior, charge.estimator)
        limit = self.limit(parameters["loc"])
        result = {name: torch.empty_like(flat) for name, flat in self.flat(parameters).items()}
        for flat in result.values():
            for padding in self.layout.pads(flat):
                padding.zero_()
        outs = {name: self.layout.cut(flat, limit) for name, flat in result.items()}
        as_they_lie = limit is None and losses
        of_losses = losses if as_they_lie else self.layout.cut_each(losses, limit)
        run = self.run(gradient_pass)
        places, begun = self.layout.starts(limit), self.starts(limit)
        shared: dict[str, dict[Weight, list[Tensor]]] = {
            name: {w: [] for w in self.layout.weights} for name in self.posterior.further
        }
        known, std = self.summary, None
        if losses and known is not None and known.fits(parameters, charge.noise):
            std = known.std  # not for a KL by itself, which may be asked for long after the draw
        stds = None if std is None else self.layout.cut(std, limit)
        for i, (piece, tensors, noise) in enumerate(self.cut(parameters, charge.noise)):
            of_loss, weight = of_losses[i], piece.weight
            shape = piece.shape if of_loss is None or limit is not None else of_loss.shape
            precision = charge.precisions.get(weight.name)
            reaches = prior.reaches(weight.shape, weight.axis)
            if precision is not None and limit is None:
                precision = precision.expand(weight.shape).view(shape)
            elif precision is not None and len(precision.shape) and not reaches:
                precision = precision[places[i] : places[i] + piece.shape[0]]
            given = viewed(tensors, shape), viewed(noise, shape)
            of_loss = None if of_loss is None else of_loss.view(shape)
            further = run(
                self.posterior,
                *given,
                prior,
                exact,
                weight.axis,
                {**charge.values, **viewed(begun[i], shape)},
                precision,
                charge.weight,
                charge.local,
                of_loss,
                {name: cuts[i].view(shape) for name, cuts in outs.items()},
                None if stds is None else stds[i].view(shape),
            )
            for name, x in further.items():
                shared[name][weight].append(x)
        return {name: self.kept(flat) for name, flat in result.items()} | {
            name: torch.stack([_sum(parts) for parts in by_weight.values()]).to(parameters[name])
            for name, by_weight in shared.items()
            if all(by_weight.values())
        }

    def settle_charge(self) -> None:
        """Add the charged KL's gradient by itself, where the loss did not depend on this block."""
        charge = self.charge
        if charge is None or charge.done:
            return
        charge.done = True
        parameters = self.parameters_by_name
        if charge.state != state_of(parameters):
            raise RuntimeError("the weights were changed between the forward and the backward pass")
        self.add_gradients(self.gradients(parameters, charge))

    def add_gradients(self, gradients: Tensors) -> None:
        """To those of the parameters that learn."""
        for name, gradient in gradients.items():
            parameter: nn.Parameter = getattr(self, name)
            if parameter.requires_grad:
                add_gradient(parameter, gradient)

    # --- passes over the weights ----------------------------------------------------------------

    def cut(self, parameters: Tensors, noise: Tensors) -> Iterator[tuple[Piece, Tensors, Tensors]]:
        """Each piece with its learnt tensors and its noise, of one dimension and without a graph,
        at least in single precision (so that sums over many half-precision weights hold)."""
        limit = self.limit(parameters["loc"])
        flats = self.flat(parameters)
        given = {name: self.layout.cut(flat.detach(), limit) for name, flat in flats.items()}
        random = {name: self.layout.cut(flat, limit) for name, flat in noise.items()}
        if self.keep is not None:
            left = self.layout.cut(self.keep, limit)
            given = {
                name: [cut * keep for cut, keep in zip(cuts, left, strict=True)]
                for name, cuts in given.items()
            }
        places = {weight.name: place for place, weight in enumerate(self.layout.weights)}
        for name in self.posterior.further:
            numbers = _apart(parameters[name].detach())
            pieces = self.layout.pieces(limit)
            given[name] = [numbers[places[piece.weight.name]] for piece in pieces]
        for i, piece in enumerate(self.layout.pieces(limit)):
            yield (
                piece,
                {name: widened(cuts[i]) for name, cuts in given.items()},
                {name: widened(cuts[i]) for name, cuts in random.items()},
            )

    def limit(self, flat: Tensor) -> int | None:
        """How large a piece may be: on a GPU whole weights, there is nothing to gain by less."""
        return PIECE if flat.device.type == "cpu" and self.placement is None else None

    def run(self, function: Callable[P, R]) -> Callable[P, R]:
        return compiled(function) if self.tuning.compiled else function


def add_gradient(parameter: nn.Parameter, gradient: Tensor) -> None:
    old = parameter.grad
    parameter.grad = gradient if old is None else old + gradient


def _apart(numbers: Tensor) -> Sequence[Tensor]:
    """Each of these numbers at a place of its own: a compiled pass copies one that lies close after
    another."""
    if len(numbers) == 1 or numbers.device.type == "cpu":
        return numbers.unbind()
    return numbers[:, None].repeat(1, ALIGNMENT)[:, 0].unbind()


def _sum(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.stack(list(parts)).sum()
