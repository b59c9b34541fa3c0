"""Captions on a page: order, shades, and nothing that could break out of it."""

import re
from pathlib import Path

import pytest

import bayesrnn as br
from bayesrnn.evaluate.captioned import Captioned, CaptionFile
from bayesrnn.evaluate.decoding import Decoding
from bayesrnn.report.captions import captions_section, choose_rows, quality_curve


def captioned(name: str, caption: str, epistemic: float = 0.1) -> Captioned:
    words = [[word, 0.5, 1.0, 0.9, epistemic] for word in [*caption.split(), "<eos>"]]
    return Captioned(name, caption, -3.0, 0.5, 1.0, 0.9, epistemic, words)


def file(*pictures: Captioned) -> CaptionFile:
    return CaptionFile(list(pictures), 0, 10, Decoding())


BAYESIAN = file(*(captioned(f"{i}.jpg", "a dog" if i % 2 else "a cat", 0.1 * i) for i in range(6)))
BASELINE = file(*(captioned(f"{i}.jpg", "a dog") for i in range(6)))


def test_those_that_differ_come_first_in_an_order_by_the_seed() -> None:
    rows = choose_rows(BAYESIAN, BASELINE, {})
    assert [row.differs for row in rows] == [True] * 3 + [False] * 3
    assert {row.name for row in rows[:3]} == {"0.jpg", "2.jpg", "4.jpg"}
    assert rows == choose_rows(BAYESIAN, BASELINE, {})
    orders = [[r.name for r in choose_rows(BAYESIAN, BASELINE, {}, seed=s)] for s in range(5)]
    assert any(order != orders[0] for order in orders)
    assert len(choose_rows(BAYESIAN, BASELINE, {}, limit=2)) == 2
    with pytest.raises(br.UserError, match=r"the baseline has no caption of 3\.jpg"):
        choose_rows(BAYESIAN, file(*BASELINE.pictures[:3]), {})


def test_a_section_shows_both_captions_the_references_and_how_sure() -> None:
    page = captions_section(BAYESIAN, BASELINE, {"0.jpg": ["one cat"]})
    assert page.count("<li>") == 6 + 1
    assert "3 of 6 captions differ" in page
    assert "one cat" in page
    assert "<eos>" not in page
    shades = [float(x) for x in re.findall(r"--u:([\d.]+)", page)]
    assert len(shades) == 24
    assert (min(shades), max(shades)) == (0, 1)
    alone = captions_section(BAYESIAN)
    assert "baseline</dt>" not in alone
    assert "differ" not in alone.split("</style>")[1]


def test_names_and_words_cannot_break_out_of_the_page() -> None:
    bad = '<script>"&'
    page = captions_section(file(captioned(bad, bad)), None, {bad: [bad]})
    assert "<script" not in page
    assert page.count("&lt;script&gt;&quot;&amp;") == 3


def test_pictures_at_hand_are_shown_small(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="pillow is not installed")
    image.new("RGB", (900, 600), "red").save(tmp_path / "0.jpg")
    (tmp_path / "1.jpg").write_text("no picture")
    page = captions_section(BAYESIAN, pictures=tmp_path)
    assert page.count('<img src="data:image/jpeg;base64,') == 1
    assert len(page) < 40_000


def test_the_curve_is_the_score_of_the_surest() -> None:
    cider = [2.0, 1.0, 1.0, 0.5, 0.0, 0.0]
    coverage, quality = quality_curve(BAYESIAN, cider)
    assert coverage[-1] == 1
    assert quality[0] == 2.0
    assert quality[-1] == pytest.approx(0.75)
    page = captions_section(BAYESIAN, BASELINE, cider={"bayesian": cider, "baseline": cider})
    assert page.count("<polyline") == 2
