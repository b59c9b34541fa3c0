"""Connectionist temporal classification: the loss, and reading labels off a network's output.

A path gives every step a label or the blank; a labelling is what is left of a path when repeats are
merged and blanks removed, and its probability is the sum over its paths (Graves et al. 2006). The
blank is label 0.
"""

import heapq
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from bayesrnn.engine import compiled
from bayesrnn.models.speech import backwards

BLANK = 0
THRESHOLD = 0.995
"""Prefix search goes section by section, cut where the blank is more probable (Graves 2011)."""
MOST_PREFIXES = 300
"""After so many prefixes of a section a beam search takes over: a bound on the time for a network
that is not sure of anything."""
BEAM = 20

MOST_PLACES = 1 << 24
"""Places of paths, at all steps, that are scored at a time: a bound on the memory."""

LogProbs = NDArray[np.float64]
Labelling = list[int]
Decoder = Callable[[LogProbs], Labelling]
Search = Literal["greedy", "prefix", "beam"]


def ctc_nll(log_p: Tensor, lengths: Tensor, y: Tensor) -> Tensor:
    """-log p(labelling) of each utterance [B], in nats.

    `log_p` is [T, B, labels], `lengths` [B]; in `y` [B, S] negative numbers are padding. In
    training with lengths that are on a GPU it is `CtcOnDevice`; torch's own, which is faster where
    nothing is recorded, asks the host for them. Both in float64: in float32 the gradient of a long
    utterance has two or three digits.
    """
    if lengths.is_cuda and torch.is_grad_enabled():
        return CtcOnDevice.apply(log_p, lengths, y)
    counts = (y >= 0).sum(dim=1)
    found = F.ctc_loss(log_p.double(), y.clamp_min(0), lengths, counts, BLANK, reduction="none")
    return found.to(log_p.dtype)


