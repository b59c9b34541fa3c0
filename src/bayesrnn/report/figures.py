"""The charts of a report, as plotly figures.

Colours are names of the page's own (`var(--run-0)`), which its script looks up whenever the theme
changes; so both themes are in one place, page.css.
"""

import html
import math
from collections.abc import Callable, Iterator, Sequence
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np

from bayesrnn.errors import UserError
from bayesrnn.prune import SAFE_THRESHOLD
from bayesrnn.report.findings import RATIO_EDGES, Findings
from bayesrnn.report.forecasts import Fan, Shown, dates
from bayesrnn.report.maps import Gate
from bayesrnn.report.readings import in_words

if TYPE_CHECKING:
    import plotly.graph_objects as go

COLOURS = 6
"""How many of the page's colours are for runs; then they start over."""
CURVE_POINTS = 200
DOTTED = {"dash": "dot", "width": 1.5, "color": "var(--muted)"}
"""A line that is no run's."""
FAN_TICKS = 4
"""Of a fan whose times are no dates."""
FEW = 0.02
"""The share of captions whose mean says little."""
FEW_EPOCHS = 8
"""So many get a tick each."""
LONGEST_NAME = 36
"""Letters of a run's name in a legend."""
NINETY = NormalDist().inv_cdf(0.95)
"""Standard deviations to either side that hold 90 %."""
SCORES = ("perplexity", "error_percent", "rmse", "per")
"""Those a run may be watched by."""
Runs = Sequence[Findings]


def require_plotly() -> None:
    """One line where the extra is not installed."""
    try:
        import plotly.graph_objects  # noqa: F401
    except ImportError as error:
        raise UserError(
            "a report's charts need plotly; install it with pip install 'bayesrnn[report]'"
        ) from error


def colour(index: int) -> str:
    return f"var(--run-{index % COLOURS})"


def plain(text: str) -> str:
    """Text of users for plotly, which reads a little HTML, but not how it writes quotes.

    >>> plain('<b>"a" & b')
    '&lt;b&gt;"a" &amp; b'
    """
    return html.escape(text, quote=False)


def draws_named(count: int) -> str:
    return "mean" if count == 0 else str(count)


# --- learning -------------------------------------------------------------------------------------


def held_out(runs: Runs) -> list["go.Figure"]:
    """The validation figure of each epoch, and that of the training data beside it; a chart for
    each kind of score."""
    found = []
    for watched in dict.fromkeys(key for run in runs for key in learning_keys(run)):
        figure = _figure("epoch", in_words(watched))
        for index, run in enumerate(runs):
            if watched not in learning_keys(run):
                continue
            x = [line["epoch"] for line in run.epochs]
            _line(figure, index, run, x, [line[watched] for line in run.epochs], "held out")
            train = f"train_{watched.partition('_')[2]}"
            if train in run.epochs[0]:
                y = [line[train] for line in run.epochs]
                _line(figure, index, run, x, y, "training", dash="dot", legend=False)
        _log_if_wide(figure)
        _whole_epochs(figure, runs)
        found += _drawn(figure, runs)
    return found


def watched_key(run: Findings) -> str | None:
    """What an epoch's line calls the figure that tells how good the model is."""
    keys = [f"{split}_{score}" for score in SCORES for split in ("valid", "test")]
    if run.ahead is not None:  # a series has an RMSE too
        keys = [run.watched]
    return next((key for key in keys if run.epochs and key in run.epochs[-1]), None)


def learning_keys(run: Findings) -> list[str]:
    """The figures of an epoch that are drawn: the watched one; of speech also the loss, which is
    what is learnt, and of the training set too; of a series also the RMSE."""
    key = watched_key(run)
    if key is None:
        return []
    split, _, score = key.partition("_")
    beside = {"per": "nll", "nll": "rmse"}.get(score)
    return [key, f"{split}_{beside}"] if beside else [key]


