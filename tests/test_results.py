"""RESULTS.md and README's table say what results/summary.json says, and nothing else."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = "# title\n\n<!-- results:begin -->\n<!-- results:end -->\n\nthe end\n"


def run(root: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / "results" / "make_tables.py"), *flags]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def entry(**changes: Any) -> dict[str, Any]:
    made_up = {
        "value": 12.5,
        "unit": "perplexity",
        "published": None,
        "seeds": [0, 1],
        "hardware": "a laptop | one core",
        "command": "bayesrnn train toy.toml --out runs/toy",
        "commit": "0123abc",
        "log": "toy.json",
    }
    return made_up | changes


def record(root: Path, summary: Any) -> None:
    (root / "results" / "summary.json").write_text(json.dumps(summary))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A small repository: the script, one raw log, a README with markers, no results."""
    (tmp_path / "results").mkdir()
    shutil.copy(ROOT / "results" / "make_tables.py", tmp_path / "results")
    (tmp_path / "results" / "toy.json").write_text('{"perplexity": [12.0, 13.0]}')
    (tmp_path / "README.md").write_text(README)
    record(tmp_path, {})
    return tmp_path


def test_the_repository_has_not_drifted():
    checked = run(ROOT, "--check")
    assert checked.returncode == 0, checked.stderr


def test_an_empty_summary_says_so(root: Path):
    assert run(root).returncode == 0
    assert "No results have been recorded yet." in (root / "RESULTS.md").read_text()
    assert "No results have been recorded yet." in (root / "README.md").read_text()
    assert run(root, "--check").returncode == 0


def test_an_entry_is_rendered_in_both_files(root: Path):
    record(root, {"toy.brnn.valid": entry(), "other.lstm.test": entry(value=3, published=4.25)})
    assert run(root).returncode == 0
    page, readme = (root / "RESULTS.md").read_text(), (root / "README.md").read_text()
    assert page.index("## toy") < page.index("## other")
    assert (
        "| `brnn.valid` | 12.5 perplexity | - | 0, 1 | a laptop \\| one core "
        "| `bayesrnn train toy.toml --out runs/toy` | `0123abc` | [log](<results/toy.json>) |"
    ) in page
    assert "| `toy.brnn.valid` | 12.5 perplexity | - | a laptop \\| one core |" in readme
    assert "| `other.lstm.test` | 3 perplexity | 4.25 | a laptop \\| one core |" in readme
    assert readme.startswith("# title\n")
    assert readme.endswith("\n\nthe end\n")
    assert run(root, "--check").returncode == 0


def test_a_changed_value_is_caught_and_nothing_is_written(root: Path):
    record(root, {"toy.brnn.valid": entry()})
    run(root)
    record(root, {"toy.brnn.valid": entry(value=11.5)})
    before = (root / "RESULTS.md").read_text(), (root / "README.md").read_text()
    checked = run(root, "--check")
    assert checked.returncode == 1
    assert "RESULTS.md differs" in checked.stderr
    assert "README.md differs" in checked.stderr
    assert "make results" in checked.stderr
    assert ((root / "RESULTS.md").read_text(), (root / "README.md").read_text()) == before


def test_an_edit_by_hand_is_caught(root: Path):
    run(root)
    page = root / "RESULTS.md"
    page.write_text(page.read_text() + "and the best in the world\n")
    checked = run(root, "--check")
    assert checked.returncode == 1
    assert "RESULTS.md differs" in checked.stderr
    assert "README.md" not in checked.stderr


def test_all_problems_are_named_at_once(root: Path):
    (root / "results" / "broken.json").write_text("{")
    without_unit = entry()
    del without_unit["unit"]
    record(
        root,
        {
            "valid": entry(),
            "toy.a.valid": without_unit | {"note": "hello"},
            "toy.b.valid": entry(value=True, published="79", seeds=3, commit="HEAD", hardware=""),
            "toy.c.valid": entry(log="absent.json"),
            "toy.d.valid": entry(log="broken.json"),
            "toy.e.valid": entry(log="../README.md"),
            "toy.f.valid": 12.5,
        },
    )
    checked = run(root)
    assert checked.returncode == 1
    expected = [
        "valid: a key must read <task>.<model>.<metric> or <task>.<metric>",
        "toy.a.valid: unit is missing",
        "toy.a.valid: note is not a known field",
        "toy.b.valid: value must be a finite number, got true",
        'toy.b.valid: published must be a finite number or null, got "79"',
        "toy.b.valid: seeds must be a list",
        "toy.b.valid: hardware must be one line of text",
        "toy.b.valid: commit must be 7 to 40 hexadecimal digits",
        "toy.c.valid: log: results/absent.json does not exist",
        "toy.d.valid: log: results/broken.json is not valid JSON",
        "toy.e.valid: log: must be a file of its own under results/",
        "toy.f.valid: must be an object",
    ]
    lines = checked.stderr.splitlines()
    assert len(lines) == len(expected)
    for line, start in zip(lines, expected, strict=True):
        assert line.startswith(start)
    assert not (root / "RESULTS.md").exists()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "is not valid JSON"),
        ("[]", "must be one object"),
        ('{"a.b.c": 1, "a.b.c": 2}', "the same key twice: a.b.c"),
        ('{"a.b.c": NaN}', "NaN is not JSON"),
    ],
)
def test_a_summary_that_is_not_one_json_object(root: Path, text: str, problem: str):
    (root / "results" / "summary.json").write_text(text)
    checked = run(root)
    assert checked.returncode == 1
    assert problem in checked.stderr


def test_readme_must_have_its_markers(root: Path):
    (root / "README.md").write_text("# title\n")
    checked = run(root)
    assert checked.returncode == 1
    assert "README.md must hold <!-- results:begin -->" in checked.stderr
