"""Training on captions: ragged batches, exact shares of the KL, padding that never counts."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import bayesrnn as br
from bayesrnn.bayes import Bayesian
from bayesrnn.data import Batch, CaptionLoader
from bayesrnn.evaluate.captions import caption_losses, evaluate_captions
from bayesrnn.recipe import Recipe
from bayesrnn.saving import build_model, build_module
from bayesrnn.train.captioning import CaptionTask
from bayesrnn.train.loop import train
from bayesrnn.train.metrics import read_metrics
from bayesrnn.train.step import Step, Update, build_optimizer
from bayesrnn.train.task import build_task
from caption_runs import caption_recipe

CPU = torch.device("cpu")


def build(recipe: Recipe) -> tuple[CaptionTask, Bayesian]:
    torch.manual_seed(1)
    task = build_task(recipe, CPU)
    assert isinstance(task, CaptionTask)
    return task, build_model(recipe, build_module(recipe, task.vocabulary)).double()


def slow_nll(model: Bayesian, task: CaptionTask, split: str) -> tuple[float, int]:
    """Caption by caption, without any batch or padding."""
    pictures = task.pictures(split)
    total, words = 0.0, 0
    end = task.vocabulary.index["<eos>"]
    with torch.no_grad(), model.weights("mean"):
        for i, ids in zip(*pictures.encoded(task.vocabulary), strict=True):
            x = torch.tensor([[end], *([word] for word in ids[:-1])])
            logits, _ = model(x, pictures=task.vectors[pictures.rows[i]][None])
            log_p = logits[:, 0].log_softmax(dim=1)
            total -= log_p[range(len(ids)), ids].sum().item()
            words += len(ids)
    return total, words


@pytest.mark.parametrize("streams", [1, 7, 250])
@pytest.mark.parametrize("lengths", [1, 3])
def test_perplexity_is_that_of_captions_one_by_one(
    streams: int, lengths: int, tmp_path: Path
) -> None:
    task, model = build(caption_recipe(tmp_path, data={"lengths": lengths}))
    total, words = slow_nll(model, task, "valid")
    found = evaluate_captions(model, task.captions("valid", streams), task.vectors)
    assert found.tokens == words == 3 * 9 + 9 * (3 + 6 + 11) == task.captions("valid").targets
    assert found.nll == pytest.approx(total / words, rel=1e-10)
    assert found.by_caption.sum().item() == pytest.approx(total, rel=1e-10)
    assert task.validate(model)["valid_nll"] == pytest.approx(total / words, rel=1e-10)
    # In the order of the data, whatever the batches.
    one = evaluate_captions(model, task.captions("valid", 1), task.vectors)
    torch.testing.assert_close(found.by_caption, one.by_caption, rtol=1e-10, atol=1e-12)


def test_draws_average_the_probability_of_each_word(tmp_path: Path) -> None:
    task, model = build(caption_recipe(tmp_path, posterior={"kind": "gaussian", "scale": 0.5}))
    loader = task.captions("valid", 8)
    found = evaluate_captions(model, loader, task.vectors, 3, torch.Generator().manual_seed(4))
    generator = torch.Generator().manual_seed(4)
    each = []
    with torch.no_grad():
        for _ in range(3):
            with model.weights("sample"):
                model.resample(generator=generator)
                each.append([caption_losses(model, task.vectors, batch) for batch in loader])
    words = [torch.cat([b.y.flatten() for b in loader])] * 3
    flat = torch.stack(
        [torch.cat([x.flatten() for x in e])[w >= 0] for e, w in zip(each, words, strict=True)]
    )
    assert found.expected_nll == pytest.approx(flat.mean().item(), rel=1e-10)
    averaged = -(-flat).exp().mean(dim=0).log()
    assert found.nll == pytest.approx(averaged.mean().item(), rel=1e-10)
    assert found.nll < found.expected_nll


def padded_more(loader: CaptionLoader, batch: Batch) -> Batch:
    """The same batch with three more steps, and a row of nothing, of wild words."""
    steps, rows = batch.y.shape
    x = torch.full((4 + steps, rows + 1), 3)
    y = torch.full((3 + steps, rows + 1), -1)
    x[: 1 + steps, :rows], y[:steps, :rows] = batch.x, batch.y
    x[1 + steps :, :rows] = 5
    return replace(batch, x=x, y=y)


def test_padding_never_counts_in_the_loss_or_its_gradient(tmp_path: Path) -> None:
    task, model = build(caption_recipe(tmp_path))
    objective = br.FreeEnergy(task.batches)
    batch = next(iter(task.batches))
    found: list[list[Tensor]] = []
    for each in (batch, padded_more(task.batches, batch)):
        model.zero_grad()
        torch.manual_seed(5)
        model.train().resample()
        losses, _ = task.nll(model, each, None)
        loss = objective.loss(model, losses, each)
        loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        found.append([loss.error, loss.complexity, *gradients])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_the_kl_is_charged_once_an_epoch_by_the_words_of_each_batch(tmp_path: Path) -> None:
    task, model = build(caption_recipe(tmp_path, train={"streams": 10}))
    objective = br.FreeEnergy(task.batches)
    kl = model.train()
    shares = []
    for batch in task.batches:
        losses, _ = task.nll(model, batch, None)
        loss = objective(model, losses, batch)
        real = int((batch.y >= 0).sum())
        assert loss.share == batch.share == real / task.batches.targets
        shares.append(loss.share)
        # A Gaussian's KL to a Normal prior is the same at every draw.
        torch.testing.assert_close(loss.complexity, loss.share * kl.kl())
    assert len(set(shares)) > 2  # ragged
    assert sum(shares) == pytest.approx(1, abs=1e-12)
    assert objective.epoch.penalty == pytest.approx(model.kl().item(), rel=1e-10)


def test_a_share_in_a_tensor_gives_the_same_step(tmp_path: Path) -> None:
    """What a replayed step reads from memory against what an ordinary one is told."""
    for prior in ({"kind": "normal", "scale": 1.0}, {"kind": "scale_mixture"}):
        recipe = caption_recipe(tmp_path, prior=prior, train={"optimizer": "SGD", "lr": 0.1})
        found = []
        for as_tensor in (False, True):
            task, model = build(recipe)
            model.train()
            update = Update(build_optimizer(recipe.train, model, len(task.batches)), 5.0, CPU)
            update.set_rate(0.1)
            objective = br.FreeEnergy(task.batches)
            step = Step(model, task.nll, objective, update, recipe.train, print)
            torch.manual_seed(2)
            for batch in task.batches:
                step._batch = batch
                if as_tensor:
                    step._function(batch.x, batch.y, step._share(batch)[0].double())
                else:
                    step(batch, None)
            found.append([objective.epoch.penalty, *(p.detach() for p in model.parameters())])
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)


def test_a_recorded_step_reads_its_share_anew(tmp_path: Path) -> None:
    """Two batches of one shape: the recording is of the first, the share of the second's words."""
    recipe = caption_recipe(tmp_path)
    task, model = build(recipe)
    update = Update(build_optimizer(recipe.train, model, len(task.batches)), 5.0, CPU)
    update.set_rate(0.0)
    objective = br.FreeEnergy(task.batches)
    step = Step(model.train(), task.nll, objective, update, recipe.train, print)
    batch = next(iter(task.batches))
    step._batch = batch
    step._function(batch.x, batch.y, torch.tensor(0.25, dtype=torch.float64))
    assert objective.epoch.penalty == pytest.approx(0.25 * model.kl().item(), rel=1e-6)


