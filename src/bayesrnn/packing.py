"""How a drawn weight lies in a model file: whole, sparse where some of it was pruned, or coded.

Sparse: `<name>.keep` has a bit a weight in the order of memory, 1 where it is left (eight to a
byte, the lowest bit first), and `<name>.loc`, `<name>.scale` and so on one number for each that is
left.

Coded: every mean is a multiple of one step. `<name>.levels` is an xz stream of those multiples,
whole numbers in the order of memory, with the lowest byte first. A point of level 0 counts as
pruned. Of a weight that has a scale, `<name>.scale` has the root mean square of each row, and
`<name>.keep` says what was pruned, as above.

config.json has each one's shape, and of a coded one the step and the type of its levels.
"""

import lzma
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayesrnn.errors import UserError, require

EACH = ("loc", "scale", "prior_loc", "prior_scale")
"""What there may be of each weight: of its posterior, and of a prior that is its own."""
LEVELS = {"int8": "<i1", "int16": "<i2", "int32": "<i4"}
"""What levels may be stored as: the first that holds them all."""
MOST_LEVELS = 2**31 - 1
FILTERS = ({"id": lzma.FILTER_LZMA2, "preset": 6, "lc": 0, "lp": 0, "pb": 0},)
"""Levels have no bytes before them to be guessed from, and no alignment."""
MEMORY = 1 << 27
"""What reading a stream may take; these filters need 9 MiB."""


class Misfit(ValueError):
    """A weight whose parts in a file do not fit together."""


def pack(
    named: Mapping[str, Tensor], step: float | None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A weight's tensors (loc, scale, keep and so on) as a file has them, coded where a `step` is
    given; and what config.json says of them."""
    stored, keep = dict(named), named.get("keep")
    if keep is not None:
        stored["keep"] = _bits(keep)
    if step is None:
        if keep is None:
            return stored, {}
        left = {key: named[key][keep] for key in EACH if key in named}
        return stored | left, {"shape": list(keep.shape)}
    loc = stored.pop("loc")
    stored["levels"], kind = _encode(to_levels(loc, step))
    if "scale" in stored:
        stored["scale"] = _by_row(stored["scale"], keep)
    else:
        stored.pop("keep", None)
    return stored, {"shape": list(loc.shape), "step": float(step), "levels": kind}


def stored_shapes(
    tensors: Mapping[str, Tensor], weights: Mapping[str, Any]
) -> dict[str, tuple[int, ...]]:
    """The shapes that a file's tensors will have, unpacked; nothing is unpacked for it."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name, facts in weights.items():
        if "shape" in facts:
            shapes.pop(f"{name}.levels", None)
            shapes[f"{name}.loc"] = tuple(facts["shape"])
    return shapes


def unpack(tensors: Mapping[str, Tensor], weights: Mapping[str, Any]) -> dict[str, Tensor]:
    """All tensors of a file, each weight whole again, with zeros where it was pruned; masks are
    bool then. The shapes that config.json gives are taken as checked."""
    whole = dict(tensors)
    for name, facts in weights.items():
        if "step" in facts:
            parts = _decoded(name, whole, facts)
        elif "shape" in facts:
            parts = _filled_up(name, tensors, facts)
        else:
            continue
        whole |= {f"{name}.{part}": value for part, value in parts.items()}
    return whole


# --- sparse ---------------------------------------------------------------------------------------


def _filled_up(
    name: str, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]
) -> dict[str, Tensor]:
    """A sparse weight with zeros where nothing is left."""
    keep = _mask(name, tensors[f"{name}.keep"], facts["shape"])
    left, parts = int(keep.sum()), {"keep": keep}
    for part in EACH:
        key = f"{name}.{part}"
        if key not in tensors:
            continue
        if tensors[key].shape != (left,):
            raise Misfit(f"{key} has the shape {tuple(tensors[key].shape)}, expected ({left},)")
        nothing = 1.0 if part == "prior_scale" else 0.0  # by which gradients are divided
        parts[part] = tensors[key].new_full(facts["shape"], nothing)
        parts[part][keep] = tensors[key]
    return parts


