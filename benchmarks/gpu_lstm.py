"""Two layers of an LSTM, their steps few and wide kernels, beside cuDNN: ms as one JSON object.

python benchmarks/gpu_lstm.py [UNITS] > lstm.json
TRITON_INTERPRET=1 python benchmarks/gpu_lstm.py --check    # its maths, without a GPU

cuDNN takes a product and an elementwise kernel for each step of each layer, and cuts the products
of the backward pass into a dozen blocks (docs/performance.md). Here both layers of a wave share a
kernel: layer 2 is one step behind layer 1. A forward step is one kernel, product and gates
together. A backward step is two: partial products, cut along units and gates, then their sum with
the gates' derivatives. The gradients of the weights are products over all steps, at the end.
"""

import json
import sys
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from bayesrnn.engine import products_in

T, B = 35, 20
ROWS = 32
"""Rows of a product's tile: the batch, filled up."""
UNITS = 16
"""Hidden units that a block of the forward pass finds."""


@triton.jit
def gate_products(  # type: ignore[no-untyped-def]
    i, f, g, o, h, w, rows, fits, units, real, H: tl.constexpr, DEEP: tl.constexpr
):
    """h [rows, H] times the four gates' rows of w [4 H, H] at these units, added to each."""
    for start in range(0, H, DEEP):
        k = start + tl.arange(0, DEEP)
        inside = k < H
        a = tl.load(h + rows[:, None] * H + k[None, :], mask=fits[:, None] & inside, other=0.0)
        at = w + units[None, :] * H + k[:, None]
        here = real[None, :] & inside[:, None]
        i = tl.dot(a, tl.load(at, mask=here, other=0.0), i, input_precision="tf32")
        f = tl.dot(a, tl.load(at + H * H, mask=here, other=0.0), f, input_precision="tf32")
        g = tl.dot(a, tl.load(at + 2 * H * H, mask=here, other=0.0), g, input_precision="tf32")
        o = tl.dot(a, tl.load(at + 3 * H * H, mask=here, other=0.0), o, input_precision="tf32")
    return i, f, g, o


