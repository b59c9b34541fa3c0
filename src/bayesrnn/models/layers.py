"""What recurrent networks share: their layers, how these start, and the state they carry."""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from bayesrnn.errors import Check
from bayesrnn.models.dropout import DropoutSettings, MaskedEmbedding, MaskedRNN

Cell = Literal["lstm", "gru", "rnn"]
State = Tensor | tuple[Tensor, ...]
"""What a network carries from cut to cut: one tensor or several, each with the batch at dim 1, and
all 0 where a text or series begins."""

CELLS: dict[str, type[nn.RNNBase]] = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}


def check_layers(cell: str, init: float, **sizes: int) -> list[Check]:
    """What the settings of such a network must be, for `require`."""
    return [
        (cell in CELLS, "cell", f"must be one of {', '.join(CELLS)}, got {cell!r}"),
        *((size >= 1, key, f"must be at least 1, got {size}") for key, size in sizes.items()),
        (0 < init < math.inf, "init", f"must be a number above 0, got {init}"),
    ]


def check_noise(scale: float) -> Check:
    """What it must be where a network's noise starts, likewise."""
    return 0 < scale <= 100, "noise", f"must be a number above 0, 100 at most, got {scale}"


# --- layers ---------------------------------------------------------------------------------------


def build_words(words: int, size: int, dropout: DropoutSettings) -> nn.Embedding:
    """An embedding, with masks where words are dropped."""
    return MaskedEmbedding(words, size, dropout) if dropout.word > 0 else nn.Embedding(words, size)


def build_rnn(
    cell: Cell, inputs: int, hidden: int, layers: int, dropout: DropoutSettings
) -> nn.RNNBase | MaskedRNN:
    """Recurrent layers, with masks where something is dropped."""
    plain = CELLS[cell](inputs, hidden, layers)  # type: ignore[arg-type]
    return MaskedRNN(plain, dropout) if dropout.on_layers else plain


@torch.no_grad()
def start_weights(module: nn.Module, init: float) -> None:
    """Weights uniform in +-init and biases at 0; the second bias of recurrent layers is frozen."""
    for name, parameter in module.named_parameters():
        if "bias" in name:
            parameter.zero_()
            parameter.requires_grad_("bias_hh" not in name)
        else:
            parameter.uniform_(-init, init)


@torch.no_grad()
def open_forget_gates(rnn: nn.RNNBase | MaskedRNN) -> None:
    """The biases of an LSTM's forget gates at 1: it remembers from the start. Other cells have no
    such gates, and stay."""
    if rnn.mode == "LSTM":
        for name, bias in rnn.named_parameters():
            if name.startswith("bias_ih"):
                bias[rnn.hidden_size : 2 * rnn.hidden_size].fill_(1.0)


# --- the state ------------------------------------------------------------------------------------


def detach(state: State) -> State:
    """Cut the state off from its history: truncated backpropagation starts here.

    >>> detach(torch.ones(1, requires_grad=True) * 2).requires_grad
    False
    """
    return tuple(s.detach() for s in state) if isinstance(state, tuple) else state.detach()


def as_tensors(state: State | None) -> tuple[Tensor, ...]:
    """A state as a flat tuple, of no tensors where there is none."""
    if state is None:
        return ()
    return state if isinstance(state, tuple) else (state,)


def as_state(tensors: Sequence[Tensor]) -> State | None:
    """The inverse of `as_tensors`."""
    if len(tensors) > 1:
        return tuple(tensors)
    return tensors[0] if tensors else None
