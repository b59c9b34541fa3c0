"""Dropout: masked layers against hand-written ones, how long masks last, and when they are on."""

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bayesrnn as br
from bayesrnn.errors import Invalid
from bayesrnn.models import (
    DropoutSettings,
    LanguageModel,
    Mask,
    MaskedEmbedding,
    MaskedRNN,
    dropout,
)
from bayesrnn.recipe import from_table, read_recipe
from bayesrnn.train import loop
from bayesrnn.train.loop import Trainer, train
from small_runs import EPOCH, assert_same_end, small_recipe, small_table

CELLS: dict[str, type[nn.RNNBase]] = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}
GATES = {"lstm": 4, "gru": 3, "rnn": 1}
T, B, IN, H, LAYERS, WORDS = 6, 3, 5, 4, 2, 11
ALL = {"input": 0.4, "recurrent": 0.3, "output": 0.5}

Masks = dict[str, Tensor | None]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Mask, Tensor | None]]:
    """What every mask said, in the order they were asked."""
    seen: list[tuple[Mask, Tensor | None]] = []
    forward = Mask.forward

    def watched(self: Mask, shape: Any, like: Tensor) -> Tensor | None:
        mask = forward(self, shape, like)
        seen.append((self, mask))
        return mask

    monkeypatch.setattr(Mask, "forward", watched)
    return seen


def recurrent(cell: str, /, **settings: Any) -> MaskedRNN:
    plain = CELLS[cell](IN, H, LAYERS).double()
    return MaskedRNN(plain, DropoutSettings(**settings))


