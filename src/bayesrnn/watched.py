"""What a trained run is judged by when its weights are pruned or rounded: the figure that its
training watched, of the run's own data."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from bayesrnn.bayes import Bayesian
from bayesrnn.errors import UserError
from bayesrnn.evaluate import evaluate_labelled, evaluate_speech, evaluate_text
from bayesrnn.evaluate.ctc import Decoder, prefix_search
from bayesrnn.recipe import Recipe
from bayesrnn.saving import vocabulary_of
from bayesrnn.train.run import changed_data
from bayesrnn.train.speech import SpeechTask
from bayesrnn.train.task import LabelledTask, LanguageTask, Task, build_task


def run_task(
    run: Path,
    recipe: Recipe,
    device: torch.device,
    data: str = "",
    warn: Callable[[str], None] | None = None,
) -> Task:
    """The task of a run's recipe, by the run's own words where it reads any; `warn` is told where
    its data have changed since its training (`data` that were given are meant to be others)."""
    task = build_task(recipe, device, vocabulary_of(run, recipe))
    changed = None if data else changed_data(run, recipe, task.digest)
    if changed and warn is not None:
        warn(changed)
    return task


class Figure(NamedTuple):
    """A task's figure of a split: "valid_perplexity", say; the lower, the better."""

    name: str
    of: Callable[[Bayesian], float]


def watched_figure(
    task: Task,
    split: str | None = None,
    streams: int | None = None,
    decode: Decoder = prefix_search,
) -> Figure:
    """The figure a task's training watches, by the posterior mean; of another split where one is
    given. A text is read as so many `streams`. Of speech it is the label error rate, of the
    test set where there is none to validate on, with labels read off by `decode`: `greedy` is fast
    where little is left of a network, of which a search has to look at everything."""
    if isinstance(task, SpeechTask) and streams is None:
        part = split or ("valid" if "valid" in task.speech.splits else "test")
        heard = task.utterances(part)
        return Figure(f"{part}_per", lambda model: evaluate_speech(model, heard, decode).per)
    if split is None and streams is None:
        return Figure(task.watched, lambda model: task.validate(model)[task.watched])
    if isinstance(task, LanguageTask):
        text = task.stream(split or "valid", streams or 1)
        name = f"{split or 'valid'}_perplexity"
        return Figure(name, lambda model: evaluate_text(model, text).perplexity)
    if isinstance(task, LabelledTask) and streams is None:
        assert split is not None
        examples, output = task.examples(split), task.output
        error = task.watched.partition("_")[2]

        def score(model: Bayesian) -> float:
            return evaluate_labelled(model, examples, output)[0].scores[error]

        return Figure(f"{split}_{error}", score)
    key = "streams" if streams is not None else "split"
    raise UserError(f"--{key} is not for this run's data; leave it out")
