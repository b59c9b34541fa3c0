"""Series, scored one step and many steps ahead, against distributions that are known."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import bayesrnn as br
from bayesrnn.evaluate.series import Forecast, backtest, evaluate_series, forecast, read_series

NOISE = 0.3


class Autoregression(nn.Module):
    """x' = a x + noise: what comes h steps on is Normal, with known moments."""

    def __init__(self, a: float) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor([a]))

    def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        s = torch.full_like(x, math.log(math.expm1(NOISE)))
        return torch.stack([self.a * x, s], dim=-1), x[-1:]


def autoregressive(rows: int, a: float = 0.8, seed: int = 1) -> np.ndarray:
    dice = np.random.default_rng(seed)
    values = np.zeros((rows, 1), np.float32)
    for t in range(1, rows):
        values[t] = a * values[t - 1] + dice.normal(0, NOISE)
    return values


def point(a: float = 0.8) -> br.Bayesian:
    return br.bayesianize(Autoregression(a), br.Delta(), br.Uniform())


def test_one_step_ahead_is_scored_as_torch_scores_it() -> None:
    values = autoregressive(60)
    loader = br.StreamLoader(values, streams=1, unroll=7)
    reading = read_series(point(), loader)
    found = evaluate_series(reading, 0)
    x, y = torch.from_numpy(values[:-1]), torch.from_numpy(values[1:])
    truth = torch.distributions.Normal(0.8 * x, NOISE)
    assert torch.equal(reading.targets, y)
    assert found.values == 59
    assert found.nll == pytest.approx(-truth.log_prob(y).mean().item(), rel=1e-5)
    assert found.rmse == pytest.approx((0.8 * x - y).square().mean().sqrt().item(), rel=1e-5)
    assert found.persistence == pytest.approx((x - y).square().mean().sqrt().item(), rel=1e-5)
    assert (found.epistemic, found.expected_nll) == (0.0, None)
    assert found.aleatoric == pytest.approx(NOISE**2, rel=1e-5)


def test_draws_are_averaged_and_taken_apart() -> None:
    model = br.bayesianize(Autoregression(0.8), br.Gaussian(0.2), br.Normal())
    values = autoregressive(200)
    loader = br.StreamLoader(values, streams=1, unroll=50)
    found = evaluate_series(read_series(model, loader, 4, torch.Generator().manual_seed(2)), 4)
    generator = torch.Generator().manual_seed(2)
    x, y = torch.from_numpy(values[:-1]), torch.from_numpy(values[1:])
    log_p, means = [], []
    for _ in range(4):
        with model.weights("sample"):
            model.resample(generator=generator)
            means.append(model(x[:, None])[0].detach()[:, 0, :, 0].double())
        log_p.append(torch.distributions.Normal(means[-1], NOISE).log_prob(y))
    averaged = torch.stack(log_p).logsumexp(dim=0) - math.log(4)
    assert found.nll == pytest.approx(-averaged.mean().item(), rel=1e-5)
    assert found.expected_nll == pytest.approx(-torch.stack(log_p).mean().item(), rel=1e-5)
    assert found.expected_nll > found.nll
    epistemic = torch.stack(means).var(dim=0, correction=0).mean().item()
    assert found.epistemic == pytest.approx(epistemic, rel=1e-4)
    assert found.total == found.aleatoric + found.epistemic


@pytest.mark.parametrize("season", [0, 4, 24])
def test_the_length_of_a_cut_changes_nothing(season: int) -> None:
    torch.manual_seed(3)
    net = br.Forecaster(2, br.SeriesSettings(hidden=6, init=0.5, season=season))
    model = br.bayesianize(net, br.Gaussian(0.1), br.Normal())
    values = np.random.default_rng(1).normal(size=(90, 2)).astype(np.float32)
    found = [
        read_series(
            model, br.StreamLoader(values, 1, unroll), 3, torch.Generator().manual_seed(4)
        ).mixture.means
        for unroll in (89, 10)
    ]
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-6)


def test_paths_have_the_moments_of_the_autoregression() -> None:
    past = torch.tensor([0.3, 2.0]).view(2, 1, 1)
    found = forecast(point(), past, steps=5, samples=0, paths=40_000)
    assert found.paths.shape == (1, 40_000, 5, 1, 1)
    variance = 0.0
    for step in range(5):
        variance = 0.64 * variance + NOISE**2
        mean = 2.0 * 0.8 ** (step + 1)
        assert found.mean[step].item() == pytest.approx(mean, abs=4 * math.sqrt(variance / 40_000))
        assert found.aleatoric[step].item() == pytest.approx(variance, rel=0.04)
        upper = mean + 1.6449 * math.sqrt(variance)
        assert found.quantile(0.95)[step].item() == pytest.approx(upper, abs=0.03)
    assert not found.epistemic.any()


