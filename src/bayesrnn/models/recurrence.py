"""One recurrent layer step by step, for masks that act inside its recurrence.

A step is one product with the state, and one function of tensors for all the rest: on a GPU, which
such small steps leave waiting for launches, few kernels. Autograd would take the gradient of the
recurrent weights step by step and add up the parts; here it is one product over all steps.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayesrnn.engine import compiled
from bayesrnn.models.linear import linear

GATES = {"LSTM": 4, "GRU": 3, "RNN_TANH": 1}  # by nn.RNNBase.mode
Memory = tuple[Tensor, ...]
"""What a cell takes along inside: an LSTM its c [B, H], a GRU its h, an RNN nothing."""


class Masks(NamedTuple):
    """Of what the gates hear of h, [B, H] or one a gate [gates, B, H]; and of an LSTM's cells."""

    heard: Tensor | None
    cell: Tensor | None


def step_by_step(
    mode: str,
    read: Tensor,
    state: Sequence[Tensor],
    weight: Tensor,
    bias: Tensor,
    z_h: Tensor | None = None,
    z_c: Tensor | None = None,
) -> list[Tensor]:
    """A layer's outputs [T, B, H] and last state; `mode` as nn.RNNBase has it, gates in its order.

    `read` is what the gates take from the input: [T, B, gates * H], or [gates, T, B, H]. The
    recurrent weights [gates * H, H] hear h * z_h, with a mask [1, B, H], or [gates, B, H] where
    each gate has its own. `z_c` [B, H] is the mask of an LSTM's cells.

    >>> h, weight, bias = torch.zeros(2, 4), torch.zeros(12, 4), torch.zeros(12)
    >>> [part.shape for part in step_by_step("GRU", torch.zeros(7, 2, 12), [h], weight, bias)]
    [torch.Size([7, 2, 4]), torch.Size([2, 4])]
    """
    gates = GATES[mode]
    if z_h is None or len(z_h) == 1:  # one product for all gates
        z_h = None if z_h is None else z_h[0]
        if read.dim() == 4:
            read = read.permute(1, 2, 0, 3).flatten(-2)
    else:  # a batch of products, one a gate
        weight, bias = weight.unflatten(0, (gates, -1)), bias.view(gates, 1, -1)
        if read.dim() == 3:
            read = read.unflatten(-1, (gates, -1)).permute(2, 0, 1, 3)
    masks, h, memory = Masks(z_h, z_c), state[0], tuple(state[:1] if mode == "GRU" else state[1:])
    if torch.compiler.is_compiling():  # then the compiler finds the gradients
        outputs, last = _run(mode, False, masks, read, weight, bias, h, memory)[:2]
    else:
        fuse = read.is_cuda and torch.is_grad_enabled()
        outputs, *last = _Recurrence.apply(mode, fuse, masks, read, weight, bias, h, *memory)
    return [outputs, outputs[-1], *last[: len(state) - 1]]


class Run(NamedTuple):
    """All steps: outputs [T, B, H]; and of each step its product and the memory before it."""

    outputs: Tensor
    last: Memory
    products: list[Tensor]
    memories: list[Memory]


def _run(
    mode: str,
    fuse: bool,
    masks: Masks,
    read: Tensor,
    weight: Tensor,
    bias: Tensor,
    h: Tensor,
    memory: Memory,
) -> Run:
    step = compiled(_step) if fuse else _step
    heard = h if masks.heard is None else h * masks.heard
    outputs, products, memories = [], [], []
    for from_input in read.unbind(-3):
        products.append(_times(heard, weight))
        memories.append(memory)
        h, heard, memory = step(mode, masks, from_input, products[-1], bias, memory)
        outputs.append(h)
    return Run(torch.stack(outputs), memory, products, memories)


def _times(x: Tensor, weight: Tensor) -> Tensor:
    """x times the transposed weight; a batch of products where each gate has its own."""
    return linear(x, weight) if weight.dim() == 2 else x @ weight.mT


def _step(
    mode: str, masks: Masks, from_input: Tensor, product: Tensor, bias: Tensor, memory: Memory
) -> tuple[Tensor, Tensor, Memory]:
    """h, what the gates hear of it, and the memory; from what the gates take from the input and
    from the state before, and the memory before."""
    gates = _gates(mode, from_input, product + bias)
    if mode == "LSTM":
        i, f, g, o = gates
        c = f * memory[0] + i * g
        h = o * c.tanh()
        if masks.cell is not None:
            # Moon et al.: a dropped cell remembers and gives nothing. The others are scaled where
            # they are read; scaled at every step they would grow without bound.
            h, c = h * masks.cell, c * (masks.cell != 0)
        memory = (c,)
    elif mode == "GRU":
        _, u, n, _ = gates
        h = (1 - u) * n + u * memory[0]
        memory = (h,)
    else:
        (h,) = gates
    return h, h if masks.heard is None else h * masks.heard, memory


def _gates(mode: str, from_input: Tensor, from_state: Tensor) -> tuple[Tensor, ...]:
    """i, f, g, o of an LSTM; r, u, n of a GRU and what n takes from the state; h of an RNN."""
    if mode == "LSTM":
        i, f, g, o = _each(mode, from_input + from_state)
        return i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    if mode == "GRU":
        (a_r, a_u, a_n), (s_r, s_u, s_n) = _each(mode, from_input), _each(mode, from_state)
        r, u = (a_r + s_r).sigmoid(), (a_u + s_u).sigmoid()
        return r, u, (a_n + r * s_n).tanh(), s_n
    return ((from_input + from_state).tanh(),)


