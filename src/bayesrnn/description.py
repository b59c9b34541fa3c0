"""The description length of a data set's labels: what it takes to send them by a network."""

import math
from dataclasses import dataclass

import torch

from bayesrnn.bayes import Bayesian, check_bayesian
from bayesrnn.evaluate.draws import evaluating


@dataclass(frozen=True)
class Description:
    """A description length in nats and in bits (Graves 2011, eqs. 3-6).

    The error loss is what the labels cost, given the network's weights; the complexity loss is what
    the weights cost, given the prior. Together they are what the labels cost.

    `uniform_bits` is the cost of a code that knows nothing but the number of labels, and `ratio` is
    the total divided by it: below 1 the network has compressed the labels, above 1 it has not.

    The complexity, and everything that needs it, is None where it is known only up to a constant (a
    point as posterior, a uniform prior). The uniform code is None where targets are numbers, not
    labels.
    """

    error_nats: float | None
    complexity_nats: float | None
    total_nats: float | None
    error_bits: float | None
    complexity_bits: float | None
    total_bits: float | None
    uniform_bits: float | None
    ratio: float | None
    bits_per_weight: float | None


def describe(
    error: float | None, complexity: float | None, targets: int, labels: int | None, weights: int
) -> Description:
    """The description length of a data set, from its error and complexity loss in nats.

    - `error`, `complexity`: the losses; None where one was not measured, or is undefined.
    - `targets`, `labels`: how many targets there are, and how many labels each may be (None for
      numbers).
    - `weights`: how many drawn weights the network has.

    >>> found = describe(error=8.0, complexity=2.0, targets=5, labels=8, weights=4)
    >>> round(found.total_bits, 2), found.uniform_bits, round(found.ratio, 3)
    (14.43, 15.0, 0.962)
    """
    total = None if error is None or complexity is None else error + complexity
    nats = (error, complexity, total)
    error, complexity, total = (None if each is None else each / math.log(2) for each in nats)
    uniform = None if labels is None else targets * math.log2(labels)
    return Description(
        *nats,
        error,
        complexity,
        total,
        uniform,
        total / uniform if total is not None and uniform else None,
        complexity / weights if complexity is not None and weights else None,
    )


def complexity(model: Bayesian, generator: torch.Generator | None = None) -> float | None:
    """What the weights cost in nats: the KL, at one draw where it has no closed form; None where it
    is undefined."""
    check_bayesian(model)
    if not model.has_description_length:
        return None
    with evaluating(model), model.weights("sample"):  # the draw is one that has not looked at data
        model.resample(generator=generator)
        return model.kl().item()
