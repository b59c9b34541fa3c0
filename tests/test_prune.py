"""Pruning: what is left, what stays 0, and what it weighs on disk."""

import copy
import json
import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import bayesrnn as br
from bayesrnn import packing
from bayesrnn.bayes import layout
from bayesrnn.prune import SAFE_THRESHOLD, bits_per_weight, kept, structure
from bayesrnn.saving import CONFIG, TENSORS
from bayesrnn.storage import Damaged

POSTERIORS: list[br.Posterior] = [
    br.Delta(),
    br.Gaussian(scale=(0.02, 0.3)),
    br.Gaussian(scale=0.1, learn_scale=False),
    br.Sharpened(scale=(0.02, 0.3)),
    br.Sharpened(scale=(0.02, 0.3), order="second"),
]
PRIORS: list[br.Prior] = [
    br.Normal(scale=0.7),
    br.Normal(loc="fit", scale="fit"),
    br.Normal(scale=0.01),
    br.Laplace(scale=0.5),
    br.ScaleMixture(sigma1=1.0, sigma2=0.1, group="weight"),
    br.ScaleMixture(sigma1=1.0, sigma2=0.1, group="input"),
    br.ScaleMixture(sigma1=1.0, sigma2=0.1, group="tensor"),
]


def title(value: Any) -> str:
    return f"{value.kind}-{getattr(value, 'group', getattr(value, 'order', ''))}"


