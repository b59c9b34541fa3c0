"""Averaged weights: the mean of those steps and no others, validated and saved, and no more."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bayesrnn.evaluate import evaluate_text
from bayesrnn.models import LanguageModel
from bayesrnn.saving import build_model, load, load_vocabulary
from bayesrnn.train.average import EVERY, Average
from bayesrnn.train.loop import Trainer, train
from bayesrnn.train.task import LanguageTask
from small_runs import EPOCH, checkpoint_contents, checkpoint_folders, metrics, small_recipe


def test_the_model_is_the_mean_of_every_tenth_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    after: list[dict[str, Tensor]] = []
    tick = Trainer._tick

    def watched(self: Trainer, batch: Any) -> None:
        tick(self, batch)
        after.append({n: p.detach().clone() for n, p in self.model.named_parameters()})

    monkeypatch.setattr(Trainer, "_tick", watched)
    recipe = small_recipe(tmp_path, train={"average_after": 1, "epochs": 3})
    model = build_model(recipe, LanguageModel(22, 6, 8, 2, init=0.1))
    train(recipe, tmp_path / "run", quiet=True, start=model)
    assert EVERY == 10
    steps = [EPOCH + 1, EPOCH + 11, EPOCH + 21, EPOCH + 31]
    for name, parameter in model.named_parameters():
        taken = torch.stack([after[step - 1][name].double() for step in steps])
        torch.testing.assert_close(parameter.double(), taken.mean(dim=0), rtol=1e-5, atol=1e-6)
    saved = load(tmp_path / "run").moments()
    for name, moments in model.moments().items():
        torch.testing.assert_close(moments, saved[name])


def test_the_average_is_what_is_validated_and_saved_and_the_rest_goes_on_as_before(
    tmp_path: Path,
) -> None:
    plain, averaged = (small_recipe(tmp_path, train={"average_after": after}) for after in (0, 1))
    train(plain, tmp_path / "plain", quiet=True)
    train(averaged, tmp_path / "averaged", quiet=True)
    first, second = (
        [line for line in metrics(tmp_path / name) if line["kind"] == "epoch"]
        for name in ("plain", "averaged")
    )
    assert first[0] == second[0]
    assert second[1].pop("averaged") == 2
    changed = {key for key in first[1] if first[1][key] != second[1][key]}
    assert changed == {"valid_nll", "valid_perplexity"}
    run = tmp_path / "averaged"
    task = LanguageTask(averaged, torch.device("cpu"), load_vocabulary(run))
    again = evaluate_text(load(run), task.stream("valid", averaged.train.valid_streams))
    assert again.nll == pytest.approx(second[1]["valid_nll"], rel=1e-6)
    # What training goes on from is not the average.
    (one, _), (other, _) = (
        checkpoint_contents(checkpoint_folders(tmp_path / name)[-1])
        for name in ("plain", "averaged")
    )
    names = [name for name in one if name.startswith(("parameters", "optimizer", "carried"))]
    assert names
    assert [name for name in names if one[name] != other[name]] == []


def test_a_model_is_at_its_average_for_a_while_and_then_as_it_was() -> None:
    layer = torch.nn.Linear(1, 1, bias=False)
    weight, place = layer.weight, layer.weight.data_ptr()
    average = Average(layer, start=0)
    with average.in_place():
        pass  # nothing is there yet
    for step in range(1, 12):
        weight.data.fill_(float(step))
        average.note(step)
    with average.in_place():
        assert layer.weight.item() == (1 + 11) / 2
    assert layer.weight.item() == 11
    average.put()
    assert layer.weight.item() == 6
    assert layer.weight is weight
    assert weight.data_ptr() == place  # a recorded step writes there


def test_what_is_frozen_is_left_alone() -> None:
    layer = torch.nn.Linear(1, 1)
    layer.bias.requires_grad_(False)
    average = Average(layer, start=3)
    average.note(3)
    assert average.count == 0
    average.note(4)
    assert set(average.means) == {"weight"}


@pytest.mark.parametrize(("after", "said"), [(1, False), (2, True), (9, True)])
def test_an_average_that_would_never_begin_is_said(tmp_path: Path, after: int, said: bool) -> None:
    recipe = small_recipe(tmp_path, train={"average_after": after, "epochs": 2})
    train(recipe, tmp_path / "run", quiet=True)
    log = (tmp_path / "run" / "log.txt").read_text()
    assert (f"train.average_after is {after}, and the training ends before" in log) == said
