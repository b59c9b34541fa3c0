"""Models on disk: `config.json` and `model.safetensors`, by the wrapped module's own names.

`<name>.loc` and `<name>.scale` (sigma itself) for a drawn weight, `<name>` for any other tensor, so
that anyone can read a model without this package. For exact resumption see train/checkpoint.py.
"""

import glob
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bayesrnn.bayes import Bayesian, Posterior, Prior, bayesianize
from bayesrnn.data import ImageData, ReviewData, Vocabulary
from bayesrnn.errors import Invalid, UserError
from bayesrnn.models import (
    LanguageModel,
    LanguageSettings,
    Mlp,
    MlpSettings,
    ReviewModel,
)
from bayesrnn.recipe import (
    POSTERIORS,
    PRIORS,
    Recipe,
    object_from_table,
    object_to_table,
    read_recipe,
)
from bayesrnn.storage import Damaged, read_facts, read_folder, write_folder

CONFIG = "config.json"
TENSORS = "model.safetensors"


def save(model: Bayesian, folder: str | Path) -> None:
    """Write a model to a folder (a model already there is replaced; anything else is refused)."""
    path = Path(folder)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        try:
            read_facts(path, "model", CONFIG)
        except Damaged as error:
            raise UserError(
                f"{path} exists and is no bayesrnn model; choose another folder"
            ) from error
        others = [p.name for p in path.iterdir() if p.name not in (CONFIG, TENSORS)]
        if others:
            raise UserError(f"{path} holds more than a model ({others[0]}); choose another folder")
    model.fit_priors()
    tensors: dict[str, Tensor] = dict(model.module.state_dict())
    weights: dict[str, Any] = {}
    posteriors: list[Posterior] = []
    for block in model.each_block():
        if not any(known is block.posterior for known in posteriors):
            posteriors.append(block.posterior)
        index = next(i for i, known in enumerate(posteriors) if known is block.posterior)
        for weight in block.layout.weights:
            weights[weight.name] = {"posterior": index, "prior": block.prior, "axis": weight.axis}
    for name, (loc, scale) in model.moments().items():
        for key, value in ((f"{name}.loc", loc), (f"{name}.scale", scale)):
            if key in tensors:
                raise UserError(f"cannot save: the module has a tensor named {key} of its own")
            if value is not None:
                tensors[key] = value
    for block in model.each_block():
        for further in block.posterior.further:
            views = block.layout.split(getattr(block, further).detach())
            tensors |= {f"{name}.{further}": view for name, view in views.items()}
    priors = [
        {"settings": object_to_table(hyper.prior), "values": _values(hyper)}
        for hyper in model.each_prior()
    ]
    facts = {
        "weights": weights,
        "posteriors": [object_to_table(posterior) for posterior in posteriors],
        "priors": priors,
    }
    write_folder(path, "model", CONFIG, {TENSORS: tensors}, facts)


def load(folder: str | Path, module: nn.Module | None = None) -> Bayesian:
    """The model in a folder, in eval mode.

    `folder` holds a saved model, to be filled into a copy of `module`, or is a run's, which knows
    its own module.
    """
    path = Path(folder)
    if not path.exists():
        raise UserError(f"no model at {path}: there is no such folder")
    if module is None:
        if not (path / "recipe.toml").exists():
            raise UserError(
                f"{path} is no run's folder, which train --out makes; to load a model of your own "
                "in Python, pass its network as load(..., module=net)"
            )
        recipe = read_recipe(path / "recipe.toml")
        module = build_module(recipe, load_vocabulary(path) if has_vocabulary(recipe) else None)
        if not (path / "model").exists():
            raise UserError(f"{path} holds no finished model yet; train it first")
        path = path / "model"
    files, facts = read_folder(path, "model", CONFIG)
    try:
        tensors = files[TENSORS]
        weights: dict[str, Any] = facts["weights"]
        posteriors = [object_from_table(POSTERIORS, table) for table in facts["posteriors"]]
        priors = [object_from_table(PRIORS, entry["settings"]) for entry in facts["priors"]]
        _check_fits(path, module, weights, tensors)
        model = _rebuild(module, weights, posteriors, priors)
        values = [entry["values"] for entry in facts["priors"]]
        _fill(model, tensors, list(zip(priors, values, strict=True)))
    except (KeyError, IndexError, TypeError, Invalid) as error:
        raise Damaged(f"{path / CONFIG} is not what this version writes: {error!r}") from error
    return model.eval()


def has_vocabulary(recipe: Recipe) -> bool:
    """Whether its runs read words, so that they keep a vocabulary."""
    return not isinstance(recipe.data, ImageData)


def load_vocabulary(run: Path) -> Vocabulary:
    """The vocabulary a run was trained with."""
    return Vocabulary.load(run / "vocabulary.json")


def build_module(recipe: Recipe, vocabulary: Vocabulary | None) -> nn.Module:
    """The recipe's plain network; the vocabulary is that of its words, where it reads any."""
    settings = recipe.model
    if isinstance(settings, MlpSettings):
        return Mlp(settings, recipe.dropout)
    if vocabulary is None:
        raise ValueError(f"a network for data of kind {recipe.data.kind!r} needs a vocabulary")
    if isinstance(settings, LanguageSettings):
        return LanguageModel.from_settings(len(vocabulary), settings, recipe.dropout)
    assert isinstance(recipe.data, ReviewData)
    return ReviewModel(len(vocabulary), settings, recipe.data.classes, recipe.dropout)


def build_model(recipe: Recipe, module: nn.Module) -> Bayesian:
    """The recipe's network made Bayesian."""
    try:
        return bayesianize(module, recipe.posterior, recipe.prior, recipe.bayes.where)
    except ValueError as error:
        raise Invalid([("recipe:", str(error))]) from error


def _values(hyper: nn.Module) -> dict[str, float]:
    return {name: value.item() for name, value in hyper.state_dict().items()}


def _check_fits(
    path: Path, module: nn.Module, weights: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    """One line that names what does not fit between the file and the module."""
    here = {name: tuple(t.shape) for name, t in module.state_dict().items()}
    parameters = dict(module.named_parameters())
    tied = {n for n, _ in module.named_parameters(remove_duplicate=False) if n not in parameters}
    beside = {further for cls in POSTERIORS.values() for further in ("scale", *cls.further)}
    there = {
        name.removesuffix(".loc") if name.removesuffix(".loc") in weights else name: tuple(t.shape)
        for name, t in tensors.items()
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


def _rebuild(
    module: nn.Module,
    weights: Mapping[str, Any],
    posteriors: list[Posterior],
    priors: list[Prior],
) -> Bayesian:
    pattern = {name: glob.escape(name) for name in weights}
    return bayesianize(
        module,
        {pattern[name]: posteriors[facts["posterior"]] for name, facts in weights.items()},
        {pattern[name]: priors[facts["prior"]] for name, facts in weights.items()},
        where=list(pattern.values()),
        input_axis={pattern[name]: facts["axis"] for name, facts in weights.items()},
    )


@torch.no_grad()
def _fill(
    model: Bayesian,
    tensors: Mapping[str, Tensor],
    values: list[tuple[Prior, Mapping[str, float]]],
) -> None:
    own = model.module.state_dict()
    for name, tensor in own.items():
        tensor.copy_(tensors[name])
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
            named = {w.name: tensors[f"{w.name}.{further}"] for w in block.layout.weights}
            getattr(block, further).copy_(block.layout.join(named))
    for hyper in model.each_prior():
        given = next(numbers for prior, numbers in values if prior is hyper.prior)
        for name, tensor in hyper.state_dict().items():
            tensor.fill_(given[name])
