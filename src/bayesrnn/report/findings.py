"""What is measured of one run for its report: plain numbers, of which figures and page are made."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bayesrnn.bayes import Bayesian
from bayesrnn.data import StreamLoader, TextData, load_text
from bayesrnn.errors import UserError, require
from bayesrnn.evaluate import (
    Reliability,
    RiskCoverage,
    TextUncertainty,
    entropy_gap,
    evaluate_labelled,
    evaluate_text,
    reliability,
    reversed_text,
    risk_coverage,
    text_uncertainty,
    unigram_entropy,
)
from bayesrnn.evaluate.calibration import calibration
from bayesrnn.evaluate.outputs import Categorical
from bayesrnn.evaluate.uncertainty import reading_cost
from bayesrnn.models.dropout import Mask
from bayesrnn.prune import SAFE_THRESHOLD, Pruned, mixed, pruning_curve, signal_to_noise
from bayesrnn.recipe import Recipe, read_recipe
from bayesrnn.report.maps import Matrix, matrices
from bayesrnn.report.passage import TOP, Passage, passage_of_file, passage_of_split
from bayesrnn.saving import has_vocabulary, load, load_vocabulary
from bayesrnn.train.run import read_metrics
from bayesrnn.train.task import EVALUATION_TOKENS, LabelledTask

FRACTIONS = (0.0, 0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98)
"""Pruned for the curve."""
RATIO_EDGES = np.linspace(-4, 2, 91)
"""Of the histogram of signal to noise, in log10; what lies outside is put into the last ones."""

Watch = Callable[[str, int], Callable[[int], None]]
"""Told what is done and how much of it there is, gives what to tell of every piece."""


@dataclass(frozen=True)
class Choices:
    """What a user may choose. `tokens` is how much of a text is read (0: all of it), `samples` are
    numbers of draws (0: the mean), and `text` is the file to shade instead of the run's own."""

    samples: tuple[int, ...] = (0, 1, 2, 5, 10)
    split: str = "test"
    tokens: int = 5000
    text: Path | None = None
    data: str = ""
    seed: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __post_init__(self) -> None:
        require(
            (
                len(self.samples) > 0 and min(self.samples) >= 0,
                "samples",
                f"must be numbers of draws, 0 or above, got {list(self.samples)}",
            ),
            (self.tokens >= 0, "tokens", f"must be 0 (all) or above, got {self.tokens}"),
        )


@dataclass(frozen=True, eq=False)
class Findings:
    """All that is known of a run. What does not apply to it is None or empty, and `notes` say
    why."""

    name: str
    path: Path
    recipe: Recipe
    unit: str
    """What is predicted, in the plural."""
    weights: int
    """How many are drawn."""
    draws: bool
    """Whether two draws of the network differ: a posterior with a scale, or dropout."""
    epochs: list[dict[str, Any]]
    steps: list[dict[str, Any]]
    split: str
    read: int
    """Predictions made of the split."""
    by_draws: list[dict[str, Any]]
    """A line of scores for each number of draws."""
    unigram: float | None
    reliability: Reliability | None
    risk: RiskCoverage | None
    passage: Passage | None
    pruning: list[Pruned]
    pruning_score: str
    """What the curve's error is."""
    ratios: NDArray[np.int64] | None
    """How many weights have a signal to noise in each bin of RATIO_EDGES."""
    noisy: float | None
    """The share of weights below Graves' rule of thumb."""
    matrices: list[Matrix]
    notes: list[str]

    @property
    def is_text(self) -> bool:
        return isinstance(self.recipe.data, TextData)


