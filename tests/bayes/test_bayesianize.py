"""`bayesianize` on many modules: the same network bit for bit, and an ordinary nn.Module."""

import copy
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, vmap
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from bayes.reference import by_name, gradient_by_name, last_draw, log_prior
from bayesrnn.bayes import (
    Bayesian,
    Delta,
    Gaussian,
    Laplace,
    Normal,
    Posterior,
    ScaleMixture,
    Uniform,
    bayesianize,
)

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")


class Tied(nn.Module):
    """A language model whose decoder is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.rnn = nn.GRU(5, 5)
        self.decoder = nn.Linear(5, 7)
        self.decoder.weight = self.embedding.weight

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden, state = self.rnn(self.embedding(x))
        return self.decoder(hidden), state


class Autoencoder(nn.Module):
    """A user's own module, with one bare parameter used twice and lists of others."""

    def __init__(self) -> None:
        super().__init__()
        self.basis = nn.Parameter(torch.randn(3, 5))
        self.shifts = nn.ParameterList([torch.randn(3), torch.randn(5)])
        self.gain = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor, *, twice: bool = False) -> dict[str, Tensor]:
        code = torch.tanh(x @ self.basis.T + self.shifts[0])
        out = code @ self.basis + self.shifts[1]
        return {"code": code, "out": self.gain * out if twice else out + self.gain}


class Parts(nn.Module):
    """Takes parts of a list of parameters, and copies of a dictionary of them."""

    def __init__(self) -> None:
        super().__init__()
        self.matrices = nn.ParameterList([torch.randn(5, 5) for _ in range(3)])
        self.rows = nn.ParameterDict({"a": torch.randn(5), "b": torch.randn(5)})

    def forward(self, x: Tensor) -> Tensor:
        for matrix in self.matrices[:-1]:
            x = torch.tanh(x @ matrix)
        copied, joined = self.rows.copy(), {"c": torch.ones(5)} | (self.rows | {})
        return (x @ self.matrices[-1] + copied["a"]) * joined["b"] * joined["c"]


def packed(x: Tensor) -> PackedSequence:
    return pack_padded_sequence(x, torch.tensor([4, 6, 1]), enforce_sorted=False)


def recurrent(cell: type[nn.RNNBase], pack: bool = False, **settings: Any) -> Callable[[], Any]:
    def make() -> tuple[nn.Module, tuple[Any, ...]]:
        x = torch.randn(6, 3, 5)
        return cell(5, 4, **settings), (packed(x) if pack else x,)

    return make


MODULES: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...]]]] = {
    "rnn": recurrent(nn.RNN),
    "rnn relu": recurrent(nn.RNN, nonlinearity="relu"),
    "gru": recurrent(nn.GRU),
    "gru bidirectional": recurrent(nn.GRU, bidirectional=True),
    "gru packed": recurrent(nn.GRU, pack=True, num_layers=2),
    "lstm": recurrent(nn.LSTM),
    "lstm layers": recurrent(nn.LSTM, num_layers=3),
    "lstm bidirectional": recurrent(nn.LSTM, num_layers=2, bidirectional=True),
    "lstm projection": recurrent(nn.LSTM, proj_size=2, num_layers=2),
    "lstm projection both ways": recurrent(nn.LSTM, proj_size=3, bidirectional=True),
    "lstm batch first": recurrent(nn.LSTM, batch_first=True),
    "lstm packed": recurrent(nn.LSTM, pack=True, bidirectional=True),
    "lstm without bias": recurrent(nn.LSTM, bias=False),
    "linear": lambda: (nn.Linear(5, 3), (torch.randn(2, 5),)),
    "linear without bias": lambda: (nn.Linear(5, 3, bias=False), (torch.randn(2, 5),)),
    "embedding": lambda: (nn.Embedding(9, 3), (torch.randint(9, (4, 2)),)),
    "embedding with padding": lambda: (
        nn.Embedding(9, 3, padding_idx=0),
        (torch.tensor([[0, 3], [8, 0]]),),
    ),
    "embedding bag": lambda: (nn.EmbeddingBag(9, 3), (torch.randint(9, (4, 2)),)),
    "conv1d": lambda: (nn.Conv1d(3, 5, 3), (torch.randn(2, 3, 8),)),
    "conv2d": lambda: (nn.Conv2d(2, 4, 3, groups=2), (torch.randn(2, 2, 7, 6),)),
    "transposed conv1d": lambda: (nn.ConvTranspose1d(3, 5, 3), (torch.randn(2, 3, 8),)),
    "transposed conv2d": lambda: (nn.ConvTranspose2d(2, 4, 3), (torch.randn(2, 2, 5, 6),)),
    "layer norm": lambda: (
        nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 2)),
        (torch.randn(3, 5),),
    ),
    "cell": lambda: (nn.LSTMCell(5, 4), (torch.randn(3, 5),)),
    "attention": lambda: (
        nn.MultiheadAttention(4, 2),
        (torch.randn(5, 2, 4), torch.randn(5, 2, 4), torch.randn(5, 2, 4)),
    ),
    "own module": lambda: (Autoencoder(), (torch.randn(4, 5),)),
    "parts of lists": lambda: (Parts(), (torch.randn(4, 5),)),
    "tied": lambda: (Tied(), (torch.randint(7, (6, 2)),)),
}
every_module = pytest.mark.parametrize("make", MODULES.values(), ids=MODULES.keys())


