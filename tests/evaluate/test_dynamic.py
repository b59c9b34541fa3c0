"""Dynamic evaluation against a plain network, torch.optim.SGD and an explicit loop."""

import copy
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import bayesrnn as br
from bayesrnn.errors import Invalid
from bayesrnn.evaluate import perplexity
from bayesrnn.evaluate.dynamic import LOOK_SEGMENTS, Diverged, Learner

VOCABULARY, EMBEDDING, HIDDEN, LAYERS = 7, 4, 5, 2
SEGMENT = 6
RATE = 0.3

Ids = NDArray[np.int64]
WHERE = {
    "all": None,
    "some": ["embedding.weight", "rnn.weight*"],  # the rest are ordinary parameters
}


@pytest.fixture
def text() -> Ids:
    return np.random.default_rng(4).integers(0, VOCABULARY, 80)


def network(cell: str = "lstm", tied: bool = False) -> br.LanguageModel:
    torch.manual_seed(8)
    width = HIDDEN if tied else EMBEDDING
    net = br.LanguageModel(VOCABULARY, width, HIDDEN, LAYERS, cell, tied, init=0.8)  # type: ignore[arg-type]
    return net.double()


def bayesian(
    posterior: br.Posterior | None = None, where: Any = None, net: nn.Module | None = None
) -> br.Bayesian:
    options = {} if where is None else {"where": where}
    chosen = br.Gaussian(0.3) if posterior is None else posterior
    return br.bayesianize(net or network(), chosen, br.Normal(), **options)


def loader(text: Ids, segment: int = SEGMENT, streams: int = 1) -> br.StreamLoader:
    return br.StreamLoader(text, streams, segment)


def losses(model: br.Bayesian, text: Ids, rate: float, segment: int = SEGMENT) -> Tensor:
    """-log p of each token of one stream."""
    cuts = perplexity.read_through(loader(text, segment), Learner(model, rate))
    return torch.cat([cut.flatten().clone() for cut in cuts])


class Plain(nn.Module):
    """The same network written with torch alone; it takes its weights by name."""

    def __init__(self, cell: str, weights: dict[str, Tensor]) -> None:
        super().__init__()
        width = weights["embedding.weight"].shape[1]
        self.embedding = nn.Embedding(VOCABULARY, width)
        kind = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}[cell]
        self.rnn = kind(width, HIDDEN, LAYERS)
        self.decoder = nn.Linear(HIDDEN, VOCABULARY)
        self.double()
        self.load_state_dict(weights)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_("bias_hh" not in name)


def scored(plain: nn.Module, row: Tensor, state: Any) -> tuple[list[Tensor], Any]:
    """The loss of each word of a row but its first, and the state after it."""
    hidden, state = plain.rnn(plain.embedding(row[:-1]), state)  # type: ignore[operator]
    log_p = plain.decoder(hidden).log_softmax(dim=-1)  # type: ignore[operator]
    return [-log_p[t, word] for t, word in enumerate(row[1:])], state


def reference(
    plain: nn.Module,
    text: Ids,
    rate: float,
    segment: int,
    streams: int = 1,
    clip: float = 0.0,
    shares: dict[str, Tensor] | None = None,
) -> Tensor:
    """Losses by stream and place: each stream's loop unrolled, one optimiser step a segment of it,
    once all streams are scored."""
    length = (len(text) - 1) // streams
    rows = [torch.from_numpy(text[i * length : (i + 1) * length + 1]) for i in range(streams)]
    optimizer = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=rate)
    states: list[Any] = [None] * streams
    found: list[list[float]] = [[] for _ in range(streams)]
    for start in range(0, length, segment):
        stop = min(start + segment, length)
        after: list[Any] = []
        for i in range(streams):
            nll, state = scored(plain, rows[i][start : stop + 1], states[i])
            found[i] += [value.item() for value in nll]
            detached = [s.detach() for s in state] if isinstance(state, tuple) else state.detach()
            after.append(tuple(detached) if isinstance(state, tuple) else detached)
        for i in range(streams):
            optimizer.zero_grad()
            torch.stack(scored(plain, rows[i][start : stop + 1], states[i])[0]).sum().backward()
            if clip:
                nn.utils.clip_grad_norm_(plain.parameters(), clip)
            for name, share in (shares or {}).items():
                plain.get_parameter(name).grad *= share
            optimizer.step()
        states = after
    return torch.tensor(found, dtype=torch.float64)


