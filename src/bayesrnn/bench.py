"""Speed of a training step, side by side in one run: plain, Bayesian, and other libraries.

All cases read the same batch, take turns, and are compared by the median of their steps, so that a
busy machine slows them all alike.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayesrnn.bayes import Delta, Gaussian, ScaleMixture, Uniform, bayesianize
from bayesrnn.data.batching import Batch
from bayesrnn.errors import UserError
from bayesrnn.models import LanguageModel
from bayesrnn.objective import FreeEnergy

Size = Literal["small", "medium", "large"]
Step = Callable[[], object]

VOCABULARY, STREAMS, LAYERS, CUTS = 10_000, 20, 2, 1_327
UNITS = {"small": 200, "medium": 650, "large": 1500}  # Zaremba et al. 2014
UNROLL = {"small": 20, "medium": 35, "large": 35}
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
) -> list[Timing]:
    """Time `steps` training steps of each case, taking turns; `advance` is told of each step."""
    place = torch.device(device)
    torch.manual_seed(1)
    batch = _batch(size, place)
    cases: dict[str, Step] = {
        "plain, ordinary loop": _plain(size, batch),
        "plain, here": _ours(size, batch, plain=True),
        "Bayesian, here": _ours(size, batch, plain=False),
    }
    if peers:
        cases |= {name: _peer(name, size, batch) for name in PEERS}
    seconds: dict[str, list[float]] = {case: [] for case in cases}
    peaks: dict[str, float | None] = dict.fromkeys(cases)
    for turn in range(steps + 1):  # the first one warms up
        for case, step in cases.items():
            if case in PEERS and turn > max(1, steps // 10):
                continue  # they take a hundred times as long
            taken, peak = _timed(step, place)
            if turn > 0:
                seconds[case].append(taken)
                peaks[case] = peak
            if advance is not None:
                advance()
    ordinary = statistics.median(seconds["plain, ordinary loop"])
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


def _timed(step: Step, device: torch.device) -> tuple[float, float | None]:
    """Seconds of one step, and on a GPU the most memory it took, in MiB."""
    if device.type != "cuda":
        began = time.perf_counter()
        step()
        return time.perf_counter() - began, None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    began = time.perf_counter()
    step()
    torch.cuda.synchronize(device)
    taken = time.perf_counter() - began
    return taken, round((torch.cuda.max_memory_allocated(device) - before) / 2**20, 1)


def _net(size: Size, batch: Batch) -> LanguageModel:
    return LanguageModel(VOCABULARY, UNITS[size], UNITS[size], LAYERS).to(batch.x.device)


def _nll(logits: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), batch.y.flatten(), reduction="sum")


def _trained(module: nn.Module, backward: Callable[[], object]) -> Step:
    """The rest of every step: clip and plain SGD, as published."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 5.0)
        optimizer.step()

    return step


def _plain(size: Size, batch: Batch) -> Step:
    net = _net(size, batch)
    return _trained(net, lambda: (_nll(net(batch.x)[0], batch) / STREAMS).backward())


def _ours(size: Size, batch: Batch, plain: bool) -> Step:
    net = _net(size, batch)
    if plain:
        model = bayesianize(net, Delta(), Uniform())
    else:
        where = ["embedding.weight", "rnn.*", "decoder.weight"]
        model = bayesianize(net, Gaussian((0.046, 0.092)), ScaleMixture(), where)
    objective = FreeEnergy(Epoch(batch.targets * CUTS))
    return _trained(
        model, lambda: objective(model, _nll(model(batch.x)[0], batch), batch).backward()
    )


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