def by_hand(rnn: MaskedRNN, x: Tensor, masks: list[Masks], output: Tensor | None) -> Tensor:
    """Row by row, step by step, gate by gate, from the textbook; masks by layer and name."""
    kind = {4: "lstm", 3: "gru", 1: "rnn"}[rnn.weight_hh_l0.shape[0] // H]
    gates = GATES[kind]

    def part(mask: Tensor | None, gate: int, t: int, b: int) -> Tensor | float:
        """A row's mask at a step: [gates or steps or 1, rows or 1, units]."""
        if mask is None:
            return 1.0
        first = {gates: gate, T: t, 1: 0}[len(mask)]
        return mask[first, min(b, mask.shape[1] - 1)]

    rows = []
    for b in range(B):
        below = [x[t, b] for t in range(T)]
        for layer, mask in enumerate(masks):
            w, u, bias, bias_h = (
                getattr(rnn, f"{name}_l{layer}").chunk(gates)
                for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
            )
            if mask["connect"] is not None:
                u = (torch.cat(u) * mask["connect"]).chunk(gates)
            h, c = torch.zeros(H).double(), torch.zeros(H).double()
            above = []
            for t in range(T):
                a = [
                    w[g] @ (below[t] * part(mask["input"], g, t, b)) + bias[g] for g in range(gates)
                ]
                r = [
                    u[g] @ (h * part(mask["recurrent"], g, t, b)) + bias_h[g] for g in range(gates)
                ]
                if kind == "lstm":
                    i, f, g, o = (a[k] + r[k] for k in range(4))
                    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
                    scale: Tensor | float = 1.0
                    if mask["cell"] is not None:  # Moon et al.: the cell itself is dropped
                        scale = mask["cell"][b]
                        c = torch.where(scale > 0, c, 0.0)
                    h = torch.sigmoid(o) * torch.tanh(c) * scale
                elif kind == "gru":
                    reset, update = torch.sigmoid(a[0] + r[0]), torch.sigmoid(a[1] + r[1])
                    h = (1 - update) * torch.tanh(a[2] + reset * r[2]) + update * h
                else:
                    h = torch.tanh(a[0] + r[0])
                above.append(h)
            below = above
        rows.append(torch.stack([h * part(output, 0, t, b) for t, h in enumerate(below)]))
    return torch.stack(rows, dim=1)


def named(rnn: MaskedRNN, seen: list[tuple[Mask, Tensor | None]]) -> tuple[list[Masks], Any]:
    """The masks of one forward, by layer and name, and that of the output."""
    found = dict(seen)
    assert len(found) == len(seen)  # each was asked once
    layers = [
        {name: found[getattr(rnn, name)[k]] for name in ("input", "recurrent", "cell", "connect")}
        for k in range(LAYERS)
    ]
    return layers, found[rnn.output]


# --- masked layers are what they say ------------------------------------------------------------

KINDS: dict[str, dict[str, Any]] = {
    "naive": {"kind": "naive", "input": 0.5, "output": 0.5},
    "tied": ALL,
    "untied": ALL | {"tied": False},
    "input alone": {"input": 0.5},
    "input alone, untied": {"input": 0.5, "tied": False},
    "recurrent alone": {"recurrent": 0.5},
    "gaussian": ALL | {"noise": "gaussian"},
    "drop-connect": {"connect": 0.5},
    "drop-connect and all": ALL | {"connect": 0.5, "tied": False},
    "shared": ALL | {"shared": True},
    "shared, untied": ALL | {"shared": True, "tied": False},
    "shared, drop-connect, gaussian": ALL
    | {"shared": True, "connect": 0.3, "noise": "gaussian", "tied": False},
}
MOON = {"cell": {"cell": 0.5}, "cell and all": ALL | {"cell": 0.4, "tied": False}}
CASES = [(cell, kind) for cell in CELLS for kind in KINDS] + [("lstm", kind) for kind in MOON]


@pytest.mark.parametrize(("cell", "kind"), CASES)
def test_a_masked_run_is_the_hand_written_one_with_the_same_masks(
    cell: str, kind: str, drawn: list[tuple[Mask, Tensor | None]]
) -> None:
    rnn = recurrent(cell, **(KINDS | MOON)[kind])
    x = torch.randn(T, B, IN).double().requires_grad_()
    y, _ = rnn(x)
    masks, output = named(rnn, drawn)
    given = {name for layer in masks for name, mask in layer.items() if mask is not None}
    rates = {name: getattr(rnn.dropout, name) for name in ("input", "recurrent", "cell", "connect")}
    assert given == {name for name, rate in rates.items() if rate > 0}
    expected = by_hand(rnn, x, masks, output)
    assert torch.allclose(y, expected, rtol=1e-10, atol=1e-12)
    weights = torch.randn_like(y)
    wanted = [x, *rnn.parameters()]
    for mine, theirs in zip(
        torch.autograd.grad((y * weights).sum(), wanted),
        torch.autograd.grad((expected * weights).sum(), wanted),
        strict=True,
    ):
        assert torch.allclose(mine, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", ["tied", "untied", "shared", "cell", "drop-connect"])
def test_the_state_is_carried_on_from_cut_to_cut(kind: str) -> None:
    rnn = recurrent("lstm", **(KINDS | MOON)[kind])
    for part in rnn.modules():
        if isinstance(part, Mask):
            part.mode = "held"
    x = torch.randn(T, B, IN).double()
    whole, last = rnn(x)
    first, state = rnn(x[:2])
    rest, end = rnn(x[2:], state)
    assert torch.allclose(torch.cat([first, rest]), whole, rtol=1e-10, atol=1e-12)
    assert all(torch.allclose(a, b) for a, b in zip(last, end, strict=True))
    assert [part.shape for part in last] == [(LAYERS, B, H)] * 2


def test_a_dropped_cell_stays_empty_and_the_others_stay_bounded() -> None:
    """Scaled at every step, a kept cell with an open forget gate would double each time."""
    rnn = MaskedRNN(nn.LSTM(IN, 50).double(), DropoutSettings(cell=0.5))
    with torch.no_grad():
        rnn.bias_ih_l0.chunk(4)[1].fill_(50.0)  # never forget
    y, (_, c) = rnn(torch.randn(400, 1, IN).double())
    dropped = c == 0
    assert 5 < dropped.sum() < 45
    assert not y[:, dropped[0]].any()
    assert c.abs().max() < 400  # at most 1 a step
    assert y.abs().max() <= 2


# --- the masks themselves ------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.1, 0.35, 0.8])
def test_a_bernoulli_mask_drops_its_rate_and_has_mean_one(rate: float) -> None:
    n = 200_000
    mask = Mask(rate)((n,), torch.zeros(()))
    assert set(mask.unique().tolist()) == {0.0, torch.tensor(1.0).div(1 - rate).item()}
    sigma = math.sqrt(rate * (1 - rate) / n)
    assert abs((mask == 0).double().mean().item() - rate) < 5 * sigma
    assert abs(mask.double().mean().item() - 1) < 5 * sigma / (1 - rate)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.8])
