"""The variational free energy: error loss + complexity loss, with the KL counted once per epoch.

Over an epoch the free energy is F = (sum of all targets' NLL) + KL (Fortunato 2017, eqs. 2-5;
Graves 2011, eqs. 3-6 and 18). A batch is charged its share of the KL: its own targets divided by
those of the epoch. The shares come from the loader and sum to 1, whatever the batches and cuts are.
They are checked: a batch that does not fit the loader's count raises an error.
"""

import math
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, field
from fractions import Fraction
from numbers import Integral
from typing import Any, NamedTuple, Protocol, get_args, runtime_checkable

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from bayesrnn.bayes.bayesian import Bayesian, check_bayesian, uncompiled
from bayesrnn.bayes.charge import Charge
from bayesrnn.bayes.kl import Estimator
from bayesrnn.bayes.looking import Look
from bayesrnn.bayes.processes import in_process_group
from bayesrnn.engine import untraced
from bayesrnn.errors import require


@runtime_checkable
class CountedLoader(Protocol):
    """A loader that knows how many targets an epoch has."""

    @property
    def targets(self) -> int: ...


@runtime_checkable
class CountedBatch(Protocol):
    """A batch that knows its targets, and over how many sequences (streams) they are spread."""

    @property
    def targets(self) -> int: ...

    @property
    def streams(self) -> int: ...


class Lengths(NamedTuple):
    """Error, complexity and total; the last two None where they are undefined (Delta, Uniform)."""

    error: float
    complexity: float | None
    total: float | None


def _lengths(error: float, complexity: float, defined: bool, unit: float) -> Lengths:
    if not defined:
        return Lengths(error / unit, None, None)
    return Lengths(error / unit, complexity / unit, (error + complexity) / unit)


@dataclass(frozen=True)
class Loss:
    """The free energy of one batch, at one draw, in nats.

    - `error`: the loss of the data and, for a sharpened posterior, what the batch was charged for
      the look: together they bound the loss (Fortunato 2017, eq. 17).
    - `complexity`: the batch's share of the KL.
    - `share`: the batch's targets divided by those of the epoch.
    - `streams`, `draws`: the sequences of the batch, and the draws of the step.
    - `warmth`: the part of the complexity that counts in `objective` while the KL is being warmed
      up; all other figures are of the whole.

    For the gradients call `backward()`: where a posterior needs more than autograd finds (the
    Fisher estimate, or the second order of sharpening), it is the only way.
    """

    error: Tensor
    complexity: Tensor
    share: float | Tensor
    streams: int
    draws: int
    model: Bayesian = field(repr=False)
    losses: Tensor = field(repr=False)
    charges: Sequence[Charge] = field(repr=False)
    local: Tensor | None = field(default=None, repr=False)
    look: Look | None = field(default=None, repr=False)
    warmth: float | Tensor = 1.0

    @property
    def total(self) -> Tensor:
        """error + complexity, in nats."""
        return self.error + self.complexity

    @property
    def objective(self) -> Tensor:
        """What `backward` differentiates: (error + warmth * complexity) / (streams * draws).

        Dividing by the streams is the published scale of a learning rate.
        """
        return (self.error + self.warmth * self.complexity) / (self.streams * self.draws)

    @property
    def nats(self) -> Lengths:
        """Error, complexity and total in nats."""
        return self._in(1.0)

    @property
    def bits(self) -> Lengths:
        """Error, complexity and total in bits."""
        return self._in(math.log(2.0))

    def _in(self, unit: float) -> Lengths:
        defined = self.model.has_description_length
        return _lengths(self.error.item(), self.complexity.item(), defined, unit)

    @untraced
    def backward(self) -> None:
        """Accumulate the gradients of `objective`.

        Where a posterior needs it (Graves 2011, eq. 17), this is done one sequence at a time.
        """
        scale = self.streams * self.draws
        if self.model.per_sequence:
            self._backward_by_sequence(scale)
        elif _can_charge(self.losses, self.charges):
            weight = self.warmth * self.share / scale
            with self.model.charged(self.charges, weight, 1 / scale):
                (self.losses.sum() / scale).backward()
            if self.look is not None:
                self.model.bend(self.look, 1 / scale)
        elif self.look is not None:
            raise RuntimeError(
                "the second order of sharpening is not available where a prior learns or several "
                'processes train together; use order="first"'
            )
        else:
            self.objective.backward()

    def _backward_by_sequence(self, scale: int) -> None:
        if in_process_group():
            raise RuntimeError("the Fisher estimate is not available in a process group")
        if self.look is not None:
            raise RuntimeError(
                "the second order of sharpening does not go with the Fisher estimate; use "
                'order="first"'
            )
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        sums = [torch.zeros_like(p) for p in parameters]
        paid = [self.warmth * self.complexity, *([] if self.local is None else [self.local])]
        for loss in (*self.losses, *(term for term in paid if term.requires_grad)):
            with self.model.one_sequence():
                gradients = torch.autograd.grad(
                    loss, parameters, retain_graph=True, allow_unused=True
                )
            for total, gradient in zip(sums, gradients, strict=True):
                if gradient is not None:
                    total += gradient
        for parameter, total in zip(parameters, sums, strict=True):
            total /= scale
            parameter.grad = total if parameter.grad is None else parameter.grad + total