@triton.jit(do_not_specialize=["wave"])
def forward_step(  # type: ignore[no-untyped-def]
    of_x,  # [T, B, 4 H] x W_ih' + b of layer 1
    w_hh1,
    w_ih2,
    w_hh2,
    b2,
    h1,  # [1 + T, B, H], likewise c1, h2, c2
    c1,
    h2,
    c2,
    gates1,  # [T, B, 4 H], likewise gates2
    gates2,
    wave,
    STEPS: tl.constexpr,
    BATCH: tl.constexpr,
    H: tl.constexpr,
    TILE: tl.constexpr,
    DEEP: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Layer 1 at step `wave`, layer 2 at the one before."""
    layer, tile = tl.program_id(0), tl.program_id(1)
    t = wave - layer
    if (t >= 0) & (t < STEPS):
        rows = tl.arange(0, ROWS)
        fits = rows < BATCH
        units = tile * TILE + tl.arange(0, TILE)
        real = units < H
        both = fits[:, None] & real[None, :]
        before, now = t * BATCH * H, (t + 1) * BATCH * H
        flat = rows[:, None] * H + units[None, :]
        wide = t * BATCH * 4 * H + rows[:, None] * 4 * H + units[None, :]
        if layer == 0:
            i = tl.load(of_x + wide, mask=both, other=0.0)
            f = tl.load(of_x + wide + H, mask=both, other=0.0)
            g = tl.load(of_x + wide + 2 * H, mask=both, other=0.0)
            o = tl.load(of_x + wide + 3 * H, mask=both, other=0.0)
            i, f, g, o = gate_products(
                i, f, g, o, h1 + before, w_hh1, rows, fits, units, real, H, DEEP
            )
            c, h, gates = c1, h1, gates1
        else:
            zero = tl.zeros((ROWS, TILE), dtype=tl.float32)
            i = zero + tl.load(b2 + units, mask=real, other=0.0)[None, :]
            f = zero + tl.load(b2 + H + units, mask=real, other=0.0)[None, :]
            g = zero + tl.load(b2 + 2 * H + units, mask=real, other=0.0)[None, :]
            o = zero + tl.load(b2 + 3 * H + units, mask=real, other=0.0)[None, :]
            i, f, g, o = gate_products(
                i, f, g, o, h1 + now, w_ih2, rows, fits, units, real, H, DEEP
            )
            i, f, g, o = gate_products(
                i, f, g, o, h2 + before, w_hh2, rows, fits, units, real, H, DEEP
            )
            c, h, gates = c2, h2, gates2
        i, f, o = tl.sigmoid(i), tl.sigmoid(f), tl.sigmoid(o)
        g = 2 * tl.sigmoid(2 * g) - 1
        new = f * tl.load(c + before + flat, mask=both, other=0.0) + i * g
        tl.store(c + now + flat, new, mask=both)
        tl.store(h + now + flat, o * (2 * tl.sigmoid(2 * new) - 1), mask=both)
        tl.store(gates + wide, i, mask=both)
        tl.store(gates + wide + H, f, mask=both)
        tl.store(gates + wide + 2 * H, g, mask=both)
        tl.store(gates + wide + 3 * H, o, mask=both)


@triton.jit
def part_product(  # type: ignore[no-untyped-def]
    total,
    d_gates,
    w,
    rows,
    fits,
    units,
    real,
    begin,
    H: tl.constexpr,
    LONG: tl.constexpr,
    DEEP: tl.constexpr,
):
    """d_gates [rows, 4 H] times w [4 H, H] at these units, over LONG gates from `begin`."""
    for start in range(0, LONG, DEEP):
        k = begin + start + tl.arange(0, DEEP)
        inside = (k < 4 * H) & (start + tl.arange(0, DEEP) < LONG)
        at = d_gates + rows[:, None] * 4 * H + k[None, :]
        a = tl.load(at, mask=fits[:, None] & inside[None, :], other=0.0)
        b = tl.load(w + k[:, None] * H + units[None, :], mask=inside[:, None] & real, other=0.0)
        total = tl.dot(a, b, total, input_precision="tf32")
    return total


@triton.jit(do_not_specialize=["wave"])
def backward_products(  # type: ignore[no-untyped-def]
    d_gates1,  # [T + 1, B, 4 H], the last one 0; likewise d_gates2
    d_gates2,
    w_hh1,
    w_ih2,
    w_hh2,
    parts,  # [3, PARTS, B, H]
    wave,
    STEPS: tl.constexpr,
    BATCH: tl.constexpr,
    H: tl.constexpr,
    TILE: tl.constexpr,
    DEEP: tl.constexpr,
    PARTS: tl.constexpr,
    LONG: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Parts of what layer 2 sends back to itself at a step, and of what both layers send to layer 1
    at the step behind it."""
    which, tile, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    t = STEPS - 1 - wave  # layer 2's; layer 1 is at t + 1
    rows = tl.arange(0, ROWS)
    fits = rows < BATCH
    units = tile * TILE + tl.arange(0, TILE)
    real = units < H
    begin = part * LONG
    step = BATCH * 4 * H
    total = tl.zeros((ROWS, TILE), dtype=tl.float32)
    d_gates, w = d_gates2 + (t + 1) * step, w_hh2
    wanted = t >= 0
    if which == 1:
        w = w_ih2
        wanted = wave > 0
    elif which == 2:
        d_gates, w = d_gates1 + (t + 2) * step, w_hh1
        wanted = wave > 0
    if wanted:
        total = part_product(
            total, d_gates, w, rows, fits, units, real[None, :], begin, H, LONG, DEEP
        )
    out = parts + (which * PARTS + part) * BATCH * H + rows[:, None] * H + units[None, :]
    tl.store(out, total, mask=fits[:, None] & real[None, :])


@triton.jit(do_not_specialize=["wave"])
def backward_gates(  # type: ignore[no-untyped-def]
    d_y,  # [T, B, H]
    parts,
    c1,
    c2,
    gates1,
    gates2,
    d_c1,  # [B, H], what is sent back along c; likewise d_c2
    d_c2,
    d_gates1,
    d_gates2,
    wave,
    STEPS: tl.constexpr,
    BATCH: tl.constexpr,
    H: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
):
    """The gates' gradients of layer 2 at a step, of layer 1 at the step behind it."""
    layer = tl.program_id(0)  # 0: layer 2, 1: layer 1
    t = STEPS - 1 - wave + layer
    if (t >= 0) & (t < STEPS):
        at = tl.program_id(1) * TILE + tl.arange(0, TILE)
        fits = at < BATCH * H
        wide = t * BATCH * 4 * H + (at // H) * 4 * H + at % H
        size = BATCH * H
        if layer == 0:
            d_h = tl.load(d_y + t * size + at, mask=fits, other=0.0)
            for part in range(PARTS):
                d_h += tl.load(parts + part * size + at, mask=fits, other=0.0)
            c, gates, d_c, d_gates = c2, gates2, d_c2, d_gates2
        else:
            d_h = tl.zeros((TILE,), dtype=tl.float32)
            for part in range(2 * PARTS):
                d_h += tl.load(parts + (PARTS + part) * size + at, mask=fits, other=0.0)
            c, gates, d_c, d_gates = c1, gates1, d_c1, d_gates1
        i = tl.load(gates + wide, mask=fits, other=0.0)
        f = tl.load(gates + wide + H, mask=fits, other=0.0)
        g = tl.load(gates + wide + 2 * H, mask=fits, other=0.0)
        o = tl.load(gates + wide + 3 * H, mask=fits, other=0.0)
        before = tl.load(c + t * size + at, mask=fits, other=0.0)
        squashed = 2 * tl.sigmoid(2 * tl.load(c + (t + 1) * size + at, mask=fits, other=0.0)) - 1
        back = tl.load(d_c + at, mask=fits, other=0.0)
        back += d_h * o * (1 - squashed * squashed)
        tl.store(d_c + at, back * f, mask=fits)
        tl.store(d_gates + wide, back * g * i * (1 - i), mask=fits)
        tl.store(d_gates + wide + H, back * before * f * (1 - f), mask=fits)
        tl.store(d_gates + wide + 2 * H, back * i * (1 - g * g), mask=fits)
        tl.store(d_gates + wide + 3 * H, d_h * squashed * o * (1 - o), mask=fits)


@dataclass
class Shape:
    """How the work is cut."""

    deep: int = 64
    warps: int = 4
    stages: int = 4
    back_tile: int = 64
    back_parts: int = 8


class Waves:
    """Two layers, both passes, on a text of T steps and B streams that starts from zeros."""

    def __init__(self, rnn: nn.LSTM, shape: Shape) -> None:
        self.weights = {n: p.detach() for n, p in rnn.named_parameters()}
        self.units, self.shape = rnn.hidden_size, shape
        w = self.weights
        like, size = w["weight_hh_l0"], (B, self.units)
        self.h1, self.c1, self.h2, self.c2 = (like.new_zeros(1 + T, *size) for _ in range(4))
        wide = (B, 4 * self.units)
        self.gates1, self.gates2 = (like.new_zeros(T, *wide) for _ in range(2))
        self.d_gates1, self.d_gates2 = (like.new_zeros(T + 1, *wide) for _ in range(2))
        self.d_c1, self.d_c2 = (like.new_zeros(size) for _ in range(2))
        self.parts = like.new_zeros(3, shape.back_parts, *size)

    def forward(self, x: Tensor) -> Tensor:
        w, units, shape = self.weights, self.units, self.shape
        bias = w["bias_ih_l0"] + w["bias_hh_l0"]
        of_x = torch.addmm(bias, x.flatten(0, 1), w["weight_ih_l0"].t())
        b2 = w["bias_ih_l1"] + w["bias_hh_l1"]
        given = (of_x, w["weight_hh_l0"], w["weight_ih_l1"], w["weight_hh_l1"], b2)
        kept = (self.h1, self.c1, self.h2, self.c2, self.gates1, self.gates2)
        how: dict[str, Any] = {"num_warps": shape.warps, "num_stages": shape.stages}
        for wave in range(T + 1):
            forward_step[(2, triton.cdiv(units, UNITS))](
                *given, *kept, wave, T, B, units, UNITS, shape.deep, ROWS, **how
            )
        return self.h2[1:]

    def backward(self, x: Tensor, d_y: Tensor) -> list[Tensor]:
        """The gradients of x and of the weights, in the order of nn.LSTM's parameters."""
        w, units, shape = self.weights, self.units, self.shape
        long = triton.cdiv(4 * units, shape.back_parts)
        self.d_c1.zero_()
        self.d_c2.zero_()
        gates = (self.d_gates1, self.d_gates2)
        given = (w["weight_hh_l0"], w["weight_ih_l1"], w["weight_hh_l1"])
        kept = (self.c1, self.c2, self.gates1, self.gates2, self.d_c1, self.d_c2, *gates)
        tiles, flat = triton.cdiv(units, shape.back_tile), 256
        sizes = (T, B, units, shape.back_tile, shape.deep, shape.back_parts, long, ROWS)
        how: dict[str, Any] = {"num_warps": shape.warps, "num_stages": shape.stages}
        for wave in range(T + 1):
            backward_products[(3, tiles, shape.back_parts)](
                *gates, *given, self.parts, wave, *sizes, **how
            )
            backward_gates[(2, triton.cdiv(B * units, flat))](
                d_y, self.parts, *kept, wave, T, B, units, flat, shape.back_parts
            )
        one, two = (g[:T].flatten(0, 1) for g in gates)
        before1, after1, before2 = (
            h.flatten(0, 1) for h in (self.h1[:T], self.h1[1:], self.h2[:T])
        )
        found = []
        for d_gates, below, own in ((one, x.flatten(0, 1), before1), (two, after1, before2)):
            bias = d_gates.sum(0)
            found += [d_gates.t() @ below, d_gates.t() @ own, bias, bias]
        return [(one @ w["weight_ih_l0"]).view_as(x), *found]


def apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm().detach() / other.norm().detach())


def compare(units: int, device: str, shape: Shape) -> float:
    """How far all of it is from nn.LSTM in double."""
    torch.manual_seed(1)
    rnn = nn.LSTM(units, units, 2).to(device)
    x = torch.randn(T, B, units, device=device)
    d_y = torch.randn(T, B, units, device=device)
    waves = Waves(rnn, shape)
    y = waves.forward(x).clone()
    found = waves.backward(x, d_y)
    truth, exact = rnn.double(), x.double().requires_grad_()
    expected = truth(exact)[0]
    gradients = torch.autograd.grad(expected, [exact, *truth.parameters()], d_y.double())
    return max(
        apart(a.double(), b) for a, b in zip([y, *found], [expected, *gradients], strict=True)
    )


def main() -> None:
    given = [int(word) for word in sys.argv[1:] if word.isdigit()]
    if "--check" in sys.argv:
        far = compare(given[0] if given else 40, "cpu", Shape(32, back_tile=16, back_parts=3))
        print(f"relative distance from nn.LSTM in double: {far:.1e}")
        assert far < 1e-5
        return
    from gpu_kernels import ms

    units = given[0] if given else 656
    record: dict[str, Any] = {"hardware": torch.cuda.get_device_name(), "torch": torch.__version__}
    record |= {"units": units, "relative distance": compare(units, "cuda", Shape()), "ms": {}}
    with products_in("tf32"):
        rnn = nn.LSTM(units, units, 2).cuda()
        x, d_y = (torch.randn(T, B, units, device="cuda") for _ in range(2))
        x.requires_grad_()
        leaves = [x, *rnn.parameters()]
        record["ms"]["cuDNN"] = {
            "forward": ms(lambda: rnn(x)),
            "both": ms(lambda: torch.autograd.grad(rnn(x)[0], leaves, d_y)),
        }
        plain = x.detach()
        for deep in (64, 128):
            for warps in (4, 8):
                for tile, parts in ((16, 4), (32, 8), (64, 16)):
                    waves = Waves(rnn, Shape(deep, warps, 3, tile, parts))
                    record["ms"][f"deep {deep}, warps {warps}, back {tile} x {parts}"] = {
                        "forward": ms(lambda w=waves: w.forward(plain)),  # type: ignore[misc]
                        "backward": ms(lambda w=waves: w.backward(plain, d_y)),  # type: ignore[misc]
                    }
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
