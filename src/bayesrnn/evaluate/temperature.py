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

from bayesrnn.bayes import Bayesian, Network
from bayesrnn.data.batching import StreamLoader
from bayesrnn.data.labelled import ExampleLoader
from bayesrnn.evaluate.dynamic import score_dynamic
from bayesrnn.evaluate.labelled import score_labelled
from bayesrnn.evaluate.perplexity import perplexity_of, score_text

TEMPERATURES = tuple(2.0 ** (k / 8) for k in range(-8, 13))
"""What `search_temperature` scores: a half to 2.8, eight to an octave."""


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
    `Categorical`, with the same `samples`. The text is read once, whatever the number of
    temperatures.

    >>> from bayesrnn.bayes import bayesianize
    >>> from bayesrnn.data import Examples
    >>> x, y = torch.randn(50, 3), torch.randint(2, (50,))
    >>> loader = ExampleLoader(Examples(x, y, [str(i) for i in range(50)]), streams=50)
    >>> found = search_temperature(bayesianize(torch.nn.Linear(3, 2)), loader)
    >>> 0.5 <= found.temperature <= 2.9
    True
    """
    if isinstance(loader, ExampleLoader):
        nlls = score_labelled(model, loader, TEMPERATURES, samples, generator, advance).nll
    elif rate is None:
        nlls = score_text(model, loader, TEMPERATURES, samples, generator, advance).nll
    else:
        if not isinstance(model, Bayesian):
            raise TypeError("dynamic evaluation is of one model, not of an ensemble")
        nlls = score_dynamic(model, loader, TEMPERATURES, rate, 0.0, advance, by_variance)
    tried = tuple(
        TemperatureTrial(temperature, nll, perplexity_of(nll))
        for temperature, nll in zip(TEMPERATURES, nlls, strict=True)
    )
    return TemperatureSearch(_lowest(TEMPERATURES, nlls), tried)


def _lowest(temperatures: Sequence[float], nlls: Sequence[float]) -> float:
    """Where the parabola through the lowest one and its neighbours is lowest, by the logarithm of
    the temperature; the lowest one itself at an end."""
    best = min(range(len(nlls)), key=nlls.__getitem__)
    if best in (0, len(nlls) - 1):
        return temperatures[best]
    x = [math.log(each) for each in temperatures[best - 1 : best + 2]]
    low, middle, high = nlls[best - 1 : best + 2]
    bend = low - 2 * middle + high  # above 0, unless all three are equal
    return math.exp(x[1] + (x[2] - x[0]) / 4 * (low - high) / bend) if bend > 0 else math.exp(x[1])