def _bits(keep: Tensor) -> Tensor:
    """A mask, eight weights to a byte."""
    bits = torch.zeros(-(-keep.numel() // 8) * 8, dtype=torch.uint8, device=keep.device)
    bits[: keep.numel()] = keep.flatten()
    return (bits.view(-1, 8) << _places(keep.device)).sum(dim=1, dtype=torch.uint8)


def _mask(name: str, packed: Tensor, shape: list[int]) -> Tensor:
    """The inverse of `_bits`."""
    count = math.prod(shape)
    if packed.numel() != -(-count // 8):
        raise Misfit(f"{name}.keep has {packed.numel()} bytes for {count} weights")
    bits = (packed.view(-1, 1) >> _places(packed.device)) & 1
    return bits.flatten()[:count].bool().view(shape)


def _places(device: torch.device) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)


# --- coded ----------------------------------------------------------------------------------------


def check_step(step: float) -> None:
    require((0 < step < math.inf, "step", f"must be a finite number above 0, got {step}"))


def to_levels(loc: Tensor, step: float) -> Tensor:
    """The multiple of `step` nearest to each mean.

    >>> to_levels(torch.tensor([0.0, 0.26, -0.9, 0.1]), 0.25)
    tensor([ 0,  1, -4,  0])
    """
    check_step(step)
    levels = (loc.double() / step).round()
    if not (levels.abs() <= MOST_LEVELS).all():  # nor is what is not finite
        largest = float(loc.abs().max())
        raise UserError(
            f"a step of {step:g} is too small for a weight of {largest:g}: choose "
            f"{2 * largest / MOST_LEVELS:.1g} or above"
            if math.isfinite(largest)
            else "a weight that is not finite cannot be rounded: train the model again"
        )
    return levels.long()


def from_levels(levels: Tensor, step: float, dtype: torch.dtype) -> Tensor:
    """The means of these levels.

    >>> from_levels(torch.tensor([0, 1, -4]), 0.25, torch.float32)
    tensor([ 0.0000,  0.2500, -1.0000])
    """
    return (levels.double() * step).to(dtype)


def coded_bytes(levels: Tensor) -> int:
    """How long their stream is."""
    return len(_encode(levels)[0])


def _encode(levels: Tensor) -> tuple[Tensor, str]:
    numbers = levels.cpu().numpy()
    largest = max(int(levels.max()), -int(levels.min())) if levels.numel() else 0
    kind = next(kind for kind in LEVELS if largest <= np.iinfo(kind).max)
    stream = lzma.compress(numbers.astype(LEVELS[kind]).tobytes(), filters=list(FILTERS))
    return torch.frombuffer(bytearray(stream), dtype=torch.uint8), kind


def _decoded(name: str, tensors: dict[str, Tensor], facts: Mapping[str, Any]) -> dict[str, Tensor]:
    """A coded weight; its stream is taken out of `tensors`."""
    check_step(facts["step"])
    shape, key = facts["shape"], f"{name}.levels"
    levels = _decode(key, tensors.pop(key), facts["levels"], math.prod(shape)).view(shape)
    scale = tensors.get(f"{name}.scale")
    parts = {"loc": from_levels(levels, facts["step"], torch.float64)}
    if scale is None:
        return parts | ({} if levels.all() else {"keep": levels != 0})
    if scale.shape != _shape_by_row(shape):
        raise Misfit(f"{name}.scale has the shape {tuple(scale.shape)} for one of {shape}")
    parts["scale"] = scale.expand(shape)
    if f"{name}.keep" in tensors:
        parts["keep"] = _mask(name, tensors[f"{name}.keep"], shape)
        parts["scale"] = parts["scale"].where(parts["keep"], 0.0)
    return parts


def _decode(key: str, stream: Tensor, kind: str, count: int) -> Tensor:
    if kind not in LEVELS:
        raise Misfit(f"{key} is of the type {kind!r}, expected one of {', '.join(LEVELS)}")
    size = count * np.dtype(kind).itemsize
    decoder = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=MEMORY)
    try:
        data = decoder.decompress(stream.numpy().tobytes(), max_length=size + 1)
    except lzma.LZMAError as error:
        raise Misfit(f"{key} is no stream of levels: {error}") from error
    if len(data) != size or not decoder.eof or decoder.unused_data:
        raise Misfit(f"{key} does not hold {count} levels")
    return torch.from_numpy(np.frombuffer(data, LEVELS[kind]).astype(kind))


def _by_row(scale: Tensor, keep: Tensor | None) -> Tensor:
    """The root mean square of each row's scales, of those left; a vector's stay as they are."""
    if scale.dim() < 2:
        return scale
    rows = scale.double().square().flatten(1)  # those of half precision would be 0
    left = torch.ones_like(rows) if keep is None else keep.flatten(1).to(rows)
    mean = (rows * left).sum(dim=1) / left.sum(dim=1).clamp_min(1)
    return mean.sqrt().view(_shape_by_row(scale.shape)).to(scale.dtype)


def _shape_by_row(shape: Sequence[int]) -> tuple[int, ...]:
    return (*shape[:1], *(1 for _ in shape[1:]))
