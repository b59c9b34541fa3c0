"""Natural gradients: every weight learns in proportion to its posterior variance, and its precision
follows the curvature that the draws show."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from bayesrnn.bayes import Bayesian, Gaussian, Sharpened, check_bayesian
from bayesrnn.bayes.layout import PIECE
from bayesrnn.bayes.posterior import SMALLEST_SCALE, softplus_inverse
from bayesrnn.errors import require


class NaturalGradient(torch.optim.Optimizer):
    """An optimiser for Gaussian posteriors: each mean learns in proportion to its variance.

    It is the Bayesian learning rule (Khan and Rue 2023; Lin et al. 2020, which keeps precisions
    positive), with momentum close to the IVON of Shen et al. (2024), for any prior.

    - `sequences`: how many sequences an epoch reads. Gradients are of the loss per sequence, as
      `FreeEnergy` gives them; F, below, is this many times that.
    - `lr`: the rate of the means, on the scale of that of SGD without momentum.
    - `momentum`: the part of the running mean of the gradients that each step keeps.
    - `scale_rate`: the rate of the precisions, as a multiple of `lr`.

    With F the free energy of all the data, N `sequences`, s = 1 / sigma^2 and m the running mean of
    d F / d mu:

        mu <-  mu - (lr / N) (sigma^2 / v) m
        s  <-  s + r d + (r d)^2 / (2 s),   d = (d F / d sigma) / sigma,   r = lr scale_rate

    both from the sigma that the draw was made with. v is the mean variance at the start of
    training, which gives `lr` its scale. Where a loss is quadratic, d is its curvature, plus the
    prior's, less s: s goes to the precision of the best independent Gaussian. Everything else that
    is learnt (ordinary parameters, points, means of fixed scales, posteriors of your own) takes
    SGD's step along its own running mean.
    """

    def __init__(
        self,
        model: Bayesian,
        sequences: int,
        lr: float = 1.0,
        momentum: float = 0.9,
        scale_rate: float = 1e-3,
    ) -> None:
        check_bayesian(model)
        require(
            (0 <= lr < math.inf, "lr", f"must be a finite number, 0 or above, got {lr}"),
            (sequences >= 1, "sequences", f"must be at least 1, got {sequences}"),
            (0 <= momentum < 1, "momentum", f"must be 0 or above, below 1, got {momentum}"),
            (0 <= scale_rate < 1, "scale_rate", f"must be 0 or above, below 1, got {scale_rate}"),
        )
        groups: list[dict[str, Any]] = []
        paired: set[Tensor] = set()
        total = 0.0
        count = 0
        for block in model.each_block():
            found, posterior = block.parameters_by_name, block.posterior
            if type(posterior) in (Gaussian, Sharpened) and "rho" in found:
                groups.append({"params": [found["loc"], found["rho"]], "paired": True})
                paired |= {found["loc"], found["rho"]}
                scales = [scale for _, scale in block.left() if scale is not None]
                total += sum(scale.double().square().sum().item() for scale in scales)
                count += block.count
        others = [p for p in model.parameters() if p not in paired]
        if others:
            groups.append({"params": others, "paired": False})
        variance = total / count if count else 1.0
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "scale_rate": scale_rate,
            "sequences": sequences,
            "variance": variance,
            "taken": 0,
        }
        super().__init__(groups, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Take one step from the present gradients."""
        assert closure is None, "gradients are those of a draw: there is no closure to call again"
        for group in self.param_groups:
            group["taken"] += 1
            if group["paired"]:
                self._step_of_pair(group, *group["params"])
            else:
                for p in group["params"]:
                    if p.grad is not None:
                        average, unbias = self._average(group, p)
                        average.lerp_(p.grad, 1 - group["momentum"])
                        p.sub_(average, alpha=group["lr"] * unbias)

    def _step_of_pair(self, group: dict[str, Any], loc: Tensor, rho: Tensor) -> None:
        """What is frozen has no gradient, and stays; the other of the two goes on."""
        moves, spreads = loc.grad is not None, rho.grad is not None
        if not (moves or spreads):
            return
        average, unbias = self._average(group, loc)
        rate = group["lr"] / group["variance"] * unbias
        scale_rate = group["scale_rate"] * group["lr"] * group["sequences"]
        size = PIECE if loc.device.type == "cpu" else max(len(loc), 1)
        gradients = [p if p.grad is None else p.grad for p in (loc, rho)]
        flat = (loc, rho, average, *gradients)
        for m, r, a, d_loc, d_rho in zip(*(tensor.split(size) for tensor in flat), strict=True):
            sigma = softplus(r).add_(SMALLEST_SCALE)
            if moves:
                a.lerp_(d_loc, 1 - group["momentum"])
                m.addcmul_(a, sigma.square(), value=-rate)
            if not spreads:
                continue
            # r d / s: d sigma / d rho is a sigmoid, and 1 / s is sigma^2
            change = d_rho.mul(sigma).mul_(scale_rate).div_(r.sigmoid())
            grown = torch.addcmul(change + 1.0, change, change, value=0.5)  # of s; at least 1/2
            sigma.mul_(grown.rsqrt_()).sub_(SMALLEST_SCALE)
            r.copy_(softplus_inverse(sigma.clamp_min_(SMALLEST_SCALE / 10)))

    def _average(self, group: dict[str, Any], p: Tensor) -> tuple[Tensor, float]:
        """The gradients' running mean so far, and what takes away the bias towards the 0 that it
        starts from."""
        state = self.state[p]
        if "average" not in state:
            state["average"] = torch.zeros_like(p)
        return state["average"], 1 / (1 - group["momentum"] ** group["taken"])
