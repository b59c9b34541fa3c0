"""Utterances in batches: those of similar length together, padded."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from bayesrnn.data.audio import STEP
from bayesrnn.data.batching import Batch
from bayesrnn.data.speech import Utterance
from bayesrnn.errors import UserError, require

JITTER = 0.1
"""How far, as a part of it, a length is off when utterances are sorted by it."""


class UtteranceLoader:
    """Utterances, `streams` at a time: x [T, B, bands], where the frames behind an utterance's end
    are NaN, and y [B, S], where the labels behind its last are -1. A target is one label.

    With a `seed` every epoch has batches and an order of its own, a function of the seed and
    `epoch` alone; without one it is the order of the lengths.

    >>> sounds = [Utterance("a", "s", torch.ones(4, 1, dtype=torch.int8), (1, 2, 2)),
    ...           Utterance("b", "s", torch.ones(3, 1, dtype=torch.int8), (1,))]
    >>> batch = next(iter(UtteranceLoader(sounds, streams=2)))
    >>> batch.y.tolist(), batch.targets
    ([[1, -1, -1], [1, 2, 2]], 4)
    >>> batch.x.isnan().sum(dim=0).flatten().tolist()
    [1, 0]
    """

    def __init__(
        self,
        utterances: Sequence[Utterance],
        streams: int,
        seed: int | None = None,
        device: torch.device | str = "cpu",
        name: str = "train",
    ) -> None:
        require((streams >= 1, "streams", f"must be at least 1, got {streams}"))
        if not utterances:
            raise UserError(f"there are no utterances of {name}; give more data")
        self.utterances = utterances
        self.streams = streams
        self.device = torch.device(device)
        self.seed = seed
        self.epoch = 0
        self.targets = sum(len(one.labels) for one in utterances)
        self.left_over = self.dropped = 0
        self._frames = np.array([len(one.features) for one in utterances])
        self._position = 0

    def __len__(self) -> int:
        """Batches in an epoch."""
        return -(-len(self.utterances) // self.streams)

    @property
    def position(self) -> int:
        """The next batch, just as `StreamLoader.position`; within the epoch that `epoch` says."""
        return self._position

    @position.setter
    def position(self, batch: int) -> None:
        require((0 <= batch <= len(self), "position", f"must be in 0..{len(self)}, got {batch}"))
        self._position = batch

    def __iter__(self) -> Iterator[Batch]:
        """From `position` to the end of the epoch."""
        if self._position == len(self):
            self._position = 0
        batches = self.order()
        while self._position < len(self):
            chosen = batches[self._position]
            self._position += 1
            yield self._batch([self.utterances[i] for i in chosen])
        self._position = 0

    def order(self) -> list[list[int]]:
        """The places of the utterances of each batch of this epoch."""
        lengths = self._frames.astype(np.float64)
        dice = None if self.seed is None else np.random.default_rng([self.seed, self.epoch])
        if dice is not None:
            lengths = lengths * dice.uniform(1 - JITTER, 1 + JITTER, len(lengths))
        ranked = np.argsort(lengths, kind="stable").tolist()
        batches = [ranked[i : i + self.streams] for i in range(0, len(ranked), self.streams)]
        if dice is not None:
            batches = [batches[i] for i in dice.permutation(len(batches))]
        return batches

    def _batch(self, chosen: Sequence[Utterance]) -> Batch:
        x = pad_sequence([one.features.float() * STEP for one in chosen], padding_value=torch.nan)
        labels = [torch.tensor(one.labels, dtype=torch.int64) for one in chosen]
        y: Tensor = pad_sequence(labels, batch_first=True, padding_value=-1)
        targets = sum(len(one.labels) for one in chosen)
        return Batch(
            x.to(self.device),
            y.to(self.device),
            first=True,
            targets=targets,
            streams=len(chosen),
            share=targets / self.targets,
        )
