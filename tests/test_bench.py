"""The benchmark runs, compares within one run, and says what it was run on (never how fast)."""

import importlib.util
import json

import pytest
import torch

from bayesrnn import bench as bench_module
from bayesrnn.bench import PEERS, bench, report
from bayesrnn.cli import main
from bayesrnn.errors import UserError

CASES = [
    "plain, ordinary loop",
    "plain, here",
    "Bayesian, here",
    "sharpened, here",
    "softmax sharpened, here",
    "naive dropout, here",
    "variational dropout, here",
    "plain, here, bfloat16",
    "Bayesian, here, bfloat16",
]


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_module, "UNITS", {"small": 8})
    monkeypatch.setattr(bench_module, "UNROLL", {"small": 3})
    monkeypatch.setattr(bench_module, "VOCABULARY", 20)
    monkeypatch.setattr(bench_module, "has_bfloat16", lambda device: True)


def test_every_case_takes_its_turn_and_is_compared_with_the_ordinary_loop() -> None:
    turns = []
    timings = bench("small", "cpu", steps=2, advance=lambda: turns.append(1))
    assert [t.case for t in timings] == CASES
    assert len(turns) == 3 * len(CASES)  # one warms up
    assert timings[0].times_plain == 1.0
    for t in timings:
        assert t.words_per_second == pytest.approx(60 / (t.ms / 1000), rel=0.01)
    found = report(timings, "small", torch.device("cpu"))
    assert found["hardware"] == "CPU"
    assert len(found["timings"]) == len(CASES)


def test_only_some_cases_may_be_timed() -> None:
    timings = bench("small", "cpu", steps=1, only=["Bayesian, here"])
    assert [t.case for t in timings] == ["plain, ordinary loop", "Bayesian, here"]
    with pytest.raises(UserError, match="there is no case 'Bayesian'; there are: plain, ordinary"):
        bench("small", "cpu", steps=1, only=["Bayesian"])


def test_a_processor_without_bfloat16_is_not_timed_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_module, "has_bfloat16", lambda device: False)
    assert [t.case for t in bench("small", "cpu", steps=1)] == CASES[:-2]


def test_the_command_prints_one_json_object(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["bayesrnn", "bench", "--size", "small", "--steps", "1", "--device", "cpu"]
    monkeypatch.setattr("sys.argv", [*arguments, "--json"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert [t["case"] for t in json.loads(capsys.readouterr().out)["timings"]] == CASES


@pytest.mark.skipif(importlib.util.find_spec("blitz") is not None, reason="blitz is installed")
def test_a_peer_that_is_not_installed_is_named() -> None:
    with pytest.raises(UserError, match=r"blitz is not installed; pip install 'bayesrnn\[bench\]'"):
        bench("small", "cpu", steps=1, peers=True)


@pytest.mark.skipif(importlib.util.find_spec("blitz") is None, reason="blitz is not installed")
@pytest.mark.filterwarnings("ignore")
def test_peers_that_are_installed_take_part() -> None:
    pytest.importorskip("bayesian_torch")
    timings = bench("small", "cpu", steps=1, peers=True)
    assert [t.case for t in timings] == [*CASES, *PEERS]
