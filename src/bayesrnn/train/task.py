"""What is learnt: a task gives the batches, the loss of one, and the validation figure."""

from typing import Protocol

import torch
from torch import Tensor

from bayesrnn.bayes import Bayesian
from bayesrnn.data import Batch, Corpus, StreamLoader, Vocabulary, load_text
from bayesrnn.evaluate.perplexity import evaluate_text, token_losses
from bayesrnn.models.language import State, detach
from bayesrnn.recipe import Recipe

EVALUATION_TOKENS = 512
"""Tokens a cut of an evaluation; the state is carried, so it changes speed and memory only."""


class Task(Protocol):
    """All the trainer knows of what it trains."""

    @property
    def batches(self) -> StreamLoader: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def digest(self) -> str: ...

    def nll(self, model: Bayesian, batch: Batch, state: State | None) -> tuple[Tensor, State]: ...

    def validate(self, model: Bayesian) -> dict[str, float]: ...


class LanguageTask:
    """Predict the next token of a text."""

    def __init__(
        self, recipe: Recipe, device: torch.device, vocabulary: Vocabulary | None = None
    ) -> None:
        self.corpus: Corpus = load_text(recipe.data, vocabulary)
        self.device = device
        train = recipe.train
        self.batches = StreamLoader(
            self.corpus.ids["train"], train.streams, train.unroll, train.drop_last, device, "train"
        )
        self._valid = self.stream("valid", train.valid_streams)

    @property
    def digest(self) -> str:
        """Of the text: a resumed run must go on with the same."""
        return self.corpus.digest

    def stream(self, split: str, streams: int = 1, unroll: int | None = None) -> StreamLoader:
        """A split for evaluation: one contiguous stream unless said otherwise."""
        unroll = max(1, EVALUATION_TOKENS // streams) if unroll is None else unroll
        return StreamLoader(self.corpus.ids[split], streams, unroll, device=self.device, name=split)

    def nll(self, model: Bayesian, batch: Batch, state: State | None) -> tuple[Tensor, State]:
        return language_nll(model, batch, state)

    def validate(self, model: Bayesian) -> dict[str, float]:
        """By the posterior mean."""
        result = evaluate_text(model, self._valid)
        return {"valid_nll": result.nll, "valid_perplexity": result.perplexity}


def language_nll(model: Bayesian, batch: Batch, state: State | None) -> tuple[Tensor, State]:
    """Each stream's summed loss, and the state to carry on (cut off from its history)."""
    logits, state = model(batch.x, state)
    return token_losses(logits, batch.y).sum(dim=0), detach(state)
