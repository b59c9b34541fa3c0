"""The errors that a user's input can raise.

Each carries one clear line; the command line prints it and exits, without a traceback.
"""

from collections.abc import Iterable


class UserError(Exception):
    """Something the user gave (a path, a file, a flag) cannot be used. Exit code 1."""


class WrongData(UserError):
    """The data at a path are not what they should be.

    Its message names the remedy in a recipe, `data.path` (or other settings). `by_flag` names that
    of a command on a run, which is given other data as --data.

    >>> error = WrongData("x.csv has no column 'y'", "a file that has it", "data.columns")
    >>> str(error)
    "x.csv has no column 'y'; set data.path to a file that has it, or change data.columns"
    >>> error.by_flag
    "x.csv has no column 'y'; give a file that has it as --data"
    """

    def __init__(self, problem: str, wanted: str, settings: str = "") -> None:
        change = f", or change {settings}" if settings else ""
        super().__init__(f"{problem}; set data.path to {wanted}{change}")
        self.by_flag = f"{problem}; give {wanted} as --data"


class Invalid(ValueError):
    """Settings that are impossible: every problem at once, each with its key. Exit code 2.

    `problems` holds a pair (key, message) for each.

    >>> str(Invalid([("pi", "must be between 0 and 1, got 1.5")]))
    'pi must be between 0 and 1, got 1.5'
    """

    def __init__(self, problems: Iterable[tuple[str, str]]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(f"{key} {message}".strip() for key, message in self.problems))


Check = tuple[bool, str, str]
"""Whether all is well, and the key and the message of where it is not."""


def require(*checks: Check) -> None:
    """Raise `Invalid` with all the (key, message) whose check is false.

    >>> require((True, "pi", "never shown"))
    """
    problems = [(key, message) for ok, key, message in checks if not ok]
    if problems:
        raise Invalid(problems)
