"""A layer step by step: its gradients against autograd's through a plain loop."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

from bayesrnn.models import DropoutSettings, Mask, MaskedRNN, recurrence
from bayesrnn.models.recurrence import GATES, Masks, step_by_step

B, H = 3, 4


def plain(
    mode: str,
    read: Tensor,
    state: list[Tensor],
    weight: Tensor,
    bias: Tensor,
    z_h: Tensor | None = None,
    z_c: Tensor | None = None,
) -> list[Tensor]:
    """The same, gate by gate, and autograd's own gradients."""
    gates = GATES[mode]
    by_gate = read.unbind(0) if read.dim() == 4 else read.chunk(gates, dim=-1)
    weights, biases = weight.chunk(gates), bias.chunk(gates)
    h, c = state[0], state[-1]
    outputs = []
    for t in range(read.shape[-3]):
        x = [each[t] for each in by_gate]
        s = []
        for k in range(gates):
            heard = h if z_h is None else h * z_h[min(k, len(z_h) - 1)]
            s.append(heard @ weights[k].t() + biases[k])
        if mode == "LSTM":
            i, f, o = (torch.sigmoid(x[k] + s[k]) for k in (0, 1, 3))
            c = f * c + i * torch.tanh(x[2] + s[2])
            h = o * torch.tanh(c)
            if z_c is not None:
                c, h = torch.where(z_c > 0, c, 0.0), h * z_c
        elif mode == "GRU":
            r, u = (torch.sigmoid(x[k] + s[k]) for k in (0, 1))
            h = (1 - u) * torch.tanh(x[2] + r * s[2]) + u * h
        else:
            h = torch.tanh(x[0] + s[0])
        outputs.append(h)
    return [torch.stack(outputs), h, c] if mode == "LSTM" else [torch.stack(outputs), h]


def mask(*shape: int) -> Tensor:
    return 2 * torch.randint(2, shape).double()


def case(mode: str, steps: int, kind: str, by_gate: bool) -> dict[str, Any]:
    """Random numbers for a layer; `by_gate` is how it gets what it reads."""
    gates = GATES[mode]
    shape = (gates, steps, B, H) if by_gate else (steps, B, gates * H)

    def draw(*size: int) -> Tensor:
        return torch.randn(size).double().requires_grad_()

    return {
        "read": draw(*shape),
        "state": [draw(B, H) for _ in range(2 if mode == "LSTM" else 1)],
        "weight": draw(gates * H, H),
        "bias": draw(gates * H),
        "z_h": {"tied": mask(1, B, H), "untied": mask(gates, B, H)}.get(kind.split()[0]),
        "z_c": mask(B, H) if "cell" in kind else None,
    }


def leaves(given: dict[str, Any]) -> list[Tensor]:
    return [given["read"], given["weight"], given["bias"], *given["state"]]


def gradients(
    run: Callable[..., list[Tensor]], mode: str, given: dict[str, Any]
) -> tuple[list[Tensor], list[Tensor]]:
    """What a layer gives, and the gradients of all that it was given, for some loss of it all."""
    found = run(mode, **given)
    loss = sum(((k + 1) * part * part.cos()).sum() for k, part in enumerate(found))
    assert isinstance(loss, Tensor)
    return found, list(torch.autograd.grad(loss, leaves(given)))


def assert_same(mine: list[Tensor], theirs: list[Tensor]) -> None:
    for a, b in zip(mine, theirs, strict=True):
        assert a.shape == b.shape
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-12)


KINDS = [(mode, kind) for mode in GATES for kind in ("tied", "untied", "none")]
KINDS += [("LSTM", kind) for kind in ("tied cell", "untied cell", "none cell")]


@pytest.mark.parametrize("by_gate", [False, True])
@pytest.mark.parametrize("steps", [1, 7])
@pytest.mark.parametrize(("mode", "kind"), KINDS)
def test_outputs_states_and_all_gradients_are_those_of_a_plain_loop(
    mode: str, kind: str, steps: int, by_gate: bool
) -> None:
    given = case(mode, steps, kind, by_gate)
    for mine, theirs in zip(
        gradients(step_by_step, mode, given), gradients(plain, mode, given), strict=True
    ):
        assert_same(mine, theirs)