class CtcOnDevice(torch.autograd.Function):
    """The same as a function of tensors alone, so that a GPU can record and replay it.

    Of utterances without frames and labels the loss is 0. Where it is infinite, the gradient is 0.
    One recursion over the steps finds both: that of alpha (Graves et al. 2006, eqs. 6 and 7), for
    each utterance and, beside it, for the same one read from its end, which gives beta (eqs. 10
    and 11). In float64: a few numbers a step, of long sums.
    """

    @staticmethod
    def forward(ctx: Any, log_p: Tensor, lengths: Tensor, y: Tensor) -> Tensor:
        steps, (B, S) = len(log_p), y.shape
        path = y.new_full((B, 2 * S + 1), BLANK)  # [B, P]: blanks around all labels
        path[:, 1::2] = y.clamp_min(0)
        last = 2 * (y >= 0).sum(dim=1)  # the place of the blank behind all labels
        inside = torch.arange(steps, device=y.device)[:, None, None] < lengths[:, None]

        in_time = backwards(lengths, steps).T[..., None]
        in_path = backwards(last + 1, 2 * S + 1)
        paths = torch.cat([path, path.gather(1, in_path)])
        both = torch.cat([log_p, log_p.gather(0, in_time.expand_as(log_p))], dim=1).double()
        said = both.gather(2, paths.expand(steps, -1, -1))  # [T, 2 B, P]
        come, end = _follow(said, torch.cat([inside, inside], dim=1), paths)

        ahead, behind = come.chunk(2, dim=1)
        behind = behind.gather(0, in_time.expand_as(behind)).gather(2, in_path.expand_as(behind))
        end = F.pad(end[:B], (1, 0), value=-torch.inf)  # place p is at p + 1
        log_total = end.gather(1, torch.stack([last, last + 1], dim=1)).logsumexp(dim=1)
        known = log_total.clamp_min(torch.finfo(torch.float64).min)  # -inf - -inf would be NaN
        part = (ahead + said[:, :B] + behind - known[:, None]).exp()
        on_path = torch.arange(2 * S + 1, device=y.device) <= last[:, None]
        part = part.masked_fill(~(inside & on_path), 0.0)
        # How probable each label is at each step, given the labelling: sums in a fixed order.
        labels = torch.arange(log_p.shape[2], device=y.device)
        is_label = (path[..., None] == labels).double()  # [B, P, labels]
        given = (part.transpose(0, 1) @ is_label).transpose(0, 1)
        ctx.save_for_backward(given.to(log_p.dtype))
        return -log_total.to(log_p.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (given,) = ctx.saved_tensors
        return -gradients[0][:, None] * given, None, None


def _follow(said: Tensor, inside: Tensor, paths: Tensor) -> tuple[Tensor, Tensor]:
    """The log probability of having come to each place of the paths [B, P], not counting what is
    `said` there, at each step [T, B, P]; and, with that, at the last step that is `inside`."""
    # What lies between is skipped where the labels differ (two blanks never do).
    past = paths != F.pad(paths, (2, 0), value=BLANK)[:, : paths.shape[1]]
    alpha = torch.full_like(said[0], -torch.inf)
    alpha[:, 0] = 0.0  # before the first step: as if at the first blank
    step = compiled(_arrive) if said.is_cuda else _arrive
    come = []
    for here, counts in zip(said, inside, strict=True):
        arrived, alpha = step(alpha, here, counts, past)
        come.append(arrived)
    return torch.stack(come), alpha


def _arrive(alpha: Tensor, said: Tensor, inside: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
    """One step of it: a path stays, goes on, or goes past a blank."""
    places = alpha.shape[1]
    one, two = (F.pad(alpha, (n, 0), value=-torch.inf)[:, :places] for n in (1, 2))
    arrived = torch.logaddexp(torch.logaddexp(alpha, one), two.masked_fill(~past, -torch.inf))
    return arrived, torch.where(inside, arrived + said, alpha)


def decoder(which: Search) -> Decoder:
    return {"greedy": greedy, "prefix": prefix_search, "beam": beam_search}[which]


def greedy(log_p: LogProbs) -> Labelling:
    """The labelling of the most probable path.

    >>> greedy(np.log([[0.1, 0.9], [0.1, 0.9], [0.9, 0.1], [0.2, 0.8]]))
    [1, 1]
    """
    best = log_p.argmax(axis=1)
    starts = np.flatnonzero(np.diff(best, prepend=BLANK) != 0)
    return [int(label) for label in best[starts] if label != BLANK]


def prefix_search(log_p: LogProbs, threshold: float = THRESHOLD) -> Labelling:
    """The most probable labelling of each section between steps that are blank, joined.

    With a threshold above 1 there is one section, and the labelling is the most probable one.

    >>> prefix_search(np.log([[0.6, 0.4], [0.6, 0.4]]))  # the best path is blank, blank: 0.36
    [1]
    """
    cuts = np.flatnonzero(log_p[:, BLANK] > np.log(threshold))
    sections = np.split(log_p, cuts)
    return [label for section in sections if len(section) for label in _search(section)]


class _Prefix(NamedTuple):
    """A prefix with the log probability, at each step, of having said it and nothing else: its last
    step being its last label, or a blank."""

    labels: tuple[int, ...]
    said: LogProbs
    blank: LogProbs


def _search(log_p: LogProbs) -> Labelling:
    """Graves' prefix search (2006, Section 3.2): always extend the prefix with most probability
    left beyond it, until that is less than the best labelling found; or, where that takes too long,
    the best of those found and of a beam search."""
    with np.errstate(divide="ignore"):  # log 0 is meant
        start = _Prefix((), np.full(len(log_p), -np.inf), np.cumsum(log_p[:, BLANK]))
        best, best_p = start.labels, start.blank[-1]
        queue = [(-_log_rest(0.0, best_p), start)]
        for _ in range(MOST_PREFIXES):
            if not queue or -queue[0][0] <= best_p:
                return list(best)
            _, prefix = heapq.heappop(queue)
            said, blank, whole = _extend(prefix, log_p)
            exactly = np.logaddexp(said[-1], blank[-1])
            for label in range(1, log_p.shape[1]):
                labels = (*prefix.labels, label)
                if exactly[label] > best_p:
                    best, best_p = labels, exactly[label]
                beyond = _log_rest(whole[label], exactly[label])
                if beyond > best_p:
                    longer = _Prefix(labels, said[:, label], blank[:, label])
                    heapq.heappush(queue, (-beyond, longer))
        labels, at_least = _beam(log_p, BEAM)
    return list(labels if at_least > best_p else best)


def _extend(prefix: _Prefix, log_p: LogProbs) -> tuple[LogProbs, LogProbs, LogProbs]:
    """`said` and `blank` of the prefix with each label behind it [T, labels], and the log
    probability of all labellings that begin so [labels]."""
    steps, labels = log_p.shape
    said, blank = np.full((2, steps, labels), -np.inf)
    if not prefix.labels:
        said[0] = log_p[0]
    whole = said[0].copy()
    for t in range(1, steps):
        new = np.full(labels, np.logaddexp(prefix.blank[t - 1], prefix.said[t - 1]))
        if prefix.labels:  # the same label again counts only after a blank
            new[prefix.labels[-1]] = prefix.blank[t - 1]
        new += log_p[t]
        said[t] = np.logaddexp(new, said[t - 1] + log_p[t])
        blank[t] = np.logaddexp(blank[t - 1], said[t - 1]) + log_p[t, BLANK]
        whole = np.logaddexp(whole, new)
    return said, blank, whole


def _log_rest(whole: float, part: float) -> float:
    """log(exp(whole) - exp(part)), -inf where nothing is left."""
    if part >= whole:
        return -np.inf
    return float(whole + np.log1p(-np.exp(part - whole)))


def beam_search(log_p: LogProbs, width: int = BEAM) -> Labelling:
    """The most probable labelling among the `width` prefixes kept at each step.

    >>> beam_search(np.log([[0.6, 0.4], [0.6, 0.4]]))
    [1]
    """
    return list(_beam(log_p, width)[0])


def _beam(log_p: LogProbs, width: int) -> tuple[tuple[int, ...], float]:
    """The best labelling, and the log probability of those of its paths that were followed."""
    beam: dict[tuple[int, ...], tuple[float, float]] = {(): (-np.inf, 0.0)}  # said, blank
    for now in log_p:
        following: dict[tuple[int, ...], tuple[float, float]]
        following = defaultdict(lambda: (-np.inf, -np.inf))
        likely = np.argsort(-now)[: width + 1].tolist()
        for labels, (said, blank) in beam.items():
            total = np.logaddexp(said, blank)
            old = following[labels]
            stays = said + now[labels[-1]] if labels else -np.inf
            following[labels] = (
                np.logaddexp(old[0], stays),
                np.logaddexp(old[1], total + now[BLANK]),
            )
            for label in likely:
                if label == BLANK:
                    continue
                longer = (*labels, label)
                comes = (blank if labels and labels[-1] == label else total) + now[label]
                old = following[longer]
                following[longer] = (np.logaddexp(old[0], comes), old[1])
        ranked = sorted(following.items(), key=lambda item: -np.logaddexp(*item[1]))
        beam = dict(ranked[:width])
    labels, both = next(iter(beam.items()))
    return labels, float(np.logaddexp(*both))


def confidences(log_p: Sequence[Tensor], labelling: Sequence[int]) -> list[float]:
    """For each label of a labelling, the probability that it is that one: p(labelling) over the sum
    of p of the labellings with any label in its place, or none.

    `log_p` holds [T, labels] of each draw of the weights; probabilities are averaged over them.
    """
    if not labelling:
        return []
    count = log_p[0].shape[1]
    variants = [
        [*labelling[:i], *([] if other == BLANK else [other]), *labelling[i + 1 :]]
        for i in range(len(labelling))
        for other in range(count)
    ]
    y = torch.tensor([[*each, *[-1] * (len(labelling) - len(each))] for each in variants])
    at_a_time = max(1, MOST_PLACES // (max(map(len, log_p)) * (2 * len(labelling) + 1)))
    found = [
        torch.cat(
            [
                -ctc_nll(
                    each.double().cpu()[:, None].expand(-1, len(some), -1),
                    torch.full((len(some),), len(each)),
                    some,
                )
                for some in y.split(at_a_time)
            ]
        )
        for each in log_p
    ]
    table = torch.stack(found).logsumexp(dim=0).view(len(labelling), count)
    chosen = table.gather(1, torch.tensor(labelling)[:, None])[:, 0]
    return (chosen - table.logsumexp(dim=1)).exp().tolist()


def edit_distance(one: Sequence[int], other: Sequence[int]) -> int:
    """The fewest insertions, deletions and substitutions that turn one into the other.

    >>> edit_distance([1, 2, 3], [2, 3, 4])
    2
    """
    row = list(range(len(other) + 1))
    for i, a in enumerate(one, start=1):
        diagonal, row[0] = row[0], i
        for j, b in enumerate(other, start=1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (a != b))
    return row[-1]
