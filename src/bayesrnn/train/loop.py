"""The training loop: recipe in, run directory out, exactly resumable."""

import gc
import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bayesrnn.bayes import Bayesian
from bayesrnn.data import Batch
from bayesrnn.data.vocabulary import END, UNKNOWN
from bayesrnn.description import describe
from bayesrnn.engine import has_bfloat16, products_in
from bayesrnn.errors import UserError
from bayesrnn.files import expanded
from bayesrnn.models.layers import State, as_state, as_tensors
from bayesrnn.objective import FreeEnergy
from bayesrnn.recipe import Recipe, from_table, to_table
from bayesrnn.saving import build_model, build_module, save_own
from bayesrnn.train.average import Average
from bayesrnn.train.beginning import begun, kept_words, located, split_anew
from bayesrnn.train.checkpoint import (
    Checkpoint,
    pack_optimizer,
    read_newest_checkpoint,
    unpack_optimizer,
    write_checkpoint,
)
from bayesrnn.train.metrics import MetricsLog, read_metrics
from bayesrnn.train.progress import Reporter
from bayesrnn.train.run import Run
from bayesrnn.train.schedule import learning_rate, warmth
from bayesrnn.train.step import Figures, Step, Update, build_optimizer, generator_of
from bayesrnn.train.stopping import Progress
from bayesrnn.train.task import Task, build_task

LOG_STEPS = 50


def train(
    recipe: Recipe,
    out: str | Path,
    fresh: bool = False,
    quiet: bool = False,
    start: Bayesian | str | Path | None = None,
    task: Task | None = None,
) -> "Outcome":
    """Train a recipe into the folder `out`, or go on there from a checkpoint of this recipe.

    - `fresh`: start over, and remove what an earlier run has written to `out`.
    - `quiet`: print nothing.
    - `start`: what to begin with instead of a new model. It is the folder of another run, whose
      words and scales are kept, or a model, which is then the one that is trained (if it reads
      words, it must number them as the recipe's own text does).
    - `task`: the recipe's own task, if it was already built.
    """
    if not isinstance(recipe, Recipe):
        raise TypeError(
            f"recipe must be a Recipe, got {recipe!r}; br.read_recipe reads one from a file"
        )
    run = Run(expanded(out))
    other = words = None
    if isinstance(start, str | Path):
        other = expanded(start)
        start, recipe, words = begun(other, recipe)
    recipe = replace(recipe, data=located(recipe.data, None if fresh else run))
    recipe = from_table(to_table(recipe))  # as the run keeps it: settings made in Python may not be
    run.check(recipe, fresh)  # all that can be wrong shows before anything is written
    if start is None and not fresh:
        run.check_model()
    device = choose_device(recipe.train.device)
    torch.manual_seed(recipe.train.seed)
    if task is None:
        task = build_task(recipe, device, words if fresh else kept_words(run, words))
    _check_choice(recipe, task)
    if not fresh:
        run.check_data(task.digest)
    model = start or build_model(recipe, build_module(recipe, task.vocabulary))
    model = model.to(device).train()
    optimizer = build_optimizer(recipe.train, model, len(task.batches))
    with run.locked():
        restored = run.prepare(recipe, fresh)
        if task.vocabulary is not None:
            task.vocabulary.save(run.vocabulary)
        trainer = Trainer(recipe, run, task, model, optimizer, quiet)
        try:
            if restored:
                trainer.reporter.say(restored)
            if start is not None and trainer.step == 0:
                trainer.save()  # the recipe alone cannot make it again
                if other is not None and (mixed := split_anew(other, recipe, task.digest)):
                    trainer.reporter.say(mixed)
            with products_in(recipe.train.precision):
                return trainer.run_to_end()
        finally:
            trainer.close()


def _check_choice(recipe: Recipe, task: Task) -> None:
    """The test set must choose nothing."""
    chooses = recipe.train.keep == "best" or recipe.train.patience > 0
    if chooses and task.watched.startswith("test_"):
        raise UserError(
            "train.keep and train.patience need a validation set, and there is none; set "
            "data.split so that there is one, or leave them out"
        )


