"""What is learnt: a task gives the batches, the loss of one, and the validation figure."""

import math
from collections.abc import Mapping
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from bayesrnn.bayes import Bayesian
from bayesrnn.data import (
    Batch,
    CaptionData,
    Corpus,
    ExampleLoader,
    ImageData,
    Labelled,
    Loader,
    ReviewData,
    SeriesData,
    SpeechData,
    StreamLoader,
    TextData,
    Vocabulary,
    load_images,
    load_reviews,
    load_text,
)
from bayesrnn.errors import WrongData
from bayesrnn.evaluate.labelled import evaluate_labelled
from bayesrnn.evaluate.outputs import Categorical, Likelihood, Normal
from bayesrnn.evaluate.perplexity import evaluate_text, token_losses
from bayesrnn.models import MlpSettings
from bayesrnn.models.layers import State, detach
from bayesrnn.recipe import Data, Recipe
from bayesrnn.train.captioning import CaptionTask
from bayesrnn.train.series import SeriesTask
from bayesrnn.train.speech import SpeechTask
from bayesrnn.train.streams import training_streams

EVALUATION_TOKENS = 512
"""Tokens a cut of an evaluation; the state is carried, so it changes speed and memory only."""
EVALUATION_EXAMPLES = 500
"""Examples a batch of an evaluation; it changes speed and memory only."""


class Task(Protocol):
    """All the trainer knows of what it trains."""

    unit: str
    """What the targets are, in the plural: "words", say."""
    watched: str
    """The figure of an epoch that tells how good a model is: the lower, the better."""
    progress: tuple[str, ...]
    """Further figures that, becoming lower, are progress (for `train.patience`)."""
    notes: tuple[str, ...]
    """What to say of the data before they are learnt from, a line each."""

    @property
    def batches(self) -> Loader:
        """What an epoch learns from. Data that are too few for that, or to validate on, may be
        refused here: there are enough for an evaluation."""

    @property
    def device(self) -> torch.device: ...

    @property
    def digest(self) -> str:
        """Of the data: a resumed run must go on with the same."""

    @property
    def vocabulary(self) -> Vocabulary | None:
        """That of the words it reads, if it does."""

    @property
    def labels(self) -> int | None:
        """How many different labels a target may be; None where it is a number."""

    def nll(
        self, model: Bayesian, batch: Batch, state: State | None
    ) -> tuple[Tensor, State | None]:
        """Each sequence's summed loss, and the state to carry on (None: there is none)."""

    def figures(self, nll: float) -> dict[str, float]:
        """What a mean loss, in nats a target, is called; the last one is for people."""

    def validate(self, model: Bayesian) -> dict[str, float]:
        """By the posterior mean."""


def build_task(
    recipe: Recipe, device: torch.device, vocabulary: Vocabulary | None = None
) -> "LanguageTask | LabelledTask | CaptionTask | SpeechTask | SeriesTask":
    """The recipe's task; a `vocabulary` given is used instead of building one."""
    return TASKS[type(recipe.data)](recipe, device, vocabulary)


