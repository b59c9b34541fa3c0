"""A recurrent forecaster of a series: the next row's distribution. A plain module."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bayesrnn.errors import require
from bayesrnn.models.dropout import DropoutSettings
from bayesrnn.models.layers import (
    Cell,
    State,
    as_state,
    as_tensors,
    build_rnn,
    check_layers,
    check_noise,
    open_forget_gates,
    start_weights,
)
from bayesrnn.models.linear import Linear


@dataclass(frozen=True)
class SeriesSettings:
    """The shape of a `Forecaster`; a recipe's `[model]` table for series.

    - `cell`: "lstm", "gru" or "rnn".
    - `hidden`, `layers`: sizes.
    - `init`: weights start uniform in +- this value.
    - `noise`: where the scale of the noise starts, in units of a column's spread.
    - `season`: with N rows, each row is read beside the one N rows before; 0: it is not.
    """

    cell: Cell = "gru"
    hidden: int = 64
    layers: int = 1
    init: float = 0.1
    noise: float = 0.5
    season: int = 0

    def __post_init__(self) -> None:
        require(
            *check_layers(self.cell, self.init, hidden=self.hidden, layers=self.layers),
            check_noise(self.noise),
            (self.season >= 0, "season", f"must be 0 (none) or above, got {self.season}"),
        )


class Forecaster(nn.Module):
    """Rows [T, B, columns] (time first) to the next row's distribution, [T, B, columns, 2].

    For each column of the next row it gives the mean, and s, where softplus(s) is the scale of its
    noise. Its state is carried on.

    What is learnt of the mean is the change from x_t, the row that was read last. With a `season`
    of N, it also has x_t+1-N, the row one season before the one that is predicted. The layers then
    read two differences, and so no level, and the change is from a place between the two rows,
    which a gate chooses:

        read = x_t - x_t-N, x_t+1-N - x_t
        mean = (1 - g) x_t + g x_t+1-N + change,    g = sigmoid(...) of each column

    The last N rows are carried on as the last part of the state, [N, B, columns]. Rows before the
    first are 0: the mean of what is scaled.

    Weights start uniform in +-init and biases at 0, with two exceptions: those of an LSTM's forget
    gates start at 1, and those of s where the noise is `noise`.

    >>> model = Forecaster(columns=3, settings=SeriesSettings(hidden=5, season=24))
    >>> output, (h, rows) = model(torch.zeros(7, 2, 3))
    >>> output.shape, rows.shape
    (torch.Size([7, 2, 3, 2]), torch.Size([24, 2, 3]))
    """

    def __init__(
        self,
        columns: int,
        settings: SeriesSettings | None = None,
        dropout: DropoutSettings | None = None,
    ) -> None:
        super().__init__()
        chosen = settings or SeriesSettings()
        masks = dropout or DropoutSettings()
        masks.check_cell(chosen.cell)
        masks.check_without_words()
        require((columns >= 1, "columns", f"must be at least 1, got {columns}"))
        self.season = chosen.season
        read = 2 * columns if self.season else columns
        self.rnn = build_rnn(chosen.cell, read, chosen.hidden, chosen.layers, masks)
        self.decoder = Linear(chosen.hidden, (3 if self.season else 2) * columns)
        start_weights(self, chosen.init)
        open_forget_gates(self.rnn)
        with torch.no_grad():
            self.decoder.bias[columns : 2 * columns] = math.log(math.expm1(chosen.noise))

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        if self.season:
            return self._with_season(x, state)
        hidden, state = self.rnn(x, state)
        change, s = self.decoder(hidden).chunk(2, dim=-1)
        return torch.stack([x + change, s], dim=-1), state

    def _with_season(self, x: Tensor, state: State | None) -> tuple[Tensor, State]:
        *own, before = as_tensors(state) or (x.new_zeros(self.season, *x.shape[1:]),)
        rows = torch.cat([before, x])
        then, ago = rows[: len(x)], rows[1 : len(x) + 1]  # a season before x, and before what comes
        hidden, after = self.rnn(torch.cat([x - then, ago - x], dim=-1), as_state(own))
        change, s, gate = self.decoder(hidden).chunk(3, dim=-1)
        mean = torch.lerp(x, ago, gate.sigmoid()) + change
        return torch.stack([mean, s], dim=-1), (*as_tensors(after), rows[len(x) :])
