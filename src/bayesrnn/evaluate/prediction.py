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
    """Predict by averaging over `samples` draws of the weights.

    - `inputs`, `named_inputs`: passed on to the model. Where it returns a tuple (an output and a
      state), the first item is read.
    - `samples`: the number of draws; 0 uses the posterior mean, and then nothing is epistemic
      (except what the members of an `Ensemble` disagree about).
    - `output`: what the raw output means: `Categorical()` (the default), `outputs.Normal()` or your
      own.
    - `generator`: of the draws, on the weights' device; torch's own by default.

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
