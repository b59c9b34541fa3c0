"""A GPU's streams without a GPU: what runs on them runs at once, and who has waited for whom is
noted.

A kernel that reads what another stream has not finished writing, or memory that is given away while
another stream still reads it, shows on a GPU as a wrong number now and then. Here it is found by
the order of the calls alone.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bayesrnn.bayes.gradients import DrawTheta


class Stream:
    """Counts its operations; `seen` is how many of each stream it has waited for."""

    def __init__(self, device: object = None, priority: int = 0) -> None:
        self.device = torch.device("cpu")
        self.seen: dict[Stream, int] = defaultdict(int)

    def wait_stream(self, other: "Stream") -> None:
        for stream, count in other.seen.items():
            self.seen[stream] = max(self.seen[stream], count)


class Use(NamedTuple):
    """An operation that reads or writes, as the so-manieth of its stream."""

    stream: Stream
    count: int
    name: str

    def done_for(self, stream: Stream) -> bool:
        return stream is self.stream or stream.seen[self.stream] >= self.count


@dataclass
class Memory:
    """Where a tensor lies. Given back it serves the stream that it was taken by."""

    alive: StorageWeakRef
    home: Stream
    written: Use | None = None
    read: dict[Stream, Use] = field(default_factory=dict)

    def uses(self) -> list[Use]:
        return [*([] if self.written is None else [self.written]), *self.read.values()]


class Watch(TorchDispatchMode):
    """Notes in `found` what would go wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.current = Stream()
        self.found: list[str] = []
        self._memories: dict[int, Memory] = {}
        self._given_back: dict[Stream, list[Memory]] = defaultdict(list)

    @contextmanager
    def on(self, stream: Stream | None) -> Iterator[None]:
        """As `torch.cuda.stream`."""
        before, self.current = self.current, stream or self.current
        try:
            yield
        finally:
            self.current = before

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        kwargs = kwargs or {}
        self._let_go()
        out = func(*args, **kwargs)
        here = self.current
        here.seen[here] += 1
        use = Use(here, here.seen[here], str(func))
        reads, writes = _operands(func, args, kwargs)
        known = {_place(tensor) for tensor in (*reads, *writes)}
        results = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        new = [tensor for tensor in results if _place(tensor) not in known]
        if writes or new or not results:  # no view, which touches nothing
            self._note(use, reads, writes, new)
        return out

    def _note(
        self, use: Use, reads: Sequence[Tensor], writes: Sequence[Tensor], new: Sequence[Tensor]
    ) -> None:
        here = use.stream
        for memory in map(self._memory, (*reads, *writes)):
            if memory.written is not None and not memory.written.done_for(here):
                self.found.append(f"{use.name} reads before {memory.written.name} has written")
        for memory in map(self._memory, writes):
            for other in memory.read.values():
                if not other.done_for(here):
                    self.found.append(f"{use.name} writes before {other.name} has read")
            memory.written, memory.read = use, {}
        for memory in map(self._memory, reads):
            memory.read[here] = use
        if new:
            for memory in self._given_back.pop(here, []):
                for other in memory.uses():
                    if not other.done_for(here):
                        self.found.append(f"{use.name} may take the memory of {other.name}")
        for memory in map(self._memory, new):
            memory.written = use

    def _memory(self, tensor: Tensor) -> Memory:
        alive = StorageWeakRef(tensor.untyped_storage())
        return self._memories.setdefault(_place(tensor), Memory(alive, self.current))

    def _let_go(self) -> None:
        for place, memory in list(self._memories.items()):
            if memory.alive.expired():
                self._given_back[memory.home].append(self._memories.pop(place))


def _operands(func: Any, args: Any, kwargs: Any) -> tuple[list[Tensor], list[Tensor]]:
    """What an operation reads, and what it writes to."""
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    for place, argument in enumerate(func._schema.arguments):
        given = args[place] if place < len(args) else kwargs.get(argument.name)
        tensors = [t for t in tree_leaves(given) if isinstance(t, Tensor)]
        changed = argument.alias_info is not None and argument.alias_info.is_write
        (writes if changed else reads).extend(tensors)
    return reads, writes


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    """`torch.cuda`'s streams are watched ones inside; what is there before is done with."""
    watch = Watch()
    forward, backward = DrawTheta.setup_context, DrawTheta.backward

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        forward(ctx, inputs, output)
        ctx.stream = watch.current

    def on_its_stream(ctx: Any, *gradients: Tensor | None) -> Any:
        """As autograd runs it: where its forward ran, after what it is given."""
        if ctx.stream is not watch.current:
            ctx.stream.wait_stream(watch.current)
        with watch.on(ctx.stream):
            return backward(ctx, *gradients)

    with monkeypatch.context() as patched:
        patched.setattr(DrawTheta, "setup_context", staticmethod(setup_context))
        patched.setattr(DrawTheta, "backward", staticmethod(on_its_stream))
        patched.setattr("torch.cuda.Stream", Stream)
        patched.setattr("torch.cuda.current_stream", lambda device=None: watch.current)
        patched.setattr("torch.cuda.stream", watch.on)
        with watch:
            yield watch