def tensors(output: Any) -> Iterator[Tensor]:
    """All tensors in a module's output."""
    if isinstance(output, PackedSequence):
        yield output.data
    elif isinstance(output, Tensor):
        yield output
    elif output is not None:
        for part in output.values() if isinstance(output, dict) else output:
            yield from tensors(part)


def scalar(output: Any) -> Tensor:
    """Some number that depends on every output in its own way."""
    return sum((t * torch.linspace(-1, 2, t.numel()).view_as(t)).sum() for t in tensors(output))


# --- bit for bit -------------------------------------------------------------------------------

WAYS: dict[str, tuple[Posterior, str, bool]] = {
    "delta": (Delta(), "auto", True),
    "delta, sample in eval": (Delta(), "sample", False),
    "gaussian of scale zero": (Gaussian(0.0, learn_scale=False), "auto", True),
    "mean in train": (Gaussian(), "mean", True),
    "mean in eval": (Gaussian(), "auto", False),
    "mean in eval by name": (Gaussian(), "mean", False),
}


@pytest.mark.parametrize(("posterior", "weights", "training"), WAYS.values(), ids=WAYS.keys())
@every_module
def test_without_noise_it_is_the_plain_module_bit_for_bit(
    make: Callable[[], Any], posterior: Posterior, weights: str, training: bool
) -> None:
    net, args = make()
    net.train(training)
    model = bayesianize(net, posterior)
    assert model.training is training
    plain = net(*args)
    if weights == "auto":
        out = model(*args)
    else:
        with model.weights(weights):
            out = model(*args)
    assert type(out) is type(plain)
    for found, expected in zip(tensors(out), tensors(plain), strict=True):
        assert torch.equal(found, expected)
    scalar(plain).backward()
    scalar(out).backward()
    found = gradient_by_name(model, "loc")
    expected = {name: p.grad for name, p in net.named_parameters()}
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name


@every_module
def test_a_draw_is_the_plain_module_with_the_drawn_weights(make: Callable[[], Any]) -> None:
    net, args = make()
    model = bayesianize(net, Gaussian(0.3))
    out = model(*args)
    plain = functional_call(net, last_draw(model), args)
    mean = net(*args)
    for found, expected in zip(tensors(out), tensors(plain), strict=True):
        assert torch.allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert not all(torch.equal(a, b) for a, b in zip(tensors(out), tensors(mean), strict=True))


def test_keyword_arguments_reach_the_module() -> None:
    net = Autoencoder()
    model = bayesianize(net, Delta())
    x = torch.randn(4, 5)
    assert torch.equal(model(x=x, twice=True)["out"], net(x, twice=True)["out"])


