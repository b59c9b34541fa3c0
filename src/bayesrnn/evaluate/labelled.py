"""Scores of labelled examples, by the posterior mean or by the average over draws."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bayesrnn.bayes import Bayesian, Network
from bayesrnn.data.labelled import ExampleLoader, Examples
from bayesrnn.evaluate.calibration import BINS, calibration
from bayesrnn.evaluate.draws import drawn, each_draw, evaluating
from bayesrnn.evaluate.intervals import calibration_of_numbers
from bayesrnn.evaluate.mixture import NormalMixture
from bayesrnn.evaluate.outputs import Likelihood, Normal, Prediction
from bayesrnn.evaluate.perplexity import Scored, check_temperatures, losses_by, score
from bayesrnn.files import expanded, write_csv


@dataclass(frozen=True)
class LabelledEvaluation:
    """How good predictions of classes or numbers are.

    - `scores`: the NLL in nats per example, and the error: in percent for classes, the root mean
      squared error for numbers.
    - `samples`: 0 for the posterior mean. With draws, probabilities are averaged.
    - `expected_nll`: averages the draws' log probabilities instead; None for the mean.
    - `mixture`: the whole distribution of each number; None for classes.
    """

    examples: int
    samples: int
    scores: dict[str, float]
    expected_nll: float | None
    mixture: NormalMixture | None = field(default=None, repr=False, compare=False)


def evaluate_labelled(
    model: Network,
    loader: ExampleLoader,
    output: Likelihood,
    samples: int = 0,
    generator: torch.Generator | None = None,
    advance: Callable[[int], None] | None = None,
) -> tuple[LabelledEvaluation, Prediction]:
    """Score every example once, in the loader's order, by the posterior mean or by draws.

    - `output`: what the raw output means: `Categorical()` or `outputs.Normal()`.
    - `samples`: the number of draws that are averaged; 0 uses the posterior mean. Each draw is kept
      for all examples.
    - `advance`: called with the number of examples after every batch.

    Returns the scores, and the predictions.
    """
    draws = each_draw(model, samples)
    sums: tuple[Tensor, ...] = ()
    expected = 0.0
    log_sum: Tensor | None = None  # per example, log of the summed probabilities
    raws: list[Tensor] = []  # of numbers, which a mixture is made of
    with evaluating(model):
        for member in draws:
            with drawn(member, samples, generator):
                raw, targets = _outputs(member, loader, advance)
            if isinstance(output, Normal):
                raws.append(raw)
            moments = output.moments(raw)
            sums = tuple(a + b for a, b in zip(sums, moments, strict=True)) if sums else moments
            log_p = -output.nll(raw, targets).double()
            expected -= log_p.mean().item() / len(draws)
            log_sum = log_p if log_sum is None else torch.logaddexp(log_sum, log_p)
        prediction = output.predict(tuple(total / len(draws) for total in sums))
    assert log_sum is not None
    nll = math.log(len(draws)) - log_sum.mean().item()
    scores = {"nll": nll, **output.error(prediction, targets)}
    mixture = output.mixture(torch.stack(raws)) if isinstance(output, Normal) else None
    expected_nll = expected if samples or len(draws) > 1 else None
    return LabelledEvaluation(loader.targets, samples, scores, expected_nll, mixture), prediction


def score_labelled(
    model: Network,
    loader: ExampleLoader,
    temperatures: Sequence[float],
    samples: int = 0,
    generator: torch.Generator | None = None,
    advance: Callable[[int], None] | None = None,
) -> Scored:
    """The loss of classes by several temperatures at once, for which each draw is run but once."""
    check_temperatures(temperatures)

    def losses(member: Bayesian) -> Iterator[Tensor]:
        raw, targets = _outputs(member, loader, advance)
        if targets.is_floating_point():
            raise ValueError("a temperature is of classes, and the targets here are numbers")
        yield losses_by(raw, targets, temperatures)

    return score(model, samples, generator, losses)


def labelled_uncertainty(
    found: LabelledEvaluation, prediction: Prediction, targets: Tensor, bins: int = BINS
) -> dict[str, Any]:
    """The mean uncertainties and the calibration of what `evaluate_labelled` found, by name.

    `targets` are the true classes or numbers; `bins` is for the calibration of classes.
    """
    parts = Prediction._fields[1:]
    means = {part: getattr(prediction, part).double().mean().item() for part in parts}
    if found.mixture is None:
        scores = asdict(calibration(prediction.mean.cpu(), targets.cpu(), bins))
    else:
        scores = asdict(calibration_of_numbers(found.mixture, targets.to(prediction.mean.device)))
    return {"samples": found.samples, **means, **scores, "nll": found.scores["nll"]}


def write_predictions(
    path: str | Path,
    examples: Examples,
    prediction: Prediction,
    mixture: NormalMixture | None = None,
) -> None:
    """Write a CSV file with a line for each example: its name, target, prediction and uncertainty.

    For classes: the most probable one, all probabilities, and entropies in nats. For numbers: the
    mean, with their `mixture` also the ends of the central 90 % interval, and variances. Total =
    aleatoric + epistemic.
    """
    mean = prediction.mean.cpu()
    rest = torch.stack([part.cpu() for part in prediction[1:]], dim=1)
    columns = ["example", "target", "predicted"]
    rows = [[name, y] for name, y in zip(examples.names, examples.y.tolist(), strict=True)]
    if mean.dim() == 1:
        ends = [] if mixture is None else [end[:, None].cpu() for end in mixture.interval(0.9)]
        columns += ["lower", "upper"] if ends else []
        numbers = torch.cat([mean[:, None], *ends, rest], dim=1).tolist()
    else:
        columns += [f"p{c}" for c in range(mean.shape[1])]
        best = mean.argmax(dim=1).tolist()
        numbers = [
            [b, *p] for b, p in zip(best, torch.cat([mean, rest], dim=1).tolist(), strict=True)
        ]
    table: list[list[Any]] = [[*columns, *Prediction._fields[1:]]]
    for row, line in zip(rows, numbers, strict=True):
        values = [*row, *line]
        table.append([float(f"{v:.7g}") if isinstance(v, float) else v for v in values])
    write_csv(expanded(path), table)


def _outputs(
    model: Bayesian, loader: ExampleLoader, advance: Callable[[int], None] | None
) -> tuple[Tensor, Tensor]:
    """The raw output for all examples under the weights in force, and their targets."""
    found = [(model(batch.x), batch.y) for batch in loader.whole(advance)]
    raw, targets = zip(*found, strict=True)
    return torch.cat(raw), torch.cat(targets)
