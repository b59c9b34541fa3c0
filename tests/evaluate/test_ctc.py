"""CTC against enumeration: every path of a case that is small enough."""

import itertools
from collections import defaultdict
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from bayesrnn.evaluate import ctc
from bayesrnn.evaluate.ctc import (
    CtcOnDevice,
    beam_search,
    confidences,
    ctc_nll,
    edit_distance,
    greedy,
    prefix_search,
)

SEQUENCES = st.lists(st.integers(1, 3), max_size=6)


def merge(path: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(label for label, _ in itertools.groupby(path) if label != 0)


def enumerate_labellings(log_p: NDArray[np.float64]) -> dict[tuple[int, ...], float]:
    """The probability of every labelling, from all its paths."""
    steps, labels = log_p.shape
    found: dict[tuple[int, ...], float] = defaultdict(float)
    for path in itertools.product(range(labels), repeat=steps):
        found[merge(path)] += float(np.exp(log_p[np.arange(steps), path].sum()))
    return found


def random_outputs(seed: int, steps: int, labels: int, sharp: float) -> NDArray[np.float64]:
    z = np.random.default_rng(seed).normal(size=(steps, labels)) * sharp
    return z - np.log(np.exp(z).sum(axis=1, keepdims=True))


CASES = [
    random_outputs(seed, steps, labels, sharp)
    for seed in range(8)
    for steps, labels in ((1, 3), (4, 2), (5, 4), (6, 3))
    for sharp in (0.3, 2.0)
]


@pytest.mark.parametrize("log_p", CASES)
def test_prefix_search_finds_the_most_probable_labelling(log_p: NDArray[np.float64]) -> None:
    truth = enumerate_labellings(log_p)
    assert sum(truth.values()) == pytest.approx(1)
    found = tuple(prefix_search(log_p, threshold=2.0))
    assert truth[found] == pytest.approx(max(truth.values()), rel=1e-12)


@pytest.mark.parametrize("log_p", CASES)
def test_a_wide_beam_finds_it_too(log_p: NDArray[np.float64]) -> None:
    truth = enumerate_labellings(log_p)
    assert truth[tuple(beam_search(log_p, width=500))] == pytest.approx(max(truth.values()))


def test_it_can_be_another_than_that_of_the_best_path() -> None:
    differ = [greedy(log_p) != prefix_search(log_p, threshold=2.0) for log_p in CASES]
    assert any(differ)
    assert not all(differ)


@pytest.mark.parametrize("decode", [greedy, prefix_search, beam_search])
def test_sections_between_blanks_are_read_one_by_one(
    decode: Callable[[NDArray[np.float64]], list[int]],
) -> None:
    sure = np.full((7, 3), 1e-4)
    for step, label in enumerate([1, 1, 0, 1, 2, 0, 0]):
        sure[step, label] = 0.9998
    assert decode(np.log(sure)) == [1, 1, 2]


def test_a_network_that_knows_nothing_is_read_in_bounded_time() -> None:
    """It is then what a beam search finds, at least."""
    log_p = random_outputs(1, 60, 20, sharp=0.5)
    found = prefix_search(log_p)

    def p(labels: list[int]) -> float:
        length = torch.tensor([len(log_p)])
        return -ctc_nll(torch.from_numpy(log_p)[:, None], length, torch.tensor([labels])).item()

    assert p(found) >= p(beam_search(log_p)) - 1e-9
    assert len(found) > 3


def test_certain_outputs_may_have_a_probability_of_zero() -> None:
    with np.errstate(divide="ignore"):
        log_p = np.log(np.array([[0.0, 1.0], [1.0, 0.0], [0.0, 1.0]]))
    assert greedy(log_p) == prefix_search(log_p) == beam_search(log_p) == [1, 1]


def test_the_loss_is_that_of_the_labelling() -> None:
    log_p = CASES[5]
    truth = enumerate_labellings(log_p)
    y = torch.tensor([[1, 2, -1], [1, -1, -1], [-1, -1, -1], [2, 1, 3]])
    wide = torch.from_numpy(log_p)[:, None].expand(-1, 4, -1)
    losses = ctc_nll(wide, torch.full((4,), len(log_p)), y)
    expected = [-np.log(truth[key]) for key in ((1, 2), (1,), (), (2, 1, 3))]
    assert losses.tolist() == pytest.approx(expected)


LABELS = 5


def case(seed: int, rows: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, lengths and labels: many repeats, some labellings empty or as long as they can be,
    and the last row without frames and labels."""
    dice = np.random.default_rng(seed)
    labellings: list[list[int]] = [
        dice.integers(1, 2 + dice.integers(1, LABELS - 1), dice.integers(0, 6)).tolist()
        for _ in range(rows - 1)
    ]
    spare = dice.choice([0, 0, 1, 4], rows - 1).tolist()
    needed = [len(y) + sum(a == b for a, b in itertools.pairwise(y)) for y in labellings]
    lengths = [max(1, n + more) for n, more in zip(needed, spare, strict=True)] + [0]
    steps, width = max(lengths) + int(dice.integers(3)), max(map(len, labellings)) + 1
    y = torch.tensor([each + [-1] * (width - len(each)) for each in [*labellings, []]])
    logits = torch.from_numpy(dice.normal(size=(steps, rows, LABELS)) * dice.choice([0.3, 3, 30]))
    return logits, torch.tensor(lengths), y


def losses_and_gradient(
    loss: Callable[..., Tensor], logits: Tensor, lengths: Tensor, y: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradient of a weighted sum, by the logits: torch's own says nothing right by log_p."""
    logits = logits.clone().requires_grad_()
    losses = loss(logits.log_softmax(dim=-1), lengths, y)
    weights = torch.linspace(-1, 2, len(losses)).to(losses)
    (gradient,) = torch.autograd.grad((losses * weights).sum(), logits)
    return losses.detach(), gradient


@pytest.mark.parametrize("seed", range(60))
def test_on_the_device_loss_and_gradient_are_those_of_torch(seed: int) -> None:
    given = case(seed)
    found, gradient = losses_and_gradient(CtcOnDevice.apply, *given)
    expected, by_torch = losses_and_gradient(ctc_nll, *given)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(gradient, by_torch, rtol=1e-9, atol=1e-10)
    assert found[-1] == 0
    assert gradient[:, -1].abs().max() == 0
    for b, length in enumerate(given[1].tolist()):
        assert gradient[length:, b].abs().sum() == 0
    single = losses_and_gradient(CtcOnDevice.apply, given[0].float(), *given[1:])
    torch.testing.assert_close(single[0].double(), found, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(single[1].double(), gradient, rtol=1e-4, atol=1e-5)


def test_on_the_device_a_long_utterance_is_that_of_torch_as_well() -> None:
    torch.manual_seed(1)
    logits = 4 * torch.randn(160, 3, 40, dtype=torch.double)
    y = torch.randint(1, 40, (3, 46))
    y[1, 20:] = -1
    given = logits, torch.tensor([160, 51, 102]), y
    found, expected = (losses_and_gradient(f, *given) for f in (CtcOnDevice.apply, ctc_nll))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_on_the_device_the_gradient_is_that_of_differences() -> None:
    logits, lengths, y = case(3)
    log_p = logits.log_softmax(dim=-1).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: CtcOnDevice.apply(x, lengths, y), log_p)


def test_on_the_device_probabilities_of_zero_give_no_nan() -> None:
    """Paths that cannot be, and labellings that cannot: infinite, as torch says."""
    sure = torch.zeros(4, 4, 3, dtype=torch.double)
    sure[:, :, 0] = 1.0
    sure[1, :2, 0], sure[1, :2, 1] = 0.5, 0.5
    log_p = sure.log().requires_grad_()
    y = torch.tensor([[1, -1], [-1, -1], [1, 1], [2, -1]])  # the last two have no path
    lengths = torch.tensor([4, 4, 2, 4])
    losses = CtcOnDevice.apply(log_p, lengths, y)
    torch.testing.assert_close(losses, ctc_nll(log_p, lengths, y))
    assert losses.isfinite().tolist() == [True, True, False, False]
    (gradient,) = torch.autograd.grad(losses.sum(), log_p)
    expected = torch.zeros_like(sure)
    expected[:, :2, 0] = -1.0
    expected[1, 0, :2] = torch.tensor([0.0, -1.0])
    torch.testing.assert_close(gradient, expected)


@pytest.mark.filterwarnings("ignore")  # of what torch does to compile
def test_a_compiled_step_of_it_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without code generation, so that no C compiler is needed."""
    given = case(5)
    expected = losses_and_gradient(CtcOnDevice.apply, *given)
    graph = torch.compile(ctc._arrive, fullgraph=True, backend="aot_eager_decomp_partition")
    monkeypatch.setattr(ctc, "_arrive", graph)
    found = losses_and_gradient(CtcOnDevice.apply, *given)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_in_training_takes_the_loss_that_can_be_recorded() -> None:
    given = case(7)
    expected = losses_and_gradient(ctc_nll, *given)
    found = losses_and_gradient(ctc_nll, *(each.cuda() for each in given))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-9, atol=1e-10)


def test_confidence_is_the_probability_given_the_other_labels() -> None:
    first, second = (enumerate_labellings(log_p) for log_p in (CASES[5], CASES[13]))
    found = confidences([torch.from_numpy(CASES[5]), torch.from_numpy(CASES[13])], [2, 1])

    def p(*labelling: int) -> float:
        return first[labelling] + second[labelling]

    at_first = p(2, 1) / sum(p(*((k, 1) if k else (1,))) for k in range(4))
    at_second = p(2, 1) / sum(p(*((2, k) if k else (2,))) for k in range(4))
    assert found == pytest.approx([at_first, at_second])
    assert confidences([torch.from_numpy(CASES[5])], []) == []


@given(SEQUENCES, SEQUENCES, SEQUENCES)
def test_edit_distance_is_a_distance(a: list[int], b: list[int], c: list[int]) -> None:
    assert edit_distance(a, a) == 0
    assert (edit_distance(a, b) == 0) == (a == b)
    assert edit_distance(a, b) == edit_distance(b, a)
    assert edit_distance(a, c) <= edit_distance(a, b) + edit_distance(b, c)
    assert abs(len(a) - len(b)) <= edit_distance(a, b) <= max(len(a), len(b))


@settings(max_examples=15)
@given(st.lists(st.integers(1, 2), max_size=4), st.lists(st.integers(1, 2), max_size=4))
def test_edit_distance_is_the_fewest_edits(a: list[int], b: list[int]) -> None:
    """By a search over all edits, breadth first."""
    reached, distance = {tuple(a)}, 0
    while tuple(b) not in reached:
        reached |= {each for one in reached for each in _edited(one)}
        distance += 1
    assert edit_distance(a, b) == distance


def _edited(one: tuple[int, ...]) -> set[tuple[int, ...]]:
    shorter = {one[:i] + one[i + 1 :] for i in range(len(one))}
    other = {(*one[:i], k, *one[i + 1 :]) for i in range(len(one)) for k in (1, 2)}
    longer = {(*one[:i], k, *one[i:]) for i in range(len(one) + 1) for k in (1, 2)}
    return shorter | other | (longer if len(one) < 5 else set())


def test_a_long_utterance_in_float32_keeps_its_digits() -> None:
    torch.manual_seed(1)
    logits, lengths = torch.randn(800, 2, 62), torch.tensor([800, 700])
    y = torch.randint(1, 62, (2, 60))
    exact = losses_and_gradient(ctc_nll, logits.double(), lengths, y)
    found = losses_and_gradient(ctc_nll, logits, lengths, y)
    assert found[0].dtype == torch.float32
    torch.testing.assert_close(found[0].double(), exact[0], rtol=1e-6, atol=0)
    torch.testing.assert_close(found[1].double(), exact[1], rtol=0, atol=1e-5)
