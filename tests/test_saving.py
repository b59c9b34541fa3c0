"""Models on disk, for a user's own module: read back the same, and by anyone."""

import copy
import json
import math
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import bayesrnn as br
from bayesrnn import storage
from bayesrnn.errors import UserError
from small_runs import folder_contents


class Mine(nn.Module):
    """Recurrent, tied, normalised, with a buffer and a frozen weight of its own."""

    def __init__(self, hidden: int = 6, tied: bool = True, more: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, hidden)
        self.rnn = nn.GRU(hidden, hidden, num_layers=2)
        self.norm = nn.BatchNorm1d(hidden)
        self.decoder = nn.Linear(hidden, 9)
        if tied:
            self.decoder.weight = self.embedding.weight
        self.gain = nn.Parameter(torch.ones(()), requires_grad=False)
        self.register_buffer("offset", torch.randn(9))
        if more:
            self.register_buffer("extra", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.rnn(self.embedding(x))
        hidden = self.norm(hidden.flatten(0, 1)).view_as(hidden)
        return self.gain * self.decoder(hidden) + self.offset


def make(module: nn.Module) -> br.Bayesian:
    """Three posteriors and three priors, fitted, learnt and given; biases of the norm ordinary."""
    return br.bayesianize(
        module,
        {"rnn.weight*": br.Gaussian((0.01, 0.3)), "rnn.*": br.Delta(), "*": br.Gaussian(0.2)},
        {
            "rnn.*": br.Normal(loc="fit", scale="fit"),
            "embedding.*": br.ScaleMixture(pi="learn", sigma1="learn"),
            "*": br.Laplace(scale=0.5),
        },
        where=["rnn.*", "embedding.*", "decoder.*"],
    )


@pytest.fixture
def model() -> br.Bayesian:
    """Trained for some steps, so that nothing is where it started."""
    model = make(Mine()).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    x = torch.randint(9, (7, 3))
    for _ in range(5):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten())
        (loss + 0.01 * model.kl()).backward()
        optimizer.step()
    return model


def drawn(model: br.Bayesian, x: Tensor) -> tuple[Tensor, float]:
    """The output of one draw, the same noise each time, and its KL."""
    model = copy.deepcopy(model).eval()
    with torch.no_grad(), model.weights("sample"):
        model.resample(generator=torch.Generator().manual_seed(5))
        return model(x), model.kl().item()


def test_a_saved_model_is_the_same_model(model: br.Bayesian, tmp_path: Path) -> None:
    br.save(model, tmp_path / "model")
    loaded = br.load(tmp_path / "model", module=Mine())
    assert not loaded.training
    saved, found = model.moments(), loaded.moments()
    assert found.keys() == saved.keys()
    for name, (loc, scale) in saved.items():
        assert torch.equal(found[name][0], loc)
        if scale is None:
            assert found[name][1] is None
        else:
            torch.testing.assert_close(found[name][1], scale, rtol=3e-7, atol=0)
    for key, tensor in model.module.state_dict().items():
        assert torch.equal(loaded.module.state_dict()[key], tensor)
    for old, new in zip(model.each_prior(), loaded.each_prior(), strict=True):
        assert new.prior == old.prior
        assert new.state_dict() == old.state_dict()

    x = torch.randint(9, (7, 3))
    with torch.no_grad():
        assert torch.equal(loaded(x), model.eval()(x))
    outputs, kl = drawn(model, x)
    loaded_outputs, loaded_kl = drawn(loaded, x)
    torch.testing.assert_close(loaded_outputs, outputs, rtol=1e-5, atol=1e-6)
    assert loaded_kl == pytest.approx(kl, rel=1e-5)


