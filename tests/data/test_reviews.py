"""Reviews: what is read of them, how they are split, and a clear line for broken files."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bayesrnn import ReviewData, UserError, Vocabulary, load_reviews
from bayesrnn.data.reviews import PADDING
from labelled_runs import write_reviews


def test_hand_made_files_are_read_as_they_were_written(tmp_path: Path) -> None:
    (tmp_path / "subj.me").write_text("so very very long\nshort\nmiddling one\n")
    (tmp_path / "rating.me").write_text("0.1\n1\n.5\n")
    settings = ReviewData(str(tmp_path), words=3, split=(0.67, 0.0, 0.33))
    vocabulary = Vocabulary(("so", "very", "short", "middling", "one", "<unk>"))
    data = load_reviews(settings, vocabulary)
    assert data.vocabulary is vocabulary
    found = {
        name: (x, y)
        for part in data.splits.values()
        for name, x, y in zip(part.names, part.x.tolist(), part.y.tolist(), strict=True)
    }
    assert found["me 1"] == ([0, 1, 1], pytest.approx(0.1))
    assert found["me 2"] == ([2, PADDING, PADDING], 1.0)
    assert found["me 3"] == ([3, 4, PADDING], 0.5)
    assert {name: len(part) for name, part in data.splits.items()} == {"train": 2, "test": 1}


def test_the_parts_are_disjoint_and_fixed_by_the_seed(tmp_path: Path) -> None:
    settings = write_reviews(tmp_path / "one")
    parts = load_reviews(settings).splits
    names = [name for part in parts.values() for name in part.names]
    assert len(names) == len(set(names)) == 100
    again = load_reviews(write_reviews(tmp_path / "two")).splits  # wherever the files are
    assert again["test"].names == parts["test"].names
    assert torch.equal(again["train"].x, parts["train"].x)
    other = load_reviews(write_reviews(tmp_path / "one", split_seed=2)).splits
    assert other["test"].names != parts["test"].names
    with_valid = load_reviews(write_reviews(tmp_path / "one", split=(0.68, 0.1, 0.22))).splits
    assert with_valid["test"].names == parts["test"].names
    assert [*with_valid["train"].names, *with_valid["valid"].names] == parts["train"].names


def test_the_vocabulary_is_that_of_the_words_trained_on(tmp_path: Path) -> None:
    """Neither a test review's words nor those after the cut are in it."""
    settings = write_reviews(tmp_path)
    test = load_reviews(settings).splits["test"].names[0]
    author, number = test.split()
    path = tmp_path / f"scaledata/{author}/subj.{author}"
    lines = path.read_text().splitlines()
    lines = [f"{line} x x x x x x x x late" for line in lines]
    lines[int(number) - 1] = "unheard"
    path.write_text("\n".join(lines) + "\n")
    data = load_reviews(settings)
    assert data.vocabulary is not None
    assert {"x", "good"} <= set(data.vocabulary.tokens)
    assert not {"unheard", "late"} & set(data.vocabulary.tokens)
    unknown = data.vocabulary.index["<unk>"]
    assert data.splits["test"].x[0].tolist() == [unknown, *[PADDING] * 7]


@pytest.mark.parametrize("classes", [3, 4])
def test_classes_are_read_from_their_own_files(tmp_path: Path, classes: int) -> None:
    ratings = load_reviews(write_reviews(tmp_path)).splits["train"]
    labels = load_reviews(write_reviews(tmp_path, classes=classes)).splits["train"]
    assert labels.y.dtype == torch.int64
    assert set(labels.y.tolist()) == set(range(classes))
    assert torch.equal(labels.x, ratings.x)
    for y, rating in zip(labels.y.tolist(), ratings.y.tolist(), strict=True):
        bounds = (0.4, 0.69) if classes == 3 else (0.31, 0.51, 0.79)
        assert y == sum(rating > bound for bound in bounds)


def test_the_scale_data_have_5006_reviews(data_folder: Callable[[str], Path]) -> None:
    settings = ReviewData(str(data_folder("sentiment")))
    data = load_reviews(settings)
    train, test = data.splits["train"], data.splits["test"]
    assert (len(train), len(test)) == (4005, 1001)
    assert len({*train.names, *test.names}) == 5006
    assert train.x.shape == (4005, 200)
    y = torch.cat([train.y, test.y])
    assert (y.min(), y.max()) == (0, 1)
    assert y.double().mean().item() == pytest.approx(0.5814, abs=1e-4)
    assert ((train.x >= 0).sum(dim=1) >= 1).all()
    assert data.vocabulary is not None
    assert train.x.max() < len(data.vocabulary)


def test_bad_folders_and_files_get_one_line(tmp_path: Path) -> None:
    settings = write_reviews(tmp_path)
    rating = tmp_path / "scaledata/A+A/rating.A+A"
    text = tmp_path / "scaledata/A+A/subj.A+A"
    good = {path: path.read_bytes() for path in (rating, text)}

    def error() -> str:
        with pytest.raises(UserError) as caught:
            load_reviews(settings)
        for path, data in good.items():
            path.write_bytes(data)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    rating.unlink()
    assert "cannot read" in error()
    rating.write_text("0.5\n")
    assert "has 40 reviews but" in (said := error())
    assert "has 1 lines" in said
    for wrong in ("1.5", "nan", "0_1", "good", ""):
        rating.write_text(f"0.5\n{wrong}\n" + "0.5\n" * 38)
        assert f"line 2: {wrong!r} is not a rating from 0 to 1" in error()
    text.write_bytes(b"\n" + b"x\n" * 39)
    assert "line 1: there is no review" in error()
    text.write_bytes(b"\xff\n" * 40)
    assert "is not UTF-8 (at byte 0)" in error()
    with pytest.raises(UserError, match=r"does not exist; set data\.path"):
        load_reviews(ReviewData(str(tmp_path / "nowhere")))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"has no files subj\.NAME"):
        load_reviews(ReviewData(str(tmp_path / "empty")))
    with pytest.raises(UserError, match="too few reviews"):
        load_reviews(write_reviews(tmp_path, split=(0.998, 0.001, 0.001)))


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="split must be three fractions that sum to 1"):
        ReviewData("x", split=(0.8, 0.2, 0.0))
    with pytest.raises(ValueError, match="words must be at least 1, got 0"):
        ReviewData("x", words=0)
    with pytest.raises(ValueError, match="classes must be 0"):
        ReviewData("x", classes=1)
