"""The report of captioners: what the page says of pictures is what was computed."""

import json
import re
import sys
from html import unescape
from pathlib import Path

import numpy as np
import pytest
import torch

import bayesrnn as br
from bayesrnn.evaluate import risk_coverage
from bayesrnn.evaluate.caption_scores import score_captions
from bayesrnn.evaluate.captioned import CaptionFile, caption_pictures
from bayesrnn.report import Choices, examine, write_page
from bayesrnn.report.captions import Picture, Spoken, gather, sample, thumbnail
from bayesrnn.report.passage import Passage
from bayesrnn.train.captioning import CaptionTask
from caption_runs import NUMBERS
from reported import Page
from small_runs import Cli, metrics


@pytest.fixture(scope="module")
def both(dropout: Path, brnn: Path, folder: Path) -> Path:
    choices = Choices((0, 1, 3))
    found = [examine(r, r.name, choices, lambda w, n: lambda d: None) for r in (dropout, brnn)]
    write_page(found, choices, folder / "both.html")
    return folder / "both.html"


def said_by(run: Path) -> tuple[CaptionFile, CaptionTask]:
    """What the library says of the test pictures, by the mean, and three draws' uncertainty."""
    task = CaptionTask(
        br.read_recipe(run / "recipe.toml"), torch.device("cpu"), br.load_vocabulary(run)
    )
    test = task.pictures("test")
    vectors = task.vectors[test.rows]
    found = caption_pictures(br.load(run), vectors, test.names, task.vocabulary, reading_samples=3)
    return found, task


def cards(page: Page) -> list[tuple[str, list[str], list[str]]]:
    """Of each picture its name, the captions and what people said."""
    found = []
    for card in page.source.split('<ul class="pictures">')[1].split('<li class="card">')[1:]:
        name = unescape(re.findall(r'<p class="name"><code>(.*?)</code>', card)[0])
        lines = re.findall(r'<p class="words".*?</p>', card, re.S)
        said = [" ".join(re.findall(r'<span class="w[^>]*>(.*?)</span>', line)) for line in lines]
        people = re.findall(r"<li>(.*?)</li>", card)
        found.append((name, [unescape(s) for s in said], [unescape(p) for p in people]))
    return found


def test_every_picture_has_both_captions_and_what_people_said(
    both: Path, dropout: Path, brnn: Path
) -> None:
    before, task = said_by(dropout)
    after, _ = said_by(brnn)
    found = cards(Page(both))
    assert {name for name, _, _ in found} == set(task.pictures("test").names)
    for name, said, people in found:
        assert said == [f"{run.captions[name]} ▪" for run in (before, after)]
        assert people == list(task.pictures("test").references[name])
    differ = [said[0] != said[1] for _, said, _ in found]
    assert any(differ)
    assert differ == sorted(differ, reverse=True)
    assert f"the captions of {sum(differ)} differ" in Page(both).text


def test_the_words_figures_are_those_of_the_library(both: Path, dropout: Path, brnn: Path) -> None:
    page = Page(both)
    runs = [said_by(dropout)[0], said_by(brnn)[0]]
    expected = {run: {each.name: each for each in file.pictures} for run, file in enumerate(runs)}
    passages = iter(page.data["passages"][2:])  # the first are texts of runs, which have none
    assert page.data["passages"][:2] == [[], []]
    for name, said, _ in cards(page):
        for run in range(len(said)):
            own = expected[run][name]
            words = next(passages)
            for word, (_, *figures) in zip(words, own.words, strict=True):
                parts = ("probability", "total", "aleatoric", "epistemic")
                assert [word[part] for part in parts] == pytest.approx(figures, abs=2e-5)
                assert len(word["top"]) == 5
                assert word["top"][0][1] >= word["probability"] - 1e-5
            assert f"confidence {own.confidence:.2f}" in page.source
    assert next(passages, None) is None


