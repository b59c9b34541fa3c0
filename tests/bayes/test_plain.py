"""The plain network back: what the model says, by ordinary parameters, without the package."""

import copy

import pytest
import torch
from torch import Tensor, nn

import bayesrnn as br


class Tied(nn.Module):
    """A recurrent network whose softmax is its embedding, with a buffer and a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.rnn = nn.LSTM(4, 4, 2)
        self.decoder = nn.Linear(4, 7)
        self.decoder.weight = self.embedding.weight
        self.rnn.bias_hh_l0.requires_grad_(False)
        self.register_buffer("shift", torch.randn(7))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.decoder(self.rnn(self.embedding(x))[0]) + self.shift
        return found


POSTERIORS = (
    br.Gaussian((0.1, 0.5)),
    br.Gaussian(0.3, learn_scale=False),
    br.Delta(),
    br.Sharpened((0.1, 0.5)),
)


def model_of(posterior: br.Posterior, prune: bool) -> br.Bayesian:
    torch.manual_seed(3)
    prior = br.Normal() if isinstance(posterior, br.Delta) else br.ScaleMixture()
    model = br.bayesianize(Tied(), posterior, prior, where=["embedding.*", "rnn.*"])
    if prune:
        br.prune(model, 0.5)
    return model


@pytest.mark.parametrize("prune", [False, True])
@pytest.mark.parametrize("posterior", POSTERIORS, ids=lambda p: f"{p.kind}")
def test_it_says_what_the_model_says(posterior: br.Posterior, prune: bool) -> None:
    model, x = model_of(posterior, prune).eval(), torch.randint(7, (5, 3))
    for which in ("mean", "sample"):
        with model.weights(which):  # type: ignore[arg-type]
            if which == "sample":
                model.resample(generator=torch.Generator().manual_seed(11))
            expected = model(x)
        generator = torch.Generator().manual_seed(11)
        network = br.plain_network(model, which, generator)  # type: ignore[arg-type]
        assert isinstance(network, Tied)
        assert not network.training
        torch.testing.assert_close(network(x), expected)
        assert which == "sample" or torch.equal(network(x), expected)


def test_it_is_an_ordinary_network() -> None:
    """The names, shapes, ties and frozen weights are those of the network at the beginning."""
    net, model = Tied(), model_of(br.Gaussian(0.1), prune=False)
    network = br.plain_network(model, "sample")
    assert list(network.state_dict()) == list(net.state_dict())
    net.load_state_dict(network.state_dict())  # so it fits where the package is not known
    assert network.decoder.weight is network.embedding.weight
    learnt = {name: p.requires_grad for name, p in network.named_parameters()}
    assert learnt == {name: p.requires_grad for name, p in net.named_parameters()}
    network(torch.randint(7, (5, 3))).sum().backward()
    assert all((p.grad is not None) == p.requires_grad for p in network.parameters())


def test_neither_follows_the_other() -> None:
    model, x = model_of(br.Gaussian(0.1), prune=False), torch.randint(7, (5, 3))
    network = br.plain_network(model)
    before, said = copy.deepcopy(model.state_dict()), network(x)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())
    network = br.plain_network(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(network(x), said)


def test_nothing_of_a_bayesian_model_is_left() -> None:
    """No class of `bayes`, no hook: so it can be run, and even pickled, without the package."""

    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.listed = nn.ParameterList([torch.randn(2), torch.randn(2)])
            self.named = nn.ParameterDict({"a": torch.randn(2)})
            self.linear = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.linear(x * self.listed[0] + self.listed[1]) + self.named["a"]
            return found

    model = br.bayesianize(Parts(), br.Gaussian(0.1)).eval()
    network = br.plain_network(model)
    x = torch.randn(3, 2)
    assert torch.equal(network(x), model(x))
    assert list(network.state_dict()) == list(Parts().state_dict())
    kept = [value for part in network.modules() for value in (type(part), *vars(part).values())]
    kept += list(network._state_dict_hooks.values())
    modules = {getattr(each, "__module__", None) or "" for each in kept}
    assert not [name for name in modules if name.startswith("bayesrnn")]


@pytest.mark.parametrize("inside", [False, True])
def test_masks_come_from_torchs_own_generator(inside: bool) -> None:
    """Whatever drew the model's masks before, or draws them at present."""
    net = br.LanguageModel(7, 4, 4, dropout=br.DropoutSettings(input=0.5))
    model, x = br.bayesianize(net, br.Gaussian(0.1)).eval(), torch.randint(7, (5, 3))
    with model.weights("sample"):
        model.resample(generator=torch.Generator().manual_seed(2))
        model(x)
        networks = [br.plain_network(model).train() for _ in range(2)]
    if not inside:
        networks = [br.plain_network(model).train() for _ in range(2)]
    torch.manual_seed(1)
    first = networks[0](x)[0]
    torch.manual_seed(1)
    again = networks[0](x)[0]
    other = networks[1](x)[0]
    assert torch.equal(first, again)
    assert not torch.equal(other, again)


def test_the_draw_that_a_model_holds_stays_its_own() -> None:
    model, x = model_of(br.Gaussian(0.3), prune=False), torch.randint(7, (5, 3))
    with model.hold():
        before, paid = model(x), model.kl()
        other = br.plain_network(model, "sample")
        assert torch.equal(model(x), before)
        assert torch.equal(model.kl(), paid)
    assert not torch.equal(other(x), before)


def test_draws_have_the_posteriors_spread() -> None:
    """Against the moments: the mean and standard deviation of 4,000 draws of four weights."""
    model = br.bayesianize(nn.Linear(2, 2, bias=False), br.Gaussian((0.2, 0.8)))
    generator = torch.Generator().manual_seed(5)
    draws = torch.stack(
        [br.plain_network(model, "sample", generator).weight.detach() for _ in range(4000)]
    )
    loc, scale = model.moments()["weight"]
    assert scale is not None
    assert ((draws.mean(0) - loc) / scale).abs().max() < 4 / 4000**0.5
    assert (draws.std(0) / scale - 1).abs().max() < 4 / 8000**0.5


@pytest.mark.filterwarnings("ignore:The tensor attributes .*_flat_weights")  # any nn.LSTM's
def test_it_can_be_exported() -> None:
    model, x = model_of(br.Gaussian(0.3), prune=True).eval(), torch.randint(7, (5, 3))
    program = torch.export.export(br.plain_network(model), (x,))
    torch.testing.assert_close(program.module()(x), model(x))


def test_what_it_cannot_be_made_of_is_said() -> None:
    with pytest.raises(TypeError, match="expected a model made by bayesianize, got Linear"):
        br.plain_network(nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match='weights must be "mean" or "sample", got 3'):
        br.plain_network(model_of(br.Delta(), prune=False), 3)  # type: ignore[arg-type]
