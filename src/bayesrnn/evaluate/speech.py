"""Scores of utterances: the loss, and the error rate of what is read off; transcriptions."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bayesrnn.bayes import Network
from bayesrnn.data.utterances import UtteranceLoader
from bayesrnn.evaluate.ctc import (
    Decoder,
    LogProbs,
    confidences,
    ctc_nll,
    edit_distance,
    greedy,
)
from bayesrnn.evaluate.draws import drawn, each_draw, evaluating
from bayesrnn.evaluate.reader import Advance


@dataclass(frozen=True)
class SpeechEvaluation:
    """The NLL of utterances, in nats per label, and their label error rate `per`, in percent.

    The rate is all edit distances over all labels. `samples` is 0 for the posterior mean. With
    draws, an utterance's probability is averaged over them, and labels are read off the average of
    what they say at each step; `expected_nll` averages the log probabilities instead, and is None
    for the mean.
    """

    utterances: int
    labels: int
    samples: int
    nll: float
    per: float
    expected_nll: float | None


def evaluate_speech(
    model: Network,
    loader: UtteranceLoader,
    decode: Decoder = greedy,
    samples: int = 0,
    generator: torch.Generator | None = None,
    advance: Advance | None = None,
) -> SpeechEvaluation:
    """Score every utterance once, by the posterior mean or by draws.

    - `decode`: how labels are read off.
    - `samples`: the number of draws that are averaged; 0 uses the posterior mean.
    - `advance`: called with the number of labels of every batch, once per draw.
    """
    draws = each_draw(model, samples)
    batches: list[_Outputs] = []
    expected = 0.0
    for member in draws:
        with evaluating(model), drawn(member, samples, generator):
            found = _read(member, loader, advance)
        expected -= sum(each.log_sum.sum().item() for each in found) / len(draws)
        batches = [a.plus(b) for a, b in zip(batches, found, strict=True)] if batches else found
    nll = -sum((each.log_sum - math.log(len(draws))).sum().item() for each in batches)
    errors = sum(
        edit_distance(decode(log_p), labels)
        for each in batches
        for log_p, labels in each.utterances(len(draws))
    )
    count = loader.targets
    return SpeechEvaluation(
        len(loader.utterances),
        count,
        samples,
        nll / count,
        100 * errors / count,
        expected / count if samples or len(draws) > 1 else None,
    )


class _Outputs(NamedTuple):
    """What draws say of a batch, probabilities summed: at each step, and of each utterance."""

    log_p: Tensor
    lengths: Tensor
    y: Tensor
    log_sum: Tensor

    def plus(self, other: "_Outputs") -> "_Outputs":
        log_p = torch.logaddexp(self.log_p, other.log_p)
        return self._replace(log_p=log_p, log_sum=torch.logaddexp(self.log_sum, other.log_sum))

    def utterances(self, draws: int) -> Iterator[tuple[LogProbs, list[int]]]:
        """The average of `draws` at each step, and the true labels."""
        log_p = (self.log_p.double() - math.log(draws)).cpu().numpy()
        for b, (length, y) in enumerate(zip(self.lengths.tolist(), self.y.tolist(), strict=True)):
            yield log_p[:length, b], [label for label in y if label >= 0]


def _read(model: Network, loader: UtteranceLoader, advance: Advance | None) -> list[_Outputs]:
    """The outputs for all batches under the weights in force."""
    found = []
    for batch in loader.whole(advance):
        log_p, lengths = model(batch.x)
        log_sum = -ctc_nll(log_p, lengths, batch.y).double()
        found.append(_Outputs(log_p, lengths, batch.y, log_sum))
    return found


@dataclass(frozen=True)
class Transcription:
    """The label ids of an utterance, each with the probability that it is that label."""

    labels: list[int]
    confidence: list[float]


def transcribe(
    model: Network,
    features: Tensor,
    decode: Decoder,
    samples: int = 0,
    generator: torch.Generator | None = None,
) -> Transcription:
    """What is said in an utterance [T, bands], by the posterior mean.

    `samples` draws, if any, say how sure that is. `decode` reads the labels off.
    """
    with evaluating(model):
        means = _said(model, features, 0)
        draws = _said(model, features, samples, generator) if samples else means
    log_p = torch.stack(means).double().logsumexp(dim=0) - math.log(len(means))
    labels = decode(log_p.cpu().numpy())
    return Transcription(labels, confidences(draws, labels))


def _said(
    model: Network, features: Tensor, samples: int, generator: torch.Generator | None = None
) -> list[Tensor]:
    """log p [T, labels] of each draw."""
    found = []
    for member in each_draw(model, samples):
        with drawn(member, samples, generator):
            found.append(member(features[:, None])[0][:, 0])
    return found
