"""Captions from a captioner: greedy, drawn, or the best of a beam; from the posterior mean, from an
average over draws at every word, or from a single draw.

All pictures of a batch go on together, and none depends on which others are beside it (except for
the masks of MC dropout, which are drawn for a whole batch).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bayesrnn.bayes import Network
from bayesrnn.errors import require
from bayesrnn.evaluate.draws import evaluating
from bayesrnn.evaluate.reader import Advance, Reader, readers


@dataclass(frozen=True)
class Decoding:
    """How captions are found: greedily, by beam search, or by drawing words.

    - `beam`: 1 is greedy: always the most probable word. A wider beam keeps that many beginnings,
      and takes the caption with the highest log p / words^`power`, its end mark counted as a word.
    - `power`: with 0 the most probable caption is taken, which tends to be short.
    - `temperature`: above 0, words are drawn instead, from p^(1 / temperature).
    - `words`: the most words that a caption may have.
    """

    beam: int = 3
    power: float = 0.7
    temperature: float = 0.0
    words: int = 20

    def __post_init__(self) -> None:
        require(
            (self.beam >= 1, "beam", f"must be at least 1, got {self.beam}"),
            (0 <= self.power < math.inf, "power", f"must be 0 or above, got {self.power}"),
            (
                0 <= self.temperature < math.inf,
                "temperature",
                f"must be 0 (no chance) or above, got {self.temperature}",
            ),
            (
                self.temperature == 0 or self.beam == 1,
                "temperature",
                "draws words one by one; use it with beam=1",
            ),
            (self.words >= 1, "words", f"must be at least 1, got {self.words}"),
        )


@dataclass(frozen=True)
class Caption:
    """A decoded caption: its word ids without the end mark, and log p of the whole.

    log p is by what it was decoded with.
    """

    ids: tuple[int, ...]
    log_p: float
    ended: bool
    """Whether it came to its end within the words allowed."""


class Voices:
    """Draws (or the mean) that say the next word together: their probabilities are averaged."""

    def __init__(self, readers: Sequence[Reader]) -> None:
        self._readers = readers

    def read(self, words: Tensor, **start: Tensor) -> Tensor:
        """log p of the next word [B, V] in double, after these [B]."""
        total: Tensor | None = None
        for reader in self._readers:
            log_p = reader.read(words.unsqueeze(0), **start)[-1].double().log_softmax(dim=-1)
            total = log_p if total is None else torch.logaddexp(total, log_p)
        assert total is not None
        return total - math.log(len(self._readers))

    def take(self, rows: Tensor) -> None:
        for reader in self._readers:
            reader.take(rows)


def decode_captions(
    model: Network,
    vectors: Tensor,
    end: int,
    decoding: Decoding | None = None,
    samples: int = 0,
    seed: int = 1,
    forbidden: Sequence[int] = (),
    batch: int = 250,
    advance: Advance | None = None,
) -> list[Caption]:
    """A caption for each picture [N, numbers], as `decoding` says.

    - `end`: the id of the end mark.
    - `samples`: 0 uses the posterior mean; otherwise so many draws are averaged at every word (1: a
      single draw speaks).
    - `forbidden`: words (an unknown one, say) that are never said.
    - `advance`: called with the number of pictures after every batch.
    """
    how = decoding or Decoding()
    chance = torch.Generator().manual_seed(seed)  # all of it now: the same however cut into batches
    chances = torch.rand(len(vectors), how.words + 1, generator=chance, dtype=torch.float64)
    found: list[Caption] = []
    with evaluating(model):
        for pictures, chosen in zip(vectors.split(batch), chances.split(batch), strict=True):
            voices = Voices(readers(model, samples, seed, vectors.device))
            if how.temperature or how.beam == 1:
                luck = chosen.to(vectors.device) if how.temperature else None
                found += _one_by_one(voices, pictures, end, how, luck, forbidden)
            else:
                found += _Beam(voices, pictures, end, how, forbidden).search()
            if advance is not None:
                advance(len(pictures))
    return found


def _allowed(log_p: Tensor, forbidden: Sequence[int]) -> Tensor:
    if forbidden:
        log_p[:, list(forbidden)] = -math.inf
    return log_p


def _one_by_one(
    voices: Voices,
    pictures: Tensor,
    end: int,
    how: Decoding,
    chances: Tensor | None,
    forbidden: Sequence[int],
) -> list[Caption]:
    """The most probable word, or, given a number from 0 to 1 for each, a drawn one."""
    rows = len(pictures)
    words = torch.full((rows,), end, device=pictures.device)
    said: list[Tensor] = []
    log_p = torch.zeros(rows, dtype=torch.float64, device=pictures.device)
    ended = torch.zeros(rows, dtype=torch.bool, device=pictures.device)
    for place in range(how.words + 1):
        start = {"pictures": pictures} if place == 0 else {}
        next_p = _allowed(voices.read(words, **start), forbidden)
        words = next_p.argmax(dim=1) if chances is None else _drawn(next_p, how, chances[:, place])
        silent = ended if place < how.words else ended | (words != end)  # no room but for the end
        log_p += torch.where(silent, 0.0, next_p.gather(1, words[:, None]).squeeze(1))
        words = torch.where(ended, end, words)
        said += [words] if place < how.words else []
        ended |= words == end
        if bool(ended.all()):
            break
    lines = torch.stack(said, dim=1).tolist()
    return [
        Caption(tuple(_until(line, end)), p, done)
        for line, p, done in zip(lines, log_p.tolist(), ended.tolist(), strict=True)
    ]


def _drawn(log_p: Tensor, how: Decoding, chances: Tensor) -> Tensor:
    """By the inverse of the cumulated probabilities: one number decides one word."""
    log_p = log_p - log_p.amax(dim=1, keepdim=True)  # stays a number at any temperature
    p = (log_p / how.temperature).softmax(dim=1).cumsum(dim=1)
    words = torch.searchsorted(p, (chances * p[:, -1])[:, None], right=True).squeeze(1)
    return words.clamp_max(p.shape[1] - 1)


def _until(ids: Sequence[int], end: int) -> Sequence[int]:
    return ids[: ids.index(end)] if end in ids else ids


class _Beam:
    """Beam search for N pictures side by side, K beginnings each.

    In every step each beginning is continued by its K most probable words. Those that end are
    complete; of the others the K most probable go on (as in Show and Tell). A picture is done once
    no beginning can become better than its best complete caption.
    """

    def __init__(
        self, voices: Voices, pictures: Tensor, end: int, how: Decoding, forbidden: Sequence[int]
    ) -> None:
        self._voices, self._pictures, self._end, self._how = voices, pictures, end, how
        self._forbidden = forbidden
        device = pictures.device
        n = len(pictures)
        self._log_p = torch.zeros(n, 1, dtype=torch.float64, device=device)  # of the beginnings
        self._words = torch.empty(n, 1, 0, dtype=torch.int64, device=device)
        self._best: list[Caption | None] = [None] * n
        self._best_score = torch.full((n,), -math.inf, dtype=torch.float64, device=device)

    def search(self) -> list[Caption]:
        n, device = len(self._pictures), self._pictures.device
        words = torch.full((n,), self._end, device=device)
        for place in range(self._how.words + 1):
            start = {"pictures": self._pictures} if place == 0 else {}
            log_p = _allowed(self._voices.read(words, **start), self._forbidden)
            log_p = self._log_p[..., None] + log_p.view(n, self._log_p.shape[1], -1)
            if place == self._how.words:
                self._complete(log_p[..., self._end], place)  # whoever is here can only end
                break
            words = self._step(log_p, place)
            if self._done():
                break
        return [best if best is not None else self._unended(i) for i, best in enumerate(self._best)]

    def _step(self, log_p: Tensor, place: int) -> Tensor:
        """Complete what ends here, keep the best of what goes on; the words last said, [N K']."""
        n, beginnings, vocabulary = log_p.shape
        width = min(self._how.beam, vocabulary)
        tops, tokens = log_p.topk(width, dim=-1)  # [N, beginnings, width]
        ends = tokens == self._end
        self._complete(tops.masked_fill(~ends, -math.inf).amax(dim=-1), place)
        going = tops.masked_fill(ends, -math.inf).flatten(1)
        kept, places = going.topk(min(self._how.beam, going.shape[1]), dim=1)
        origin = places // width  # the beginning that each continues
        last = tokens.flatten(1).gather(1, places)
        index = origin[..., None].expand(-1, -1, self._words.shape[-1])
        self._words = torch.cat([self._words.gather(1, index), last[..., None]], dim=-1)
        self._log_p = kept
        rows = torch.arange(n, device=log_p.device)[:, None] * beginnings + origin
        self._voices.take(rows.flatten())
        return last.flatten()

    def _complete(self, log_p: Tensor, place: int) -> None:
        """Beginnings that end after `place` words, with these log p [N, beginnings]."""
        top, which = log_p.max(dim=1)
        score = top / (place + 1) ** self._how.power
        better = (score > self._best_score).nonzero().flatten()
        said = self._words[better, which[better]].tolist()
        for i, ids, p in zip(better.tolist(), said, top[better].tolist(), strict=True):
            self._best[i] = Caption(tuple(ids), p, True)
        self._best_score = torch.maximum(score, self._best_score)

    def _done(self) -> bool:
        """log p only falls, and at most `words` words and the end divide it."""
        reachable = self._log_p.amax(dim=1) / (self._how.words + 1) ** self._how.power
        return bool((reachable <= self._best_score).all())

    def _unended(self, i: int) -> Caption:
        """Where no beginning has ended (its end is impossible): the most probable one."""
        return Caption(tuple(self._words[i, 0].tolist()), self._log_p[i, 0].item(), False)
