"""`bayesrnn uncertainty`: its figures and files, and one line for whatever is wrong."""

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest

import bayesrnn as br
from bayesrnn.commands import uncertainty
from bayesrnn.commands.temperature import Heat
from bayesrnn.data import encode_file, encode_text
from bayesrnn.evaluate import text_uncertainty
from bayesrnn.train import loop
from labelled_runs import image_recipe, make_sure, review_recipe
from small_runs import Cli, small_recipe, write_text


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    loop.train(small_recipe(folder), folder / "run", quiet=True)
    return folder / "run"


def figures_of(cli: Cli, *arguments: object) -> dict[str, Any]:
    code, out, err = cli("uncertainty", *arguments, "--json")
    told = [line for line in err.splitlines() if not line.startswith("note: the best temperature")]
    assert (code, told) == (0, [])
    return json.loads(out)


def test_the_figures_are_those_of_the_library(cli: Cli, finished: Path) -> None:
    found = figures_of(cli, finished, "--samples", "3,0", "--seed", "5")
    assert (found["text"], found["tokens"], found["detection"]) == ("test", 49, [])
    mean, draws = found["by_draws"]
    assert (mean["samples"], draws["samples"]) == (0, 3)
    assert (mean["epistemic"], mean["variance"]) == (0, 0)
    settings = br.read_recipe(finished / "recipe.toml").data
    assert isinstance(settings, br.TextData)
    ids = br.load_text(settings, br.load_vocabulary(finished)).ids["test"]
    loader = br.StreamLoader(ids, 1, 20)
    expected = text_uncertainty(br.load(finished), loader, (0, 3), seed=5)
    for line, count in ((mean, 0), (draws, 3)):
        for name in ("total", "aleatoric", "epistemic", "variance", "nll", "brier"):
            value = getattr(expected[count], name).mean().item()
            assert line[name] == pytest.approx(value, abs=1e-6)
        assert line["total"] == pytest.approx(line["aleatoric"] + line["epistemic"], abs=1e-6)
        assert {"perplexity", "accuracy", "ece", "adaptive_ece", "aurc"} <= set(line)
    evaluated = json.loads(cli("evaluate", finished, "--json")[1])
    assert mean["perplexity"] == pytest.approx(evaluated["perplexity"], rel=1e-6)


def test_a_temperature_is_searched_for_each_number_of_draws(cli: Cli, finished: Path) -> None:
    searched = figures_of(cli, finished, "--samples", "0,3", "--temperature", "search")
    for line in searched["by_draws"]:
        evaluated = ["evaluate", finished, "--samples", line["samples"]]
        evaluated += ["--temperature", "search", "--json"]
        assert json.loads(cli(*evaluated)[1])["temperature"] == pytest.approx(line["temperature"])


