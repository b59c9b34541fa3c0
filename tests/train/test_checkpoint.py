"""Checkpoints: which are kept, which is read, and an optimiser's state in them."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from bayesrnn.errors import Invalid, UserError
from bayesrnn.train.checkpoint import (
    Checkpoint,
    pack_optimizer,
    read_newest_checkpoint,
    unpack_optimizer,
    write_checkpoint,
)
from bayesrnn.train.settings import TrainSettings, optimizers


def test_the_newest_two_are_kept_by_number_not_by_name(tmp_path: Path) -> None:
    for step in (9, 10, 999_999_999, 8):
        write_checkpoint(tmp_path, step, Checkpoint({}, {"step": step}))
    assert sorted(int(path.name) for path in tmp_path.iterdir()) == [10, 999_999_999]


def test_nothing_is_read_from_a_folder_that_has_none(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "notes").mkdir()
    assert read_newest_checkpoint(tmp_path, said.append) is None
    assert read_newest_checkpoint(tmp_path / "missing", said.append) is None
    assert said == []


def test_a_damaged_one_is_reported_and_passed_over(tmp_path: Path) -> None:
    for step in (1, 2):
        tensors = {"x.safetensors": {"x": torch.full((3,), float(step))}}
        write_checkpoint(tmp_path, step, Checkpoint(tensors, {"step": step}))
    (tmp_path / "000000002/x.safetensors").write_bytes(b"")
    said: list[str] = []
    found = read_newest_checkpoint(tmp_path, said.append)
    assert found is not None
    assert found.facts["step"] == 1
    assert torch.equal(found.tensors["x.safetensors"]["x"], torch.ones(3))
    assert len(said) == 1
    assert str(tmp_path / "000000002/x.safetensors") in said[0]
    (tmp_path / "000000001/manifest.json").unlink()
    with pytest.raises(UserError, match="every checkpoint in"):
        read_newest_checkpoint(tmp_path, said.append)


def fresh(name: str) -> tuple[nn.Linear, torch.optim.Optimizer]:
    torch.manual_seed(3)
    network = nn.Linear(3, 2)
    return network, getattr(torch.optim, name)(network.parameters(), lr=0.01)


def step(network: nn.Linear, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    network(x).square().sum().backward()
    optimizer.step()


# (natural gradients, which are of a Bayesian network: test_resume.py)
@pytest.mark.parametrize("name", sorted(set(optimizers()) - {"NaturalGradient"}))
def test_every_optimiser_goes_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    network, optimizer = fresh(name)
    for _ in range(3):
        step(network, optimizer, torch.ones(1, 3))
    tensors, facts = pack_optimizer(optimizer)
    saved = {"o.safetensors": tensors, "p.safetensors": dict(network.state_dict())}
    write_checkpoint(tmp_path, 3, Checkpoint(saved, {"optimizer": facts}))

    found = read_newest_checkpoint(tmp_path, print)
    assert found is not None
    resumed, resumed_optimizer = fresh(name)
    resumed.load_state_dict(found.tensors["p.safetensors"])
    unpack_optimizer(resumed_optimizer, found.tensors["o.safetensors"], found.facts["optimizer"])
    for _ in range(3):
        step(network, optimizer, torch.ones(1, 3))
        step(resumed, resumed_optimizer, torch.ones(1, 3))
    for ours, expected in zip(resumed.parameters(), network.parameters(), strict=True):
        assert torch.equal(ours, expected)
    pairs = zip(resumed_optimizer.param_groups, optimizer.param_groups, strict=True)
    for group, other in pairs:
        settings = {k: v for k, v in group.items() if k != "params"}
        assert settings == {k: v for k, v in other.items() if k != "params"}


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"lr": 0.0}, "lr"),
        ({"lr": float("inf")}, "lr"),
        ({"epochs": 0}, "epochs"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"clip": -1.0}, "clip"),
        ({"decay": 0.0}, "decay"),
        ({"draws": 0}, "draws"),
        ({"checkpoint_minutes": -0.5}, "checkpoint_minutes"),
        ({"optimizer": "LBFGS"}, "optimizer"),
        ({"optimizer": "sgd"}, "optimizer"),
        ({"options": {"betas": (0.9, 0.99)}}, "options.betas"),
        ({"device": "tpu"}, "device"),
    ],
)
def test_impossible_settings_are_refused_by_their_key(
    settings: dict[str, object], key: str
) -> None:
    with pytest.raises(Invalid) as caught:
        TrainSettings(**settings)  # type: ignore[arg-type]
    assert [problem[0] for problem in caught.value.problems] == [key]
