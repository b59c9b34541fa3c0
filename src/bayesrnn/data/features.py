"""Pictures as vectors, made by any network: npz or safetensors files."""

import io
import json
import struct
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from bayesrnn.errors import UserError, require
from bayesrnn.files import read_bytes, write_atomic

SUFFIXES = (".npz", ".safetensors")


@dataclass(frozen=True, eq=False)
class Features:
    """The vectors of pictures [N, numbers], float16 or float32, and the pictures' file names."""

    vectors: Tensor
    names: Sequence[str]

    def __post_init__(self) -> None:
        shape = list(self.vectors.shape)
        require(
            (len(shape) == 2, "vectors", f"must be [pictures, numbers], got {shape}"),
            (
                len(self.names) == shape[0],
                "names",
                f"must be one a vector ({shape[0]}), got {len(self.names)}",
            ),
        )

    def rows(self, names: Sequence[str], wanted_by: str) -> list[int]:
        """The rows in which these pictures' vectors are."""
        place = {name: row for row, name in enumerate(self.names)}
        missing = [name for name in names if name not in place]
        if missing:
            raise UserError(
                f"{len(missing)} of {len(names)} pictures of {wanted_by} have no features "
                f"({missing[0]}, say); make features of all of them, or name the other file"
            )
        return [place[name] for name in names]


def read_features(path: Path) -> Features:
    """Read the vectors of pictures from a file.

    It is an npz with the arrays `features` and `filenames`, or a safetensors file with the tensor
    `features` and, in its metadata, `filenames` as a JSON list.
    """
    _check_suffix(path)
    data = read_bytes(path)
    try:
        vectors, names = (_from_npz if path.suffix == ".npz" else _from_safetensors)(data)
    except KeyError as error:
        raise UserError(
            f"{path} has no {error.args[0]!r}; it must hold `features` and `filenames`"
        ) from error
    except (
        ValueError,
        TypeError,
        OSError,
        EOFError,
        NotImplementedError,  # of zip files: a damaged head asks for more than there is
        zipfile.BadZipFile,
        SafetensorError,
        struct.error,
    ) as error:
        raise UserError(f"{path} is damaged or not {path.suffix[1:]} ({error})") from error
    if vectors.dim() != 2 or len(vectors) != len(names):
        raise UserError(
            f"{path} has features of shape {list(vectors.shape)} for {len(names)} filenames; "
            "expected one row of numbers a picture"
        )
    if vectors.numel() == 0:
        raise UserError(f"{path} holds no features: they are of shape {list(vectors.shape)}")
    if not vectors.is_floating_point() or not bool(vectors.isfinite().all()):
        raise UserError(f"{path} has features that are no finite floating-point numbers")
    if len(set(names)) != len(names):
        raise UserError(f"{path} has a picture twice; every file name must be there once")
    return Features(vectors if vectors.dtype == torch.float16 else vectors.float(), names)


def write_features(path: Path, features: Features) -> None:
    """Write the file that `read_features` reads, of the kind that its name ends in."""
    _check_suffix(path)
    if path.suffix == ".npz":
        file = io.BytesIO()
        np.savez(file, features=features.vectors.numpy(), filenames=np.array(features.names))
        write_atomic(path, file.getvalue())
        return
    metadata = {"filenames": json.dumps(list(features.names))}
    write_atomic(path, save_tensors({"features": features.vectors}, metadata))


def _check_suffix(path: Path) -> None:
    if path.suffix not in SUFFIXES:
        raise UserError(f"{path} must end in {' or '.join(SUFFIXES)} to hold features")


def _from_npz(data: bytes) -> tuple[Tensor, list[str]]:
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        for name in ("features", "filenames"):
            if name not in arrays:
                raise KeyError(name)  # numpy's own says more, and less clearly
        return torch.from_numpy(arrays["features"]), [str(name) for name in arrays["filenames"]]


def _from_safetensors(data: bytes) -> tuple[Tensor, list[str]]:
    vectors = load_tensors(data)["features"]
    (length,) = struct.unpack("<Q", data[:8])  # safetensors: its JSON head, with the metadata
    names = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["filenames"])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError("its filenames are no list of names")
    return vectors, names
