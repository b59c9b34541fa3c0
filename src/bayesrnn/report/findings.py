"""What is known of one run for its report: plain numbers, of which figures and page are made."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bayesrnn.bayes import Bayesian
from bayesrnn.data import CaptionData, SeriesData, SpeechData, TextData
from bayesrnn.errors import UserError
from bayesrnn.evaluate import Coverage, Reliability, RiskCoverage
from bayesrnn.evaluate.reader import Watch
from bayesrnn.prune import SAFE_THRESHOLD, Pruned, bits_per_weight, mixed, signal_to_noise
from bayesrnn.recipe import Recipe
from bayesrnn.report.captions import Spoken
from bayesrnn.report.choices import Choices
from bayesrnn.report.forecasts import Ahead
from bayesrnn.report.maps import Matrix, matrices
from bayesrnn.report.passage import Passage
from bayesrnn.report.readings import (
    Subject,
    read_captions,
    read_labelled,
    read_series_run,
    read_speech,
    read_text,
)
from bayesrnn.saving import load, load_recipe
from bayesrnn.storage import Damaged
from bayesrnn.train.metrics import read_metrics
from bayesrnn.train.run import changed_data, with_data
from bayesrnn.train.stopping import best_line

READERS = {
    TextData: read_text,
    CaptionData: read_captions,
    SpeechData: read_speech,
    SeriesData: read_series_run,
}
"""By the kind of data; all others are labelled."""
RATIO_EDGES = np.linspace(-4, 2, 91)
"""Of the histogram of signal to noise, in log10; what lies outside is put into the last ones."""


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
    measured: str
    """What was read, in words."""
    by_draws: list[dict[str, Any]]
    """A line of scores for each number of draws."""
    reliability: Reliability | None
    risk: RiskCoverage | None
    pruning: list[Pruned]
    pruning_score: str
    """What the curve's error is."""
    ratios: NDArray[np.int64] | None
    """How many weights have a signal to noise in each bin of RATIO_EDGES; points have none."""
    noisy: float | None
    """The share of those below Graves' rule of thumb."""
    matrices: list[Matrix]
    bits_per_weight: float | None
    """None where weights have no description length."""
    watched: str
    """The figure by which a best epoch was kept, where one was."""
    notes: list[str]
    changed: str | None
    """That its data are not those of its training, where they are not."""
    unigram: float | None = None
    coverage: Coverage | None = None
    """Where numbers are predicted."""
    passage: Passage | None = None
    spoken: Spoken | None = None
    ahead: Ahead | None = None
    """Where the data are a series."""

    @property
    def is_text(self) -> bool:
        return isinstance(self.recipe.data, TextData)

    @property
    def kept(self) -> dict[str, Any] | None:
        """The figures of the epoch whose model the run has: the last, or the best, which cannot be
        told where lines are lost."""
        train, best = self.recipe.train, None
        if train.keep == "best":
            if lost_epochs(self.epochs):
                return None
            best = best_line(self.epochs, self.watched, train.warm_up)
        return best or (self.epochs[-1] if self.epochs else None)


def examine(run: Path, name: str, choices: Choices, watch: Watch) -> Findings:
    """Measure a run's model on its data."""
    model = load(run).to(choices.device)
    recipe = with_data(run, load_recipe(run), choices.data)
    draws = model.draws_differ
    counts = choices.samples if draws else (0,)
    epochs, steps, notes = _learning(run)
    if model.all_points:
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
    read = READERS.get(type(recipe.data), read_labelled)
    found = read(Subject(run, model, recipe, counts, choices, watch))
    digest = found.pop("digest")
    changed = None if choices.data else changed_data(run, recipe, digest)
    return Findings(
        name,
        run,
        recipe,
        weights=model.weight_count,
        draws=draws,
        epochs=epochs,
        steps=steps,
        split=choices.split,
        notes=notes + found.pop("notes", []) + ([f"Mind: {changed}."] if changed else []),
        changed=changed,
        **_of_weights(model, choices, watch),
        **found,
    )


def _learning(run: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[str]]:
    """The figures of its epochs and of its steps, and why some are not there."""
    lines: list[dict[str, Any]] = []
    notes: list[str] = []
    try:
        lines = read_metrics(run)
    except Damaged as error:
        notes.append(f"Its learning is not shown: {error}.")
    except UserError:
        notes.append(
            "There is no metrics.jsonl in its folder (it was pruned, not trained, say), so its "
            "learning is not shown."
        )
    epochs, steps = ([line for line in lines if line["kind"] == k] for k in ("epoch", "step"))
    if lost_epochs(epochs):
        notes.append(
            f"Of its learning {lost_epochs(epochs)} epochs are not shown: their lines in "
            "metrics.jsonl were lost."
        )
    return epochs, steps, notes


def lost_epochs(epochs: Sequence[Mapping[str, Any]]) -> int:
    """How many epochs before the last of these have no line.

    >>> lost_epochs([{"epoch": 2}, {"epoch": 5}])
    3
    """
    return max((line["epoch"] for line in epochs), default=0) - len(epochs)


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


def _of_weights(model: Bayesian, choices: Choices, watch: Watch) -> dict[str, Any]:
    """Signal to noise, and the weight matrices as pictures."""
    advance = watch("looking at the weights", 1)
    ratios: NDArray[np.int64] | None = None
    noisy: float | None = None
    if not model.all_points:
        drawn = [name for name, (_, scale) in model.moments().items() if scale is not None]
        found_ratios = signal_to_noise(model)
        each = torch.cat([found_ratios[name].flatten() for name in drawn]).cpu()
        places = each.clamp_min(1e-30).log10().clamp(RATIO_EDGES[0], RATIO_EDGES[-1])
        ratios = np.histogram(places.numpy(), RATIO_EDGES)[0]
        noisy = (each < SAFE_THRESHOLD).double().mean().item()
    generator = torch.Generator(choices.device).manual_seed(choices.seed)
    found = matrices(model, generator)
    advance(1)
    bits = bits_per_weight(model, generator)
    return {"ratios": ratios, "noisy": noisy, "matrices": found, "bits_per_weight": bits}
