"""Where drawn weights lie in memory, so that the hardware likes them.

cuDNN wants all weights of a recurrent layer in one buffer, in its own order, or copies them there
in every call; and tensor cores want rows of whole 32 bytes: an LSTM of 650 units takes a third
longer than one of 656. Since a draw is written to memory anyhow, it can be written there at no
cost: each weight into the corner of a zero-filled frame. Units that are all zeros stay zero and
change nothing.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from bayesrnn.bayes.layout import Weight
from bayesrnn.models.linear import is_linear

ROW_BYTES = 32
GATES: dict[type, int] = {nn.LSTM: 4, nn.GRU: 3, nn.RNN: 1}


@dataclass(frozen=True)
class Frame:
    """A tensor that holds a weight in the corner of each of its gates' parts.

    >>> frame = Frame("w", (6, 4), gates=2)
    >>> frame.corner(torch.zeros(6, 4), torch.Size([4, 3])).shape
    torch.Size([2, 2, 3])
    """

    name: str
    outer: tuple[int, ...]
    gates: int = 1

    def split(self, shape: torch.Size) -> tuple[int, ...]:
        """The weight's shape, with its gates apart."""
        return (self.gates, shape[0] // self.gates, *shape[1:])

    def corner(self, outer: Tensor, shape: torch.Size) -> Tensor:
        """The weight's own part of its frame: a view of the shape that `split` says."""
        parts = outer.view(self.gates, self.outer[0] // self.gates, *self.outer[1:])
        for axis, size in enumerate(self.split(shape)):
            parts = parts.narrow(axis, 0, size)
        return parts


class Placement:
    """All frames of one layer, side by side in one buffer, and how the layer runs with them.

    `frozen` are weights that are not drawn but have a place in the buffer. `serve` makes a forward
    of the layer from its filled frames; None: the frames are the weights, and can just be bound.
    """

    def __init__(
        self,
        owner: nn.Module,
        frames: Sequence[Frame],
        frozen: Mapping[str, nn.Parameter],
        serve: Callable[[Mapping[str, Tensor]], Callable[..., Any]] | None,
    ) -> None:
        self.owner = owner
        self.frames = {frame.name: frame for frame in frames}
        self.frozen = dict(frozen)
        self.serve = serve
        self._buffer: Tensor | None = None

    def outers(self, like: Tensor, dtype: torch.dtype, reuse: bool = False) -> dict[str, Tensor]:
        """Frames, filled with zeros and what is frozen; `reuse` the last ones where nothing needs
        those any more (what is around the weights is zero still)."""
        sizes = [math.prod(frame.outer) for frame in self.frames.values()]
        buffer = self._buffer if reuse else None
        if buffer is None or buffer.device != like.device or buffer.dtype != dtype:
            buffer = torch.zeros(sum(sizes), dtype=dtype, device=like.device)
        if reuse:
            self._buffer = buffer
        outers = {
            frame.name: part.view(frame.outer)
            for frame, part in zip(self.frames.values(), buffer.split(sizes), strict=True)
        }
        for name, tensor in self.frozen.items():
            self.corner(outers[name], name, tensor.shape).copy_(
                tensor.detach().view(self.frames[name].split(tensor.shape))
            )
        return outers

    def corner(self, outer: Tensor, name: str, shape: torch.Size) -> Tensor:
        return self.frames[name].corner(outer, shape)


def place(
    owner: nn.Module,
    path: str,
    weights: Sequence[Weight],
    dtype: torch.dtype,
    aligned: bool,
) -> Placement | None:
    """The best place for a layer's drawn weights, all of them in `weights`; None: as they are.

    Only `aligned` frames are larger than their weights, and only for layers whose forward is known.
    """
    aligned = aligned and "forward" not in vars(owner)  # one of its own is not known
    multiple = ROW_BYTES // dtype.itemsize if aligned else 1
    shapes = {weight.name: weight.shape for weight in weights}
    if type(owner) in GATES and isinstance(owner, nn.RNNBase):
        return _place_recurrent(owner, path, shapes, multiple)
    weight = f"{path}.weight" if path else "weight"
    if aligned and is_linear(owner) and weight in shapes:
        return _place_linear(owner, weight, shapes, multiple)
    return None


def _place_recurrent(
    owner: nn.RNNBase, path: str, shapes: Mapping[str, torch.Size], multiple: int
) -> Placement | None:
    names = {f"{path}.{name}" if path else name: name for name in owner._flat_weights_names}
    frozen = {name: owner._parameters[local] for name, local in names.items() if name not in shapes}
    kept = {name: p for name, p in frozen.items() if p is not None and not p.requires_grad}
    if owner.proj_size or kept.keys() != frozen.keys():
        return None  # a weight that learns but is not drawn is a parameter with its own place
    gates = GATES[type(owner)]
    if owner.bidirectional:
        multiple = 1  # the halves of what one layer gives the next would be apart
    inside, hidden = _up(owner.input_size, multiple), _up(owner.hidden_size, multiple)
    pads = (inside, hidden) != (owner.input_size, owner.hidden_size)

    def frame(name: str) -> Frame:
        shape = shapes[name] if name in shapes else kept[name].shape
        columns = [] if len(shape) == 1 else [shape[1]]
        if columns and pads:
            columns = [inside if names[name] == "weight_ih_l0" else hidden]
        return Frame(name, (gates * hidden, *columns), gates)

    matrices_first = sorted(names, key=lambda name: names[name].startswith("bias"))

    def serve(outers: Mapping[str, Tensor]) -> Callable[..., Any]:
        def forward(x: Tensor | PackedSequence, hx: Any = None) -> Any:
            before = owner.input_size, owner.hidden_size, owner._flat_weights
            owner.input_size, owner.hidden_size = inside, hidden
            owner._flat_weights = [outers[name] for name in names]
            try:
                padded = _pad(x, before[0], inside), _pad(hx, before[1], hidden)
                y, state = type(owner).forward(owner, *padded)
            finally:
                owner.input_size, owner.hidden_size, owner._flat_weights = before
            return _cut(y, owner.hidden_size), _cut(state, owner.hidden_size)

        return forward

    return Placement(owner, [frame(n) for n in matrices_first], kept, serve if pads else None)


def _place_linear(
    owner: nn.Linear, weight: str, shapes: Mapping[str, torch.Size], multiple: int
) -> Placement | None:
    wide = _up(owner.in_features, multiple)
    if wide == owner.in_features:
        return None

    def serve(outers: Mapping[str, Tensor]) -> Callable[..., Any]:
        bias = next((outers[name] for name in outers if name != weight), None)

        def forward(x: Tensor) -> Tensor:
            b = owner.bias if bias is None else bias
            return F.linear(_pad(x, owner.in_features, wide), outers[weight], b)

        return forward

    frames = [
        Frame(name, (shape[0], wide) if name == weight else tuple(shape))
        for name, shape in shapes.items()
    ]
    return Placement(owner, frames, {}, serve)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _pad(x: Any, own: int, size: int) -> Any:
    """Zeros behind the last axis, of `own` size, of a tensor, of each of a state's, or of a packed
    sequence."""
    if x is None:
        return None
    if isinstance(x, PackedSequence):
        return x._replace(data=_pad(x.data, own, size))
    if isinstance(x, tuple):
        return tuple(_pad(part, own, size) for part in x)
    if x.shape[-1] != own:
        raise RuntimeError(f"expected a last axis of {own}, got the shape {tuple(x.shape)}")
    return x if own == size else F.pad(x, (0, size - own))


def _cut(x: Any, size: int) -> Any:
    """The inverse of `_pad`."""
    if isinstance(x, PackedSequence):
        return x._replace(data=_cut(x.data, size))
    if isinstance(x, tuple):
        return tuple(_cut(part, size) for part in x)
    return x[..., :size]
