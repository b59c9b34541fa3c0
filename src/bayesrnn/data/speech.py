"""Utterances and what was said in them: from a corpus of audio, or from features made of it."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from bayesrnn.data.audio import SpeechData, import_soundfile, read_audio, spectrogram
from bayesrnn.data.corpora import list_sphinx, list_timit, subfolder
from bayesrnn.data.vocabulary import BLANK, Vocabulary
from bayesrnn.errors import WrongData
from bayesrnn.files import data_folder
from bayesrnn.storage import read_folder, write_folder

MANIFEST, TENSORS, KIND = "features.json", "features.safetensors", "speech features"
CORPUS = "a corpus of speech"


@dataclass(frozen=True, eq=False)
class Utterance:
    """One utterance: its features, int8 [frames, bands], and the ids of its labels.

    A feature is in steps of 0.04 standard deviations.
    """

    name: str
    speaker: str
    features: Tensor
    labels: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Speech:
    """Utterances by split.

    `vocabulary` has their labels, the blank first. `digest` is the checksum of features and labels.
    """

    splits: Mapping[str, Sequence[Utterance]]
    vocabulary: Vocabulary
    digest: str


def load_speech(settings: SpeechData) -> Speech:
    """Read the corpus at `settings.path`, from its audio or from features made before."""
    folder = data_folder(settings.path, CORPUS)
    parts, vocabulary = (
        _read_features(folder, settings)
        if (folder / MANIFEST).exists()
        else _read_corpus(folder, settings)
    )
    digest = hashlib.sha256(json.dumps([vocabulary.tokens, settings.valid]).encode())
    for part, utterances in parts.items():
        for one in utterances:
            digest.update(f"{part} {one.name} {one.labels} {tuple(one.features.shape)}".encode())
            digest.update(one.features.numpy().tobytes())
    return Speech(_split(parts, settings), vocabulary, digest.hexdigest())


def prepare_speech(settings: SpeechData, path: Path) -> int:
    """Write a corpus as features, to a folder that `load_speech` reads without audio libraries.

    Returns the number of utterances.
    """
    parts, vocabulary = _read_corpus(data_folder(settings.path, CORPUS), settings)
    everything = [one for utterances in parts.values() for one in utterances]
    tensors = {
        "features": torch.cat([one.features for one in everything]),
        "frames": torch.tensor([len(one.features) for one in everything], dtype=torch.int32),
        "labels": torch.tensor([label for one in everything for label in one.labels]).int(),
        "lengths": torch.tensor([len(one.labels) for one in everything], dtype=torch.int32),
    }
    facts = {
        "settings": _of_features(settings),
        "vocabulary": vocabulary.tokens,
        "names": [one.name for one in everything],
        "speakers": [one.speaker for one in everything],
        "parts": {part: len(utterances) for part, utterances in parts.items()},
    }
    write_folder(path, KIND, MANIFEST, {TENSORS: tensors}, facts)
    return len(everything)


def _of_features(settings: SpeechData) -> dict[str, Any]:
    """The settings that features depend on (all but where they are, and how they are split)."""
    names = ("targets", "variants", "rate", "scale", "bands", "window_ms", "hop_ms")
    found: dict[str, Any] = {name: getattr(settings, name) for name in names}
    return found | {"variants": list(settings.variants)}


def _read_features(
    folder: Path, settings: SpeechData
) -> tuple[dict[str, list[Utterance]], Vocabulary]:
    files, facts = read_folder(folder, KIND, MANIFEST)
    wanted = _of_features(settings)
    wrong = [
        f"data.{key} is {facts['settings'].get(key)!r} there and {value!r} here"
        for key, value in wanted.items()
        if facts["settings"].get(key) != value
    ]
    if wrong:
        raise WrongData(
            f"{folder} holds other features: {'; '.join(wrong)}",
            "features made anew with `bayesrnn prepare`",
            "the settings",
        )
    tensors = files[TENSORS]
    features = tensors["features"].split(tensors["frames"].tolist())
    labels = tensors["labels"].split(tensors["lengths"].tolist())
    everything = [
        Utterance(name, speaker, x, tuple(y.tolist()))
        for name, speaker, x, y in zip(
            facts["names"], facts["speakers"], features, labels, strict=True
        )
    ]
    parts, start = {}, 0
    for part, count in facts["parts"].items():
        parts[part] = everything[start : start + count]
        start += count
    return parts, Vocabulary(tuple(facts["vocabulary"]))


def _read_corpus(
    folder: Path, settings: SpeechData
) -> tuple[dict[str, list[Utterance]], Vocabulary]:
    """From audio; which layout it is shows in the files there are."""
    import_soundfile()
    if any(folder.glob("etc/*_train.fileids")):
        spoken, labels = list_sphinx(folder, settings)
    elif any(subfolder(folder, part) for part in ("TRAIN", "TEST")):
        spoken, labels = list_timit(folder, settings)
    else:
        raise WrongData(
            f"{folder} has neither etc/*_train.fileids (CMU Sphinx) nor TRAIN and TEST (TIMIT) nor "
            f"{MANIFEST} (features)",
            CORPUS,
        )
    vocabulary = Vocabulary((BLANK, *labels))
    parts: dict[str, list[Utterance]] = {}
    console = Console(stderr=True)
    for one in track(
        spoken, "reading audio", console=console, transient=True, disable=not console.is_terminal
    ):
        name = str(one.path.relative_to(folder))
        features = spectrogram(read_audio(one.path, settings.rate), settings, str(one.path))
        ids = tuple(vocabulary.encode(one.labels))
        parts.setdefault(one.part, []).append(Utterance(name, one.speaker, features, ids))
    missing = [part for part in ("train", "test") if part not in parts]
    if missing:
        raise WrongData(f"{folder} has no utterances of {missing[0]}", CORPUS)
    return parts, vocabulary


def _split(
    parts: Mapping[str, list[Utterance]], settings: SpeechData
) -> dict[str, Sequence[Utterance]]:
    """Some speakers of train apart for validation."""
    if settings.valid == 0:
        return dict(parts)
    speakers = sorted({one.speaker for one in parts["train"]})
    count = round(settings.valid * len(speakers))
    if not 1 <= count < len(speakers):
        raise WrongData(
            f"{settings.path} has {len(speakers)} speakers to train on, so data.valid="
            f"{settings.valid:g} sets {count} of them apart",
            "a corpus with more",
            "data.valid (0: none)",
        )
    order = np.random.default_rng(settings.split_seed).permutation(len(speakers))
    chosen = {speakers[number] for number in order[:count]}
    train = [one for one in parts["train"] if one.speaker not in chosen]
    valid = [one for one in parts["train"] if one.speaker in chosen]
    return {"train": train, "valid": valid, "test": parts["test"]}
