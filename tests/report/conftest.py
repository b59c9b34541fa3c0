"""Small finished runs, made once for all tests of the report."""

from pathlib import Path

import pytest

from bayesrnn.train import loop
from labelled_runs import image_recipe, review_recipe
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
