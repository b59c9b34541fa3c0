"""A step as a GPU takes it, with a second stream: nothing is read before it is written, and nothing
given away before it is read."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import bayesrnn as br
from bayesrnn.bayes import Bayesian
from bayesrnn.bayes import block as block_module
from bayesrnn.bayes.block import Block
from bayesrnn.bayes.charge import Summary
from bayesrnn.data.batching import Batch
from bayesrnn.engine import WARM_UP
from bayesrnn.evaluate.captions import caption_losses
from bayesrnn.evaluate.series import OUTPUT
from bayesrnn.models.layers import State, detach
from bayesrnn.train import step as step_module
from bayesrnn.train.settings import TrainSettings
from bayesrnn.train.step import Step, Update, build_optimizer
from bayesrnn.train.task import language_nll
from streams import Stream, Watch, watched

Nll = Callable[[Bayesian, Batch, State | None], tuple[Tensor, State | None]]
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
STEPS, STREAMS, WORDS = 6, 4, 11
LOOKS = br.Sharpened((0.05, 0.3))
SOFTMAX = {"decoder*": LOOKS, "*": br.Gaussian((0.05, 0.3))}
SECOND = br.Sharpened((0.05, 0.3), order="second")
MASKS = br.DropoutSettings(input=0.2, recurrent=0.2, output=0.2)


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole weights at a time, in frames, and no compiler."""
    tuned = Bayesian.tuned

    def aligned(model: Bayesian, *how: Any, **named: Any) -> Any:
        return tuned(model, *how, **{**named, "aligned": True})

    monkeypatch.setattr(Bayesian, "tuned", aligned)
    monkeypatch.setattr(Block, "limit", lambda block, flat: None)
    for module in (block_module, step_module):
        monkeypatch.setattr(module, "compiled", lambda function: function)


def step_of(
    model: Bayesian, nll: Nll, targets: int, said: list[str], precision: str, draws: int
) -> Step:
    settings = TrainSettings(lr=0.1, precision=precision, draws=draws)  # type: ignore[arg-type]
    update = Update(build_optimizer(settings, model, 10), settings.clip, CPU)
    update.set_rate(0.1)
    update.recordable = True
    rate, update.rate = update.rate, SimpleNamespace(device=CUDA)  # type: ignore[assignment]
    objective = br.FreeEnergy(SimpleNamespace(targets=10 * targets))
    step = Step(model, nll, objective, update, settings, said.append)
    update.rate = rate
    return step


def run(
    monkeypatch: pytest.MonkeyPatch,
    model: Bayesian,
    x: Tensor,
    y: Tensor,
    nll: Nll = language_nll,
    precision: str = "tf32",
    draws: int = 1,
    warmth: Tensor | None = None,
) -> Watch:
    """All steps before the one that would be recorded."""
    said: list[str] = []
    with watched(monkeypatch) as watch:
        step = step_of(model, nll, y.numel(), said, precision, draws)
        step.objective.warmth = 1.0 if warmth is None else warmth
        batch = Batch(x, y, False, y.numel(), STREAMS, 0.1, padded=nll is not language_nll)
        state: State | None = None
        for number in range(WARM_UP):
            if warmth is not None:
                warmth.fill_(number / WARM_UP)
            state = step(batch, state)
    assert said == []
    return watch


def words() -> tuple[Tensor, Tensor]:
    ids = torch.randint(WORDS, (STEPS + 1, STREAMS))
    return ids[:-1].contiguous(), ids[1:].contiguous()


def language_model(posterior: Any = None, prior: br.Prior | None = None, **how: Any) -> br.Bayesian:
    torch.manual_seed(1)
    net = br.LanguageModel(WORDS, how.pop("embedding", 5), 7, 2, **how)
    return br.bayesianize(net, posterior, prior).train()


