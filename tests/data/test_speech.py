"""Corpora of speech, made here: the layouts of CMU Sphinx and of TIMIT, and features kept."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bayesrnn.data import SpeechData, Vocabulary, load_speech, prepare_speech
from bayesrnn.data.corpora import FOLDED, PHONES_39, fold_phones, list_sphinx
from bayesrnn.data.speech import MANIFEST, TENSORS
from bayesrnn.errors import UserError
from speech_runs import RATE, WORDS, soundfile, tone, write_corpus

PHONES_61 = (
    "iy ih eh ey ae aa aw ay ah ao oy ow uh uw ux er ax ix axr ax-h jh ch b d g p t k dx s sh z zh "
    "f th v dh m n ng em en nx eng l r w y hh hv el bcl dcl gcl pcl tcl kcl q pau epi h#"
)


def settings(folder: Path, **changes: object) -> SpeechData:
    return replace(SpeechData(str(folder), rate=RATE, bands=8, valid=0.34), **changes)


def test_a_sphinx_corpus_is_read(tmp_path: Path) -> None:
    found = load_speech(settings(write_corpus(tmp_path / "toy")))
    assert found.vocabulary.tokens == ("<blank>", "A", "B", "C")
    assert {name: len(part) for name, part in found.splits.items()} == {
        "train": 16,
        "valid": 8,
        "test": 6,
    }
    speakers = {name: {one.speaker for one in part} for name, part in found.splits.items()}
    assert not speakers["train"] & speakers["valid"]
    first = load_speech(settings(tmp_path / "toy", valid=0)).splits["train"][0]
    line = (tmp_path / "toy/etc/toy_train.transcription").read_text().splitlines()[0]
    words = line.split()[1:-2]
    assert found.vocabulary.decode(first.labels) == [p for w in words for p in WORDS[w]]
    seconds = 0.04 + 0.16 * len(first.labels)
    assert len(first.features) == pytest.approx(100 * seconds, abs=4)


def test_variants_and_words(tmp_path: Path) -> None:
    folder = write_corpus(tmp_path / "toy")
    usual = load_speech(settings(folder, valid=0.0)).splits["train"]
    other = load_speech(settings(folder, valid=0.0, variants=("CA(2)",))).splits["train"]
    words = load_speech(settings(folder, valid=0.0, targets="words"))
    assert words.vocabulary.tokens == ("<blank>", "AB", "BC", "CA")
    for a, b, c in zip(usual, other, words.splits["train"], strict=True):
        said = words.vocabulary.decode(c.labels)
        assert len(a.labels) == len(b.labels) == 2 * len(said)
        assert (a.labels != b.labels) == ("CA" in said)
    with pytest.raises(UserError, match=r"names 'AB\(7\)'"):
        load_speech(settings(folder, variants=("AB(7)",)))


def test_features_kept_are_the_same_as_from_audio(tmp_path: Path) -> None:
    folder = write_corpus(tmp_path / "toy")
    assert prepare_speech(settings(folder), tmp_path / "kept") == 30
    from_audio, kept = load_speech(settings(folder)), load_speech(settings(tmp_path / "kept"))
    assert from_audio.digest == kept.digest
    assert from_audio.vocabulary == kept.vocabulary
    for split, utterances in from_audio.splits.items():
        for one, other in zip(utterances, kept.splits[split], strict=True):
            assert (one.name, one.speaker, one.labels) == (other.name, other.speaker, other.labels)
            assert one.features.equal(other.features)
    with pytest.raises(UserError, match=r"data\.bands is 8 there and 9 here"):
        load_speech(settings(tmp_path / "kept", bands=9))
    data = bytearray((tmp_path / "kept" / TENSORS).read_bytes())
    data[-3] ^= 1
    (tmp_path / "kept" / TENSORS).write_bytes(data)
    with pytest.raises(UserError, match="is damaged"):
        load_speech(settings(tmp_path / "kept"))
    assert (tmp_path / "kept" / MANIFEST).exists()


def rename_speakers(folder: Path, names: dict[str, str]) -> None:
    ids = folder / "etc/toy_train.fileids"
    for old, new in names.items():
        (folder / "flac/toy_train" / old).rename(folder / "flac/toy_train" / new)
        ids.write_text(ids.read_text().replace(f"/{old}/", f"/{new}/"))


def test_a_number_after_another_speakers_name_is_a_session(tmp_path: Path) -> None:
    folder = write_corpus(tmp_path / "toy")

    def speakers() -> set[str]:
        found = load_speech(settings(folder, valid=0)).splits["train"]
        return {one.speaker for one in found}

    rename_speakers(folder, {f"t{letter}": f"spk{i}" for i, letter in enumerate("abcdef", 1)})
    assert speakers() == {f"spk{i}" for i in range(1, 7)}
    assert load_speech(settings(folder)).splits["valid"]
    rename_speakers(folder, {f"spk{i}": name for i, name in enumerate(["m1", "m2", "f1", "f2"], 1)})
    assert speakers() == {"m1", "m2", "f1", "f2", "spk5", "spk6"}
    rename_speakers(folder, {"spk5": "mjab", "spk6": "mjab2", "f1": "mjab10"})
    assert speakers() == {"m1", "m2", "f2", "mjab"}


def test_what_is_wrong_with_a_corpus_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        load_speech(settings(tmp_path / "none"))
    with pytest.raises(UserError, match="neither etc"):
        load_speech(settings(tmp_path))
    folder = write_corpus(tmp_path / "toy")
    with pytest.raises(UserError, match="8000 samples a second"):
        load_speech(settings(folder, rate=16_000))
    with pytest.raises(UserError, match="6 speakers"):
        load_speech(settings(folder, valid=0.01))
    transcripts = folder / "etc/toy_test.transcription"
    before = transcripts.read_text()
    for text, problem in (
        (before.replace("(u0-test)", "(other)"), "no line for u0-test"),
        (before.replace("(u0-test)", ""), r"line 1: no \(name\)"),
        ("DE " + before, "does not have 'DE', said in u0-test"),
    ):
        transcripts.write_text(text)
        with pytest.raises(UserError, match=problem):
            load_speech(settings(folder))
    transcripts.write_text(before)
    next(folder.rglob("u3-train.flac")).unlink()
    with pytest.raises(UserError, match=r"no audio file for .*u3-train"):
        load_speech(settings(folder))


def test_labels_are_a_closed_set() -> None:
    with pytest.raises(UserError, match="'D' is none of the 3 labels"):
        Vocabulary(("<blank>", "A", "B")).encode(["A", "D"])


def test_sixty_one_phones_fold_to_thirty_nine() -> None:
    everything = PHONES_61.split()
    assert len(set(everything)) == 61
    assert set(FOLDED) < set(everything)
    assert len(PHONES_39) == 39
    assert set(fold_phones(everything)) == set(PHONES_39)
    assert len(fold_phones(everything)) == 60  # "q" is left out
    with pytest.raises(ValueError, match="'xx' is no phone"):
        fold_phones(["xx"])


def write_timit(folder: Path) -> Path:
    """TRAIN of three speakers, TEST of one of the core set and one who is not."""
    for part, region, speaker in (
        ("TRAIN", "DR1", "FCJF0"),
        ("TRAIN", "DR2", "MRCG0"),
        ("TRAIN", "DR2", "FAEM0"),
        ("TEST", "DR1", "MDAB0"),
        ("TEST", "DR1", "FAKS0"),
    ):
        place = folder / part / region / speaker
        place.mkdir(parents=True)
        for sentence in ("SA1", "SX37", "SI5"):
            sound = tone(["A", "B"])
            soundfile.write(place / f"{sentence}.WAV", sound, RATE, format="NIST", subtype="PCM_16")
            lines = ["0 300 h#", "300 1200 ix", "1200 1300 q", "1300 1500 bcl", "1500 2000 b"]
            (place / f"{sentence}.PHN").write_text("\n".join(lines) + "\n")
            (place / f"{sentence}.TXT").write_text("0 2000 Ib.\n")
    return folder


def test_a_timit_folder_is_read(tmp_path: Path) -> None:
    found = load_speech(settings(write_timit(tmp_path / "timit")))
    assert found.vocabulary.tokens == ("<blank>", *PHONES_39)
    names = {split: sorted(one.name for one in part) for split, part in found.splits.items()}
    assert names["test"] == ["TEST/DR1/MDAB0/SI5.WAV", "TEST/DR1/MDAB0/SX37.WAV"]
    assert len(names["train"]) == 4
    assert len(names["valid"]) == 2
    assert not any("SA1" in name for each in names.values() for name in each)
    one = found.splits["test"][0]
    assert found.vocabulary.decode(one.labels) == ["sil", "ih", "sil", "b"]
    assert one.speaker == "MDAB0"
    assert np.isfinite(one.features.numpy()).all()
    with pytest.raises(UserError, match="by its phones"):
        load_speech(settings(tmp_path / "timit", targets="words"))
    (tmp_path / "timit/TRAIN/DR1/FCJF0/SI5.PHN").write_text("0 300\n")
    with pytest.raises(UserError, match=r"SI5\.PHN, line 1: expected `start end phone`"):
        load_speech(settings(tmp_path / "timit"))


def test_an4_itself(data_folder: Callable[[str], Path]) -> None:
    """948 and 130 utterances; its labels hold about 73 kbit (all training speakers)."""
    folder = data_folder("an4")
    lists = {
        part: (folder / f"etc/an4_{part}.fileids").read_text().split() for part in ("train", "test")
    }
    assert {part: len(names) for part, names in lists.items()} == {"train": 948, "test": 130}
    spoken, labels = list_sphinx(folder, SpeechData(str(folder), variants=("A(2)",)))
    assert len(labels) == 33
    assert len(spoken) == 1078
    targets = sum(len(one.labels) for one in spoken if one.part == "train")
    assert 72_000 < targets * np.log2(len(labels)) < 74_500
    people = {part: {one.speaker for one in spoken if one.part == part} for part in lists}
    assert not people["train"] & people["test"]
