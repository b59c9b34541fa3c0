"""Making the GPU do nothing but work: kernels compiled from plain functions, and whole steps
recorded once and replayed.

Nothing here knows any maths. A function that is compiled or replayed is the one that runs as it is
on a CPU.
"""

import functools
import gc
import platform
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._compile import _disable_dynamo  # torch.compiler's would load the compiler at once

P = ParamSpec("P")
R = TypeVar("R")

WARM_UP = 3
"""Calls that run as they are before the recording: libraries choose their kernels meanwhile."""
SHAPES = 8
"""Shapes that are recorded: each takes memory of its own for what it reads and gives."""
Shapes = tuple[torch.Size, ...]
IS_X86 = platform.machine().lower() in ("x86_64", "amd64")


@dataclass(frozen=True)
class Tuning:
    """How draws are made and used; as it stands, the ordinary way."""

    aligned: bool = False  # draws may lie in frames larger than they are
    dtype: torch.dtype | None = None  # of draws and means, if not that of the learnt ones
    compiled: bool = False  # each pass over the weights one kernel a weight
    stream: torch.cuda.Stream | None = None  # a second one, for passes that nothing waits for


@functools.cache
def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """The function with its operations fused into few kernels, anew for every shape it meets."""
    fused = torch.compile(function, dynamic=False)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        # torch's own limits are meant for accidents; a network has as many shapes as it has
        with torch._dynamo.config.patch(recompile_limit=512, accumulated_recompile_limit=4096):
            return fused(*args, **kwargs)

    return call


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """The function, which a `torch.compile` around it runs as it is, with all that it calls.

    What is drawn, kept and charged from call to call is Python's; a compiler that reads it compiles
    anew for every value that it meets. The network's own forward is what it should compile.
    """
    return _disable_dynamo(function)


def untraced_itself(function: Callable[P, R]) -> Callable[P, R]:
    """The same, but what the function calls is compiled."""
    return _disable_dynamo(function, recursive=False)


class Recording(NamedTuple):
    """A recorded call, and the memory it reads from and writes to."""

    graph: torch.cuda.CUDAGraph
    inputs: Sequence[Tensor]
    outputs: tuple[Tensor, ...]


class Replay:
    """A function of tensors that launches its work on a GPU, recorded and replayed as one graph.

    The first calls of a shape run as they are, then one is recorded; from there on inputs are
    copied into the memory it was recorded with and the graph is launched. Once `SHAPES` shapes are
    recorded, calls of others run as they are. What is returned is overwritten by the next call. The
    function must not look at a tensor's value; one that does, or that cannot be recorded for
    another reason, runs as it is for good, and `refused` says why. On a CPU everything runs as it
    is. A `generator` of its own that the function draws from must be named.
    """

    def __init__(
        self,
        function: Callable[..., tuple[Tensor, ...]],
        device: torch.device,
        generator: torch.Generator | None = None,
    ) -> None:
        self._function = function
        self._generator = generator
        self._recordings: dict[Shapes, Recording] = {}
        self._calls: Counter[Shapes] = Counter()
        self._pool: Any = None  # one memory for all: only one of them runs at a time
        self.refused: str | None = None if device.type == "cuda" else "there is no GPU"
        # Of high priority: what runs beside it fills the gaps and never holds it up.
        self._stream = torch.cuda.Stream(device, priority=-1) if self.refused is None else None

    @property
    def recorded(self) -> bool:
        return bool(self._recordings)

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        if self.refused is not None:
            return self.as_it_is(*inputs)
        shapes = tuple(x.shape for x in inputs)
        if shapes not in self._recordings:
            self._calls[shapes] += 1
            if self._calls[shapes] <= WARM_UP or len(self._recordings) == SHAPES:
                return self.as_it_is(*inputs)
            recording = self._record(inputs)
            if recording is None:
                return self.as_it_is(*inputs)
            self._recordings[shapes] = recording
        recording = self._recordings[shapes]
        for mine, given in zip(recording.inputs, inputs, strict=True):
            if mine is not given:
                mine.copy_(given)
        recording.graph.replay()
        return recording.outputs

    def as_it_is(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Run without a recording, but on its stream: what autograd keeps belongs to a stream."""
        stream = self._stream
        if stream is None:
            return self._function(*inputs)
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            outputs = self._function(*inputs)
        torch.cuda.current_stream(stream.device).wait_stream(stream)
        return outputs

    def _record(self, inputs: Sequence[Tensor]) -> Recording | None:
        stream = self._stream
        assert stream is not None
        torch.cuda.synchronize(stream.device)
        mine = [x.clone() for x in inputs]
        graph = torch.cuda.CUDAGraph()
        before = torch.cuda.current_stream(stream.device)
        random = [generator.get_state() for generator in self._generators()]
        self._register(graph)
        try:
            with _undisturbed(), torch.cuda.graph(graph, pool=self._pool, stream=stream):
                outputs = self._function(*mine)
        except RuntimeError as error:
            torch.cuda.set_stream(before)
            cause = error.__context__ or error  # ending a recording that failed fails as well
            self.refused = (str(cause).strip() or repr(cause)).splitlines()[0]
            torch.cuda.synchronize(stream.device)
            self._recover(stream, random)
            return None
        self._pool = graph.pool()
        return Recording(graph, mine, outputs)

    def _recover(self, stream: torch.cuda.Stream, random: Sequence[Tensor]) -> None:
        """After a recording that failed torch's generator still believes to be recorded, and
        refuses to draw; a recording that succeeds puts that right."""
        graph = torch.cuda.CUDAGraph()
        self._register(graph)
        with _undisturbed(), torch.cuda.graph(graph, stream=stream):
            torch.zeros((), device=stream.device)
        for generator, state in zip(self._generators(), random, strict=True):
            generator.set_state(state)

    def _generators(self) -> list[torch.Generator]:
        """torch's own, and the one that was named."""
        assert self._stream is not None
        own = torch.cuda.default_generators[self._stream.device.index]
        return [own] if self._generator in (None, own) else [own, self._generator]

    def _register(self, graph: torch.cuda.CUDAGraph) -> None:
        """Its draws go on from replay to replay; torch's own do by themselves."""
        for generator in self._generators()[1:]:
            graph.register_generator_state(generator)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """No garbage is collected inside: an old recording that goes while a new one is made, that of a
    training before in the same process, say, spoils it."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


@contextmanager
def products_in(precision: str) -> Iterator[None]:
    """Let a GPU take products of float32 numbers in TF32 (all but "float32" do), for a while."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    exact = precision == "float32"
    torch.set_float32_matmul_precision("highest" if exact else "high")
    torch.backends.cudnn.allow_tf32 = not exact
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


def has_bfloat16(device: torch.device) -> bool:
    """Whether it computes in bfloat16 by itself, as GPUs do and newer processors (those whose kind
    does not tell count as such)."""
    known = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return device.type != "cpu" or not IS_X86 or known is None or bool(known())


def second_stream(device: torch.device) -> torch.cuda.Stream:
    """Of low priority, for work that nothing waits for."""
    return torch.cuda.Stream(device, priority=0)


@contextmanager
def beside(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """What is launched inside runs on that stream, after all that was launched so far."""
    if stream is None:
        yield
        return
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        yield
