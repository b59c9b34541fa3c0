"""Uncertainty by token against direct sums over all draws at once, on networks of a few units."""

import dataclasses
import math
import weakref
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

import bayesrnn as br
from bayesrnn.errors import Invalid, UserError
from bayesrnn.evaluate import (
    TextUncertainty,
    aupr,
    auroc,
    detect,
    entropy_gap,
    reversed_text,
    shuffled_text,
    text_uncertainty,
    unigram_entropy,
)
from bayesrnn.evaluate.reader import draw_seeds
from bayesrnn.evaluate.uncertainty import reading_cost

VOCABULARY = 7
COUNTS = (0, 1, 2, 5)
FIGURES = ("total", "aleatoric", "epistemic", "variance", "nll", "brier", "top_probabilities")

DROPOUTS = {
    "none": None,
    "variational": br.DropoutSettings(input=0.4, recurrent=0.3, output=0.4),
    "untied": br.DropoutSettings(input=0.4, recurrent=0.3, tied=False, connect=0.2),
    "naive": br.DropoutSettings(kind="naive", input=0.4, output=0.3),
}


@pytest.fixture
def text() -> NDArray[np.int32]:
    return np.random.default_rng(4).integers(0, VOCABULARY, 90).astype(np.int32)


def language_model(
    cell: str = "lstm", dropout: str = "none", posterior: br.Posterior | None = None
) -> br.Bayesian:
    torch.manual_seed(8)
    network = br.LanguageModel(
        VOCABULARY, 4, 5, layers=2, cell=cell, init=0.8, dropout=DROPOUTS[dropout]
    )
    return br.bayesianize(network.double(), posterior or br.Gaussian(0.3), br.Normal())


def loader(text: NDArray[np.int32], unroll: int = 13, streams: int = 1) -> br.StreamLoader:
    return br.StreamLoader(text, streams, unroll)


def all_at_once(model: br.Bayesian, text: NDArray[np.int32], draws: int, seed: int = 1) -> Tensor:
    """Probabilities [draws, N, V]: each draw in one forward over the whole text."""
    x = torch.from_numpy(text[:-1].astype(np.int64))[:, None]
    found = []
    model.eval()
    for own in draw_seeds(seed, draws):
        with torch.no_grad(), model.weights("sample"):
            model.resample(generator=torch.Generator().manual_seed(own))
            found.append(model(x)[0].squeeze(1).softmax(dim=-1))
    return torch.stack(found)


def entropy(p: Tensor) -> Tensor:
    return -(p * p.log()).sum(dim=-1)


