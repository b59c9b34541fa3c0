"""Losses against torch.distributions, and figures of examples against the definitions."""

import csv
import math
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import torch.distributions as td
from torch import Tensor, nn

from bayesrnn import Categorical, ExampleLoader, Examples, Gaussian, bayesianize
from bayesrnn.bayes import Bayesian
from bayesrnn.evaluate import (
    NormalMixture,
    calibration_of_numbers,
    evaluate_labelled,
    labelled_uncertainty,
    outputs,
    predict,
    write_predictions,
)
from bayesrnn.evaluate.calibration import calibration


def test_the_loss_of_a_class_is_the_distributions() -> None:
    raw, y = torch.randn(7, 4), torch.randint(4, (7,))
    expected = -td.Categorical(logits=raw).log_prob(y)
    assert torch.allclose(Categorical().nll(raw, y), expected, atol=1e-6)


def test_the_loss_of_a_number_is_the_distributions() -> None:
    raw, y = torch.randn(7, 2), torch.randn(7)
    expected = -td.Normal(raw[:, 0], nn.functional.softplus(raw[:, 1])).log_prob(y)
    assert torch.allclose(outputs.Normal().nll(raw, y), expected, atol=1e-5)
    expected = -td.Normal(raw[:, 0], 0.3).log_prob(y)
    assert torch.allclose(outputs.Normal(scale=0.3).nll(raw[:, 0], y), expected, atol=1e-5)


def test_the_loss_of_a_class_whose_probability_is_0_in_single_precision() -> None:
    linear = nn.Linear(2, 2, bias=False)
    linear.weight.data = torch.tensor([[0.0, 0.0], [200.0, 1.0]])
    model = bayesianize(linear, Gaussian())
    loader = ExampleLoader(Examples(torch.eye(2), torch.tensor([0, 1]), ["a", "b"]), 2)
    result, prediction = evaluate_labelled(model, loader, Categorical())
    assert prediction.mean[0, 0] == 0
    assert result.scores["nll"] == pytest.approx(100.157, abs=1e-3)


def test_errors_are_counted_in_percent_and_as_root_mean_square() -> None:
    logits = torch.tensor([[2.0, 0, 0], [0, 2, 0], [0, 0, 2], [2, 0, 0]])
    prediction = Categorical().predict(Categorical().moments(logits))
    assert Categorical().error(prediction, torch.tensor([0, 1, 2, 1])) == {"error_percent": 25.0}
    normal = outputs.Normal(scale=1.0)
    numbers = normal.predict(normal.moments(torch.tensor([1.0, 2.0])))
    assert normal.error(numbers, torch.tensor([4.0, 6.0])) == {"rmse": pytest.approx(12.5**0.5)}


def noisy_model(outputs_: int) -> tuple[Bayesian, Examples]:
    model = bayesianize(nn.Linear(3, outputs_), Gaussian(scale=0.5))
    x = torch.randn(23, 3)
    y: Tensor = torch.randint(outputs_, (23,))
    return model, Examples(x, y, [f"no {i}" for i in range(23)])


@pytest.mark.parametrize("samples", [0, 5])
def test_batches_and_order_do_not_change_the_figures(samples: int) -> None:
    model, examples = noisy_model(4)
    found = []
    for loader in (
        ExampleLoader(examples, 23),
        ExampleLoader(examples, 5),
        ExampleLoader(examples, 4, seed=1),
    ):
        loader.position = 1
        generator = torch.Generator().manual_seed(3)
        result, prediction = evaluate_labelled(model, loader, Categorical(), samples, generator)
        assert loader.position == 1
        assert (result.examples, result.samples) == (23, samples)
        found.append([*result.scores.values(), result.expected_nll or 0.0])
        if loader.seed is None:
            generator.manual_seed(3)
            expected = predict(model, examples.x, samples=samples, generator=generator)
            for ours, theirs in zip(prediction, expected, strict=True):
                assert torch.allclose(ours, theirs, atol=1e-6)
            p = expected.mean[torch.arange(23), examples.y]
            assert result.scores["nll"] == pytest.approx(-p.log().mean().item(), rel=1e-5)
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert found[2] == pytest.approx(found[0], rel=1e-5)


def test_the_average_of_draws_is_never_worse_than_the_expected_loss() -> None:
    """Jensen: -log of an average <= the average of -log."""
    model, examples = noisy_model(2)
    loader = ExampleLoader(examples, 8)
    result, _ = evaluate_labelled(model, loader, Categorical(), samples=8)
    assert result.expected_nll is not None
    assert result.scores["nll"] < result.expected_nll
    assert evaluate_labelled(model, loader, Categorical())[0].expected_nll is None
    with pytest.raises(ValueError, match="samples must be 0"):
        evaluate_labelled(model, loader, Categorical(), samples=-1)


