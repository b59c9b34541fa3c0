"""`bayesrnn report` without a browser: what the page says is what was computed."""

import json
import math
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import bayesrnn as br
from bayesrnn.evaluate import entropy_gap, reversed_text, text_uncertainty, unigram_entropy
from bayesrnn.report import Choices, examine, figures, write_page
from bayesrnn.report.figures import watched_key
from bayesrnn.report.page import render
from bayesrnn.report.readings import FRACTIONS
from bayesrnn.train import loop
from labelled_runs import make_sure
from reported import Page
from small_runs import Cli, folder_contents, metrics, small_recipe


@pytest.fixture(scope="module")
def page(bayes: Path, plain: Path, folder: Path) -> Page:
    choices = Choices((0, 1, 3))
    found = [examine(run, run.name, choices, unwatched) for run in (plain, bayes)]
    write_page(found, choices, folder / "page.html")
    return Page(folder / "page.html")


def unwatched(what: str, total: int) -> Callable[[int], None]:
    return lambda done: None


def test_the_command_writes_the_same_page(
    cli: Cli, page: Page, bayes: Path, plain: Path, tmp_path: Path
) -> None:
    out = tmp_path / "page.html"
    code, said, err = cli("report", plain, bayes, "--samples", "0,3,1", "--out", out)
    assert (code, err) == (0, "")
    assert "megabytes" in said
    assert out.read_text() == page.source


def ids_of(run: Path, split: str = "test") -> NDArray[np.int32]:
    settings = br.read_recipe(run / "recipe.toml").data
    assert isinstance(settings, br.TextData)
    return br.load_text(settings, br.load_vocabulary(run)).ids[split]


def text_of(run: Path, split: str = "test") -> br.StreamLoader:
    return br.StreamLoader(ids_of(run, split), 1, 20)


def test_learning_is_that_of_the_metrics(page: Page, bayes: Path, plain: Path) -> None:
    lines = {r.name: [x for x in metrics(r) if x["kind"] == "epoch"] for r in (bayes, plain)}
    assert dict(page.lines("error_bits")) == {
        name: [line["error_bits"] for line in found] for name, found in lines.items()
    }
    assert page.lines("complexity_bits") == [
        ("bayes", [line["complexity_bits"] for line in lines["bayes"]])
    ]
    held_out = [y for name, y in page.lines("held_out") if name == "bayes"]
    assert held_out == [
        [line[key] for line in lines["bayes"]] for key in ("valid_perplexity", "train_perplexity")
    ]
    assert page.rows["last"][1] == f"{lines['bayes'][-1]['valid_perplexity']:,.4g}"
    assert page.rows["complexity_bits"][0] == "–"


def test_the_gap_is_that_of_the_library(page: Page, bayes: Path, plain: Path) -> None:
    ids = ids_of(bayes)
    model = br.load(bayes)
    here = text_uncertainty(model, br.StreamLoader(ids, 1, 512), (0, 1, 3))
    back = text_uncertainty(model, br.StreamLoader(reversed_text(ids), 1, 512), (0, 1, 3))
    gaps = [entropy_gap(here[n], back[n]).gap for n in (0, 1, 3)]
    drawn = dict(page.lines("entropy_gap"))
    assert drawn["bayes"] == pytest.approx(gaps, rel=1e-9)
    assert len(drawn["plain"]) == 3  # points: the same for any number of draws
    assert len(set(drawn["plain"])) == 1
    assert page.rows["entropy_gap"][1] == f"{gaps[-1]:.4f}"
    assert page.rows["perplexity_draws"] == ["–", f"{here[3].summary()['perplexity']:,.2f}"]
    reference = page.data["figures"]["entropies"]["layout"]["annotations"][0]["text"]
    assert reference == f"word frequencies alone: {unigram_entropy(ids):.2f}"


