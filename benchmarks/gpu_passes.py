"""Ways to pass over the weights on a GPU, each replayed as a CUDA graph: ms as one JSON object.

python benchmarks/gpu_passes.py [UNITS] > passes.json

The weights are those of the medium language model (or of UNITS units): "emb" an embedding, "lstm"
its four recurrent matrices, "dec" the softmax's. `docs/performance.md` says what came of it.
"""

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from gpu_kernels import ms
from torch import Tensor, nn

from bayesrnn.bayes import Gaussian, ScaleMixture
from bayesrnn.bayes.kl import Draw, sampled_gradient
from bayesrnn.bayes.passes import look, plus
from bayesrnn.engine import compiled, products_in

POSTERIOR, PRIOR = Gaussian((0.046, 0.092)), ScaleMixture()
WORDS, SHARE, ROWS = 10_000, 1 / 26_540, 65
Part = dict[str, Any]


def part(kind: str, units: int) -> Part:
    """One weight: what is learnt, its noise, and its draw and gradient where a layer wants them."""
    wide = -(-units // 8) * 8
    shape = (4, units, units) if kind == "lstm" else (WORDS, units)
    frame = {"emb": shape, "lstm": (4, wide, wide), "dec": (WORDS, wide)}[kind]
    corner = tuple(slice(size) for size in shape)
    groups = (WORDS, 1) if kind == "emb" else (*[1] * (len(shape) - 1), units)
    loc, rho, eps, ahead = (0.1 * torch.randn(shape, device="cuda") for _ in range(4))
    return {
        "learnt": {"loc": loc, "rho": rho - 2.5},
        "eps": eps,
        "ahead": ahead,
        "theta": torch.zeros(frame, device="cuda")[corner],
        "of_loss": 0.01 * torch.randn(frame, device="cuda")[corner],
        "precision": torch.rand(groups, device="cuda").expand(shape),
        "found": {"loc": torch.empty_like(loc), "rho": torch.empty_like(rho)},
        "rate": torch.zeros((), device="cuda"),
    }


def down(x: Tensor) -> Tensor:
    """Sums down the columns, some rows at a time."""
    rows = max(n for n in range(1, ROWS + 1) if x.shape[-2] % n == 0)
    return x.unflatten(-2, (-1, rows)).sum(-2)


def of_draw(draw: Draw) -> tuple[Tensor, Tensor]:
    """What the KL needs of each weight: minus log q (up to a constant), and theta's square."""
    assert draw.scale is not None
    assert draw.eps is not None
    return draw.scale.log() + 0.5 * draw.eps.square(), draw.theta.square()


def gradient(p: Part) -> dict[str, Tensor]:
    noise = {"eps": p["eps"]}
    draw = look(POSTERIOR, p["learnt"], noise)
    d_loc, d_scale = sampled_gradient(draw, PRIOR, 0, {}, p["precision"])
    of_loc, of_scale = POSTERIOR.lift(p["learnt"], noise, p["of_loss"])
    assert of_scale is not None
    assert d_scale is not None
    both = plus(of_loc, d_loc, SHARE), plus(of_scale, d_scale, SHARE)
    return POSTERIOR.chain(p["learnt"], *both)


def squares(p: Part) -> Tensor:
    found = gradient(p)
    return found["loc"].square() + found["rho"].square()


def draw(p: Part) -> None:
    p["theta"].copy_(POSTERIOR.draw(p["learnt"], {"eps": p["eps"]}))


def draw_and_sums(p: Part, total: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
    made = look(POSTERIOR, p["learnt"], {"eps": p["eps"]})
    p["theta"].copy_(made.theta)
    return tuple(total(x) for x in of_draw(made))


def sums(p: Part, total: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
    made = look(POSTERIOR, p["learnt"], {"eps": p["eps"]})
    return tuple(total(x) for x in of_draw(made))


def write(p: Part, found: dict[str, Tensor]) -> None:
    for name, value in found.items():
        p["found"][name].copy_(value)


def write_gradient_and_norm(p: Part) -> Tensor:
    found = gradient(p)
    write(p, found)
    return across(found["loc"].square() + found["rho"].square())


def update(p: Part, values: dict[str, Tensor]) -> dict[str, Tensor]:
    new = {name: p["learnt"][name] - p["rate"] * value for name, value in values.items()}
    for name, value in new.items():
        p["learnt"][name].copy_(value)
    return new


def update_and_draw(p: Part) -> None:
    new = update(p, gradient(p))
    p["theta"].copy_(POSTERIOR.draw(new, {"eps": p["ahead"]}))


def across(x: Tensor) -> Tensor:
    return x.sum(-1)


WAYS: dict[str, Callable[[Part], object]] = {
    "draw": draw,
    "draw, sums across rows": lambda p: draw_and_sums(p, across),
    "draw, sums down columns": lambda p: draw_and_sums(p, down),
    "sums across rows": lambda p: sums(p, across),
    "sums down columns": lambda p: sums(p, down),
    "gradient": lambda p: write(p, gradient(p)),
    "gradient, and its norm by rows": write_gradient_and_norm,
    "norm of the gradient, by rows": lambda p: across(squares(p)),
    "norm of the gradient, by columns": lambda p: down(squares(p)),
    "update from the gradient": lambda p: update(p, p["found"]),
    "update, gradient found again": lambda p: update(p, gradient(p)),
    "update, gradient found again, next draw": update_and_draw,
}


def noise_beside(units: int) -> dict[str, float]:
    """Forward and backward of two LSTM layers while noise for all weights is drawn beside them, as
    a whole or in pieces that leave room."""
    wide = -(-units // 8) * 8
    rnn = nn.LSTM(wide, wide, 2).cuda()
    x = torch.randn(35, 20, wide, device="cuda", requires_grad=True)
    noise = torch.empty(2 * WORDS * units + 16 * units * units, device="cuda")
    second = torch.cuda.Stream(priority=0)

    def run() -> None:
        y = rnn(x)[0]
        torch.autograd.grad(y, [x, *rnn.parameters()], y.detach())

    def beside(pieces: Sequence[Tensor]) -> None:
        here = torch.cuda.current_stream()
        second.wait_stream(here)
        with torch.cuda.stream(second):
            for piece in pieces:
                piece.normal_()
        run()
        here.wait_stream(second)

    found = {"lstm": ms(run), "noise": ms(lambda: noise.normal_())}
    for power in (20, 18, 16):
        pieces = noise.split(1 << power)
        found[f"lstm beside noise, pieces of 2^{power}"] = ms(lambda p=pieces: beside(p))  # type: ignore[misc]
    return found | {"lstm beside noise, whole": ms(lambda: beside([noise]))}


def main() -> None:
    units = int(sys.argv[1]) if len(sys.argv) > 1 else 650
    found: dict[str, Any] = {}
    for name, way in WAYS.items():
        fused = compiled(way)
        found[name] = {}
        for kind, count in {"emb": 1, "lstm": 4, "dec": 1}.items():
            parts = [part(kind, units) for _ in range(count)]
            found[name][kind] = ms(lambda f=fused, ps=parts: [f(p) for p in ps])  # type: ignore[misc]
    with products_in("tf32"):
        found |= noise_beside(units)
    device = torch.cuda.get_device_name()
    record = {"hardware": device, "torch": torch.__version__, "units": units, "ms": found}
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
