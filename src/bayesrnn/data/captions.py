"""Pictures and what people said of them: the JSON layouts of COCO and of Flickr8k."""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from bayesrnn.data.features import SUFFIXES, read_features
from bayesrnn.data.penn import penn_words
from bayesrnn.data.splits import SPLITS, check_fractions, split_at_random
from bayesrnn.data.vocabulary import END, UNKNOWN, Vocabulary, check_limit
from bayesrnn.errors import UserError, WrongData, require
from bayesrnn.files import data_file, expanded, read_bytes

CAPTIONS = "a file of captions"
_CALLED = {"train": "train", "val": "valid", "valid": "valid", "test": "test", "restval": "train"}


@dataclass(frozen=True)
class CaptionData:
    """The `[data]` table of a recipe for captions.

    - `path`: a JSON file of captions, or a folder with COCO's captions_train*.json,
      captions_val*.json and perhaps captions_test*.json.
    - `features`: the file with the pictures' vectors; by default the one such file beside the
      captions.
    - `max_vocabulary`, `min_count`: the most entries of the vocabulary (0: no limit), and how often
      a word must occur. The vocabulary is that of the training captions.
    - `lengths`: captions are padded to one of so many lengths, which are chosen so that little is
      padded.
    - `split`, `split_seed`: where a file does not say which picture is for what, all are shuffled
      by `split_seed` and cut into `split`.
    """

    path: str
    features: str = ""
    min_count: int = 5
    max_vocabulary: int = 0
    lengths: int = 6
    split: tuple[float, float, float] = (0.8, 0.1, 0.1)
    split_seed: int = 1
    kind: ClassVar[str] = "captions"

    def __post_init__(self) -> None:
        require(
            (self.path != "", "path", "must name a file or folder of captions, got ''"),
            (self.min_count >= 1, "min_count", f"must be at least 1, got {self.min_count}"),
            check_limit(self.max_vocabulary, 3),
            (self.lengths >= 1, "lengths", f"must be at least 1, got {self.lengths}"),
            check_fractions(self.split),
            (self.split_seed >= 0, "split_seed", f"must be 0 or above, got {self.split_seed}"),
        )


@dataclass(frozen=True, eq=False)
class Pictures:
    """The pictures of one split: file names, rows of their vectors, and each one's captions."""

    names: Sequence[str]
    rows: Sequence[int]
    captions: Sequence[Sequence[str]]
    """The captions of each picture: each a string of words with blanks between."""

    def __len__(self) -> int:
        return len(self.names)

    @property
    def references(self) -> dict[str, Sequence[str]]:
        """What people said of each picture, by its name."""
        return dict(zip(self.names, self.captions, strict=True))

    def encoded(self, vocabulary: Vocabulary) -> tuple[list[int], list[list[int]]]:
        """All captions: the place of each one's picture, and its ids with the end mark."""
        end = vocabulary.index[END]
        of = [i for i, captions in enumerate(self.captions) for _ in captions]
        ids = [[*vocabulary.encode(c.split()), end] for captions in self.captions for c in captions]
        return of, ids


@dataclass(frozen=True, eq=False)
class Captions:
    """Pictures by split, with their vectors and the vocabulary of their captions.

    `vectors` [N, numbers] are those of all pictures, and the `rows` of `Pictures` are rows of it.
    `digest` is the checksum of the files' contents.
    """

    splits: Mapping[str, Pictures]
    vectors: Tensor
    vocabulary: Vocabulary
    digest: str


class Picture(NamedTuple):
    """As a file has it; the split may not be said."""

    name: str
    split: str | None
    captions: list[str]


def load_captions(settings: CaptionData, vocabulary: Vocabulary | None = None) -> Captions:
    """Read captions, with the features of their pictures.

    A `vocabulary` that is given (that of a finished run, say) is used instead of building one.
    """
    digest = hashlib.sha256()
    pictures = read_captions(expanded(settings.path), digest)
    name, count = Counter(picture.name for picture in pictures).most_common(1)[0]
    if count > 1:  # it could be trained on and tested with
        raise UserError(f"{settings.path} has {name} {count} times; put its captions together")
    features_path = find_features(settings)
    digest.update(hashlib.sha256(read_bytes(features_path)).digest())
    features = read_features(features_path)
    parts = _split(pictures, settings)
    if not parts.get("train"):
        raise UserError(f"{settings.path} has no pictures to train on; give some the split 'train'")
    splits = {
        name: Pictures(
            [p.name for p in part],
            features.rows([p.name for p in part], f"{settings.path}, {name},"),
            [p.captions for p in part],
        )
        for name, part in parts.items()
        if part
    }
    if vocabulary is None:
        said = [c.split() for picture in splits["train"].captions for c in picture]
        counts = Counter(word for words in said for word in words)
        counts[END] = len(said)
        vocabulary = Vocabulary.build(counts, settings.max_vocabulary or None, settings.min_count)
    if END not in vocabulary.index or UNKNOWN not in vocabulary.index:
        raise UserError(f"the vocabulary has no {END}, so it is not one of captions")
    return Captions(splits, features.vectors, vocabulary, digest.hexdigest())


