"""The description length of an example that can be worked out by hand."""

import json
import math
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from torch import nn

from bayesrnn import Delta, FreeEnergy, Gaussian, Normal, Sharpened, Uniform, bayesianize
from bayesrnn.bayes import Laplace, Posterior, Prior
from bayesrnn.description import Description, complexity, describe
from small_runs import Cli, write_recipe


def one_weight(posterior: Posterior, prior: Prior) -> Description:
    """Five targets of 4 labels, by a network of one weight of mean 0.5: logits (w, 0, 0, 0)."""
    net = nn.Linear(1, 1, bias=False)
    nn.init.constant_(net.weight, 0.5)
    model = bayesianize(net, posterior, prior)

    class Batch:
        targets, streams = 5, 1

    objective = FreeEnergy(Batch())
    w = model(torch.ones(1, 1))
    logits = torch.cat([w, torch.zeros(1, 3)], dim=1).expand(5, 4)
    y = torch.tensor([0, 0, 0, 1, 2])
    objective(model, nn.functional.cross_entropy(logits, y, reduction="sum"), Batch())
    return describe(*objective.epoch.nats[:2], objective.epoch.targets, 4, model.weight_count)


def test_a_hand_computed_example() -> None:
    """A scale of (almost) 0.01 against N(0, 1): KL = log(1 / 0.01) + (0.5^2 + 0.01^2 - 1) / 2."""
    torch.manual_seed(3)
    found = one_weight(Gaussian(scale=0.01, learn_scale=False), Normal(0.0, 1.0))
    complexity = math.log(100) + (0.25 + 1e-4 - 1) / 2
    error = 5 * math.log(math.exp(0.5) + 3) - 3 * 0.5  # at the mean; the draw is 0.01 off it
    assert found.complexity_nats == pytest.approx(complexity, rel=1e-5)
    assert found.error_nats == pytest.approx(error, abs=0.1)
    assert found.total_nats == pytest.approx(found.error_nats + complexity, rel=1e-5)
    assert found.uniform_bits == 10.0  # five times two bits
    assert found.total_bits == pytest.approx(found.total_nats / math.log(2))
    assert found.ratio == pytest.approx(found.total_bits / 10)
    assert found.bits_per_weight == pytest.approx(complexity / math.log(2), rel=1e-5)


@pytest.mark.parametrize(
    ("posterior", "prior"),
    [
        (Delta(), Uniform()),
        (Delta(), Normal("fit", "fit")),
        (Delta(), Laplace(0.0, 1 / 12)),
        (Gaussian(0.075, learn_scale=False), Uniform()),
    ],
)
def test_what_is_known_up_to_a_constant_is_no_length(posterior: Posterior, prior: Prior) -> None:
    found = one_weight(posterior, prior)
    assert found.error_nats is not None
    assert (found.complexity_nats, found.total_nats, found.total_bits) == (None, None, None)
    assert (found.ratio, found.bits_per_weight) == (None, None)


def test_numbers_have_no_uniform_code() -> None:
    found = describe(3.0, 1.0, targets=7, labels=None, weights=2)
    assert (found.uniform_bits, found.ratio) == (None, None)
    assert found.total_nats == 4.0


def test_train_and_evaluate_report_it(tmp_path: Path, cli: Cli) -> None:
    recipe = write_recipe(tmp_path, prior={"kind": "normal", "loc": "fit", "scale": "fit"})
    trained = json.loads(cli("train", recipe, "--out", tmp_path / "run", "--json", "--quiet").out)
    names = [field.name for field in fields(Description)]
    assert set(names) <= set(trained)
    assert trained["total_bits"] == pytest.approx(
        trained["error_bits"] + trained["complexity_bits"]
    )
    assert trained["ratio"] == pytest.approx(trained["total_bits"] / trained["uniform_bits"])
    drawn = json.loads(
        cli("evaluate", tmp_path / "run", "--split", "train", "--samples", 3, "--json").out
    )
    assert drawn["error_nats"] == pytest.approx(drawn["expected_nll"] * drawn["tokens"], rel=0.01)
    assert drawn["total_nats"] == pytest.approx(drawn["error_nats"] + drawn["complexity_nats"])
    assert drawn["ratio"] > 0
    by_mean = json.loads(cli("evaluate", tmp_path / "run", "--split", "train", "--json").out)
    on_test = json.loads(cli("evaluate", tmp_path / "run", "--samples", 3, "--json").out)
    for found in (by_mean, on_test):  # no code length: the mean's loss, targets never sent
        assert (found["error_nats"], found["total_bits"], found["ratio"]) == (None, None, None)
        assert found["complexity_bits"] == pytest.approx(drawn["complexity_bits"])
        assert found["bits_per_weight"] == pytest.approx(drawn["bits_per_weight"])


def test_the_weights_of_a_sharpened_model_cost_the_same_while_it_trains() -> None:
    model = bayesianize(nn.Linear(3, 2), Sharpened(0.1), Normal())
    for mode in (True, False):
        model.train(mode)
        moments = [torch.distributions.Normal(*moment) for moment in model.moments().values()]
        prior = torch.distributions.Normal(0.0, 1.0)
        exact = sum(torch.distributions.kl_divergence(q, prior).sum().item() for q in moments)
        assert complexity(model) == pytest.approx(exact, rel=1e-5)
        assert model.training == mode