def _each(mode: str, x: Tensor) -> tuple[Tensor, ...]:
    """[B, H] of each gate, of [B, gates * H] or [gates, B, H]."""
    return x.unbind() if x.dim() == 3 else x.chunk(GATES[mode], dim=-1)


class _Recurrence(torch.autograd.Function):
    """`_run` with its gradients. What those of a step need, its gates, is computed again from the
    step's products, in the same kernel."""

    @staticmethod
    def forward(
        ctx: Any,
        mode: str,
        fuse: bool,
        masks: Masks,
        read: Tensor,
        weight: Tensor,
        bias: Tensor,
        h: Tensor,
        *memory: Tensor,
    ) -> tuple[Tensor, ...]:
        bias, *start = (part.detach() for part in (bias, *memory))  # one kind: compiled once
        run = _run(mode, fuse, masks, read, weight, bias, h, tuple(start))
        ctx.mode, ctx.fuse = mode, fuse
        parts = [part for each in run.memories for part in each]
        ctx.save_for_backward(*masks, read, weight, bias, h, run.outputs, *run.products, *parts)
        return run.outputs, *run.last

    @staticmethod
    def backward(ctx: Any, d_outputs: Tensor, *d_last: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # as create_graph=True has it
            raise RuntimeError("a masked recurrence has no second derivatives")
        z_h, z_c, read, weight, bias, h, outputs, *rest = ctx.saved_tensors
        n = len(outputs)
        products, parts = rest[:n], iter(rest[n:])
        memories = [tuple(next(parts) for _ in d_last) for _ in range(n)]
        back = compiled(_back) if ctx.fuse else _back
        d_memory = tuple(part.contiguous() for part in d_last)
        d_heard = torch.zeros_like(h if z_h is None else z_h)
        d_reads, d_products = [], []
        steps = (read.unbind(-3), products, memories, d_outputs.contiguous().unbind())
        for from_input, product, memory, d_output in reversed(list(zip(*steps, strict=True))):
            d_read, d_product, d_memory = back(
                *(ctx.mode, Masks(z_h, z_c), from_input, product, bias, memory),
                *(d_output, d_heard, d_memory),
            )
            d_heard = _times(d_product, weight.mT)
            d_reads.append(d_read)
            d_products.append(d_product)
        d_product = torch.stack(d_products[::-1], dim=-3)  # [T, B, gates * H] or [gates, T, B, H]
        d_weight = d_bias = None
        if ctx.needs_input_grad[4]:
            heard = torch.cat([h[None], outputs[:-1]])
            heard = heard if z_h is None else heard * z_h.unsqueeze(-3)
            d_weight = _times(d_product.flatten(-3, -2).mT, heard.flatten(-3, -2).mT)
        if ctx.needs_input_grad[5]:
            d_bias = d_product.sum((-3, -2)).view_as(bias)
        d_read = torch.stack(d_reads[::-1], dim=-3) if ctx.mode == "GRU" else d_product
        return None, None, None, d_read, d_weight, d_bias, _unheard(d_heard, z_h), *d_memory


def _back(
    mode: str,
    masks: Masks,
    from_input: Tensor,
    product: Tensor,
    bias: Tensor,
    memory: Memory,
    d_output: Tensor,
    d_heard: Tensor,
    d_memory: Memory,
) -> tuple[Tensor, Tensor, Memory]:
    """The gradients of what a step takes from the input, of its product and of the memory before
    it, from those of what it gives: its output, what the gates hear of that, and its memory."""
    of_sigmoid, of_tanh = torch.ops.aten.sigmoid_backward, torch.ops.aten.tanh_backward
    join = torch.stack if product.dim() == 3 else partial(torch.cat, dim=-1)
    gates = _gates(mode, from_input, product + bias)
    d_h = d_output + _unheard(d_heard, masks.heard)
    if mode == "LSTM":
        (i, f, g, o), (c,), (d_c,) = gates, memory, d_memory
        given = (f * c + i * g).tanh()
        if masks.cell is not None:
            d_h, d_c = d_h * masks.cell, d_c * (masks.cell != 0)
        d_c = d_c + of_tanh(d_h * o, given)
        d_i, d_f, d_g = of_sigmoid(d_c * g, i), of_sigmoid(d_c * c, f), of_tanh(d_c * i, g)
        d_product = join([d_i, d_f, d_g, of_sigmoid(d_h * given, o)])
        return d_product, d_product, (d_c * f,)
    if mode == "GRU":
        r, u, n, s_n = gates
        d_h = d_h + d_memory[0]
        d_n = of_tanh(d_h * (1 - u), n)
        d_r, d_u = of_sigmoid(d_n * s_n, r), of_sigmoid(d_h * (memory[0] - n), u)
        return join([d_r, d_u, d_n]), join([d_r, d_u, d_n * r]), (d_h * u,)
    d_product = of_tanh(d_h, gates[0])
    return d_product, d_product, ()


def _unheard(d_heard: Tensor, z_h: Tensor | None) -> Tensor:
    """The gradient of h, from that of what the gates hear."""
    if z_h is None:
        return d_heard
    return d_heard * z_h if z_h.dim() == 2 else (d_heard * z_h).sum(0)
