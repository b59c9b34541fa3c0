"""Tokens and their ids."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from bayesrnn.errors import Check, Invalid, UserError, require
from bayesrnn.files import expanded, read_bytes, write_atomic

END = "<eos>"
UNKNOWN = "<unk>"
BLANK = "<blank>"
"""What a network that labels sounds says where nothing new begins."""
FORMAT = "bayesrnn vocabulary 1"


def check_limit(size: int, least: int) -> Check:
    """What a recipe's `max_vocabulary` must be, for `require`."""
    said = f"must be 0 (no limit) or at least {least}, got {size}"
    return size == 0 or size >= least, "max_vocabulary", said


@dataclass(frozen=True)
class Vocabulary:
    """The known tokens; a token's id is its place among them.

    Every other token is read as `<unk>`. A vocabulary without `<unk>` (labels of speech, which have
    `<blank>`) refuses other tokens.

    >>> vocabulary = Vocabulary(("the", "cat", "<unk>"))
    >>> vocabulary.encode(["the", "dog"])
    [0, 2]
    >>> vocabulary.decode([1, 2])
    ['cat', '<unk>']
    """

    tokens: tuple[str, ...] = field(repr=False)
    index: Mapping[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        index = {token: number for number, token in enumerate(self.tokens)}
        require(
            (len(index) == len(self.tokens), "vocabulary", "must not hold the same token twice"),
            (
                UNKNOWN in index or BLANK in index,
                "vocabulary",
                f"must hold {UNKNOWN}, or {BLANK} where it is of labels",
            ),
        )
        object.__setattr__(self, "index", index)

    @classmethod
    def build(cls, counts: Mapping[str, int], max_size: int | None, min_count: int) -> Self:
        """A vocabulary of the tokens seen at least `min_count` times, the most frequent first.

        `counts` says how often each was seen; equally frequent ones are in alphabetical order.
        `max_size` bounds all the entries, `<unk>` included, which comes last unless the text itself
        holds it. Neither `<unk>` nor an `<eos>` of the text is ever left out.

        >>> Vocabulary.build({"b": 2, "a": 2, "<eos>": 1, "c": 1}, max_size=4, min_count=1).tokens
        ('a', 'b', '<eos>', '<unk>')
        """
        require(
            (max_size is None or max_size >= 2, "max_size", f"must be at least 2, got {max_size}"),
            (min_count >= 1, "min_count", f"must be at least 1, got {min_count}"),
        )
        ranked = sorted(
            (token for token in counts if counts[token] > 0), key=lambda t: (-counts[t], t)
        )
        kept = {END, UNKNOWN}.intersection(ranked) | {UNKNOWN}
        frequent = [t for t in ranked if t not in kept and counts[t] >= min_count]
        room = len(frequent) if max_size is None else max_size - len(kept)
        kept.update(frequent[:room])
        tokens = [token for token in ranked if token in kept]
        if UNKNOWN not in tokens:
            tokens.append(UNKNOWN)
        return cls(tuple(tokens))

    def __len__(self) -> int:
        return len(self.tokens)

    def encode(self, tokens: Iterable[str]) -> list[int]:
        """The id of each token; unknown tokens have that of `<unk>`."""
        if UNKNOWN in self.index:
            unknown = self.index[UNKNOWN]
            return [self.index.get(token, unknown) for token in tokens]
        try:
            return [self.index[token] for token in tokens]
        except KeyError as error:
            raise UserError(f"{error.args[0]!r} is none of the {len(self)} labels") from error

    def decode(self, ids: Iterable[int]) -> list[str]:
        """The token of each id."""
        return [self.tokens[number] for number in ids]

    def _checksum(self) -> str:
        return hashlib.sha256(json.dumps(self.tokens).encode()).hexdigest()

    def save(self, path: str | Path) -> None:
        """Write the tokens to a JSON file, with their checksum."""
        contents = {"format": FORMAT, "sha256": self._checksum(), "tokens": self.tokens}
        write_atomic(expanded(path), json.dumps(contents, ensure_ascii=False, indent=0).encode())

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what `save` wrote (old files have no checksum)."""
        data = read_bytes(expanded(path))
        problem = f"not in the format '{FORMAT}'"
        try:
            match json.loads(data):
                case {"format": str(written), "tokens": [*tokens], **more} if written == FORMAT:
                    if all(isinstance(token, str) for token in tokens):
                        found = cls(tuple(tokens))
                        if more.get("sha256") in (None, found._checksum()):
                            return found
                        problem = "its tokens are not those that were saved"
        except Invalid as error:
            problem = str(error)
        except (ValueError, RecursionError):
            problem = "not JSON"
        raise UserError(f"{path} is damaged or no vocabulary ({problem}); restore it from a copy")
