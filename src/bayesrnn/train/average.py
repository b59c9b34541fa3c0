"""The mean of what was learnt over the last epochs (Polyak and Juditsky 1992), in place of the end.

Steps with a rate that does not vanish go on moving around an optimum; their mean lies closer to it.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

EVERY = 10
"""Steps from one that is taken in to the next: neighbours hardly differ."""


class Average:
    """The running mean of all that is learnt, in the form in which it is learnt (a scale: before
    softplus), at every tenth step from the one after `start` on (None: never).

    A step knows nothing of it: what a recorded step writes to is read here, and what it reads from
    stays where it is in memory.
    """

    def __init__(self, model: nn.Module, start: int | None) -> None:
        self._learnt = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._start = start
        self.count = 0
        self.means: dict[str, Tensor] = {}

    def note(self, step: int) -> None:
        """Take in the weights after this step, if it is one of those that count."""
        if self._start is None or step <= self._start or (step - self._start - 1) % EVERY:
            return
        self.count += 1
        if self.count == 1:
            self.means = {name: p.detach().clone() for name, p in self._learnt.items()}
        else:
            torch._foreach_lerp_(self._averaged(), self._present(), 1 / self.count)

    def put(self) -> None:
        """Set the model to the mean, for good; nothing where there is none yet."""
        if self.count:
            torch._foreach_copy_(self._present(), self._averaged())

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model at the mean, for a while."""
        before = [tensor.clone() for tensor in self._present()] if self.count else []
        self.put()
        try:
            yield
        finally:
            if before:
                torch._foreach_copy_(self._present(), before)

    def load(self, means: Mapping[str, Tensor], count: int) -> None:
        """Go on from a checkpoint's `means` and `count`."""
        self.count = count
        self.means = {name: tensor.to(self._learnt[name].data) for name, tensor in means.items()}

    def _present(self) -> list[Tensor]:
        return [p.data for p in self._learnt.values()]

    def _averaged(self) -> list[Tensor]:
        return [self.means[name] for name in self._learnt]