class Net(nn.Module):
    """Words to words: an embedding, an LSTM and a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 5)
        self.rnn = nn.LSTM(5, 7)
        self.out = nn.Linear(7, 11)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.out(self.rnn(self.words(x))[0])
        return result


def build(
    posterior: br.Posterior | None = None, prior: br.Prior | None = None, **more: Any
) -> br.Bayesian:
    return br.bayesianize(
        Net(), posterior or br.Gaussian(scale=(0.02, 0.3)), prior or br.Normal(), **more
    )


def loss_of(model: br.Bayesian) -> Tensor:
    words = torch.arange(24).view(6, 4) % 11
    return nn.functional.cross_entropy(model(words).flatten(0, 1), words.roll(1, 0).flatten())


def draws(model: br.Bayesian) -> dict[str, Tensor]:
    """The weights the module sees in a forward."""
    seen: dict[str, Tensor] = {}

    def look(layer: nn.Module, *_: Any) -> None:
        name = next(n for n, m in model.module.named_modules() if m is layer)
        for local, tensor in layer._parameters.items():
            assert tensor is not None
            seen[f"{name}.{local}"] = tensor.detach().clone()

    hooks = [m.register_forward_pre_hook(look) for m in model.module.children()]
    loss_of(model)
    for hook in hooks:
        hook.remove()
    return seen


def assert_zeros(model: br.Bayesian, masks: dict[str, Tensor]) -> None:
    """Pruned weights are 0 in the mean and in draws; the others are drawn."""
    for name, (loc, scale) in model.moments().items():
        assert torch.equal(loc[~masks[name]], torch.zeros_like(loc[~masks[name]]))
        assert scale is None or (scale[~masks[name]] == 0).all()
    for which in ("mean", "sample"):
        with model.weights(which):  # type: ignore[arg-type]
            for name, theta in draws(model).items():
                assert (theta[~masks[name]] == 0).all()
                assert masks[name].sum() == 0 or (theta[masks[name]] != 0).any()


# --- which weights --------------------------------------------------------------------------------


def test_signal_to_noise_is_mean_over_deviation() -> None:
    model = build()
    for name, ratio in br.signal_to_noise(model).items():
        loc, scale = model.moments()[name]
        assert scale is not None
        assert torch.equal(ratio, loc.abs() / scale)
    point = build(br.Delta())
    assert all(
        torch.equal(ratio, point.moments()[name][0].abs())
        for name, ratio in br.signal_to_noise(point).items()
    )


@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.83])
@pytest.mark.parametrize("posterior", [POSTERIORS[0], POSTERIORS[1]], ids=title)
def test_the_ranking_equals_a_direct_sort(fraction: float, posterior: br.Posterior) -> None:
    model = build(posterior)
    pairs = [
        (value, name, place)
        for name, ratio in br.signal_to_noise(model).items()
        for place, value in enumerate(ratio.flatten().tolist())
    ]
    gone = {(name, place) for _, name, place in sorted(pairs)[: round(fraction * len(pairs))]}
    br.prune(model, fraction)
    found = {
        (name, place)
        for name, keep in kept(model).items()
        for place, here in enumerate(keep.flatten().tolist())
        if not here
    }
    assert found == gone
    assert model.weight_count == len(pairs) - len(gone)


def test_a_fraction_of_each_tensor() -> None:
    model = build()
    ratios = br.signal_to_noise(model)
    br.prune(model, 0.6, per_tensor=True)
    for name, keep in kept(model).items():
        assert (~keep).sum() == round(0.6 * keep.numel())
        assert ratios[name][~keep].max() <= ratios[name][keep].min()


def test_a_threshold() -> None:
    model = build()
    ratios = br.signal_to_noise(model)
    br.prune(model, threshold=SAFE_THRESHOLD)
    assert pytest.approx(0.8325546) == SAFE_THRESHOLD
    assert all(
        torch.equal(keep, ratios[name] >= SAFE_THRESHOLD) for name, keep in kept(model).items()
    )
    whole = build()
    br.prune(whole, threshold=0.0)
    assert all(keep.all() for keep in kept(whole).values())


def test_pruning_nothing_is_the_identity_and_pruning_all_is_zero() -> None:
    model = build()
    x = torch.arange(6).view(6, 1)
    same = copy.deepcopy(model)
    br.prune(same, 0.0)
    assert torch.equal(same.eval()(x), model.eval()(x))
    with same.weights("sample"), model.weights("sample"):
        for one in (same, model):
            one.resample(generator=torch.Generator().manual_seed(1))
        assert torch.equal(same(x), model(x))
        assert same.kl().item() == pytest.approx(model.kl().item(), rel=1e-6)
    br.prune(model, 1.0)
    assert all((loc == 0).all() for loc, _ in model.moments().values())
    assert (model(x) == 0).all()
    with model.weights("sample"):
        assert (model(x) == 0).all()
        assert model.kl().item() == pytest.approx(0.0, abs=1e-3)
    assert model.weight_count == 0


def test_what_was_pruned_stays_so_and_counts() -> None:
    model = build()
    br.prune(model, 0.5)
    first = kept(model)
    br.prune(model, 0.5)
    assert all(torch.equal(first[name], keep) for name, keep in kept(model).items())
    br.prune(model, 0.8)
    assert all((first[name] | ~keep).all() for name, keep in kept(model).items())
    total = sum(keep.numel() for keep in first.values())
    assert model.weight_count == total - round(0.8 * total)
    br.prune(model, 0.2)  # less than before: nothing comes back
    assert model.weight_count == total - round(0.8 * total)


@pytest.mark.parametrize(
    ("wrong", "key"),
    [
        ({}, "fraction"),
        ({"fraction": 0.5, "threshold": 1.0}, "fraction"),
        ({"fraction": 1.5}, "fraction"),
        ({"fraction": math.nan}, "fraction"),
        ({"threshold": -1.0}, "threshold"),
        ({"threshold": math.inf}, "threshold"),
        ({"threshold": 1.0, "by": "magnitude"}, "threshold"),
        ({"threshold": 1.0, "per_tensor": True}, "threshold"),
        ({"fraction": 0.5, "by": "size"}, "by"),
    ],
)
def test_wrong_use(wrong: dict[str, Any], key: str) -> None:
    with pytest.raises(br.Invalid) as caught:
        br.prune(build(), **wrong)
    assert caught.value.problems[0][0] == key


def test_points_are_not_ranked_beside_the_others() -> None:
    model = br.bayesianize(Net(), {"rnn.*": br.Gaussian(), "*": br.Delta()}, br.Normal())
    with pytest.raises(br.Invalid, match=r"per_tensor must be set \(--per-tensor\): some"):
        br.prune(model, 0.5)
    with pytest.raises(br.Invalid, match="threshold cannot be set: some weights are points"):
        br.prune(model, threshold=br.SAFE_THRESHOLD)  # of sizes it would take nearly all points
    br.prune(model, 0.5, per_tensor=True)


@pytest.mark.parametrize(
    ("posterior", "prior"),
    [(br.Gaussian(), br.Normal("fit", "fit")), (br.Delta(), br.Laplace("fit", "fit"))],
)
def test_a_fitted_prior_stays_where_no_weight_is_left(
    posterior: br.Posterior, prior: br.Prior
) -> None:
    model = br.bayesianize(Net(), posterior, prior)
    before = {name: value.item() for name, value in model.priors[0].values().items()}
    br.prune(model, 1.0)
    with model.weights("sample"):
        model.resample()
        assert model.kl().item() == 0.0
    assert {name: value.item() for name, value in model.priors[0].values().items()} == before


# --- what stays 0 ---------------------------------------------------------------------------------


@pytest.mark.parametrize("posterior", POSTERIORS, ids=title)
def test_draws_and_means_are_zero_there(posterior: br.Posterior) -> None:
    model = build(posterior).eval()
    br.prune(model, 0.7)
    assert_zeros(model, kept(model))


@pytest.mark.parametrize("posterior", POSTERIORS, ids=title)
@pytest.mark.parametrize("which", ["mean", "sample"])
def test_weights_that_lie_elsewhere_are_the_same(which: str, posterior: br.Posterior) -> None:
    """In frames where tensor cores like them best; what the optimiser moved since is not seen."""
    model = build(posterior, br.ScaleMixture()).double().eval()
    br.prune(model, 0.7)
    with torch.no_grad():
        for parameter in model.blocks.parameters():
            parameter.add_(0.1)
    found = []
    for tuned in (False, True):
        model.zero_grad()
        with model.tuned() if tuned else nullcontext(), model.weights(which):  # type: ignore[arg-type]
            model.resample(generator=torch.Generator().manual_seed(1))
            loss = loss_of(model)
            loss.backward()
        grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        found.append([loss.detach(), *grads])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


OPTIMISERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
}


@pytest.mark.parametrize("began_before", [False, True])
@pytest.mark.parametrize("optimiser", OPTIMISERS)
@pytest.mark.parametrize("posterior", POSTERIORS, ids=title)
def test_retraining_keeps_zeros_at_zero(
    posterior: br.Posterior, optimiser: str, began_before: bool
) -> None:
    model = build(posterior, br.ScaleMixture(sigma1=1.0, sigma2=0.1)).train()
    words = (torch.arange(200) % 11).numpy()
    loader = br.StreamLoader(words, streams=4, unroll=6)
    objective = br.FreeEnergy(loader)
    optimizer = OPTIMISERS[optimiser](model.parameters())

    def learn(steps: int) -> None:
        for _, batch in zip(range(steps), loader, strict=False):

            def nll(batch: br.Batch = batch) -> Tensor:
                return nn.functional.cross_entropy(
                    model(batch.x).flatten(0, 1), batch.y.flatten(), reduction="sum"
                )

            optimizer.zero_grad()
            model.resample(nll=lambda: nll() / 4)
            objective(model, nll(), batch).backward()
            optimizer.step()

    if began_before:  # what the optimiser remembers moves pruned weights
        learn(2)
    br.prune(model, 0.6)
    masks = kept(model)
    if not began_before:
        optimizer = OPTIMISERS[optimiser](model.parameters())
    before = {name: loc.clone() for name, (loc, _) in model.moments().items()}
    learn(3)
    model.eval()
    assert_zeros(model, masks)
    assert any(not torch.equal(loc, before[name]) for name, (loc, _) in model.moments().items())
    if not began_before:
        for block in model.each_block():
            assert block.keep is not None
            learnt = block.flat(block.parameters_by_name)
            assert all((p[~block.keep] == 0).all() for p in learnt.values())


@pytest.mark.parametrize("how", ["mean", "sample"])
def test_gradients_are_those_of_the_others(how: str) -> None:
    model = build().train()
    br.prune(model, 0.6)
    with model.weights(how):  # type: ignore[arg-type]
        loss_of(model).backward()
    for block in model.each_block():
        grad = block.parameters_by_name["loc"].grad
        assert grad is not None
        assert block.keep is not None
        assert (grad[~block.keep] == 0).all()
        assert (grad[block.keep] != 0).any()


# --- the KL of what is left -------------------------------------------------------------------


def direct_kl(model: br.Bayesian, prior: br.Prior) -> Tensor:
    """Summed over the weights left with torch.distributions, at the present draw if need be."""
    total = torch.zeros((), dtype=torch.float64)
    masks = kept(model)
    for block in model.each_block():
        values = {n: torch.as_tensor(v).double() for n, v in model.hyper(block).values().items()}
        assert block.noise is not None
        noise = block.layout.split(block.noise["eps"])
        for weight in block.layout.weights:
            keep = masks[weight.name]
            loc, scale = (t.double()[keep] for t in model.moments()[weight.name] if t is not None)
            q = torch.distributions.Normal(loc, scale)
            if isinstance(prior, br.Normal):
                p = torch.distributions.Normal(values["loc"], values["scale"])
                total += torch.distributions.kl_divergence(q, p).sum()
                continue
            theta = loc + scale * noise[weight.name].double()[keep]
            if isinstance(prior, br.Laplace):
                x = torch.linspace(-8, 8, 4001, dtype=torch.float64)[:, None] * scale + loc
                p_x = torch.distributions.Laplace(0.0, values["scale"]).log_prob(x)
                terms = q.log_prob(x).exp() * (q.log_prob(x) - p_x)
                total += (torch.trapezoid(terms, dx=16 / 4000, dim=0) * scale).sum()
                continue
            assert isinstance(prior, br.ScaleMixture)
            group = torch.zeros(weight.shape, dtype=torch.long)
            if prior.group == "weight":
                group = torch.arange(keep.numel()).view(weight.shape)
            elif prior.group == "input" and weight.axis is not None:
                size = [1] * len(weight.shape)
                size[weight.axis] = -1
                group = (group + torch.arange(weight.shape[weight.axis]).view(size)).view(
                    weight.shape
                )
            total += q.log_prob(theta).sum()
            for index in group[keep].unique():
                mine = theta[group[keep] == index]
                wide = torch.distributions.Normal(0.0, values["sigma1"]).log_prob(mine).sum()
                narrow = torch.distributions.Normal(0.0, values["sigma2"]).log_prob(mine).sum()
                pi = values["pi"]
                total -= torch.logaddexp(pi.log() + wide, (1 - pi).log() + narrow)
    return total


@pytest.mark.parametrize("prior", PRIORS[:1] + PRIORS[2:], ids=title)
@pytest.mark.parametrize("piece", [layout.PIECE, 16])
def test_the_kl_is_that_of_the_weights_left(
    prior: br.Prior, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bayesrnn.bayes.block.PIECE", piece)
    model = build(prior=prior).train()
    br.prune(model, 0.6)
    loss_of(model)
    tolerance = 1e-4 if isinstance(prior, br.Laplace) else 1e-5
    assert model.kl().item() == pytest.approx(direct_kl(model, prior).item(), rel=tolerance)


@pytest.mark.parametrize("prior", PRIORS, ids=title)
@pytest.mark.parametrize("piece", [layout.PIECE, 16])
def test_the_kls_gradient_is_its_slope(
    prior: br.Prior, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bayesrnn.bayes.block.PIECE", piece)
    if prior.named("fit"):
        prior = br.Normal(loc=0.1, scale=0.4)
    model = build(prior=prior).double().train()
    br.prune(model, 0.6)
    with model.hold():
        loss_of(model)
        model.kl().backward()
        for block in model.each_block():
            assert block.keep is not None
            for tensor in block.parameters_by_name.values():
                direction = torch.randn_like(tensor)
                found = (tensor.grad * direction).sum().item()  # type: ignore[operator]
                ends = []
                for step in (1e-5, -1e-5):
                    with torch.no_grad():
                        tensor.add_(direction, alpha=step)
                    ends.append(model.kl().item())
                    with torch.no_grad():
                        tensor.sub_(direction, alpha=step)
                assert found == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize(
    "prior",
    [
        br.Normal(loc="learn", scale="learn"),
        br.ScaleMixture("learn", "learn", "learn", "weight"),
        br.ScaleMixture("learn", "learn", "learn", "input"),
    ],
    ids=title,
)
def test_a_learnt_prior_gets_the_slope_of_the_weights_left(prior: br.Prior) -> None:
    model = build(prior=prior).double().train()
    with torch.no_grad():
        for value in model.priors.parameters():
            value.add_(0.3)
    br.prune(model, 0.6)
    with model.hold():
        loss_of(model)
        model.kl().backward()
        for value in model.priors.parameters():
            assert value.grad is not None
            ends = []
            for step in (1e-6, -1e-6):
                with torch.no_grad():
                    value.add_(step)
                    ends.append(direct_kl(model, prior).item())
                    value.sub_(step)
            assert value.grad.item() == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-4)


def test_a_fitted_prior_looks_at_the_weights_left() -> None:
    model = build(prior=br.Normal(loc="fit", scale="fit"))
    br.prune(model, 0.6)
    model.fit_priors()
    masks = kept(model)
    moments = model.moments()
    loc = torch.cat([moments[name][0][keep] for name, keep in masks.items()])
    scale = torch.cat([moments[name][1][keep] for name, keep in masks.items()])  # type: ignore[index]
    values = next(model.each_prior()).values()
    assert values["loc"] == pytest.approx(loc.mean().item(), rel=1e-4)
    variance = ((loc - loc.mean()).square() + scale.square()).mean()
    assert values["scale"] == pytest.approx(variance.sqrt().item(), rel=1e-4)


# --- the curve --------------------------------------------------------------------------------


def test_the_curve_is_that_of_models_pruned_one_by_one() -> None:
    model = build().eval()
    state = copy.deepcopy(model.state_dict())

    def score(pruned: br.Bayesian) -> float:
        with torch.no_grad():
            return loss_of(pruned).item()

    total = model.weight_count
    rows = br.pruning_curve(model, score, (0.0, 0.3, 0.9, 1.0))
    for row in rows:
        one = copy.deepcopy(model)
        br.prune(one, row.fraction)
        assert row.weights == one.weight_count == total - round(row.fraction * total)
        assert row.percent == pytest.approx(100 * row.weights / total)
        assert row.error == score(one)
        if row.fraction < 1:
            assert row.bits_per_weight == pytest.approx(bits_per_weight(one))
    assert rows[-1].bits_per_weight is None
    after = model.state_dict()
    assert after.keys() == state.keys()
    assert all(torch.equal(after[name], value) for name, value in state.items())


def test_a_curve_by_thresholds() -> None:
    model = build().eval()
    told: list[br.Pruned] = []

    def score(pruned: br.Bayesian) -> float:
        with torch.no_grad():
            return loss_of(pruned).item()

    of_table_2 = [0.0, 0.01, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0]  # Graves 2011
    rows = br.pruning_curve(model, score, thresholds=of_table_2, advance=told.append)
    assert rows == told
    assert [row.threshold for row in rows] == of_table_2
    assert rows[0].percent == 100
    for row in rows:
        assert row.threshold is not None
        one = copy.deepcopy(model)
        br.prune(one, threshold=row.threshold)
        assert row.weights == one.weight_count
        assert row.fraction == pytest.approx(1 - row.weights / model.weight_count)
        assert row.error == score(one)


def test_magnitude_looks_at_the_mean_alone() -> None:
    model = build()
    sizes = {name: loc.abs() for name, (loc, _) in model.moments().items()}
    br.prune(model, 0.6, by="magnitude")
    masks = kept(model)
    highest = max(float(size[~masks[name]].max()) for name, size in sizes.items())
    lowest = min(
        float(size[masks[name]].min()) for name, size in sizes.items() if masks[name].any()
    )
    assert highest <= lowest
    assert model.weight_count == sum(size.numel() for size in sizes.values()) - round(
        0.6 * sum(size.numel() for size in sizes.values())
    )


def test_bits_of_a_weight_by_hand() -> None:
    """Two weights, N(1, 0.5) and N(0.1, 0.5), against N(0, 1); the second one is pruned."""
    net = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[1.0, 0.1]]))
    model = br.bayesianize(net, br.Gaussian(scale=0.5), br.Normal())
    first = math.log(1 / 0.5) + (0.5**2 + 1.0**2) / 2 - 0.5  # 0.8181 nats
    second = math.log(1 / 0.5) + (0.5**2 + 0.1**2) / 2 - 0.5
    both = (first + second) / 2 / math.log(2)
    assert bits_per_weight(model) == pytest.approx(both, rel=1e-5)
    br.prune(model, 0.5)
    assert bits_per_weight(model) == pytest.approx(first / math.log(2), rel=1e-5)


def test_what_is_left_of_rows_and_units() -> None:
    model = br.bayesianize(nn.LSTM(3, 2), br.Gaussian(1.0, learn_scale=False), br.Uniform())
    with torch.no_grad():
        block = next(model.each_block())
        weights = block.layout.split(block.parameters_by_name["loc"])
        for weight in weights.values():
            weight.fill_(1.0)
        outer, inner = weights["weight_ih_l0"], weights["weight_hh_l0"]
        for gate in range(4):  # unit 1: nothing enters it
            outer[2 * gate + 1] = inner[2 * gate + 1] = 0.01
        outer[2] = inner[2] = 0.01  # unit 0: nothing enters its forget gate
        inner[:, 0] = 0.01  # and it tells its layer nothing
        outer[4] = 0.01  # its cell still hears the layer
    br.prune(model, threshold=0.1)
    found = structure(model)
    assert [m.name for m in found.matrices] == ["weight_ih_l0", "weight_hh_l0"]
    whole, part = found.matrices[0].weights, found.matrices[0].left
    assert (whole, part) == (24, 6)
    assert (found.matrices[0].rows, found.matrices[0].dead_rows) == (8, 6)
    assert (found.matrices[1].columns, found.matrices[1].dead_columns) == (2, 1)
    (layer,) = found.layers
    assert (layer.layer, layer.units, layer.unfed, layer.unheard) == ("l0", 2, 1, 1)
    assert layer.unfed_gates == {"input": 1, "forget": 2, "cell": 1, "output": 1}


def test_dead_units() -> None:
    model = br.bayesianize(nn.Linear(3, 4), br.Gaussian(1.0, learn_scale=False), br.Uniform())
    with torch.no_grad():
        block = next(model.each_block())
        weight = block.layout.split(block.parameters_by_name["loc"])["weight"]
        weight.fill_(1.0)
        weight[2] = 0.01
        weight[:, 1] = 0.02
    br.prune(model, threshold=0.1)
    dead = br.dead_units(model)
    assert list(dead) == ["weight"]
    assert dead["weight"].rows.tolist() == [2]
    assert dead["weight"].columns.tolist() == [1]


# --- on disk ----------------------------------------------------------------------------------


@pytest.mark.parametrize("posterior", POSTERIORS, ids=title)
def test_a_pruned_model_comes_back(posterior: br.Posterior, tmp_path: Path) -> None:
    model = build(posterior, where=["words.*", "rnn.*", "out.weight"]).eval()
    br.prune(model, 0.8)
    br.save(model, tmp_path / "m")
    again = br.load(tmp_path / "m", Net())
    masks = kept(model)
    assert all(torch.equal(keep, masks[name]) for name, keep in kept(again).items())
    for name, (loc, scale) in again.moments().items():
        expected, spread = model.moments()[name]
        assert torch.equal(loc, expected)
        if scale is not None and spread is not None:
            torch.testing.assert_close(scale, spread)
    assert again.weight_count == model.weight_count
    with torch.no_grad():
        assert torch.equal(loss_of(again), loss_of(model))
    br.save(model, tmp_path / "means", mean_only=True)
    plain = br.load(tmp_path / "means", Net())
    assert all(isinstance(block.posterior, br.Delta) for block in plain.each_block())
    for name, (loc, _) in plain.moments().items():
        assert torch.equal(loc, model.moments()[name][0])
    with torch.no_grad():
        assert torch.equal(loss_of(plain), loss_of(model))


def test_the_file_is_bits_and_values(tmp_path: Path) -> None:
    """Read without the package."""
    model = build()
    br.prune(model, 0.8)
    br.save(model, tmp_path / "m", mean_only=True)
    tensors = load_file(tmp_path / "m" / TENSORS)
    shapes = json.loads((tmp_path / "m" / CONFIG).read_text())["weights"]
    for name, (loc, _) in model.moments().items():
        shape = shapes[name]["shape"]
        packed = tensors[f"{name}.keep"].tolist()
        bits = [bool(packed[i // 8] >> (i % 8) & 1) for i in range(math.prod(shape))]
        values = iter(tensors[f"{name}.loc"].tolist())
        dense = torch.tensor([next(values) if bit else 0.0 for bit in bits]).view(shape)
        assert torch.equal(dense, loc)
        assert f"{name}.scale" not in tensors


def test_a_file_of_a_fifth_of_the_means_is_a_quarter_of_it(tmp_path: Path) -> None:
    net = nn.LSTM(100, 100)
    model = br.bayesianize(net, br.Gaussian(), br.Normal())
    br.save(model, tmp_path / "dense", mean_only=True)
    br.prune(model, 0.8)
    br.save(model, tmp_path / "sparse", mean_only=True)
    sizes = [(tmp_path / name / TENSORS).stat().st_size for name in ("sparse", "dense")]
    assert 0.2 < sizes[0] / sizes[1] <= 0.25


def test_parts_that_do_not_fit_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    br.prune(model, 0.8)
    bits = packing._bits
    monkeypatch.setattr(packing, "_bits", lambda keep: bits(keep.logical_not()))
    br.save(model, tmp_path / "m")
    with pytest.raises(Damaged, match=r"words.weight.loc has the shape"):
        br.load(tmp_path / "m", Net())


def test_a_state_tells_whether_it_is_pruned() -> None:
    whole, pruned = build(), build()
    assert not any("keep" in name for name in whole.state_dict())
    br.prune(pruned, 0.5)
    state = copy.deepcopy(whole.state_dict())
    whole.load_state_dict(pruned.state_dict())
    masks = kept(pruned)
    assert all(torch.equal(keep, masks[name]) for name, keep in kept(whole).items())
    assert whole.weight_count == pruned.weight_count
    pruned.load_state_dict(state)
    assert all(keep.all() for keep in kept(pruned).values())