def bits(which: str) -> Callable[[Runs], list["go.Figure"]]:
    """`error_bits` or `complexity_bits` of each epoch."""

    def draw(runs: Runs) -> list["go.Figure"]:
        figure = _figure("epoch", "bits an epoch" if which == "error_bits" else "bits")
        for index, run in enumerate(runs):
            lines = [line for line in run.epochs if line.get(which) is not None]
            x = [line["epoch"] for line in lines]
            if lines:
                _line(figure, index, run, x, [line[which] for line in lines], "")
        _whole_epochs(figure, runs)
        return _drawn(figure, runs)

    return draw


def speed(runs: Runs) -> list["go.Figure"]:
    """Training speed over the steps."""
    units = {run.unit for run in runs}
    unit = units.pop() if len(units) == 1 else "targets"
    figure = _figure("step", f"{unit} a second")
    for index, run in enumerate(runs):
        pace = speeds(run)
        if pace:
            _line(figure, index, run, [step for step, _ in pace], [v for _, v in pace], "")
    figure.update_yaxes(rangemode="tozero")
    return _drawn(figure, runs)


def speeds(run: Findings) -> list[tuple[int, float]]:
    """Step and targets a second."""
    return [
        (line["step"], value)
        for line in run.steps
        for key, value in line.items()
        if key.endswith("_per_second")
    ]


# --- not knowing ----------------------------------------------------------------------------------


def entropy_gap(runs: Runs) -> list["go.Figure"]:
    """How much less sure a model is of the text reversed, by the number of draws."""
    figure = _figure("draws", f"nats a {_one(runs)}")
    for index, run, x, lines in _by_draws(runs):
        _line(figure, index, run, x, [line["entropy_gap"] for line in lines], "gap")
    return _draws_axis(figure, runs)


def entropies(runs: Runs) -> list["go.Figure"]:
    """The entropies themselves, and that of the words without their order."""
    figure = _figure("draws", f"nats a {_one(runs)}")
    for index, run, x, lines in _by_draws(runs):
        _line(figure, index, run, x, [line["total"] for line in lines], "text")
        y = [line["entropy_reversed"] for line in lines]
        _line(figure, index, run, x, y, "reversed", dash="dash", legend=False)
    alone = {(round(run.unigram, 6), run.unit[:-1]) for run in runs if run.unigram is not None}
    for place, (value, unit) in enumerate(sorted(alone)):
        figure.add_hline(
            value,
            line=DOTTED,
            annotation={
                "text": f"{unit} frequencies alone: {value:.2f}",
                "font": {"color": "var(--muted)", "size": 12},
                "yanchor": "bottom",
            },
            annotation_position="top right" if place % 2 else "top left",  # two may be near
        )
    return _draws_axis(figure, runs)


def _one(runs: Runs) -> str:
    """What texts are of; in a general word where they differ."""
    units = {run.unit for run in runs if run.is_text}
    return units.pop()[:-1] if len(units) == 1 else "token"


def _by_draws(runs: Runs) -> Iterator[tuple[int, Findings, list[str], list[dict[str, Any]]]]:
    """Each text run's lines; a run of points is the same for every number of draws."""
    counts = sorted({line["samples"] for run in runs if run.is_text for line in run.by_draws})
    for index, run in enumerate(runs):
        if not run.is_text:
            continue
        if run.draws:
            yield index, run, [draws_named(line["samples"]) for line in run.by_draws], run.by_draws
        else:
            yield index, run, [draws_named(count) for count in counts], run.by_draws * len(counts)


def _draws_axis(figure: "go.Figure", runs: Runs) -> list["go.Figure"]:
    counts = sorted({line["samples"] for run in runs for line in run.by_draws})
    order = [draws_named(count) for count in counts]
    figure.update_yaxes(exponentformat="none")
    figure.update_xaxes(type="category", categoryorder="array", categoryarray=order)
    return _drawn(figure, runs)


