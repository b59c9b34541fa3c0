"""Networks without their zeros say what the pruned ones say."""

import pytest
import torch
from torch import nn

import bayesrnn as br
from bayesrnn.sparse import SparseLinear, SparseLSTM, plain_network, sparse_network


def pruned(module: nn.Module, fraction: float = 0.8) -> br.Bayesian:
    model = br.bayesianize(module, br.Gaussian((0.02, 0.3)), br.Normal()).eval()
    br.prune(model, fraction)
    return model


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("streams", [1, 3])
def test_a_language_model(streams: int, tied: bool) -> None:
    model = pruned(br.LanguageModel(13, 8, 8, 2, tied=tied, init=0.5))
    x = torch.randint(13, (5, streams))
    with torch.no_grad():
        expected, state = model(x)
        for network, kind in ((plain_network(model), nn.LSTM), (sparse_network(model), SparseLSTM)):
            assert isinstance(network.rnn, kind)
            found, after = network(x)
            torch.testing.assert_close(found, expected)
            again, _ = network(x, after)
            torch.testing.assert_close(again, model(x, state)[0])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("shape", [(4, 3, 5), (4, 5)])
def test_an_lstm(bias: bool, batch_first: bool, shape: tuple[int, ...]) -> None:
    net = nn.LSTM(5, 6, 2, bias=bias, batch_first=batch_first)
    model = pruned(net)
    x = torch.randn(shape)
    network = sparse_network(model)
    assert isinstance(network, SparseLSTM)
    with torch.no_grad():
        expected, state = model(x)
        found, after = network(x)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(after, tuple(state))
        torch.testing.assert_close(network(x, after)[0], model(x, state)[0])


def test_only_where_there_are_enough_zeros() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    model = pruned(net, 0.5)
    assert not any(isinstance(layer, SparseLinear) for layer in sparse_network(model).modules())
    some = sparse_network(model, at_least=0.2)
    assert isinstance(some[0], SparseLinear)  # type: ignore[index]
    x = torch.randn(2, 3, 8)
    torch.testing.assert_close(some(x), model(x).detach())
    nothing = pruned(nn.Linear(4, 4), 1.0)
    assert (sparse_network(nothing)(torch.randn(4)) == 0).all()
    with pytest.raises(br.Invalid, match="at_least"):
        sparse_network(model, 2.0)


def test_other_layers_stay() -> None:
    for layer in (nn.GRU(4, 4), nn.LSTM(4, 4, bidirectional=True)):
        model = pruned(layer)
        network = sparse_network(model)
        assert type(network) is type(layer)
        x = torch.randn(3, 2, 4)
        with torch.no_grad():
            torch.testing.assert_close(network(x)[0], model(x)[0])
