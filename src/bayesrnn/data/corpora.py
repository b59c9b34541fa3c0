"""Corpora of speech on disk: which files there are, who speaks in them, and what is said."""

import re
import string
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from bayesrnn.data.audio import SpeechData
from bayesrnn.errors import UserError
from bayesrnn.files import as_text, read_bytes

SUFFIXES = (".flac", ".wav", ".WAV", ".sph", ".ogg")

FOLDED = {
    "ux": "uw",
    "axr": "er",
    "ax": "ah",
    "ax-h": "ah",
    "em": "m",
    "en": "n",
    "nx": "n",
    "eng": "ng",
    "ix": "ih",
    "el": "l",
    "ao": "aa",
    "zh": "sh",
    "hv": "hh",
    **dict.fromkeys(("pcl", "tcl", "kcl", "bcl", "dcl", "gcl", "h#", "pau", "epi"), "sil"),
}
"""TIMIT's 61 phones to 39 (Lee & Hon 1989); those not here stay, and "q" is left out."""
_PHONES = (
    "aa ae ah aw ay b ch d dh dx eh er ey f g hh ih iy jh k l m n ng ow oy p r s sh sil t th uh uw "
    "v w y z"
)
PHONES_39 = tuple(_PHONES.split())
_CORE = (
    "MDAB0 MWBT0 FELC0 MTAS1 MWEW0 FPAS0 MJMP0 MLNT0 FPKT0 MLLL0 MTLS0 FJLM0 MBPM0 MKLT0 FNLP0 "
    "MCMJ0 MJDH0 FMGD0 MGRT0 MNJM0 FDHC0 MJLN0 MPAM0 FMLD0"
)
CORE_TEST = frozenset(_CORE.split())
"""The speakers of TIMIT's core test set."""


class Spoken(NamedTuple):
    """A file to be read, and what is said in it."""

    part: str
    speaker: str
    path: Path
    labels: Sequence[str]


# --- CMU Sphinx ------------------------------------------------------------------------------


def list_sphinx(folder: Path, settings: SpeechData) -> tuple[list[Spoken], list[str]]:
    """etc/NAME_{train,test}.{fileids,transcription} and etc/*.dic."""
    lists = next(iter(sorted(folder.glob("etc/*_train.fileids"))))
    stem = lists.name.removesuffix("_train.fileids")
    dictionaries = sorted(folder.glob("etc/*.dic"))
    if not dictionaries:
        raise UserError(f"{folder / 'etc'} has no *.dic, the dictionary of how words are spoken")
    phones = _read_dictionary(dictionaries[0], settings.variants)
    spoken = []
    for part in ("train", "test"):
        ids = _lines(lists.with_name(f"{stem}_{part}.fileids"))
        said = _read_transcripts(lists.with_name(f"{stem}_{part}.transcription"))
        shorts = Counter(number.rpartition("/")[2] for number in ids)
        for number in ids:
            path = _audio_file(folder, number)
            short = number.rpartition("/")[2]
            key = number if number in said else short
            if key not in said:
                raise UserError(f"{stem}_{part}.transcription has no line for {key}; add it")
            if key == short and shorts[short] > 1:
                raise UserError(
                    f"{stem}_{part}.fileids has {shorts[short]} files named {short}; write their "
                    f"lines in {stem}_{part}.transcription as ({number})"
                )
            unknown = [word for word in said[key] if word not in phones]
            if unknown:
                raise UserError(
                    f"{dictionaries[0]} does not have {unknown[0]!r}, said in {key}; add it"
                )
            labels = (
                said[key]
                if settings.targets == "words"
                else [phone for word in said[key] for phone in phones[word]]
            )
            spoken.append(Spoken(part, path.parent.name, path, labels))
    spoken = _without_sessions(spoken)
    if settings.targets == "words":
        return spoken, sorted(phones)
    return spoken, sorted({phone for each in phones.values() for phone in each})


def _without_sessions(spoken: list[Spoken]) -> list[Spoken]:
    """A number after the name of another speaker is a further session of that one (mjab2 beside
    mjab), and goes: a person is never on both sides of a split. Without mjab, it tells speakers
    apart (m1, m2, ...)."""
    speakers = {one.speaker for one in spoken}
    bare = {name: name.rstrip(string.digits) for name in speakers}
    return [
        one._replace(speaker=bare[one.speaker]) if bare[one.speaker] in speakers else one
        for one in spoken
    ]