# --- the maths -------------------------------------------------------------------------------


@pytest.mark.parametrize("cell", ["lstm", "gru", "rnn"])
@pytest.mark.parametrize("posterior", [br.Gaussian(0.3), br.Delta()], ids=["gaussian", "delta"])
@pytest.mark.parametrize("where", ["all", "some"])
def test_it_equals_plain_sgd_in_an_explicit_loop(
    cell: str, posterior: br.Posterior, where: str, text: Ids
) -> None:
    net = network(cell)
    model = bayesian(posterior, WHERE[where], net)
    expected = reference(Plain(cell, dict(net.state_dict())), text, RATE, SEGMENT)
    torch.testing.assert_close(losses(model, text, RATE), expected[0], rtol=1e-9, atol=1e-9)
    result = br.dynamic_evaluate(model, loader(text), RATE)
    assert result.nll == pytest.approx(expected.mean().item(), rel=1e-10)
    assert result.perplexity == pytest.approx(math.exp(result.nll))
    assert (result.tokens, result.samples) == (len(text) - 1, 0)
    assert (result.rate, result.segment) == (RATE, SEGMENT)


@pytest.mark.parametrize("streams", [2, 3])
def test_it_learns_from_one_stream_after_the_other_once_all_are_scored(
    streams: int, text: Ids
) -> None:
    net = network()
    plain = Plain("lstm", dict(net.state_dict()))
    expected = reference(plain, text, RATE, SEGMENT, streams).mean().item()
    result = br.dynamic_evaluate(bayesian(net=net), loader(text, streams=streams), RATE)
    assert result.nll == pytest.approx(expected, rel=1e-10)


