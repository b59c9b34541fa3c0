"""The present values of a prior's parameters."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from bayesrnn.bayes.passes import widened
from bayesrnn.bayes.prior import Number, Prior


class Hyper(nn.Module):
    """The present values of one prior object's parameters: numbers, fitted, or learnt.

    Fitted ones are buffers, learnt ones parameters in an unconstrained form (log of a scale, logit
    of a probability), so both are saved with the model.
    """

    def __init__(self, prior: Prior, like: Tensor) -> None:
        super().__init__()
        self.prior = prior
        for name in prior.named("fit"):
            self.register_buffer(name, like.new_tensor(prior.start[name]))
        for name in prior.named("learn"):
            start = torch.tensor(prior.start[name], dtype=torch.float64)
            raw = {"real": start, "positive": start.log(), "unit": start.logit()}
            value = raw[prior.domains[name]].to(like)
            self.register_parameter(name, nn.Parameter(value))

    def values(self) -> dict[str, Number]:
        """Numbers and 0-d tensors by parameter name, constrained; at least in single precision, as
        they are multiplied with the number of weights. What each weight has of its own, from its
        start, is the block's to say."""
        values: dict[str, Number] = {}
        for name, domain in self.prior.domains.items():
            setting = getattr(self.prior, name)
            if setting == "start":
                continue
            if setting == "learn":
                raw = widened(getattr(self, name))
                values[name] = {"real": raw, "positive": raw.exp(), "unit": raw.sigmoid()}[domain]
            else:
                values[name] = widened(getattr(self, name)) if setting == "fit" else float(setting)
        return values

    def learnt(self) -> tuple[Tensor, ...]:
        """The parameters that move by gradient (none, where all are numbers, fitted or frozen)."""
        return tuple(p for p in self.parameters() if p.requires_grad)

    @torch.no_grad()
    def fit(self, means: Sequence[Tensor], scales: Sequence[Tensor | None]) -> None:
        """Set the fitted values to their optimum for these posteriors (none left: they stay)."""
        if self.prior.named("fit") and any(mean.numel() for mean in means):
            wide = [widened(mean) for mean in means]
            spread = [None if scale is None else widened(scale) for scale in scales]
            for name, value in self.prior.fit(wide, spread, self.values()).items():
                getattr(self, name).copy_(value)
