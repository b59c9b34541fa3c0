"""What a model does not know of a text, token by token, and how well that tells texts apart.

Every draw reads the whole text with its own weights and its own carried state. All draws advance
together, cut by cut, so that only one cut's probabilities are ever in memory: those of one draw,
and the sum over the draws so far.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bayesrnn.bayes import Network, members_of
from bayesrnn.data.batching import Batch, StreamLoader
from bayesrnn.data.vocabulary import Vocabulary
from bayesrnn.errors import UserError, require
from bayesrnn.evaluate.calibration import BINS, Calibration, calibration_of_top
from bayesrnn.evaluate.draws import evaluating
from bayesrnn.evaluate.perplexity import (
    check_temperatures,
    perplexity_of,
    tempered,
    token_losses,
)
from bayesrnn.evaluate.reader import Reader, readers
from bayesrnn.files import write_atomic, write_csv

WINDOW = 50
"""Tokens a window, where nothing else is said."""
COLUMNS = ("nll", "probability", "total", "aleatoric", "epistemic", "variance", "max_probability")
"""The figures of a token that are written to files."""


@dataclass(frozen=True, eq=False)
class TextUncertainty:
    """The uncertainty about each predicted token, in the order of the text.

    Each figure is [N] in double, on the CPU. `samples` is 0 for the posterior mean. The first token
    of the text is not predicted, as none is before it, so N is one less than the tokens of the
    text.
    """

    samples: int
    targets: Tensor
    """The tokens that came, by id."""
    total: Tensor
    """The entropy of the averaged distribution, in nats: aleatoric + epistemic."""
    aleatoric: Tensor
    """The average of the draws' entropies, in nats."""
    epistemic: Tensor
    """The mutual information between the token and the weights: what the draws disagree about."""
    variance: Tensor
    """The variance over the draws of each word's probability, summed over the words."""
    nll: Tensor
    """-log of the averaged probability of the token that came."""
    brier: Tensor
    """The squared distance between the averaged distribution and the token that came."""
    top_tokens: Tensor
    """[N, top]: the most probable tokens by the averaged distribution, by id."""
    top_probabilities: Tensor
    """[N, top]: their probabilities."""
    members: int = 1
    """How many members an ensemble has, with `samples` draws of each."""

    @property
    def averaged(self) -> int:
        """How many networks' distributions were averaged."""
        return max(self.samples, 1) * self.members

    @property
    def probability(self) -> Tensor:
        """The averaged probability of the token that came."""
        return (-self.nll).exp()

    @property
    def max_probability(self) -> Tensor:
        """The probability of the most probable token."""
        return self.top_probabilities[:, 0].contiguous()

    @property
    def correct(self) -> Tensor:
        """Whether the most probable token came."""
        return self.top_tokens[:, 0] == self.targets

    @property
    def confidence(self) -> float:
        """The geometric mean of the probabilities of the tokens that came."""
        return (-self.nll.mean()).exp().item()

    def part(self, start: int, stop: int) -> "TextUncertainty":
        """The figures of the tokens from `start` to before `stop`."""
        parts: dict[str, Any] = {
            n: v[start:stop] for n, v in vars(self).items() if isinstance(v, Tensor)
        }
        return replace(self, **parts)

    def summary(self) -> dict[str, float]:
        """Means over the text, by name; entropies in nats per token."""
        nll = self.nll.mean().item()
        means = {name: getattr(self, name).mean().item() for name in COLUMNS[2:]}
        return {"samples": self.samples, "nll": nll, "perplexity": perplexity_of(nll), **means}

    def calibration(self, bins: int = BINS) -> Calibration:
        """The calibration of the most probable token."""
        return calibration_of_top(self.nll, self.brier, self.max_probability, self.correct, bins)


