"""Models on disk: `config.json` and `model.safetensors`, by the wrapped module's own names.

A drawn weight is stored as `<name>.loc` and `<name>.scale` (sigma itself), with `<name>.prior_loc`
and `<name>.prior_scale` if its prior is its own; any other tensor as `<name>`. So anyone can read a
model without this package. For exact resumption see train/checkpoint.py.

A pruned weight is stored sparsely, and a rounded one is coded: see packing.py.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bayesrnn.bayes import (
    Bayesian,
    Delta,
    Posterior,
    Prior,
    Uniform,
    bayesianize,
    check_bayesian,
)
from bayesrnn.bayes.bayesianize import assembled, choose, each_of, plain_copy
from bayesrnn.bayes.block import Block
from bayesrnn.data import ImageData, ReviewData, SeriesData, SpeechData, Vocabulary
from bayesrnn.errors import Invalid, UserError
from bayesrnn.files import expanded
from bayesrnn.models import (
    Captioner,
    CaptionerSettings,
    Forecaster,
    LanguageModel,
    LanguageSettings,
    Mlp,
    MlpSettings,
    ReviewModel,
    SeriesSettings,
    SpeechSettings,
    build_speech_network,
)
from bayesrnn.packing import EACH, Misfit, pack, stored_shapes, unpack
from bayesrnn.recipe import (
    POSTERIORS,
    PRIORS,
    Recipe,
    object_from_table,
    object_to_table,
    read_run_recipe,
)
from bayesrnn.storage import Damaged, read_facts, read_folder, write_folder

CONFIG = "config.json"
TENSORS = "model.safetensors"


def save(
    model: Bayesian, folder: str | Path, mean_only: bool = False, step: float | None = None
) -> None:
    """Save a model to a folder.

    A model that is already there is replaced; anything else is refused. Pruned weights are stored
    sparsely.

    - `mean_only`: leave out the scales and the priors. `load` then gives the plain network with
      these weights: a `Delta` posterior with a `Uniform` prior.
    - `step`: round every drawn weight's mean to a multiple of it, and code it; its scales become
      those of its rows. See compress.py for how to choose a step.
    """
    check_bayesian(model)
    path = expanded(folder)
    if path.exists() and not path.is_dir():
        raise UserError(f"{path} is a file, and a model is a folder; choose another name")
    if path.resolve() == Path.cwd():
        raise UserError(f"{path} is the folder you are in, which cannot be replaced; name another")
    if path.exists() and any(path.iterdir()):
        try:
            read_facts(path, "model", CONFIG)
        except Damaged as error:
            raise UserError(
                f"{path} exists and is no bayesrnn model; choose another folder"
            ) from error
    save_own(model, path, mean_only, step)


def save_own(
    model: Bayesian, path: Path, mean_only: bool = False, step: float | None = None
) -> None:
    """`save` to a folder that is known to be a model's, that of a run: even one that is damaged is
    replaced."""
    inside = path.iterdir() if path.is_dir() else ()
    others = [p.name for p in inside if p.name not in (CONFIG, TENSORS)]
    if others:
        raise UserError(f"{path} holds more than a model ({others[0]}); choose another folder")
    _check_kinds(model, mean_only)
    if step is not None and not mean_only and has_own_priors(model):
        raise UserError(
            "cannot round a model whose prior is its start: that would take more room than the "
            "rounded weights; leave out its scales, or give it another prior with br.with_prior"
        )
    model.fit_priors()
    tensors: dict[str, Tensor] = dict(model.module.state_dict())
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            raise UserError(
                f"cannot save: the module's state holds {name}, a {type(value).__name__}, and a "
                "model file holds tensors alone; leave it out of get_extra_state"
            )
    weights: dict[str, Any] = {}
    posteriors: list[Posterior] = [Delta()] if mean_only else []
    for block in model.each_block():
        if not mean_only and not any(known is block.posterior for known in posteriors):
            posteriors.append(block.posterior)
        known = [mean_only or known is block.posterior for known in posteriors]
        for name, named in _tensors_of(block, mean_only).items():
            index = {"posterior": known.index(True), "prior": 0 if mean_only else block.prior}
            axis = next(w.axis for w in block.layout.weights if w.name == name)
            stored, facts = pack(named, step)
            weights[name] = {**index, "axis": axis, **facts}
            for key, value in stored.items():
                if f"{name}.{key}" in tensors:
                    raise UserError(
                        f"cannot save: the module has a tensor named {name}.{key} of its own"
                    )
                tensors[f"{name}.{key}"] = value
    priors = [
        {"settings": object_to_table(hyper.prior), "values": _values(hyper)}
        for hyper in model.each_prior()
    ]
    if mean_only:
        priors = [{"settings": object_to_table(Uniform()), "values": {}}]
    settings = {
        "weights": weights,
        "posteriors": [object_to_table(posterior) for posterior in posteriors],
        "priors": priors,
    }
    write_folder(path, "model", CONFIG, {TENSORS: tensors}, settings)


def has_own_priors(model: Bayesian) -> bool:
    """Whether the prior of some weight is its own, from where it began."""
    return any(block.start for block in model.each_block())


def dense_bytes(model: Bayesian) -> int:
    """Of all means and all other tensors, without a file's head."""
    means = [loc for loc, _ in model.moments().values()]
    return sum(t.numel() * t.element_size() for t in (*means, *model.module.state_dict().values()))


