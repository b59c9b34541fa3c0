"""What is easily got wrong with the library: refused with one clear line, or made to work."""

import copy
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bayesrnn as br
from bayesrnn.description import complexity
from bayesrnn.errors import Invalid
from bayesrnn.evaluate.sharpened import evaluate_sharpened
from small_runs import write_text


def plain() -> nn.Linear:
    return nn.Linear(3, 2)


def text() -> br.StreamLoader:
    return br.StreamLoader(np.arange(9), 1, 2)


@pytest.mark.parametrize(
    "use",
    [
        lambda folder: br.predict(plain(), torch.zeros(1, 3)),  # type: ignore[arg-type]
        lambda folder: br.save(plain(), folder / "model"),  # type: ignore[arg-type]
        lambda folder: br.prune(plain(), fraction=0.5),  # type: ignore[arg-type]
        lambda folder: br.evaluate_text(plain(), text()),  # type: ignore[arg-type]
        lambda folder: br.dynamic_evaluate(plain(), text(), 0.1),  # type: ignore[arg-type]
        lambda folder: evaluate_sharpened(plain(), text()),  # type: ignore[arg-type]
        lambda folder: br.sharpen(plain(), "*", 0.1, 0.2),  # type: ignore[arg-type]
        lambda folder: br.NaturalGradient(plain(), 9),  # type: ignore[arg-type]
        lambda folder: br.signal_to_noise(plain()),  # type: ignore[arg-type]
        lambda folder: br.pruning_curve(plain(), lambda model: 0.0),  # type: ignore[arg-type]
        lambda folder: br.structure(plain()),  # type: ignore[arg-type]
        lambda folder: br.weight_bits(plain()),  # type: ignore[arg-type]
        lambda folder: br.sparse_network(plain()),  # type: ignore[arg-type]
        lambda folder: complexity(plain()),  # type: ignore[arg-type]
    ],
    ids=[
        "predict",
        "save",
        "prune",
        "evaluate_text",
        "dynamic_evaluate",
        "evaluate_sharpened",
        "sharpen",
        "NaturalGradient",
        "signal_to_noise",
        "pruning_curve",
        "structure",
        "weight_bits",
        "sparse_network",
        "complexity",
    ],
)
def test_a_plain_module_is_named_as_such(use: Callable[[Path], object], tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="expected a model made by bayesianize, got Linear"):
        use(tmp_path)
    assert not (tmp_path / "model").exists()


def test_a_bayesian_network_is_not_made_bayesian_again() -> None:
    model = br.bayesianize(plain())
    for twice in (model, nn.Sequential(model, nn.ReLU())):
        with pytest.raises(TypeError, match="Bayesian already"):
            br.bayesianize(twice)


def test_modules_that_cannot_be_copied_say_why() -> None:
    with pytest.raises(ValueError, match=r"0\.weight is of a lazy module and has no size yet"):
        br.bayesianize(nn.Sequential(nn.LazyLinear(2)))
    net = nn.Sequential(plain())
    for computed in (net[0](torch.zeros(3)), [{"h": net[0].weight.sum()}]):
        net[0].left = computed
        with pytest.raises(ValueError, match=r"^0\.left was computed from weights.*prune\.remove"):
            br.bayesianize(net)
    model = br.bayesianize(nn.utils.parametrizations.weight_norm(plain()))
    assert model(torch.zeros(1, 3)).shape == (1, 2)


