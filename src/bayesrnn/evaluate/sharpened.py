"""The bound on the perplexity of a sharpened model (Fortunato 2017, Section 4.2, eqs. 15-17).

Each cut is looked at before it is scored, and pays for the look with its exact KL: the sum is an
upper bound on -E log of the integral of p(x | theta) N(theta | phi, sigma0^2), not on the loss of
the network at its mean. What a look is worth depends on how much is looked at, so the shape
(streams and steps of a cut) belongs to the number; it should be that of training.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from bayesrnn.bayes import Bayesian
from bayesrnn.data.batching import StreamLoader
from bayesrnn.errors import UserError
from bayesrnn.evaluate.perplexity import token_losses
from bayesrnn.models.language import State, detach


@dataclass(frozen=True)
class Bound:
    """In nats a token: `nll` under the sharpened weights, `kl` of the looks, their sum `bound`, and
    its exponential; over `tokens` predictions in cuts of `streams` by `unroll`."""

    tokens: int
    streams: int
    unroll: int
    around: str
    nll: float
    kl: float
    bound: float
    perplexity: float


def evaluate_sharpened(
    model: Bayesian,
    loader: StreamLoader,
    around: Literal["mean", "draw"] = "mean",
    generator: torch.Generator | None = None,
    advance: Callable[[int], None] | None = None,
) -> Bound:
    """Score every target of the loader once, each cut by weights that have looked at it.

    phi is the mean of q(phi), or drawn from it anew for every cut. `advance` is told the number of
    targets after every cut.
    """
    if not any(block.posterior.looks_at_data for block in model.each_block()):
        raise UserError(
            "the model is not sharpened, so there is no bound to compute; train one with "
            'posterior.kind = "sharpened", or evaluate it as it is'
        )
    nll, kl = torch.zeros(2, dtype=torch.float64, device=loader.device).unbind()
    state: State | None = None
    training = {module: module.training for module in model.modules()}
    before, loader.position = loader.position, 0
    model.eval()
    try:
        with model.weights("sample"):
            for batch in loader:

                def mean_loss() -> Tensor:
                    logits, _ = model(batch.x, state)  # noqa: B023 - used at once
                    return token_losses(logits, batch.y).sum() / batch.streams  # noqa: B023

                model.resample(mean_loss, generator, around)
                with torch.no_grad():
                    logits, after = model(batch.x, state)
                    nll += token_losses(logits, batch.y).double().sum()
                    paid = model.local_kl()
                    assert paid is not None
                    kl += paid
                state = detach(after)
                if advance is not None:
                    advance(batch.targets)
    finally:
        loader.position = before
        for module, mode in training.items():
            module.training = mode
    tokens = loader.targets
    bound = (nll + kl).item() / tokens
    perplexity = math.exp(bound) if bound < 700 else math.inf
    return Bound(
        tokens,
        loader.streams,
        loader.unroll,
        around,
        nll.item() / tokens,
        kl.item() / tokens,
        bound,
        perplexity,
    )
