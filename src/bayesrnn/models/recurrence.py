"""One recurrent layer step by step, for masks that act inside its recurrence.

A step is one product with the state, and one function of tensors for all the rest: on a GPU, which
such small steps leave waiting for launches, one kernel. Autograd would take the gradient of the
recurrent weights step by step and add up the parts; here it is one product over all steps.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bayesrnn.engine import compiled

GATES = {"LSTM": 4, "GRU": 3, "RNN_TANH": 1}  # by nn.RNNBase.mode
State = tuple[Tensor, ...]
"""h [B, H], and the memory c [B, H] of an LSTM."""


class Masks(NamedTuple):
    """Of what the gates hear of the state, [B, H] or for each gate [gates, B, H]; of the cells."""

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
    if z_h is None or len(z_h) == 1:
        z_h = z_h if z_h is None else z_h[0]
        if read.dim() == 4:
            read = read.permute(1, 2, 0, 3).flatten(-2)
    else:
        weight, bias = weight.unflatten(0, (gates, -1)), bias.view(gates, 1, -1)
        if read.dim() == 3:
            read = read.unflatten(-1, (gates, -1)).permute(2, 0, 1, 3)
    masks = Masks(z_h, z_c)
    if torch.compiler.is_compiling():  # then the compiler finds the gradients
        return list(_run(mode, False, masks, read, weight, bias, tuple(state))[0])
    fuse = read.is_cuda and torch.is_grad_enabled()
    return list(_Recurrence.apply(mode, fuse, masks, read, weight, bias, *state))


def _run(
    mode: str, fuse: bool, masks: Masks, read: Tensor, weight: Tensor, bias: Tensor, state: State
) -> tuple[tuple[Tensor, ...], list[Tensor], list[State]]:
    """Outputs and last state; the products of all steps, and the states before them."""
    step = compiled(_step) if fuse else _step
    heard = state[0] if masks.heard is None else state[0] * masks.heard
    products, states = [], [state]
    for from_input in read.unbind(-3):
        products.append(heard @ weight.mT)
        state, heard = step(mode, masks, from_input, products[-1], bias, state)
        states.append(state)
    outputs = torch.stack([each[0] for each in states[1:]])
    return (outputs, *state), products, states[:-1]


def _step(
    mode: str, masks: Masks, from_input: Tensor, product: Tensor, bias: Tensor, state: State
) -> tuple[State, Tensor]:
    """The next state, and what the gates hear of it."""
    state = _cell(mode, masks.cell, from_input, product, bias, state)
    return state, state[0] if masks.heard is None else state[0] * masks.heard


def _cell(
    mode: str,
    z_c: Tensor | None,
    from_input: Tensor,
    product: Tensor,
    bias: Tensor,
    state: State,
) -> State:
    """The next state, from what the gates take from the input and from the state."""
    s = product + bias
    if mode == "LSTM":
        i, f, g, o = _each(mode, from_input + s)
        c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        # Moon et al.: a dropped cell remembers and gives nothing. The others are scaled where they
        # are read; scaled at every step they would grow without bound.
        return (h, c) if z_c is None else (h * z_c, c * (z_c != 0))
    if mode == "GRU":
        (a_r, a_u, a_n), (s_r, s_u, s_n) = _each(mode, from_input), _each(mode, s)
        r, u = (a_r + s_r).sigmoid(), (a_u + s_u).sigmoid()
        n = (a_n + r * s_n).tanh()
        return ((1 - u) * n + u * state[0],)
    return ((from_input + s).tanh(),)


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
        *state: Tensor,
    ) -> tuple[Tensor, ...]:
        given, products, states = _run(mode, fuse, masks, read, weight, bias, state)
        ctx.mode, ctx.fuse, ctx.steps = mode, fuse, len(products)
        parts = (part for each in states for part in each)
        ctx.save_for_backward(*masks, read, weight, bias, *products, *parts)
        return given

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_outputs: Tensor, *d_last: Tensor) -> tuple[Tensor | None, ...]:
        z_h, z_c, read, weight, bias, *rest = ctx.saved_tensors
        masks, products, parts = Masks(z_h, z_c), rest[: ctx.steps], rest[ctx.steps :]
        states = [tuple(parts[k : k + len(d_last)]) for k in range(0, len(parts), len(d_last))]
        back = compiled(_back) if ctx.fuse else _back
        d_state = tuple(part.contiguous() for part in d_last)
        d_heard = torch.zeros_like(states[0][0] if z_h is None else z_h)
        d_reads, d_products = [], []
        steps = zip(read.unbind(-3), products, states, d_outputs.contiguous().unbind(), strict=True)
        for from_input, product, before, d_output in reversed(list(steps)):
            d_read, d_product, d_state = back(
                ctx.mode, masks, from_input, product, bias, before, d_output, d_state, d_heard
            )
            d_heard = d_product @ weight
            d_reads.append(d_read)
            d_products.append(d_product)
        d_state = (d_state[0] + _unheard(d_heard, z_h), *d_state[1:])
        d_product = torch.stack(d_products[::-1], dim=-3)  # [T, B, gates * H] or [gates, T, B, H]
        d_weight = d_bias = None
        if ctx.needs_input_grad[4]:
            h = torch.stack([each[0] for each in states])
            heard = h if z_h is None else h * z_h.unsqueeze(-3)
            d_weight = d_product.flatten(-3, -2).mT @ heard.flatten(-3, -2)
        if ctx.needs_input_grad[5]:
            d_bias = d_product.sum((-3, -2)).view_as(bias)
        d_read = torch.stack(d_reads[::-1], dim=-3)
        return None, None, None, d_read, d_weight, d_bias, *d_state


def _back(
    mode: str,
    masks: Masks,
    from_input: Tensor,
    product: Tensor,
    bias: Tensor,
    state: State,
    d_output: Tensor,
    d_state: State,
    d_heard: Tensor,
) -> tuple[Tensor, Tensor, State]:
    """The gradients of what a step reads, of its product and of the state before it, where
    `d_output`, `d_state` and `d_heard` are those of the state after it, by who reads it."""

    def cell(a: Tensor, s: Tensor, *before: Tensor) -> State:
        return _cell(mode, masks.cell, a, s, bias, before)

    d_h = d_state[0] + d_output + _unheard(d_heard, masks.heard)
    _, pull = torch.func.vjp(cell, from_input, product, *state)
    d_read, d_product, *d_before = pull((d_h, *d_state[1:]))
    return d_read, d_product, tuple(d_before)


def _unheard(d_heard: Tensor, z_h: Tensor | None) -> Tensor:
    """The gradient of h, from that of what the gates hear."""
    if z_h is None:
        return d_heard
    return d_heard * z_h if z_h.dim() == 2 else (d_heard * z_h).sum(0)
