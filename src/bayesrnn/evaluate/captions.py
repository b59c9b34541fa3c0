"""How well a captioner expects what people said, and what it does not know of a caption."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bayesrnn.bayes import Network, members_of
from bayesrnn.data.batching import Batch
from bayesrnn.data.padded import CaptionLoader
from bayesrnn.evaluate.draws import drawn, each_draw, evaluating
from bayesrnn.evaluate.perplexity import Evaluation, perplexity_of, token_losses
from bayesrnn.evaluate.reader import Advance, Reader, readers
from bayesrnn.evaluate.uncertainty import TextUncertainty, by_draws, check_reading


def caption_losses(model: Network, vectors: Tensor, batch: Batch) -> Tensor:
    """-log p of each word of a batch, [T, B]; 0 where there is padding. `vectors` are those of all
    pictures."""
    logits, _ = model(batch.x[1:], pictures=vectors[batch.x[0]])
    losses = token_losses(logits, batch.y.clamp_min(0))
    return torch.where(batch.y >= 0, losses, 0.0)


@dataclass(frozen=True, eq=False)
class CaptionEvaluation(Evaluation):
    """An `Evaluation` of captions.

    `tokens` are words and end marks, never padding; `by_caption` is each caption's summed NLL, in
    the order of the data.
    """

    by_caption: Tensor

    def summary(self) -> dict[str, float | int | None]:
        """The figures of all captions together, by name."""
        keys = ("tokens", "samples", "nll", "perplexity", "expected_nll", "expected_perplexity")
        return {key: getattr(self, key) for key in keys}


def evaluate_captions(
    model: Network,
    loader: CaptionLoader,
    vectors: Tensor,
    samples: int = 0,
    generator: torch.Generator | None = None,
    advance: Advance | None = None,
) -> CaptionEvaluation:
    """The perplexity per word of what people said, by the posterior mean or by draws.

    `samples` is the number of draws; 0 uses the posterior mean. The draws' probabilities are
    averaged for every word; the expected figures average logs. Each draw is kept for all captions.
    `vectors` are those of all pictures. `advance` is called with the number of targets after every
    batch.
    """
    draws = each_draw(model, samples)
    log_sum: list[Tensor] = []  # by batch and word, log of the summed probabilities
    expected = 0.0
    with evaluating(model):
        for member in draws:
            with drawn(member, samples, generator):
                losses = [  # of each batch
                    caption_losses(member, vectors, batch).double()
                    for batch in loader.whole(advance)
                ]
            expected += sum(each.sum().item() for each in losses)
            log_sum = (
                [torch.logaddexp(a, -b) for a, b in zip(log_sum, losses, strict=True)]
                if log_sum
                else [-each for each in losses]
            )
    # Padding has the loss 0 in every draw, so its average is 0 as well.
    by_batch = torch.stack([(math.log(len(draws)) - each).sum(dim=0) for each in log_sum]).cpu()
    by_caption = torch.zeros(len(loader.counts), dtype=torch.float64)
    order = torch.from_numpy(loader.order)
    by_caption[order[order >= 0]] = by_batch[order >= 0]
    nll = by_caption.sum().item() / loader.targets
    expected /= len(draws) * loader.targets
    return CaptionEvaluation(
        loader.targets,
        samples,
        nll,
        perplexity_of(nll),
        expected if samples or len(draws) > 1 else None,
        perplexity_of(expected) if samples or len(draws) > 1 else None,
        by_caption,
    )


def caption_uncertainty(
    model: Network,
    loader: CaptionLoader,
    vectors: Tensor,
    samples: Sequence[int] = (10,),
    seed: int = 1,
    top: int = 1,
    advance: Advance | None = None,
) -> dict[int, list[TextUncertainty]]:
    """The uncertainty about given captions, for each number of draws in `samples`.

    It gives the figures of each caption's words and its end, in the order of the data. 0 draws are
    the posterior mean; draws are nested, and `advance` is called as by `text_uncertainty`.
    `vectors` are those of all pictures.
    """
    check_reading(samples, top)
    wanted = sorted(set(samples))
    members = len(members_of(model))
    found: dict[int, dict[int, TextUncertainty]] = {count: {} for count in wanted}
    with evaluating(model):
        for lines, batch in zip(loader.order, loader.whole(), strict=True):

            def read(reader: Reader, batch: Batch = batch) -> Tensor:
                logits = reader.read(batch.x[1:], pictures=vectors[batch.x[0]])
                if advance is not None:
                    advance(batch.targets)
                return logits

            mean = readers(model, 0, seed, vectors.device) if 0 in wanted else []
            draws = readers(model, wanted[-1], seed, vectors.device) if wanted[-1] else []
            figures = by_draws(mean, draws, read, batch.y.clamp_min(0), wanted, top, members)
            for count, each in figures.items():
                found[count] |= _by_caption(each, lines, loader.counts, count, members)
    return {count: [each[i] for i in range(len(each))] for count, each in found.items()}


def _by_caption(
    figures: Mapping[str, Tensor],
    lines: np.ndarray,
    counts: np.ndarray,
    samples: int,
    members: int,
) -> dict[int, TextUncertainty]:
    """[T, B] figures taken apart, without padding."""
    return {
        int(line): TextUncertainty(
            samples,
            members=members,
            **{name: value[: counts[line], column] for name, value in figures.items()},
        )
        for column, line in enumerate(lines)
        if line >= 0
    }
