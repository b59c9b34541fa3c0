"""Batches of utterances: everything once, similar lengths together, padding never counted."""

import numpy as np
import pytest
import torch

from bayesrnn.data import Utterance, UtteranceLoader, choose_lengths
from bayesrnn.data.audio import STEP
from bayesrnn.errors import Invalid, UserError


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


def few_lengths(sounds: list[Utterance]) -> list[int]:
    return choose_lengths([len(one.features) for one in sounds], 3)


@pytest.mark.parametrize("few", [False, True])
def test_every_utterance_once_with_all_its_labels(few: bool) -> None:
    sounds = utterances()
    lengths = few_lengths(sounds) if few else None
    loader = UtteranceLoader(sounds, streams=4, seed=7, lengths=lengths)
    batches = list(loader)
    assert len(batches) == len(loader) == 6
    assert sum(batch.targets for batch in batches) == loader.targets
    assert sum(batch.share for batch in batches) == pytest.approx(1)
    seen = []
    if lengths is not None:  # few shapes: all batches are full, of rows of nothing where need be
        assert {batch.streams for batch in batches} == {4}
        assert {len(batch.x) for batch in batches} == set(lengths)
        assert len({batch.y.shape for batch in batches}) == 1
    for batch in batches:
        assert batch.x.shape[1] == len(batch.y) == batch.streams
        assert int((batch.y >= 0).sum()) == batch.targets
        for b in range(batch.streams):
            inside = ~batch.x[:, b].isnan().any(dim=1)
            frames = int(inside.sum())
            assert inside[:frames].all()
            labels = tuple(label for label in batch.y[b].tolist() if label >= 0)
            if few and not frames:
                assert labels == ()
                continue
            seen.append((tuple((batch.x[:frames, b, 0] / STEP).round().int().tolist()), labels))
    assert sorted(seen) == sorted((tuple(u.features[:, 0].tolist()), u.labels) for u in sounds)


@pytest.mark.parametrize("few", [False, True])
def test_similar_lengths_lie_together(few: bool) -> None:
    sounds = utterances(200)
    lengths = choose_lengths([len(one.features) for one in sounds], 6) if few else None
    loader = UtteranceLoader(sounds, streams=10, seed=1, lengths=lengths)
    padded = sum(batch.x[..., 0].isnan().sum().item() for batch in loader)
    read = sum(batch.x[..., 0].numel() for batch in loader)
    assert padded / read < 0.15


@pytest.mark.parametrize("few", [False, True])
def test_orders_are_a_function_of_seed_and_epoch_and_can_go_on(few: bool) -> None:
    sounds = utterances()
    lengths = few_lengths(sounds) if few else None
    one, other = (UtteranceLoader(sounds, streams=4, seed=7, lengths=lengths) for _ in range(2))
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


def test_utterances_longer_than_all_lengths_are_refused() -> None:
    with pytest.raises(Invalid, match=r"lengths must reach \d+, the longest"):
        UtteranceLoader(utterances(), streams=2, lengths=[10, 20])
