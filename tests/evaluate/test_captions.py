"""What a model does not know of a caption; the scores of captions, and how sure they are."""

import json
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

import bayesrnn as br
from bayesrnn.bayes import Bayesian
from bayesrnn.data.penn import penn_words
from bayesrnn.evaluate import caption_scores
from bayesrnn.evaluate.caption_scores import Measured, bleu, compare, score_captions
from bayesrnn.evaluate.captioned import (
    Captioned,
    CaptionFile,
    caption_pictures,
    foreign_pictures,
    rank_captions,
)
from bayesrnn.evaluate.captions import caption_uncertainty
from bayesrnn.evaluate.decoding import Decoding, decode_captions
from bayesrnn.evaluate.reader import draw_seeds
from bayesrnn.models import Captioner, CaptionerSettings

VOCABULARY = br.Vocabulary(("a", "<eos>", "dog", "cat", "runs", "<unk>"))
END = 1
Pair = tuple[dict[str, str], dict[str, list[str]]]


def small_model(scale: float = 0.5) -> Bayesian:
    torch.manual_seed(2)
    settings = CaptionerSettings(numbers=3, norm=4.0, embedding=4, hidden=6, init=1.0)
    net = Captioner(len(VOCABULARY), settings).double()
    return br.bayesianize(net, br.Gaussian(scale), br.Normal(0.0, 1.0)).eval()


# --- uncertainty ---------------------------------------------------------------------------------


@pytest.mark.parametrize("samples", [0, 2, 4])
@pytest.mark.parametrize("batch", [1, 2, 50])
def test_a_words_uncertainty_is_what_the_draws_say_one_by_one(samples: int, batch: int) -> None:
    model = small_model()
    vectors = torch.randn(3, 3, dtype=torch.float64)
    rows, captions = [2, 0, 2, 1], [[2, END], [0, 2, 4, END], [END], [3, 4, END]]
    loader = br.CaptionLoader(rows, captions, END, batch, [2, 4])
    found = caption_uncertainty(model, loader, vectors, (0, 2, 4), top=2)
    for row, caption, figures in zip(rows, captions, found[samples], strict=True):
        x = torch.tensor([[END], *([word] for word in caption[:-1])])
        each = []
        for seed in draw_seeds(1, samples) if samples else [None]:
            with torch.no_grad(), model.weights("mean" if seed is None else "sample"):
                if seed is not None:
                    model.resample(generator=torch.Generator().manual_seed(seed))
                each.append(model(x, pictures=vectors[row][None])[0][:, 0].softmax(dim=1))
        p = torch.stack(each)
        total = torch.special.entr(p.mean(dim=0)).sum(dim=1)
        aleatoric = torch.special.entr(p).sum(dim=2).mean(dim=0)
        of_words = p.mean(dim=0)[range(len(caption)), caption]
        torch.testing.assert_close(figures.total, total)
        torch.testing.assert_close(figures.aleatoric, aleatoric)
        torch.testing.assert_close(figures.epistemic, (total - aleatoric).clamp_min(0))
        torch.testing.assert_close(figures.probability, of_words)
        assert figures.confidence == pytest.approx(of_words.log().mean().exp().item())
        assert figures.top_tokens.tolist() == p.mean(dim=0).topk(2).indices.tolist()
        assert figures.targets.tolist() == caption
        assert figures.epistemic.mean() > 0 or samples == 0


def test_captions_with_their_figures_are_written_and_read(tmp_path: Path) -> None:
    model = small_model()
    vectors = torch.randn(4, 3, dtype=torch.float64)
    how = Decoding(beam=2, words=5)
    found = caption_pictures(model, vectors, "wxyz", VOCABULARY, how, 2, 3, draws=2)
    plain = decode_captions(model, vectors, END, how, 2, forbidden=[5])
    for picture, caption in zip(found.pictures, plain, strict=True):
        assert picture.caption == " ".join(VOCABULARY.decode(caption.ids))
        assert [word[0] for word in picture.words] == [*picture.caption.split(), "<eos>"]
        mean = sum(word[4] for word in picture.words) / len(picture.words)
        assert picture.epistemic == pytest.approx(mean, rel=1e-4)
        assert len(picture.draws) == 2
    first = decode_captions(model, vectors, END, how, 1, forbidden=[5])
    assert found.pictures[0].draws[0] == " ".join(VOCABULARY.decode(first[0].ids))
    found.write(tmp_path / "c.json")
    assert CaptionFile.read(tmp_path / "c.json") == found
    assert set(found.captions) == set("wxyz")
    for text in ("no", "[]", '{"format": "other"}', '{"format": "bayesrnn captions 1"}'):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(br.UserError, match=r"bad\.json is damaged or no file of captions"):
            CaptionFile.read(tmp_path / "bad.json")


