"""Small finished runs, made once for all tests of the report."""

from pathlib import Path

import pytest

from bayesrnn.train import loop
from caption_runs import caption_recipe
from labelled_runs import image_recipe, review_recipe
from series_runs import series_recipe
from small_runs import small_recipe

POINTS = {"posterior": {"kind": "delta"}, "prior": {"kind": "uniform"}}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("report")


@pytest.fixture(scope="session")
def bayes(folder: Path) -> Path:
    loop.train(small_recipe(folder / "b"), folder / "bayes", quiet=True)
    return folder / "bayes"


@pytest.fixture(scope="session")
def plain(folder: Path) -> Path:
    loop.train(small_recipe(folder / "p", **POINTS), folder / "plain", quiet=True)
    return folder / "plain"


@pytest.fixture(scope="session")
def images(folder: Path) -> Path:
    loop.train(image_recipe(folder / "i"), folder / "images", quiet=True)
    return folder / "images"


@pytest.fixture(scope="session")
def reviews(folder: Path) -> Path:
    loop.train(review_recipe(folder / "r"), folder / "reviews", quiet=True)
    return folder / "reviews"


@pytest.fixture(scope="session")
def brnn(folder: Path) -> Path:
    """A Bayesian captioner."""
    recipe = caption_recipe(folder / "c", train={"epochs": 6})
    loop.train(recipe, folder / "brnn", quiet=True)
    return folder / "brnn"


@pytest.fixture(scope="session")
def dropout(folder: Path) -> Path:
    """Its baseline: points and dropout, on the same pictures."""
    dropped = {"kind": "naive", "output": 0.3}
    recipe = caption_recipe(folder / "c", **POINTS, dropout=dropped, train={"epochs": 4})
    loop.train(recipe, folder / "dropout", quiet=True)
    return folder / "dropout"


@pytest.fixture(scope="session")
def waves(folder: Path) -> Path:
    """A Bayesian forecaster."""
    loop.train(series_recipe(folder / "s"), folder / "waves", quiet=True)
    return folder / "waves"


@pytest.fixture(scope="session")
def still(folder: Path) -> Path:
    """Its baseline of points, on the same series."""
    loop.train(series_recipe(folder / "s", **POINTS), folder / "still", quiet=True)
    return folder / "still"
