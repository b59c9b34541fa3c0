"""The cost of single weights: by hand, and in sum the model's own KL."""

import math

import pytest
import torch
from torch import Tensor

import bayesrnn as br
from bayesrnn.bayes import Posterior, Prior
from bayesrnn.bayes.cost import weight_bits

PRIORS = [
    br.Normal(),
    br.Normal(loc="fit", scale="fit"),
    br.Laplace(scale=0.3),
    br.ScaleMixture(),
    br.ScaleMixture(group="weight"),
    br.ScaleMixture(group="tensor"),
]


def total(found: dict[str, Tensor]) -> float:
    return sum(bits.double().sum().item() for bits in found.values())


@pytest.mark.parametrize("posterior", [br.Gaussian(scale=(0.01, 0.1)), br.Sharpened()])
@pytest.mark.parametrize("pruned", [False, True])
@pytest.mark.parametrize("prior", PRIORS, ids=repr)
def test_the_costs_sum_to_the_kl(prior: Prior, pruned: bool, posterior: Posterior) -> None:
    net = br.LanguageModel(vocabulary=11, embedding=4, hidden=5, layers=2)
    model = br.bayesianize(net, posterior, prior).eval()
    if pruned:
        br.prune(model, fraction=0.4)
    found = weight_bits(model, 1, torch.Generator().manual_seed(3))
    with model.weights("sample"):
        model.resample(generator=torch.Generator().manual_seed(3))
        expected = model.kl().item()
    if isinstance(prior, br.ScaleMixture):  # there the KL is of one draw, and so is its entropy
        for block in model.each_block():
            assert block.noise is not None
            eps = block.layout.split(block.noise["eps"].double()).values()
            expected += (sum(e.square().sum().item() for e in eps) - block.count) / 2
    assert total(found) == pytest.approx(expected / math.log(2), rel=1e-5)
    if pruned:
        for name, (loc, _) in model.moments().items():
            assert (found[name][loc == 0] == 0).all()


def test_one_weight_against_the_mixture_by_hand() -> None:
    """A group of two: log p is one of the two, and the rest of it is shared."""
    model = br.bayesianize(
        torch.nn.Linear(1, 2, bias=False), br.Gaussian(scale=0.02), br.ScaleMixture(0.25, 1.0, 0.1)
    )
    loc = torch.tensor([[0.5], [0.01]])
    with torch.no_grad():
        next(model.each_block()).parameters_by_name["loc"][:2] = loc.flatten()
    found = weight_bits(model, 1, torch.Generator().manual_seed(1))["weight"].double()
    eps = next(model.each_block()).posterior.noise(
        next(model.each_block()).parameters_by_name, torch.Generator().manual_seed(1)
    )["eps"][:2]
    theta = (loc.flatten() + 0.02 * eps).double()

    def density(x: Tensor, sigma: float) -> Tensor:
        return torch.exp(-((x / sigma) ** 2) / 2) / (sigma * math.sqrt(2 * math.pi))

    wide = 0.25 * density(theta, 1.0).prod()
    narrow = 0.75 * density(theta, 0.1).prod()
    r = wide / (wide + narrow)
    # log p = sum over components of r_k (log pi_k + sum_i log N_ik - log r_k)
    own = r * density(theta, 1.0).log() + (1 - r) * density(theta, 0.1).log()
    choice = r * (math.log(0.25) - r.log()) + (1 - r) * (math.log(0.75) - (1 - r).log())
    entropy = math.log(0.02) + 0.5 * (1 + math.log(2 * math.pi))
    expected = (-entropy - own - choice / 2) / math.log(2)
    assert found.flatten().tolist() == pytest.approx(expected.tolist(), rel=1e-4)


def test_more_draws_only_average() -> None:
    net = torch.nn.Linear(3, 4, bias=False)
    model = br.bayesianize(net, br.Gaussian(scale=0.1), br.ScaleMixture(group="weight"))
    generator = torch.Generator().manual_seed(5)
    each = [weight_bits(model, 1, generator)["weight"] for _ in range(3)]
    together = weight_bits(model, 3, torch.Generator().manual_seed(5))["weight"]
    torch.testing.assert_close(together, torch.stack(each).mean(dim=0))
    assert not torch.equal(each[0], each[1])


def test_what_has_no_description_length_is_left_out_and_nothing_is_changed() -> None:
    net = br.LanguageModel(vocabulary=11, embedding=4, hidden=5, layers=1)
    model = br.bayesianize(net, {"rnn.*": br.Gaussian(), "*": br.Delta()}, br.Normal())
    model.resample()
    before = [block.noise for block in model.each_block()]
    assert set(weight_bits(model)) == {n for n in model.moments() if n.startswith("rnn")}
    assert all(a is b.noise for a, b in zip(before, model.each_block(), strict=True))
    name = "rnn.weight_hh_l0"
    torch.testing.assert_close(weight_bits(model, names=[name]), {name: weight_bits(model)[name]})
    with pytest.raises(br.Invalid, match="samples"):
        weight_bits(model, 0)
