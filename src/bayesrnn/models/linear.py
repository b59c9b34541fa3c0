"""`nn.Linear` and `F.linear`, whose products a CPU computes with the faster of two libraries.

torch computes float32 products on a CPU with MKL, which leaves half of an AMD processor idle.
oneDNN, which torch has as well and uses for recurrent layers, does not (docs/performance.md). The
products are the same to rounding. Which library is used follows from the sizes, never from a
measurement, so that a run repeats itself bit by bit.
"""

from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

from bayesrnn.engine import IS_X86

SMALLEST = 1 << 23
"""Multiplications of a product from which on oneDNN is faster; below, its calls cost more."""
FEWEST_ROWS = 8
"""Rows of x from which on the gradient of the weight is no slower, either."""
HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


class Linear(nn.Linear):
    """`nn.Linear` whose large products a CPU computes with the faster of two libraries."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def is_linear(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether its forward is known: `nn.Linear`'s own, and not that of a class made from it."""
    return type(layer) in (nn.Linear, Linear)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., in] times the transposed weight [out, in], and a bias: `F.linear`.

    >>> x, weight = torch.ones(2, 3), torch.ones(4, 3)
    >>> torch.equal(linear(x, weight), F.linear(x, weight))
    True
    """
    if not _suits_onednn(x, weight, bias):
        return F.linear(x, weight, bias)
    flat: Tensor = _ByOneDNN.apply(x.reshape(-1, x.shape[-1]), weight, bias)
    return flat.view(*x.shape[:-1], len(weight))


def _suits_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether it is a large product of plain float32 tensors on a CPU, and nothing but autograd's
    backward mode watches."""
    given = [x, weight] if bias is None else [x, weight, bias]
    return (
        all(type(t) in (Tensor, nn.Parameter) for t in given)  # first: a tracer has no sizes
        and all(t.device.type == "cpu" and t.dtype == torch.float32 for t in given)
        and all(t.layout == torch.strided for t in given)
        and (bias is None or bias.shape == weight.shape[:1])
        and x.numel() * len(weight) >= SMALLEST
        and x.numel() >= FEWEST_ROWS * x.shape[-1]
        and HAS_ONEDNN
        and IS_X86  # where this was measured; ARM has other libraries
        and bool(torch.backends.mkldnn.enabled)
        and not _watched()
    )


def _watched() -> bool:
    """Whether something follows the operations that does not know oneDNN's."""
    return (
        torch.is_autocast_enabled("cpu")
        or torch.compiler.is_compiling()
        or torch._C._is_tracing()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack() > 0
        or forward_ad._current_level >= 0
    )


class _ByOneDNN(torch.autograd.Function):
    """x [rows, in] times the transposed weight, and a bias; its gradients are such products again,
    so that second derivatives exist."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        of_x, of_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if of_weight else None, weight if of_x else None)
        row = None if bias is None else bias.contiguous()  # oneDNN takes it for that
        found: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, row, "none", [], "")
        return found

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        return (
            None if weight is None else _ByOneDNN.apply(d_y, weight.t(), None),
            None if x is None else _ByOneDNN.apply(d_y.t(), x.t(), None),
            d_y.sum(0) if ctx.needs_input_grad[2] else None,
        )
