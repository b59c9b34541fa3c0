"""Temperature scaling, against plain torch, scipy and what must be so at the best temperature."""

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import minimize_scalar
from torch import Tensor, nn

import bayesrnn as br
from bayesrnn.evaluate.perplexity import token_losses
from bayesrnn.evaluate.reader import draw_seeds
from bayesrnn.evaluate.temperature import TEMPERATURES, _lowest

WORDS = 20


@pytest.fixture
def model() -> br.Bayesian:
    torch.manual_seed(3)
    net = br.LanguageModel(WORDS, 6, 7, 1, init=1.0)
    with torch.no_grad():
        net.decoder.weight.mul_(4)
    return br.bayesianize(net, br.Gaussian((0.05, 0.4))).eval()


@pytest.fixture
def loader(model: br.Bayesian) -> br.StreamLoader:
    """What the model says at a temperature of 1.6: so it is too sure of this text."""
    ids = br.generate(model, [0], 800, temperature=1.6, generator=torch.Generator().manual_seed(5))
    return br.StreamLoader(np.array(ids, dtype=np.int32), streams=1, unroll=50)


def logits_of(model: br.Bayesian, loader: br.StreamLoader) -> tuple[Tensor, Tensor]:
    """Those of the whole text at once, by the weights in force, and its targets."""
    batches = list(loader.whole())
    x, y = (torch.cat([getattr(batch, part) for batch in batches]) for part in "xy")
    with torch.no_grad():
        return model(x)[0].flatten(0, 1).double(), y.flatten()


def by_draws(
    model: br.Bayesian, loader: br.StreamLoader, draws: int
) -> tuple[list[Tensor], Tensor]:
    """The logits of each of the draws that a generator from seed 8 gives."""
    generator, found = torch.Generator().manual_seed(8), []
    for _ in range(draws):
        with model.weights("sample"):
            model.resample(generator=generator)
            logits, y = logits_of(model, loader)
        found.append(logits)
    return found, y


def nll(logits: list[Tensor], y: Tensor, temperature: float) -> float:
    """The definition: of the draws' averaged probabilities."""
    p = torch.stack([(each / temperature).softmax(-1) for each in logits]).mean(0)
    return F.nll_loss(p.log(), y).item()


@pytest.mark.parametrize("temperature", [0.4, 1.0, 3.0])
def test_the_mean_and_the_average_of_draws_are_the_definition(
    model: br.Bayesian, loader: br.StreamLoader, temperature: float
) -> None:
    logits, y = logits_of(model, loader)
    found = br.evaluate_text(model, loader, temperature=temperature)
    assert found.nll == pytest.approx(nll([logits], y, temperature), rel=1e-6)
    several, y = by_draws(model, loader, 3)
    generator = torch.Generator().manual_seed(8)
    found = br.evaluate_text(model, loader, 3, generator, temperature=temperature)
    assert found.nll == pytest.approx(nll(several, y, temperature), rel=1e-6)
    single = sum(nll([each], y, temperature) for each in several) / 3
    assert found.expected_nll == pytest.approx(single, rel=1e-6)


@pytest.mark.parametrize("samples", [0, 4])
def test_the_best_is_where_an_optimiser_finds_the_lowest(
    model: br.Bayesian, loader: br.StreamLoader, samples: int
) -> None:
    if samples:
        draws, y = by_draws(model, loader, samples)
    else:
        logits, y = logits_of(model, loader)
        draws = [logits]
    best = minimize_scalar(lambda t: nll(draws, y, t), bounds=(0.5, 4.0), method="bounded")
    generator = torch.Generator().manual_seed(8)
    found = br.search_temperature(model, loader, samples, generator)
    assert 1.1 < best.x < 2.6  # inside, so that there is something to find
    assert found.temperature == pytest.approx(best.x, rel=0.02)
    assert nll(draws, y, found.temperature) < best.fun + 1e-4
    assert [trial.temperature for trial in found.tried] == list(TEMPERATURES)
    for trial in found.tried:
        assert trial.nll == pytest.approx(nll(draws, y, trial.temperature), rel=1e-6)
        assert trial.perplexity == pytest.approx(math.exp(trial.nll), rel=1e-12)


