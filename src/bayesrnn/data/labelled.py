"""Examples that each have one target, in batches whose order a seed decides."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from bayesrnn.data.batching import Batch, Batches
from bayesrnn.data.vocabulary import Vocabulary
from bayesrnn.errors import UserError, require


@dataclass(frozen=True, eq=False)
class Examples:
    """Inputs x [N, ...], their targets y [N] (int64 classes or float numbers), and their names."""

    x: Tensor
    y: Tensor
    names: Sequence[str]

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True, eq=False)
class Labelled:
    """Examples by split.

    `digest` is the checksum of the files' contents; `vocabulary` is None where no words are read.
    """

    splits: Mapping[str, Examples]
    digest: str
    vocabulary: Vocabulary | None = None

    def part(self, split: str) -> Examples:
        """The examples of a split, or of "all" splits, one after the other."""
        if split == "all":
            parts = list(self.splits.values())
            x, y = torch.cat([each.x for each in parts]), torch.cat([each.y for each in parts])
            return Examples(x, y, [name for each in parts for name in each.names])
        if split not in self.splits:
            raise UserError(
                f"there is no {split!r} set, only {', '.join(self.splits)}; choose one of them, or "
                "set data.split"
            )
        return self.splits[split]


class ExampleLoader(Batches):
    """A loader of examples, `streams` at a time, each a sequence of its own.

    With a `seed` every epoch has an order of its own, which depends on the seed and `epoch` alone;
    without one, it is the given order. The last batch is smaller unless the number of examples is a
    multiple of `streams`; `drop_last` leaves that one out. All examples are kept on the device.
    `name` is what error messages call them.

    >>> examples = Examples(torch.arange(5.0), torch.arange(5), "abcde")
    >>> loader = ExampleLoader(examples, streams=2)
    >>> [batch.y.tolist() for batch in loader]
    [[0, 1], [2, 3], [4]]
    """

    def __init__(
        self,
        examples: Examples,
        streams: int,
        drop_last: bool = False,
        seed: int | None = None,
        device: torch.device | str = "cpu",
        name: str = "train",
    ) -> None:
        require((streams >= 1, "streams", f"must be at least 1, got {streams}"))
        count = len(examples)
        if count == 0 or (drop_last and count < streams):
            raise UserError(
                f"'{name}' has {count} examples, fewer than a batch needs "
                f"({streams if drop_last else 1}); lower train.streams or give more data"
            )
        self.streams = streams
        self.device = torch.device(device)
        self.seed = seed
        self.targets = count - count % streams if drop_last else count
        self.left_over = 0
        self.dropped = count - self.targets
        self.x, self.y = examples.x.to(self.device), examples.y.to(self.device)

    def __len__(self) -> int:
        """The number of batches in an epoch."""
        return -(-self.targets // self.streams)

    def _maker(self) -> Callable[[int], Batch]:
        return partial(self._batch, self._order())

    def _order(self) -> Tensor | None:
        if self.seed is None:
            return None
        order = np.random.default_rng([self.seed, self.epoch]).permutation(len(self.y))
        return torch.from_numpy(order).to(self.device)

    def _batch(self, order: Tensor | None, number: int) -> Batch:
        start = number * self.streams
        stop = min(start + self.streams, self.targets)
        if order is None:
            x, y = self.x[start:stop], self.y[start:stop]
        else:
            chosen = order[start:stop]
            x, y = self.x[chosen], self.y[chosen]
        size = stop - start
        return Batch(x, y, first=True, targets=size, streams=size, share=size / self.targets)
