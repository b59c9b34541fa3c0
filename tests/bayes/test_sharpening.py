"""Posterior sharpening (Fortunato 2017, Section 4) against closed forms and brute force."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import bayesrnn as br
from bayesrnn.bayes.gradients import draw_of
from bayesrnn.bayes.looking import differentiable
from bayesrnn.data import StreamLoader
from bayesrnn.errors import Invalid, UserError
from bayesrnn.evaluate import dynamic_evaluate
from bayesrnn.evaluate.sharpened import Bound, evaluate_sharpened, looking, search_look
from bayesrnn.train.loop import train
from bayesrnn.train.metrics import read_metrics
from small_runs import small_recipe

POSTERIOR = br.Sharpened((0.1, 0.3), sigma0=0.05, eta=0.02, clip=0.0)
RELATIVE = br.Sharpened((0.1, 0.3), sigma0=0.4, eta=0.6, clip=0.0, relative=True)
both = pytest.mark.parametrize("posterior", [POSTERIOR, RELATIVE], ids=["absolute", "relative"])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(3, 5)
        self.out = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(x.transpose(0, 1))[0][-1])


def data(count: int = 4) -> tuple[Tensor, Tensor, DataLoader[tuple[Tensor, ...]]]:
    torch.manual_seed(2)
    x = torch.randn(count, 6, 3, dtype=torch.float64)
    y = x.sum(dim=(1, 2))[:, None]
    return x, y, DataLoader(TensorDataset(x, y), batch_size=count)


def model_of(posterior: br.Posterior = POSTERIOR, **kwargs: object) -> br.Bayesian:
    torch.manual_seed(1)
    prior = br.ScaleMixture(0.5, 0.8, 0.05)
    return br.bayesianize(Net().double(), posterior, prior, **kwargs)  # type: ignore[arg-type]


def losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return 0.5 * (model(x) - y).square().flatten()


def weights(model: br.Bayesian) -> dict[str, Tensor]:
    return {
        name: theta.detach().clone()
        for block in model.each_block()
        for name, theta in draw_of(block).items()
    }


def phis(model: br.Bayesian) -> dict[str, Tensor]:
    found = {}
    for block in model.each_block():
        std = block.posterior.std(block.parameters_by_name)
        flat = torch.addcmul(block.loc, std, block.noise["eps"]).detach()
        found |= block.layout.split(flat)
    return found


@both
def test_theta_is_phi_after_a_step_of_gradient_descent_and_noise(posterior: br.Sharpened) -> None:
    """Eq. 7, with the gradient from a plain network that has phi for weights."""
    model, (x, y, _) = model_of(posterior), data()
    model.resample(nll=lambda: losses(model, x, y).mean())
    plain, phi = Net().double(), phis(model)
    plain.load_state_dict(phi)
    losses(plain, x, y).mean().backward()
    found = weights(model)
    for block in model.each_block():
        eps0 = block.layout.split(block.noise["eps0"])
        for weight in block.layout.weights:
            name = weight.name
            g = plain.get_parameter(name).grad
            sigma = block.moments()[name][1] if posterior.relative else 1.0
            step, noise = posterior.eta * sigma**2 * g, posterior.sigma0 * sigma * eps0[name]
            expected = phi[name] - step + noise
            torch.testing.assert_close(found[name], expected, rtol=1e-10, atol=1e-12)


def test_without_a_rate_only_the_noise_of_sigma0_is_left_and_costs_nothing() -> None:
    model, (x, y, _) = model_of(br.Sharpened(0.2, sigma0=0.05, eta=0.0)), data()
    model.resample(nll=lambda: losses(model, x, y).mean())
    found, phi = weights(model), phis(model)
    for block in model.each_block():
        eps0 = block.layout.split(block.noise["eps0"])
        for weight in block.layout.weights:
            rest = found[weight.name] - 0.05 * eps0[weight.name]
            torch.testing.assert_close(rest, phi[weight.name], rtol=1e-12, atol=1e-12)
    assert model.local_kl().item() == 0.0


def test_the_gradient_is_clipped_over_all_weights_together() -> None:
    x, y, _ = data()
    free, bound = model_of(), model_of(br.Sharpened((0.1, 0.3), 0.05, eta=0.02, clip=0.3))
    bound.load_state_dict(free.state_dict())
    found = []
    for model in (free, bound):
        torch.manual_seed(4)
        model.resample(nll=lambda m=model: losses(m, x, y).mean())
        found.append([block.noise["gradient"] for block in model.each_block()])
    norm = torch.sqrt(sum(g.square().sum() for g in found[0]))
    assert norm > 0.3
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other, one * 0.3 / norm, rtol=1e-5, atol=0)


@both
def test_the_local_kl_is_that_of_two_gaussians(posterior: br.Sharpened) -> None:
    model, (x, y, _) = model_of(posterior), data()
    model.resample(nll=lambda: losses(model, x, y).mean())
    total = 0.0
    for block in model.each_block():
        for name, g in block.layout.split(block.noise["gradient"]).items():
            sigma = block.moments()[name][1] if posterior.relative else torch.ones_like(g)
            width = posterior.sigma0 * sigma
            one = torch.distributions.Normal(-posterior.eta * sigma**2 * g, width)
            other = torch.distributions.Normal(torch.zeros_like(g), width)
            total += torch.distributions.kl_divergence(one, other).sum().item()
    assert model.local_kl().item() == pytest.approx(total, rel=1e-10)


def slope(parameter: Tensor, direction: Tensor, value: Callable[[], float]) -> float:
    """How a value changes as a parameter moves, by a central difference."""
    ends = []
    for sign in (1, -1):
        with torch.no_grad():
            parameter.add_(sign * 1e-6 * direction)
        ends.append(value())
        with torch.no_grad():
            parameter.sub_(sign * 1e-6 * direction)
    return (ends[0] - ends[1]) / 2e-6


@both
@pytest.mark.parametrize("tuned", [False, True])
@pytest.mark.parametrize("fused", [True, False])
def test_gradients_against_finite_differences_of_the_whole_objective(
    fused: bool, tuned: bool, posterior: br.Sharpened
) -> None:
    """First order: the noise and the look at the batch are held."""
    model, (x, y, loader) = model_of(posterior), data()
    with torch.no_grad():
        for block in model.blocks:
            block.eta.uniform_(-1, 1)

    def loss() -> br.objective.Loss:  # type: ignore[name-defined]
        return br.FreeEnergy(loader, "sample").loss(model, losses(model, x, y), [x, y])

    with model.hold():
        model.resample(nll=lambda: losses(model, x, y).mean())
        if tuned:
            with model.tuned():
                found = loss()
                found.backward() if fused else found.objective.backward()
        else:
            found = loss()
            found.backward() if fused else found.objective.backward()
        torch.manual_seed(5)
        for parameter in model.parameters():
            direction = torch.randn_like(parameter)
            ends = []
            for sign in (1, -1):
                with torch.no_grad():
                    parameter.add_(sign * 1e-6 * direction)
                    ends.append(loss().objective.item())
                    parameter.sub_(sign * 1e-6 * direction)
            numeric = (ends[0] - ends[1]) / 2e-6
            given = (parameter.grad * direction).sum().item()
            assert given == pytest.approx(numeric, rel=2e-5, abs=1e-8)


@pytest.mark.parametrize(("start", "rises"), [(0.002, True), (0.05, False)])
def test_the_rate_learns_but_stays_between_zero_and_twice_its_start(
    start: float, rises: bool
) -> None:
    """To first order the best is streams * sigma0^2 = 0.01."""
    posterior = br.Sharpened((0.1, 0.3), sigma0=0.05, eta=start, clip=0.0)
    model, (x, y, loader) = model_of(posterior), data()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e6)
    for _ in range(3):
        objective = br.FreeEnergy(loader)
        optimizer.zero_grad()
        model.resample(nll=lambda: losses(model, x, y).mean())
        objective(model, losses(model, x, y), [x, y]).backward()
        for block in model.blocks:  # the rates alone
            block.loc.grad = block.rho.grad = None
        optimizer.step()
    rates = torch.cat([b.posterior.rate(b.parameters_by_name).detach() for b in model.blocks])
    assert len(rates) == 6  # one a weight tensor
    assert (rates >= 0).all()
    assert (rates <= 2 * start).all()
    assert (rates > 1.5 * start).all() if rises else (rates < 0.5 * start).all()


def test_the_bound_is_above_what_it_bounds() -> None:
    """-log of the integral of p(x | theta) N(theta | phi, sigma0^2), by brute force on a grid, for
    a network of one weight; equal up to the gap for the best rate, larger for others."""
    x = torch.tensor([[1.0], [2.0], [-1.0]], dtype=torch.float64)
    y = torch.tensor([[0.5], [1.5], [-0.2]], dtype=torch.float64)
    sigma0, phi = 0.3, 0.1
    grid = torch.linspace(-6, 6, 200_001, dtype=torch.float64)
    nll = 0.5 * (grid[:, None] * x.T - y.T).square().sum(dim=1)
    prior = torch.distributions.Normal(phi, sigma0).log_prob(grid)
    truth = -torch.logsumexp(prior - nll, dim=0) - math.log(grid[1] - grid[0])
    found = {}
    for eta in (0.0, 0.05, 0.2, 0.5):
        posterior = br.Sharpened(0.2, sigma0=sigma0, eta=eta, clip=0.0)
        model = br.bayesianize(nn.Linear(1, 1, bias=False).double(), posterior, br.Normal())
        with torch.no_grad():
            model.blocks[0].loc[:1] = phi
        bounds = []
        torch.manual_seed(3)
        with model.weights("sample"):
            for _ in range(400):
                model.resample(lambda m=model: 0.5 * (m(x) - y).square().sum() / 3, around="mean")
                with torch.no_grad():
                    loss = 0.5 * (model(x) - y).square().sum()
                    bounds.append((loss + model.local_kl()).item())
        found[eta] = float(np.mean(bounds)), float(np.std(bounds)) / 20
    for mean, error in found.values():
        assert mean > truth.item() - 3 * error
    assert found[0.2][0] + 3 * found[0.2][1] < found[0.0][0]  # a look pays off
    assert found[0.2][0] < truth.item() + 0.1  # and comes near


def test_draws_weighed_by_importance_close_the_gap_to_what_is_bounded() -> None:
    """The same integral, by a look that is too short: one draw leaves a gap, many leave none, and
    none of them goes below."""
    x = torch.tensor([[1.0], [2.0], [-1.0]], dtype=torch.float64)
    y = torch.tensor([[0.5], [1.5], [-0.2]], dtype=torch.float64)
    sigma0, phi = 0.5, 0.1
    grid = torch.linspace(-6, 6, 200_001, dtype=torch.float64)
    nll = 0.5 * (grid[:, None] * x.T - y.T).square().sum(dim=1)
    prior = torch.distributions.Normal(phi, sigma0).log_prob(grid)
    truth = (-torch.logsumexp(prior - nll, dim=0) - math.log(grid[1] - grid[0])).item()
    posterior = br.Sharpened(0.2, sigma0=sigma0, eta=0.05, clip=0.0)
    model = br.bayesianize(nn.Linear(1, 1, bias=False).double(), posterior, br.Normal())
    with torch.no_grad():
        model.blocks[0].loc[:1] = phi
    torch.manual_seed(3)
    bounds: dict[int, list[float]] = {1: [], 4: [], 64: []}
    with model.weights("sample"), torch.no_grad():
        model.resample(lambda: 0.5 * (model(x) - y).square().sum() / 3, around="mean")
        for draws, found in bounds.items():
            for _ in range(400):
                log_w = []
                for _ in range(draws):
                    model.redraw_look()
                    loss = 0.5 * (model(x) - y).square().sum()
                    log_w.append(-loss - model.local_log_ratio())
                found.append(math.log(draws) - torch.stack(log_w).logsumexp(0).item())
    mean = {draws: float(np.mean(found)) for draws, found in bounds.items()}
    error = {draws: float(np.std(found)) / 20 for draws, found in bounds.items()}
    assert mean[1] - truth > 0.1
    assert mean[4] < mean[1] - 3 * error[1]
    assert mean[64] < truth + 0.02
    for draws in bounds:
        assert mean[draws] > truth - 3 * error[draws]


@pytest.mark.parametrize("relative", [False, True])
def test_a_draws_log_ratio_is_that_of_two_normals(relative: bool) -> None:
    x, y, _ = data()
    posterior = br.Sharpened(0.1, sigma0=0.3, eta=0.7, clip=0.0, relative=relative)
    model = br.bayesianize(Net().double(), posterior, br.Normal())
    with model.weights("sample"):
        model.resample(nll=lambda: losses(model, x, y).mean())
        expected = torch.zeros((), dtype=torch.float64)
        for block in model.blocks:
            noise, parameters = block.noise, block.spread(block.parameters_by_name)
            phi = block.posterior.draw(parameters, {"eps": noise["eps"]})
            theta = block.posterior.draw(parameters, noise)
            unit = block.posterior.std(parameters) if relative else 1.0
            q, p = (
                torch.distributions.Normal(centre, 0.3 * unit * torch.ones_like(phi))
                for centre in (phi - 0.7 * unit**2 * noise["gradient"], phi)
            )
            expected += (q.log_prob(theta) - p.log_prob(theta)).sum().detach()
        assert model.local_log_ratio().item() == pytest.approx(expected.item(), rel=1e-9)
        before = model.local_kl().item()
        first = weights(model)
        model.redraw_look()
        assert model.local_kl().item() == before  # the same look
        assert any(not torch.equal(first[name], one) for name, one in weights(model).items())


def test_it_looks_only_when_it_may() -> None:
    model, x = model_of(), data()[0]
    with pytest.raises(RuntimeError, match=r"resample\(nll="):
        model(x)
    model.eval()
    with model.weights("sample"):  # q(phi) alone: no look, no charge
        model.resample()
        model(x)
        assert model.local_kl().item() == 0.0
        for name, phi in phis(model).items():
            torch.testing.assert_close(weights(model)[name], phi, rtol=1e-12, atol=1e-14)


def test_some_weights_may_be_sharpened_and_others_not() -> None:
    x, y, loader = data()
    posteriors = {"rnn.*": POSTERIOR, "*": br.Gaussian(0.1)}
    model = br.bayesianize(Net().double(), posteriors, br.Normal())
    model.resample(nll=lambda: losses(model, x, y).mean())
    br.FreeEnergy(loader)(model, losses(model, x, y), [x, y]).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_rates_are_saved_and_loaded(tmp_path: Path) -> None:
    model = model_of()
    with torch.no_grad():
        for block in model.blocks:
            block.eta.normal_()
    br.save(model, tmp_path / "model")
    loaded = br.load(tmp_path / "model", Net().double())
    for one, other in zip(model.blocks, loaded.blocks, strict=True):
        assert torch.equal(one.eta, other.eta)
        found, expected = (b.layout.split(b.loc) for b in (other, one))
        for weight in one.layout.weights:
            assert torch.equal(found[weight.name], expected[weight.name])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sigma0": 0.0}, "sigma0 must be a finite number above 0"),
        ({"eta": -0.1}, "eta must be a finite number, 0 or above"),
        ({"clip": -1.0}, r"clip must be 0 \(off\) or above"),
        ({"estimator": "fisher"}, "estimator must be"),
    ],
)
def test_bad_settings_are_named(settings: dict[str, object], message: str) -> None:
    with pytest.raises(Invalid, match=message):
        br.Sharpened(0.1, **settings)  # type: ignore[arg-type]


# --- in a language model -----------------------------------------------------------------------


def test_a_sharpened_run_trains_resumes_and_has_a_bound(tmp_path: Path) -> None:
    posterior = {"kind": "sharpened", "scale": 0.05, "sigma0": 0.02, "eta": 0.0016}
    changes = {"options": {}, "epochs": 4}
    recipe = small_recipe(tmp_path, posterior=posterior, train=changes)
    train(recipe, tmp_path / "run", quiet=True)
    epochs = [m for m in read_metrics(tmp_path / "run") if m["kind"] == "epoch"]
    assert epochs[-1]["train_nll"] < epochs[0]["train_nll"]
    for steps in (27, 0):  # broken off, and to the end
        part = small_recipe(tmp_path, posterior=posterior, train=changes | {"max_steps": steps})
        train(part, tmp_path / "parts", quiet=True)
    model, parts = br.load(tmp_path / "run"), br.load(tmp_path / "parts")
    for name, tensor in model.state_dict().items():
        assert torch.equal(parts.state_dict()[name], tensor)
    ids = np.arange(401) * 7 % 20
    bound = evaluate_sharpened(model, StreamLoader(ids, 4, 5))
    assert bound.bound == pytest.approx(bound.nll + bound.kl)
    assert bound.kl > 0
    assert (bound.streams, bound.unroll, bound.tokens) == (4, 5, 400)


def test_the_bound_by_several_draws_is_that_of_a_plain_loop() -> None:
    torch.manual_seed(1)
    net = br.LanguageModel(20, 4, 5, 1, init=0.5).double()
    model = br.bayesianize(net, br.Sharpened(0.05, sigma0=0.5, eta=0.5, clip=0.0))
    loader = StreamLoader(np.arange(81) * 7 % 20, 4, 5)
    found = evaluate_sharpened(model, loader, generator=torch.Generator().manual_seed(3), draws=6)
    generator = torch.Generator().manual_seed(3)
    total, nlls, state = 0.0, [], None
    with model.eval().weights("sample"), torch.no_grad():
        for batch in loader:

            def loss() -> torch.Tensor:
                logits, _ = model(batch.x, state)  # noqa: B023
                return nn.functional.cross_entropy(
                    logits.flatten(0, 1),
                    batch.y.flatten(),  # noqa: B023
                    reduction="sum",
                )

            model.resample(lambda: loss() / 4, generator, "mean")
            _, after = model(batch.x, state)
            ratios, weighed = [], []
            for draw in range(6):
                if draw:
                    model.redraw_look(generator)
                nlls.append(loss().item())
                ratios.append(model.local_log_ratio().item())
                weighed.append(math.exp(-nlls[-1] - ratios[-1]))
            total += model.local_kl().item() - np.mean(ratios) - math.log(np.mean(weighed))
            state = after
    assert found.draws == 6
    assert found.bound == pytest.approx(total / 80, rel=1e-9)
    assert found.nll == pytest.approx(np.sum(nlls) / 6 / 80, rel=1e-9)
    assert found.bound < found.nll + found.kl
    with pytest.raises(Invalid, match="draws must be at least 1, got 0"):
        evaluate_sharpened(model, loader, draws=0)


def test_a_look_that_moves_nothing_leaves_dynamic_evaluation() -> None:
    torch.manual_seed(1)
    net = br.LanguageModel(20, 4, 5, 2, init=0.5).double()
    model = br.bayesianize(net, br.Sharpened(0.05, sigma0=1e-12, eta=0.0))
    loader = StreamLoader(np.arange(403) * 7 % 20, 4, 5)
    found = evaluate_sharpened(model, loader, rate=0.3)
    learnt = dynamic_evaluate(model, loader, 0.3)
    assert found.kl == 0
    assert found.rate == 0.3
    assert found.bound == pytest.approx(learnt.nll, rel=1e-9)
    assert abs(found.bound - evaluate_sharpened(model, loader).bound) > 0.05


@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_the_bound_is_the_same_in_inference_mode(rate: float) -> None:
    torch.manual_seed(1)
    model = br.bayesianize(br.LanguageModel(20, 4, 5, 1), br.Sharpened(0.05, eta=0.008))
    loader = StreamLoader(np.arange(101) * 7 % 20, 4, 5)

    def bound() -> Bound:
        generator = torch.Generator().manual_seed(3)
        return evaluate_sharpened(model, loader, generator=generator, rate=rate, draws=2)

    expected = bound()
    with torch.inference_mode():
        assert bound() == expected


@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_the_bound_leaves_the_model_as_it_was(rate: float) -> None:
    torch.manual_seed(1)
    net = br.LanguageModel(20, 4, 5, 1)
    model = br.bayesianize(net, br.Sharpened(0.05, eta=0.008))
    before = {name: t.clone() for name, t in model.state_dict().items()}
    loader = StreamLoader(np.arange(101) * 7 % 20, 4, 5)
    evaluate_sharpened(model, loader, around="draw", rate=rate)
    assert model.training
    assert loader.position == 0
    assert all(p.grad is None for p in model.parameters())
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_a_model_that_does_not_look_has_no_bound() -> None:
    model = br.bayesianize(br.LanguageModel(20, 4, 5, 1), br.Gaussian(0.05))
    with pytest.raises(UserError, match="the model is not sharpened"):
        evaluate_sharpened(model, StreamLoader(np.arange(101) % 20, 4, 5))


# --- looks of a trained model --------------------------------------------------------------------


def looking_pair(where: str, **sizes: float | bool) -> tuple[br.Bayesian, br.Bayesian]:
    """A model that was sharpened so from the start, and one that is so afterwards."""
    torch.manual_seed(1)
    net = br.LanguageModel(20, 4, 5, 1, init=0.5).double()
    posteriors = {where: br.Sharpened((0.1, 0.2), clip=0.0, **sizes), "*": br.Gaussian((0.1, 0.2))}
    from_start = br.bayesianize(net, posteriors, generator=torch.Generator().manual_seed(2))
    trained = br.bayesianize(net, br.Gaussian((0.1, 0.2)))
    source = dict(from_start.named_parameters())
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            parameter.copy_(source[name])
    return from_start, br.sharpen(trained, where, **sizes)


@pytest.mark.parametrize("where", ["decoder.*", "rnn.*"])
@pytest.mark.parametrize("relative", [False, True])
def test_sharpened_afterwards_it_looks_as_if_it_had_been_from_the_start(
    where: str, relative: bool
) -> None:
    expected, found = looking_pair(where, sigma0=0.3, eta=0.7, relative=relative)
    loader = StreamLoader(np.arange(101) * 7 % 20, 4, 5)
    bounds = [
        evaluate_sharpened(model, loader, "draw", torch.Generator().manual_seed(3))
        for model in (expected, found)
    ]
    assert bounds[0] == bounds[1]
    assert bounds[0].kl > 0


def test_a_model_that_looked_looks_with_other_weights_and_stays_as_it_was() -> None:
    model = br.bayesianize(br.LanguageModel(20, 4, 5, 1), br.Sharpened(0.05, eta=0.01))
    before = {name: t.clone() for name, t in model.state_dict().items()}
    found = br.sharpen(model, "decoder.*", 0.1, 0.2)
    looks = {
        weight.name: block.posterior.looks_at_data
        for block in found.each_block()
        for weight in block.layout.weights
    }
    assert {name for name, it_looks in looks.items() if it_looks} == {
        "decoder.weight",
        "decoder.bias",
    }
    assert [name for name, _ in found.named_parameters() if name.endswith("eta")] == [
        "blocks.2.eta"
    ]
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


def test_a_draw_that_was_held_is_not_one_of_the_sharpened_copy() -> None:
    model, x = br.bayesianize(br.LanguageModel(20, 4, 5, 1)), torch.zeros(3, 2, dtype=torch.long)
    with model.hold():
        expected = model(x)[0]
        found = br.sharpen(model, "decoder.*", 0.1, 0.2)
        assert torch.equal(model(x)[0], expected)
    with pytest.raises(RuntimeError, match="there is none"):
        found.kl()
    found.looking = False
    assert not torch.equal(found(x)[0], expected)
    assert found.kl().isfinite()


class Bowl(nn.Module):
    """A quadratic loss: its minimum at a look's own cost has a closed form."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([0.3, -1.0, 0.7]))
        self.register_buffer("bend", torch.tensor([0.5, 2.0, 8.0]))

    def forward(self) -> torch.Tensor:
        return (self.bend * (self.w - 1) ** 2).sum() / 2  # type: ignore[operator]