def test_at_the_best_temperature_entropy_is_loss(
    model: br.Bayesian, loader: br.StreamLoader
) -> None:
    before = br.text_uncertainty(model, loader, (0,))[0].summary()
    assert before["total"] < before["nll"] - 0.3
    best = br.search_temperature(model, loader).temperature
    after = br.text_uncertainty(model, loader, (0,), temperature=best)[0].summary()
    assert after["total"] == pytest.approx(after["nll"], abs=0.02)
    assert after["nll"] < before["nll"] - 0.05


def test_figures_by_token_are_those_of_divided_logits(
    model: br.Bayesian, loader: br.StreamLoader
) -> None:
    logits, y = logits_of(model, loader)
    p = (logits / 1.7).softmax(-1)
    found = br.text_uncertainty(model, loader, (0,), temperature=1.7)[0]
    torch.testing.assert_close(found.total, torch.special.entr(p).sum(-1), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        found.nll, F.nll_loss(p.log(), y, reduction="none"), rtol=1e-5, atol=1e-6
    )
    torch.testing.assert_close(found.max_probability, p.amax(-1), rtol=1e-5, atol=1e-6)
    as_it_is = br.text_uncertainty(model, loader, (0,))[0]
    assert torch.equal(found.top_tokens, as_it_is.top_tokens)


def test_figures_of_draws_are_those_of_each_draws_divided_logits(
    model: br.Bayesian, loader: br.StreamLoader
) -> None:
    found = br.text_uncertainty(model, loader, (3,), seed=4, temperature=0.6)[3]
    draws = []
    for seed in draw_seeds(4, 3):
        with model.weights("sample"):
            model.resample(generator=torch.Generator().manual_seed(seed))
            logits, y = logits_of(model, loader)
        draws.append((logits / 0.6).softmax(-1))
    p, each = torch.stack(draws).mean(0), torch.stack(draws)
    close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)
    close(found.total, torch.special.entr(p).sum(-1))
    close(found.aleatoric, torch.special.entr(each).sum(-1).mean(0))
    close(found.nll, F.nll_loss(p.log(), y, reduction="none"))
    assert found.epistemic.mean() > 0.01


def test_classes_by_draws_have_the_same_definition() -> None:
    model, x = br.bayesianize(nn.Linear(3, 4), br.Gaussian(1.0)), torch.randn(6, 3)
    generator = torch.Generator().manual_seed(8)
    prediction = br.predict(model, x, samples=3, output=br.Categorical(2.5), generator=generator)
    generator, draws = torch.Generator().manual_seed(8), []
    for _ in range(3):
        network = br.plain_network(model, "sample", generator)
        draws.append((network(x).detach() / 2.5).softmax(-1))
    each = torch.stack(draws)
    torch.testing.assert_close(prediction.mean, each.mean(0))
    aleatoric = torch.special.entr(each).sum(-1).mean(0)
    torch.testing.assert_close(prediction.aleatoric, aleatoric)


def test_one_is_no_temperature(model: br.Bayesian, loader: br.StreamLoader) -> None:
    assert br.evaluate_text(model, loader, temperature=1.0) == br.evaluate_text(model, loader)
    logits, y = torch.randn(30, 5), torch.randint(5, (30,))
    plain = F.cross_entropy(logits, y, reduction="none")
    assert torch.equal(token_losses(logits, y, 1.0), plain)