CASES: dict[str, dict[str, Any]] = {
    "gaussian": {},
    "tied": {"embedding": 7, "tied": True},
    "plain": {"posterior": br.Delta(), "prior": br.Uniform()},
    "fitted prior": {"prior": br.Normal("fit", "fit")},
    "learnt prior": {"prior": br.Normal(0.0, "learn")},
    "mixture by weight": {"prior": br.ScaleMixture(group="weight")},
    "sharpened": {"posterior": LOOKS},
    "softmax sharpened": {"posterior": SOFTMAX},
    "second order": {"posterior": SECOND},
    "masks": {"dropout": MASKS},
    "masks, sharpened": {"posterior": LOOKS, "dropout": MASKS},
}


@pytest.mark.parametrize("precision", ["tf32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_streams_wait_for_each_other(
    case: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = run(monkeypatch, language_model(**CASES[case]), *words(), precision=precision)
    assert watch.found == []


def test_streams_wait_before_looks_begin_and_while_the_kl_is_warmed_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = language_model(LOOKS)
    model.looking = False
    assert run(monkeypatch, model, *words(), warmth=torch.zeros(())).found == []


def test_streams_wait_where_weights_are_pruned(monkeypatch: pytest.MonkeyPatch) -> None:
    model = language_model(br.Gaussian((0.05, 0.3)))
    br.prune(model, 0.5)
    assert run(monkeypatch, model, *words()).found == []


@pytest.mark.parametrize("precision", ["tf32", "bfloat16"])
def test_streams_wait_with_a_share_of_the_kl_that_differs(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    x, y = words()
    captioner = br.Captioner(WORDS, br.CaptionerSettings(numbers=6, embedding=5, hidden=7))
    vectors = torch.rand(WORDS, 6)

    def captions(model: Bayesian, batch: Batch, state: State | None) -> tuple[Tensor, None]:
        return caption_losses(model, vectors, batch).sum(dim=0), None

    first = torch.cat([x[:1], x])
    model = br.bayesianize(captioner).train()
    assert run(monkeypatch, model, first, y, captions, precision).found == []


@pytest.mark.parametrize("cell", ["gru", "lstm"])
@pytest.mark.parametrize("season", [0, 3])
@pytest.mark.parametrize("precision", ["tf32", "bfloat16"])
def test_streams_wait_for_a_series(
    cell: Any, season: int, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    rows = torch.randn(STEPS + 1, STREAMS, 3)

    def series(model: Bayesian, batch: Batch, state: State | None) -> tuple[Tensor, State]:
        raw, after = model(batch.x, state)
        return OUTPUT.nll(raw, batch.y).sum(dim=(0, 2)), detach(after)

    settings = br.SeriesSettings(cell, hidden=7, season=season)
    model = br.bayesianize(br.Forecaster(3, settings)).train()
    assert run(monkeypatch, model, rows[:-1], rows[1:], series, precision).found == []


@pytest.mark.parametrize(
    ("prior", "draws", "beside"),
    [
        (br.ScaleMixture(), 1, True),
        (br.ScaleMixture(), 2, False),
        (br.Normal(0, "learn"), 1, False),
    ],
    ids=["one gradient", "several draws", "learnt prior"],
)
def test_there_is_a_second_stream_where_gradients_do_not_add_up(
    prior: br.Prior, draws: int, beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with watched(monkeypatch):
        step = step_of(language_model(prior=prior), language_nll, 24, [], "tf32", draws)
    assert isinstance(step._stream, Stream) == beside


def test_memory_that_is_let_go_too_early_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a draw notes of log q must stay until the second stream was waited for."""
    log_q = Summary.log_q

    def forgetful(summary: Summary) -> Tensor:
        found = log_q(summary)
        summary._log_q.clear()
        return found

    monkeypatch.setattr(Summary, "log_q", forgetful)
    found = run(monkeypatch, language_model(), *words()).found
    assert any("may take the memory of aten.cat" in each for each in found)


def test_a_read_without_waiting_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with watched(monkeypatch) as watch:
        second = torch.cuda.Stream()
        with torch.cuda.stream(second):
            made = torch.ones(3)
        made + 1
        assert watch.found == ["aten.add.Tensor reads before aten.ones.default has written"]
        torch.cuda.current_stream().wait_stream(second)
        made + 1
    assert len(watch.found) == 1