def test_a_gaussian_mask_has_mean_one_and_a_bernoullis_variance(rate: float) -> None:
    """N(1, 1) for 0.5 (Gal: "Multiplicative Gaussian noise as approximate inference")."""
    n = 200_000
    mask = Mask(rate, "gaussian")((n,), torch.zeros(())).double()
    variance = rate / (1 - rate)
    assert abs(mask.mean().item() - 1) < 5 * math.sqrt(variance / n)
    assert abs(mask.var().item() / variance - 1) < 5 * math.sqrt(2 / n)
    bernoulli = Mask(rate)((n,), torch.zeros(())).double()
    assert bernoulli.var().item() == pytest.approx(variance, rel=0.05)
    z = (mask - 1) / math.sqrt(variance)
    assert z.pow(4).mean().item() == pytest.approx(3, rel=0.05)


def test_every_rate_reaches_its_own_mask(drawn: list[tuple[Mask, Tensor | None]]) -> None:
    rates = {"input": 0.1, "recurrent": 0.2, "output": 0.6, "cell": 0.4, "connect": 0.5}
    rnn = MaskedRNN(nn.LSTM(100, 100, 2), DropoutSettings(**rates, tied=False))
    rnn(torch.randn(2, 100, 100))
    layers, output = named(rnn, drawn)
    for masks in layers:
        for name, mask in masks.items():
            assert mask is not None
            assert (mask == 0).double().mean().item() == pytest.approx(rates[name], abs=0.05)
    assert output is not None
    assert (output == 0).double().mean().item() == pytest.approx(0.6, abs=0.05)


def test_a_mask_has_the_type_of_what_it_masks() -> None:
    for dtype in (torch.bfloat16, torch.float64):
        for noise in ("bernoulli", "gaussian"):
            mask = Mask(0.5, noise)((3, 2), torch.zeros((), dtype=dtype))
            assert mask is not None
            assert mask.dtype == dtype
            assert mask.shape == (3, 2)


def test_what_a_layer_reads_is_right_on_average() -> None:
    """A linear layer's mean over masks is the layer without them: no rescaling is needed."""
    rnn = MaskedRNN(nn.RNN(IN, H).double(), DropoutSettings(input=0.4, tied=False))
    x, weight = torch.randn(1, 4000, IN).double(), rnn.weight_ih_l0
    x = x[:, :1].expand_as(x)  # many rows of the same
    mask = rnn.input[0]((1, 4000, IN), x)
    read = rnn._read(x, mask, weight, rnn.bias_ih_l0)
    exact = rnn._read(x[:, :1], None, weight, rnn.bias_ih_l0)
    error = (read.mean(dim=-2, keepdim=True) - exact) / (read.std(dim=-2, keepdim=True) / 4000**0.5)
    assert error.abs().max() < 5


# --- how long they last, and what has its own ----------------------------------------------------


def test_variational_masks_are_the_same_at_every_step_and_differ_between_rows_and_forwards(
    drawn: list[tuple[Mask, Tensor | None]],
) -> None:
    """An LSTM never gives exactly 0 by itself: the zeros are those of the output's mask."""
    rnn = MaskedRNN(nn.LSTM(IN, 40).double(), DropoutSettings(**ALL))
    y, _ = rnn(torch.randn(T, B, IN).double())
    zeros = y == 0
    assert zeros.any()
    assert (zeros == zeros[0]).all()
    assert not (zeros[0, 0] == zeros[0, 1]).all()
    again, _ = rnn(torch.randn(T, B, IN).double())
    assert not ((again == 0) == zeros).all()
    assert all(mask is None or mask.shape[:2] == (1, B) for part, mask in drawn)


