"""What the documents show must run, and what they name must exist."""

import ast
import builtins
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.main import get_command

import bayesrnn as br
from bayesrnn.cli import app
from series_runs import write_series

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_example_in_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    Path("book.txt").write_text("the cat sat on the mat and looked at the dog .\n" * 200)
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert code is not None
    found: dict[str, object] = {}
    exec(code[1], found)
    assert found["words"].mean.shape[-1] == len(found["corpus"].vocabulary)  # type: ignore[attr-defined]
    assert Path("my-model/model.safetensors").exists()
    per_word = found["nll"].item() / found["batch"].targets  # type: ignore[attr-defined]
    assert per_word < math.log(len(found["corpus"].vocabulary))  # type: ignore[attr-defined]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_and_paths_in_the_documents_exist(document: Path) -> None:
    text = document.read_text()
    links = [t for t in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in t]
    paths = re.findall(r"`((?:tests|recipes|examples|bayes|train|evaluate)/[\w./-]+)`", text)
    folders = (ROOT, ROOT / "src" / "bayesrnn")
    missing = [t for t in links if not (document.parent / t).exists()]
    missing += [p for p in paths if not any((folder / p).exists() for folder in folders)]
    assert missing == []


def test_functions_in_the_map_from_the_papers_exist() -> None:
    source = "\n".join(p.read_text() for p in (ROOT / "src").rglob("*.py"))
    rows = re.findall(r"^\| .*? \| (.*?) \|", (ROOT / "docs/maths.md").read_text(), re.MULTILINE)
    names = {n for row in rows for n in re.findall(r"`(?:\w+\.)?(\w+)(?:\(.*?\))?`", row)}
    assert len(names) > 10
    missing = [n for n in names if not re.search(rf"(?:def|class) {n}\b|\b{n}:", source)]
    assert missing == []


def test_every_command_and_option_in_the_documents_exists() -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    options = {
        name: {option for parameter in command.params for option in parameter.opts}
        for name, command in commands.items()
    }
    shown = 0
    for document in DOCUMENTS:
        text = document.read_text().replace("\n                  [", " [")  # README's summary
        for line in re.findall(r"bayesrnn ([a-z]+ [^`#\n]*)", "\n".join(_code(text))):
            name, *words = line.split()
            assert name in options, f"{document.name}: bayesrnn {line}"
            flags = {flag for word in words for flag in re.findall(r"--[a-z][a-z-]*", word)}
            assert flags <= options[name] | {"--help"}, f"{document.name}: bayesrnn {line}"
            shown += len(flags)
    assert shown > 60


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_shown_together_write_to_folders_of_their_own(document: Path) -> None:
    """Pasted one after the other, none is refused the folder of the one before."""
    for block in _code(document.read_text()):
        folders = re.findall(r"bayesrnn prune .*--out (\S+)", block)
        assert len(folders) == len(set(folders)), document.name


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_functions_called_in_the_documents_were_imported(document: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", document.read_text(), re.DOTALL | re.MULTILINE)
    nodes = [node for block in blocks for node in ast.walk(ast.parse(block))]
    known = set(dir(builtins))
    known |= {name.asname or name.name for n in nodes if hasattr(n, "names") for name in n.names}
    known |= {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    known |= {n.name for n in nodes if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
    known |= {n.arg for n in nodes if isinstance(n, ast.arg)}
    called = {n.func for n in nodes if isinstance(n, ast.Call)}
    assert {f.id for f in called if isinstance(f, ast.Name)} <= known


def test_the_sharpened_step_of_the_tutorial_runs() -> None:
    text = (ROOT / "docs" / "tutorial.md").read_text()
    (code,) = (c for c in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "Sharpened(" in c)
    loader = br.StreamLoader(np.arange(61) % 11, streams=4, unroll=5)
    known: dict[str, object] = {"br": br, "torch": torch, "net": br.LanguageModel(11, 6, 6, 1)}
    known |= {"batch": next(iter(loader)), "objective": br.FreeEnergy(loader)}
    exec(code, known)
    model = known["model"]
    assert isinstance(model, br.Bayesian)
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_the_example_of_series_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    table = write_series(tmp_path, rows=3000).read_text()
    Path("ETTh1.csv").write_text(table.replace("when,flow,site,heat", "date,HUFL,site,OT"))
    code = re.search(r"```python\n(.*?)```", (ROOT / "docs/series.md").read_text(), re.DOTALL)
    assert code is not None
    known: dict[str, object] = {}
    exec(code[1], known)
    found = known["found"]
    assert isinstance(found, br.Forecast)
    assert found.mean.shape == (24, 1, 2)


def _code(text: str) -> list[str]:
    """The lines of blocks without a language, and what stands in backticks elsewhere."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    blocks = [block for language, block in fenced if not language]
    rest = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return [*blocks, *re.findall(r"`([^`\n]+)`", rest)]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_to_headings_exist(document: Path) -> None:
    links = re.findall(r"\]\(([^)#:]*)#([^)]+)\)", document.read_text())
    for path, heading in links:
        target = (document.parent / path if path else document).read_text()
        headings = re.findall(r"^#+ (.+)$", target, re.MULTILINE)
        anchors = {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}
        assert heading in anchors, f"{document.name}: {path}#{heading}"
