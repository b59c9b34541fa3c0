"""Loaders of padded sequences, those of similar length together; captions among them."""

from abc import abstractmethod
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bayesrnn.data.batching import Batch, Batches
from bayesrnn.errors import UserError, require

PADDING = -1
"""In y, where there is nothing to predict."""


class PaddedLoader(Batches):
    """Sequences of different lengths, `streams` at a time, those of similar length together.

    - `sizes`: the steps of each sequence.
    - `lengths`: if given, a batch is padded to one of them, so that an epoch has few shapes and a
      GPU can replay each; otherwise to the longest sequence in it.
    - `counts`: the targets of each sequence. Padding counts nowhere, so each batch's share of the
      KL is exact, however ragged it is.
    - `seed`: with one, every epoch mixes sequences and batches anew, depending on the seed and
      `epoch` alone; without one, `order` says what is where.
    """

    def __init__(
        self,
        counts: Sequence[int],
        sizes: Sequence[int],
        lengths: Sequence[int] | None,
        streams: int,
        seed: int | None,
        device: torch.device | str,
        lacks: str,
    ) -> None:
        require((streams >= 1, "streams", f"must be at least 1, got {streams}"))
        if not counts:
            raise UserError(f"{lacks}; give more data")
        self.counts, self.sizes = np.array(counts), np.array(sizes)
        # What a sequence may be padded to.
        self.lengths = np.unique(sizes if lengths is None else lengths)
        longest = self.sizes.max()
        require((longest <= self.lengths[-1], "lengths", f"must reach {longest}, the longest"))
        self._bucket = np.searchsorted(self.lengths, self.sizes)
        self.streams, self.seed = streams, seed
        self.device = torch.device(device)
        self.targets = int(self.counts.sum())
        self.left_over = self.dropped = 0

    def __len__(self) -> int:
        """The number of batches in an epoch."""
        return -(-len(self.counts) // self.streams)

    def _ranked(self, random: np.random.Generator | None) -> NDArray[np.int64]:
        """All sequences, similar lengths next to each other; mixed as far as that allows."""
        lines = np.arange(len(self.sizes))
        if random is not None:
            lines = random.permutation(lines)
        return lines[np.argsort(self._bucket[lines], kind="stable")]

    def _length(self, lines: NDArray[np.int64]) -> int:
        """The steps of a batch of these."""
        return int(self.lengths[self._bucket[lines].max()])

    @property
    def order(self) -> NDArray[np.int64]:
        """[batches, streams]: which sequence is in each place of this epoch; -1 is none."""
        random = None if self.seed is None else np.random.default_rng([self.seed, self.epoch])
        filled = np.full(len(self) * self.streams, -1, dtype=np.int64)
        filled[: len(self.counts)] = self._ranked(random)
        batches = filled.reshape(len(self), self.streams)
        return batches if random is None else random.permutation(batches)

    def _maker(self) -> Callable[[int], Batch]:
        order = self.order
        on_device = torch.from_numpy(order).to(self.device)
        return lambda here: self._batch(order[here], on_device[here])

    @abstractmethod
    def _batch(self, lines: NDArray[np.int64], chosen: Tensor) -> Batch:
        """These sequences, -1 being none; `chosen` are the same on the device."""


class CaptionLoader(PaddedLoader):
    """A loader of captions, `streams` at a time, in batches that have one of few shapes.

    - x is [1 + T, B]: the row of each caption's picture, then the words that are read, which begin
      with `end`.
    - y is [T, B]: the words to predict, which end with `end`, then `PADDING`.

    T is one of `lengths`. A batch that is not full is filled up with nothing but padding. `targets`
    counts words and end marks. `pictures` has the row of each caption's picture, and `captions` its
    word ids with the end mark. With a `seed`, every epoch mixes captions and batches anew.

    >>> captions = [[5, 2], [6, 7, 2], [2]]
    >>> loader = CaptionLoader([0, 0, 1], captions, end=2, streams=2, lengths=[2, 3])
    >>> [(batch.y.tolist(), batch.targets) for batch in loader]
    [([[5, 2], [2, -1]], 3), ([[6, -1], [7, -1], [2, -1]], 3)]
    """

    def __init__(
        self,
        pictures: Sequence[int],
        captions: Sequence[Sequence[int]],
        end: int,
        streams: int,
        lengths: Sequence[int],
        seed: int | None = None,
        device: torch.device | str = "cpu",
        name: str = "train",
    ) -> None:
        counts = [len(caption) for caption in captions]
        super().__init__(
            counts, counts, lengths, streams, seed, device, f"'{name}' has no captions"
        )
        require(
            (
                len(pictures) == len(captions),
                "pictures",
                f"must be one a caption ({len(captions)}), got {len(pictures)}",
            ),
            (min(counts) >= 1, "captions", "must each have an end mark at least"),
        )
        # One more line: the padding that fills up a batch.
        table = np.full((len(captions) + 1, 1 + self.lengths[-1]), PADDING, dtype=np.int32)
        for line, (picture, caption) in enumerate(zip(pictures, captions, strict=True)):
            table[line, : 1 + len(caption)] = [picture, *caption]
        self._table = torch.from_numpy(table).to(self.device)
        self._end = end

    def _batch(self, lines: NDArray[np.int64], chosen: Tensor) -> Batch:
        real = lines[lines >= 0]
        length = self._length(real)
        targets = int(self.counts[real].sum())
        columns = self._table[chosen, : 1 + length].T.long()  # line -1 is the last: padding
        y = columns[1:]
        x = columns.clamp_min(0)
        x[1:] = torch.where(y < 0, self._end, y).roll(1, dims=0)
        x[1] = self._end
        return Batch(
            x=x,
            y=y.contiguous(),
            first=True,
            targets=targets,
            streams=self.streams,
            share=targets / self.targets,
            padded=True,
        )


def choose_lengths(counts: Sequence[int] | NDArray[np.int64], most: int) -> list[int]:
    """At most `most` lengths to pad to, so that all together are padded least.

    >>> choose_lengths([2, 2, 3, 9, 10], most=2)
    [3, 10]
    """
    require((most >= 1, "most", f"must be at least 1, got {most}"))
    sizes, numbers = np.unique(np.asarray(counts), return_counts=True)
    below = np.concatenate([[0], np.cumsum(numbers)])  # captions among the first so many sizes
    # cost[j]: the least for the sizes before j, with the last of them as one of the lengths.
    cost = np.concatenate([[0.0], np.full(len(sizes), np.inf)])
    paths: list[list[int]] = [[] for _ in cost]
    for _ in range(min(most, len(sizes))):
        before, known = cost.copy(), [list(path) for path in paths]
        for j in range(1, len(cost)):
            tries = before[:j] + (below[j] - below[:j]) * sizes[j - 1]
            best = int(tries.argmin())
            if tries[best] < cost[j]:
                cost[j], paths[j] = tries[best], [*known[best], int(sizes[j - 1])]
    return paths[-1]