class LanguageTask:
    """Predict the next token of a text."""

    watched = "valid_perplexity"
    progress: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __init__(
        self, recipe: Recipe, device: torch.device, vocabulary: Vocabulary | None = None
    ) -> None:
        assert isinstance(recipe.data, TextData)
        self.unit = recipe.data.unit
        self.corpus: Corpus = load_text(recipe.data, vocabulary)
        self.digest, self.vocabulary = self.corpus.digest, self.corpus.vocabulary
        self.labels = len(self.vocabulary)
        self.device = device
        self._train = recipe.train

    @cached_property
    def _training(self) -> tuple[StreamLoader, StreamLoader]:
        """To learn from, and to validate on."""
        valid = self.stream("valid", self._train.valid_streams, key="train.valid_streams")
        return training_streams(self.corpus.ids["train"], self._train, self.device), valid

    @property
    def batches(self) -> StreamLoader:
        return self._training[0]

    def stream(
        self, split: str, streams: int = 1, unroll: int | None = None, key: str = "--streams"
    ) -> StreamLoader:
        """A split for evaluation: one contiguous stream unless said otherwise (by `key`)."""
        unroll = max(1, EVALUATION_TOKENS // streams) if unroll is None else unroll
        ids = self.corpus.part(split)
        return StreamLoader(ids, streams, unroll, device=self.device, name=split, key=key)

    def nll(self, model: Bayesian, batch: Batch, state: State | None) -> tuple[Tensor, State]:
        return language_nll(model, batch, state)

    def figures(self, nll: float) -> dict[str, float]:
        return {"nll": nll, "perplexity": math.exp(min(nll, 700.0))}

    def validate(self, model: Bayesian) -> dict[str, float]:
        result = evaluate_text(model, self._training[1])
        return {"valid_nll": result.nll, "valid_perplexity": result.perplexity}


class LabelledTask:
    """Predict an image's class, or a review's rating or class."""

    progress: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __init__(
        self, recipe: Recipe, device: torch.device, vocabulary: Vocabulary | None = None
    ) -> None:
        self.device = device
        self.unit = recipe.data.kind
        self.data, self.output = _load_labelled(recipe, vocabulary)
        self.digest, self.vocabulary = self.data.digest, self.data.vocabulary
        train = recipe.train
        self.batches = ExampleLoader(
            self.data.splits["train"], train.streams, train.drop_last, train.seed, device
        )
        # Without a validation set the test set is watched, and called so.
        self._split = "valid" if "valid" in self.data.splits else "test"
        self._valid = self.examples(self._split)
        error = "error_percent" if isinstance(self.output, Categorical) else "rmse"
        self.watched = f"{self._split}_{error}"
        shape = recipe.model.classes if isinstance(recipe.model, MlpSettings) else 0
        classes = recipe.data.classes if isinstance(recipe.data, ReviewData) else shape
        self.labels = classes or None

    def examples(self, split: str) -> ExampleLoader:
        """A split for evaluation, in its own order."""
        part = self.data.part(split)
        return ExampleLoader(part, EVALUATION_EXAMPLES, device=self.device, name=split)

    def nll(self, model: Bayesian, batch: Batch, state: State | None) -> tuple[Tensor, None]:
        return self.output.nll(model(batch.x), batch.y), None

    def figures(self, nll: float) -> dict[str, float]:
        return {"nll": nll}

    def validate(self, model: Bayesian) -> dict[str, float]:
        result, _ = evaluate_labelled(model, self._valid, self.output)
        return {f"{self._split}_{name}": value for name, value in result.scores.items()}


def _load_labelled(recipe: Recipe, vocabulary: Vocabulary | None) -> tuple[Labelled, Likelihood]:
    """The examples, and what the network's output says of their targets."""
    if isinstance(recipe.data, ReviewData):
        output = Categorical() if recipe.data.classes else Normal()
        return load_reviews(recipe.data, vocabulary), output
    assert isinstance(recipe.data, ImageData)
    assert isinstance(recipe.model, MlpSettings)
    data = load_images(recipe.data)
    pixels = data.splits["train"].x.shape[1]
    classes = 1 + max(int(examples.y.max()) for examples in data.splits.values())
    if pixels != recipe.model.inputs or classes > recipe.model.classes:
        raise WrongData(
            f"{recipe.data.path} has images of {pixels} pixels in {classes} classes, but the "
            f"network is for {recipe.model.inputs} pixels and {recipe.model.classes} classes",
            "a folder of such images",
            f"model.inputs to {pixels} and model.classes to {classes}",
        )
    return data, Categorical()


def language_nll(model: Bayesian, batch: Batch, state: State | None) -> tuple[Tensor, State]:
    """Each stream's summed loss, and the state to carry on (cut off from its history)."""
    logits, state = model(batch.x, state)
    return token_losses(logits, batch.y).sum(dim=0), detach(state)


TASKS: Mapping[
    type[Data], type[LanguageTask | LabelledTask | CaptionTask | SpeechTask | SeriesTask]
] = {
    TextData: LanguageTask,
    ImageData: LabelledTask,
    ReviewData: LabelledTask,
    CaptionData: CaptionTask,
    SpeechData: SpeechTask,
    SeriesData: SeriesTask,
}