def _check_kinds(model: Bayesian, mean_only: bool) -> None:
    """Refuse posteriors and priors that `load` does not know: a file holds settings, no code."""
    if mean_only:
        return
    for known, used in (
        (POSTERIORS, [block.posterior for block in model.each_block()]),
        (PRIORS, [hyper.prior for hyper in model.each_prior()]),
    ):
        for one in used:
            if known.get(one.kind) is not type(one):
                raise UserError(
                    f"cannot save a {type(one).__name__}: load knows {', '.join(known)} alone, and "
                    "none of your own; save with mean_only=True, or keep model.state_dict()"
                )


def load(folder: str | Path, module: nn.Module | None = None) -> Bayesian:
    """Load the model of a folder, in eval mode.

    `folder` is that of a run, which knows its own module. Otherwise it holds a saved model, which
    is loaded into a copy of `module`.
    """
    path = expanded(folder)
    again = module is None and (path / "checkpoints").is_dir()
    if module is None:
        recipe = load_recipe(path)
        module = build_module(recipe, vocabulary_of(path, recipe))
        if not (path / "model").exists():
            raise UserError(f"{path} holds no finished model yet; train it first")
        path = path / "model"
    elif not path.exists():
        raise UserError(f"no model at {path}: there is no such folder; give one made by br.save")
    module = plain_copy(module)
    try:
        files, facts = read_folder(path, "model", CONFIG)
    except Damaged as error:
        if not again:
            raise
        raise Damaged(
            f"{error}; the command that trained it, run again, writes the model anew"
        ) from error
    try:
        weights: dict[str, Any] = facts["weights"]
        posteriors = [object_from_table(POSTERIORS, table) for table in facts["posteriors"]]
        priors = [object_from_table(PRIORS, entry["settings"]) for entry in facts["priors"]]
        _check_fits(path, module, weights, stored_shapes(files[TENSORS], weights))
        tensors = unpack(files[TENSORS], weights)
        model = assembled(
            module,
            choose(module, lambda name, _: name in weights),
            {name: posteriors[of["posterior"]] for name, of in weights.items()},
            {name: priors[of["prior"]] for name, of in weights.items()},
            {name: of["axis"] for name, of in weights.items()},
        )
        values = [entry["values"] for entry in facts["priors"]]
        _fill(model, tensors, list(zip(priors, values, strict=True)))
    except (KeyError, IndexError, TypeError, Misfit, Invalid) as error:
        raise Damaged(f"{path / CONFIG} is not what this version writes: {error!r}") from error
    return model.eval()


def means_alone(model: Bayesian, recipe: Recipe) -> bool:
    """Whether a run's model was written without the scales that its recipe gives it."""
    points = any(isinstance(posterior, Delta) for posterior in each_of(recipe.posterior))
    return model.all_points and not points


def load_recipe(run: Path) -> Recipe:
    """The recipe a run was trained with."""
    if not run.exists():
        raise UserError(f"no run at {run}: there is no such folder; give one made by train --out")
    if not (run / "recipe.toml").exists():
        raise UserError(
            f"{run} is no run's folder, as train --out makes them; give one of those or, for a "
            "model of your own in Python, pass its network as load(..., module=net)"
        )
    return read_run_recipe(run / "recipe.toml")


def load_vocabulary(run: str | Path) -> Vocabulary:
    """The vocabulary that a run was trained with; `run` is its folder."""
    return Vocabulary.load(expanded(run) / "vocabulary.json")


def vocabulary_of(run: Path, recipe: Recipe) -> Vocabulary | None:
    """The same, where runs of the recipe read words, and so keep one; else None."""
    return None if isinstance(recipe.data, ImageData | SeriesData) else load_vocabulary(run)


def build_module(recipe: Recipe, vocabulary: Vocabulary | None) -> nn.Module:
    """The recipe's plain network; the vocabulary is that of its words, where it reads any."""
    settings = recipe.model
    if isinstance(settings, MlpSettings):
        return Mlp(settings, recipe.dropout)
    if isinstance(settings, SeriesSettings):
        assert isinstance(recipe.data, SeriesData)
        return Forecaster(len(recipe.data.columns), settings, recipe.dropout)
    if vocabulary is None:
        raise ValueError(f"a network for data of kind {recipe.data.kind!r} needs a vocabulary")
    if isinstance(settings, SpeechSettings):
        assert isinstance(recipe.data, SpeechData)
        return build_speech_network(recipe.data.bands, len(vocabulary), settings)
    if isinstance(settings, LanguageSettings):
        return LanguageModel.from_settings(len(vocabulary), settings, recipe.dropout)
    if isinstance(settings, CaptionerSettings):
        return Captioner(len(vocabulary), settings, recipe.dropout)
    assert isinstance(recipe.data, ReviewData)
    return ReviewModel(len(vocabulary), settings, recipe.data.classes, recipe.dropout)


