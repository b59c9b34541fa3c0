"""Model averages and their uncertainty, against sums over explicit draws."""

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributions import Categorical as TorchCategorical

import bayesrnn as br
from bayesrnn.errors import Invalid

SAMPLES = 7


def make(outputs: int, dtype: torch.dtype = torch.float64) -> br.Bayesian:
    torch.manual_seed(2)
    return br.bayesianize(nn.Linear(3, outputs).to(dtype), br.Gaussian(0.5), br.Normal())


def raw_draws(model: br.Bayesian, x: Tensor, seed: int) -> Tensor:
    """W x + b for explicit draws of W and b, stacked."""
    generator = torch.Generator().manual_seed(seed)
    (block,), moments, draws = list(model.each_block()), model.moments(), []
    for _ in range(SAMPLES):
        noise = torch.empty(block.loc.numel(), dtype=x.dtype).normal_(generator=generator)
        eps = block.layout.split(noise)
        theta = {n: loc + scale * eps[n] for n, (loc, scale) in moments.items()}  # type: ignore[operator]
        draws.append(x @ theta["weight"].T + theta["bias"])
    return torch.stack(draws)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(4, 3, dtype=torch.float64)


def test_categories_are_averaged_and_taken_apart(x: Tensor) -> None:
    model = make(5)
    found = br.predict(model, x, samples=SAMPLES, generator=torch.Generator().manual_seed(3))
    p = raw_draws(model, x, 3).softmax(-1)
    torch.testing.assert_close(found.mean, p.mean(0))
    torch.testing.assert_close(found.total, TorchCategorical(p.mean(0)).entropy())
    torch.testing.assert_close(found.aleatoric, TorchCategorical(p).entropy().mean(0))
    information = (p * (p / p.mean(0)).log()).sum(-1).mean(0)  # mean KL from the average
    torch.testing.assert_close(found.epistemic, information)
    assert (found.epistemic > 0.01).all()


@pytest.mark.parametrize("samples", [10**9, 10**20])  # zeros too many: gigabytes, or a traceback
def test_more_draws_than_anyone_means_are_refused(samples: int, x: Tensor) -> None:
    with pytest.raises(Invalid, match=r"samples must be 0 .* 1,000,000 at the most"):
        br.predict(make(5), x, samples=samples)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_entropy_of_the_average_is_at_least_the_average_entropy(dtype: torch.dtype) -> None:
    x = torch.randn(200, 3).to(dtype)
    for output, outputs in ((br.Categorical(), 6), (br.outputs.Normal(), 2)):
        found = br.predict(make(outputs, dtype), x, samples=SAMPLES, output=output)
        assert (found.total >= found.aleatoric - 1e-6).all()
        assert (found.epistemic >= 0).all()
        gap = found.total - (found.aleatoric + found.epistemic)
        assert gap.abs().max() < 1e-6
        assert found.mean.dtype == found.total.dtype == found.epistemic.dtype == dtype


@pytest.mark.parametrize("scale", [None, 0.3])
def test_the_law_of_total_variance_holds_for_a_normal_output(
    scale: float | None, x: Tensor
) -> None:
    model = make(2)
    found = br.predict(
        model,
        x,
        samples=SAMPLES,
        output=br.outputs.Normal(scale),
        generator=torch.Generator().manual_seed(3),
    )
    raw = raw_draws(model, x, 3)
    if scale is None:
        means, variances = raw[..., 0], (1 + raw[..., 1].exp()).log().square()
    else:
        means, variances = raw, torch.full_like(raw, 0.09)
    torch.testing.assert_close(found.mean, means.mean(0))
    torch.testing.assert_close(found.aleatoric, variances.mean(0))
    torch.testing.assert_close(found.epistemic, means.var(0, correction=0))
    torch.testing.assert_close(found.total, variances.mean(0) + means.var(0, correction=0))


def test_a_small_spread_around_a_large_mean_is_not_lost_to_rounding() -> None:
    model = make(1, torch.float32)
    with torch.no_grad():
        for block in model.each_block():
            block.layout.split(block.loc)["bias"].fill_(1000.0)
    x = torch.zeros(1, 3)
    found = br.predict(
        model,
        x,
        samples=SAMPLES,
        output=br.outputs.Normal(0.0),
        generator=torch.Generator().manual_seed(3),
    )
    expected = raw_draws(model, x, 3).double().var(0, correction=0)
    assert found.epistemic.item() == pytest.approx(expected.item(), rel=1e-3)


@dataclass
class Poisson:
    """A user's own output: raw is log(rate); the variance of counts, taken apart."""

    def moments(self, raw: Tensor) -> tuple[Tensor, ...]:
        return raw.exp(), raw.exp().square()

    def predict(self, averages: tuple[Tensor, ...]) -> br.Prediction:
        rate, square = averages
        epistemic = square - rate.square()
        return br.Prediction(rate, rate + epistemic, rate, epistemic)


