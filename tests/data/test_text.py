import io
import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from bayesrnn.data import Corpus, StreamLoader, TextData, Vocabulary, encode_text, load_text, text
from bayesrnn.data.text import Tokens, tokenise
from bayesrnn.errors import Invalid, UserError

KINDS: tuple[Tokens, ...] = ("whitespace", "words", "characters")


def settings_for(path: Path, folder: Path, **changes: object) -> TextData:
    return replace(TextData(str(path), cache=str(folder / "cache")), **changes)  # type: ignore[arg-type]


def words_of(corpus: Corpus, split: str) -> list[str]:
    return corpus.vocabulary.decode(corpus.ids[split].tolist())


def write_splits(folder: Path, train: str, valid: str, test: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name, contents in (("train", train), ("valid", valid), ("test", test)):
        (folder / f"{name}.txt").write_text(contents, encoding="utf-8", newline="")
    return folder


LETTERS = "\\w[\\w\u0301\u093f\u200d]*"
"""Of a word, with the marks that TEXTS have."""


def plain_tokens(contents: str, kind: Tokens, lowercase: bool) -> list[str]:
    """The definition, for a text in one piece."""
    if kind == "characters":
        characters = list(contents)
        return list("".join(c.lower() for c in characters)) if lowercase else characters
    found = []
    for line in contents.split("\n"):
        if line.strip():
            pattern = r"\S+" if kind == "whitespace" else rf"{LETTERS}(?:['’]{LETTERS})?|[^\w\s]"
            tokens = re.findall(pattern, line)
            found += [t.lower() for t in tokens] if lowercase else tokens
            found.append("<eos>")
    return found


# Penn Treebank


def test_penn_treebank(data_folder: Callable[[str], Path], tmp_path: Path) -> None:
    ptb = data_folder("ptb")
    corpus = load_text(settings_for(ptb, tmp_path))
    lengths = {split: len(ids) for split, ids in corpus.ids.items()}
    assert lengths == {"train": 929_589, "valid": 73_760, "test": 82_430}
    assert len(corpus.vocabulary) == 10_000
    assert corpus.vocabulary.tokens[:3] == ("the", "<unk>", "<eos>")
    assert set(corpus.unknown.values()) == {0}
    loader = StreamLoader(corpus.ids["train"], streams=20, unroll=35, drop_last=True)
    assert len(loader) == 1327
    assert StreamLoader(corpus.ids["test"], streams=1, unroll=35).targets == 82_429
    lines = (ptb / "ptb.test.txt").read_text(encoding="utf-8").splitlines()
    assert words_of(corpus, "test") == [t for line in lines for t in [*line.split(), "<eos>"]]


# Tokens


def test_tokens_by_hand() -> None:
    contents = "Don't  STOP, ok?\n \n\nÉté_1 'so'\r\nend"
    found = {
        kind: "|".join(t for p in tokenise([contents], TextData("x", tokens=kind)) for t in p)
        for kind in KINDS
    }
    assert found["characters"] == "|".join(contents)
    assert found["whitespace"] == "Don't|STOP,|ok?|<eos>|Été_1|'so'|<eos>|end|<eos>"
    assert found["words"] == "Don't|STOP|,|ok|?|<eos>|Été_1|'|so|'|<eos>|end|<eos>"


@pytest.mark.parametrize(
    "word",
    [
        "don’t",  # as books and phones write it
        "n\u0303andu\u0301",  # accents of their own, as some files have them
        "हिन्दी",
        "தமிழ்",
        "ไม่ใช่",
        "שָׁלוֹם",
        "مَكْتَبَة",
        "می\u200cخواهم",
    ],
)
def test_a_word_of_any_script_is_one_token(word: str) -> None:
    settings = TextData("x", tokens="words")
    for line in (f"a {word}, {word}", f"a {word}\n{word}.".upper()):
        words = line.replace(".", " .").replace(",", " ,").replace("\n", " <eos> ").split()
        assert [t for piece in tokenise(line, settings) for t in piece] == [*words, "<eos>"]


TEXTS = st.text(
    st.sampled_from([*"ab'’_.,<> \t\n\r\x0b\u00a0\u2028éΣİ漢🙂क\u0301\u093f\u200d"]),
    max_size=60,
)


@pytest.mark.parametrize("kind", KINDS)
@hypothesis_settings(max_examples=200)
@given(contents=TEXTS, lowercase=st.booleans(), size=st.integers(1, 7))
def test_chunks_never_tear_a_token(
    kind: Tokens,
    tmp_path_factory: pytest.TempPathFactory,
    contents: str,
    lowercase: bool,
    size: int,
) -> None:
    path = tmp_path_factory.getbasetemp() / "chunks.txt"
    path.write_bytes(contents.encode())
    settings = TextData(str(path), tokens=kind, lowercase=lowercase)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "CHUNK_BYTES", size)
        chunks = list(text._read_text(path, lambda _: None))
    assert "".join(chunks) == contents
    expected = plain_tokens(contents, kind, lowercase)
    assert [t for piece in tokenise(chunks, settings) for t in piece] == expected
    assert [t for piece in tokenise([contents], settings) for t in piece] == expected