def build_model(recipe: Recipe, module: nn.Module) -> Bayesian:
    """The recipe's network made Bayesian."""
    with blaming_recipe():
        return bayesianize(module, recipe.posterior, recipe.prior, recipe.bayes.where)


@contextmanager
def blaming_recipe() -> Iterator[None]:
    """What is wrong inside is so because of what the recipe names."""
    try:
        yield
    except ValueError as error:
        raise Invalid([("recipe:", str(error))]) from error


def _tensors_of(block: Block, mean_only: bool) -> dict[str, dict[str, Tensor]]:
    """What is stored of each weight of a block: its mean, scale and so on; where some of it was
    pruned, also which are left."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, (loc, scale) in block.moments().items():
        found[name] = {"loc": loc} if mean_only or scale is None else {"loc": loc, "scale": scale}
    for further in () if mean_only else block.posterior.further:
        numbers: Tensor = getattr(block, further).detach()
        for weight, number in zip(block.layout.weights, numbers.unbind(), strict=True):
            found[weight.name][further] = number
    for key, begun in () if mean_only else block.start.items():
        for name, own in block.layout.split(begun).items():
            found[name][f"prior_{key}"] = own
    if block.keep is not None:
        for name, keep in block.layout.split(block.keep).items():
            if not keep.all():
                found[name]["keep"] = keep
    return found


def _values(hyper: nn.Module) -> dict[str, float]:
    return {name: value.item() for name, value in hyper.state_dict().items()}


def _check_fits(
    path: Path,
    module: nn.Module,
    weights: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
) -> None:
    """One line that names what does not fit between the file and the module."""
    here = {name: tuple(t.shape) for name, t in module.state_dict().items()}
    parameters = dict(module.named_parameters())
    tied = {n for n, _ in module.named_parameters(remove_duplicate=False) if n not in parameters}
    beside = {"keep", *EACH[1:]} | {name for cls in POSTERIORS.values() for name in cls.further}
    there = {
        name.removesuffix(".loc") if name.removesuffix(".loc") in weights else name: shape
        for name, shape in shapes.items()
        if not (name.rpartition(".")[2] in beside and name.rpartition(".")[0] in weights)
    }
    wrong = [
        f"{name} is {there[name]} there and {here[name]} here"
        for name in here
        if name in there and there[name] != here[name]
    ]
    wrong += [f"{name} is not in the module" for name in sorted(there) if name not in here]
    wrong += [
        f"{name} is not in the file" for name in here if name not in there and name not in tied
    ]
    wrong += [
        f"{name} is a weight of its own there and tied here" for name in weights if name in tied
    ]
    wrong += [
        f"{name} is drawn there and frozen here"
        for name in weights
        if name in parameters and not parameters[name].requires_grad
    ]
    if wrong:
        shown = "; ".join(wrong[:3]) + (f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else "")
        raise UserError(f"{path} was saved from another network: {shown}")


@torch.no_grad()
def _fill(
    model: Bayesian,
    tensors: Mapping[str, Tensor],
    values: list[tuple[Prior, Mapping[str, float]]],
) -> None:
    own = model.module.state_dict()
    model.module.load_state_dict({name: tensors[name] for name in own}, strict=False)
    for block in model.each_block():
        loc = block.layout.join({w.name: tensors[f"{w.name}.loc"] for w in block.layout.weights})
        scale = None
        if block.posterior.std(block.parameters_by_name) is not None:
            scale = block.layout.join(
                {w.name: tensors[f"{w.name}.scale"] for w in block.layout.weights}
            )
        for name, value in block.posterior.restore(loc, scale).items():
            getattr(block, name).copy_(value)
        for further in block.posterior.further:
            numbers = [tensors[f"{w.name}.{further}"] for w in block.layout.weights]
            getattr(block, further).copy_(torch.stack(numbers))
        masks = {w.name: tensors.get(f"{w.name}.keep") for w in block.layout.weights}
        if any(mask is not None for mask in masks.values()):
            whole = block.layout.split(torch.ones_like(loc, dtype=torch.bool))
            keep = {n: whole[n] if mask is None else mask for n, mask in masks.items()}
            block.prune(block.layout.join(keep))
        for key, begun in block.start.items():
            own = {w.name: tensors[f"{w.name}.prior_{key}"] for w in block.layout.weights}
            begun.copy_(block.layout.join(own))
    for hyper in model.each_prior():
        given = next(numbers for prior, numbers in values if prior is hyper.prior)
        for name, tensor in hyper.state_dict().items():
            tensor.fill_(given[name])
