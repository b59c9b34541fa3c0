"""Every gradient in float64, against Algorithm 2, finite differences and eq. 17 of Graves."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.distributions as td
import torch.nn.functional as F
from torch import Tensor, nn

from bayes.reference import (
    TinyTagger,
    axes,
    by_name,
    central_differences,
    gradient_by_name,
    learnt,
    log_prior,
    losses,
    plain_losses,
    relative_error,
    tiny_batch,
)
from bayesrnn.bayes import (
    Bayesian,
    Delta,
    Gaussian,
    Laplace,
    Normal,
    Posterior,
    Prior,
    ScaleMixture,
    Sharpened,
    Uniform,
    bayesianize,
)
from bayesrnn.objective import FreeEnergy

WEIGHT = 0.37  # of the KL
MIXTURE = {"pi": 0.3, "sigma1": 0.9, "sigma2": 0.15}
NUMBERS = {
    "uniform": Uniform(),
    "normal": Normal(0.2, 0.7),
    "laplace": Laplace(-0.1, 0.6),
    "mixture by weight": ScaleMixture(**MIXTURE, group="weight"),
    "mixture by input": ScaleMixture(**MIXTURE, group="input"),
    "mixture by tensor": ScaleMixture(**MIXTURE, group="tensor"),
}


def tagger() -> TinyTagger:
    net = TinyTagger().double()
    net.rnn.bias_hh_l0.requires_grad_(False)
    return net


# --- Algorithm 2 -------------------------------------------------------------------------------


@pytest.mark.parametrize("terms", ["error", "complexity", "both"])
@pytest.mark.parametrize("prior", NUMBERS.values(), ids=NUMBERS.keys())
def test_gradients_of_the_sampled_kl_are_those_of_algorithm_2(prior: Prior, terms: str) -> None:
    net = tagger()
    model = bayesianize(net, Gaussian((0.05, 0.4)), prior)
    x, y = tiny_batch()
    error = losses(model(x), y).sum()
    g_on, w = {"error": (1.0, 0.0), "complexity": (0.0, WEIGHT), "both": (1.0, WEIGHT)}[terms]
    (g_on * error + w * model.kl("sample")).backward()

    # Algorithm 2, as it is written: theta, mu and sigma are variables of their own.
    mu, eps, rho = by_name(model, "loc"), by_name(model, "eps"), by_name(model, "rho")
    sigma = {n: (F.softplus(r) + 1e-5) for n, r in rho.items()}
    theta = {n: mu[n] + sigma[n] * eps[n] for n in mu}
    variables = [theta, mu, sigma]
    for group in variables:
        for tensor in group.values():
            tensor.requires_grad_()
    values = {name: getattr(prior, name) for name in prior.domains}
    plain = plain_losses(net, theta, x, y).sum()
    log_ratio = sum(
        td.Normal(mu[n], sigma[n]).log_prob(theta[n]).sum()
        - log_prior(prior, theta[n], axes(model)[n], values)
        for n in mu
    )
    assert error.item() == pytest.approx(plain.item(), rel=1e-12)
    assert model.kl("sample").item() == pytest.approx(log_ratio.item(), rel=1e-9)
    names = list(mu)
    g = torch.autograd.grad(plain, list(theta.values()))
    g_theta, g_mu, g_sigma = (
        torch.autograd.grad(log_ratio, list(group.values()), retain_graph=True)
        for group in variables
    )
    d_mu, d_rho = [], []
    for i, name in enumerate(names):
        d_mu.append(g_on * g[i] + w * (g_theta[i] + g_mu[i]))
        d_sigma = (g_on * g[i] + w * g_theta[i]) * eps[name] + w * g_sigma[i]
        leaf = rho[name].clone().requires_grad_()
        d_rho += torch.autograd.grad(F.softplus(leaf) + 1e-5, leaf, d_sigma)
    found_mu, found_rho = gradient_by_name(model, "loc"), gradient_by_name(model, "rho")
    if d_mu[0].any():  # with a uniform prior the KL has no gradient of the mean
        assert relative_error([found_mu[n] for n in names], d_mu) < 1e-6
    else:
        assert not any(found_mu[n].any() for n in names)
    assert relative_error([found_rho[n] for n in names], d_rho) < 1e-6


def test_ordinary_parameters_get_the_plain_gradient_at_the_draw() -> None:
    net = tagger()
    model = bayesianize(net, where="rnn.*")
    x, y = tiny_batch()
    (losses(model(x), y).sum() + model.kl()).backward()
    mu, eps, rho = (by_name(model, which) for which in ("loc", "eps", "rho"))
    theta = {n: mu[n] + (F.softplus(rho[n]) + 1e-5) * eps[n] for n in mu}
    plain_losses(net, theta, x, y).sum().backward()
    for name in ("embedding.weight", "decoder.weight", "decoder.bias"):
        found = model.module.get_parameter(name).grad
        assert relative_error([found], [net.get_parameter(name).grad]) < 1e-9


# --- finite differences ------------------------------------------------------------------------

CASES: dict[str, tuple[Posterior, Prior, str]] = {}
for prior_name, number_prior in NUMBERS.items():
    CASES[f"delta, {prior_name}"] = (Delta(), number_prior, "auto")
    CASES[f"gaussian, {prior_name}"] = (Gaussian((0.05, 0.4)), number_prior, "auto")
    CASES[f"gaussian, {prior_name}, sample"] = (Gaussian((0.05, 0.4)), number_prior, "sample")
    CASES[f"fixed, {prior_name}"] = (Gaussian(0.3, learn_scale=False), number_prior, "auto")
CASES |= {
    "delta, normal learnt": (Delta(), Normal("learn", "learn"), "auto"),
    "delta, laplace learnt": (Delta(), Laplace("learn", "learn"), "auto"),
    "gaussian, normal learnt": (Gaussian(0.2), Normal("learn", "learn"), "auto"),
    "gaussian, normal learnt, sample": (Gaussian(0.2), Normal("learn", 0.5), "sample"),
    "gaussian, laplace learnt": (Gaussian(0.2), Laplace(0.1, "learn"), "auto"),
    "gaussian, laplace learnt, sample": (Gaussian(0.2), Laplace("learn", "learn"), "sample"),
    "gaussian, mixture learnt": (Gaussian(0.2), ScaleMixture("learn", "learn", 0.2), "auto"),
    "gaussian, narrow learnt": (Gaussian(0.2), ScaleMixture(0.4, 0.8, "learn", "weight"), "auto"),
    # at its optimum the prior's own movement adds nothing to the slope
    "delta, normal fitted": (Delta(), Normal("fit", "fit"), "auto"),
    "delta, laplace fitted": (Delta(), Laplace(0.0, "fit"), "auto"),
    "gaussian, normal fitted": (Gaussian((0.05, 0.4)), Normal("fit", "fit"), "auto"),
    "fixed, normal fitted": (Gaussian(0.3, learn_scale=False), Normal(0.0, "fit"), "auto"),
}


@pytest.mark.parametrize(("posterior", "prior", "kl"), CASES.values(), ids=CASES.keys())
def test_gradients_are_finite_differences_with_the_noise_held(
    posterior: Posterior, prior: Prior, kl: str
) -> None:
    net = nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 4)).double()
    model = bayesianize(net, posterior, prior)
    if prior.named("learn"):  # away from the standard normal, and where a step is a small step
        with torch.no_grad():
            for parameter in model.priors.parameters():
                parameter.fill_(-0.4)
    x, y = tiny_batch()

    def loss() -> Tensor:
        return losses(model(x), y).sum() + WEIGHT * model.kl(kl)

    with model.hold():
        loss().backward()
        views, gradients = learnt(model)
        with torch.no_grad():
            expected = central_differences(loss, views)
    assert relative_error(gradients, expected) < 1e-6
    own = len(list(model.priors.parameters()))  # the prior's come last
    for gradient, slope in zip(gradients[-own:], expected[-own:], strict=True) if own else ():
        assert gradient.item() == pytest.approx(slope.item(), rel=1e-6)
        assert slope.item() != 0


def test_gradients_through_a_recurrent_network_are_finite_differences() -> None:
    model = bayesianize(tagger(), Gaussian(0.2), ScaleMixture(**MIXTURE))
    x, y = tiny_batch(4, 3)

    def loss() -> Tensor:
        return losses(model(x), y).sum() + WEIGHT * model.kl()

    with model.hold():
        loss().backward()
        views, gradients = learnt(model)
        with torch.no_grad():
            expected = central_differences(loss, views)
    assert relative_error(gradients, expected) < 1e-6


def test_a_kl_in_a_larger_expression_is_scaled_by_the_chain_rule() -> None:
    model = bayesianize(nn.Linear(2, 2).double(), Gaussian(0.2), Normal())
    model.resample()
    model.kl().backward()
    once = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model.kl().square().backward()
    expected = [2 * model.kl().item() * gradient for gradient in once]
    assert relative_error([p.grad for p in model.parameters()], expected) < 1e-12


@pytest.mark.parametrize("frozen", [["scale"], ["loc", "scale"]])
def test_a_learnt_prior_can_be_frozen(frozen: list[str]) -> None:
    model = bayesianize(nn.Linear(2, 2).double(), Gaussian(0.2), Normal("learn", "learn"))
    model.resample()
    model.kl().backward()
    expected = [block.loc.grad.clone() for block in model.blocks]
    model.zero_grad()
    for name in frozen:
        getattr(model.priors[0], name).requires_grad_(False)
    model.kl().backward()
    assert all(getattr(model.priors[0], name).grad is None for name in frozen)
    assert all(
        torch.equal(block.loc.grad, g) for block, g in zip(model.blocks, expected, strict=True)
    )


# --- the Fisher estimate -----------------------------------------------------------------------


def counted(targets: int, streams: int) -> SimpleNamespace:
    return SimpleNamespace(targets=targets, streams=streams)


@pytest.mark.parametrize("prior", [Normal(0.2, 0.7), Uniform(), ScaleMixture(**MIXTURE)])
def test_the_fisher_estimate_is_eq_17_summed_over_sequences(prior: Prior) -> None:
    net = tagger()
    streams, share = 5, 0.25
    model = bayesianize(net, Gaussian((0.05, 0.4), estimator="fisher"), prior)
    x, y = tiny_batch(4, streams)
    objective = FreeEnergy(SimpleNamespace(targets=80))
    loss = objective(model, losses(model(x), y), counted(20, streams))
    assert loss.share == share
    loss.backward()

    mu, eps, rho = by_name(model, "loc"), by_name(model, "eps"), by_name(model, "rho")
    sigma = {n: (F.softplus(r) + 1e-5) for n, r in rho.items()}
    theta = {n: (mu[n] + sigma[n] * eps[n]).requires_grad_() for n in mu}
    names = list(mu)
    d_mu = {n: torch.zeros_like(mu[n]) for n in names}
    d_variance = {n: torch.zeros_like(mu[n]) for n in names}
    for sequence in range(streams):
        one = plain_losses(net, theta, x[:, [sequence]], y[:, [sequence]]).sum()
        for name, g in zip(names, torch.autograd.grad(one, list(theta.values())), strict=True):
            d_mu[name] += g
            d_variance[name] += g.square() / 2
    # the complexity's part is no estimate: its own gradient, which is checked above
    kl = copy.deepcopy(model)
    kl.zero_grad()
    kl.kl().backward()
    kl_mu, kl_rho = gradient_by_name(kl, "loc"), gradient_by_name(kl, "rho")
    found_mu, found_rho = gradient_by_name(model, "loc"), gradient_by_name(model, "rho")
    wanted_mu, wanted_rho = [], []
    for name in names:
        wanted_mu.append((d_mu[name] + share * kl_mu[name]) / streams)
        d_rho = d_variance[name] * 2 * sigma[name] * torch.sigmoid(rho[name])
        wanted_rho.append((d_rho + share * kl_rho[name]) / streams)
    assert relative_error([found_mu[n] for n in names], wanted_mu) < 1e-6
    assert relative_error([found_rho[n] for n in names], wanted_rho) < 1e-6


def test_the_whole_fisher_gradient_with_a_normal_prior_is_eqs_16_and_17() -> None:
    net = nn.Linear(2, 1, bias=False).double()
    model = bayesianize(net, Gaussian(0.3, estimator="fisher"), Normal(0.1, 0.5))
    x, y = torch.randn(6, 2, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    loss = FreeEnergy(SimpleNamespace(targets=6))(
        model, 0.5 * (model(x)[:, 0] - y).square(), counted(6, 6)
    )
    loss.backward()
    mu, sigma = net.weight.detach()[0], 0.3
    theta = mu + sigma * by_name(model, "eps")["weight"][0]
    each = (x @ theta - y)[:, None] * x  # the gradient of each sequence's loss
    d_mu = (mu - 0.1) / 0.5**2 + each.sum(0)
    d_variance = 0.5 * (1 / 0.5**2 - 1 / sigma**2) + 0.5 * each.square().sum(0)
    rho = by_name(model, "rho")["weight"][0]
    d_rho = d_variance * 2 * sigma * torch.sigmoid(rho)
    found_mu = gradient_by_name(model, "loc")["weight"][0]
    found_rho = gradient_by_name(model, "rho")["weight"][0]
    assert relative_error([found_mu], [d_mu / 6]) < 1e-6
    assert relative_error([found_rho], [d_rho / 6]) < 1e-6


def test_fisher_gradients_accumulate_and_ordinary_parameters_get_theirs() -> None:
    net = tagger()
    model = bayesianize(net, Gaussian(estimator="fisher"), Normal(), where="rnn.*")
    x, y = tiny_batch()
    with model.hold():
        for _ in range(2):
            loss = FreeEnergy(SimpleNamespace(targets=6))(model, losses(model(x), y), counted(6, 2))
            loss.backward()
        twice = {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}
        model.zero_grad()
        loss = FreeEnergy(SimpleNamespace(targets=6))(model, losses(model(x), y), counted(6, 2))
        loss.backward()
    (plain,) = torch.autograd.grad(losses(model(x), y).sum() / 2, model.module.decoder.bias)
    assert plain.abs().sum() > 0
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert torch.allclose(twice[name], 2 * parameter.grad, rtol=1e-12)
            assert parameter.grad.any()
    assert model.module.rnn.bias_hh_l0.grad is None


def test_beside_frozen_fisher_weights_the_others_learn() -> None:
    posteriors = {"rnn.*": Gaussian(estimator="fisher"), "decoder.*": Sharpened()}
    model = bayesianize(tagger(), posteriors, Normal(), where=["rnn.*", "decoder.*"])
    model.blocks.requires_grad_(False)
    x, y = tiny_batch()
    model.resample(nll=lambda: losses(model(x), y).mean())
    loss = FreeEnergy(SimpleNamespace(targets=6))(model, losses(model(x), y), counted(6, 2))
    loss.backward()
    assert model.module.embedding.weight.grad.abs().sum() > 0
    assert all(p.grad is None for p in model.blocks.parameters())


def test_fisher_gradients_of_several_draws_are_averaged() -> None:
    model, x, y = fisher_model()
    with model.hold():  # the same draw three times: its average is that of one
        for draws in (1, 3):
            model.zero_grad()
            objective = FreeEnergy(SimpleNamespace(targets=6))
            for _ in range(draws):
                objective(model, losses(model(x), y), counted(6, 2), draws=draws).backward()
            if draws == 1:
                once = [p.grad.clone() for p in model.parameters() if p.requires_grad]
    averaged = [p.grad for p in model.parameters() if p.requires_grad]
    assert relative_error(averaged, once) < 1e-12


def fisher_model() -> tuple[Bayesian, Tensor, Tensor]:
    return bayesianize(tagger(), Gaussian(estimator="fisher"), Normal()), *tiny_batch()


def test_the_fisher_estimate_refuses_a_summed_loss() -> None:
    model, x, y = fisher_model()
    with pytest.raises(ValueError, match=r"expected a vector of 2, got shape \(\)"):
        FreeEnergy(SimpleNamespace(targets=6))(model, losses(model(x), y).sum(), counted(6, 2))


def test_the_fisher_estimate_refuses_a_plain_backward() -> None:
    model, x, y = fisher_model()
    with pytest.raises(RuntimeError, match="one sequence at a time"):
        losses(model(x), y).sum().backward()
    loss = FreeEnergy(SimpleNamespace(targets=6))(model, losses(model(x), y), counted(6, 2))
    with pytest.raises(RuntimeError, match="one sequence at a time"):
        loss.objective.backward()
    # and goes on working the right way
    loss = FreeEnergy(SimpleNamespace(targets=6))(model, losses(model(x), y), counted(6, 2))
    loss.backward()
    assert all(block.rho.grad.isfinite().all() for block in model.blocks)