def find_features(settings: CaptionData) -> Path:
    """The file of features: the one named, or the only one beside the captions."""
    if settings.features:
        return expanded(settings.features)
    path = expanded(settings.path)
    folder = path if path.is_dir() else path.parent
    found = sorted(file for file in folder.glob("*") if file.suffix in SUFFIXES)
    if len(found) != 1:
        raise WrongData(
            f"{folder} holds {len(found)} files of features ({', '.join(SUFFIXES)})",
            "captions beside the one to use",
            "data.features, which names it",
        )
    return found[0]


def read_captions(path: Path, digest: "hashlib._Hash | None" = None) -> list[Picture]:
    """The pictures of a file, or of a folder of COCO's files; a picture without captions is left
    out."""
    if not path.is_dir():
        return _read_file(data_file(str(path), CAPTIONS), digest)
    files = sorted(path.glob("captions_*.json"))
    if not files:
        raise WrongData(f"{path} has no captions_*.json", CAPTIONS)
    pictures: list[Picture] = []
    for file in files:
        word = next((w for w in _CALLED if file.stem.startswith(f"captions_{w}")), None)
        if word is None:
            raise UserError(
                f"{file} does not say what it is for: expected captions_train..., captions_val... "
                "or captions_test..."
            )
        pictures += [p._replace(split=_CALLED[word]) for p in _read_file(file, digest)]
    return pictures


def _read_file(path: Path, digest: "hashlib._Hash | None") -> list[Picture]:
    data = read_bytes(path)
    if digest is not None:
        digest.update(data)
    try:
        contents = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise WrongData(f"{path} is not JSON ({error})", CAPTIONS) from error
    try:
        if "annotations" in contents:
            pictures = _coco(contents)
        else:
            pictures = [_flickr(image) for image in contents["images"]]
    except (KeyError, TypeError, AttributeError) as error:
        raise WrongData(
            f"{path} is no file of captions ({error!r}): expected `images` with `captions`, "
            "or `images` and `annotations` as COCO has them",
            CAPTIONS,
        ) from error
    pictures = [p._replace(captions=[c for c in p.captions if c]) for p in pictures]
    pictures = [p for p in pictures if p.captions]
    if not pictures:
        raise WrongData(f"{path} holds no captions", CAPTIONS)
    return pictures


def _flickr(image: Mapping[str, Any]) -> Picture:
    """`ptb` are the same captions, already split into words."""
    ready = image.get("ptb")
    said = image["captions"] if ready is None else ready
    if isinstance(said, str):
        raise TypeError("captions must be a list, even a single one")
    captions = [_words(c) for c in said] if ready is None else said
    return Picture(str(image["filename"]), image.get("split"), [str(c) for c in captions])


def _coco(contents: Mapping[str, Any]) -> list[Picture]:
    pictures = {
        image["id"]: Picture(str(image["file_name"]), image.get("split"), [])
        for image in contents["images"]
    }
    for said in contents["annotations"]:
        if said["image_id"] in pictures:
            pictures[said["image_id"]].captions.append(_words(said["caption"]))
    return list(pictures.values())


def _words(caption: str) -> str:
    return " ".join(penn_words(caption))


def _split(pictures: Sequence[Picture], settings: CaptionData) -> dict[str, list[Picture]]:
    """By what the file says (anything but train, val and test is left out), or at random."""
    if any(picture.split is not None for picture in pictures):
        parts: dict[str, list[Picture]] = {name: [] for name in SPLITS}
        for picture in pictures:
            if isinstance(picture.split, str) and picture.split in _CALLED:
                parts[_CALLED[picture.split]].append(picture)
        return parts
    return split_at_random(pictures, settings.split, settings.split_seed)