def examine(run: Path, name: str, choices: Choices, watch: Watch) -> Findings:
    """Measure a run's model on its data."""
    model = load(run).to(choices.device)
    recipe = read_recipe(run / "recipe.toml")
    if choices.data:
        recipe = replace(recipe, data=replace(recipe.data, path=choices.data))
    elif not Path(recipe.data.path).expanduser().exists():
        raise UserError(
            f"the data of {run} are no longer at {recipe.data.path}; say where with --data"
        )
    draws = _differ(model)
    counts = choices.samples if draws else (0,)
    notes: list[str] = []
    try:
        lines = read_metrics(run)
    except UserError:
        lines = []
        notes.append(
            "There is no metrics.jsonl in its folder (it was pruned, not trained, say), so its "
            "learning is not shown."
        )
    if not _spread(model):
        same = "only its dropout differs between draws" if draws else "all draws are the same"
        notes.append(
            f"Its weights are points: {same}{'' if draws else ', nothing is epistemic'}, and no "
            "weight has a signal to noise or a cost in bits. It is pruned by the size of its "
            "weights."
        )
    if mixed(model):
        notes.append(
            "Some of its weights are points, which have no signal to noise and no bits; each "
            "tensor is pruned by itself."
        )
    read = _read_text if isinstance(recipe.data, TextData) else _read_labelled
    found = read(run, model, recipe, counts, choices, watch)
    return Findings(
        name,
        run,
        recipe,
        weights=model.weight_count,
        draws=draws,
        epochs=[line for line in lines if line["kind"] == "epoch"],
        steps=[line for line in lines if line["kind"] == "step"],
        split=choices.split,
        notes=notes + found.pop("notes", []),
        **_of_weights(model, choices, watch),
        **found,
    )


def names_of(runs: Sequence[Path]) -> list[str]:
    """A short name for each run: its folder's, with as much of the path as tells them apart.

    >>> names_of([Path("runs/plain"), Path("a/brnn"), Path("b/brnn")])
    ['plain', 'a/brnn', 'b/brnn']
    """
    paths = [run.resolve() for run in runs]
    names = []
    for path in paths:
        length = 1
        same = [other for other in paths if other != path]
        while any(other.parts[-length:] == path.parts[-length:] for other in same):
            length += 1
        names.append("/".join(path.parts[-length:]))
    return names


def _spread(model: Bayesian) -> bool:
    """Whether some weights have a standard deviation."""
    return any(scale is not None for _, scale in model.moments().values())


def _differ(model: Bayesian) -> bool:
    """Whether draws of the network do."""
    masks = (part for part in model.modules() if isinstance(part, Mask))
    return _spread(model) or any(mask.rate > 0 and mask.at_test for mask in masks)


def _read_text(
    run: Path,
    model: Bayesian,
    recipe: Recipe,
    counts: Sequence[int],
    choices: Choices,
    watch: Watch,
) -> dict[str, Any]:
    """A text and its reverse, the passage, and the pruning curve on the validation text."""
    settings, vocabulary = recipe.data, load_vocabulary(run)
    assert isinstance(settings, TextData)
    corpus = load_text(settings, vocabulary)

    def stream(ids: NDArray[np.int32], name: str) -> StreamLoader:
        return StreamLoader(ids, 1, EVALUATION_TOKENS, device=choices.device, name=name)

    def read(ids: NDArray[np.int32], what: str, top: int = 1) -> dict[int, TextUncertainty]:
        loader = stream(ids, what)
        advance = watch(f"reading {what}", reading_cost(loader.targets, counts))
        return text_uncertainty(model, loader, counts, choices.seed, top, advance)

    ids = _first(corpus.ids[choices.split], choices.tokens)
    text = read(ids, f"the {choices.split} text", TOP)
    backwards = read(reversed_text(ids), "it reversed")
    most = text[max(counts)]
    passage = passage_of_split(most, ids, settings, vocabulary, choices.split)
    if choices.text is not None:
        tokens = passage_of_file(choices.text, settings)
        own = read(np.array(vocabulary.encode(tokens), np.int32), str(choices.text), TOP)
        passage = Passage(str(choices.text), tokens, own[max(counts)], settings, vocabulary)
    valid = stream(_first(corpus.ids["valid"], choices.tokens), "valid")
    advance = watch("pruning", valid.targets * len(FRACTIONS))
    return {
        "unit": "words" if settings.tokens != "characters" else "characters",
        "read": len(most.targets),
        "by_draws": [
            {
                **each.summary(),
                **asdict(each.calibration()),
                "entropy_reversed": backwards[count].total.mean().item(),
                "entropy_gap": entropy_gap(each, backwards[count]).gap,
            }
            for count, each in text.items()
        ],
        "unigram": unigram_entropy(ids),
        "reliability": reliability(most.max_probability, most.correct),
        "risk": risk_coverage(-most.max_probability, ~most.correct),
        "passage": passage,
        "pruning": pruning_curve(
            model,
            lambda m: evaluate_text(m, valid, advance=advance).perplexity,
            FRACTIONS,
            mixed(model),
        ),
        "pruning_score": "validation perplexity",
    }


