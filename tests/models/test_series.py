"""A forecaster as a plain module."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bayesrnn import DropoutSettings, Forecaster, Invalid, SeriesSettings
from bayesrnn.models.layers import as_state, as_tensors, detach

SEASONS = (1, 2, 5, 30)
"""Shorter and longer than a cut, and than all that is read."""


@pytest.mark.parametrize("season", [0, *SEASONS])
@pytest.mark.parametrize("cell", ["gru", "lstm", "rnn"])
def test_cut_in_pieces_with_the_state_carried_it_reads_the_same(cell: Any, season: int) -> None:
    settings = SeriesSettings(cell=cell, hidden=5, layers=2, init=0.5, season=season)
    model = Forecaster(3, settings).double()
    x = torch.randn(12, 2, 3, dtype=torch.float64)
    whole, after = model(x)
    cuts, state = [], None
    for cut in x.split([7, 1, 4]):
        found, state = model(cut, None if state is None else detach(state))
        cuts.append(found)
    torch.testing.assert_close(torch.cat(cuts), whole)
    torch.testing.assert_close(as_tensors(state), as_tensors(after))
    assert whole.shape == (12, 2, 3, 2)
    assert all(part.shape[1] == 2 for part in as_tensors(state))


def test_without_a_season_it_is_the_network_it_was() -> None:
    """Bit for bit: the weights, where they start, the output and the state."""
    torch.manual_seed(2)
    model = Forecaster(3, SeriesSettings(hidden=5, layers=2, init=0.3, noise=0.7))
    torch.manual_seed(2)
    rnn, decoder = nn.GRU(3, 5, 2), nn.Linear(5, 6)
    for name, parameter in [*rnn.named_parameters(), *decoder.named_parameters()]:
        nn.init.zeros_(parameter) if "bias" in name else nn.init.uniform_(parameter, -0.3, 0.3)
    noise = torch.tensor(0.7, dtype=torch.float64).expm1().log().float()
    decoder.bias.data[3:] = noise
    own = {f"rnn.{name}": tensor for name, tensor in rnn.state_dict().items()}
    own |= {f"decoder.{name}": tensor for name, tensor in decoder.state_dict().items()}
    assert list(model.state_dict()) == list(own)
    assert all(torch.equal(tensor, own[name]) for name, tensor in model.state_dict().items())
    x = torch.randn(7, 2, 3)
    hidden, h = rnn(x)
    change, s = decoder(hidden).chunk(2, dim=-1)
    output, state = model(x)
    assert torch.equal(output, torch.stack([x + change, s], dim=-1))
    assert isinstance(state, Tensor)
    assert torch.equal(state, h)


def step_by_step(model: Forecaster, x: Tensor, season: int) -> Tensor:
    """What a forecaster says of every next row, one row at a time and with all rows at hand."""
    rows = {t: x[t] for t in range(len(x))}
    zero = torch.zeros_like(x[0])
    said, state = [], None
    for t in range(len(x)):
        then, ago = (rows.get(k, zero) for k in (t - season, t + 1 - season))
        hidden, state = model.rnn(torch.cat([x[t] - then, ago - x[t]], dim=-1)[None], state)
        change, s, gate = model.decoder(hidden[0]).split(x.shape[-1], dim=-1)
        g = 1 / (1 + (-gate).exp())
        said.append(torch.stack([(1 - g) * x[t] + g * ago + change, s], dim=-1))
    return torch.stack(said)


@pytest.mark.parametrize("season", SEASONS)
@pytest.mark.parametrize("cell", ["gru", "lstm", "rnn"])
def test_rows_are_read_beside_those_of_a_season_before(cell: Any, season: int) -> None:
    model = Forecaster(3, SeriesSettings(cell=cell, hidden=5, init=0.8, season=season)).double()
    x = torch.randn(12, 2, 3, dtype=torch.float64)
    output, state = model(x)
    torch.testing.assert_close(output, step_by_step(model, x, season))
    padded = torch.cat([torch.zeros(season, 2, 3, dtype=x.dtype), x])
    assert torch.equal(as_tensors(state)[-1], padded[-season:])


@pytest.mark.parametrize("season", SEASONS)
def test_a_state_of_zeros_is_none(season: int) -> None:
    """An epoch on a GPU begins with zeros in the place of a state."""
    model = Forecaster(3, SeriesSettings("lstm", hidden=5, init=0.8, season=season))
    x = torch.randn(6, 2, 3)
    output, state = model(x)
    zeros = as_state([torch.zeros_like(part) for part in as_tensors(state)])
    assert torch.equal(model(x, zeros)[0], output)


@pytest.mark.parametrize("season", SEASONS)
def test_what_comes_later_changes_nothing(season: int) -> None:
    model = Forecaster(3, SeriesSettings(hidden=5, init=0.8, season=season))
    x = torch.randn(12, 2, 3)
    before, _ = model(x)
    for t in range(11):
        other = x.clone()
        other[t + 1 :] = 100.0
        after, _ = model(other)
        assert torch.equal(after[: t + 1], before[: t + 1])
        assert not torch.equal(after[t + 1], before[t + 1])


def test_with_the_gate_open_it_is_the_seasonal_naive_forecast() -> None:
    model = Forecaster(2, SeriesSettings(hidden=4, season=3))
    nn.init.zeros_(model.decoder.weight)
    model.decoder.bias.data[4:] = 100.0
    x = torch.randn(8, 1, 2)
    mean = model(x)[0][..., 0]
    assert torch.equal(mean[2:], x[:-2])
    assert not mean[:2].any()
    model.decoder.bias.data[4:] = -100.0
    assert torch.equal(model(x)[0][..., 0], x)


def test_with_a_season_the_level_is_not_read() -> None:
    """A constant that was always there goes through to the mean, and changes nothing else."""
    model = Forecaster(3, SeriesSettings(hidden=5, init=0.8, season=4)).double()
    x, level = torch.randn(12, 2, 3, dtype=torch.float64), torch.tensor([5.0, 0.0, -9.0])
    _, state = model(x[:4])
    *own, rows = as_tensors(state)
    below, _ = model(x[4:], as_state([*own, rows]))
    above, _ = model(x[4:] + level, as_state([*own, rows + level]))
    torch.testing.assert_close(above[..., 0], below[..., 0] + level)
    torch.testing.assert_close(above[..., 1], below[..., 1])


def test_a_state_is_taken_apart_and_put_together() -> None:
    parts = [torch.full((1,), float(k), requires_grad=True) * 2 for k in range(3)]
    for count in (1, 2, 3):
        state = as_state(parts[:count])
        assert state is not None
        assert as_tensors(state) == tuple(parts[:count])
        assert not any(part.requires_grad for part in as_tensors(detach(state)))
    assert as_state([]) is None
    assert as_tensors(None) == ()


def test_it_starts_from_the_row_before_and_the_given_noise() -> None:
    model = Forecaster(3, SeriesSettings(hidden=5, noise=0.7))
    nn.init.zeros_(model.decoder.weight)
    x = torch.randn(4, 2, 3)
    output, _ = model(x)
    assert torch.equal(output[..., 0], x)
    noise = nn.functional.softplus(output[..., 1])
    torch.testing.assert_close(noise, torch.full_like(noise, 0.7))


def test_masks_are_those_of_the_other_networks() -> None:
    model = Forecaster(3, SeriesSettings(hidden=5), DropoutSettings(input=0.5, recurrent=0.5))
    x = torch.randn(4, 2, 3)
    assert not torch.equal(model(x)[0], model(x)[0])
    model.eval()
    assert torch.equal(model(x)[0], model(x)[0])
    with pytest.raises(Invalid, match=r"dropout.word drops words, of which a series has none"):
        Forecaster(3, SeriesSettings(), DropoutSettings(word=0.2))
    with pytest.raises(Invalid, match="columns must be at least 1"):
        Forecaster(0)
    with pytest.raises(Invalid, match=r"season must be 0 \(none\) or above, got -1"):
        SeriesSettings(season=-1)
