"""Prediction by averaging over weight draws, for any module."""

from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from bayesrnn.bayes import Network
from bayesrnn.errors import require
from bayesrnn.evaluate.draws import drawn, each_draw, evaluating
from bayesrnn.evaluate.outputs import Categorical, Normal, Output, Prediction


def predict(
    model: Network,
    *inputs: Any,
    samples: int = 10,
    output: Output | None = None,
    generator: torch.Generator | None = None,
    **named_inputs: Any,
) -> Prediction:
    """Average over `samples` draws what `output` (default: `Categorical()`) says of the raw output.

    Where the module returns a tuple (an output and a state), its first item is taken. `samples` = 0
    uses the posterior mean, and then nothing is epistemic (but where the members of an `Ensemble`
    disagree).

    >>> from bayesrnn.bayes import bayesianize
    >>> model = bayesianize(torch.nn.Linear(3, 4))
    >>> prediction = predict(model, torch.zeros(5, 3), samples=3)
    >>> prediction.mean.shape, prediction.epistemic.shape
    (torch.Size([5, 4]), torch.Size([5]))
    """
    whole = isinstance(samples, Integral) and samples >= 0
    require((whole, "samples", f"must be 0 (the mean) or a whole number above, got {samples!r}"))
    kind: Output = Categorical() if output is None else output
    sums: tuple[Tensor, ...] = ()
    draws = each_draw(model, samples)
    with evaluating(model):
        for member in draws:
            with drawn(member, samples, generator):
                raw = member(*inputs, **named_inputs)
            first = raw[0] if isinstance(raw, tuple) else raw
            if type(kind) in (Categorical, Normal) and not isinstance(first, Tensor):
                raise TypeError(
                    f"{type(kind).__name__}() reads a tensor, or the first of a tuple, and "
                    f"the module returns a {type(first).__name__}; give an output=... of your own "
                    "whose moments(raw) takes it"
                )
            moments = kind.moments(first)
            sums = tuple(a + b for a, b in zip(sums, moments, strict=True)) if sums else moments
        return kind.predict(tuple(total / len(draws) for total in sums))
