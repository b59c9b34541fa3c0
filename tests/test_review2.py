"""What a second review of the library found, each a test that failed before."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from bayesrnn import Gaussian, Normal, bayesianize
from bayesrnn.data.captions import CaptionData, load_captions
from bayesrnn.data.features import Features, read_features, write_features
from bayesrnn.errors import Invalid, UserError
from bayesrnn.evaluate.decoding import Decoding, decode_captions
from bayesrnn.models import Captioner, CaptionerSettings
from bayesrnn.recipe import from_table, read_recipe
from bayesrnn.train.settings import TrainSettings
from bayesrnn.train.step import build_optimizer
from small_runs import Cli, write_recipe


@pytest.mark.parametrize(
    ("table", "key", "value"),
    [
        pytest.param("train", "lr", 10**400, id="lr"),
        ("train", "streams", 10**30),
        ("model", "init", float("inf")),
        ("train", "options", {"capturable": True}),
        ("train", "options", {"differentiable": True}),
    ],
)
def test_a_number_out_of_range_names_its_key(table: str, key: str, value: Any) -> None:
    settings: dict[str, Any] = {"data": {"path": "x"}, table: {key: value}}
    with pytest.raises(Invalid, match=rf"{table}\.{key}"):
        from_table(settings)


@pytest.mark.parametrize("key", ["window_ms", "hop_ms"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_span_of_time_that_is_no_number_names_its_key(key: str, value: Any) -> None:
    with pytest.raises(Invalid, match=rf"data\.{key}"):
        from_table({"data": {"kind": "speech", "path": "x", key: value}})


def test_a_number_of_thousands_of_digits_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(f'[data]\npath = "x"\n[train]\nseed = {"9" * 5000}\n')
    with pytest.raises(UserError, match=re.escape(str(path))):
        read_recipe(path)
    path.write_text('[data]\npath = "x"\n')
    with pytest.raises(Invalid, match="seed"):
        read_recipe(path, [f"train.seed={'9' * 5000}"])


@pytest.mark.parametrize("options", [{"betas": (0.9,)}, {"fused": True, "foreach": True}])
def test_options_that_torch_refuses_in_whatever_way_are_one_line(options: dict[str, Any]) -> None:
    settings = TrainSettings(optimizer="Adam", options=options)
    with pytest.raises(UserError, match=r"train\.options do not suit Adam"):
        build_optimizer(settings, bayesianize(nn.Linear(2, 2), Gaussian(), Normal()))


def test_too_little_memory_is_one_line(cli: Cli, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    result = cli("train", recipe, "model.hidden=10000000000000", "--out", tmp_path / "run")
    assert result.code == 1
    assert len(result.errors) == 1
    assert "not enough memory" in result.errors[0]


# --- captions ------------------------------------------------------------------------------------


def captions_with(folder: Path, *images: dict[str, Any]) -> CaptionData:
    """Three pictures, and these."""
    own = [
        {"filename": f"{i}.jpg", "split": split, "captions": ["A dog runs."]}
        for i, split in enumerate(("train", "val", "test"))
    ]
    (folder / "captions.json").write_text(json.dumps({"images": [*own, *images]}))
    names = [f"{i}.jpg" for i in range(4)]
    write_features(folder / "features.npz", Features(torch.rand(4, 3), names))
    return CaptionData(str(folder / "captions.json"), min_count=1)


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_picture_that_is_there_twice_is_refused(split: str, tmp_path: Path) -> None:
    """It would be both trained on and tested with, or lose its first captions."""
    again = {"filename": "0.jpg", "split": split, "captions": ["A cat sits."]}
    with pytest.raises(UserError, match=r"has 0\.jpg 2 times"):
        load_captions(captions_with(tmp_path, again))


@pytest.mark.parametrize("key", ["captions", "ptb"])
def test_a_caption_that_stands_alone_is_not_read_letter_by_letter(key: str, tmp_path: Path) -> None:
    alone = {"filename": "3.jpg", "split": "train", "captions": ["x"], key: "a dog runs"}
    with pytest.raises(UserError, match="must be a list"):
        load_captions(captions_with(tmp_path, alone))


def test_a_split_that_is_no_word_leaves_its_picture_out(tmp_path: Path) -> None:
    odd = {"filename": "3.jpg", "split": ["train"], "captions": ["a dog"]}
    found = load_captions(captions_with(tmp_path, odd))
    assert [list(part.names) for part in found.splits.values()] == [["0.jpg"], ["1.jpg"], ["2.jpg"]]


@pytest.mark.parametrize(
    ("features", "names"),
    [
        (np.array([["a"]]), np.array(["a.jpg"])),
        (np.zeros((1, 4)), np.array("a.jpg")),
        (np.zeros((0, 4)), np.array([], dtype=str)),
        (np.zeros((1, 0)), np.array(["a.jpg"])),
    ],
    ids=["letters", "one name", "no pictures", "no numbers"],
)
def test_features_of_another_shape_or_kind_are_one_line(
    features: Any, names: Any, tmp_path: Path
) -> None:
    np.savez(tmp_path / "f.npz", features=features, filenames=names)
    with pytest.raises(UserError, match=r"f\.npz"):
        read_features(tmp_path / "f.npz")


def test_damaged_features_are_one_line(tmp_path: Path) -> None:
    path = tmp_path / "f.npz"
    path.write_bytes(b"")
    with pytest.raises(UserError, match="damaged or not npz"):
        read_features(path)
    write_features(path, Features(torch.rand(2, 3), ["a.jpg", "b.jpg"]))
    data = bytearray(path.read_bytes())
    data[data.index(b"PK\1\2") + 10] = 77  # how it is packed
    path.write_bytes(data)
    with pytest.raises(UserError, match="damaged or not npz"):
        read_features(path)


def test_the_smallest_temperature_says_the_most_probable_words() -> None:
    torch.manual_seed(3)
    settings = CaptionerSettings(numbers=4, embedding=4, hidden=5, init=2.0)
    model = bayesianize(Captioner(6, settings), Gaussian(), Normal())
    vectors = torch.rand(5, 4)

    def said(temperature: float) -> list[tuple[int, ...]]:
        how = Decoding(beam=1, temperature=temperature, words=4)
        return [each.ids for each in decode_captions(model, vectors, 0, how, forbidden=(5,))]

    assert said(1e-310) == said(0.0)
