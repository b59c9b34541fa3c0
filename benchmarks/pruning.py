"""What pruning saves: the file's size, and the time of one token a step on a CPU.

The medium Penn Treebank model (2 LSTM layers of 650, 10,000 words), untrained: size and time depend
on how many weights are left, not on their values. Dense and sparse networks take turns. `loop_ms`
is the sparse LSTM's own code with dense matrices: what is gained over that is gained by the zeros,
the rest by not being nn.LSTM. `text_cut` is one stream of a text in a cut as `evaluate` reads it.

    python benchmarks/pruning.py --threads 2 > pruning.json
"""

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import bayesrnn as br
from bayesrnn.prune import choose
from bayesrnn.saving import TENSORS
from bayesrnn.sparse import SparseLSTM, sparse_network
from bayesrnn.train.task import EVALUATION_TOKENS

VOCABULARY, SIZE, LAYERS = 10_000, 650, 2


def file_bytes(model: br.Bayesian) -> int:
    with tempfile.TemporaryDirectory() as folder:
        br.save(model, Path(folder) / "model", mean_only=True)
        return (Path(folder) / "model" / TENSORS).stat().st_size


def milliseconds(calls: list[Callable[[], object]], rounds: int) -> list[float]:
    """The median time of each, taking turns."""
    times: list[list[float]] = [[] for _ in calls]
    for number in range(rounds + 3):
        for call, mine in zip(calls, times, strict=True):
            began = time.perf_counter()
            call()
            if number >= 3:
                mine.append(1e3 * (time.perf_counter() - began))
    return [statistics.median(mine) for mine in times]


def one_token(network: nn.Module, x: Tensor, state: Any) -> Callable[[], object]:
    return lambda: network(x, state)


def dense_loop(lstm: nn.LSTM) -> SparseLSTM:
    """The sparse LSTM with dense matrices."""
    loop = SparseLSTM(lstm)
    loop.inputs = [getattr(lstm, f"weight_ih_l{i}") for i in range(lstm.num_layers)]
    loop.recurrent = [getattr(lstm, f"weight_hh_l{i}") for i in range(lstm.num_layers)]
    return loop


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=50)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(1)
    net = br.LanguageModel(VOCABULARY, SIZE, SIZE, LAYERS)
    model = br.bayesianize(net, br.Gaussian((0.01, 0.1)), br.ScaleMixture()).eval()
    dense_bytes = file_bytes(model)
    dense = br.plain_network(model).requires_grad_(False)
    rows = []
    for fraction in (0.5, 0.8, 0.9, 0.95):
        for block, masks in choose(model, fraction, per_tensor=True).items():
            block.prune(block.layout.join(masks))
        sparse = sparse_network(model, at_least=0.0)
        row: dict[str, Any] = {
            "fraction": fraction,
            "file_ratio": file_bytes(model) / dense_bytes,
        }
        for batch in (1, 4, 20):
            x = torch.randint(VOCABULARY, (1, batch))
            state = dense(x)[1]
            whole = [one_token(n, x, state) for n in (dense, sparse)]
            hidden = dense.embedding(x)
            cells = (dense.rnn, sparse.rnn, dense_loop(dense.rnn))
            lstm = [one_token(n, hidden, state) for n in cells]
            for name, calls in (("network", whole), ("lstm", lstm)):
                ms = milliseconds(calls, given.rounds)
                row[f"{name}_batch_{batch}"] = {
                    "dense_ms": ms[0],
                    "sparse_ms": ms[1],
                    "speedup": ms[0] / ms[1],
                }
                if len(ms) > 2:
                    row[f"{name}_batch_{batch}"]["loop_ms"] = ms[2]
        x = torch.randint(VOCABULARY, (EVALUATION_TOKENS, 1))
        ms = milliseconds(
            [one_token(n, x, None) for n in (dense, sparse)], max(given.rounds // 10, 1)
        )
        row["text_cut"] = {"dense_ms": ms[0], "sparse_ms": ms[1], "speedup": ms[0] / ms[1]}
        rows.append(row)
    facts = {"threads": given.threads, "rounds": given.rounds, "machine": platform.machine()}
    print(json.dumps({**facts, "torch": torch.__version__, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
