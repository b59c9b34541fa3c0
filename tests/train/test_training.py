"""What a training optimises and writes down, against sums made by hand."""

import json
import math
import threading
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Laplace, Normal, kl_divergence

import bayesrnn as br
from bayesrnn.description import Description
from bayesrnn.errors import UserError
from bayesrnn.models.language import LanguageModel
from bayesrnn.objective import FreeEnergy
from bayesrnn.recipe import Recipe
from bayesrnn.saving import build_model, build_module
from bayesrnn.train import loop
from bayesrnn.train.loop import Outcome, train
from bayesrnn.train.metrics import read_metrics
from bayesrnn.train.task import LanguageTask
from small_runs import EPOCH, checkpoint_folders, metrics, small_recipe

STILL = {"lr": 1e-30, "options": {}}  # no weight moves, so that an epoch has one KL

STEP_KEYS = {"kind", "step", "epoch", "nll", "perplexity", "kl", "words_per_second"}
EPOCH_KEYS = {
    *("kind", "step", "epoch", "lr", "train_nll", "train_perplexity", "kl", "seconds"),
    *("valid_nll", "valid_perplexity"),
    *(field.name for field in fields(Description)),
}


def start_of(recipe: Recipe) -> tuple[LanguageTask, LanguageModel]:
    """The data and the plain network that a run of this recipe starts from."""
    task = LanguageTask(recipe, torch.device("cpu"))
    torch.manual_seed(recipe.train.seed)
    return task, build_module(recipe, task.corpus.vocabulary)


def summed_nll(network: LanguageModel, task: LanguageTask) -> float:
    """-log p of each target of an epoch, the state carried by hand."""
    total, state = 0.0, None
    with torch.no_grad():
        for batch in task.batches:
            logits, state = network(batch.x, state)
            picked = logits.double().log_softmax(-1).gather(-1, batch.y[..., None])
            total -= picked.sum().item()
    return total


def trainable(network: LanguageModel) -> Tensor:
    return torch.cat(
        [p.detach().double().flatten() for p in network.parameters() if p.requires_grad]
    )


def only_epoch(folder: Path) -> dict[str, Any]:
    [line] = [line for line in metrics(folder) if line["kind"] == "epoch"]
    return line


@pytest.mark.parametrize("kind", ["normal", "laplace"])
def test_an_epoch_of_a_penalised_network_sums_to_nll_minus_log_prior(
    kind: str, tmp_path: Path
) -> None:
    recipe = small_recipe(
        tmp_path,
        posterior={"kind": "delta"},
        prior={"kind": kind, "scale": 0.2},
        train=STILL | {"epochs": 1},
    )
    train(recipe, tmp_path / "run", quiet=True)
    task, network = start_of(recipe)
    line = only_epoch(tmp_path / "run")
    log_prior = {"normal": Normal, "laplace": Laplace}[kind](0.0, 0.2)
    expected = -log_prior.log_prob(trainable(network)).sum().item()
    assert line["kl"] == pytest.approx(expected, rel=1e-5)
    nll = summed_nll(network, task)
    assert line["train_nll"] * task.batches.targets == pytest.approx(nll, rel=1e-6)
    assert line["error_bits"] == pytest.approx(nll / math.log(2), rel=1e-6)
    assert line["complexity_bits"] is None  # a point has no description length
    assert line["total_bits"] is None


@pytest.mark.parametrize("draws", [1, 3])
def test_the_kl_is_charged_exactly_once_an_epoch(draws: int, tmp_path: Path) -> None:
    recipe = small_recipe(
        tmp_path,
        prior={"kind": "normal", "scale": 0.2},
        train=STILL | {"epochs": 1, "draws": draws},
    )
    train(recipe, tmp_path / "run", quiet=True)
    _, network = start_of(recipe)
    means = trainable(network)
    kl = kl_divergence(Normal(means, 0.05), Normal(0.0, 0.2)).sum().item()
    line = only_epoch(tmp_path / "run")
    assert line["kl"] == pytest.approx(kl, rel=1e-5)
    assert line["complexity_bits"] == pytest.approx(kl / math.log(2), rel=1e-5)
    assert line["total_bits"] == pytest.approx(line["error_bits"] + line["complexity_bits"])


