"""Drawn weights set into their module: the places they take there, for the time of one forward."""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from bayesrnn.bayes.block import Block
from bayesrnn.bayes.placement import Placement, place
from bayesrnn.engine import beside

Slot = tuple[nn.Module, str]
"""A layer, and its own name for a parameter."""


class Binding:
    """The places that a module's drawn weights take: of each weight one, or several where it is
    tied. Where one layer has a whole block, the draw may lie where the hardware likes it best."""

    def __init__(
        self, module: nn.Module, blocks: Sequence[Block], slots: Mapping[str, Sequence[Slot]]
    ) -> None:
        self._module = module
        self._slots = {name: tuple(places) for name, places in slots.items()}
        self._owners = {block: self._one_owner(block) for block in blocks}
        self._placements: dict[tuple[Block, torch.dtype, bool], Placement | None] = {}

    def place_weights(self) -> None:
        """Choose where each block's draws lie: in cuDNN's order on a GPU, aligned where `tuned`."""
        for block, owner in self._owners.items():
            loc, aligned = block.parameters_by_name["loc"], block.tuning.aligned
            if owner is None or not (aligned or loc.device.type == "cuda"):
                block.placement = None
                continue
            dtype = loc.dtype if block.tuning.dtype is None else block.tuning.dtype
            key = (block, dtype, aligned)
            old = self._placements.get(key)
            if key not in self._placements or (
                old is not None and any(p.requires_grad for p in old.frozen.values())
            ):
                old = place(*owner, block.layout.weights, dtype, aligned)
                self._placements[key] = old
            block.placement = old

    @contextmanager
    def bound(
        self, weights: Mapping[Block, Mapping[str, Tensor]], dtype: torch.dtype | None
    ) -> Iterator[None]:
        """The module with its empty places filled, and what is ordinary in this dtype."""
        with ExitStack() as undo:
            for block, tensors in weights.items():
                placement, owner = block.placement, self._owners[block]
                if placement is not None and placement.serve is not None and owner is not None:
                    owner[0].forward = _after(block, placement.serve(tensors))
                    undo.callback(owner[0].__dict__.pop, "forward")
                    continue
                for name, tensor in tensors.items():
                    for layer, local in self.places(name):
                        undo.callback(set_weight, layer, local, layer._parameters.get(local))
                        set_weight(layer, local, tensor)
            if dtype is not None:
                for layer in self._module.modules():
                    for local, parameter in list(layer._parameters.items()):
                        if isinstance(parameter, nn.Parameter) and parameter.is_floating_point():
                            undo.callback(set_weight, layer, local, parameter)
                            set_weight(layer, local, parameter.to(dtype))
            yield

    def _one_owner(self, block: Block) -> tuple[nn.Module, str] | None:
        """The layer all weights of a block belong to, and its path; None where one is tied."""
        places = [place for w in block.layout.weights for place in self._slots[w.name]]
        owners = {owner for owner, _ in places}
        if len(owners) != 1 or len(places) != len(block.layout.weights):
            return None
        return owners.pop(), block.layout.weights[0].name.rpartition(".")[0]

    def places(self, name: str) -> Sequence[Slot]:
        """Where this weight belongs."""
        if name in self._slots:
            return self._slots[name]
        path, _, local = name.rpartition(".")  # frozen: an ordinary parameter
        return [(self._module.get_submodule(path), local)]

    def __getstate__(self) -> dict[str, Any]:
        """For a copy: without placements, which hold on to the module they were made for."""
        return {**self.__dict__, "_placements": {}}


def late(block: Block) -> bool:
    """Whether only a layer's own forward waits for this block's draw, which may take time."""
    return (
        block.tuning.stream is not None
        and block.placement is not None
        and block.placement.serve is not None
        and not isinstance(block.placement.owner, nn.RNNBase)
    )


@contextmanager
def beside_if_late(block: Block) -> Iterator[None]:
    with beside(block.tuning.stream if late(block) else None):
        yield


def _after(block: Block, forward: Callable[..., Any]) -> Callable[..., Any]:
    """A layer's forward that first waits for its weights."""
    stream = block.tuning.stream
    if not late(block) or stream is None:
        return forward

    def waiting(*args: Any, **kwargs: Any) -> Any:
        torch.cuda.current_stream(stream.device).wait_stream(stream)
        return forward(*args, **kwargs)

    return waiting


class Away:
    """What is found in a drawn weight's place between forwards. Nothing can be computed with it:
    a None in the place of a bias would be taken for a layer without one."""

    ERROR = (
        "a weight that is drawn in every forward of a Bayesian model was read outside of one: call "
        "the model, not the module inside it (moments() has its mean and spread; a checkpoint "
        "inside the module runs parts of it again outside, so put it around the whole model)"
    )

    @classmethod
    def __torch_function__(cls, *args: object, **kwargs: object) -> NoReturn:
        raise RuntimeError(cls.ERROR)

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{name}: {self.ERROR}")

    def _computed(self, *_: object) -> NoReturn:
        raise RuntimeError(self.ERROR)

    # With numbers, in a penalty on the weights, say; of tensors torch asks `__torch_function__`.
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _computed
    __truediv__ = __pow__ = __neg__ = __getitem__ = __lt__ = __gt__ = _computed

    def detach(self) -> "Away":
        """Asked for by layers that save their weights themselves."""
        return self


def without_places(module: nn.Module, state: dict[str, Any], *_: object) -> None:
    """A hook of `state_dict`: empty places are nothing to save."""
    for name in [name for name, value in state.items() if isinstance(value, Away)]:
        del state[name]


class DrawnList(nn.ParameterList):
    """One whose parts hold the draws themselves: torch's make parameters of them, which no gradient
    comes back from."""

    def __getitem__(self, index: Any) -> Any:
        return list(self)[index] if isinstance(index, slice) else super().__getitem__(index)


class DrawnDict(nn.ParameterDict):
    """The same of a dictionary: of its copies."""

    def copy(self) -> dict[str, Any]:  # type: ignore[override]
        return dict(self.items())

    def __or__(self, other: Any) -> dict[str, Any]:  # type: ignore[override]
        return self.copy() | dict(other.items())

    def __ror__(self, other: Any) -> dict[str, Any]:  # type: ignore[override]
        return dict(other.items()) | self.copy()


PARTED: dict[type, type] = {nn.ParameterList: DrawnList, nn.ParameterDict: DrawnDict}
"""What containers become where draws are set into them."""


def set_weight(owner: nn.Module, local: str, tensor: Tensor | None) -> None:
    """Set a parameter to a plain tensor, or back. A recurrent layer keeps two more lists of its
    weights, which have to follow; done by hand, so that torch neither packs nor moves them."""
    owner._parameters[local] = tensor  # type: ignore[assignment]
    if tensor is None:
        owner.__dict__[local] = Away()  # found before what is in _parameters
    else:
        owner.__dict__.pop(local, None)
    if isinstance(owner, nn.RNNBase) and local in owner._flat_weights_names:
        index = owner._flat_weights_names.index(local)
        owner._flat_weights[index] = getattr(owner, local)
        references: list[Any] = owner._flat_weight_refs
        references[index] = None if tensor is None else weakref.ref(tensor)
