"""What every test shares: one thread, fixed seeds, hypothesis settings, optional data sets."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest
import torch

from bayesrnn.cli import main
from small_runs import Cli, Result

ROOT = Path(__file__).resolve().parent.parent

torch.set_num_threads(1)  # the tests run in several processes; more threads only get in the way


class TorchRandom:
    """torch's generator as hypothesis wants it: reset for every example, restored afterwards."""

    seed = staticmethod(torch.manual_seed)
    getstate = staticmethod(torch.get_rng_state)
    setstate = staticmethod(torch.set_rng_state)


torch_random = TorchRandom()  # hypothesis keeps only a weak reference
hypothesis.register_random(torch_random)

hypothesis.settings.register_profile("local", deadline=None, max_examples=30)
hypothesis.settings.register_profile("ci", deadline=None, max_examples=30, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


def shared_data(name: str) -> Path:
    """The folder of a data set that is not part of the repository; skips the test without it.

    The data sets lie side by side in one folder: $BAYESRNN_DATA, or ../shared/data.
    """
    folder = Path(os.environ.get("BAYESRNN_DATA") or ROOT / "../shared/data").resolve() / name
    if not folder.exists():
        pytest.skip(f"data set {name!r} is not here; set BAYESRNN_DATA to the folder that holds it")
    return folder


@pytest.fixture
def data_folder() -> Callable[[str], Path]:
    """`data_folder("ptb")` is the path of that data set, or the test is skipped."""
    return shared_data


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Run a command in this process."""

    def run(*arguments: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["bayesrnn", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main()
        return Result(int(caught.value.code or 0), *capsys.readouterr())

    return run
