"""What a first reader of the code found wrong, kept right."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bayesrnn as br
from bayesrnn.errors import UserError
from bayesrnn.train.loop import train
from small_runs import small_recipe


class Counted:
    """A loader, and a batch, of so many targets."""

    def __init__(self, targets: int) -> None:
        self.targets = self.streams = targets

    def __iter__(self) -> Iterator[int]:
        return iter(())


def test_a_loader_that_puts_time_first_is_refused_not_undercharged() -> None:
    data = TensorDataset(torch.randn(8, 5))
    loader = DataLoader(data, batch_size=8, collate_fn=lambda b: torch.stack([x for (x,) in b], 1))
    model = br.bayesianize(nn.Linear(8, 1))
    for batch in loader:
        nll = model(batch).square().sum()
        with pytest.raises(ValueError, match=r"batch of 5 examples .* have 8: put the batch first"):
            br.FreeEnergy(loader)(model, nll, batch)


def test_many_draws_never_drift_past_the_end_of_an_epoch() -> None:
    model = br.bayesianize(nn.Linear(1, 1))
    model(torch.zeros(1, 1))
    objective = br.FreeEnergy(Counted(7 * 11))
    for _ in range(3):
        for _ in range(11):
            for _ in range(9):
                objective(model, torch.zeros(()), Counted(7), draws=9)
        assert objective.epoch.share == 1.0
        assert objective.epoch.targets == 77


def test_evaluation_leaves_the_mode_of_every_part_as_it_was() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    net[1].eval()
    model = br.bayesianize(net, where=["0.*", "2.*"])
    assert not model.module[1].training
    assert model.training
    br.predict(model, torch.randn(4, 3), samples=2)
    assert [part.training for part in model.module] == [True, False, True]


def test_evaluating_on_a_loader_does_not_move_its_position() -> None:
    loader = br.StreamLoader(np.arange(50) % 7, streams=2, unroll=4)
    loader.position = 3
    model = br.bayesianize(br.LanguageModel(7, 4, 4, 1))
    br.evaluate_text(model, loader)
    assert loader.position == 3


def test_a_fisher_step_with_a_learnt_prior_works() -> None:
    x = torch.randn(4, 3, dtype=torch.float64)
    loader = DataLoader(TensorDataset(x), batch_size=4)
    posterior, prior = br.Gaussian(0.1, estimator="fisher"), br.Normal(0.0, "learn")
    model = br.bayesianize(nn.Linear(3, 1).double(), posterior, prior)
    br.FreeEnergy(loader)(model, model(x).square().sum(dim=1), [x]).backward()
    assert model.priors[0].scale.grad.abs() > 0
    assert model.blocks[0].rho.grad.abs().sum() > 0


def test_weights_changed_before_the_backward_pass_are_noticed() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.spare = nn.LSTM(3, 2), nn.LSTM(3, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)[0]

    x = torch.randn(4, 1, 3)
    loader = DataLoader(TensorDataset(x), batch_size=4)
    model = br.bayesianize(Half())
    loss = br.FreeEnergy(loader)(model, model(x).square().sum(), [x])
    with torch.no_grad():
        model.blocks[1].loc.mul_(2)
    with pytest.raises(RuntimeError, match="changed between the forward and the backward"):
        loss.backward()
    assert all(block.charge is None for block in model.blocks)


def test_a_loss_that_does_not_depend_on_the_weights_still_pulls_them_to_the_prior() -> None:
    x = torch.randn(4, 3)
    loader = DataLoader(TensorDataset(x), batch_size=4)
    model = br.bayesianize(nn.Linear(3, 1), prior=br.Normal(0.0, 0.1))
    model(x)
    br.FreeEnergy(loader)(model, torch.tensor(3.0), [x]).backward()
    assert model.blocks[0].loc.grad.abs().sum() > 0


@pytest.mark.parametrize("prior", [br.ScaleMixture(), br.Normal(0.0, "learn")])
def test_a_model_can_be_made_and_asked_in_inference_mode(prior: br.Prior) -> None:
    with torch.inference_mode():
        model = br.bayesianize(nn.Linear(3, 2), prior=prior)
        prediction = br.predict(model, torch.zeros(1, 3), samples=2)
        model.resample()
        assert torch.isfinite(model.kl())
    assert torch.isfinite(prediction.total).all()


def test_a_prior_is_fitted_to_many_half_precision_weights_without_overflow() -> None:
    net = nn.Linear(500, 500).half()
    nn.init.constant_(net.weight, 2.0)
    model = br.bayesianize(net, br.Delta(), br.Normal(0.0, "fit"), where="weight")
    assert model.priors[0].scale.item() == pytest.approx(2.0, rel=1e-3)


def test_the_smallest_temperature_is_greedy() -> None:
    model = br.bayesianize(br.LanguageModel(7, 4, 4, 1))
    greedy = br.generate(model, [1], 5, temperature=0.0)
    assert br.generate(model, [1], 5, temperature=1e-310) == greedy


def test_a_run_can_be_made_longer_but_not_shorter(tmp_path: Path) -> None:
    train(small_recipe(tmp_path, train={"epochs": 2}), tmp_path / "run", quiet=True)
    before = (tmp_path / "run/recipe.toml").read_text()
    with pytest.raises(UserError, match=r"train.epochs is 2 there and 1 here"):
        train(small_recipe(tmp_path, train={"epochs": 1}), tmp_path / "run", quiet=True)
    assert (tmp_path / "run/recipe.toml").read_text() == before
    longer = train(small_recipe(tmp_path, train={"epochs": 3}), tmp_path / "run", quiet=True)
    assert [line["epoch"] for line in longer.epochs] == [1, 2, 3]


def test_the_sums_of_an_objective_survive_json_exactly() -> None:
    model = br.bayesianize(nn.Linear(1, 1))
    model(torch.zeros(1, 1))
    one, two = br.FreeEnergy(Counted(70)), br.FreeEnergy(Counted(70))
    one(model, torch.tensor(0.1), Counted(7), draws=3)
    two.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert two.state_dict() == one.state_dict()
    assert two.epoch == one.epoch