def test_what_draws_disagree_about_is_told_from_noise() -> None:
    """After one step: epistemic = x^2 sigma^2, aleatoric = noise^2, even with few paths a draw."""
    model = br.bayesianize(Autoregression(0.8), br.Gaussian(0.1), br.Normal())
    past = torch.tensor([3.0]).view(1, 1, 1)
    found = forecast(model, past, steps=1, samples=1500, paths=4)
    sigma = next(iter(model.moments().values()))[1].item()
    assert found.epistemic.item() == pytest.approx((3 * sigma) ** 2, rel=0.15)
    assert found.aleatoric.item() == pytest.approx(NOISE**2, rel=0.06)
    spread = found.paths.var().item()
    assert found.aleatoric.item() + found.epistemic.item() == pytest.approx(spread, rel=0.05)


def test_a_draw_keeps_its_weights_along_the_whole_path() -> None:
    """h steps ahead of x the mean of a draw is a^h x and its variance that of h noises. Weights
    drawn anew at each step would disagree far less: their means are products of different a."""
    model = br.bayesianize(Autoregression(0.8), br.Gaussian(0.1), br.Normal())
    sigma = next(iter(model.moments().values()))[1].item()
    found = forecast(model, torch.full((1, 1, 1), 3.0), steps=4, samples=2000, paths=8)
    a = np.random.default_rng(1).normal(0.8, sigma, 400_000)
    for h in range(1, 5):
        noise = NOISE**2 * sum(a ** (2 * k) for k in range(h))
        assert found.mean[h - 1].item() == pytest.approx(3 * (a**h).mean(), rel=0.03)
        assert found.epistemic[h - 1].item() == pytest.approx((3 * a**h).var(), rel=0.12)
        assert found.aleatoric[h - 1].item() == pytest.approx(noise.mean(), rel=0.06)


def test_a_draw_keeps_its_masks_along_all_its_paths() -> None:
    """Without noise the paths of a draw, and so of its masks, are one; those of two draws are
    not."""
    net = br.Forecaster(
        2, br.SeriesSettings(hidden=16, init=0.5, noise=1e-4), br.DropoutSettings(recurrent=0.5)
    )
    nn.init.zeros_(net.decoder.weight[2:])  # the same noise for all
    model = br.bayesianize(net, br.Delta(), br.Uniform())
    past = torch.randn(30, 3, 2)
    found = forecast(model, past, steps=6, samples=5, paths=3)
    assert found.aleatoric.max() < 1e-6
    assert found.epistemic.min() > 1e-6


def test_along_a_path_the_season_before_is_its_own() -> None:
    """With the gate open a row is that of a season before and noise: within the first season ahead
    the rows before were read, from then on the path has drawn them, and its noise adds up."""
    season, steps = 3, 8
    net = br.Forecaster(2, br.SeriesSettings(hidden=4, noise=NOISE, season=season))
    nn.init.zeros_(net.decoder.weight)
    net.decoder.bias.data[4:] = 100.0
    model = br.bayesianize(net, br.Delta(), br.Uniform())
    past = torch.randn(10, 2, 2)
    found = forecast(model, past, steps, samples=0, paths=20_000)
    for step in range(steps):
        rounds = step // season + 1
        assert found.mean[step].sub(past[-season + step % season]).abs().max() < 0.02
        assert found.aleatoric[step].mean().item() == pytest.approx(rounds * NOISE**2, rel=0.04)
    noise = found.paths[:, :, season:] - found.paths[:, :, :-season]
    assert noise.std().item() == pytest.approx(NOISE, rel=0.02)


@pytest.mark.parametrize("masks", [br.DropoutSettings(), br.DropoutSettings(recurrent=0.4)])
def test_a_path_reads_on_as_if_its_rows_had_come(masks: br.DropoutSettings) -> None:
    """Past and path in one pass say of each step what the path was drawn from."""
    settings = br.SeriesSettings("lstm", hidden=6, init=0.8, season=3)
    model = br.bayesianize(br.Forecaster(2, settings, masks), br.Delta(), br.Uniform())
    past = torch.randn(10, 1, 2)
    path = forecast(model, past, steps=8, samples=0, paths=2).paths[0, :, :, 0].transpose(0, 1)
    noise = torch.Generator().manual_seed(1)
    model.eval()
    with model.weights("mean"), torch.no_grad():
        raw, _ = model(torch.cat([past.expand(-1, 2, -1), path]))
    for step, row in enumerate(path):
        mean, scale = br.outputs.Normal().read(raw[len(past) - 1 + step])
        drawn = mean + scale * torch.randn(mean.shape, generator=noise)
        torch.testing.assert_close(drawn, row, rtol=1e-4, atol=1e-5)


