"""One HTML file with everything in it: style, script, the plotting library, figures and text.

It asks nothing of the network, and its own policy (Content-Security-Policy) forbids it to.
"""

import base64
import functools
import gzip
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bayesrnn import __version__
from bayesrnn.files import write_atomic
from bayesrnn.models import SpeechSettings
from bayesrnn.report import figures
from bayesrnn.report.findings import Choices, Findings
from bayesrnn.report.passage import LONGEST, MEASURES, Passage, scales

if TYPE_CHECKING:
    import plotly.graph_objects as go

FOLDER = Path(__file__).parent
BITS_SHOWN = (0.005, 0.995)
"""The quantiles of the bits a weight that get the lightest and the darkest colour."""


@dataclass(frozen=True)
class Chart:
    """A chart's place on the page: its title, and one sentence on how to read it."""

    key: str
    title: str
    caption: str
    draw: Callable[[Sequence[Findings]], list["go.Figure"]]
    """Several, where runs have scores that do not belong on one axis."""


CHARTS = (
    Chart(
        "held_out",
        "Held-out score",
        "After each epoch, by the posterior mean; dotted, on the training data.",
        figures.held_out,
    ),
    Chart(
        "error_bits",
        "Error bits",
        "What the training data cost to send once the weights are known.",
        figures.bits("error_bits"),
    ),
    Chart(
        "complexity_bits",
        "Complexity bits",
        "What the weights themselves cost: the KL from the prior. Points have no such cost.",
        figures.bits("complexity_bits"),
    ),
    Chart("speed", "Speed", "While training, on the machine it was trained on.", figures.speed),
    Chart(
        "entropy_gap",
        "Entropy gap",
        "How much less sure the model is when the text is reversed. More is better.",
        figures.entropy_gap,
    ),
    Chart(
        "entropies",
        "Entropy",
        "Of the text as it is (solid) and reversed (dashed).",
        figures.entropies,
    ),
    Chart(
        "reliability",
        "Reliability",
        "On the dotted line confidence is right as often as it says. Large dots hold more "
        "predictions.",
        figures.reliability,
    ),
    Chart(
        "risk_coverage",
        "Risk and coverage",
        "The errors left when only the surest predictions are kept.",
        figures.risk_coverage,
    ),
    Chart(
        "pruning",
        "Pruning",
        "The score without the weights of lowest signal to noise.",
        figures.pruning,
    ),
    Chart(
        "signal_to_noise",
        "Signal to noise",
        "A weight far to the left is mostly noise, and can go. The first bar holds all below it.",
        figures.signal_to_noise,
    ),
)


def write_page(runs: Sequence[Findings], choices: Choices, out: Path) -> int:
    """Write the page (an older one of that name is replaced); its size in bytes."""
    data = render(runs, choices).encode()
    write_atomic(out, data)
    return len(data)


def render(runs: Sequence[Findings], choices: Choices) -> str:
    """The page's HTML. All text of users is escaped, by jinja and in the script's data."""
    import jinja2

    environment = jinja2.Environment(
        autoescape=True,
        loader=jinja2.FileSystemLoader(FOLDER),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    charts: dict[str, Any] = {}
    shown: dict[str, list[str]] = {}
    for chart in CHARTS:
        for number, figure in enumerate(chart.draw(runs)):
            key = f"{chart.key}-{number + 1}" if number else chart.key
            charts[key] = json.loads(figure.to_json())
            shown.setdefault(chart.key, []).append(key)
    maps = [_maps(run, index) for index, run in enumerate(runs)]
    for each in maps:
        charts |= each.pop("figures")
    passages = [run.passage for run in runs if run.passage is not None]
    ends = scales(passages)
    data = {
        "figures": charts,
        "scales": ends,
        "passages": [_words(run.passage) for run in runs],
        "maps": [gate for each in maps for matrix in each["matrices"] for gate in matrix["gates"]],
    }
    return environment.get_template("page.html").render(
        version=__version__,
        choices=choices,
        runs=runs,
        colours=[figures.colour(index) for index in range(len(runs))],
        rows=head_rows(runs),
        charts={chart.key: chart for chart in CHARTS},
        shown=shown,
        maps=maps,
        measures=MEASURES,
        longest=LONGEST,
        measured=_measured(runs, choices),
        most=max(choices.samples),
        by_draws=[_draw_table(run) for run in runs],
        style=_trusted((FOLDER / "page.css").read_text()),
        script=_trusted((FOLDER / "page.js").read_text()),
        data=_trusted(as_script(data)),
        library=_library(),
    )


def as_script(data: Any) -> str:
    """JSON that can stand inside a script element: nothing in it ends the element.

    >>> as_script({"word": "</script>"})
    '{"word":"\\\\u003c/script\\\\u003e"}'
    """
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


@functools.cache
def _library() -> str:
    """plotly's script, packed: 2 MB instead of 5, which the page's own script unpacks."""
    from plotly.offline import get_plotlyjs

    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), 9, mtime=0)).decode()


def _trusted(text: str) -> Any:
    from markupsafe import Markup

    return Markup(text)


# --- the head table -------------------------------------------------------------------------------