def test_the_temperature_of_what_came_is_found() -> None:
    """Labels are drawn from the logits over 1.6, so that is the truth; 40,000 of them."""
    torch.manual_seed(11)
    net, x = nn.Linear(4, 6), torch.randn(40_000, 4)
    with torch.no_grad():
        net.weight.normal_(std=2.0)
        y = torch.multinomial((net(x) / 1.6).softmax(-1), 1).flatten()
    examples = br.Examples(x, y, [str(i) for i in range(len(x))])
    loader = br.ExampleLoader(examples, streams=1000)
    model = br.bayesianize(net, br.Delta(), br.Normal())
    found = br.search_temperature(model, loader)
    assert found.temperature == pytest.approx(1.6, rel=0.03)
    scores, prediction = br.evaluate_labelled(model, loader, br.Categorical(found.temperature))
    before, as_it_is = br.evaluate_labelled(model, loader, br.Categorical())
    assert scores.scores["nll"] < before.scores["nll"]
    assert scores.scores["error_percent"] == before.scores["error_percent"]
    assert prediction.total.mean().item() == pytest.approx(scores.scores["nll"], abs=0.01)
    expected = (net(x) / found.temperature).softmax(-1)
    torch.testing.assert_close(prediction.mean, expected.detach())
    assert not torch.equal(prediction.mean, as_it_is.mean)


def test_dynamic_evaluation_scores_with_it_and_learns_without(
    model: br.Bayesian, loader: br.StreamLoader
) -> None:
    found = br.search_temperature(model, loader, rate=0.02)
    plain = br.dynamic_evaluate(model, loader, 0.02)
    tried = {trial.temperature: trial.nll for trial in found.tried}
    assert tried[1.0] == pytest.approx(plain.nll, rel=1e-6)
    hot = br.dynamic_evaluate(model, loader, 0.02, temperature=TEMPERATURES[-1])
    assert tried[TEMPERATURES[-1]] == pytest.approx(hot.nll, rel=1e-6)
    varied = br.search_temperature(model, loader, rate=0.02, by_variance=True)
    other = br.dynamic_evaluate(model, loader, 0.02, by_variance=True, temperature=2.0)
    at = {trial.temperature: trial.nll for trial in varied.tried}
    assert at[2.0] == pytest.approx(other.nll, rel=1e-6)
    assert abs(at[2.0] - tried[2.0]) > 1e-4
    still = br.dynamic_evaluate(model, loader, 0.0, temperature=2.0)
    assert still.nll == pytest.approx(br.evaluate_text(model, loader, temperature=2.0).nll)
    best = br.dynamic_evaluate(model, loader, 0.02, temperature=found.temperature)
    assert best.nll <= min(tried.values()) + 1e-6


def test_whether_it_diverges_is_no_matter_of_temperature(
    model: br.Bayesian, loader: br.StreamLoader
) -> None:
    still = br.dynamic_evaluate(model, loader, 1e-9, temperature=0.1)
    expected = br.evaluate_text(model, loader, temperature=0.1).nll
    assert still.nll == pytest.approx(expected, rel=1e-4)
    assert expected > math.log(WORDS) + 1  # more than a loss may be that has not diverged
    for call in (
        lambda: br.dynamic_evaluate(model, loader, 30.0, temperature=1000.0),
        lambda: br.search_temperature(model, loader, rate=30.0),
    ):
        with pytest.raises(br.UserError, match="with the rate 30 diverges"):
            call()


def test_an_ensemble_has_one(model: br.Bayesian, loader: br.StreamLoader) -> None:
    other = br.bayesianize(br.LanguageModel(WORDS, 6, 7, 1, init=0.4), br.Gaussian(0.1)).eval()
    both = [logits_of(each, loader)[0] for each in (model, other)]
    y = logits_of(model, loader)[1]
    found = br.search_temperature(br.Ensemble([model, other]), loader)
    for trial in found.tried:
        assert trial.nll == pytest.approx(nll(both, y, trial.temperature), rel=1e-6)
    with pytest.raises(TypeError, match="of one model, not of an ensemble"):
        br.search_temperature(br.Ensemble([model, other]), loader, rate=0.1)


