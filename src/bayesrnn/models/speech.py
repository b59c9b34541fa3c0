"""Spectrograms to phones: networks whose outputs are read by connectionist temporal classification.

Both networks take x [T, B, bands], where the frames behind an utterance's end are NaN. They give
log probabilities [T', B, labels], the blank first, and the length of each utterance in T' steps.
What they give for an utterance does not depend on those beside it. The hierarchical one never asks
the host for a length, so that a GPU can replay it, and takes utterances without any frame.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from bayesrnn.engine import compiled
from bayesrnn.errors import require
from bayesrnn.models.linear import Linear

Window = tuple[int, int]
"""Steps of time and frequency bands that are read as one."""


@dataclass(frozen=True)
class SpeechSettings:
    """The shape of a network for speech; a recipe's `[model]` table for speech.

    - `network`: "blstm", a bidirectional LSTM, or "mdlstm", the hierarchy of two-dimensional LSTMs
      of Graves & Schmidhuber 2008.
    - `hidden`, `layers`, `stack` of "blstm": cells per direction, layers, and frames read at a
      time.
    - `cells`, `units`, `windows` of "mdlstm": cells of each level and direction, units of the tanh
      layers between levels, and the windows (time, frequency) in which each level reads the one
      below.
    - `init`: the standard deviation of the weights, which start normal.
    """

    network: Literal["blstm", "mdlstm"] = "blstm"
    hidden: int = 64
    layers: int = 1
    stack: int = 3
    cells: tuple[int, ...] = (2, 10, 50)
    units: tuple[int, ...] = (6, 20)
    windows: tuple[Window, ...] = ((2, 4), (2, 4), (1, 4))
    init: float = 0.1

    def __post_init__(self) -> None:
        levels = len(self.cells)
        require(
            (
                self.network in ("blstm", "mdlstm"),
                "network",
                f'must be "blstm" or "mdlstm", got {self.network!r}',
            ),
            (self.hidden >= 1, "hidden", f"must be at least 1, got {self.hidden}"),
            (self.layers >= 1, "layers", f"must be at least 1, got {self.layers}"),
            (self.stack >= 1, "stack", f"must be at least 1, got {self.stack}"),
            (
                levels >= 1 and min(self.cells) >= 1,
                "cells",
                f"must be one number above 0 a level, got {list(self.cells)}",
            ),
            (
                len(self.units) == levels - 1 and min(self.units, default=1) >= 1,
                "units",
                f"must be one number above 0 between levels, so {levels - 1}, got "
                f"{list(self.units)}",
            ),
            (
                len(self.windows) == levels and min(map(min, self.windows), default=0) >= 1,
                "windows",
                f"must be one [time, frequency] a level, so {levels}, got {list(self.windows)}",
            ),
            (0 < self.init < math.inf, "init", f"must be a number above 0, got {self.init}"),
        )

    @property
    def frames_a_step(self) -> int:
        """How many frames of input make one step of output."""
        if self.network == "blstm":
            return self.stack
        return math.prod(time for time, _ in self.windows)


def build_speech_network(bands: int, labels: int, settings: SpeechSettings) -> nn.Module:
    """The network for speech that `settings` describe.

    `bands` is the number of bands of its input; `labels` counts the blank too.
    """
    network = BidirectionalNetwork if settings.network == "blstm" else HierarchicalNetwork
    return network(bands, labels, settings)


@torch.no_grad()
def _start(module: nn.Module, init: float) -> None:
    """All weights normal, as published; the second bias of nn's LSTMs is 0 and frozen."""
    for name, parameter in module.named_parameters():
        if "bias_hh" in name:
            parameter.zero_().requires_grad_(False)
        else:
            parameter.normal_(0.0, init)


def read_padded(x: Tensor) -> tuple[Tensor, Tensor]:
    """x with its padding at 0, and the frames of each utterance [B]."""
    return x.nan_to_num(nan=0.0), (~x[..., 0].isnan()).sum(dim=0)


