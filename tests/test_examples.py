"""The examples run, and show what they say they show."""

import ast
import importlib
import sys
from pathlib import Path

import pytest

from scripts import load_script

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
SCRIPTS = sorted([*EXAMPLES.glob("*.py"), *(ROOT / "benchmarks").glob("*.py")])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_what_a_script_imports_of_the_package_is_there(script: Path) -> None:
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("bayesrnn"):
            module = importlib.import_module(node.module or "")
            assert [name.name for name in node.names if not hasattr(module, name.name)] == []


def test_a_drifted_sensor_makes_the_draws_disagree_more() -> None:
    known, drifted = load_script(EXAMPLES / "sensor.py").main(epochs=80)
    assert drifted > 1.5 * known


def test_the_demo_trains_both_twins_on_a_text_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    book = tmp_path / "book.txt"
    book.write_text("the cat sat on the mat and looked at the dog .\n" * 300)
    small = ["train.epochs=2", "model.hidden=16", "model.embedding=16"]
    arguments = ["--data", str(book), "--out", str(tmp_path / "runs"), "--samples", "2"]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "argv", ["demo.py", *arguments, *small, "train.max_steps=3"])
    with pytest.raises(SystemExit, match="demo-plain was stopped early"):
        load_script(EXAMPLES / "demo.py").main()
    monkeypatch.setattr(sys, "argv", ["demo.py", *arguments, *small])
    load_script(EXAMPLES / "demo.py").main()
    shown = capsys.readouterr().out
    assert "test perplexity, 2 draws" in shown
    assert (tmp_path / "runs/report.html").read_text().count('data-figure="entropy_gap"') == 1
    assert (tmp_path / "runs/demo-brnn/model/model.safetensors").exists()