def test_one_gigantic_line_comes_in_pieces() -> None:
    chunks = ["ab,cd" * 20] * 50
    for kind in KINDS[1:]:
        pieces = list(tokenise(chunks, TextData("x", tokens=kind)))
        assert len(pieces) >= 50
        assert max(len(piece) for piece in pieces) < 200


def test_encode_text_is_the_same_as_a_file(tmp_path: Path) -> None:
    contents = "One two.\nThree'll do\n"
    folder = write_splits(tmp_path / "text", contents, contents, contents)
    for kind in KINDS:
        settings = settings_for(folder, tmp_path, tokens=kind, lowercase=True)
        corpus = load_text(settings)
        ids = encode_text(contents, settings, corpus.vocabulary)
        assert ids == corpus.ids["train"].tolist()


# Sources and splits


def test_a_single_file_is_split_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "all.txt"
    words = [f"w{number % 37}" for number in range(1003)]
    path.write_text(" ".join(words))
    settings = settings_for(path, tmp_path, split=(0.7, 0.1, 0.2))
    corpus = load_text(settings)
    whole = [*words, "<eos>"]
    assert words_of(corpus, "train") == whole[:703]  # 0.7 * 1004 = 702.8
    assert words_of(corpus, "valid") == whole[703:803]  # 0.8 * 1004 = 803.2
    # the only <eos> is in the last part, and the vocabulary is that of the first
    assert words_of(corpus, "test") == [*whole[803:-1], "<unk>"]
    assert corpus.unknown == {"train": 0, "valid": 0, "test": 1}
    monkeypatch.setattr(text, "CHUNK_BYTES", 10)
    again = load_text(replace(settings, cache=str(tmp_path / "other")))
    for split in ("train", "valid", "test"):
        assert np.array_equal(corpus.ids[split], again.ids[split])
        assert corpus.ids[split].dtype == np.int32
        assert isinstance(corpus.ids[split], np.memmap)
        assert not corpus.ids[split].flags.writeable


def test_a_folder_of_files_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    (folder / "b").mkdir(parents=True)
    (folder / "c.txt").write_text("4\n")
    (folder / "b" / "x.txt").write_text("2 3")
    (folder / "a.txt").write_text("0 1")
    (folder / "empty.txt").write_text("")
    (folder / "ignored.md").write_text("no")
    corpus = load_text(settings_for(folder, tmp_path, split=(0.75, 0.125, 0.125)))
    assert words_of(corpus, "train") == ["0", "1", "<eos>", "2", "3", "<eos>"]
    assert corpus.unknown == {"train": 0, "valid": 1, "test": 0}
    assert words_of(corpus, "test") == ["<eos>"]


def test_split_files_with_either_name(tmp_path: Path) -> None:
    folder = write_splits(tmp_path / "text", "a a b\n", "a\n", "b\n")
    first = load_text(settings_for(folder, tmp_path))
    for file in list(folder.iterdir()):
        file.rename(folder / f"ptb.{file.name}")
    second = load_text(settings_for(folder, tmp_path))
    assert words_of(first, "test") == words_of(second, "test") == ["b", "<eos>"]


def test_unknown_tokens_are_counted(tmp_path: Path) -> None:
    folder = write_splits(tmp_path / "text", "a a a b b c <unk>\n", "a c d <unk>\n", "a <unk>\n")
    corpus = load_text(settings_for(folder, tmp_path, min_count=2))
    assert corpus.vocabulary.tokens == ("a", "b", "<eos>", "<unk>")
    assert corpus.unknown == {"train": 1, "valid": 2, "test": 0}
    assert words_of(corpus, "valid") == ["a", "<unk>", "<unk>", "<unk>", "<eos>"]
    small = load_text(settings_for(folder, tmp_path, max_vocabulary=3))
    assert small.vocabulary.tokens == ("a", "<eos>", "<unk>")


