"""Networks for speech: published sizes, the fast two-dimensional LSTM against a plain loop over its
cells, and utterances that do not depend on those beside them."""

import math

import pytest
import torch
from torch import Tensor, nn

from bayesrnn import Gaussian, Normal, bayesianize
from bayesrnn.errors import Invalid
from bayesrnn.models import SpeechSettings, build_speech_network, speech
from bayesrnn.models.speech import DIRECTIONS, GridLSTM, HierarchicalNetwork, gather_windows

TINY = SpeechSettings("mdlstm", cells=(2, 3), units=(4,), windows=((2, 2), (2, 3)), init=0.5)
NETWORKS = {"blstm": SpeechSettings(hidden=5, layers=2, init=0.5), "mdlstm": TINY}


def test_the_hierarchical_network_has_the_published_size() -> None:
    """Graves 2011, Section 8: 139,536 weights, and 1,306 units without inputs and bias."""
    settings = SpeechSettings("mdlstm")
    network = build_speech_network(128, 40, settings)
    assert sum(p.numel() for p in network.parameters()) == 139_536
    blocks = 4 * sum(settings.cells)
    assert blocks * 5 + sum(settings.units) + 40 == 1306
    assert isinstance(network, HierarchicalNetwork)
    gates = sum(lstm.weight_hh.shape[0] * lstm.weight_hh.shape[2] for lstm in network.lstms)
    outputs = network.decoder.out_features + sum(layer.out_features for layer in network.between)
    assert gates + outputs == 1306


def naive(lstm: GridLSTM, x: Tensor) -> Tensor:
    """One utterance [H, W, inputs], one cell after another, from the equations."""
    H, W, _ = x.shape
    n = lstm.cells
    outputs = []
    for d, (time, frequency) in enumerate(DIRECTIONS):
        columns = list(reversed(range(W))) if time else list(range(W))
        rows = list(reversed(range(H))) if frequency else list(range(H))
        h: dict[tuple[int, int], Tensor] = {}
        c: dict[tuple[int, int], Tensor] = {}
        zero = x.new_zeros(n)
        p_i, p_1, p_2, p_o = lstm.peephole[d].split(n)
        for r, row in enumerate(rows):
            for k, column in enumerate(columns):
                before = (rows[r], columns[k - 1]) if k else None
                below = (rows[r - 1], columns[k]) if r else None
                h1, c1 = (h[before], c[before]) if before else (zero, zero)
                h2, c2 = (h[below], c[below]) if below else (zero, zero)
                z = x[row, column] @ lstm.weight_ih[d] + lstm.bias[d]
                z = z + h1 @ lstm.weight_hh[d, :n] + h2 @ lstm.weight_hh[d, n:]
                i, f1, f2, o, g = z.split(n)
                i = torch.sigmoid(i + p_i * c1 + p_i * c2)
                f1, f2 = torch.sigmoid(f1 + p_1 * c1), torch.sigmoid(f2 + p_2 * c2)
                state = torch.clamp(i * torch.tanh(g) + f1 * c1 + f2 * c2, -10, 10)
                c[row, column] = state
                h[row, column] = torch.sigmoid(o + p_o * state) * torch.tanh(state)
        cells = [torch.stack([h[i, j] for j in range(W)]) for i in range(H)]
        outputs.append(torch.stack(cells))
    return torch.cat(outputs, dim=-1)


@pytest.mark.parametrize(("height", "widths"), [(1, (1, 3)), (3, (5, 2)), (4, (2, 2))])
def test_diagonals_do_what_single_cells_do(height: int, widths: tuple[int, int]) -> None:
    lstm = GridLSTM(2, 3).double()
    for parameter in lstm.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(2, height, max(widths), 2, dtype=torch.double, requires_grad=True)
    found = lstm(x, torch.tensor(widths))
    expected = [naive(lstm, x[b, :, :width]) for b, width in enumerate(widths)]
    direction = torch.randn_like(found)
    inputs = [x, *lstm.parameters()]
    fast = torch.autograd.grad(
        sum((found[b, :, :w] * direction[b, :, :w]).sum() for b, w in enumerate(widths)),
        inputs,
    )
    slow = torch.autograd.grad(
        sum((e * direction[b, :, : widths[b]]).sum() for b, e in enumerate(expected)), inputs
    )
    for b, width in enumerate(widths):
        torch.testing.assert_close(found[b, :, :width], expected[b])
    for one, other in zip(fast, slow, strict=True):
        assert one.abs().max() > 0 or height == 1
        torch.testing.assert_close(one, other)


WHERE = [
    "cpu",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    ),
]


