"""The reproduction's script: a whole job on a small text, stopped, resumed, and what it keeps."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bayesrnn.train.loop import Trainer, train
from scripts import load_script
from small_runs import environment, small_recipe, write_text

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def reproduce(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / "reproduce.py"), "--data", str(folder / "text")]
    command += ["--out", str(folder / "out"), "--quick", "--commit", "0123abc", *flags]
    cache = {"XDG_CACHE_HOME": str(folder / "cache")}
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment() | cache
    )


def test_a_job_is_stopped_by_its_deadline_and_then_done_and_then_left_alone(tmp_path: Path) -> None:
    for split, words in (("train", 1000), ("valid", 300), ("test", 200)):
        write_text(tmp_path / "text", words, f"ptb.{split}.txt")
    job = tmp_path / "out" / "brnn-3.json"
    flags = ("--only", "brnn", "--seeds", "3", "--jobs", "2")
    stopped = reproduce(tmp_path, *flags, "--deadline", "0")
    assert stopped.returncode == 3, stopped.stderr
    assert not json.loads(job.read_text())["complete"]
    done = reproduce(tmp_path, *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(job.read_text())
    assert record["complete"]
    assert record["failed"] == {}
    assert (record["model"], record["seed"], record["commit"]) == ("brnn", 3, "0123abc")
    assert len(record["epochs"]) == 2
    found = record["evaluations"]
    assert found["valid"]["perplexity"] == record["epochs"][-1]["valid_perplexity"]
    assert found["prune"]["all"][0]["error"] == pytest.approx(found["valid"]["perplexity"])
    assert found["test_de_chosen"]["rate"] in (0.05, 0.1)
    short = found["test_short_dv"]
    assert (short["segment"], short["rate"]) == (10, found["test_dv_chosen"]["rate"])
    learning = {"rate": found["test_de_chosen"]["rate"]}
    for how, rest in (("", {"samples": 0}), ("_mc", {"samples": 2}), ("_de", learning)):
        best = found[f"temperature{how}"]
        for split in ("valid", "test"):
            tempered = found[f"{split}_tempered{how}"]
            assert tempered.items() >= rest.items()
            assert tempered["temperature"] == best["temperature"]
        lowest = min(trial["perplexity"] for trial in best["tried"])
        assert found[f"valid_tempered{how}"]["perplexity"] <= lowest * 1.001
    assert [row["samples"] for row in found["gap"]["by_draws"]] == [0, 2]
    assert "prune_80_retrained" in found
    assert str(tmp_path) not in job.read_text()
    assert not (tmp_path / "out/runs/brnn-3").exists()
    before = job.read_bytes()
    again = reproduce(tmp_path, *flags)
    assert again.returncode == 0
    assert "training" not in again.stdout
    assert job.read_bytes() == before
    other = reproduce(tmp_path, *flags, "--set", "train.lr=0.5")
    assert "was made with other settings; give a --tag" in other.stderr


@pytest.mark.parametrize("same", [True, False])
def test_figures_are_taken_again_of_the_same_network_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], same: bool
) -> None:
    script = load_script(BENCHMARKS / "reproduce.py")
    curve = [{"epoch": 1, "valid_perplexity": 120.0}, {"epoch": 2, "valid_perplexity": 90.0}]
    kept = {"perplexity": 90.0}
    recorded = {
        "model": "brnn",
        "seed": 2,
        "overrides": [],
        "commit": "old",
        "complete": True,
        "trained": True,
        "commands": ["bayesrnn train"],
        "plan": {"steps": []},
        "epochs": curve,
        "evaluations": {"valid": kept, "gap": {}, "gap_more": {}},
        "failed": {"valid_de_0.1": "diverged"},
    }
    (tmp_path / "brnn.json").write_text(json.dumps([recorded, recorded | {"seed": 3}]))
    monkeypatch.setattr(script, "RECORDED", tmp_path)
    plan = script.QUICK_PLAN
    again = ("gap*", "valid_de_0.1")
    out = tmp_path / "out"
    settings = script.Settings("t", out, 1, float("inf"), False, plan, [], "", "new", again)
    fresh = script.Job("brnn", 4, settings).record  # a seed that is not there
    assert (fresh["commit"], fresh["evaluations"]) == ("new", {})
    job = script.Job("brnn", 2, settings)
    assert not job.record["complete"]
    assert not job.record["trained"]
    assert job.record["evaluations"] == {"valid": kept}
    assert job.record["failed"] == {}
    last = 90.0 if same else 90.01
    now = [curve[0], {"epoch": 2, "valid_perplexity": last}]
    out.mkdir()
    monkeypatch.setattr(job, "start", lambda *a, **k: json.dumps({"run": "r", "finished": True}))
    monkeypatch.setattr(job, "curve", lambda: now)
    job.train()
    written = json.loads(job.file.read_text())
    assert written["epochs"] == now
    assert written["evaluations"] == ({"valid": kept} if same else {})
    assert written["commit"] == ("old, new" if same else "new")
    assert "curve_before" not in written
    assert ("the same network" in capsys.readouterr().out) is same


def evaluated(
    tmp_path: Path, steps: list[str], until: float, early: bool = False, **changes: Any
) -> dict[str, Any]:
    """The figures of a small run, from those that job.json holds on."""
    plan = load_script(BENCHMARKS / "reproduce.py").QUICK_PLAN | {"steps": steps}
    job, run = tmp_path / "job.json", tmp_path / "run"
    if not job.exists():
        train(small_recipe(tmp_path, **changes), run, quiet=True)
        job.write_text(json.dumps({"plan": plan, "evaluations": {}, "failed": {}}))
    record = json.loads(job.read_text()) | {"plan": plan}
    job.write_text(json.dumps(record))
    load_script(BENCHMARKS / "reproduce_job.py").work_through(job, run, until, early)
    return json.loads(job.read_text())  # type: ignore[no-any-return]


SHARPENED = {"kind": "sharpened", "scale": 0.05, "sigma0": 0.02, "eta": 0.0016}


def test_a_sharpened_model_has_its_bounds_one_after_the_other(tmp_path: Path) -> None:
    changes = {"posterior": SHARPENED, "train": {"options": {}}}
    nothing = evaluated(tmp_path, [], until=0.0, **changes)
    assert nothing["evaluations"] == {}
    first_epoch = evaluated(tmp_path, ["look"], float("inf"), early=True)["evaluations"]
    looks = ["look", "valid_bound", "look_more", "valid_bound_more"]
    assert list(first_epoch) == [f"epoch1_{name}" for name in ("valid", *looks)]
    (tmp_path / "job.json").unlink()
    (tmp_path / "run").rename(tmp_path / "after one epoch")
    first = evaluated(tmp_path, ["look", "valid_bound"], float("inf"), **changes)["evaluations"]
    assert list(first) == ["look", "valid_bound"]
    assert first["valid_bound"]["look"] == first["look"]["look"]
    best = min(first["look"]["tried"], key=lambda trial: trial["bound"])
    assert first["valid_bound"]["bound"] == best["bound"]
    every = evaluated(tmp_path, [], float("inf"))
    assert every["failed"] == {}
    found = every["evaluations"]
    assert found["valid_bound"] == first["valid_bound"]  # not measured twice
    assert found["valid_bound"]["kl"] > 0
    assert found["look_more"]["looks"] == found["test_bound_more"]["looks"] == 2
    assert found["valid_bound_more"]["bound"] != found["valid_bound"]["bound"]
    assert found["test_bound_weighed"]["draws"] == 2
    assert found["test_bound_weighed"]["look"] == found["look_more"]["look"]
    assert found["test_bound_de_chosen"]["rate"] in (0.05, 0.02)
    assert found["test_bound_dv_chosen"]["by_variance"]
    assert "prune_80_retrained" not in found


def test_bounds_go_on_from_older_searches_and_fail_without_one(tmp_path: Path) -> None:
    bounds = ["valid_bound", "look_more", "test_bound_de_chosen"]
    changes = {"posterior": SHARPENED, "train": {"options": {}}}
    without = evaluated(tmp_path, bounds, float("inf"), **changes)
    assert without["evaluations"] == {}
    assert list(without["failed"]) == bounds
    job = tmp_path / "job.json"
    older = {"look": {"look": 1.0, "tried": []}}  # of the time when there was but one
    job.write_text(json.dumps({"plan": {}, "evaluations": older, "failed": {}}))
    found = evaluated(tmp_path, ["valid_bound"], float("inf"))["evaluations"]
    assert (found["valid_bound"]["look"], found["valid_bound"]["looks"]) == (1.0, 1)


def test_a_first_epoch_is_evaluated_to_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = load_script(BENCHMARKS / "reproduce.py")
    plan = script.QUICK_PLAN
    settings = script.Settings("text", tmp_path, 1, float("inf"), False, plan, [], "", "0123abc")
    job = script.Job("sharpened", 1, settings)
    taken: list[str] = []
    monkeypatch.setattr(job, "train", lambda *flags: None)
    monkeypatch.setattr(job, "evaluate", lambda *flags: taken.extend(flags))
    job.record["evaluations"] = {"epoch1_valid_bound": {}}  # stopped there
    job.early()
    assert taken == ["--early"]
    job.record["evaluations"]["epoch1_valid_bound_more"] = {}
    job.early()
    assert taken == ["--early"]


def test_a_model_with_dropout_is_measured_with_it_on_and_off(tmp_path: Path) -> None:
    points = {"posterior": {"kind": "delta"}, "prior": {"kind": "uniform"}}
    steps = ["test", "test_mc", "gap", "prune"]
    dropout = {"kind": "naive", "input": 0.5, "output": 0.5}
    record = evaluated(tmp_path, steps, float("inf"), dropout=dropout, **points)
    found = record["evaluations"]
    assert list(found) == ["test", "test_mc", "gap"]  # points are not pruned
    assert found["test_mc"]["samples"] == 2
    off, on = found["gap"]["by_draws"]
    assert off["epistemic"] == 0
    assert on["epistemic"] > 0


def test_retraining_that_is_stopped_is_no_figure_and_goes_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluated(tmp_path, ["valid"], float("inf"))
    tick = Trainer._tick

    def stopping(self: Trainer, batch: Any) -> None:
        tick(self, batch)
        if self.step == 7:
            self.stopped_by = 15

    step = "prune_80_retrained"
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_tick", stopping)
        with pytest.raises(SystemExit):
            evaluated(tmp_path, [step], float("inf"))
    assert (tmp_path / "run-pruned-80").exists()
    assert step not in json.loads((tmp_path / "job.json").read_text())["evaluations"]
    found = evaluated(tmp_path, [step], float("inf"))["evaluations"][step]
    assert found["valid_perplexity"] == pytest.approx(found["valid_perplexity_by_epoch"][-1])
    assert not (tmp_path / "run-pruned-80").exists()
