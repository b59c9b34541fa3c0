"""Captions on a page (Fortunato 2017, Figs. 4 and 6): for each picture what the baseline says, what
the Bayesian network says, and what people said; words are shaded by what the draws of the weights
disagree about. Captions that differ between the two come first.

`captions_section` is one piece of HTML with its own style, for any page.
"""

import base64
import io
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np
import torch

from bayesrnn.errors import UserError
from bayesrnn.evaluate.calibration import risk_coverage
from bayesrnn.evaluate.captioned import PARTS, Captioned, CaptionFile

STYLE = Path(__file__).with_name("captions.css")
THUMBNAIL = 420
"""Pixels of the longer side."""
DARKEST = 0.95
"""The quantile of the words' uncertainty that is shaded fully."""
TITLES = {"baseline": "baseline", "bayesian": "Bayesian"}
References = Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class Row:
    """One picture: the captions of both (the first may be missing), and what people said."""

    name: str
    baseline: Captioned | None
    bayesian: Captioned
    references: Sequence[str]

    @property
    def differs(self) -> bool:
        return self.baseline is not None and self.baseline.caption != self.bayesian.caption


def choose_rows(
    bayesian: CaptionFile,
    baseline: CaptionFile | None,
    references: References,
    limit: int = 24,
    seed: int = 1,
) -> list[Row]:
    """A random sample of the pictures where the two differ; if there are too few, of the others."""
    before = {} if baseline is None else {each.name: each for each in baseline.pictures}
    missing = [each.name for each in bayesian.pictures if baseline and each.name not in before]
    if missing:
        raise UserError(f"the baseline has no caption of {missing[0]}; caption the same pictures")
    rows = [
        Row(each.name, before.get(each.name), each, references.get(each.name, ()))
        for each in bayesian.pictures
    ]
    random.Random(seed).shuffle(rows)
    return sorted(rows, key=lambda row: not row.differs)[:limit]


def captions_section(
    bayesian: CaptionFile,
    baseline: CaptionFile | None = None,
    references: References | None = None,
    pictures: Path | None = None,
    limit: int = 24,
    seed: int = 1,
    cider: Mapping[str, Sequence[float]] | None = None,
) -> str:
    """HTML. `pictures` is the folder of the pictures, where they are at hand; `cider` the score of
    every caption, in the files' order, by "baseline" and "bayesian", for a curve."""
    rows = choose_rows(bayesian, baseline, references or {}, limit, seed)
    shown = [each for row in rows for each in (row.baseline, row.bayesian) if each is not None]
    figures = [word[PARTS.index("epistemic") + 1] for each in shown for word in each.words]
    darkest = float(np.quantile(figures, DARKEST)) if figures else 0.0
    differing = ""
    if baseline is not None:
        before = baseline.captions
        count = sum(before[name] != said for name, said in bayesian.captions.items())
        differing = (
            f"<span>{count} of {len(before)} captions differ; a sample of those first</span>"
        )
    legend = (
        f'<p class="legend"><span>sure<span class="scale"></span>the draws disagree '
        f"({darkest:.2g} nats a word and more)</span>{differing}</p>"
    )
    cards = "\n".join(_card(row, darkest, pictures) for row in rows)
    curve = "" if cider is None else _curve_figure(bayesian, baseline, cider)
    style = STYLE.read_text()
    return (
        f'<div class="captions">\n<style>\n{style}</style>\n{curve}{legend}\n'
        f'<ul class="pictures">\n{cards}\n</ul>\n</div>\n'
    )


def _card(row: Row, darkest: float, pictures: Path | None) -> str:
    image = _thumbnail(pictures / row.name) if pictures is not None else None
    name = escape(row.name)
    picture = "" if image is None else f'<img src="{image}" alt="{name}">'
    both = zip(TITLES.values(), (row.baseline, row.bayesian), strict=True)
    said = "".join(
        f"<dt>{title}</dt><dd>{_words(each, darkest)} "
        f'<span class="sure" title="geometric mean of the words’ probabilities">'
        f"{each.confidence:.2f}</span></dd>"
        for title, each in both
        if each is not None
    )
    same = "" if row.baseline is None or row.differs else '<span class="same">same</span>'
    people = "".join(f"<li>{escape(text)}</li>" for text in row.references)
    true = f"<details open><summary>people said</summary><ul>{people}</ul></details>"
    return (
        f'<li>{picture}<p class="name">{name}{same}</p><dl>{said}</dl>'
        f"{true if row.references else ''}</li>"
    )