def test_naive_masks_are_fresh_at_every_step() -> None:
    settings = DropoutSettings(kind="naive", input=0.5, output=0.5)
    rnn = MaskedRNN(nn.LSTM(IN, 40).double(), settings)
    y, _ = rnn(torch.randn(T, B, IN).double())
    patterns = {tuple(row.tolist()) for row in (y == 0).flatten(0, 1)}
    assert len(patterns) == T * B


@pytest.mark.parametrize("cell", CELLS)
def test_untied_gates_have_masks_of_their_own_and_tied_ones_share(
    cell: str, drawn: list[tuple[Mask, Tensor | None]]
) -> None:
    for tied, count in ((True, 1), (False, GATES[cell])):
        drawn.clear()
        rnn = MaskedRNN(CELLS[cell](40, 40), DropoutSettings(**ALL, tied=tied))
        rnn(torch.randn(T, B, 40))
        found = dict(drawn)
        for part in (rnn.input[0], rnn.recurrent[0]):
            mask = found[part]
            assert mask is not None
            assert mask.shape == (count, B, 40)
            gates = {tuple(row.flatten().tolist()) for row in mask}
            assert len(gates) == count
        output = found[rnn.output]
        assert output is not None
        assert output.shape == (1, B, 40)  # the softmax is one reader


def test_a_shared_mask_is_the_same_for_all_rows() -> None:
    rnn = MaskedRNN(nn.GRU(IN, 40), DropoutSettings(**ALL, shared=True))
    x = torch.randn(T, 1, IN).expand(T, B, IN)
    y, _ = rnn(x)
    assert torch.allclose(y[:, :1].expand_as(y), y)
    apart, _ = MaskedRNN(nn.GRU(IN, 40), DropoutSettings(**ALL))(x)
    assert not torch.allclose(apart[:, :1].expand_as(apart), apart)


@pytest.mark.parametrize(
    "kind", ["shared", "shared, untied", "input alone", "naive", "drop-connect"]
)
def test_masks_outside_the_recurrence_take_no_loop_over_time(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_loop(*args: Any) -> None:
        raise AssertionError("looped over time")

    monkeypatch.setattr(dropout, "step_by_step", no_loop)
    recurrent("lstm", **KINDS[kind])(torch.randn(T, B, IN).double())
    with pytest.raises(AssertionError, match="looped"):
        recurrent("lstm", recurrent=0.5)(torch.randn(T, B, IN).double())


@pytest.mark.parametrize("shared", [False, True])
def test_a_dropped_word_is_dropped_everywhere_in_its_sequence(shared: bool) -> None:
    """Never "- dog and the cat"."""
    words = MaskedEmbedding(WORDS, 3, DropoutSettings(word=0.5, shared=shared))
    x = torch.arange(WORDS).repeat(3)[:, None].repeat(1, 8)  # every word three times, in each row
    found = []
    for _ in range(2):
        vectors = words(x)
        gone = (vectors == 0).all(dim=-1).view(3, WORDS, 8)
        assert (gone == gone[0]).all()
        left = ~gone.view(-1, 8)
        assert torch.allclose(vectors[left], 2 * words.weight[x[left]])
        found.append(gone[0])
    assert not torch.equal(*found)  # the next sequence has other words dropped
    rows = {tuple(row.tolist()) for row in found[0].t()}
    assert len(rows) == 1 if shared else len(rows) > 4
    assert 0.25 < torch.stack(found).double().mean() < 0.75


def test_words_are_dropped_at_their_rate() -> None:
    words = MaskedEmbedding(1000, 2, DropoutSettings(word=0.2))
    x = torch.arange(1000)[:, None].repeat(1, 50)
    gone = (words(x) == 0).all(dim=-1).double().mean().item()
    assert abs(gone - 0.2) < 5 * math.sqrt(0.2 * 0.8 / 50_000)


# --- the language model: when masks are on -------------------------------------------------------

FULL = DropoutSettings(input=0.4, recurrent=0.3, output=0.5, word=0.3)


def language(cell: str = "lstm", dropout: DropoutSettings | None = FULL) -> LanguageModel:
    torch.manual_seed(5)
    return LanguageModel(WORDS, IN, H, LAYERS, cell, init=0.8, dropout=dropout).double()  # type: ignore[arg-type]


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("kind", KINDS)
def test_without_masks_it_is_the_plain_network_with_the_same_names(cell: str, kind: str) -> None:
    plain = language(cell, None)
    masked = language(cell, DropoutSettings(**KINDS[kind])).eval()
    assert list(masked.state_dict()) == list(plain.state_dict())
    assert [n for n, p in masked.named_parameters() if not p.requires_grad] == [
        n for n, p in plain.named_parameters() if not p.requires_grad
    ]
    x = torch.randint(WORDS, (T, B))
    for name, parameter in plain.named_parameters():  # the same start
        assert torch.equal(masked.get_parameter(name), parameter)
    before = torch.get_rng_state()
    logits, state = masked(x)
    assert torch.equal(torch.get_rng_state(), before)  # nothing was drawn
    expected, carried = plain(x)
    assert torch.allclose(logits, expected, rtol=1e-12, atol=1e-14)
    mine, theirs = (s if isinstance(s, tuple) else (s,) for s in (state, carried))
    assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(mine, theirs, strict=True))
    masked.train()
    assert not torch.allclose(masked(x)[0], expected)


