"""What every prior promises, checked against torch.distributions and scipy's optimiser."""

import math
from collections.abc import Mapping

import numpy as np
import pytest
import torch
import torch.distributions as td
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, optimize
from torch import Tensor, nn

from bayes.reference import log_prior, relative_error
from bayesrnn.bayes import (
    Delta,
    Gaussian,
    Laplace,
    Normal,
    Prior,
    ScaleMixture,
    Uniform,
    bayesianize,
    default_input_axis,
)
from bayesrnn.bayes.hyper import Hyper
from bayesrnn.errors import Invalid

MIXTURE = {"pi": 0.3, "sigma1": 0.9, "sigma2": 0.15}
PRIORS = {
    "uniform": (Uniform(), {}),
    "normal": (Normal(0.2, 0.7), {"loc": 0.2, "scale": 0.7}),
    "normal, fitted": (Normal("fit", "fit"), {"loc": -0.4, "scale": 1.3}),
    "normal, learnt": (Normal("learn", "learn"), {"loc": 0.1, "scale": 0.3}),
    "laplace": (Laplace(-0.1, 0.6), {"loc": -0.1, "scale": 0.6}),
    "laplace, fitted": (Laplace("fit", "fit"), {"loc": 0.5, "scale": 0.2}),
    "laplace, learnt": (Laplace("learn", "learn"), {"loc": 0.1, "scale": 0.3}),
    "mixture by weight": (ScaleMixture(**MIXTURE, group="weight"), MIXTURE),
    "mixture by input": (ScaleMixture(**MIXTURE, group="input"), MIXTURE),
    "mixture by tensor": (ScaleMixture(**MIXTURE, group="tensor"), MIXTURE),
    "mixture, learnt": (ScaleMixture("learn", "learn", "learn"), MIXTURE),
}
every_prior = pytest.mark.parametrize(("prior", "values"), PRIORS.values(), ids=PRIORS.keys())


def normal(loc: float, scale: float) -> td.Normal:
    """In double, which torch.distributions does not make of two Python numbers."""
    return td.Normal(*torch.tensor([loc, scale], dtype=torch.float64))


@st.composite
def weights(draw: st.DrawFn) -> tuple[Tensor, int | None]:
    """A weight tensor of any shape and, where it has one, the axis of its input units."""
    shape = draw(st.lists(st.integers(1, 6), max_size=4))
    axis = draw(st.sampled_from([None, *range(len(shape))]))
    return torch.randn(shape, dtype=torch.float64) * draw(st.sampled_from([0.05, 1.0])), axis


@every_prior
@pytest.mark.parametrize("kind", ["number", "tensor"])
@given(weight=weights())
def test_log_p_and_its_gradient_are_those_of_torch_distributions(
    prior: Prior, values: Mapping[str, float], kind: str, weight: tuple[Tensor, int | None]
) -> None:
    theta, axis = weight
    given_values = values
    if kind == "tensor":
        given_values = {n: torch.tensor(v, dtype=torch.float64) for n, v in values.items()}
    log_p = prior.log_prob(theta, axis, given_values)
    score = prior.score(theta, axis, given_values)
    theta.requires_grad_()
    expected = log_prior(prior, theta, axis, values)
    assert log_p.shape == ()
    assert score.shape == theta.shape
    assert log_p.item() == pytest.approx(expected.item(), rel=1e-9, abs=1e-9)
    if isinstance(prior, Uniform):
        assert not score.any()
        return
    (gradient,) = torch.autograd.grad(expected, theta)
    assert relative_error([score], [gradient]) < 1e-9


@pytest.mark.parametrize(
    ("prior", "values"),
    [case for case in PRIORS.values() if case[1]],
    ids=[name for name, case in PRIORS.items() if case[1]],
)
def test_the_density_of_one_weight_integrates_to_one(
    prior: Prior, values: Mapping[str, float]
) -> None:
    def density(x: float) -> float:
        return prior.log_prob(torch.tensor([x], dtype=torch.float64), None, values).exp().item()

    kinks = sorted({0.0, float(values.get("loc", 0.0))})
    total, _ = integrate.quad(density, -25, 25, points=kinks, limit=400)
    assert total == pytest.approx(1.0, abs=1e-7)


def test_the_groups_of_each_layer_are_the_weights_leaving_an_input_unit() -> None:
    layers = {
        "embedding": (nn.Embedding(5, 3), 0),
        "bag": (nn.EmbeddingBag(5, 3), 0),
        "linear": (nn.Linear(3, 5), 1),
        "conv1d": (nn.Conv1d(3, 5, 2), 1),
        "conv2d": (nn.Conv2d(3, 5, 2), 1),
        "transposed1d": (nn.ConvTranspose1d(3, 5, 2), 0),
        "transposed2d": (nn.ConvTranspose2d(3, 5, 2), 0),
    }
    prior = ScaleMixture(**MIXTURE)
    for name, (layer, axis) in layers.items():
        assert default_input_axis(layer, layer.weight) == axis, name
        model = bayesianize(layer.double(), Delta(), prior, where="weight").train()
        model.resample()
        # unit by unit: all weights of one input at once
        theta = layer.weight.detach()
        units = [theta[i] if axis == 0 else theta[:, i] for i in range(theta.shape[axis])]
        by_hand = 0.0
        for unit in units:
            joint = [
                math.log(chance) + normal(0.0, width).log_prob(unit).sum().item()
                for chance, width in ((0.3, 0.9), (0.7, 0.15))
            ]
            by_hand += np.logaddexp(*joint)
        assert model.kl().item() == pytest.approx(-by_hand, rel=1e-10), name


