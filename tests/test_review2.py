"""What a second review of the library found, each a test that failed before."""

import re
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from bayesrnn import Gaussian, Normal, bayesianize
from bayesrnn.errors import Invalid, UserError
from bayesrnn.recipe import from_table, read_recipe
from bayesrnn.train.settings import TrainSettings
from bayesrnn.train.step import build_optimizer
from small_runs import Cli, write_recipe


@pytest.mark.parametrize(
    ("table", "key", "value"),
    [
        pytest.param("train", "lr", 10**400, id="lr"),
        ("train", "streams", 10**30),
        ("model", "init", float("inf")),
        ("train", "options", {"capturable": True}),
        ("train", "options", {"differentiable": True}),
    ],
)
def test_a_number_out_of_range_names_its_key(table: str, key: str, value: Any) -> None:
    settings: dict[str, Any] = {"data": {"path": "x"}, table: {key: value}}
    with pytest.raises(Invalid, match=rf"{table}\.{key}"):
        from_table(settings)


@pytest.mark.parametrize("key", ["window_ms", "hop_ms"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_span_of_time_that_is_no_number_names_its_key(key: str, value: Any) -> None:
    with pytest.raises(Invalid, match=rf"data\.{key}"):
        from_table({"data": {"kind": "speech", "path": "x", key: value}})


def test_a_number_of_thousands_of_digits_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(f'[data]\npath = "x"\n[train]\nseed = {"9" * 5000}\n')
    with pytest.raises(UserError, match=re.escape(str(path))):
        read_recipe(path)
    path.write_text('[data]\npath = "x"\n')
    with pytest.raises(Invalid, match="seed"):
        read_recipe(path, [f"train.seed={'9' * 5000}"])


@pytest.mark.parametrize("options", [{"betas": (0.9,)}, {"fused": True, "foreach": True}])
def test_options_that_torch_refuses_in_whatever_way_are_one_line(options: dict[str, Any]) -> None:
    settings = TrainSettings(optimizer="Adam", options=options)
    with pytest.raises(UserError, match=r"train\.options do not suit Adam"):
        build_optimizer(settings, bayesianize(nn.Linear(2, 2), Gaussian(), Normal()))


def test_too_little_memory_is_one_line(cli: Cli, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    result = cli("train", recipe, "model.hidden=10000000000000", "--out", tmp_path / "run")
    assert result.code == 1
    assert len(result.errors) == 1
    assert "not enough memory" in result.errors[0]
