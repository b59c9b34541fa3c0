"""How well a captioner expects what people said, and what it does not know of a caption."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bayesrnn.bayes import Bayesian
from bayesrnn.data.batching import Batch
from bayesrnn.data.padded import CaptionLoader
from bayesrnn.errors import require
from bayesrnn.evaluate.perplexity import Evaluation, evaluating, perplexity_of, token_losses
from bayesrnn.evaluate.reader import Advance, Reader, draw_seeds
from bayesrnn.evaluate.uncertainty import Sums


def caption_losses(model: Bayesian, vectors: Tensor, batch: Batch) -> Tensor:
    """-log p of each word of a batch, [T, B]; 0 where there is padding. `vectors` are those of all
    pictures."""
    logits, _ = model(batch.x[1:], pictures=vectors[batch.x[0]])
    losses = token_losses(logits, batch.y.clamp_min(0))
    return torch.where(batch.y >= 0, losses, 0.0)


@dataclass(frozen=True, eq=False)
class CaptionEvaluation(Evaluation):
    """`tokens` are words and end marks, never padding; `by_caption` is each caption's summed NLL,
    in the order of the data."""

    by_caption: Tensor

    def summary(self) -> dict[str, float | int | None]:
        keys = ("tokens", "samples", "nll", "perplexity", "expected_nll", "expected_perplexity")
        return {key: getattr(self, key) for key in keys}


def evaluate_captions(
    model: Bayesian,
    loader: CaptionLoader,
    vectors: Tensor,
    samples: int = 0,
    generator: torch.Generator | None = None,
    advance: Advance | None = None,
) -> CaptionEvaluation:
    """The perplexity per word of what people said; `samples` = 0 uses the posterior mean.

    With draws, their probabilities are averaged for every word; the expected figures average logs.
    Each draw is kept for all captions.
    """
    require((samples >= 0, "samples", f"must be 0 (the mean) or above, got {samples}"))
    log_sum: list[Tensor] = []  # by batch and word, log of the summed probabilities
    expected = 0.0
    with evaluating(model):
        for _ in range(max(samples, 1)):
            with model.weights("sample" if samples else "mean"):
                if samples:
                    model.resample(generator=generator)
                losses = _losses(model, loader, vectors, advance)
            expected += sum(each.sum().item() for each in losses)
            log_sum = (
                [torch.logaddexp(a, -b) for a, b in zip(log_sum, losses, strict=True)]
                if log_sum
                else [-each for each in losses]
            )
    draws = max(samples, 1)
    # Padding has the loss 0 in every draw, so its average is 0 as well.
    by_batch = torch.stack([(math.log(draws) - each).sum(dim=0) for each in log_sum]).cpu()
    by_caption = torch.zeros(len(loader.counts), dtype=torch.float64)
    order = torch.from_numpy(loader.order)
    by_caption[order[order >= 0]] = by_batch[order >= 0]
    nll = by_caption.sum().item() / loader.targets
    expected /= draws * loader.targets
    return CaptionEvaluation(
        loader.targets,
        samples,
        nll,
        perplexity_of(nll),
        expected if samples else None,
        perplexity_of(expected) if samples else None,
        by_caption,
    )


def _losses(
    model: Bayesian, loader: CaptionLoader, vectors: Tensor, advance: Advance | None
) -> list[Tensor]:
    """Of each batch in double, under the weights in force."""
    return [caption_losses(model, vectors, batch).double() for batch in loader.whole(advance)]


@dataclass(frozen=True, eq=False)
class WordFigures:
    """What a model thinks of each word of one caption and of its end, in double: probabilities by
    the average of `samples` draws (0: the mean), entropies in nats."""

    samples: int
    probability: Tensor
    total: Tensor
    aleatoric: Tensor
    epistemic: Tensor

    @property
    def confidence(self) -> float:
        """The geometric mean of the words' probabilities."""
        return self.probability.log().mean().exp().item()

    def mean(self, part: str) -> float:
        """Of `total`, `aleatoric` or `epistemic`, a word."""
        value: Tensor = getattr(self, part)
        return value.mean().item()


def caption_uncertainty(
    model: Bayesian,
    vectors: Tensor,
    rows: Sequence[int],
    captions: Sequence[Sequence[int]],
    end: int,
    samples: int = 10,
    seed: int = 1,
    batch: int = 250,
    advance: Advance | None = None,
) -> list[WordFigures]:
    """What draws disagree about in given captions (ids with their end mark), each of the picture in
    that row of `vectors`. `advance` is told the number of words after every draw of a batch."""
    require((samples >= 0, "samples", f"must be 0 (the mean) or above, got {samples}"))
    counts = [len(caption) for caption in captions]
    lengths = sorted(set(counts))
    loader = CaptionLoader(rows, captions, end, batch, lengths, device=vectors.device)
    seeds: list[int | None] = [*draw_seeds(seed, samples)] if samples else [None]
    found: dict[int, WordFigures] = {}
    with evaluating(model):
        for lines, each in zip(loader.order, loader, strict=True):
            sums = Sums(each.y.clamp_min(0))
            for own in seeds:
                reader = Reader(model, own, vectors.device)
                sums.add(reader.read(each.x[1:], pictures=vectors[each.x[0]]))
                if advance is not None:
                    advance(each.targets)
            found |= _by_caption(sums.figures(1), lines, counts, samples)
    return [found[i] for i in range(len(captions))]


def _by_caption(
    figures: Mapping[str, Tensor], lines: np.ndarray, counts: Sequence[int], samples: int
) -> dict[int, WordFigures]:
    """[T, B] figures taken apart, without padding."""
    return {
        int(line): WordFigures(
            samples,
            (-figures["nll"][: counts[line], column]).exp(),
            *(
                figures[part][: counts[line], column]
                for part in ("total", "aleatoric", "epistemic")
            ),
        )
        for column, line in enumerate(lines)
        if line >= 0
    }
