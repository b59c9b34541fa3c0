"""What each weight costs: the KL of a model, taken apart weight by weight (Graves 2011, Fig. 3).

It maps the KL's own functions over single weights, so that the costs sum to the KL.
"""

import math
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from bayesrnn.bayes.bayesian import Bayesian, check_bayesian
from bayesrnn.bayes.block import Block
from bayesrnn.bayes.hyper import Hyper
from bayesrnn.bayes.kl import Draw, exact_pair
from bayesrnn.bayes.layout import Weight
from bayesrnn.bayes.passes import look
from bayesrnn.bayes.prior import LOG_2PI, Values
from bayesrnn.errors import require


@torch.no_grad()
def weight_bits(
    model: Bayesian,
    samples: int = 10,
    generator: torch.Generator | None = None,
    names: Collection[str] | None = None,
) -> dict[str, Tensor]:
    """The bits that each drawn weight costs, by name; 0 for a pruned weight.

    `names` limits the result to those weights. Where the KL has a closed form, the bits are exact;
    otherwise the entropy is, and log p is averaged over `samples` draws. The bits sum to the
    expected KL. Weights without a description length (Delta, Uniform) are left out. If a prior
    takes groups of weights together, what does not depend on the single weight is shared equally by
    its group, so that a weight may come out below 0.

    >>> from bayesrnn import Gaussian, Normal, bayesianize
    >>> net = torch.nn.Linear(2, 1, bias=False)
    >>> _ = torch.nn.init.constant_(net.weight, 2.0)
    >>> weight_bits(bayesianize(net, Gaussian(scale=0.5), Normal()))["weight"]
    tensor([[3.3444, 3.3444]])
    """
    check_bayesian(model)
    require((samples >= 1, "samples", f"must be at least 1, got {samples}"))
    model.fit_priors()
    found: dict[str, Tensor] = {}
    for block in model.each_block():
        hyper = model.hyper(block)
        wanted = [w for w in block.layout.weights if names is None or w.name in names]
        if not (wanted and block.posterior.proper and hyper.prior.proper):
            continue
        exact = exact_pair(block.posterior, hyper.prior, "auto") is not None
        held = block.noise
        draws = []
        for _ in range(1 if exact else samples):
            block.resample(generator)
            draws.append(_costs(block, hyper, wanted))
        block.noise = held
        for name in draws[0]:
            found[name] = torch.stack([draw[name] for draw in draws]).mean(dim=0) / math.log(2)
    return found


def _costs(block: Block, hyper: Hyper, weights: Sequence[Weight]) -> dict[str, Tensor]:
    """Of some of a block's weights, in nats, at its present draw."""
    assert block.noise is not None
    layout, parameters = block.layout, block.spread(block.parameters_by_name)
    given = {name: layout.split(flat) for name, flat in parameters.items()}
    noise = {name: layout.split(flat) for name, flat in block.noise.items()}
    keep = None if block.keep is None else layout.split(block.keep)
    values = {name: v.item() if isinstance(v, Tensor) else v for name, v in hyper.values().items()}
    starts = {name: layout.split(flat) for name, flat in block.start.items()}
    costs: dict[str, Tensor] = {}
    for weight in weights:
        name = weight.name
        draw = look(
            block.posterior,
            {key: tensors[name].double() for key, tensors in given.items()},
            {key: tensors[name].double() for key, tensors in noise.items()},
        )
        left = torch.ones_like(draw.theta) if keep is None else keep[name].to(draw.theta)
        own = {**values, **{key: begun[name].double() for key, begun in starts.items()}}
        cost = _each(draw, block, hyper, weight, own, left)
        costs[name] = cost.where(left > 0, 0.0).to(given["loc"][name].dtype)
    return costs


def _each(
    draw: Draw, block: Block, hyper: Hyper, weight: Weight, values: Values, left: Tensor
) -> Tensor:
    """The nats of each weight of a tensor."""
    prior = hyper.prior
    exact = exact_pair(block.posterior, prior, "auto")
    assert draw.scale is not None
    whole = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    own = {name: value.flatten() for name, value in whole.items()}  # from the start
    if exact is not None:
        value = torch.vmap(lambda loc, scale, own: exact.value(loc, scale, {**values, **own}))
        return value(draw.loc.flatten(), draw.scale.flatten(), own).view(draw.loc.shape)
    of_q = -(draw.scale.log() + 0.5 * (1.0 + LOG_2PI))  # E[log q]: one draw's would be noise
    if not prior.grouped:
        log_p = torch.vmap(lambda theta, own: prior.log_prob(theta, None, {**values, **own}))
        return of_q - log_p(draw.theta.flatten(), own).view(draw.loc.shape)
    # A group has sum of squares S, precision r and n weights. Of its log p, -r theta^2 / 2 is each
    # weight's own; the rest, log p + r S / 2, does not depend on which weight, and is shared.
    theta = draw.theta * left
    sums = prior.sums(theta, weight.axis)
    count = prior.gather(left, weight.axis)
    settle = torch.vmap(lambda s, n: prior.settle(s, n, values))
    of_group, precision = (
        found.view(sums.shape) for found in settle(sums.flatten(), count.flatten())
    )
    shared = (of_group + precision * sums / 2) / count.clamp_min(1)
    return of_q - (shared - precision * theta.square() / 2)