@pytest.mark.parametrize(("mode", "kind"), KINDS)
def test_gradients_are_finite_differences(mode: str, kind: str) -> None:
    given = case(mode, 2, kind, by_gate=False)

    def run(read: Tensor, weight: Tensor, bias: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        varied = given | {"read": read, "weight": weight, "bias": bias, "state": list(state)}
        return tuple(step_by_step(mode, **varied))

    assert torch.autograd.gradcheck(run, leaves(given), fast_mode=True)


@pytest.mark.parametrize("mode", GATES)
@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_a_state_carried_into_a_second_call_carries_gradients_back(mode: str, kind: str) -> None:
    given = case(mode, 7, kind, by_gate=False)

    def in_two(mode: str, read: Tensor, state: list[Tensor], **rest: Any) -> list[Tensor]:
        first, *middle = step_by_step(mode, read[:3], state, **rest)
        second, *last = step_by_step(mode, read[3:], middle, **rest)
        return [torch.cat([first, second]), *last]

    for mine, theirs in zip(
        gradients(in_two, mode, given), gradients(plain, mode, given), strict=True
    ):
        assert_same(mine, theirs)


@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_weights_may_be_drawn_from_others_or_fixed(kind: str) -> None:
    """Drop-connect and posteriors give weights that are no leaves; a frozen one has no gradient."""
    given = case("LSTM", 5, kind, by_gate=False)
    kept = mask(*given["weight"].shape)

    def connected(run: Callable[..., list[Tensor]]) -> Callable[..., list[Tensor]]:
        return lambda mode, weight, **rest: run(mode, weight=weight * kept, **rest)

    _, mine = gradients(connected(step_by_step), "LSTM", given)
    _, theirs = gradients(connected(plain), "LSTM", given)
    assert_same(mine, theirs)
    _, expected = gradients(plain, "LSTM", given)
    for frozen in (["weight"], ["weight", "bias"], ["read", "bias"]):
        fixed = given | {name: given[name].detach() for name in frozen}
        found = step_by_step("LSTM", **fixed)
        loss = sum(((k + 1) * part * part.cos()).sum() for k, part in enumerate(found))
        assert isinstance(loss, Tensor)
        free = [k for k, x in enumerate(leaves(fixed)) if x.requires_grad]
        got = torch.autograd.grad(loss, [leaves(fixed)[k] for k in free])
        assert_same(list(got), [expected[k] for k in free])


@pytest.mark.parametrize("mode", GATES)
def test_without_gradients_it_gives_the_same(mode: str) -> None:
    given = case(mode, 5, "untied", by_gate=True)
    expected = plain(mode, **given)
    for off in (torch.no_grad, torch.inference_mode):
        with off():
            found = step_by_step(mode, **given)
        assert not any(part.requires_grad for part in found)
        assert_same(found, expected)


def test_second_derivatives_are_refused() -> None:
    given = case("LSTM", 3, "tied", by_gate=False)
    outputs = step_by_step("LSTM", **given)[0]
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(outputs.sum(), given["weight"], create_graph=True)

    def loss(weight: Tensor) -> Tensor:
        return step_by_step("LSTM", **given | {"weight": weight})[0].sum()

    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(loss)(given["weight"])


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[func.overloadpacket.__name__] += 1
        return func(*args, **kwargs or {})

    @property
    def count(self) -> int:
        return sum(self.seen[name] for name in ("mm", "bmm", "addmm", "baddbmm"))


@pytest.mark.parametrize("mode", GATES)
@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_the_gradient_of_the_weights_is_one_product_over_all_steps(mode: str, kind: str) -> None:
    steps = 7
    given = case(mode, steps, kind, by_gate=False)
    with Products() as forward:
        outputs = step_by_step(mode, **given)[0]
    assert forward.count == steps
    with Products() as backward:
        outputs.sum().backward()
    assert backward.count == steps + 1


@pytest.mark.parametrize("tied", [True, False])
def test_what_is_read_is_one_product_that_copies_no_weights(tied: bool) -> None:
    rnn = MaskedRNN(nn.LSTM(H, H), DropoutSettings(input=0.5, recurrent=0.5, tied=tied))
    x = torch.randn(7, B, H)
    with Products() as forward:
        y, _ = rnn(x)
    assert forward.count == 1 + len(x)
    assert not forward.seen["clone"]
    with Products() as backward:
        y.sum().backward()
    assert backward.count == 1 + len(x) + 1  # x needs no gradient


@pytest.mark.parametrize(("mode", "kind"), KINDS)
def test_compiled_steps_are_the_plain_ones_and_compiled_once(
    mode: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, but for the last stage, which makes the kernels."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(function, backend=counter, fullgraph=True, dynamic=False)

    apply = recurrence._Recurrence.apply

    class Fused:
        @staticmethod
        def apply(mode: str, fuse: bool, masks: Masks, *rest: Tensor) -> Any:
            assert not fuse  # there is no GPU
            return apply(mode, True, masks, *rest)

    monkeypatch.setattr(recurrence, "compiled", compiled)
    given = case(mode, 4, kind, by_gate=False)
    expected = gradients(plain, mode, given)
    monkeypatch.setattr(recurrence, "_Recurrence", Fused)
    for mine, theirs in zip(gradients(step_by_step, mode, given), expected, strict=True):
        assert_same(mine, theirs)
    assert counter.frame_count == 2  # a step forward and a step back


def test_a_layer_under_held_masks_has_one_gradient_in_one_piece_or_two() -> None:
    rnn = MaskedRNN(nn.GRU(5, H, 2).double(), DropoutSettings(input=0.4, recurrent=0.4, tied=False))
    for part in rnn.modules():
        if isinstance(part, Mask):
            part.mode = "held"
    x = torch.randn(7, B, 5).double().requires_grad_()
    whole, _ = rnn(x)
    first, state = rnn(x[:3])
    second, _ = rnn(x[3:], state)
    wanted = [x, *rnn.parameters()]
    assert_same(
        list(torch.autograd.grad(torch.cat([first, second]).cos().sum(), wanted)),
        list(torch.autograd.grad(whole.cos().sum(), wanted)),
    )
