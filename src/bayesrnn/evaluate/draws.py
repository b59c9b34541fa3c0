"""The networks that an evaluation averages: a model's mean, its draws, or those of an ensemble."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from bayesrnn.bayes import Bayesian
from bayesrnn.bayes.ensemble import Network, members_of
from bayesrnn.errors import require

MOST_DRAWS = 1_000_000
"""More than anyone has use for; a number with some zeros too many would fill the memory."""


@contextmanager
def evaluating(model: Network) -> Iterator[None]:
    """Eval mode without gradients; each part's own mode comes back afterwards."""
    members_of(model)  # refuses a plain module
    before = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in before.items():
            module.training = training


def each_draw(model: Network, samples: int) -> list[Bayesian]:
    """Whose draw each is: `samples` of every member, members in turn; with 0 their means."""
    fits = 0 <= samples <= MOST_DRAWS
    said = f"must be 0 (the mean) or above, {MOST_DRAWS:,} at the most, got {samples}"
    require((fits, "samples", said))
    return members_of(model) * max(samples, 1)


@contextmanager
def drawn(
    member: Bayesian, samples: int, generator: torch.Generator | None = None
) -> Iterator[None]:
    """Under a new draw of that member; under its mean where `samples` is 0."""
    with member.weights("sample" if samples else "mean"):
        if samples:
            member.resample(generator=generator)
        yield
