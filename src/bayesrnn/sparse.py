"""Pruned networks that run on a CPU without their zeros.

`sparse_network` gives the plain network at the posterior mean, for inference: matrices with enough
zeros are kept as compressed rows. This is meant for batch 1, where reading the weights takes the
time; benchmarks/pruning.py measures where it pays. `text_reader` uses it where it pays for a text.
"""

import warnings

import torch
from torch import Tensor, nn

from bayesrnn.bayes import Bayesian, check_bayesian, plain_network
from bayesrnn.errors import require
from bayesrnn.models.linear import is_linear

Pair = tuple[Tensor, Tensor]

COLUMNS = 32
"""How many vectors a sparse matrix is multiplied with at a time: more do not stay in the cache."""
PAYS_FROM = 0.95
"""The part of zeros from which a text is read faster without them."""
LSTM_FROM = 1 << 20
"""The recurrent weights of a layer from which that holds for an LSTM: a smaller one's are in the
cache, and nn.LSTM's own loop costs less than this one's."""
PRODUCTS = (torch.float32, torch.float64)
"""The numbers that torch has sparse products of."""


def sparse_network(model: Bayesian, at_least: float = 0.75, lstm_from: int = 0) -> nn.Module:
    """A copy of the wrapped network without its zeros, at the mean, for inference on a CPU.

    It has no gradients. Its `nn.Linear` and `nn.LSTM` layers (of one direction, without
    projections) are replaced where at least the part `at_least` of their weights is 0; an `nn.LSTM`
    only if each layer has `lstm_from` recurrent weights or more. Everything else is as it was, and
    so are layers with hooks or a forward of their own.
    """
    check_bayesian(model)
    require((0 <= at_least <= 1, "at_least", f"must be between 0 and 1, got {at_least}"))
    network = plain_network(model).cpu().requires_grad_(False)
    fused = (nn.TransformerEncoderLayer, nn.MultiheadAttention)  # which read their layers' weights
    whole = [layer for layer in network.modules() if isinstance(layer, fused)]
    parts = {part for layer in whole for part in layer.modules()}
    for path, layer in list(network.named_modules()):
        if layer in parts:
            continue
        new = _replacement(layer, at_least, lstm_from)
        if new is not None and path:
            parent, _, local = path.rpartition(".")
            setattr(network.get_submodule(parent), local, new)
        elif new is not None:
            return new.eval()
    return network


def text_reader(model: Bayesian, streams: int) -> nn.Module | None:
    """The network at the mean without its zeros, where that reads a text faster than the model
    itself: on a CPU, one stream, pruned enough. None where it does not."""
    loc = next(model.each_block()).parameters_by_name["loc"]
    if streams > 1 or loc.device.type != "cpu" or loc.dtype != torch.float32:
        return None
    if model.weight_count == model.full_count:  # nothing was pruned; zeros cost a pass to count
        return None
    network = sparse_network(model, PAYS_FROM, LSTM_FROM)
    sparse = any(isinstance(layer, (SparseLinear, SparseLSTM)) for layer in network.modules())
    return network if sparse else None


def _replacement(layer: nn.Module, at_least: float, lstm_from: int) -> nn.Module | None:
    if not _runs_as_ever(layer):
        return None
    if is_linear(layer) and _zeros(layer.weight) >= at_least:
        return SparseLinear(layer)
    if type(layer) is nn.LSTM and not layer.bidirectional and layer.proj_size == 0:
        if 4 * layer.hidden_size**2 < lstm_from:
            return None
        matrices = [w for name, w in layer.named_parameters() if w.dim() == 2]
        zeros = sum(_zeros(w) * w.numel() for w in matrices) / sum(w.numel() for w in matrices)
        return SparseLSTM(layer) if zeros >= at_least else None
    return None


def _runs_as_ever(layer: nn.Module) -> bool:
    """Whether it does what its class says and no more, in numbers with sparse products."""
    more = layer._forward_hooks or layer._forward_pre_hooks or "forward" in vars(layer)
    return not more and all(p.dtype in PRODUCTS for p in layer.parameters(recurse=False))


