"""A recurrent language model: embedding, recurrent layers, softmax. A plain module."""

from dataclasses import asdict, dataclass

from torch import Tensor, nn

from bayesrnn.errors import Invalid, require
from bayesrnn.models.dropout import DropoutSettings
from bayesrnn.models.layers import (
    Cell,
    State,
    build_rnn,
    build_words,
    check_layers,
    start_weights,
)
from bayesrnn.models.linear import Linear


@dataclass(frozen=True)
class LanguageSettings:
    """The shape of a `LanguageModel`; a recipe's `[model]` table for text.

    - `cell`: "lstm", "gru" or "rnn".
    - `embedding`, `hidden`, `layers`: sizes.
    - `tied`: the embedding and the softmax share their weights, which needs embedding = hidden.
    - `init`: weights start uniform in +- this value.
    """

    cell: Cell = "lstm"
    embedding: int = 650
    hidden: int = 650
    layers: int = 2
    tied: bool = False
    init: float = 0.05

    def __post_init__(self) -> None:
        require(
            *check_layers(
                self.cell,
                self.init,
                embedding=self.embedding,
                hidden=self.hidden,
                layers=self.layers,
            ),
            (
                not self.tied or self.embedding == self.hidden,
                "tied",
                f"needs embedding = hidden, got {self.embedding} and {self.hidden}",
            ),
        )


class LanguageModel(nn.Module):
    """Token ids [T, B] (time first) to logits [T, B, vocabulary], with a state that is carried on.

    The arguments are those of `LanguageSettings`, with the size of the vocabulary and `dropout`.

    Weights start uniform in +-init and biases at 0. nn's recurrent layers add two bias vectors; the
    second is kept at 0 and frozen, because made Bayesian it would double the bias's noise and KL.
    With `dropout` the weights, their names and their start are the same.

    >>> import torch
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
        self.embedding = build_words(vocabulary, embedding, dropout)
        self.rnn = build_rnn(cell, embedding, hidden, layers, dropout)
        self.decoder: nn.Linear = Linear(hidden, vocabulary)
        if tied:
            self.decoder.weight = self.embedding.weight
        start_weights(self, init)

    @classmethod
    def from_settings(
        cls, vocabulary: int, settings: LanguageSettings, dropout: DropoutSettings | None = None
    ) -> "LanguageModel":
        """The language model that `settings` describe, for so large a vocabulary."""
        return cls(vocabulary, **asdict(settings), dropout=dropout)

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        hidden, state = self.rnn(self.embedding(x), state)
        return self.decoder(hidden), state
