"""docs/reference.md says what the docstrings say, of every public name."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import bayesrnn as br
from scripts import load_script

SCRIPT = Path(__file__).resolve().parent.parent / "docs" / "make_reference.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path])  # the script adds results/
        return load_script(SCRIPT)


def test_the_reference_has_not_drifted() -> None:
    command = [sys.executable, str(SCRIPT), "--check"]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr


def test_a_public_name_without_a_theme_or_a_docstring_is_told(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def undocumented() -> None: ...

    monkeypatch.setattr(br, "__all__", [*br.__all__, "undocumented", "no_theme"])
    monkeypatch.setattr(br, "undocumented", undocumented, raising=False)
    themes = (*script.THEMES, script.Theme("Added", "undocumented predict absent"))
    assert script.problems(themes) == [
        "no_theme has no theme in make_reference.py",
        "predict is in the themes twice",
        "absent is in a theme, and bayesrnn has no such name",
        "undocumented has no docstring",
    ]


def test_a_docstring_that_python_made_up_is_none(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of a dataclass is its signature."""
    monkeypatch.setattr(br.Pruned, "__doc__", "Pruned(fraction: float)")
    assert script.problems() == ["Pruned has no docstring"]


def test_calls_are_short_and_alike_on_every_version(script: ModuleType) -> None:
    assert script.call("Bayesian.weights") == "Bayesian.weights(which)"
    assert script.call("UserError") == "UserError"  # its arguments are Python's, not ours
    assert script.call("outputs.Normal") == "outputs.Normal(scale=None)"
    assert "**named_inputs" in script.call("predict")
    assert "levels=(0.05, 0.1, ..., 0.95)" in script.call("evaluate.coverage")
    assert "decode=greedy" in script.call("evaluate_speech")
    assert script.call("Vocabulary") == "Vocabulary(tokens)"  # `index` is not given
    assert script.shown(1 / 3) == "0.3333"


def test_a_sentence_ends_where_the_next_begins(script: ModuleType) -> None:
    text = "The gap (Shen et al. 2024, eq. 7, i.e. so\nmuch). Large is good.\n\nMore."
    assert script.first_sentence(text) == "The gap (Shen et al. 2024, eq. 7, i.e. so much)."
    assert script.first_sentence("Without an end") == "Without an end"
