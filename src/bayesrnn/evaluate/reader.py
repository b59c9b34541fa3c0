"""Draws that read side by side: each with its own weights and its own carried state.

Of each draw a seed, the state and the dropout masks are kept; its weights' noise is drawn again
from the seed in every cut. That costs one pass over the weights a cut, where keeping it would cost
as much memory as all drawn networks.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import repeat

import torch
from torch import Tensor

from bayesrnn.bayes import Bayesian, Network
from bayesrnn.evaluate.draws import each_draw
from bayesrnn.models.dropout import Held, Mask
from bayesrnn.models.layers import as_state, as_tensors

Advance = Callable[[int], None]
"""Told how much is done, after every piece."""
Watch = Callable[[str, int], Advance]
"""Told what is done and how much of it there is, gives what to tell of every piece."""


class Reader:
    """One draw (without a seed: the mean) that reads on and on."""

    def __init__(self, model: Bayesian, seed: int | None, device: torch.device) -> None:
        self._model, self._seed = model, seed
        self._carried: tuple[Tensor, ...] = ()
        self._generator = torch.Generator(device)
        self._after: Tensor | None = None  # the generator's state after the last cut
        self._masks = [part for part in model.modules() if isinstance(part, Mask)]
        self._held: list[Held] = []

    def read(self, x: Tensor, **start: Tensor) -> Tensor:
        """The logits [T, B, V] of the next cut; `start` is what the model wants beside the words
        and the state."""
        if self._seed is None:
            with self._model.weights("mean"):
                return self._run(x, start)
        with self._model.weights("sample"):
            self._generator.manual_seed(self._seed)
            self._model.resample(generator=self._generator)
            if self._after is not None:  # masks go on from where they were, and do not start over
                self._generator.set_state(self._after)
                for mask, held in zip(self._masks, self._held, strict=True):
                    mask.held = held
            logits = self._run(x, start)
            self._after = self._generator.get_state()
            self._held = [mask.held for mask in self._masks]
        return logits

    def take(self, rows: Tensor) -> None:
        """Go on with these rows of the batch, some of them perhaps several times."""
        self._carried = tuple(part.index_select(1, rows) for part in self._carried)
        pairs = zip(self._masks, self._held, strict=False)  # none yet, before the first cut
        self._held = [mask.of_rows(held, rows) for mask, held in pairs]

    def _run(self, x: Tensor, start: Mapping[str, Tensor]) -> Tensor:
        logits, state = self._model(x, as_state(self._carried), **start)
        self._carried = as_tensors(state)
        return logits


def readers(model: Network, samples: int, seed: int, device: torch.device) -> list[Reader]:
    """One for each draw (`each_draw`), by seeds of their own; with `samples` = 0 for each mean."""
    members = each_draw(model, samples)
    seeds = draw_seeds(seed, len(members)) if samples else repeat(None, len(members))
    return [Reader(member, own, device) for member, own in zip(members, seeds, strict=True)]


def draw_seeds(seed: int, count: int) -> Iterator[int]:
    """One a draw; the first ones are the same for every count."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        yield int(torch.randint(2**62, (), generator=generator).item())