def text_uncertainty(
    model: Network,
    loader: StreamLoader,
    samples: Sequence[int] = (10,),
    seed: int = 1,
    top: int = 1,
    advance: Callable[[int], None] | None = None,
    temperature: float = 1.0,
) -> dict[int, TextUncertainty]:
    """The uncertainty about every token of a text, for each number of draws in `samples`.

    - `samples`: 0 is the posterior mean. The draws are nested: those of a smaller number are the
      first of a larger one, whatever the others are.
    - `seed`: of the draws.
    - `top`: how many of the most probable tokens are kept.
    - `advance`: called with the number of targets after every cut of every draw.
    - `temperature`: logits are divided by it (see `search_temperature`).
    """
    check_reading(samples, top)
    check_temperatures([temperature])
    wanted = sorted(set(samples))
    mean = readers(model, 0, seed, loader.device) if 0 in wanted else []
    draws = readers(model, wanted[-1], seed, loader.device) if wanted[-1] else []
    members = len(members_of(model))
    found: dict[int, list[dict[str, Tensor]]] = {count: [] for count in wanted}
    with evaluating(model):
        for batch in loader.whole():

            def read(reader: Reader, batch: Batch = batch) -> Tensor:
                logits = reader.read(batch.x)
                if advance is not None:
                    advance(batch.targets)
                return tempered(logits, temperature)

            for count, cut in by_draws(mean, draws, read, batch.y, wanted, top, members).items():
                found[count].append(cut)
    return {n: TextUncertainty(n, members=members, **_joined(cuts)) for n, cuts in found.items()}


def by_draws(
    mean: Sequence[Reader],
    draws: Sequence[Reader],
    read: Callable[[Reader], Tensor],
    y: Tensor,
    samples: Sequence[int],
    top: int,
    members: int,
) -> dict[int, dict[str, Tensor]]:
    """One cut's figures, [T, B] each, by each number of draws of so many members: `read` gives a
    reader's logits."""
    found = {}
    for which in (mean, draws):
        sums = Sums(y)
        for count, reader in enumerate(which, start=1):
            sums.add(read(reader))
            key = 0 if which is mean else count // members
            if count % members == 0 and key in samples:
                found[key] = sums.figures(top)
    return found


def check_reading(samples: Sequence[int], top: int) -> None:
    """What may be asked of a reading."""
    if not isinstance(samples, Sequence) or not all(isinstance(n, Integral) for n in samples):
        raise TypeError(f"samples must be numbers of draws, such as (0, 10), got {samples!r}")
    require(
        (len(samples) > 0, "samples", "must name at least one number of draws"),
        (
            all(count >= 0 for count in samples),
            "samples",
            f"must be 0 (the mean) or above, got {list(samples)}",
        ),
        (top >= 1, "top", f"must be at least 1, got {top}"),
    )


def reading_cost(model: Network, targets: int, samples: Sequence[int]) -> int:
    """All that `text_uncertainty` and `caption_uncertainty` will tell `advance`."""
    return targets * (max(samples) + (0 in samples)) * len(members_of(model))


def write_tokens(path: Path, found: Iterable[TextUncertainty], vocabulary: Vocabulary) -> None:
    """Write a file with a line for each predicted token and number of draws.

    A line has the number of draws, the token's place in the text (the first one, which is not
    predicted, is 0), the token, the most probable one, and the figures. The file is CSV, or, if its
    name ends in .json, one object with the same `columns` and `rows`.
    """
    columns = ["samples", "place", "token", "predicted", *COLUMNS]
    rows: list[list[Any]] = []
    for text in found:
        tokens = vocabulary.decode(text.targets.tolist())
        predicted = vocabulary.decode(text.top_tokens[:, 0].tolist())
        figures = torch.stack([getattr(text, name) for name in COLUMNS], dim=1).tolist()
        for place, line in enumerate(zip(tokens, predicted, figures, strict=True), start=1):
            rounded = [float(f"{value:.9g}") for value in line[2]]
            rows.append([text.samples, place, line[0], line[1], *rounded])
    if path.suffix == ".json":
        contents = json.dumps({"columns": columns, "rows": rows}, ensure_ascii=False)
        write_atomic(path, contents.encode())
        return
    write_csv(path, [columns, *rows])


