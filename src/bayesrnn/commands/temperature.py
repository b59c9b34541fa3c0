"""--temperature, of several commands."""

import math
from dataclasses import asdict
from typing import Annotated, Any

import torch
import typer

from bayesrnn.bayes import Network
from bayesrnn.commands.options import OrSearch, or_search
from bayesrnn.data import ExampleLoader, StreamLoader
from bayesrnn.evaluate import Categorical, search_temperature
from bayesrnn.evaluate.draws import each_draw
from bayesrnn.evaluate.outputs import Likelihood
from bayesrnn.evaluate.reader import Watch
from bayesrnn.train.task import LabelledTask

Temperature = Annotated[
    str | None,
    typer.Option(
        metavar="T|search",
        help="Divide logits by this before the softmax (of texts and classes); search finds what "
        "is best on the validation set, by the same number of draws.",
    ),
]


def temperature_of(given: str | None) -> OrSearch:
    """What --temperature gives; 1 where it is left out."""
    fits = "--temperature is a finite number above 0"
    return 1.0 if given is None else or_search(given, lambda t: 0 < t < math.inf, fits)


def best_temperature(
    model: Network,
    valid: StreamLoader | ExampleLoader,
    count: int,
    generator: torch.Generator | None,
    watch: Watch,
    **dynamic: Any,
) -> tuple[float, dict[str, Any]]:
    """The temperature that is best on what is for validation, and those tried. The generator is
    left as it was."""
    advance = watch("trying temperatures on valid", valid.targets * len(each_draw(model, count)))
    state = None if generator is None else generator.get_state()
    found = search_temperature(model, valid, count, generator, advance, **dynamic)
    if generator is not None and state is not None:
        generator.set_state(state)
    return found.temperature, {"temperatures": [asdict(trial) for trial in found.tried]}


def tempered_output(
    task: LabelledTask,
    model: Network,
    count: int,
    generator: torch.Generator,
    temperature: OrSearch,
    watch: Watch,
) -> tuple[Likelihood, dict[str, Any]]:
    """What a task's output says by this temperature, and those tried if there was a search."""
    if temperature == 1.0:
        return task.output, {}
    if not isinstance(task.output, Categorical):
        raise typer.BadParameter("--temperature is of classes, and this run predicts numbers")
    if temperature != "search":
        return Categorical(temperature), {}
    if "valid" not in task.data.splits:
        raise typer.BadParameter(
            "--temperature search needs a validation set, and this run has none: give a number"
        )
    found, tried = best_temperature(model, task.examples("valid"), count, generator, watch)
    return Categorical(found), tried


def tempered(temperature: float) -> dict[str, float]:
    """A temperature among the figures, where it is one."""
    return {} if temperature == 1.0 else {"temperature": temperature}
