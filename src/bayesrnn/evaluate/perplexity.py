"""Perplexity over a whole text, with the state carried from cut to cut.

It is by the posterior mean, or by Monte Carlo: each draw keeps its weights and its own state over
the whole stream. For each token, the draws' probabilities are averaged (the model average), and so
are their logs (the expected loss, Fortunato 2017, Section 4.2), which a description length needs.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayesrnn.bayes import Bayesian, Network
from bayesrnn.data.batching import StreamLoader
from bayesrnn.engine import Replay
from bayesrnn.errors import require
from bayesrnn.evaluate.draws import drawn, each_draw, evaluating
from bayesrnn.models.layers import as_state, as_tensors
from bayesrnn.sparse import text_reader


@dataclass(frozen=True)
class Evaluation:
    """The NLL of a text, in nats per token, and its exponential, over `tokens` predictions.

    `samples` is 0 for the posterior mean. The expected figures average logs over the draws; they
    are None for the mean.
    """

    tokens: int
    samples: int
    nll: float
    perplexity: float
    expected_nll: float | None
    expected_perplexity: float | None


def evaluate_text(
    model: Network,
    loader: StreamLoader,
    samples: int = 0,
    generator: torch.Generator | None = None,
    advance: Callable[[int], None] | None = None,
    temperature: float = 1.0,
) -> Evaluation:
    """Score every target of the loader once, by the posterior mean or by draws.

    - `samples`: the number of draws that are averaged; 0 uses the posterior mean.
    - `generator`: of the draws, on the weights' device; torch's own by default.
    - `advance`: called with the number of targets after every cut, for a progress bar.
    - `temperature`: logits are divided by it (see `search_temperature`).

    On a CPU, the mean of a pruned model reads one stream without its zeros, where that is faster
    (`text_reader`).
    """
    scored = score_text(model, loader, (temperature,), samples, generator, advance)
    nll, expected = scored.nll[0], scored.expected[0]
    several = (expected, perplexity_of(expected)) if scored.averaged > 1 or samples else (None,) * 2
    return Evaluation(loader.targets, samples, nll, perplexity_of(nll), *several)


class Scored(NamedTuple):
    """By temperature: the NLL of the model average and the expected one, in nats a target; and how
    many networks were averaged."""

    nll: list[float]
    expected: list[float]
    averaged: int


def score_text(
    model: Network,
    loader: StreamLoader,
    temperatures: Sequence[float],
    samples: int = 0,
    generator: torch.Generator | None = None,
    advance: Callable[[int], None] | None = None,
) -> Scored:
    """The same by several temperatures at once, for which the text is read but once."""
    check_temperatures(temperatures)

    def losses(member: Bayesian) -> Iterator[Tensor]:
        thin = None if samples else text_reader(member, loader.streams)
        for found in read_through(loader, _cut(thin or member, temperatures), advance):
            yield found.flatten(1)

    return score(model, samples, generator, losses)


def score(
    model: Network,
    samples: int,
    generator: torch.Generator | None,
    losses: Callable[[Bayesian], Iterator[Tensor]],
) -> Scored:
    """Averages over the draws: `losses` gives those of each target under the weights in force,
    [temperatures, n] at a time, each overwritten by the next."""
    first, *others = each_draw(model, samples)
    with evaluating(model):
        if not others:  # then sums are all that is asked for, and little is kept
            with drawn(first, samples, generator):
                parts = [(part.sum(dim=1), part.shape[1]) for part in losses(first)]
            total = torch.stack([part for part, _ in parts]).sum(dim=0)
            nll = (total / sum(count for _, count in parts)).tolist()
            return Scored(nll, nll, 1)

        def log_p(member: Bayesian) -> Tensor:
            with drawn(member, samples, generator):
                return -torch.cat([part.clone() for part in losses(member)], dim=1)

        log_sum = log_p(first)  # of each target, log of the summed probabilities
        expected = -log_sum.mean(dim=1)
        for member in others:
            found = log_p(member)
            expected -= found.mean(dim=1)
            log_sum = torch.logaddexp(log_sum, found)
    count = 1 + len(others)
    nll = (math.log(count) - log_sum.mean(dim=1)).tolist()
    return Scored(nll, (expected / count).tolist(), count)


def token_losses(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> Tensor:
    """-log p of each target, of the targets' shape, where p is the softmax of logits over
    `temperature`."""
    wide = tempered(logits, temperature)
    flat = F.cross_entropy(wide.flatten(0, -2), targets.flatten(), reduction="none")
    return flat.view(targets.shape)


def losses_by(logits: Tensor, targets: Tensor, temperatures: Sequence[float]) -> Tensor:
    """Those of each temperature, in double: [temperatures, ...]."""
    if len(temperatures) == 1:
        return token_losses(logits, targets, temperatures[0]).double()[None]
    wide = tempered(logits, 1.0)
    wide = wide - wide.amax(dim=-1, keepdim=True)
    picked = wide.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    found = [(wide / heat).exp().sum(dim=-1).log() - picked / heat for heat in temperatures]
    return torch.stack(found).double()


def tempered(logits: Tensor, temperature: float) -> Tensor:
    """Logits divided by the temperature, in single precision at least."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide if temperature == 1.0 else wide / float(temperature)


COLDEST, HOTTEST = 1e-3, 1e3
"""The ends of what temperatures may be: beyond them single precision has no softmax."""


def check_temperatures(temperatures: Sequence[float]) -> None:
    """Refuse what logits cannot be divided by."""
    for temperature in temperatures:
        fits = isinstance(temperature, Real) and COLDEST <= temperature <= HOTTEST
        said = f"must be a number from {COLDEST:g} to {HOTTEST:g}, got {temperature!r}"
        require((fits, "temperature", said))


Cut = Callable[..., tuple[Tensor, ...]]
"""x [T, B], y [T, B] and the carried state (none at first) to losses and the new state."""


def read_through(
    loader: StreamLoader, cut: Cut, advance: Callable[[int], None] | None = None
) -> Iterator[Tensor]:
    """What `cut` finds of each cut in turn, from the loader's first; overwritten by the next."""
    run = Replay(cut, loader.device)
    carried: Sequence[Tensor] = ()
    for batch in loader.whole():
        call = run if carried else run.as_it_is
        losses, *carried = call(batch.x, batch.y, *carried)
        if advance is not None:  # before anyone looks at the losses, and perhaps stops
            advance(batch.targets)
        yield losses


def _cut(model: nn.Module, temperatures: Sequence[float]) -> Cut:
    """Losses in double, [temperatures, T, B], under the weights in force."""

    def cut(x: Tensor, y: Tensor, *carried: Tensor) -> tuple[Tensor, ...]:
        logits, state = model(x, as_state(carried))
        return losses_by(logits, y, temperatures), *as_tensors(state)

    return cut


def perplexity_of(nll: float) -> float:
    """Perplexity; infinite where a float ends."""
    return math.exp(nll) if nll < 700 else math.inf