class Sums:
    """Over the draws so far, of one cut with the targets y [T, B]."""

    def __init__(self, y: Tensor) -> None:
        self._y = y
        self._count = 0
        self._p: Tensor | None = None  # [T, B, V]
        self._entropy = torch.zeros(y.shape, dtype=torch.float64, device=y.device)
        self._square = torch.zeros_like(self._entropy)
        self._log_p = torch.full_like(self._entropy, -math.inf)  # log of the summed probabilities

    def add(self, logits: Tensor) -> None:
        p = logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(dim=-1)
        self._count += 1
        self._entropy += _entropy(p)
        self._square += _square(p)
        self._log_p = torch.logaddexp(self._log_p, -token_losses(logits, self._y).double())
        self._p = p if self._p is None else self._p.add_(p)

    def figures(self, top: int) -> dict[str, Tensor]:
        """[T, B] each, the top ones [T, B, top]."""
        assert self._p is not None
        p = self._p / self._count
        total, square = _entropy(p), _square(p)
        aleatoric = self._entropy / self._count
        probabilities, tokens = p.topk(min(top, p.shape[-1]), dim=-1)
        of_target = p.gather(-1, self._y.unsqueeze(-1)).squeeze(-1).double()
        figures = {
            "targets": self._y,
            "total": total,
            "aleatoric": aleatoric,
            "epistemic": (total - aleatoric).clamp_min(0.0),
            "variance": (self._square / self._count - square).clamp_min(0.0),
            "nll": math.log(self._count) - self._log_p,
            "brier": square - 2 * of_target + 1,
            "top_tokens": tokens,
            "top_probabilities": probabilities.double(),
        }
        return {name: figure.cpu() for name, figure in figures.items()}


def _entropy(p: Tensor) -> Tensor:
    return _sum(torch.special.entr(p))


def _square(p: Tensor) -> Tensor:
    return _sum(p.square())


def _sum(x: Tensor) -> Tensor:
    """Over the last axis, in double from short sums on: as good as double, and much faster."""
    return torch.stack([part.sum(dim=-1) for part in x.split(500, dim=-1)]).double().sum(dim=0)