@pytest.mark.parametrize("dropout", ["none", "variational", "untied"])
@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_streaming_equals_direct_sums_over_all_draws_at_once(
    cell: str, dropout: str, text: NDArray[np.int32]
) -> None:
    model = language_model(cell, dropout)
    found = text_uncertainty(model, loader(text), COUNTS, top=3)
    every = all_at_once(model, text, max(COUNTS))
    y = torch.from_numpy(text[1:].astype(np.int64))
    assert sorted(found) == list(COUNTS)
    for count in (1, 2, 5):
        draws = every[:count]  # nested: the first ones
        p, figures = draws.mean(dim=0), found[count]
        of_target = p.gather(1, y[:, None]).squeeze(1)
        one_hot = torch.nn.functional.one_hot(y, VOCABULARY)
        expected = {
            "total": entropy(p),
            "aleatoric": entropy(draws).mean(dim=0),
            "epistemic": (draws * (draws / p).log()).sum(dim=-1).mean(dim=0),  # a mean of KLs
            "variance": draws.var(dim=0, correction=0).sum(dim=-1),
            "nll": -of_target.log(),
            "brier": (p - one_hot).square().sum(dim=-1),
            "top_probabilities": p.sort(dim=-1, descending=True).values[:, :3],
        }
        assert figures.samples == count
        assert figures.targets.tolist() == y.tolist()
        assert figures.top_tokens[:, 0].tolist() == p.argmax(dim=-1).tolist()
        assert figures.correct.tolist() == (p.argmax(dim=-1) == y).tolist()
        torch.testing.assert_close(figures.max_probability, p.max(dim=-1).values)
        for name, value in expected.items():
            torch.testing.assert_close(getattr(figures, name), value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dropout", ["none", "variational"])
def test_the_mean_is_the_mean_network_and_nothing_of_it_is_epistemic(
    dropout: str, text: NDArray[np.int32]
) -> None:
    model = language_model(dropout=dropout).eval()
    found = text_uncertainty(model, loader(text), (0,))[0]
    x = torch.from_numpy(text[:-1].astype(np.int64))[:, None]
    with torch.no_grad(), model.weights("mean"):
        p = model(x)[0].squeeze(1).softmax(dim=-1)
    torch.testing.assert_close(found.total, entropy(p), rtol=1e-10, atol=1e-12)
    assert found.epistemic.max() == 0
    assert found.variance.max() == 0
    assert found.nll.mean().item() == pytest.approx(br.evaluate_text(model, loader(text)).nll)


def test_total_is_aleatoric_plus_epistemic_in_single_precision_too(
    text: NDArray[np.int32],
) -> None:
    model = language_model().float()
    for figures in text_uncertainty(model, loader(text), (0, 1, 2, 10)).values():
        torch.testing.assert_close(
            figures.total, figures.aleatoric + figures.epistemic, rtol=0, atol=1e-6
        )
        assert figures.epistemic.min() >= 0
        assert figures.total.max() <= math.log(VOCABULARY) + 1e-6


def test_parts_add_up_over_a_large_vocabulary_in_single_precision() -> None:
    network = br.LanguageModel(10_007, 6, 8, layers=1, init=0.5)
    model = br.bayesianize(network, br.Gaussian(0.1), br.Normal())
    text = np.random.default_rng(4).integers(0, 10_007, 30).astype(np.int32)
    found = text_uncertainty(model, loader(text), (1, 3))
    p = all_at_once(model, text, 3).double()
    for count, figures in found.items():
        expected = entropy(p[:count].mean(dim=0))
        torch.testing.assert_close(figures.total, expected, rtol=0, atol=1e-6)
        parts = figures.aleatoric + figures.epistemic
        torch.testing.assert_close(figures.total, parts, rtol=0, atol=1e-6)


def test_neither_distributions_nor_drawn_weights_pile_up(text: NDArray[np.int32]) -> None:
    """However many draws and cuts there are, the outputs of one are alive, and one draw's noise."""
    model = language_model()
    outputs: list[weakref.ref[Tensor]] = []
    noises: list[weakref.ref[Tensor]] = []
    most = 0

    def watch(_: object, __: object, logits: Tensor) -> None:
        nonlocal most
        outputs.append(weakref.ref(logits))
        noises.extend(weakref.ref(b.noise["eps"]) for b in model.each_block() if b.noise)
        alive = [ref for ref in (*outputs, *noises) if ref() is not None]
        most = max(most, len(alive))

    with model.module.get_submodule("decoder").register_forward_hook(watch):
        text_uncertainty(model, loader(text, 10), (1, 6))
    assert len(outputs) == 6 * 9
    assert most <= 1 + len(list(model.each_block()))


@pytest.mark.parametrize("dropout", ["none", "variational", "untied"])
def test_how_the_stream_is_cut_does_not_matter(dropout: str, text: NDArray[np.int32]) -> None:
    model = language_model(dropout=dropout)
    first, *others = (text_uncertainty(model, loader(text, cut), (0, 3)) for cut in (89, 1, 7))
    for other in others:
        for count in (0, 3):
            for name in FIGURES:
                torch.testing.assert_close(
                    getattr(first[count], name), getattr(other[count], name), rtol=1e-9, atol=1e-12
                )


@pytest.mark.parametrize("dropout", list(DROPOUTS))
def test_each_draw_reads_on_as_evaluate_does_with_its_weights_masks_and_state(
    dropout: str, text: NDArray[np.int32]
) -> None:
    """One draw, many cuts: the same generator gives the same loss to the last digits, naive
    dropout's fresh masks included."""
    model = language_model(dropout=dropout)
    own = next(draw_seeds(3, 1))
    expected = br.evaluate_text(model, loader(text, 5), 1, torch.Generator().manual_seed(own)).nll
    found = text_uncertainty(model, loader(text, 5), (1,), seed=3)[1]
    assert found.nll.mean().item() == pytest.approx(expected, rel=1e-12)


def test_a_draw_without_its_state_would_differ(text: NDArray[np.int32]) -> None:
    model = language_model()
    whole = text_uncertainty(model, loader(text), (2,))[2].total
    later = text_uncertainty(model, loader(text[40:]), (2,))[2].total
    assert (whole[40:] - later)[:3].abs().max() > 1e-4


def test_several_streams_come_back_in_the_order_of_the_text(text: NDArray[np.int32]) -> None:
    model = language_model()
    found = text_uncertainty(model, loader(text, unroll=4, streams=3), (2,))[2]
    length = (len(text) - 1) // 3
    assert found.targets.tolist() == text[1 : 3 * length + 1].tolist()
    second = text[length : 2 * length + 1]
    alone = text_uncertainty(model, loader(second), (2,))[2]
    torch.testing.assert_close(found.total[length : 2 * length], alone.total)


def test_smaller_numbers_of_draws_are_the_first_of_larger_ones(text: NDArray[np.int32]) -> None:
    model = language_model()
    few = text_uncertainty(model, loader(text), (2,))[2]
    many = text_uncertainty(model, loader(text), (6, 2, 0))[2]
    for name in FIGURES:
        assert torch.equal(getattr(few, name), getattr(many, name))


def test_the_same_seed_gives_the_same_and_another_does_not(text: NDArray[np.int32]) -> None:
    model = language_model(dropout="naive")
    one, same, other = (text_uncertainty(model, loader(text), (3,), seed)[3] for seed in (1, 1, 2))
    assert torch.equal(one.total, same.total)
    assert not torch.equal(one.total, other.total)


def test_a_point_posterior_disagrees_with_itself_only_by_dropout(text: NDArray[np.int32]) -> None:
    plain = text_uncertainty(language_model(posterior=br.Delta()), loader(text), (4,))[4]
    assert plain.epistemic.max() < 1e-12
    masked = language_model(dropout="variational", posterior=br.Delta())
    assert text_uncertainty(masked, loader(text), (4,))[4].epistemic.min() > 1e-6


def test_what_was_there_before_is_there_afterwards(text: NDArray[np.int32]) -> None:
    model, stream = language_model(dropout="variational").train(), loader(text)
    stream.position = 2
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    told: list[int] = []
    text_uncertainty(model, stream, (0, 3), advance=told.append)
    assert sum(told) == reading_cost(model, stream.targets, (0, 3)) == 4 * stream.targets
    assert model.training
    assert stream.position == 2
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("samples", "top", "message"),
    [((), 1, "samples must name"), ((3, -1), 1, "samples must be 0"), ((3,), 0, "top must be")],
)
def test_impossible_numbers_are_refused(
    samples: tuple[int, ...], top: int, message: str, text: NDArray[np.int32]
) -> None:
    with pytest.raises(Invalid, match=message):
        text_uncertainty(language_model(), loader(text), samples, top=top)