@dataclass(frozen=True)
class Outcome:
    """How a training ended.

    - `steps`, `epoch`: how many were taken in all.
    - `finished`: whether these are all of them.
    - `seconds`: how long the training took.
    - `epochs`: the figures of each epoch (of those whose line in metrics.jsonl was not lost).
    - `watched`: the name of the figure that tells how good an epoch's model is: the lower, the
      better.
    - `kept`: the epoch whose model the run has: the last, or the best by that figure.
    """

    steps: int
    finished: bool
    seconds: float
    epoch: int
    epochs: list[dict[str, Any]]
    watched: str
    kept: int


@dataclass
class Window:
    """Sums since the last line of figures."""

    error: float = 0.0
    targets: int = 0
    seconds: float = 0.0


class Trainer:
    """One training in progress. All that must survive a restart is in `_checkpoint`."""

    def __init__(
        self,
        recipe: Recipe,
        run: Run,
        task: Task,
        model: Bayesian,
        optimizer: torch.optim.Optimizer,
        quiet: bool,
    ) -> None:
        self.recipe = recipe
        self.settings = recipe.train
        self.run = run
        self.task = task
        self.model = model
        self.objective = FreeEnergy(task.batches, recipe.bayes.kl, processes=1)
        self.warm_up = self.settings.warm_up * len(task.batches)  # in steps
        if self.warm_up:
            self.objective.warmth = torch.zeros((), device=task.batches.device)
        self.optimizer = optimizer
        self.step = self.epoch = 0
        self.state: State | None = None
        self.progress = Progress()
        self.best: dict[str, Tensor] | None = None  # of the best epoch, where that is kept
        self.window = Window()
        self.seconds = 0.0
        self.seen = 0  # the step up to which figures were read
        self.total = self.settings.epochs * len(task.batches)
        if self.settings.max_steps:
            self.total = min(self.total, self.settings.max_steps)
        after = self.settings.average_after * len(task.batches)
        self.average = Average(model, after or None)
        self.stopped_by: int | None = None
        warnings: list[str] = []
        checkpoint = read_newest_checkpoint(run.checkpoints, warnings.append)
        self.reporter = Reporter(
            run.log, self.total, checkpoint.facts["step"] if checkpoint else 0, quiet
        )
        for warning in warnings:
            self.reporter.say(warning)
        kept = self._restore(checkpoint) if checkpoint else 0
        self._say_start(checkpoint is not None)
        self.take = self._step()
        self.metrics = MetricsLog(run, kept, self.step, self.epoch, self.reporter.say)

    def _step(self) -> Step:
        update = Update(self.optimizer, self.settings.clip, self.task.batches.device)
        say = self.reporter.say
        return Step(self.model, self.task.nll, self.objective, update, self.settings, say)

    # --- the loop ------------------------------------------------------------------------------

    def run_to_end(self) -> Outcome:
        """All epochs that are left, or up to the first signal to stop."""
        self._clock = self._saved_at = time.monotonic()
        began = (self.step, self.epoch)
        with self._signals():
            try:
                while not self._done() and self.stopped_by is None:
                    self._one_epoch()
            finally:
                self.model.looking = True
            if (self.step, self.epoch) != began:
                self.save()
            if self.best is not None:
                self.model.load_state_dict(self.best)
            else:
                self.average.put()  # the checkpoint has the weights to go on from
            # even where no step was taken: the last process may not have come to it
            save_own(self.model, self.run.model)
        finished = self._done()
        if finished:
            self.metrics.write({"kind": "end", "step": self.step, "epoch": self.epoch})
        else:
            name = signal.Signals(self.stopped_by or 0).name
            self.reporter.say(
                f"stopped by {name} at step {self.step}/{self.total}; saved. Run the same command "
                "to go on"
            )
        epochs = [line for line in read_metrics(self.run.path) if line["kind"] == "epoch"]
        kept = self.progress.best_epoch if self.best is not None else self.epoch
        seconds, watched = round(self.seconds, 1), self.task.watched
        return Outcome(self.step, finished, seconds, self.epoch, epochs, watched, kept)

    def _done(self) -> bool:
        """Whether all steps were taken, or no epoch was progress for too long."""
        patience = self.settings.patience
        waited = self.epoch - max(self.progress.last_gain, self.settings.warm_up)
        return self.step >= self.total or bool(patience and waited >= patience)

    def _one_epoch(self) -> None:
        lr = learning_rate(
            self.epoch, self.settings.lr, self.settings.decay, self.settings.decay_after
        )
        self._look_or_not()
        self.take.update.set_rate(lr)
        for batch in self._batches():
            self._update(batch)
            self._tick(batch)
            if self.stopped_by is not None or self.step >= self.total:
                break
            if time.monotonic() - self._saved_at >= 60 * self.settings.checkpoint_minutes:
                self.save()
        if self.task.batches.position in (0, len(self.task.batches)):
            self._end_epoch(lr)

    def _look_or_not(self) -> None:
        """Posteriors that look at the data begin to after so many epochs. A step that looks is
        another one, so it is recorded anew."""
        looking = self.epoch >= self.settings.look_after
        if looking != self.model.looking and self.model.looks_at_data:
            self.model.looking = looking
            self.take = self._step()
            gc.collect()  # the recording of the other step, and its memory

    def _batches(self) -> Iterator[Batch]:
        """What is left of the epoch: nothing, when it was stopped right at its end."""
        if self.step < (self.epoch + 1) * len(self.task.batches):
            self.task.batches.epoch = self.epoch
            yield from self.task.batches

    def _update(self, batch: Batch) -> None:
        """One step; its figures stay on the device until `_look`."""
        for _ in range(self.settings.draws):
            self.objective.count(batch, self.settings.draws)
        if isinstance(self.objective.warmth, Tensor):  # at one place: a recorded step reads it
            self.objective.warmth.fill_(warmth(self.step, self.warm_up))
        self.state = self.take(batch, None if batch.first else self.state)
        self.window.targets += batch.targets

    def _look(self) -> None:
        """Read the figures from the device; stop where one of them is not finite."""
        figures = self.take.update.read()
        if figures.failed:
            self._stop_not_finite(figures)
        self.seen = self.step
        self.window.error += figures.total_error
        self.kl = figures.kl

    def _tick(self, batch: Batch) -> None:
        """Count the step; every so often write a line of figures."""
        self.step += 1
        self.average.note(self.step)
        now = time.monotonic()
        self.window.seconds += now - self._clock
        self.seconds += now - self._clock
        self._clock = now
        self.reporter.step(self.step)
        due = self.step % LOG_STEPS == 0 or self.step == self.total
        if due or self.task.batches.device.type == "cpu":
            self._look()
        if due:
            nll = self.window.error / self.window.targets
            line = {
                "kind": "step",
                "step": self.step,
                "epoch": self.epoch + 1,
                **self.task.figures(nll),
                "kl": self.kl,
                f"{self.task.unit}_per_second": round(self.window.targets / self.window.seconds, 1),
            }
            self.window = Window()
            self.metrics.write(line)
            self.reporter.figures(line, self.task.unit)

    def _end_epoch(self, lr: float) -> None:
        self._look()
        sums = self.objective.epoch
        train = self.task.figures(sums.nats.error / sums.targets)
        with self.average.in_place():
            valid = self.task.validate(self.model)
        line = {
            "kind": "epoch",
            "step": self.step,
            "epoch": self.epoch + 1,
            "lr": lr,
            **{f"train_{name}": value for name, value in train.items()},
            "kl": sums.penalty,
            **self._description(),
            **valid,
            **({"averaged": self.average.count} if self.average.count else {}),
            "seconds": round(self.seconds, 2),
        }
        self.epoch += 1
        self._clock = time.monotonic()
        self.metrics.write(line)
        told = list(dict.fromkeys([f"train_{list(train)[-1]}", self.task.watched]))
        told += list(valid)[-1:] if len(told) == 1 else []  # then what was trained on is watched
        shown = ", ".join(f"{name.replace('_', ' ')} {line[name]:.4g}" for name in told)
        self.reporter.say(
            f"epoch {line['epoch']}: {shown}, kl {sums.penalty:,.0f} nats, lr {lr:.4g}, "
            f"{self.seconds:.0f} s"
        )
        self._note_progress(line)

    def _note_progress(self, line: dict[str, Any]) -> None:
        """Keep the model of an epoch that is the best so far, as it was validated; say when there
        was no progress for too long."""
        if self.epoch <= self.settings.warm_up:
            return
        watched = self.task.watched
        if self.progress.note(line, watched, self.task.progress) and self.settings.keep == "best":
            with self.average.in_place():
                self.best = {name: value.clone() for name, value in self.model.state_dict().items()}
        if self._done() and self.step < self.total:
            self.reporter.say(
                f"no progress for {self.settings.patience} epochs; the best by "
                f"{watched.replace('_', ' ')} was epoch {self.progress.best_epoch}"
            )

    def _description(self) -> dict[str, float | None]:
        """The description length of the epoch's targets."""
        sums = self.objective.epoch
        error, complexity, _ = sums.nats
        weights = self.model.weight_count
        return asdict(describe(error, complexity, sums.targets, self.task.labels, weights))

    # --- when things end -----------------------------------------------------------------------

    def _stop_not_finite(self, figures: Figures) -> None:
        error, kl, norm = figures.error, figures.kl, figures.norm
        what = (
            "the loss of the data"
            if not math.isfinite(error)
            else "the KL"
            if not math.isfinite(kl)
            else "the gradient"
        )
        raise UserError(
            f"step {self.seen + figures.steps}: {what} is not finite (loss {error:.4g}, kl "
            f"{kl:.4g}, gradient norm {norm:.4g}). The learning rate is probably too high, or a "
            f"scale too small: try train.lr={self.settings.lr / 2:g}, "
            f"{'a smaller train.clip' if self.settings.clip else 'train.clip=5'}, or a "
            f"larger prior scale. The step was not taken; what was saved in {self.run.path} is as "
            "it was"
        )

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Ctrl-C, SIGTERM and the terminal's end (unless that is ignored, as nohup has it) end the
        loop after the step in progress; a second one at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def stop(number: int, frame: object) -> None:
            if self.stopped_by is not None:
                raise KeyboardInterrupt
            self.stopped_by = number

        stops = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            stops.append(signal.SIGHUP)
        before = {number: signal.signal(number, stop) for number in stops}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def close(self) -> None:
        self.reporter.close()
        self.metrics.close()

    # --- saving --------------------------------------------------------------------------------

    def save(self) -> None:
        """Write a checkpoint of this very moment."""
        self._look()
        write_checkpoint(self.run.checkpoints, self.step, self._checkpoint())
        self._saved_at = time.monotonic()

    def _checkpoint(self) -> Checkpoint:
        optimizer, optimizer_facts = pack_optimizer(self.optimizer)
        carried: dict[str, Tensor] = {"rng.cpu": torch.get_rng_state()}
        if self.task.batches.device.type == "cuda":
            carried["rng.cuda"] = generator_of(self.task.batches.device).get_state()
        carried |= {f"state.{i}": tensor for i, tensor in enumerate(as_tensors(self.state))}
        facts = {
            "step": self.step,
            "epoch": self.epoch,
            "position": self.task.batches.position,
            "data": self.task.digest,
            "recipe": to_table(self.recipe),
            "objective": self.objective.state_dict(),
            "window": vars(self.window),
            "seconds": self.seconds,
            "optimizer": optimizer_facts,
            "progress": self.progress.state_dict(),
            "averaged": self.average.count,
            "metrics_bytes": self.metrics.sync(),
        }
        tensors = {
            "parameters.safetensors": dict(self.model.state_dict()),
            "optimizer.safetensors": optimizer,
            "carried.safetensors": carried,
        }
        if self.best is not None:
            tensors["best.safetensors"] = self.best
        if self.average.count:
            tensors["average.safetensors"] = self.average.means
        return Checkpoint(tensors, facts)

    def _restore(self, checkpoint: Checkpoint) -> int:
        """Go back to a checkpoint; the number of bytes of metrics it had written."""
        tensors, facts = checkpoint
        device = self.task.batches.device
        self._check_epochs(facts["step"], facts["epoch"], facts["position"])
        self.model.load_state_dict(tensors["parameters.safetensors"])
        unpack_optimizer(self.optimizer, tensors["optimizer.safetensors"], facts["optimizer"])
        self.average.load(tensors.get("average.safetensors", {}), facts.get("averaged", 0))
        carried = tensors["carried.safetensors"]
        torch.set_rng_state(carried["rng.cpu"])
        if "rng.cuda" in carried and device.type == "cuda":
            generator_of(device).set_state(carried["rng.cuda"])
        names = [f"state.{i}" for i in range(len(carried)) if f"state.{i}" in carried]
        self.state = as_state([carried[name].to(device) for name in names])
        self.step, self.epoch = facts["step"], facts["epoch"]
        self.seen = self.step
        self.task.batches.position = facts["position"]
        self.objective.load_state_dict(facts["objective"])
        self.window = Window(**facts["window"])
        self.seconds = facts["seconds"]
        self.progress = Progress(**facts.get("progress", {}))
        if "best.safetensors" in tensors:
            best = tensors["best.safetensors"]
            self.best = {name: value.to(device) for name, value in best.items()}
        return int(facts["metrics_bytes"])

    def _check_epochs(self, step: int, epoch: int, position: int) -> None:
        """Refuse a checkpoint from epochs of another length: the same data were cut otherwise."""
        steps = len(self.task.batches)
        at_end = position == steps and step == epoch * steps
        if step != epoch * steps + position and not at_end:
            raise UserError(
                f"{self.run.path} was begun with another version, which cut the same data "
                f"differently (an epoch has {steps} steps now); go on with that one, choose "
                "another --out, or start over with --fresh"
            )

    def _say_start(self, resumed: bool) -> None:
        batches = self.task.batches
        where = f"resuming at step {self.step}" if resumed else "starting"
        kind = "plain weights" if self.model.all_points else "Bayesian weights"
        text = (
            f"{where} on {batches.device}: {self.model.weight_count:,} {kind}, "
            f"{self.total:,} steps, {batches.targets:,} {self.task.unit} an epoch"
        )
        if batches.left_over:
            text += f" (without the last {batches.left_over}, too few for another time step)"
        if batches.dropped:
            text += f" (without the {batches.dropped} of the last cut)"
        self.reporter.say(text)
        for note in self.task.notes:
            self.reporter.say(note)
        if self.settings.precision == "bfloat16" and not has_bfloat16(batches.device):
            self.reporter.say(
                "this processor has no instructions for bfloat16 and takes longer so than with "
                "train.precision=float32"
            )
        vocabulary = self.task.vocabulary
        if vocabulary is not None and {*vocabulary.tokens} <= {UNKNOWN, END}:
            self.reporter.say(
                f"no token of the training text is known, and all are read as {UNKNOWN}; lower "
                "data.min_count"
            )
        never = {"average_after": "averaged"}
        if self.model.looks_at_data:
            never["look_after"] = "looked at"
        elif after := self.settings.look_after:
            self.reporter.say(
                f"train.look_after is {after}, and changes nothing: no posterior here looks at the "
                "data"
            )
        for key, what in never.items():
            after = getattr(self.settings, key)
            if after * len(batches) >= self.total:
                self.reporter.say(
                    f"train.{key} is {after}, and the training ends before: nothing will be {what}"
                )


def choose_device(wanted: str, key: str = "train.device") -> torch.device:
    """ "auto" is the GPU where there is one; `key` is what the user set."""
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(wanted)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise UserError(f"{key} is {wanted!r}; use auto, cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"{key} is {wanted!r}, but no GPU is available; use cpu")
    return device
