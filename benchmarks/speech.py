"""AN4 by the ten networks of Graves 2011, Table 1, and the two-dimensional one; pruning (Table 2).

Make the features once, where the audio and a library for it are:

    bayesrnn prepare recipes/an4-ml.toml data.path=an4 --out an4-mel
    bayesrnn prepare recipes/an4-mdlstm-ml.toml data.path=an4 --out an4-linear

and train anywhere, all networks side by side, each in a process of its own:

    python benchmarks/speech.py --mel an4-mel --linear an4-linear --out runs/an4 --minutes 9 \\
        --gpu mdlstm-ml mdlstm-adaptive-weight-noise adaptive-weight-noise

The bidirectional networks are small enough for one CPU core each.

It stops by itself when its time is over; the same command goes on where it was. Everything of a
network that is finished is in OUT/NAME.json, and all of them together in OUT/speech.json.
"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
NETWORKS = (
    "adaptive-weight-noise",  # first, because pruning waits for it
    "adaptive-prior-weight-noise",
    "weight-noise",
    "ml",
    "l1",
    "adaptive-mean-l1",
    "l2",
    "adaptive-mean-l2",
    "adaptive-l2",
    "adaptive-l1",
)
HIERARCHICAL = ("mdlstm-adaptive-weight-noise", "mdlstm-ml")
FISHER = "adaptive-weight-noise-fisher"
CURVES = ("ml", "weight-noise", "adaptive-prior-weight-noise", "adaptive-weight-noise")
LAMBDAS = (0.0, 0.01, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
CURVE_KEYS = ("epoch", "train_nll", "valid_nll", "valid_per", "test_nll", "test_per", "total_bits")


class OutOfTime(Exception):
    """The time is over, and what was running has saved itself."""


class Commands:
    """Runs `bayesrnn` commands as processes until a deadline; those that run then get SIGTERM."""

    def __init__(self, seconds: float, threads: int) -> None:
        self.deadline = time.monotonic() + seconds
        self.environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(threads),
            "PYTHONPATH": str(ROOT / "src"),
        }
        self._running: set[subprocess.Popen[str]] = set()
        self._lock = threading.Lock()

    def __call__(self, *arguments: object) -> dict[str, Any]:
        """What the command prints with --json; `OutOfTime` where it could not end."""
        if time.monotonic() > self.deadline:
            raise OutOfTime
        command = [sys.executable, "-m", "bayesrnn", *map(str, arguments), "--json"]
        process = subprocess.Popen(
            command,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        with self._lock:
            self._running.add(process)
        try:
            out, err = process.communicate()
        finally:
            with self._lock:
                self._running.discard(process)
        if process.returncode != 0:
            if time.monotonic() > self.deadline:
                raise OutOfTime
            raise RuntimeError(f"{' '.join(command[3:])}: {err.strip()[-500:]}")
        found: dict[str, Any] = json.loads(out)
        if found.get("finished") is False:
            raise OutOfTime
        return found

    def stop_in_time(self) -> None:
        """To be run beside the others: ends them when the time is over."""
        while time.monotonic() < self.deadline:
            time.sleep(0.5)
        with self._lock:
            for process in self._running:
                process.send_signal(signal.SIGTERM)


def train(given: argparse.Namespace, run: Commands, name: str) -> dict[str, Any]:
    """Train one network, and score it."""
    data = given.linear if name in HIERARCHICAL else given.mel
    device = "cuda" if name in given.gpu else given.device
    settings = [f"data.path={data}", f"train.device={device}", f"train.seed={given.seed}"]
    settings += ["posterior.estimator=fisher"] if name == FISHER else []
    settings += [f"train.epochs={given.epochs}"] if given.epochs else []
    recipe = ROOT / "recipes" / f"an4-{name.removesuffix('-fisher')}.toml"
    folder = given.out / name
    done = run("train", recipe, *settings, *given.set, "--out", folder, "--quiet")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    epochs = [line for line in lines if line["kind"] == "epoch"]
    found = {key: done[key] for key in ("epochs", "kept_epoch", "seconds")}
    found |= {"device": device, "settings": [*settings, *given.set]}
    found |= score(run, folder, device, described=done["complexity_bits"] is not None)
    if name in (*CURVES, *HIERARCHICAL, FISHER):
        found["curve"] = {
            key: [round(line[key], 4) for line in epochs]
            for key in CURVE_KEYS
            if epochs and epochs[0].get(key) is not None
        }
    return found


def score(run: Commands, folder: Path, device: str, described: bool) -> dict[str, Any]:
    """Phone error rates of the test set by all ways of decoding; the description length, by
    draws."""
    found: dict[str, Any] = {}
    for decoding in ("greedy", "beam", "prefix"):
        done = run("evaluate", folder, "--decoding", decoding, "--device", device)
        found[f"per_{decoding}"] = done["per"]
    found |= {"per": done["per"], "test_nll": done["nll"]}
    if described:
        draws = run("evaluate", folder, *BY_DRAWS, "--device", device)
        keys = ("error_bits", "complexity_bits", "total_bits", "uniform_bits", "ratio")
        found |= {key: draws[key] for key in (*keys, "bits_per_weight")}
    return found


BY_DRAWS = "--split train --samples 3 --decoding greedy".split()  # noqa: SIM905


def prune(given: argparse.Namespace, run: Commands, threshold: float) -> dict[str, Any]:
    """A row of Table 2: the trained network pruned, and retrained."""
    source = given.out / "adaptive-weight-noise"
    before, after = (given.out / f"prune-{threshold:g}{end}" for end in ("", "-retrained"))
    by = ("--threshold", threshold, "--scale", "--quiet")
    facts = before / "pruned.json"
    if not facts.exists():
        done = run("prune", source, *by, "--out", before)
        facts.write_text(json.dumps({key: done[key] for key in ("weights", "percent")}))
    found = run("evaluate", before, "--device", "cpu")
    row = {"lambda": threshold, **json.loads(facts.read_text()), "per": found["per"]}
    row["bits_per_weight"] = found["bits_per_weight"]
    if threshold == 0:  # nothing was pruned, so nothing is retrained: as in the paper
        return row | {"per_retrained": row["per"], "retrain_epochs": 0}
    done = run("prune", source, *by, "--retrain", given.retrain, "--out", after)
    found = run("evaluate", after, "--device", "cpu")
    row["bits_per_weight"] = found["bits_per_weight"]
    return row | {"per_retrained": found["per"], "retrain_epochs": len(done["epochs"])}


def wanted(given: argparse.Namespace, run: Commands) -> dict[str, Callable[[], dict[str, Any]]]:
    """All there is to do, by name, but for what was not asked for."""
    names = [
        *NETWORKS,
        *(HIERARCHICAL if given.linear else ()),
        *([FISHER] if given.fisher else []),
    ]
    jobs = {name: (lambda n=name: train(given, run, n)) for name in names}
    if (given.out / "adaptive-weight-noise.json").exists() and given.retrain:
        jobs |= {f"prune-{each:g}": (lambda t=each: prune(given, run, t)) for each in LAMBDAS}
    return {name: job for name, job in jobs.items() if not given.only or name in given.only}


def finish(given: argparse.Namespace, name: str, job: Callable[[], dict[str, Any]]) -> str:
    """Do one job and write down what it found; what became of it."""
    path = given.out / f"{name}.json"
    if not path.exists():
        try:
            path.write_text(json.dumps(job()) + "\n")
        except OutOfTime:
            return "goes on the next time"
        except RuntimeError as error:
            return f"failed: {error}"
    found = json.loads(path.read_text())
    return f"{found['per']:.2f} % phone errors"


def collect(out: Path, linear: Path | None) -> dict[str, Any]:
    """Everything that is finished."""
    found = {
        path.stem: json.loads(path.read_text())
        for path in sorted(out.glob("*.json"))
        if path.stem != "speech"
    }
    rows = [found.pop(f"prune-{each:g}") for each in LAMBDAS if f"prune-{each:g}" in found]
    whole = found.get(HIERARCHICAL[0])  # the one that trains on all utterances
    if whole is not None and linear is not None:
        parts = json.loads((linear / "features.json").read_text())["parts"]
        whole["utterances_per_second"] = parts["train"] * whole["epochs"] / whole["seconds"]
    facts = {"torch": torch.__version__, "machine": platform.machine(), "cores": os.cpu_count()}
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {**facts, "gpu": gpu, "networks": found, "pruning": rows}


def entries(found: dict[str, Any], common: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What results/summary.json says of all this; `common` is the same in every entry. The paper's
    numbers are of TIMIT, so none is entered as the one to compare with."""
    values: dict[str, tuple[float, str]] = {}
    for name, one in found["networks"].items():
        key = f"an4.{name.replace('-', '_')}"
        values[f"{key}.per"] = one["per"], "% of the phones"
        values[f"{key}.epochs"] = one["kept_epoch"], "epochs"
        if name == HIERARCHICAL[1]:  # stopped early, and the other not: both by the best path
            best = "% of the phones (best path)"
            values[f"{key}.per_best_path"] = one["per_greedy"], best
            last = f"{best}, not stopped, after {one['epochs']} epochs"
            values[f"{key}.per_last_epoch"] = one["curve"]["test_per"][-1], last
        if one.get("ratio") is not None:
            values[f"{key}.ratio"] = one["ratio"], "bits / bits of a uniform code"
        if "utterances_per_second" in one:
            speed = one["utterances_per_second"]
            values["an4.mdlstm_utterances_per_second"] = speed, "utterances trained a second"
    units = {
        "weights": "weights",
        "percent": "% of the weights",
        "per": "% of the phones",
        "per_retrained": "% of the phones",
        "retrain_epochs": "epochs",
        "bits_per_weight": "bits a weight",
    }
    for row in found["pruning"]:
        for name, unit in units.items():
            values[f"an4.prune_{row['lambda']:g}.{name}"] = row[name], unit
    return {
        key: {"value": value, "unit": unit, "published": None, **common}
        for key, (value, unit) in values.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mel", type=Path, help="features of an4-*.toml")
    parser.add_argument("--linear", type=Path, help="features of an4-mdlstm-*.toml (else left out)")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--workers", type=int, default=12, help="processes side by side")
    parser.add_argument("--threads", type=int, default=1, help="of each process, on a CPU")
    parser.add_argument("--device", default="cpu", help="for all but those of --gpu")
    parser.add_argument("--gpu", nargs="*", default=[], help="names of networks to train on a GPU")
    parser.add_argument("--epochs", type=int, help="instead of the recipes'")
    parser.add_argument("--retrain", type=int, default=30, help="epochs after pruning (0: none)")
    parser.add_argument("--fisher", action="store_true", help="the Fisher estimate of sigma too")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="*", help="names: ml l2 prune-0.5 ...")
    parser.add_argument("--set", nargs="*", default=[], help="changes to all recipes: train.lr=...")
    parser.add_argument(
        "--summary",
        type=json.loads,
        help="train nothing; print entries for results/summary.json with these further fields: "
        '{"hardware": ..., "command": ..., "commit": ..., "log": ...}',
    )
    given = parser.parse_args()
    if given.summary is not None:
        found = json.loads((given.out / "speech.json").read_text())
        print(json.dumps(entries(found, {"seeds": [given.seed], **given.summary}), indent=1))
        return
    if given.mel is None:
        parser.error("--mel is needed, to train on")
    given.out.mkdir(parents=True, exist_ok=True)
    run = Commands(60 * given.minutes, given.threads)
    threading.Thread(target=run.stop_in_time, daemon=True).start()
    begun: set[str] = set()
    pending: dict[Future[str], str] = {}
    with ThreadPoolExecutor(given.workers) as pool:
        while True:  # pruning joins in once there is a network to prune
            for name, job in wanted(given, run).items():
                if name not in begun:
                    begun.add(name)
                    pending[pool.submit(finish, given, name, job)] = name
            if not pending:
                break
            for future in wait(pending, return_when=FIRST_COMPLETED).done:
                print(f"{pending.pop(future)}: {future.result()}", flush=True)
    (given.out / "speech.json").write_text(json.dumps(collect(given.out, given.linear)) + "\n")


if __name__ == "__main__":
    main()