@pytest.mark.parametrize("samples", [10, (1.5,), "10"])
def test_samples_are_numbers_of_draws(samples: Any, text: NDArray[np.int32]) -> None:
    with pytest.raises(TypeError, match="samples must be numbers of draws, such as"):
        text_uncertainty(language_model(), loader(text), samples)


def test_at_most_all_words_are_the_top_ones(text: NDArray[np.int32]) -> None:
    found = text_uncertainty(language_model(), loader(text), (2,), top=50)[2]
    assert found.top_tokens.shape == (len(text) - 1, VOCABULARY)
    torch.testing.assert_close(found.top_probabilities.sum(dim=1), torch.ones(89).double())


def test_probabilities_that_underflow_still_have_a_finite_loss(text: NDArray[np.int32]) -> None:
    model = language_model(posterior=br.Delta()).float()
    with torch.no_grad():
        for block in model.each_block():
            block.loc.mul_(300)
    found = text_uncertainty(model, loader(text), (0, 2))
    for figures in found.values():
        assert figures.nll.isfinite().all()
        assert figures.nll.max() > 110  # beyond what single precision can hold a probability of
        assert figures.total.isfinite().all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dropout", list(DROPOUTS))
def test_a_gpu_reads_on_as_evaluate_does(dropout: str, text: NDArray[np.int32]) -> None:
    model = language_model(dropout=dropout).cuda()
    stream = br.StreamLoader(text, 1, 13, device="cuda")
    own = next(draw_seeds(1, 1))
    generator = torch.Generator("cuda").manual_seed(own)
    found = text_uncertainty(model, stream, (0, 1))
    mean = br.evaluate_text(model, stream).nll
    assert found[0].nll.mean().item() == pytest.approx(mean, rel=1e-6)
    if dropout != "naive":  # a recording's fresh masks come in another order
        one = br.evaluate_text(model, stream, 1, generator).nll
        assert found[1].nll.mean().item() == pytest.approx(one, rel=1e-6)


# --- other texts -----------------------------------------------------------------------------


def test_the_reverse_is_read_backwards(text: NDArray[np.int32]) -> None:
    backwards = reversed_text(text)
    assert backwards.tolist() == list(reversed(text.tolist()))
    batch = next(iter(loader(backwards, unroll=89)))
    assert batch.x.squeeze(1).tolist() == text[:0:-1].tolist()
    assert batch.y.squeeze(1).tolist() == text[-2::-1].tolist()