def test_disputed_words_are_those_few_draws_say() -> None:
    draws = ["a dog runs", "a cat runs", "a dog sleeps"]
    each = Captioned("x", "a cat runs home", -1.0, 0.5, 1.0, 1.0, 0.1, [], draws)
    assert each.disputed == ["cat", "home"]
    assert Captioned("x", "a cat", -1.0, 0.5, 1.0, 1.0, 0.1, []).disputed == []


def test_what_does_not_fit_is_compared_with_what_does() -> None:
    model = small_model()
    vectors = torch.randn(12, 3, dtype=torch.float64)
    names = [str(i) for i in range(12)]
    own = caption_pictures(model, vectors, names, VOCABULARY, Decoding(words=4), 0, 3)
    found = foreign_pictures(model, vectors, own, VOCABULARY)
    assert set(found) == {"wrong picture", "noise"}
    for each in found.values():
        assert 0 <= each.epistemic_auroc <= 1
        assert each.total > each.epistemic > 0
    # Pictures that are all the same cannot be wrong.
    same = vectors[:1].expand(12, -1).contiguous()
    own = caption_pictures(model, same, names, VOCABULARY, Decoding(words=4), 0, 3)
    assert foreign_pictures(model, same, own, VOCABULARY)["wrong picture"].total_auroc == 0.5
    # A single one is never another's.
    own = caption_pictures(model, vectors[:1], names[:1], VOCABULARY, Decoding(words=4), 0, 3)
    alone = foreign_pictures(model, vectors[:1], own, VOCABULARY)
    assert set(asdict(alone["wrong picture"]).values()) == {None}
    assert alone["noise"].total > 0


def test_the_surest_captions_are_ranked_as_scipy_does() -> None:
    uncertainty = torch.tensor([0.1, 0.4, 0.2, 0.2, 0.9], dtype=torch.float64)
    cider = torch.tensor([2.0, 0.5, 1.0, 0.6, 0.0], dtype=torch.float64)
    found = rank_captions(uncertainty, cider)
    assert found.cider == pytest.approx(cider.mean().item())
    assert found.cider_tenth == 2.0
    assert found.cider_half == pytest.approx((2 + 0.8) / 2)  # two of five, a tie at the second
    areas = [2.0, 2.8 / 2, 3.6 / 3, 4.1 / 4, 4.1 / 5]
    assert found.area == pytest.approx(sum(areas) / 5)
    assert found.best_area >= found.area
    expected = stats.spearmanr(uncertainty, cider).statistic
    assert found.correlation == pytest.approx(expected)
    assert rank_captions(torch.zeros(3), torch.rand(3)).correlation is None
    assert rank_captions(torch.rand(1), torch.rand(1)).correlation is None


# --- scores --------------------------------------------------------------------------------------


@pytest.fixture
def _scorers() -> None:
    pytest.importorskip("pycocoevalcap", reason="the extra captions is not installed")


@pytest.fixture
def coco(data_folder: Callable[[str], Path]) -> Pair:
    """The captions of the COCO challenge's own check, and their references."""
    folder = data_folder("captions")
    true = json.loads((folder / "coco_val2014_fakecap1000_refs.json").read_text())
    said = json.loads((folder / "coco_val2014_fakecap_results.json").read_text())
    references: dict[str, list[str]] = {}
    for each in true["annotations"]:
        words = " ".join(penn_words(each["caption"]))
        references.setdefault(str(each["image_id"]), []).append(words)
    captions = {str(each["image_id"]): " ".join(penn_words(each["caption"])) for each in said}
    return captions, references