def _words(captioned: Captioned, darkest: float) -> str:
    """Each word, shaded; its figures are told where the pointer rests."""
    found = []
    for word, *figures in captioned.words[:-1]:  # without the end mark
        by_part = dict(zip(PARTS, figures, strict=True))
        shade = min(1.0, by_part["epistemic"] / darkest) if darkest > 0 else 0.0
        told = f"probability {by_part['probability']:.2f}; nats: " + ", ".join(
            f"{part} {by_part[part]:.3f}" for part in PARTS[1:]
        )
        found.append(
            f'<span class="word" style="--u:{shade:.2f}" title="{told}">{escape(word)}</span>'
        )
    return " ".join(found)


def _thumbnail(path: Path) -> str | None:
    """The picture as a small JPEG in a data URI; None where it is not at hand."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        return None
    try:
        with Image.open(path) as image:
            small = image.convert("RGB")
    except (OSError, UnidentifiedImageError):
        return None
    small.thumbnail((THUMBNAIL, THUMBNAIL))
    file = io.BytesIO()
    small.save(file, "JPEG", quality=82)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()


# --- the curve -----------------------------------------------------------------------------------

WIDTH, HEIGHT, LEFT, BOTTOM, POINTS = 560, 250, 46, 36, 100


def quality_curve(
    captions: CaptionFile, cider: Sequence[float], part: str = "epistemic"
) -> tuple[list[float], list[float]]:
    """Coverage, and the mean CIDEr of the surest captions there, at most `POINTS` of them."""
    unsure = torch.tensor([getattr(each, part) for each in captions.pictures])
    curve = risk_coverage(unsure, -torch.tensor(cider, dtype=torch.float64))
    places = np.unique(np.linspace(0.02 * len(cider), len(cider) - 1, POINTS).astype(int))
    return curve.coverage[places].tolist(), (-curve.risk[places]).tolist()


def _curve_figure(
    bayesian: CaptionFile, baseline: CaptionFile | None, cider: Mapping[str, Sequence[float]]
) -> str:
    both = {"baseline": baseline, "bayesian": bayesian}
    curves = {
        name: quality_curve(file, cider[name])
        for name, file in both.items()
        if file is not None and name in cider
    }
    if not curves:
        return ""
    values = [y for _, ys in curves.values() for y in ys]
    low, high = min(values), max(values)
    margin = 0.08 * (high - low) or 0.1
    low, high = max(0.0, low - margin), high + margin

    def place(x: float, y: float) -> str:
        right = LEFT + x * (WIDTH - LEFT - 90)
        down = (HEIGHT - BOTTOM) * (1 - (y - low) / (high - low)) + 6
        return f"{right:.1f},{down:.1f}"

    lines = []
    for index, (name, (xs, ys)) in enumerate(curves.items()):
        colour = f"var(--run-{index}, {('#1667b1', '#cc560c')[index]})"
        points = " ".join(place(x, y) for x, y in zip(xs, ys, strict=True))
        end_x, end_y = place(xs[-1], ys[-1]).split(",")
        above = all(ys[-1] >= others[-1] for _, others in curves.values())
        down = float(end_y) + 4 + (-8 if above else 8) * (len(curves) > 1)
        lines.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
            f'<text x="{float(end_x) + 6}" y="{down}" fill="{colour}">{TITLES[name]}</text>'
        )
    grid = "".join(
        f'<line x1="{LEFT}" x2="{WIDTH - 90}" y1="{y}" y2="{y}" stroke="currentColor" '
        f'opacity=".12"/><text x="{LEFT - 8}" y="{float(y) + 4}" text-anchor="end" '
        f'fill="currentColor">{value:.2f}</text>'
        for value in np.linspace(low, high, 4)
        for y in [place(0, float(value)).split(",")[1]]
    )
    ticks = "".join(
        f'<text x="{place(x, low).split(",")[0]}" y="{HEIGHT - BOTTOM + 26}" text-anchor="middle" '
        f'fill="currentColor">{x:.0%}</text>'
        for x in (0, 0.25, 0.5, 0.75, 1)
    )
    return (
        f'<figure><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" font-size="12" '
        f'aria-label="CIDEr by coverage">{grid}{ticks}{"".join(lines)}</svg>'
        "<figcaption>CIDEr of the surest captions (mean), by the share of pictures that is "
        "captioned at all: the more it rises to the left, the better a network knows which of its "
        "captions are bad.</figcaption></figure>\n"
    )
