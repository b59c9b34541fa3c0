"""Perplexity over a whole text, state carried from cut to cut.

By the posterior mean, or by Monte Carlo: each draw keeps its weights and its own state over the
whole stream; per token the draws' probabilities are averaged (the model average), and beside it
their logs (the expected loss, Fortunato 2017, eq. 17), which is what a description length needs.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayesrnn.bayes import Bayesian, check_bayesian
from bayesrnn.data.batching import StreamLoader
from bayesrnn.engine import Replay
from bayesrnn.errors import require
from bayesrnn.models.language import as_state, as_tensors
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
    model: Bayesian,
    loader: StreamLoader,
    samples: int = 0,
    generator: torch.Generator | None = None,
    advance: Callable[[int], None] | None = None,
) -> Evaluation:
    """Score every target of the loader once; `samples` = 0 uses the posterior mean.

    `advance` is told the number of targets after every cut, for a progress bar. On a CPU the mean
    of a pruned model reads one stream without its zeros, where that is faster (`text_reader`).
    """
    require((samples >= 0, "samples", f"must be 0 (the mean) or above, got {samples}"))
    if samples == 0:
        with evaluating(model), model.weights("mean"):
            network = text_reader(model, loader.streams) or model
            nll = _mean(read_through(loader, _cut(network), advance))
        return Evaluation(loader.targets, 0, nll, perplexity_of(nll), None, None)
    expected = 0.0
    log_sum: Tensor | None = None  # per token, log of the summed probabilities
    with evaluating(model):
        for _ in range(samples):
            with model.weights("sample"):
                model.resample(generator=generator)
                cuts = read_through(loader, _cut(model), advance)
                log_p = -torch.cat([losses.flatten().clone() for losses in cuts])
            expected -= log_p.mean().item() / samples
            log_sum = log_p if log_sum is None else torch.logaddexp(log_sum, log_p)
    assert log_sum is not None
    nll = math.log(samples) - log_sum.mean().item()
    return Evaluation(
        loader.targets, samples, nll, perplexity_of(nll), expected, perplexity_of(expected)
    )


@contextmanager
def evaluating(model: Bayesian) -> Iterator[None]:
    """Eval mode without gradients; each part's own mode comes back afterwards."""
    check_bayesian(model)
    before = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in before.items():
            module.training = training


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


def _mean(losses: Iterator[Tensor]) -> float:
    total: Tensor | None = None
    count = 0
    for cut in losses:
        total = cut.sum() if total is None else total + cut.sum()
        count += cut.numel()
    assert total is not None
    return total.item() / count


def perplexity_of(nll: float) -> float:
    """Perplexity; infinite where a float ends."""
    return math.exp(nll) if nll < 700 else math.inf