def test_without_rates_nothing_is_wrapped() -> None:
    model = language(dropout=DropoutSettings())
    assert type(model.rnn) is nn.LSTM
    assert type(model.embedding) is nn.Embedding


def test_tied_softmax_and_embedding_stay_tied() -> None:
    model = LanguageModel(WORDS, H, H, 1, tied=True, dropout=FULL)
    assert model.decoder.weight is model.embedding.weight
    bayesian = br.bayesianize(model, br.Gaussian(), br.Normal())
    bayesian(torch.randint(WORDS, (T, B)))[0].sum().backward()


def same(a: Tensor, b: Tensor) -> bool:
    return bool(torch.allclose(a, b, rtol=1e-10, atol=1e-12))


def bayesian(dropout: DropoutSettings = FULL) -> br.Bayesian:
    return br.bayesianize(language(dropout=dropout), br.Delta(), br.Normal())


def test_in_train_mode_every_forward_has_its_own_masks_and_at_the_mean_none() -> None:
    model, plain = bayesian(), language(dropout=None)
    x = torch.randint(WORDS, (T, B))
    one, two = model(x)[0], model(x)[0]
    assert not same(one, two)
    with model.weights("mean"):
        assert same(model(x)[0], plain(x)[0])  # in train mode too
    model.eval()
    assert same(model(x)[0], plain(x)[0])
    model.train()
    assert not same(model(x)[0], plain(x)[0])


def test_hold_keeps_the_masks_with_the_weights() -> None:
    model = bayesian()
    x = torch.randint(WORDS, (T, B))
    with model.hold():
        held = model(x)[0]
        assert same(model(x)[0], held)
        with model.weights("sample"):
            assert not same(model(x)[0], held)
        assert same(model(x)[0], held)
        model.resample()
        assert not same(model(x)[0], held)
    assert not same(model(x)[0], model(x)[0])


@pytest.mark.parametrize("training", [False, True])
def test_a_sample_holds_its_masks_over_a_whole_stream_and_the_next_has_others(
    training: bool,
) -> None:
    model = bayesian(DropoutSettings(**ALL)).train(training)
    x = torch.randint(WORDS, (3 * T, B))
    draws = []
    for _ in range(2):
        with model.weights("sample"), torch.no_grad():
            whole, _ = model(x)
            cuts, state = [], None
            for cut in x.split(T):
                logits, state = model(cut, state)
                cuts.append(logits)
            assert same(torch.cat(cuts), whole)
            draws.append(whole)
    assert not same(*draws)
    with model.weights("sample"):
        first = model(x)[0]
        model.resample()
        assert not same(model(x)[0], first)


