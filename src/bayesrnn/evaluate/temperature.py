"""Temperature scaling (Guo et al. 2017): one number that calibrates a network's probabilities.

Logits are divided by it before the softmax of every draw. At the best temperature for a text, the
entropy of a single network's predictions is, on average over that text, its loss: the derivative of
the loss by 1 / temperature is (loss - entropy) times the temperature, and 0 there. Of draws that
are averaged it is the average's loss that is made small, and the mean, which is too sure, and an
average of many draws, which may be too unsure, want temperatures of their own.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from bayesrnn.bayes import Ensemble, Network
from bayesrnn.bayes.bayesian import uncompiled
from bayesrnn.data.batching import StreamLoader
from bayesrnn.data.labelled import ExampleLoader
from bayesrnn.errors import UserError, require
from bayesrnn.evaluate.dynamic import score_dynamic
from bayesrnn.evaluate.labelled import score_labelled
from bayesrnn.evaluate.perplexity import perplexity_of, score_text

_FINE = [k / 8 for k in range(-6, 7)]
TEMPERATURES = tuple(2.0**k for k in (-3, -2, -1.5, -1, *_FINE, 1, 1.5, 2, 3))
"""What `search_temperature` scores: an eighth to 8, eight to an octave around 1."""


@dataclass(frozen=True)
class TemperatureTrial:
    """One temperature's loss, in nats per target, and its exponential."""

    temperature: float
    nll: float
    perplexity: float


@dataclass(frozen=True)
class TemperatureSearch:
    """The temperature of the lowest loss, interpolated between those that were tried, in order."""

    temperature: float
    tried: tuple[TemperatureTrial, ...]

    @property
    def at_end(self) -> bool:
        """Whether it is the first or last of those: one beyond may be better."""
        return self.temperature in (self.tried[0].temperature, self.tried[-1].temperature)


def search_temperature(
    model: Network,
    loader: StreamLoader | ExampleLoader,
    samples: int = 0,
    generator: torch.Generator | None = None,
    advance: Callable[[int], None] | None = None,
    rate: float | None = None,
    by_variance: bool = False,
) -> TemperatureSearch:
    """Find the temperature of the lowest loss on a text or examples (those for validation, say).

    - `samples`: by the average of so many draws; 0 uses the posterior mean.
    - `rate`, `by_variance`: if a `rate` is given, the temperature is that of dynamic evaluation.

    Give the temperature to `evaluate_text`, `text_uncertainty`, `dynamic_evaluate` or
    `Categorical`, with the same `samples`. The text is read once; every temperature takes one more
    pass over its logits.

    >>> from bayesrnn.bayes import bayesianize
    >>> from bayesrnn.data import Examples
    >>> x, y = torch.randn(50, 3), torch.randint(2, (50,))
    >>> loader = ExampleLoader(Examples(x, y, [str(i) for i in range(50)]), streams=50)
    >>> found = search_temperature(bayesianize(torch.nn.Linear(3, 2)), loader)
    >>> found.tried[0].temperature <= found.temperature <= found.tried[-1].temperature
    True
    """
    of_text = rate is None or not isinstance(loader, ExampleLoader)
    require(
        (of_text, "rate", "is of dynamic evaluation, and so of texts; leave it out"),
        (rate is None or samples == 0, "samples", "must be 0 with a rate, which moves the mean"),
        (rate is not None or not by_variance, "by_variance", "is of a rate; give that too"),
    )
    if isinstance(loader, ExampleLoader):
        nlls = score_labelled(model, loader, TEMPERATURES, samples, generator, advance).nll
    elif rate is None:
        nlls = score_text(model, loader, TEMPERATURES, samples, generator, advance).nll
    else:
        if isinstance(uncompiled(model), Ensemble):
            raise TypeError("dynamic evaluation is of one model, not of an ensemble")
        assert not isinstance(model, Ensemble)
        nlls = score_dynamic(model, loader, TEMPERATURES, rate, 0.0, advance, by_variance)
    as_it_is = nlls[TEMPERATURES.index(1.0)]
    if not math.isfinite(as_it_is):
        raise UserError(f"the model's loss is {as_it_is}, so no temperature can be found")
    tried = tuple(
        TemperatureTrial(temperature, nll, perplexity_of(nll))
        for temperature, nll in zip(TEMPERATURES, nlls, strict=True)
    )
    return TemperatureSearch(_lowest(TEMPERATURES, nlls), tried)


def _lowest(temperatures: Sequence[float], nlls: Sequence[float]) -> float:
    """Where the parabola through the lowest one and its neighbours is lowest, by the logarithm of
    the temperature; the lowest one itself at an end."""
    best = min(range(len(nlls)), key=lambda i: math.inf if math.isnan(nlls[i]) else nlls[i])
    if best in (0, len(nlls) - 1):
        return temperatures[best]
    low, here, high = (math.log(each) for each in temperatures[best - 1 : best + 2])
    left = (here - low) * (nlls[best] - nlls[best + 1])
    right = (here - high) * (nlls[best] - nlls[best - 1])
    if not math.isfinite(left - right) or left == right:  # a neighbour has no loss, or all the same
        return temperatures[best]
    return math.exp(here - ((here - low) * left - (here - high) * right) / (left - right) / 2)
