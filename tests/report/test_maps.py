"""Weight matrices as pictures: the right weights in the right place."""

import pytest
import torch

import bayesrnn as br
from bayesrnn.bayes.cost import weight_bits
from bayesrnn.models.speech import HierarchicalNetwork, SpeechSettings
from bayesrnn.prune import kept, mixed, pruning_order
from bayesrnn.report import maps
from bayesrnn.report.figures import gate_map


def network(hidden: int = 6) -> br.Bayesian:
    net = br.LanguageModel(vocabulary=9, embedding=5, hidden=hidden, layers=2, init=0.5)
    return br.bayesianize(net, br.Gaussian(scale=(0.01, 0.2)), br.Normal())


def test_a_weight_is_left_where_pruning_leaves_it() -> None:
    for fraction in (0.0, 0.25, 0.8, 1.0):
        model = network()
        br.prune(model, fraction=0.1)
        order = pruning_order(model)
        br.prune(model, fraction=fraction)
        for name, left in kept(model).items():
            count = sum(each.numel() for each in order.values())
            cut = max(round(fraction * count), round(0.1 * count)) / count
            assert torch.equal(order[name] > cut, left), (name, fraction)


def test_with_points_among_the_weights_each_tensor_is_by_itself() -> None:
    net = br.LanguageModel(vocabulary=9, embedding=5, hidden=6, layers=1, init=0.5)
    model = br.bayesianize(net, {"rnn.*": br.Gaussian(), "*": br.Delta()}, br.Normal())
    order = pruning_order(model)
    br.prune(model, fraction=0.5, per_tensor=True)
    for name, left in kept(model).items():
        assert torch.equal(order[name] > round(0.5 * left.numel()) / left.numel(), left), name
    assert mixed(model)
    assert not mixed(network())


def test_gates_are_the_rows_in_torchs_order() -> None:
    model = network()
    found = {matrix.name: matrix for matrix in maps.matrices(model)}
    assert list(found) == [f"rnn.weight_{s}_l{n}" for n in (0, 1) for s in ("ih", "hh")]
    bits = weight_bits(model)["rnn.weight_hh_l1"]
    order = pruning_order(model)["rnn.weight_hh_l1"]
    gates = found["rnn.weight_hh_l1"].gates
    assert [gate.name for gate in gates] == ["input", "forget", "cell", "output"]
    for number, gate in enumerate(gates):
        rows = slice(6 * number, 6 * number + 6)
        assert gate.bits is not None
        assert torch.equal(torch.from_numpy(gate.bits), bits[rows])
        assert gate.mean_bits == pytest.approx(bits[rows].mean().item())
        assert gate.left[0] == 1
        assert gate.left[100] == 0
        assert gate.left[30] == pytest.approx((order[rows] > 0.3).double().mean().item())


def test_large_matrices_are_shown_in_steps() -> None:
    gate = maps.matrices(network(hidden=401))[1].gates[0]
    assert (gate.step, gate.pruned_at.shape) == (3, (134, 134))


def test_a_gru_has_three_gates_and_other_networks_whole_matrices() -> None:
    gru = br.bayesianize(torch.nn.GRU(3, 4), br.Gaussian(), br.Normal())
    assert [gate.name for gate in maps.matrices(gru)[0].gates] == ["reset", "update", "new"]
    line = br.bayesianize(torch.nn.Linear(3, 4), br.Delta(), br.Uniform())
    (matrix,) = maps.matrices(line)
    assert (matrix.name, len(matrix.gates), matrix.gates[0].bits) == ("weight", 1, None)


def test_a_picture_keeps_its_numbers_to_a_byte() -> None:
    gate = maps.matrices(network())[0].gates[2]
    assert gate.bits is not None
    low, high = float(gate.bits.min()), float(gate.bits.max())
    bits, cut = gate_map(gate, low, high).data
    assert bits.z / 255 * (high - low) + low == pytest.approx(gate.bits, abs=(high - low) / 500)
    for percent in (0, 37, 80, 100):
        assert ((cut.z <= 2 * percent) == (gate.pruned_at <= percent / 100 + 1e-6)).all()


def test_two_dimensional_lstms_show_five_gates_with_all_directions() -> None:
    shape = SpeechSettings("mdlstm", cells=(2, 3), units=(4,), windows=((2, 4), (1, 2)))
    model = br.bayesianize(HierarchicalNetwork(8, 3, shape), br.Gaussian(), br.Normal())
    found = {matrix.name: matrix for matrix in maps.matrices(model)}
    assert list(found) == [f"lstms.{n}.weight_{s}" for n in (0, 1) for s in ("ih", "hh")]
    matrix = found["lstms.1.weight_hh"]
    assert [gate.name for gate in matrix.gates] == list(maps.GRID_GATES)
    bits = weight_bits(model)["lstms.1.weight_hh"]  # [direction, from, gate and unit]
    forget = matrix.gates[1].bits
    assert forget is not None
    assert forget.shape == (3, 4 * 6)
    assert forget[2, 3 * 6 + 5] == bits[3, 5, 1 * 3 + 2]  # unit 2, from the last of direction 3