@pytest.mark.parametrize("cell", [nn.RNN, nn.GRU, nn.LSTM])
def test_a_recurrent_layers_groups_are_columns_and_each_bias_is_one(cell: type) -> None:
    layer = cell(3, 2).double()
    prior = ScaleMixture(**MIXTURE)
    model = bayesianize(layer, Delta(), prior)
    model.resample()
    by_hand = sum(
        log_prior(prior, p.detach(), 1 if p.dim() == 2 else None, MIXTURE)
        for p in layer.parameters()
    )
    assert model.kl().item() == pytest.approx(-by_hand.item(), rel=1e-10)


def test_a_tied_weight_is_grouped_by_its_first_owner() -> None:
    class Tied(nn.Module):
        def __init__(self, embedding_first: bool) -> None:
            super().__init__()
            embedding, decoder = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
            decoder.weight = embedding.weight
            if embedding_first:
                self.embedding, self.decoder = embedding, decoder
            else:
                self.decoder, self.embedding = decoder, embedding

    for embedding_first, axis in ((True, 0), (False, 1)):
        model = bayesianize(Tied(embedding_first))
        assert [w.axis for w in model.blocks[0].layout.weights] == [axis]


@pytest.mark.parametrize(
    ("make", "problems"),
    [
        (lambda: Normal(scale=0.0), ["scale"]),
        (lambda: Normal(loc=math.nan, scale=-1.0), ["loc", "scale"]),
        (lambda: Laplace(loc=math.inf, scale="fitted"), ["loc", "scale"]),
        (lambda: ScaleMixture(pi=1.0, sigma1=0.0, sigma2=math.inf), ["pi", "sigma1", "sigma2"]),
        (lambda: ScaleMixture(pi=0.0), ["pi"]),
        (lambda: ScaleMixture(group="layer"), ["group"]),
        (lambda: ScaleMixture(sigma1="fit", sigma2="fit"), ["sigma1", "sigma2"]),
    ],
)
def test_all_impossible_settings_are_named_at_once(make: object, problems: list[str]) -> None:
    with pytest.raises(Invalid) as caught:
        make()
    assert [key for key, _ in caught.value.problems] == problems


# --- present values ----------------------------------------------------------------------------


@pytest.mark.parametrize("prior", [Normal("learn", "learn"), ScaleMixture("learn", 0.4, "learn")])
def test_learnt_values_start_where_they_are_said_to_and_stay_in_their_domain(
    prior: Prior,
) -> None:
    hyper = Hyper(prior, torch.zeros(1, dtype=torch.float64))
    learnt = prior.named("learn")
    assert sorted(name for name, _ in hyper.named_parameters()) == sorted(learnt)
    for name in learnt:
        assert hyper.values()[name].item() == pytest.approx(prior.start[name], rel=1e-12)
    for raw in (-8.0, 8.0):
        with torch.no_grad():
            for parameter in hyper.parameters():
                parameter.fill_(raw)
        for name in learnt:
            value = hyper.values()[name].item()
            inside = {"real": True, "positive": value > 0, "unit": 0 < value < 1}
            assert inside[prior.domains[name]]


def test_numbers_are_neither_parameters_nor_buffers_and_fitted_values_are_buffers() -> None:
    hyper = Hyper(Normal(0.5, "fit"), torch.zeros(1))
    assert list(hyper.parameters()) == []
    assert [name for name, _ in hyper.named_buffers()] == ["scale"]
    assert hyper.values()["loc"] == 0.5


# --- closed-form optima ------------------------------------------------------------------------


def complexity(model: nn.Module, family: str, loc: float, scale: float) -> float:
    """Summed over every weight, by torch.distributions: the KL, or -log p for a point."""
    total = 0.0
    for mean, std in model.moments().values():
        if family == "laplace":
            numbers = torch.tensor([loc, scale], dtype=torch.float64)
            total -= td.Laplace(*numbers).log_prob(mean).sum().item()
        elif std is None:
            total -= normal(loc, scale).log_prob(mean).sum().item()
        else:
            kl = td.kl_divergence(td.Normal(mean, std), normal(loc, scale))
            total += kl.sum().item()
    return total