class Remembering(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = super().forward(x)
        return self.last


@pytest.mark.parametrize("use", [br.sparse_network, lambda model: br.sharpen(model, "*", 0.1, 0.2)])
def test_a_model_that_cannot_be_copied_says_why(use: Callable[[br.Bayesian], object]) -> None:
    model = br.bayesianize(Remembering(3, 2))
    model(torch.zeros(1, 3))
    with pytest.raises(ValueError, match=r"last was computed from weights.*torch\.no_grad\(\)"):
        use(model)
    with torch.no_grad():
        model(torch.zeros(1, 3))
    use(model)


class Wrapping(nn.Module):
    """Whose own layer is run by a function that it was given when it was made."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.layer, self.after = plain(), nn.Identity()
        self.run = self.layer.forward
        if way == "attribute":
            self.run = lambda x: self.layer(x)
        elif way == "hook":
            self.after.register_forward_hook(lambda module, given, x: x * self.layer.bias)
        elif way == "forward":
            forward = self.layer.forward
            self.layer.forward = lambda x: forward(x) + 1  # type: ignore[method-assign]
            self.run = self.layer
        elif way == "default":
            self.steps = [lambda x, layer=self.layer: layer(x)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.run(x))


@pytest.mark.parametrize(
    ("way", "name"),
    [
        ("attribute", "run"),
        ("hook", "_forward_hooks"),
        ("forward", "forward"),
        ("default", "steps"),
    ],
)
def test_functions_made_around_a_layer_are_refused(way: str, name: str) -> None:
    """A copy would run the layer of the network that it is a copy of, and draw nothing."""
    with pytest.raises(ValueError, match=rf"keeps Wrapping.*<lambda> in its attribute '{name}'"):
        br.bayesianize(Wrapping(way))
    model = br.bayesianize(Wrapping("method"), br.Gaussian(0.1)).train()
    assert not torch.equal(model(torch.ones(1, 3)), model(torch.ones(1, 3)))


class Named(nn.Linear):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        return {"logits": super().forward(x)}


def test_data_parallel_is_refused() -> None:
    """Its copies of each forward would keep the draw, and `kl` find none."""
    with pytest.raises(RuntimeError, match="use DistributedDataParallel"):
        br.bayesianize(plain())._replicate_for_data_parallel()


def test_an_output_of_another_kind_is_named() -> None:
    with pytest.raises(TypeError, match=r"reads a tensor.* the module returns a dict; give an"):
        br.predict(br.bayesianize(Named(3, 2)), torch.zeros(1, 3))


def test_an_output_may_be_made_of_a_known_one() -> None:
    class Logits(br.Categorical):
        def moments(self, raw: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
            return super().moments(raw["logits"])

    model, x = br.bayesianize(Named(3, 2)), torch.ones(1, 3)
    found = br.predict(model, x, samples=0, output=Logits()).mean
    assert torch.equal(found, model.eval()(x)["logits"].softmax(-1))


def test_a_file_is_no_place_for_a_model(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(br.UserError, match="file is a file, and a model is a folder"):
        br.save(br.bayesianize(plain()), tmp_path / "file")


def test_a_recipe_is_no_path(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"got 'my\.toml'; br\.read_recipe reads one"):
        br.train("my.toml", tmp_path / "run")  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("where", [None, 3, [plain()]])
def test_where_must_name_weights(where: object) -> None:
    with pytest.raises(TypeError, match="where must be a name pattern, several, or a predicate"):
        br.bayesianize(plain(), where=where)  # type: ignore[arg-type]


@pytest.mark.parametrize("block", ["hold", "mean", "sample"])
def test_a_copy_made_inside_a_block_is_free_of_it(block: str) -> None:
    model = br.bayesianize(plain(), br.Gaussian(0.1), br.Normal()).train()
    x = torch.randn(4, 3)
    with model.hold() if block == "hold" else model.weights(block):  # type: ignore[arg-type]
        model(x)
        copied = copy.deepcopy(model)
        assert torch.equal(model(x), model(x))
    copied(x)  # perhaps the draw that was held, once
    assert not torch.equal(copied(x), copied(x))
    assert copied.kl().isfinite()


def test_points_have_no_threshold() -> None:
    model = br.bayesianize(plain(), br.Delta(), br.Uniform())
    with pytest.raises(br.Invalid, match="threshold cannot be set: all weights are points"):
        br.prune(model, threshold=0.83)
    br.prune(model, fraction=0.5)
    assert model.weight_count == 4


def test_one_number_is_no_class() -> None:
    model = br.bayesianize(nn.Linear(3, 1))
    x = torch.zeros(4, 3)
    with pytest.raises(ValueError, match=r"two or more classes.*\(4, 1\).*br\.outputs\.Normal"):
        br.predict(model, x, samples=2)
    assert br.predict(model, x, samples=2, output=br.outputs.Normal(1.0)).mean.shape == (4, 1)
    with pytest.raises(br.Invalid, match=re.escape("samples must be 0 (the mean) or a whole")):
        br.predict(model, x, samples=1.5)  # type: ignore[arg-type]


def test_token_ids_may_be_a_list_or_a_tensor() -> None:
    for ids in (list(range(8)), torch.arange(8), np.arange(8)):
        first = next(iter(br.StreamLoader(ids, streams=2, unroll=2)))  # type: ignore[arg-type]
        assert first.x.tolist() == [[0, 3], [1, 4]]
    assert br.bayesianize(plain(), where={"weight", "bias"}).weight_count == 8  # type: ignore[arg-type]
    assert br.Gaussian(np.float32(0.05)).std  # type: ignore[arg-type]
    for odd in (np.zeros((2, 3), dtype=np.int64), np.zeros(9), "words"):
        with pytest.raises(br.Invalid, match="ids must be one row of token ids"):
            br.StreamLoader(odd, streams=1, unroll=2)  # type: ignore[arg-type]


def test_a_text_may_be_given_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = write_text(tmp_path)
    by_path, by_settings = br.load_text(path), br.load_text(br.TextData(str(path)))
    assert np.array_equal(by_path.ids["train"], by_settings.ids["train"])


@pytest.mark.parametrize("scale", ["a", None, (0.1,), (0.1, "b")])
def test_a_scale_is_a_number_or_a_pair(scale: object) -> None:
    with pytest.raises(br.Invalid, match="scale must be a number or a pair of them"):
        br.Gaussian(scale)  # type: ignore[arg-type]


def test_a_kl_that_does_not_exist_is_refused_at_once() -> None:
    loader = DataLoader(TensorDataset(torch.zeros(4, 3)), batch_size=2)
    with pytest.raises(br.Invalid, match="kl must be one of auto, exact, sample, got 'foo'"):
        br.FreeEnergy(loader, kl="foo")  # type: ignore[arg-type]


class Counted:
    targets = 1000
    streams = 4


class Batch:
    targets = 100
    streams = 4


def gradients(model: br.Bayesian, nll: torch.Tensor) -> list[torch.Tensor]:
    """Those of the free energy, of all that is learnt."""
    model.zero_grad()
    br.FreeEnergy(Counted())(model, nll, Batch()).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def test_the_second_order_reads_a_batch_in_parts() -> None:
    """Several forwards of one draw, whose losses are added up."""
    torch.manual_seed(1)
    x = torch.randn(4, 5, 8, dtype=torch.float64)
    model = br.bayesianize(net(), br.Sharpened(0.05, sigma0=0.1, eta=0.4, order="second")).train()
    found = []
    for parts in ([x], [x[:1], x[1:]], [x[:1], x[1:2], x[2:]]):
        torch.manual_seed(1)
        model.resample(nll=lambda: model(x).sub(1).square().mean())
        with model.hold():
            found.append(gradients(model, sum(model(p).sub(1).square().sum() for p in parts)))  # type: ignore[arg-type]
    for others in found[1:]:
        for one, other in zip(found[0], others, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-7)


def test_the_second_order_is_not_left_out_unseen() -> None:
    x = torch.randn(4, 8, dtype=torch.float64)
    model = br.bayesianize(net(), br.Sharpened(0.05, order="second")).train()
    model.resample(nll=lambda: model(x).square().mean())
    loss = br.FreeEnergy(Counted())(model, model(x).square().sum(), Batch())
    with pytest.raises(RuntimeError, match=r"more than autograd finds: call loss.backward\(\)"):
        loss.objective.backward()


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(nn.functional.dropout(x, 0.3, self.training))  # type: ignore[no-any-return]


class Attending(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("module", "fine"), [(Noisy(), False), (Attending(0.3), False), (Attending(0.0), True)]
)
def test_the_second_order_refuses_any_noise_of_the_module(module: nn.Module, fine: bool) -> None:
    x = torch.randn(4, 5, 8, dtype=torch.float64)
    model = br.bayesianize(module, br.Sharpened(0.05, order="second")).train()
    model.resample(nll=lambda: model(x).square().mean())
    nll = model(x).square().sum()
    if fine:
        assert gradients(model, nll)
        return
    with pytest.raises(RuntimeError, match=r"dropout .or other noise. that is drawn anew"):
        gradients(model, nll)


def test_masks_that_are_held_are_no_noise() -> None:
    """They are drawn at the look, and are the same in all passes after it."""
    dropout = br.DropoutSettings(kind="variational", input=0.3, recurrent=0.3, word=0.1)
    net = br.LanguageModel(11, 4, 5, 1, dropout=dropout)
    model = br.bayesianize(net, br.Sharpened(0.05, order="second")).train()
    x = torch.arange(12).view(6, 2) % 11
    model.resample(nll=lambda: model(x)[0].square().mean())
    assert gradients(model, model(x)[0].square().sum())


def test_the_fisher_estimate_squares_the_gradient_of_a_whole_sequence() -> None:
    """Eq. 12, however many forwards of one draw have read the sequence."""
    torch.manual_seed(1)
    x = torch.randn(4, 5, 8, dtype=torch.float64)
    posterior = br.Gaussian(0.2, estimator="fisher")
    model = br.bayesianize(nn.Linear(8, 1).double(), posterior, br.Uniform()).train()

    def loss(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return (one.sum((1, 2)) - 1) ** 2 + (other.sum((1, 2)) + 1) ** 2

    found = []
    for together in (True, False):
        torch.manual_seed(1)
        with model.hold():
            both = model(torch.stack([x, 2 * x])) if together else (model(x), model(2 * x))
            found.append(gradients(model, loss(*both)))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-10, atol=1e-12)


def test_the_fisher_estimate_squares_each_draw_by_itself() -> None:
    """A sequence that two draws have read, the second of them in two forwards."""
    torch.manual_seed(1)
    x = torch.randn(4, 5, 8, dtype=torch.float64)
    posterior = br.Gaussian(0.2, estimator="fisher")
    model = br.bayesianize(nn.Linear(8, 1, bias=False).double(), posterior, br.Uniform()).train()
    (block,) = model.each_block()
    first = model(x)
    with model.hold():
        rest = model(2 * x), model(3 * x)
        _, found = gradients(model, sum((y.sum((1, 2)) - 1) ** 2 for y in (first, *rest)))
        _, of_kl = gradients(model, torch.zeros(4, dtype=torch.float64, requires_grad=True))
    slopes = [2 * (y.sum((1, 2)) - 1)[:, None] * x.sum(1) for y in (first, *rest)]
    squares = slopes[0] ** 2 + (2 * slopes[1] + 3 * slopes[2]) ** 2  # of each sequence
    (sigma,) = (scale.flatten() for _, scale in model.moments().values() if scale is not None)
    wanted = sigma * squares.sum(0) * block.rho[:8].sigmoid() / Batch.streams
    torch.testing.assert_close((found - of_kl)[:8], wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("fused", [True, False])
def test_a_kl_after_a_step_is_that_of_the_new_weights(fused: bool) -> None:
    torch.manual_seed(1)
    model = br.bayesianize(nn.Linear(8, 3), br.Gaussian(0.3)).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=fused)
    gradients(model, model(torch.randn(4, 8)).square().sum())
    optimizer.step()
    found = model.kl()
    with torch.no_grad():  # a write that torch counts: nothing kept of the draw fits any more
        for parameter in model.parameters():
            parameter.add_(0)
    assert found.item() == pytest.approx(model.kl().item())


class Half(br.Gaussian):
    """A posterior of one's own."""

    def std(self, parameters: br.bayes.posterior.Tensors) -> torch.Tensor:
        return 0.5 * super().std(parameters)


class Wide(br.Normal):
    """A prior of one's own."""


def test_what_load_does_not_know_is_not_saved(tmp_path: Path) -> None:
    for model in (
        br.bayesianize(plain(), Half(0.2), br.Normal()),
        br.bayesianize(plain(), br.Gaussian(0.2), Wide()),
    ):
        with pytest.raises(br.UserError, match=r"cannot save a (Half|Wide): load knows"):
            br.save(model, tmp_path / "model")
        assert not (tmp_path / "model").exists()
    br.save(model, tmp_path / "model", mean_only=True)
    assert br.load(tmp_path / "model", plain()).all_points


def test_sharpening_leaves_other_posteriors_as_they_are() -> None:
    model = br.bayesianize(
        nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)),
        {"0.*": Half(0.2), "1.*": br.Gaussian(0.2)},
        br.Normal(),
    )
    looking = br.sharpen(model, "1.*", 0.1, 0.2)
    for name, (_, scale) in looking.moments().items():
        assert torch.equal(scale, model.moments()[name][1])  # type: ignore[arg-type]
    with pytest.raises(Invalid, match="which are Half"):
        br.sharpen(model, "0.*", 0.1, 0.2)


