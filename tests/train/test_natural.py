"""Natural gradients: against the formulas, against the exact posterior, and beside SGD."""

import copy
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

import bayesrnn as br
from bayesrnn.train.natural import NaturalGradient


class Examples:
    """All the examples in one batch."""

    def __init__(self, count: int) -> None:
        self.targets = self.streams = count


def regression(count: int = 64, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 3, generator=generator) * torch.tensor([0.3, 1.0, 2.0])
    x[:, 1] += 0.5 * x[:, 2]  # so that the weights are not independent given the data
    y = x @ torch.tensor([1.0, -2.0, 0.5]) + 0.5 * torch.randn(count, generator=generator)
    return x, y


def model_of(scale: float, prior: float) -> br.Bayesian:
    net = nn.Linear(3, 1, bias=False)
    return br.bayesianize(net, br.Gaussian(scale=scale), br.Normal(0.0, prior)).train()


def take(model: br.Bayesian, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    batch = Examples(len(x))
    nll = 0.5 * ((model(x)[:, 0] - y) / 0.5).square().sum()
    optimizer.zero_grad()
    br.FreeEnergy(batch)(model, nll, batch).backward()
    optimizer.step()


def test_it_finds_the_best_independent_gaussian_of_a_quadratic_loss() -> None:
    """Its mean is the exact posterior's, its precisions the diagonal of the exact precision."""
    torch.manual_seed(1)
    x, y = regression()
    model = model_of(scale=0.1, prior=0.7)
    optimizer = NaturalGradient(model, len(x), lr=0.05, momentum=0.9, scale_rate=0.1)
    for number in range(4000):
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * (1 - number / 4000)
        take(model, optimizer, x, y)
    precision = x.T @ x / 0.5**2 + torch.eye(3) / 0.7**2
    mean = torch.linalg.solve(precision, x.T @ y / 0.5**2)
    [(loc, scale)] = model.moments().values()
    assert scale is not None
    spread = precision.diagonal().rsqrt()
    assert ((loc[0] - mean).abs() < 0.2 * spread).all()
    assert torch.allclose(scale[0], spread, rtol=0.05)


def test_a_step_is_that_of_the_equations() -> None:
    """Against autograd through the free energy of all data, in double, with the precision itself
    as what moves."""
    torch.manual_seed(2)
    x, y = regression(10)
    model = model_of(scale=0.2, prior=0.7)
    optimizer = NaturalGradient(model, 10, lr=0.5, momentum=0.8, scale_rate=1e-3)
    first_variance = 0.2**2
    average = torch.zeros(3, dtype=torch.float64)
    for number in (1, 2, 3):
        [(loc, scale)] = model.moments().values()
        assert scale is not None
        mu = loc[0].double().clone().requires_grad_()
        sigma = scale[0].double().clone().requires_grad_()
        take(model, optimizer, x, y)
        [block] = model.each_block()
        assert block.noise is not None
        theta = mu + sigma * block.noise["eps"][:3].double()
        nll = 0.5 * ((x.double() @ theta - y.double()) / 0.5).square().sum()
        normal = torch.distributions.Normal
        kl = torch.distributions.kl_divergence(
            normal(mu, sigma), normal(torch.zeros_like(mu), torch.full_like(mu, 0.7))
        ).sum()
        d_mu, d_sigma = torch.autograd.grad(nll + kl, (mu, sigma))
        average = 0.8 * average + 0.2 * d_mu / 10  # of the loss a sequence
        precision = sigma.detach() ** -2
        moved = mu - 0.5 * sigma**2 / first_variance * average / (1 - 0.8**number)
        change = 0.5 * 1e-3 * d_sigma / sigma.detach()
        wanted = precision + change + change**2 / (2 * precision)
        [(loc, scale)] = model.moments().values()
        assert scale is not None
        assert torch.allclose(loc[0].double(), moved.detach(), rtol=1e-5, atol=1e-6)
        assert torch.allclose(scale[0].double() ** -2, wanted, rtol=1e-4)


@pytest.mark.parametrize("size", [1e6, -1e6])
def test_precisions_stay_positive_whatever_the_gradient(size: float) -> None:
    model = model_of(scale=0.2, prior=1.0)
    optimizer = NaturalGradient(model, 10, lr=1.0, scale_rate=0.5)
    [block] = model.each_block()
    for _ in range(5):
        block.loc.grad = torch.zeros_like(block.loc)
        block.rho.grad = torch.full_like(block.rho, size)
        optimizer.step()
        [(_, scale)] = model.moments().values()
        assert scale is not None
        assert scale.isfinite().all()
        assert (scale > 0).all()


class LogScale(br.Gaussian):
    """A posterior of one's own, which has another rho."""

    def std(self, parameters: Mapping[str, Tensor]) -> Tensor:
        return parameters["rho"].exp()

    def chain(
        self, parameters: Mapping[str, Tensor], d_loc: Tensor, d_scale: Tensor | None
    ) -> dict[str, Tensor]:
        assert d_scale is not None
        return {"loc": d_loc, "rho": d_scale * parameters["rho"].exp()}


@pytest.mark.parametrize(
    "posterior", [br.Delta(), br.Gaussian(0.1, learn_scale=False), LogScale(0.1)]
)
def test_all_but_learnt_gaussians_takes_the_steps_of_sgd(posterior: br.Posterior) -> None:
    x, y = regression()
    models = []
    for _ in range(2):
        torch.manual_seed(3)
        models.append(br.bayesianize(nn.Linear(3, 1), posterior, br.Uniform(), ["weight"]).train())
    natural = NaturalGradient(models[0], len(x), lr=0.01, momentum=0.0)
    plain = torch.optim.SGD(models[1].parameters(), lr=0.01)
    for seed in range(3):
        for model, optimizer in ((models[0], natural), (models[1], plain)):
            torch.manual_seed(seed)
            take(model, optimizer, x, y)
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.allclose(one, other, rtol=1e-6)


def test_momentum_of_what_is_no_gaussian_is_the_gradients_unbiased_running_mean() -> None:
    model = br.bayesianize(nn.Linear(3, 1), br.Gaussian(0.1), br.Uniform(), ["weight"])
    optimizer = NaturalGradient(model, sequences=1, lr=0.5, momentum=0.8)
    bias = model.module.bias
    assert isinstance(bias, nn.Parameter)
    start = bias.item()
    bias.grad = torch.tensor([2.0])
    optimizer.step()
    assert bias.item() == pytest.approx(start - 0.5 * 2.0, rel=1e-6)
    bias.grad = torch.tensor([-4.0])
    optimizer.step()
    mean = (0.8 * 2.0 + 1.0 * -4.0) / (0.8 + 1.0)
    assert bias.item() == pytest.approx(start - 0.5 * (2.0 + mean), rel=1e-6)


@pytest.mark.parametrize(("frozen", "learns"), [("rho", "loc"), ("loc", "rho")])
def test_what_is_frozen_stays_and_the_rest_learns_as_before(frozen: str, learns: str) -> None:
    x, y = regression()
    found = []
    for freezes in (False, True):
        torch.manual_seed(4)
        model = model_of(scale=0.2, prior=1.0)
        [block] = model.each_block()
        start = {name: p.detach().clone() for name, p in block.parameters_by_name.items()}
        block.parameters_by_name[frozen].requires_grad_(not freezes)
        take(model, NaturalGradient(model, len(x), lr=0.1), x, y)
        assert torch.equal(block.parameters_by_name[frozen], start[frozen]) == freezes
        found.append(block.parameters_by_name[learns].detach())
        assert not torch.equal(found[-1], start[learns])
    assert torch.equal(*found)


def test_a_copy_goes_on_as_the_original_does() -> None:
    x, y = regression()
    model = model_of(scale=0.2, prior=1.0)
    optimizer = NaturalGradient(model, len(x), lr=0.1)
    take(model, optimizer, x, y)
    copied = copy.deepcopy((model, optimizer))
    for pair in ((model, optimizer), copied):
        torch.manual_seed(5)
        take(*pair, x, y)
    for one, other in zip(model.parameters(), copied[0].parameters(), strict=True):
        assert torch.equal(one, other)


def test_wrong_settings_are_said_in_one_line() -> None:
    model = model_of(scale=0.2, prior=1.0)
    with pytest.raises(br.Invalid, match=r"momentum must be 0 or above, below 1, got 1\.5"):
        NaturalGradient(model, 10, momentum=1.5)
    with pytest.raises(br.Invalid, match="sequences must be at least 1, got 0"):
        NaturalGradient(model, 0)
    with pytest.raises(br.Invalid, match="lr must be a finite number, 0 or above, got -1"):
        NaturalGradient(model, 10, lr=-1.0)
    with pytest.raises(TypeError, match="expected a model made by bayesianize, got generator"):
        NaturalGradient(model.parameters(), 10)  # type: ignore[arg-type]
