"""What is easily got wrong with the library: refused with one clear line, or made to work."""

import copy
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bayesrnn as br
from small_runs import write_text


def plain() -> nn.Linear:
    return nn.Linear(3, 2)


@pytest.mark.parametrize(
    "use",
    [
        lambda folder: br.predict(plain(), torch.zeros(1, 3)),  # type: ignore[arg-type]
        lambda folder: br.save(plain(), folder / "model"),  # type: ignore[arg-type]
        lambda folder: br.prune(plain(), fraction=0.5),  # type: ignore[arg-type]
        lambda folder: br.evaluate_text(plain(), br.StreamLoader(np.arange(9), 1, 2)),  # type: ignore[arg-type]
    ],
    ids=["predict", "save", "prune", "evaluate_text"],
)
def test_a_plain_module_is_named_as_such(use: Callable[[Path], object], tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="expected a model made by bayesianize, got Linear"):
        use(tmp_path)
    assert not (tmp_path / "model").exists()


def test_a_bayesian_network_is_not_made_bayesian_again() -> None:
    model = br.bayesianize(plain())
    for twice in (model, nn.Sequential(model, nn.ReLU())):
        with pytest.raises(TypeError, match="Bayesian already"):
            br.bayesianize(twice)


@pytest.mark.parametrize("where", [None, 3, [plain()]])
def test_where_must_name_weights(where: object) -> None:
    with pytest.raises(TypeError, match="where must be a name pattern, several, or a predicate"):
        br.bayesianize(plain(), where=where)  # type: ignore[arg-type]


@pytest.mark.parametrize("block", ["hold", "mean", "sample"])
def test_a_copy_made_inside_a_block_is_free_of_it(block: str) -> None:
    model = br.bayesianize(plain(), br.Gaussian(0.1), br.Normal()).train()
    x = torch.randn(4, 3)
    with model.hold() if block == "hold" else model.weights(block):  # type: ignore[arg-type]
        model(x)
        copied = copy.deepcopy(model)
        assert torch.equal(model(x), model(x))
    copied(x)  # perhaps the draw that was held, once
    assert not torch.equal(copied(x), copied(x))
    assert copied.kl().isfinite()


def test_points_have_no_threshold() -> None:
    model = br.bayesianize(plain(), br.Delta(), br.Uniform())
    with pytest.raises(br.Invalid, match="threshold cannot be set: all weights are points"):
        br.prune(model, threshold=0.83)
    br.prune(model, fraction=0.5)
    assert model.weight_count == 4


def test_one_number_is_no_class() -> None:
    model = br.bayesianize(nn.Linear(3, 1))
    x = torch.zeros(4, 3)
    with pytest.raises(ValueError, match=r"two or more classes.*\(4, 1\).*br\.outputs\.Normal"):
        br.predict(model, x, samples=2)
    assert br.predict(model, x, samples=2, output=br.outputs.Normal(1.0)).mean.shape == (4, 1)
    with pytest.raises(br.Invalid, match=re.escape("samples must be 0 (the mean) or a whole")):
        br.predict(model, x, samples=1.5)  # type: ignore[arg-type]


def test_token_ids_may_be_a_list_or_a_tensor() -> None:
    for ids in (list(range(8)), torch.arange(8), np.arange(8)):
        first = next(iter(br.StreamLoader(ids, streams=2, unroll=2)))  # type: ignore[arg-type]
        assert first.x.tolist() == [[0, 3], [1, 4]]
    assert br.bayesianize(plain(), where={"weight", "bias"}).weight_count == 8  # type: ignore[arg-type]
    assert br.Gaussian(np.float32(0.05)).std  # type: ignore[arg-type]
    for odd in (np.zeros((2, 3), dtype=np.int64), np.zeros(9), "words"):
        with pytest.raises(br.Invalid, match="ids must be one row of token ids"):
            br.StreamLoader(odd, streams=1, unroll=2)  # type: ignore[arg-type]


def test_a_text_may_be_given_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = write_text(tmp_path)
    by_path, by_settings = br.load_text(path), br.load_text(br.TextData(str(path)))
    assert np.array_equal(by_path.ids["train"], by_settings.ids["train"])


@pytest.mark.parametrize("scale", ["a", None, (0.1,), (0.1, "b")])
def test_a_scale_is_a_number_or_a_pair(scale: object) -> None:
    with pytest.raises(br.Invalid, match="scale must be a number or a pair of them"):
        br.Gaussian(scale)  # type: ignore[arg-type]


def test_a_kl_that_does_not_exist_is_refused_at_once() -> None:
    loader = DataLoader(TensorDataset(torch.zeros(4, 3)), batch_size=2)
    with pytest.raises(br.Invalid, match="kl must be one of auto, exact, sample, got 'foo'"):
        br.FreeEnergy(loader, kl="foo")  # type: ignore[arg-type]
