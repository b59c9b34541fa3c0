"""Parts of the data: to train on, to validate, to test."""

import math
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from bayesrnn.errors import Check

T = TypeVar("T")
SPLITS = ("train", "valid", "test")


def sum_to_one(split: Sequence[float]) -> bool:
    return math.isclose(sum(split), 1, abs_tol=1e-6)


def check_fractions(split: Sequence[float]) -> Check:
    """What `split` must be where no part may be empty; for `require`."""
    fits = len(split) == 3 and all(part > 0 for part in split) and sum_to_one(split)
    return fits, "split", f"must be three fractions above 0 that sum to 1, got {list(split)}"


def split_places(count: int, split: Sequence[float]) -> dict[str, slice]:
    """Where each part is among so many, in their order; each bound is the nearest.

    >>> split_places(7, (0.5, 0.25, 0.25))
    {'train': slice(0, 4, None), 'valid': slice(4, 5, None), 'test': slice(5, 7, None)}
    """
    train, valid, _ = split
    bounds = (0, round(count * train), round(count * (train + valid)), count)
    return {name: slice(*bounds[i : i + 2]) for i, name in enumerate(SPLITS)}


def split_at_random(items: Sequence[T], split: Sequence[float], seed: int) -> dict[str, list[T]]:
    """The parts, shuffled by the seed."""
    order = np.random.default_rng(seed).permutation(len(items))
    places = split_places(len(items), split)
    return {name: [items[i] for i in order[place]] for name, place in places.items()}
