"""Batches of utterances: everything once, similar lengths together, padding never counted."""

import numpy as np
import pytest
import torch

from bayesrnn.data import Utterance, UtteranceLoader
from bayesrnn.data.audio import STEP
from bayesrnn.errors import UserError


def utterances(count: int = 23) -> list[Utterance]:
    dice = np.random.default_rng(3)
    found = []
    for number in range(count):
        frames, labels = int(dice.integers(4, 60)), int(dice.integers(1, 6))
        features = torch.from_numpy(dice.integers(-127, 127, (frames, 2)).astype(np.int8))
        found.append(
            Utterance(str(number), "s", features, tuple(dice.integers(1, 9, labels).tolist()))
        )
    return found


def test_every_utterance_once_with_all_its_labels() -> None:
    sounds = utterances()
    loader = UtteranceLoader(sounds, streams=4, seed=7)
    batches = list(loader)
    assert len(batches) == len(loader) == 6
    assert sum(batch.targets for batch in batches) == loader.targets
    assert sum(batch.share for batch in batches) == pytest.approx(1)
    seen = []
    for batch in batches:
        assert batch.x.shape[1] == len(batch.y) == batch.streams
        assert int((batch.y >= 0).sum()) == batch.targets
        for b in range(batch.streams):
            inside = ~batch.x[:, b].isnan().any(dim=1)
            frames = int(inside.sum())
            assert inside[:frames].all()
            labels = tuple(label for label in batch.y[b].tolist() if label >= 0)
            seen.append((tuple((batch.x[:frames, b, 0] / STEP).round().int().tolist()), labels))
    assert sorted(seen) == sorted((tuple(u.features[:, 0].tolist()), u.labels) for u in sounds)


def test_similar_lengths_lie_together() -> None:
    loader = UtteranceLoader(utterances(200), streams=10, seed=1)
    padded = sum(batch.x[..., 0].isnan().sum().item() for batch in loader)
    read = sum(batch.x[..., 0].numel() for batch in loader)
    assert padded / read < 0.15


def test_orders_are_a_function_of_seed_and_epoch_and_can_go_on() -> None:
    sounds = utterances()
    one, other = (UtteranceLoader(sounds, streams=4, seed=7) for _ in range(2))
    assert np.array_equal(one.order, other.order)
    other.epoch = 1
    assert not np.array_equal(one.order, other.order)
    one.epoch, one.position = 1, 2
    for a, b in zip(list(one), list(other)[2:], strict=True):
        assert torch.equal(a.y, b.y)
    plain = UtteranceLoader(sounds, streams=4)
    frames = [len(sounds[i].features) for i in plain.order.flatten() if i >= 0]
    assert frames == sorted(frames)


def test_no_utterances_is_an_error() -> None:
    with pytest.raises(UserError, match="'train' has no utterances"):
        UtteranceLoader([], streams=2)
