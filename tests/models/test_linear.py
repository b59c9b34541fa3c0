"""Products on a CPU by oneDNN: against float64, and never where something else watches."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from bayesrnn.bayes import Gaussian, Normal, bayesianize
from bayesrnn.engine import IS_X86
from bayesrnn.models.linear import (
    FEWEST_ROWS,
    HAS_ONEDNN,
    SMALLEST,
    Linear,
    _suits_onednn,
    is_linear,
    linear,
)

ROWS, INSIDE, OUT = 64, 300, 500
assert ROWS * INSIDE * OUT >= SMALLEST

needs_onednn = pytest.mark.skipif(
    not (HAS_ONEDNN and IS_X86),
    reason="torch was built without oneDNN, or this is no x86 processor",
)


def tensors(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    x, weight, bias = torch.randn(4, ROWS // 4, INSIDE), torch.randn(OUT, INSIDE), torch.randn(OUT)
    return tuple(t.to(dtype).requires_grad_() for t in (x, weight, bias))  # type: ignore[return-value]


def close(found: Tensor, truth: Tensor) -> None:
    torch.testing.assert_close(found.double(), truth, rtol=0, atol=3e-6 * truth.abs().max().item())


@needs_onednn
def test_value_and_gradients_are_those_of_float64() -> None:
    x, weight, bias = tensors()
    assert _suits_onednn(x, weight, None)
    y, truth = linear(x, weight, bias), F.linear(*tensors(torch.float64))
    assert y.shape == truth.shape == (4, ROWS // 4, OUT)
    assert "ByOneDNN" in type(y.grad_fn.next_functions[0][0]).__name__  # type: ignore[union-attr]
    close(y, truth)
    along = torch.randn_like(y)
    found = torch.autograd.grad(y, (x, weight, bias), along)
    exact = tensors(torch.float64)
    wanted = torch.autograd.grad(F.linear(*exact), exact, along.double())
    for ours, true in zip(found, wanted, strict=True):
        close(ours, true)


@needs_onednn
def test_second_derivatives() -> None:
    """Those of |d loss / d x|^2 with respect to the weight, as a gradient penalty has them."""

    def penalty(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        loss = linear(x, weight, bias).tanh().sum()
        (d_x,) = torch.autograd.grad(loss, x, create_graph=True)
        (found,) = torch.autograd.grad(d_x.square().sum(), weight)
        return found

    small = tuple((0.05 * t).detach().requires_grad_() for t in tensors())
    exact = tuple((0.05 * t).detach().requires_grad_() for t in tensors(torch.float64))
    close(penalty(*small), penalty(*exact))


@needs_onednn
def test_only_what_is_asked_for() -> None:
    x, weight, _ = tensors()
    y = linear(x.detach(), weight)
    y.sum().backward()
    assert x.grad is None
    assert weight.grad is not None
    with torch.no_grad():
        assert not linear(x, weight).requires_grad


def test_small_products_and_few_rows_are_torchs_own() -> None:
    x, weight, bias = tensors()
    assert not _suits_onednn(x[0, : FEWEST_ROWS - 1].detach(), weight.detach().repeat(20, 1), None)
    few = x[0, :3]
    assert torch.equal(linear(few, weight, bias), F.linear(few, weight, bias))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions_are_torchs_own(dtype: torch.dtype) -> None:
    given = tensors(dtype)
    assert torch.equal(linear(*given), F.linear(*given))


def test_transforms_autocast_and_switches_are_torchs_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, weight, bias = (t.detach() for t in tensors())
    found = torch.func.vmap(lambda row: linear(row, weight, bias))(x)
    assert torch.equal(found, torch.func.vmap(lambda row: F.linear(row, weight, bias))(x))
    gradient = torch.func.grad(lambda w: linear(x, w, bias).square().sum())(weight)
    assert gradient.shape == weight.shape
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(x, weight, bias).dtype == torch.bfloat16
    meta = linear(x.to("meta"), weight.to("meta"), bias.to("meta"))
    assert meta.shape == (4, ROWS // 4, OUT)
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    assert not _suits_onednn(x, weight, None)


def test_a_layer_is_known_and_a_class_made_from_it_is_not() -> None:
    class Other(nn.Linear):
        pass

    assert is_linear(Linear(2, 3))
    assert is_linear(nn.Linear(2, 3))
    assert not is_linear(Other(2, 3))
    assert not is_linear(nn.Embedding(2, 3))


def test_a_zero_scale_equals_the_plain_layer_bit_for_bit_above_the_threshold() -> None:
    torch.manual_seed(1)
    net = Linear(INSIDE, OUT)
    x = torch.randn(ROWS, INSIDE)
    plain = net(x)
    model = bayesianize(net, Gaussian(0.0, learn_scale=False), Normal(0.0, 1.0))
    with model.weights("sample"):
        assert torch.equal(model(x), plain)


BIASES = {
    "a column": lambda: torch.randn(OUT, 4)[:, 1],
    "one number all over": lambda: torch.randn(1).expand(OUT),
    "every second": lambda: torch.randn(2 * OUT)[::2],
    "one number": lambda: torch.randn(1),
    "no axis": lambda: torch.randn(()),
}


@pytest.mark.parametrize("bias", BIASES.values(), ids=BIASES.keys())
def test_a_bias_may_lie_in_any_way(bias: Callable[[], Tensor]) -> None:
    x, weight, _ = tensors()
    given = bias()
    exact = F.linear(x.double(), weight.double(), given.double())
    close(linear(x, weight, given), exact.detach())


def test_a_bias_from_elsewhere_is_refused_as_by_torch() -> None:
    x, weight, bias = (t.detach() for t in tensors())
    with pytest.raises(RuntimeError):
        linear(x, weight, bias.to("meta"))


@needs_onednn
def test_only_what_the_gradients_need_is_kept() -> None:
    x, weight, bias = tensors()
    frozen = linear(x, weight.detach(), bias)
    kept = frozen.grad_fn.next_functions[0][0].saved_tensors  # type: ignore[union-attr]
    assert [t is None for t in kept] == [True, False]
    with torch.no_grad():
        x.add_(1.0)  # not needed any more, so this is allowed
    frozen.sum().backward()
    assert x.grad is not None


@needs_onednn
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # in torch
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
def test_whatever_follows_the_operations_sees_torchs_own() -> None:
    x, weight, bias = (t.detach() for t in tensors())
    layer = Linear(INSIDE, OUT)
    with FlopCounterMode(display=False) as counter:
        layer(x)
    assert counter.get_total_flops() == 2 * ROWS * INSIDE * OUT
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        tangent = forward_ad.unpack_dual(linear(dual, weight, bias)).tangent
    assert tangent is not None
    close(tangent, torch.ones_like(x).double() @ weight.double().T)
    traced = torch.fx.symbolic_trace(layer)
    close(traced(x), F.linear(x.double(), layer.weight.double(), layer.bias.double()).detach())
    assert linear(x[:1, 0], weight.to_sparse_csr()).shape == (1, OUT)
