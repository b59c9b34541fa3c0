"""`bayesrnn report`."""

import time
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from bayesrnn.commands.options import (
    AsJson,
    Data,
    Device,
    DrawSeed,
    Season,
    check_file,
    draw_counts,
    note,
    recipe_of,
)
from bayesrnn.commands.tables import show, watching
from bayesrnn.data import CaptionData, SeriesData, TextData
from bayesrnn.errors import UserError
from bayesrnn.evaluate.reader import Advance
from bayesrnn.report.captions import check_pictures
from bayesrnn.report.choices import Choices
from bayesrnn.report.figures import require_plotly
from bayesrnn.report.findings import examine, names_of
from bayesrnn.report.page import write_page
from bayesrnn.report.passage import passage_of_file
from bayesrnn.train.loop import choose_device


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Runs' folders, side by side.")],
    out: Annotated[Path, typer.Option(help="The page to write, FILE.html.")],
    samples: Annotated[
        str, typer.Option(metavar="N[,N...]", help="Numbers of draws; 0 is the posterior mean.")
    ] = "0,1,2,5,10",
    split: Annotated[
        Literal["train", "valid", "test"], typer.Option(help="Which part of the data.")
    ] = "test",
    tokens: Annotated[
        int,
        typer.Option(
            min=0, help="Read so many tokens of a text, or words of captions; 0 is all of them."
        ),
    ] = Choices.tokens,
    text: Annotated[
        Path | None, typer.Option(help="Shade this text file, not the run's own text.")
    ] = None,
    pictures: Annotated[
        Path | None, typer.Option(help="The folder of the pictures, to show them with captions.")
    ] = None,
    season: Season = None,
    seed: DrawSeed = 1,
    data: Data = "",
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """One page about runs, to open in a browser.

    Learning, uncertainty, calibration, pruning, and a text, or captions of pictures, shaded word by
    word; of a series, forecasts beside what came. The page needs no network.

    bayesrnn report runs/book --out page.html

    bayesrnn report runs/plain runs/bayes --text letter.txt --out page.html

    bayesrnn report runs/dropout runs/brnn --pictures flickr8k/images --out page.html
    """
    started = time.monotonic()
    if out.suffix not in (".html", ".htm"):
        raise typer.BadParameter(f"--out must end in .html, got {str(out)!r}")
    check_file(out)
    require_plotly()
    choices = Choices(
        tuple(draw_counts(samples)),
        split,
        tokens,
        text,
        pictures,
        data,
        seed,
        season,
        choose_device(device, "--device"),
    )
    _check(runs, text, pictures, season)
    found = []
    with watching() as watch:
        for run, name in zip(runs, names_of(runs), strict=True):

            def begin(what: str, total: int, name: str = name) -> Advance:
                return watch(f"{name}: {what}", total)

            found.append(examine(run, name, choices, begin))
    for changed in (run.changed for run in found if run.changed):
        note(changed)
    size = write_page(found, choices, out)
    figures: dict[str, Any] = {
        "page": str(out),
        "megabytes": round(size / 1e6, 2),
        "seconds": round(time.monotonic() - started, 1),
    }
    if as_json:
        figures["runs"] = [
            {"run": str(run.path), "split": split, "read": run.read, "by_draws": run.by_draws}
            for run in found
        ]
    show(figures, "report", as_json)


def _check(runs: list[Path], text: Path | None, pictures: Path | None, season: int | None) -> None:
    """Say what is wrong with a folder or a text before anything is measured."""
    for run in runs:
        if not (run / "recipe.toml").is_file() or not (run / "model").is_dir():
            why = "there is no such folder" if not run.exists() else "it has no finished model"
            raise UserError(f"{run} is no run to report on: {why}; train one with --out")
    kinds = [recipe_of(run).data for run in runs]
    if text is not None:
        shading = [kind for kind in kinds if isinstance(kind, TextData)]
        if not shading:
            raise typer.BadParameter(f"--text is not for a run on {kinds[0].kind}")
        for kind in shading:
            passage_of_file(text, kind)
    if season is not None and not any(isinstance(kind, SeriesData) for kind in kinds):
        raise typer.BadParameter(f"--season is not for a run on {kinds[0].kind}")
    if pictures is not None:
        if not any(isinstance(kind, CaptionData) for kind in kinds):
            raise typer.BadParameter(f"--pictures is not for a run on {kinds[0].kind}")
        check_pictures(pictures)
