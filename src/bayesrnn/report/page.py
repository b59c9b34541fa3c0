"""One HTML file with everything in it: style, script, the plotting library, figures and text.

It asks nothing of the network, and its own policy (Content-Security-Policy) forbids it to.
"""

import base64
import functools
import gzip
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bayesrnn import __version__
from bayesrnn.files import write_atomic
from bayesrnn.report import figures
from bayesrnn.report.captions import gather, sample, thumbnail
from bayesrnn.report.choices import Choices
from bayesrnn.report.findings import Findings
from bayesrnn.report.forecasts import side_by_side
from bayesrnn.report.passage import LONGEST, MEASURES, Passage, scales
from bayesrnn.report.table import draw_table, head_rows

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
        "error_ahead",
        "Error by steps ahead",
        "The RMSE of the forecasts' mean (solid) and the CRPS of their paths (dashed), from many "
        "places of the split. In grey, the RMSE of the last row, for ever (dotted), and, where "
        "there is a season, of the last one, over and over.",
        figures.error_ahead,
    ),
    Chart(
        "coverage_ahead",
        "Intervals by steps ahead",
        "Of what came, the share that the central 90 % intervals held. Below the dotted line the "
        "model is too sure so far ahead.",
        figures.coverage_ahead,
    ),
    Chart(
        "held_out",
        "Held-out score",
        "After each epoch, by the posterior mean. Dotted, where it was kept, the training score: "
        "the mean over the epoch, by the weights drawn for each step.",
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
        "coverage",
        "Reliability of intervals",
        "On the dotted line the central 90 % intervals hold 90 % of the targets, and so on. Below "
        "it the model is too sure, above it not sure enough.",
        figures.coverage,
    ),
    Chart(
        "risk_coverage",
        "Risk and coverage",
        "The errors left when only the surest predictions are kept.",
        figures.risk_coverage,
    ),
    Chart(
        "captions_kept",
        "Captions kept",
        "The mean CIDEr when only the surest captions are kept, by total (solid) and by epistemic "
        "uncertainty (dashed). A line that falls to the right knows which captions are bad.",
        figures.captions_kept,
    ),
    Chart(
        "pruning",
        "Pruning",
        "The score without the weights of lowest signal to noise; of points, without the smallest "
        "ones.",
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
    forecasts = _forecasts(runs)
    for series in forecasts:
        charts |= series.pop("figures")
    passages = [run.passage for run in runs]
    captions = _captions(runs, choices, len(passages))
    spoken = [said["passage"] for card in captions["cards"] for said in card["said"]]
    data = {
        "figures": charts,
        "scales": {"text": scales(passages), "captions": scales(spoken)},
        "passages": [_words(passage) for passage in [*passages, *spoken]],
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
        captions=captions,
        forecasts=forecasts,
        measures=MEASURES,
        longest=LONGEST,
        measured=_measured(runs),
        most=max(choices.samples),
        by_draws=[draw_table(run) for run in runs],
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


def _measured(runs: Sequence[Findings]) -> str:
    """What the figures are of, in words; once, where it is the same for all runs."""
    parts: dict[str, list[str]] = {}
    for run in runs:
        parts.setdefault(run.measured, []).append(run.name)
    if len(parts) == 1:
        return next(iter(parts))
    return "; ".join(f"{text} ({', '.join(names)})" for text, names in parts.items())


# --- the shaded words, the forecasts and the maps -------------------------------------------------


def _captions(runs: Sequence[Findings], choices: Choices, first: int) -> dict[str, Any]:
    """A sample of the pictures that runs captioned; the captions' words have the numbers from
    `first` on among the page's passages."""
    pictures = gather([run.spoken for run in runs])
    chosen = sample(pictures, choices.seed)
    numbers = itertools.count(first)
    cards = [
        {
            "name": picture.name,
            "image": choices.pictures and thumbnail(choices.pictures, picture.name),
            "said": [
                {"run": place, "passage": passage, "number": next(numbers)}
                for place, passage in picture.said.items()
            ],
            "same": len(picture.said) > 1 and not picture.differs,
            "references": picture.references,
        }
        for picture in chosen
    ]
    differing = sum(picture.differs for picture in pictures)
    return {
        "cards": cards,
        "pictures": len(pictures),
        "differing": differing,
        "missing": sum(card["image"] is None for card in cards),
    }


def _forecasts(runs: Sequence[Findings]) -> list[dict[str, Any]]:
    """Each series that runs forecast, a card a column."""
    found = []
    for number, shown in enumerate(side_by_side([run.ahead for run in runs])):
        keys = {name: f"fan {number} {name}" for name in shown.names}
        found.append(
            {
                "figures": {
                    key: json.loads(figures.fan(shown, name, runs).to_json())
                    for name, key in keys.items()
                },
                "cards": keys,
                "runs": list(shown.runs),
                "one": shown.one,
                "doubts": any(ahead.doubts for ahead in shown.runs.values()),
            }
        )
    return found


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
    low = round(low, 2) + 0.0  # not -0.0
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
                    "left": [round(share, 6) for share in gate.left],
                    "step": gate.step,
                    "rows": gate.pruned_at.shape[0],
                    "columns": gate.pruned_at.shape[1],
                }
            )
        listed.append({"name": matrix.name, "title": matrix.title, "gates": gates})
    return {"figures": found, "matrices": listed, "low": low, "high": high, "bits": bool(shown)}
