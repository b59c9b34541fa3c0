"""Captions and features from files, and their batches."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

import bayesrnn as br
from bayesrnn.data import (
    CaptionData,
    CaptionLoader,
    Features,
    choose_lengths,
    load_captions,
    read_features,
    write_features,
)
from bayesrnn.data.captions import read_captions
from bayesrnn.data.penn import penn_words
from caption_runs import SPLITS, write_captions

Folder = Callable[[str], Path]


# --- words ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sentence", "words"),
    [
        ("Two men, one dog - and a cat!", "two men one dog and a cat"),
        ("It's the man's \"hat\" ...", "it 's the man 's hat"),
        ("They cannot, don't and won't", "they can not do n't and wo n't"),
        ("A (small) T-shirt & jeans", "a -lrb- small -rrb- t-shirt & jeans"),
        ("At 10:30 on Morgan Rd. in the U.S. , 3.50", "at 10:30 on morgan rd. in the u.s. 3.50"),
    ],
)
def test_words_are_split_as_the_penn_treebank_does(sentence: str, words: str) -> None:
    assert " ".join(penn_words(sentence)) == words


def test_words_are_those_of_the_java_tokeniser_on_all_of_flickr8k(data_folder: Folder) -> None:
    file = data_folder("captions") / "flickr8k_captions.json"
    pairs = [
        pair
        for image in json.loads(file.read_text())["images"]
        for pair in zip(image["captions"], image["ptb"], strict=True)
    ]
    assert len(pairs) == 40_455
    assert [(raw, ptb) for raw, ptb in pairs if " ".join(penn_words(raw)) != ptb] == []


# --- files ---------------------------------------------------------------------------------------


def test_flickrs_layout_with_its_features(tmp_path: Path) -> None:
    data = load_captions(CaptionData(str(write_captions(tmp_path)), min_count=1))
    assert {name: len(part) for name, part in data.splits.items()} == {
        "train": 36,
        "valid": 9,
        "test": 9,
    }
    valid = data.splits["valid"]
    assert valid.names[4] == "val4.jpg"
    assert valid.captions[4][1] == "a green cat in the snow"
    # The vector of a picture is found by its name.
    assert data.vectors[valid.rows[4]][[1, 4]].min() > 0.9
    of, ids = valid.encoded(data.vocabulary)
    assert of[:4] == [0, 0, 0, 1]
    assert data.vocabulary.decode(ids[0]) == ["a", "red", "dog", "<eos>"]


def test_rare_words_are_unknown_and_the_words_given_are_kept(tmp_path: Path) -> None:
    settings = CaptionData(str(write_captions(tmp_path)), min_count=37)
    data = load_captions(settings)
    assert "red" not in data.vocabulary.index
    assert data.vocabulary.index["<eos>"] == data.vocabulary.tokens.index("<eos>")
    again = load_captions(settings, br.Vocabulary(("x", "<eos>", "<unk>")))
    assert again.vocabulary.tokens == ("x", "<eos>", "<unk>")


def coco(names: list[str], captions: int = 2) -> str:
    images = [{"id": 7 + i, "file_name": name} for i, name in enumerate(names)]
    said = [
        {"image_id": 7 + i % len(names), "caption": f"Picture {i}."}
        for i in range(captions * len(names))
    ]
    return json.dumps({"images": images, "annotations": said})


def test_cocos_layout_in_a_folder_or_split_at_random(tmp_path: Path) -> None:
    names = [f"{i}.jpg" for i in range(10)]
    write_features(tmp_path / "f.safetensors", Features(torch.rand(10, 3), names))
    (tmp_path / "captions_train2014.json").write_text(coco(names[:6]))
    (tmp_path / "captions_val2014.json").write_text(coco(names[6:]))
    data = load_captions(CaptionData(str(tmp_path), min_count=1))
    assert {k: list(v.names) for k, v in data.splits.items()} == {
        "train": names[:6],
        "valid": names[6:],
    }
    assert data.splits["train"].captions[0] == ["picture 0", "picture 6"]
    (tmp_path / "all.json").write_text(coco(names))
    one = CaptionData(str(tmp_path / "all.json"), min_count=1, split=(0.6, 0.2, 0.2))
    parts = load_captions(one).splits
    assert {k: len(v) for k, v in parts.items()} == {"train": 6, "valid": 2, "test": 2}
    assert sorted(name for part in parts.values() for name in part.names) == names


@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_features_come_back(suffix: str, dtype: torch.dtype, tmp_path: Path) -> None:
    given = Features(torch.rand(3, 4).to(dtype), ["b.jpg", "a ä.png", "c"])
    write_features(tmp_path / f"f.{suffix}", given)
    found = read_features(tmp_path / f"f.{suffix}")
    assert torch.equal(found.vectors, given.vectors)
    assert list(found.names) == list(given.names)
    assert found.rows(["c", "b.jpg"], "x") == [2, 0]


def test_bad_features_get_one_line(tmp_path: Path) -> None:
    def wrong(name: str, message: str) -> None:
        with pytest.raises(br.UserError, match=message) as caught:
            read_features(tmp_path / name)
        assert "\n" not in str(caught.value)

    (tmp_path / "text.npz").write_text("no zip")
    wrong("text.npz", r"text\.npz is damaged or not npz")
    (tmp_path / "text.safetensors").write_text("no tensors")
    wrong("text.safetensors", "is damaged or not safetensors")
    wrong("none.npz", r"cannot read .*none\.npz")
    wrong("f.csv", r"must end in \.npz or \.safetensors")
    np.savez(tmp_path / "less.npz", features=np.ones((2, 3)))
    wrong("less.npz", "has no 'filenames")
    np.savez(tmp_path / "uneven.npz", features=np.ones((2, 3)), filenames=np.array(["a"]))
    wrong("uneven.npz", r"features of shape \[2, 3\] for 1 filenames")
    np.savez(tmp_path / "nan.npz", features=np.full((1, 3), np.nan), filenames=np.array(["a"]))
    wrong("nan.npz", "no finite")
    np.savez(tmp_path / "twice.npz", features=np.ones((2, 3)), filenames=np.array(["a", "a"]))
    wrong("twice.npz", "a picture twice")
    np.savez(tmp_path / "objects.npz", features=np.ones((1, 1)), filenames=np.array([{}]))
    wrong("objects.npz", "damaged or not npz")  # a pickle is never opened
    save_file({"features": np.ones((1, 2), np.float32)}, tmp_path / "names.safetensors")
    wrong("names.safetensors", "has no '__metadata__'")


def test_bad_captions_get_one_line(tmp_path: Path) -> None:
    def wrong(contents: str, message: str, name: str = "c.json") -> None:
        (tmp_path / name).write_text(contents)
        with pytest.raises(br.UserError, match=message) as caught:
            load_captions(CaptionData(str(tmp_path / name)))
        assert "\n" not in str(caught.value)

    write_features(tmp_path / "f.npz", Features(torch.rand(1, 3), ["a.jpg"]))
    wrong("no", r"c\.json is not JSON")
    wrong("[]", r"c\.json is no file of captions")
    wrong('{"images": [{"filename": "a.jpg"}]}', r"no file of captions \(KeyError\('captions'\)\)")
    wrong('{"images": []}', "holds no captions")
    image = '{"filename": "%s", "split": "%s", "captions": ["a dog"]}'
    wrong('{"images": [' + image % ("a.jpg", "test") + "]}", "has no pictures to train on")
    wrong('{"images": [' + image % ("b.jpg", "train") + "]}", r"have no features \(b\.jpg, say\)")
    write_features(tmp_path / "g.npz", Features(torch.rand(1, 3), ["a.jpg"]))
    wrong('{"images": [' + image % ("a.jpg", "train") + "]}", "holds 2 files of features")
    with pytest.raises(br.UserError, match=r"has no captions_\*\.json"):
        read_captions(tmp_path)
    (tmp_path / "captions_other.json").write_text("{}")
    with pytest.raises(br.UserError, match="does not say what it is for"):
        read_captions(tmp_path)


def test_impossible_settings_are_all_named() -> None:
    with pytest.raises(br.Invalid) as caught:
        CaptionData("", min_count=0, lengths=0, split=(0.5, 0.5, 0.5))
    assert {key for key, _ in caught.value.problems} == {"path", "min_count", "lengths", "split"}


# --- batches -------------------------------------------------------------------------------------

END = 2
ragged = st.lists(st.integers(1, 9), min_size=1, max_size=40)


@given(ragged, st.integers(1, 7), st.integers(1, 5), st.integers(0, 3))
def test_every_word_is_there_once_and_the_shares_are_exact(
    counts: list[int], streams: int, most: int, epoch: int
) -> None:
    captions = [[10 * n + k for k in range(1, count)] + [END] for n, count in enumerate(counts, 1)]
    lengths = choose_lengths(counts, most)
    loader = CaptionLoader(range(len(counts)), captions, END, streams, lengths, seed=3)
    loader.epoch = epoch
    seen: list[tuple[int, list[int]]] = []
    shares = []
    for batch in loader:
        assert batch.y.shape[0] in lengths
        assert batch.x.shape == (1 + len(batch.y), streams)
        assert batch.targets == int((batch.y >= 0).sum())
        assert batch.streams == streams
        assert batch.padded
        shares.append(batch.targets)
        for x, y in zip(batch.x.T.tolist(), batch.y.T.tolist(), strict=True):
            real = [word for word in y if word >= 0]
            assert y == real + [-1] * (len(y) - len(real))
            if real:
                assert x[1 : 1 + len(real)] == [END, *real[:-1]]
                seen.append((x[0], real))
    assert sorted(seen) == sorted(enumerate(captions))
    assert loader.targets == sum(counts) == sum(shares)
    assert len(shares) == len(loader)


def test_the_order_is_a_function_of_seed_and_epoch_and_can_be_resumed() -> None:
    captions = [[5, END], [6, 7, END], [8, END], [9, END]]

    def loader() -> CaptionLoader:
        return CaptionLoader([0, 1, 2, 3], captions, END, 1, [2, 3], seed=1)

    one, other = loader(), loader()
    other.epoch = 7
    orders = [[batch.x[0].item() for batch in each] for each in (one, loader(), other)]
    assert orders[0] == orders[1] != orders[2]
    one.position = 2
    assert [batch.x[0].item() for batch in one] == orders[0][2:]


@given(ragged, st.integers(1, 4))
def test_lengths_are_the_best_there_are(counts: list[int], most: int) -> None:
    """Against all choices."""
    from itertools import combinations

    def padded(lengths: tuple[int, ...] | list[int]) -> int:
        return sum(min(n for n in lengths if n >= count) for count in counts)

    sizes = sorted(set(counts))
    found = choose_lengths(counts, most)
    assert len(found) <= most
    choices = [
        (*some, sizes[-1])
        for number in range(most)
        for some in combinations(sizes[:-1], min(number, len(sizes) - 1))
    ]
    assert padded(found) == min(map(padded, choices))


def test_captions_longer_than_all_lengths_are_refused() -> None:
    with pytest.raises(br.Invalid, match=re.escape("lengths must reach 3")):
        CaptionLoader([0], [[5, 6, END]], END, 1, [2])


def test_there_are_as_many_pictures_as_written(tmp_path: Path) -> None:
    assert sum(SPLITS.values()) == len(read_captions(write_captions(tmp_path)))