def test_a_sample_with_other_rows_has_masks_for_them_and_comes_back_to_the_first() -> None:
    model = bayesian().eval()
    x = torch.randint(WORDS, (T, B))
    with model.weights("sample"):
        first = model(x)[0]
        assert model(x[:, :1])[0].shape == (T, 1, WORDS)
        assert same(model(x)[0], first)


def test_naive_masks_stay_fresh_under_a_sample() -> None:
    model = bayesian(DropoutSettings("naive", input=0.5, output=0.5)).eval()
    x = torch.randint(WORDS, (T, B))
    with model.weights("sample"):
        assert not same(model(x)[0], model(x)[0])


def test_words_are_never_dropped_at_test() -> None:
    model, plain = bayesian(DropoutSettings(word=0.9)), language(dropout=None)
    x = torch.randint(WORDS, (T, B))
    model.eval()
    with model.weights("sample"):
        assert same(model(x)[0], plain(x)[0])
    model.train()
    assert not same(model(x)[0], plain(x)[0])


def loader(length: int = 61) -> br.StreamLoader:
    ids = torch.randint(WORDS, (length,), generator=torch.Generator().manual_seed(3))
    return br.StreamLoader(ids.numpy(), 2, 7, device=torch.device("cpu"), name="test")


def test_evaluation_averages_the_probabilities_of_whole_streams_each_with_one_mask_set() -> None:
    """The same figure, by hand: for each draw its masks over the whole text, at once."""
    model, text = bayesian(), loader()
    batches = list(text)
    text.position = 0
    x, y = (torch.cat([getattr(batch, key) for batch in batches]) for key in "xy")
    result = br.evaluate_text(model, text, samples=3, generator=torch.Generator().manual_seed(8))
    generator = torch.Generator().manual_seed(8)
    probabilities = []
    model.eval()
    for _ in range(3):
        with model.weights("sample"), torch.no_grad():
            model.resample(generator=generator)
            log_p = model(x)[0].log_softmax(-1)
        probabilities.append(log_p.gather(-1, y[..., None]).squeeze(-1).exp())
    average = torch.stack(probabilities).mean(dim=0)
    assert result.nll == pytest.approx(-average.log().mean().item(), rel=1e-9)
    logs = torch.stack(probabilities).log().mean().item()
    assert result.expected_nll == pytest.approx(-logs, rel=1e-9)
    assert result.nll < result.expected_nll  # the draws differ
    mean = br.evaluate_text(model, text)
    assert mean.nll == pytest.approx(br.evaluate_text(bayesian(DropoutSettings()), text).nll)


def test_predictions_average_over_masks_and_tell_what_is_not_known() -> None:
    model = bayesian()
    x = torch.randint(WORDS, (T, B))
    seed = torch.Generator().manual_seed(4)
    average = br.predict(model, x, samples=5, generator=seed)
    assert (average.epistemic > 0).all()
    again = br.predict(model, x, samples=5, generator=torch.Generator().manual_seed(4))
    assert torch.equal(average.mean, again.mean)
    mean = br.predict(model, x, samples=0)
    expected = language(dropout=None)(x)[0].softmax(-1)
    assert same(mean.mean, expected)
    assert not same(average.mean, expected)


def test_masks_and_drawn_weights_go_together() -> None:
    """A Gaussian posterior under masks: both are part of the draw."""
    model = br.bayesianize(language(), br.Gaussian(0.1), br.Normal()).eval()
    x = torch.randint(WORDS, (T, B))
    with model.weights("sample"):
        one = model(x)[0]
        assert same(model(x)[0], one)
        state = torch.get_rng_state()
        model.resample()
        two = model(x)[0]
        torch.set_rng_state(state)
        model.resample()
        assert same(model(x)[0], two)
    assert not same(one, two)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_random_state_gives_the_same_masks(kind: str) -> None:
    model = language(dropout=DropoutSettings(**KINDS[kind], word=0 if kind == "naive" else 0.3))
    x = torch.randint(WORDS, (T, B))
    state = torch.get_rng_state()
    one = model(x)[0]
    other = model(x)[0]
    torch.set_rng_state(state)
    assert torch.equal(model(x)[0], one)
    assert not torch.equal(one, other)


