"""The engine's parts on a CPU: what a GPU compiles, records and replays is the same maths.

(The GPU's own check is benchmarks/engine_check.py; its result is in results/.)
"""

import functools
import gc
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import bayesrnn as br
from bayesrnn.bayes import block as block_module
from bayesrnn.engine import SHAPES, WARM_UP, Recording, Replay, products_in
from bayesrnn.objective import Known
from bayesrnn.saving import build_model, build_module
from bayesrnn.train import step as step_module
from bayesrnn.train.checkpoint import pack_optimizer, unpack_optimizer
from bayesrnn.train.loop import train
from bayesrnn.train.metrics import read_metrics
from bayesrnn.train.step import Step, Update, build_optimizer
from bayesrnn.train.task import LanguageTask
from small_runs import small_recipe

PAIRS = {
    "grouped mixture": br.ScaleMixture(0.5, 0.8, 0.05),
    "mixture by weight": br.ScaleMixture(0.5, 0.8, 0.05, "weight"),
    "normal": br.Normal(0.1, 0.7),
    "fitted normal": br.Normal("fit", "fit"),
    "laplace": br.Laplace(0.0, 0.4),
    "the start": br.Normal("start", "start"),
}


def traced(function: Callable[..., Any]) -> Callable[..., Any]:
    """As `compiled`, without the C compiler: one graph, or an error."""
    return torch.compile(function, dynamic=False, fullgraph=True, backend="aot_eager")


def one_step(model: br.Bayesian, compiled: bool) -> list[Tensor]:
    x = torch.arange(24).view(6, 4) % 11
    objective = br.FreeEnergy(DataLoader(TensorDataset(x), batch_size=4))
    model.zero_grad()
    torch.manual_seed(3)
    with model.tuned(compiled=compiled):
        model.resample()
        loss = objective(model, model(x)[0].square().sum(), [x[:4]])
        loss.backward()
    return [
        loss.error,
        loss.complexity,
        *(p.grad for p in model.parameters() if p.grad is not None),
    ]


@pytest.mark.parametrize(
    ("prior", "pruned"),
    [(prior, None) for prior in PAIRS.values()]
    + [(PAIRS["grouped mixture"], 0.6), (PAIRS["fitted normal"], 0.6)],
    ids=[*PAIRS, "grouped mixture, pruned", "fitted normal, pruned"],
)
def test_every_pass_over_the_weights_is_one_graph_with_the_same_result(
    prior: br.Prior, pruned: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    net = br.LanguageModel(11, 5, 7, 2).double()
    model = br.bayesianize(net, br.Gaussian((0.05, 0.3)), prior)
    with torch.no_grad():
        for parameter in model.parameters():  # away from the start
            parameter += 0.1 * torch.randn_like(parameter)
    if pruned is not None:
        br.prune(model, pruned)
    expected = one_step(model, compiled=False)
    seen: list[str] = []

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        seen.append(function.__name__)
        return traced(function)

    monkeypatch.setattr(block_module, "compiled", watched)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=64):
        found = one_step(model, compiled=True)
    torch._dynamo.reset()
    assert {"draw_pass", "gradient_pass"} <= set(seen)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_a_share_in_a_tensor_is_compiled_once_for_all_its_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(1)
    x = torch.randn(6, 4, dtype=torch.float64)
    net = nn.Linear(4, 3, bias=False).double()
    model = br.bayesianize(net, br.Gaussian((0.05, 0.3)), PAIRS["grouped mixture"])
    objective = br.FreeEnergy(DataLoader(TensorDataset(x), batch_size=4))

    def gradients(share: float, compiled: bool) -> list[Tensor]:
        model.zero_grad()
        torch.manual_seed(3)
        given = torch.tensor(share, dtype=torch.float64) if compiled else None
        batch = SimpleNamespace(targets=round(6 * share), streams=4)
        with model.tuned(compiled=compiled):
            model.resample()
            objective.loss(model, model(x).square().sum(), batch, share=given).backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    expected = {share: gradients(share, False) for share in (1 / 6, 0.5)}
    monkeypatch.setattr(block_module, "compiled", functools.cache(traced))
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=64):
        found = {1 / 6: gradients(1 / 6, True)}
        with torch._dynamo.config.patch(error_on_recompile=True):
            found[0.5] = gradients(0.5, True)
    torch._dynamo.reset()
    for share, each in found.items():
        for one, other in zip(each, expected[share], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


# --- the update --------------------------------------------------------------------------------


def net_with_gradients(size: float = 1.0) -> nn.Linear:
    torch.manual_seed(1)
    net = nn.Linear(5, 3)
    for p in net.parameters():
        p.grad = size * torch.randn(p.shape)
    return net


def recordable(optimizer: torch.optim.Optimizer, clip: float, lr: float) -> Update:
    """An update as on a GPU."""
    update = Update(optimizer, clip, torch.device("cpu"))
    update.recordable = True
    if not update._plain:
        for group in optimizer.param_groups:
            group["lr"] = update.rate
    update.set_rate(lr)
    return update


@pytest.fixture
def _uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_module, "compiled", lambda function: function)


