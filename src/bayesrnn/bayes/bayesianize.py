"""Any module made Bayesian: chosen parameters are drawn from a distribution.

`bayesianize` takes a plain `nn.Module` and returns a `Bayesian` with the same call signature. There
are no Bayesian layers: before the wrapped module runs, its weights are set to a draw (or the mean).
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from bayesrnn.bayes.block import Block, Charge, Hyper
from bayesrnn.bayes.kl import Estimator, check_pair
from bayesrnn.bayes.layout import Weight
from bayesrnn.bayes.posterior import Gaussian, Posterior
from bayesrnn.bayes.prior import Prior, ScaleMixture

Where = Callable[[str, nn.Parameter], bool] | str | Sequence[str]
T = TypeVar("T")


class Bayesian(nn.Module):
    """A module whose chosen weights are drawn; made by `bayesianize`.

    In train mode every forward uses a fresh draw, the same for all time steps; in eval mode the
    mean is used. `weights`, `hold` and `resample` say otherwise. What is kept of a draw is its
    noise: theta is rebuilt from it in every forward.
    """

    def __init__(
        self,
        module: nn.Module,
        blocks: Sequence[Block],
        priors: Sequence[Hyper],
        slots: Mapping[str, Sequence[tuple[nn.Module, str]]],
    ) -> None:
        super().__init__()
        self.module = module
        self.blocks = nn.ModuleList(blocks)
        self.priors = nn.ModuleList(priors)
        self._slots = {name: tuple(places) for name, places in slots.items()}
        self._mode: Literal["auto", "mean", "sample"] = "auto"
        self._holding = False  # the present draw stays over several forwards
        self._keep = False  # the next forward uses the present draw
        self._drawn = False  # the last forward (or resample) used a draw
        self._leaves: dict[Block, Tensor] | None = None  # theta while `resample` takes gradients

    # --- drawing -----------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's own forward, with its weights drawn or at their mean."""
        with self._bound(self._weights()):
            return self.module(*args, **kwargs)

    @contextmanager
    def weights(self, which: Literal["mean", "sample"]) -> Iterator[None]:
        """Use the posterior mean, or one draw held for the whole block, whatever the train mode."""
        if which not in ("mean", "sample"):
            raise ValueError(f'weights must be "mean" or "sample", got {which!r}')
        before = (self._mode, self._holding, self._keep)
        wanted = self._holding or self._keep  # a draw that is still to be used afterwards
        held = [block.noise for block in self.each_block()] if wanted else None
        self._mode, self._holding, self._keep = which, True, False
        try:
            yield
        finally:
            self._mode, self._holding, self._keep = before
            if held is not None:
                for block, noise in zip(self.each_block(), held, strict=True):
                    block.noise = noise

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Keep one draw over all forwards of the block (in train mode)."""
        before = self._holding
        self._holding = True
        try:
            yield
        finally:
            self._holding = before
            self._keep = self._keep and before

    def resample(
        self,
        nll: Callable[[], Tensor] | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        """Draw now; the next forward (all of them inside `hold`) uses this draw.

        `nll` runs the model on the batch at hand and returns its loss: posteriors that look at the
        data need it, the others ignore it. `generator` must be on the weights' device; without it
        the draw comes from torch's own, and differs between the ranks of a process group.
        """
        looking = [block for block in self.each_block() if block.posterior.looks_at_data]
        if looking and nll is None:
            raise RuntimeError(
                f"a {looking[0].posterior.kind} posterior looks at the data: call "
                "model.resample(nll=lambda: loss of the batch) before the forward"
            )
        if looking and self._uses_mean():
            raise RuntimeError(
                f"a {looking[0].posterior.kind} posterior takes gradients at its draw: call "
                'resample(nll=...) in train mode or inside model.weights("sample")'
            )
        if generator is None:
            generator = _rank_generator(next(self.each_block()).mean().device)
        for block in self.each_block():
            block.resample(generator)
        self._keep = self._drawn = True
        if not looking or nll is None:
            return
        with self.hold(), torch.enable_grad():
            self._leaves = {block: block.flat_draw().requires_grad_() for block in looking}
            try:
                gradients = torch.autograd.grad(nll(), list(self._leaves.values()))
            except BaseException:
                self._keep = self._drawn = False
                raise
            finally:
                self._leaves = None
        for block, gradient in zip(looking, gradients, strict=True):
            assert block.noise is not None
            block.noise = block.posterior.refine(
                block.parameters_by_name, block.noise, gradient, generator
            )
        self._keep = True

    def kl(self, estimator: Estimator = "auto") -> Tensor:
        """KL[q || p] in nats, summed over all weights, at the last forward's draw.

        "auto" is exact for each block that has a closed form and one-sample otherwise. Priors set
        to "fit" are first moved to their optimum for the weights as they are now.
        """
        if self._mode == "mean" or not self._drawn:
            raise RuntimeError(
                "kl() speaks of the last forward's draw, and there is none: the mean was used, or "
                'nothing was run yet. Call it in train mode or inside model.weights("sample"), '
                "after a forward or model.resample()"
            )
        self.fit_priors()
        terms = [block.kl(self.hyper(block), estimator) for block in self.each_block()]
        return torch.stack([term.to(terms[0].device) for term in terms]).sum()

    def fit_priors(self) -> None:
        """Move every prior parameter set to "fit" to its optimum (`kl` does this by itself)."""
        for index, hyper in enumerate(self.each_prior()):
            if not hyper.prior.named("fit"):
                continue
            moments = [
                moment
                for block in self.each_block()
                if block.prior == index
                for moment in block.moments().values()
            ]
            hyper.fit([loc for loc, _ in moments], [scale for _, scale in moments])

    # --- looking -----------------------------------------------------------------------------

    def moments(self) -> dict[str, tuple[Tensor, Tensor | None]]:
        """Mean and standard deviation (None for a point) of each drawn weight, by its name."""
        return {
            name: moment for block in self.each_block() for name, moment in block.moments().items()
        }

    @property
    def weight_count(self) -> int:
        """How many weights are drawn; tied ones count once, padding never."""
        return sum(block.layout.count for block in self.each_block())

    @property
    def has_description_length(self) -> bool:
        """Whether the KL is a number of nats, not one up to a constant (Delta, Uniform)."""
        return all(
            block.posterior.proper and self.hyper(block).prior.proper for block in self.each_block()
        )

    @property
    def per_sequence(self) -> bool:
        """Whether some posterior wants the gradients of single sequences (Fisher estimate)."""
        return any(block.posterior.per_sequence for block in self.each_block())

    @contextmanager
    def one_sequence(self) -> Iterator[None]:
        """The backward passes inside are of one sequence's loss each (`FreeEnergy` uses it)."""
        for block in self.each_block():
            block.one_sequence = True
        try:
            yield
        finally:
            for block in self.each_block():
                block.one_sequence = False

    @contextmanager
    def charged(self, charges: Sequence[Charge], weight: float) -> Iterator[None]:
        """The KL of those charges, times `weight`, is added to what the backward pass inside gives.

        Both gradients then take one pass over the weights together (`FreeEnergy` uses it).
        """
        for block, charge in zip(self.each_block(), charges, strict=True):
            block.charge = replace(charge, weight=weight)
        try:
            yield
            for block in self.each_block():
                block.settle_charge()
        finally:
            for block in self.each_block():
                block.charge = None

    def charges(self) -> list[Charge]:
        """The terms of the last `kl()`, one a block."""
        return [block.last_charge for block in self.each_block() if block.last_charge is not None]

    def hyper(self, block: Block) -> Hyper:
        """The block's prior with its present values."""
        hyper = self.priors[block.prior]
        assert isinstance(hyper, Hyper)
        return hyper

    def each_block(self) -> Iterator[Block]:
        for block in self.blocks:
            assert isinstance(block, Block)
            yield block

    def each_prior(self) -> Iterator[Hyper]:
        for hyper in self.priors:
            assert isinstance(hyper, Hyper)
            yield hyper

    # --- binding -----------------------------------------------------------------------------

    def _uses_mean(self) -> bool:
        return self._mode == "mean" or (self._mode == "auto" and not self.training)

    def _weights(self) -> dict[str, Tensor]:
        """Each weight's theta for the coming forward."""
        if self._uses_mean():
            self._drawn = False
            return _merged(block.layout.split(block.mean()) for block in self.each_block())
        if not self._keep:
            self.resample()
        self._keep = self._holding
        self._drawn = True
        leaves = self._leaves or {}
        return _merged(
            block.layout.split(leaves[block])
            if block in leaves
            else block.draw(self.hyper(block).prior)
            for block in self.each_block()
        )

    @contextmanager
    def _bound(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """The wrapped module with its empty places filled, for the time of one forward."""
        try:
            for name, tensor in weights.items():
                for owner, local in self._slots[name]:
                    _place(owner, local, tensor)
            yield
        finally:
            for places in self._slots.values():
                for owner, local in places:
                    _place(owner, local, None)


def bayesianize(
    module: nn.Module,
    posterior: Posterior | Mapping[str, Posterior] | None = None,
    prior: Prior | Mapping[str, Prior] | None = None,
    where: Where = "*",
    input_axis: Mapping[str, int | None] | None = None,
    generator: torch.Generator | None = None,
) -> Bayesian:
    """Make `module` Bayesian: the weights chosen by `where` become draws from `posterior`.

    The module is copied; the one given stays as it is. Means start at its present weights, so a
    trained network becomes Bayesian in one line. Parameters that do not require gradients stay
    ordinary, as do those `where` does not choose: a predicate on (name, parameter), a name pattern
    such as "rnn.*", or several. `posterior` and `prior` are each one object (default: `Gaussian()`
    and `ScaleMixture()`) or a mapping from name pattern to object, where the first match counts. An
    object that covers several weights is one object: what it fits, it fits over all of them.

    `input_axis` overrides, by name pattern, which axis of a weight holds its input units (the
    groups of a grouped prior); see `default_input_axis`.

    >>> model = bayesianize(nn.Linear(3, 2), where="weight")
    >>> model(torch.zeros(1, 3)).shape, model.weight_count
    (torch.Size([1, 2]), 6)
    """
    module = copy.deepcopy(module)
    chosen = _choose(module, where)
    names = {name: aliases for name, (_, aliases) in chosen.items()}
    posteriors = _assign(names, posterior if posterior is not None else Gaussian(), "posterior")
    priors = _assign(names, prior if prior is not None else ScaleMixture(), "prior")
    axes = _axes(module, names, input_axis or {})
    objects: list[Prior] = []
    members: dict[tuple[object, ...], list[str]] = {}
    for name in _layout_order(module, names):
        parameter = chosen[name][0]
        check_pair(posteriors[name], priors[name])
        if not any(known is priors[name] for known in objects):
            objects.append(priors[name])
        owner = module.get_submodule(name.rpartition(".")[0])
        key = (
            name.rpartition(".")[0] if isinstance(owner, nn.RNNBase) else None,
            id(posteriors[name]),
            id(priors[name]),
            parameter.dtype,
            parameter.device,
        )
        members.setdefault(key, []).append(name)
    blocks = []
    for group in members.values():
        weights = [Weight(name, chosen[name][0].shape, axes[name]) for name in group]
        tensors = {name: chosen[name][0].detach() for name in group}
        index = next(i for i, known in enumerate(objects) if known is priors[group[0]])
        blocks.append(Block(weights, tensors, posteriors[group[0]], index, generator))
    like = blocks[0].mean().detach()
    slots = _empty(module, names)
    model = Bayesian(module, blocks, [Hyper(known, like) for known in objects], slots)
    model.train(module.training)
    model.fit_priors()
    return model


def default_input_axis(owner: nn.Module, parameter: Tensor) -> int | None:
    """Which axis holds the input units, whose outgoing weights a grouped prior takes together.

    The one rule here that looks at a layer's type: an embedding's words are its rows, and a
    transposed convolution has its inputs first; all others (Linear, recurrent, Conv) have the
    outputs first and the inputs second. A vector (a bias) has no input units: it is one group.
    """
    if parameter.dim() < 2:
        return None
    first = (nn.Embedding, nn.EmbeddingBag, nn.modules.conv._ConvTransposeNd)
    return 0 if isinstance(owner, first) else 1


def _choose(module: nn.Module, where: Where) -> dict[str, tuple[nn.Parameter, list[str]]]:
    """The chosen parameters by first name, each with all its names (several where it is tied)."""
    aliases: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        aliases.setdefault(parameter, []).append(name)
    trainable = {p: names for p, names in aliases.items() if p.requires_grad}
    if callable(where):
        chosen = {p: names for p, names in trainable.items() if where(names[0], p)}
    else:
        patterns = [where] if isinstance(where, str) else list(where)
        _check_patterns(patterns, trainable.values(), "where")
        chosen = {
            p: names
            for p, names in trainable.items()
            if any(_matches(pattern, names) for pattern in patterns)
        }
    if not chosen:
        raise ValueError("where chooses no trainable parameter, so there is nothing to draw")
    for parameter, names in chosen.items():
        if not parameter.is_floating_point():
            raise ValueError(f"{names[0]} is {parameter.dtype}: only real numbers can be drawn")
        if parameter.numel() == 0:
            raise ValueError(f"{names[0]} has no elements; leave it out with where=...")
        owner = module.get_submodule(names[0].rpartition(".")[0])
        if isinstance(owner, (nn.Embedding, nn.EmbeddingBag)) and (
            owner.sparse or owner.max_norm is not None
        ):
            raise ValueError(
                f"{names[0]} belongs to an embedding with sparse=True or max_norm, which a drawn "
                "weight cannot have; build it without, or leave it out with where=..."
            )
    return {names[0]: (p, names) for p, names in chosen.items()}


def _assign(
    names: Mapping[str, Sequence[str]], given: T | Mapping[str, T], role: str
) -> dict[str, T]:
    """The object for each name; the first matching pattern counts."""
    if not isinstance(given, Mapping):
        return dict.fromkeys(names, given)
    _check_patterns(list(given), names.values(), role)
    found: dict[str, T] = {}
    for name, aliases in names.items():
        for pattern, candidate in given.items():
            if _matches(pattern, aliases):
                found[name] = candidate
                break
        else:
            raise ValueError(
                f"no {role} for {name}: none of the patterns {', '.join(map(repr, given))} matches "
                'it; add one (a last "*" takes all that is left) or leave it out with where=...'
            )
    return found


def _axes(
    module: nn.Module, names: Mapping[str, Sequence[str]], overrides: Mapping[str, int | None]
) -> dict[str, int | None]:
    _check_patterns(list(overrides), names.values(), "input_axis")
    axes: dict[str, int | None] = {}
    for name, aliases in names.items():
        path, _, local = name.rpartition(".")
        owner = module.get_submodule(path)
        parameter: Tensor = getattr(owner, local)
        axes[name] = default_input_axis(owner, parameter)
        for pattern, axis in overrides.items():
            if _matches(pattern, aliases):
                if axis is not None and not 0 <= axis < parameter.dim():
                    raise ValueError(
                        f"input_axis {axis} of {name} is not one of its {parameter.dim()} axes"
                    )
                axes[name] = axis
                break
    return axes


def _layout_order(module: nn.Module, names: Mapping[str, Sequence[str]]) -> list[str]:
    """The module's own order, but a recurrent layer's matrices before its biases (cuDNN's)."""

    def position(name: str) -> tuple[int, bool]:
        path, _, local = name.rpartition(".")
        owner = module.get_submodule(path)
        recurrent = isinstance(owner, nn.RNNBase)
        return paths.index(path), recurrent and local.startswith("bias")

    paths = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
    return sorted(names, key=position)


def _empty(
    module: nn.Module, names: Mapping[str, Sequence[str]]
) -> dict[str, list[tuple[nn.Module, str]]]:
    """Take the chosen parameters out of the module; return the places they left."""
    slots: dict[str, list[tuple[nn.Module, str]]] = {}
    for name, aliases in names.items():
        for alias in aliases:
            path, _, local = alias.rpartition(".")
            slots.setdefault(name, []).append((module.get_submodule(path), local))
    for places in slots.values():
        for owner, local in places:
            owner.register_parameter(local, None)
    for owner in {owner for places in slots.values() for owner, _ in places}:
        if isinstance(owner, nn.RNNBase):
            owner._init_flat_weights()
    return slots


def _place(owner: nn.Module, local: str, tensor: Tensor | None) -> None:
    """Set an emptied parameter to a plain tensor. A recurrent layer keeps a second list of its
    weights, which has to follow; done by hand, so that torch neither packs nor moves them."""
    owner._parameters[local] = tensor  # type: ignore[assignment]
    if isinstance(owner, nn.RNNBase):
        owner._flat_weights[owner._flat_weights_names.index(local)] = tensor


def _merged(parts: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {name: tensor for part in parts for name, tensor in part.items()}


def _matches(pattern: str, names: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names)


def _check_patterns(patterns: Sequence[str], names: Any, role: str) -> None:
    known = list(names)
    for pattern in patterns:
        if not any(_matches(pattern, aliases) for aliases in known):
            listed = ", ".join(aliases[0] for aliases in known)
            raise ValueError(
                f"{role} pattern {pattern!r} matches no trainable parameter; they are: {listed}"
            )


def _rank_generator(device: torch.device) -> torch.Generator | None:
    """In a process group, a generator that differs between ranks even where their seeds agree.

    It is seeded from torch's own, so saving torch's state is still enough to draw the same again.
    """
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    if distributed.get_world_size() == 1:
        return None
    seed = int(torch.randint(2**62, ()).item())
    generator = torch.Generator(device)
    return generator.manual_seed((seed + 0x9E3779B97F4A7C15 * distributed.get_rank()) % 2**63)