@pytest.mark.usefixtures("_scorers")
def test_scores_are_those_of_the_challenge(coco: Pair) -> None:
    """The values of the challenge's own notebook; words are split without Java."""
    found = score_captions(*coco)
    published = {"bleu4": 0.191, "cider": 0.600, "rouge_l": 0.396}
    assert {name: round(found.scores[name], 3) for name in published} == published
    assert found.by_picture["cider"].mean() == pytest.approx(found.scores["cider"])
    from pycocoevalcap.bleu.bleu import Bleu

    said = {name: [caption] for name, caption in coco[0].items()}
    true = {name: coco[1][name] for name in coco[0]}
    official, _ = Bleu(4).compute_score(true, said, verbose=0)
    assert [found.scores[f"bleu{n}"] for n in (1, 2, 3, 4)] == pytest.approx(official, rel=1e-9)
    some = np.arange(100)
    official, _ = Bleu(4).compute_score(
        {name: true[name] for name in list(true)[:100]},
        {name: said[name] for name in list(said)[:100]},
        verbose=0,
    )
    assert bleu(found.bleu_counts[some]) == pytest.approx(official, rel=1e-9)


@pytest.mark.usefixtures("_scorers")
@pytest.mark.skipif(
    shutil.which("java") is None or "BAYESRNN_METEOR" not in os.environ,
    reason="METEOR needs Java and half a minute; set BAYESRNN_METEOR=1 to have it tested",
)
def test_meteor_is_that_of_the_challenge(coco: Pair) -> None:
    assert round(score_captions(*coco, meteor=True).scores["meteor"], 3) == 0.195


@pytest.mark.usefixtures("_scorers")
def test_meteor_without_java_is_refused_before_anything_is_scored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(br.UserError, match="METEOR needs Java"):
        score_captions({"a": "x"}, {"a": ["x"]}, meteor=True)


@pytest.mark.usefixtures("_scorers")
def test_captions_without_references_are_refused() -> None:
    with pytest.raises(br.UserError, match="needs references to be scored by; b has none"):
        score_captions({"a": "x", "b": "y"}, {"a": ["x"]})
    with pytest.raises(br.UserError, match="there are no captions"):
        score_captions({}, {})


def test_without_the_scorers_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "pycocoevalcap.bleu.bleu_scorer", None)
    assert not caption_scores.can_score()
    with pytest.raises(br.UserError, match=r"pip install 'bayesrnn\[captions\]'"):
        score_captions({"a": "x"}, {"a": ["x"]})


def measured(cider: np.ndarray, nll: np.ndarray, seed: int = 0) -> Measured:
    dice = np.random.default_rng(seed)
    right = dice.integers(0, 5, (*cider.shape, 4)).astype(float)
    counts = np.concatenate([np.full((*cider.shape, 6), 8.0), right], axis=-1)
    return Measured(cider, counts, nll, np.full(cider.shape, 10.0))


def test_the_bootstrap_agrees_with_the_normal_approximation() -> None:
    """For a mean of many independent differences both are the same."""
    dice = np.random.default_rng(1)
    base = dice.gamma(1.0, 0.5, (2, 400))
    better = base + dice.normal(0.03, 0.4, (2, 400))
    ours, theirs = measured(better, better), measured(base, base)
    found = compare(ours, theirs, resamples=4000)
    gains = (better - base).mean(axis=0)
    error = gains.std(ddof=1) / math.sqrt(400)
    assert found["cider"].difference == pytest.approx(gains.mean())
    assert found["cider"].p == pytest.approx(stats.norm.sf(gains.mean() / error), abs=0.02)
    assert found["cider"].low == pytest.approx(gains.mean() - 1.96 * error, abs=0.1 * error)
    # Of perplexity the lower one is better.
    nll = [np.exp(each.sum(axis=1) / 4000).mean() for each in (better, base)]
    assert found["perplexity"].difference == pytest.approx(nll[1] - nll[0])
    assert found["bleu4"].difference == 0
    assert {name: each.p for name, each in compare(ours, ours, 50).items()} == {
        "perplexity": 1,
        "bleu4": 1,
        "cider": 1,
    }
    with pytest.raises(br.Invalid, match="must be the same for both systems"):
        compare(ours, measured(base[:, :5], base[:, :5]))
