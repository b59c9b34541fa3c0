"""Posteriors that look at the data begin to after so many epochs, and are ordinary until then."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bayesrnn as br
from bayesrnn.models import LanguageModel
from bayesrnn.saving import build_model, load
from bayesrnn.train.loop import Trainer, train
from small_runs import metrics, small_recipe

ORDINARY = {"kind": "gaussian", "scale": 0.05}
LOOKS = {"kind": "sharpened", "scale": 0.05, "sigma0": 0.1, "eta": 0.05}


def trained(folder: Path, posterior: dict[str, Any], look_after: int) -> tuple[Any, list[Any]]:
    recipe = small_recipe(
        folder, posterior=posterior, train={"look_after": look_after, "epochs": 3}
    )
    train(recipe, folder / "run", quiet=True)
    epochs = [line for line in metrics(folder / "run") if line["kind"] == "epoch"]
    return load(folder / "run").moments(), epochs


def test_until_then_it_is_the_ordinary_network_bit_for_bit(tmp_path: Path) -> None:
    ordinary, epochs = trained(tmp_path / "ordinary", ORDINARY, 0)
    never, same = trained(tmp_path / "never", LOOKS, 3)
    assert epochs == same
    for name, (loc, scale) in ordinary.items():
        assert torch.equal(never[name][0], loc)
        assert torch.equal(never[name][1], scale)
    assert "nothing will be looked at" in (tmp_path / "never" / "run" / "log.txt").read_text()
    _, late = trained(tmp_path / "late", LOOKS, 2)
    _, always = trained(tmp_path / "always", LOOKS, 0)
    assert [one == other for one, other in zip(epochs, late, strict=True)] == [True, True, False]
    assert not any(one == other for one, other in zip(epochs, always, strict=True))


def test_a_training_that_fails_leaves_a_model_that_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = small_recipe(tmp_path, posterior=LOOKS, train={"look_after": 2, "epochs": 3})
    model = build_model(recipe, LanguageModel(22, 6, 8, 2, init=0.1))

    def broken(self: Trainer, batch: object) -> None:
        assert not self.model.looking
        raise br.UserError("so it goes")

    monkeypatch.setattr(Trainer, "_tick", broken)
    with pytest.raises(br.UserError, match="so it goes"):
        train(recipe, tmp_path / "run", quiet=True, start=model)
    assert model.looking
    model.looking = False  # and it is of training alone
    x = torch.zeros(5, 2, dtype=torch.int64)
    looked: list[int] = []

    def nll() -> torch.Tensor:
        looked.append(1)
        return model(x)[0].square().mean()

    with model.eval().weights("sample"):
        model.resample(nll=nll)
    assert looked == [1]


def test_without_a_posterior_that_looks_it_is_said_to_change_nothing(tmp_path: Path) -> None:
    for after in (9, 0):
        trained(tmp_path / str(after), ORDINARY, after)
    said = (tmp_path / "9/run/log.txt").read_text()
    assert "train.look_after is 9, and changes nothing: no posterior here looks" in said
    assert "looked at" not in said
    assert "look" not in (tmp_path / "0/run/log.txt").read_text()


def test_a_model_that_is_told_not_to_look_draws_phi(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    model = br.bayesianize(nn.Linear(3, 2), br.Sharpened(0.1, sigma0=0.1, eta=0.1)).train()
    x = torch.randn(4, 3)
    with pytest.raises(RuntimeError, match="looks at the data"):
        model(x)
    model.looking = False
    model.resample(nll=lambda: pytest.fail("nobody asked for a look"))
    torch.testing.assert_close(model.local_kl(), torch.zeros(()))
    model(x).sum().backward()
    (block,) = model.each_block()
    assert block.noise is not None
    assert set(block.noise) == {"eps"}
    assert block.eta.grad is None
