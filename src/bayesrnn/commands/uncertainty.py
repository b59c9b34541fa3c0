"""`bayesrnn uncertainty`."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
import typer
from numpy.typing import NDArray

from bayesrnn.bayes import Network
from bayesrnn.commands.captions import uncertainty_of_run
from bayesrnn.commands.options import (
    OF_TEXTS,
    AsJson,
    Data,
    Device,
    DrawSeed,
    OrSearch,
    RunFolders,
    check_draws,
    check_file,
    check_flags,
    draw_counts,
    load_runs,
    names_of,
    note_data,
    note_part,
    note_unknown,
)
from bayesrnn.commands.series import series_uncertainty
from bayesrnn.commands.tables import columns, print_table, show, shown, table_of, watching
from bayesrnn.commands.temperature import (
    Heat,
    Temperature,
    heat_of,
    note_split,
    output_of,
    temperature_of,
)
from bayesrnn.data import (
    CaptionData,
    SeriesData,
    SpeechData,
    StreamLoader,
    TextData,
    Vocabulary,
    encode_file,
    load_text,
)
from bayesrnn.errors import UserError
from bayesrnn.evaluate import (
    TextUncertainty,
    detect,
    entropy_gap,
    evaluate_labelled,
    labelled_uncertainty,
    reversed_text,
    shuffled_text,
    text_uncertainty,
    unigram_entropy,
    write_tokens,
)
from bayesrnn.evaluate.calibration import BINS
from bayesrnn.evaluate.draws import each_draw
from bayesrnn.evaluate.outputs import Normal
from bayesrnn.evaluate.reader import Watch
from bayesrnn.evaluate.uncertainty import WINDOW, check_window, reading_cost
from bayesrnn.saving import vocabulary_of
from bayesrnn.train.captioning import CaptionTask
from bayesrnn.train.loop import choose_device
from bayesrnn.train.run import with_data
from bayesrnn.train.series import SeriesTask
from bayesrnn.train.task import EVALUATION_TOKENS, LabelledTask


def uncertainty(
    runs: RunFolders,
    samples: Annotated[
        str | None,
        typer.Option(
            metavar="N[,N...]",
            help="How many draws; 0 is the posterior mean (default: 10, or 0 where all draws are "
            "the same).",
        ),
    ] = None,
    split: Annotated[
        Literal["train", "valid", "test", "all"] | None,
        typer.Option(
            help="Which part of the data (default: test); of texts, series and reviews also all."
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(help="Read this text file instead.", rich_help_panel=OF_TEXTS),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Write every token's figures, as FILE.csv or FILE.json.", rich_help_panel=OF_TEXTS
        ),
    ] = None,
    gap: Annotated[
        bool,
        typer.Option(
            "--gap",
            help="Also read the text reversed and shuffled, and compare.",
            rich_help_panel=OF_TEXTS,
        ),
    ] = False,
    foreign: Annotated[
        Path | None,
        typer.Option(
            help="With --gap: a text of another kind to compare with.", rich_help_panel=OF_TEXTS
        ),
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"With --gap: tokens in each of the windows to tell apart (default: {WINDOW}).",
            rich_help_panel=OF_TEXTS,
        ),
    ] = None,
    temperature: Temperature = None,
    bins: Annotated[int, typer.Option(min=1, help="Bins of the calibration errors.")] = BINS,
    seed: DrawSeed = 1,
    data: Data = "",
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """What a run's model does not know.

    Of a text: entropy, its aleatoric and epistemic parts, calibration, and whether other texts
    stand out (--gap). Of images and reviews: the mean uncertainties and calibration. Of ratings and
    series: variances, and how many targets fall within the intervals. Of captions: whether unsure
    ones are bad ones, and whether a wrong picture or noise makes the model less sure.

    bayesrnn uncertainty runs/ptb --samples 0,1,10 --gap

    bayesrnn uncertainty runs/ptb --text letter.txt --out letter.csv

    bayesrnn uncertainty runs/ptb-1 runs/ptb-2 runs/ptb-3 --samples 0
    """
    counts = draw_counts("10" if samples is None else samples)
    heat = temperature_of(temperature)
    searched = heat == "search"  # on the run's own text, whatever is read
    for flag, used in (("--split", split is not None), ("--data", data != "" and not searched)):
        if text is not None and used:
            raise typer.BadParameter(f"{flag} is of the run's own text; leave it or --text out")
    for flag, given in (("--foreign", foreign), ("--window", window)):
        if given is not None and not gap:
            raise typer.BadParameter(f"{flag} is of --gap; give that too")
    if out is not None and out.suffix not in (".csv", ".json"):
        raise typer.BadParameter(f"--out must end in .csv or .json, got {str(out)!r}")
    check_file(out)
    place = choose_device(device, "--device")
    model, recipe = load_runs(runs, place)
    run = runs[0]
    if samples is None and not model.draws_differ:
        counts = [0]
    elif max(counts) > 0:
        check_draws(run, model, "--samples, or give --samples 0")
    recipe = recipe if text is not None and not searched else with_data(run, recipe, data)
    settings, part = recipe.data, split or "test"
    if isinstance(settings, SpeechData):
        raise UserError(
            f"{run} is a run on speech; `bayesrnn transcribe RUN FILE --samples 10` says how sure "
            "each label is"
        )
    vocabulary = vocabulary_of(run, recipe)
    check_flags(recipe, {"--split all": part == "all"})
    if not isinstance(settings, TextData):
        flags = {"--text": text is not None, "--out": out is not None, "--gap": gap}
        flags |= {"--temperature": temperature is not None, "--bins": bins != BINS}
        check_flags(recipe, flags)
    if text is None:
        note_part(recipe, data, part)
        note_split(heat, part)
    with watching() as watch:
        if isinstance(settings, TextData):
            assert vocabulary is not None
            corpus = None
            if text is None or searched:
                corpus = load_text(settings, vocabulary)
                note_data(runs, recipe, corpus.digest, data)
            if text is None:
                assert corpus is not None
                own = Named(part, corpus.part(part))
            else:
                own = Named(str(text), encode_file(text, settings, vocabulary))
            note_unknown(settings.path if text is None else own.name, own.ids, vocabulary)
            texts = _texts(own, settings, vocabulary, foreign, gap, seed)
            loaders = {
                which: StreamLoader(ids, 1, EVALUATION_TOKENS, device=place, name=name)
                for which, (name, ids) in texts.items()
            }

            def valid() -> StreamLoader:
                assert corpus is not None
                ids = corpus.part("valid")
                return StreamLoader(ids, 1, EVALUATION_TOKENS, device=place, name="valid")

            heats = {}
            for count in counts:
                generator = torch.Generator(place).manual_seed(seed)
                heats[count] = heat_of(heat, model, valid, count, generator, watch)
            found = _text(model, loaders, heats, bins, seed, gap, window or WINDOW, watch)
            found.figures["unigram_entropy"] = unigram_entropy(texts["text"].ids)
            if out is not None:
                write_tokens(out, found.tokens, vocabulary)
        elif isinstance(settings, CaptionData):
            captions = CaptionTask(recipe, place, vocabulary)
            note_data(runs, recipe, captions.digest, data)
            found = _captions(model, captions, part, counts, seed, watch)
        elif isinstance(settings, SeriesData):
            series = SeriesTask(recipe, place)
            note_data(runs, recipe, series.digest, data)
            by_draws = series_uncertainty(model, series, part, counts, seed, watch)
            figures = {"split": part, "values": by_draws[0]["values"]}
            found = Found("series", "variances in units of a column's spread", figures, by_draws)
        else:
            examples = LabelledTask(recipe, place, vocabulary)
            note_data(runs, recipe, examples.digest, data)
            found = _labelled(run, model, examples, part, counts, bins, seed, heat, watch)
    _show(runs, found, window or WINDOW, as_json)


class Found(NamedTuple):
    """Of one kind of data: some figures, those by the number of draws, and of texts also how other
    texts are told apart, and every token's figures."""

    what: str
    measure: str
    figures: dict[str, Any]
    by_draws: list[dict[str, Any]]
    detection: list[dict[str, Any]] | None = None
    tokens: Sequence[TextUncertainty] = ()