def test_the_module_given_to_load_is_left_alone(model: br.Bayesian, tmp_path: Path) -> None:
    br.save(model, tmp_path / "model")
    module = Mine()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    br.load(tmp_path / "model", module=module)
    after = module.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_a_loaded_model_keeps_tied_weights_tied_and_trains_on(
    model: br.Bayesian, tmp_path: Path
) -> None:
    br.save(model, tmp_path / "model")
    loaded = br.load(tmp_path / "model", module=Mine()).train()
    assert loaded.weight_count == model.weight_count
    assert [p.shape for p in loaded.parameters()] == [p.shape for p in model.parameters()]
    (loaded(torch.zeros(3, 2, dtype=torch.int64)).sum() + loaded.kl()).backward()
    assert all(p.grad is not None for p in loaded.parameters() if p.requires_grad)


def test_the_names_in_a_file_are_no_patterns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Matching each with all took a network of 1000 layers a quarter of a minute to load."""
    net = nn.ModuleDict({name: nn.Linear(2, 2) for name in ("*", "[ab]", "a")})
    br.save(br.bayesianize(net, {"a.*": br.Delta(), "*": br.Gaussian(0.2)}), tmp_path / "model")
    monkeypatch.setattr(import_module("bayesrnn.bayes.bayesianize"), "fnmatchcase", None)
    points = {n for n, (_, s) in br.load(tmp_path / "model", net).moments().items() if s is None}
    assert points == {"a.weight", "a.bias"}


class SavesItself(nn.Linear):
    """As the layers of graph networks do."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        for name in ("weight", "bias"):
            own = getattr(self, name)
            destination[prefix + name] = own if keep_vars else own.detach()


def test_a_layer_that_saves_its_weights_itself(tmp_path: Path) -> None:
    net, x = nn.Sequential(SavesItself(3, 2), nn.Tanh()), torch.randn(4, 3)
    model = br.bayesianize(net, br.Gaussian(0.1), where="*.weight").eval()
    br.save(model, tmp_path / "model")
    assert torch.equal(br.load(tmp_path / "model", net)(x), net(x))
    ordinary = {"module.0.bias"}
    for state in (model.state_dict(), model.state_dict(keep_vars=True)):
        assert {name for name in state if name.startswith("module.")} == ordinary
    other = br.bayesianize(nn.Sequential(SavesItself(3, 2), nn.Tanh()), where="*.weight").eval()
    other.load_state_dict(copy.deepcopy(model).state_dict())
    assert torch.equal(other(x), net(x))


class Centred(nn.Linear):
    """Keeps a number that is no buffer, and saves it as it likes."""

    centre = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - self.centre)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}centre"] = torch.tensor(self.centre)

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        self.centre = state.pop(f"{prefix}centre").item()
        super()._load_from_state_dict(state, prefix, *rest)


def test_what_a_layer_saves_in_its_own_way_it_loads_so(tmp_path: Path) -> None:
    net, x = Centred(3, 2), torch.randn(4, 3)
    net.centre = 2.0
    model = br.bayesianize(net, where="weight").eval()
    br.save(model, tmp_path / "model")
    assert torch.equal(br.load(tmp_path / "model", Centred(3, 2))(x), model(x))


