"""Which epoch was the best, and whether there is still progress."""

from collections.abc import Iterable, Mapping
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