def reliability(runs: Runs) -> list["go.Figure"]:
    """Confidence against the share that was right; the larger a dot, the more predictions."""
    figure = _figure("confidence", "share that was right")
    for index, run in enumerate(runs):
        if run.reliability is None:
            continue
        count = run.reliability.count.double()
        sizes = (4 + 16 * (count / count.max()).sqrt()).tolist()
        _line(
            figure,
            index,
            run,
            run.reliability.confidence.tolist(),
            run.reliability.accuracy.tolist(),
            "",
            marker={"size": sizes, "opacity": 1, "line": {"color": "var(--card)", "width": 1.5}},
            customdata=run.reliability.count.tolist(),
            hovertemplate=(
                "confidence %{x:.2f}, right %{y:.2f}<br>%{customdata:,} predictions"
                f"<extra>{plain(run.name)}</extra>"
            ),
        )
    return _diagonal(figure, runs)


def coverage(runs: Runs) -> list["go.Figure"]:
    """Of numbers: the share of targets in intervals that are to hold so many."""
    figure = _figure("level of the interval", "share of targets in it")
    for index, run in enumerate(runs):
        if run.coverage is not None:
            x, y = run.coverage.level.tolist(), run.coverage.share.tolist()
            hover = "%{x:.0%} interval: %{y:.1%} of the targets"
            label = f"{hover}<extra>{plain(run.name)}</extra>"
            _line(figure, index, run, x, y, "", hovertemplate=label)
    return _diagonal(figure, runs)


def _diagonal(figure: "go.Figure", runs: Runs) -> list["go.Figure"]:
    """Shares of both axes, and where they are the same."""
    figure.add_shape(
        type="line", x0=0, y0=0, x1=1, y1=1, line={"dash": "dot", "color": "var(--muted)"}
    )
    figure.update_xaxes(range=[-0.02, 1.03], dtick=0.2)
    figure.update_yaxes(range=[-0.02, 1.03], dtick=0.2)
    return _drawn(figure, runs)


def risk_coverage(runs: Runs) -> list["go.Figure"]:
    """The share of errors among the surest predictions."""
    figure = _figure("share of predictions kept, the surest first", "share that was wrong")
    for index, run in enumerate(runs):
        if run.risk is None:
            continue
        count = len(run.risk.risk)
        kept = np.unique(np.linspace(0, count - 1, CURVE_POINTS).astype(int))
        x, y = run.risk.coverage.numpy()[kept], run.risk.risk.numpy()[kept]
        _line(figure, index, run, x.tolist(), y.tolist(), "", mode="lines")
    figure.update_yaxes(rangemode="tozero")
    figure.update_xaxes(range=[0, 1.01])
    return _drawn(figure, runs)


def captions_kept(runs: Runs) -> list["go.Figure"]:
    """CIDEr of the surest captions; the very first ones, which are few, are left out."""
    figure = _figure("share of captions kept, the surest first", "CIDEr (mean)")
    dashes = {"total": "solid", "epistemic": "dash"}
    for index, run in enumerate(runs):
        for part, curve in run.spoken.kept.items() if run.spoken else ():
            if part == "epistemic" and not run.draws:
                continue
            count = len(curve.risk)
            at = np.unique(np.linspace(FEW * count, count - 1, CURVE_POINTS).astype(int))
            x, y = curve.coverage.numpy()[at], -curve.risk.numpy()[at]
            first = part == "total"  # the only one in the legend
            points = x.tolist(), y.tolist()
            _line(figure, index, run, *points, part, dashes[part], first, mode="lines")
    figure.update_xaxes(range=[0, 1.01], tickformat=".0%")
    return _drawn(figure, runs)


# --- forecasts ------------------------------------------------------------------------------------


