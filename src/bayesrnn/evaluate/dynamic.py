"""Dynamic evaluation (Mikolov 2010): a model that goes on learning from the text it is scored on.

The text is read segment by segment. A segment is first scored, with weights that have seen only
earlier segments. Then they take one step of gradient descent on it: the gradient of its NLL, summed
over the segment, at the posterior mean, without the KL. The means and the ordinary parameters move;
the state is carried on. Of several streams all segments are scored first, and then learnt from one
after the other. (So the last target of a stream, which is the first word of the next one, has been
read, though not predicted, before it is scored: one word per stream.) All of this happens to a
copy: the model itself is never written to.

By variance, each weight moves in proportion to its sigma^2: what the posterior knows well stays
where it is, and what it does not know learns fast. That is the first-order step of online Bayes:
with N(mu, sigma^2) as the prior of a segment's weights, its posterior's mode is at mu - sigma^2 g.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bayesrnn.bayes import Bayesian, check_bayesian
from bayesrnn.bayes.bayesianize import copied
from bayesrnn.bayes.passes import clip_pass
from bayesrnn.data.batching import StreamLoader
from bayesrnn.errors import UserError, require
from bayesrnn.evaluate.perplexity import (
    Evaluation,
    check_temperatures,
    losses_by,
    perplexity_of,
    read_through,
    token_losses,
)
from bayesrnn.models.layers import CELLS, as_state, as_tensors

RATES = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
"""What `search_rate` tries; 0 is the model as it is."""

LOOK_SEGMENTS = 50
"""How often the loss is read from the device, to stop early where it diverges."""


@dataclass(frozen=True)
class DynamicEvaluation(Evaluation):
    """An `Evaluation` in which the posterior mean moved by `rate` after every segment.

    `segment` is the number of steps in one; with `by_variance`, each weight moved in proportion to
    its variance, otherwise all alike. `samples` is 0.
    """

    rate: float
    segment: int
    by_variance: bool


@dataclass(frozen=True)
class Trial:
    """One rate's figures over the text; None if it diverged."""

    rate: float
    nll: float | None
    perplexity: float | None


@dataclass(frozen=True)
class RateSearch:
    """The rate with the lowest NLL, and all that were tried, in order."""

    rate: float
    tried: tuple[Trial, ...]


class Diverged(UserError):
    """The rate is too high for this model and text."""


def dynamic_evaluate(
    model: Bayesian,
    loader: StreamLoader,
    rate: float,
    clip: float = 0.0,
    advance: Callable[[int], None] | None = None,
    by_variance: bool = False,
    temperature: float = 1.0,
) -> DynamicEvaluation:
    """Score every target of the loader once, and learn at `rate` from each cut once it is scored.

    The loader's cuts are the segments. The longer they are, the larger and the rarer the steps, so
    take those of the training (`unroll`).

    - `clip`: a bound on the norm of all gradients together (0: off).
    - `advance`: called with the number of targets after every segment, for a progress bar.
    - `by_variance`: the rate of each weight is `rate` times its variance over the mean variance of
      all; parameters without one learn at `rate`.
    - `temperature`: targets are scored by logits over it (see `search_temperature`), and learnt
      from without.
    """
    [nll] = score_dynamic(model, loader, (temperature,), rate, clip, advance, by_variance)
    return DynamicEvaluation(
        loader.targets, 0, nll, perplexity_of(nll), None, None, rate, loader.unroll, by_variance
    )


def score_dynamic(
    model: Bayesian,
    loader: StreamLoader,
    temperatures: Sequence[float],
    rate: float,
    clip: float = 0.0,
    advance: Callable[[int], None] | None = None,
    by_variance: bool = False,
) -> list[float]:
    """The NLL, in nats a token, by each of several temperatures, learning but once."""
    check_bayesian(model)
    require(
        (0 <= rate < math.inf, "rate", f"must be a finite number, 0 or above, got {rate}"),
        (0 <= clip < math.inf, "clip", f"must be 0 (off) or above, got {clip}"),
    )
    check_temperatures(temperatures)
    check_segment(loader)
    more = () if set(temperatures) == {1.0} else temperatures
    with torch.inference_mode(False), torch.enable_grad():
        nlls = _means(Learner(model, rate, clip, by_variance, more), loader, advance)
    return nlls[1:] if more else nlls


