"""Utterances in batches: those of similar length together, padded."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bayesrnn.data.audio import STEP
from bayesrnn.data.batching import Batch
from bayesrnn.data.padded import PADDING, PaddedLoader
from bayesrnn.data.speech import Utterance
from bayesrnn.errors import UserError

JITTER = 0.1
"""How far, as a part of it, a length is off when utterances are sorted by it."""


class UtteranceLoader(PaddedLoader):
    """A loader of utterances, `streams` at a time, padded; a target is one label.

    - x is [T, B, bands]; the frames behind an utterance's end are NaN.
    - y is [B, S]; the labels behind an utterance's last are `PADDING`.

    T is the longest of a batch, so shapes hardly ever recur. With `lengths` it is one of these, and
    a batch that is not full is filled up with utterances without frames and labels. S is the same
    for all batches. With a `seed`, every epoch mixes utterances and batches anew.

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
        lengths: Sequence[int] | None = None,
    ) -> None:
        counts = [len(one.labels) for one in utterances]
        sizes = [len(one.features) for one in utterances]
        lacks = f"'{name}' has no utterances"
        super().__init__(counts, sizes, lengths, streams, seed, device, lacks)
        if self.targets == 0:
            raise UserError(f"nothing is said in any utterance of '{name}'; give more data")
        self.utterances = utterances
        self._filled = lengths is not None
        # All of it on the device, so that no step copies; one more line: what fills up a batch.
        labels = np.full((len(counts) + 1, max(counts)), PADDING)
        for line, one in enumerate(utterances):
            labels[line, : len(one.labels)] = one.labels
        ends = np.cumsum(sizes)
        self._labels = torch.from_numpy(labels).to(self.device)
        self._starts = torch.from_numpy(np.append(ends - sizes, 0)).to(self.device)
        self._frames = torch.from_numpy(np.append(sizes, 0)).to(self.device)
        self._features = torch.cat([one.features for one in utterances]).to(self.device)

    def _ranked(self, random: np.random.Generator | None) -> NDArray[np.int64]:
        if self._filled or random is None:
            return super()._ranked(random)
        jitter = random.uniform(1 - JITTER, 1 + JITTER, len(self.sizes))
        return np.argsort(self.sizes * jitter, kind="stable")

    def _batch(self, lines: NDArray[np.int64], chosen: Tensor) -> Batch:
        real = lines[lines >= 0]
        if not self._filled:
            chosen = chosen[: len(real)]
        step = torch.arange(self._length(real), device=self.device)[:, None]
        inside = step < self._frames[chosen]  # line -1 is the last: nothing
        places = (self._starts[chosen] + step).masked_fill(~inside, 0)
        frames = self._features[places].float() * STEP
        targets = int(self.counts[real].sum())
        return Batch(
            frames.masked_fill(~inside[..., None], torch.nan),
            self._labels[chosen],
            first=True,
            targets=targets,
            streams=len(chosen),
            share=targets / self.targets,
            padded=True,
        )
