"""What the command line needs before its modules are imported, which takes seconds: Ctrl-C is one
word and the exit code, as later on; and threads that let others work. Importing this module is all
that is needed; it does nothing where the process is not the command line's.
"""

import os
import signal
import sys
from collections.abc import MutableMapping, Sequence
from itertools import pairwise
from pathlib import PurePath

INTERRUPTED = 130
"""The exit code after Ctrl-C, as shells have it."""
SPINS = "1000"
"""Turns of a waiting thread before it sleeps: GNU's own where it knows that cores are short."""


def is_command(words: Sequence[str]) -> bool:
    """Whether a process of these words is `bayesrnn`, or `python -m bayesrnn`.

    >>> is_command(["python", "-m", "bayesrnn", "train"]), is_command(["python", "bin/bayesrnn"])
    (True, True)
    >>> is_command(["python", "-m", "pytest", "bayesrnn"]), is_command(["python", "mine.py"])
    (False, False)
    """
    for word, after in pairwise([*words[1:], ""]):
        if word in ("-m", "-c"):
            return word == "-m" and after == "bayesrnn"
        if not word.startswith("-"):
            return PurePath(word).name in ("bayesrnn", "bayesrnn.exe")
    return False


def quit_at_once(number: int, frame: object) -> None:
    os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)


def started() -> None:
    """From here on Ctrl-C is an exception again."""
    if signal.getsignal(signal.SIGINT) is quit_at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def open_streams() -> None:
    """A process may be started with its output closed (`2>&-`): what it would say goes nowhere
    then, and no file that it writes takes the place."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
            setattr(sys, name, os.fdopen(number, "w", closefd=False))


def wait_briefly(environment: MutableMapping[str, str]) -> None:
    """A thread of OpenMP that waits for the others spins, by default for milliseconds. Where
    another process works as well, the one waited for then gets no core, and all takes many times as
    long. GNU's OpenMP, which is torch's on Linux, reads how long when torch is imported.

    >>> given = {"GOMP_SPINCOUNT": "7"}
    >>> wait_briefly(given)
    >>> given
    {'GOMP_SPINCOUNT': '7'}
    """
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", SPINS)


if is_command(sys.orig_argv):
    wait_briefly(os.environ)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, quit_at_once)