def test_tables_and_charts_are_those_of_the_other_commands(
    both: Path, brnn: Path, cli: Cli
) -> None:
    page = Page(both)
    evaluated = json.loads(cli("evaluate", brnn, "--json").out)
    assert page.rows["perplexity_mean"][1] == f"{evaluated['perplexity']:,.2f}"
    lines = [line for line in metrics(brnn) if line["kind"] == "epoch"]
    assert dict(page.lines("complexity_bits")) == {"brnn": [x["complexity_bits"] for x in lines]}
    assert page.rows["last"][1] == f"{lines[-1]['valid_perplexity']:,.4g}"
    assert [name for name, _ in page.lines("speed")] == ["dropout", "brnn"]
    axes = page.data["figures"]["pruning"]["layout"]["yaxis"]["title"]["text"]
    assert axes == "valid perplexity"
    curve = dict(page.lines("pruning"))["brnn"]
    assert curve[0] == pytest.approx(lines[-1]["valid_perplexity"], rel=1e-4)
    risk = dict(page.lines("risk_coverage"))["brnn"]
    assert f"{1 - risk[-1]:.4f}" in page.source  # the accuracy in the table of draws
    assert [name for name, _ in page.lines("signal_to_noise")] == ["brnn"]
    assert {"entropy_gap", "entropies"}.isdisjoint(page.data["figures"])
    assert any(key.startswith("map 1 rnn.weight_hh_l0") for key in page.data["figures"])
    assert "that people said of the test pictures" in page.text


def test_captions_are_scored_and_kept_by_how_sure_they_are(both: Path, brnn: Path) -> None:
    pytest.importorskip("pycocoevalcap", reason="the scorers are not installed")
    page = Page(both)
    found, task = said_by(brnn)
    scores = score_captions(found.captions, task.pictures("test").references)
    assert page.rows["bleu4"][1] == f"{scores.scores['bleu4']:.3f}"
    assert page.rows["cider"][1] == f"{scores.scores['cider']:.3f}"
    by = torch.tensor([each.epistemic for each in found.pictures])
    curve = risk_coverage(by, -torch.from_numpy(scores.by_picture["cider"]))
    kept = page.lines("captions_kept")
    assert [name for name, _ in kept] == ["dropout"] * 2 + ["brnn"] * 2
    assert kept[3][1] == pytest.approx((-curve.risk).tolist())
    assert kept[3][1][-1] == pytest.approx(scores.scores["cider"])


