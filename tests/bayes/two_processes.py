"""One rank of a data-parallel step; run by test_distributed.py, prints its numbers as JSON."""

import copy
import json
import sys

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from bayesrnn.bayes import Bayesian, Gaussian, Normal, ScaleMixture, bayesianize
from bayesrnn.data.batching import StreamLoader
from bayesrnn.objective import FreeEnergy


def build() -> tuple[Bayesian, TensorDataset]:
    """The same on every rank and in the test: all seeds agree."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    priors = {"0.*": ScaleMixture(0.3, 0.9, 0.15), "*": Normal("fit", "learn")}
    model = bayesianize(net, Gaussian((0.05, 0.4)), priors)
    data = TensorDataset(
        torch.randn(12, 3, dtype=torch.float64), torch.randn(12, 1, dtype=torch.float64)
    )
    return model, data


def gradients(model: nn.Module) -> list[list[float]]:
    return [p.grad.reshape(-1).tolist() for p in model.parameters()]


WORDS = 24


def by_streams(parallel: DistributedDataParallel, model: Bayesian, rank: int) -> dict[str, object]:
    """A loader of this package, which reads this rank's half of a text."""
    ids = np.arange(2 * WORDS)[rank * WORDS : (rank + 1) * WORDS]
    loader = StreamLoader(ids, streams=2, unroll=5)
    try:
        FreeEnergy(loader)
        refused = ""
    except ValueError as error:
        refused = str(error)
    objective = FreeEnergy(loader, "sample", processes=2)
    found: list[object] = []
    for batch in loader:
        model.zero_grad()
        x = torch.stack([batch.x, batch.y, batch.x - batch.y], dim=-1).double() / WORDS
        loss = objective(parallel, parallel(x).square().sum(), batch)
        loss.backward()
        eps = [block.noise["eps"].tolist() for block in model.blocks]
        found.append({"x": x.tolist(), "eps": eps, "gradient": gradients(model)})
    share = objective.epoch.share
    return {"refused": refused, "steps": found, "share": share, "targets": loader.targets}


def main(store: str, rank: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model, data = build()
    alone = copy.deepcopy(model)
    parallel = DistributedDataParallel(model)
    loader = DataLoader(data, batch_size=3, sampler=DistributedSampler(data, shuffle=False))
    objective = FreeEnergy(loader, kl="sample")
    optimiser = torch.optim.SGD(parallel.parameters(), lr=0.1)
    report: dict[str, object] = {}

    batches = list(loader)
    torch.manual_seed(1)
    x, y = batches[0]
    loss = objective(parallel, 0.5 * (parallel(x) - y).square().sum(), (x, y))
    loss.backward()
    report["share"] = loss.share
    report["eps"] = [block.noise["eps"].tolist() for block in model.blocks]
    report["x"], report["y"] = x.tolist(), y.tolist()
    report["gradient"] = gradients(model)
    optimiser.step()
    report["after"] = [p.reshape(-1).tolist() for p in model.parameters()]

    # The same rank, the same state of torch's generator, without the other ranks.
    torch.manual_seed(1)
    objective = FreeEnergy(loader, kl="sample")
    objective(alone, 0.5 * (alone(x) - y).square().sum(), (x, y)).backward()
    report["local"] = gradients(alone)
    report["same draw alone"] = all(
        torch.equal(a.noise["eps"], b.noise["eps"])
        for a, b in zip(alone.blocks, model.blocks, strict=True)
    )

    # The rest of the epoch, and a draw from a generator of one's own.
    objective = FreeEnergy(loader)
    for x, y in loader:
        optimiser.zero_grad()
        objective(parallel, 0.5 * (parallel(x) - y).square().sum(), (x, y)).backward()
        optimiser.step()
    report["epoch share"] = objective.epoch.share
    report["last"] = [p.reshape(-1).tolist() for p in model.parameters()]
    report["streams"] = by_streams(parallel, model, rank)
    model.resample(generator=torch.Generator().manual_seed(6))
    report["own generator"] = [block.noise["eps"].tolist() for block in model.blocks]
    print(json.dumps(report), flush=True)
    dist.barrier()  # neither leaves while the other may still talk to it
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
