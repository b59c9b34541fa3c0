"""What is kept of a draw until its KL, and of the KL until its gradient is taken."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from bayesrnn.bayes.hyper import Hyper
from bayesrnn.bayes.kl import Estimator
from bayesrnn.bayes.layout import Piece, Weight
from bayesrnn.bayes.posterior import Tensors
from bayesrnn.bayes.prior import Number, Prior

State = list[tuple[int, int]]


def state_of(parameters: Tensors) -> State:
    """Where the learnt tensors are, and how often each was written to."""
    return [
        (tensor.data_ptr(), -1 if tensor.is_inference() else tensor._version)
        for tensor in parameters.values()
    ]


class Summary:
    """What the KL with a grouped prior needs of a draw: log q, and the sums of each group.

    What the draw has noted stays until the next one, and nothing takes its place: the KL reads it
    on a second stream, and torch would give its memory away before that has happened.
    """

    def __init__(self, parameters: Tensors, noise: Tensors) -> None:
        self._noise = noise  # held, so that no other noise can take its place in memory
        self._state = state_of(parameters)
        self._parts: dict[str, list[Tensor]] = {}
        self._log_q: list[Tensor] = []
        self.theta: dict[str, Tensor] = {}
        self.std: Tensor | None = None  # flat, for the gradients of the same draw
        self.asked = False  # the KL has read it

    def fits(self, parameters: Tensors, noise: Tensors) -> bool:
        """Whether it is the same noise, and the learnt tensors have not changed since."""
        return self._noise is noise and self._state == state_of(parameters)

    def add(self, piece: Piece, of_q: Tensor | None, part: Tensor, prior: Prior) -> None:
        """Note log q of a piece, by parts (None: it is known), and the sums of its groups."""
        self._log_q += [] if of_q is None else [of_q]
        parts = self._parts.setdefault(piece.weight.name, [])
        if parts and prior.reaches(piece.weight.shape, piece.weight.axis):
            parts[0] = parts[0] + part
        else:
            parts.append(part)

    def lay(self, weight: Weight, of_q: Tensor, theta: Tensor) -> None:
        """Note log q of a whole weight, by parts, and where the draw lies that its sums can be
        taken of."""
        self._log_q.append(of_q)
        self.theta[weight.name] = theta

    def lacks(self, weight: Weight) -> bool:
        return weight.name not in self._parts

    def log_q(self) -> Tensor:
        """Added up here, not with the draw: nothing waits for it there."""
        return torch.cat([part.flatten() for part in self._log_q]).sum(dtype=torch.float64)

    def sums(self, weight: Weight) -> Tensor:
        parts = self._parts[weight.name]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


@dataclass
class Charge:
    """A KL term whose gradient is to be added, once, to that of the loss."""

    hyper: Hyper
    estimator: Estimator
    noise: Tensors
    values: dict[str, Number] = field(default_factory=dict)
    state: State = field(default_factory=list)
    weight: float | Tensor = 1.0
    local: float = 0.0  # of the part that each batch is charged in full
    precisions: dict[str, Tensor] = field(default_factory=dict)
    done: bool = False
