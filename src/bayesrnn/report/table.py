"""The tables of the page: settings and final scores, and all scores by the number of draws."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from bayesrnn.bayes.bayesianize import each_of
from bayesrnn.models import SpeechSettings
from bayesrnn.report import figures
from bayesrnn.report.findings import Findings
from bayesrnn.report.readings import in_words
from bayesrnn.train.stopping import best_line

Cell = tuple[float | str | None, str]
"""A value and how it is written."""


def head_rows(runs: Sequence[Findings]) -> list[tuple[str, str, list[Cell]]]:
    """Key, title and a cell a run; rows in which no run has anything are left out."""
    held_out, unit = _shared(runs)
    rows: list[tuple[str, str, Callable[[Findings], float | str | None], str]] = [
        ("data", "data", lambda run: run.recipe.data.kind, ""),
        ("network", "network", _network, ""),
        ("posterior", "posterior", lambda run: _kinds(run.recipe.posterior), ""),
        ("prior", "prior", lambda run: _kinds(run.recipe.prior), ""),
        ("weights", "weights", lambda run: run.weights, "{:,}"),
        ("epochs", "epochs", lambda run: _last(run, "epoch"), "{:,}"),
        ("seconds", "training time", lambda run: _last(run, "seconds"), "time"),
        ("speed", f"{unit} a second (median)", _speed, "{:,.0f}"),
        ("error_bits", "error bits, epoch kept", _kept("error_bits"), "{:,.0f}"),
        ("complexity_bits", "complexity bits, epoch kept", _kept("complexity_bits"), "{:,.0f}"),
        ("ratio", "both over a uniform code, epoch kept", _kept("ratio"), "{:,.3f}"),
        ("bits_per_weight", "bits a weight", lambda run: run.bits_per_weight, "{:,.3f}"),
        ("best", f"{held_out}, best epoch", _best, "{:,.4g}"),
        ("last", f"{held_out}, last epoch", lambda run: _watched(run, -1), "{:,.4g}"),
    ]
    split = runs[0].split
    most = max(line["samples"] for run in runs for line in run.by_draws)
    for key, title, form in (
        ("perplexity", f"{split} perplexity", "{:,.2f}"),
        ("error_percent", f"{split} error", "{:.2f} %"),
        ("rmse", f"{split} root mean square error", "{:.4f}"),
        ("per", f"{split} label error rate", "{:.2f} %"),
    ):
        rows.append((f"{key}_mean", f"{title}, by the mean", _score(key, 0), form))
        if most:
            rows.append((f"{key}_draws", f"{title}, by {most} draws", _score(key, most), form))
    rows += [
        ("persistence", "that of the row before, once more", _score("persistence"), "{:.4f}"),
        ("bleu4", f"{split} BLEU-4 of its captions", _caption_score("bleu4"), "{:.3f}"),
        ("cider", f"{split} CIDEr of its captions", _caption_score("cider"), "{:.3f}"),
        ("ece", "calibration error", _score("ece"), "{:.4f}"),
        ("aurc", "risk-coverage area", _score("aurc"), "{:.4f}"),
        ("crps", f"{split} CRPS", _score("crps"), "{:.4f}"),
        ("coverage_90", "targets in 90 % intervals", _score("coverage_90"), "{:.1%}"),
        ("width_90", "mean width of these", _score("width_90"), "{:.4f}"),
        (
            "calibration_error",
            "calibration error of intervals",
            _score("calibration_error"),
            "{:.4f}",
        ),
        ("total", "uncertainty, total", _score("total"), "{:.4f}"),
        ("epistemic", "of it epistemic", _score("epistemic"), "{:.4f}"),
        ("entropy_gap", "entropy gap", _score("entropy_gap"), "{:.4f}"),
        ("noisy", "weights below signal to noise 0.83", lambda run: run.noisy, "{:.1%}"),
    ]
    found = []
    for key, title, value, form in rows:
        cells = [(v := value(run), written(v, form)) for run in runs]
        if any(v is not None for v, _ in cells):
            found.append((key, title, cells))
    return found


def _shared(runs: Sequence[Findings]) -> tuple[str, str]:
    """What is held out, and what is counted a second; in general words where runs differ."""
    keys = {figures.watched_key(run) for run in runs} - {None}
    units = {run.unit for run in runs}
    return (
        in_words(keys.pop() or "") if len(keys) == 1 else "held out",
        units.pop() if len(units) == 1 else "targets",
    )


def written(value: float | str | None, form: str) -> str:
    """A figure for people.

    >>> written(3725.0, "time"), written(None, "{:.1f}"), written(-0.01, "{:.1f}")
    ('1 h 2 min', '–', '0.0')
    """
    if value is None:
        return "–"
    if isinstance(value, str):
        return value
    if form == "time":
        minutes, seconds = divmod(round(value), 60)
        if minutes >= 60:
            return f"{minutes // 60} h {minutes % 60} min"
        return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
    text = form.format(value)
    return text.removeprefix("-") if not text.strip("-0.,% ") else text  # not -0.0000


def _network(run: Findings) -> str:
    settings = run.recipe.model
    if isinstance(settings, SpeechSettings):
        cells = " + ".join(map(str, settings.cells))
        grid, line = f"2-D LSTM {cells}", f"BLSTM {settings.layers} × {settings.hidden}"
        return grid if settings.network == "mdlstm" else line
    cell = getattr(settings, "cell", "mlp").upper()
    return f"{cell} {settings.layers} × {settings.hidden}"


def _kinds(given: Any) -> str:
    """The kind of a posterior or a prior; several, where a recipe has one a weight."""
    return ", ".join(sorted({one.kind.replace("_", " ") for one in each_of(given)}))


def _last(run: Findings, key: str) -> float | None:
    return run.epochs[-1].get(key) if run.epochs else None


def _kept(key: str) -> Callable[[Findings], float | None]:
    """Of the epoch whose model the run has."""
    return lambda run: None if run.kept is None else run.kept.get(key)


def _speed(run: Findings) -> float | None:
    pace = [value for _, value in figures.speeds(run)]
    return statistics.median(pace) if pace else None


def _watched(run: Findings, epoch: int) -> float | None:
    key = figures.watched_key(run)
    return None if key is None else run.epochs[epoch][key]


def _best(run: Findings) -> float | None:
    key = figures.watched_key(run)
    if key is None:
        return None
    best = best_line(run.epochs, key, run.recipe.train.warm_up)
    return None if best is None else best[key]


def _score(key: str, samples: int | None = None) -> Callable[[Findings], float | None]:
    """Of the line with so many draws; None: with the most."""

    def find(run: Findings) -> float | None:
        lines = [line for line in run.by_draws if samples in (None, line["samples"])]
        return lines[-1].get(key) if lines else None

    return find


def _caption_score(key: str) -> Callable[[Findings], float | None]:
    return lambda run: run.spoken.scores.get(key) if run.spoken else None


DRAW_COLUMNS = {
    "nll": "NLL",
    "perplexity": "perplexity",
    "error_percent": "error %",
    "rmse": "RMSE",
    "per": "label error %",
    "total": "total",
    "aleatoric": "aleatoric",
    "epistemic": "epistemic",
    "entropy_gap": "gap",
    "brier": "Brier",
    "accuracy": "accuracy",
    "ece": "ECE",
    "aurc": "AURC",
    "crps": "CRPS",
    "coverage_50": "in 50 %",
    "coverage_90": "in 90 %",
    "width_90": "width",
    "calibration_error": "error",
}


def draw_table(run: Findings) -> dict[str, Any]:
    keys = [key for key in DRAW_COLUMNS if key in run.by_draws[0]]
    lines = [
        [
            figures.draws_named(line["samples"]),
            *(written(line[key], "{:,.4f}" if key != "perplexity" else "{:,.2f}") for key in keys),
        ]
        for line in run.by_draws
    ]
    return {"columns": [DRAW_COLUMNS[key] for key in keys], "lines": lines}
