"""Captions are found as stated: against all sentences there are, and whatever the batches."""

import itertools
import math

import pytest
import torch
from torch import Tensor

import bayesrnn as br
from bayesrnn.bayes import Bayesian
from bayesrnn.evaluate.decoding import Caption, Decoding, decode_captions
from bayesrnn.evaluate.draws import evaluating
from bayesrnn.evaluate.reader import Reader, draw_seeds
from bayesrnn.models import Captioner, CaptionerSettings

END, UNKNOWN, VOCABULARY, WORDS = 1, 4, 5, 4


def small_model(scale: float = 0.4, dropout: br.DropoutSettings | None = None) -> Bayesian:
    """Whose sentences are all different in probability, and end here and there."""
    torch.manual_seed(7)
    settings = CaptionerSettings(numbers=3, norm=4.0, embedding=4, hidden=6, init=1.5)
    net = Captioner(VOCABULARY, settings, dropout).double()
    return br.bayesianize(net, br.Gaussian(scale), br.Normal(0.0, 1.0)).eval()


def pictures(count: int = 6) -> Tensor:
    return torch.randn(count, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def log_probability(model: Bayesian, picture: Tensor, ids: tuple[int, ...], samples: int) -> float:
    """Of a whole caption and its end, read in one go by each draw; averaged word by word."""
    words = [*ids, END]
    x = torch.tensor([[END], *([word] for word in ids)])
    each = []
    for seed in draw_seeds(1, samples) if samples else [None]:
        with torch.no_grad(), model.weights("mean" if seed is None else "sample"):
            if seed is not None:
                model.resample(generator=torch.Generator().manual_seed(seed))
            logits, _ = model(x, pictures=picture[None])
        each.append(logits[:, 0].softmax(dim=1)[range(len(words)), words])
    return torch.stack(each).mean(dim=0).log().sum().item()


def all_sentences() -> list[tuple[int, ...]]:
    words = [word for word in range(VOCABULARY) if word not in (END, UNKNOWN)]
    return [ids for n in range(WORDS + 1) for ids in itertools.product(words, repeat=n)]


@pytest.mark.parametrize(("samples", "power"), [(0, 0.0), (0, 0.7), (0, 1.0), (2, 0.7)])
def test_a_beam_that_is_wide_enough_finds_the_best_of_all_sentences(
    samples: int, power: float
) -> None:
    model, given = small_model(), pictures(3)
    how = Decoding(beam=3**WORDS, power=power, words=WORDS)
    found = decode_captions(model, given, END, how, samples, forbidden=[UNKNOWN])
    for picture, caption in zip(given, found, strict=True):
        scores = {
            ids: log_probability(model, picture, ids, samples) / (len(ids) + 1) ** power
            for ids in all_sentences()
        }
        best = max(scores, key=scores.__getitem__)
        assert caption.ids == best
        assert caption.ended
        score = caption.log_p / (len(best) + 1) ** power
        assert score == pytest.approx(scores[best], rel=1e-9)
    assert len(all_sentences()) == 1 + 3 + 9 + 27 + 81


def test_a_narrow_beam_is_never_better() -> None:
    model, given = small_model(), pictures(40)

    def scores(beam: int) -> Tensor:
        how = Decoding(beam=beam, power=0.0, words=WORDS)
        found = decode_captions(model, given, END, how, forbidden=[UNKNOWN])
        for picture, caption in zip(given, found, strict=True):
            expected = log_probability(model, picture, caption.ids, 0)
            assert caption.log_p == pytest.approx(expected, rel=1e-9)
        return torch.tensor([caption.log_p for caption in found])

    best = scores(3**WORDS)
    two = scores(2)
    assert (two <= best + 1e-9).all()
    assert two.mean() < best.mean()


def greedy(model: Bayesian, picture: Tensor, words: int) -> tuple[tuple[int, ...], float]:
    """By reading the whole beginning anew for every word."""
    ids: list[int] = []
    total = 0.0
    for _ in range(words):
        with torch.no_grad(), model.weights("mean"):
            logits, _ = model(torch.tensor([[END], *([w] for w in ids)]), pictures=picture[None])
        log_p = logits[-1, 0].log_softmax(dim=0)
        log_p[UNKNOWN] = -math.inf
        word = int(log_p.argmax())
        total += log_p[word].item()
        if word == END:
            break
        ids.append(word)
    return tuple(ids), total


def test_greedy_takes_the_most_probable_word_every_time() -> None:
    model, given = small_model(), pictures(20)
    found = decode_captions(model, given, END, Decoding(beam=1, words=6), forbidden=[UNKNOWN])
    for picture, caption in zip(given, found, strict=True):
        ids, log_p = greedy(model, picture, 6)
        assert caption.ids == ids
        assert caption.log_p == pytest.approx(log_p, rel=1e-9)
        assert caption.ended == (len(ids) < 6)
    assert len({len(caption.ids) for caption in found}) > 1


@pytest.mark.parametrize(
    ("how", "samples"),
    [
        (Decoding(beam=1, words=6), 0),
        (Decoding(beam=1, temperature=1.3, words=6), 0),
        (Decoding(beam=3, words=6), 0),
        (Decoding(beam=3, words=6), 1),
        (Decoding(beam=4, power=0.0, words=6), 3),
    ],
)
def test_a_caption_does_not_depend_on_those_beside_it(how: Decoding, samples: int) -> None:
    model, given = small_model(), pictures(9)
    together = decode_captions(model, given, END, how, samples, forbidden=[UNKNOWN])
    for batch in (1, 4):
        found = decode_captions(model, given, END, how, samples, forbidden=[UNKNOWN], batch=batch)
        assert [each.ids for each in found] == [each.ids for each in together]
        for one, other in zip(found, together, strict=True):
            assert one.log_p == pytest.approx(other.log_p, rel=1e-9)
            assert one.ended == other.ended
    if not how.temperature:  # chance is dealt out by place, all else by picture
        order = torch.randperm(9)
        shuffled = decode_captions(model, given[order], END, how, samples, forbidden=[UNKNOWN])
        assert [each.ids for each in shuffled] == [together[i].ids for i in order]


def test_drawn_words_come_as_often_as_they_should() -> None:
    model = small_model()
    picture = pictures(1)
    how = Decoding(beam=1, temperature=1.0, words=1)
    found = decode_captions(model, picture.expand(20_000, -1), END, how, batch=20_000)
    with torch.no_grad(), model.weights("mean"):
        logits, _ = model(torch.tensor([[END]]), pictures=picture)
    p = logits[0, 0].softmax(dim=0)
    counts = torch.zeros(VOCABULARY, dtype=torch.float64)
    for caption in found:
        counts[caption.ids[0] if caption.ids else END] += 1
    error = (p * (1 - p) / 20_000).sqrt()
    assert ((counts / 20_000 - p).abs() < 5 * error + 1e-9).all()


def test_draws_differ_from_the_mean_and_a_seed_repeats_them() -> None:
    model, given = small_model(scale=1.0), pictures(20)
    how = Decoding(beam=2, words=6)

    def ids(samples: int, seed: int = 1) -> list[tuple[int, ...]]:
        return [c.ids for c in decode_captions(model, given, END, how, samples, seed)]

    assert ids(1) == ids(1)
    assert ids(1) != ids(1, seed=2)
    assert ids(1) != ids(0)
    assert ids(5) != ids(1)


def test_dropout_speaks_too() -> None:
    """MC dropout: masks are part of a draw."""
    model = small_model(1e-4, br.DropoutSettings("naive", input=0.5, output=0.5))
    given = pictures(5)
    assert len(decode_captions(model, given, END, Decoding(beam=2, words=4), samples=2)) == 5


def test_a_caption_that_cannot_end_is_cut_off() -> None:
    model, given = small_model(), pictures(2)
    found = decode_captions(model, given, END, Decoding(words=3), forbidden=[UNKNOWN, END])
    assert all(len(caption.ids) == 3 and not caption.ended for caption in found)
    assert isinstance(found[0], Caption)


def test_impossible_ways_are_refused() -> None:
    with pytest.raises(br.Invalid) as caught:
        Decoding(beam=0, power=-1, words=0)
    assert {key for key, _ in caught.value.problems} == {"beam", "power", "words"}
    with pytest.raises(br.Invalid, match="temperature draws words one by one"):
        Decoding(beam=3, temperature=1.0)


def test_a_greedy_caption_that_fills_all_words_allowed_may_still_end() -> None:
    model, given = small_model(), pictures(400)
    whole = decode_captions(model, given, END, Decoding(beam=1, words=6), forbidden=[UNKNOWN])
    tight = 0
    for picture, caption in zip(given, whole, strict=True):
        if not caption.ended or not caption.ids:
            continue
        for words in {len(caption.ids), max(1, len(caption.ids) - 1)}:
            how = Decoding(beam=1, words=words)
            (found,) = decode_captions(model, picture[None], END, how, forbidden=[UNKNOWN])
            assert found.ids == caption.ids[:words]
            assert found.ended == (words == len(caption.ids))
            if found.ended:
                assert found.log_p == pytest.approx(caption.log_p, rel=1e-9)
                tight += 1
    assert tight > 2


@pytest.mark.parametrize(
    "dropout",
    [
        br.DropoutSettings(input=0.5, recurrent=0.5, output=0.5, cell=0.3),
        br.DropoutSettings(input=0.5, recurrent=0.5, output=0.5, tied=False, connect=0.3),
        br.DropoutSettings(input=0.5, recurrent=0.5, output=0.5, connect=0.3, shared=True),
    ],
    ids=["tied", "untied", "shared"],
)
def test_a_beam_that_changes_rows_takes_its_masks_along(dropout: br.DropoutSettings) -> None:
    """Three beginnings that go on from row 1 are one sentence: the same masks, the same logits; and
    they are those that row 1 has without the others."""
    model = small_model(1e-4, dropout)
    given, words = pictures(3), torch.tensor([[2, 3, 0]])

    def started() -> Reader:
        reader = Reader(model, 5, torch.device("cpu"))
        reader.read(torch.full((1, 3), END), pictures=given)
        return reader

    with evaluating(model):
        alone, beside = started(), started()
        beside.take(torch.tensor([1, 1, 1, 0]))
        found = beside.read(torch.tensor([[3, 3, 3, 2]]))[0]
        wanted = alone.read(words)[0]
        assert torch.allclose(found[:3], found[:1], rtol=1e-12)
        assert torch.allclose(found[[0, 3]], wanted[[1, 0]], rtol=1e-12)
        again = beside.read(torch.tensor([[0, 0, 2, 0]]))[0]
        assert torch.allclose(again[0], again[1], rtol=1e-12)
        assert not torch.allclose(again[0], again[2])
