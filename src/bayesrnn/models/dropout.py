"""Dropout for recurrent networks: masks on what a layer reads, remembers and gives. Plain modules.

A mask z is multiplicative noise of mean 1, so W diag(z) is a draw of the weights around W (Gal's
slides of 2015: "randomly set columns of M to zero"). Leaving the masks out gives the mean-field
prediction, without rescaling any weight. The KL to a Normal prior is weight decay ("L2 reg" there):
use a Delta posterior with that prior.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from bayesrnn.errors import require
from bayesrnn.models.linear import linear
from bayesrnn.models.recurrence import GATES, step_by_step

Kind = Literal["variational", "naive"]
Noise = Literal["bernoulli", "gaussian"]
Mode = Literal["auto", "off", "held"]
Held = dict[tuple[int, ...], Tensor]
"""Masks by their shape."""

RATES = ("input", "recurrent", "output", "word", "cell", "connect")


@dataclass(frozen=True)
class DropoutSettings:
    """What is dropped, and how; a recipe's `[dropout]` table.

    The rates, from 0 (nothing is dropped) to below 1:

    - `input`: of what each layer reads.
    - `recurrent`: of the state that each layer reads back.
    - `output`: of what the last layer gives.
    - `word`: of word types, each dropped everywhere in a sequence or nowhere, and only in training.
    - `cell`: of an LSTM's memory (Moon et al.).
    - `connect`: of single recurrent weights (drop-connect, one mask for the whole batch).

    How masks are drawn:

    - `kind`: "variational" (Gal): one mask per sequence and batch row, the same at every time step.
      "naive" (Zaremba): fresh masks at every time step, on `input` and `output` alone.
    - `tied`: gates share their masks; untied, each gate has its own.
    - `shared`: masks are the same for all rows of a batch and are folded into the weights: faster,
      but a noisier estimate.
    - `noise`: "bernoulli", or "gaussian": N(1, rate / (1 - rate)), of the same variance.
    """

    kind: Kind = "variational"
    input: float = 0.0
    recurrent: float = 0.0
    output: float = 0.0
    word: float = 0.0
    cell: float = 0.0
    connect: float = 0.0
    tied: bool = True
    shared: bool = False
    noise: Noise = "bernoulli"

    def __post_init__(self) -> None:
        rates = {key: getattr(self, key) for key in RATES}
        recurrent = {key: rates[key] > 0 for key in ("recurrent", "word", "cell", "connect")}
        beyond_naive = recurrent | {"tied": not self.tied, "shared": self.shared}
        require(
            (
                self.kind in ("variational", "naive"),
                "kind",
                f"must be one of variational, naive, got {self.kind!r}",
            ),
            (
                self.noise in ("bernoulli", "gaussian"),
                "noise",
                f"must be one of bernoulli, gaussian, got {self.noise!r}",
            ),
            *(
                (0 <= rate < 1, key, f"must be 0 or above and below 1, got {rate}")
                for key, rate in rates.items()
            ),
            *(
                (
                    self.kind != "naive" or not used,
                    key,
                    'is not for naive dropout, which has input and output; use kind="variational"',
                )
                for key, used in beyond_naive.items()
            ),
            (
                not (self.cell > 0 and self.shared),
                "cell",
                "cannot be folded into weights; use shared=false",
            ),
            (
                not (self.cell > 0 and self.noise == "gaussian"),
                "cell",
                'drops cells or keeps them; use noise="bernoulli"',
            ),
        )

    @property
    def on_layers(self) -> bool:
        """Whether anything other than words is dropped."""
        return any(getattr(self, key) > 0 for key in RATES if key != "word")

    def check_feed_forward(self) -> None:
        """Refuse what a network without recurrence cannot drop: it has only inputs and outputs."""
        only = DropoutSettings(self.kind, input=self.input, output=self.output, noise=self.noise)
        fits = self == only
        require((fits, "dropout", "of a network for images has input, output and noise only"))

    def check_cell(self, cell: str) -> None:
        """Refuse a rate of memory cells for anything but an LSTM, which alone has them."""
        fits = self.cell == 0 or cell.lower() == "lstm"
        require((fits, "dropout.cell", f"masks the memory of an lstm, which a {cell} has not"))

    def check_without_words(self) -> None:
        """Refuse a rate of words, of which a series has none."""
        require(
            (
                self.word == 0,
                "dropout.word",
                f"drops words, of which a series has none, got {self.word}",
            )
        )


class Mask(nn.Module):
    """Draws one kind of mask: 0 or 1 / (1 - rate), or Gaussian noise of the same variance.

    By itself (`mode` "auto") it draws a fresh mask in every forward of train mode, and none in eval
    mode. Code that averages over draws sets `mode`: "off", or "held" for one mask over several
    forwards, until `renew`. A `per_step` mask is always fresh. One that is not `at_test` stays off
    in eval mode.

    Masks come from torch's own generator of the device (or the one that `renew` was given), by
    operations that can be recorded and replayed.

    >>> Mask(0.5).eval()((2, 3), like=torch.ones(())) is None
    True
    """

    def __init__(
        self,
        rate: float,
        noise: Noise = "bernoulli",
        per_step: bool = False,
        at_test: bool = True,
        by_row: bool = True,
    ) -> None:
        super().__init__()
        require((0 <= rate < 1, "rate", f"must be 0 or above and below 1, got {rate}"))
        self.rate, self.noise, self.per_step, self.at_test = rate, noise, per_step, at_test
        self.by_row = by_row  # the last axis but one is that of the batch
        self.mode: Mode = "auto"
        self.held: Held = {}  # by shape: other rows, other sequences
        self._generator: torch.Generator | None = None

    def extra_repr(self) -> str:
        return f"{self.rate}, {self.noise}"

    def renew(self, generator: torch.Generator | None = None) -> None:
        """Let go of held masks; the next ones come from `generator` (None: torch's own)."""
        self.held = {}
        self._generator = generator

    def of_rows(self, held: Held, rows: Tensor) -> Held:
        """Held masks of these rows of the batch: a sequence that changes its row keeps its mask."""
        if not self.by_row:
            return held
        taken = [mask.index_select(-2, rows) for mask in held.values()]
        return {tuple(mask.shape): mask for mask in taken}

    def forward(self, shape: Sequence[int], like: Tensor) -> Tensor | None:
        """The mask of this forward, of `like`'s type and device; None if nothing is masked."""
        on = self.training or (self.mode == "held" and self.at_test)
        if self.rate == 0 or self.mode == "off" or not on:
            return None
        if self.mode == "auto" or self.per_step:
            return self._draw(shape, like)
        if tuple(shape) not in self.held:
            with torch.inference_mode(False):
                self.held[tuple(shape)] = self._draw(shape, like)
        return self.held[tuple(shape)]

    @torch.no_grad()
    def _draw(self, shape: Sequence[int], like: Tensor) -> Tensor:
        keep = 1 - self.rate
        mask = torch.empty(tuple(shape), dtype=like.dtype, device=like.device)
        if self.noise == "gaussian":
            return mask.normal_(1.0, math.sqrt(self.rate / keep), generator=self._generator)
        return mask.bernoulli_(keep, generator=self._generator).div_(keep)


def masked(x: Tensor, mask: nn.Module) -> Tensor:
    """x times a mask of its shape, where there is one now."""
    z = mask(x.shape, like=x)
    return x if z is None else x * z


class MaskedEmbedding(nn.Embedding):
    """Token ids [T, B] to vectors, with word types dropped: "the dog and the cat" may become
    "- dog and - cat", never "- dog and the cat" (Gal: "word types rather than word tokens").
    """

    def __init__(self, words: int, size: int, dropout: DropoutSettings) -> None:
        super().__init__(words, size)
        self.shared = dropout.shared
        self.types = Mask(dropout.word, dropout.noise, at_test=False)

    def forward(self, x: Tensor) -> Tensor:
        vectors = super().forward(x)
        rows = x.shape[1]
        types = self.types((1 if self.shared else rows, self.num_embeddings), vectors)
        if types is None:
            return vectors
        of_tokens = types.expand(rows, -1).gather(1, x.t())  # [B, T]
        return vectors * of_tokens.t().unsqueeze(-1)


class MaskedRNN(nn.Module):
    """An nn.LSTM, GRU or RNN with dropout; it takes over the plain layer's weights and their names.

    A gate with masks z_x and z_h reads W (x_t * z_x) + U (h_t-1 * z_h) + b: W diag(z_x) and U
    diag(z_h) are one draw of its weights (Gal: "use the same dropout mask at each time step").
    Masks that differ between the rows of a batch and act inside the recurrence need a loop over
    time; all others leave time to the device's own recurrent kernels.

    >>> rnn = MaskedRNN(nn.LSTM(3, 4, num_layers=2), DropoutSettings(input=0.5, recurrent=0.25))
    >>> y, (h, c) = rnn(torch.zeros(7, 2, 3))
    >>> y.shape, h.shape
    (torch.Size([7, 2, 4]), torch.Size([2, 2, 4]))
    """

    def __init__(self, plain: nn.RNNBase, dropout: DropoutSettings) -> None:
        super().__init__()
        odd = plain.bidirectional or plain.proj_size or plain.batch_first or plain.dropout
        if plain.mode not in GATES or odd or not plain.bias:
            raise ValueError(
                "masks need a plain nn.LSTM, nn.GRU or nn.RNN (tanh), time first, with biases and "
                f"without dropout of its own, got {plain}"
            )
        dropout.check_cell(plain.mode)
        for name, parameter in plain.named_parameters():
            self.register_parameter(name, parameter)
        self.mode, self.hidden_size = plain.mode, plain.hidden_size
        self.gates = GATES[plain.mode]
        self.dropout = dropout

        by_row = not dropout.shared

        def masks(rate: float, per_step: bool = False, by_row: bool = by_row) -> nn.ModuleList:
            kind = (rate, dropout.noise, per_step)
            each = (Mask(*kind, by_row=by_row) for _ in range(plain.num_layers))
            return nn.ModuleList(each)

        naive = dropout.kind == "naive"
        self.input = masks(dropout.input, naive)
        self.recurrent = masks(dropout.recurrent)
        self.cell = masks(dropout.cell)
        self.connect = masks(dropout.connect, by_row=False)
        self.output = Mask(dropout.output, dropout.noise, naive, by_row=by_row)

    def forward(
        self, x: Tensor, state: Tensor | tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor | tuple[Tensor, Tensor]]:
        """[T, B, in] to the last layer's outputs [T, B, H] and the state, [layers, B, H] each."""
        steps, rows = x.shape[:2]
        if state is None:
            zeros = x.new_zeros(len(self.input), rows, self.hidden_size)
            state = (zeros, zeros) if self.mode == "LSTM" else zeros
        before = state if isinstance(state, tuple) else (state,)
        after = []
        for layer in range(len(self.input)):
            x, *last = self._layer(layer, x, [part[layer] for part in before])
            after.append(last)
        mask = self.output(self._shape(1, steps, rows, self.hidden_size), x)
        x = x if mask is None else x * mask
        carried = [torch.stack(parts) for parts in zip(*after, strict=True)]
        return x, (carried[0], carried[1]) if len(carried) == 2 else carried[0]

    def _shape(self, gates: int, steps: int, rows: int, units: int) -> tuple[int, int, int]:
        """Of a mask on [T, B, units]: one for each time step, each gate, or once and for all."""
        if self.dropout.kind == "naive":
            return steps, rows, units
        return 1 if self.dropout.tied else gates, 1 if self.dropout.shared else rows, units

    def _layer(self, layer: int, x: Tensor, state: list[Tensor]) -> list[Tensor]:
        """One layer's outputs and last state, with this forward's masks."""
        names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        w_ih, w_hh, b_ih, b_hh = (getattr(self, f"{name}_l{layer}") for name in names)
        steps, rows, units = x.shape
        z_x = self.input[layer](self._shape(self.gates, steps, rows, units), x)
        z_h = self.recurrent[layer](self._shape(self.gates, steps, rows, self.hidden_size), x)
        z_c = self.cell[layer]((rows, self.hidden_size), x)
        z_u = self.connect[layer](w_hh.shape, x)
        if z_u is not None:
            w_hh = w_hh * z_u
        if self.dropout.shared:
            w_ih, z_x = fold(w_ih, z_x), None
            w_hh, z_h = fold(w_hh, z_h), None
        elif z_x is not None and (self.dropout.tied or self.gates == 1):
            x, z_x = x * z_x, None
        if z_x is None and z_h is None and z_c is None:
            return self._kernel(x, state, [w_ih, w_hh, b_ih, b_hh])
        read = self._read(x, z_x, w_ih, b_ih)
        return step_by_step(self.mode, read, state, w_hh, b_hh, z_h, z_c)

    def _kernel(self, x: Tensor, state: list[Tensor], weights: list[Tensor]) -> list[Tensor]:
        """One layer on the device's own kernels."""
        if x.is_cuda:  # cuDNN wants them in one buffer, or copies them there with a warning
            flat = torch.cat([w.flatten() for w in weights])
            parts = flat.split([w.numel() for w in weights])
            weights = [part.view_as(w) for part, w in zip(parts, weights, strict=True)]
        start = [part.unsqueeze(0) for part in state]
        keep = torch.is_grad_enabled()  # cuDNN calls what it keeps for a backward pass training
        options = (weights, True, 1, 0.0, keep, False, False)
        if self.mode == "LSTM":
            y, *last = torch.lstm(x, start, *options)
        else:
            run = torch.gru if self.mode == "GRU" else torch.rnn_tanh
            y, *last = run(x, start[0], *options)
        return [y, *(part.squeeze(0) for part in last)]

    def _read(self, x: Tensor, mask: Tensor | None, weight: Tensor, bias: Tensor) -> Tensor:
        """W x + b of all gates [T, B, gates * H], or W_g (x * z_g) + b_g of each gate g
        [gates, T, B, H], where each has its own mask [gates, B, units]."""
        if mask is None:
            return linear(x, weight, bias)
        # One product a gate over all steps: torch would copy the weights for each step of more.
        masked = (x * mask.unsqueeze(1)).flatten(1, 2)
        weight, bias = (w.unflatten(0, (self.gates, -1)) for w in (weight, bias))
        return torch.baddbmm(bias.unsqueeze(1), masked, weight.mT).unflatten(1, x.shape[:2])


def fold(weight: Tensor, mask: Tensor | None) -> Tensor:
    """W diag(z) of each gate, for a mask [1 or gates, 1, units] that a whole batch shares.

    >>> fold(torch.ones(2, 3), torch.tensor([[[0.0, 1.0, 2.0]]]))
    tensor([[0., 1., 2.],
            [0., 1., 2.]])
    """
    if mask is None:
        return weight
    return (weight.unflatten(0, (len(mask), -1)) * mask).flatten(0, 1)