def test_a_copy_has_masks_of_its_own() -> None:
    model = bayesian().eval()
    x = torch.randint(WORDS, (T, B))
    with model.weights("sample"):
        model.resample(generator=torch.Generator().manual_seed(1))
        first = model(x)[0]
        twin = copy.deepcopy(model)
        with twin.weights("sample"):
            twin.resample(generator=torch.Generator().manual_seed(1))
            assert same(twin(x)[0], first)
            twin.resample()
            assert not same(twin(x)[0], first)
        assert same(model(x)[0], first)


def test_a_step_can_be_compiled_whole() -> None:
    rnn = recurrent("lstm", **ALL)
    x = torch.randn(T, B, IN).double()
    compiled = torch.compile(rnn, fullgraph=True, backend="eager")
    torch.manual_seed(2)
    y, _ = compiled(x)
    torch.manual_seed(2)
    assert same(rnn(x)[0], y)


# --- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["input", "recurrent", "output", "word", "cell", "connect"])
@pytest.mark.parametrize("rate", [-0.1, 1.0, 1.5, math.nan])
def test_a_rate_outside_0_to_1_gets_one_line(key: str, rate: float) -> None:
    with pytest.raises(Invalid) as caught:
        DropoutSettings(**{key: rate})
    assert str(caught.value) == f"{key} must be 0 or above and below 1, got {rate}"


def test_all_that_is_wrong_is_named_at_once() -> None:
    with pytest.raises(Invalid) as caught:
        DropoutSettings(kind="other", noise="uniform", input=2.0)  # type: ignore[arg-type]
    assert [key for key, _ in caught.value.problems] == ["kind", "noise", "input"]
    with pytest.raises(Invalid) as caught:
        DropoutSettings("naive", recurrent=0.1, word=0.1, cell=0.1, connect=0.1, tied=False)
    keys = [key for key, _ in caught.value.problems]
    assert keys == ["recurrent", "word", "cell", "connect", "tied"]
    assert 'use kind="variational"' in str(caught.value)
    with pytest.raises(Invalid, match="cell cannot be folded"):
        DropoutSettings(cell=0.1, shared=True)
    with pytest.raises(Invalid, match="cell drops cells or keeps them"):
        DropoutSettings(cell=0.1, noise="gaussian")


def test_a_recipe_names_the_key(tmp_path: Path) -> None:
    wrong = {"input": 1.0, "recurrent": "much", "inptu": 0.1}
    with pytest.raises(Invalid) as caught:
        from_table(small_table(tmp_path, dropout=wrong))
    problems = dict(caught.value.problems)
    assert problems.keys() == {"dropout.recurrent", "dropout.inptu", "dropout.input"}
    assert "did you mean input?" in problems["dropout.inptu"]
    gru = small_table(tmp_path, dropout={"cell": 0.5}, model={"cell": "gru"})
    with pytest.raises(Invalid, match=r"^dropout\.cell masks the memory of an lstm"):
        from_table(gru)


def test_a_cell_mask_needs_an_lstm() -> None:
    with pytest.raises(Invalid) as caught:
        LanguageModel(0, cell="gru", dropout=DropoutSettings(cell=0.5))
    assert [key for key, _ in caught.value.problems] == ["vocabulary", "dropout.cell"]
    with pytest.raises(Invalid, match="an lstm"):
        recurrent("rnn", cell=0.5)


@pytest.mark.parametrize(
    "odd",
    [
        lambda: nn.LSTM(IN, H, batch_first=True),
        lambda: nn.LSTM(IN, H, bidirectional=True),
        lambda: nn.LSTM(IN, H, 2, dropout=0.5),
        lambda: nn.LSTM(IN, H, proj_size=2),
        lambda: nn.LSTM(IN, H, bias=False),
        lambda: nn.RNN(IN, H, nonlinearity="relu"),
    ],
)
def test_a_layer_that_is_not_plain_is_refused(odd: Callable[[], nn.RNNBase]) -> None:
    with pytest.raises(ValueError, match="masks need a plain nn"):
        MaskedRNN(odd(), FULL)


