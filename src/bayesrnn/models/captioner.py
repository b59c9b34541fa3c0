"""Captions of pictures: a picture's vector starts a recurrent network, which says one word after
another (Vinyals et al. 2015, Show and Tell). A plain module."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayesrnn.errors import require
from bayesrnn.models.dropout import DropoutSettings, Mask, masked
from bayesrnn.models.layers import (
    Cell,
    State,
    as_state,
    build_rnn,
    build_words,
    check_layers,
    open_forget_gates,
    start_weights,
)
from bayesrnn.models.linear import Linear

Picture = Literal["state", "word"]


@dataclass(frozen=True)
class CaptionerSettings:
    """The shape of a `Captioner`; a recipe's `[model]` table for captions.

    - `cell`: "lstm", "gru" or "rnn".
    - `numbers`: how many numbers a picture's vector has.
    - `picture`: "state": a picture is the state that the network starts from (Fortunato 2017,
      Section 6.2); "word": it is the first word that is read (Show and Tell).
    - `norm`: the length that a picture's vector is brought to (0: left as it is).
    - `embedding`, `hidden`, `layers`: sizes.
    - `init`: weights start uniform in +- this value.
    """

    cell: Cell = "lstm"
    numbers: int = 2048
    picture: Picture = "state"
    norm: float = 1.0
    embedding: int = 512
    hidden: int = 512
    layers: int = 1
    init: float = 0.08

    def __post_init__(self) -> None:
        require(
            *check_layers(
                self.cell,
                self.init,
                numbers=self.numbers,
                embedding=self.embedding,
                hidden=self.hidden,
                layers=self.layers,
            ),
            (
                self.picture in ("state", "word"),
                "picture",
                f"must be one of state, word, got {self.picture!r}",
            ),
            (0 <= self.norm < math.inf, "norm", f"must be 0 (as it is) or above, got {self.norm}"),
        )


class Captioner(nn.Module):
    """Word ids [T, B] (time first) and pictures [B, numbers] to logits [T, B, vocabulary].

    Give the pictures with the first words of captions, and the state with those that follow.
    Weights start uniform in +-init, biases at 0, except those of an LSTM's forget gates, which
    start at 1.

    >>> model = Captioner(11, CaptionerSettings(numbers=6, embedding=4, hidden=5))
    >>> logits, state = model(torch.zeros(3, 2, dtype=torch.int64), pictures=torch.rand(2, 6))
    >>> logits, state = model(torch.zeros(1, 2, dtype=torch.int64), state)
    >>> logits.shape
    torch.Size([1, 2, 11])
    """

    def __init__(
        self,
        vocabulary: int,
        settings: CaptionerSettings | None = None,
        dropout: DropoutSettings | None = None,
    ) -> None:
        super().__init__()
        chosen, masks = settings or CaptionerSettings(), dropout or DropoutSettings()
        masks.check_cell(chosen.cell)
        require((vocabulary >= 1, "vocabulary", f"must be at least 1, got {vocabulary}"))
        self.settings = chosen
        self.embedding = build_words(vocabulary, chosen.embedding, masks)
        self.rnn = build_rnn(chosen.cell, chosen.embedding, chosen.hidden, chosen.layers, masks)
        parts = 2 if chosen.cell == "lstm" else 1  # what a state consists of
        of_state = parts * chosen.layers * chosen.hidden
        as_word = chosen.picture == "word"
        self.picture = Linear(chosen.numbers, chosen.embedding if as_word else of_state)
        self.numbers = Mask(masks.input, masks.noise)
        self.decoder = Linear(chosen.hidden, vocabulary)
        start_weights(self, chosen.init)
        open_forget_gates(self.rnn)

    def forward(
        self, words: Tensor, state: State | None = None, pictures: Tensor | None = None
    ) -> tuple[Tensor, State]:
        vectors = self.embedding(words)
        if pictures is not None:
            seen = self._see(pictures, vectors.dtype)
            if self.settings.picture == "word":
                _, state = self.rnn(seen.unsqueeze(0), state)
            else:
                state = self._start(seen)
        hidden, state = self.rnn(vectors, state)
        return self.decoder(hidden), state

    def _see(self, pictures: Tensor, dtype: torch.dtype) -> Tensor:
        pictures = pictures.to(torch.promote_types(pictures.dtype, torch.float32))
        if self.settings.norm:
            pictures = self.settings.norm * F.normalize(pictures, dim=-1)
        return self.picture(masked(pictures.to(dtype), self.numbers))

    def _start(self, seen: Tensor) -> State | None:
        """[B, parts * layers * hidden] as a state; what layers give is between -1 and 1."""
        hidden = self.settings.hidden
        parts = seen.view(len(seen), -1, self.settings.layers, hidden).permute(1, 2, 0, 3)
        h, *memory = (part.contiguous() for part in parts.unbind())
        return as_state([h.tanh(), *memory])
