"""The way back: the plain network that a Bayesian model is at its mean, or at one draw."""

from typing import Literal

import torch
from torch import Tensor, nn

from bayesrnn.bayes.bayesian import Bayesian, check_bayesian, uncompiled
from bayesrnn.bayes.bayesianize import copied
from bayesrnn.bayes.binding import PARTED, without_places
from bayesrnn.bayes.block import Block
from bayesrnn.bayes.processes import rank_generator
from bayesrnn.models.dropout import Mask


def plain_network(
    model: Bayesian,
    weights: Literal["mean", "sample"] = "mean",
    generator: torch.Generator | None = None,
) -> nn.Module:
    """A copy of the wrapped network as a plain module, at the posterior mean or at one draw.

    Nothing of a Bayesian model is left in it: its weights are ordinary parameters again, under
    their old names, and its dropout masks come from torch's own generator. Use it to deploy or
    export (`torch.export`, ONNX), to train on as a plain network, or to run several draws apart.
    The copy is on the model's device, in eval mode; a change of one does not reach the other.
    Pruned weights are 0.

    `weights` is "mean" or "sample". A draw is of the weights alone, without dropout masks; it comes
    from `generator` (on the weights' device), or from torch's own.

    >>> from bayesrnn.bayes.bayesianize import bayesianize
    >>> plain_network(bayesianize(nn.Linear(3, 2)))
    Linear(in_features=3, out_features=2, bias=True)
    """
    check_bayesian(model)
    if weights not in ("mean", "sample"):
        raise ValueError(f'weights must be "mean" or "sample", got {weights!r}')
    model = uncompiled(model)
    network = copied(model.module)
    paths = {layer: path for path, layer in model.module.named_modules()}
    for block in model.each_block():
        values = block.mean() if weights == "mean" else _drawn(block, generator)
        for name, value in block.layout.split(values.detach()).items():
            weight = nn.Parameter(value.clone())
            for layer, local in model.binding.places(name):  # tied weights have several
                setattr(network.get_submodule(paths[layer]), local, weight)
    classes = {drawn: plain for plain, drawn in PARTED.items()}
    for layer in network.modules():
        layer.__class__ = classes.get(type(layer), type(layer))
        if isinstance(layer, nn.RNNBase):
            layer.flatten_parameters()  # in cuDNN's order again
        if isinstance(layer, Mask):
            layer.renew()
    hooks = network._state_dict_hooks
    for key in [key for key, hook in hooks.items() if hook is without_places]:
        del hooks[key]
    return network.eval()


@torch.no_grad()
def _drawn(block: Block, generator: torch.Generator | None) -> Tensor:
    """A draw of its own: the model keeps the one that it has."""
    parameters = block.parameters_by_name
    if generator is None:
        generator = rank_generator(parameters["loc"].device)
    noise = block.posterior.noise(parameters, generator)
    return block.kept(block.posterior.draw(parameters, noise))