Cell = tuple[float | str | None, str]
"""A value and how it is written."""


def head_rows(runs: Sequence[Findings]) -> list[tuple[str, str, list[Cell]]]:
    """Key, title and a cell a run; rows in which no run has anything are left out."""
    rows: list[tuple[str, str, Callable[[Findings], float | str | None], str]] = [
        ("data", "data", lambda run: run.recipe.data.kind, ""),
        ("network", "network", _network, ""),
        ("posterior", "posterior", lambda run: _kinds(run.recipe.posterior), ""),
        ("prior", "prior", lambda run: _kinds(run.recipe.prior), ""),
        ("weights", "weights", lambda run: run.weights, "{:,}"),
        ("epochs", "epochs", lambda run: _last(run, "epoch"), "{:,}"),
        ("seconds", "training time", lambda run: _last(run, "seconds"), "time"),
        ("speed", "speed (median)", _speed, "{:,.0f}/s"),
        ("error_bits", "error bits, epoch kept", _kept("error_bits"), "{:,.0f}"),
        ("complexity_bits", "complexity bits, epoch kept", _kept("complexity_bits"), "{:,.0f}"),
        ("ratio", "both over a uniform code, epoch kept", _kept("ratio"), "{:,.3f}"),
        ("bits_per_weight", "bits a weight", lambda run: run.bits_per_weight, "{:,.3f}"),
        ("best", "held out, best epoch", _best, "{:,.4g}"),
        ("last", "held out, last epoch", lambda run: _watched(run, -1), "{:,.4g}"),
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
        ("ece", "calibration error", _score("ece"), "{:.4f}"),
        ("aurc", "risk-coverage area", _score("aurc"), "{:.4f}"),
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


def written(value: float | str | None, form: str) -> str:
    """A figure for people.

    >>> written(3725.0, "time"), written(None, "{:.1f}")
    ('1 h 2 min', '–')
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
    return form.format(value)


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
    each = given.values() if isinstance(given, dict) else [given]
    return ", ".join(sorted({one.kind.replace("_", " ") for one in each}))


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
    return None if key is None else min(line[key] for line in run.epochs)


def _score(key: str, samples: int | None = None) -> Callable[[Findings], float | None]:
    """Of the line with so many draws; None: with the most."""

    def find(run: Findings) -> float | None:
        lines = [line for line in run.by_draws if samples in (None, line["samples"])]
        return lines[-1].get(key) if lines else None

    return find


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
}


def _draw_table(run: Findings) -> dict[str, Any]:
    keys = [key for key in DRAW_COLUMNS if key in run.by_draws[0]]
    lines = [
        [
            figures.draws_named(line["samples"]),
            *(written(line[key], "{:,.4f}" if key != "perplexity" else "{:,.2f}") for key in keys),
        ]
        for line in run.by_draws
    ]
    return {"columns": [DRAW_COLUMNS[key] for key in keys], "lines": lines}


def _measured(runs: Sequence[Findings], choices: Choices) -> str:
    """What the figures are of, in words; once, where it is the same for all runs."""
    parts: dict[str, list[str]] = {}
    for run in runs:
        first = "the first " if run.is_text and run.read == choices.tokens else "all "
        what = "text" if run.is_text else "set"
        text = f"{first}{run.read:,} {run.unit} of the {run.split} {what}"
        parts.setdefault(text, []).append(run.name)
    if len(parts) == 1:
        return next(iter(parts))
    return "; ".join(f"{text} ({', '.join(names)})" for text, names in parts.items())


# --- the shaded text and the maps -----------------------------------------------------------------


def _words(passage: Passage | None) -> list[dict[str, Any] | None]:
    """What the script shows of each word; None: not predicted."""
    if passage is None:
        return []
    return [
        None
        if token.figures is None
        else {
            **{name: round(value, 5) for name, value in token.figures.items()},
            "top": [[word, round(p, 5)] for word, p in token.top],
        }
        for token in passage
    ]


def _maps(run: Findings, index: int) -> dict[str, Any]:
    """The run's matrices for the page; one scale of bits for all of them, without the extremes."""
    shown = [g.bits.ravel() for m in run.matrices for g in m.gates if g.bits is not None]
    low, high = np.quantile(np.concatenate(shown), BITS_SHOWN).tolist() if shown else (0.0, 0.0)
    low = round(low, 1) + 0.0  # not -0.0
    found: dict[str, Any] = {}
    listed = []
    for matrix in run.matrices:
        gates = []
        for gate in matrix.gates:
            key = f"map {index} {matrix.name} {gate.name}"
            found[key] = json.loads(figures.gate_map(gate, low, high).to_json())
            gates.append(
                {
                    "key": key,
                    "name": gate.name,
                    "bits": gate.mean_bits,
                    "left": [round(share, 4) for share in gate.left],
                    "step": gate.step,
                    "rows": gate.pruned_at.shape[0],
                    "columns": gate.pruned_at.shape[1],
                }
            )
        listed.append({"name": matrix.name, "title": matrix.title, "gates": gates})
    return {"figures": found, "matrices": listed, "low": low, "high": high, "bits": bool(shown)}