def test_with_the_mean_dropout_is_the_plain_modules_own() -> None:
    net = nn.LSTM(5, 4, num_layers=2, dropout=0.5)
    model, x = bayesianize(net), torch.randn(6, 3, 5)
    torch.manual_seed(3)
    expected = net(x)[0]
    torch.manual_seed(3)
    with model.weights("mean"):
        assert torch.equal(model(x)[0], expected)


# --- sequences ---------------------------------------------------------------------------------


class Watched(nn.Module):
    """A hand-written recurrent loop that remembers the weights of each time step."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(3, 4)
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen = []
        h = c = x.new_zeros(x.shape[1], 4)
        for step in x:
            self.seen.append(self.cell.weight_hh.detach().clone())
            h, c = self.cell(step, (h, c))
        return h


def test_one_forward_uses_one_draw_for_all_time_steps() -> None:
    model = bayesianize(Watched(), Gaussian(0.3))
    sequences = []
    for _ in range(2):
        model(torch.randn(9, 2, 3))
        sequences.append(model.module.seen)
    for seen in sequences:
        assert len(seen) == 9
        assert all(torch.equal(weights, seen[0]) for weights in seen)
    assert not torch.equal(sequences[0][0], sequences[1][0])


@pytest.mark.parametrize("cell", [nn.RNN, nn.GRU, nn.LSTM])
def test_under_hold_single_steps_are_the_whole_sequence(cell: type[nn.RNNBase]) -> None:
    model = bayesianize(cell(3, 4, num_layers=2).double(), Gaussian(0.3))
    x = torch.randn(9, 2, 3, dtype=torch.float64)
    with model.hold():
        whole, last = model(x)
        steps, state = [], None
        for step in x:
            out, state = model(step[None], state)
            steps.append(out)
    assert torch.allclose(torch.cat(steps), whole, rtol=1e-12, atol=1e-14)
    for a, b in zip(tensors(state), tensors(last), strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-14)
    assert not torch.allclose(model(x)[0], whole, atol=1e-3)


@pytest.mark.parametrize("cuts", [[4, 5], [1, 7, 1], [3, 3, 3]])
@pytest.mark.parametrize("weights", ["sample", "mean"])
def test_chunks_with_carried_state_are_one_long_unroll(cuts: list[int], weights: str) -> None:
    model = bayesianize(nn.LSTM(3, 4).double(), Gaussian(0.3)).eval()
    x = torch.randn(9, 2, 3, dtype=torch.float64)
    with model.weights(weights):
        whole, _ = model(x)
        whole.square().sum().backward()
        expected = gradient_by_name(model, "loc")
        expected = {name: g.clone() for name, g in expected.items()}
        model.zero_grad()
        pieces, state = [], None
        for chunk in x.split(cuts):
            out, state = model(chunk, state)
            pieces.append(out)
        joined = torch.cat(pieces)
        joined.square().sum().backward()
    assert torch.allclose(joined, whole, rtol=1e-12, atol=1e-14)
    for name, gradient in gradient_by_name(model, "loc").items():
        assert torch.allclose(gradient, expected[name], rtol=1e-9, atol=1e-12)


# --- which weights -----------------------------------------------------------------------------


def small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def drawn_names(model: Bayesian) -> set[str]:
    return set(model.moments())


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("*", {"0.weight", "0.bias", "2.weight", "2.bias"}),
        ("0.*", {"0.weight", "0.bias"}),
        (["0.bias", "*.weight"], {"0.weight", "0.bias", "2.weight"}),
        (lambda name, p: p.dim() == 2, {"0.weight", "2.weight"}),
        (lambda name, p: name.startswith("2"), {"2.weight", "2.bias"}),
    ],
)
def test_where_chooses_the_weights(where: Any, expected: set[str]) -> None:
    net = small()
    model = bayesianize(net, where=where)
    assert drawn_names(model) == expected
    rest = {name for name, _ in net.named_parameters()} - expected
    assert {name for name, _ in model.module.named_parameters()} == rest
    for name in rest:
        assert torch.equal(model.module.get_parameter(name), net.get_parameter(name))


def test_a_pattern_that_matches_nothing_is_quoted_with_the_names_there_are() -> None:
    with pytest.raises(ValueError, match=r"where pattern '0.wieght'.*0\.weight, 0\.bias"):
        bayesianize(small(), where=["2.*", "0.wieght"])
    with pytest.raises(ValueError, match=r"posterior pattern 'rnn\.\*' matches no"):
        bayesianize(small(), {"rnn.*": Delta(), "*": Gaussian()})
    with pytest.raises(ValueError, match=r"prior pattern 'rnn\.\*' matches no"):
        bayesianize(small(), prior={"rnn.*": Normal(), "*": Normal()})
    with pytest.raises(ValueError, match=r"input_axis pattern 'rnn\.\*' matches no"):
        bayesianize(small(), input_axis={"rnn.*": 0})


@pytest.mark.parametrize("where", [lambda name, p: False, []])
def test_choosing_nothing_is_an_error(where: Any) -> None:
    with pytest.raises(ValueError, match="nothing to draw"):
        bayesianize(small(), where=where)


@pytest.mark.parametrize("role", ["posterior", "prior"])
def test_a_weight_that_no_pattern_covers_is_named(role: str) -> None:
    chosen = Gaussian() if role == "posterior" else Normal()
    with pytest.raises(ValueError, match=rf"no {role} for 2\.bias: .*'0\.\*', '2\.weight'"):
        bayesianize(small(), **{role: {"0.*": chosen, "2.weight": chosen}})


def test_in_a_mapping_the_first_match_counts() -> None:
    model = bayesianize(
        small(),
        {"2.*": Gaussian(0.5), "*.bias": Delta(), "*": Gaussian(0.1)},
        {"0.weight": Laplace(), "*": Normal()},
    )
    scales = {name: scale for name, (_, scale) in model.moments().items()}
    assert scales["0.bias"] is None
    assert scales["0.weight"].unique().tolist() == pytest.approx([0.1])
    assert scales["2.weight"].unique().tolist() == pytest.approx([0.5])
    assert scales["2.bias"].unique().tolist() == pytest.approx([0.5])
    priors = {
        weight.name: model.hyper(block).prior.kind
        for block in model.blocks
        for weight in block.layout.weights
    }
    assert priors == {
        "0.weight": "laplace",
        "0.bias": "normal",
        "2.weight": "normal",
        "2.bias": "normal",
    }


def test_the_defaults_are_a_gaussian_and_the_grouped_mixture() -> None:
    model = bayesianize(small())
    assert {type(block.posterior) for block in model.blocks} == {Gaussian}
    assert [hyper.prior for hyper in model.priors] == [ScaleMixture(group="input")]


def test_frozen_parameters_stay_ordinary() -> None:
    net = nn.LSTM(3, 2)
    net.bias_hh_l0.requires_grad_(False)
    model = bayesianize(net, Gaussian(0.3))
    assert "bias_hh_l0" not in drawn_names(model)
    assert model.weight_count == 8 * 3 + 8 * 2 + 8
    model(torch.randn(4, 1, 3))[0].sum().backward()
    assert torch.equal(model.module.bias_hh_l0, net.bias_hh_l0)
    assert model.module.bias_hh_l0.grad is None
    with pytest.raises(ValueError, match="matches no trainable parameter"):
        bayesianize(net, where="bias_hh_l0")


def test_weights_that_cannot_be_drawn_are_refused_by_name() -> None:
    net = small()
    net.empty = nn.Parameter(torch.zeros(0, 3))
    with pytest.raises(ValueError, match="empty has no elements"):
        bayesianize(net)
    net.empty = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(ValueError, match=r"empty is torch\.complex64.* leave it out"):
        bayesianize(net)
    assert bayesianize(net, where=["0.*", "2.*"]).weight_count == 3 * 4 + 4 + 4 * 2 + 2


def test_input_axis_overrides_the_rule_by_pattern() -> None:
    net = small().double()
    prior = ScaleMixture(0.3, 0.9, 0.15)
    values = {"pi": 0.3, "sigma1": 0.9, "sigma2": 0.15}
    model = bayesianize(net, Delta(), prior, input_axis={"0.weight": 0, "2.weight": None})
    model.resample()
    axes = {"0.weight": 0, "0.bias": None, "2.weight": None, "2.bias": None}
    named = net.named_parameters()
    expected = -sum(log_prior(prior, p.detach(), axes[n], values) for n, p in named)
    assert model.kl().item() == pytest.approx(expected.item(), rel=1e-10)
    usual = bayesianize(net, Delta(), prior)
    usual.resample()
    assert abs(usual.kl().item() - expected.item()) > 1e-3
    with pytest.raises(ValueError, match=r"input_axis 2 of 0\.weight is not one of its 2 axes"):
        bayesianize(net, input_axis={"0.weight": 2})


# --- tied weights ------------------------------------------------------------------------------


def test_tied_weights_stay_tied_and_are_counted_once() -> None:
    net = Tied()
    model = bayesianize(net, Gaussian(0.3), Normal())
    untied = sum(p.numel() for p in net.parameters())
    assert model.weight_count == untied
    assert "decoder.weight" not in drawn_names(model)
    seen = []
    model.module.decoder.register_forward_hook(
        lambda layer, *_: seen.append((layer.weight, model.module.embedding.weight))
    )
    model(torch.randint(7, (3, 2)))
    decoder, embedding = seen[0]
    assert decoder is embedding
    assert not torch.equal(decoder, net.decoder.weight)
    # the KL has the shared matrix once
    expected = sum(
        torch.distributions.kl_divergence(
            torch.distributions.Normal(p.detach(), 0.3), torch.distributions.Normal(0.0, 1.0)
        ).sum()
        for p in net.parameters()
    )
    assert model.kl().item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("pattern", ["embedding.weight", "decoder.weight"])
def test_a_tied_weight_answers_to_each_of_its_names(pattern: str) -> None:
    model = bayesianize(Tied(), where=pattern)
    assert drawn_names(model) == {"embedding.weight"}
    mapped = bayesianize(Tied(), {pattern: Gaussian(0.7), "*": Delta()})
    assert mapped.moments()["embedding.weight"][1].unique().tolist() == pytest.approx([0.7])


# --- storage -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_views_are_aligned_to_16_bytes_and_hold_the_weights(dtype: torch.dtype) -> None:
    net = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1), nn.Conv1d(3, 1, 2)).to(dtype)
    model = bayesianize(net, Gaussian(0.3))
    model.resample()
    for block in model.blocks:
        drawn = block.posterior.draw(block.parameters_by_name, block.noise)
        for flat in (block.loc, block.rho, drawn):
            assert flat.dtype == dtype
            for view in block.layout.split(flat).values():
                assert view.data_ptr() % 16 == 0
                assert view.is_contiguous()
    for name, parameter in net.named_parameters():
        assert torch.equal(by_name(model, "loc")[name], parameter)


def test_each_recurrent_layer_is_a_block_with_its_matrices_before_its_biases() -> None:
    net = nn.ModuleDict({"a": nn.LSTM(3, 2, num_layers=2), "b": nn.GRU(3, 2), "c": nn.Linear(2, 2)})
    model = bayesianize(net)
    blocks = [[weight.name for weight in block.layout.weights] for block in model.blocks]
    assert blocks == [
        [
            f"a.{kind}_{part}_l{i}"
            for kind in ("weight", "bias")
            for i in (0, 1)
            for part in ("ih", "hh")
        ],
        ["b.weight_ih_l0", "b.weight_hh_l0", "b.bias_ih_l0", "b.bias_hh_l0"],
        ["c.weight", "c.bias"],
    ]


def test_join_and_split_are_inverse_and_padding_is_zero() -> None:
    block = bayesianize(nn.Linear(3, 5)).blocks[0]
    named = {"weight": torch.ones(5, 3), "bias": torch.full((5,), 2.0)}
    flat = block.layout.join(named)
    assert flat.sum() == 15 + 10
    assert flat.numel() == 16 + 8
    for name, view in block.layout.split(flat).items():
        assert torch.equal(view, named[name])


def test_moments_are_the_mean_and_standard_deviation_by_name() -> None:
    net = small()
    model = bayesianize(net, {"0.*": Gaussian(0.3, learn_scale=False), "*": Gaussian(0.2)})
    for name, (loc, scale) in model.moments().items():
        assert torch.equal(loc, net.get_parameter(name))
        expected = 0.3 if name.startswith("0") else 0.2
        assert scale.shape == loc.shape
        assert scale.unique().tolist() == pytest.approx([expected])
        assert not loc.requires_grad
        assert not scale.requires_grad


# --- an ordinary module ------------------------------------------------------------------------


def test_the_given_module_stays_as_it_is() -> None:
    net = Tied()
    before = copy.deepcopy(net.state_dict())
    model = bayesianize(net, Gaussian(0.3))
    optimiser = torch.optim.SGD(model.parameters(), lr=1.0)
    x = torch.randint(7, (3, 2))
    (scalar(model(x)) + model.kl()).backward()
    optimiser.step()
    after = net.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert all(p.grad is None and isinstance(p, nn.Parameter) for p in net.parameters())
    assert net.decoder.weight is net.embedding.weight
    assert net(x)[0].shape == (3, 2, 7)


def test_parameters_are_what_an_optimiser_should_update() -> None:
    net = small()
    net[0].bias.requires_grad_(False)
    model = bayesianize(
        net, {"0.*": Gaussian(), "*": Delta()}, Normal("learn", 1.0), where=["0.*", "2.weight"]
    )
    names = {name for name, p in model.named_parameters() if p.requires_grad}
    drawn = {"blocks.0.loc", "blocks.0.rho", "blocks.1.loc"}
    assert names == drawn | {"priors.0.loc", "module.2.bias"}
    model(torch.randn(2, 3)).sum().backward()
    model.kl().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    assert {n for n, _ in model.named_parameters()} - names == {"module.0.bias"}


def test_the_noise_is_neither_parameter_nor_buffer() -> None:
    model = bayesianize(nn.Linear(2, 2), Gaussian())
    before = set(model.state_dict())
    model(torch.randn(1, 2))
    assert set(model.state_dict()) == before == {"blocks.0.loc", "blocks.0.rho"}
    assert list(model.buffers()) == []


def test_a_state_dict_makes_the_same_model_of_another() -> None:
    def make() -> Bayesian:
        return bayesianize(
            nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)),
            {"0.*": Gaussian((0.1, 0.5)), "*": Delta()},
            {"0.*": Normal("learn", "fit"), "*": Laplace(0.0, "fit")},
            where=["0.*", "2.weight"],
        )

    one, other = make(), make()
    x = torch.randn(5, 3)
    one(x)  # BatchNorm's buffers move
    one.kl()
    with torch.no_grad():
        one.priors[0].loc.fill_(0.3)
    result = other.load_state_dict(load(save(one.state_dict())), strict=True)
    assert result.missing_keys == result.unexpected_keys == []
    outputs, terms = [], []
    for model in (one, other):
        torch.manual_seed(5)
        outputs.append(model(x))
        terms.append(model.kl())
    assert torch.equal(*outputs)
    assert torch.equal(*terms)
    assert torch.equal(one.eval()(x), other.eval()(x))


def test_a_deep_copy_is_identical_and_independent() -> None:
    model = bayesianize(Tied(), Gaussian(0.3), Normal(0.0, "learn"))
    x = torch.randint(7, (4, 2))
    out = model(x)[0]
    twin = copy.deepcopy(model)
    assert twin.kl().item() == model.kl().item()  # the draw came along
    states = []
    for each in (model, twin):
        torch.manual_seed(7)
        states.append(each(x)[0])
    assert torch.equal(*states)
    assert not torch.equal(states[0], out)
    (states[1].sum() + twin.kl()).backward()
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    assert all(p.grad is None for p in model.parameters())
    torch.manual_seed(7)
    assert torch.equal(model(x)[0], states[0])
    torch.manual_seed(7)
    assert not torch.equal(twin(x)[0], states[0])


def test_a_traced_network_can_be_copied() -> None:
    """torch.fx copies what its graph reads, and not what is found between forwards."""
    net, x = torch.fx.symbolic_trace(nn.Linear(5, 4)), torch.randn(4, 5)
    copied = copy.deepcopy(bayesianize(net, Gaussian(0.3))).eval()
    assert torch.equal(copied(x), net(x))
    copied.train()(x).sum().backward()
    assert all(p.grad is not None for p in copied.parameters())


def test_a_deep_copy_inside_hold_keeps_the_draw() -> None:
    model, x = bayesianize(nn.Linear(3, 2), Gaussian(0.3)), torch.randn(1, 3)
    with model.hold():
        out = model(x)
        twin = copy.deepcopy(model)
        assert torch.equal(twin(x), out)


def test_double_moves_everything_and_the_draw_with_it() -> None:
    model = bayesianize(nn.LSTM(3, 2), Gaussian(0.3), Normal("fit", "learn"))
    x = torch.randn(4, 1, 3)
    with model.hold():
        single = model(x)[0]
        kl = model.kl("sample").item()
        assert model.double() is model
        assert {noise.dtype for noise in model.blocks[0].noise.values()} == {torch.float64}
        out = model(x.double())[0]
        assert out.dtype == torch.float64
        assert torch.allclose(out, single.double(), atol=1e-6)
        assert model.kl("sample").item() == pytest.approx(kl, rel=1e-5)
    assert {t.dtype for t in model.state_dict().values()} == {torch.float64}
    (model(x.double())[0].sum() + model.kl()).backward()
    model.to(torch.float32)
    assert model(x)[0].dtype == torch.float32


def test_to_another_device_moves_everything() -> None:
    model = bayesianize(nn.Linear(3, 2)).to("meta")
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert model(torch.zeros(4, 3, device="meta")).shape == (4, 2)


def test_functional_call_replaces_the_learnt_tensors() -> None:
    model = bayesianize(nn.Linear(3, 2), Gaussian(0.3)).eval()
    x = torch.randn(4, 3)
    parameters = {n: p.detach().clone() for n, p in model.named_parameters()}
    moved = parameters | {"blocks.0.loc": (parameters["blocks.0.loc"] + 1).requires_grad_()}
    out = functional_call(model, moved, (x,))
    expected = model(x) + x.sum(1, keepdim=True) + 1
    assert torch.allclose(out, expected, atol=1e-5)
    (gradient,) = torch.autograd.grad(out.sum(), moved["blocks.0.loc"])
    weight = model.blocks[0].layout.split(gradient)["weight"]
    assert torch.allclose(weight, x.sum(0).expand(2, 3), atol=1e-5)
    model.train()
    torch.manual_seed(1)
    one = functional_call(model, parameters, (x,))
    torch.manual_seed(1)
    assert torch.equal(model(x), one)
    assert all(p.grad is None for p in model.parameters())


def test_the_gradients_of_single_examples_are_those_at_one_draw() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    model = bayesianize(net, Gaussian(0.3))
    x, y = torch.randn(5, 3), torch.randn(5, 2)

    def loss(network: nn.Module, tensors: dict[str, Tensor], one: Tensor, target: Tensor) -> Tensor:
        return (functional_call(network, tensors, (one[None],)) - target).square().sum()

    def each(network: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        of_one = grad(partial(loss, network))
        found: dict[str, Tensor] = vmap(of_one, in_dims=(None, 0, 0))(tensors, x, y)
        return found

    tensors = {name: p.detach() for name, p in model.named_parameters()}
    model.resample()
    with model.hold():
        found = each(model, tensors)
        slopes = vmap(jacrev(model))(x)
        with pytest.raises(RuntimeError, match=r"vmap over a model's own tensors"):
            vmap(lambda loc: functional_call(model, {"blocks.0.loc": loc}, (x,)))(
                torch.zeros(2, *tensors["blocks.0.loc"].shape)
            )
    theta = last_draw(model)
    expected = each(net, theta)
    for index in range(len(x)):
        one = {name: flat[index] for name, flat in found.items()}
        for place, block in enumerate(model.blocks):
            for name, gradient in block.layout.split(one[f"blocks.{place}.loc"]).items():
                torch.testing.assert_close(gradient, expected[name][index])
    torch.testing.assert_close(
        slopes, vmap(jacrev(lambda row: functional_call(net, theta, (row,))))(x)
    )


@pytest.mark.parametrize(
    "optimiser", [torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop, torch.optim.AdamW]
)
def test_torchs_optimisers_reduce_the_loss(optimiser: type[torch.optim.Optimizer]) -> None:
    x = torch.randn(64, 3)
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]])
    model = bayesianize(nn.Linear(3, 1), Gaussian(0.05), Normal())
    steps = optimiser(model.parameters(), lr=0.01)
    seen = []
    for _ in range(150):
        steps.zero_grad()
        loss = 0.5 * (model(x) - y).square().mean() + model.kl() / 6400
        loss.backward()
        steps.step()
        seen.append(loss.item())
    assert sum(seen[-10:]) < 0.6 * sum(seen[:10])


def test_a_regression_learns_the_exact_posterior() -> None:
    """One weight, unit noise, Normal(0, 1) prior: q has a known optimum, mean and variance."""
    x = torch.linspace(-1, 1, 20, dtype=torch.float64)[:, None]
    y = 0.8 * x + 0.1 * torch.randn(20, 1, dtype=torch.float64)
    model = bayesianize(nn.Linear(1, 1, bias=False).double(), Gaussian(0.5), Normal(0.0, 1.0))
    precision = 1 + x.square().sum().item()
    mean = (x * y).sum().item() / precision
    optimiser = torch.optim.Adam(model.parameters(), lr=0.03)
    rate = torch.optim.lr_scheduler.ExponentialLR(optimiser, 0.998)
    for _ in range(2000):
        optimiser.zero_grad()
        (0.5 * (model(x) - y).square().sum() + model.kl()).backward()
        optimiser.step()
        rate.step()
    ((loc, scale),) = model.moments().values()
    assert loc.item() == pytest.approx(mean, abs=0.05)
    assert scale.item() == pytest.approx(1 / math.sqrt(precision), rel=0.1)


def test_a_second_backward_works() -> None:
    model = bayesianize(nn.LSTM(3, 2), Gaussian(0.3), ScaleMixture())
    loss = model(torch.randn(4, 1, 3))[0].sum() + model.kl()
    loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in model.parameters()]
    loss.backward()
    for parameter, gradient in zip(model.parameters(), once, strict=True):
        assert torch.allclose(parameter.grad, 2 * gradient)


def test_printing_a_model_shows_the_wrapped_one() -> None:
    assert "Linear(in_features=3, out_features=2" in repr(bayesianize(nn.Linear(3, 2)))


@pytest.mark.parametrize(
    ("posterior", "prior", "defined"),
    [
        (Gaussian(), Normal(), True),
        (Gaussian(), ScaleMixture(), True),
        (Gaussian(), Uniform(), False),
        (Delta(), Normal(), False),
        ({"weight": Gaussian(), "*": Delta()}, Normal(), False),
        (Gaussian(), {"weight": Normal(), "*": Uniform()}, False),
    ],
)
def test_a_description_length_needs_densities_throughout(
    posterior: Any, prior: Any, defined: bool
) -> None:
    assert bayesianize(nn.Linear(2, 2), posterior, prior).has_description_length is defined


def test_what_is_no_module_posterior_or_prior_is_said() -> None:
    with pytest.raises(TypeError, match=r"module must be an nn\.Module, got str"):
        bayesianize("net")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"posterior must be a Posterior, .*got Normal\("):
        bayesianize(nn.Linear(2, 1), Normal(0.0, 1.0))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"prior must be a Prior, .*got Gaussian\("):
        bayesianize(nn.Linear(2, 1), prior={"*": Gaussian()})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="matches no trainable parameter; the module has none"):
        bayesianize(nn.ReLU())
