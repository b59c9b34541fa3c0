"""A series as a task of the trainer."""

from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from bayesrnn.bayes import Bayesian
from bayesrnn.data import Batch, SeriesData, StreamLoader, Vocabulary, load_series
from bayesrnn.data.series import uneven
from bayesrnn.errors import require
from bayesrnn.evaluate.baselines import best_season
from bayesrnn.evaluate.series import OUTPUT, PAST, READ_STEPS, evaluate_series, read_series
from bayesrnn.models import SeriesSettings
from bayesrnn.models.layers import State, detach
from bayesrnn.recipe import Recipe
from bayesrnn.train.streams import training_streams


class SeriesTask:
    """Predict the next row of a series."""

    unit = "values"
    watched = "valid_nll"
    progress: tuple[str, ...] = ()
    vocabulary: ClassVar[None] = None
    labels: ClassVar[None] = None

    def __init__(
        self, recipe: Recipe, device: torch.device, vocabulary: Vocabulary | None = None
    ) -> None:
        assert isinstance(recipe.data, SeriesData)
        self.device = device
        self.series = load_series(recipe.data)
        self.digest = self.series.digest
        every = [time for rows in self.series.splits.values() for time in rows.times]
        self.notes: tuple[str, ...] = tuple(filter(None, [uneven(every)]))
        assert isinstance(recipe.model, SeriesSettings)
        self._season, self._train = recipe.model.season, recipe.train

    @cached_property
    def _training(self) -> tuple[StreamLoader, StreamLoader]:
        """To learn from, and to validate on."""
        train = self._train
        batches = training_streams(self.series.splits["train"].values, train, self.device)
        valid = self.stream("valid", train.valid_streams, key="train.valid_streams")
        self._check_season()
        return batches, valid

    @property
    def batches(self) -> StreamLoader:
        return self._training[0]

    def _check_season(self) -> None:
        """Refuse one that no stream is as long as: what was a season before would never be read."""
        season, train = self._season, self._train
        for split, key, streams in (
            ("train", "train.streams", train.streams),
            ("valid", "train.valid_streams", train.valid_streams),
        ):
            rows = (len(self.series.splits[split]) - 1) // streams
            require(
                (
                    season <= rows,
                    "model.season",
                    f"must be at most {rows}, the rows of a stream of '{split}', got {season}; "
                    f"lower it or {key}, or give more rows",
                )
            )

    def stream(self, split: str, streams: int = 1, key: str = "--streams") -> StreamLoader:
        """A split for evaluation: one contiguous stream unless said otherwise (by `key`)."""
        unroll = max(1, READ_STEPS // streams)
        values = self.series.part(split)
        return StreamLoader(values, streams, unroll, device=self.device, name=split, key=key)

    def season(self, split: str, steps: int) -> int:
        """That of the rows to train on, for forecasts of so many steps in a split."""
        longest = min(PAST, len(self.series.part(split)) // 2)
        return best_season(self.series.splits["train"].values, steps, longest)

    def nll(self, model: Bayesian, batch: Batch, state: State | None) -> tuple[Tensor, State]:
        raw, state = model(batch.x, state)
        return OUTPUT.nll(raw, batch.y).sum(dim=(0, 2)), detach(state)

    def figures(self, nll: float) -> dict[str, float]:
        return {"nll": nll}

    def validate(self, model: Bayesian) -> dict[str, float]:
        found = evaluate_series(read_series(model, self._training[1]), 0)
        return {"valid_nll": found.nll, "valid_rmse": found.rmse, "valid_crps": found.crps}
