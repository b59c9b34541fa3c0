"""A trained model that looks at the data, whether or not it was trained to."""

import copy
from fnmatch import fnmatchcase

from bayesrnn.bayes.bayesian import Bayesian
from bayesrnn.bayes.posterior import Gaussian, Sharpened
from bayesrnn.errors import Invalid


def sharpen(
    model: Bayesian,
    where: str,
    sigma0: float,
    eta: float,
    relative: bool = False,
    clip: float = 0.0,
) -> Bayesian:
    """A copy whose weights named by the pattern `where` look at the data (Fortunato 2017, Section
    4), and no others do. What is learnt of phi stays; eta is the given one.

    Sharpening belongs to how a batch is scored, so its width need not be the one of training, if
    there was any: each choice gives a bound of its own. Choose on a validation set. The arguments
    are those of `Sharpened`.

    >>> from torch import nn
    >>> from bayesrnn.bayes import bayesianize
    >>> model = bayesianize(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)))
    >>> looking = sharpen(model, "1.*", sigma0=0.1, eta=0.2)
    >>> [block.posterior.kind for block in looking.each_block()]
    ['gaussian', 'sharpened']
    """
    model = copy.deepcopy(model)
    found = False
    for block in model.each_block():
        chosen = {weight.name: fnmatchcase(weight.name, where) for weight in block.layout.weights}
        old = block.posterior
        if any(chosen.values()) and not (all(chosen.values()) and isinstance(old, Gaussian)):
            some = ", ".join(name for name in chosen if chosen[name])
            said = f"of {', '.join(chosen)}, which are {old.kind}, {where!r} names {some}"
            raise Invalid([("where", f"must name whole layers that are Gaussian; {said}")])
        if not isinstance(old, Gaussian):
            continue
        own = (old.scale, old.learn_scale)
        looks = any(chosen.values())
        found = found or looks
        block.take(
            Sharpened(*own, sigma0=sigma0, eta=eta, clip=clip, relative=relative)
            if looks
            else Gaussian(*own, estimator=old.estimator)
        )
    if not found:
        listed = ", ".join(w.name for b in model.each_block() for w in b.layout.weights)
        raise Invalid([("where", f"must name some weight; {where!r} names none of {listed}")])
    return model
