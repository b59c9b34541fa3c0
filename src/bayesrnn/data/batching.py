"""Batches, and long texts or series as parallel streams, with state carried from cut to cut."""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray
from torch import Tensor

from bayesrnn.errors import UserError, WrongData, require


@dataclass(frozen=True, eq=False)
class Batch:
    """One step's data: a cut through all streams of a text, or examples, captions, utterances."""

    x: Tensor
    """The inputs. Text: [T, B] token ids, int64, time first. Series: [T, B, columns]. Examples:
    [B, ...]. Captions: [1 + T, B], a row of pictures, then words. Utterances: [T, B, bands]."""
    y: Tensor
    """The targets. Text and series: the same, one step later. Examples: [B]. Captions: [T, B]
    words. Utterances: [B, S] labels."""
    first: bool
    """Whether the carried state starts from zero here; with examples always, as they have none."""
    targets: int
    """How many numbers in y are to be predicted."""
    streams: int
    """How many sequences lie side by side: B."""
    share: float
    """The part of the epoch's targets that is in this batch; sums to 1 over an epoch."""
    padded: bool = False
    """Some of y is not to be predicted, so batches of one shape may differ in targets and share."""


class Loader(Protocol):
    """What training needs of a loader: counted targets, and a position within an epoch."""

    targets: int
    """How many targets an epoch has."""
    left_over: int
    dropped: int
    device: torch.device
    position: int
    """The number of the next batch. After an epoch it is 0 again; set it to go on from there."""
    epoch: int
    """The number of the epoch, for loaders whose order depends on it."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Batch]: ...


class Batches(ABC):
    """The base class of the loaders here, with a position to go on from within the epoch `epoch`.

    A loader says how many batches an epoch has, and how each is made.
    """

    epoch: int = 0
    _position: int = 0

    @abstractmethod
    def __len__(self) -> int:
        """The number of batches in an epoch."""

    @abstractmethod
    def _maker(self) -> Callable[[int], Batch]:
        """What makes a batch of this epoch, given its number."""

    @property
    def position(self) -> int:
        """The number of the next batch: i + 1 while batch i is in use, and 0 again after the epoch.

        Set it to a saved value to go on from there; `len(loader)` is the same as 0.
        """
        return self._position

    @position.setter
    def position(self, batch: int) -> None:
        require((0 <= batch <= len(self), "position", f"must be in 0..{len(self)}, got {batch}"))
        self._position = batch

    def __iter__(self) -> Iterator[Batch]:
        """The batches from `position` to the end of the epoch."""
        if self._position == len(self):
            self._position = 0
        make = self._maker()
        while self._position < len(self):
            here = self._position
            self._position = here + 1
            yield make(here)
        self._position = 0

    def whole(self, advance: Callable[[int], None] | None = None) -> Iterator[Batch]:
        """The epoch from its first batch, wherever `position` is; that stays.

        `advance` is called with the number of targets of each batch once you are done with it.
        """
        beside = copy.copy(self)
        beside.position = 0
        for batch in beside:
            yield batch
            if advance is not None:
                advance(batch.targets)


class StreamLoader(Batches):
    """A loader of a text or series: `streams` parts of it side by side, in cuts of `unroll` steps.

    - `ids`: the token ids [N] of a text, or the rows [N, columns] of a series, all of whose numbers
      are targets.
    - `streams`, `unroll`: the parts are contiguous. Of N tokens each stream predicts L = (N - 1) //
      streams, every one exactly once. The last cut is shorter unless L is a multiple of `unroll`.
    - `drop_last`: leave that shorter cut out.

    `targets` counts an epoch's predictions, `left_over` those (fewer than `streams`) at the end of
    the text that fit no stream, `dropped` those of a last cut that is left out.

    >>> loader = StreamLoader(np.arange(8), streams=2, unroll=2)
    >>> [batch.x.tolist() for batch in loader]
    [[[0, 3], [1, 4]], [[2, 5]]]
    >>> loader.targets, loader.left_over, loader.dropped
    (6, 1, 0)
    """

    def __init__(
        self,
        ids: NDArray[np.integer[Any]] | NDArray[np.floating[Any]],
        streams: int,
        unroll: int,
        drop_last: bool = False,
        device: torch.device | str = "cpu",
        name: str = "text",
        key: str = "streams",
    ) -> None:
        """`name` and `key` are what error messages call the text and the number of streams."""
        ids = np.asarray(ids)
        tokens = ids.ndim == 1 and np.issubdtype(ids.dtype, np.integer)
        series = ids.ndim == 2 and np.issubdtype(ids.dtype, np.floating)
        require(
            (streams >= 1, "streams", f"must be at least 1, got {streams}"),
            (unroll >= 1, "unroll", f"must be at least 1, got {unroll}"),
            (
                tokens or series,
                "ids",
                "must be one row of token ids, or rows of numbers, got "
                f"{ids.dtype} {list(ids.shape)}",
            ),
        )
        length = (len(ids) - 1) // streams
        _check_length(len(ids), streams, unroll if drop_last else 1, series, name, key)
        self.name = name
        self.streams = streams
        self.unroll = unroll
        self.device = torch.device(device)
        used = length - length % unroll if drop_last else length
        columns = ids.shape[1:]
        self._width = math.prod(columns)  # predictions a step of a stream
        self.targets = streams * used * self._width
        self.left_over = (len(ids) - 1 - streams * length) * self._width
        self.dropped = streams * (length - used) * self._width
        self._steps = used
        self._dtype = np.dtype(np.float32 if series else np.int64)
        step, *inner = ids.strides
        # Row b is tokens b * length .. (b + 1) * length, so a row's last is the next one's first.
        shape, strides = (streams, length + 1, *columns), (length * step, step, *inner)
        self._rows = as_strided(ids, shape, strides, writeable=False)
        self._device_rows: Tensor | None = None  # on a GPU the whole text: no copying every step
        if self.device.type != "cpu":
            stored = np.array(ids, dtype=np.float32 if series else np.int32, order="C")
            text = torch.from_numpy(stored).to(self.device)
            width = self._width
            on_device = (length * width, width, *((1,) if series else ()))
            self._device_rows = text.as_strided(shape, on_device)

    def __len__(self) -> int:
        """The number of cuts in an epoch."""
        return -(-self._steps // self.unroll)

    def _maker(self) -> Callable[[int], Batch]:
        return self._batch  # a text is read in its order in every epoch

    def _batch(self, cut: int) -> Batch:
        start = cut * self.unroll
        stop = min(start + self.unroll, self._steps)
        if self._device_rows is None:
            rows = self._rows[:, start : stop + 1].swapaxes(0, 1)
            steps = torch.from_numpy(np.array(rows, dtype=self._dtype, order="C"))
        else:
            there = self._device_rows[:, start : stop + 1].transpose(0, 1)
            kind = torch.float32 if there.is_floating_point() else torch.int64
            steps = there.to(kind, copy=True, memory_format=torch.contiguous_format)
        targets = (stop - start) * self.streams * self._width
        return Batch(
            x=steps[:-1],
            y=steps[1:],
            first=cut == 0,
            targets=targets,
            streams=self.streams,
            share=targets / self.targets,
        )


def _check_length(count: int, streams: int, steps: int, series: bool, name: str, key: str) -> None:
    """Refuse a text, or series, that is too short for so many streams of `steps` steps."""
    if (count - 1) // streams >= steps:
        return
    what, unit, more = ("series", "rows", "rows") if series else ("text", "tokens", "text")
    held = f"{what} '{name}' has {count} {unit}, fewer than {streams} streams"
    if count > streams:
        raise UserError(
            f"{held} of {steps} steps need ({streams * steps + 1}); lower {key} or "
            f"{key.replace('streams', 'unroll')}, or give more {more}"
        )
    problem = f"{held} need ({streams + 1})"
    if key.startswith("train."):
        raise WrongData(problem, f"a longer {what}", key if streams > 1 else "data.split")
    lower = f"lower {key}, or " if streams > 1 else ""
    raise UserError(f"{problem}; {lower}give more {more}")