def check_segment(loader: StreamLoader) -> None:
    """Refuse a text that ends within its first segment: there is nothing to learn for."""
    steps = loader.targets // loader.streams
    if loader.unroll > steps:
        raise UserError(
            f"a segment of {loader.unroll} steps is longer than text '{loader.name}', which has "
            f"{steps} steps a stream ({loader.streams} in all), so nothing would be learnt; use a "
            "shorter segment, fewer streams or more text"
        )


def search_rate(
    model: Bayesian,
    loader: StreamLoader,
    rates: Sequence[float] = RATES,
    clip: float = 0.0,
    advance: Callable[[int], None] | None = None,
    by_variance: bool = False,
) -> RateSearch:
    """Try each of `rates` on a text (the validation text, say) and choose the one that scores best.

    A rate that diverges is left early and has no figures. `advance` is called with all the targets
    of every rate. The other arguments are those of `dynamic_evaluate`.
    """
    require((len(rates) > 0, "rates", "must hold at least one rate"))
    tried = []
    for rate in rates:
        left = loader.targets

        def count(targets: int) -> None:
            nonlocal left
            left -= targets
            if advance is not None:
                advance(targets)

        try:
            found = dynamic_evaluate(model, loader, rate, clip, count, by_variance)
            tried.append(Trial(rate, found.nll, found.perplexity))
        except Diverged:
            count(left)
            tried.append(Trial(rate, None, None))
    scores = {trial.rate: trial.nll for trial in tried if trial.nll is not None}
    if not scores:
        shown = ", ".join(f"{rate:g}" for rate in rates)
        raise Diverged(
            f"dynamic evaluation diverges at every rate that was tried ({shown}); try lower ones, "
            f"{min(rates) / 10:g} say"
        )
    return RateSearch(min(scores, key=scores.__getitem__), tuple(tried))


