"""Do thin kernels leave an LSTM alone? ms as one JSON object; each way replayed as a CUDA graph.

python benchmarks/gpu_thin.py [UNITS] > thin.json
TRITON_INTERPRET=1 python benchmarks/gpu_thin.py --check    # their maths, without a GPU

torch's passes over the weights have thousands of blocks, so what runs beside them waits for room.
These have one small block a multiprocessor (or a few), which goes through all the weights: slower
alone, and they were to fit beside the LSTM's own blocks (docs/performance.md says what came of it).
"""

import itertools
import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from gpu_kernels import ms
from torch import Tensor, nn

from bayesrnn.bayes import Gaussian
from bayesrnn.engine import compiled, products_in

POSTERIOR = Gaussian((0.046, 0.092))
EACH = 8
"""Numbers that a thread has under way (of noise four times as many)."""
WORDS = 10_000


@triton.jit
def noise_kernel(out, seed, count, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Four standard normal numbers from each step of the generator."""
    key = tl.load(seed)
    inside = tl.arange(0, TILE)
    for start in range(tl.program_id(0) * 4 * TILE, count, tl.num_programs(0) * 4 * TILE):
        a, b, c, d = tl.randn4x(key, start // 4 + inside)
        at = start + inside
        tl.store(out + at, a, mask=at < count)
        tl.store(out + at + TILE, b, mask=at + TILE < count)
        tl.store(out + at + 2 * TILE, c, mask=at + 2 * TILE < count)
        tl.store(out + at + 3 * TILE, d, mask=at + 3 * TILE < count)


@triton.jit
def draw_kernel(loc, rho, eps, theta, count, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """theta = mu + (softplus(rho) + 1e-5) eps."""
    for start in range(tl.program_id(0) * TILE, count, tl.num_programs(0) * TILE):
        at = start + tl.arange(0, TILE)
        fits = at < count
        x = tl.load(rho + at, mask=fits, other=0.0)
        sigma = tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x))) + 1e-5
        drawn = tl.load(loc + at, mask=fits) + sigma * tl.load(eps + at, mask=fits)
        tl.store(theta + at, drawn, mask=fits)


class Weights:
    """As many as there are of a medium network, flat, and the ways to pass over them."""

    def __init__(self, count: int, device: str) -> None:
        self.learnt = {
            "loc": 0.05 * torch.randn(count, device=device),
            "rho": 0.2 * torch.randn(count, device=device) - 2.5,
        }
        self.eps, self.theta = (torch.zeros(count, device=device) for _ in range(2))
        self.seed = torch.ones((), dtype=torch.int64, device=device)

    def usual(self, what: str) -> None:
        if what == "noise":
            self.eps.normal_()
        else:
            compiled(_draw)(self.learnt, self.eps, self.theta)

    def thin(self, what: str, blocks: int, warps: int) -> None:
        count, tile = len(self.eps), 32 * warps * EACH
        if what == "noise":
            self.seed.add_(1)
            noise_kernel[(blocks,)](self.eps, self.seed, count, TILE=tile, num_warps=warps)
        else:
            given = (self.learnt["loc"], self.learnt["rho"], self.eps, self.theta)
            draw_kernel[(blocks,)](*given, count, TILE=tile, num_warps=warps)


def _draw(learnt: dict[str, Tensor], eps: Tensor, theta: Tensor) -> None:
    theta.copy_(POSTERIOR.draw(learnt, {"eps": eps}))


def measure(units: int) -> dict[str, Any]:
    wide = -(-units // 8) * 8
    rnn = nn.LSTM(wide, wide, 2).cuda()
    x = torch.randn(35, 20, wide, device="cuda", requires_grad=True)
    weights = Weights(2 * WORDS * units + 16 * units * units, "cuda")
    second = torch.cuda.Stream(priority=0)
    cores = torch.cuda.get_device_properties(0).multi_processor_count

    def lstm() -> None:
        y = rnn(x)[0]
        torch.autograd.grad(y, [x, *rnn.parameters()], y.detach())

    def beside(work: Callable[[], object]) -> None:
        here = torch.cuda.current_stream()
        second.wait_stream(here)
        with torch.cuda.stream(second):
            work()
        lstm()
        here.wait_stream(second)

    found: dict[str, Any] = {"lstm alone": ms(lstm)}
    for what in ("noise", "draw"):
        ways = {"usual": partial(weights.usual, what)}
        for blocks, warps in itertools.product((cores, 2 * cores, 4 * cores), (2, 4, 8)):
            name = f"thin, {blocks} blocks of {warps} warps"
            ways[name] = partial(weights.thin, what, blocks, warps)
        found[what] = {
            name: {"alone": ms(way), "lstm beside it": ms(partial(beside, way))}
            for name, way in ways.items()
        }
    return found


def check() -> None:
    """The maths, by Triton's interpreter on a CPU."""
    torch.manual_seed(1)
    weights = Weights(20_000 + 777, "cpu")
    weights.thin("noise", 3, 4)
    eps = weights.eps.double()
    count = len(eps)
    print("mean, variance, fourth moment", eps.mean(), eps.var(), eps.pow(4).mean())
    assert abs(eps.mean()) < 5 / count**0.5
    assert abs(eps.var() - 1) < 5 * (2 / count) ** 0.5
    assert abs(eps.pow(4).mean() - 3) < 5 * (96 / count) ** 0.5
    assert len(eps.unique()) > 0.99 * count
    weights.thin("draw", 3, 4)
    torch.testing.assert_close(weights.theta, POSTERIOR.draw(weights.learnt, {"eps": weights.eps}))
    print("as they should be")


def main() -> None:
    if "--check" in sys.argv:
        check()
        return
    units = int(sys.argv[1]) if len(sys.argv) > 1 else 650
    with products_in("tf32"):
        found = measure(units)
    record = {"hardware": torch.cuda.get_device_name(), "torch": torch.__version__, "units": units}
    print(json.dumps({**record, "ms": found}, indent=1))


if __name__ == "__main__":
    main()
