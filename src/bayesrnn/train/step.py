"""One training step as the device sees it: draw, forward, free energy, backward, clip, update.

Nothing in it waits for a GPU: figures add up there and are read once in a while. So a step is
recorded once and replayed as one graph; on a CPU, and where that is not possible, the same step
runs as it is.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayesrnn.bayes import Bayesian
from bayesrnn.bayes.passes import clip_pass
from bayesrnn.bayes.processes import in_process_group
from bayesrnn.data.batching import Batch
from bayesrnn.engine import Replay, compiled, second_stream
from bayesrnn.errors import UserError
from bayesrnn.models.layers import State, as_state, as_tensors
from bayesrnn.objective import FreeEnergy, Known
from bayesrnn.train.natural import NaturalGradient
from bayesrnn.train.settings import TrainSettings, optimizer_class


class Figures(NamedTuple):
    """What the device has noted: since the last reading, and of the last step."""

    total_error: float
    steps: int
    error: float
    kl: float
    norm: float
    failed: bool
    """The figures of the last step are not finite: it was not taken, nor any after it."""


class Update:
    """Clip all gradients together and take the optimiser's step, unless a figure is not finite.

    `recordable` is whether it does so without asking the host: plain SGD, whose clipping is a
    smaller rate, and optimisers with a fused form, which take the scale of the gradients and
    whether to skip as tensors.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, clip: float, device: torch.device) -> None:
        self.optimizer = optimizer
        self.clip = clip or math.inf
        self.figures = torch.zeros(len(Figures._fields), dtype=torch.float64, device=device)
        self.rate = torch.zeros((), device=device)
        options = optimizer.defaults
        self._plain = isinstance(optimizer, torch.optim.SGD) and not any(
            options[key] for key in ("momentum", "weight_decay", "maximize")
        )
        fused = bool(options.get("fused"))
        self.recordable = device.type == "cuda" and (self._plain or fused)
        self.compiled = False
        if self.recordable and not self._plain:
            for group in optimizer.param_groups:
                group["lr"] = self.rate
                if "capturable" in group:
                    group["capturable"] = True

    def set_rate(self, lr: float) -> None:
        self.rate.fill_(lr)
        for group in self.optimizer.param_groups:
            if not isinstance(group["lr"], Tensor):
                group["lr"] = lr

    def __call__(self, error: Tensor, kl: Tensor) -> None:
        """Note the step's figures and, if all are finite, take it."""
        pairs = [
            (p, p.grad)
            for group in self.optimizer.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        norm = torch.nn.utils.get_total_norm([g for _, g in pairs])
        note = compiled(_note) if self.compiled else _note
        descend = compiled(_descend) if self.compiled else _descend
        factor, fine = note(self.figures, error, kl, norm, self.clip)
        rate = self.rate * factor
        if self.recordable and self._plain:
            descend([p.data for p, _ in pairs], [g for _, g in pairs], rate, fine)
        elif self.recordable:
            self.optimizer.grad_scale = factor.reciprocal()  # type: ignore[attr-defined]
            self.optimizer.found_inf = (~fine).float()  # type: ignore[attr-defined]
            self.optimizer.step()
        elif fine and self._plain:
            with torch.no_grad():
                for p, g in pairs:
                    p.add_(g, alpha=-rate.item())
        elif fine:
            if math.isfinite(self.clip):
                torch._foreach_mul_([g for _, g in pairs], factor)
            self.optimizer.step()

    def read(self) -> Figures:
        """The figures so far; this waits for the device."""
        values = Figures(*self.figures.tolist())
        self.figures[:2].zero_()
        return values._replace(steps=int(values.steps), failed=bool(values.failed))


def _note(
    figures: Tensor, error: Tensor, kl: Tensor, norm: Tensor, clip: float
) -> tuple[Tensor, Tensor]:
    """Add a step to the figures (a `Figures` as one vector); nothing is noted after one that
    failed. Returns what the gradients are to be multiplied with, and whether all is finite."""
    total, steps, _, _, _, failed = figures.unbind()
    error, kl = error.double(), kl.double()
    fine = error.isfinite() & kl.isfinite() & norm.isfinite()
    new = torch.stack([total + error, steps + 1, error, kl, norm.double(), (~fine).double()])
    fine = fine & (failed == 0)
    figures.copy_(torch.where(failed == 0, new, figures))
    return clip_pass(norm, clip), fine


def _descend(
    parameters: Sequence[Tensor], gradients: Sequence[Tensor], rate: Tensor, fine: Tensor
) -> None:
    """theta - rate * gradient, where the step is fine."""
    for p, g in zip(parameters, gradients, strict=True):
        p.copy_(torch.where(fine, p - rate * g, p))


class Step:
    """A step of one model on one task. `run` is the step; calling it may replay a recording."""

    def __init__(
        self,
        model: Bayesian,
        nll: Callable[[Bayesian, Batch, State | None], tuple[Tensor, State | None]],
        objective: FreeEnergy,
        update: Update,
        settings: TrainSettings,
        say: Callable[[str], None],
    ) -> None:
        self.model, self.nll, self.objective, self.update = model, nll, objective, update
        self.draws = settings.draws
        self.dtype = torch.bfloat16 if settings.precision == "bfloat16" else None
        self._say = say
        self._replay: Replay | None = None
        self._stream: torch.cuda.Stream | None = None
        self._zeros: tuple[Tensor, ...] = ()  # the state an epoch starts from
        self._tried = False  # whether the fast way was gone once
        device = update.rate.device
        if device.type != "cuda":
            return
        obstacle = self._obstacle(settings)
        if obstacle is None:
            # Of several draws, or where a prior learns and the KL's gradient is one by itself,
            # gradients add up, for which they would have to be waited for.
            learns = any(hyper.learnt() for hyper in model.each_prior())
            self._stream = second_stream(device) if self.draws == 1 and not learns else None
            self._replay = Replay(self._function, device)
            update.compiled = True
        else:
            say(f"every step runs kernel by kernel, not as one graph: {obstacle}")

    def _obstacle(self, settings: TrainSettings) -> str | None:
        if settings.engine == "eager":
            return 'train.engine is "eager"'
        if not self.update.recordable:
            return f"{settings.optimizer} has no fused form, or was told not to use it"
        if self.model.per_sequence:
            return "the Fisher estimate takes the gradient of one sequence at a time"
        if in_process_group():
            return "several processes train together"
        return None

    def __call__(self, batch: Batch, state: State | None) -> State | None:
        """Take a step from the carried state (None: zeros); the state to carry on, if any."""
        if self._replay is None:
            return self.run(batch, state)
        self._batch = batch
        seen, known = self._replay.recorded, self._replay.refused
        if not self._tried:
            after = self._first(self._replay, batch, state)
        else:
            carried = as_tensors(state) or self._zeros
            after = self._replay(batch.x, batch.y, *self._share(batch), *carried)
        if self._replay is not None and self._replay.recorded and not seen:
            self._say("recorded a step; from here on it is replayed as one graph")
        if self._replay is not None and self._replay.refused and not known:
            self._say(f"every step runs kernel by kernel: {self._replay.refused}")
        for block in self.model.each_block():
            block.summary = None  # of weights that have changed since, which replays do not tell
        return as_state(after)

    def _first(self, replay: Replay, batch: Batch, state: State | None) -> tuple[Tensor, ...]:
        """The first step: where the fast way fails, the same step the ordinary way, and all after
        it (a module that reads the weights of its layers itself cannot be `tuned`)."""
        self._tried = True
        sums, figures = self.objective.state_dict(), self.update.figures.clone()
        random = generator_of(batch.x.device).get_state()
        try:
            after = replay.as_it_is(batch.x, batch.y, *self._share(batch), *as_tensors(state))
            self._zeros = tuple(torch.zeros_like(s) for s in after)
            return after
        except Exception as error:  # whatever it is: if it is the user's, it will come again
            why = (str(error).strip() or repr(error)).splitlines()[0]
        self._say(f"every step runs kernel by kernel: {why}")
        self._replay, self._stream, self.update.compiled = None, None, False
        if batch.x.is_cuda:
            torch.cuda.synchronize(batch.x.device)
        self.model.join()
        self.objective.load_state_dict(sums)
        self.update.figures.copy_(figures)
        generator_of(batch.x.device).set_state(random)
        return as_tensors(self.run(batch, state))

    def _share(self, batch: Batch) -> tuple[Tensor, ...]:
        """Where batches of one shape may differ in targets, their share of the KL is an input that
        every replay reads anew; elsewhere it is part of the recording. Made without waiting."""
        if not batch.padded:
            return ()
        return (torch.full((), batch.targets / self.objective.targets, device=batch.x.device),)

    def _function(self, x: Tensor, y: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        """What is recorded: a step as a function of tensors alone."""
        batch = replace(self._batch, x=x, y=y)
        share, carried = (others[0], others[1:]) if batch.padded else (None, others)
        return as_tensors(self.run(batch, as_state(carried), share))

    def run(self, batch: Batch, state: State | None, share: Tensor | None = None) -> State | None:
        """The step itself; `share` is the batch's share of the KL, as a tensor."""
        fast = self._replay is not None
        tuned = self.model.tuned(self.dtype, fast, self._stream, aligned=batch.x.is_cuda)
        if self.dtype is not None and batch.x.is_floating_point():  # numbers, not ids of words
            batch = replace(batch, x=batch.x.to(self.dtype))
        for group in self.update.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

        def mean_loss() -> Tensor:
            return self.nll(self.model, batch, state)[0].sum() / batch.streams

        total: Tensor | float = 0.0
        with tuned if fast or self.dtype is not None else nullcontext():
            for _ in range(self.draws):  # each from the same state; the last one's is carried on
                self.model.resample(nll=mean_loss)
                known = self._early_kl()
                losses, after = self.nll(self.model, batch, state)
                loss = self.objective.loss(self.model, losses, batch, self.draws, known, share)
                loss.backward()
                self.model.join()
                total = total + loss.error.detach() / self.draws
        assert isinstance(total, Tensor)
        self.update(total, loss.complexity.detach() / loss.share)
        return after

    def _early_kl(self) -> Known | None:
        """The KL's value beside the forward pass, where there is a stream for it. (On a CPU the KL
        needs what the draw finds on its way.)"""
        if self._stream is None:
            return None
        self.model.prepare()
        with self.model.beside(), torch.no_grad():
            return Known(self.model.kl(self.objective.kl), self.model.local_kl())


def generator_of(device: torch.device) -> torch.Generator:
    """torch's own, of that device."""
    if device.type != "cuda":
        return torch.default_generator
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


def build_optimizer(
    settings: TrainSettings, model: Bayesian, batches: int
) -> torch.optim.Optimizer:
    """What `settings` names, over all that is learnt; an epoch has so many `batches`."""
    cls = optimizer_class(settings.optimizer)
    options: dict[str, Any] = dict(settings.options)
    on_gpu = all(p.device.type == "cuda" for p in model.parameters())
    if on_gpu and "fused" in inspect.signature(cls).parameters:
        options = {"fused": True, **options}
    try:
        if cls is NaturalGradient:
            return NaturalGradient(model, settings.streams * batches, settings.lr, **options)
        optimizer: torch.optim.Optimizer = cls(model.parameters(), lr=settings.lr, **options)
    except (TypeError, ValueError, IndexError, RuntimeError) as error:
        raise UserError(f"train.options do not suit {cls.__name__}: {error}") from error
    return optimizer
