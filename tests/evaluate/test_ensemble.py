"""Ensembles against averages taken by hand over their members."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import bayesrnn as br
from bayesrnn.data.labelled import ExampleLoader, Examples
from bayesrnn.errors import Invalid
from bayesrnn.evaluate import detect, text_uncertainty
from bayesrnn.evaluate.draws import drawn, each_draw, evaluating
from bayesrnn.evaluate.labelled import evaluate_labelled
from bayesrnn.evaluate.reader import draw_seeds
from bayesrnn.evaluate.series import evaluate_series, forecast, read_series
from bayesrnn.evaluate.speech import transcribe
from bayesrnn.evaluate.uncertainty import reading_cost

VOCABULARY = 7
TEXT = np.random.default_rng(4).integers(0, VOCABULARY, 60).astype(np.int32)


def language_model(seed: int, posterior: br.Posterior | None = None) -> br.Bayesian:
    torch.manual_seed(seed)
    network = br.LanguageModel(VOCABULARY, 4, 5, layers=1, init=0.8)
    return br.bayesianize(network.double(), posterior or br.Gaussian(0.3), br.Normal())


def loader() -> br.StreamLoader:
    return br.StreamLoader(TEXT, 1, 13)


def probabilities(model: br.Bayesian) -> Tensor:
    """[N, V] of the whole text in one forward, under the weights in force."""
    return model(torch.from_numpy(TEXT[:-1].astype(np.int64))[:, None])[0][:, 0].softmax(dim=-1)


def of_target(p: Tensor) -> Tensor:
    y = torch.from_numpy(TEXT[1:].astype(np.int64))
    return p.gather(-1, y.expand(*p.shape[:-1])[..., None])[..., 0]


def entropy(p: Tensor) -> Tensor:
    return torch.special.entr(p).sum(dim=-1)


@pytest.fixture
def ensemble() -> br.Ensemble:
    return br.Ensemble([language_model(seed) for seed in (1, 2, 3)])


def by_hand(ensemble: br.Ensemble, samples: int, draw: Callable[[int], torch.Generator]) -> Tensor:
    """[M * samples, N, V], members in turn."""
    members = [member for member in ensemble.members if isinstance(member, br.Bayesian)]
    found = []
    ensemble.eval()
    with torch.no_grad():
        for number in range(max(samples, 1) * len(members)):
            member = members[number % len(members)]
            with member.weights("sample" if samples else "mean"):
                if samples:
                    member.resample(generator=draw(number))
                found.append(probabilities(member))
    return torch.stack(found)


@pytest.mark.parametrize("samples", [0, 1, 4])
def test_a_text_is_scored_by_the_average_of_all(ensemble: br.Ensemble, samples: int) -> None:
    generator = torch.Generator().manual_seed(5)
    p = of_target(by_hand(ensemble, samples, lambda _: generator))
    found = br.evaluate_text(
        ensemble, loader(), samples, generator=torch.Generator().manual_seed(5)
    )
    assert found.nll == pytest.approx(-p.mean(dim=0).log().mean().item(), rel=1e-10)
    assert found.expected_nll == pytest.approx(-p.log().mean().item(), rel=1e-10)
    assert found.nll < found.expected_nll  # Jensen; members differ
    assert found.samples == samples


@pytest.mark.parametrize("counts", [(0,), (0, 1, 3), (2,)])
def test_the_uncertainty_of_a_text_is_what_members_disagree_about(
    ensemble: br.Ensemble, counts: tuple[int, ...]
) -> None:
    told: list[int] = []
    found = text_uncertainty(ensemble, loader(), counts, seed=3, advance=told.append)
    assert sum(told) == reading_cost(ensemble, loader().targets, counts)
    seeds = list(draw_seeds(3, 9))
    for count in counts:
        p = by_hand(ensemble, count, lambda i: torch.Generator().manual_seed(seeds[i]))
        text = found[count]
        assert (text.samples, text.averaged) == (count, len(p))
        assert torch.allclose(text.total, entropy(p.mean(dim=0)), rtol=1e-9)
        assert torch.allclose(text.aleatoric, entropy(p).mean(dim=0), rtol=1e-9)
        assert torch.allclose(text.nll, -of_target(p.mean(dim=0)).log(), rtol=1e-9)
        assert text.epistemic.min() > 1e-6
        detection = detect(text, text.part(5, 45), window=10)
        assert detection.information_auroc is not None  # the means of several members disagree


def test_one_member_is_that_model() -> None:
    model = language_model(1)
    alone = br.Ensemble([model])
    for samples in (0, 3):
        one, other = (
            br.evaluate_text(m, loader(), samples, generator=torch.Generator().manual_seed(2))
            for m in (model, alone)
        )
        assert one == other
    assert text_uncertainty(alone, loader(), (0,))[0].epistemic.max() < 1e-12


def test_networks_without_a_posterior_are_an_ensemble_too() -> None:
    plain = br.Ensemble([language_model(seed, br.Delta()) for seed in (1, 2)])
    assert not plain.draws_differ
    assert br.evaluate_text(plain, loader()).expected_nll is not None


def test_predictions_of_any_module() -> None:
    torch.manual_seed(0)
    members = [br.bayesianize(nn.Linear(3, 4)) for _ in range(5)]
    x = torch.randn(6, 3)
    found = br.predict(br.Ensemble(members), x, samples=0)
    with torch.no_grad():
        p = torch.stack([member.eval()(x).softmax(dim=-1) for member in members])
    assert torch.allclose(found.mean, p.mean(dim=0).to(found.mean), atol=1e-6)
    disagreement = entropy(p.mean(dim=0)) - entropy(p).mean(dim=0)
    assert torch.allclose(found.epistemic.float(), disagreement, atol=1e-6)


def test_labelled_examples() -> None:
    torch.manual_seed(0)
    members = [br.bayesianize(nn.Linear(3, 4)) for _ in range(3)]
    examples = Examples(torch.randn(9, 3), torch.randint(4, (9,)), [str(i) for i in range(9)])
    result, found = evaluate_labelled(
        br.Ensemble(members), ExampleLoader(examples, 4), br.Categorical()
    )
    with torch.no_grad():
        p = torch.stack([member.eval()(examples.x).softmax(dim=-1) for member in members])
    right = p.gather(-1, examples.y.expand(3, 9)[..., None])[..., 0]
    assert result.scores["nll"] == pytest.approx(-right.mean(dim=0).log().mean().item(), rel=1e-5)
    assert result.expected_nll == pytest.approx(-right.log().mean().item(), rel=1e-5)
    assert torch.allclose(found.mean, p.mean(dim=0).to(found.mean), atol=1e-6)


class Steady(nn.Module):
    """Each row is the one before times a, and noise of the standard deviation 1."""

    def __init__(self, a: float) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor([a]))

    def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return torch.stack([self.a * x, torch.full_like(x, 0.541325)], dim=-1), x[-1:]


def test_series_and_their_forecasts() -> None:
    slopes = (0.0, 0.5, 1.0)
    models = [br.bayesianize(Steady(a), br.Delta(), br.Uniform()) for a in slopes]
    values = np.random.default_rng(1).normal(size=(40, 1)).astype(np.float32)
    reading = read_series(br.Ensemble(models), br.StreamLoader(values, streams=1, unroll=7))
    found = evaluate_series(reading, 0)
    x, y = torch.from_numpy(values[:-1]).double(), torch.from_numpy(values[1:]).double()
    means = torch.stack([a * x for a in slopes])
    each = torch.distributions.Normal(means, 1.0).log_prob(y)
    assert found.nll == pytest.approx(-each.exp().mean(dim=0).log().mean().item(), rel=1e-4)
    assert found.expected_nll == pytest.approx(-each.mean().item(), rel=1e-4)
    assert found.epistemic == pytest.approx(means.var(dim=0, correction=0).mean().item(), rel=1e-4)
    past = torch.full((5, 1, 1), 6.0)
    ahead = forecast(br.Ensemble(models), past, steps=1, samples=0, paths=2000)
    assert ahead.paths.mean(dim=1).flatten().tolist() == pytest.approx([0.0, 3.0, 6.0], abs=0.15)
    assert ahead.epistemic.item() == pytest.approx(6.0, abs=0.2)  # the variance of 0, 3 and 6
    total = ahead.aleatoric + ahead.epistemic
    assert ahead.paths.var().item() == pytest.approx(total.item(), rel=1e-3)


class Heard(nn.Module):
    """The same log p of two labels at every step, whatever is heard."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.tensor([1 - p, p]).log())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        log_p = self.logits.log_softmax(dim=-1).expand(*x.shape[:2], 2)
        return log_p, torch.full((x.shape[1],), x.shape[0])