def test_shuffling_keeps_the_words(text: NDArray[np.int32]) -> None:
    mixed = shuffled_text(text, 2)
    assert sorted(mixed.tolist()) == sorted(text.tolist())
    assert mixed.tolist() != text.tolist()
    assert mixed.tolist() == shuffled_text(text, 2).tolist()


def test_the_gap_is_the_difference_of_two_direct_sums(text: NDArray[np.int32]) -> None:
    model = language_model()
    found, backwards = (
        text_uncertainty(model, loader(ids), (0, 4)) for ids in (text, reversed_text(text))
    )
    here, there = (
        entropy(all_at_once(model, np.array(ids), 4).mean(dim=0)).mean().item()
        for ids in (text, text[::-1])
    )
    gap = entropy_gap(found[4], backwards[4])
    assert gap.samples == 4
    assert gap.entropy == pytest.approx(here, rel=1e-10)
    assert gap.entropy_reversed == pytest.approx(there, rel=1e-10)
    assert gap.gap == pytest.approx(there - here, rel=1e-8)
    with pytest.raises(Invalid, match="the same on both texts, got 0 and 4"):
        entropy_gap(found[0], backwards[4])


def test_the_unigram_entropy_is_that_of_the_frequencies() -> None:
    ids = np.array([5, 5, 5, 2, 2, 9], dtype=np.int32)
    expected = -(3 / 6 * math.log(3 / 6) + 2 / 6 * math.log(2 / 6) + 1 / 6 * math.log(1 / 6))
    assert unigram_entropy(ids) == pytest.approx(expected)


scores = st.lists(st.integers(0, 6), min_size=1, max_size=12).map(
    lambda found: torch.tensor(found, dtype=torch.float64) / 6
)


@given(scores, scores)
def test_auroc_is_a_direct_count_of_pairs(inside: Tensor, outside: Tensor) -> None:
    above = (outside[:, None] > inside).double() + 0.5 * (outside[:, None] == inside).double()
    assert auroc(inside, outside) == pytest.approx(above.mean().item())


@given(scores, scores)
def test_aupr_is_a_direct_sum_over_thresholds(inside: Tensor, outside: Tensor) -> None:
    expected, recall = 0.0, 0.0
    for threshold in torch.cat([inside, outside]).unique().flip(0):
        hits = (outside >= threshold).sum().item()
        called = hits + (inside >= threshold).sum().item()
        expected += hits / called * (hits / len(outside) - recall)
        recall = hits / len(outside)
    assert aupr(inside, outside) == pytest.approx(expected)


def test_both_areas_equal_torchmetrics(other_metrics: ModuleType) -> None:
    inside, outside = torch.rand(400), torch.rand(300) * 1.2
    p = torch.cat([inside, outside]) / 2
    y = torch.cat([torch.zeros(400), torch.ones(300)]).long()
    assert auroc(inside, outside) == pytest.approx(
        other_metrics.binary_auroc(p, y).item(), abs=1e-6
    )
    expected = other_metrics.binary_average_precision(p, y).item()
    assert aupr(inside, outside) == pytest.approx(expected, abs=1e-6)


def figures_of(total: Tensor, epistemic: Tensor, samples: int = 2) -> TextUncertainty:
    empty = torch.zeros(len(total))
    named = {field.name: empty for field in dataclasses.fields(TextUncertainty)}
    return TextUncertainty(
        **{**named, "samples": samples, "total": total, "epistemic": epistemic, "members": 1}  # type: ignore[arg-type]
    )


def test_detection_compares_means_of_windows() -> None:
    text = figures_of(torch.tensor([0.0, 2.0, 3.0, 3.0, 100.0]), torch.tensor([0.0, 1, 1, 1, 9]))
    other = figures_of(torch.tensor([1.0, 3.0, 4.0, 4.0]), torch.tensor([0.0, 0.2, 0.0, 0.0]))
    found = detect(text, other, window=2)  # 1, 3 against 2, 4; 0.5, 1 against 0.1, 0
    assert (found.windows, found.windows_other) == (2, 2)
    assert found.entropy_auroc == 0.75
    assert found.information_auroc == 0.0
    assert found.entropy_aupr == pytest.approx((1 + 2 / 3) / 2)
    single = detect(figures_of(text.total, text.epistemic, 1), other, window=2)
    assert (single.information_auroc, single.information_aupr) == (None, None)


def test_a_text_shorter_than_a_window_is_one_line() -> None:
    short = figures_of(torch.ones(3), torch.ones(3))
    with pytest.raises(UserError, match="3 predicted tokens has no window of 50"):
        detect(short, short, 50)
    with pytest.raises(Invalid, match="window must be at least 1"):
        detect(short, short, 0)
