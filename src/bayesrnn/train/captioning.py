"""Say what is in a picture: the task of a captioner."""

import math

import numpy as np
import torch
from torch import Tensor

from bayesrnn.bayes import Bayesian
from bayesrnn.data import (
    Batch,
    CaptionData,
    CaptionLoader,
    Captions,
    Pictures,
    Vocabulary,
    choose_lengths,
    load_captions,
)
from bayesrnn.data.captions import find_features
from bayesrnn.data.vocabulary import END
from bayesrnn.errors import UserError, require
from bayesrnn.evaluate.captions import caption_losses, evaluate_captions
from bayesrnn.models import CaptionerSettings
from bayesrnn.models.layers import State
from bayesrnn.recipe import Recipe

EVALUATION_CAPTIONS = 250
"""Captions a batch of an evaluation; it changes speed and memory only."""


class CaptionTask:
    """Predict the next word of a caption, given its picture and the words before."""

    unit = "words"
    progress: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __init__(
        self, recipe: Recipe, device: torch.device, vocabulary: Vocabulary | None = None
    ) -> None:
        assert isinstance(recipe.data, CaptionData)
        assert isinstance(recipe.model, CaptionerSettings)
        train = recipe.train
        require((not train.drop_last, "train.drop_last", "is not for captions: none is left out"))
        self.data: Captions = load_captions(recipe.data, vocabulary)
        self.digest, self.vocabulary = self.data.digest, self.data.vocabulary
        self.labels = len(self.vocabulary)
        self.device = device
        self.vectors = self.data.vectors.to(device)
        numbers = self.vectors.shape[1]
        if numbers != recipe.model.numbers:
            raise UserError(
                f"{find_features(recipe.data)} has vectors of {numbers} numbers, but the network "
                f"is for {recipe.model.numbers}; set model.numbers={numbers}"
            )
        self._lengths = recipe.data.lengths
        self.batches = self.captions("train", train.streams, train.seed)
        # Without a validation set the one trained on is watched, and called so.
        self._split = next(s for s in ("valid", "test", "train") if s in self.data.splits)
        self._valid = self.captions(self._split)
        self.watched = f"{self._split}_perplexity"

    def pictures(self, split: str) -> Pictures:
        if split not in self.data.splits:
            raise UserError(
                f"there is no {split!r} set, only {', '.join(self.data.splits)}; choose one of them"
            )
        return self.data.splits[split]

    def captions(
        self,
        split: str,
        streams: int = EVALUATION_CAPTIONS,
        seed: int | None = None,
        words: int = 0,
    ) -> CaptionLoader:
        """All captions of a split, or the first ones that together have no more than `words` words;
        without a seed in a fixed order, for evaluation."""
        pictures = self.pictures(split)
        of, ids = pictures.encoded(self.vocabulary)
        if words:
            sums = np.cumsum([len(caption) for caption in ids])
            count = max(1, int(np.searchsorted(sums, words, side="right")))
            of, ids = of[:count], ids[:count]
        return CaptionLoader(
            [pictures.rows[i] for i in of],
            ids,
            self.vocabulary.index[END],
            streams,
            choose_lengths([len(caption) for caption in ids], self._lengths),
            seed,
            self.device,
            split,
        )

    def nll(self, model: Bayesian, batch: Batch, state: State | None) -> tuple[Tensor, None]:
        return caption_losses(model, self.vectors, batch).sum(dim=0), None

    def figures(self, nll: float) -> dict[str, float]:
        return {"nll": nll, "perplexity": math.exp(min(nll, 700.0))}

    def validate(self, model: Bayesian) -> dict[str, float]:
        found = evaluate_captions(model, self._valid, self.vectors)
        return {f"{self._split}_nll": found.nll, f"{self._split}_perplexity": found.perplexity}