def test_speech_is_heard_by_the_average_of_the_means() -> None:
    models = [br.bayesianize(Heard(p), br.Delta(), br.Uniform()) for p in (0.1, 0.6, 0.95)]
    seen: list[np.ndarray] = []

    def decode(log_p: np.ndarray) -> list[int]:
        seen.append(log_p)
        return [1]

    said = transcribe(br.Ensemble(models), torch.zeros(3, 4), decode)
    assert np.exp(seen[0]) == pytest.approx(np.tile([0.45, 0.55], (3, 1)), rel=1e-5)
    assert said.labels == [1]


def test_modes_and_draws_come_back(ensemble: br.Ensemble) -> None:
    first = ensemble.members[0]
    assert isinstance(first, br.Bayesian)
    ensemble.train()
    with pytest.raises(RuntimeError, match="stop"), evaluating(ensemble), drawn(first, 1):
        raise RuntimeError("stop")
    assert ensemble.training
    assert all(member.training for member in ensemble.members)
    assert first.train()(torch.zeros(1, 1, dtype=torch.long)) is not None
    assert len(each_draw(ensemble, 4)) == 12


def test_what_is_no_ensemble_is_refused() -> None:
    model = language_model(1)
    with pytest.raises(Invalid, match="at least one"):
        br.Ensemble([])
    with pytest.raises(Invalid, match="another model"):
        br.Ensemble([model, model])
    with pytest.raises(TypeError, match="bayesianize"):
        br.Ensemble([nn.Linear(2, 2)])  # type: ignore[list-item]
    with pytest.raises(Invalid, match="samples"):
        br.evaluate_text(br.Ensemble([model]), loader(), -1)
