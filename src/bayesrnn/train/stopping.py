"""Which epoch was the best, and whether there is still progress."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Progress:
    """The lowest of each figure so far, the epoch in which the watched one was lowest, and the last
    one in which any of them became lower (0: none yet).

    >>> progress = Progress()
    >>> for epoch, (nll, errors) in enumerate([(2.0, 9), (1.5, 9), (1.7, 8), (1.6, 8)], start=1):
    ...     line = {"epoch": epoch, "nll": nll, "errors": errors}
    ...     _ = progress.note(line, "nll", ("errors",))
    >>> progress.best_epoch, progress.last_gain
    (2, 3)
    """

    lowest: dict[str, float] = field(default_factory=dict)
    best_epoch: int = 0
    last_gain: int = 0

    def note(self, line: Mapping[str, Any], watched: str, others: Iterable[str]) -> bool:
        """Look at an epoch's figures; whether the watched one was never lower. Figures that are
        undefined (None) do not count."""
        lower = [
            name
            for name in dict.fromkeys((watched, *others))
            if line[name] is not None and line[name] < self.lowest.get(name, float("inf"))
        ]
        self.lowest |= {name: line[name] for name in lower}
        if lower:
            self.last_gain = line["epoch"]
        if watched in lower:
            self.best_epoch = line["epoch"]
        return watched in lower

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)


def best_line(
    epochs: Sequence[dict[str, Any]], watched: str, warm_up: int
) -> dict[str, Any] | None:
    """The figures of the epoch in which the watched one was lowest, as a training takes it: epochs
    of the warm-up and figures that are undefined do not count. None where none is left.

    >>> lines = [{"epoch": 1, "nll": 1.0}, {"epoch": 2, "nll": 3.0}, {"epoch": 3, "nll": 2.0}]
    >>> best_line(lines, "nll", warm_up=1)
    {'epoch': 3, 'nll': 2.0}
    """
    later = [line for line in epochs if line["epoch"] > warm_up and line[watched] is not None]
    finite = [line for line in later if math.isfinite(line[watched])]
    return min(finite, key=lambda line: line[watched], default=None)


def line_of(epochs: Sequence[dict[str, Any]], epoch: int | None) -> dict[str, Any]:
    """The figures of one epoch; empty where its line was lost."""
    return next((line for line in epochs if line["epoch"] == epoch), {})