@pytest.mark.parametrize("looks", [1, 2, 5, 200])
def test_each_further_look_is_taken_where_the_others_led(looks: int) -> None:
    model = br.bayesianize(Bowl().double(), br.Sharpened(0.05, sigma0=0.1, eta=0.2, clip=0.0))
    (block,) = model.each_block()
    phi, h = torch.tensor([0.3, -1.0, 0.7]).double(), torch.tensor([0.5, 2.0, 8.0]).double()
    with model.eval().weights("sample"):
        model.resample(lambda: model(), around="mean", looks=looks)
        noise = {name: block.layout.split(t)["w"] for name, t in block.noise.items()}
        theta = block.layout.split(block.posterior.draw(block.parameters_by_name, block.noise))["w"]
        paid = model.local_kl()
    seen: list[torch.Tensor] = []
    for _ in range(looks):
        led = phi - 0.2 * sum(seen, torch.zeros(3).double()) / max(len(seen), 1)
        seen.append(h * (led - 1))
    centre = phi - 0.2 * sum(seen) / looks
    assert torch.allclose(theta - 0.1 * noise["eps0"], centre, atol=1e-6)
    assert paid.item() == pytest.approx(((centre - phi) ** 2).sum().item() / (2 * 0.1**2))
    if looks == 200:  # the minimum of loss + (theta - phi)^2 / (2 eta), where all looks agree
        assert torch.allclose(centre, (phi + 0.2 * h) / (1 + 0.2 * h), atol=0.02)