def test_a_forecast_reads_a_whole_season() -> None:
    for season, rows in ((0, 500), (24, 500), (600, 600)):
        net = br.Forecaster(1, br.SeriesSettings(hidden=2, season=season))
        model = br.bayesianize(net, br.Delta(), br.Uniform())
        values = autoregressive(1300)
        assert backtest(model, values, 1, origins=2, samples=0, paths=2).past == rows
        assert backtest(model, values, 1, 2, past=7, samples=0, paths=2).past == 7
    assert backtest(model, autoregressive(700), 1, 2, samples=0, paths=2).past == 600
    short = "600 rows are too few for forecasts of 1 steps after 600 rows; give more rows"
    with pytest.raises(br.UserError, match=short):
        backtest(model, autoregressive(600), 1)


def test_scores_of_paths_are_those_of_brute_force() -> None:
    paths = torch.randn(3, 7, 2, 4, 2, dtype=torch.float64)
    found, target = Forecast(paths), torch.randn(2, 4, 2, dtype=torch.float64)
    flat = paths.flatten(0, 1)
    apart = (flat[:, None] - flat[None]).abs().sum(dim=(0, 1)) / (21 * 20)
    crps = (flat - target).abs().mean(dim=0) - apart / 2
    torch.testing.assert_close(found.crps(target), crps)
    for p in (0.0, 0.05, 0.5, 0.95, 1.0):
        torch.testing.assert_close(found.quantile(p), torch.quantile(flat, p, dim=0))
    torch.testing.assert_close(found.cdf(target), (flat < target).double().mean(dim=0))
    torch.testing.assert_close(found.mean, flat.mean(dim=0))


def test_a_backtest_of_the_true_model_is_calibrated() -> None:
    values = autoregressive(4000)
    found = backtest(point(), values, steps=3, origins=800, past=20, samples=0, paths=200)
    assert (found.origins, found.past, len(found.rmse)) == (800, 20, 3)
    variance = 0.0
    for step in range(3):
        variance = 0.64 * variance + NOISE**2
        assert found.rmse[step] == pytest.approx(math.sqrt(variance), rel=0.1)
        assert found.crps[step] == pytest.approx(math.sqrt(variance / math.pi), rel=0.1)
        assert found.coverage_90[step] == pytest.approx(0.9, abs=0.04)
        assert found.rmse[step] < found.persistence[step]


def test_unless_told_there_are_as_many_paths_by_the_mean_as_by_draws() -> None:
    """90 % intervals of few paths hold less, however right the model is: of 25, 22 in 26."""
    values = autoregressive(4000)
    found = backtest(point(), values, steps=1, origins=1500, past=20, samples=0)
    assert found.paths == 500
    assert found.coverage_90[0] == pytest.approx(0.9, abs=0.025)
    few = backtest(point(), values, steps=1, origins=1500, past=20, samples=0, paths=25)
    assert few.coverage_90[0] == pytest.approx(22 / 26, abs=0.025)
    model = br.bayesianize(Autoregression(0.8), br.Gaussian(0.1), br.Normal())
    past = torch.ones(4, 1, 1)
    sizes = [forecast(model, past, 1, samples).paths.shape[:2] for samples in (0, 1, 20)]
    assert sizes == [(1, 500), (1, 500), (20, 25)]


def test_a_seed_decides_a_forecast_and_the_model_stays_as_it_was() -> None:
    model = br.bayesianize(Autoregression(0.8), br.Gaussian(0.1), br.Normal())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    past = torch.ones(4, 2, 1)
    one, same, other = (forecast(model, past, 3, 4, 5, seed=s).paths for s in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_what_cannot_be_forecast_is_refused() -> None:
    model = point()
    for settings, message in (
        ({"past": torch.ones(4, 1), "steps": 1}, r"past must be \[T, B, C\]"),
        ({"past": torch.ones(4, 1, 1), "steps": 0}, "steps must be at least 1"),
        ({"past": torch.ones(4, 1, 1), "steps": 1, "paths": 1}, "paths must be at least 2"),
        (
            {"past": torch.ones(4, 1, 1), "steps": 1, "paths": 10**20},
            "paths must be at least 2, 1,",
        ),
        ({"past": torch.ones(4, 1, 1), "steps": 1, "samples": -1}, "samples must be 0"),
    ):
        with pytest.raises(br.Invalid, match=message):
            forecast(model, **settings)
    with pytest.raises(br.Invalid, match="origins must be at least 1, got 0"):
        backtest(model, autoregressive(10), steps=1, origins=0)
    with pytest.raises(br.UserError, match="10 rows are too few for forecasts of 8 steps"):
        backtest(model, autoregressive(10), steps=8)
