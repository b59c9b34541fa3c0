import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bayesrnn.data import StreamLoader
from bayesrnn.errors import Invalid, UserError


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, int, int]:
    """Tokens, streams and unroll with at least one whole cut."""
    streams = draw(st.integers(1, 20))
    unroll = draw(st.integers(1, 40))
    return draw(st.integers(streams * unroll + 1, 4000)), streams, unroll


@pytest.mark.parametrize("drop_last", [False, True])
@settings(max_examples=50)
@given(shape=shapes())
def test_every_target_is_predicted_once(drop_last: bool, shape: tuple[int, int, int]) -> None:
    tokens, streams, unroll = shape
    text = np.arange(tokens, dtype=np.int32)
    text.flags.writeable = False
    loader = StreamLoader(text, streams, unroll, drop_last)
    batches = list(loader)
    assert len(batches) == len(loader)
    assert [batch.first for batch in batches] == [True] + [False] * (len(batches) - 1)
    assert sum(batch.share for batch in batches) == pytest.approx(1, abs=1e-6)
    assert sum(batch.targets for batch in batches) == loader.targets
    assert loader.targets + loader.left_over + loader.dropped == tokens - 1
    assert 0 <= loader.left_over < streams
    assert 0 <= loader.dropped < streams * unroll
    assert drop_last or loader.dropped == 0
    for batch in batches:
        assert batch.x.shape == batch.y.shape
        assert batch.x.numel() == batch.targets
        assert batch.x.shape[1] == batch.streams == streams
        assert batch.x.dtype == batch.y.dtype == torch.int64
        assert torch.equal(batch.y, batch.x + 1)  # the text counts upwards
    targets = torch.cat([batch.y for batch in batches]).T.flatten()
    assert len(set(targets.tolist())) == loader.targets
    if not drop_last:
        assert targets.tolist() == list(range(1, loader.targets + 1))


def test_a_stream_is_the_text_again() -> None:
    text = np.random.default_rng(0).integers(0, 9, 100)
    batches = list(StreamLoader(text, streams=3, unroll=4))
    x = torch.cat([batch.x for batch in batches])
    for stream in range(3):
        assert x[:, stream].tolist() == text[stream * 33 : (stream + 1) * 33].tolist()


@pytest.mark.parametrize("columns", [(), (3,)], ids=["tokens", "numbers"])
def test_a_text_kept_on_a_device_is_cut_as_one_on_the_cpu_is(columns: tuple[int, ...]) -> None:
    """The same places, read with values: a device without values says what it would read."""
    ids = np.random.default_rng(0).integers(0, 9, (100, *columns))
    ids = ids.astype(np.float32 if columns else np.int32)
    there = StreamLoader(ids, streams=3, unroll=4, device="meta")
    rows = there._device_rows
    assert rows is not None
    there._device_rows = torch.from_numpy(ids).as_strided(rows.shape, rows.stride())
    for batch, expected in zip(there, StreamLoader(ids, streams=3, unroll=4), strict=True):
        assert torch.equal(batch.x, expected.x)
        assert torch.equal(batch.y, expected.y)
        assert batch.x.dtype == expected.x.dtype


def test_one_stream_predicts_all_but_the_first_token() -> None:
    loader = StreamLoader(np.arange(100), streams=1, unroll=35)
    assert (loader.targets, loader.left_over, loader.dropped, len(loader)) == (99, 0, 0, 3)


@pytest.mark.parametrize("stop", range(1, 8))
def test_position_restores_exactly(stop: int) -> None:
    text = np.random.default_rng(0).integers(0, 9, 64)
    whole = [batch.y for batch in StreamLoader(text, 3, 3)]
    assert len(whole) == 7
    loader = StreamLoader(text, 3, 3)
    seen = []
    for number, batch in enumerate(loader):
        assert loader.position == number + 1
        seen.append(batch.y)
        if number + 1 == stop:
            break
    other = StreamLoader(text, 3, 3)
    other.position = loader.position
    rest = [batch.y for batch in other]
    expected = whole[stop:] if stop < 7 else whole  # the end is the start of the next epoch
    assert len(rest) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(rest, expected, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(seen, whole[:stop], strict=True))
    assert other.position == 0
    assert len(list(other)) == 7


@pytest.mark.parametrize("position", [-1, 8])
def test_an_impossible_position(position: int) -> None:
    loader = StreamLoader(np.arange(64), 3, 3)
    with pytest.raises(Invalid, match=rf"position must be in 0\.\.7, got {position}"):
        loader.position = position


def test_too_few_tokens() -> None:
    with pytest.raises(UserError) as caught:
        StreamLoader(np.arange(12), streams=20, unroll=35, name="valid")
    assert str(caught.value) == (
        "text 'valid' has 12 tokens, fewer than 20 streams need (21); "
        "lower streams, or give more text"
    )
    with pytest.raises(UserError, match=r"; lower --streams, or give more text$"):
        StreamLoader(np.arange(12), streams=20, unroll=35, key="--streams")
    with pytest.raises(UserError, match=r"fewer than 2 streams of 35 steps need \(71\)"):
        StreamLoader(np.arange(70), streams=2, unroll=35, drop_last=True)
    with pytest.raises(UserError, match=r"; lower train.streams or train.unroll, or give more"):
        StreamLoader(np.arange(70), 2, 35, drop_last=True, key="train.streams")
    assert len(StreamLoader(np.arange(71), streams=2, unroll=35, drop_last=True)) == 1
    assert len(StreamLoader(np.arange(21), streams=20, unroll=35)) == 1
    with pytest.raises(
        UserError, match=r"has 0 tokens, fewer than 1 streams need \(2\); give more text"
    ):
        StreamLoader(np.arange(0), streams=1, unroll=1)


def test_impossible_sizes() -> None:
    with pytest.raises(Invalid, match=r"streams must.*; unroll must"):
        StreamLoader(np.arange(12), streams=0, unroll=0)


def test_a_whole_epoch_is_read_beside_one_in_progress() -> None:
    loader = StreamLoader(np.arange(41), streams=2, unroll=3)
    every = [batch.x.tolist() for batch in loader]
    loader.position = 3
    told: list[int] = []
    for number, batch in enumerate(loader.whole(told.append)):
        assert batch.x.tolist() == every[number]
        assert (len(told), loader.position) == (number, 3)  # told once it is done with
    assert sum(told) == loader.targets
    next(loader.whole())  # left early
    assert [batch.x.tolist() for batch in loader] == every[3:]