def test_ratings_are_averaged_as_a_mixture_of_normals() -> None:
    model, classes = noisy_model(2)
    y = torch.randn(23)
    loader = ExampleLoader(Examples(classes.x, y, classes.names), 10)
    generator = torch.Generator().manual_seed(1)
    result, prediction = evaluate_labelled(model, loader, outputs.Normal(), 6, generator)
    generator.manual_seed(1)
    raws = []
    model.eval()
    for _ in range(6):
        with model.weights("sample"), torch.no_grad():
            model.resample(generator=generator)
            raws.append(model(classes.x))
    raw = torch.stack(raws)
    scale = nn.functional.softplus(raw[..., 1])
    log_p = td.Normal(raw[..., 0], scale).log_prob(y)
    assert result.expected_nll == pytest.approx(-log_p.mean().item(), rel=1e-5)
    mixture = (log_p.logsumexp(dim=0) - math.log(6)).mean().item()
    assert result.scores["nll"] == pytest.approx(-mixture, rel=1e-5)
    mean = raw[..., 0].mean(dim=0)
    assert result.scores["rmse"] == pytest.approx(
        (mean - y).square().mean().sqrt().item(), rel=1e-5
    )
    variance = raw[..., 0].var(dim=0, unbiased=False)
    assert torch.allclose(prediction.epistemic, variance, atol=1e-5)
    assert torch.allclose(prediction.aleatoric, scale.square().mean(dim=0), atol=1e-5)
    assert result.mixture is not None
    assert torch.allclose(result.mixture.means, raw[..., 0], atol=1e-6)
    assert torch.allclose(result.mixture.scales, scale, atol=1e-6)
    assert result.mixture.nll(y).mean().item() == pytest.approx(result.scores["nll"], rel=1e-5)


@pytest.mark.parametrize("samples", [0, 4])
def test_the_uncertainty_of_numbers_is_variances_and_the_calibration_of_the_mixture(
    samples: int,
) -> None:
    model, classes = noisy_model(2)
    y = torch.randn(23)
    loader = ExampleLoader(Examples(classes.x, y, classes.names), 10)
    result, prediction = evaluate_labelled(model, loader, outputs.Normal(), samples)
    assert result.mixture is not None
    assert result.mixture.means.shape == (max(samples, 1), 23)
    line = labelled_uncertainty(result, prediction, y)
    assert line["samples"] == samples
    assert line["epistemic"] == pytest.approx(
        result.mixture.means.var(dim=0, correction=0).mean().item(), rel=1e-4, abs=1e-9
    )
    assert line["total"] == pytest.approx(line["aleatoric"] + line["epistemic"], rel=1e-5)
    expected = asdict(calibration_of_numbers(result.mixture, y))
    assert {key: line[key] for key in expected} == pytest.approx(expected, rel=1e-5)
    assert line["rmse"] == pytest.approx(result.scores["rmse"], rel=1e-5)


def test_classes_have_no_mixture() -> None:
    model, examples = noisy_model(4)
    result, prediction = evaluate_labelled(model, ExampleLoader(examples, 10), Categorical(), 3)
    assert result.mixture is None
    line = labelled_uncertainty(result, prediction, examples.y)
    assert line["ece"] == calibration(prediction.mean, examples.y).ece


@pytest.mark.parametrize("output", [Categorical(), outputs.Normal()])
def test_predictions_are_written_a_line_an_example(
    output: Categorical | outputs.Normal, tmp_path: Path
) -> None:
    model, examples = noisy_model(2)
    loader = ExampleLoader(examples, 10)
    result, prediction = evaluate_labelled(model, loader, output, samples=4)
    write_predictions(tmp_path / "all.csv", examples, prediction, result.mixture)
    with (tmp_path / "all.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [line["example"] for line in lines] == examples.names
    assert [int(line["target"]) for line in lines] == examples.y.tolist()
    for i, line in enumerate(lines):
        for part in ("total", "aleatoric", "epistemic"):
            assert float(line[part]) == pytest.approx(getattr(prediction, part)[i].item())
        if isinstance(output, Categorical):
            p = [float(line["p0"]), float(line["p1"])]
            assert p == pytest.approx(prediction.mean[i].tolist())
            assert int(line["predicted"]) == int(p[1] > p[0])
        else:
            assert float(line["predicted"]) == pytest.approx(prediction.mean[i].item())
            assert result.mixture is not None
            each = NormalMixture(result.mixture.means[:, i], result.mixture.scales[:, i])
            ends = [float(line["lower"]), float(line["upper"])]
            found = [each.cdf(torch.tensor(end)).item() for end in ends]
            assert found == pytest.approx([0.05, 0.95], abs=1e-6)