# --- training ------------------------------------------------------------------------------------

RUNS: dict[str, dict[str, Any]] = {
    "naive": {"dropout": {"kind": "naive", "input": 0.5, "output": 0.5}},
    "variational": {"dropout": {"input": 0.3, "recurrent": 0.2, "output": 0.3, "word": 0.2}},
    "untied gru, gaussian": {
        "model": {"cell": "gru"},
        "dropout": {"input": 0.3, "recurrent": 0.2, "tied": False, "noise": "gaussian"},
    },
    "shared": {"dropout": {"input": 0.3, "recurrent": 0.2, "shared": True, "connect": 0.2}},
    "cell": {"dropout": {"cell": 0.3}},
}
DECAY = {"posterior": {"kind": "delta"}, "prior": {"kind": "normal", "scale": 2.0}}


@pytest.mark.parametrize("kind", RUNS)
def test_a_run_that_was_stopped_ends_like_one_that_was_not(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "LOG_STEPS", 4)
    recipe = small_recipe(tmp_path, **RUNS[kind], **DECAY, train={"lr": 0.1})
    outcome = train(recipe, tmp_path / "whole", quiet=True)
    assert outcome.finished
    assert outcome.epochs[-1]["train_nll"] < outcome.epochs[0]["train_nll"]
    tick = Trainer._tick

    def stopping(self: Trainer, batch: Any) -> None:
        tick(self, batch)
        if self.step == EPOCH + 7:
            self.stopped_by = 15

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_tick", stopping)
        assert not train(recipe, tmp_path / "parts", quiet=True).finished
    assert train(recipe, tmp_path / "parts", quiet=True).finished
    assert_same_end(tmp_path / "parts", tmp_path / "whole")


def test_dropout_and_drawn_weights_train_together_and_the_mean_has_neither(tmp_path: Path) -> None:
    recipe = small_recipe(
        tmp_path,
        model={"embedding": 8, "tied": True},
        posterior={"kind": "gaussian", "scale": 0.02},
        **RUNS["naive"],
        train={"lr": 0.1, "epochs": 3},
    )
    outcome = train(recipe, tmp_path / "run", quiet=True)
    assert outcome.epochs[-1]["train_nll"] < outcome.epochs[0]["train_nll"]
    model = br.load(tmp_path / "run").train()
    means = {name: loc for name, (loc, _) in model.moments().items()}
    assert "decoder.weight" not in means  # it is the embedding's
    plain = LanguageModel(len(br.load_vocabulary(tmp_path / "run")), 8, 8, 2, tied=True)
    plain.load_state_dict(dict(model.module.state_dict()) | means, strict=False)
    x = torch.randint(10, (T, B))
    with model.weights("mean"):
        mean = model(x)[0]
    assert torch.allclose(mean, plain(x)[0], atol=1e-6)
    with model.hold():  # one draw of the weights, so that what differs are the masks
        model.resample()
        assert not torch.allclose(model(x)[0], model(x)[0])


def test_a_run_knows_its_dropout_when_it_is_loaded(tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path, **RUNS["variational"], **DECAY, train={"max_steps": 3})
    train(recipe, tmp_path / "run", quiet=True)
    assert read_recipe(tmp_path / "run" / "recipe.toml").dropout == recipe.dropout
    model = br.load(tmp_path / "run")
    x = torch.randint(10, (T, B))
    with torch.no_grad():
        mean = model(x)[0]
        with model.weights("sample"):
            assert not torch.allclose(model(x)[0], mean)
    plain = LanguageModel(len(br.load_vocabulary(tmp_path / "run")), 6, 8, 2)
    twin = br.load(tmp_path / "run" / "model", module=plain)  # the same names, so any twin will do
    assert torch.allclose(twin(x)[0], mean, atol=1e-6)