def test_the_second_order_goes_through_one_look() -> None:
    model = br.bayesianize(Bowl(), br.Sharpened(0.05, order="second"))
    for training, gradients in ((True, True), (True, False), (False, True)):
        model.train(training)
        with (
            model.weights("sample"),
            torch.set_grad_enabled(gradients),
            pytest.raises(RuntimeError, match="one look"),
        ):
            model.resample(lambda: model(), looks=2)
    with model.weights("sample"), torch.no_grad():  # a bound needs none
        model.resample(lambda: model(), looks=2)


@pytest.mark.parametrize("looks", [0, -2])
def test_there_is_at_least_one_look(looks: int) -> None:
    model = br.bayesianize(Bowl(), br.Sharpened(0.05))
    with pytest.raises(Invalid, match=f"looks must be at least 1, got {looks}"):
        model.resample(lambda: model(), looks=looks)


def test_the_look_with_the_lowest_bound_is_chosen() -> None:
    model, _ = looking_pair("decoder.*", sigma0=0.3, eta=0.7)
    loader = StreamLoader(np.arange(101) * 7 % 20, 4, 5)
    search = search_look(model, loader, "decoder.*", (0.01, 0.5, 4.0))
    assert [trial.look for trial in search.tried] == [0.01, 0.5, 4.0]
    best = min(search.tried, key=lambda trial: trial.bound)
    assert search.look == best.look
    again = looking(model, "decoder.*", best.look, streams=4)
    found = evaluate_sharpened(again, loader, generator=torch.Generator().manual_seed(1))
    assert found.bound == best.bound
    (block,) = [b for b in again.each_block() if b.posterior.looks_at_data]
    assert isinstance(block.posterior, br.Sharpened)
    assert (block.posterior.sigma0, block.posterior.relative) == (best.look, True)
    assert block.posterior.eta == pytest.approx(4 * best.look**2)


