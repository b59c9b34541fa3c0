"""Speed of a training step, side by side in one run: plain, Bayesian, and other libraries.

All cases read the same batch, take turns, and are compared by the median of their steps, so that a
busy machine slows them all alike.
"""

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayesrnn.bayes import (
    Delta,
    Gaussian,
    Posterior,
    ScaleMixture,
    Sharpened,
    Uniform,
    bayesianize,
)
from bayesrnn.data.batching import Batch
from bayesrnn.engine import WARM_UP, has_bfloat16, products_in
from bayesrnn.errors import UserError
from bayesrnn.models import LanguageModel
from bayesrnn.models.dropout import DropoutSettings
from bayesrnn.models.layers import State
from bayesrnn.objective import FreeEnergy
from bayesrnn.train.settings import TrainSettings
from bayesrnn.train.step import Step as TrainStep
from bayesrnn.train.step import Update, build_optimizer
from bayesrnn.train.task import language_nll

Size = Literal["small", "medium", "large"]
Step = Callable[[], object]

VOCABULARY, STREAMS, LAYERS, CUTS = 10_000, 20, 2, 1_327
UNITS = {"small": 200, "medium": 650, "large": 1500}  # Zaremba et al. 2014
UNROLL = {"small": 20, "medium": 35, "large": 35}
ORDINARY = "plain, ordinary loop"
TURN = 20
PLAIN = Delta()
BAYESIAN = Gaussian((0.046, 0.092))
SHARPENED = Sharpened((0.046, 0.092))
SOFTMAX_SHARPENED = {"decoder.weight": Sharpened((0.046, 0.092)), "*": BAYESIAN}
NAIVE = DropoutSettings("naive", input=0.5, output=0.5)
VARIATIONAL = DropoutSettings(input=0.35, recurrent=0.2, output=0.35, word=0.2)
PEERS = ("blitz", "bayesian-torch")


@dataclass(frozen=True)
class Timing:
    """One case: its median step, and what that is beside the plain loop's."""

    case: str
    ms: float
    words_per_second: float
    times_plain: float
    peak_mib: float | None


@dataclass(frozen=True)
class Epoch:
    """An endless epoch: as many targets as Penn Treebank's has."""

    targets: int


