"""A forecaster as a plain module."""

import pytest
import torch
from torch import nn

from bayesrnn import DropoutSettings, Forecaster, Invalid, SeriesSettings


@pytest.mark.parametrize("cell", ["gru", "lstm", "rnn"])
def test_cut_in_pieces_with_the_state_carried_it_reads_the_same(cell: str) -> None:
    model = Forecaster(3, SeriesSettings(cell=cell, hidden=5, layers=2, init=0.5)).double()
    x = torch.randn(12, 2, 3, dtype=torch.float64)
    whole, _ = model(x)
    first, state = model(x[:7])
    second, _ = model(x[7:], state)
    torch.testing.assert_close(torch.cat([first, second]), whole)
    assert whole.shape == (12, 2, 3, 2)


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
