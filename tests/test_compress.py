"""Rounded and coded weights: what a file gives back, how small it is, and what it costs a run."""

import json
import lzma
import math
import re
import tracemalloc
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn

import bayesrnn as br
from bayesrnn import packing
from bayesrnn.compress import MOST_TRIES, PER_OCTAVE, _most, compress_run, rounded
from bayesrnn.errors import Invalid, UserError
from bayesrnn.packing import Misfit, coded_bytes, from_levels, pack, to_levels, unpack
from bayesrnn.prune import kept
from bayesrnn.saving import CONFIG, TENSORS
from bayesrnn.storage import Damaged
from labelled_runs import image_recipe, review_recipe
from small_runs import Cli, folder_contents, small_recipe


class Net(nn.Module):
    """Matrices, vectors, a kernel of four axes, and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.picture = nn.Conv2d(1, 3, 2)
        self.rnn = nn.LSTM(12, 5)
        self.decoder = nn.Linear(5, 4)
        self.gain = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:  # [T, B, 3, 3]
        seen = self.picture(x.flatten(0, 1).unsqueeze(1)).flatten(1).unflatten(0, x.shape[:2])
        return self.gain * self.decoder(self.rnn(seen)[0])


def build(dtype: torch.dtype = torch.float32) -> br.Bayesian:
    torch.manual_seed(3)
    return br.bayesianize(
        Net().to(dtype),
        {"decoder.*": br.Delta(), "*": br.Gaussian((0.01, 0.3))},
        br.Normal(),
        where=["picture.*", "rnn.weight*", "rnn.bias_ih*", "decoder.weight", "gain"],
    )


def assert_same_means(found: br.Bayesian, expected: br.Bayesian) -> None:
    for name, (loc, _) in expected.moments().items():
        assert torch.equal(found.moments()[name][0], loc), name


# --- levels -----------------------------------------------------------------------------------


@given(
    st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=30),
    st.floats(1e-4, 30),
)
def test_a_level_is_the_nearest(values: list[float], step: float) -> None:
    loc = torch.tensor(values)
    levels = to_levels(loc, step)
    back = from_levels(levels, step, torch.float64)
    assert ((loc.double() - back).abs() <= step / 2 * (1 + 1e-9)).all()
    assert torch.equal(to_levels(back, step), levels)  # what is rounded stays where it is


@pytest.mark.parametrize(("largest", "kind"), [(127, "int8"), (128, "int16"), (40_000, "int32")])
def test_levels_take_the_bytes_they_need(largest: int, kind: str) -> None:
    loc = torch.tensor([0.0, -largest * 0.5, largest * 0.5, 3.0])
    stored, facts = pack({"loc": loc}, 0.5)
    assert facts == {"shape": [4], "step": 0.5, "levels": kind}
    whole = unpack({f"w.{key}": value for key, value in stored.items()}, {"w": facts})
    assert whole["w.loc"].tolist() == loc.tolist()
    assert whole["w.keep"].tolist() == [False, True, True, True]
    assert set(whole) == {"w.loc", "w.keep"}


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_has_no_level(value: float) -> None:
    with pytest.raises(UserError, match="not finite"):
        to_levels(torch.tensor([0.0, value]), 0.1)


@pytest.mark.parametrize("largest", [0.3, 0.5, 0.9])
def test_a_step_that_is_too_small_is_named(largest: float) -> None:
    words = rf"a step of 1e-12 is too small for a weight of {largest}: choose (\S+) or above"
    with pytest.raises(UserError, match=words) as caught:
        to_levels(torch.tensor([largest]), 1e-12)
    found = re.search(words, str(caught.value))
    assert found is not None
    to_levels(torch.tensor([largest]), float(found[1]))  # the one named is large enough


def test_the_code_is_about_as_long_as_the_entropy() -> None:
    """Of levels that have nothing to do with each other no code can do better on average."""
    dice = np.random.default_rng(1)
    levels = np.rint(dice.laplace(scale=0.6, size=200_000))
    _, counts = np.unique(levels, return_counts=True)
    p = counts / counts.sum()
    entropy = -(p * np.log2(p)).sum() * levels.size / 8  # bytes
    size = coded_bytes(torch.from_numpy(levels).long())
    assert 0.99 * entropy < size < 1.2 * entropy


# --- files ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mean_only", [True, False])
@pytest.mark.parametrize("pruned", [0.0, 0.4])
def test_a_file_gives_back_the_rounded_means(
    dtype: torch.dtype, mean_only: bool, pruned: float, tmp_path: Path
) -> None:
    model = build(dtype)
    br.prune(model, pruned, per_tensor=True)
    br.save(model, tmp_path / "m", mean_only, step=0.1)
    found = br.load(tmp_path / "m", Net().to(dtype))
    with rounded(model, 0.1):
        assert_same_means(found, model)
        x = torch.randn(6, 2, 3, 3, dtype=dtype)
        with torch.no_grad():
            assert torch.equal(found(x), model.eval()(x))
    for key, tensor in model.module.state_dict().items():  # what is not drawn is exact
        assert torch.equal(found.module.state_dict()[key], tensor)
    for name, keep in kept(found).items():
        loc, scale = found.moments()[name]
        assert torch.equal(keep, loc != 0 if scale is None else kept(model)[name])


def test_rows_keep_their_whole_variance(tmp_path: Path) -> None:
    """What a unit reads varies by sum sigma^2 x^2: for inputs of one size, as before."""
    model = build()
    br.prune(model, 0.4, per_tensor=True)
    br.save(model, tmp_path / "m", step=0.1)
    found = br.load(tmp_path / "m", Net())
    for name, (_, scale) in model.moments().items():
        mine = found.moments()[name][1]
        assert (mine is None) == (scale is None)
        if mine is None or scale is None:
            continue
        assert torch.equal(mine > 0, scale > 0)  # nothing pruned has any
        if scale.dim() < 2:
            torch.testing.assert_close(mine, scale, rtol=1e-5, atol=0)
            continue
        total = scale.square().flatten(1).sum(1)
        torch.testing.assert_close(mine.square().flatten(1).sum(1), total, rtol=1e-4, atol=0)
        left = mine.flatten(1)
        assert all(len(row[row > 0].unique()) <= 1 for row in left)


@pytest.mark.parametrize(("columns", "scale"), [(300, 1.2e-4), (70_000, 0.05)])
def test_rows_of_half_precision(columns: int, scale: float, tmp_path: Path) -> None:
    """Squares of small scales, and how many there are, are beyond what half precision holds."""
    net = nn.Linear(columns, 2, bias=False).half()
    model = br.bayesianize(net, br.Gaussian(scale), br.Normal())
    br.save(model, tmp_path / "m", step=0.01)
    (before,), (after,) = (m.moments().values() for m in (model, br.load(tmp_path / "m", net)))
    assert before[1] is not None
    assert after[1] is not None
    torch.testing.assert_close(after[1], before[1], rtol=1e-2, atol=0)


def test_the_file_is_read_without_the_package(tmp_path: Path) -> None:
    model = build()
    br.save(model, tmp_path / "m", mean_only=True, step=0.05)
    tensors = load_file(tmp_path / "m" / TENSORS)
    weights = json.loads((tmp_path / "m" / CONFIG).read_text())["weights"]
    for name, (loc, _) in model.moments().items():
        data = lzma.decompress(tensors[f"{name}.levels"].numpy().tobytes())
        levels = np.frombuffer(data, weights[name]["levels"]).reshape(weights[name]["shape"])
        expected = np.rint(loc.double().numpy() / 0.05)
        assert np.array_equal(levels, expected)


def test_a_saved_model_trains_on_and_is_saved_again(tmp_path: Path) -> None:
    """With scales it is Bayesian as before; rounding it again changes nothing."""
    model = build()
    br.save(model, tmp_path / "m", step=0.1)
    found = br.load(tmp_path / "m", Net())
    br.save(found, tmp_path / "again", step=0.1)
    files = [load_file(tmp_path / name / TENSORS) for name in ("m", "again")]
    assert files[0].keys() == files[1].keys()
    for name in files[0]:
        if name.endswith(".levels"):
            assert torch.equal(files[0][name], files[1][name])
    found.train()(torch.randn(2, 2, 3, 3)).sum().backward()
    assert all(p.grad is not None for p in found.parameters())
    assert math.isfinite(found.kl().item())


@pytest.mark.parametrize("step", [np.float32(0.1), torch.tensor(0.1)])
def test_a_step_may_be_a_number_of_an_array(step: float, tmp_path: Path) -> None:
    model = build()
    br.save(model, tmp_path / "m", step=step)
    with rounded(model, step):
        assert_same_means(br.load(tmp_path / "m", Net()), model)


@pytest.mark.parametrize("step", [0.0, -1.0, math.nan, math.inf])
def test_a_step_is_a_number_above_zero(step: float, tmp_path: Path) -> None:
    model = build()
    with pytest.raises(Invalid, match="step must be a finite number above 0"):
        br.save(model, tmp_path / "m", step=step)
    scored: list[br.Bayesian] = []
    with pytest.raises(Invalid, match="step must be a finite number above 0"):
        br.compression_curve(model, lambda m: scored.append(m) or 0.0, [0.1, step])
    assert not scored  # refused before all the work
    assert not (tmp_path / "m").exists()


def test_another_network_is_named(tmp_path: Path) -> None:
    br.save(build(), tmp_path / "m", step=0.1)
    other = Net()
    other.decoder = nn.Linear(5, 6)
    with pytest.raises(UserError, match=r"decoder.weight is \(4, 5\) there and \(6, 5\) here"):
        br.load(tmp_path / "m", other)


def stream(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(lzma.compress(data)), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"levels": torch.arange(99, dtype=torch.uint8)}, "w.levels is no stream of levels"),
        ({"levels": stream(bytes(7))}, "w.levels does not hold 8 levels"),
        ({"levels": stream(bytes(9))}, "w.levels does not hold 8 levels"),
        ({"levels": stream(bytes(8))[:-9]}, "w.levels does not hold 8 levels"),
        ({"levels": torch.cat([stream(bytes(8))] * 2)}, "w.levels does not hold 8 levels"),
        ({"scale": torch.ones(3, 1)}, "w.scale has the shape"),
        ({"keep": torch.zeros(2, dtype=torch.uint8)}, "w.keep has 2 bytes for 8 weights"),
    ],
)
def test_parts_that_do_not_fit(parts: dict[str, Tensor], words: str) -> None:
    whole = {"levels": stream(bytes(8)), "scale": torch.ones(2, 1)} | parts
    facts = {"shape": [2, 4], "step": 0.1, "levels": "int8"}
    with pytest.raises(Misfit, match=words):
        unpack({f"w.{key}": value for key, value in whole.items()}, {"w": facts})
    for step in (0.0, math.nan):
        with pytest.raises(Invalid, match="step must be a finite number above 0"):
            unpack(
                {f"w.{key}": value for key, value in whole.items()}, {"w": facts | {"step": step}}
            )
    facts["levels"] = "object"
    with pytest.raises(Misfit, match=r"w.levels is of the type 'object'"):
        unpack({f"w.{key}": value for key, value in whole.items()}, {"w": facts})


def test_a_stream_that_would_fill_the_memory_is_not_read_to_its_end() -> None:
    bomb = stream(bytes(100_000_000))
    assert len(bomb) < 20_000
    facts = {"shape": [8], "step": 0.1, "levels": "int8"}
    tracemalloc.start()
    try:
        with pytest.raises(Misfit, match="does not hold 8 levels"):
            unpack({"w.levels": bomb}, {"w": facts})
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()


def test_a_damaged_file_is_called_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(packing, "_encode", lambda levels: (stream(b"abc"), "int8"))
        br.save(build(), tmp_path / "m", step=0.1)
    with pytest.raises(Damaged, match=r"levels does not hold \d+ levels"):
        br.load(tmp_path / "m", Net())


# --- what it costs ----------------------------------------------------------------------------


def largest_error(model: br.Bayesian, start: br.Bayesian) -> float:
    before = start.moments()
    return max(
        float((loc - before[name][0]).abs().max()) for name, (loc, _) in model.moments().items()
    )


def test_a_curve_is_that_of_the_files(tmp_path: Path) -> None:
    model = build()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    told: list[br.Compressed] = []
    start = build()
    rows = br.compression_curve(model, lambda m: largest_error(m, start), (0.05, 0.4), told.append)
    assert rows == told
    count = sum(loc.numel() for loc, _ in model.moments().values())
    for row in rows:
        br.save(model, tmp_path / "m", mean_only=True, step=row.step)
        file = load_file(tmp_path / "m" / TENSORS)
        assert row.coded_bytes == sum(
            len(value) for name, value in file.items() if name.endswith(".levels")
        )
        assert row.coded_bits_per_weight == pytest.approx(8 * row.coded_bytes / count)
        found = br.load(tmp_path / "m", Net())
        assert row.zeros == pytest.approx(1 - found.weight_count / count)
        assert row.error == largest_error(found, start)
    assert rows[0].error < rows[1].error
    assert rows[0].zeros < rows[1].zeros
    after = model.state_dict()
    assert all(torch.equal(after[key], before[key]) for key in before)


def test_a_score_that_fails_leaves_the_model_as_it_was() -> None:
    model = build()

    def score(_: br.Bayesian) -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        br.compression_curve(model, score)
    assert_same_means(model, build())


@pytest.mark.parametrize("most", [0.001, 0.02, 0.3])
def test_the_coarsest_step_is_found(most: float) -> None:
    model, start = build(), build()
    tried: list[tuple[float, float]] = []
    step, error = br.coarsest_step(
        model, lambda m: largest_error(m, start), most, lambda *pair: tried.append(pair)
    )
    assert (step, error) in tried
    assert len(tried) <= MOST_TRIES
    assert error <= most
    (coarser,) = br.compression_curve(
        model, lambda m: largest_error(m, start), [step * 2 ** (1 / PER_OCTAVE)]
    )
    assert coarser.error > most
    assert_same_means(model, start)


def test_one_bad_step_hides_no_coarser_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model, places = build(), list[int]()
    largest = max(float(loc.abs().max()) for loc, _ in model.moments().values())

    def noting(model: br.Bayesian, step: float) -> AbstractContextManager[None]:
        places.append(round(-PER_OCTAVE * math.log2(step / largest)))
        return rounded(model, step)

    monkeypatch.setattr("bayesrnn.compress.rounded", noting)
    fitting = {17, 18, 19, *range(21, 41)}  # the bisection starts at 20, and goes to finer ones
    step, _ = br.coarsest_step(model, lambda _: float(places[-1] not in fitting), 0.5)
    assert round(-PER_OCTAVE * math.log2(step / largest)) == 17
    assert len(places) == len(set(places)) <= MOST_TRIES


def test_all_to_zero_where_anything_is_allowed() -> None:
    model = build()
    largest = max(float(loc.abs().max()) for loc, _ in model.moments().values())
    assert br.coarsest_step(model, lambda _: 1.0, 1.0)[0] == pytest.approx(largest, rel=0.01)


@pytest.mark.parametrize(
    ("value", "words"), [(0.0, "some weight that is not 0: give a step"), (math.nan, "finite")]
)
def test_weights_that_say_nothing_of_a_step(value: float, words: str) -> None:
    net = nn.Linear(2, 3)
    nn.init.constant_(net.weight, value)
    nn.init.zeros_(net.bias)
    with pytest.raises(Invalid, match=f"model must .*{words}"):
        br.coarsest_step(br.bayesianize(net), lambda _: 1.0, 1.0)


def test_where_no_step_does_it_says_so() -> None:
    with pytest.raises(UserError, match=r"even steps of \S+ end at 2, above 1; allow more"):
        br.coarsest_step(build(), lambda _: 2.0, 1.0)


# --- runs -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compression")
    br.train(small_recipe(folder, train={"epochs": 2}), folder / "run", quiet=True)
    return folder / "run"


def test_the_command_writes_a_run_that_evaluate_reads(cli: Cli, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "small"
    before = folder_contents(run)
    done = cli("compress", run, "--allow", 2, "--out", out, "--json")
    assert done.code == 0, done.err
    assert folder_contents(run) == before
    figures = json.loads(done.out)
    assert figures["figure"] == "valid_perplexity"
    assert figures["after"] <= 1.02 * figures["before"]
    assert figures["file_bytes"] == (out / "model" / TENSORS).stat().st_size
    assert figures["file_ratio"] < 1
    for folder, key in ((run, "before"), (out, "after")):
        done = cli("evaluate", folder, "--split", "valid", "--json", "--device", "cpu")
        assert done.code == 0, done.err
        assert json.loads(done.out)["perplexity"] == pytest.approx(figures[key], rel=1e-5)
    done = cli("generate", out, "--tokens", 3, "--seed", 1)
    assert done.code == 0, done.err


def test_with_scales_it_can_be_drawn(cli: Cli, run: Path, tmp_path: Path) -> None:
    done = cli("compress", run, "--step", 0.05, "--scale", "--out", tmp_path / "small", "--json")
    assert done.code == 0, done.err
    figures = json.loads(done.out)
    assert (figures["step"], figures["figure"], figures["after"]) == (0.05, None, None)
    done = cli("evaluate", tmp_path / "small", "--samples", 3, "--json", "--device", "cpu")
    assert done.code == 0, done.err
    scores = json.loads(done.out)
    assert scores["expected_perplexity"] > scores["perplexity"]
    assert scores["complexity_nats"] > 0
    done = cli("compress", run, "--step", 0.05, "--out", tmp_path / "means", "--json")
    assert done.code == 0, done.err
    done = cli("evaluate", tmp_path / "means", "--samples", 3)
    assert "its weights are points" in done.errors[0]


def test_a_curve_of_a_run(cli: Cli, run: Path) -> None:
    done = cli("compress", run, "--curve", "0.01,1", "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert [point["step"] for point in found["points"]] == [0.01, 1.0]
    assert found["points"][0]["error"] == pytest.approx(found["before"], rel=0.01)
    assert found["points"][1]["error"] > found["points"][0]["error"]
    shown = cli("compress", run, "--curve", "0.01,1").out
    assert "valid perplexity" in shown
    assert "bits each" in shown


def test_other_kinds_of_data(tmp_path: Path) -> None:
    br.train(image_recipe(tmp_path), tmp_path / "run", quiet=True)
    done = compress_run(tmp_path / "run", tmp_path / "small", allow=0.1)
    assert done.figure is not None
    assert done.before is not None
    assert done.after is not None
    assert done.after <= 1.1 * done.before
    assert br.load(tmp_path / "small").all_points


def test_where_the_test_set_chooses_it_says_so(cli: Cli, tmp_path: Path) -> None:
    br.train(review_recipe(tmp_path), tmp_path / "run", quiet=True)
    done = cli("compress", tmp_path / "run", "--out", tmp_path / "small", "--json")
    assert json.loads(done.out)["figure"] == "test_rmse"
    assert "has no validation set, so its test set chooses the step" in done.err
    done = cli("compress", tmp_path / "run", "--step", 0.1, "--out", tmp_path / "other")
    assert not done.err


def test_a_loss_rises_by_the_logarithm() -> None:
    """One that may be below 0, of which a percent says nothing."""
    assert _most("valid_nll", -0.5, 0.01) == pytest.approx(-0.5 + math.log(1.01))
    assert _most("valid_perplexity", 120.0, 0.01) == pytest.approx(121.2)


def test_one_line_for_what_is_wrong(cli: Cli, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine.txt").write_text("mine")
    means = tmp_path / "means"
    cli("compress", run, "--step", 0.1, "--out", means)
    for code, words, arguments in [
        (1, "no such folder", (tmp_path / "none", "--out", out)),
        (1, "leave out --scale", (means, "--step", 0.1, "--scale", "--out", out)),
        (1, "is no run's folder", (full, "--out", out)),
        (1, "exists and is not empty", (run, "--out", full)),
        (1, "exists and is not empty", (run, "--out", run)),
        (1, "--data", (run, "--data", tmp_path / "none", "--out", out)),
        (1, "too small", (run, "--step", 1e-15, "--out", out)),
        (1, "--device is 'banana'", (run, "--device", "banana", "--out", out)),
        (2, "--out is needed", (run,)),
        (2, "--out", (run, "--curve", "0.1", "--out", out)),
        (2, "--scale", (run, "--curve", "0.1", "--scale")),
        (2, "--curve", (run, "--curve", "0.1,x")),
        (2, "step must be", (run, "--curve", "0.1,0")),
        (2, "step must be", (run, "--step", "0", "--out", out)),
        (2, "--allow", (run, "--step", "1", "--allow", 3, "--out", out)),
        (2, "--allow", (run, "--allow", -1, "--out", out)),
    ]:
        done = cli("compress", *arguments)
        assert done.code == code, (arguments, done.err)
        assert "Traceback" not in done.err
        assert words in done.err.replace("\n", " "), (arguments, done.err)
    assert (full / "mine.txt").read_text() == "mine"
    assert [path.name for path in out.iterdir()] == [".lock"]  # no run without a model


def test_data_that_cannot_be_read_leave_no_folder(cli: Cli, run: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.touch()
    done = cli("compress", run, "--data", empty, "--out", tmp_path / "out")
    assert "is empty or blank" in done.errors[0]
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_written_is_refused_before_the_search(
    run: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    tried: list[tuple[float, float]] = []
    with pytest.raises(UserError, match=r"cannot write .*; choose another --out"):
        compress_run(run, tmp_path / "file" / "small", advance=lambda *pair: tried.append(pair))
    assert not tried


def test_a_folder_that_was_begun_is_taken_up_again(
    cli: Cli, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, command = (
        tmp_path / "small",
        ("compress", run, "--step", 0.05, "--out", tmp_path / "small"),
    )
    with monkeypatch.context() as patch:

        def full(*_: object, **__: object) -> None:
            raise UserError("there is no space")

        patch.setattr("bayesrnn.compress.save_own", full)
        assert cli(*command).errors == ["there is no space"]
    assert not (out / "model").exists()
    done = cli(*command)
    assert done.code == 0, done.err
    assert "exists and is not empty" in cli(*command).errors[0]