def test_anyone_can_read_the_file(model: br.Bayesian, tmp_path: Path) -> None:
    br.save(model, tmp_path / "model")
    tensors = load_file(tmp_path / "model/model.safetensors")
    names = {
        *("rnn." + part for part in ("weight_ih_l0", "weight_hh_l0", "weight_ih_l1")),
        *("rnn.weight_hh_l1", "embedding.weight", "decoder.bias"),
    }
    points = {"rnn." + part for part in ("bias_ih_l0", "bias_hh_l0", "bias_ih_l1", "bias_hh_l1")}
    others = {"gain", "offset", "norm.weight", "norm.bias"}
    others |= {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    expected = {f"{name}.{part}" for name in names for part in ("loc", "scale")}
    assert set(tensors) == expected | {f"{name}.loc" for name in points} | others
    for name, (loc, scale) in model.moments().items():
        assert torch.equal(tensors[f"{name}.loc"], loc)
        if scale is not None:
            assert torch.equal(tensors[f"{name}.scale"], scale)
    network = Mine()  # by hand, without this package
    network.load_state_dict(
        {name.removesuffix(".loc"): t for name, t in tensors.items() if name[-6:] != ".scale"}
        | {"decoder.weight": tensors["embedding.weight.loc"]}
    )
    x = torch.randint(9, (7, 3))
    with torch.no_grad():
        assert torch.equal(network.eval()(x), model.eval()(x))


def test_nothing_is_pickled(model: br.Bayesian, tmp_path: Path) -> None:
    br.save(model, tmp_path / "model")
    files = folder_contents(tmp_path / "model")
    assert files.keys() == {"config.json", "model.safetensors"}
    json.loads(files["config.json"])
    assert not files["model.safetensors"].startswith((b"PK", b"\x80"))


def test_weight_noise_keeps_its_scale(tmp_path: Path) -> None:
    noise = br.Gaussian(0.075, learn_scale=False)
    br.save(br.bayesianize(nn.Linear(2, 2), noise, br.Uniform()), tmp_path / "model")
    loaded = br.load(tmp_path / "model", module=nn.Linear(2, 2))
    assert all(
        scale is not None and torch.all(scale == torch.tensor(0.075))
        for _, scale in loaded.moments().values()
    )


def test_a_very_small_scale_survives(tmp_path: Path) -> None:
    model = br.bayesianize(nn.Linear(2, 2))
    with torch.no_grad():
        for block in model.each_block():
            block.rho.fill_(-200.0)
    br.save(model, tmp_path / "model")
    loaded = br.load(tmp_path / "model", module=nn.Linear(2, 2))
    for name, (_, scale) in model.moments().items():
        found = loaded.moments()[name][1]
        assert scale is not None
        assert found is not None
        torch.testing.assert_close(found, scale, rtol=1e-6, atol=0)
    assert all(torch.isfinite(p).all() for p in loaded.parameters())


def test_prior_values_follow_their_prior_whatever_the_order_of_the_layers(tmp_path: Path) -> None:
    def network(names: tuple[str, str]) -> nn.Module:
        layers = {"one": nn.Linear(3, 3), "two": nn.Linear(3, 3)}
        return nn.ModuleDict({name: layers[name] for name in names})

    model = br.bayesianize(
        network(("one", "two")),
        br.Gaussian(0.1),
        {"one.*": br.Normal(scale="learn"), "two.*": br.Normal(scale="learn")},
    )
    with torch.no_grad():
        model.priors[0].scale.fill_(math.log(2.0))
        model.priors[1].scale.fill_(math.log(7.0))
    br.save(model, tmp_path / "model")
    loaded = br.load(tmp_path / "model", module=network(("two", "one")))
    found = {
        block.layout.weights[0].name: loaded.hyper(block).scale.exp().item()
        for block in loaded.each_block()
    }
    assert found == pytest.approx({"one.weight": 2.0, "two.weight": 7.0})


# --- what does not fit -----------------------------------------------------------------------


def frozen() -> Mine:
    module = Mine()
    module.rnn.weight_ih_l0.requires_grad_(False)
    return module


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (lambda: Mine(hidden=5), r"embedding.weight is \(9, 6\) there and \(9, 5\) here"),
        (lambda: Mine(more=True), "extra is not in the file"),
        (lambda: Mine(tied=False), "decoder.weight is not in the file"),
        (lambda: nn.Linear(3, 3), "is not in the module"),
        (frozen, "rnn.weight_ih_l0 is drawn there and frozen here"),
    ],
)
def test_another_module_is_refused_in_one_line_that_names_what_differs(
    other: Callable[[], nn.Module], said: str, model: br.Bayesian, tmp_path: Path
) -> None:
    br.save(model, tmp_path / "model")
    with pytest.raises(UserError, match=said) as caught:
        br.load(tmp_path / "model", module=other())
    assert "was saved from another network" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_weights_that_were_two_are_not_loaded_into_tied_ones(tmp_path: Path) -> None:
    br.save(br.bayesianize(Mine(tied=False)), tmp_path / "model")
    with pytest.raises(UserError, match=r"decoder.weight is a weight of its own there and tied"):
        br.load(tmp_path / "model", module=Mine(tied=True))


