"""Input that nobody expects: read rightly, or refused in one line."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from bayesrnn import Gaussian, Normal, bayesianize
from bayesrnn.data import (
    ReviewData,
    SpeechData,
    TextData,
    load_reviews,
    load_speech,
    load_text,
)
from bayesrnn.data.audio import read_audio
from bayesrnn.data.captions import CaptionData, load_captions
from bayesrnn.data.features import Features, read_features, write_features
from bayesrnn.data.utterances import UtteranceLoader
from bayesrnn.errors import Invalid, UserError
from bayesrnn.evaluate import ctc
from bayesrnn.evaluate.captioned import rank_captions
from bayesrnn.evaluate.decoding import Decoding, decode_captions
from bayesrnn.models import Captioner, CaptionerSettings
from bayesrnn.recipe import from_table, read_recipe
from bayesrnn.storage import Damaged, read_facts
from bayesrnn.train.metrics import epochs_missing, read_metrics
from bayesrnn.train.settings import TrainSettings
from bayesrnn.train.step import build_optimizer
from bayesrnn.train.task import build_task
from small_runs import Cli, write_recipe


@pytest.mark.parametrize(
    ("table", "key", "value"),
    [
        pytest.param("train", "lr", 10**400, id="lr"),
        ("train", "lr", 1e300),
        ("model", "init", 1e300),
        ("train", "streams", 10**30),
        ("model", "init", float("inf")),
        ("model", "noise", 1e38),
        ("train", "options", {"capturable": True}),
        ("train", "options", {"differentiable": True}),
    ],
)
def test_a_number_out_of_range_names_its_key(table: str, key: str, value: Any) -> None:
    data: dict[str, Any] = {"path": "x"}
    kinds = [data, {**data, "kind": "reviews"}, {**data, "kind": "series", "columns": ["a"]}]
    for data in kinds if key == "noise" else kinds[:1]:
        with pytest.raises(Invalid, match=rf"{table}\.{key}"):
            from_table({"data": data, table: {key: value}})


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
        build_optimizer(settings, bayesianize(nn.Linear(2, 2), Gaussian(), Normal()), 10)


def test_options_that_natural_gradients_refuse_are_one_line() -> None:
    settings = TrainSettings(optimizer="NaturalGradient", options={"momentum": 2.0})
    with pytest.raises(
        UserError, match=r"train\.options do not suit NaturalGradient: momentum must"
    ):
        build_optimizer(settings, bayesianize(nn.Linear(2, 2), Gaussian(), Normal()), 10)


@pytest.mark.parametrize("setting", ["hidden=10000000000000", "embedding=9000000000000000000"])
def test_too_little_memory_is_one_line(setting: str, cli: Cli, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    result = cli("train", recipe, f"model.{setting}", "--out", tmp_path / "run")
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


# --- speech and reviews --------------------------------------------------------------------------


def write_speech(folder: Path, ids: list[str], lines: list[str]) -> SpeechData:
    """A corpus in the layout of CMU Sphinx, of noise."""
    soundfile = pytest.importorskip("soundfile")
    random = np.random.default_rng(1)
    (folder / "etc").mkdir(parents=True)
    (folder / "etc" / "x.dic").write_text("YES Y EH S\nNO N OW\n")
    for part, names, said in (("train", ids, lines), ("test", ["c/u9"], ["YES (u9)"])):
        (folder / "etc" / f"x_{part}.fileids").write_text("\n".join(names) + "\n")
        (folder / "etc" / f"x_{part}.transcription").write_text("\n".join(said) + "\n")
        for name in names:
            path = folder / "wav" / f"{name}.wav"
            path.parent.mkdir(parents=True, exist_ok=True)
            soundfile.write(path, 0.1 * random.normal(size=8000), 16_000)
    return SpeechData(str(folder), valid=0.0)


def test_utterances_of_one_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    """By the name alone both would get the transcript of the last."""
    lines = ["<s> YES </s> ({}u1)", "<s> NO </s> ({}u1)"]
    unclear = write_speech(tmp_path / "unclear", ["a/u1", "b/u1"], [x.format("") for x in lines])
    with pytest.raises(UserError, match=r"2 files named u1; .* as \(a/u1\)"):
        load_speech(unclear)
    clear = [line.format(folder) for line, folder in zip(lines, ("a/", "b/"), strict=True)]
    found = load_speech(write_speech(tmp_path / "clear", ["a/u1", "b/u1"], clear))
    said = [found.vocabulary.decode(one.labels) for one in found.splits["train"]]
    assert said == [["Y", "EH", "S"], ["N", "OW"]]


def test_a_corpus_in_which_nothing_is_said_is_one_line(tmp_path: Path) -> None:
    data = write_speech(tmp_path, ["a/u1", "b/u2"], ["<s> </s> (u1)", "<s> </s> (u2)"])
    with pytest.raises(UserError, match="nothing is said in any utterance of 'train'"):
        UtteranceLoader(load_speech(data).splits["train"], streams=2)


def test_an_utterance_is_never_left_out(tmp_path: Path) -> None:
    """`drop_last` was taken, and did nothing."""
    table = {"kind": "speech", "path": str(tmp_path)}
    recipe = from_table({"data": table, "train": {"drop_last": True}})
    with pytest.raises(Invalid, match=r"train\.drop_last is not for speech"):
        build_task(recipe, torch.device("cpu"))


def test_a_file_of_bare_samples_is_one_line(tmp_path: Path) -> None:
    pytest.importorskip("soundfile")
    (tmp_path / "a.raw").write_bytes(bytes(8000))
    with pytest.raises(UserError, match=r"a\.raw is damaged or not audio"):
        read_audio(tmp_path / "a.raw", 16_000)


def test_a_byte_order_mark_is_no_part_of_a_recipe(tmp_path: Path) -> None:
    path = write_recipe(tmp_path)
    plain = read_recipe(path)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert read_recipe(path) == plain


@pytest.mark.parametrize("value", ["2024", "2024-05-01", "1.5", "true"])
def test_a_path_that_toml_takes_for_something_else_is_to_be_quoted(
    value: str, tmp_path: Path
) -> None:
    path = write_recipe(tmp_path)
    quoted = f'data.path="{value}"'
    with pytest.raises(Invalid, match=f"must be a string, got .*; quote it: '{quoted}'"):
        read_recipe(path, [f"data.path={value}"])
    assert read_recipe(path, [quoted]).data.path == value


def test_a_list_whose_quotes_a_shell_took_away_is_to_be_quoted(tmp_path: Path) -> None:
    path = write_recipe(tmp_path)
    with pytest.raises(Invalid) as refused:
        read_recipe(path, ["bayes.where=[rnn.*,decoder.weight]"])
    quoted = 'bayes.where=["rnn.*", "decoder.weight"]'
    assert str(refused.value).endswith(f"; quote it: '{quoted}'")
    assert read_recipe(path, [quoted]).bayes.where == ("rnn.*", "decoder.weight")


def test_a_byte_order_mark_is_no_part_of_a_word(tmp_path: Path) -> None:
    data = write_speech(tmp_path / "speech", ["a/u1"], ["YES (u1)"])
    marked = tmp_path / "speech" / "etc" / "x_train.fileids"
    marked.write_bytes(b"\xef\xbb\xbf" + marked.read_bytes())
    assert len(load_speech(data).splits["train"]) == 1
    (tmp_path / "subj.A").write_text("\ufeffgood\n" * 1 + "good\n" * 9)
    (tmp_path / "rating.A").write_text("\ufeff" + "0.5\n" * 10)
    vocabulary = load_reviews(ReviewData(str(tmp_path))).vocabulary
    assert vocabulary is not None
    assert vocabulary.tokens == ("good", "<unk>")


# --- runs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        "3",
        "[1]",
        "{}",
        '{"kind": "epoch"}',
        '{"kinc": "step"}',
        '{"kind": "epoch", "epoch": 1, "valid_nll": "5"}',
        '{"kind": "step", "nll": [5]}',
    ],
)
def test_a_line_of_metrics_without_its_keys_is_damage(line: str, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(f'{{"kind": "step", "step": 1}}\n{line}\n')
    with pytest.raises(Damaged, match="line 2 is not JSON, or not a run's"):
        read_metrics(tmp_path)
    assert epochs_missing(tmp_path, from_table({"data": {"path": "x"}})) == 0


def test_json_nested_beyond_reason_is_damage(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(Damaged, match="is not JSON"):
        read_facts(tmp_path, "model", "config.json")


@pytest.mark.parametrize("ending", ["ids", "json"])
def test_an_encoded_text_that_was_altered_is_encoded_anew(ending: str, tmp_path: Path) -> None:
    """A flipped bit would be another word, or none of the vocabulary."""
    (tmp_path / "text.txt").write_text("the cat sat on the mat\n" * 20)
    settings = TextData(str(tmp_path / "text.txt"), cache=str(tmp_path / "cache"))
    first = load_text(settings)
    before, words = {name: ids.tolist() for name, ids in first.ids.items()}, first.vocabulary
    (file,) = (tmp_path / "cache").glob(f"*.{ending}")
    data = bytearray(file.read_bytes())
    place = data.index(b"cat") if ending == "json" else 1
    data[place] ^= 1
    file.write_bytes(data)
    again = load_text(settings)
    assert {name: ids.tolist() for name, ids in again.ids.items()} == before
    assert again.vocabulary == words


def test_how_sure_a_long_labelling_is_takes_bounded_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All its variants at once would be 57 GB for half a minute of speech."""
    log_p = torch.randn(30, 5, generator=torch.Generator().manual_seed(1)).log_softmax(dim=1)
    labelling = [1, 2, 2, 3, 4, 1]
    whole = ctc.confidences([log_p, log_p.roll(1, 0)], labelling)
    sizes = []
    plain = ctc.ctc_nll

    def watched(log_p: torch.Tensor, lengths: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        sizes.append(log_p.shape[0] * log_p.shape[1] * (2 * y.shape[1] + 1))
        return plain(log_p, lengths, y)

    monkeypatch.setattr(ctc, "ctc_nll", watched)
    monkeypatch.setattr(ctc, "MOST_PLACES", 2000)
    assert ctc.confidences([log_p, log_p.roll(1, 0)], labelling) == pytest.approx(whole)
    assert max(sizes) <= 2000


def test_captions_that_score_nothing_rank_at_0_not_below() -> None:
    found = rank_captions(torch.rand(5), torch.zeros(5))
    assert str([found.cider, found.area, found.best_area]) == "[0.0, 0.0, 0.0]"