class Turned(nn.Module):
    """The same network, its state [streams, layers, units]."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network("gru")

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        state = None if state is None else state.transpose(0, 1).contiguous()
        logits, state = self.net(x, state)
        return logits, state.transpose(0, 1)


class Counting(Turned):
    """The same network; of its state a part belongs to no stream."""

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        before, steps = (None, torch.zeros(1)) if state is None else state
        logits, after = self.net(x, before)
        return logits, (after, steps + len(x))


@pytest.mark.parametrize("kind", [Turned, Counting])
@pytest.mark.parametrize("streams", [LAYERS, 3, HIDDEN])
def test_the_state_may_be_laid_in_any_way(kind: type[nn.Module], streams: int, text: Ids) -> None:
    here = loader(text, streams=streams)
    expected = br.dynamic_evaluate(bayesian(net=network("gru")), here, RATE / 3)
    found = br.dynamic_evaluate(bayesian(net=kind()), here, RATE / 3)
    assert found.nll == pytest.approx(expected.nll, rel=1e-10)


def test_clipping_bounds_the_norm_of_all_gradients_together(text: Ids) -> None:
    net = network()
    expected = reference(Plain("lstm", dict(net.state_dict())), text, RATE, SEGMENT, clip=0.5)
    model = bayesian(where=WHERE["some"], net=net)
    result = br.dynamic_evaluate(model, loader(text), RATE, clip=0.5)
    assert result.nll == pytest.approx(expected.mean().item(), rel=1e-5)  # clip_grad_norm_'s 1e-6
    assert result.nll != pytest.approx(br.dynamic_evaluate(model, loader(text), RATE).nll, rel=1e-4)


def test_tied_weights_learn_as_one(text: Ids) -> None:
    net = network(tied=True)
    plain = Plain("lstm", dict(net.state_dict()))
    plain.decoder.weight = plain.embedding.weight
    expected = reference(plain, text, RATE, SEGMENT).mean().item()
    found = br.dynamic_evaluate(bayesian(net=net), loader(text), RATE).nll
    assert found == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("where", ["all", "some"])
@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_by_variance_each_weight_has_its_own_rate(where: str, clip: float, text: Ids) -> None:
    net = network()
    model = bayesian(br.Gaussian((0.05, 0.9)), WHERE[where], net)
    sigma = {name: std for b in model.each_block() for name, (_, std) in b.moments().items()}
    mean = torch.cat([std.flatten() ** 2 for std in sigma.values() if std is not None]).mean()
    shares = {name: std**2 / mean for name, std in sigma.items() if std is not None}
    assert len(shares) == (9 if where == "all" else 5)
    plain = Plain("lstm", dict(net.state_dict()))
    expected = reference(plain, text, RATE, SEGMENT, clip=clip, shares=shares).mean().item()
    result = br.dynamic_evaluate(model, loader(text), RATE, clip, by_variance=True)
    assert result.nll == pytest.approx(expected, rel=1e-5 if clip else 1e-10)
    assert result.by_variance
    alike = br.dynamic_evaluate(model, loader(text), RATE, clip)
    assert not alike.by_variance
    assert alike.nll != pytest.approx(expected, rel=1e-4)


def test_equal_variances_are_as_none(text: Ids) -> None:
    model = bayesian(br.Gaussian(0.3))
    alike = br.dynamic_evaluate(model, loader(text), RATE)
    by_variance = br.dynamic_evaluate(model, loader(text), RATE, by_variance=True)
    assert by_variance.nll == pytest.approx(alike.nll, rel=1e-10)
    found = br.search_rate(model, loader(text), (0.0, RATE), by_variance=True)
    assert found.tried[1].nll == by_variance.nll


def test_of_a_pruned_model_the_weights_left_share_the_rate(text: Ids) -> None:
    model = bayesian(br.Gaussian(0.3))
    for block in model.each_block():
        block.prune(torch.arange(block.mean().numel()) % 2 == 0)
    alike = br.dynamic_evaluate(model, loader(text), RATE)
    by_variance = br.dynamic_evaluate(model, loader(text), RATE, by_variance=True)
    assert by_variance.nll == pytest.approx(alike.nll, rel=1e-10)


def test_points_have_no_variance_to_learn_by(text: Ids) -> None:
    with pytest.raises(br.UserError, match="no weight of the model has a variance"):
        br.dynamic_evaluate(bayesian(br.Delta()), loader(text), RATE, by_variance=True)


@pytest.mark.parametrize("streams", [1, 3])
def test_the_rate_0_is_ordinary_evaluation(streams: int, text: Ids) -> None:
    model = bayesian()
    still = br.evaluate_text(model, loader(text, streams=streams))
    moved = br.dynamic_evaluate(model, loader(text, streams=streams), 0.0)
    found = (moved.nll, moved.perplexity)
    assert found == pytest.approx((still.nll, still.perplexity), rel=1e-13)
    assert moved.tokens == still.tokens


def test_sigma_and_frozen_parameters_do_not_move(text: Ids) -> None:
    learner = Learner(bayesian(where=WHERE["some"]), RATE)
    before = {name: p.detach().clone() for name, p in learner.model.named_parameters()}
    for _ in perplexity.read_through(loader(text), learner):
        pass
    moved = {n for n, p in learner.model.named_parameters() if not torch.equal(p, before[n])}
    still = {n for n in before if n.endswith(".rho") or "bias_hh" in n}
    assert still
    assert moved == set(before) - still


def test_noise_of_the_network_itself_is_off(text: Ids) -> None:
    class Dropping(nn.Module):
        def __init__(self, rate: float) -> None:
            super().__init__()
            torch.manual_seed(8)
            self.embedding = nn.Embedding(VOCABULARY, EMBEDDING)
            self.rnn = nn.LSTM(EMBEDDING, HIDDEN, LAYERS, dropout=rate)
            self.drop = nn.Dropout(rate)
            self.decoder = nn.Linear(HIDDEN, VOCABULARY)

        def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
            hidden, state = self.rnn(self.embedding(x), state)
            return self.decoder(self.drop(hidden)), state

    noisy, quiet = (bayesian(net=Dropping(rate)) for rate in (0.5, 0.0))
    expected = br.dynamic_evaluate(quiet, loader(text), RATE)
    assert br.dynamic_evaluate(noisy, loader(text), RATE) == expected
    assert noisy.module.rnn.dropout == 0.5


def test_a_text_that_repeats_itself_gets_easier() -> None:
    phrase = np.array([0, 3, 1, 5, 2, 2, 6, 4])
    text = np.concatenate([np.tile(phrase, 60), phrase[:1]])
    found = losses(bayesian(), text, rate=0.3, segment=len(phrase)).view(60, -1).mean(dim=1)
    still = losses(bayesian(), text, rate=0.0, segment=len(phrase)).view(60, -1).mean(dim=1)
    assert found[0] == still[0]
    assert found[-10:].mean() < 0.2 < 1.0 < still[-10:].mean()


# --- only the past ---------------------------------------------------------------------------


def test_a_segment_is_scored_before_anything_is_learnt_from_it() -> None:
    """One step at this rate all but memorises the segment: scores after it would be far lower."""
    text = np.array([0, 3, 1, 5, 2, 6, 4, 0, 3])
    model = bayesian()
    frozen = losses(model, text, rate=0.0, segment=4)
    learnt = losses(model, text, rate=1.0, segment=4)
    assert torch.equal(learnt[:4], frozen[:4])
    assert not torch.isclose(learnt[4:], frozen[4:]).any()


@pytest.mark.parametrize("changed", [1, 3, 12])
def test_no_score_depends_on_a_later_token(changed: int, text: Ids) -> None:
    """Change all tokens from one segment on: only what comes with or after them may change."""
    other = text.copy()
    first = changed * SEGMENT + 1  # the segment's first target
    other[first:] = (other[first:] + 1) % VOCABULARY
    model = bayesian()
    before, after = losses(model, text, RATE), losses(model, other, RATE)
    assert torch.equal(before[: first - 1], after[: first - 1])
    assert not torch.isclose(before[first - 1 :], after[first - 1 :]).all()


def test_within_a_segment_too_no_score_depends_on_a_later_token(text: Ids) -> None:
    other = text.copy()
    other[SEGMENT + 4] = (other[SEGMENT + 4] + 1) % VOCABULARY
    before, after = (losses(bayesian(), ids, RATE) for ids in (text, other))
    assert torch.equal(before[: SEGMENT + 3], after[: SEGMENT + 3])
    assert before[SEGMENT + 3] != after[SEGMENT + 3]


def test_the_last_segment_counts_even_where_it_is_short(text: Ids) -> None:
    assert (len(text) - 1) % SEGMENT == 1
    told: list[int] = []
    result = br.dynamic_evaluate(bayesian(), loader(text), RATE, advance=told.append)
    assert told == [SEGMENT] * 13 + [1]
    assert result.tokens == 79


# --- the model is left alone -----------------------------------------------------------------


def everything(model: br.Bayesian) -> dict[str, Any]:
    """Bits and places of all that an evaluation could touch."""
    parts: dict[str, Any] = {"rng": torch.get_rng_state().tolist(), "grad": torch.is_grad_enabled()}
    for name, module in model.named_modules():
        parts[f"mode {name}"] = module.training
    for name, tensor in model.state_dict(keep_vars=True).items():
        gradient = None if tensor.grad is None else tensor.grad.numpy().tobytes()
        bits = tensor.detach().numpy().tobytes()
        parts[name] = (id(tensor), tensor.data_ptr(), tensor._version, bits, gradient)
    for i, block in enumerate(model.each_block()):
        assert block.noise is not None
        parts[f"noise {i}"] = {n: (id(t), t.numpy().tobytes()) for n, t in block.noise.items()}
    return parts


def used_in_training(prior: br.Prior) -> br.Bayesian:
    """A model in the middle of it: gradients, noise, and parts in modes of their own."""
    model = br.bayesianize(network(), br.Gaussian(0.3), prior, where=WHERE["some"])
    logits, _ = model(torch.zeros(3, 2, dtype=torch.int64))
    (logits.square().sum() + model.kl()).backward()
    model.module.embedding.eval()
    return model


PRIORS = [br.Normal(), br.Normal(scale="learn"), br.Normal(scale="fit"), br.ScaleMixture()]


@pytest.mark.parametrize("prior", PRIORS, ids=["fixed", "learn", "fit", "mixture"])
@pytest.mark.parametrize("failure", [None, KeyError, KeyboardInterrupt])
def test_weights_noise_random_state_and_modes_are_untouched(
    prior: br.Prior, failure: type[BaseException] | None, text: Ids
) -> None:
    model = used_in_training(prior)
    cuts = loader(text)
    cuts.position = 2
    before = everything(model)
    seen = 0

    def advance(targets: int) -> None:
        nonlocal seen
        seen += targets
        if failure is not None and seen > 30:
            raise failure

    if failure is None:
        br.dynamic_evaluate(model, cuts, RATE, advance=advance)
    else:
        with pytest.raises(failure):
            br.dynamic_evaluate(model, cuts, RATE, advance=advance)
    assert seen > 30
    assert everything(model) == before
    assert cuts.position == 2


def test_a_failing_network_leaves_no_trace_either(text: Ids) -> None:
    model = used_in_training(br.Normal())
    before = everything(model)
    outside = np.append(text[:50], VOCABULARY)  # no such token
    with pytest.raises(IndexError):
        br.dynamic_evaluate(model, loader(outside), RATE)
    assert everything(model) == before


def test_it_can_be_repeated(text: Ids) -> None:
    model = bayesian()
    assert br.dynamic_evaluate(model, loader(text), RATE) == br.dynamic_evaluate(
        model, loader(text), RATE
    )


@pytest.mark.parametrize("around", [nullcontext, torch.no_grad, torch.inference_mode])
def test_it_does_not_matter_what_is_switched_off_around_it(
    around: Callable[[], Any], text: Ids
) -> None:
    model = bayesian()
    expected = br.dynamic_evaluate(model, loader(text), RATE)
    with around(), model.weights("sample"):
        assert br.dynamic_evaluate(model, loader(text), RATE) == expected
    assert br.dynamic_evaluate(copy.deepcopy(model).train(), loader(text), RATE) == expected


# --- the search ------------------------------------------------------------------------------


def test_the_search_reports_every_rate_and_takes_the_best(text: Ids) -> None:
    model, told = bayesian(), list[int]()
    rates = (0.2, 0.0, 0.02)
    search = br.search_rate(model, loader(text), rates, advance=told.append)
    each = [br.dynamic_evaluate(model, loader(text), rate) for rate in rates]
    assert [(t.rate, t.nll, t.perplexity) for t in search.tried] == [
        (e.rate, e.nll, e.perplexity) for e in each
    ]
    assert search.rate == min(each, key=lambda e: e.nll).rate
    assert sum(told) == len(rates) * (len(text) - 1)


@pytest.mark.parametrize("rate", [1e3, 1e200])
def test_a_rate_that_diverges_is_reported_and_not_chosen(rate: float, text: Ids) -> None:
    told: list[int] = []
    search = br.search_rate(bayesian(), loader(text), (rate, 0.01), advance=told.append)
    assert (search.tried[0].nll, search.tried[0].perplexity) == (None, None)
    assert search.tried[1].nll is not None
    assert search.rate == 0.01
    assert sum(told) == 2 * (len(text) - 1)


def test_by_default_the_model_as_it_is_is_among_the_rates(text: Ids) -> None:
    search = br.search_rate(bayesian(), loader(text))
    still = br.evaluate_text(bayesian(), loader(text)).nll
    assert search.tried[0].nll == pytest.approx(still, rel=1e-13)
    assert len(search.tried) > 3


# --- what is refused -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rate", [1e3, 1e200])
def test_a_rate_that_diverges_is_one_line_with_the_remedy(
    rate: float, dtype: torch.dtype, text: Ids
) -> None:
    model = bayesian().to(dtype)
    with pytest.raises(br.UserError, match=r"with the rate 1\S+ diverges: .* use a lower rate"):
        br.dynamic_evaluate(model, loader(text), rate)
    with pytest.raises(br.UserError, match=r"diverges at every rate that was tried \(1"):
        br.search_rate(model, loader(text), (rate, 2 * rate))


def test_divergence_is_seen_long_before_the_end() -> None:
    text = np.random.default_rng(1).integers(0, VOCABULARY, 20 * LOOK_SEGMENTS * 2)
    told: list[int] = []
    with pytest.raises(Diverged):
        br.dynamic_evaluate(bayesian(), loader(text, 2), 1e3, advance=told.append)
    assert len(told) == LOOK_SEGMENTS + 1


def test_a_model_that_is_poor_by_itself_has_not_diverged() -> None:
    net = network()
    with torch.no_grad():
        net.decoder.bias[3] = 50.0  # sure of a token that comes late and then never ends
    text = np.concatenate([np.full(20, 3), np.arange(60) % 3])
    result = br.dynamic_evaluate(bayesian(net=net), loader(text), 0.0)
    still = br.evaluate_text(bayesian(net=net), loader(text)).nll
    assert result.nll == pytest.approx(still, rel=1e-13)
    assert still > 10


@pytest.mark.parametrize("rate", [-0.1, math.nan, math.inf])
def test_an_impossible_rate_is_refused(rate: float, text: Ids) -> None:
    with pytest.raises(Invalid, match="rate must be a finite number, 0 or above"):
        br.dynamic_evaluate(bayesian(), loader(text), rate)


def test_further_wrong_input_is_named(text: Ids) -> None:
    with pytest.raises(Invalid, match="clip must be 0"):
        br.dynamic_evaluate(bayesian(), loader(text), RATE, clip=-1)
    with pytest.raises(Invalid, match="rates must hold at least one"):
        br.search_rate(bayesian(), loader(text), ())
    with pytest.raises(br.UserError, match="nothing to learn: every mean"):
        br.dynamic_evaluate(bayesian().requires_grad_(False), loader(text), RATE)
    broken = network()
    with torch.no_grad():
        broken.decoder.bias.fill_(math.nan)
    with pytest.raises(br.UserError, match="loss is nan before it has learnt anything"):
        br.dynamic_evaluate(bayesian(net=broken), loader(text), RATE)


def test_a_segment_longer_than_the_text_is_one_line(text: Ids) -> None:
    br.dynamic_evaluate(bayesian(), loader(text, segment=79), RATE)
    expected = r"a segment of 80 steps is longer than text 'text', which has 79 steps a stream"
    with pytest.raises(br.UserError, match=expected):
        br.dynamic_evaluate(bayesian(), loader(text, segment=80), RATE)
    with pytest.raises(br.UserError, match=r"has 39 steps a stream \(2 in all\)"):
        br.search_rate(bayesian(), loader(text, segment=40, streams=2))


# --- where it runs ---------------------------------------------------------------------------


@pytest.mark.parametrize("cell", ["lstm", "gru", "rnn"])
def test_where_the_weights_lie_does_not_matter(cell: str, text: Ids) -> None:
    """`tuned` lays them as a GPU wants them."""
    model = bayesian(net=network(cell))
    learner = Learner(model, RATE)
    with learner.model.tuned():
        cuts = perplexity.read_through(loader(text), learner)
        found = torch.cat([cut.flatten().clone() for cut in cuts])
    torch.testing.assert_close(found, losses(model, text, RATE), rtol=1e-9, atol=1e-9)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.filterwarnings("ignore:RNN module weights are not part")  # some: biases lie elsewhere
@pytest.mark.parametrize("where", ["all", "some"])
def test_a_gpu_finds_the_same(where: str, text: Ids) -> None:
    model = bayesian(where=WHERE[where])
    expected = br.dynamic_evaluate(model, loader(text), RATE).nll
    cuts = br.StreamLoader(text, 1, SEGMENT, device="cuda")
    model.to("cuda")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert br.dynamic_evaluate(model, cuts, RATE).nll == pytest.approx(expected, rel=1e-6)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