def _joined(cuts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Cuts [T, B] to [N], stream after stream: the order of the text."""
    whole = {name: torch.cat([cut[name] for cut in cuts]) for name in cuts[0]}
    return {name: figure.transpose(0, 1).flatten(0, 1) for name, figure in whole.items()}


def joined(texts: Sequence[TextUncertainty]) -> TextUncertainty:
    """One after another, as if they were one; all by the same number of draws."""
    names = [name for name, value in vars(texts[0]).items() if isinstance(value, Tensor)]
    whole: dict[str, Any] = {
        name: torch.cat([getattr(text, name) for text in texts]) for name in names
    }
    return replace(texts[0], **whole)


# --- texts that are unlike the one trained on ----------------------------------------------------


def reversed_text(ids: NDArray[np.int32]) -> NDArray[np.int32]:
    """The tokens from the last to the first (Fortunato 2017, Section 6.1.1).

    >>> reversed_text(np.array([3, 1, 2], dtype=np.int32)).tolist()
    [2, 1, 3]
    """
    return np.ascontiguousarray(ids[::-1])


def shuffled_text(ids: NDArray[np.int32], seed: int = 1) -> NDArray[np.int32]:
    """The same tokens in a random order."""
    return np.random.default_rng(seed).permutation(ids)


def unigram_entropy(ids: NDArray[np.int32]) -> float:
    """The entropy of the text's own word frequencies, in nats per word: it knows nothing of order.

    >>> round(unigram_entropy(np.array([0, 1, 0, 1], dtype=np.int32)), 4)
    0.6931
    """
    counts = np.unique(ids, return_counts=True)[1] / len(ids)
    return float(-(counts * np.log(counts)).sum())


@dataclass(frozen=True)
class EntropyGap:
    """The predictive entropy on a text and on its reverse, per word in nats, and the difference
    (Fortunato 2017, eqs. 19 and 20)."""

    samples: int
    entropy: float
    entropy_reversed: float
    gap: float


def entropy_gap(text: TextUncertainty, backwards: TextUncertainty) -> EntropyGap:
    """How much less sure the model is of the text read backwards, by the averaged distribution.

    Large is good: it is less sure where it should be. Both arguments are of `text_uncertainty`, by
    the same number of draws.
    """
    require(
        (
            text.samples == backwards.samples,
            "samples",
            f"must be the same on both texts, got {text.samples} and {backwards.samples}",
        )
    )
    here, there = text.total.mean().item(), backwards.total.mean().item()
    return EntropyGap(text.samples, here, there, there - here)


@dataclass(frozen=True)
class Detection:
    """How well windows of another text stand out by their mean uncertainty.

    `windows` and `windows_other` count them, each of `window` tokens. AUROC and AUPR are by entropy
    and by mutual information; the latter are None with fewer than two draws, which cannot disagree.
    """

    samples: int
    window: int
    windows: int
    windows_other: int
    entropy_auroc: float
    entropy_aupr: float
    information_auroc: float | None
    information_aupr: float | None


def detect(text: TextUncertainty, other: TextUncertainty, window: int = WINDOW) -> Detection:
    """Tell windows of `other` from windows of `text`, by predictive entropy and mutual information.

    `other` is the positives. What is left over at the end of a text, shorter than `window` tokens,
    is no window.
    """
    by_entropy = windows(text.total, window), windows(other.total, window)
    disagree = min(text.averaged, other.averaged) >= 2
    inside, outside = windows(text.epistemic, window), windows(other.epistemic, window)
    return Detection(
        text.samples,
        window,
        len(by_entropy[0]),
        len(by_entropy[1]),
        auroc(*by_entropy),
        aupr(*by_entropy),
        auroc(inside, outside) if disagree else None,
        aupr(inside, outside) if disagree else None,
    )


def windows(values: Tensor, window: int) -> Tensor:
    """Means of windows side by side.

    >>> windows(torch.tensor([1.0, 3.0, 5.0, 7.0, 9.0]), 2).tolist()
    [2.0, 6.0]
    """
    check_window(len(values), window)
    count = len(values) // window
    return values[: count * window].view(count, window).mean(dim=1)


def check_window(tokens: int, window: int) -> None:
    """A text must have one window at least."""
    require((window >= 1, "window", f"must be at least 1, got {window}"))
    if tokens < window:
        raise UserError(
            f"a text of {tokens} predicted tokens has no window of {window}; "
            "give a longer text, or a shorter window"
        )


def auroc(inside: Tensor, outside: Tensor) -> float:
    """The area under the ROC curve: how often a score from `outside` is above one from `inside`.

    A tie counts a half. It is by ranks (Mann and Whitney), so it takes a sort and not all pairs.

    >>> auroc(torch.tensor([0.1, 0.2]), torch.tensor([0.2, 0.3]))
    0.875
    """
    m, n = len(inside), len(outside)
    above = ranks(torch.cat([inside, outside]))[m:].sum().item() - n * (n + 1) / 2
    return above / (m * n)


def ranks(values: Tensor) -> Tensor:
    """From 1 on; ties share their mean rank.

    >>> ranks(torch.tensor([0.5, 0.1, 0.5])).tolist()
    [2.5, 1.0, 2.5]
    """
    _, place, sizes = values.unique(return_inverse=True, return_counts=True)
    return (sizes.cumsum(0) - (sizes - 1) / 2).double()[place]


def aupr(inside: Tensor, outside: Tensor) -> float:
    """The average precision of finding `outside` by high scores.

    It is the sum over thresholds of the precision there times the recall gained; ties are found
    together.

    >>> aupr(torch.tensor([0.1, 0.2]), torch.tensor([0.3, 0.4]))
    1.0
    """
    both = torch.cat([inside, outside])
    _, place = both.unique(return_inverse=True)
    levels = int(place.max()) + 1
    found = torch.bincount(place[len(inside) :], minlength=levels).flip(0).double()
    called = torch.bincount(place, minlength=levels).flip(0).double().cumsum(0)
    precision = found.cumsum(0) / called
    return (precision * found).sum().item() / len(outside)