class Learner:
    """A copy of a model, at its mean and without noise, that learns from every cut it has scored,
    one stream after the other: a step for all of them together would be coarser, and learn less.

    Given to `read_through`. Nothing in it waits for a GPU, so its steps are recorded and replayed.
    """

    def __init__(
        self,
        model: Bayesian,
        rate: float,
        clip: float = 0.0,
        by_variance: bool = False,
        temperatures: Sequence[float] = (),
    ) -> None:
        self.rate, self.clip = rate, clip
        self._more = tuple(temperatures)  # beside 1, which says whether it diverges
        self.guess = math.nan  # the loss a token of a uniform guess, known after the first cut
        self._worst: float | None = None  # a loss above this one has diverged
        self.model = copied(model).eval()
        for part in self.model.modules():
            # cuDNN runs backward in train mode alone. A subclass may do more there: left as it is.
            if isinstance(part, nn.RNNBase) and type(part) in CELLS.values():
                part.train().dropout = 0.0
                part.flatten_parameters()  # a copy's weights do not lie together
        self._parameters = [p for p in self.model.parameters() if p.requires_grad]
        self._shares = _shares(self.model) if by_variance else {}
        # A number that a weight cannot hold is refused by torch; with this one it diverges as well.
        self._step = min([rate, *(torch.finfo(p.dtype).max for p in self._parameters)])

    def __call__(self, x: Tensor, y: Tensor, *carried: Tensor) -> tuple[Tensor, ...]:
        """Score a cut, then learn from it. [1 + temperatures, T, B]: the first is without one."""
        at_once = self.rate > 0 and y.shape[1] == 1  # from what it is scored by
        with self.model.weights("mean"), torch.set_grad_enabled(at_once):
            logits, state = self.model(x, as_state(carried))
            losses = token_losses(logits, y)  # [T, B]
        scored = losses.detach().double()[None]
        if self._more:
            scored = torch.cat([scored, losses_by(logits.detach(), y, self._more)])
        self.guess = math.log(logits.shape[-1])
        if at_once:
            self._learn(losses.sum())
        elif self.rate > 0:
            for stream in range(y.shape[1]):
                self._learn(self._loss_of(stream, x, y, carried))
        return scored, *(s.detach() for s in as_tensors(state))

    def _loss_of(self, stream: int, x: Tensor, y: Tensor, carried: Sequence[Tensor]) -> Tensor:
        """The loss of one stream of a cut, by what the model has become. Where its part of the
        state is not plainly along the second axis, all streams are read for it."""
        streams = y.shape[1]
        alone = all([d for d, n in enumerate(t.shape) if n == streams] == [1] for t in carried)
        if alone:
            x, y, *carried = (t[:, stream : stream + 1].contiguous() for t in (x, y, *carried))
        with self.model.weights("mean"):
            logits, _ = self.model(x, as_state(carried))
        losses = token_losses(logits, y)
        return losses.sum() if alone else losses[:, stream].sum()

    def _learn(self, loss: Tensor) -> None:
        if not loss.requires_grad:
            raise UserError(
                "dynamic evaluation has nothing to learn: every mean and every ordinary parameter "
                "is frozen; thaw them with model.requires_grad_()"
            )
        found = torch.autograd.grad(loss, self._parameters, allow_unused=True)  # none for sigma
        pairs = [(p, g) for p, g in zip(self._parameters, found, strict=True) if g is not None]
        parameters: list[Tensor] = [p for p, _ in pairs]
        gradients = [g for _, g in pairs]
        with torch.no_grad():
            if self.clip > 0:
                norm = nn.utils.get_total_norm(gradients)
                factor = clip_pass(norm, self.clip)
                gradients = list(torch._foreach_mul(gradients, factor))
            if self._shares:
                shares = [self._shares.get(id(parameter)) for parameter in parameters]
                gradients = [
                    gradient if share is None else gradient * share
                    for gradient, share in zip(gradients, shares, strict=True)
                ]
            torch._foreach_add_(parameters, gradients, alpha=-self._step)

    def check(self, nll: float, count: int, targets: int) -> None:
        """Stop where the loss a token, over the first `count` targets, has gone astray; the first
        time it is that of the model as it was given."""
        if self._worst is None:
            if not math.isfinite(nll):
                raise UserError(f"the model's loss is {nll} before it has learnt anything")
            # e times the perplexity of a guess; a model that stands still does not diverge
            self._worst = max(nll, self.guess) + 1.0 if self.rate > 0 else math.inf
        elif not nll <= self._worst:
            raise Diverged(
                f"dynamic evaluation with the rate {self.rate:g} diverges: after {count:,} of "
                f"{targets:,} tokens the loss is {nll:.4g} nats a token (a uniform guess: "
                f"{self.guess:.4g}); use a lower rate, {self.rate / 10:g} say, or search for one"
            )


@torch.no_grad()
def _shares(model: Bayesian) -> dict[int, Tensor]:
    """Each weight's variance over the mean variance of all that have one, by the parameter that
    holds the means."""
    variances, left = {}, []
    for block in model.each_block():
        std = block.posterior.std(block.parameters_by_name)
        if std is not None:
            variances[id(block.loc)] = std.square()
            left += [scale.flatten() for _, scale in block.left() if scale is not None]
    if not variances:
        raise UserError(
            "no weight of the model has a variance to learn by: leave out --by-variance, or train "
            'a model with posterior.kind = "gaussian"'
        )
    mean = torch.cat(left).square().mean()
    return {name: variance / mean for name, variance in variances.items()}


def _means(
    learner: Learner, loader: StreamLoader, advance: Callable[[int], None] | None
) -> list[float]:
    """The loss a token, and that by each temperature, unless it diverges."""
    total = torch.zeros((), dtype=torch.float64, device=loader.device)
    count, nlls = 0, [math.nan]
    for number, losses in enumerate(read_through(loader, learner, advance)):
        total = total + losses.sum(dim=(1, 2))
        count += losses[0].numel()
        if number % LOOK_SEGMENTS and count < loader.targets:
            continue
        nlls = [each / count for each in total.tolist()]
        learner.check(nlls[0], count, loader.targets)
    return nlls