def test_a_parabolas_lowest_point_is_found() -> None:
    temperatures = [2.0**k for k in (-1, 0, 1)]
    for lowest in (-0.45, 0.0, 0.3):
        nlls = [(k - lowest) ** 2 for k in (-1, 0, 1)]
        assert _lowest(temperatures, nlls) == pytest.approx(2.0**lowest, rel=1e-12)
    assert _lowest(temperatures, [1.0, 2.0, 3.0]) == 0.5
    assert _lowest(temperatures, [3.0, 2.0, 1.0]) == 2.0
    assert _lowest([1.0, 2.0, 4.0], [2.0, 1.0, 1.0]) == pytest.approx(2.0**1.5)
    uneven = [-1.0, 0.5, 1.0]
    found = _lowest([2.0**k for k in uneven], [(k - 0.3) ** 2 for k in uneven])
    assert found == pytest.approx(2.0**0.3)
    assert _lowest([1.0, 2.0, 4.0], [1.0, 1.0, 1.0]) == 1.0
    assert _lowest([1.0, 2.0, 4.0], [math.nan, 1.0, 2.0]) == 2.0
    assert _lowest([1.0, 2.0, 4.0], [math.inf, 1.0, 2.0]) == 2.0


def test_one_beyond_those_tried_is_told(model: br.Bayesian) -> None:
    """Random words: the less is said of them the better."""
    ids = np.random.default_rng(1).integers(0, WORDS, 400).astype(np.int32)
    with torch.no_grad():
        for block in model.each_block():
            block.loc.mul_(3)
    found = br.search_temperature(model, br.StreamLoader(ids, 1, 50))
    assert found.at_end
    assert found.temperature == TEMPERATURES[-1] == 8.0


def test_a_model_without_a_loss_has_none(model: br.Bayesian, loader: br.StreamLoader) -> None:
    with torch.no_grad():
        for block in model.each_block():
            block.loc.fill_(math.nan)
    with pytest.raises(br.UserError, match="the model's loss is nan, so no temperature"):
        br.search_temperature(model, loader)


def test_what_does_not_go_together(model: br.Bayesian, loader: br.StreamLoader) -> None:
    with pytest.raises(br.Invalid, match="samples must be 0 with a rate"):
        br.search_temperature(model, loader, samples=3, rate=0.1)
    with pytest.raises(br.Invalid, match="by_variance is of a rate"):
        br.search_temperature(model, loader, by_variance=True)
    labelled = br.ExampleLoader(
        br.Examples(torch.zeros(2, 3), torch.zeros(2).long(), ["a", "b"]), 2
    )
    with pytest.raises(br.Invalid, match="rate is of dynamic evaluation, and so of texts"):
        br.search_temperature(model, labelled, rate=0.1)


@pytest.mark.parametrize("wrong", [0, -1.0, 1e-4, 1e4, math.nan, math.inf, "hot", None])
def test_what_is_no_temperature(wrong: object, model: br.Bayesian, loader: br.StreamLoader) -> None:
    calls: list[Callable[[], object]] = [
        lambda: br.evaluate_text(model, loader, temperature=wrong),  # type: ignore[arg-type]
        lambda: br.text_uncertainty(model, loader, (0,), temperature=wrong),  # type: ignore[arg-type]
        lambda: br.dynamic_evaluate(model, loader, 0.1, temperature=wrong),  # type: ignore[arg-type]
        lambda: br.Categorical(wrong),  # type: ignore[arg-type]
    ]
    for call in calls:
        with pytest.raises(
            br.Invalid, match=r"temperature must be a number from 0\.001 to 1000, got"
        ):
            call()


def test_numbers_have_none() -> None:
    loader = br.ExampleLoader(br.Examples(torch.zeros(4, 3), torch.zeros(4), list("abcd")), 2)
    with pytest.raises(ValueError, match="a temperature is of classes"):
        br.search_temperature(br.bayesianize(nn.Linear(3, 2)), loader)
