"""Make any module Bayesian: chosen parameters are drawn from a distribution.

`bayesianize` takes a plain `nn.Module` and returns a `Bayesian` with the same call signature. There
are no Bayesian layers: before the wrapped module runs, its weights are set to a draw (or the mean).
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from types import CellType, FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from bayesrnn.bayes.bayesian import Bayesian, check_bayesian, uncompiled
from bayesrnn.bayes.binding import PARTED, Slot, set_weight
from bayesrnn.bayes.block import Block
from bayesrnn.bayes.hyper import Hyper
from bayesrnn.bayes.kl import check_pair
from bayesrnn.bayes.layout import Weight
from bayesrnn.bayes.posterior import Gaussian, Posterior
from bayesrnn.bayes.prior import Prior, ScaleMixture

Where = Callable[[str, nn.Parameter], bool] | str | Sequence[str]
Chosen = dict[str, tuple[nn.Parameter, list[str]]]
"""Parameters by first name, each with all its names."""
T = TypeVar("T")
M = TypeVar("M", bound=nn.Module)


def bayesianize(
    module: nn.Module,
    posterior: Posterior | Mapping[str, Posterior] | None = None,
    prior: Prior | Mapping[str, Prior] | None = None,
    where: Where = "*",
    input_axis: Mapping[str, int | None] | None = None,
    generator: torch.Generator | None = None,
) -> Bayesian:
    """Make a copy of `module` Bayesian: weights chosen by `where` are drawn from `posterior`.

    The module itself stays as it is. The means start at its present weights, so a trained network
    becomes Bayesian in one line. If the network is compiled, in whole or in part, the copy is not:
    compile the model instead.

    - `posterior`, `prior`: one object each (default: `Gaussian()` and `ScaleMixture()`), or a
      mapping from name pattern to object, in which the first match counts. One object that covers
      several weights stays one object: what it fits, it fits over all of them.
    - `where`: a name pattern such as "rnn.*", several of them, or a predicate on (name, parameter).
      Parameters that it does not choose, and those that do not require gradients, stay ordinary.
    - `input_axis`: overrides, by name pattern, which axis of a weight holds its input units (the
      groups of a grouped prior); see `default_input_axis`.
    - `generator`: what sigmas that start at random come from; torch's own generator by default.

    >>> model = bayesianize(nn.Linear(3, 2), where="weight")
    >>> model(torch.zeros(1, 3)).shape, model.weight_count
    (torch.Size([1, 2]), 6)
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be an nn.Module, got {type(module).__name__}")
    if any(isinstance(part, Bayesian) for part in module.modules()):
        raise TypeError(
            "module is Bayesian already, in whole or in part: its means and scales would be drawn "
            "again; give bayesianize the plain network (model.module is without weights)"
        )
    module = plain_copy(module)
    chosen = choose(module, where)
    names = {name: aliases for name, (_, aliases) in chosen.items()}
    posterior = Gaussian() if posterior is None else posterior
    prior = ScaleMixture() if prior is None else prior
    _check_kind(posterior, Posterior, "posterior", "Gaussian()")
    _check_kind(prior, Prior, "prior", "Normal(0.0, 1.0)")
    posteriors = _assign(names, posterior, "posterior")
    priors = _assign(names, prior, "prior")
    axes = _axes(module, names, input_axis or {})
    return assembled(module, chosen, posteriors, priors, axes, generator)