def test_a_given_vocabulary_is_used(tmp_path: Path) -> None:
    folder = write_splits(tmp_path / "text", "a b\n", "b\n", "a\n")
    vocabulary = Vocabulary(("<unk>", "b", "<eos>"))
    corpus = load_text(settings_for(folder, tmp_path), vocabulary)
    assert corpus.vocabulary == vocabulary
    assert corpus.ids["train"].tolist() == [0, 1, 2]
    assert corpus.unknown == {"train": 1, "valid": 0, "test": 1}
    assert load_text(settings_for(folder, tmp_path)).vocabulary != vocabulary


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    folder = write_splits(tmp_path / "text", "\ufeffa b\n", "b\n", "a\n")
    corpus = load_text(settings_for(folder, tmp_path))
    assert corpus.vocabulary.tokens == ("<eos>", "a", "b", "<unk>")


# Cache


def test_the_cache_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_splits(tmp_path / "text", "a b c\n", "b\n", "a\n")
    settings = settings_for(folder, tmp_path)
    first = load_text(settings)
    files = {file: file.stat().st_mtime_ns for file in (tmp_path / "cache").iterdir()}
    assert sorted(file.suffix for file in files) == [".ids", ".json"]
    moved = folder.rename(tmp_path / "moved")
    with monkeypatch.context() as patch:
        patch.setattr(text, "tokenise", None)  # would fail if it were called
        second = load_text(replace(settings, path=str(moved)))
    assert second.vocabulary == first.vocabulary
    assert second.unknown == first.unknown
    assert second.ids["train"].tolist() == first.ids["train"].tolist()
    assert {file: file.stat().st_mtime_ns for file in files} == files
    (moved / "valid.txt").write_text("c\n")
    assert words_of(load_text(replace(settings, path=str(moved))), "valid") == ["c", "<eos>"]


@pytest.mark.parametrize("suffix", [".ids", ".json"])
@pytest.mark.parametrize("damage", ["truncated", "longer", "empty", "gone"])
def test_a_damaged_cache_is_made_again(tmp_path: Path, suffix: str, damage: str) -> None:
    folder = write_splits(tmp_path / "text", "a b c\n", "b\n", "a\n")
    settings = settings_for(folder, tmp_path)
    load_text(settings)
    (file,) = (tmp_path / "cache").glob(f"*{suffix}")
    whole = file.read_bytes()
    file.unlink()
    if damage != "gone":
        changed = {"truncated": whole[:-1], "longer": whole + b"{}{}", "empty": b""}
        file.write_bytes(changed[damage])
    assert words_of(load_text(settings), "train") == ["a", "b", "c", "<eos>"]
    assert file.read_bytes() == whole


def test_the_cache_is_where_caches_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_splits(tmp_path / "text", "a\n", "b\n", "c\n")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    load_text(TextData(str(folder)))
    assert len(list((tmp_path / "xdg" / "bayesrnn").iterdir())) == 2
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    load_text(TextData(str(folder)))
    assert len(list((tmp_path / "home" / ".cache" / "bayesrnn").iterdir())) == 2


def test_progress_only_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    folder = write_splits(tmp_path / "text", "a\n", "b\n", "c\n")
    for number, screen in enumerate((io.StringIO(), Terminal())):
        monkeypatch.setattr(sys, "stderr", screen)
        load_text(settings_for(folder, tmp_path / str(number)))
        assert bool(screen.getvalue()) == screen.isatty()


# Bad input


def fails(path: Path, folder: Path, **changes: object) -> str:
    with pytest.raises(UserError) as caught:
        load_text(settings_for(path, folder, **changes))
    message = str(caught.value)
    assert "\n" not in message
    assert "; " in message
    assert not list((folder / "cache").glob("*")) if (folder / "cache").is_dir() else True
    return message