def _show(runs: Sequence[Path], found: Found, window: int, as_json: bool) -> None:
    figures = {**names_of(runs, as_json), **found.figures}
    if as_json:
        more = {} if found.detection is None else {"detection": found.detection}
        show({**figures, "by_draws": found.by_draws, **more}, found.what, True)
        return
    show(figures, found.what, False)
    columns(found.by_draws, f"by the number of draws (0: the mean); {found.measure}")
    if found.detection:
        keys = ("entropy_auroc", "entropy_aupr", "information_auroc", "information_aupr")
        heads = ("other text", "draws", *(key.replace("_", "\n") for key in keys))
        table = table_of(*heads, title=f"other texts, told apart by windows of {window}")
        for case in found.detection:
            table.add_row(case["other"], str(case["samples"]), *(shown(case[k]) for k in keys))
        print_table(table)


class Named(NamedTuple):
    """A text, and what it is called."""

    name: str
    ids: NDArray[np.int32]


def _texts(
    own: Named,
    settings: TextData,
    vocabulary: Vocabulary,
    foreign: Path | None,
    gap: bool,
    seed: int,
) -> dict[str, Named]:
    """The text itself, and those to compare it with."""
    texts = {"text": own}
    if gap:
        texts["reversed"] = Named("reversed", reversed_text(own.ids))
        texts["shuffled"] = Named("shuffled", shuffled_text(own.ids, seed))
    if foreign is not None:
        texts["foreign"] = Named(str(foreign), encode_file(foreign, settings, vocabulary))
    return texts


