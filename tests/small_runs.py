"""Small runs that several tests share: a text, a recipe, and what there is to compare afterwards.

A test's text has 500 words: 400 to train on, so that 4 streams of 5 steps make 20 steps an epoch,
the last of them one word short.
"""

import json
import os
import random
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import load_file

import bayesrnn
from bayesrnn.recipe import Recipe, from_table, to_toml

EPOCH = 20  # steps
PACKAGE_FOLDER = Path(bayesrnn.__file__).resolve().parent.parent
TIMES = ("seconds", "_per_second")


class Result(NamedTuple):
    """How a command ended: its exit code, what it printed, what it complained of."""

    code: int
    out: str
    err: str

    @property
    def errors(self) -> list[str]:
        """The lines that were said to have gone wrong: one a problem, and nothing else."""
        lines = self.err.splitlines()
        assert "Traceback" not in self.err
        assert all(line.startswith("error: ") and len(line) < 700 for line in lines), self.err
        return [line.removeprefix("error: ") for line in lines]


Cli = Callable[..., Result]


def write_text(folder: Path, words: int = 500, name: str = "text.txt") -> Path:
    """A text in which the next word can be guessed, in part, from the last one."""
    dice = random.Random(7)
    names = [f"w{i}" for i in range(20)]
    place, text = 0, []
    for number in range(words * 9 // 10):
        place = (place * 3 + dice.choice([0, 1, 1, 5])) % len(names)
        text.append(names[place] + ("\n" if number % 9 == 8 else " "))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text("".join(text))
    return path


def changed(table: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe's tables with `changes` merged in, `train={"lr": 1}` say; a posterior and a prior
    are replaced."""
    whole = ("posterior", "prior")
    merged = {k: v if k in whole else {**table.get(k, {}), **v} for k, v in changes.items()}
    return table | merged


def small_table(folder: Path, **changes: Any) -> dict[str, Any]:
    """A recipe's tables, `changed`."""
    table: dict[str, Any] = {
        "data": {"path": str(write_text(folder)), "cache": str(folder / "cache")},
        "model": {"cell": "lstm", "embedding": 6, "hidden": 8, "layers": 2, "init": 0.1},
        "posterior": {"kind": "gaussian", "scale": 0.05},
        "prior": {"kind": "scale_mixture"},
        "train": {
            "epochs": 2,
            "streams": 4,
            "unroll": 5,
            "lr": 0.5,
            "options": {"momentum": 0.9},
            "device": "cpu",
        },
    }
    return changed(table, changes)


def small_recipe(folder: Path, **changes: Any) -> Recipe:
    return from_table(small_table(folder, **changes))


def write_recipe(folder: Path, **changes: Any) -> Path:
    path = folder / "small.toml"
    path.write_text(to_toml(small_recipe(folder, **changes)))
    return path


def train_command(recipe: Path, out: Path, *settings: str) -> list[str]:
    return [sys.executable, "-m", "bayesrnn", "train", str(recipe), *settings, "--out", str(out)]


def environment() -> dict[str, str]:
    """For a process of its own: this package, and one thread, as in the tests."""
    return os.environ | {"PYTHONPATH": str(PACKAGE_FOLDER), "OMP_NUM_THREADS": "1"}


def checkpoint_folders(run: Path) -> list[Path]:
    """Oldest first."""
    return sorted(path for path in (run / "checkpoints").iterdir() if path.name.isdigit())


def metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without what depends on the clock."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.endswith(TIMES)} for line in lines]


def checkpoint_contents(folder: Path) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Every tensor's bytes, and the facts without what depends on the clock, or says how long to
    train and where."""
    tensors = {
        f"{file.name}/{name}": tensor.contiguous().numpy().tobytes()
        for file in folder.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
    facts = json.loads((folder / "manifest.json").read_text())
    for key in ("seconds", "metrics_bytes", "manifest_sha256", "recipe"):
        del facts[key]
    del facts["window"]["seconds"]
    return tensors, facts


def assert_same_end(run: Path, other: Path, with_steps: bool = True) -> None:
    """Parameters, optimiser, random state, position, metrics and model: the same bit for bit."""
    tensors, facts = checkpoint_contents(checkpoint_folders(run)[-1])
    expected_tensors, expected_facts = checkpoint_contents(checkpoint_folders(other)[-1])
    assert tensors.keys() == expected_tensors.keys()
    assert {name for name in tensors if tensors[name] != expected_tensors[name]} == set()
    model = "model/model.safetensors"
    assert (run / model).read_bytes() == (other / model).read_bytes()
    lines, expected_lines = metrics(run), metrics(other)
    if with_steps:
        assert facts == expected_facts
        assert lines == expected_lines
    else:
        assert epochs_only(lines) == epochs_only(expected_lines)


def epochs_only(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in lines if line["kind"] == "epoch"]


def folder_contents(folder: Path) -> Mapping[str, bytes]:
    """Every file below a folder, to see that nothing was touched."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