def test_entropies_of_characters_are_said_to_be(bayes: Path, tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path, data={"tokens": "characters"}, train={"epochs": 1})
    loop.train(recipe, tmp_path / "letters", quiet=True)
    found = [
        examine(run, run.name, Choices((0,)), unwatched) for run in (tmp_path / "letters", bayes)
    ]
    for runs, unit in ((found[:1], "character"), (found[1:], "word"), (found, "token")):
        for figure in (*figures.entropy_gap(runs), *figures.entropies(runs)):
            assert figure.layout.yaxis.title.text == f"nats a {unit}"
    said = sorted(note.text.partition(":")[0] for note in figure.layout.annotations)
    assert said == ["character frequencies alone", "word frequencies alone"]
    assert len({note.xanchor for note in figure.layout.annotations}) == 2  # not one on the other


def test_reliability_and_risk_are_of_the_most_draws(page: Page, bayes: Path) -> None:
    found = text_uncertainty(br.load(bayes), text_of(bayes), (3,))[3]
    scores = found.calibration()
    assert page.rows["ece"][1] == f"{scores.ece:.4f}"
    trace = page.data["figures"]["reliability"]["data"][1]
    gaps = [abs(a - c) * n for a, c, n in zip(trace["y"], trace["x"], trace["customdata"])]  # noqa: B905
    assert sum(gaps) / len(found.targets) == pytest.approx(scores.ece, rel=1e-5)
    risk = dict(page.lines("risk_coverage"))["bayes"]
    assert risk[-1] == pytest.approx(1 - scores.accuracy)
    assert len(risk) == len(found.targets)  # a short text: every point of it


def test_the_pruning_curve_is_of_the_pruned_model(page: Page, bayes: Path) -> None:
    curve = dict(page.lines("pruning"))["bayes"]
    for fraction, perplexity in list(zip(FRACTIONS, curve, strict=True))[::5]:
        model = br.load(bayes)
        br.prune(model, fraction=fraction)
        expected = br.evaluate_text(model, text_of(bayes, "valid")).perplexity
        assert perplexity == pytest.approx(expected, rel=1e-5)


def test_the_histogram_counts_every_weight(page: Page, bayes: Path) -> None:
    model = br.load(bayes)
    ratios = torch.cat([ratio.flatten() for ratio in br.signal_to_noise(model).values()])
    ((name, shares),) = page.lines("signal_to_noise")
    assert (name, sum(shares)) == ("bayes", pytest.approx(1.0))
    x = torch.tensor(page.data["figures"]["signal_to_noise"]["data"][0]["x"])
    share_above = sum(s for s, at in zip(shares, x.tolist(), strict=True) if at > 1)
    assert share_above == pytest.approx((ratios >= 1).double().mean().item(), abs=1e-9)
    noisy = (ratios < br.SAFE_THRESHOLD).double().mean().item()
    assert page.rows["noisy"] == ["–", f"{noisy:.1%}"]
    _, top = page.data["figures"]["signal_to_noise"]["layout"]["yaxis"]["range"]
    assert top > 1.1 * max(shares)  # the name of Graves' rule stands above


def test_the_scale_of_bits_has_two_ends(page: Page, bayes: Path) -> None:
    run = examine(bayes, "bayes", Choices((0,)), unwatched)
    gates = [gate.bits for matrix in run.matrices for gate in matrix.gates]
    bits = [each.ravel() for each in gates if each is not None]
    low, high = np.quantile(np.concatenate(bits), (0.005, 0.995))
    ends = re.search(r"(-?[\d.]+) bits(-?[\d.]+) bits and more", page.text.replace("\n", ""))
    assert ends is not None
    assert [float(end) for end in ends.groups()] == pytest.approx([low, high], abs=0.0051)


def test_every_shaded_word_has_its_own_figures(page: Page, bayes: Path) -> None:
    vocabulary = br.load_vocabulary(bayes)
    found = text_uncertainty(br.load(bayes), text_of(bayes), (3,), top=5)[3]
    shown = page.data["passages"][1]
    assert shown[0] is None  # nothing predicts the first
    assert len(shown) == len(found.targets) + 1
    for at, word in enumerate(shown[1:]):
        for part in ("total", "aleatoric", "epistemic", "probability"):
            assert word[part] == pytest.approx(getattr(found, part)[at].item(), abs=2e-5)
        assert [w for w, _ in word["top"]] == vocabulary.decode(found.top_tokens[at].tolist())
    tokens = vocabulary.decode(ids_of(bayes).tolist())
    written = [{"<eos>": "¶", "<unk>": "‹unk›"}.get(token, token) for token in tokens]
    assert page.words[-len(tokens) :] == written
    low, high = page.data["scales"]["text"]["epistemic"]
    values = found.epistemic.numpy()
    assert values.min() <= low < high <= values.max()


