"""The `[train]` table of a recipe."""

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from bayesrnn.errors import Check, require
from bayesrnn.train.natural import NaturalGradient

Option = bool | int | float | tuple[float, ...]

OURS = ("params", "model", "sequences", "lr", "capturable", "differentiable")
"""Arguments of an optimiser that no option sets: given here, or of no use in a training."""


def optimizers() -> list[str]:
    """The names that can be used here: those in torch.optim that need no closure, and our own.

    >>> {"SGD", "Adam", "AdamW", "NaturalGradient"} <= set(optimizers())
    True
    """
    return sorted(
        [NaturalGradient.__name__]
        + [
            name
            for name, value in vars(torch.optim).items()
            if inspect.isclass(value)
            and issubclass(value, torch.optim.Optimizer)
            and value is not torch.optim.Optimizer
            and name not in ("LBFGS", "SparseAdam", "Muon")
        ]
    )


def optimizer_class(name: str) -> Any:
    """One of `optimizers`, which differ in what they are built from."""
    return NaturalGradient if name == NaturalGradient.__name__ else getattr(torch.optim, name)


@dataclass(frozen=True)
class TrainSettings:
    """How a model is trained; a recipe's `[train]` table.

    The length of the training, and its batches:

    - `epochs`, `max_steps`: how long to train (`max_steps` 0: no limit on steps).
    - `streams`, `unroll`: a step reads `unroll` tokens (or rows of a series) of each of `streams`
      streams, with the state carried on. Of other data it reads `streams` examples, in an order of
      its own in every epoch.
    - `drop_last`: leave out the last, shorter cut of an epoch.
    - `draws`: weight draws per step, which are averaged.

    The optimiser:

    - `optimizer`, `options`: a class of `torch.optim` or "NaturalGradient", and its further
      arguments.
    - `lr`, `decay`, `decay_after`: the rate is `lr` for `decay_after` epochs, and is then
      multiplied by `decay` every epoch.
    - `clip`: a bound on the norm of all gradients together (0: off).
    - `warm_up`: the first epochs, over which the KL's weight rises from 0 to what it should be.
    - `average_after`: after so many epochs (0: never) all that is learnt is averaged, at every
      tenth step; the average is what is validated and saved as the model.
    - `look_after`: posteriors that look at the data (sharpening) do so only after so many epochs.

    Validation, and which model is kept:

    - `valid_streams`: how many streams a validation text is read as after each epoch (1: exact,
      contiguous).
    - `keep`: which epoch's model a run ends with: the "last", or the "best" by the watched figure.
    - `patience`: end the training after so many epochs without progress (0: never). Neither this
      nor `keep` looks at epochs of the warm-up.

    How it runs:

    - `seed`, `device`: the seed of everything random; "auto" (a GPU if there is one), "cpu" or
      "cuda".
    - `precision`: what is computed in: "float32", "tf32" (a GPU's own form of it for products; the
      same as "float32" elsewhere) or "bfloat16". What is learnt stays in float32.
    - `engine`: "auto" replays each step as one graph on a GPU where it can; "eager" runs it kernel
      by kernel.
    - `checkpoint_minutes`: how often to save a checkpoint.
    """

    epochs: int = 20
    max_steps: int = 0
    seed: int = 1
    streams: int = 20
    unroll: int = 35
    drop_last: bool = False
    optimizer: str = "SGD"
    lr: float = 1.0
    options: Mapping[str, Option] = field(default_factory=dict)
    decay: float = 1.0
    decay_after: int = 0
    warm_up: int = 0
    clip: float = 5.0
    average_after: int = 0
    look_after: int = 0
    draws: int = 1
    valid_streams: int = 1
    keep: Literal["last", "best"] = "last"
    patience: int = 0
    device: str = "auto"
    precision: Literal["tf32", "float32", "bfloat16"] = "tf32"
    engine: Literal["auto", "eager"] = "auto"
    checkpoint_minutes: float = 5.0

    def __post_init__(self) -> None:
        def at_least(key: str, smallest: int) -> Check:
            value = getattr(self, key)
            return value >= smallest, key, f"must be at least {smallest}, got {value}"

        def positive(key: str) -> Check:
            value = getattr(self, key)
            return 0 < value < math.inf, key, f"must be a finite number above 0, got {value}"

        def one_of(key: str, *words: str) -> Check:
            value = getattr(self, key)
            return value in words, key, f"must be one of {', '.join(words)}, got {value!r}"

        known = self.optimizer in optimizers()
        allowed = (
            sorted(set(inspect.signature(optimizer_class(self.optimizer)).parameters))
            if known
            else []
        )
        usable = [name for name in allowed if name not in OURS]
        require(
            at_least("epochs", 1),
            at_least("max_steps", 0),
            (0 <= self.seed < 2**63, "seed", f"must be 0 or above, below 2^63, got {self.seed}"),
            at_least("streams", 1),
            at_least("unroll", 1),
            at_least("decay_after", 0),
            (
                0 <= self.warm_up < max(self.epochs, 1),
                "warm_up",
                f"must be 0 (none) or above, and below train.epochs ({self.epochs}), got "
                f"{self.warm_up}",
            ),
            at_least("average_after", 0),
            at_least("look_after", 0),
            at_least("draws", 1),
            at_least("valid_streams", 1),
            at_least("patience", 0),
            one_of("keep", "last", "best"),
            at_least("checkpoint_minutes", 0),
            positive("lr"),
            positive("decay"),
            (0 <= self.clip < math.inf, "clip", f"must be 0 (off) or above, got {self.clip}"),
            (
                known,
                "optimizer",
                f"must be one of {', '.join(optimizers())}, got {self.optimizer!r}",
            ),
            *(
                (
                    key in usable,
                    f"options.{key}",
                    f"is not an option of {self.optimizer}; allowed: {', '.join(usable)}",
                )
                for key in (self.options if known else ())
            ),
            one_of("precision", "tf32", "float32", "bfloat16"),
            one_of("engine", "auto", "eager"),
            (
                self.device in ("auto", "cpu") or self.device.split(":")[0] == "cuda",
                "device",
                f'must be "auto", "cpu" or "cuda", got {self.device!r}',
            ),
        )
