"""Utterances in batches: those of similar length together, padded."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from bayesrnn.data.audio import STEP
from bayesrnn.data.batching import Batch
from bayesrnn.data.padded import PADDING, PaddedLoader
from bayesrnn.data.speech import Utterance

JITTER = 0.1
"""How far, as a part of it, a length is off when utterances are sorted by it."""


class UtteranceLoader(PaddedLoader):
    """Utterances, `streams` at a time: x [T, B, bands], where the frames behind an utterance's end
    are NaN, and y [B, S], where the labels behind its last are `PADDING`. A target is one label.
    T is the longest of a batch, so shapes hardly ever recur.

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
        counts = [len(one.labels) for one in utterances]
        super().__init__(counts, streams, seed, device, f"'{name}' has no utterances")
        self.utterances = utterances
        self._frames = np.array([len(one.features) for one in utterances])

    def _ranked(self, random: np.random.Generator | None) -> NDArray[np.int64]:
        lengths = self._frames.astype(np.float64)
        if random is not None:
            lengths = lengths * random.uniform(1 - JITTER, 1 + JITTER, len(lengths))
        return np.argsort(lengths, kind="stable")

    def _maker(self) -> Callable[[int], Batch]:
        order = self.order.tolist()
        return lambda here: self._batch([self.utterances[i] for i in order[here] if i >= 0])

    def _batch(self, chosen: Sequence[Utterance]) -> Batch:
        x = pad_sequence([one.features.float() * STEP for one in chosen], padding_value=torch.nan)
        labels = [torch.tensor(one.labels, dtype=torch.int64) for one in chosen]
        y: Tensor = pad_sequence(labels, batch_first=True, padding_value=PADDING)
        targets = sum(len(one.labels) for one in chosen)
        return Batch(
            x.to(self.device),
            y.to(self.device),
            first=True,
            targets=targets,
            streams=len(chosen),
            share=targets / self.targets,
            padded=True,
        )