class BidirectionalNetwork(nn.Module):
    """A bidirectional LSTM over stacked frames, the practical default.

    >>> network = BidirectionalNetwork(5, 4, SpeechSettings(hidden=6, stack=2))
    >>> log_p, lengths = network(torch.zeros(7, 1, 5))
    >>> log_p.shape, lengths
    (torch.Size([4, 1, 4]), tensor([4]))
    """

    def __init__(self, bands: int, labels: int, settings: SpeechSettings) -> None:
        super().__init__()
        self.stack = settings.stack
        self.rnn = nn.LSTM(
            bands * settings.stack, settings.hidden, settings.layers, bidirectional=True
        )
        self.decoder = Linear(2 * settings.hidden, labels)
        _start(self, settings.init)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x, frames = read_padded(x)
        lengths = -(-frames.cpu() // self.stack)  # packing wants them on the host
        x = F.pad(x, (0, 0, 0, 0, 0, -len(x) % self.stack))
        x = x.unflatten(0, (-1, self.stack)).transpose(1, 2).flatten(2)  # [T', B, stack * bands]
        packed = pack_padded_sequence(x, lengths, enforce_sorted=False)
        hidden, _ = pad_packed_sequence(self.rnn(packed)[0], total_length=len(x))
        return self.decoder(hidden).float().log_softmax(dim=-1), lengths


class HierarchicalNetwork(nn.Module):
    """Levels of two-dimensional LSTMs (Graves & Schmidhuber 2008), as in Graves 2011, Section 8.

    The spectrogram is cut into windows of 2 x 4 (time x frequency), whose 8 numbers are what the
    first LSTMs read. Their outputs are gathered in windows of 2 x 4, and those of the second in
    1 x 4, for layers of 6 and 20 tanh units without bias. What the last LSTMs say of one step of
    time is summed over the frequencies.

    With one band of input and 40 labels this has 139,536 weights, as published:

        level    LSTMs, 4 directions                                 tanh units
        1        4 x [2 x 5 x (8 + 1 + 2 x 2) + 2 x 4]    =     552  6 x 4 x 2 x 8 = 384
        2        4 x [10 x 5 x (6 + 1 + 2 x 10) + 10 x 4] =   5,560  20 x 4 x 10 x 4 = 3,200
        3        4 x [50 x 5 x (20 + 1 + 2 x 50) + 50 x 4] = 121,800
        output   40 x (4 x 50 + 1)                        =   8,040

    and 4 x (2 + 10 + 50) x 5 + 6 + 20 + 40 = 1,306 units: cell, input gate, two forget gates and
    output gate of each block, tanh units, outputs.
    """

    def __init__(self, bands: int, labels: int, settings: SpeechSettings) -> None:
        super().__init__()
        self.windows = settings.windows
        inputs = [settings.windows[0][0] * settings.windows[0][1], *settings.units]
        self.lstms = nn.ModuleList(
            GridLSTM(n, cells) for n, cells in zip(inputs, settings.cells, strict=True)
        )
        self.between = nn.ModuleList(
            Linear(len(DIRECTIONS) * cells * time * frequency, units, bias=False)
            for cells, (time, frequency), units in zip(
                settings.cells, settings.windows[1:], settings.units, strict=False
            )
        )
        self.decoder = Linear(len(DIRECTIONS) * settings.cells[-1], labels)
        _start(self, settings.init)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x, widths = read_padded(x)
        x = x.permute(1, 2, 0).unsqueeze(-1)  # [B, frequency, time, 1]
        for level, (lstm, window) in enumerate(zip(self.lstms, self.windows, strict=True)):
            x, widths = gather_windows(x, widths, window)
            if level > 0:
                x = self.between[level - 1](x).tanh()
            x = lstm(x, widths)
        summed = x.sum(dim=1).transpose(0, 1)  # [time, B, 4 * cells]
        return self.decoder(summed).float().log_softmax(dim=-1), widths


def gather_windows(x: Tensor, widths: Tensor, window: Window) -> tuple[Tensor, Tensor]:
    """x [B, H, W, C] in windows [B, H', W', C * their size], and the widths in windows.

    What is behind an utterance's end, and what fills the last window, is 0.
    """
    time, frequency = window
    inside = torch.arange(x.shape[2], device=x.device) < widths[:, None]
    x = x * inside[:, None, :, None]
    x = F.pad(x, (0, 0, 0, -x.shape[2] % time, 0, -x.shape[1] % frequency))
    x = x.unflatten(2, (-1, time)).unflatten(1, (-1, frequency))  # [B, H', f, W', t, C]
    return x.transpose(2, 3).flatten(3), -(-widths // time)


DIRECTIONS = ((False, False), (True, False), (False, True), (True, True))
"""Whether time, and whether frequency, is read backwards."""


STATE_BOUND = 10.0
"""Where tanh has long saturated. With two forget gates a state can grow at every step, in float32
beyond all bounds (Leifert et al. 2016), and gradients with it."""


class GridLSTM(nn.Module):
    """LSTMs over two dimensions, in all four directions: [B, H, W, inputs] to [B, H, W, 4 * cells].

    Each cell reads its input, and the outputs h and states c of the cell one step of time (1) and
    one band (2) before it:

        i = sigmoid(z_i + p_i (c1 + c2))    f1 = sigmoid(z_1 + p_1 c1)    f2 = sigmoid(z_2 + p_2 c2)
        c = i tanh(z_c) + f1 c1 + f2 c2     o = sigmoid(z_o + p_o c)      h = o tanh(c)

    with z = W_x x + W_h [h1, h2] + b, and c kept within +-10. As in Graves' own program, and as his
    count of weights tells, the input gate has one peephole for both states.

    All cells on one diagonal are computed at once, for all directions: H + W - 1 steps in all.
    """

    def __init__(self, inputs: int, cells: int) -> None:
        super().__init__()
        self.cells = cells
        d = len(DIRECTIONS)
        self.weight_ih = nn.Parameter(torch.zeros(d, inputs, 5 * cells))  # i, f1, f2, o, c
        self.weight_hh = nn.Parameter(torch.zeros(d, 2 * cells, 5 * cells))
        self.bias = nn.Parameter(torch.zeros(d, 5 * cells))
        self.peephole = nn.Parameter(torch.zeros(d, 4 * cells))  # i, f1, f2, o

    def forward(self, x: Tensor, widths: Tensor) -> Tensor:
        B, H, W, _ = x.shape
        places = backwards(widths, W)
        read = torch.stack([_turn(x, places, *way) for way in DIRECTIONS])  # [4, B, H, W, inputs]
        z = torch.baddbmm(self.bias[:, None], read.flatten(1, 3), self.weight_ih)
        z = _skew(z.view(4, B, H, W, -1))  # [K, 4, B, H, 5 * cells]
        h = _unskew(self._scan(z), W)
        ways = zip(h, DIRECTIONS, strict=True)
        return torch.cat([_turn(each, places, *way) for each, way in ways], dim=-1)

    def _scan(self, z: Tensor) -> Tensor:
        """The outputs of all diagonals [K, 4, B, H, cells].

        On a diagonal, row i's neighbour in time is row i of the diagonal before, its neighbour in
        frequency row i - 1 of that. Cells before an utterance's start have z, h and c of 0, and so
        give 0.
        """
        _, d, B, H, _ = z.shape
        h = c = z.new_zeros(d, B, H, self.cells)
        # A diagonal is small and there are hundreds: on a GPU each of its kernels costs a launch.
        step = compiled(_diagonal) if z.is_cuda and torch.is_grad_enabled() else _diagonal
        outputs = []
        for each in z.contiguous():
            h, c = step(each, h, c, self.weight_hh, self.peephole)
            outputs.append(h)
        return torch.stack(outputs)


def _diagonal(
    z: Tensor, h1: Tensor, c1: Tensor, weight_hh: Tensor, peephole: Tensor
) -> tuple[Tensor, Tensor]:
    """Outputs and states [4, B, H, cells] of a diagonal, from those of the one before."""
    d, B, H, n = h1.shape
    p_i, p_1, p_2, p_o = peephole.view(d, 1, 1, 4, n).unbind(dim=3)
    h2, c2 = (F.pad(s[:, :, :-1], (0, 0, 1, 0)) for s in (h1, c1))
    before = torch.cat([h1, h2], dim=-1).view(d, B * H, 2 * n)
    gates = torch.baddbmm(z.reshape(d, B * H, 5 * n), before, weight_hh)
    i, f1, f2, o, g = gates.view(d, B, H, 5 * n).split(n, dim=-1)
    i = torch.sigmoid(i + p_i * (c1 + c2))
    f1, f2 = torch.sigmoid(f1 + p_1 * c1), torch.sigmoid(f2 + p_2 * c2)
    c = (i * g.tanh() + f1 * c1 + f2 * c2).clamp(-STATE_BOUND, STATE_BOUND)
    return torch.sigmoid(o + p_o * c) * c.tanh(), c


def _turn(x: Tensor, places: Tensor, time: bool, frequency: bool) -> Tensor:
    """A batch [B, H, W, C] turned round in time and frequency; each utterance about itself (its
    steps `backwards`), so that its padding stays behind it. Done twice it changes nothing."""
    if frequency:
        x = x.flip(1)
    return x.gather(2, places[:, None, :, None].expand_as(x)) if time else x


def backwards(lengths: Tensor, steps: int) -> Tensor:
    """The place [B, steps] of each step where sequences are read from their ends; padding stays.

    >>> backwards(torch.tensor([3, 0]), 4)
    tensor([[2, 1, 0, 3],
            [0, 1, 2, 3]])
    """
    place = torch.arange(steps, device=lengths.device)
    back = lengths[:, None] - 1 - place
    return torch.where(back >= 0, back, place)


def _skew(x: Tensor) -> Tensor:
    """[..., H, W, C] to diagonals first [H + W - 1, ..., H, C], with 0 where there is nothing."""
    H, W = x.shape[-3:-1]
    x = F.pad(x, (0, 0, 0, H)).flatten(-3, -2)[..., : H * (W + H - 1), :]
    return x.unflatten(-2, (H, W + H - 1)).movedim(-2, 0)


def _unskew(x: Tensor, width: int) -> Tensor:
    """The inverse of `_skew`."""
    H = x.shape[-2]
    x = x.movedim(0, -2).flatten(-3, -2)  # [..., H * (W + H - 1), C]
    return F.pad(x, (0, 0, 0, H)).unflatten(-2, (H, width + H))[..., :width, :]