def _read_dictionary(path: Path, variants: Sequence[str]) -> dict[str, list[str]]:
    """The phones of each word: of its first entry, or of the variant that is named."""
    entries = {parts[0]: parts[1:] for line in _lines(path) if (parts := line.split())}
    unknown = [name for name in variants if name not in entries]
    if unknown:
        raise UserError(f"data.variants names {unknown[0]!r}, which {path} does not have")
    words = {name: phones for name, phones in entries.items() if not re.search(r"\(\d+\)$", name)}
    return words | {re.sub(r"\(\d+\)$", "", name): entries[name] for name in variants}


def _read_transcripts(path: Path) -> dict[str, list[str]]:
    """The words of each utterance: `<s> YES </s> (name)`, or (folder/name) as in the fileids."""
    found = {}
    for number, line in enumerate(_lines(path), start=1):
        match = re.fullmatch(r"(.*)\(([^()]+)\)\s*", line)
        if match is None:
            raise UserError(f"{path}, line {number}: no (name) at its end: {line!r}")
        found[match[2]] = [word for word in match[1].split() if word not in ("<s>", "</s>")]
    return found


def _audio_file(folder: Path, number: str) -> Path:
    """The file of an id, in one of the folders beside etc."""
    places = [folder, *(place for place in sorted(folder.iterdir()) if place.is_dir())]
    for place in places:
        for suffix in SUFFIXES:
            path = place / f"{number}{suffix}"
            if path.exists():
                return path
    raise UserError(f"{folder} has no audio file for {number} ({', '.join(SUFFIXES)})")


# --- TIMIT -----------------------------------------------------------------------------------


def list_timit(folder: Path, settings: SpeechData) -> tuple[list[Spoken], list[str]]:
    """All of TRAIN but the two sentences that everybody reads (SA), and the core test set (all of
    TEST where none of its speakers is there)."""
    if settings.targets == "words":
        raise UserError('TIMIT is read by its phones; set data.targets = "phones"')
    spoken = []
    for part in ("train", "test"):
        place = subfolder(folder, part)
        texts = sorted(place.rglob("*")) if place is not None else []
        texts = [path for path in texts if path.suffix.lower() == ".phn"]
        texts = [path for path in texts if not path.name.upper().startswith("SA")]
        core = [path for path in texts if path.parent.name.upper() in CORE_TEST]
        for path in core if part == "test" and core else texts:
            audio = [path.with_suffix(suffix) for suffix in SUFFIXES]
            found = [file for file in audio if file.exists()]
            if not found:
                raise UserError(f"{path} has no audio beside it ({', '.join(SUFFIXES)})")
            spoken.append(Spoken(part, path.parent.name.upper(), found[0], _read_phones(path)))
    return spoken, list(PHONES_39)


def _read_phones(path: Path) -> list[str]:
    """The folded phones of a .PHN file: `start end phone` a line."""
    found = []
    for number, line in enumerate(_lines(path), start=1):
        parts = line.split()
        if len(parts) != 3:
            raise UserError(f"{path}, line {number}: expected `start end phone`, got {line!r}")
        found.append(parts[2].lower())
    try:
        return fold_phones(found)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error


def fold_phones(phones: Iterable[str]) -> list[str]:
    """TIMIT's 61 phones as the 39 that are scored.

    >>> fold_phones(["h#", "ix", "q", "bcl", "b", "zh"])
    ['sil', 'ih', 'sil', 'b', 'sh']
    """
    folded = [FOLDED.get(phone, phone) for phone in phones if phone != "q"]
    unknown = [phone for phone in folded if phone not in PHONES_39]
    if unknown:
        raise ValueError(f"{unknown[0]!r} is no phone of TIMIT")
    return folded


def subfolder(folder: Path, name: str) -> Path | None:
    """A folder's subfolder by name, however it is capitalised."""
    found = [p for p in folder.iterdir() if p.is_dir() and p.name.lower() == name.lower()]
    return found[0] if found else None


def _lines(path: Path) -> list[str]:
    text = as_text(read_bytes(path), path)
    return [line for line in text.splitlines() if line.strip()]