@pytest.mark.parametrize("draws", [1, 3])
def test_a_step_follows_the_mean_gradient_of_its_draws(draws: int, tmp_path: Path) -> None:
    lr = 0.3
    recipe = small_recipe(
        tmp_path,
        train={"lr": lr, "options": {}, "clip": 0.0, "draws": draws, "max_steps": 1},
    )
    train(recipe, tmp_path / "run", quiet=True)

    task, network = start_of(recipe)
    model = build_model(recipe, network).train()
    batch = next(iter(task.batches))
    objective = torch.zeros(())
    for _ in range(draws):
        logits, _ = model(batch.x)
        nll = -logits.log_softmax(-1).gather(-1, batch.y[..., None]).sum()
        share = batch.targets / task.batches.targets
        objective = objective + (nll + share * model.kl()) / (batch.streams * draws)
    objective.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= lr * parameter.grad
    trained = br.load(tmp_path / "run").moments()
    for name, (loc, scale) in model.moments().items():
        torch.testing.assert_close(trained[name][0], loc, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(trained[name][1], scale, rtol=1e-4, atol=1e-7)


def test_clipping_bounds_the_norm_of_all_gradients_together(tmp_path: Path) -> None:
    train_settings = {"lr": 1.0, "options": {}, "clip": 0.01, "max_steps": 1}
    recipe = small_recipe(
        tmp_path, posterior={"kind": "delta"}, prior={"kind": "uniform"}, train=train_settings
    )
    train(recipe, tmp_path / "run", quiet=True)
    _, network = start_of(recipe)
    trained = br.load(tmp_path / "run").moments()
    before = dict(network.named_parameters())
    moved = torch.cat([(loc - before[n]).detach().flatten() for n, (loc, _) in trained.items()])
    assert moved.norm().item() == pytest.approx(0.01, rel=1e-3)


def test_the_state_is_carried_from_cut_to_cut_and_starts_anew_each_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Any, Any]] = []
    nll = LanguageTask.nll

    def watched(self: LanguageTask, model: Any, batch: Any, state: Any) -> Any:
        losses, after = nll(self, model, batch, state)
        seen.append((state, after))
        return losses, after

    monkeypatch.setattr(LanguageTask, "nll", watched)
    train(small_recipe(tmp_path), tmp_path / "run", quiet=True)
    assert len(seen) == 2 * EPOCH
    for number, (state, _) in enumerate(seen):
        if number % EPOCH == 0:
            assert state is None
        else:
            before = seen[number - 1][1]
            assert all(torch.equal(a, b) for a, b in zip(state, before, strict=True))
            assert any(tensor.abs().max() > 0 for tensor in state)
            assert not any(tensor.requires_grad for tensor in state)


