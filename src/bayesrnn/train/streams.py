"""A text or series as the streams that a recipe's `[train]` table asks for."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bayesrnn.data import StreamLoader
from bayesrnn.train.settings import TrainSettings


def training_streams(
    ids: NDArray[np.integer[Any]] | NDArray[np.floating[Any]],
    train: TrainSettings,
    device: torch.device,
) -> StreamLoader:
    """What the steps of an epoch read, one after the other."""
    shape = train.streams, train.unroll, train.drop_last
    return StreamLoader(ids, *shape, device, "train", "train.streams")