def test_one_run_alone_and_only_some_of_its_words(cli: Cli, brnn: Path, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    options = ("--samples", "0,2", "--tokens", 40, "--out", out, "--json")
    code, said, err = cli("report", brnn, *options)
    assert (code, err) == (0, "")
    (run,) = json.loads(said)["runs"]
    assert 30 <= run["read"] <= 40
    page = Page(out)
    assert f"the first {run['read']} words that people said" in page.text
    assert all(len(said) == 1 for _, said, _ in cards(page))
    assert "differ" not in page.text.split("Picture by picture")[1].split("In figures")[0]
    mixed = cli("report", brnn, "--tokens", 40, "--samples", 0, "--out", out, "--split", "valid")
    assert mixed.code == 0
    assert "valid pictures" in Page(out).text


def test_captions_and_a_text_on_one_page(cli: Cli, brnn: Path, bayes: Path, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    assert cli("report", bayes, brnn, "--samples", "0,2", "--out", out).code == 0
    page = Page(out)
    numbers = [a["data-words"] for _, a in page.tags if "data-words" in a]
    assert numbers == [str(n) for n in (0, *range(2, 11))]
    assert len(page.data["passages"]) == 11
    assert page.data["scales"]["text"] != page.data["scales"]["captions"]


def test_text_of_users_is_never_markup(cli: Cli, brnn: Path, tmp_path: Path) -> None:
    name, words = "<img src=x onerror=alert(1)>.jpg", '</script><script>"&'
    image = {"filename": name, "captions": ["x"], "ptb": [words]}
    images = [{**image, "split": "train", "filename": "1.jpg"}, {**image, "split": "test"}]
    (tmp_path / "captions.json").write_text(json.dumps({"images": images}))
    np.savez(
        tmp_path / "features.npz",
        features=np.ones((2, NUMBERS), np.float16),
        filenames=np.array(["1.jpg", name]),
    )
    out = tmp_path / "page.html"
    options = ("--data", tmp_path / "captions.json", "--samples", 0, "--out", out)
    code, _, err = cli("report", brnn, *options)
    assert (code, err) == (0, "")
    page = Page(out)
    assert "img" not in {tag for tag, _ in page.tags}
    assert [tag for tag, _ in page.tags].count("script") == 3
    assert (cards(page)[0][0], cards(page)[0][2]) == (name, [words])


def test_pictures_at_hand_are_shown_small(cli: Cli, brnn: Path, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="pillow is not installed")
    folder = tmp_path / "pictures"
    folder.mkdir()
    image.new("RGB", (900, 600), "red").save(folder / "test0.jpg")
    (folder / "test1.jpg").write_text("no picture")
    out = tmp_path / "page.html"
    code, _, err = cli("report", brnn, "--pictures", folder, "--samples", 0, "--out", out)
    assert (code, err) == (0, "")
    page = Page(out)
    (shown,) = [a for tag, a in page.tags if tag == "img"]
    assert shown["alt"] == "test0.jpg"
    assert (shown["src"] or "").startswith("data:image/jpeg;base64,")
    assert len(shown["src"] or "") < 20_000
    assert f"8 of these pictures could not be read from {folder}" in page.text
    image.new("RGB", (9, 6)).save(tmp_path / "outside.jpg")
    assert thumbnail(folder, "../outside.jpg") is None
    assert thumbnail(tmp_path, "outside.jpg") is not None


def test_pictures_that_cannot_be_shown_are_said_at_once(
    cli: Cli, brnn: Path, bayes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "page.html"
    gone = cli("report", brnn, "--pictures", tmp_path / "gone", "--out", out)
    assert gone.code == 1
    assert gone.errors == [f"no pictures at {tmp_path / 'gone'}: there is no such folder"]
    other = cli("report", bayes, "--pictures", tmp_path, "--out", out)
    assert other.code == 2
    assert "--pictures is not for a run on text" in other.err
    monkeypatch.setitem(sys.modules, "PIL", None)
    without = cli("report", brnn, "--pictures", tmp_path, "--out", out)
    assert without.code == 1
    assert "pip install 'bayesrnn[features]'" in without.errors[0]
    assert not out.exists()


def spoken(brnn: Path, **captions: str) -> Spoken:
    """As if a run had said that."""
    said_words = {name: text.split() for name, text in captions.items()}
    vocabulary = br.load_vocabulary(brnn)
    figures = dict.fromkeys(
        ("targets", "total", "aleatoric", "epistemic", "variance", "nll", "brier"), torch.zeros(1)
    )
    top = torch.zeros(1, 1)
    found = br.TextUncertainty(1, **figures, top_tokens=top, top_probabilities=top)
    passages = {
        name: Passage(name, words, found, "whitespace", vocabulary)
        for name, words in said_words.items()
    }
    return Spoken(passages, {name: [f"this is {name}"] for name in captions})


def test_pictures_that_differ_come_first_in_an_order_by_the_seed(brnn: Path) -> None:
    before = spoken(brnn, **{f"p{i}": "a dog" for i in range(6)})
    after = spoken(brnn, **{f"p{i}": "a dog" if i % 2 else "a cat" for i in range(6)}, q="a fish")
    found = gather([before, None, after])
    assert [picture.name for picture in found] == [*(f"p{i}" for i in range(6)), "q"]
    assert [list(picture.said) for picture in found] == [[0, 2]] * 6 + [[2]]
    assert found[6].references == ["this is q"]

    def names(pictures: list[Picture]) -> list[str]:
        return [picture.name for picture in pictures]

    assert set(names(sample(found, 1)[:3])) == {"p0", "p2", "p4"}
    assert names(sample(found, 1)) == names(sample(found, 1))
    assert len({tuple(names(sample(found, seed))) for seed in range(5)}) > 1
    assert len(sample(found, 1, 2)) == 2
