"""Reviews and their ratings: the scale data of Pang & Lee 2005."""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch

from bayesrnn.data.labelled import Examples, Labelled
from bayesrnn.data.splits import split_at_random, sum_to_one
from bayesrnn.data.vocabulary import Vocabulary, check_limit
from bayesrnn.errors import UserError, WrongData, require
from bayesrnn.files import as_text, data_folder, read_bytes

PADDING = -1
"""Stands after a review's last word; no word has this id."""


@dataclass(frozen=True)
class ReviewData:
    """The `[data]` table of a recipe for reviews.

    - `path`: a folder in which, at any depth, each file subj.NAME (one review per line) stands
      beside rating.NAME (one number from 0 to 1 per line) or, for N classes, label.Nclass.NAME (one
      whole number from 0 to N - 1 per line).
    - `words`: how many words of a review are read, from its start.
    - `classes`: 0 to predict the rating, N to predict one of N classes.
    - `max_vocabulary`, `min_count`: the most entries of the vocabulary (0: no limit), and how often
      a word must occur. The vocabulary is that of the training words.
    - `split`, `split_seed`: all reviews, in the order of their files' names, are shuffled by
      `split_seed`. The first `split[0]` of them are to train on, the next `split[1]` to validate
      (0: none, and the test set is watched during training), the last `split[2]` to test.
    """

    path: str
    words: int = 200
    classes: int = 0
    max_vocabulary: int = 0
    min_count: int = 1
    split: tuple[float, float, float] = (0.8, 0.0, 0.2)
    split_seed: int = 1
    kind: ClassVar[str] = "reviews"

    def __post_init__(self) -> None:
        train, valid, test = self.split
        require(
            (self.path != "", "path", "must name a folder of reviews, got ''"),
            (self.words >= 1, "words", f"must be at least 1, got {self.words}"),
            (
                self.classes == 0 or self.classes >= 2,
                "classes",
                f"must be 0 (the rating itself) or at least 2, got {self.classes}",
            ),
            check_limit(self.max_vocabulary, 2),
            (self.min_count >= 1, "min_count", f"must be at least 1, got {self.min_count}"),
            (
                min(train, test) > 0 <= valid and sum_to_one(self.split),
                "split",
                "must be three fractions that sum to 1, the first and last above 0, got "
                f"{list(self.split)}",
            ),
            (self.split_seed >= 0, "split_seed", f"must be 0 or above, got {self.split_seed}"),
        )


class Review(NamedTuple):
    """The words that are read, what is to be predicted, and where it stands."""

    words: list[str]
    target: float
    name: str


def load_reviews(settings: ReviewData, vocabulary: Vocabulary | None = None) -> Labelled:
    """Read the reviews as word ids [N, words], padded at the end, and their ratings or classes.

    A `vocabulary` that is given (that of a finished run, say) is used instead of building one.
    """
    reviews, digest = _read_reviews(settings)
    splits = _split(reviews, settings)
    if vocabulary is None:
        counts = Counter(word for review in splits["train"] for word in review.words)
        vocabulary = Vocabulary.build(counts, settings.max_vocabulary or None, settings.min_count)
    encoded = {name: _encode(part, settings, vocabulary) for name, part in splits.items() if part}
    return Labelled(encoded, digest, vocabulary)


def _split(reviews: list[Review], settings: ReviewData) -> dict[str, list[Review]]:
    splits = split_at_random(reviews, settings.split, settings.split_seed)
    wanted = dict(zip(splits, settings.split, strict=True))
    empty = [name for name, part in splits.items() if wanted[name] and not part]
    if empty:
        raise WrongData(
            f"{settings.path} holds too few reviews ({len(reviews)}) to split them as "
            f"{list(settings.split)}: none is left for {empty[0]}",
            "a folder with more",
            "data.split",
        )
    return splits


def _encode(reviews: list[Review], settings: ReviewData, vocabulary: Vocabulary) -> Examples:
    x = torch.full((len(reviews), settings.words), PADDING)
    for row, review in zip(x, reviews, strict=True):
        row[: len(review.words)] = torch.tensor(vocabulary.encode(review.words))
    kind = torch.int64 if settings.classes else torch.float32
    y = torch.tensor([review.target for review in reviews], dtype=kind)
    return Examples(x, y, [review.name for review in reviews])


# --- reading ---------------------------------------------------------------------------------


def _read_reviews(settings: ReviewData) -> tuple[list[Review], str]:
    folder = data_folder(settings.path, "a folder of reviews")
    texts = sorted(folder.rglob("subj.*"), key=lambda path: (path.name, path))
    if not texts:
        raise WrongData(f"{folder} has no files subj.NAME", "a folder that has some")
    reviews: list[Review] = []
    digests: list[str] = []
    for path in texts:
        author = path.name.removeprefix("subj.")
        form = f"label.{settings.classes}class.{{}}" if settings.classes else "rating.{}"
        beside = path.with_name(form.format(author))
        lines, targets = (_lines(file, digests) for file in (path, beside))
        if len(lines) != len(targets):
            raise UserError(
                f"{path} has {len(lines)} reviews but {beside} has {len(targets)} lines; they do "
                "not belong together"
            )
        for number, (line, target) in enumerate(zip(lines, targets, strict=True), start=1):
            words = line.split()[: settings.words]
            if not words:
                raise UserError(f"{path}, line {number}: there is no review; take out the line")
            reviews.append(
                Review(words, _target(target, settings, beside, number), f"{author} {number}")
            )
    return reviews, hashlib.sha256(json.dumps(digests).encode()).hexdigest()


def _lines(path: Path, digests: list[str]) -> list[str]:
    data = read_bytes(path)
    digests.append(hashlib.sha256(data).hexdigest())
    return as_text(data, path).removesuffix("\n").split("\n")


def _target(text: str, settings: ReviewData, path: Path, line: int) -> float:
    """A rating from 0 to 1, or a class below `classes`."""
    read: Callable[[str], float] = int if settings.classes else float
    highest = settings.classes - 1 if settings.classes else 1
    try:
        value = math.nan if "_" in text else read(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= highest:
        wanted = "a class" if settings.classes else "a rating"
        raise UserError(f"{path}, line {line}: {text!r} is not {wanted} from 0 to {highest}")
    return value