def _text(
    model: Network,
    loaders: Mapping[str, StreamLoader],
    heats: Mapping[int, Heat],
    bins: int,
    seed: int,
    gap: bool,
    window: int,
    watch: Watch,
) -> Found:
    """`uncertainty` of a text, and of others beside it, by numbers of draws, each at its own
    temperature."""
    if gap:
        for loader in loaders.values():  # said now, not after all the reading
            try:
                check_window(loader.targets, window)
            except UserError as error:
                raise UserError(f"text {loader.name}: {error} by --window") from error
    found: dict[str, dict[int, TextUncertainty]] = {}
    for which, loader in loaders.items():
        groups: dict[float, list[int]] = {}  # draws that share a temperature are read together
        for count, heat in heats.items():
            groups.setdefault(heat.value, []).append(count)
        cost = sum(reading_cost(model, loader.targets, counts) for counts in groups.values())
        advance = watch(f"reading {which}", cost)
        read: dict[int, TextUncertainty] = {}
        for value, counts in groups.items():
            read |= text_uncertainty(model, loader, counts, seed, 1, advance, value)
        found[which] = {count: read[count] for count in heats}
    here = found.pop("text")
    by_draws = [
        {
            **each.summary(),
            **heats[count].figures,
            **_scores(each, bins),
            **(_gap(each, found["reversed"][count]) if gap else {}),
        }
        for count, each in here.items()
    ]
    detections = [
        {"other": which, **asdict(detect(here[count], other[count], window))}
        for which, other in found.items()
        for count in here
    ]
    figures = {"text": loaders["text"].name, "tokens": loaders["text"].targets}
    return Found(
        "text", "entropies in nats a token", figures, by_draws, detections, list(here.values())
    )


def _captions(
    model: Network, task: CaptionTask, split: str, counts: Sequence[int], seed: int, watch: Watch
) -> Found:
    """`uncertainty` of captions."""
    by_draws = [uncertainty_of_run(model, task, split, count, seed, watch) for count in counts]
    figures = {"split": split, "pictures": len(task.pictures(split))}
    return Found("captions", "entropies in nats a word", figures, by_draws)


def _labelled(
    run: Path,
    model: Network,
    task: LabelledTask,
    split: str,
    counts: Sequence[int],
    bins: int,
    seed: int,
    temperature: OrSearch | None,
    watch: Watch,
) -> Found:
    """`uncertainty` of images or reviews: the same draws for every count, as far as they go."""
    numbers = isinstance(task.output, Normal)
    if numbers and bins != BINS:
        raise typer.BadParameter(f"--bins is of classes, and {run} predicts numbers; leave it out")
    examples = task.examples(split)
    targets = task.data.part(split).y
    by_draws: list[dict[str, Any]] = []
    for count in counts:
        generator = torch.Generator(task.device).manual_seed(seed)
        output, heat = output_of(task, model, count, generator, temperature, watch)
        advance = watch(f"reading {split}", examples.targets * len(each_draw(model, count)))
        result, found = evaluate_labelled(model, examples, output, count, generator, advance)
        by_draws.append({**labelled_uncertainty(result, found, targets, bins), **heat.figures})
    figures = {"split": split, "examples": examples.targets}
    measure = "uncertainties are variances" if numbers else "entropies in nats an example"
    return Found(task.unit, measure, figures, by_draws)


def _scores(text: TextUncertainty, bins: int) -> dict[str, Any]:
    """What calibration adds to a text's summary."""
    scores = asdict(text.calibration(bins))
    return {key: scores[key] for key in ("brier", "accuracy", "ece", "adaptive_ece", "aurc")}


def _gap(text: TextUncertainty, backwards: TextUncertainty) -> dict[str, float]:
    """What the reverse adds to a text's summary, which has its entropy as the total."""
    found = entropy_gap(text, backwards)
    return {"total_reversed": found.entropy_reversed, "entropy_gap": found.gap}
