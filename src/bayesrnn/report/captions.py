"""Captions on the page (Fortunato 2017, Fig. 4): of each picture what every run says, its words
shaded like those of a text, and what people said. Pictures on which the runs differ come first."""

import base64
import io
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from bayesrnn.bayes import Bayesian
from bayesrnn.data.vocabulary import END, UNKNOWN
from bayesrnn.errors import UserError
from bayesrnn.evaluate import RiskCoverage, risk_coverage
from bayesrnn.evaluate.caption_scores import can_score, score_captions
from bayesrnn.evaluate.captioned import read_again
from bayesrnn.evaluate.decoding import decode_captions
from bayesrnn.evaluate.reader import Watch
from bayesrnn.report.passage import TOP, Passage
from bayesrnn.train.captioning import CaptionTask

SHOWN = 12
"""Pictures on the page."""
THUMBNAIL = 480
"""Pixels of the longer side."""


@dataclass(frozen=True, eq=False)
class Spoken:
    """What a run says of a split's pictures, by their names, and what people said of them."""

    said: Mapping[str, Passage]
    """With the end mark."""
    references: Mapping[str, Sequence[str]]
    scores: Mapping[str, float] = field(default_factory=dict)
    """BLEU and CIDEr, where the scorers are installed."""
    kept: Mapping[str, RiskCoverage] = field(default_factory=dict)
    """By `total` and `epistemic` uncertainty: -CIDEr of the surest captions."""


def speak(
    model: Bayesian, task: CaptionTask, split: str, samples: int, seed: int, watch: Watch
) -> Spoken:
    """Caption all pictures by the mean, and ask `samples` draws how sure they are of each word."""
    pictures, vocabulary = task.pictures(split), task.vocabulary
    vectors = task.vectors[pictures.rows]
    end = vocabulary.index[END]
    found = decode_captions(
        model,
        vectors,
        end,
        forbidden=(vocabulary.index[UNKNOWN],),
        advance=watch("captioning", len(vectors)),
    )
    ids = [[*caption.ids, end] for caption in found]
    rows = range(len(vectors))
    figures = read_again(model, vectors, rows, ids, end, samples, seed, TOP, watch)
    said = {
        name: Passage(name, vocabulary.decode(words), each, "whitespace", vocabulary)
        for name, words, each in zip(pictures.names, ids, figures, strict=True)
    }
    return _scored(Spoken(said, pictures.references))


def _scored(spoken: Spoken) -> Spoken:
    captions = {
        name: " ".join(each.tokens[:-1])
        for name, each in spoken.said.items()
        if spoken.references[name]
    }
    if not captions or not can_score():
        return spoken
    found = score_captions(captions, spoken.references)
    loss = -torch.from_numpy(found.by_picture["cider"])
    kept = {}
    for part in ("total", "epistemic"):
        means = [getattr(spoken.said[name].found, part).mean() for name in captions]
        kept[part] = risk_coverage(torch.stack(means), loss)
    return Spoken(spoken.said, spoken.references, found.scores, kept)


# --- on the page ----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Picture:
    """One picture on the page: what each run says, by its place among the runs."""

    name: str
    said: Mapping[int, Passage]
    references: Sequence[str]

    @property
    def differs(self) -> bool:
        return len({tuple(each.tokens) for each in self.said.values()}) > 1


def gather(runs: Sequence[Spoken | None]) -> list[Picture]:
    """All pictures that a run captioned, each once."""
    names = dict.fromkeys(name for run in runs if run is not None for name in run.said)
    return [
        Picture(
            name,
            {place: run.said[name] for place, run in enumerate(runs) if run and name in run.said},
            next(run.references[name] for run in runs if run and name in run.said),
        )
        for name in names
    ]


def sample(pictures: Sequence[Picture], seed: int, count: int = SHOWN) -> list[Picture]:
    """At random, of those on which the runs differ; if there are too few, of the others too."""
    mixed = list(pictures)
    random.Random(seed).shuffle(mixed)
    return sorted(mixed, key=lambda picture: not picture.differs)[:count]


def thumbnail(folder: Path, name: str) -> str | None:
    """The picture as a small JPEG in a data URI; None where there is none that can be read."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    path = (folder / name).resolve()
    if not path.is_relative_to(folder.resolve()) or not path.is_file():
        return None
    try:
        with Image.open(path) as image:
            image.draft("RGB", (2 * THUMBNAIL, 2 * THUMBNAIL))
            small = ImageOps.exif_transpose(image).convert("RGB")
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError):
        return None
    small.thumbnail((THUMBNAIL, THUMBNAIL))
    file = io.BytesIO()
    small.save(file, "JPEG", quality=82)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()


def check_pictures(folder: Path) -> None:
    """To be said before anything is measured."""
    if not folder.is_dir():
        raise UserError(f"no pictures at {folder}: there is no such folder")
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise UserError(
            "showing pictures needs pillow; install it with pip install 'bayesrnn[features]'"
        ) from error
