from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bayesrnn.data import Vocabulary
from bayesrnn.errors import Invalid, UserError

TOKENS = st.one_of(st.sampled_from(["<eos>", "<unk>"]), st.text("abcé", min_size=1, max_size=3))
COUNTS = st.dictionaries(TOKENS, st.integers(1, 9), max_size=30)


@given(COUNTS, st.none() | st.integers(3, 20), st.integers(1, 4))
def test_build(counts: dict[str, int], max_size: int | None, min_count: int) -> None:
    vocabulary = Vocabulary.build(counts, max_size, min_count)
    special = {"<eos>", "<unk>"}
    assert len(vocabulary) == len(set(vocabulary.tokens))
    assert "<unk>" in vocabulary.tokens
    assert ("<eos>" in vocabulary.tokens) == ("<eos>" in counts)
    keys = [(-counts[t], t) for t in vocabulary.tokens if t in counts]
    assert keys == sorted(keys)
    if "<unk>" not in counts:
        assert vocabulary.tokens[-1] == "<unk>"
    possible = {t for t in counts if counts[t] >= min_count} | (special & set(counts)) | {"<unk>"}
    assert len(vocabulary) == min(len(possible), max_size or len(possible))
    kept = [counts[t] for t in vocabulary.tokens if t not in special]
    cut = [counts[t] for t in possible - special - set(vocabulary.tokens)]
    assert not kept or not cut or min(kept) >= max(cut)


@given(COUNTS, st.lists(TOKENS))
def test_encode_and_decode(counts: dict[str, int], tokens: list[str]) -> None:
    vocabulary = Vocabulary.build(counts, None, 1)
    ids = vocabulary.encode(tokens)
    known = set(vocabulary.tokens)
    assert vocabulary.decode(ids) == [t if t in known else "<unk>" for t in tokens]
    assert vocabulary.decode(range(len(vocabulary))) == list(vocabulary.tokens)


def test_save_and_load(tmp_path: Path) -> None:
    vocabulary = Vocabulary(("\n", '"', "ß", "\u2028", "🙂", "<unk>"))
    vocabulary.save(tmp_path / "vocabulary.json")
    assert Vocabulary.load(tmp_path / "vocabulary.json") == vocabulary
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[1, 2]", "not in the format"),
        (b'{"format": "other", "tokens": ["<unk>"]}', "not in the format"),
        (b'{"format": "bayesrnn vocabulary 1", "tokens": "<unk>"}', "not in the format"),
        (b'{"format": "bayesrnn vocabulary 1", "tokens": ["<unk>", 1]}', "not in the format"),
        (b'{"format": "bayesrnn vocabulary 1", "tokens": ["<unk>", "<unk>"]}', "twice"),
        (b'{"format": "bayesrnn vocabulary 1", "tokens": ["a"]}', "must hold <unk>"),
    ],
)
def test_load_of_a_damaged_file(tmp_path: Path, data: bytes, problem: str) -> None:
    path = tmp_path / "vocabulary.json"
    path.write_bytes(data)
    with pytest.raises(UserError) as caught:
        Vocabulary.load(path)
    assert str(caught.value).startswith(f"{path} is damaged or no vocabulary (")
    assert problem in str(caught.value)


def test_load_of_a_truncated_file(tmp_path: Path) -> None:
    path = tmp_path / "vocabulary.json"
    Vocabulary(("a", "<unk>")).save(path)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(UserError, match="not JSON"):
        Vocabulary.load(path)
    with pytest.raises(UserError, match="cannot read"):
        Vocabulary.load(tmp_path / "gone.json")


def test_words_that_were_changed_are_noticed(tmp_path: Path) -> None:
    path = tmp_path / "vocabulary.json"
    Vocabulary(("cat", "dog", "<unk>")).save(path)
    saved = path.read_text()
    path.write_text(saved.replace('"cat"', '"dug"'))
    with pytest.raises(UserError, match="its tokens are not those that were saved"):
        Vocabulary.load(path)
    path.write_text("".join(line for line in saved.splitlines() if "sha256" not in line))
    assert Vocabulary.load(path).tokens == ("cat", "dog", "<unk>")  # from before there was one


def test_impossible_sizes() -> None:
    with pytest.raises(Invalid, match=r"max_size must.*; min_count must"):
        Vocabulary.build({"a": 1}, 1, 0)