def test_a_text_of_ones_own_is_shaded_with_its_unknown_words(
    cli: Cli, bayes: Path, tmp_path: Path
) -> None:
    text = tmp_path / "letter.txt"
    text.write_text("w1 w2 <b>nobody</b> </script> & w3\n")
    code, _, err = cli(
        "report", bayes, "--text", text, "--samples", 2, "--out", tmp_path / "p.html"
    )
    assert (code, err) == (0, "")
    page = Page(tmp_path / "p.html")
    assert page.words == ["w1", "w2", "<b>nobody</b>", "</script>", "&", "w3", "¶"]
    assert [tag for tag, _ in page.tags].count("script") == 3
    classes = [a["class"] for tag, a in page.tags if tag == "span" and "data-i" in a]
    assert ["unknown" in (c or "") for c in classes] == [
        False,
        False,
        True,
        True,
        True,
        False,
        False,
    ]


def test_text_of_users_is_never_markup(bayes: Path, tmp_path: Path, cli: Cli) -> None:
    name = """<img src=x onerror=alert('"')>"""
    run = tmp_path / name
    shutil.copytree(bayes, run)
    code, _, err = cli("report", run, "--samples", "0", "--out", tmp_path / "p.html")
    assert (code, err) == (0, "")
    page = Page(tmp_path / "p.html")
    assert "img" not in {tag for tag, _ in page.tags}
    assert name in page.text
    assert page.lines("error_bits")[0][0] == """&lt;img src=x onerror=alert('"')&gt;"""  # plotly's
    assert not re.search(r"<img", page.source)


def test_the_page_asks_nothing_of_the_network(page: Page) -> None:
    policy = next(a["content"] for t, a in page.tags if t == "meta" and "http-equiv" in a)
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    assert [
        a for t, a in page.tags if a.get("src") or (t == "link" and a["href"] != "data:,")
    ] == []
    assert 1e6 < len(page.source) < 3e6


def test_images_and_numbers_show_what_applies(
    cli: Cli, images: Path, reviews: Path, bayes: Path, tmp_path: Path
) -> None:
    out = tmp_path / "page.html"
    code, _, err = cli("report", images, reviews, "--samples", "0,2", "--out", out)
    assert (code, err) == (0, "")
    page = Page(out)
    assert page.words == []
    assert {"entropy_gap", "entropies"}.isdisjoint(page.data["figures"])
    assert [name for name, _ in page.lines("reliability")] == ["images"]
    assert page.rows["error_percent_mean"][1] == page.rows["rmse_mean"][0] == "–"
    assert "there is no text to shade" in page.text
    assert [name for name, _ in page.lines("coverage")] == ["reviews"]
    assert "in nats a prediction (of numbers: variances)" in page.text
    evaluated = json.loads(cli("evaluate", images, "--json").out)
    assert page.rows["error_percent_mean"][0] == f"{evaluated['error_percent']:.2f} %"
    figures = page.data["figures"]
    plots = ("held_out", "pruning", "pruning-2")
    axes = {key: figures[key]["layout"]["yaxis"]["title"]["text"] for key in plots}
    assert axes["pruning"] == axes["held_out"] == "valid error, %"
    assert axes["pruning-2"] == "test RMSE"  # each score on an axis of its own
    assert [name for name, _ in page.lines("pruning-2")] == ["reviews"]
    code, _, _ = cli("report", images, bayes, "--samples", "0,2", "--out", out)
    assert code == 0
    assert [name for name, _ in Page(out).lines("entropy_gap")] == ["bayes"]


