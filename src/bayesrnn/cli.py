"""The command line: a table of commands; each is a file of commands/."""

import functools
import io
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from bayesrnn import __version__
from bayesrnn.commands.bench import bench
from bayesrnn.commands.caption import caption
from bayesrnn.commands.compress import compress
from bayesrnn.commands.evaluate import evaluate
from bayesrnn.commands.features import features
from bayesrnn.commands.forecast import forecast
from bayesrnn.commands.generate import generate
from bayesrnn.commands.prepare import prepare
from bayesrnn.commands.prune import prune
from bayesrnn.commands.report import report
from bayesrnn.commands.train import train
from bayesrnn.commands.transcribe import transcribe
from bayesrnn.commands.uncertainty import uncertainty
from bayesrnn.errors import Invalid, UserError, WrongData
from bayesrnn.files import expanded
from bayesrnn.starting import INTERRUPTED, open_streams, started

OUT_OF_MEMORY = re.compile(
    "out of memory|can't allocate memory|not enough memory|size calculation overflowed"
)
"""What torch says, of a GPU's memory and of the machine's own."""

app = typer.Typer(
    name="bayesrnn",
    help="Bayesian recurrent networks: train them, and ask what they do not know.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def as_called(command: Callable[..., None]) -> Callable[..., None]:
    """The command as a user calls it. ~ is their home in every path it is given: a shell leaves
    that of --out=~/x, and of anything in quotes, as it is. What is wrong with data is told with the
    flag that gives others, where the command has it."""

    def path_of(value: Any) -> Any:
        if isinstance(value, list):
            return [path_of(one) for one in value]
        return expanded(value) if isinstance(value, Path) else value

    @functools.wraps(command)
    def run(**given: Any) -> None:
        try:
            command(**{name: path_of(value) for name, value in given.items()})
        except WrongData as error:
            if "data" not in given:
                raise
            raise UserError(error.by_flag) from error

    return run


for command in (
    train,
    evaluate,
    uncertainty,
    generate,
    forecast,
    caption,
    features,
    transcribe,
    prepare,
    prune,
    compress,
    report,
    bench,
):
    # where settings are given, a setting that is written as an option is told how it is written
    app.command(context_settings={"ignore_unknown_options": command in (train, prepare)})(
        as_called(command)
    )


def main() -> None:
    """Run a command; a user's mistake becomes one line and an exit code (1 failed, 2 wrong use)."""
    started()
    open_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal may not know every letter
    try:
        app()
    except Invalid as error:
        for key, message in error.problems:
            print(f"error: {key} {message}", file=sys.stderr)
        sys.exit(2)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"error: {where}{error.strerror or error}", file=sys.stderr)
        sys.exit(1)
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not OUT_OF_MEMORY.search(str(error)):
            raise
        print(
            "error: there is not enough memory for this; lower train.streams, train.unroll or the "
            "network's sizes, or read less at a time",
            file=sys.stderr,
        )
        sys.exit(1)
    except SystemExit as end:
        if end.code == INTERRUPTED:
            print("interrupted", file=sys.stderr)
        raise


def _version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass
