"""torch.compile on Bayesian models and on what is made Bayesian, beside the uncompiled ones."""

import copy
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import bayesrnn as br
from bayesrnn.description import complexity
from bayesrnn.evaluate.sharpened import evaluate_sharpened
from small_runs import environment

pytestmark = [
    # The compiler asks each tensor that it meets for its gradient, a draw too, and would hide it;
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    # and what it imports for an optimiser is out of date.
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
]

STEPS = 10  # torch compiles a function anew fewer times before it gives up

Backend = CompileCounterWithBackend
Way = Callable[[br.Bayesian, Backend], br.Bayesian]


def outside(model: br.Bayesian, backend: Backend) -> br.Bayesian:
    return torch.compile(model, backend=backend)  # type: ignore[return-value]


def in_place(model: br.Bayesian, backend: Backend) -> br.Bayesian:
    model.compile(backend=backend)
    return model


def a_part(model: br.Bayesian, backend: Backend) -> br.Bayesian:
    model.module.encoder.compile(backend=backend)  # type: ignore[union-attr, operator]
    return model


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def backend() -> Backend:
    """Compiles with autograd, but without a C++ compiler, and counts how often it is asked to."""
    return CompileCounterWithBackend("aot_eager")


class Encoder(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh()


class Net(nn.Module):
    """A recurrence that torch.compile sees through, as it does not through nn.LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder(3, 4)
        self.cell = nn.GRUCell(4, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(len(x), 4)
        for step in self.encoder(x).unbind(1):
            h = self.cell(step, h)
        return self.norm(h)


def network(kind: type[nn.Module] = Net) -> nn.Module:
    torch.manual_seed(0)
    return kind().double()


def model_of(posterior: br.Posterior | None = None, prior: br.Prior | None = None) -> br.Bayesian:
    generator = torch.Generator().manual_seed(1)
    return br.bayesianize(
        network(), posterior or br.Gaussian((0.1, 0.3)), prior, generator=generator
    )


def data() -> tuple[Tensor, Tensor]:
    x = torch.randn(STEPS, 2, 5, 3, generator=torch.Generator().manual_seed(2)).double()
    return x, x.mean(dim=2) @ torch.ones(3, 4).double()


def losses(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """One a sequence."""
    return (model(x) - y).square().sum(dim=1)


BATCH = SimpleNamespace(targets=2, streams=2)


class Training:
    """Some steps of a model's training, and what they gave."""

    def __init__(self, model: br.Bayesian, whole_step: Backend | None = None) -> None:
        self.model = model
        self.objective = br.FreeEnergy(SimpleNamespace(targets=2 * STEPS))
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        step = torch.compile(self.step, backend=whole_step) if whole_step else self.step
        torch.manual_seed(3)
        self.totals = [float(step(x, y)) for x, y in zip(*data(), strict=True)]

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """Two draws, the second of which is held over two forwards."""
        model = self.model
        self.optimizer.zero_grad()
        self.draw(x, y)
        first = self.objective(model, losses(model, x, y), BATCH, draws=2)
        first.backward()
        with model.hold():
            self.draw(x, y)
            nll = (losses(model, x, y) + losses(model, x, y)) / 2
            second = self.objective(model, nll, BATCH, draws=2)
            second.backward()
        self.optimizer.step()
        return (first.total + second.total).detach()

    def draw(self, x: Tensor, y: Tensor) -> None:
        if self.model.looks_at_data:
            self.model.resample(nll=lambda: losses(self.model, x, y).mean())

    def check(self, expected: "Training") -> None:
        torch.testing.assert_close(self.totals, expected.totals, rtol=1e-9, atol=1e-9)
        for one, other in zip(self.model.parameters(), expected.model.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


KINDS = {
    "gaussian": (br.Gaussian((0.1, 0.3)), br.ScaleMixture(0.5, 0.8, 0.05)),
    "fitted": (br.Gaussian((0.1, 0.3)), br.Normal("fit", "fit")),
    "learnt": (br.Gaussian((0.1, 0.3)), br.Normal("learn", "learn")),
    "points": (br.Delta(), br.Laplace(0.0, 0.4)),
    "fisher": (br.Gaussian((0.1, 0.3), estimator="fisher"), br.Normal()),
    "sharpened": (br.Sharpened((0.1, 0.3), sigma0=0.05, eta=0.02), br.Normal()),
    "second order": (br.Sharpened((0.1, 0.3), sigma0=0.05, eta=0.02, order="second"), br.Normal()),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def check_training(way: Way, kind: str, backend: Backend) -> None:
    """That it is the uncompiled model's, and that neither a draw nor a step compiles anything
    anew."""
    expected = Training(model_of(*KINDS[kind]))
    with torch._dynamo.config.patch(error_on_recompile=True):
        found = Training(way(model_of(*KINDS[kind]), backend))
    found.check(expected)
    assert backend.frame_count == 1


@kinds
def test_training_is_that_of_the_uncompiled_model(kind: str, backend: Backend) -> None:
    check_training(outside, kind, backend)


@pytest.mark.parametrize("way", [in_place, a_part])
def test_so_it_is_however_it_was_compiled(way: Way, backend: Backend) -> None:
    check_training(way, "sharpened", backend)


@kinds
def test_a_whole_step_can_be_compiled(kind: str, backend: Backend) -> None:
    expected = Training(model_of(*KINDS[kind]))
    found = Training(model_of(*KINDS[kind]), whole_step=backend)
    found.check(expected)
    assert backend.frame_count >= 1


@pytest.mark.parametrize("way", [outside, in_place, a_part])
def test_every_forward_has_weights_of_its_own(way: Way, backend: Backend) -> None:
    model = model_of()
    twin = copy.deepcopy(model)
    compiled = way(model, backend)
    x = data()[0][0]

    def run(one: br.Bayesian) -> list[Tensor]:
        torch.manual_seed(4)
        one.train()
        found = [one(x), one(x)]
        with one.hold():
            found += [one(x), one(x)]
        one.resample(generator=torch.Generator().manual_seed(5))
        found.append(one(x))
        one.eval()
        found.append(one(x))
        with one.weights("sample"):
            found += [one(x), one(x)]
        with torch.no_grad():
            for parameter in one.parameters():
                parameter += 0.1
            found.append(one(x))
        with torch.inference_mode():
            found.append(one(x).clone())
        return found

    found = run(compiled)
    for one, other in zip(found, run(twin), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    held = [2, 6, 8]  # and the next: one draw, or the mean under another grad mode
    for place, (one, other) in enumerate(pairwise(found)):
        assert torch.allclose(one, other, rtol=1e-9) == (place in held)


def test_a_step_that_draws_draws_anew_in_every_call(backend: Backend) -> None:
    model = model_of().train()
    x, y = (tensor[0] for tensor in data())

    def score() -> Tensor:
        model.resample()
        loss = losses(model, x, y).sum() + model.kl("sample")
        loss.backward()
        return loss.detach()

    def run(call: Callable[[], Tensor]) -> Tensor:
        """Losses and gradients, a row a call."""
        rows = []
        torch.manual_seed(4)
        for _ in range(STEPS):
            model.zero_grad()
            loss = call()
            gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
            rows.append(torch.cat([loss[None], *gradients]))
        return torch.stack(rows)

    expected = run(score)
    with torch._dynamo.config.patch(error_on_recompile=True):
        found = run(torch.compile(score, backend=backend))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    assert len(set(found[:, 0].tolist())) == STEPS


# --- all that is asked of a model -----------------------------------------------------------------


def language_network() -> nn.Module:
    torch.manual_seed(6)
    dropout = br.DropoutSettings(input=0.2, recurrent=0.2)
    return br.LanguageModel(11, embedding=4, hidden=5, cell="gru", dropout=dropout).double()


def language_model() -> br.Bayesian:
    return br.bayesianize(language_network(), br.Gaussian((0.1, 0.3)), br.Normal())


LOADER = br.StreamLoader(np.random.default_rng(7).integers(0, 11, 81), streams=2, unroll=8)
X = next(iter(LOADER)).x


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(8)


def saved(model: br.Bayesian, folder: Path) -> Tensor:
    br.save(model, folder)
    return br.load(folder, module=language_network())(X)[0]


def pruned(model: br.Bayesian, folder: Path) -> Tensor:
    br.prune(model, fraction=0.5)
    return model.eval()(X)[0]


def sharpened(model: br.Bayesian, folder: Path) -> float:
    looking = br.sharpen(model, "rnn.*", sigma0=0.05, eta=0.02)
    return evaluate_sharpened(looking, LOADER, generator=seeded()).perplexity


ASKED: dict[str, Callable[[br.Bayesian, Path], Any]] = {
    "predict": lambda model, _: br.predict(model, X, samples=3, generator=seeded()).total,
    "mean": lambda model, _: br.predict(model, X, samples=0).mean,
    "ensemble": lambda model, _: (
        br.predict(br.Ensemble([model, language_model()]), X, samples=2, generator=seeded()).mean
    ),
    "save": saved,
    "prune": pruned,
    "pruning_curve": lambda model, _: [
        point.error for point in br.pruning_curve(model, lambda one: one(X)[0].sum().item(), [0.5])
    ],
    "structure": lambda model, _: [matrix.left for matrix in br.structure(model).matrices],
    "signal_to_noise": lambda model, _: br.signal_to_noise(model),
    "weight_bits": lambda model, _: br.weight_bits(model),
    "complexity": lambda model, _: complexity(model, seeded()),
    "evaluate_text": lambda model, _: (
        br.evaluate_text(model, LOADER, samples=2, generator=seeded()).perplexity
    ),
    "dynamic_evaluate": lambda model, _: br.dynamic_evaluate(model, LOADER, 0.05).perplexity,
    "text_uncertainty": lambda model, _: br.text_uncertainty(model, LOADER, (0, 2))[2].epistemic,
    "evaluate_sharpened": sharpened,
    "generate": lambda model, _: br.generate(model, [1, 2], 5, generator=seeded()),
    "sparse_network": lambda model, _: br.sparse_network(model)(X)[0],
    "NaturalGradient": lambda model, _: br.NaturalGradient(model, 9).defaults["variance"],
}


@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
def test_what_is_asked_of_a_model_can_be_asked_of_a_compiled_one(
    asked: Callable[[br.Bayesian, Path], Any], backend: Backend, tmp_path: Path
) -> None:
    model = outside(language_model(), backend)
    expected = asked(language_model().eval(), tmp_path / "expected")
    found = asked(model.eval(), tmp_path / "found")
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("way", [outside, in_place])
def test_a_copy_has_weights_of_its_own(way: Way, backend: Backend) -> None:
    model = way(model_of().eval(), backend)
    x = data()[0][0]
    before = model(x)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert not copied(x).any()
    assert torch.equal(model(x), before)


def test_what_is_no_model_is_named_by_what_was_compiled() -> None:
    plain = torch.compile(nn.Linear(3, 2), backend="eager")
    with pytest.raises(TypeError, match="expected a model made by bayesianize, got Linear"):
        br.prune(plain, fraction=0.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("together", [False, True])
def test_what_is_asked_of_a_compiled_model_runs_compiled(together: bool, backend: Backend) -> None:
    model = outside(model_of(), backend)
    br.predict(br.Ensemble([model]) if together else model, data()[0][0], samples=2)
    assert backend.frame_count == 1


def test_an_ensemble_may_be_compiled(backend: Backend) -> None:
    members = [language_model(), language_model()]
    br.prune(members[1], fraction=0.5)
    expected = br.predict(br.Ensemble(members), X, samples=0).mean
    compiled = torch.compile(br.Ensemble(members), backend=backend)
    torch.testing.assert_close(br.predict(compiled, X, samples=0).mean, expected)  # type: ignore[arg-type]


# --- compiled before ------------------------------------------------------------------------------


def test_a_compiled_network_is_taken_as_what_it_was_made_of(tmp_path: Path) -> None:
    net = network()
    expected = br.bayesianize(net, where=["encoder.*", "cell.*"])
    net.encoder = torch.compile(net.encoder, backend="eager")
    again = torch.compile(net, backend="eager")
    model = br.bayesianize(again, where=["encoder.*", "cell.*"])  # type: ignore[arg-type]
    assert list(model.moments()) == list(expected.moments())
    assert list(model.state_dict()) == list(expected.state_dict())
    assert isinstance(net.encoder, torch._dynamo.OptimizedModule)  # the one given is as it was
    br.save(model, tmp_path / "model")
    x = data()[0][0]
    for module in (network(), again):
        loaded = br.load(tmp_path / "model", module=module)  # type: ignore[arg-type]
        torch.testing.assert_close(loaded(x), model.eval()(x))


def test_a_tied_part_that_is_compiled_stays_tied() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(3, 3)
            self.second = torch.compile(self.first, backend="eager")

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x))

    model = br.bayesianize(network(Tied))
    assert model.weight_count == 12
    assert model.module.first is model.module.second


class Kept(Net):
    """As many a script has it."""

    def __init__(self) -> None:
        super().__init__()
        self.forward = torch.compile(self.forward, backend="eager")  # type: ignore[method-assign]


class Decorated(Net):
    @torch.compile(backend="aot_eager")
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def test_a_compiled_method_that_a_module_keeps_is_refused() -> None:
    with pytest.raises(ValueError, match="keeps a compiled method in its attribute 'forward'"):
        br.bayesianize(network(Kept))


def test_a_compiled_method_of_a_class_reads_the_draws() -> None:
    x = data()[0][0]
    model, expected = (br.bayesianize(network(kind)).train() for kind in (Decorated, Net))
    expected.load_state_dict(model.state_dict())
    torch.manual_seed(4)
    found = [model(x) for _ in range(3)]
    torch.manual_seed(4)
    torch.testing.assert_close(found, [expected(x) for _ in range(3)], rtol=1e-9, atol=1e-9)
    assert not torch.equal(found[0], found[1])


def test_the_network_by_itself_is_one_graph(backend: Backend) -> None:
    model = model_of().eval()
    x = data()[0][0]
    expected = model(x)
    model.module.compile(backend=backend, fullgraph=True)
    torch.testing.assert_close(model(x), expected, rtol=1e-9, atol=1e-9)
    assert backend.frame_count == 1


def test_the_mean_is_exported_as_one_graph() -> None:
    model = model_of().eval()
    x = data()[0][0]
    exported = torch.export.export(model, (x,), strict=False)
    torch.testing.assert_close(exported.module()(x), model(x))


@pytest.mark.parametrize("way", [outside, in_place])
def test_a_module_of_torchs_own_is_compiled_too(way: Way, backend: Backend) -> None:
    model = br.bayesianize(nn.Sequential(nn.Linear(3, 2), nn.Tanh())).eval()
    x = torch.randn(4, 3)
    expected = model(x)
    torch.testing.assert_close(way(model, backend)(x), expected)
    assert backend.frame_count == 1


def test_what_nobody_compiles_needs_no_compiler() -> None:
    """It takes a second to load, longer than a short evaluation. (An optimiser loads it anyway.)"""
    program = """
import sys, torch, bayesrnn as br
model = br.bayesianize(torch.nn.Linear(3, 2))
x = torch.ones(4, 3)
model(x)
br.predict(model, x, samples=2)
print("torch._dynamo" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(), capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("False\n", "")