def test_an_output_of_ones_own_is_used(x: Tensor) -> None:
    model = make(1)
    found = br.predict(
        model,
        x,
        samples=SAMPLES,
        output=Poisson(),
        generator=torch.Generator().manual_seed(3),
    )
    rates = raw_draws(model, x, 3).exp()
    torch.testing.assert_close(found.mean, rates.mean(0))
    torch.testing.assert_close(found.total, rates.mean(0) + rates.var(0, correction=0))


@pytest.mark.parametrize("output", [br.Categorical(), br.outputs.Normal(0.1)])
def test_the_mean_alone_has_nothing_epistemic(output: br.Categorical, x: Tensor) -> None:
    model = make(4)
    found = br.predict(model, x, samples=0, output=output)
    loc = {name: mean for name, (mean, _) in model.moments().items()}
    raw = x @ loc["weight"].T + loc["bias"]
    expected = raw.softmax(-1) if isinstance(output, br.Categorical) else raw
    torch.testing.assert_close(found.mean, expected)
    assert found.epistemic.abs().max() < 1e-12
    torch.testing.assert_close(found.total, found.aleatoric)


def test_the_first_of_several_outputs_is_taken_and_named_inputs_are_passed_on() -> None:
    model = br.bayesianize(nn.LSTM(3, 4, batch_first=True))
    state = (torch.ones(1, 2, 4), torch.ones(1, 2, 4))
    found = br.predict(model, torch.zeros(2, 5, 3), samples=2, hx=state)
    assert found.mean.shape == (2, 5, 4)
    without = br.predict(model, torch.zeros(2, 5, 3), samples=0)
    assert not torch.equal(
        br.predict(model, torch.zeros(2, 5, 3), samples=0, hx=state).mean, without.mean
    )


@pytest.mark.parametrize("training", [True, False])
def test_prediction_needs_no_gradient_and_gives_the_train_mode_back(
    training: bool, x: Tensor
) -> None:
    model = make(3).train(training)
    found = br.predict(model, x)
    assert not found.mean.requires_grad
    assert model.training is training


def test_a_negative_number_of_draws_is_refused(x: Tensor) -> None:
    with pytest.raises(Invalid, match="samples must be 0"):
        br.predict(make(2), x, samples=-1)


def test_a_normal_output_of_the_wrong_shape_says_what_it_reads() -> None:
    with pytest.raises(ValueError, match=r"last axis of 2, got shape \(4, 3\)"):
        br.outputs.Normal().moments(torch.zeros(4, 3))
    with pytest.raises(Invalid, match="scale must be 0 or above"):
        br.outputs.Normal(-1.0)


@given(st.lists(st.lists(st.floats(-50, 50), min_size=3, max_size=3), min_size=1, max_size=6))
def test_uncertainty_stays_within_its_bounds(draws: list[list[float]]) -> None:
    kind = br.Categorical()
    moments = [kind.moments(torch.tensor(raw, dtype=torch.float64)) for raw in draws]
    averages = tuple(torch.stack(each).mean(0) for each in zip(*moments, strict=True))
    found = kind.predict(averages)
    assert found.mean.sum().item() == pytest.approx(1)
    assert -1e-12 <= found.aleatoric.item() <= found.total.item() + 1e-12
    assert found.total.item() <= math.log(3) + 1e-12


def test_means_and_targets_of_different_shapes_are_refused() -> None:
    """torch would make [4, 4] of [4, 1] and [4]."""
    output = br.outputs.Normal(1.0)
    means, targets = torch.zeros(4, 1), torch.zeros(4)
    with pytest.raises(ValueError, match=r"\(4, 1\) and the targets \(4,\).*squeeze"):
        output.nll(means, targets)
    prediction = output.predict(output.moments(means))
    with pytest.raises(ValueError, match="squeeze"):
        output.error(prediction, targets)
    assert output.nll(means.squeeze(-1), targets).shape == (4,)


def test_a_normal_output_without_noise_is_infinitely_wrong_not_nan() -> None:
    raw = torch.tensor([[0.0, -110.0]])  # softplus(-110) is 0 in float32
    assert br.outputs.Normal().nll(raw, torch.tensor([1.0])).item() == math.inf
    assert br.outputs.Normal(0.0).nll(torch.zeros(1), torch.zeros(1)).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_categories_of_half_precision_are_averaged_in_single(dtype: torch.dtype) -> None:
    raw = torch.randn(10, 6, 10_000, generator=torch.Generator().manual_seed(1)).to(dtype)
    output = br.Categorical()
    draws = [output.moments(each) for each in raw]
    averages = tuple(torch.stack(part).mean(dim=0) for part in zip(*draws, strict=True))
    p = raw.double().softmax(dim=-1)
    entropy = torch.special.entr(p.mean(dim=0)).sum(dim=-1)
    found = output.predict(averages)
    torch.testing.assert_close(found.total.double(), entropy, rtol=0, atol=1e-4)
    torch.testing.assert_close(found.mean.double().sum(-1), torch.ones(6).double())
