"""Batches of examples: all of them once an epoch, in an order that a restart does not change."""

import pytest
import torch

from bayesrnn import ExampleLoader, Examples, UserError


def examples(count: int = 10) -> Examples:
    y = torch.arange(count)
    return Examples(torch.stack([y, -y], dim=1).float(), y, [str(i) for i in range(count)])


def test_every_example_comes_once_with_its_own_target() -> None:
    loader = ExampleLoader(examples(), 4, seed=1)
    batches = list(loader)
    assert [batch.streams for batch in batches] == [batch.targets for batch in batches] == [4, 4, 2]
    assert sum(batch.share for batch in batches) == pytest.approx(1)
    assert all(batch.first for batch in batches)
    assert sorted(y for batch in batches for y in batch.y.tolist()) == list(range(10))
    for batch in batches:
        assert torch.equal(batch.x[:, 0], batch.y.float())
    assert (len(loader), loader.targets, loader.dropped, loader.position) == (3, 10, 0, 0)


def test_the_order_is_a_function_of_seed_and_epoch() -> None:
    def order(seed: int | None, epoch: int) -> list[int]:
        loader = ExampleLoader(examples(50), 7, seed=seed)
        loader.epoch = epoch
        return [y for batch in loader for y in batch.y.tolist()]

    assert order(1, 0) == order(1, 0)
    orders = [order(1, 0), order(1, 1), order(2, 0), order(2, 1), order(0, 1)]
    assert len({tuple(found) for found in orders}) == len(orders)
    assert order(None, 3) == list(range(50))


def test_it_goes_on_in_the_midst_of_an_epoch() -> None:
    whole = ExampleLoader(examples(50), 7, seed=3)
    whole.epoch = 2
    expected = [batch.y.tolist() for batch in whole]
    broken = ExampleLoader(examples(50), 7, seed=3)
    broken.epoch = 2
    steps = iter(broken)
    assert [next(steps).y.tolist() for _ in range(3)] == expected[:3]
    resumed = ExampleLoader(examples(50), 7, seed=3)
    resumed.epoch, resumed.position = 2, broken.position
    assert [batch.y.tolist() for batch in resumed] == expected[3:]
    resumed.position = len(resumed)  # the same as 0
    assert [batch.y.tolist() for batch in resumed] == expected
    with pytest.raises(ValueError, match=r"position must be in 0\.\.8"):
        resumed.position = 9


def test_a_smaller_last_batch_can_be_left_out() -> None:
    loader = ExampleLoader(examples(), 4, drop_last=True, seed=1)
    assert [batch.streams for batch in loader] == [4, 4]
    assert (loader.targets, loader.dropped) == (8, 2)
    with pytest.raises(UserError, match="has 10 examples, fewer than a batch needs"):
        ExampleLoader(examples(), 11, drop_last=True)
