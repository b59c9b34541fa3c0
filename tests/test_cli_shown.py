"""What a person at a terminal sees: whole names, units, one line where something is wrong."""

import io
import json
import os
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from typer.core import TyperArgument
from typer.main import get_command

from bayesrnn import cli as command_line
from bayesrnn.commands import evaluate as evaluate_command
from bayesrnn.commands import report as report_command
from bayesrnn.commands import tables, texts
from bayesrnn.commands import uncertainty as uncertainty_command
from bayesrnn.data import read_features
from bayesrnn.errors import UserError
from bayesrnn.train import loop
from bayesrnn.train.progress import Reporter
from labelled_runs import review_recipe
from small_runs import Cli, small_recipe


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shown")
    loop.train(small_recipe(folder), folder / "run", quiet=True)
    return folder / "run"


def test_every_command_is_told_in_one_line() -> None:
    for command in command_line.app.registered_commands:
        assert command.callback is not None
        first, *rest = (command.callback.__doc__ or "").split("\n")
        assert rest[:1] == [""], f"{command.callback.__name__}: more than a line"
        assert len(first) <= 64, f"{command.callback.__name__}: too long for 80 columns"


def test_arguments_are_called_as_the_documents_call_them() -> None:
    arguments = {
        parameter.metavar
        for command in get_command(command_line.app).commands.values()  # type: ignore[attr-defined]
        for parameter in command.params
        if isinstance(parameter, TyperArgument)
    }
    assert arguments == {"RUN", "RECIPE", "KEY=VALUE", "FILE", "PICTURES"}


def test_a_title_wider_than_its_table_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    tables.columns([{"samples": 10}], "by the number of draws (0: the mean)")
    title, *table = capsys.readouterr().out.splitlines()
    assert title == "by the number of draws (0: the mean)"
    assert max(map(len, table)) < len(title)


def test_every_nll_has_its_unit(capsys: pytest.CaptureFixture[str]) -> None:
    tables.show({"train_nll": 0.5, "valid_nll": 0.6, "best_valid_nll": 0.6}, "training", False)
    assert capsys.readouterr().out.count("nll (nats each)") == 3


