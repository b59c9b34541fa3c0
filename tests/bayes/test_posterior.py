"""What every posterior promises, checked against autograd and scipy."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from bayesrnn.bayes import Delta, Gaussian, Posterior
from bayesrnn.bayes.posterior import softplus_inverse
from bayesrnn.errors import Invalid

POSTERIORS = {
    "delta": Delta(),
    "gaussian": Gaussian(scale=0.05),
    "gaussian over a range": Gaussian(scale=(0.02, 0.3)),
    "gaussian of fixed scale": Gaussian(scale=0.1, learn_scale=False),
    "gaussian, fisher": Gaussian(scale=0.2, estimator="fisher"),
}
every_posterior = pytest.mark.parametrize("posterior", POSTERIORS.values(), ids=POSTERIORS.keys())
spread_out = pytest.mark.parametrize(
    "posterior", list(POSTERIORS.values())[1:], ids=list(POSTERIORS)[1:]
)
sizes = st.integers(1, 200)


def start(posterior: Posterior, size: int) -> dict[str, Tensor]:
    return posterior.init(torch.randn(size, dtype=torch.float64))


@every_posterior
@given(size=sizes)
def test_the_mean_starts_at_the_given_weights(posterior: Posterior, size: int) -> None:
    loc = torch.randn(size)
    assert torch.equal(posterior.mean(posterior.init(loc)), loc)


@every_posterior
@given(size=sizes, seed=st.integers(0, 2**40))
def test_a_draw_is_a_function_of_its_noise_and_the_noise_of_its_seed(
    posterior: Posterior, size: int, seed: int
) -> None:
    parameters = start(posterior, size)
    once = posterior.noise(parameters, torch.Generator().manual_seed(seed))
    torch.randn(3)  # torch's own generator has no part in it
    again = posterior.noise(parameters, torch.Generator().manual_seed(seed))
    assert once.keys() == again.keys()
    assert all(torch.equal(once[name], again[name]) for name in once)
    assert not any(noise.requires_grad for noise in once.values())
    theta = posterior.draw(parameters, once)
    assert theta.shape == (size,)
    assert torch.equal(theta, posterior.draw(parameters, again))


@spread_out
def test_another_seed_is_another_draw(posterior: Posterior) -> None:
    parameters = start(posterior, 50)
    one = posterior.draw(parameters, posterior.noise(parameters, None))
    two = posterior.draw(parameters, posterior.noise(parameters, None))
    assert (one != two).all()


def test_a_point_draws_its_mean() -> None:
    loc = torch.randn(7)
    parameters = Delta().init(loc)
    assert torch.equal(Delta().draw(parameters, Delta().noise(parameters, None)), loc)
    assert Delta().std(parameters) is None


@spread_out
def test_draws_are_gaussian_with_the_stated_mean_and_std(posterior: Posterior) -> None:
    count = 20_000
    first = posterior.init(torch.randn(5, dtype=torch.float64))
    parameters = {name: value.repeat(count, 1).reshape(-1) for name, value in first.items()}
    draws = posterior.draw(parameters, posterior.noise(parameters, None)).reshape(count, 5)
    mean, std = posterior.mean(first), posterior.std(first)
    for i in range(5):
        wanted = stats.norm(mean[i].item(), std[i].item())
        assert stats.kstest(draws[:, i].numpy(), wanted.cdf).pvalue > 1e-4


@pytest.mark.parametrize("scale", [2e-5, 1e-3, 0.05, 1.0, 40.0])
def test_sigma_starts_at_the_number_given(scale: float) -> None:
    learnt, fixed = Gaussian(scale=scale), Gaussian(scale=scale, learn_scale=False)
    loc = torch.zeros(4, dtype=torch.float64)
    assert learnt.std(learnt.init(loc)).tolist() == pytest.approx([scale] * 4, rel=1e-9)
    assert fixed.std(fixed.init(loc)).tolist() == [scale] * 4


def test_over_a_range_rho_starts_uniform_between_the_two_ends() -> None:
    posterior = Gaussian(scale=(0.04, 0.2))
    parameters = posterior.init(torch.zeros(20_000, dtype=torch.float64))
    low, high = (math.log(math.expm1(s - 1e-5)) for s in (0.04, 0.2))
    uniform = stats.uniform(low, high - low)
    assert stats.kstest(parameters["rho"].numpy(), uniform.cdf).pvalue > 1e-4
    std = posterior.std(parameters)
    assert 0.04 - 1e-12 <= std.min() < 0.041
    assert 0.199 < std.max() <= 0.2 + 1e-12


def test_the_start_over_a_range_comes_from_the_generator_given() -> None:
    posterior, loc = Gaussian(scale=(0.04, 0.2)), torch.zeros(9)
    starts = [posterior.init(loc, torch.Generator().manual_seed(s))["rho"] for s in (1, 1, 2)]
    assert torch.equal(starts[0], starts[1])
    assert not torch.equal(starts[0], starts[2])


def test_sigma_is_the_softplus_of_rho_and_a_hundred_thousandth() -> None:
    rho = torch.linspace(-30, 30, 61, dtype=torch.float64)
    std = Gaussian().std({"loc": torch.zeros_like(rho), "rho": rho})
    assert torch.allclose(std, torch.log1p(rho.exp()) + 1e-5, rtol=1e-9, atol=0)


@every_posterior
@given(size=sizes)
def test_restore_inverts_mean_and_std(posterior: Posterior, size: int) -> None:
    parameters = start(posterior, size)
    std = posterior.std(parameters)
    restored = posterior.restore(posterior.mean(parameters), std)
    assert restored.keys() == parameters.keys()
    assert torch.equal(posterior.mean(restored), posterior.mean(parameters))
    for name, value in parameters.items():
        assert torch.allclose(restored[name], value, rtol=1e-9, atol=1e-12)


def test_restore_takes_any_scale_from_the_smallest_up() -> None:
    scale = torch.tensor([1e-5, 1.1e-5, 1e-3, 1.0, 100.0])
    posterior = Gaussian()
    restored = posterior.restore(torch.zeros(5), scale)
    assert restored["rho"].dtype == torch.float32
    assert restored["rho"].isfinite().all()
    assert torch.allclose(posterior.std(restored), scale, rtol=1e-4)


@every_posterior
@given(size=sizes)
def test_pull_is_the_gradient_through_the_draw(posterior: Posterior, size: int) -> None:
    parameters = {name: v.requires_grad_() for name, v in start(posterior, size).items()}
    noise = posterior.noise(parameters, None)
    gradient = torch.randn(size, dtype=torch.float64)
    with torch.no_grad():
        pulled = posterior.pull(parameters, noise, gradient)
    theta = posterior.draw(parameters, noise)
    if posterior.per_sequence:
        # eq. 12 of Graves: the mean's as always; d L / d sigma^2 = g^2 / 2
        variance = (F.softplus(parameters["rho"]) + 1e-5).square()
        (expected,) = torch.autograd.grad(variance, parameters["rho"], gradient.square() / 2)
        assert torch.equal(pulled["loc"], gradient)
        assert torch.allclose(pulled["rho"], expected, rtol=1e-10)
        return
    expected = torch.autograd.grad(theta, list(parameters.values()), gradient)
    assert pulled.keys() == parameters.keys()
    for name, value in zip(parameters, expected, strict=True):
        assert torch.allclose(pulled[name], value, rtol=1e-10, atol=0)


@every_posterior
@given(size=sizes)
def test_chain_is_the_gradient_through_mean_and_std(posterior: Posterior, size: int) -> None:
    parameters = {name: v.requires_grad_() for name, v in start(posterior, size).items()}
    d_loc, d_scale = torch.randn(2, size, dtype=torch.float64)
    loss = (posterior.mean(parameters) * d_loc).sum()
    std = posterior.std(parameters)
    if std is not None:
        loss = loss + (std * d_scale).sum()
    expected = torch.autograd.grad(loss, list(parameters.values()))
    with torch.no_grad():
        chained = posterior.chain(parameters, d_loc, None if std is None else d_scale)
    assert chained.keys() == parameters.keys()
    for name, value in zip(parameters, expected, strict=True):
        assert torch.allclose(chained[name], value, rtol=1e-10, atol=0)


@every_posterior
def test_by_default_a_look_at_the_data_changes_nothing(posterior: Posterior) -> None:
    parameters = start(posterior, 5)
    noise = posterior.noise(parameters, None)
    refined = posterior.refine(posterior.look_noise(noise, None), torch.ones(5))
    assert not posterior.looks_at_data
    assert refined == noise


@given(st.floats(1e-12, 1e6))
def test_the_inverse_of_softplus_neither_overflows_nor_cancels(y: float) -> None:
    x = softplus_inverse(torch.tensor(y, dtype=torch.float64))
    assert F.softplus(x, threshold=1e9 if y < 500 else 20).item() == pytest.approx(y, rel=1e-6)


@pytest.mark.parametrize(
    ("settings", "key", "message"),
    [
        ({"scale": 1e-5}, "scale", "above 1e-05"),
        ({"scale": -1.0, "learn_scale": False}, "scale", "above 0"),
        ({"scale": math.inf}, "scale", "finite"),
        ({"scale": math.nan}, "scale", "finite"),
        ({"scale": (0.2, 0.1)}, "scale", "increasing"),
        ({"scale": (0.1, 0.2), "learn_scale": False}, "scale", "one number"),
        ({"estimator": "exact"}, "estimator", "'exact'"),
        ({"estimator": "fisher", "learn_scale": False}, "estimator", "learn_scale = true"),
    ],
)
def test_impossible_settings_are_refused_by_name(
    settings: dict[str, object], key: str, message: str
) -> None:
    with pytest.raises(Invalid, match=message) as caught:
        Gaussian(**settings)
    assert key in dict(caught.value.problems)


def test_all_impossible_settings_are_named_at_once() -> None:
    with pytest.raises(Invalid) as caught:
        Gaussian(scale=(0.1, 0.2), learn_scale=False, estimator="fisher")
    assert [key for key, _ in caught.value.problems] == ["scale", "estimator"]


def test_a_fixed_scale_of_zero_is_allowed() -> None:
    posterior = Gaussian(scale=0.0, learn_scale=False)
    parameters = posterior.init(torch.randn(6))
    drawn = posterior.draw(parameters, posterior.noise(parameters, None))
    assert torch.equal(drawn, parameters["loc"])
