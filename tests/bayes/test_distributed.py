"""Two processes: each rank draws its own noise, and both stay the same model."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import bayesrnn
from bayes import two_processes
from bayesrnn.bayes import Gaussian, bayesianize
from bayesrnn.objective import FreeEnergy

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="torch was built without gloo"
)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of the two ranks reports; they meet in a file, so no port is needed."""
    folder = tmp_path_factory.mktemp("ranks")
    source = Path(bayesrnn.__file__).parent.parent
    environment = os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    if "lo" in [name for _, name in socket.if_nameindex()]:
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    processes = [
        subprocess.Popen(
            [sys.executable, two_processes.__file__, str(folder / "store"), str(rank)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors
    return [json.loads(out.splitlines()[-1]) for out, _ in outputs]


def double(numbers: Any) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def test_ranks_with_the_same_seed_draw_different_noise(ranks: list[dict[str, Any]]) -> None:
    for one, other in zip(ranks[0]["eps"], ranks[1]["eps"], strict=True):
        assert (double(one) != double(other)).all()
        correlation = torch.corrcoef(torch.stack([double(one), double(other)]))[0, 1]
        assert abs(correlation) < 0.5


def test_a_rank_repeats_its_draw_from_the_same_state(ranks: list[dict[str, Any]]) -> None:
    assert [report["same draw alone"] for report in ranks] == [True, True]


def test_a_generator_of_ones_own_is_used_as_it_is(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["own generator"] == ranks[1]["own generator"]


def test_the_gradient_is_the_mean_over_the_ranks(ranks: list[dict[str, Any]]) -> None:
    local = list(zip(ranks[0]["local"], ranks[1]["local"], strict=True))
    assert any(one != other for one, other in local)
    for report in ranks:
        for found, (one, other) in zip(report["gradient"], local, strict=True):
            expected = (double(one) + double(other)) / 2
            assert torch.allclose(double(found), expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("when", ["after", "last"])
def test_parameters_stay_identical_across_ranks(ranks: list[dict[str, Any]], when: str) -> None:
    assert ranks[0][when] == ranks[1][when]
    model, _ = two_processes.build()
    start = [p.reshape(-1).tolist() for p in model.parameters()]
    assert all(a != b for a, b in zip(ranks[0][when], start, strict=True))


def test_the_shares_of_all_ranks_add_up_to_one_kl(ranks: list[dict[str, Any]]) -> None:
    assert [report["share"] for report in ranks] == [3 / 12, 3 / 12]
    assert [report["epoch share"] for report in ranks] == [0.5, 0.5]


def test_the_mean_gradient_is_that_of_the_whole_free_energy(ranks: list[dict[str, Any]]) -> None:
    """(errors of both ranks + 6/12 of the KL, averaged over the two draws) / 6 streams."""
    model, _ = two_processes.build()
    total = torch.zeros((), dtype=torch.float64)
    for report in ranks:
        model.resample()
        for block, eps in zip(model.blocks, report["eps"], strict=True):
            block.noise = {"eps": double(eps)}
        error = 0.5 * (model(double(report["x"])) - double(report["y"])).square().sum()
        total = total + (error + (6 / 12) * model.kl("sample") / 2) / 6
    total.backward()
    for found, parameter in zip(ranks[0]["gradient"], model.parameters(), strict=True):
        assert torch.allclose(double(found), parameter.grad.reshape(-1), rtol=1e-9, atol=1e-12)


def test_a_loader_of_streams_must_say_into_how_many_parts_the_text_is_cut(
    ranks: list[dict[str, Any]],
) -> None:
    for report in ranks:
        assert "processes=1), or the number of parts" in report["streams"]["refused"]
        assert report["streams"]["share"] == pytest.approx(0.5)


def test_of_streams_the_mean_gradient_is_that_of_the_whole_free_energy(
    ranks: list[dict[str, Any]],
) -> None:
    """(errors of both ranks + the whole batch's share of the KL, averaged over the draws) / 4."""
    model, _ = two_processes.build()
    for parameter, last in zip(model.parameters(), ranks[0]["last"], strict=True):
        parameter.data.copy_(double(last).view_as(parameter))
    reports = [report["streams"] for report in ranks]
    targets = sum(report["targets"] for report in reports)
    for steps in zip(*(report["steps"] for report in reports), strict=True):
        model.zero_grad()
        for step in steps:
            model.resample()
            for block, eps in zip(model.blocks, step["eps"], strict=True):
                block.noise = {"eps": double(eps)}
            x = double(step["x"])
            share = 2 * x.shape[0] * x.shape[1] / targets  # of both ranks together
            ((model(x).square().sum() + share * model.kl("sample") / 2) / 4).backward()
        for found, parameter in zip(steps[0]["gradient"], model.parameters(), strict=True):
            assert torch.allclose(double(found), parameter.grad.reshape(-1), rtol=1e-9, atol=1e-12)


def test_the_fisher_estimate_is_refused_in_a_process_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = bayesianize(torch.nn.Linear(2, 1), Gaussian(estimator="fisher"))
    x = torch.randn(4, 2)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=4)
    loss = FreeEnergy(loader)(model, model(x)[:, 0].square(), (x,))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    with pytest.raises(RuntimeError, match="not available in a process group"):
        loss.backward()
