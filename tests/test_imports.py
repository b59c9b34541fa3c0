"""Imports go one way, in the order that CONTRIBUTING.md gives."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import bayesrnn

PACKAGE = Path(bayesrnn.__file__).parent
RULES = (Path(__file__).parent.parent / "CONTRIBUTING.md").read_text()
EXCEPTIONS = {("recipe", "train.settings")}


def imported(path: Path) -> Iterator[str]:
    """The package's modules that a file imports, without the package's name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("bayesrnn."):
            yield (node.module or "").removeprefix("bayesrnn.")


def test_a_module_imports_those_to_its_left_alone() -> None:
    said = re.search(r"\*\*Imports go one way\*\*: (.*?)\. ", RULES, re.DOTALL)
    assert said is not None
    order = [part.strip().split(", ") for part in said[1].split("->")]
    rank = {name: place for place, names in enumerate(order) for name in names}
    assert {"data", "bayes", "recipe", "compress", "cli"} <= rank.keys()
    wrong = [
        f"{path.relative_to(PACKAGE)} imports {module}"
        for path in PACKAGE.rglob("*.py")
        for module in imported(path)
        if (part := path.relative_to(PACKAGE).with_suffix("").parts[0]) in rank
        and rank.get(module.split(".")[0], 0) > rank[part]
        and (part, module) not in EXCEPTIONS
    ]
    assert wrong == []
