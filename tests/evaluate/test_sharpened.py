"""The bound of a sharpened model, cut by cut (what it bounds: tests/bayes/test_sharpening.py)."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

import bayesrnn as br
from bayesrnn.errors import Invalid
from bayesrnn.evaluate import sharpened
from bayesrnn.evaluate.draws import evaluating
from bayesrnn.evaluate.dynamic import Learner
from bayesrnn.models.layers import as_tensors


def looking_model() -> br.Bayesian:
    torch.manual_seed(1)
    net = br.LanguageModel(20, 4, 5, 2, init=0.5)
    model = br.bayesianize(net, br.Gaussian(0.1), where=["rnn.*", "decoder.*"])
    return sharpened.looking(model, "decoder.*", 1.0, 1)


@pytest.mark.parametrize(("looks", "draws"), [(1, 1), (2, 3)])
@pytest.mark.parametrize("by_variance", [False, True])
def test_no_cut_looks_at_a_value(looks: int, draws: int, by_variance: bool) -> None:
    """So it can be recorded: on a device whose tensors have no values, asking for one fails."""
    learner = Learner(looking_model().to("meta"), 0.1, by_variance=by_variance)
    model = learner.model
    x = torch.zeros(6, 1, dtype=torch.int64, device="meta")
    carried: tuple[Tensor, ...] = ()
    learnt: list[Tensor] = []
    for _ in range(2):
        with evaluating(model), model.weights("sample"):
            *found, after = sharpened._score(model, x, x, carried, "mean", None, looks, draws)
        assert [f.shape for f in found] == [torch.Size([])] * 3
        carried = as_tensors(after)
        with torch.enable_grad():
            _, *learnt = learner(x, x, *learnt)
    assert [c.shape for c in carried] == [c.shape for c in learnt]


@pytest.mark.parametrize("rate", [0.0, 0.2])
@pytest.mark.parametrize("streams", [1, 4])
def test_a_cut_knows_nothing_of_later_ones(
    streams: int, rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of texts that part after the third cut of each stream the first three have the same bounds;
    the others do not."""
    model, unroll, cuts = looking_model(), 5, 6
    score = sharpened._score
    bounds: list[float] = []

    def noted(*given: object) -> object:
        found = score(*given)  # type: ignore[arg-type]
        bounds.append(found[2].item())
        return found

    monkeypatch.setattr(sharpened, "_score", noted)
    rows = (np.arange(streams * cuts * unroll) * 7 % 20).reshape(streams, -1)
    for shift in (0, 1):
        rows[:, 3 * unroll + 1 :] += shift  # the target of the third cut's last word stays
        loader = br.StreamLoader(np.append(rows % 20, 0), streams, unroll)
        generator = torch.Generator().manual_seed(2)
        sharpened.evaluate_sharpened(model, loader, "draw", generator, rate=rate)
    one, other = bounds[:cuts], bounds[cuts:]
    assert one[:3] == other[:3]
    assert all(a != b for a, b in zip(one[3:], other[3:], strict=True))


@pytest.mark.parametrize("look", [0.0, 1e-300, 1e300, math.nan])
def test_a_look_of_no_sensible_width_is_refused(look: float) -> None:
    with pytest.raises(Invalid, match="look must be a width from 1e-06 to"):
        sharpened.looking(looking_model(), "decoder.*", look, 1)


def test_a_width_without_a_bound_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    bounds = iter([math.nan, 3.0, 2.0])

    def score(*_: object, **__: object) -> sharpened.Bound:
        bound = next(bounds)
        return sharpened.Bound(1, 1, 1, "mean", 1, 1, 0.0, False, bound, 0.0, bound, bound)

    monkeypatch.setattr(sharpened, "evaluate_sharpened", score)
    loader = br.StreamLoader(np.arange(9, dtype=np.int32), 1, 4)
    assert sharpened.search_look(looking_model(), loader, "decoder.*", (0.5, 1.0, 2.0)).look == 2.0
