"""The captioner: a plain module whose start is a picture."""

import pytest
import torch
from torch import nn

import bayesrnn as br
from bayesrnn.models import Captioner, CaptionerSettings
from bayesrnn.models.layers import as_tensors

WORDS = torch.tensor([[0, 3], [4, 5], [6, 7]])


def captioner(**changes: object) -> Captioner:
    settings = CaptionerSettings(**{"numbers": 6, "embedding": 4, "hidden": 5, **changes})  # type: ignore[arg-type]
    return Captioner(9, settings).double()


@pytest.mark.parametrize("cell", ["lstm", "gru", "rnn"])
@pytest.mark.parametrize("picture", ["state", "word"])
@pytest.mark.parametrize("layers", [1, 2])
def test_word_by_word_is_the_whole_caption(cell: str, picture: str, layers: int) -> None:
    model = captioner(cell=cell, picture=picture, layers=layers)
    pictures = torch.rand(2, 6, dtype=torch.float64)
    whole, last = model(WORDS, pictures=pictures)
    assert whole.shape == (3, 2, 9)
    first, state = model(WORDS[:1], pictures=pictures)
    second, state = model(WORDS[1:2], state)
    third, state = model(WORDS[2:], state)
    torch.testing.assert_close(torch.cat([first, second, third]), whole)
    for one, other in zip(as_tensors(state), as_tensors(last), strict=True):
        torch.testing.assert_close(one, other)


def test_the_picture_is_the_state_that_is_started_from() -> None:
    """Fortunato 2017, Section 6.2: against the same by hand."""
    model = captioner(norm=3.0)
    pictures = torch.rand(2, 6, dtype=torch.float64)
    found, _ = model(WORDS, pictures=pictures)
    unit = 3 * pictures / pictures.square().sum(dim=1, keepdim=True).sqrt()
    start = unit @ model.picture.weight.T + model.picture.bias
    h, c = start[:, :5].tanh(), start[:, 5:]
    hidden, _ = model.rnn(model.embedding(WORDS), (h[None].contiguous(), c[None].contiguous()))
    torch.testing.assert_close(found, model.decoder(hidden))


def test_the_picture_as_first_word_is_read_before_the_others() -> None:
    model = captioner(picture="word", norm=0.0)
    pictures = torch.rand(2, 6, dtype=torch.float64)
    found, _ = model(WORDS, pictures=pictures)
    words = torch.cat([model.picture(pictures)[None], model.embedding(WORDS)])
    hidden, _ = model.rnn(words)
    torch.testing.assert_close(found, model.decoder(hidden)[1:])


def test_weights_start_as_stated() -> None:
    model = Captioner(9, CaptionerSettings(numbers=6, embedding=4, hidden=5, init=0.3))
    bias = model.rnn.bias_ih_l0.detach()
    assert torch.equal(bias[5:10], torch.ones(5))
    assert torch.equal(bias[:5], torch.zeros(5))
    assert not model.rnn.bias_hh_l0.requires_grad
    assert 0.2 < model.picture.weight.abs().max() <= 0.3


def test_dropout_masks_what_the_picture_says_too() -> None:
    dropout = br.DropoutSettings("naive", input=0.5, output=0.5)
    model = Captioner(9, CaptionerSettings(numbers=6, embedding=4, hidden=5), dropout)
    names = [name for name, _ in model.named_parameters()]
    plain = Captioner(9, CaptionerSettings(numbers=6, embedding=4, hidden=5))
    assert set(names) == {name for name, _ in plain.named_parameters()}
    torch.manual_seed(1)
    pictures = torch.rand(2, 6)
    kept = model._see(pictures, torch.float32)
    again = model._see(pictures, torch.float32)
    assert not torch.equal(kept, again)
    model.eval()
    assert torch.equal(model(WORDS, pictures=pictures)[0], model(WORDS, pictures=pictures)[0])


def test_half_precision_vectors_are_widened() -> None:
    model = Captioner(9, CaptionerSettings(numbers=6, embedding=4, hidden=5))
    pictures = torch.rand(2, 6).half()
    found, _ = model(WORDS, pictures=pictures)
    torch.testing.assert_close(found, model(WORDS, pictures=pictures.float())[0])


def test_it_is_a_plain_module_that_becomes_bayesian() -> None:
    net = Captioner(9, CaptionerSettings(numbers=6, embedding=4, hidden=5))
    model = br.bayesianize(net, br.Gaussian(0.1), br.ScaleMixture())
    pictures = torch.rand(2, 6)
    one, other = (model(WORDS, pictures=pictures)[0] for _ in range(2))
    assert not torch.equal(one, other)
    assert isinstance(net, nn.Module)
    with pytest.raises(br.Invalid, match=r"picture must be one of state, word, got 'x'"):
        CaptionerSettings(picture="x")  # type: ignore[arg-type]