def _can_charge(losses: Tensor, charges: Sequence[Charge]) -> bool:
    """Whether the KL's gradient can ride on the loss's: not where a prior learns (its gradient is
    in the graph), nor in a process group (whose hooks every gradient must pass)."""
    learns = any(charge.hyper.learnt() for charge in charges)
    return losses.requires_grad and not learns and not in_process_group()


class Known(NamedTuple):
    """The model's `kl()` and `local_kl()` of the present draw."""

    divergence: Tensor
    local: Tensor | None


class FreeEnergy:
    """Turns a batch's summed NLL into a `Loss`, with the share of the KL taken from the loader.

    - `loader`: one of this package's, a `torch.utils.data.DataLoader` (each example is a target and
      a sequence of its own), or any object with `targets` whose batches have `targets` and
      `streams`.
    - `kl`: "auto" (exact where there is a closed form), "exact" or "sample".
    - `processes`: where several processes train together, each with a loader of its own part: how
      many parts, of equal length, make an epoch. A `DataLoader` knows it from its
      `DistributedSampler`.

    The loss passed in is the negative log-likelihood of the batch, **summed**: a scalar, or a
    vector with one entry per sequence, which is summed here.

    `warmth` is the part of the KL that is minimised at present: 1, unless you set it (a number, or
    a tensor on the device). A large network with little data may learn nothing while the KL counts
    in full from the first step: start at 0 and let it rise. Only with 1 is the objective the free
    energy.

    >>> from torch.utils.data import TensorDataset
    >>> from bayesrnn.bayes import bayesianize
    >>> x, y = torch.randn(10, 3), torch.randn(10, 1)
    >>> loader = DataLoader(TensorDataset(x, y), batch_size=4)
    >>> model, objective = bayesianize(torch.nn.Linear(3, 1)), FreeEnergy(loader)
    >>> for batch in loader:
    ...     loss = objective(model, 0.5 * (model(batch[0]) - batch[1]).square().sum(), batch)
    >>> loss.share, objective.epoch.share
    (0.2, 1.0)
    """

    def __init__(
        self, loader: object, kl: Estimator = "auto", processes: int | None = None
    ) -> None:
        known = get_args(Estimator)
        require((kl in known, "kl", f"must be one of {', '.join(known)}, got {kl!r}"))
        self.kl = kl
        self.warmth: float | Tensor = 1.0
        self.targets, self.processes, self._sizes = _count_epoch(loader, processes)
        self._error, self._complexity = torch.zeros(2, dtype=torch.float64).unbind()
        self._defined = True
        self.restart()

    def restart(self) -> None:
        """Start to count a new epoch; needed after one that broke off, not after a full one."""
        self._seen = Fraction(0)  # exact: a batch of several draws counts in parts
        self._error.zero_()
        self._complexity.zero_()

    @untraced
    def __call__(
        self, model: Bayesian | DistributedDataParallel, nll: Tensor, batch: object, draws: int = 1
    ) -> Loss:
        """The `Loss` of a batch, from its summed `nll`.

        `batch` is what the loader yielded. With several `draws` per step, call it once per draw,
        each time with their number.

        On a CPU, a loss that is not finite raises an error, before it spoils every weight. On a GPU
        it is not checked, because that would make every step wait.
        """
        if nll.device.type == "cpu" and not bool(nll.isfinite().all()):
            raise ValueError(
                f"the batch's nll is {nll.sum().item()}, and a step would make every weight so: "
                "look for NaN in the data, or lower the learning rate"
            )
        before = self._seen
        self.count(batch, draws)
        try:
            return self.loss(model, nll, batch, draws)
        except BaseException:
            self._seen = before
            raise

    def count(self, batch: object, draws: int = 1) -> None:
        """Count a draw of a batch towards the epoch; an epoch that gets too long is refused."""
        require((draws >= 1, "draws", f"must be at least 1, got {draws}"))
        targets, _ = _count_batch(batch, self._sizes)
        here = self.targets // self.processes
        if self._seen >= here:
            self.restart()
        seen = self._seen + Fraction(targets, draws)
        if seen > here:
            raise ValueError(
                f"the batches since the epoch began hold more targets ({float(seen):g}) than the "
                f"loader's epoch ({here}), so the KL would be charged more than once; if an epoch "
                "was broken off, call objective.restart()"
            )
        self._seen = seen

    @untraced
    def loss(
        self,
        model: Bayesian | DistributedDataParallel,
        nll: Tensor,
        batch: object,
        draws: int = 1,
        known: "Known | None" = None,
        share: Tensor | None = None,
    ) -> Loss:
        """The `Loss` of a batch, without counting the batch.

        All of it happens on the device, so it can be recorded once and replayed (`count` cannot).
        `known` is a KL that was already computed. `share` is the batch's share as a tensor, if a
        replay is to read it anew every time.
        """
        model = uncompiled(model)
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        targets, streams = _count_batch(batch, self._sizes)
        check_bayesian(inner)
        if inner.per_sequence and nll.shape != (streams,):
            raise ValueError(
                "the Fisher estimate needs one loss a sequence: expected a vector of "
                f"{streams}, got shape {tuple(nll.shape)}"
            )
        part = targets / self.targets if share is None else share
        if self._error.device != nll.device:
            self._error, self._complexity = (
                total.to(nll.device) for total in (self._error, self._complexity)
            )
        losses = nll.reshape(-1)
        with inner.beside():  # what is made out there must be held here until it is waited for
            divergence, local = known or Known(inner.kl(self.kl), inner.local_kl())
            complexity, error = part * divergence, nll.sum()
            if local is not None:
                error = error + local
            self._complexity.add_(complexity.detach().double() / draws)
            self._error.add_(error.detach().double() / draws)
        charges = inner.charges()
        of_model = (inner, losses, charges, local, inner.look)
        loss = Loss(error, complexity, part, streams, draws, *of_model, self.warmth)
        self._defined = inner.has_description_length
        return loss

    @property
    def epoch(self) -> "Epoch":
        """The sums since the epoch began."""
        error, complexity = self._error.item(), self._complexity.item()
        return Epoch(
            _lengths(error, complexity, self._defined, 1.0),
            _lengths(error, complexity, self._defined, math.log(2.0)),
            float(self._seen / self.targets),
            round(self._seen),
            complexity,
        )

    def state_dict(self) -> dict[str, Any]:
        """The sums so far, as plain and exact numbers."""
        return {
            "seen": str(self._seen),
            "error": self._error.item(),
            "complexity": self._complexity.item(),
            "defined": self._defined,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from the sums that `state_dict` gave."""
        self._seen = Fraction(state["seen"])
        self._error.fill_(state["error"])
        self._complexity.fill_(state["complexity"])
        self._defined = bool(state["defined"])


class Epoch(NamedTuple):
    """An epoch so far: lengths in nats and bits, the share of the KL charged, and the targets seen.

    `penalty` is the complexity that was optimised, in nats, even where it is known only up to a
    constant and `nats.complexity` is None.
    """

    nats: Lengths
    bits: Lengths
    share: float
    targets: int
    penalty: float


def _count_epoch(loader: object, parts: int | None) -> tuple[int, int, set[int] | None]:
    """The targets of an epoch over all processes, the number of processes that share it, and how
    many examples a batch may have (None: the batches know themselves)."""
    require((parts is None or parts >= 1, "processes", f"must be at least 1, got {parts}"))
    if isinstance(loader, CountedLoader) and isinstance(loader.targets, Integral):
        said = f"of an epoch must be at least 1, got {loader.targets}"
        require((loader.targets >= 1, "targets", said))
        if parts is None and in_process_group():
            raise ValueError(
                f"several processes train together, and a {type(loader).__name__} does not say "
                "whether it holds all the data or this process's part: give "
                "FreeEnergy(loader, processes=1), or the number of parts"
            )
        parts = parts or 1
        return loader.targets * parts, parts, None
    if isinstance(loader, DataLoader):
        batches = loader.batch_sampler
        if isinstance(batches, BatchSampler) and isinstance(batches.sampler, Sized):
            sampler, size, drops = batches.sampler, batches.batch_size, batches.drop_last
            examples = len(sampler) - len(sampler) % size if drops else len(sampler)
            if examples == 0:
                raise ValueError(
                    f"an epoch of this DataLoader is empty: {len(sampler)} examples, "
                    f"batch_size {size}, drop_last={drops}"
                )
            processes = parts or 1
            if isinstance(sampler, DistributedSampler):
                processes = sampler.num_replicas
                agree = parts in (None, processes)
                said = f"must be left out: the DistributedSampler says {processes}, got {parts}"
                require((agree, "processes", said))
            return examples * processes, processes, {size, examples % size} - {0}
    raise TypeError(
        f"cannot tell how many targets an epoch of {type(loader).__name__} has, so the KL's weight "
        "is unknown: give the loader a `targets` attribute (targets of an epoch), and its batches "
        "`targets` and `streams`"
    )


def _count_batch(batch: object, sizes: set[int] | None) -> tuple[int, int]:
    """The targets of a batch and its sequences; `sizes` are those the loader can yield."""
    if isinstance(batch, CountedBatch):
        for key, number, least in (("targets", batch.targets, 0), ("streams", batch.streams, 1)):
            whole = isinstance(number, Integral) and number >= least
            said = f"of a batch must be a whole number, {least} or above, got {number!r}"
            require((whole, key, said))
        return batch.targets, batch.streams
    first: Any = batch
    while not isinstance(first, Tensor):
        if isinstance(first, Mapping) and first:
            first = next(iter(first.values()))
        elif isinstance(first, (list, tuple)) and first:
            first = first[0]
        else:
            raise TypeError(
                f"cannot tell how many targets a batch of {type(batch).__name__} has: pass what "
                "the loader yielded, or give it `targets` and `streams`"
            )
    if sizes is not None and len(first) not in sizes:
        raise ValueError(
            f"a batch of {len(first)} examples does not come from a loader whose batches have "
            f"{' or '.join(map(str, sorted(sizes)))}: put the batch first, pass the batch as the "
            "loader yielded it, or give it `targets` and `streams`"
        )
    return len(first), len(first)
