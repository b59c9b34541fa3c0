"""Perplexity against a network unrolled by hand, in one go."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

import bayesrnn as br
from bayesrnn.errors import Invalid

VOCABULARY, HIDDEN = 7, 5
SAMPLES = 6

Weights = dict[str, Tensor]


@pytest.fixture
def text() -> NDArray[np.int64]:
    return np.random.default_rng(4).integers(0, VOCABULARY, 90)


def language_model(cell: str) -> br.Bayesian:
    torch.manual_seed(8)
    network = br.LanguageModel(VOCABULARY, 4, HIDDEN, layers=2, cell=cell, init=0.8)  # type: ignore[arg-type]
    return br.bayesianize(network.double(), br.Gaussian(0.3), br.Normal())


def lstm_step(w: Weights, layer: int, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Hochreiter and Schmidhuber's, one token and no batch; the second bias is 0."""
    gates = w[f"rnn.weight_ih_l{layer}"] @ x + w[f"rnn.weight_hh_l{layer}"] @ h
    i, f, g, o = (gates + w[f"rnn.bias_ih_l{layer}"]).split(HIDDEN)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def rnn_step(w: Weights, layer: int, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    inputs = w[f"rnn.weight_ih_l{layer}"] @ x + w[f"rnn.bias_ih_l{layer}"]
    return (inputs + w[f"rnn.weight_hh_l{layer}"] @ h).tanh(), c


def unroll(w: Weights, cell: str, ids: NDArray[np.int64]) -> Tensor:
    """p(next token) at each place of one long stream, from the zero state."""
    step = {"lstm": lstm_step, "rnn": rnn_step}[cell]
    states = [(torch.zeros(HIDDEN).double(), torch.zeros(HIDDEN).double())] * 2
    found = []
    for token, following in pairwise(ids):
        x = w["embedding.weight"][token]
        for layer in range(2):
            states[layer] = step(w, layer, x, *states[layer])
            x = states[layer][0]
        logits = w["decoder.weight"] @ x + w["decoder.bias"]
        found.append((logits.exp() / logits.exp().sum())[following])
    return torch.stack(found)


def means(model: br.Bayesian) -> Weights:
    return {name: loc for name, (loc, _) in model.moments().items()}


def explicit_draws(model: br.Bayesian, seed: int, samples: int) -> list[Weights]:
    """theta = mu + sigma eps, the eps of each block in turn from one generator."""
    generator = torch.Generator().manual_seed(seed)
    draws = []
    for _ in range(samples):
        eps: Weights = {}
        for block in model.each_block():
            noise = torch.empty(block.loc.numel(), dtype=torch.float64).normal_(generator=generator)
            eps |= block.layout.split(noise)
        moments = model.moments()
        draws.append({n: loc + scale * eps[n] for n, (loc, scale) in moments.items()})  # type: ignore[operator]
    return draws


@pytest.mark.parametrize("cell", ["lstm", "rnn"])
def test_one_stream_equals_one_long_unroll_by_hand(cell: str, text: NDArray[np.int64]) -> None:
    model = language_model(cell)
    expected = -unroll(means(model), cell, text).log().mean().item()
    result = br.evaluate_text(model, br.StreamLoader(text, streams=1, unroll=13))
    assert result.nll == pytest.approx(expected, rel=1e-12)
    assert result.perplexity == pytest.approx(math.exp(expected), rel=1e-12)
    assert (result.tokens, result.samples) == (len(text) - 1, 0)
    assert result.expected_nll is None
    assert result.expected_perplexity is None


@pytest.mark.parametrize("samples", [0, 3])
def test_how_the_stream_is_cut_does_not_matter(samples: int, text: NDArray[np.int64]) -> None:
    model = language_model("lstm")
    results = [
        br.evaluate_text(
            model,
            br.StreamLoader(text, streams=1, unroll=cut),
            samples,
            torch.Generator().manual_seed(1),
        ).nll
        for cut in (1, 2, 7, 89, 500)
    ]
    assert results == pytest.approx([results[0]] * 5, rel=1e-12)


def test_draws_are_averaged_as_probabilities_each_with_its_own_weights_and_state(
    text: NDArray[np.int64],
) -> None:
    model = language_model("lstm")
    probabilities = torch.stack(
        [unroll(w, "lstm", text) for w in explicit_draws(model, 11, SAMPLES)]
    )
    result = br.evaluate_text(
        model,
        br.StreamLoader(text, streams=1, unroll=10),
        SAMPLES,
        torch.Generator().manual_seed(11),
    )
    assert result.nll == pytest.approx(-probabilities.mean(dim=0).log().mean().item(), rel=1e-12)
    assert result.expected_nll == pytest.approx(-probabilities.log().mean().item(), rel=1e-12)
    assert result.perplexity == pytest.approx(math.exp(result.nll))
    assert result.expected_perplexity == pytest.approx(math.exp(result.expected_nll or 0))
    assert result.samples == SAMPLES
    assert result.nll < (result.expected_nll or 0)  # Jensen: the draws do differ


@pytest.mark.parametrize("samples", [1, 2, 5])
def test_the_model_average_is_never_worse_than_the_average_loss(
    samples: int, text: NDArray[np.int64]
) -> None:
    loader = br.StreamLoader(text, streams=2, unroll=10)
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        result = br.evaluate_text(language_model("gru"), loader, samples, generator)
        assert result.expected_nll is not None
        assert result.nll <= result.expected_nll + 1e-12
        assert samples > 1 or result.nll == pytest.approx(result.expected_nll, rel=1e-12)


def test_several_streams_start_from_zero_each(text: NDArray[np.int64]) -> None:
    model = language_model("lstm")
    length = (len(text) - 1) // 3
    parts = [text[i * length : (i + 1) * length + 1] for i in range(3)]
    expected = -torch.cat([unroll(means(model), "lstm", part) for part in parts]).log().mean()
    result = br.evaluate_text(model, br.StreamLoader(text, streams=3, unroll=8))
    assert result.nll == pytest.approx(expected.item(), rel=1e-12)
    assert result.tokens == 3 * length


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("samples", [0, 2])
def test_the_train_mode_comes_back_even_after_an_error(
    training: bool, samples: int, text: NDArray[np.int64]
) -> None:
    model = language_model("lstm").train(training)
    loader = br.StreamLoader(text, streams=1, unroll=8)
    br.evaluate_text(model, loader, samples)
    assert model.training is training
    assert model.module.training is training

    def fails(_: int) -> None:
        assert not model.training
        raise KeyError

    with pytest.raises(KeyError):
        br.evaluate_text(model, loader, samples, advance=fails)
    assert model.training is training
    assert torch.is_grad_enabled()


def test_an_evaluation_starts_at_the_beginning_and_tells_its_progress(
    text: NDArray[np.int64],
) -> None:
    model, told = language_model("lstm"), list[int]()
    loader = br.StreamLoader(text, streams=1, unroll=40)
    first = br.evaluate_text(model, loader, advance=told.append)
    assert told == [40, 40, 9]
    loader.position = 2
    assert br.evaluate_text(model, loader) == first


def test_a_negative_number_of_draws_is_refused(text: NDArray[np.int64]) -> None:
    with pytest.raises(Invalid, match="samples must be 0"):
        br.evaluate_text(language_model("lstm"), br.StreamLoader(text, 1, 8), -1)
