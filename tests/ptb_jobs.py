"""Made-up job files, in the form in which benchmarks/reproduce.py writes them."""

import json
from pathlib import Path
from typing import Any

POINTS = ("plain", "plain_medium")
MASKED = ("dropout", "variational_tied", "variational_untied", "best")


def made_up_job(model: str, seed: int, level: float, **changes: Any) -> dict[str, Any]:
    """All figures of one job; `level` is its test perplexity, and each seed is 1 above the last."""
    level = level + seed - 1

    def scored(value: float, **more: Any) -> dict[str, Any]:
        return {"perplexity": value, **more}

    found: dict[str, Any] = {
        "valid": scored(level + 3),
        "test": scored(level),
        "valid_de": scored(level - 2, rate=0.1),
        "test_de": scored(level - 5, rate=0.1),
        "valid_de_0.05": scored(level - 1, rate=0.05),
        "valid_de_0.2": scored(level - 2.5, rate=0.2),
        "test_de_chosen": scored(level - 5.5, rate=0.2),
        "valid_dv_0.1": scored(level - 3, rate=0.1),
        "valid_dv_0.05": scored(level - 2, rate=0.05),
        "test_dv_chosen": scored(level - 6, rate=0.1),
        "test_short_dv": scored(level - 7, rate=0.1, segment=10),
        "temperature": {"temperature": 1.07, "tried": []},
        "test_tempered": scored(level - 1.2, temperature=1.07),
        "test_tempered_de": scored(level - 5.8, temperature=1.02, rate=0.2),
    }
    if model == "sharpened":
        found |= {
            "look": {"look": 1.25, "tried": []},
            "look_more": {"look": 1.5, "looks": 4, "tried": []},
            "epoch1_look": {"look": 2.0, "looks": 1, "tried": []},
            "epoch1_valid_bound": scored(230.0),
            "epoch1_look_more": {"look": 2.5, "looks": 4, "tried": []},
            "epoch1_valid_bound_more": scored(225.0),
            "test_bound_more": scored(level - 0.8),
            "test_bound_weighed": scored(level - 1.1, draws=16),
            "valid_bound": scored(level + 2.5),
            "test_bound": scored(level - 0.5),
            "valid_bound_de": scored(level - 2, rate=0.1),
            "valid_bound_de_0.3": scored(level - 1, rate=0.3),
            "test_bound_de": scored(level - 5, rate=0.1),
            "test_bound_de_chosen": scored(level - 5, rate=0.1),
            "valid_bound_dv_0.3": scored(level - 4, rate=0.3),
            "valid_bound_dv_0.1": scored(level - 3, rate=0.1),
            "test_bound_dv_chosen": scored(level - 7, rate=0.3),
            "test_stream_bound": scored(level - 0.6),
            "test_stream_bound_dv": scored(level - 7.5, rate=0.05),
        }
    if model == "brnn":
        found["epoch1_look_more"] = {"look": 2.5, "looks": 4, "tried": []}
        found["epoch1_valid_bound_more"] = scored(240.0)
    if model not in POINTS:
        found["test_mc"] = scored(level - 1, samples=10)
        start = 0.6 if model in MASKED else 0.65
        for name, draws in (("gap", [0, 1, 2, 5, 10]), ("gap_more", [20, 50])):
            rows = [
                {
                    "samples": n,
                    "gap": start
                    + (0.03 * (1 - 1 / (n + 1)) if model not in MASKED else -0.04 * (n > 0)),
                    "perplexity": level + 2 - n / 20,
                    "entropy": 3.8,
                    "entropy_reversed": 4.45,
                }
                for n in draws
            ]
            found[name] = {"streams": 20, "unigram_entropy": 6.33, "by_draws": rows}
    if model in ("brnn", "sharpened", "best"):
        curve = [(0.0, 0.0), (0.5, 0.2), (0.7, 1.2), (0.8, 4.0), (0.9, 20.0)]
        rows = [{"fraction": f, "error": level + 3 + up} for f, up in curve]
        found["prune"] = {"all": rows, "per_tensor": rows}
        found["prune_80_retrained"] = {"valid_perplexity": level + 3.3, "retrain_epochs": 5}
        squares = [[(7 * r + 3 * c) % 101 for c in range(65)] for r in range(260)]
        matrix = {"rows": [0] * 2600, "columns": [0] * 650, "left_percent": squares}
        matrices = {f"rnn.weight_{part}_l1": matrix for part in ("ih", "hh")}
        found["prune_map"] = {"fraction": 0.8, "side": 10, "matrices": matrices}
    epochs = [
        {"epoch": n, "valid_perplexity": level + 3 + 170 / n**1.5, "train_perplexity": 100.0}
        for n in range(1, 41)
    ]
    return {
        "model": model,
        "seed": seed,
        "recipe": f"recipes/ptb-{model}.toml",
        "overrides": [],
        "commit": "0123abc",
        "hardware": "1x GPU",
        "complete": True,
        "trained": True,
        "epochs": epochs,
        "evaluations": found,
        "failed": {},
        **changes,
    }


def write_jobs(folder: Path, *jobs: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for job in jobs:
        tag = "-tried" if job["overrides"] else ""
        (folder / f"{job['model']}{tag}-{job['seed']}.json").write_text(json.dumps(job))
    return folder
