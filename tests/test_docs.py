"""What the documents show must run, and what they name must exist."""

import ast
import builtins
import copy
import json
import math
import re
from collections.abc import Mapping
from dataclasses import fields
from itertools import zip_longest
from pathlib import Path

import pytest
import torch
from typer.main import get_command

import bayesrnn as br
from bayesrnn.cli import app
from bayesrnn.models import LanguageSettings
from bayesrnn.recipe import DATA, MODELS, POSTERIORS, PRIORS, BayesSettings
from bayesrnn.train.settings import TrainSettings
from series_runs import write_series

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_example_in_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    Path("book.txt").write_text("the cat sat on the mat and looked at the dog .\n" * 200)
    found: dict[str, object] = {}
    for code in _python(ROOT / "README.md"):
        exec(code, found)
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


def test_commands_shown_on_pages_that_go_on_from_each_other_write_to_folders_of_their_own() -> None:
    """Pasted one after the other, none is refused the folder of one before."""
    folders: list[str] = []
    for page in ("tutorial", "uncertainty", "pruning", "compression"):
        code = "\n".join(_code((ROOT / "docs" / f"{page}.md").read_text()))
        folders += re.findall(r"bayesrnn (?:prune|compress) .*--out (\S+)", code)
        folders += re.findall(r'compress_run\(".*?", "(.*?)"', code)
    assert len(folders) > 8
    assert sorted(set(folders)) == sorted(folders)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_functions_called_in_the_documents_were_imported(document: Path) -> None:
    nodes = [node for block in _python(document) for node in ast.walk(ast.parse(block))]
    known = set(dir(builtins))
    known |= {name.asname or name.name for n in nodes if hasattr(n, "names") for name in n.names}
    known |= {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    known |= {n.name for n in nodes if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
    known |= {n.arg for n in nodes if isinstance(n, ast.arg)}
    called = {n.func for n in nodes if isinstance(n, ast.Call)}
    assert {f.id for f in called if isinstance(f, ast.Name)} <= known


@pytest.fixture(scope="module")
def tutorial(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, object]]:
    """A folder with a text and two runs on it, and what the tutorial's code has made there."""
    folder = tmp_path_factory.mktemp("tutorial")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        lines = [f"The cat saw {i % 7} mats on {i % 11} chairs.\n" for i in range(1500)]
        Path("book.txt").write_text("".join(lines))
        sizes = ["model.embedding=8", "model.hidden=8", "train.max_steps=5", "train.unroll=20"]
        for run, seed in (("book", 1), ("book-2", 2)):
            changes = ["data.path=book.txt", f"train.seed={seed}", *sizes]
            recipe = br.read_recipe(ROOT / "recipes" / "demo-brnn.toml", changes)
            br.train(recipe, Path("runs") / run, quiet=True)
        known: dict[str, object] = {}
        for code in _python(ROOT / "docs" / "tutorial.md"):
            exec(code, known)
    return folder, known


def test_the_tutorial_runs_from_top_to_bottom(tutorial: tuple[Path, dict[str, object]]) -> None:
    _, known = tutorial
    model, looking, p, trained = (known[name] for name in ("model", "looking", "p", "trained"))
    assert isinstance(model, br.Bayesian)
    assert isinstance(looking, br.Bayesian)
    assert all(w.grad is not None for w in looking.parameters() if w.requires_grad)
    assert isinstance(p, br.Prediction)
    torch.testing.assert_close(p.total, p.aleatoric + p.epistemic)
    assert isinstance(trained, br.Bayesian)


@pytest.mark.parametrize("page", ["uncertainty", "pruning", "compression"])
def test_a_page_that_goes_on_from_the_tutorial_runs(
    page: str, tutorial: tuple[Path, dict[str, object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, known = tutorial
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    known = known | {"model": copy.deepcopy(known["model"])}
    for code in _python(ROOT / "docs" / f"{page}.md"):
        exec(code, known)


def test_the_example_of_series_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    table = write_series(tmp_path, rows=3000).read_text()
    Path("ETTh1.csv").write_text(table.replace("when,flow,site,heat", "date,HUFL,site,OT"))
    known: dict[str, object] = {}
    for code in _python(ROOT / "docs" / "series.md"):
        exec(code, known)
    found = known["found"]
    assert isinstance(found, br.Forecast)
    assert found.mean.shape == (24, 1, 2)


def test_every_key_of_a_recipe_is_in_the_documents_with_its_default() -> None:
    text, priors, images, reviews = _keys_shown("recipes")
    others: list[tuple[str, dict[str, type]]] = [
        ("dropout", {"": br.DropoutSettings}),
        ("bayes", {"": BayesSettings}),
        ("train", {"": TrainSettings}),
    ]
    _check_keys(text, *others, ("data", {"": br.TextData}), ("model", {"": LanguageSettings}))
    _check_keys(priors, ("posterior", POSTERIORS), ("prior", PRIORS))
    shown = {"images": images, "reviews": reviews}
    shown |= {kind: _keys_shown(kind)[0] for kind in ("captions", "speech", "series")}
    for kind, data in DATA.items():
        if kind != "text":
            _check_keys(shown[kind], ("data", {"": data}), ("model", {"": MODELS[data]}))


def _keys_shown(page: str) -> list[dict[str, str]]:
    """Of each table of keys in a page: the keys and what stands there as their defaults."""
    text = (ROOT / "docs" / f"{page}.md").read_text()
    tables = []
    for table in re.findall(r"^\| key.*\n\|---.*\n((?:\|.*\n)+)", text, re.MULTILINE):
        shown: dict[str, str] = {}
        for row in table.splitlines():
            first, *_, last = row.split("|")[1:-1]
            keys = re.findall(r"`(\w+\.\w+)`", first)
            parts = [part.strip() for part in re.findall(r"`[^`]*`|[^`,]+", last)]
            defaults = [part for part in parts if part]
            if len(defaults) == 1:  # that of all
                defaults *= len(keys)
            shown |= dict(zip_longest(keys, defaults, fillvalue=""))
        tables.append(shown)
    return tables


def _check_keys(shown: Mapping[str, str], *settings: tuple[str, Mapping[str, type]]) -> None:
    """Each table of a recipe is one of these classes, and each of its fields is shown."""
    known = {
        f"{table}.{field.name}": field
        for table, classes in settings
        for each in classes.values()
        for field in fields(each)
    }
    tables = [table for table, _ in settings]
    own = {k for k in shown if k.split(".")[0] in tables and not k.endswith(".kind")}
    assert own == {key for key in known if not key.endswith(".kind")}
    for key, field in known.items():
        if shown.get(key, "").startswith("`"):
            assert shown[key].strip("`") == json.dumps(field.default), key


def _python(document: Path) -> list[str]:
    """The Python that a document shows, block by block."""
    return re.findall(r"^```python\n(.*?)^```$", document.read_text(), re.DOTALL | re.MULTILINE)


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