def _zeros(weight: Tensor) -> float:
    return (weight == 0).double().mean().item()


def compressed(weight: Tensor) -> Tensor:
    """A matrix as compressed rows, with 32-bit places: half the memory to read of 64-bit ones."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that compressed rows are in beta state
        rows = weight.detach().to_sparse_csr()
        return torch.sparse_csr_tensor(
            rows.crow_indices().int(), rows.col_indices().int(), rows.values(), rows.shape
        )


def product(rows: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., in] times the transposed matrix [out, in], and a bias."""
    flat = x.reshape(-1, x.shape[-1])
    if len(flat) == 1:
        found = (rows @ flat[0])[None]
    else:
        found = torch.cat([(rows @ some.t()).t() for some in flat.split(COLUMNS)])
    found = found if bias is None else found + bias
    return found.reshape(*x.shape[:-1], rows.shape[0])


class SparseLinear(nn.Module):
    """`nn.Linear` by compressed rows, which are its `weight` to modules that ask for that."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight = compressed(layer.weight)
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        return product(self.weight, x, self.bias)


class SparseLSTM(nn.Module):
    """`nn.LSTM` by compressed rows, in its own order of gates; no packed sequences."""

    def __init__(self, layer: nn.LSTM) -> None:
        super().__init__()
        self.input_size, self.hidden_size = layer.input_size, layer.hidden_size
        self.num_layers, self.batch_first = layer.num_layers, layer.batch_first
        self.bidirectional, self.proj_size = False, 0
        self.inputs: list[Tensor] = []
        self.recurrent: list[Tensor] = []
        self.biases: list[Tensor | None] = []
        for index in range(layer.num_layers):
            self.inputs.append(compressed(getattr(layer, f"weight_ih_l{index}")))
            self.recurrent.append(compressed(getattr(layer, f"weight_hh_l{index}")))
            bias: Tensor | None = None
            if layer.bias:
                bias = sum(getattr(layer, f"bias_{way}_l{index}").detach() for way in ("ih", "hh"))
            self.biases.append(bias)

    def flatten_parameters(self) -> None:
        """For callers of `nn.LSTM`'s: there is nothing to lay side by side."""

    @torch.no_grad()
    def forward(self, x: Tensor, state: Pair | None = None) -> tuple[Tensor, Pair]:
        """x [T, B, in] (or [B, T, in], or [T, in]) and the state, as `nn.LSTM` has them."""
        if not isinstance(x, Tensor):
            raise TypeError(
                f"an nn.LSTM without its zeros takes a padded tensor, got {type(x).__name__}; keep "
                "it dense with sparse_network(model, lstm_from=2**62), or give padded sequences"
            )
        alone = x.dim() == 2
        if alone:
            x = x[:, None]
            state = None if state is None else (state[0][:, None], state[1][:, None])
        elif self.batch_first:
            x = x.transpose(0, 1)
        if state is None:
            zeros = x.new_zeros(len(self.inputs), x.shape[1], self.hidden_size)
            state = zeros, zeros
        ends: list[Pair] = []
        for index, rows in enumerate(self.inputs):
            h, c = state[0][index], state[1][index]
            entering = product(rows, x, self.biases[index])  # [T, B, 4 H], all steps at once
            outputs = []
            for step in entering:
                i, f, g, o = (step + product(self.recurrent[index], h, None)).chunk(4, dim=-1)
                c = torch.addcmul(f.sigmoid() * c, i.sigmoid(), g.tanh())
                h = o.sigmoid() * c.tanh()
                outputs.append(h)
            x = torch.stack(outputs)
            ends.append((h, c))
        after = torch.stack([h for h, _ in ends]), torch.stack([c for _, c in ends])
        if alone:
            return x[:, 0], (after[0][:, 0], after[1][:, 0])
        return (x.transpose(0, 1) if self.batch_first else x), after
