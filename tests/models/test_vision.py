"""Features of pictures by networks for images; their weights are random here."""

import builtins
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import bayesrnn as br
from bayesrnn.models.vision import find_pictures, load_vision, picture_features
from vision_extra import Image, torchvision


def write_pictures(
    folder: Path, names: tuple[str, ...] = ("b.png", "a.jpg", "deep/c.jpeg")
) -> Path:
    dice = np.random.default_rng(1)
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(dice.integers(0, 255, (50, 70, 3), dtype=np.uint8)).save(path)
    return folder


def test_a_network_without_its_last_layer_gives_a_vector_a_picture(tmp_path: Path) -> None:
    torch.manual_seed(1)
    module, prepare = load_vision("resnet18", "random")
    paths = find_pictures(write_pictures(tmp_path))
    assert [path.name for path in paths] == ["a.jpg", "b.png", "c.jpeg"]
    told: list[int] = []
    found = picture_features(paths, module, prepare, batch=2, advance=told.append)
    assert found.vectors.shape == (3, 512)
    assert found.vectors.dtype == torch.float16
    assert list(found.names) == ["a.jpg", "b.png", "c.jpeg"]
    assert told == [2, 1]
    with torch.no_grad(), Image.open(paths[1]) as image:
        alone = module(prepare(image.convert("RGB"))[None])
    torch.testing.assert_close(found.vectors[1].float(), alone[0], rtol=2e-3, atol=2e-3)


def test_weights_from_a_file_are_used(tmp_path: Path) -> None:
    net = torchvision.models.resnet18(weights=None)
    save_file(net.state_dict(), tmp_path / "w.safetensors")
    module, _ = load_vision("resnet18", str(tmp_path / "w.safetensors"))
    assert torch.equal(module.conv1.weight, net.conv1.weight)
    save_file({"x": torch.ones(1)}, tmp_path / "other.safetensors")
    with pytest.raises(br.UserError, match="does not hold the weights of resnet18"):
        load_vision("resnet18", str(tmp_path / "other.safetensors"))
    (tmp_path / "text.safetensors").write_text("no")
    with pytest.raises(br.UserError, match="is damaged or not safetensors"):
        load_vision("resnet18", str(tmp_path / "text.safetensors"))


def test_bad_input_gets_one_line(tmp_path: Path) -> None:
    with pytest.raises(br.UserError, match="has no network 'resnet19'; one of: alexnet"):
        load_vision("resnet19", "random")
    with pytest.raises(br.UserError, match="there is no such folder"):
        find_pictures(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(br.UserError, match="holds no pictures"):
        find_pictures(tmp_path / "empty")
    write_pictures(tmp_path / "two", ("a.jpg", "b/a.jpg"))
    with pytest.raises(br.UserError, match=r"2 pictures named a\.jpg"):
        find_pictures(tmp_path / "two")
    (tmp_path / "text.jpg").write_text("no picture")
    module, prepare = load_vision("resnet18", "random")
    with pytest.raises(br.UserError, match=r"text\.jpg cannot be read as a picture"):
        picture_features([tmp_path / "text.jpg"], module, prepare)


def test_a_torchvision_of_another_kind_gets_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str, *args: object, **kwargs: object) -> object:
        if name == "torchvision":
            raise RuntimeError("operator torchvision::nms does not exist")
        return usual(name, *args, **kwargs)

    usual = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", fail)
    with pytest.raises(br.UserError, match="torchvision does not fit this torch"):
        load_vision("resnet18", "random")


def test_timm_where_it_is_there() -> None:
    pytest.importorskip("timm", reason="timm is not installed")
    module, _ = load_vision("timm:resnet18", "random")
    assert module(torch.zeros(1, 3, 64, 64)).shape == (1, 512)
