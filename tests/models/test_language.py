"""The language model: shapes, tying, start, and its Bayesian twin."""

import math

import pytest
import torch
from torch import nn

from bayesrnn.bayes import Gaussian, bayesianize
from bayesrnn.errors import Invalid
from bayesrnn.models import LanguageModel, LanguageSettings
from bayesrnn.models.layers import detach

CELLS = ["lstm", "gru", "rnn"]


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("layers", [1, 3])
def test_logits_are_time_by_stream_by_vocabulary_and_the_state_is_carried(
    cell: str, layers: int
) -> None:
    model = LanguageModel(11, embedding=4, hidden=5, layers=layers, cell=cell)
    x = torch.randint(11, (7, 2))
    logits, state = model(x)
    assert logits.shape == (7, 2, 11)
    parts = state if cell == "lstm" else (state,)
    assert isinstance(state, tuple) is (cell == "lstm")
    assert [part.shape for part in parts] == [(layers, 2, 5)] * len(parts)
    start, carried = model(x[:3])
    rest, last = model(x[3:], carried)
    assert torch.allclose(torch.cat([start, rest]), logits, atol=1e-6)
    assert torch.allclose(last[0] if cell == "lstm" else last, parts[0], atol=1e-6)


@pytest.mark.parametrize("cell", CELLS)
def test_the_layer_is_the_one_asked_for(cell: str) -> None:
    model = LanguageModel(11, embedding=4, hidden=5, layers=2, cell=cell)
    expected = {"lstm": (nn.LSTM, 4), "gru": (nn.GRU, 3), "rnn": (nn.RNN, 1)}
    kind, gates = expected[cell]
    assert type(model.rnn) is kind
    assert model.rnn.weight_ih_l0.shape == (gates * 5, 4)
    assert model.rnn.weight_ih_l1.shape == (gates * 5, 5)


@pytest.mark.parametrize("cell", CELLS)
def test_weights_start_uniform_within_init_and_biases_at_zero(cell: str) -> None:
    model = LanguageModel(200, embedding=40, hidden=40, layers=1, cell=cell, init=0.3)
    for name, parameter in model.named_parameters():
        if "bias" in name:
            assert not parameter.any(), name
            continue
        assert 0.29 < parameter.max() <= 0.3, name
        assert -0.3 <= parameter.min() < -0.29, name
        assert parameter.std().item() == pytest.approx(0.3 / math.sqrt(3), rel=0.1), name


@pytest.mark.parametrize("cell", CELLS)
def test_the_second_bias_of_each_layer_is_frozen_at_zero_and_never_drawn(cell: str) -> None:
    model = LanguageModel(11, embedding=4, hidden=5, layers=2, cell=cell)
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {"rnn.bias_hh_l0", "rnn.bias_hh_l1"}
    bayesian = bayesianize(model)
    assert not frozen & bayesian.moments().keys()
    logits, _ = bayesian(torch.randint(11, (3, 2)))
    logits.sum().backward()
    torch.optim.SGD(bayesian.parameters(), lr=1.0).step()
    assert not bayesian.module.rnn.bias_hh_l0.any()


def test_tied_the_decoder_is_the_embedding_and_counts_once() -> None:
    tied = LanguageModel(11, embedding=5, hidden=5, layers=1, tied=True)
    untied = LanguageModel(11, embedding=5, hidden=5, layers=1)
    assert tied.decoder.weight is tied.embedding.weight
    assert tied(torch.randint(11, (3, 2)))[0].shape == (3, 2, 11)
    assert bayesianize(untied).weight_count - bayesianize(tied).weight_count == 11 * 5


def test_impossible_settings_are_all_named_at_once() -> None:
    with pytest.raises(Invalid) as caught:
        LanguageSettings(cell="mlp", embedding=0, hidden=-1, layers=0, tied=True, init=0.0)
    keys = [key for key, _ in caught.value.problems]
    assert keys == ["cell", "embedding", "hidden", "layers", "init", "tied"]
    assert "'mlp'" in str(caught.value)
    assert "lstm, gru, rnn" in str(caught.value)


def test_an_impossible_model_names_its_vocabulary_with_the_rest() -> None:
    with pytest.raises(Invalid) as caught:
        LanguageModel(0, embedding=0, hidden=5)
    assert {key for key, _ in caught.value.problems} == {"vocabulary", "embedding"}


def test_settings_make_the_same_model_as_arguments() -> None:
    settings = LanguageSettings(cell="gru", embedding=6, hidden=6, layers=1, tied=True, init=0.2)
    torch.manual_seed(1)
    one = LanguageModel.from_settings(9, settings)
    torch.manual_seed(1)
    two = LanguageModel(9, cell="gru", embedding=6, hidden=6, layers=1, tied=True, init=0.2)
    assert one.state_dict().keys() == two.state_dict().keys()
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


@pytest.mark.parametrize("cell", CELLS)
def test_a_detached_state_has_the_same_numbers_and_no_history(cell: str) -> None:
    model = LanguageModel(11, embedding=4, hidden=5, layers=1, cell=cell)
    _, state = model(torch.randint(11, (3, 2)))
    cut = detach(state)
    assert type(cut) is type(state)
    before, after = (s if isinstance(s, tuple) else (s,) for s in (state, cut))
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old, new)
        assert old.requires_grad
        assert not new.requires_grad


@pytest.mark.parametrize("cell", CELLS)
def test_weights_are_drawn_once_per_sequence(cell: str) -> None:
    """A whole sequence is the plain network with one set of drawn weights; the next has another."""
    net = LanguageModel(11, embedding=4, hidden=5, layers=2, cell=cell).double()
    model = bayesianize(net, Gaussian(0.3))
    x = torch.randint(11, (9, 2))
    draws = []
    for _ in range(2):
        logits, _ = model(x)
        for block in model.blocks:
            theta = block.layout.split(
                block.loc + block.posterior.std({"rho": block.rho}) * block.noise["eps"]
            )
            for name, weight in theta.items():
                net.get_parameter(name).data.copy_(weight)
        state, steps = None, []
        for step in x:  # one time step after the other, all with the same weights
            out, state = net(step[None], state)
            steps.append(out)
        assert torch.allclose(torch.cat(steps), logits, rtol=1e-9, atol=1e-12)
        draws.append(net.embedding.weight.detach().clone())
    assert not torch.equal(*draws)
