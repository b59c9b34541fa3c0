"""Captions with what the model does not know of them: made, kept in files, and put to the test."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bayesrnn.bayes import Network
from bayesrnn.data.padded import CaptionLoader
from bayesrnn.data.vocabulary import END, UNKNOWN, Vocabulary
from bayesrnn.errors import UserError
from bayesrnn.evaluate.calibration import risk_coverage
from bayesrnn.evaluate.captions import caption_uncertainty
from bayesrnn.evaluate.decoding import Caption, Decoding, decode_captions
from bayesrnn.evaluate.reader import Watch
from bayesrnn.evaluate.uncertainty import TextUncertainty, auroc, ranks, reading_cost
from bayesrnn.files import expanded, read_bytes, write_atomic

FORMAT = "bayesrnn captions 1"
PARTS = ("probability", "total", "aleatoric", "epistemic")
"""The figures of a word."""
READ = 250
"""Captions that are read side by side; it changes speed and memory only."""


@dataclass(frozen=True)
class Captioned:
    """A picture's caption, and how sure the model is of it.

    Figures are means over the words and the end, except `confidence`, which is the geometric mean
    of their probabilities.
    """

    name: str
    caption: str
    log_p: float
    confidence: float
    total: float
    aleatoric: float
    epistemic: float
    words: list[list[Any]] = field(repr=False)
    """Each word, and the end mark too, with its `PARTS`."""
    draws: list[str] = field(default_factory=list)
    """What single draws say, if that was asked for."""

    @property
    def disputed(self) -> list[str]:
        """The words that fewer than half of the single draws say as well."""
        said = [set(draw.split()) for draw in self.draws]
        words = dict.fromkeys(self.caption.split())
        return [word for word in words if 2 * sum(word in each for each in said) < len(said)]


@dataclass(frozen=True)
class CaptionFile:
    """Captions of many pictures, with the uncertainty of each.

    They were decoded from the average of `samples` draws (0: the mean), as `decoding` says; their
    uncertainty is by `reading_samples` draws.
    """

    pictures: list[Captioned]
    samples: int
    reading_samples: int
    decoding: Decoding
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def captions(self) -> dict[str, str]:
        """The captions, by the pictures' names."""
        return {picture.name: picture.caption for picture in self.pictures}

    def mean(self, part: str) -> float:
        """The mean of one figure ("total", say) over all pictures."""
        return sum(getattr(picture, part) for picture in self.pictures) / len(self.pictures)

    def write(self, path: str | Path) -> None:
        """Write it to a JSON file."""
        head = {"format": FORMAT, "columns": ["word", *PARTS]}
        text = json.dumps({**head, **asdict(self)}, ensure_ascii=False)
        write_atomic(expanded(path), text.encode())

    @classmethod
    def read(cls, path: str | Path) -> "CaptionFile":
        """Read what `write` wrote."""
        data = read_bytes(expanded(path))
        try:
            contents = json.loads(data)
            if contents.pop("format") != FORMAT:
                raise ValueError(f"not in the format '{FORMAT}'")
            contents.pop("columns")
            pictures = [Captioned(**each) for each in contents.pop("pictures")]
            decoding = Decoding(**contents.pop("decoding"))
            return cls(pictures=pictures, decoding=decoding, **contents)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(f"{path} is damaged or no file of captions ({error})") from error


def caption_pictures(
    model: Network,
    vectors: Tensor,
    names: Sequence[str],
    vocabulary: Vocabulary,
    decoding: Decoding | None = None,
    samples: int = 0,
    reading_samples: int = 10,
    draws: int = 0,
    seed: int = 1,
    watch: Watch | None = None,
) -> CaptionFile:
    """Caption pictures [N, numbers] and say how sure each word is.

    - `samples`: captions come from the average of so many draws (0: the mean).
    - `reading_samples`: so many draws tell the uncertainty of their words.
    - `draws`: so many single draws say what they would have said.
    """
    how = decoding or Decoding()
    end, forbidden = vocabulary.index[END], (vocabulary.index[UNKNOWN],)

    def say(what: str, count: int, own_seed: int) -> list[Caption]:
        advance = None if watch is None else watch(what, len(vectors))
        return decode_captions(
            model, vectors, end, how, count, own_seed, forbidden, advance=advance
        )

    found = say("captioning", samples, seed)
    ids = [[*caption.ids, end] for caption in found]
    figures = read_again(
        model, vectors, range(len(vectors)), ids, end, reading_samples, seed, watch=watch
    )
    single = [say(f"draw {i + 1} speaks", 1, seed + i) for i in range(draws)]
    pictures = [
        Captioned(
            name,
            _text(caption.ids, vocabulary),
            caption.log_p,
            each.confidence,
            each.total.mean().item(),
            each.aleatoric.mean().item(),
            each.epistemic.mean().item(),
            _words([*caption.ids, end], each, vocabulary),
            [_text(said[i].ids, vocabulary) for said in single],
        )
        for i, (name, caption, each) in enumerate(zip(names, found, figures, strict=True))
    ]
    return CaptionFile(pictures, samples, reading_samples, how)