def bench(
    size: Size = "medium",
    device: torch.device | str = "cpu",
    steps: int = 20,
    peers: bool = False,
    advance: Callable[[], None] | None = None,
    only: Sequence[str] = (),
) -> list[Timing]:
    """Time `steps` turns of each case, one after the other; `advance` is told of each turn. `only`
    names cases to time beside the plain loop (none: all).

    On a GPU a turn is several steps, and waits for the device at its end only.
    """
    place = torch.device(device)
    torch.manual_seed(1)
    batch = _batch(size, place)
    makers: dict[str, Callable[[], Step]] = {
        ORDINARY: lambda: _plain(size, batch),
        "plain, here": lambda: _ours(size, batch, PLAIN),
        "Bayesian, here": lambda: _ours(size, batch, BAYESIAN),
        "sharpened, here": lambda: _ours(size, batch, SHARPENED),
        "softmax sharpened, here": lambda: _ours(size, batch, SOFTMAX_SHARPENED),
        "naive dropout, here": lambda: _ours(size, batch, PLAIN, dropout=NAIVE),
        "variational dropout, here": lambda: _ours(size, batch, PLAIN, dropout=VARIATIONAL),
    }
    if has_bfloat16(place):
        makers |= {
            "plain, here, bfloat16": lambda: _ours(size, batch, PLAIN, "bfloat16"),
            "Bayesian, here, bfloat16": lambda: _ours(size, batch, BAYESIAN, "bfloat16"),
        }
    if place.type == "cuda":
        makers["Bayesian, here, eager"] = lambda: _ours(size, batch, BAYESIAN, engine="eager")
    if peers:
        makers |= {name: partial(_peer, name, size, batch) for name in PEERS}
    unknown = [case for case in only if case not in makers]
    if unknown:
        raise UserError(f"there is no case {unknown[0]!r}; there are: {'; '.join(makers)}")
    makers = {c: make for c, make in makers.items() if not only or c in (ORDINARY, *only)}
    cases: dict[str, Step] = {}
    peaks: dict[str, float | None] = {}
    seconds: dict[str, list[float]] = {case: [] for case in makers}
    with products_in("tf32"):
        for case, make in makers.items():
            cases[case], peaks[case] = _warmed(make, 2 if case in PEERS else WARM_UP + 3, place)
            if advance is not None:
                advance()
        for turn in range(steps):
            for case, step in cases.items():
                if case in PEERS and turn >= max(1, steps // 10):
                    continue  # they take a hundred times as long
                seconds[case].append(_timed(step, 1 if case in PEERS else TURN, place))
                if advance is not None:
                    advance()
    ordinary = statistics.median(seconds[ORDINARY])
    return [
        Timing(
            case,
            round(1000 * statistics.median(taken), 3),
            round(batch.targets / statistics.median(taken), 1),
            round(statistics.median(taken) / ordinary, 3),
            peaks[case],
        )
        for case, taken in seconds.items()
    ]


def report(timings: list[Timing], size: Size, device: torch.device) -> dict[str, Any]:
    """The timings as one JSON object, with what they were taken on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return {
        "size": size,
        "units": UNITS[size],
        "layers": LAYERS,
        "vocabulary": VOCABULARY,
        "streams": STREAMS,
        "unroll": UNROLL[size],
        "hardware": name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "timings": [asdict(timing) for timing in timings],
    }


def _batch(size: Size, device: torch.device) -> Batch:
    steps = UNROLL[size]
    ids = torch.randint(VOCABULARY, (steps + 1, STREAMS), device=device)
    targets = steps * STREAMS
    return Batch(ids[:-1], ids[1:], True, targets, STREAMS, 1 / CUTS)


def _warmed(
    make: Callable[[], Step], count: int, device: torch.device
) -> tuple[Step, float | None]:
    """A case after its first steps, and on a GPU the most memory it took, in MiB."""
    if device.type != "cuda":
        step = make()
        step()
        return step, None
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step = make()
    for _ in range(count):
        step()
    torch.cuda.synchronize(device)
    return step, round((torch.cuda.max_memory_allocated(device) - before) / 2**20, 1)


def _timed(step: Step, count: int, device: torch.device) -> float:
    """Seconds of one step: on a GPU a mean, since waiting for every one would slow them down."""
    if device.type != "cuda":
        began = time.perf_counter()
        step()
        return time.perf_counter() - began
    torch.cuda.synchronize(device)
    began = time.perf_counter()
    for _ in range(count):
        step()
    torch.cuda.synchronize(device)
    return (time.perf_counter() - began) / count


def _net(size: Size, batch: Batch, dropout: DropoutSettings | None = None) -> LanguageModel:
    net = LanguageModel(VOCABULARY, UNITS[size], UNITS[size], LAYERS, dropout=dropout)
    return net.to(batch.x.device)


def _nll(logits: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), batch.y.flatten(), reduction="sum")


def _trained(module: nn.Module, backward: Callable[[], object]) -> Step:
    """The rest of an ordinary step: clip and plain SGD, as published."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 5.0)
        optimizer.step()

    return step


def _plain(size: Size, batch: Batch) -> Step:
    """What one would write with torch's own layers."""
    net = _net(size, batch)
    net.decoder = nn.Linear(UNITS[size], VOCABULARY, device=batch.x.device)
    return _trained(net, lambda: (_nll(net(batch.x)[0], batch) / STREAMS).backward())


def _ours(
    size: Size,
    batch: Batch,
    posterior: Posterior | Mapping[str, Posterior],
    precision: Literal["tf32", "bfloat16"] = "tf32",
    engine: Literal["auto", "eager"] = "auto",
    dropout: DropoutSettings | None = None,
) -> Step:
    net = _net(size, batch, dropout)
    if posterior is PLAIN:
        model = bayesianize(net, posterior, Uniform())
    else:
        where = ["embedding.weight", "rnn.*", "decoder.weight"]
        model = bayesianize(net, posterior, ScaleMixture(), where)
    settings = TrainSettings(lr=0.1, precision=precision, engine=engine)
    optimizer = build_optimizer(settings, model, CUTS)
    update = Update(optimizer, settings.clip, batch.x.device)
    update.set_rate(settings.lr)
    objective = FreeEnergy(Epoch(batch.targets * CUTS))
    take = TrainStep(model, language_nll, objective, update, settings, lambda text: None)
    state: list[State | None] = [None]

    def step() -> None:
        state[0] = take(batch, state[0])

    return step


def _peer(name: str, size: Size, batch: Batch) -> Step:
    """Another library's step, with only the LSTM Bayesian: they have no more."""
    units = UNITS[size]
    try:
        if name == "blitz":
            from blitz.modules import BayesianLSTM

            layers = [BayesianLSTM(units, units) for _ in range(LAYERS)]
        else:
            from bayesian_torch.layers import LSTMReparameterization

            layers = [LSTMReparameterization(units, units) for _ in range(LAYERS)]
    except ImportError as error:
        raise UserError(
            f"{name} is not installed; pip install 'bayesrnn[bench]', or leave out --peers"
        ) from error
    net = nn.ModuleList([nn.Embedding(VOCABULARY, units), *layers, nn.Linear(units, VOCABULARY)])
    net.to(batch.x.device)

    def backward() -> None:
        hidden = net[0](batch.x.T)  # both want the batch first
        kl: Tensor | float = 0.0
        for layer in layers:
            hidden, *rest = layer(hidden)
            if name == "blitz":
                kl = kl + layer.log_variational_posterior - layer.log_prior
            else:
                kl = kl + rest[-1]
        nll = _nll(net[-1](hidden).transpose(0, 1), batch)
        ((nll + kl / CUTS) / STREAMS).backward()

    return _trained(net, backward)
