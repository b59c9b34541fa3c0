"""Networks without their zeros say what the pruned ones say."""

import pytest
import torch
from torch import nn

import bayesrnn as br
from bayesrnn.sparse import (
    SparseLinear,
    SparseLSTM,
    compressed,
    product,
    sparse_network,
    text_reader,
)


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
        for network, kind in (
            (br.plain_network(model), nn.LSTM),
            (sparse_network(model), SparseLSTM),
        ):
            assert isinstance(network.rnn, kind)
            found, after = network(x)
            torch.testing.assert_close(found, expected)
            again, _ = network(x, after)
            torch.testing.assert_close(again, model(x, state)[0])


def test_the_masks_of_an_earlier_draw_are_left_out() -> None:
    dropout = br.DropoutSettings(input=0.5, recurrent=0.5, output=0.5)
    model = pruned(br.LanguageModel(13, 8, 8, 1, init=0.5, dropout=dropout))
    x = torch.randint(13, (5, 1))
    with torch.no_grad():
        expected, _ = model(x)
        with model.weights("sample"):
            assert not torch.equal(model(x)[0], expected)
        for network in (br.plain_network(model), sparse_network(model)):
            torch.testing.assert_close(network(x)[0], expected)


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


@pytest.mark.parametrize("hidden", [8, 512])
def test_texts_are_read_without_zeros_where_it_pays(
    hidden: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same figures, to what single precision allows; small LSTMs stay as they are."""
    words = (torch.arange(60) * 7 % 11).numpy()
    model = pruned(br.LanguageModel(11, 8, hidden, 1, init=0.3), 0.97)
    one = br.StreamLoader(words, streams=1, unroll=13)
    network = text_reader(model, 1)
    assert isinstance(network, nn.Module)
    assert isinstance(network.rnn, SparseLSTM) == (hidden == 512)
    assert isinstance(network.decoder, SparseLinear)
    found = br.evaluate_text(model, one)
    monkeypatch.setattr("bayesrnn.evaluate.perplexity.text_reader", lambda *_: None)
    assert br.evaluate_text(model, one).nll == pytest.approx(found.nll, rel=1e-6)


def test_texts_are_read_as_ever_where_it_does_not_pay() -> None:
    assert text_reader(pruned(br.LanguageModel(11, 8, 8, 1), 0.97), 2) is None
    assert text_reader(pruned(br.LanguageModel(11, 8, 8, 1), 0.5), 1) is None
    assert text_reader(pruned(br.LanguageModel(11, 8, 8, 1), 0.97).double(), 1) is None
    whole = br.bayesianize(br.LanguageModel(11, 8, 8, 1), br.Gaussian(), br.Normal())
    assert text_reader(whole, 1) is None


def test_many_columns_are_taken_in_parts() -> None:
    weight = torch.randn(6, 5) * (torch.rand(6, 5) > 0.5)
    x, bias = torch.randn(3, 47, 5), torch.randn(6)
    torch.testing.assert_close(product(compressed(weight), x, bias), x @ weight.t() + bias)


def test_other_layers_stay() -> None:
    for layer in (nn.GRU(4, 4), nn.LSTM(4, 4, bidirectional=True)):
        model = pruned(layer)
        network = sparse_network(model)
        assert type(network) is type(layer)
        x = torch.randn(3, 2, 4)
        with torch.no_grad():
            torch.testing.assert_close(network(x)[0], model(x)[0])


def test_layers_that_do_more_than_their_class_stay() -> None:
    net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)), nn.LSTM(8, 8))
    net[0].register_forward_hook(lambda layer, given, found: 2 * found)
    net[1].register_forward_pre_hook(lambda layer, given: (given[0] + 1,))
    net[2].forward = net[2].extra_repr  # type: ignore[assignment]
    net[3].register_forward_hook(lambda layer, given, found: found[0].tanh())
    kinds = [type(layer) for layer in sparse_network(pruned(net, 0.9))]  # type: ignore[arg-type]
    assert kinds == [type(layer) for layer in net]


def test_layers_in_numbers_without_sparse_products_stay() -> None:
    model = pruned(nn.Linear(8, 8).bfloat16(), 0.9)
    x = torch.randn(2, 8, dtype=torch.bfloat16)
    assert torch.equal(sparse_network(model)(x), model(x))


class Asks(nn.Module):
    """Asks its layers for what theirs have."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.LSTM(8, 6, 2), nn.Linear(6, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        zeros = x.new_zeros(self.rnn.num_layers, x.shape[1], self.rnn.hidden_size)
        y = self.rnn(x.to(self.out.weight.dtype), (zeros, zeros))[0]
        again = nn.functional.linear(y, self.out.weight, self.out.bias)
        return self.out(y) + again.view(*y.shape[:2], self.out.out_features)


def test_a_sparse_layer_answers_like_the_one_it_replaces() -> None:
    model, x = pruned(Asks()), torch.randn(5, 2, 8)
    network = sparse_network(model, 0.5)
    assert isinstance(network.rnn, SparseLSTM)
    assert isinstance(network.out, SparseLinear)
    torch.testing.assert_close(network(x), model(x).detach())


def test_packed_sequences_are_refused() -> None:
    packed = nn.utils.rnn.pack_padded_sequence(torch.randn(5, 2, 8), [5, 3])
    model = pruned(nn.LSTM(8, 6), 0.9)
    with pytest.raises(TypeError, match="takes a padded tensor, got PackedSequence"):
        sparse_network(model)(packed)
    found, _ = sparse_network(model, lstm_from=2**62)(packed)
    torch.testing.assert_close(found.data, model(packed)[0].data)