def fan(shown: Shown, column: str, runs: Runs) -> "go.Figure":
    """A column's past and what came, and what runs saw coming: the mean of the paths, and bands.

    The bands of all runs would hide each other: the page's script shows those of one run and one
    view, all of the spread or what of it is epistemic, by their `meta`.
    """
    figure = _figure("", "")
    times, now = shown.one.times, shown.one.past - 1
    days = dates(times)
    x: list[Any] = list(range(-now, len(times) - now)) if days is None else [*days]
    told = [plain(time) for time in times]
    fans = shown.fans(column)
    rows = next(iter(fans.values())).rows
    form = f".{max(each.digits for each in fans.values())}~g"
    for index, each in fans.items():
        _bands(figure, index, runs[index], each, x[now:], float(rows[now]))
    for index, each in fans.items():
        figures = np.stack([*each.most, NINETY * each.doubt], axis=1).tolist()
        _line(
            figure,
            index,
            runs[index],
            x[now:],
            [float(rows[now]), *each.mean.tolist()],
            "",
            mode="lines",
            text=told[now:],
            customdata=[[float(rows[now]), float(rows[now]), 0.0], *figures],
            hovertemplate=(
                f"%{{text}}: %{{y:{form}}}<br>90 % in %{{customdata[0]:{form}}} to "
                f"%{{customdata[1]:{form}}}<br>"
                f"own doubt ± %{{customdata[2]:.3~g}}<extra>{plain(runs[index].name)}</extra>"
            ),
        )
    figure.add_scatter(
        x=x,
        y=rows.tolist(),
        name="what came",
        mode="lines",
        line={"color": "var(--ink)", "width": 1.75},
        text=told,
        hovertemplate=f"%{{text}}: %{{y:{form}}}<extra>what came</extra>",
    )
    figure.add_vline(x[now], line=DOTTED)
    if days is not None:
        figure.update_xaxes(automargin=False)  # it leaves room for a third line
        figure.update_layout(margin_b=40)
    else:
        ticks = sorted({(2 * k + 1) * len(x) // (2 * FAN_TICKS) for k in range(FAN_TICKS)})
        figure.update_xaxes(tickvals=[x[t] for t in ticks], ticktext=[told[t] for t in ticks])
    figure.update_layout(showlegend=False, xaxis_title=None, yaxis_title=None)
    return figure


def _bands(
    figure: "go.Figure", index: int, run: Findings, fan: Fan, x: list[Any], last: float
) -> None:
    """What a run saw coming, at the times `x`; all bands open from the `last` row."""
    doubt = NINETY * fan.doubt
    for (low, high), view, opacity in (
        (fan.most, "total", 0.17),
        (fan.half, "total", 0.3),
        (fan.most, "epistemic", 0.12),
        ((fan.mean - doubt, fan.mean + doubt), "epistemic", 0.5),
    ):
        figure.add_scatter(
            x=[*x, *x[:0:-1], x[0]],
            y=[float(end) for end in (last, *high, *low[::-1], last)],
            name=plain(run.name),
            mode="lines",
            line={"width": 0},
            fill="toself",
            fillcolor=colour(index),
            opacity=opacity,
            hoverinfo="skip",
            meta=[view, index],
        )


def error_ahead(runs: Runs) -> list["go.Figure"]:
    """RMSE and CRPS by the number of steps ahead, and what the last row, for ever, and the last
    season, over and over, would give."""
    figure = _figure("steps ahead", "error, in spreads of the column")
    for index, run in enumerate(runs):
        if run.ahead is not None:
            rmse, crps = list(run.ahead.scores.rmse), list(run.ahead.scores.crps)
            steps = list(range(1, len(rmse) + 1))
            _line(figure, index, run, steps, rmse, "RMSE", mode="lines")
            _line(figure, index, run, steps, crps, "CRPS", "dash", legend=False, mode="lines")
    scores = [run.ahead.scores for run in runs if run.ahead]
    naive = [("the last row", "dot", each.persistence) for each in scores]
    naive += [
        (f"the last {each.season} rows", "dashdot", each.seasonal)
        for each in scores
        if each.season > 1
    ]
    for name, dash, same in dict.fromkeys(naive):
        figure.add_scatter(
            x=list(range(1, len(same) + 1)),
            y=same,
            name=name,
            mode="lines",
            line={"color": "var(--muted)", "dash": dash, "width": 2},
            hovertemplate=f"%{{x}}: %{{y:,.4~r}}<extra>{name}, RMSE</extra>",
        )
    figure.update_yaxes(rangemode="tozero")
    return _drawn(figure, runs)


def coverage_ahead(runs: Runs) -> list["go.Figure"]:
    """What 90 % intervals hold, by the number of steps ahead."""
    figure = _figure("steps ahead", "share of what came in 90 % intervals")
    for index, run in enumerate(runs):
        if run.ahead is not None:
            held = list(run.ahead.scores.coverage_90)
            _line(figure, index, run, list(range(1, len(held) + 1)), held, "", mode="lines")
    figure.add_hline(0.9, line=DOTTED)
    figure.update_yaxes(tickformat=".0%", range=[0, 1.03])
    return _drawn(figure, runs)


# --- weights --------------------------------------------------------------------------------------


def pruning(runs: Runs) -> list["go.Figure"]:
    """What is lost without the weights of lowest signal to noise; a chart for each kind of
    score."""
    found = []
    for score in dict.fromkeys(run.pruning_score for run in runs):
        figure = _figure("weights pruned", score)
        for index, run in enumerate(runs):
            if run.pruning_score == score:
                x = [row.fraction for row in run.pruning]
                _line(figure, index, run, x, [row.error for row in run.pruning], "")
        figure.update_xaxes(tickformat=".0%")
        _log_if_wide(figure)
        found += _drawn(figure, runs)
    return found


def signal_to_noise(runs: Runs) -> list["go.Figure"]:
    """How many weights have which |mean| / standard deviation."""
    figure = _figure("signal to noise, |mean| / standard deviation", "share of weights")
    top = 0.0
    centres = 10 ** ((RATIO_EDGES[1:] + RATIO_EDGES[:-1]) / 2)
    for index, run in enumerate(runs):
        if run.ratios is None:
            continue
        y = (run.ratios / run.ratios.sum()).tolist()
        top = max(top, *y)
        shape = {"shape": "hvh", "width": 2}
        _line(figure, index, run, centres.tolist(), y, "", mode="lines", fill="tozeroy", line=shape)
    figure.add_vline(SAFE_THRESHOLD, line=DOTTED)
    figure.add_annotation(
        text=f"Graves' rule: {SAFE_THRESHOLD:.2f}",
        x=math.log10(SAFE_THRESHOLD),
        y=1,
        yref="paper",
        xanchor="left",
        yanchor="top",
        xshift=4,
        showarrow=False,
        font={"color": "var(--muted)", "size": 12},
    )
    ticks = [10.0**power for power in range(-4, 3)]
    figure.update_xaxes(type="log", tickvals=ticks, ticktext=[f"{tick:g}" for tick in ticks])
    figure.update_yaxes(tickformat=".1%", range=[0, 1.15 * top])  # room for the rule's name
    return _drawn(figure, runs)


def gate_map(gate: Gate, low: float, high: float) -> "go.Figure":
    """One gate's weights, a dot each: what they cost, and (hidden at first) when they are pruned.

    Numbers are cut to a byte: 255 is `high` bits, and 200 the last weight to be pruned.
    """
    import plotly.graph_objects as go

    figure = go.Figure()
    if gate.bits is not None:
        bytes_ = ((gate.bits - low) / max(high - low, 1e-9) * 255).clip(0, 255).round()
        ramp = [[i / 3, f"var(--ramp-{i})"] for i in range(4)]
        _heat(figure, bytes_.astype(np.uint8), 255, ramp, "bits")
    cut = np.ceil(gate.pruned_at * 200 - 1e-4).clip(0, 200).astype(np.uint8)
    _heat(figure, cut, 200, [[0, "var(--gone)"], [1, "var(--left)"]], "pruned_at")
    rows, columns = gate.pruned_at.shape
    figure.update_layout(margin={"l": 0, "r": 0, "t": 0, "b": 0})
    plain = {"visible": False, "constrain": "domain", "fixedrange": True}
    figure.update_xaxes(**plain, range=[-0.5, columns - 0.5])
    figure.update_yaxes(**plain, range=[rows - 0.5, -0.5], scaleanchor="x")
    return figure


def _heat(figure: "go.Figure", z: Any, top: int, scale: list[list[Any]], name: str) -> None:
    figure.add_heatmap(
        z=z,
        zmin=0,
        zmax=top,
        colorscale=scale,
        showscale=False,
        hoverinfo="skip",
        name=name,
        visible=not figure.data,
    )


# --- what all charts share ------------------------------------------------------------------------


def _figure(x: str, y: str) -> "go.Figure":
    import plotly.graph_objects as go

    figure = go.Figure()
    axis: dict[str, Any] = {
        "gridcolor": "var(--grid)",
        "linecolor": "var(--line)",
        "zeroline": False,
        "automargin": True,
        "ticks": "",
        "tickfont": {"size": 12},
    }
    figure.update_layout(
        template="none",
        hovermode="closest",
        margin={"l": 12, "r": 14, "t": 12, "b": 12},
        legend={
            "orientation": "h",
            "x": 0,
            "y": 1.02,
            "yanchor": "bottom",
            "font": {"size": 12},
        },
        xaxis={**axis, "title": _axis_title(x), "showgrid": False, "showline": True},
        yaxis={**axis, "title": _axis_title(y)},
    )
    return figure


def _whole_epochs(figure: "go.Figure", runs: Runs) -> None:
    """There is no epoch 1.5; with many epochs no tick falls there anyway."""
    if max((len(run.epochs) for run in runs), default=0) <= FEW_EPOCHS:
        figure.update_xaxes(dtick=1)


def _axis_title(text: str) -> dict[str, Any]:
    return {"text": text, "standoff": 8, "font": {"size": 12}}


def _line(
    figure: "go.Figure",
    index: int,
    run: Findings,
    x: list[Any],
    y: list[Any],
    what: str,
    dash: str = "solid",
    legend: bool = True,
    **more: Any,
) -> None:
    """One run's line. User text is escaped: plotly reads a little HTML."""
    long = len(run.name) > LONGEST_NAME
    name = plain(f"{run.name[: LONGEST_NAME - 1]}…" if long else run.name)
    label = f"{name}, {what}" if what else name
    given: dict[str, Any] = {
        "mode": "lines+markers",
        "hovertemplate": f"%{{x}}: %{{y:,.4~r}}<extra>{label}</extra>",
        "marker": {"size": 6},
    }
    given |= more
    line = {"color": colour(index), "dash": dash, "width": 2.25, **given.pop("line", {})}
    marker = {"color": colour(index), **given.pop("marker")}
    figure.add_scatter(
        x=x,
        y=y,
        name=name,
        legendgroup=str(index),
        showlegend=legend,
        line=line,
        marker=marker,
        **given,
    )


def _log_if_wide(figure: "go.Figure") -> None:
    """A log axis where values span more than a factor of five."""
    values = [v for trace in figure.data for v in trace.y if v is not None and v < math.inf]
    if values and max(values) > 5 * min(values) > 0:
        powers = range(math.floor(math.log10(min(values))), math.ceil(math.log10(max(values))) + 1)
        figure.update_yaxes(type="log", tickvals=[d * 10.0**p for p in powers for d in (1, 2, 5)])
        figure.update_yaxes(tickformat=",~g")


def _drawn(figure: "go.Figure", runs: Runs) -> list["go.Figure"]:
    """The figure, unless it is empty; a legend where there is more than one run to tell apart."""
    figure.update_layout(showlegend=len(runs) > 1)
    return [figure] if figure.data else []
