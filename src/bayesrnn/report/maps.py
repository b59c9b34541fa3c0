"""Weight matrices as pictures: bits a weight, and the pattern that pruning leaves, gate by gate
(Graves 2011, Figs. 3 and 4; Fortunato 2017, Fig. 5)."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bayesrnn.bayes import Bayesian
from bayesrnn.bayes.cost import weight_bits
from bayesrnn.models.speech import GridLSTM
from bayesrnn.prune import pruning_order

SIDE = 200
"""Dots a side of a picture; of larger matrices only every second (third, ...) row and column."""
DRAWS = 5
"""That costs are averaged over, where they have no closed form."""
GATES = {4: ("input", "forget", "cell", "output"), 3: ("reset", "update", "new"), 1: ("hidden",)}
"""In torch's order."""
RECURRENT = re.compile(r"(?:(.*)\.)?weight_(ih|hh)_l(\d+)(_reverse)?")
GRID = re.compile(r"(.*)\.(\d+)\.weight_(ih|hh)")
GRID_GATES = ("input", "forget in time", "forget in frequency", "output", "cell")
"""Of `GridLSTM`, in its order."""


@dataclass(frozen=True, eq=False)
class Gate:
    """One gate's part of a matrix: rows are the units weights go to, columns where they come
    from."""

    name: str
    bits: NDArray[np.float32] | None
    """None where weights have no description length."""
    mean_bits: float | None
    pruned_at: NDArray[np.float32]
    """The fraction of all the model's weights that is pruned when this one goes: 0 to 1."""
    left: list[float]
    """The share of this gate's weights that is left with 0, 1, ... 100 % of all pruned."""
    step: int
    """Every so many rows and columns are shown."""


@dataclass(frozen=True, eq=False)
class Matrix:
    """A weight by its own name, what it connects in words, and its gates."""

    name: str
    title: str
    gates: list[Gate]


def matrices(model: Bayesian, generator: torch.Generator | None = None) -> list[Matrix]:
    """The matrices of all recurrent layers; of a network without any, all its matrices."""
    order = pruning_order(model)
    flat = [name for name, each in order.items() if each.dim() == 2]
    chosen = [name for name in order if _is_recurrent(model, name)] or flat
    bits = weight_bits(model, DRAWS, generator, chosen)
    return [_matrix(model, name, bits.get(name), order[name]) for name in chosen]


def _is_recurrent(model: Bayesian, name: str) -> bool:
    if GRID.fullmatch(name):
        return isinstance(model.module.get_submodule(name.rpartition(".")[0]), GridLSTM)
    return RECURRENT.fullmatch(name) is not None


def _matrix(model: Bayesian, name: str, bits: Tensor | None, order: Tensor) -> Matrix:
    if order.dim() == 3:
        return _grid(name, bits, order)
    found = RECURRENT.fullmatch(name)
    if found is None:
        return Matrix(name, name, [_gate("", bits, order)])
    path, source, layer, backwards = found.groups()
    owner = model.module.get_submodule(path or "")
    count = order.shape[0] // int(owner.hidden_size)  # type: ignore[arg-type]
    names = GATES.get(count, tuple(f"part {i}" for i in range(1, count + 1)))
    whence = "its input" if source == "ih" else "its own last state"
    title = f"Layer {int(layer) + 1}{', backwards' if backwards else ''}: from {whence}"
    return Matrix(name, title, _gates(names, bits, order))


def _grid(name: str, bits: Tensor | None, order: Tensor) -> Matrix:
    """Of a `GridLSTM`: [directions, from, gates and units], with directions side by side."""
    found = GRID.fullmatch(name)
    assert found is not None
    whence = "its input" if found[3] == "ih" else "the states before it in time and in frequency"
    title = f"Level {int(found[2]) + 1}: from {whence}, four directions side by side"
    return Matrix(
        name, title, _gates(GRID_GATES, None if bits is None else _flat(bits), _flat(order))
    )


def _flat(grid: Tensor) -> Tensor:
    """[gates and units, directions and from]."""
    return grid.permute(2, 0, 1).flatten(1)


def _gates(names: Sequence[str], bits: Tensor | None, order: Tensor) -> list[Gate]:
    """The rows of a matrix, gate by gate."""
    count = len(names)
    of_bits = [None] * count if bits is None else bits.chunk(count)
    return [_gate(*gate) for gate in zip(names, of_bits, order.chunk(count), strict=True)]


def _gate(name: str, bits: Tensor | None, order: Tensor) -> Gate:
    step = -(-max(order.shape) // SIDE)
    shown = (slice(None, None, step), slice(None, None, step))
    at = torch.arange(101, dtype=torch.float64, device=order.device) / 100
    gone = torch.searchsorted(order.flatten().sort().values, at, right=True)
    return Gate(
        name,
        None if bits is None else bits[shown].float().cpu().numpy(),
        None if bits is None else bits.double().mean().item(),
        order[shown].float().cpu().numpy(),
        (1 - gone / order.numel()).tolist(),
        step,
    )
