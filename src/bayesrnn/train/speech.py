"""Speech as a task of the trainer."""

import torch
from torch import Tensor

from bayesrnn.bayes import Bayesian
from bayesrnn.data import (
    Batch,
    SpeechData,
    UtteranceLoader,
    Vocabulary,
    choose_lengths,
    load_speech,
)
from bayesrnn.data.speech import Utterance
from bayesrnn.errors import UserError, require
from bayesrnn.evaluate.ctc import ctc_nll
from bayesrnn.evaluate.speech import evaluate_speech
from bayesrnn.models import SpeechSettings
from bayesrnn.models.layers import State
from bayesrnn.recipe import Recipe

EVALUATION_UTTERANCES = 32
"""Utterances a batch of an evaluation; it changes speed and memory only."""
LENGTHS = 6
"""Lengths that utterances to train on are padded to, so that a GPU can replay a step of each."""


class SpeechTask:
    """Say which phones, or words, are in an utterance.

    The test set is scored after every epoch too, for the curve; nothing is chosen by it. Without a
    validation set an epoch is judged by its loss on the training set (Graves 2011, Section 8).
    """

    notes: tuple[str, ...] = ()

    def __init__(
        self, recipe: Recipe, device: torch.device, vocabulary: Vocabulary | None = None
    ) -> None:
        assert isinstance(recipe.data, SpeechData)
        assert isinstance(recipe.model, SpeechSettings)
        left_out = recipe.train.drop_last
        require((not left_out, "train.drop_last", "is not for speech: none is left out"))
        self.device = device
        self.unit: str = recipe.data.targets
        self.speech = load_speech(recipe.data)
        if vocabulary is not None and vocabulary != self.speech.vocabulary:
            raise UserError(
                f"the labels of {recipe.data.path} are not those that the run began with; put its "
                "data back, or start over with --fresh"
            )
        self.digest, self.vocabulary = self.speech.digest, self.speech.vocabulary
        self.labels = len(self.vocabulary) - 1  # the blank is never a target
        for utterances in self.speech.splits.values():
            for one in utterances:
                _check_length(one, recipe.model.frames_a_step)
        train = self.speech.splits["train"]
        lengths = None  # a blstm asks the host for those of a batch: nothing could be recorded
        if recipe.model.network == "mdlstm":
            lengths = choose_lengths([len(one.features) for one in train], LENGTHS)
        self.batches = UtteranceLoader(
            train, recipe.train.streams, recipe.train.seed, device, lengths=lengths
        )
        self._scored = [split for split in ("valid", "test") if split in self.speech.splits]
        self.watched = "valid_nll" if "valid" in self._scored else "train_nll"
        self.progress: tuple[str, ...] = (
            ("valid_nll", "valid_per") if "valid" in self._scored else ("total_bits", "train_nll")
        )

    def utterances(self, split: str) -> UtteranceLoader:
        """A split for evaluation."""
        if split not in self.speech.splits:
            raise UserError(f"there is no {split!r} set: data.valid was 0, so all of it trained")
        return UtteranceLoader(
            self.speech.splits[split], EVALUATION_UTTERANCES, device=self.device, name=split
        )

    def nll(self, model: Bayesian, batch: Batch, state: State | None) -> tuple[Tensor, None]:
        log_p, lengths = model(batch.x)
        return ctc_nll(log_p, lengths, batch.y), None

    def figures(self, nll: float) -> dict[str, float]:
        return {"nll": nll}

    def validate(self, model: Bayesian) -> dict[str, float]:
        scores: dict[str, float] = {}
        for split in self._scored:
            found = evaluate_speech(model, self.utterances(split))
            scores |= {f"{split}_nll": found.nll, f"{split}_per": found.per}
        return scores


def _check_length(one: Utterance, frames_a_step: int) -> None:
    """A labelling needs a step for each label, and one between equal ones."""
    steps = -(-len(one.features) // frames_a_step)
    repeats = sum(a == b for a, b in zip(one.labels, one.labels[1:], strict=False))
    needed = len(one.labels) + repeats
    if steps < needed:
        raise UserError(
            f"{one.name} is too short for its {len(one.labels)} labels: it gives {steps} steps of "
            f"{frames_a_step} frames, and {needed} are needed; lower model.stack or data.hop_ms, "
            "or take it out"
        )
