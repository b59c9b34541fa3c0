"""BLEU, CIDEr, ROUGE-L and METEOR of captions, by the scorers of the COCO challenge
(pycocoevalcap); and how sure a difference between two systems is.

They compare words: references and captions are strings of words with blanks between, as
`penn_words` splits them, which is what the challenge's own tokeniser (in Java) does. BLEU, CIDEr
and ROUGE-L then need no Java; METEOR does, and takes half a minute to start.
"""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bayesrnn.errors import UserError, require

ORDERS = 4  # n-grams of 1 to 4 words


@dataclass(frozen=True, eq=False)
class CaptionScores:
    """Of all captions; `by_picture` holds those that are means over pictures, picture by picture.

    BLEU is no mean: `bleu_counts` [pictures, 2 + 2 x 4] are what it is made of (words said, words
    of the nearest reference, n-grams said, n-grams right), to be summed over pictures.
    """

    scores: dict[str, float]
    by_picture: dict[str, NDArray[np.float64]]
    bleu_counts: NDArray[np.float64]


def score_captions(
    captions: Mapping[str, str], references: Mapping[str, Sequence[str]], meteor: bool = False
) -> CaptionScores:
    """Scores of a caption a picture, by name, against what people said of it."""
    check_meteor(meteor)
    missing = [name for name in captions if not references.get(name)]
    if missing or not captions:
        what = f"{missing[0]} has none" if missing else "there are no captions"
        raise UserError(f"every caption needs references to be scored by; {what}")
    names = list(captions)
    said = {name: [captions[name]] for name in names}
    true = {name: list(references[name]) for name in names}
    scorers = load_scorers()
    counts = _bleu_counts(scorers["bleu"], said, true)
    scores = {f"bleu{n}": float(value) for n, value in enumerate(bleu(counts), start=1)}
    by_picture: dict[str, NDArray[np.float64]] = {}
    for name in ("cider", "rouge_l", *(["meteor"] if meteor else [])):
        scorer = scorers[name]()
        whole, each = scorer.compute_score(true, said)
        scores[name], by_picture[name] = float(whole), np.asarray(each, dtype=np.float64)
        if name == "meteor":  # a process of its own, which leaves its pipes open
            scorer.meteor_p.stdout.close()
            scorer.meteor_p.stderr.close()
    return CaptionScores(scores, by_picture, counts)


def check_meteor(wanted: bool) -> None:
    """To be said before hours of work, not after."""
    if wanted and shutil.which("java") is None:
        raise UserError("METEOR needs Java, and there is no `java` here; install it or do without")


def load_scorers() -> dict[str, Any]:
    """The scorer classes, or one line that says how to get them."""
    try:
        from pycocoevalcap.bleu.bleu_scorer import BleuScorer
        from pycocoevalcap.cider.cider import Cider
        from pycocoevalcap.meteor.meteor import Meteor
        from pycocoevalcap.rouge.rouge import Rouge
    except ImportError as error:
        raise UserError(
            "scoring captions needs pycocoevalcap: pip install 'bayesrnn[captions]'"
        ) from error
    return {"bleu": BleuScorer, "cider": Cider, "rouge_l": Rouge, "meteor": Meteor}


def can_score() -> bool:
    try:
        load_scorers()
    except UserError:
        return False
    return True


def _bleu_counts(
    scorer_class: Any, said: Mapping[str, list[str]], true: Mapping[str, list[str]]
) -> NDArray[np.float64]:
    scorer = scorer_class(n=ORDERS)
    for name, captions in said.items():
        scorer += (captions[0], true[name])
    rows = []
    for part in scorer.ctest:
        words = part["testlen"]
        nearest = min((abs(length - words), length) for length in part["reflen"])[1]
        rows.append([words, nearest, *part["guess"], *part["correct"]])
    return np.array(rows, dtype=np.float64)


def bleu(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """BLEU-1 to 4 from counts [..., pictures, 10], summed over pictures: the geometric mean of the
    n-grams' precisions, less where too little is said (Papineni et al. 2002)."""
    sums = counts.sum(axis=-2)
    words, nearest = sums[..., 0], sums[..., 1]
    said, right = sums[..., 2 : 2 + ORDERS], sums[..., 2 + ORDERS :]
    tiny, small = 1e-15, 1e-9  # the scorer's own, against divisions by zero
    logs = np.log((right + tiny) / (said + small))
    means = np.cumsum(logs, axis=-1) / np.arange(1, ORDERS + 1)
    ratio = (words + tiny) / (nearest + small)
    brevity = np.where(ratio < 1, 1 - 1 / ratio, 0.0)
    found: NDArray[np.float64] = np.exp(means + brevity[..., None])
    return found


@dataclass(frozen=True)
class Comparison:
    """How much better one system is than another, by a paired bootstrap over pictures.

    It holds the difference, its 95 % interval, and the share of resamples in which the system is
    not better.
    """

    difference: float
    low: float
    high: float
    p: float


@dataclass(frozen=True, eq=False)
class Measured:
    """What a system's runs (seeds) gave by picture, in the same order for all systems.

    `cider` [runs, pictures]; `nll` and `words`, the summed NLL of the references and their words;
    and `bleu_counts` [runs, pictures, 10].
    """

    cider: NDArray[np.float64]
    bleu_counts: NDArray[np.float64]
    nll: NDArray[np.float64]
    words: NDArray[np.float64]

    def figures(self, chosen: NDArray[np.int64]) -> dict[str, float]:
        """The means over the runs, of these pictures alone; larger is better throughout."""
        nll = self.nll[:, chosen].sum(axis=1) / self.words[:, chosen].sum(axis=1)
        return {
            "perplexity": -float(np.exp(nll).mean()),
            "bleu4": float(bleu(self.bleu_counts[:, chosen])[:, -1].mean()),
            "cider": float(self.cider[:, chosen].mean()),
        }


def compare(
    system: Measured, baseline: Measured, resamples: int = 10_000, seed: int = 1
) -> dict[str, Comparison]:
    """Whether `system` is better than `baseline`, figure by figure (a lower perplexity is better).

    It is a bootstrap: pictures are drawn anew, the runs stay as they are. So p speaks of other
    pictures, not of other seeds.
    """
    pictures = system.cider.shape[1]
    same = all(each.shape[1] == pictures for each in vars(system).values())
    same = same and all(each.shape[1] == pictures for each in vars(baseline).values())
    require(
        (same, "pictures", "must be the same for both systems and all figures"),
        (resamples >= 1, "resamples", f"must be at least 1, got {resamples}"),
    )
    random = np.random.default_rng(seed)
    seen: dict[str, list[float]] = {}
    for _ in range(resamples):
        drawn = random.integers(pictures, size=(pictures,))
        for name, value in _gains(system, baseline, drawn):
            seen.setdefault(name, []).append(value)
    found = {}
    for name, value in _gains(system, baseline, np.arange(pictures)):
        gains = np.array(seen[name])
        low, high = np.quantile(gains, [0.025, 0.975])
        p = (1 + int((gains <= 0).sum())) / (1 + resamples)
        found[name] = Comparison(value, float(low), float(high), p)
    return found


def _gains(
    system: Measured, baseline: Measured, chosen: NDArray[np.int64]
) -> list[tuple[str, float]]:
    ours, theirs = system.figures(chosen), baseline.figures(chosen)
    return [(name, ours[name] - theirs[name]) for name in ours]