def test_a_folder_that_is_no_model_is_never_overwritten(model: br.Bayesian, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/cat.jpg").write_bytes(b"cat")
    (tmp_path / "file").write_text("words")
    for name in ("photos", "file"):
        with pytest.raises(UserError, match=name):
            br.save(model, tmp_path / name)
    assert folder_contents(tmp_path) == {"photos/cat.jpg": b"cat", "file": b"words"}


def test_a_model_is_replaced_but_never_what_lies_beside_it(
    model: br.Bayesian, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    br.save(br.bayesianize(nn.Linear(2, 2)), folder)
    br.save(model, folder)
    br.load(folder, module=Mine())
    (folder / "notes.txt").write_text("mine")
    before = folder_contents(folder)
    with pytest.raises(UserError, match=r"holds more than a model \(notes.txt\)"):
        br.save(br.bayesianize(nn.Linear(2, 2)), folder)
    assert folder_contents(folder) == before


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
@pytest.mark.parametrize("harm", ["cut short", "flipped", "missing"])
def test_a_damaged_model_is_named(file: str, harm: str, model: br.Bayesian, tmp_path: Path) -> None:
    br.save(model, tmp_path / "model")
    path = tmp_path / "model" / file
    data = bytearray(path.read_bytes())
    if harm == "missing":
        path.unlink()
    elif harm == "cut short":
        path.write_bytes(data[: len(data) // 2])
    else:
        place = data.index(b'"axis": ') + 8 if file == "config.json" else len(data) // 2
        data[place] ^= 1
        path.write_bytes(data)
    with pytest.raises(UserError, match=file) as caught:
        br.load(tmp_path / "model", module=Mine())
    assert "\n" not in str(caught.value)


def test_a_file_of_somebody_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "model.safetensors").write_bytes(b"...")
    with pytest.raises(UserError, match="does not describe a bayesrnn model"):
        br.load(tmp_path, module=Mine())


def test_a_folder_that_is_missing_or_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no such folder"):
        br.load(tmp_path / "missing")
    with pytest.raises(UserError, match=r"is no run's folder, .*; give one of those"):
        br.load(tmp_path)


def test_a_full_disk_leaves_the_model_that_was_there(
    model: br.Bayesian, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    br.save(model, tmp_path / "model")
    before = folder_contents(tmp_path)

    def full(path: Path, data: bytes) -> None:
        path.write_bytes(data[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(storage, "_write_synced", full)
    with pytest.raises(UserError, match=r"No space left on device; free some space"):
        br.save(model, tmp_path / "model")
    assert folder_contents(tmp_path) == before


@pytest.mark.parametrize("exists", [True, False])
def test_through_a_link_the_folder_that_it_points_to_is_written(
    exists: bool, tmp_path: Path
) -> None:
    link, folder = tmp_path / "latest", tmp_path / "elsewhere" / "model"
    folder.parent.mkdir()
    link.symlink_to(folder)
    if exists:
        folder.mkdir()
    for scale in (1.0, 2.0):
        net = nn.Linear(2, 2)
        nn.init.constant_(net.weight, scale)
        br.save(br.bayesianize(net), link)
        assert br.load(folder, module=net).moments()["weight"][0].eq(scale).all()
    assert link.is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "latest"]
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


def test_the_folder_one_is_in_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in (".", tmp_path):
        with pytest.raises(br.UserError, match="is the folder you are in"):
            br.save(br.bayesianize(nn.Linear(2, 2)), folder)