def test_a_missing_path(tmp_path: Path) -> None:
    message = fails(tmp_path / "gone", tmp_path)
    assert message == (
        f"{tmp_path / 'gone'} does not exist; set data.path to a text file or a folder of them"
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("contents", ["", " \n\t\n", "\ufeff"])
def test_an_empty_file(tmp_path: Path, kind: Tokens, contents: str) -> None:
    path = tmp_path / "empty.txt"
    path.write_text(contents, encoding="utf-8")
    assert fails(path, tmp_path, tokens=kind).startswith(f"{path} is empty or blank; ")
    folder = write_splits(tmp_path / "text", "a\n", contents, "a\n")
    message = fails(folder, tmp_path, tokens=kind)
    assert message.startswith(f"{folder / 'valid.txt'} is empty or blank; ")


def test_a_text_too_short_to_split(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("a b")
    assert f"{path} has 3 tokens, too few to split as [0.8, 0.1, 0.1]; " in fails(path, tmp_path)


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_text_that_is_not_utf8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(text, "CHUNK_BYTES", size)
    path = tmp_path / "bad.txt"
    for data, offset in (
        ("né 漢字 ".encode() + b"caf\xe9 au lait", 14),
        ("\ufeffab".encode() + b"\xff", 5),
        (b"cut short \xe6\xbc", 10),
    ):
        path.write_bytes(data)
        assert fails(path, tmp_path).startswith(f"{path} is not UTF-8 (at byte {offset}); ")
    path.write_bytes(b"MZ text\0text")
    assert fails(path, tmp_path).startswith(f"{path} is binary (NUL at byte 7); ")


def test_missing_splits(tmp_path: Path) -> None:
    folder = write_splits(tmp_path / "text", "a\n", "a\n", "a\n")
    (folder / "test.txt").unlink()
    (folder / "more.txt").write_text("a\n")
    assert f"{folder} has train.txt, valid.txt but not test.txt; " in fails(folder, tmp_path)


def test_a_folder_without_texts(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    assert fails(folder, tmp_path).startswith(f"{folder} has no .txt files; ")


def test_something_that_is_no_file(tmp_path: Path) -> None:
    assert "is neither a file nor a folder; " in fails(Path(os.devnull), tmp_path)


def test_an_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "secret.txt"
    path.write_text("a b c")

    def refuse(self: Path, *arguments: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    assert fails(path, tmp_path).startswith(f"cannot read {path}: Permission denied; ")


@pytest.mark.parametrize("inside", ["", "runs/one"])
def test_a_runs_log_is_no_text(inside: str, tmp_path: Path) -> None:
    run = tmp_path / "texts" / inside
    run.mkdir(parents=True)
    (run / "log.txt").write_text("2026-01-01 12:00:00 starting on cpu\n" * 50)
    (tmp_path / "texts" / "book.txt").write_text("once upon a time\n" * 50)
    load_text(TextData(str(tmp_path / "texts"), cache=str(tmp_path / "other")))
    (run / "recipe.toml").write_text("")
    message = fails(tmp_path / "texts", tmp_path)
    assert message.startswith(f"{run} is a run's folder, and its log is no text to learn; give")


def test_an_unwritable_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_splits(tmp_path / "text", "a\n", "a\n", "a\n")
    (tmp_path / "file").write_text("")
    cache = tmp_path / "file" / "cache"
    message = fails(folder, tmp_path, cache=str(cache))
    assert message.startswith(f"cannot make {cache}: Not a directory; make it writable, or set ")
    really_open = Path.open

    def refuse(self: Path, mode: str = "r") -> object:
        if mode == "xb":
            raise PermissionError(13, "Permission denied")
        return really_open(self, mode)

    monkeypatch.setattr(Path, "open", refuse)
    message = fails(folder, tmp_path)
    assert message.startswith(f"cannot write {tmp_path / 'cache'}")
    assert message.endswith("writable, or set data.cache or $XDG_CACHE_HOME to another folder")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"path": ""}, "path must name"),
        ({"tokens": "bytes"}, "tokens must be one of whitespace, words, characters, got 'bytes'"),
        ({"max_vocabulary": -1}, "max_vocabulary must be 0"),
        ({"max_vocabulary": 2}, "max_vocabulary must be 0"),
        ({"min_count": 0}, "min_count must be at least 1, got 0"),
        ({"split": (0.8, 0.2, 0.0)}, "split must be three fractions"),
        ({"split": (0.8, 0.1, 0.2)}, "split must be three fractions"),
        ({"split": (0.5, 0.5)}, "split must be three fractions"),
        ({"split": (float("nan"), 0.5, 0.5)}, "split must be three fractions"),
    ],
)
def test_impossible_settings(changes: dict[str, object], message: str) -> None:
    with pytest.raises(Invalid) as caught:
        replace(TextData("x"), **changes)  # type: ignore[arg-type]
    assert message in str(caught.value)