@pytest.mark.usefixtures("_uncompiled")
@pytest.mark.parametrize("clip", [0.0, 0.5, 100.0])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("SGD", {}),
        ("SGD", {"momentum": 0.9, "fused": True}),
        ("Adam", {"fused": True}),
        ("AdamW", {"fused": True, "weight_decay": 0.1}),
    ],
)
def test_an_update_that_never_asks_the_host_is_clipping_and_the_optimisers_step(
    name: str, options: dict[str, Any], clip: float
) -> None:
    found, expected = net_with_gradients(), net_with_gradients()
    cls = getattr(torch.optim, name)
    update = recordable(cls(found.parameters(), lr=0.3, **options), clip, 0.3)
    reference = cls(expected.parameters(), lr=0.3, **options)
    for _ in range(3):
        norm = torch.nn.utils.clip_grad_norm_(expected.parameters(), clip or math.inf)
        reference.step()
        update(torch.tensor(2.0), torch.tensor(7.0))
        assert update.figures[4].item() == pytest.approx(norm.item(), rel=1e-6)
        for net in (found, expected):
            for p, other in zip(net.parameters(), net_with_gradients().parameters(), strict=True):
                p.grad = other.grad
    for one, other in zip(found.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("_uncompiled")
@pytest.mark.parametrize("options", [{}, {"momentum": 0.9, "fused": True}])
@pytest.mark.parametrize("where", ["error", "kl", "gradient"])
def test_a_step_that_is_not_finite_is_not_taken_nor_any_after_it(
    where: str, options: dict[str, Any]
) -> None:
    net = net_with_gradients()
    update = recordable(torch.optim.SGD(net.parameters(), lr=0.3, **options), 5.0, 0.3)
    good = torch.tensor(2.0), torch.tensor(7.0)
    update(*good)
    kept = [p.detach().clone() for p in net.parameters()]
    bad = {"error": (torch.tensor(math.nan), good[1]), "kl": (good[0], torch.tensor(math.inf))}
    if where == "gradient":
        net.weight.grad[0, 0] = math.nan
    update(*bad.get(where, good))
    if where == "gradient":
        net.weight.grad[0, 0] = 0.0
    update(*good)  # all is well again, but the state carried on came from a bad step
    figures = update.read()
    assert figures.failed
    assert figures.steps == 2  # the second one failed
    for p, before in zip(net.parameters(), kept, strict=True):
        assert torch.equal(p, before)


@pytest.mark.usefixtures("_uncompiled")
def test_figures_add_up_and_start_anew_after_a_reading() -> None:
    net = net_with_gradients()
    update = recordable(torch.optim.SGD(net.parameters(), lr=0.0), 0.0, 0.0)
    for error in (1.0, 2.0, 4.0):
        update(torch.tensor(error), torch.tensor(10 * error))
    figures = update.read()
    assert (figures.total_error, figures.steps, figures.error, figures.kl) == (7.0, 3, 4.0, 40.0)
    assert not figures.failed
    update(torch.tensor(5.0), torch.tensor(1.0))
    assert update.read()[:2] == (5.0, 1)


def test_how_an_optimiser_computes_is_not_what_is_saved() -> None:
    """A run may go on on another device."""
    one = torch.optim.Adam(net_with_gradients().parameters(), lr=torch.tensor(0.3), fused=True)
    one.step()
    tensors, facts = pack_optimizer(one)
    assert facts["groups"][0]["lr"] == pytest.approx(0.3)
    other = torch.optim.Adam(net_with_gradients().parameters(), lr=0.1)
    unpack_optimizer(other, tensors, facts)
    assert other.param_groups[0]["lr"] == pytest.approx(0.3)
    assert not other.param_groups[0]["fused"]
    other.step()


# --- replay ------------------------------------------------------------------------------------


def test_without_a_gpu_a_replay_runs_the_function_and_says_why() -> None:
    replay = Replay(lambda x: (x + 1,), torch.device("cpu"))
    assert replay.refused == "there is no GPU"
    for value in range(6):
        (found,) = replay(torch.tensor(value))
        assert found.item() == value + 1
    assert not replay.recorded


class FakeGraph:
    """Replays by calling the function with the memory it was recorded with."""

    def __init__(self, replay: Replay, inputs: list[Tensor], outputs: tuple[Tensor, ...]) -> None:
        self.replays = 0
        self._again = lambda: replay._function(*inputs)
        self._outputs = outputs

    def replay(self) -> None:
        self.replays += 1
        for mine, new in zip(self._outputs, self._again(), strict=True):
            mine.copy_(new)


def test_each_of_a_few_shapes_is_recorded_once_it_was_seen_often_enough() -> None:
    calls: list[int] = []

    def function(x: Tensor, factor: Tensor) -> tuple[Tensor, ...]:
        calls.append(len(x))
        return (x * factor,)

    replay = Replay(function, torch.device("cpu"))
    replay.refused = None  # as on a GPU
    graphs: dict[int, FakeGraph] = {}

    def record(inputs: Sequence[Tensor]) -> Recording:
        mine = [x.clone() for x in inputs]
        graph = FakeGraph(replay, mine, function(*mine))
        graphs[len(inputs[0])] = graph
        return Recording(graph, mine, graph._outputs)  # type: ignore[arg-type]

    replay._record = record  # type: ignore[method-assign]
    for turn in range(1, WARM_UP + 3):
        for size in (3, 2, 5):
            (found,) = replay(torch.arange(size) + turn, torch.tensor(turn))
            assert found.tolist() == [turn * (i + turn) for i in range(size)]
        assert replay.recorded == (turn > WARM_UP)
    assert {size: graph.replays for size, graph in graphs.items()} == {3: 2, 2: 2, 5: 2}
    for size in range(10, 10 + SHAPES):  # no more than so many; what comes later runs as it is
        for _ in range(WARM_UP + 2):
            (found,) = replay(torch.arange(size), torch.tensor(2))
            assert found.tolist() == list(range(0, 2 * size, 2))
    assert len(graphs) == SHAPES


def test_a_shape_that_cannot_be_recorded_ends_all_recording() -> None:
    replay = Replay(lambda x: (x + 1,), torch.device("cpu"))
    replay.refused = None

    def record(inputs: Sequence[Tensor]) -> None:
        replay.refused = "it looked at a value"

    replay._record = record  # type: ignore[method-assign]
    for value in range(WARM_UP + 3):
        assert replay(torch.tensor(value))[0].item() == value + 1
    assert not replay.recorded


@pytest.mark.parametrize("fails", [False, True])
def test_no_old_recording_goes_while_a_new_one_is_made(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its end, by the garbage collector at any time, is refused while a stream is recorded."""
    generator = SimpleNamespace(get_state=torch.get_rng_state, set_state=torch.set_rng_state)
    monkeypatch.setattr("torch.cuda.CUDAGraph", lambda: SimpleNamespace(pool=lambda: None))
    monkeypatch.setattr("torch.cuda.graph", lambda graph, **how: nullcontext())
    monkeypatch.setattr("torch.cuda.current_stream", lambda device: None)
    monkeypatch.setattr("torch.cuda.set_stream", lambda stream: None)
    monkeypatch.setattr("torch.cuda.synchronize", lambda device: None)
    monkeypatch.setattr("torch.cuda.default_generators", {None: generator})
    collects: list[bool] = []

    def function(x: Tensor) -> tuple[Tensor, ...]:
        collects.append(gc.isenabled())
        if fails:
            raise RuntimeError("it looked at a value")
        return (x + 1,)

    replay = Replay(function, torch.device("cpu"))
    replay._stream = SimpleNamespace(device=torch.device("cpu"))  # type: ignore[assignment]
    assert (replay._record([torch.ones(3)]) is None) == fails
    assert collects == [False]
    assert gc.isenabled()


@pytest.mark.parametrize("fails", [False, True])
def test_a_generator_of_its_own_is_named_to_every_recording(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And has its state back where the recording fails, which draws from it in vain."""
    named: list[torch.Generator] = []
    graph = SimpleNamespace(pool=lambda: None, register_generator_state=named.append)
    monkeypatch.setattr("torch.cuda.CUDAGraph", lambda: graph)
    monkeypatch.setattr("torch.cuda.graph", lambda graph, **how: nullcontext())
    monkeypatch.setattr("torch.cuda.current_stream", lambda device: None)
    monkeypatch.setattr("torch.cuda.set_stream", lambda stream: None)
    monkeypatch.setattr("torch.cuda.synchronize", lambda device: None)
    monkeypatch.setattr("torch.cuda.default_generators", {None: torch.default_generator})
    own = torch.Generator().manual_seed(5)
    states = [generator.get_state() for generator in (own, torch.default_generator)]

    def function(x: Tensor) -> tuple[Tensor, ...]:
        drawn = x + torch.rand(3, generator=own) + torch.rand(3)
        if fails:
            raise RuntimeError("it looked at a value")
        return (drawn,)

    for generator, names in ((own, [own]), (None, []), (torch.default_generator, [])):
        named.clear()
        replay = Replay(function, torch.device("cpu"), generator)
        replay._stream = SimpleNamespace(device=torch.device("cpu"))  # type: ignore[assignment]
        assert (replay._record([torch.ones(3)]) is None) == fails
        assert named == names * (2 if fails else 1)  # again for the one that puts all right
        if fails and generator is own:
            for each, state in zip((own, torch.default_generator), states, strict=True):
                assert torch.equal(each.get_state(), state)


@pytest.mark.parametrize(("precision", "matmul"), [("tf32", "high"), ("float32", "highest")])
def test_tf32_is_allowed_for_a_while_only(precision: str, matmul: str) -> None:
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    with products_in(precision):
        assert torch.get_float32_matmul_precision() == matmul
        assert torch.backends.cudnn.allow_tf32 == (precision == "tf32")
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == before


def test_a_run_in_bfloat16_learns_about_the_same_and_keeps_float32(tmp_path: Path) -> None:
    found = {}
    for precision in ("float32", "bfloat16"):
        recipe = small_recipe(tmp_path, train={"precision": precision})
        train(recipe, tmp_path / precision, quiet=True)
        last = [m for m in read_metrics(tmp_path / precision) if m["kind"] == "epoch"][-1]
        found[precision] = last["valid_nll"]
    assert found["bfloat16"] != found["float32"]
    assert found["bfloat16"] == pytest.approx(found["float32"], rel=0.02)
    model = br.load(tmp_path / "bfloat16")
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("has", [True, False])
def test_a_processor_without_bfloat16_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has: bool
) -> None:
    monkeypatch.setattr("torch.cpu._is_avx512_bf16_supported", lambda: has)
    monkeypatch.setattr("bayesrnn.engine.IS_X86", True)
    recipe = small_recipe(tmp_path, train={"precision": "bfloat16", "max_steps": 1})
    train(recipe, tmp_path / "run", quiet=True)
    said = (tmp_path / "run" / "log.txt").read_text()
    assert ("this processor has no instructions for bfloat16" in said) == (not has)


def test_a_kl_asked_for_before_the_forward_gives_the_same_step() -> None:
    torch.manual_seed(1)
    model = br.bayesianize(br.LanguageModel(11, 5, 7, 2).double(), br.Gaussian((0.05, 0.3)))
    x = torch.arange(24).view(6, 4) % 11
    found = []
    for early in (True, False):
        model.zero_grad()
        torch.manual_seed(3)
        objective = br.FreeEnergy(DataLoader(TensorDataset(x), batch_size=4))
        model.resample()
        known = None
        if early:
            with torch.no_grad():
                known = Known(model.kl(), model.local_kl())
        loss = objective.loss(model, model(x)[0].square().sum(), [x[:4]], 1, known)
        loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        found.append([loss.error, loss.complexity, *gradients])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def test_where_the_fast_way_fails_the_step_is_taken_the_ordinary_way(tmp_path: Path) -> None:
    """With the same noise, the same figures, and one line that says why."""
    recipe = small_recipe(tmp_path)
    found = []
    for fails in (False, True):
        torch.manual_seed(1)
        task = LanguageTask(recipe, torch.device("cpu"))
        model = build_model(recipe, build_module(recipe, task.corpus.vocabulary))
        update = Update(
            build_optimizer(recipe.train, model, len(task.batches)), 5.0, torch.device("cpu")
        )
        update.set_rate(0.1)
        objective, said = br.FreeEnergy(task.batches), []
        step = Step(model, task.nll, objective, update, recipe.train, said.append)
        if fails:

            def fail(*inputs: Tensor, spoilt: br.FreeEnergy = objective) -> tuple[Tensor, ...]:
                torch.randn(3)
                spoilt._error += 7
                raise AttributeError("'NoneType' object has no attribute 'dtype'")

            step._replay = Replay(fail, torch.device("cpu"))
        state = None
        for batch, _ in zip(task.batches, range(3), strict=False):
            objective.count(batch)
            state = step(batch, state)
        found.append((objective.epoch, [p.detach().clone() for p in model.parameters()]))
        assert said == (
            ["every step runs kernel by kernel: 'NoneType' object has no attribute 'dtype'"]
            if fails
            else []
        )
    assert found[0][0] == found[1][0]
    for one, other in zip(found[0][1], found[1][1], strict=True):
        assert torch.equal(one, other)


def test_an_ordinary_loop_keeps_no_gradients() -> None:
    model = br.bayesianize(nn.Linear(3, 2))
    for _ in range(3):
        x = torch.randn(4, 3)
        loss = br.FreeEnergy(DataLoader(TensorDataset(x), batch_size=4))(model, model(x).sum(), [x])
        loss.backward()
    assert all(not block.held for block in model.each_block())


def test_what_is_undefined_stays_so_in_an_epoch_of_replays() -> None:
    """Replays count batches, but never come by the code that makes a loss."""
    model = br.bayesianize(nn.Linear(3, 2), br.Delta(), br.Uniform())
    x = torch.randn(4, 3)
    objective = br.FreeEnergy(DataLoader(TensorDataset(x), batch_size=4))
    objective(model, model(x).sum(), [x])
    assert objective.epoch.bits.total is None
    objective.count([x])
    assert objective.epoch.bits.total is None