@pytest.mark.parametrize(
    ("posterior", "where", "message"),
    [
        (br.Gaussian(0.05), "rnn.weight*", "must name whole layers that are Gaussian"),
        (br.Delta(), "rnn.*", "must name whole layers that are Gaussian"),
        (br.Gaussian(0.05), "softmax", "'softmax' names none of embedding.weight"),
    ],
)
def test_weights_that_cannot_look_are_refused(
    posterior: br.Posterior, where: str, message: str
) -> None:
    model = br.bayesianize(br.LanguageModel(20, 4, 5, 1), posterior, br.Normal(0.0, 1.0))
    with pytest.raises(Invalid, match=message):
        br.sharpen(model, where, 0.1, 0.2)


# --- the second order --------------------------------------------------------------------------


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("tuned", [False, True])
def test_the_second_order_is_the_gradient_of_the_whole_objective(
    tuned: bool, relative: bool
) -> None:
    """Finite differences of all of it: the look at the batch is taken anew at every end."""
    sizes = {"sigma0": 0.4, "eta": 3.0} if relative else {"sigma0": 0.05, "eta": 0.2}
    first_order = br.Sharpened((0.1, 0.3), clip=0.0, relative=relative, **sizes)
    posterior = replace(first_order, order="second")
    model, (x, y, loader) = model_of(posterior), data()

    def loss() -> br.objective.Loss:  # type: ignore[name-defined]
        torch.manual_seed(9)  # the same noise
        model.resample(nll=lambda: losses(model, x, y).mean())
        return br.FreeEnergy(loader, "sample").loss(model, losses(model, x, y), [x, y])

    if tuned:
        with model.tuned():
            loss().backward()
    else:
        loss().backward()
    given = {name: p.grad.clone() for name, p in model.named_parameters()}
    first = model_of(first_order)
    first.load_state_dict(model.state_dict())
    torch.manual_seed(9)
    first.resample(nll=lambda: losses(first, x, y).mean())
    br.FreeEnergy(loader, "sample").loss(first, losses(first, x, y), [x, y]).backward()
    torch.manual_seed(5)
    apart = 0.0
    for (name, parameter), other in zip(model.named_parameters(), first.parameters(), strict=True):
        direction = torch.randn_like(parameter)
        numeric = slope(parameter, direction, lambda: loss().objective.item())
        assert (given[name] * direction).sum().item() == pytest.approx(numeric, rel=1e-4, abs=1e-7)
        apart = max(apart, abs((other.grad * direction).sum().item() - numeric) / abs(numeric))
    assert apart > 0.01  # the first order is another gradient


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("tuned", [False, True])
def test_the_second_order_reaches_all_that_the_look_depends_on(tuned: bool, frozen: bool) -> None:
    """Weights that do not look, ordinary parameters, and those beside frozen weights that look."""
    posteriors = {
        "*_hh_l0": br.Gaussian((0.1, 0.3)),
        "*": br.Sharpened((0.1, 0.3), sigma0=0.05, eta=0.2, clip=0.0, order="second"),
    }
    torch.manual_seed(1)
    prior = br.ScaleMixture(0.5, 0.8, 0.05)
    where = ["rnn.*", "out.weight"]
    model, (x, y, loader) = br.bayesianize(Net().double(), posteriors, prior, where), data()
    if frozen:
        model.blocks[-1].requires_grad_(False)
        assert [weight.name for weight in model.blocks[-1].layout.weights] == ["out.weight"]

    def loss() -> br.objective.Loss:  # type: ignore[name-defined]
        torch.manual_seed(9)  # the same noise
        model.resample(nll=lambda: losses(model, x, y).mean())
        return br.FreeEnergy(loader, "sample").loss(model, losses(model, x, y), [x, y])

    with model.tuned() if tuned else nullcontext():
        loss().backward()
    learnt = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert any(name.endswith("out.bias") for name in learnt)
    given = {name: p.grad.clone() for name, p in learnt.items()}
    torch.manual_seed(5)
    for name, parameter in learnt.items():
        direction = torch.randn_like(parameter)
        numeric = slope(parameter, direction, lambda: loss().objective.item())
        assert (given[name] * direction).sum().item() == pytest.approx(numeric, rel=1e-4, abs=1e-7)
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)