def test_a_state_without_a_block_leaves_its_pruning() -> None:
    model = br.bayesianize(nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)), where="0.*")
    br.prune(model, fraction=0.5)
    before = model.weight_count
    part = {name: value for name, value in model.state_dict().items() if "module" in name}
    model.load_state_dict(part, strict=False)
    assert model.weight_count == before
    assert all((scale == 0).sum() > 0 for _, scale in [model.moments()["0.weight"]])  # type: ignore[union-attr]


class Listed(nn.Module):
    def __init__(self, kept: Callable[[nn.Parameter], object]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 3))
        self.everything = kept(self.weight)


@pytest.mark.parametrize(
    "kept", [lambda w: [w], lambda w: (None, w), lambda w: {"w": w}], ids=["list", "tuple", "dict"]
)
def test_a_parameter_kept_twice_is_refused(kept: Callable[[nn.Parameter], object]) -> None:
    with pytest.raises(ValueError, match="Listed keeps weight in its attribute 'everything'"):
        br.bayesianize(Listed(kept))
    br.bayesianize(Listed(lambda w: nn.ParameterList([w])))


class Started(nn.LSTM):
    """With a state of its own to start from."""

    def __init__(self) -> None:
        super().__init__(8, 6)
        self.h0 = nn.Parameter(torch.randn(1, 1, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        h = self.h0.expand(1, x.shape[1], 6).contiguous()
        return super().forward(x, (h, torch.zeros_like(h)))[0]


def test_a_recurrent_layer_may_have_weights_beside_its_own() -> None:
    model = br.bayesianize(Started(), br.Gaussian(0.1)).train()
    model(torch.randn(5, 2, 8)).sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    assert "h0" in model.moments()


def test_a_parametrised_recurrent_layer_is_drawn() -> None:
    torch.manual_seed(1)
    layer = nn.utils.parametrizations.weight_norm(nn.LSTM(8, 6), "weight_hh_l0")
    model, x = br.bayesianize(layer, br.Gaussian(0.1)), torch.randn(5, 2, 8)
    torch.testing.assert_close(model.eval()(x)[0], layer(x)[0])
    assert not torch.equal(model.train()(x)[0], model(x)[0])


def test_a_parametrised_embedding_keeps_its_rules() -> None:
    embedding = nn.utils.parametrizations.spectral_norm(nn.Embedding(7, 3))
    (block,) = br.bayesianize(embedding).each_block()
    assert [weight.axis for weight in block.layout.weights] == [0]
    sparse = nn.utils.parametrizations.spectral_norm(nn.Embedding(7, 3, sparse=True))
    with pytest.raises(ValueError, match="sparse=True or max_norm"):
        br.bayesianize(sparse)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_a_scripted_module_is_refused() -> None:
    compiled = torch.jit.script(plain())
    for module, name in ((compiled, "weight"), (nn.Sequential(compiled), r"0\.weight")):
        with pytest.raises(TypeError, match=rf"^{name} is in a module compiled by torch.jit"):
            br.bayesianize(module)
    beside = nn.Sequential(compiled, nn.Linear(2, 1))
    assert br.bayesianize(beside, where="1.*")(torch.zeros(4, 3)).shape == (4, 1)


def test_data_are_no_loader() -> None:
    class Pictures:
        targets = torch.zeros(9)

    with pytest.raises(TypeError, match="cannot tell how many targets an epoch of Pictures has"):
        br.FreeEnergy(Pictures())


class Extra(nn.Linear):
    def get_extra_state(self) -> object:
        return {"seen": 3}

    def set_extra_state(self, state: object) -> None: ...


def test_what_a_file_cannot_hold_is_named(tmp_path: Path) -> None:
    with pytest.raises(br.UserError, match="the module's state holds _extra_state, a dict"):
        br.save(br.bayesianize(Extra(3, 2)), tmp_path / "model")
    module = plain()
    module.register_buffer("turn", torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(br.UserError, match=r"cannot save turn: .* no torch.complex128"):
        br.save(br.bayesianize(module), tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_layer_with_a_forward_of_its_own_keeps_it() -> None:
    layer = nn.Linear(5, 3)
    model = br.bayesianize(nn.Sequential(layer))
    inner = model.module[0]
    inner.forward = lambda x: nn.functional.linear(x, inner.weight, inner.bias) + 1
    x = torch.randn(2, 5)
    with model.hold():
        plainly = model(x)
        with model.tuned():
            torch.testing.assert_close(model(x), plainly)
        torch.testing.assert_close(model(x), plainly)


class Reads(nn.Module):
    """A text model that asks more of its layers than to be called."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(11, 8), nn.Linear(8, 11)
        encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.inner = nn.TransformerEncoder(encoder, 1) if kind == "attends" else nn.LSTM(8, 8)

    def forward(self, x: torch.Tensor, state: object = None) -> tuple[torch.Tensor, object]:
        read = self.embedding(x)
        if isinstance(self.inner, nn.TransformerEncoder):
            return self.out(self.inner(read)), None
        self.inner.flatten_parameters()
        read, state = self.inner(read, state)
        return self.out(read), state


@pytest.mark.parametrize("kind", ["attends", "remembers"])
def test_a_sparse_network_serves_modules_that_look_into_their_layers(kind: str) -> None:
    torch.manual_seed(1)
    model = br.bayesianize(Reads(kind), br.Gaussian(0.1)).eval()
    br.prune(model, fraction=0.9)
    x = torch.arange(6).view(3, 2)
    with torch.no_grad():
        found = br.sparse_network(model)(x)[0]
        torch.testing.assert_close(found, model(x)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "other", [nn.Linear(3, 4), nn.Linear(5, 2), nn.Sequential(nn.Linear(3, 3))], ids=str
)
def test_the_state_of_another_network_is_refused(other: nn.Module) -> None:
    """Flat tensors of one size may hold other weights."""
    model, wrong = br.bayesianize(nn.Linear(3, 3)), br.bayesianize(other)
    sizes = [{k: v.shape for k, v in m.state_dict().items() if "loc" in k} for m in (model, wrong)]
    assert sizes[0] == sizes[1]
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match=r"weight', \[3, 3\]\], \['bias', \[3\]\]\] here"):
        model.load_state_dict(wrong.state_dict())
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    model.load_state_dict(br.bayesianize(nn.Linear(3, 3)).state_dict())
    model.load_state_dict(dict(before))  # the tensors alone
