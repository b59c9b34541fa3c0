"""The bound on the perplexity of a sharpened model (Fortunato 2017, Section 4.2, eqs. 15-17).

Each cut is looked at before it is scored, and pays for the look with its exact KL: the sum is an
upper bound on -E log of the integral of p(x | theta) N(theta | phi, sigma0^2), not on the loss of
the network at its mean. What a look is worth depends on how much is looked at, so the shape
(streams and steps of a cut) belongs to the number. The looks of the training are for the shape of
the training; those of `looking` suit any.

With several draws of theta a cut, which is not in the paper, they are weighed by importance (Burda
et al. 2016): -log of the mean over draws of p(x | theta) p(theta | phi) / q(theta | phi, x) is, in
expectation, a bound too, and the tighter the more draws there are. What the draws' log q - log p
differ from the KL, their expectation, is taken off again; by one draw that leaves eq. 17.

With a rate it is dynamic: once a cut is scored, the mean of q(phi) learns from it, as in
`dynamic.py`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from bayesrnn.bayes import Bayesian, check_bayesian, sharpen
from bayesrnn.data.batching import StreamLoader
from bayesrnn.engine import Replay
from bayesrnn.errors import UserError, require
from bayesrnn.evaluate.draws import evaluating
from bayesrnn.evaluate.dynamic import LOOK_SEGMENTS, Learner, check_segment
from bayesrnn.evaluate.perplexity import perplexity_of, token_losses
from bayesrnn.models.layers import State, as_state, as_tensors, detach


@dataclass(frozen=True)
class Bound:
    """In nats a token: `nll` under the sharpened weights, `kl` of the looks, the `bound`, and its
    exponential; over `tokens` predictions in cuts of `streams` by `unroll`, each looked at `looks`
    times, after which the mean moved by `rate` (0: it stayed), each weight alike or by its
    variance. By one draw a cut the bound is nll + kl; by more it is lower, and nll an average over
    the `draws`."""

    tokens: int
    streams: int
    unroll: int
    around: str
    looks: int
    draws: int
    rate: float
    by_variance: bool
    nll: float
    kl: float
    bound: float
    perplexity: float


WIDTHS = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 2.5)
"""Widths of a look that `search_look` tries."""
NARROWEST, WIDEST = 1e-6, 1e6
"""Looks between these can be told from none, and from one that goes nowhere near the weights."""
LOOK_AT = "decoder.*"
"""The weights that gain most by looking: the softmax's."""


@dataclass(frozen=True)
class LookTrial:
    """The bound with looks of one width."""

    look: float
    bound: float
    perplexity: float


@dataclass(frozen=True)
class LookSearch:
    """The width with the lowest bound, and every one that was tried, in order."""

    look: float
    tried: tuple[LookTrial, ...]


def looking(model: Bayesian, where: str, look: float, streams: int) -> Bayesian:
    """A copy that looks with the weights named `where`, whatever it was trained with.

    sigma0 is `look` times each weight's own sigma, and eta streams * sigma0^2: where, to first
    order, a look gains most over what it costs.
    """
    fits = NARROWEST <= look <= WIDEST
    said = f"must be a width from {NARROWEST:g} to {WIDEST:g}, as a part of sigma, got {look}"
    require((fits, "look", said))
    return sharpen(model, where, look, streams * look**2, relative=True)


def search_look(
    model: Bayesian,
    loader: StreamLoader,
    where: str,
    widths: Sequence[float] = WIDTHS,
    seed: int = 1,
    advance: Callable[[int], None] | None = None,
    looks: int = 1,
    draws: int = 1,
) -> LookSearch:
    """Try each width on this text (the validation text, say) and choose the one with the lowest
    bound. `advance` is told of all the targets of every width."""
    tried = []
    for look in widths:
        generator = torch.Generator(loader.device).manual_seed(seed)
        one = looking(model, where, look, loader.streams)
        found = evaluate_sharpened(
            one, loader, "mean", generator, advance, looks=looks, draws=draws
        )
        tried.append(LookTrial(look, found.bound, found.perplexity))
    best = min(tried, key=lambda trial: (math.isnan(trial.bound), trial.bound))
    return LookSearch(best.look, tuple(tried))