def test_numbers_are_calibrated_by_intervals_of_the_most_draws(
    cli: Cli, reviews: Path, tmp_path: Path
) -> None:
    out = tmp_path / "page.html"
    code, said, err = cli("report", reviews, "--samples", "0,3", "--out", out, "--json")
    assert (code, err) == (0, "")
    page = Page(out)
    expected = json.loads(cli("uncertainty", reviews, "--samples", "0,3", "--json").out)["by_draws"]
    lines = json.loads(said)["runs"][0]["by_draws"]
    for line, found in zip(lines, expected, strict=True):
        assert line == pytest.approx(found, rel=1e-6)
    assert page.rows["crps"] == [f"{expected[1]['crps']:.4f}"]
    assert page.rows["coverage_90"] == [f"{expected[1]['coverage_90']:.1%}"]
    assert page.rows["width_90"] == [f"{expected[1]['width_90']:.4f}"]
    assert page.rows["calibration_error"] == [f"{expected[1]['calibration_error']:.4f}"]
    figure = page.data["figures"]["coverage"]
    (trace,) = figure["data"]
    held = dict(zip(trace["x"], trace["y"], strict=True))
    assert (held[0.5], held[0.9]) == (expected[1]["coverage_50"], expected[1]["coverage_90"])
    gaps = [abs(share - level) for level, share in held.items()]
    assert sum(gaps) / 19 == pytest.approx(expected[1]["calibration_error"])
    (diagonal,) = figure["layout"]["shapes"]
    assert [diagonal[key] for key in ("x0", "y0", "x1", "y1")] == [0, 0, 1, 1]
    assert {"reliability", "risk_coverage"}.isdisjoint(page.data["figures"])
    assert "Uncertainties are variances, by 3 draws" in page.text
    assert "no risk against coverage" in page.text


def test_a_pruned_run_has_no_learning_but_all_the_rest(
    cli: Cli, bayes: Path, tmp_path: Path
) -> None:
    small = tmp_path / "small"
    assert cli("prune", bayes, "--fraction", 0.5, "--out", small).code == 0
    code, _, err = cli("report", small, "--out", tmp_path / "p.html", "--tokens", 30)
    assert (code, err) == (0, "")
    page = Page(tmp_path / "p.html")
    assert "held_out" not in page.data["figures"]
    assert "no metrics.jsonl" in page.text
    assert len(page.lines("pruning")[0][1]) == len(FRACTIONS)


def test_dropout_and_points_among_the_weights_are_said(tmp_path: Path) -> None:
    point = {"kind": "delta"}
    recipes = {
        "dropout": small_recipe(
            tmp_path, posterior=point, prior={"kind": "uniform"}, dropout={"output": 0.5}
        ),
        "mixed": small_recipe(
            tmp_path,
            posterior={"rnn.*": {"kind": "gaussian"}, "*": point},
            prior={"kind": "normal"},
        ),
    }
    found = {}
    for name, recipe in recipes.items():
        loop.train(recipe, tmp_path / name, quiet=True)
        found[name] = examine(tmp_path / name, name, Choices((0, 2)), unwatched)
    dropout, mixed = found["dropout"], found["mixed"]
    assert "only its dropout differs between draws" in dropout.notes[0]
    assert dropout.by_draws[1]["epistemic"] > 0
    assert (dropout.ratios, dropout.matrices[0].gates[0].bits) == (None, None)
    assert "each tensor is pruned by itself" in mixed.notes[0]
    assert len(mixed.pruning) == len(FRACTIONS)
    model = br.load(tmp_path / "mixed")
    ratios = [ratio for name, ratio in br.signal_to_noise(model).items() if name.startswith("rnn.")]
    drawn = torch.cat([ratio.flatten() for ratio in ratios])  # points have no signal to noise
    assert mixed.ratios is not None
    assert mixed.ratios.sum() == len(drawn)
    assert mixed.noisy == (drawn < br.SAFE_THRESHOLD).double().mean().item()