def test_each_number_of_draws_has_a_temperature_of_its_own(
    cli: Cli, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that share one are read together, which changes nothing."""

    def found(heat: object, model: object, valid: object, count: int, *_: object) -> Heat:
        own = {0: 1.5, 1: 0.7, 3: 1.5}[count]
        return Heat(own, {"temperature": own}, {})

    monkeypatch.setattr(uncertainty, "heat_of", found)
    more = ["--gap", "--window", 10]
    searched = figures_of(cli, finished, "--samples", "0,1,3", *more, "--temperature", "search")
    for line, heat in zip(searched["by_draws"], (1.5, 0.7, 1.5), strict=True):
        own = ["--samples", line["samples"], *more]
        monkeypatch.undo()
        alone = figures_of(cli, finished, *own, "--temperature", heat)
        assert alone["by_draws"] == [pytest.approx(line)]
        assert line["temperature"] == heat
        [before] = figures_of(cli, finished, *own)["by_draws"]
        assert "temperature" not in before
        assert line["total"] != before["total"]
        assert (line["total"] > before["total"]) == (heat > 1)
    assert [line["samples"] for line in searched["by_draws"]] == [0, 1, 3]


def test_of_another_text_the_temperature_is_that_of_the_runs_own(
    cli: Cli, finished: Path, tmp_path: Path
) -> None:
    text = tmp_path / "other.txt"
    text.write_text("w1 w2 w3 w4 w5 w6\n" * 30)
    options = ["--samples", "0", "--temperature", "search"]
    [own] = figures_of(cli, finished, *options)["by_draws"]
    [other] = figures_of(cli, finished, *options, "--text", text)["by_draws"]
    assert other["temperature"] == own["temperature"]
    assert other["nll"] != own["nll"]
    data = br.read_recipe(finished / "recipe.toml").data.path
    [moved] = figures_of(cli, finished, *options, "--text", text, "--data", data)["by_draws"]
    assert moved == other
    refused = cli("uncertainty", finished, "--text", text, "--data", data)
    assert (refused.code, "--data is of the run's own text" in refused.err) == (2, True)


def test_the_gap_compares_with_the_reverse_a_shuffle_and_a_foreign_text(
    cli: Cli, finished: Path, tmp_path: Path
) -> None:
    foreign = tmp_path / "foreign.txt"
    foreign.write_text("w1 w1 w1 nobody knows this w1\n" * 9)
    options = ("--samples", "0,4", "--gap", "--foreign", foreign, "--window", 10)
    found = figures_of(cli, finished, *options)
    for line in found["by_draws"]:
        assert line["entropy_gap"] == pytest.approx(line["total_reversed"] - line["total"])
    told = {(line["other"], line["samples"]): line for line in found["detection"]}
    assert set(told) == {(o, n) for o in ("reversed", "shuffled", "foreign") for n in (0, 4)}
    assert told["reversed", 0]["information_auroc"] is None
    assert all(0 <= line["entropy_auroc"] <= 1 for line in told.values())
    assert 0 <= told["foreign", 4]["information_aupr"] <= 1
    assert told["foreign", 4]["windows_other"] == 7
    assert 0 < found["unigram_entropy"] < 3.1


def test_a_table_is_for_people(cli: Cli, finished: Path) -> None:
    code, out, err = cli("uncertainty", finished, "--samples", "0,2", "--gap", "--window", 5)
    assert (code, err) == (0, "")
    assert all(word in out for word in ("epistemic", "total reversed", "entropy gap", "shuffled"))


def test_every_token_of_any_text_is_written(cli: Cli, finished: Path, tmp_path: Path) -> None:
    text = tmp_path / "reversed"  # a name is only a name
    text.write_text('w1 w2 "quoted", w3\nw4\n')
    options = ("--text", text, "--samples", "0,3")
    found = figures_of(cli, finished, *options, "--out", tmp_path / "tokens.csv")
    assert (found["text"], found["tokens"]) == (str(text), 6)
    figures_of(cli, finished, *options, "--out", tmp_path / "tokens.json")
    with (tmp_path / "tokens.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["token"] for row in rows[:6]] == ["w2", "<unk>", "w3", "<eos>", "w4", "<eos>"]
    assert [int(row["place"]) for row in rows] == [1, 2, 3, 4, 5, 6] * 2
    assert [int(row["samples"]) for row in rows] == [0] * 6 + [3] * 6
    for row in rows:
        parts = float(row["aleatoric"]) + float(row["epistemic"])
        assert float(row["total"]) == pytest.approx(parts, abs=1e-6)
        assert 0 < float(row["probability"]) <= float(row["max_probability"]) + 1e-6 < 1
    mean = sum(float(row["nll"]) for row in rows[6:]) / 6
    assert mean == pytest.approx(found["by_draws"][1]["nll"])
    written = json.loads((tmp_path / "tokens.json").read_text())
    assert written["columns"] == list(rows[0])
    assert [[str(v) for v in row] for row in written["rows"]] == [list(r.values()) for r in rows]


def test_a_text_of_ones_own_needs_no_training_text(cli: Cli, tmp_path: Path) -> None:
    loop.train(small_recipe(tmp_path, train={"epochs": 1}), tmp_path / "run", quiet=True)
    (tmp_path / "text.txt").unlink()
    text = write_text(tmp_path, 60, "own.txt")
    assert figures_of(cli, tmp_path / "run", "--text", text)["tokens"] == 59


def test_a_file_is_encoded_as_a_text_in_memory_is(tmp_path: Path) -> None:
    vocabulary = br.Vocabulary(("a", "b", "<eos>", "<unk>"))
    (tmp_path / "text.txt").write_text("a b\n\nc a")
    settings = br.TextData("elsewhere.txt")
    ids = encode_file(tmp_path / "text.txt", settings, vocabulary)
    assert ids.tolist() == encode_text("a b\n\nc a", settings, vocabulary) == [0, 1, 2, 3, 0, 2]


@pytest.mark.parametrize(
    ("wrong", "flag"),
    [
        (["--samples", "few"], "--samples"),
        (["--samples", "3,-1"], "--samples"),
        (["--samples", ""], "--samples"),
        (["--foreign", "a.txt"], "--foreign"),
        (["--window", "5"], "--window"),
        (["--gap", "--window", "0"], "--window"),
        (["--bins", "0"], "--bins"),
        (["--out", "tokens.xls"], "--out"),
        (["--text", "a.txt", "--split", "test"], "--split"),
        (["--text", "a.txt", "--data", "nowhere"], "--data is of the run's own text"),
    ],
)
def test_wrong_use_exits_with_2(wrong: list[str], flag: str, cli: Cli, finished: Path) -> None:
    code, out, err = cli("uncertainty", finished, *wrong)
    assert (code, out) == (2, "")
    assert flag in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("contents", "options", "message"),
    [
        (None, [], "cannot read"),
        (b"", [], "is empty or blank"),
        (b"w1 \0 w2", [], "is binary"),
        (b"w1 \xff", [], "is not UTF-8"),
        (b"w1 w2 w3", ["--gap"], "a text of 3 predicted tokens has no window of 50"),
        (b"w1 w2 w3", ["--out", "gone/tokens.csv"], "there is no folder gone"),
    ],
)
def test_a_text_that_cannot_be_read_is_one_line(
    contents: bytes | None,
    options: list[str],
    message: str,
    cli: Cli,
    finished: Path,
    tmp_path: Path,
) -> None:
    text = tmp_path / "text.txt"
    if contents is not None:
        text.write_bytes(contents)
    code, out, err = cli("uncertainty", finished, "--text", text, *options)
    assert (code, out) == (1, "")
    assert err.startswith("error: ")
    assert message in err
    assert len(err.splitlines()) == 1


def test_a_text_too_short_to_compare_with_is_named(
    cli: Cli, finished: Path, tmp_path: Path
) -> None:
    foreign = tmp_path / "one.txt"
    foreign.write_text("w1")
    code, out, err = cli("uncertainty", finished, "--gap", "--window", 5, "--foreign", foreign)
    assert (code, out) == (1, "")
    assert err == (
        f"error: text {foreign}: a text of 1 predicted tokens has no window of 5; give a longer "
        "text, or a shorter window by --window\n"
    )


def test_classes_have_means_and_calibration(cli: Cli, tmp_path: Path) -> None:
    run = tmp_path / "run"
    loop.train(image_recipe(tmp_path), run, quiet=True)
    found = figures_of(cli, run, "--samples", "0,3")
    mean, draws = found["by_draws"]
    assert found["split"] == "test"
    for line in (mean, draws):
        assert line["predictions"] == found["examples"]
        assert line["total"] == pytest.approx(line["aleatoric"] + line["epistemic"], abs=1e-6)
        assert 0 <= line["classwise_ece"] <= 1
    assert mean["epistemic"] == 0
    evaluated = json.loads(cli("evaluate", run, "--samples", 3, "--json")[1])
    assert draws["nll"] == pytest.approx(evaluated["nll"], rel=1e-5)
    assert 100 * (1 - draws["accuracy"]) == pytest.approx(evaluated["error_percent"])
    code, out, _ = cli("uncertainty", run)
    assert code == 0
    assert "classwise ece" in out
    for flags in (["--gap"], ["--text", "a.txt"], ["--out", "a.csv"]):
        code, _, err = cli("uncertainty", run, *flags)
        assert code == 2
        assert f"{flags[0]} is not for a run on images" in err


def test_the_loss_of_a_class_is_finite_where_its_probability_is_0(cli: Cli, tmp_path: Path) -> None:
    run = tmp_path / "run"
    loop.train(image_recipe(tmp_path), run, quiet=True)
    make_sure(run)
    (line,) = figures_of(cli, run, "--samples", "0")["by_draws"]
    evaluated = json.loads(cli("evaluate", run, "--json").out)
    assert 100 < line["nll"] == evaluated["nll"] < math.inf


def test_numbers_have_variances_and_calibration(cli: Cli, tmp_path: Path) -> None:
    run = tmp_path / "run"
    loop.train(review_recipe(tmp_path), run, quiet=True)
    found = figures_of(cli, run, "--samples", "0,3", "--seed", 5)
    assert (found["split"], found["examples"]) == ("test", 22)
    for line, count in zip(found["by_draws"], (0, 3), strict=True):
        assert (line["samples"], line["predictions"]) == (count, 22)
        assert line["total"] == pytest.approx(line["aleatoric"] + line["epistemic"], rel=1e-5)
        draws = ("--samples", count, "--seed", 5) if count else ()
        evaluated = json.loads(cli("evaluate", run, *draws, "--json").out)
        assert line["nll"] == pytest.approx(evaluated["nll"], rel=1e-5)
        assert line["rmse"] == pytest.approx(evaluated["rmse"], rel=1e-5)
        assert 0 < line["crps"] < line["rmse"]
        assert 0 <= line["coverage_50"] <= line["coverage_90"] <= 1
        assert 0 < line["calibration_error"] <= 0.5
    mean, draws = found["by_draws"]
    assert mean["epistemic"] == 0 < draws["epistemic"]
    scale = mean["aleatoric"] ** 0.5  # one for all reviews
    assert mean["width_90"] == pytest.approx(2 * 1.6448536 * scale, rel=1e-5)
    code, out, err = cli("uncertainty", run)
    assert (code, err) == (0, "")
    assert all(word in out for word in ("variances", "crps", "coverage 90", "calibration error"))
    assert "entropies" not in out
    code, _, err = cli("uncertainty", run, "--bins", 5)
    assert code == 2
    assert "--bins is of classes" in err


def test_what_is_not_finite_is_null_in_json(cli: Cli, tmp_path: Path) -> None:
    """Means so large that the perplexity is beyond a float."""

    def strict(text: str) -> dict[str, Any]:
        return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))

    run = tmp_path / "run"
    loop.train(small_recipe(tmp_path), run, quiet=True)
    make_sure(run, 1e4)
    found = strict(cli("uncertainty", run, "--samples", "0", "--json").out)["by_draws"][0]
    assert found["nll"] > 700
    assert found["perplexity"] is None
    assert strict(cli("evaluate", run, "--json").out)["perplexity"] is None
    curve = strict(cli("prune", run, "--curve", "0,1", "--json").out)
    assert [point["error"] is None for point in curve["points"]] == [True, False]
    page = tmp_path / "page.html"
    report = cli("report", run, "--out", page, "--samples", "0", "--tokens", 20, "--json")
    assert strict(report.out)["runs"][0]["by_draws"][0]["perplexity"] is None


def test_of_points_there_is_the_mean_alone(cli: Cli, tmp_path: Path) -> None:
    plain = {"posterior": {"kind": "delta"}, "prior": {"kind": "uniform"}}
    loop.train(small_recipe(tmp_path, **plain), tmp_path / "run", quiet=True)
    found = figures_of(cli, tmp_path / "run")
    assert [line["samples"] for line in found["by_draws"]] == [0]
    assert figures_of(cli, tmp_path / "run", "--samples", "0") == found
    result = cli("uncertainty", tmp_path / "run", "--samples", "0,10")
    assert result.code == 1
    assert "every draw of" in result.errors[0]
    assert "leave out --samples, or give --samples 0" in result.errors[0]