def read_again(
    model: Network,
    vectors: Tensor,
    rows: Sequence[int],
    captions: Sequence[Sequence[int]],
    end: int,
    samples: int = 10,
    seed: int = 1,
    top: int = 1,
    watch: Watch | None = None,
    what: str = "asking how sure",
) -> list[TextUncertainty]:
    """How sure `samples` draws are of captions (ids with their end mark), each of the picture in
    that row of `vectors`."""
    lengths = sorted(set(map(len, captions)))
    loader = CaptionLoader(rows, captions, end, READ, lengths, device=vectors.device)
    advance = None if watch is None else watch(what, reading_cost(model, loader.targets, [samples]))
    return caption_uncertainty(model, loader, vectors, (samples,), seed, top, advance)[samples]


def _text(ids: Sequence[int], vocabulary: Vocabulary) -> str:
    return " ".join(vocabulary.decode(ids))


def _words(ids: Sequence[int], figures: TextUncertainty, vocabulary: Vocabulary) -> list[list[Any]]:
    numbers = torch.stack([getattr(figures, part) for part in PARTS], dim=1).tolist()
    rows = zip(vocabulary.decode(ids), numbers, strict=True)
    return [[word, *(float(f"{x:.6g}") for x in line)] for word, line in rows]


# --- does the uncertainty tell anything? ---------------------------------------------------------


@dataclass(frozen=True)
class Ranking:
    """Whether unsure captions are bad ones: the mean CIDEr of all, of the surest half and tenth,
    its mean over all coverages (`area`), and what `area` would be with the captions ranked by
    CIDEr itself; Spearman's correlation of the uncertainty with CIDEr (below 0 is good; None where
    either is the same everywhere)."""

    cider: float
    cider_half: float
    cider_tenth: float
    area: float
    best_area: float
    correlation: float | None


def rank_captions(uncertainty: Tensor, cider: Tensor) -> Ranking:
    """Keep the surest captions, drop the others: risk and coverage with CIDEr in the place of a
    loss."""
    curve = risk_coverage(uncertainty, -cider)
    quality = 0.0 - curve.risk  # and no -0.0

    def at(share: float) -> float:
        return quality[max(1, round(share * len(quality))) - 1].item()

    best = 0.0 - risk_coverage(-cider, -cider).risk.mean().item()
    both = torch.stack([ranks(uncertainty), ranks(cider)])
    spread = bool((both.amax(dim=1) > both.amin(dim=1)).all())
    correlation = torch.corrcoef(both)[0, 1].item() if spread else None
    return Ranking(at(1.0), at(0.5), at(0.1), quality.mean().item(), best, correlation)


@dataclass(frozen=True)
class Foreign:
    """Mean uncertainty a word with what does not fit, and how often it is above that of a caption
    with its own picture (AUROC; 0.5: it tells nothing). None where there is nothing to read."""

    total: float | None
    epistemic: float | None
    total_auroc: float | None
    epistemic_auroc: float | None


def foreign_pictures(
    model: Network,
    vectors: Tensor,
    own: CaptionFile,
    vocabulary: Vocabulary,
    seed: int = 1,
    watch: Watch | None = None,
) -> dict[str, Foreign]:
    """The out-of-distribution check. "wrong picture": each caption of `own` is read with another
    picture before it, where there is one. "noise": the numbers of every picture are shuffled,
    and a caption is made of what is left."""
    end = vocabulary.index[END]
    random = torch.Generator().manual_seed(seed)
    ids = [vocabulary.encode([word[0] for word in each.words]) for each in own.pictures]
    order = torch.randperm(len(vectors), generator=random)
    other = torch.empty_like(order)
    other[order] = order.roll(1)  # one large circle: no picture stays where it is
    samples = own.reading_samples
    wrong: list[TextUncertainty] = []
    if len(vectors) > 1:
        rows, what = other.tolist(), "wrong pictures"
        wrong = read_again(model, vectors, rows, ids, end, samples, seed, watch=watch, what=what)
    places = torch.stack([torch.randperm(vectors.shape[1], generator=random) for _ in vectors])
    noise = vectors.gather(1, places.to(vectors.device))
    names = [each.name for each in own.pictures]
    shuffled = caption_pictures(
        model, noise, names, vocabulary, own.decoding, own.samples, samples, seed=seed, watch=watch
    )
    figures = {
        "wrong picture": {
            p: [getattr(each, p).mean().item() for each in wrong] for p in ("total", "epistemic")
        },
        "noise": {p: [getattr(e, p) for e in shuffled.pictures] for p in ("total", "epistemic")},
    }
    return {which: _foreign(own, parts) for which, parts in figures.items()}


def _foreign(own: CaptionFile, parts: Mapping[str, list[float]]) -> Foreign:
    if not parts["total"]:
        return Foreign(None, None, None, None)

    def above(part: str) -> float:
        mine = torch.tensor([getattr(each, part) for each in own.pictures])
        return auroc(mine, torch.tensor(parts[part]))

    means = {part: sum(values) / len(values) for part, values in parts.items()}
    return Foreign(means["total"], means["epistemic"], above("total"), above("epistemic"))