def test_a_captioner_learns_and_resumes_exactly(tmp_path: Path) -> None:
    recipe = caption_recipe(tmp_path, train={"epochs": 4})
    whole = train(recipe, tmp_path / "whole", quiet=True)
    perplexities = [line["valid_perplexity"] for line in whole.epochs]
    assert whole.watched == "valid_perplexity"
    assert perplexities[-1] < 0.5 * perplexities[0]
    stopped = replace(recipe, train=replace(recipe.train, max_steps=10))
    assert train(stopped, tmp_path / "parts", quiet=True).steps == 10
    train(recipe, tmp_path / "parts", quiet=True)
    for one, other in zip(
        (m for m in read_metrics(tmp_path / "whole") if m["kind"] == "epoch"),
        (m for m in read_metrics(tmp_path / "parts") if m["kind"] == "epoch"),
        strict=True,
    ):
        assert one["valid_nll"] == other["valid_nll"]
        assert one["kl"] == other["kl"]


def test_what_does_not_fit_is_said(tmp_path: Path) -> None:
    with pytest.raises(br.UserError, match=r"vectors of 6 numbers.*set model\.numbers=6"):
        build_task(caption_recipe(tmp_path, model={"numbers": 7}), CPU)
    with pytest.raises(br.Invalid, match=r"train\.drop_last is not for captions"):
        build_task(caption_recipe(tmp_path, train={"drop_last": True}), CPU)
    task, _ = build(caption_recipe(tmp_path))
    with pytest.raises(br.UserError, match="there is no 'other' set, only train, valid, test"):
        task.pictures("other")
