"""A passage of text, token by token, with what a model did not know of each."""

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bayesrnn.data import TextData, Vocabulary
from bayesrnn.data.text import file_tokens
from bayesrnn.data.vocabulary import END, UNKNOWN
from bayesrnn.errors import UserError
from bayesrnn.evaluate import TextUncertainty

TOP = 5
"""Predictions shown of each token."""
LENGTH = 240
"""Tokens of the run's own text that are shaded."""
LONGEST = 1000
"""Tokens of a text that a user gives."""
MEASURES = ("total", "aleatoric", "epistemic")


@dataclass(frozen=True)
class Token:
    """One token on the page. The first of a text is not predicted, and has no figures."""

    text: str
    space: bool
    """Whether a blank goes before it."""
    ends_line: bool
    known: bool
    figures: dict[str, float] | None
    top: list[tuple[str, float]]


@dataclass(frozen=True, eq=False)
class Passage:
    """`tokens` as they were read; `found` is of all of them, or of all but the first, which
    nothing predicts at the start of a text."""

    source: str
    tokens: list[str]
    found: TextUncertainty
    split_by: str
    """How the text was split into tokens: a `TextData.tokens`."""
    vocabulary: Vocabulary

    @property
    def samples(self) -> int:
        return self.found.samples

    def __iter__(self) -> Iterator[Token]:
        before = ""
        for place, text in enumerate(self.tokens):
            space = bool(before) and self._spaced(before, text)
            yield self._token(place, text, space)
            before = "" if text in (END, "\n") else text

    def _token(self, place: int, text: str, space: bool) -> Token:
        known = text in self.vocabulary.index and text != UNKNOWN
        ends_line = text in (END, "\n")
        found = self.found
        at = place - (len(self.tokens) - len(found.targets))
        if at < 0:
            return Token(text, space, ends_line, known, None, [])
        figures = {name: getattr(found, name)[at].item() for name in (*MEASURES, "probability")}
        words = self.vocabulary.decode(found.top_tokens[at].tolist())
        top = list(zip(words, found.top_probabilities[at].tolist(), strict=True))
        return Token(text, space, ends_line, known, figures, top)

    def _spaced(self, before: str, text: str) -> bool:
        """Whether a blank is between two tokens of a line: as `decode_text` has it."""
        if self.split_by == "characters" or text == END:
            return False
        if self.split_by == "whitespace":
            return True
        return not re.fullmatch(r"[.,;:!?)\]%]", text) and not re.fullmatch(r"[(\[$]", before)


def passage_of_split(
    found: TextUncertainty,
    ids: NDArray[np.int32],
    settings: TextData,
    vocabulary: Vocabulary,
    split: str,
) -> Passage:
    """Some lines of the text read, from the first line on that begins with something behind it."""
    end = vocabulary.index.get(END, -1)
    ends = np.flatnonzero(ids[: max(len(ids) - LENGTH, 0)] == end)
    start = next((int(place) + 1 for place in ends if place >= 20), 0)
    stop = min(start + LENGTH, len(ids))
    tokens = vocabulary.decode(ids[start:stop].tolist())
    part = found.part(max(start - 1, 0), stop - 1)
    return Passage(f"the {split} text", tokens, part, settings.tokens, vocabulary)


def passage_of_file(path: Path, settings: TextData) -> list[str]:
    """The tokens of a file that a user wants to see shaded."""
    tokens = list(itertools.islice(file_tokens(path, settings), LONGEST))
    if len(tokens) < 2:
        raise UserError(f"{path} has {len(tokens)} token; at least 2 are needed to predict one")
    return tokens


def scales(passages: Sequence[Passage | None]) -> dict[str, tuple[float, float]]:
    """The values of each measure that get no shade and the full one, the same for all runs of a
    page: nearly the lowest and the highest there are."""
    ends: dict[str, tuple[float, float]] = {}
    for name in MEASURES:
        values = [
            getattr(p.found, name) for p in passages if p and (p.samples or name != "epistemic")
        ]
        low, high = np.quantile(np.concatenate(values), (0.05, 0.99)) if values else (0.0, 0.0)
        ends[name] = (float(low), float(high))
    return ends
