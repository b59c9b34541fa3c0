"""Perplexity over a whole text, state carried from cut to cut.

By the posterior mean, or by Monte Carlo: each draw keeps its weights and its own state over the
whole stream; per token the draws' probabilities are averaged (the model average), and beside it
their logs (the expected loss, Fortunato 2017, Section 4.2), which is what a description length
needs.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayesrnn.bayes import Network
from bayesrnn.data.batching import StreamLoader
from bayesrnn.engine import Replay
from bayesrnn.evaluate.draws import drawn, each_draw, evaluating
from bayesrnn.models.layers import as_state, as_tensors
from bayesrnn.sparse import text_reader


@dataclass(frozen=True)
class Evaluation:
    """NLL in nats a token and its exponential, over `tokens` predictions.

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
) -> Evaluation:
    """Score every target of the loader once; `samples` = 0 uses the posterior mean.

    `advance` is told the number of targets after every cut, for a progress bar. On a CPU the mean
    of a pruned model reads one stream without its zeros, where that is faster (`text_reader`).
    """
    expected = 0.0
    log_sum: Tensor | None = None  # per token, log of the summed probabilities
    draws = each_draw(model, samples)
    with evaluating(model):
        for member in draws:
            with drawn(member, samples, generator):
                thin = None if samples else text_reader(member, loader.streams)
                cuts = read_through(loader, _cut(thin or member), advance)
                log_p = -torch.cat([losses.flatten().clone() for losses in cuts])
            expected -= log_p.mean().item() / len(draws)
            log_sum = log_p if log_sum is None else torch.logaddexp(log_sum, log_p)
    assert log_sum is not None
    nll = math.log(len(draws)) - log_sum.mean().item()
    several = (expected, perplexity_of(expected)) if samples or len(draws) > 1 else (None, None)
    return Evaluation(loader.targets, samples, nll, perplexity_of(nll), *several)


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """-log p of each target, of the targets' shape."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    flat = F.cross_entropy(wide.flatten(0, -2), targets.flatten(), reduction="none")
    return flat.view(targets.shape)


Cut = Callable[..., tuple[Tensor, ...]]
"""x [T, B], y [T, B] and the carried state (none at first) to losses [T, B] and the new state."""


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


def _cut(model: nn.Module) -> Cut:
    """Losses in double under the weights in force."""

    def cut(x: Tensor, y: Tensor, *carried: Tensor) -> tuple[Tensor, ...]:
        logits, state = model(x, as_state(carried))
        return token_losses(logits, y).double(), *as_tensors(state)

    return cut


def perplexity_of(nll: float) -> float:
    """Perplexity; infinite where a float ends."""
    return math.exp(nll) if nll < 700 else math.inf