def test_the_loss_of_a_class_is_finite_where_its_probability_is_0(
    cli: Cli, images: Path, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(images, tmp_path / "run"))
    make_sure(run)
    found = examine(run, "run", Choices((0,)), unwatched)
    evaluated = json.loads(cli("evaluate", run, "--json").out)
    assert 100 < found.by_draws[0]["nll"] == evaluated["nll"] < math.inf


def test_nothing_of_a_run_is_changed_and_the_draws_are_the_same_again(
    bayes: Path, tmp_path: Path
) -> None:
    before = folder_contents(bayes)
    choices = Choices((0, 2), tokens=20)
    told: list[int] = []
    pages = [
        render([examine(bayes, "bayes", choices, lambda w, n: told.append)], choices)
        for _ in range(2)
    ]
    assert pages[0] == pages[1]
    assert folder_contents(bayes) == before
    assert sum(told) > 0


def test_json_has_the_figures(cli: Cli, bayes: Path, tmp_path: Path) -> None:
    options = ("--samples", "0,2", "--tokens", 20, "--out", tmp_path / "p.html", "--json")
    found = json.loads(cli("report", bayes, *options).out)
    (run,) = found["runs"]
    assert (run["run"], run["read"], found["page"]) == (str(bayes), 20, str(tmp_path / "p.html"))
    assert [line["samples"] for line in run["by_draws"]] == [0, 2]


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        (["--samples", "few"], "--samples"),
        (["--tokens", "-1"], "--tokens"),
        (["--split", "other"], "--split"),
        (["--out", "page.pdf"], "--out"),
    ],
)
def test_wrong_use_exits_with_2(
    options: list[str], flag: str, cli: Cli, bayes: Path, tmp_path: Path
) -> None:
    code, out, err = cli("report", bayes, "--out", tmp_path / "p.html", *options)
    assert (code, out) == (2, "")
    assert flag in err
    assert not (tmp_path / "p.html").exists()


def test_a_bad_folder_or_missing_data_is_one_line(
    cli: Cli, bayes: Path, images: Path, tmp_path: Path
) -> None:
    out, few = tmp_path / "p.html", ("--samples", 0)

    def said(*arguments: object, code: int = 1) -> str:
        found = cli("report", *arguments)
        assert found.code == code
        assert not out.exists()
        (line,) = found.errors
        return line

    assert said(tmp_path / "gone", "--out", out).endswith(
        "gone is no run to report on: there is no such folder; train one with --out"
    )
    assert "it has no finished model" in said(bayes, tmp_path, "--out", out)
    assert "there is no folder" in said(bayes, "--out", tmp_path / "gone" / "p.html")
    assert "cannot read" in said(bayes, "--text", tmp_path / "gone.txt", "--out", out)
    (tmp_path / "short.txt").write_text("w1")  # with its end of line, one word to predict
    assert cli("report", bayes, "--text", tmp_path / "short.txt", *few, "--out", out).code == 0
    out.unlink()
    moved = tmp_path / "moved"
    loop.train(small_recipe(tmp_path / "d", train={"epochs": 1}), moved, quiet=True)
    text = tmp_path / "elsewhere.txt"
    (tmp_path / "d" / "text.txt").rename(text)
    assert "say where with --data" in said(moved, "--out", out)
    assert "does not exist" in said(moved, "--data", tmp_path / "gone", "--out", out)
    assert cli("report", moved, "--data", text, *few, "--out", out).code == 0
    found = cli("report", images, "--text", text, "--out", out)
    assert found.code == 2
    assert "--text is not for a run on images" in found.err


def test_without_plotly_the_extra_is_named(
    cli: Cli, bayes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    found = cli("report", bayes, "--out", tmp_path / "p.html")
    assert (found.code, found.errors) == (
        1,
        ["a report's charts need plotly; install it with pip install 'bayesrnn[report]'"],
    )


def test_the_watched_figure_is_the_one_that_training_watched(
    bayes: Path, images: Path, reviews: Path
) -> None:
    choices = Choices((0,), tokens=20)
    found = [examine(run, run.name, choices, unwatched) for run in (bayes, images, reviews)]
    assert [watched_key(each) for each in found] == [
        "valid_perplexity",
        "valid_error_percent",
        "test_rmse",
    ]
