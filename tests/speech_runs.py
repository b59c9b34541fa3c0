"""A small corpus of tones that several tests share: each phone is a pitch, each word two phones."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from bayesrnn.recipe import Recipe, from_table
from small_runs import changed

soundfile = pytest.importorskip("soundfile")

RATE = 8000
PITCH = {"A": 500.0, "B": 1200.0, "C": 2200.0}
WORDS = {"AB": ["A", "B"], "BC": ["B", "C"], "CA": ["C", "A"], "CA(2)": ["A", "A"]}


def tone(phones: list[str], seed: int = 0, seconds: float = 0.12) -> NDArray[np.float64]:
    """Tones with short pauses between them, in a little noise."""
    time = np.arange(round(RATE * seconds)) / RATE
    pause = np.zeros(RATE // 25)
    parts = [part for p in phones for part in (0.3 * np.sin(2 * np.pi * PITCH[p] * time), pause)]
    sound = np.concatenate([pause, *parts])
    return sound + 1e-3 * np.random.default_rng(seed).standard_normal(len(sound))


def write_corpus(folder: Path) -> Path:
    """In the layout of CMU Sphinx: 24 utterances of 6 speakers to train on, 6 of 2 others to test.
    The train transcripts carry <s> </s>, those of test do not, as in AN4."""
    dice = np.random.default_rng(5)
    (folder / "etc").mkdir(parents=True)
    lines = [f"{word:20} {' '.join(phones)}" for word, phones in WORDS.items()]
    (folder / "etc/toy.dic").write_text("\n".join(lines) + "\n")
    for part, speakers, each in (("train", 6, 4), ("test", 2, 3)):
        ids, said = [], []
        for number in range(speakers * each):
            name = f"u{number}-{part}"
            place = f"toy_{part}/{part[0]}{'abcdef'[number // each]}/{name}"
            words = dice.choice(["AB", "BC", "CA"], size=dice.integers(1, 4)).tolist()
            phones = [phone for word in words for phone in WORDS[word]]
            path = folder / "flac" / f"{place}.flac"
            path.parent.mkdir(parents=True, exist_ok=True)
            soundfile.write(path, tone(phones, number), RATE)
            ids.append(place)
            text = " ".join(words)
            said.append(f"<s> {text} </s> ({name})" if part == "train" else f"{text} ({name})")
        (folder / f"etc/toy_{part}.fileids").write_text("\n".join(ids) + "\n")
        (folder / f"etc/toy_{part}.transcription").write_text("\n".join(said) + "\n")
    return folder


DATA = {"kind": "speech", "rate": RATE, "bands": 8, "valid": 0.34}


def speech_recipe(folder: Path, **changes: Any) -> Recipe:
    table: dict[str, Any] = {
        "data": {**DATA, "path": str(folder)},
        "model": {"hidden": 10, "stack": 3, "init": 0.2},
        "posterior": {"kind": "delta"},
        "prior": {"kind": "uniform"},
        "train": {
            "epochs": 2,
            "streams": 4,
            "optimizer": "Adam",
            "lr": 0.03,
            "device": "cpu",
        },
    }
    return from_table(changed(table, changes))