def assembled(
    module: nn.Module,
    chosen: Chosen,
    posteriors: Mapping[str, Posterior],
    priors: Mapping[str, Prior],
    axes: Mapping[str, int | None],
    generator: torch.Generator | None = None,
) -> Bayesian:
    """The model that takes this module over, given all that is known of each chosen weight."""
    _check_kept_once(module, {p: aliases[0] for p, aliases in chosen.values()})
    names = {name: aliases for name, (_, aliases) in chosen.items()}
    order = _layout_order(module, names)
    objects = _distinct(priors[name] for name in order)
    members: dict[tuple[object, ...], list[str]] = {}
    for name in order:
        parameter = chosen[name][0]
        check_pair(posteriors[name], priors[name])
        key = (
            name.rpartition(".")[0],  # a layer is a block: its gradient need not wait for others
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
        index = [known is priors[group[0]] for known in objects].index(True)
        blocks.append(Block(weights, tensors, posteriors[group[0]], index, generator))
        blocks[-1].begin(priors[group[0]].named("start"))
    like = blocks[0].mean().detach()
    slots = _empty(module, names)
    model = Bayesian(module, blocks, [Hyper(known, like) for known in objects], slots)
    model.training = module.training  # its own alone: a part kept in eval mode stays there
    model.fit_priors()
    return model


def with_prior(model: Bayesian, prior: Prior | Mapping[str, Prior]) -> Bayesian:
    """A copy of `model` with another prior; what it has learnt stays.

    With `Normal("start", "start")`, what the model has learnt is the prior from here on, so that
    training on further data, and on these alone, follows Bayes' rule (Nguyen et al. 2018).

    `prior` is one object or a mapping from name pattern to object, as for `bayesianize`; the
    weights of one layer share one.

    >>> from bayesrnn.bayes.prior import Normal
    >>> later = with_prior(bayesianize(nn.Linear(3, 2)), Normal("start", "start"))
    >>> later.train()(torch.zeros(1, 3)).shape, later.kl().item()
    (torch.Size([1, 2]), 0.0)
    """
    check_bayesian(model)
    _check_kind(prior, Prior, "prior", "Normal(0.0, 1.0)")
    model = copied(uncompiled(model))
    blocks = list(model.each_block())
    names = {weight.name: [weight.name] for block in blocks for weight in block.layout.weights}
    found = _assign(names, prior, "prior")
    objects = _distinct(found.values())
    for block in blocks:
        first, *others = (weight.name for weight in block.layout.weights)
        for name in others:
            if found[name] is not found[first]:
                raise ValueError(f"{first} and {name} are of one layer, and share a prior")
        check_pair(block.posterior, found[first])
        block.prior = [known is found[first] for known in objects].index(True)
        block.begin(found[first].named("start"))
    model.priors = nn.ModuleList(Hyper(known, blocks[0].mean().detach()) for known in objects)
    model.forget_draw()  # its KL was another prior's
    model.fit_priors()
    return model


def plain_copy(module: nn.Module) -> nn.Module:
    """A copy in which nothing is compiled, so that weights have the names that they have in the
    network; refused where it has no weights yet, or holds what torch cannot copy."""
    for name, parameter in module.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise ValueError(
                f"{name} is of a lazy module and has no size yet; run the module once, on any "
                "input of the right size, before bayesianize"
            )
    _check_functions(module)
    module = uncompiled(copied(module))
    for part in list(module.modules()):
        for name, own in list(part._modules.items()):
            if uncompiled(own) is not own:
                setattr(part, name, uncompiled(own))
    for part in module.modules():
        for name, value in vars(part).items():
            compiled = getattr(value, "_torchdynamo_orig_callable", None)
            if isinstance(getattr(compiled, "__self__", None), nn.Module):
                raise ValueError(
                    f"{type(part).__name__} keeps a compiled method in its attribute {name!r}, "
                    "which a copy would run with the old weights: leave it out, and call "
                    "model.compile() after bayesianize; or put @torch.compile above the method"
                )
    return module


def copied(module: M) -> M:
    """A deep copy; what torch does not copy is named."""
    try:
        return copy.deepcopy(module)
    except RuntimeError as error:
        if "deepcopy" not in str(error):
            raise
        raise ValueError(
            f"{_computed(module)} was computed from weights, and torch copies no such tensor: if a "
            "forward left it there, run one under torch.no_grad(); if torch.nn.utils.weight_norm, "
            "spectral_norm or prune made it, use torch.nn.utils.parametrizations, or prune.remove"
        ) from error


def _check_functions(module: nn.Module) -> None:
    """Refuse a network that keeps functions made around its own layers: torch copies none, so that
    the copy would run the layers of the network that it is a copy of."""
    own = set(module.modules())
    for part in module.modules():
        for name, value in vars(part).items():
            for one in _inside(value):
                if isinstance(one, FunctionType) and not own.isdisjoint(_modules_of(one)):
                    raise ValueError(
                        f"{type(part).__name__} keeps {one.__qualname__} in its attribute "
                        f"{name!r}, a function that uses the network itself, which a copy would "
                        "run with the old weights: make it a method of the class"
                    )


def _modules_of(function: FunctionType) -> Iterator[nn.Module]:
    """Those that a function has from where it was made, themselves or by a method."""
    held = [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]
    compiled = hasattr(function, "_torchdynamo_orig_callable")  # `plain_copy` knows those
    for one in () if compiled else (*held, *(function.__defaults__ or ())):
        module = getattr(one, "__self__", one)
        if isinstance(module, nn.Module):
            yield module


def _computed(module: nn.Module) -> str:
    """Where a module keeps a tensor that torch does not copy."""
    for path, part in module.named_modules():
        for name, value in {**part._buffers, **vars(part)}.items():
            if any(isinstance(one, Tensor) and not one.is_leaf for one in _inside(value)):
                return f"{path}.{name}" if path else name
    return "what the module keeps"


def _inside(value: object) -> Iterator[object]:
    """What an attribute holds, itself or in lists and the like."""
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, (list, tuple)):
        for one in value:
            yield from _inside(one)
    else:
        yield value


def default_input_axis(owner: nn.Module, parameter: Tensor) -> int | None:
    """The axis of the input units, whose outgoing weights a grouped prior takes together.

    This is the one rule here that looks at a layer's type: an embedding's words are its rows, and a
    transposed convolution has its inputs first; all others (Linear, recurrent, Conv) have the
    outputs first and the inputs second. A vector (a bias) has no input units (None): it is one
    group.
    """
    if parameter.dim() < 2:
        return None
    first = (nn.Embedding, nn.EmbeddingBag, nn.modules.conv._ConvTransposeNd)
    return 0 if isinstance(owner, first) else 1


