"""Many weights in one flat tensor: named, aligned views, and pieces that stay in the cache."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ALIGNMENT = 8
"""Elements: 16 bytes for 2-byte numbers, more for wider ones. Most weights need no padding then."""
PIECE = 1 << 18
"""Elements of a piece on a CPU, whose tensors then stay in its cache. On two cores 2^18 to
2^19 was best; smaller pieces cost more calls, larger ones more memory traffic."""


@dataclass(frozen=True)
class Weight:
    """One weight tensor: its name, its shape, and which axis holds its input units."""

    name: str
    shape: torch.Size
    axis: int | None


@dataclass(frozen=True)
class Piece:
    """Some whole rows of a weight: `shape` is the weight's with fewer rows."""

    weight: Weight
    shape: tuple[int, ...]


class Layout:
    """Where each weight is in a flat tensor. Padding between them is never read.

    >>> layout = Layout([Weight("a", torch.Size([2, 3]), 1), Weight("b", torch.Size([4]), None)])
    >>> layout.split(torch.arange(16.0))["b"]
    tensor([ 8.,  9., 10., 11.])
    """

    def __init__(self, weights: Sequence[Weight]) -> None:
        self.weights = tuple(weights)
        self._sizes = [
            size
            for weight in self.weights
            for size in (weight.shape.numel(), -weight.shape.numel() % ALIGNMENT)
        ]
        self._cuts: dict[int | None, tuple[list[int], list[Piece]]] = {}

    @property
    def count(self) -> int:
        """How many weights, the padding left out."""
        return sum(self._sizes[::2])

    def split(self, flat: Tensor) -> dict[str, Tensor]:
        """Named views of a flat tensor, by one `split` (its backward is a single pass)."""
        pieces = flat.split(self._sizes)[::2]
        return {
            weight.name: piece.view(weight.shape)
            for weight, piece in zip(self.weights, pieces, strict=True)
        }

    def spread(self, numbers: Tensor) -> Tensor:
        """A flat tensor with one of these numbers all over each weight (and its padding)."""
        lengths = map(sum, zip(self._sizes[::2], self._sizes[1::2], strict=True))
        return torch.cat([x.expand(n) for x, n in zip(numbers.unbind(), lengths, strict=True)])

    def sums(self, flat: Tensor) -> Tensor:
        """The sum over each weight."""
        return torch.stack([piece.sum() for piece in self.split(flat).values()])

    def join(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The flat tensor of these named ones; the inverse of `split`, padding zero."""
        pieces: list[Tensor] = []
        for weight, padding in zip(self.weights, self._sizes[1::2], strict=True):
            tensor = tensors[weight.name]
            pieces += [tensor.reshape(-1), tensor.new_zeros(padding)]
        return torch.cat(pieces)

    def pieces(self, limit: int | None) -> list[Piece]:
        """The weights in pieces of at most `limit` elements (or one row); None: one piece each."""
        return self._cut(limit)[1]

    def starts(self, limit: int | None) -> list[int]:
        """The row of its weight that each piece begins with."""
        starts: list[int] = []
        before: Piece | None = None
        for piece in self.pieces(limit):
            same = before is not None and before.weight is piece.weight
            starts.append(starts[-1] + before.shape[0] if same and before is not None else 0)
            before = piece
        return starts

    def cut(self, flat: Tensor, limit: int | None) -> list[Tensor]:
        """The flat tensor in those pieces, each of one dimension."""
        return list(flat.split(self._cut(limit)[0])[::2])

    def cut_each(self, tensors: Sequence[Tensor | None], limit: int | None) -> list[Tensor | None]:
        """One tensor a weight (or none at all, or None) in the same pieces."""
        if not tensors:
            return [None] * len(self.pieces(limit))
        cuts: list[Tensor | None] = []
        for weight, tensor in zip(self.weights, tensors, strict=True):
            mine = [p for p in self.pieces(limit) if p.weight is weight]
            sizes = [math.prod(piece.shape) for piece in mine]
            cuts += [None] * len(mine) if tensor is None else tensor.reshape(-1).split(sizes)
        return cuts

    def pads(self, flat: Tensor) -> list[Tensor]:
        """The padding, as views."""
        return list(flat.split(self._sizes)[1::2])

    def _cut(self, limit: int | None) -> tuple[list[int], list[Piece]]:
        """Sizes for `split` (every second one is padding, mostly empty), and the pieces."""
        if limit not in self._cuts:
            sizes: list[int] = []
            pieces: list[Piece] = []
            for weight, padding in zip(self.weights, self._sizes[1::2], strict=True):
                rows = weight.shape[0] if weight.shape else 1
                row = weight.shape.numel() // rows
                step = rows if limit is None else max(1, limit // row)
                for start in range(0, rows, step):
                    count = min(step, rows - start)
                    sizes += [count * row, 0]
                    pieces.append(Piece(weight, (count, *weight.shape[1:])))
                sizes[-1] = padding
            self._cuts[limit] = sizes, pieces
        return self._cuts[limit]
