"""What a report is to be of."""

from dataclasses import dataclass, field
from pathlib import Path

import torch

from bayesrnn.errors import require


@dataclass(frozen=True)
class Choices:
    """What a user may choose. `tokens` is how much of a text, or of people's captions, is read (0:
    all of it), `samples` are numbers of draws (0: the mean), `text` is the file to shade instead of
    the run's own, and `pictures` the folder of the pictures that captions are of. `season` is that
    of a series, in rows (None: what fits the rows to train on)."""

    samples: tuple[int, ...] = (0, 1, 2, 5, 10)
    split: str = "test"
    tokens: int = 5000
    text: Path | None = None
    pictures: Path | None = None
    data: str = ""
    seed: int = 1
    season: int | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __post_init__(self) -> None:
        require(
            (
                len(self.samples) > 0 and min(self.samples) >= 0,
                "samples",
                f"must be numbers of draws, 0 or above, got {list(self.samples)}",
            ),
            (self.season is None or self.season >= 1, "season", "must be at least 1"),
            (self.tokens >= 0, "tokens", f"must be 0 (all) or above, got {self.tokens}"),
        )
