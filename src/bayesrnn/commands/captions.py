"""What `evaluate` and `uncertainty` do with a run on captions."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bayesrnn.bayes import Network
from bayesrnn.evaluate.caption_scores import can_score, check_meteor, score_captions
from bayesrnn.evaluate.captioned import (
    CaptionFile,
    caption_pictures,
    foreign_pictures,
    rank_captions,
)
from bayesrnn.evaluate.captions import evaluate_captions
from bayesrnn.evaluate.decoding import Decoding
from bayesrnn.evaluate.draws import each_draw
from bayesrnn.evaluate.reader import Watch
from bayesrnn.train.captioning import CaptionTask

UNSCORED = ("bleu1", "bleu2", "bleu3", "bleu4", "cider", "rouge_l")
"""What is null without the scorers."""


def evaluate_run(
    model: Network,
    task: CaptionTask,
    split: str,
    samples: int,
    beam: int,
    seed: int,
    predictions: Path | None,
    meteor: bool,
    watch: Watch,
) -> dict[str, Any]:
    """Perplexity, and the scores of captions; these into a file, where one is given."""
    check_meteor(meteor)
    loader = task.captions(split)
    generator = torch.Generator(task.device).manual_seed(seed)
    advance = watch(f"reading {split}", loader.targets * len(each_draw(model, samples)))
    found = evaluate_captions(model, loader, task.vectors, samples, generator, advance)
    captions = own_captions(model, task, split, samples, samples or 10, beam, seed, watch)
    if predictions is not None:
        captions.write(predictions)
    scores: dict[str, float | None] = dict.fromkeys(UNSCORED)
    if can_score():
        watch("scoring", 1)
        scores |= score_captions(captions.captions, task.pictures(split).references, meteor).scores
    return {
        "pictures": len(captions.pictures),
        **found.summary(),
        "beam": beam,
        **scores,
        "confidence": captions.mean("confidence"),
        "epistemic": captions.mean("epistemic"),
    }


def uncertainty_of_run(
    model: Network, task: CaptionTask, split: str, samples: int, seed: int, watch: Watch
) -> dict[str, Any]:
    """By `samples` draws, of the captions that the mean gives: uncertainty a word, whether it ranks
    bad captions, and whether what does not fit raises it."""
    captions = own_captions(model, task, split, 0, samples, Decoding.beam, seed, watch)
    parts = ("confidence", "total", "aleatoric", "epistemic")
    figures: dict[str, Any] = {part: captions.mean(part) for part in parts}
    rows = task.pictures(split).rows
    others = foreign_pictures(model, task.vectors[rows], captions, task.vocabulary, seed, watch)
    for which, found in others.items():
        figures |= {f"{which.replace(' ', '_')}_{k}": value for k, value in asdict(found).items()}
    if can_score():
        watch("scoring", 1)
        scores = score_captions(captions.captions, task.pictures(split).references)
        cider = torch.from_numpy(scores.by_picture["cider"])
        for part in ("total", "epistemic"):
            by = torch.tensor([getattr(each, part) for each in captions.pictures])
            ranking = asdict(rank_captions(by, cider))
            figures |= {f"by_{part}_{key}": value for key, value in ranking.items()}
    return {"samples": samples, **figures}


def own_captions(
    model: Network,
    task: CaptionTask,
    split: str,
    samples: int,
    reading_samples: int,
    beam: int,
    seed: int,
    watch: Watch,
) -> CaptionFile:
    pictures = task.pictures(split)
    return caption_pictures(
        model,
        task.vectors[pictures.rows],
        pictures.names,
        task.vocabulary,
        Decoding(beam=beam),
        samples,
        reading_samples,
        seed=seed,
        watch=watch,
    )