def two_layers() -> nn.Module:
    net = nn.Sequential(nn.LSTM(3, 2), nn.Linear(2, 3)).double()
    with torch.no_grad():
        for p in net.parameters():
            p.add_(0.3 + 0.2 * torch.randn_like(p))
    return net


@pytest.mark.parametrize(
    ("posterior", "family"),
    [
        (Delta(), "normal"),
        (Gaussian((0.05, 0.9)), "normal"),
        (Gaussian(0.4, learn_scale=False), "normal"),
        (Delta(), "laplace"),
    ],
)
def test_the_fitted_prior_minimises_the_complexity_over_all_blocks(
    posterior: object, family: str
) -> None:
    prior = {"normal": Normal, "laplace": Laplace}[family]("fit", "fit")
    model = bayesianize(two_layers(), posterior, prior)
    assert len(model.blocks) == 2
    assert len(model.priors) == 1
    model.resample()
    model.kl()
    loc, scale = (float(model.priors[0].values()[name]) for name in ("loc", "scale"))
    found = complexity(model, family, loc, scale)
    best = optimize.minimize(
        lambda p: complexity(model, family, p[0], math.exp(p[1])),
        [0.0, 0.0],
        method="Nelder-Mead",
        options={"xatol": 1e-7, "fatol": 1e-10, "maxiter": 2000},
    )
    assert found <= best.fun + 1e-6
    assert found == pytest.approx(best.fun, rel=1e-6)
    assert scale == pytest.approx(math.exp(best.x[1]), rel=1e-3)


@pytest.mark.parametrize(("loc", "scale"), [("fit", 0.6), (0.1, "fit")])
@pytest.mark.parametrize("family", ["normal", "laplace"])
def test_one_parameter_is_fitted_with_the_other_held(
    family: str, loc: float | str, scale: float | str
) -> None:
    prior = {"normal": Normal, "laplace": Laplace}[family](loc, scale)
    model = bayesianize(two_layers(), Delta(), prior)
    values = {name: float(v) for name, v in model.priors[0].values().items()}
    here = complexity(model, family, values["loc"], values["scale"])
    fitted = "loc" if loc == "fit" else "scale"
    assert values["scale" if loc == "fit" else "loc"] == (scale if loc == "fit" else loc)
    for move in (-0.05, -1e-3, 1e-3, 0.05):
        moved = values | {fitted: values[fitted] + move}
        assert complexity(model, family, moved["loc"], moved["scale"]) > here - 1e-9


def test_one_object_is_fitted_over_all_it_covers_and_two_equal_ones_each_over_their_own() -> None:
    net = two_layers()
    one = bayesianize(net, Delta(), Normal("fit", "fit"))
    two = bayesianize(net, Delta(), {"0.*": Normal("fit", "fit"), "*": Normal("fit", "fit")})
    every = torch.cat([p.detach().reshape(-1) for p in net.parameters()])
    assert len(one.priors) == 1
    assert float(one.priors[0].loc) == pytest.approx(every.mean().item(), rel=1e-12)
    assert float(one.priors[0].scale) == pytest.approx(every.std(correction=0).item(), rel=1e-12)
    assert len(two.priors) == 2
    for hyper, layer in zip(two.priors, net, strict=True):
        own = torch.cat([p.detach().reshape(-1) for p in layer.parameters()])
        assert float(hyper.loc) == pytest.approx(own.mean().item(), rel=1e-12)
        assert float(hyper.scale) == pytest.approx(own.std(correction=0).item(), rel=1e-12)


def test_the_fit_is_taken_anew_at_each_kl_after_an_update() -> None:
    model = bayesianize(nn.Linear(4, 3).double(), Gaussian(0.3), Normal("fit", "fit"))
    model.resample()
    model.kl()
    before = {name: float(v) for name, v in model.priors[0].values().items()}
    with torch.no_grad():
        model.blocks[0].loc.mul_(2).add_(1)
    model.kl()
    means = torch.cat([mean.reshape(-1) for mean, _ in model.moments().values()])
    after = {name: float(v) for name, v in model.priors[0].values().items()}
    assert after["loc"] == pytest.approx(means.mean().item(), rel=1e-12)
    spread = means.var(correction=0).item() + 0.3**2
    assert after["scale"] == pytest.approx(math.sqrt(spread), rel=1e-12)
    assert after["loc"] > before["loc"] + 0.5


@pytest.mark.parametrize("setting", [("fit", 1.0), (0.0, "fit")])
def test_a_laplace_prior_is_fitted_only_to_points(setting: tuple[object, object]) -> None:
    bayesianize(nn.Linear(2, 2), Delta(), Laplace(*setting))
    with pytest.raises(Invalid, match="only with a delta posterior"):
        bayesianize(nn.Linear(2, 2), Gaussian(), Laplace(*setting))


def test_a_mixture_is_not_learnt_with_points_where_it_would_collapse() -> None:
    with pytest.raises(Invalid, match="collapsing"):
        bayesianize(nn.Linear(2, 2), Delta(), ScaleMixture(sigma2="learn"))