def test_a_second_order_run_trains(tmp_path: Path) -> None:
    posterior = {"kind": "sharpened", "scale": 0.05, "eta": 0.0016, "order": "second"}
    recipe = small_recipe(tmp_path, posterior=posterior, train={"options": {}})
    train(recipe, tmp_path / "run", quiet=True)
    epochs = [m for m in read_metrics(tmp_path / "run") if m["kind"] == "epoch"]
    assert epochs[-1]["train_nll"] < epochs[0]["train_nll"]


def test_a_loss_bends_with_the_look_it_was_made_with() -> None:
    """Two losses first, then their backward passes: the same as one after the other."""
    posterior = br.Sharpened((0.1, 0.3), sigma0=0.05, eta=0.2, clip=0.0, order="second")
    x, y, loader = data()
    found = []
    for together in (True, False):
        model = model_of(posterior)
        torch.manual_seed(9)
        kept = []
        for _ in range(2):
            model.resample(nll=lambda m=model: losses(m, x, y).mean())
            loss = br.FreeEnergy(loader, "sample").loss(model, losses(model, x, y), [x, y])
            kept.append(loss) if together else loss.backward()
        for loss in kept:
            loss.backward()
        found.append([p.grad for p in model.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)


def test_only_some_blocks_may_bend() -> None:
    second = br.Sharpened((0.1, 0.3), sigma0=0.05, eta=0.2, clip=0.0, order="second")
    posteriors = {"rnn.*": second, "out.weight": POSTERIOR, "*": br.Gaussian(0.1)}
    torch.manual_seed(1)
    model = br.bayesianize(Net().double(), posteriors, br.Normal())
    x, y, loader = data()

    def loss(parameter: Tensor | None = None) -> br.objective.Loss:  # type: ignore[name-defined]
        torch.manual_seed(9)
        model.resample(nll=lambda: losses(model, x, y).mean())
        return br.FreeEnergy(loader, "sample").loss(model, losses(model, x, y), [x, y])

    loss().backward()
    assert all(p.grad is not None for p in model.parameters())
    assert model.look is not None
    model.eval()
    with model.weights("sample"):
        model.resample()
    assert model.look is None  # nothing is left of a look that was not taken


@pytest.mark.parametrize("kind", ["naive", "nn"])
def test_fresh_masks_cannot_be_compared(kind: str) -> None:
    posterior = br.Sharpened(0.1, order="second")
    if kind == "naive":
        dropout = br.DropoutSettings(kind="naive", output=0.5)
        net: nn.Module = br.LanguageModel(11, 4, 5, 1, dropout=dropout)
    else:
        net = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
    model = br.bayesianize(net, posterior)
    with pytest.raises(RuntimeError, match="second order of sharpening compares two forward"):
        model.resample(nll=lambda: torch.zeros(()))


def test_the_look_and_the_step_see_the_same_masks() -> None:
    dropout = br.DropoutSettings(kind="variational", input=0.5, recurrent=0.3, output=0.5)
    torch.manual_seed(1)
    net = br.LanguageModel(11, 4, 5, 1, dropout=dropout)
    model = br.bayesianize(net, br.Sharpened(0.1, sigma0=1e-9, eta=0.0))
    x = torch.arange(12).view(6, 2) % 11
    seen = []

    def loss() -> Tensor:
        seen.append(model(x)[0])
        return seen[-1].sum()

    model.resample(nll=loss)
    loss()
    torch.testing.assert_close(seen[0], seen[1], rtol=1e-4, atol=1e-5)
    model.resample(nll=loss)
    assert not torch.allclose(seen[2], seen[1], rtol=1e-2)


def test_sharpening_beside_the_fisher_estimate_is_charged_too() -> None:
    x, y, loader = data()
    found = []
    for estimator in ("fisher", "reparameterised"):
        posteriors = {"rnn.*": POSTERIOR, "*": br.Gaussian(0.1, estimator=estimator)}  # type: ignore[arg-type]
        torch.manual_seed(1)
        model = br.bayesianize(Net().double(), posteriors, br.Normal())
        torch.manual_seed(9)
        model.resample(nll=lambda m=model: losses(m, x, y).mean())
        br.FreeEnergy(loader).loss(model, losses(model, x, y), [x, y]).backward()
        found.append(model.blocks[0].eta.grad)
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-12)


def test_a_prior_that_learns_does_not_go_with_the_second_order() -> None:
    posterior = br.Sharpened(0.1, order="second")
    with pytest.raises(Invalid, match='order = "first"'):
        br.bayesianize(nn.Linear(2, 2), posterior, br.Normal(0.0, "learn"))


def test_gradients_of_a_recurrent_layer_in_eval_mode_are_without_its_dropout() -> None:
    """It is put into train mode for them, which cuDNN wants, and comes back as it was."""
    torch.manual_seed(1)
    layer, x = nn.LSTM(3, 4, num_layers=2, dropout=0.9).eval(), torch.randn(5, 2, 3)
    wanted = layer(x)[0]
    with differentiable(layer):
        assert layer.training
        assert torch.equal(layer(x)[0], wanted)
    assert (layer.training, layer.dropout) == (False, 0.9)
