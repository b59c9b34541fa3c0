"""Several separately trained networks that answer as one."""

from collections.abc import Sequence
from typing import cast

from torch import nn

from bayesrnn.bayes.bayesian import Bayesian, check_bayesian, uncompiled
from bayesrnn.errors import require


class Ensemble(nn.Module):
    """Models that answer together: their distributions are averaged (Lakshminarayanan et al. 2017).

    `predict`, `evaluate_text`, `text_uncertainty` and the like take an ensemble in place of a
    model. Each member answers by its mean, or by draws of its own where it has any; `samples` is
    then the number of draws of each member. What the members or their draws disagree about is
    epistemic.

    >>> import bayesrnn as br, torch
    >>> ensemble = Ensemble([br.bayesianize(nn.Linear(3, 4)) for _ in range(5)])
    >>> br.predict(ensemble, torch.zeros(2, 3), samples=0).epistemic.shape
    torch.Size([2])
    """

    def __init__(self, members: Sequence[Bayesian]) -> None:
        super().__init__()
        require((len(members) > 0, "members", "must be at least one model, got none"))
        for member in members:
            check_bayesian(member)
        require((len(set(members)) == len(members), "members", "must each be another model"))
        self.members = nn.ModuleList(members)

    @property
    def draws_differ(self) -> bool:
        """Whether the draws of some member differ."""
        return any(member.draws_differ for member in members_of(self))


Network = Bayesian | Ensemble


def members_of(model: Network) -> list[Bayesian]:
    """Those of an ensemble; a model is its only one."""
    given = uncompiled(model)
    if isinstance(given, Ensemble):
        return [cast(Bayesian, member) for member in given.members]
    check_bayesian(model)
    return [cast(Bayesian, model)]  # a compiled one as it is, so that it runs compiled