VARIANTS: dict[str, dict[str, Any]] = {
    "weight noise": {
        "posterior": {"kind": "gaussian", "scale": 0.075, "learn_scale": False},
        "prior": {"kind": "uniform"},
    },
    "fitted normal": {"prior": {"kind": "normal", "loc": "fit", "scale": "fit"}},
    "learnt normal": {"prior": {"kind": "normal", "loc": "learn", "scale": "learn"}},
    "fitted laplace": {
        "posterior": {"kind": "delta"},
        "prior": {"kind": "laplace", "loc": "fit", "scale": "fit"},
    },
    "learnt laplace": {"prior": {"kind": "laplace", "scale": "learn"}},
    "learnt mixture": {"prior": {"kind": "scale_mixture", "pi": "learn", "sigma1": "learn"}},
    "mixture of each weight": {
        "prior": {"kind": "scale_mixture", "sigma2": 0.02, "group": "weight"}
    },
    "Fisher": {
        "posterior": {"kind": "gaussian", "estimator": "fisher"},
        "prior": {"kind": "normal", "scale": "fit"},
    },
    "by pattern": {
        "posterior": {
            "rnn.*": {"kind": "gaussian", "scale": [0.01, 0.02]},
            "*": {"kind": "delta"},
        },
        "prior": {"*.weight*": {"kind": "scale_mixture"}, "*": {"kind": "normal"}},
    },
    "some weights only": {"bayes": {"where": ["rnn.weight*"], "kl": "sample"}},
    "tied rnn": {"model": {"cell": "rnn", "tied": True, "embedding": 8, "hidden": 8}},
    "Adam": {"train": {"optimizer": "Adam", "lr": 0.01, "options": {"betas": [0.8, 0.9]}}},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_posterior_and_prior_lowers_the_free_energy_and_can_be_loaded(
    variant: str, tmp_path: Path
) -> None:
    changes = dict(VARIANTS[variant])
    gentle = {"epochs": 3, "lr": 0.02, "options": {}}
    changes["train"] = gentle | changes.get("train", {})
    recipe = small_recipe(tmp_path, **changes)
    outcome = train(recipe, tmp_path / "run", quiet=True)
    task, network = start_of(recipe)
    energies = [task.batches.targets * e["train_nll"] + e["kl"] for e in outcome.epochs]
    assert energies == sorted(energies, reverse=True)
    before, model = build_model(recipe, network), br.load(tmp_path / "run")
    assert all(
        not torch.equal(loc, before.moments()[name][0])
        for name, (loc, _) in model.moments().items()
    )
    for old, new in zip(before.each_prior(), model.each_prior(), strict=True):
        for name in (*new.prior.named("learn"), *new.prior.named("fit")):
            assert not torch.equal(getattr(new, name), getattr(old, name))


def test_a_fitted_prior_ends_at_the_moments_of_the_weights(tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path, prior={"kind": "normal", "loc": "fit", "scale": "fit"})
    train(recipe, tmp_path / "run", quiet=True)
    model = br.load(tmp_path / "run")
    moments = model.moments().values()
    loc = torch.cat([mean.flatten() for mean, _ in moments]).double()
    scale = torch.cat([std.flatten() for _, std in moments if std is not None]).double()
    values = next(model.each_prior()).values()
    assert float(values["loc"]) == pytest.approx(loc.mean().item(), abs=1e-6)
    expected = (scale.square() + (loc - loc.mean()).square()).mean().sqrt().item()
    assert float(values["scale"]) == pytest.approx(expected, rel=1e-5)


def test_the_learning_rate_follows_the_published_schedule(tmp_path: Path) -> None:
    settings = {"epochs": 5, "lr": 0.5, "decay": 0.9, "decay_after": 2}
    outcome = train(small_recipe(tmp_path, train=settings), tmp_path / "run", quiet=True)
    assert [line["lr"] for line in outcome.epochs] == pytest.approx(
        [0.5, 0.5, 0.5 * 0.9, 0.5 * 0.9**2, 0.5 * 0.9**3]
    )


def test_a_text_of_characters_is_counted_in_characters(tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path, data={"tokens": "characters"}, train={"epochs": 1})
    train(recipe, tmp_path / "run", quiet=True)
    line = next(line for line in read_metrics(tmp_path / "run") if line["kind"] == "step")
    assert "characters_per_second" in line
    assert "words_per_second" not in line


def test_the_kl_warms_up_step_by_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[float] = []
    loss = FreeEnergy.loss

    def watched(self: FreeEnergy, *given: Any, **named: Any) -> Any:
        counted.append(float(self.warmth))
        return loss(self, *given, **named)

    monkeypatch.setattr(FreeEnergy, "loss", watched)
    settings = {"epochs": 4, "warm_up": 2}
    outcome = train(small_recipe(tmp_path, train=settings), tmp_path / "run", quiet=True)
    steps = outcome.steps // 2
    rising = [step / steps for step in range(steps)]
    assert counted == pytest.approx([*rising, *[1.0] * steps])
    assert all(line["kl"] > 0 for line in outcome.epochs)  # the whole of it


def test_metrics_are_lines_of_json_with_the_documented_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "LOG_STEPS", 8)
    train(small_recipe(tmp_path), tmp_path / "run", quiet=True)
    lines = [json.loads(s) for s in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert lines.pop() == {"kind": "end", "step": 2 * EPOCH, "epoch": 2}
    assert [(line["kind"], line["step"]) for line in lines] == [
        *(("step", 8), ("step", 16), ("epoch", EPOCH)),
        *(("step", 24), ("step", 32), ("step", 40), ("epoch", 2 * EPOCH)),
    ]
    for line in lines:
        assert set(line) == (STEP_KEYS if line["kind"] == "step" else EPOCH_KEYS)
        assert line["epoch"] == (line["step"] - 1) // EPOCH + 1
        assert all(math.isfinite(v) for v in line.values() if isinstance(v, float))
    for line in lines:
        nll = line["nll"] if line["kind"] == "step" else line["train_nll"]
        perplexity = "perplexity" if line["kind"] == "step" else "train_perplexity"
        assert line[perplexity] == pytest.approx(math.exp(nll))


def test_the_lines_of_figures_average_to_the_epochs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "LOG_STEPS", EPOCH // 4)
    train(small_recipe(tmp_path, train={"epochs": 1}), tmp_path / "run", quiet=True)
    steps = [line["nll"] for line in metrics(tmp_path / "run") if line["kind"] == "step"]
    targets = [100, 100, 100, 96]  # the last cut is one step short
    mean = sum(n * t for n, t in zip(steps, targets, strict=True)) / sum(targets)
    assert mean == pytest.approx(only_epoch(tmp_path / "run")["train_nll"], rel=1e-9)


def test_training_works_outside_the_main_thread(tmp_path: Path) -> None:
    """Signals can only be caught in the main one."""
    done: list[Outcome] = []
    recipe = small_recipe(tmp_path, train={"max_steps": 2})
    thread = threading.Thread(
        target=lambda: done.append(train(recipe, tmp_path / "run", quiet=True))
    )
    thread.start()
    thread.join()
    assert done[0].finished


@pytest.mark.parametrize(
    ("settings", "prior", "cause"),
    [
        ({"lr": 1e38, "clip": 0.0, "options": {}}, {"kind": "uniform"}, "the loss of the data"),
        ({}, {"kind": "normal", "scale": 1e-30}, "the KL"),
    ],
)
def test_a_loss_that_is_not_finite_stops_with_its_step_cause_and_remedy(
    settings: dict[str, Any], prior: dict[str, Any], cause: str, tmp_path: Path
) -> None:
    recipe = small_recipe(tmp_path, train=settings | {"checkpoint_minutes": 0}, prior=prior)
    with pytest.raises(UserError) as caught:
        train(recipe, tmp_path / "run", quiet=True)
    message = str(caught.value)
    lr = recipe.train.lr
    assert f": {cause} is not finite" in message
    assert f"train.lr={lr / 2:g}" in message
    assert ("a smaller train.clip" in message) == (recipe.train.clip > 0)
    step = int(message.removeprefix("step ").partition(":")[0])
    folders = checkpoint_folders(tmp_path / "run") if step > 1 else []
    assert [int(path.name) for path in folders] == list(range(max(1, step - 2), step))
    if folders:
        before = {path.name: path.stat().st_mtime_ns for path in folders[-1].iterdir()}
        with pytest.raises(UserError, match=rf"step {step}: "):  # from where it was, once more
            train(recipe, tmp_path / "run", quiet=True)
        after = {path.name: path.stat().st_mtime_ns for path in folders[-1].iterdir()}
        assert after == before


def test_the_published_recipe_learns_the_penn_treebank(
    data_folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A smaller network, and the first tenth of the text: its KL falls about ten times as fast."""
    ptb, text = data_folder("ptb"), tmp_path / "text"
    text.mkdir()
    for name in ("train", "valid", "test"):
        lines = (ptb / f"ptb.{name}.txt").read_text().splitlines(keepends=True)
        (text / f"ptb.{name}.txt").write_text("".join(lines[: len(lines) // 10]))
    recipe = br.read_recipe(
        Path(__file__).parents[2] / "recipes/ptb-brnn-medium.toml",
        [
            *(f"data.path={text}", f"data.cache={tmp_path / 'cache'}", "train.device=cpu"),
            *("model.hidden=64", "model.embedding=64", "train.max_steps=120"),
        ],
    )
    carried: list[bool] = []
    nll = LanguageTask.nll

    def watched(self: LanguageTask, model: Any, batch: Any, state: Any) -> Any:
        carried.append(state is not None)
        return nll(self, model, batch, state)

    monkeypatch.setattr(LanguageTask, "nll", watched)
    monkeypatch.setattr(loop, "LOG_STEPS", 20)
    train(recipe, tmp_path / "run", quiet=True)
    lines = [line for line in metrics(tmp_path / "run") if line["kind"] == "step"]
    assert [line["step"] for line in lines] == [20, 40, 60, 80, 100, 120]
    assert carried == [False] + [True] * 119
    losses, kls = [line["nll"] for line in lines], [line["kl"] for line in lines]
    assert losses[0] < math.log(10_000)
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 6.75
    assert kls == sorted(kls, reverse=True)
    assert kls[-1] < 0.98 * kls[0]
