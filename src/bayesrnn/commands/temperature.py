"""--temperature, of several commands."""

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any, NamedTuple

import torch
import typer

from bayesrnn.bayes import Network
from bayesrnn.commands.options import OrSearch, note, or_search
from bayesrnn.data import ExampleLoader, StreamLoader
from bayesrnn.evaluate import Categorical, search_temperature
from bayesrnn.evaluate.draws import each_draw
from bayesrnn.evaluate.outputs import Likelihood
from bayesrnn.evaluate.perplexity import COLDEST, HOTTEST
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


def temperature_of(given: str | None) -> OrSearch | None:
    """What --temperature gives; None where it is left out."""
    fits = f"--temperature is a number from {COLDEST:g} to {HOTTEST:g}"
    return None if given is None else or_search(given, lambda t: COLDEST <= t <= HOTTEST, fits)


def note_split(temperature: OrSearch | None, split: str) -> None:
    """Say where a search would look at what is scored."""
    if temperature == "search" and split in ("valid", "all"):
        note("the temperature is chosen on the validation set, which is part of what is scored")


class Heat(NamedTuple):
    """A temperature, and what a command says of it: nothing where none was asked for."""

    value: float
    figures: dict[str, float]
    tried: dict[str, Any]


def heat_of(
    temperature: OrSearch | None,
    model: Network,
    valid: Callable[[], StreamLoader | ExampleLoader],
    count: int,
    generator: torch.Generator | None,
    watch: Watch,
    **dynamic: Any,
) -> Heat:
    """The temperature that was given, or the best one on what is for validation. The generator is
    left as it was."""
    if temperature is None:
        return Heat(1.0, {}, {})
    if temperature != "search":
        return Heat(temperature, {"temperature": temperature}, {})
    loader = valid()
    advance = watch("trying temperatures on valid", loader.targets * len(each_draw(model, count)))
    state = None if generator is None else generator.get_state()
    found = search_temperature(model, loader, count, generator, advance, **dynamic)
    if generator is not None and state is not None:
        generator.set_state(state)
    if found.at_end:
        note(
            f"the best temperature, {found.temperature:g}, is the last that was tried; one beyond "
            "it may be better"
        )
    tried = {"temperatures": [asdict(trial) for trial in found.tried]}
    return Heat(found.temperature, {"temperature": found.temperature}, tried)


def output_of(
    task: LabelledTask,
    model: Network,
    count: int,
    generator: torch.Generator,
    temperature: OrSearch | None,
    watch: Watch,
) -> tuple[Likelihood, Heat]:
    """What a task's output says by this temperature."""
    if temperature is not None and not isinstance(task.output, Categorical):
        raise typer.BadParameter("--temperature is of classes, and this run predicts numbers")
    if temperature == "search" and "valid" not in task.data.splits:
        raise typer.BadParameter(
            "--temperature search needs a validation set, and this run has none: give a number"
        )
    valid = partial(task.examples, "valid")
    heat = heat_of(temperature, model, valid, count, generator, watch)
    return (task.output if temperature is None else Categorical(heat.value)), heat