def choose(module: nn.Module, where: Where) -> Chosen:
    """The chosen parameters by first name, each with all its names (several where it is tied)."""
    aliases: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        aliases.setdefault(parameter, []).append(name)
    trainable = {p: names for p, names in aliases.items() if p.requires_grad}
    if callable(where):
        chosen = {p: names for p, names in trainable.items() if where(names[0], p)}
    else:
        several = isinstance(where, Iterable) and not isinstance(where, str)
        patterns: list[Any] = list(where) if several else [where]
        if not all(isinstance(pattern, str) for pattern in patterns):
            raise TypeError(
                "where must be a name pattern, several, or a predicate on (name, parameter), got "
                f"{where!r}"
            )
        _check_patterns(patterns, trainable.values(), "where")
        chosen = {
            p: names
            for p, names in trainable.items()
            if any(_matches(pattern, names) for pattern in patterns)
        }
    if not chosen:
        raise ValueError("where chooses no trainable parameter, so there is nothing to draw")
    scripted = [part for part in module.modules() if isinstance(part, torch.jit.ScriptModule)]
    compiled = {parameter for part in scripted for parameter in part.parameters()}
    for parameter, names in chosen.items():
        if parameter in compiled:
            raise TypeError(
                f"{names[0]} is in a module compiled by torch.jit: give bayesianize the one it was "
                "made of, or leave it out with where=..."
            )
        if not parameter.is_floating_point():
            raise ValueError(
                f"{names[0]} is {parameter.dtype}: only real numbers can be drawn; leave it out "
                "with where=..."
            )
        if parameter.numel() == 0:
            raise ValueError(f"{names[0]} has no elements; leave it out with where=...")
        owner = _owner(module, names[0])
        if isinstance(owner, (nn.Embedding, nn.EmbeddingBag)) and (
            owner.sparse or owner.max_norm is not None
        ):
            raise ValueError(
                f"{names[0]} belongs to an embedding with sparse=True or max_norm, which a drawn "
                "weight cannot have; build it without, or leave it out with where=..."
            )
    return {names[0]: (p, names) for p, names in chosen.items()}


def _check_kept_once(module: nn.Module, chosen: Mapping[nn.Parameter, str]) -> None:
    """Refuse a module that keeps a chosen parameter where no draw would reach it: in a list, or
    under another name that is not a parameter's."""
    for part in module.modules():
        for name, value in vars(part).items():
            if name in ("_parameters", "_flat_weights"):  # where draws do
                continue
            for one in _inside(value):
                if isinstance(one, nn.Parameter) and one in chosen:
                    raise ValueError(
                        f"{type(part).__name__} keeps {chosen[one]} in its attribute {name!r} as "
                        "well, where a draw does not reach it: make that an nn.ParameterList, or "
                        f"leave {chosen[one]} out with where=..."
                    )


def _owner(module: nn.Module, name: str) -> nn.Module:
    """The layer that a parameter belongs to, parametrised or not."""
    path = name.rpartition(".")[0]
    owner = module.get_submodule(path)
    if isinstance(owner, nn.utils.parametrize.ParametrizationList):
        return module.get_submodule(path.rpartition(".parametrizations.")[0])
    return owner


def each_of(given: T | Mapping[str, T]) -> list[T]:
    """One object, or those of a mapping from name pattern to object."""
    return list(given.values()) if isinstance(given, Mapping) else [given]


def _distinct(objects: Iterable[T]) -> list[T]:
    """Each of these once; two that are equal are still two."""
    return list({id(one): one for one in objects}.values())


def _check_kind(given: object, kind: type, role: str, example: str) -> None:
    """Posteriors and priors are easily taken for one another."""
    for one in each_of(given):
        if not isinstance(one, kind):
            raise TypeError(
                f"{role} must be a {kind.__name__}, such as br.{example}, or a mapping from name "
                f"pattern to such; got {one!r}"
            )


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
        parameter = module.get_parameter(name)
        axes[name] = default_input_axis(_owner(module, name), parameter)
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


def _empty(module: nn.Module, names: Mapping[str, Sequence[str]]) -> dict[str, list[Slot]]:
    """Take the chosen parameters out of the module; return the places they left."""
    slots: dict[str, list[Slot]] = {}
    for name, aliases in names.items():
        for alias in aliases:
            path, _, local = alias.rpartition(".")
            slots.setdefault(name, []).append((module.get_submodule(path), local))
    for places in slots.values():
        for owner, local in places:
            owner.__class__ = PARTED.get(type(owner), type(owner))
            set_weight(owner, local, None)
    return slots


def _matches(pattern: str, names: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names)


def _check_patterns(patterns: Sequence[str], names: Iterable[Sequence[str]], role: str) -> None:
    known = list(names)
    for pattern in patterns:
        if not any(_matches(pattern, aliases) for aliases in known):
            listed = ", ".join(aliases[0] for aliases in known)
            raise ValueError(
                f"{role} pattern {pattern!r} matches no trainable parameter; "
                + (f"they are: {listed}" if listed else "the module has none")
            )
