"""What a person sees while a model trains: a bar on a terminal, plain lines elsewhere."""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from bayesrnn.files import writing

BESIDE = 24
"""Columns of a terminal that the bar, the slash, the time left and the spaces between take."""


def fitting(parts: Sequence[str], room: int) -> str:
    """As many of the figures, the first ones first, as there is room for.

    >>> fitting(["perplexity 99.1", "3,500 words/s", "nll 4.596"], 31)
    'perplexity 99.1  3,500 words/s'
    """
    line = ""
    for part in parts:
        longer = f"{line}  {part}" if line else part
        if len(longer) > room:
            break
        line = longer
    return line


class Reporter:
    """Progress of one training, also kept in log.txt."""

    def __init__(self, log: Path, total_steps: int, done: int, quiet: bool = False) -> None:
        self._console = Console(stderr=True, quiet=quiet, soft_wrap=True, emoji=False)
        self._log = log
        self._total = total_steps
        self._started, self._first = time.monotonic(), done
        self._bar: Progress | None = None
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=None),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[figures]}"),
                console=self._console,
            )
            self._task = self._bar.add_task(
                "training", total=total_steps, completed=done, figures=""
            )
            self._bar.start()

    def say(self, text: str) -> None:
        """One line, now and in the log."""
        line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n"
        with writing(self._log), self._log.open("ab") as file:
            file.write(line.encode(errors="backslashreplace"))  # a path may be no text
        try:
            self._console.print(text, highlight=False, markup=False)
        except OSError:  # whoever looked is gone: a closed terminal, a pipe; the log has it all
            self._console.quiet, self._bar = True, None

    def step(self, step: int) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=step)

    def figures(self, line: Mapping[str, Any], unit: str) -> None:
        """The running figures of a step line; `unit` is what the targets are."""
        parts = [f"perplexity {line['perplexity']:,.1f}"] if "perplexity" in line else []
        parts += [f"{line[f'{unit}_per_second']:,.0f} {unit}/s", f"nll {line['nll']:.3f}"]
        parts += [f"kl {line['kl']:,.0f}"]
        if self._bar is not None:
            epoch = f"epoch {line['epoch']}"
            room = self._console.width - len(epoch) - 2 * len(str(self._total)) - BESIDE
            self._bar.update(self._task, description=epoch, figures=fitting(parts, room))
        else:
            left = self._time_left(line["step"])
            text = "  ".join(parts)
            self.say(f"step {line['step']}/{self._total} (epoch {line['epoch']})  {text}{left}")

    def _time_left(self, step: int) -> str:
        if step <= self._first:
            return ""
        pace = (time.monotonic() - self._started) / (step - self._first)
        seconds = round(pace * (self._total - step))
        return f"  {seconds // 60}:{seconds % 60:02d} left"

    def close(self) -> None:
        if self._bar is not None:
            with suppress(OSError):
                self._bar.stop()
