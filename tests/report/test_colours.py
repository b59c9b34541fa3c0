"""Runs can be told apart by eyes without red or green cones too, and from what came (the ink)."""

import itertools
import re

import numpy as np
import pytest
from numpy.typing import NDArray

from bayesrnn.report import figures
from bayesrnn.report.page import FOLDER

EYES = {
    "without red": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "without green": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.01182, 0.04294, 0.968881],
    ],
}
"""Of linear RGB (Machado, Oliveira & Fernandes 2009, severity 1)."""
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
WHITE = TO_XYZ.sum(axis=1)


def seen(colour: str, eyes: str) -> NDArray[np.float64]:
    """In CIELAB, where 2.3 is a just noticeable difference."""
    part = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(part <= 0.04045, part / 12.92, ((part + 0.055) / 1.055) ** 2.4)
    xyz = TO_XYZ @ (np.array(EYES[eyes]) @ linear).clip(0, 1) / WHITE
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("eyes", EYES)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_runs_have_colours_that_differ(theme: str, eyes: str) -> None:
    style = (FOLDER / "page.css").read_text()
    pairs = re.findall(r"--(run-\d|ink): light-dark\((#\w{6}), (#\w{6})\)", style)
    assert len(pairs) == figures.COLOURS + 1
    colours = [seen(dark if theme == "dark" else light, eyes) for _, light, dark in pairs]
    gaps = [np.linalg.norm(a - b) for a, b in itertools.combinations(colours, 2)]
    assert min(gaps) > 14