@torch.inference_mode(False)  # a look takes gradients
def evaluate_sharpened(
    model: Bayesian,
    loader: StreamLoader,
    around: Literal["mean", "draw"] = "mean",
    generator: torch.Generator | None = None,
    advance: Callable[[int], None] | None = None,
    rate: float = 0.0,
    by_variance: bool = False,
    looks: int = 1,
    draws: int = 1,
) -> Bound:
    """Score every target of the loader once, each cut by weights that have looked at it (several
    times, if so wanted: `Bayesian.resample`); by several `draws` of them around the same look, if
    so wanted, all from the state that the first draw has left after the cut before.

    phi is the mean of q(phi), or drawn from it anew for every cut; dropout masks, if there are any,
    are drawn in both. `advance` is told the number of targets after every cut. With a `rate` above
    0 the mean of a copy learns from each cut once that is scored and paid for: still a bound, since
    what a cut is scored with depends on earlier cuts and on its own look alone.
    """
    check_bayesian(model)
    require((draws >= 1, "draws", f"must be at least 1, got {draws}"))
    if not any(block.posterior.looks_at_data for block in model.each_block()):
        raise UserError(
            "the model is not sharpened, so there is no bound to compute: let it look with --look, "
            'or train one with posterior.kind = "sharpened"'
        )
    if rate > 0:
        check_segment(loader)
    learner = Learner(model, rate, by_variance=by_variance) if rate > 0 else None
    model = model if learner is None else learner.model

    def cut(x: Tensor, y: Tensor, *carried: Tensor) -> tuple[Tensor, ...]:
        """Its loss, KL and bound; the new state, and that of the mean, which learns."""
        count = len(carried) // (1 if learner is None else 2)
        with evaluating(model), model.weights("sample"):
            *found, after = _score(model, x, y, carried[:count], around, generator, looks, draws)
        state = as_tensors(detach(after))
        if learner is None:
            return torch.stack(found), *state
        with torch.enable_grad():
            _, *learnt = learner(x, y, *carried[count:])
        return torch.stack(found), *state, *learnt

    total = torch.zeros(3, dtype=torch.float64, device=loader.device)
    run = Replay(cut, loader.device, generator)
    carried: Sequence[Tensor] = ()
    count = 0
    for number, batch in enumerate(loader.whole(advance)):
        call = run if carried else run.as_it_is
        found, *carried = call(batch.x, batch.y, *carried)
        total += found
        count += batch.targets
        if learner is not None and (number % LOOK_SEGMENTS == 0 or count == loader.targets):
            learner.check(total[2].item() / count, count, loader.targets)
    nll, kl, bound = total.tolist()
    tokens = loader.targets
    each = bound / tokens
    return Bound(
        tokens,
        loader.streams,
        loader.unroll,
        around,
        looks,
        draws,
        rate,
        by_variance,
        nll / tokens,
        kl / tokens,
        each,
        perplexity_of(each),
    )


def _score(
    model: Bayesian,
    x: Tensor,
    y: Tensor,
    carried: Sequence[Tensor],
    around: Literal["mean", "draw"],
    generator: torch.Generator | None,
    looks: int,
    draws: int,
) -> tuple[Tensor, Tensor, Tensor, State]:
    """A cut's loss, what its looks cost, its bound, in double, and the state it leaves."""
    state = as_state(carried)

    def mean_loss() -> Tensor:
        logits, _ = model(x, state)
        return token_losses(logits, y).sum() / y.shape[1]

    model.resample(mean_loss, generator, around, looks)
    paid = model.local_kl()
    assert paid is not None
    losses, log_ratios, after = _draws(model, x, y, state, draws, generator)
    weighed = math.log(draws) - torch.logsumexp(-losses - log_ratios, dim=0)
    bound = weighed + paid - log_ratios.mean()  # of expectation 0: less noise
    return losses.mean(), paid.double(), bound, after


def _draws(
    model: Bayesian,
    x: Tensor,
    y: Tensor,
    state: State | None,
    draws: int,
    generator: torch.Generator | None,
) -> tuple[Tensor, Tensor, State]:
    """Of the present draw and further ones around the same look: each one's loss of the cut and its
    log q - log p; and the state that the first one leaves."""
    losses, log_ratios = [], []
    first: State | None = None
    for number in range(draws):
        if number > 0:
            model.redraw_look(generator)
        logits, after = model(x, state)
        ratio = model.local_log_ratio()
        assert ratio is not None
        losses.append(token_losses(logits, y).double().sum())
        log_ratios.append(ratio)
        first = after if number == 0 else first
    assert first is not None
    return torch.stack(losses), torch.stack(log_ratios), first
