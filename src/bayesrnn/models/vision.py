"""Pictures to vectors, by a network for images of torchvision or timm. Both are extras."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from torch import Tensor, nn

from bayesrnn.data.features import Features
from bayesrnn.errors import UserError
from bayesrnn.files import expanded, read_bytes

ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
RANDOM = "random"
Prepare = Callable[[Any], Tensor]
"""A picture to the network's input, [3, height, width]."""


def load_vision(network: str = "resnet50", weights: str = "") -> tuple[nn.Module, Prepare]:
    """A network of torchvision by its name, or of timm as timm:NAME, without its last layer.

    `weights` are the network's own, fetched where they are not at hand (""); those in a safetensors
    file with the network's own names; or "random", for tests.
    """
    own = weights == ""
    load = _from_timm if network.startswith("timm:") else _from_torchvision
    try:
        module, prepare = load(network.removeprefix("timm:"), own)
    except OSError as error:
        raise UserError(
            f"the weights of {network} cannot be fetched ({error}); give them as --weights "
            "FILE.safetensors"
        ) from error
    if not own and weights != RANDOM:
        _fill(module, expanded(weights), network)
    _take_off_last(module)
    return module.eval(), prepare


def find_pictures(folder: Path) -> list[Path]:
    """All pictures in a folder, at any depth, by name; or the one picture itself."""
    if folder.is_file():
        return [folder]
    if not folder.is_dir():
        raise UserError(f"no pictures at {folder}: there is no such folder")
    found = sorted(p for p in folder.rglob("*") if p.suffix.lower() in ENDINGS)
    if not found:
        raise UserError(f"{folder} holds no pictures ({', '.join(ENDINGS)})")
    name, count = Counter(path.name for path in found).most_common(1)[0]
    if count > 1:
        raise UserError(f"{folder} has {count} pictures named {name}; names tell them apart")
    return found


@torch.no_grad()
def picture_features(
    paths: Sequence[Path],
    module: nn.Module,
    prepare: Prepare,
    batch: int = 32,
    device: torch.device | str = "cpu",
    advance: Callable[[int], None] | None = None,
) -> Features:
    """Each picture's vector, in float16, under its file name."""
    module = module.to(device)
    vectors = []
    for pictures in _batches(paths, prepare, batch):
        vectors.append(module(pictures.to(device)).flatten(1).half().cpu())
        if advance is not None:
            advance(len(pictures))
    return Features(torch.cat(vectors), [path.name for path in paths])


def _batches(paths: Sequence[Path], prepare: Prepare, batch: int) -> Iterator[Tensor]:
    from PIL import Image, UnidentifiedImageError

    for start in range(0, len(paths), batch):
        pictures = []
        for path in paths[start : start + batch]:
            try:
                with Image.open(path) as image:
                    pictures.append(prepare(image.convert("RGB")))
            except (UnidentifiedImageError, OSError) as error:
                raise UserError(f"{path} cannot be read as a picture ({error})") from error
        yield torch.stack(pictures)


def _from_torchvision(name: str, own: bool) -> tuple[nn.Module, Prepare]:
    try:
        from torchvision import models
    except ImportError as error:
        raise UserError(
            "features of pictures need torchvision: pip install 'bayesrnn[features]'"
        ) from error
    except RuntimeError as error:  # one built for another torch: with CUDA, or without
        raise UserError(
            f"torchvision does not fit this torch ({error}); install the one of the same kind, as "
            "https://pytorch.org/get-started/locally says"
        ) from error
    known = models.list_models(module=models)
    if name not in known:
        raise UserError(f"torchvision has no network {name!r}; one of: {', '.join(known)}")
    default = models.get_model_weights(name).DEFAULT
    return models.get_model(name, weights=default if own else None), default.transforms()


def _from_timm(name: str, own: bool) -> tuple[nn.Module, Prepare]:
    try:
        import timm
    except ImportError as error:
        raise UserError("networks named timm:NAME need timm: pip install timm") from error
    if not timm.is_model(name):
        raise UserError(f"timm has no network {name!r}; see timm.list_models()")
    module: nn.Module = timm.create_model(name, pretrained=own)
    settings = timm.data.resolve_model_data_config(module)
    return module, timm.data.create_transform(**settings, is_training=False)


def _fill(module: nn.Module, path: Path, network: str) -> None:
    data = read_bytes(path)
    try:
        module.load_state_dict(load_tensors(data))
    except SafetensorError as error:
        raise UserError(f"{path} is damaged or not safetensors ({error})") from error
    except RuntimeError as error:
        why = str(error).splitlines()[-1].strip()
        raise UserError(f"{path} does not hold the weights of {network}: {why}") from error


def _take_off_last(module: nn.Module) -> None:
    """What classifies goes: the last linear layer."""
    linear = [name for name, part in module.named_modules() if isinstance(part, nn.Linear)]
    if not linear:
        raise UserError("the network has no last linear layer, so it gives no features")
    path, _, name = linear[-1].rpartition(".")
    setattr(module.get_submodule(path), name, nn.Identity())