@pytest.mark.filterwarnings("ignore")  # of what torch does to compile
@pytest.mark.parametrize("device", WHERE)
def test_a_compiled_diagonal_is_the_same(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU without code generation, so that no C compiler is needed."""
    lstm = GridLSTM(2, 3)
    for parameter in lstm.parameters():
        nn.init.normal_(parameter)
    x, widths = torch.randn(2, 4, 5, 2), torch.tensor([5, 2])

    def run() -> list[Tensor]:
        found = lstm(x, widths)
        gradients = torch.autograd.grad(found.square().sum(), list(lstm.parameters()))
        return [each.cpu() for each in (found, *gradients)]

    expected = run()
    if device == "cuda":
        lstm, x, widths = lstm.cuda(), x.cuda(), widths.cuda()
    else:
        graph = torch.compile(speech._diagonal, fullgraph=True, backend="aot_eager")
        monkeypatch.setattr(speech, "_diagonal", graph)
    for one, other in zip(run(), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


def test_states_that_would_grow_without_bound_stay_finite() -> None:
    """Both forget gates open: unbounded, a state would be a sum over all paths to its cell."""
    lstm = GridLSTM(1, 2)
    for parameter in lstm.parameters():
        nn.init.constant_(parameter, 1.0)
    x = torch.ones(1, 30, 150, 1, requires_grad=True)
    found = lstm(x, torch.tensor([150]))
    assert torch.isfinite(found).all()
    gradients = torch.autograd.grad(found.sum(), [x, *lstm.parameters()])
    assert all(torch.isfinite(gradient).all() for gradient in gradients)


def test_windows_hold_what_lies_together() -> None:
    x = torch.arange(1.0, 21.0).view(1, 4, 5, 1)
    found, widths = gather_windows(x, torch.tensor([3]), (2, 2))
    assert widths.tolist() == [2]
    assert found.shape == (1, 2, 3, 4)
    assert sorted(found[0, 0, 0].tolist()) == [1.0, 2.0, 6.0, 7.0]
    assert sorted(found[0, 0, 1].tolist()) == [0.0, 0.0, 3.0, 8.0]  # behind the end: 0
    assert found[0, :, 2].abs().max() == 0


@pytest.mark.parametrize("name", NETWORKS)
def test_padding_and_neighbours_change_nothing(name: str) -> None:
    network = build_speech_network(6, 4, NETWORKS[name]).double()
    sounds = [torch.randn(frames, 6, dtype=torch.double) for frames in (11, 7, 4)]
    x = nn.utils.rnn.pad_sequence(sounds, padding_value=math.nan)
    together, lengths = network(x)
    assert torch.isfinite(together).all()
    torch.testing.assert_close(together.logsumexp(dim=-1), torch.zeros_like(together[..., 0]))
    for b, sound in enumerate(sounds):
        alone, (length,) = network(sound[:, None])
        assert length == lengths[b] == -(-len(sound) // NETWORKS[name].frames_a_step)
        torch.testing.assert_close(together[:length, b], alone[:, 0])


def test_an_utterance_without_frames_disturbs_nothing() -> None:
    """It fills up a batch: no length, no NaN, and no gradient that is not its own."""
    network = build_speech_network(6, 4, TINY).double()
    x = torch.full((9, 2, 6), math.nan, dtype=torch.double)
    x[:7, 0] = torch.randn(7, 6, dtype=torch.double)
    gradients = []
    for rows in (x, x[:7, :1]):
        log_p, lengths = network(rows)
        assert torch.isfinite(log_p).all()
        length = lengths[0]
        loss = log_p[:length, 0, 1].sum() + 0.0 * log_p.sum()
        gradients.append(torch.autograd.grad(loss, list(network.parameters())))
    assert network(x)[1].tolist() == [2, 0]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", NETWORKS)
def test_all_of_an_utterance_is_read_in_both_directions(name: str) -> None:
    network = build_speech_network(6, 4, NETWORKS[name])
    x = torch.randn(9, 1, 6, requires_grad=True)
    log_p, _ = network(x)
    for step in (0, -1):
        (gradient,) = torch.autograd.grad(log_p[step, 0, 1], x, retain_graph=True)
        assert (gradient.abs().amax(dim=(1, 2)) > 0).all()
        assert (gradient.abs().amax(dim=(0, 1)) > 0).all()


@pytest.mark.parametrize("name", NETWORKS)
def test_made_bayesian_the_mean_is_the_network_itself(name: str) -> None:
    network = build_speech_network(6, 4, NETWORKS[name])
    x = torch.randn(8, 2, 6)
    x[5:, 1] = math.nan
    with torch.no_grad():
        before = network(x)[0]
        model = bayesianize(network, Gaussian(scale=0.3), Normal("fit", "fit"))
        assert torch.equal(model.eval()(x)[0], before)
        assert not torch.equal(model.train()(x)[0], before)
    trained = sum(
        p.numel()
        for p in build_speech_network(6, 4, NETWORKS[name]).parameters()
        if p.requires_grad
    )
    assert model.weight_count == trained


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"network": "cnn"}, "network"),
        ({"units": (6,)}, "units"),
        ({"windows": ((2, 4),)}, "windows"),
        ({"windows": ((2, 4), (0, 4), (1, 4))}, "windows"),
        ({"cells": ()}, "cells"),
        ({"stack": 0}, "stack"),
        ({"init": math.inf}, "init"),
    ],
)
def test_impossible_shapes_are_refused(changes: dict[str, object], key: str) -> None:
    with pytest.raises(Invalid, match=key):
        SpeechSettings(**changes)  # type: ignore[arg-type]
