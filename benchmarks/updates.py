"""A text that comes in parts, each gone when the next one comes: what a network learns of the new
part, and what it keeps of the old ones.

    python benchmarks/updates.py --out runs/updates --seeds 1,2,3 > updates.json

The text is the demo's, in parts in the order of its years. A Bayesian network goes on from part to
part with the prior of its recipe (`train --start`), or with what it had learnt as the prior
(`Normal("start", "start")`); a plain one just goes on; and networks are trained anew on all parts
so far. After each part, each is scored on the test text of every part. One vocabulary for all, that
of the whole text. Runs that are there already are only measured.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from reproduce import present_commit
from reproduce_job import hardware

import bayesrnn as br
from bayesrnn.data.text import tokenise
from bayesrnn.train.metrics import read_metrics
from bayesrnn.train.task import LanguageTask

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))
from demo import state_of_the_union  # noqa: E402

START = br.Normal("start", "start")
WAYS: dict[str, tuple[str, br.Prior | None, bool]] = {
    "plain": ("demo-plain", None, False),
    "bayesian": ("demo-brnn", None, False),
    "bayesian-start": ("demo-brnn", START, False),
    "plain-all": ("demo-plain", None, True),
    "bayesian-all": ("demo-brnn", None, True),
}
"""The recipe, the prior from the second part on (None: the recipe's), and whether earlier parts are
still there to be trained on anew."""
COMMAND = "python benchmarks/updates.py --out RUNS"
SPLITS = {"train": 0.8, "valid": 0.9, "test": 1.0}
"""Where each ends, as a part of the text's words."""


def cut(lines: Sequence[str], sizes: Sequence[int], ends: Sequence[float]) -> list[list[str]]:
    """Lines in groups that end at these parts of all words."""
    seen = [total / sum(sizes) for total in accumulate(sizes)]
    groups: list[list[str]] = [[] for _ in ends]
    for line, place in zip(lines, seen, strict=True):
        groups[next(i for i, end in enumerate(ends) if place <= end + 1e-9)].append(line)
    return groups


def write_parts(text: Path, count: int, settings: br.TextData, out: Path) -> tuple[list[Path], ...]:
    """Folders of texts: of each part, and of all parts up to each."""

    def size(line: str) -> int:
        return sum(len(piece) for piece in tokenise([line], settings))

    lines = text.read_text(encoding="utf-8").splitlines()
    ends = [(number + 1) / count for number in range(count)]
    single, so_far = [], []
    before: dict[str, list[str]] = {split: [] for split in SPLITS}
    for number, part in enumerate(cut(lines, [size(line) for line in lines], ends), start=1):
        folders = out / f"part-{number}", out / f"parts-to-{number}"
        splits = cut(part, [size(line) for line in part], list(SPLITS.values()))
        for split, own in zip(SPLITS, splits, strict=True):
            before[split] += own
            for folder, group in zip(folders, (own, before[split]), strict=True):
                folder.mkdir(parents=True, exist_ok=True)
                (folder / f"{split}.txt").write_text("\n".join(group) + "\n", encoding="utf-8")
        single.append(folders[0])
        so_far.append(folders[1])
    return single, so_far


def scores(run: Path, parts: Sequence[Path]) -> list[float]:
    """The perplexity of every part's test text."""
    recipe = br.read_recipe(run / "recipe.toml")
    model, words = br.load(run), br.load_vocabulary(run)
    found = []
    for part in parts:
        data = replace(recipe.data, path=str(part))
        task = LanguageTask(replace(recipe, data=data), torch.device("cpu"), words)
        found.append(br.evaluate_text(model, task.stream("test")).perplexity)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="the folder of runs and texts")
    parser.add_argument("--data", type=Path, help="a text file instead of the demo's")
    parser.add_argument("--parts", type=int, default=3)
    parser.add_argument("--seeds", default="1")
    parser.add_argument("--only", default=",".join(WAYS), help="these ways alone")
    parser.add_argument("--commit", default="", help="of the code (default: the checkout's)")
    parser.add_argument("changes", nargs="*", help="of the recipes, such as train.epochs=3")
    given = parser.parse_args()
    text = given.data or state_of_the_union(given.out / "addresses.txt")
    whole = br.read_recipe(ROOT / "recipes" / "demo-brnn.toml", [f"data.path={text}"]).data
    assert isinstance(whole, br.TextData)
    parts, so_far = write_parts(text, given.parts, whole, given.out)
    words = br.load_text(whole).vocabulary
    rows: list[dict[str, Any]] = []
    for seed in map(int, given.seeds.split(",")):
        for way in given.only.split(","):
            name, prior, all_parts = WAYS[way]
            before: Path | None = None
            for number, folder in enumerate(so_far if all_parts else parts, start=1):
                changes = [f"data.path={folder}", f"train.seed={seed}", *given.changes]
                recipe = br.read_recipe(ROOT / "recipes" / f"{name}.toml", changes)
                if prior is not None and before is not None:
                    recipe = replace(recipe, prior=prior)
                run = given.out / f"{way if number > 1 else name}-{number}-{seed}"
                task = LanguageTask(recipe, torch.device("cpu"), words)
                br.train(recipe, run, quiet=True, start=before, task=task)
                epochs = [line for line in read_metrics(run) if line["kind"] == "epoch"]
                row = {
                    "way": way,
                    "seed": seed,
                    "parts": number,
                    "test": scores(run, parts),
                    "valid": [round(line["valid_perplexity"], 2) for line in epochs],
                    "seconds": epochs[-1]["seconds"],
                }
                rows.append(row)
                print(json.dumps(row), file=sys.stderr, flush=True)
                before = None if all_parts else run
    found = {
        "command": " ".join([COMMAND, f"--seeds {given.seeds}", *given.changes]),
        "commit": given.commit or present_commit(),
        **hardware(),
        "tokens": [
            [len(br.load_text(replace(whole, path=str(p)), words).ids[s]) for s in SPLITS]
            for p in parts
        ],
        "rows": rows,
    }
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
