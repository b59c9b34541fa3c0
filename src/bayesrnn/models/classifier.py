"""One prediction per example: images by a feed-forward network, reviews by a recurrent one."""

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bayesrnn.errors import require
from bayesrnn.models.dropout import DropoutSettings, Mask, masked
from bayesrnn.models.layers import (
    Cell,
    build_rnn,
    build_words,
    check_layers,
    check_noise,
    open_forget_gates,
    start_weights,
)
from bayesrnn.models.linear import Linear


@dataclass(frozen=True)
class MlpSettings:
    """The shape of an `Mlp`; a recipe's `[model]` table for images.

    An example has `inputs` numbers; each of `layers` hidden layers has `hidden` units.
    """

    inputs: int = 784
    hidden: int = 800
    layers: int = 2
    classes: int = 10

    def __post_init__(self) -> None:
        require(
            (self.inputs >= 1, "inputs", f"must be at least 1, got {self.inputs}"),
            (self.hidden >= 1, "hidden", f"must be at least 1, got {self.hidden}"),
            (self.layers >= 1, "layers", f"must be at least 1, got {self.layers}"),
            (self.classes >= 2, "classes", f"must be at least 2, got {self.classes}"),
        )


class Mlp(nn.Module):
    """Rows of numbers [B, inputs] to logits [B, classes], through rectified hidden layers.

    Weights start as those of `nn.Linear`, biases at 0. Of `dropout` it uses the rates of inputs and
    outputs, which here are the pixels and the hidden units.

    >>> Mlp(MlpSettings(inputs=6, hidden=5, classes=3))(torch.zeros(2, 6)).shape
    torch.Size([2, 3])
    """

    def __init__(self, settings: MlpSettings, dropout: DropoutSettings | None = None) -> None:
        super().__init__()
        chosen = dropout or DropoutSettings()
        chosen.check_feed_forward()
        self.pixels = Mask(chosen.input, chosen.noise)
        self.units = nn.ModuleList(
            Mask(chosen.output, chosen.noise) for _ in range(settings.layers)
        )
        sizes = [settings.inputs, *[settings.hidden] * settings.layers]
        self.hidden = nn.ModuleList(Linear(a, b) for a, b in itertools.pairwise(sizes))
        self.decoder = Linear(settings.hidden, settings.classes)
        for layer in (*self.hidden, self.decoder):
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = masked(x, self.pixels)
        for layer, mask in zip(self.hidden, self.units, strict=True):
            x = masked(layer(x).relu(), mask)
        return self.decoder(x)


@dataclass(frozen=True)
class ReviewSettings:
    """The shape of a `ReviewModel`; a recipe's `[model]` table for reviews.

    - `cell`: "lstm", "gru" or "rnn".
    - `embedding`, `hidden`, `layers`: sizes.
    - `init`: weights start uniform in +- this value.
    - `noise`: where the learnt scale of a rating's noise starts (without classes).
    """

    cell: Cell = "lstm"
    embedding: int = 128
    hidden: int = 128
    layers: int = 1
    init: float = 0.1
    noise: float = 0.2

    def __post_init__(self) -> None:
        require(
            *check_layers(
                self.cell,
                self.init,
                embedding=self.embedding,
                hidden=self.hidden,
                layers=self.layers,
            ),
            check_noise(self.noise),
        )


class ReviewModel(nn.Module):
    """Reviews as word ids [B, T] to logits [B, classes]; or, without classes, to ratings [B, 2].

    A rating is its mean, and s, where softplus(s) is the scale of its noise; s is learnt and the
    same for all reviews. A review's state is read off at its last word; negative ids after it are
    padding, and change nothing.

    Weights start uniform in +-init and biases at 0, with two exceptions: those of an LSTM's forget
    gates start at 1, so that it remembers a whole review from the start, and the mean's at 0.5,
    mid-scale.

    >>> model = ReviewModel(vocabulary=9, settings=ReviewSettings("gru", embedding=4, hidden=5))
    >>> model(torch.tensor([[1, 2, 3], [4, -1, -1]])).shape
    torch.Size([2, 2])
    """

    def __init__(
        self,
        vocabulary: int,
        settings: ReviewSettings | None = None,
        classes: int = 0,
        dropout: DropoutSettings | None = None,
    ) -> None:
        super().__init__()
        chosen = settings or ReviewSettings()
        masks = dropout or DropoutSettings()
        masks.check_cell(chosen.cell)
        require(
            (vocabulary >= 1, "vocabulary", f"must be at least 1, got {vocabulary}"),
            (classes == 0 or classes >= 2, "classes", f"must be 0 or at least 2, got {classes}"),
        )
        self.embedding = build_words(vocabulary, chosen.embedding, masks)
        self.rnn = build_rnn(chosen.cell, chosen.embedding, chosen.hidden, chosen.layers, masks)
        self.decoder = Linear(chosen.hidden, classes or 1)
        start_weights(self, chosen.init)
        open_forget_gates(self.rnn)
        if not classes:
            nn.init.constant_(self.decoder.bias, 0.5)
            self.noise = nn.Parameter(torch.tensor([math.log(math.expm1(chosen.noise))]))
        self.classes = classes

    def forward(self, x: Tensor) -> Tensor:
        last = (x >= 0).sum(dim=1) - 1
        states, _ = self.rnn(self.embedding(x.clamp_min(0).T))  # [T, B, hidden]
        output = self.decoder(states[last, torch.arange(len(x), device=x.device)])
        if self.classes:
            return output
        return torch.cat([output, self.noise.expand_as(output)], dim=1)
