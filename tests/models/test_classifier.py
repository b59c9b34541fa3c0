"""The networks for images and reviews, against the same written out by hand."""

import math

import pytest
import torch
from torch import nn

from bayesrnn import DropoutSettings, Mlp, MlpSettings, ReviewModel, ReviewSettings
from bayesrnn.models.layers import Cell

CELLS: list[Cell] = ["lstm", "gru", "rnn"]


def test_the_mlp_is_linear_rectified_linear_rectified_linear() -> None:
    model = Mlp(MlpSettings(inputs=6, hidden=5, layers=2, classes=3))
    named = dict(model.named_parameters())
    assert {name: tuple(p.shape) for name, p in named.items() if "weight" in name} == {
        "hidden.0.weight": (5, 6),
        "hidden.1.weight": (5, 5),
        "decoder.weight": (3, 5),
    }
    assert all((p == 0).all() for name, p in named.items() if "bias" in name)
    with torch.no_grad():
        for p in named.values():
            p.normal_()
    x = torch.randn(4, 6)
    hidden = x
    for layer in ("hidden.0", "hidden.1"):
        hidden = (hidden @ named[f"{layer}.weight"].T + named[f"{layer}.bias"]).clamp_min(0)
    expected = hidden @ named["decoder.weight"].T + named["decoder.bias"]
    assert torch.allclose(model(x), expected, atol=1e-6)


def test_the_default_is_the_published_shape() -> None:
    sizes = [p.numel() for p in Mlp(MlpSettings()).parameters()]
    assert sum(sizes) == 784 * 800 + 800 + 800 * 800 + 800 + 800 * 10 + 10


@pytest.mark.parametrize("classes", [0, 4])
@pytest.mark.parametrize("cell", CELLS)
def test_padding_changes_nothing(cell: Cell, classes: int) -> None:
    """A review's output is that of the review by itself, and so are the gradients."""
    settings = ReviewSettings(cell, embedding=4, hidden=6, layers=2, init=0.5)
    model = ReviewModel(11, settings, classes)
    reviews = [torch.randint(11, (length,)) for length in (7, 1, 4, 10)]
    padded = torch.full((4, 10), -1)
    for row, review in zip(padded, reviews, strict=True):
        row[: len(review)] = review
    alone = torch.cat([model(review[None]) for review in reviews])
    assert torch.allclose(model(padded), alone, atol=1e-6)
    parameters = [p for p in model.parameters() if p.requires_grad]
    found, expected = (
        torch.autograd.grad(output.square().sum(), parameters) for output in (model(padded), alone)
    )
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("cell", CELLS)
def test_padding_changes_nothing_under_masks_either(cell: Cell) -> None:
    """With the same masks a shorter review gives the same, however long the others are."""
    dropout = DropoutSettings(input=0.5, recurrent=0.25, output=0.5, word=0.25)
    settings = ReviewSettings(cell, embedding=4, hidden=6, init=0.5)
    model = ReviewModel(11, settings, dropout=dropout)
    short = torch.randint(11, (3, 5))
    padded = torch.cat([short, torch.full((3, 4), -1)], dim=1)
    outputs = []
    for x in (short, padded):
        torch.manual_seed(1)
        outputs.append(model(x))
    assert torch.allclose(outputs[0], outputs[1], atol=1e-6)
    assert not torch.allclose(model(short), outputs[0])
    assert not torch.allclose(model.eval()(short), outputs[0])


def test_the_review_is_read_off_at_its_last_word() -> None:
    model = ReviewModel(5, ReviewSettings("gru", embedding=3, hidden=4))
    x = torch.tensor([[1, 2, 3]])
    states, last = model.rnn(model.embedding(x.T))
    assert torch.allclose(model(x)[:, :1], model.decoder(last[0]))
    assert torch.equal(states[-1], last[0])


def test_an_untrained_network_says_half_with_the_noise_it_was_given() -> None:
    model = ReviewModel(5, ReviewSettings(embedding=3, hidden=4, init=1e-6, noise=0.3))
    mean, s = model(torch.tensor([[1, 2], [3, -1]])).unbind(dim=1)
    assert torch.allclose(mean, torch.tensor(0.5), atol=1e-4)
    assert torch.allclose(nn.functional.softplus(s), torch.tensor(0.3))
    classifier = ReviewModel(5, ReviewSettings(embedding=3, hidden=4), classes=3)
    assert classifier(torch.tensor([[1, 2], [3, -1]])).shape == (2, 3)


def test_forget_gates_start_open_and_the_second_bias_is_frozen() -> None:
    rnn = ReviewModel(5, ReviewSettings("lstm", embedding=3, hidden=2)).rnn
    bias = rnn.get_parameter("bias_ih_l0")
    assert bias.tolist() == [0, 0, 1, 1, 0, 0, 0, 0]
    second = rnn.get_parameter("bias_hh_l0")
    assert not second.requires_grad
    assert (second == 0).all()


def test_impossible_shapes_are_refused_all_at_once() -> None:
    with pytest.raises(ValueError, match=r"hidden must be at least 1, got 0; .*classes must"):
        MlpSettings(hidden=0, classes=1)
    with pytest.raises(ValueError, match=r"cell must be one of .*; .*noise must be a number above"):
        ReviewSettings("lstn", noise=math.inf)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="classes must be 0 or at least 2, got 1"):
        ReviewModel(5, classes=1)


def test_an_mlp_drops_pixels_and_units_in_training_only() -> None:
    settings = MlpSettings(inputs=400, hidden=300, layers=2, classes=3)
    torch.manual_seed(1)
    model = Mlp(settings, DropoutSettings(kind="naive", input=0.25, output=0.5))
    x = torch.ones(50, 400)
    seen: list[torch.Tensor] = []
    for layer in (*model.hidden, model.decoder):
        layer.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    model(x)
    pixels, first, second = seen
    assert pixels.unique().tolist() == pytest.approx([0.0, 1 / 0.75])
    assert (pixels == 0).float().mean().item() == pytest.approx(0.25, abs=0.02)
    assert not torch.equal(pixels[0], pixels[1])  # each image has its own
    hidden = model.hidden[0](pixels).relu()
    kept = first != 0
    assert torch.allclose(first[kept], 2 * hidden[kept])
    assert (~kept & (hidden > 0)).sum() / (hidden > 0).sum() == pytest.approx(0.5, abs=0.03)
    assert (second == 0).float().mean() > 0.5
    seen.clear()
    model.eval()(x)
    assert torch.equal(seen[0], x)


def test_dropout_that_needs_recurrence_is_refused() -> None:
    with pytest.raises(ValueError, match="has input, output and noise only"):
        Mlp(MlpSettings(), DropoutSettings(recurrent=0.5))