def test_ctrl_c_is_said(run: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(texts, "evaluate_text", interrupted)
    assert cli("evaluate", run) == (130, "", "interrupted\n")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("nowhere/x{}", "there is no folder"),
        ("taken{}", "it is a folder; give the name of a file"),
        ("pipe{}", "it is no regular file; give the name of a file"),
        ("link{}", "it is no regular file; give the name of a file"),
        ("locked/x{}", "is read-only; choose another"),
    ],
)
@pytest.mark.parametrize(
    ("command", "flag", "ending"),
    [
        (report_command, "--out", ".html"),
        (uncertainty_command, "--out", ".csv"),
        (evaluate_command, "--predictions", ".csv"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_the_work(
    command: object,
    flag: str,
    ending: str,
    target: str,
    message: str,
    run: Path,
    tmp_path: Path,
    cli: Cli,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / f"taken{ending}").mkdir()
    (tmp_path / "locked").mkdir()
    os.mkfifo(tmp_path / f"pipe{ending}")
    (tmp_path / f"link{ending}").symlink_to(tmp_path / f"pipe{ending}")
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "locked")
    work = "examine" if command is report_command else "load_runs"
    monkeypatch.setattr(command, work, lambda *given: pytest.fail("it was begun"))
    name = command.__name__.rpartition(".")[2]  # type: ignore[attr-defined]
    path = tmp_path / target.format(ending)
    result = cli(name, run, flag, path)
    assert result.code == 1
    assert len(result.errors) == 1
    assert str(path) in result.errors[0]
    assert message in result.errors[0]


@pytest.mark.parametrize(
    ("contents", "message"),
    [(None, "cannot read {}: No such file"), ("\n", "{} is empty or blank")],
)
def test_a_text_that_cannot_be_shaded_is_refused_before_the_work(
    contents: str | None,
    message: str,
    run: Path,
    tmp_path: Path,
    cli: Cli,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    letter = tmp_path / "letter.txt"
    if contents is not None:
        letter.write_text(contents)
    monkeypatch.setattr(report_command, "examine", lambda *given: pytest.fail("it was begun"))
    result = cli("report", run, "--text", letter, "--out", tmp_path / "page.html")
    assert result.code == 1
    [line] = result.errors
    assert message.format(letter) in line


def test_a_report_says_where_the_metrics_are_damaged(run: Path, tmp_path: Path, cli: Cli) -> None:
    copied = tmp_path / "run"
    shutil.copytree(run, copied)
    whole = (copied / "metrics.jsonl").read_text()
    (copied / "metrics.jsonl").write_text(whole + '{"kind": "st')
    page = tmp_path / "page.html"
    result = cli("report", copied, "--out", page, "--samples", "0", "--tokens", "20")
    assert (result.code, result.err) == (0, "")
    assert f"line {len(whole.splitlines()) + 1} is not JSON" in page.read_text()


def test_what_is_known_of_a_run_whose_metrics_are_gone_is_shown(
    run: Path, tmp_path: Path, cli: Cli
) -> None:
    copied = tmp_path / "run"
    shutil.copytree(run, copied)
    (copied / "metrics.jsonl").unlink()
    found = cli("train", copied / "recipe.toml", "--out", copied, "--json", "--quiet")
    assert found.code == 0, found.err
    figures = json.loads(found.out)
    epochs = small_recipe(tmp_path).train.epochs
    assert (figures["epochs"], figures["kept_epoch"], figures["finished"]) == (epochs, epochs, True)
    assert figures["valid_perplexity"] is figures["best_valid_perplexity"] is None
    assert cli("train", copied / "recipe.toml", "--out", copied, "--quiet").code == 0
    assert cli("evaluate", copied).code == 0
    page = tmp_path / "page.html"
    one_more = [f"train.epochs={epochs + 1}"]
    assert cli("train", copied / "recipe.toml", *one_more, "--out", copied, "--quiet").code == 0
    assert cli("report", copied, "--out", page, "--samples", "0", "--tokens", "20").code == 0
    assert f"Of its learning {epochs} epochs are not shown" in page.read_text()


def test_names_are_not_cut_in_a_narrow_terminal(
    run: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    result = cli("prune", run, "--fraction", "0.5", "--out", tmp_path / "small")
    assert result.code == 0
    assert "embedding.weight" in result.out
    assert "rnn.weight_ih_l0" in result.out
    assert "percent left" in result.out
    assert "…" not in result.out


def test_names_of_users_are_no_markup(
    run: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(run, "r[v2]:dog:")
    Path("z[/b]").mkdir(parents=True)
    Path("z[/b]/t.txt").write_text("w1 w2 w3\n")
    for name, asked in {
        "r[v2]:dog:": ["prune", "r[v2]:dog:", "--curve", "0,0.5"],
        "small[v2]": ["prune", run, "--fraction", "0.5", "--out", "small[v2]"],
        "z[/b]/t.txt": ["uncertainty", run, "--text", "z[/b]/t.txt"],
    }.items():
        result = cli(*asked)
        assert (result.code, result.err) == (0, "")
        assert name in result.out


def test_the_bar_shows_names_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    terminal = partial(Console, file=shown, force_terminal=True, width=200)
    monkeypatch.setattr(tables, "Console", lambda stderr: terminal())
    with tables.watching() as watch:
        watch("run[v2][/b]: reading", 1)(1)
    assert "run[v2][/b]: reading" in shown.getvalue()


def test_a_table_has_what_was_measured_with_its_unit(run: Path, cli: Cli) -> None:
    unmeasured = ("expected nll", "error bits", "uniform bits", "ratio")
    by_the_mean = cli("evaluate", run).out
    assert "nll (nats each)" in by_the_mean
    assert "complexity bits" in by_the_mean
    assert not any(figure in by_the_mean for figure in unmeasured)
    described = cli("evaluate", run, "--split", "train", "--samples", "2").out
    assert all(figure in described for figure in unmeasured)
    found = json.loads(cli("evaluate", run, "--json").out)
    assert found["ratio"] is None
    assert found["expected_nll"] is None
    assert "2e-05" in cli("evaluate", run, "--dynamic", "0.00002").out


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_the_bar_leaves_room_for_the_steps_and_the_time(
    columns: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("FORCE_COLOR", "1")
    line = {"epoch": 12, "step": 1234, "words_per_second": 34567.0, "nll": 6.943}
    reporter = Reporter(tmp_path / "log.txt", 12345, 0)
    reporter.figures({**line, "kl": 1309532.0, "perplexity": 1036.0}, "words")
    reporter.step(1234)
    reporter.close()
    shown = capsys.readouterr().err
    assert "1234/12345" in shown.replace(" 1234/", "1234/")
    assert "perplexity 1,036.0" in shown
    assert ("kl 1,309,532" in shown) == (columns == 120)
    assert "…" not in shown


def test_features_without_the_array_are_named_in_plain_words(tmp_path: Path) -> None:
    np.savez(tmp_path / "bad.npz", vectors=np.zeros((2, 3), np.float32))
    with pytest.raises(UserError, match=r"bad\.npz has no 'features'; it must hold"):
        read_features(tmp_path / "bad.npz")


def test_one_review_is_too_few_and_the_remedy_is_said(tmp_path: Path) -> None:
    recipe = review_recipe(tmp_path)
    folder = Path(recipe.data.path)
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "subj.me").write_text("good film\n")
    (folder / "rating.me").write_text("0.9\n")
    with pytest.raises(UserError, match=r"too few reviews \(1\).*with more, or change data.split"):
        loop.train(recipe, tmp_path / "run", quiet=True)


def test_a_case_that_is_not_timed_is_one_line(cli: Cli) -> None:
    result = cli("bench", "--case", "nope")
    assert result.code == 1
    assert len(result.errors) == 1
    assert "there is no case 'nope'; there are: plain" in result.errors[0]


@pytest.mark.parametrize(("kind", "weights"), [("delta", "plain"), ("gaussian", "Bayesian")])
def test_a_training_says_what_it_trains(kind: str, weights: str, tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path, posterior={"kind": kind}, train={"max_steps": 1})
    loop.train(recipe, tmp_path / "run", quiet=True)
    said = (tmp_path / "run/log.txt").read_text()
    assert f" {weights} weights, 1 steps, 396 words an epoch (without the last 3" in said
