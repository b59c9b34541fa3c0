"""Checkpoints a run can be resumed from bit for bit: raw tensors and a manifest, no pickle.

`checkpoints/<step>/` holds the newest two. The newest that passes its checksums is used; a damaged
one is named and passed over.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayesrnn.errors import UserError
from bayesrnn.storage import Damaged, read_facts, read_folder, write_folder

MANIFEST = "manifest.json"
KEPT = 2
HOW = ("fused", "foreach", "capturable", "differentiable")
"""An optimiser's settings that say how it computes on a device, not what."""


class Checkpoint(NamedTuple):
    """Tensors by file and name, and plain facts."""

    tensors: dict[str, dict[str, Tensor]]
    facts: dict[str, Any]


def write_checkpoint(folder: Path, step: int, checkpoint: Checkpoint) -> None:
    """Write `folder/<step>`, then drop all but the newest two."""
    write_folder(
        folder / f"{step:09d}", "checkpoint", MANIFEST, checkpoint.tensors, checkpoint.facts
    )
    for old in steps_of(folder)[:-KEPT]:
        shutil.rmtree(old, ignore_errors=True)


def read_newest_checkpoint(folder: Path, warn: Callable[[str], None]) -> Checkpoint | None:
    """The newest good checkpoint, or None where there is none at all.

    A damaged one is reported through `warn` and skipped; if all are damaged, that is an error.
    """
    steps = steps_of(folder)
    for path in reversed(steps):
        try:
            return Checkpoint(*read_folder(path, "checkpoint", MANIFEST))
        except Damaged as error:
            warn(f"skipping a damaged checkpoint: {error}")
    if steps:
        raise UserError(
            f"every checkpoint in {folder} is damaged; start over with --fresh, or restore a copy"
        )
    return None


def newest_facts(folder: Path) -> dict[str, Any]:
    """Those of the newest good checkpoint; empty where there is none."""
    for path in reversed(steps_of(folder)):
        try:
            return read_facts(path, "checkpoint", MANIFEST)
        except UserError:
            continue
    return {}


def steps_of(folder: Path) -> list[Path]:
    """The checkpoints there, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.name.isdigit())


def pack_optimizer(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """An optimiser's state as named tensors and plain facts."""
    state = optimizer.state_dict()
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, Any] = {}
    for index, entries in state["state"].items():
        for name, value in entries.items():
            (tensors if isinstance(value, Tensor) else numbers)[f"{index}.{name}"] = value
    groups = [
        {k: v.item() if isinstance(v, Tensor) else v for k, v in group.items() if k not in HOW}
        for group in state["param_groups"]
    ]
    return tensors, {"numbers": numbers, "groups": json.loads(json.dumps(groups))}


def unpack_optimizer(
    optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]
) -> None:
    """The inverse of `pack_optimizer`."""
    state: dict[int, dict[str, Any]] = {}
    for key, value in (*tensors.items(), *facts["numbers"].items()):
        index, _, name = key.partition(".")
        state.setdefault(int(index), {})[name] = value
    groups = [
        {k: tuple(v) if isinstance(v, list) and k != "params" else v for k, v in group.items()}
        | {k: mine[k] for k in HOW if k in mine}
        for group, mine in zip(facts["groups"], optimizer.param_groups, strict=True)
    ]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