def _read_labelled(
    run: Path,
    model: Bayesian,
    recipe: Recipe,
    counts: Sequence[int],
    choices: Choices,
    watch: Watch,
) -> dict[str, Any]:
    """Images or reviews: calibration where classes are predicted, and the pruning curve."""
    vocabulary = load_vocabulary(run) if has_vocabulary(recipe) else None
    task = LabelledTask(recipe, choices.device, vocabulary)
    examples = task.examples(choices.split)
    classes = isinstance(task.output, Categorical)
    targets = task.data.splits[choices.split].y.cpu()
    by_draws: list[dict[str, Any]] = []
    for count in sorted(counts):
        advance = watch(f"reading the {choices.split} set", examples.targets * max(count, 1))
        generator = torch.Generator(choices.device).manual_seed(choices.seed)
        result, mean = evaluate_labelled(model, examples, task.output, count, generator, advance)
        parts = {part: getattr(mean, part).double().mean().item() for part in mean._fields[1:]}
        scores = asdict(calibration(mean.mean.cpu(), targets)) if classes else {}
        by_draws.append({"samples": count, **result.scores, **parts, **scores})
    diagram = risk = None
    if classes:
        confidence, predicted = mean.mean.cpu().max(dim=1)
        diagram = reliability(confidence, predicted == targets)
        risk = risk_coverage(-confidence, predicted != targets)
    watched = task.watched.partition("_")[0]
    score = task.watched.removeprefix(f"{watched}_")
    held_out = task.examples(watched)
    advance = watch("pruning", held_out.targets * len(FRACTIONS))

    def error(pruned: Bayesian) -> float:
        scored, _ = evaluate_labelled(pruned, held_out, task.output, advance=advance)
        return scored.scores[score]

    notes = [f"It is trained on {task.unit}: there is no text to shade, and none to reverse."]
    if not classes:
        notes.append("It predicts numbers, so it has no classes to be calibrated on.")
    return {
        "unit": task.unit,
        "read": examples.targets,
        "by_draws": by_draws,
        "unigram": None,
        "reliability": diagram,
        "risk": risk,
        "passage": None,
        "pruning": pruning_curve(model, error, FRACTIONS, mixed(model)),
        "pruning_score": f"{watched} {score}".replace("_", " "),
        "notes": notes,
    }


def _of_weights(model: Bayesian, choices: Choices, watch: Watch) -> dict[str, Any]:
    """Signal to noise, and the weight matrices as pictures."""
    advance = watch("looking at the weights", 1)
    ratios: NDArray[np.int64] | None = None
    noisy: float | None = None
    if _spread(model):
        each = torch.cat([ratio.flatten() for ratio in signal_to_noise(model).values()]).cpu()
        places = each.clamp_min(1e-30).log10().clamp(RATIO_EDGES[0], RATIO_EDGES[-1])
        ratios = np.histogram(places.numpy(), RATIO_EDGES)[0]
        noisy = (each < SAFE_THRESHOLD).double().mean().item()
    generator = torch.Generator(choices.device).manual_seed(choices.seed)
    found = matrices(model, generator)
    advance(1)
    return {"ratios": ratios, "noisy": noisy, "matrices": found}


def _first(ids: NDArray[np.int32], tokens: int) -> NDArray[np.int32]:
    """As many ids as `tokens` predictions need; 0: all."""
    return np.array(ids[: tokens + 1] if tokens else ids)
