"""A recurrent language model: embedding, recurrent layers, softmax. A plain module."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from bayesrnn.errors import Invalid, require
from bayesrnn.models.dropout import DropoutSettings, MaskedEmbedding, MaskedRNN
from bayesrnn.models.linear import Linear

Cell = Literal["lstm", "gru", "rnn"]
State = Tensor | tuple[Tensor, ...]
"""What a network carries from cut to cut: one tensor or several, each with the batch at dim 1, and
all 0 where a text or series begins."""

CELLS: dict[str, type[nn.RNNBase]] = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}


@dataclass(frozen=True)
class LanguageSettings:
    """The shape of a `LanguageModel`; a recipe's `[model]` table."""

    cell: Cell = "lstm"
    embedding: int = 650
    hidden: int = 650
    layers: int = 2
    tied: bool = False
    init: float = 0.05

    def __post_init__(self) -> None:
        require(
            (self.cell in CELLS, "cell", f"must be one of {', '.join(CELLS)}, got {self.cell!r}"),
            (self.embedding >= 1, "embedding", f"must be at least 1, got {self.embedding}"),
            (self.hidden >= 1, "hidden", f"must be at least 1, got {self.hidden}"),
            (self.layers >= 1, "layers", f"must be at least 1, got {self.layers}"),
            (0 < self.init < math.inf, "init", f"must be a number above 0, got {self.init}"),
            (
                not self.tied or self.embedding == self.hidden,
                "tied",
                f"needs embedding = hidden, got {self.embedding} and {self.hidden}",
            ),
        )


class LanguageModel(nn.Module):
    """Token ids [T, B] (time first) to logits [T, B, vocabulary], with carried state.

    Weights start uniform in +-init and biases at 0. nn's recurrent layers add two bias vectors;
    the second is kept at 0 and frozen: made Bayesian it would double the bias's noise and KL.
    With `dropout` the weights, their names and their start are the same.

    >>> model = LanguageModel(vocabulary=11, embedding=4, hidden=5, layers=1)
    >>> logits, state = model(torch.zeros(7, 2, dtype=torch.int64))
    >>> logits.shape
    torch.Size([7, 2, 11])
    """

    def __init__(
        self,
        vocabulary: int,
        embedding: int = 650,
        hidden: int = 650,
        layers: int = 2,
        cell: Cell = "lstm",
        tied: bool = False,
        init: float = 0.05,
        dropout: DropoutSettings | None = None,
    ) -> None:
        super().__init__()
        dropout = DropoutSettings() if dropout is None else dropout
        problems: list[tuple[str, str]] = []
        if vocabulary < 1:
            problems.append(("vocabulary", f"must be at least 1, got {vocabulary}"))
        for check in (
            lambda: LanguageSettings(cell, embedding, hidden, layers, tied, init),
            lambda: dropout.check_cell(cell),
        ):
            try:
                check()
            except Invalid as error:
                problems += error.problems
        if problems:
            raise Invalid(problems)
        self.embedding, self.rnn = build_layers(
            vocabulary, embedding, hidden, layers, cell, dropout
        )
        self.decoder: nn.Linear = Linear(hidden, vocabulary)
        if tied:
            self.decoder.weight = self.embedding.weight
        start_weights(self, init)

    @classmethod
    def from_settings(
        cls, vocabulary: int, settings: LanguageSettings, dropout: DropoutSettings | None = None
    ) -> "LanguageModel":
        return cls(vocabulary, **asdict(settings), dropout=dropout)

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        hidden, state = self.rnn(self.embedding(x), state)
        return self.decoder(hidden), state


def build_layers(
    vocabulary: int,
    embedding: int,
    hidden: int,
    layers: int,
    cell: Cell,
    dropout: DropoutSettings,
) -> tuple[nn.Embedding, nn.RNNBase | MaskedRNN]:
    """An embedding and recurrent layers, with masks where something is dropped."""
    words = (
        MaskedEmbedding(vocabulary, embedding, dropout)
        if dropout.word > 0
        else nn.Embedding(vocabulary, embedding)
    )
    plain = CELLS[cell](embedding, hidden, layers)  # type: ignore[arg-type]
    return words, MaskedRNN(plain, dropout) if dropout.on_layers else plain


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
def open_forget_gates(rnn: nn.Module, layers: int, hidden: int) -> None:
    """The biases of an LSTM's forget gates at 1: it remembers from the start."""
    for layer in range(layers):
        getattr(rnn, f"bias_ih_l{layer}")[hidden : 2 * hidden].fill_(1.0)


def detach(state: State) -> State:
    """The state with its history cut off: truncated backpropagation starts here.

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
