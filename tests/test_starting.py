"""Before the command line has begun: Ctrl-C while its modules are imported, and patient threads."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from small_runs import environment

PATIENCE = 60  # seconds


def interrupt(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a Python whose torch never comes to its end; Ctrl-C once it is being imported."""
    sign = folder / "importing"
    (folder / "torch.py").write_text(
        f"import pathlib, time\npathlib.Path({str(sign)!r}).touch()\ntime.sleep({PATIENCE})\n"
    )
    env = environment()
    env["PYTHONPATH"] = f"{folder}:{env['PYTHONPATH']}"
    process = subprocess.Popen([sys.executable, *words], env=env, stderr=-1, stdout=-1, text=True)
    try:
        until = time.monotonic() + PATIENCE
        while not sign.exists() and process.poll() is None and time.monotonic() < until:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    return subprocess.CompletedProcess(words, process.returncode, out, err)


@pytest.mark.parametrize("script", [False, True], ids=["python -m bayesrnn", "bayesrnn"])
def test_ctrl_c_during_the_imports_is_one_word(script: bool, tmp_path: Path) -> None:
    (tmp_path / "bayesrnn").write_text("from bayesrnn.cli import main\nmain()\n")
    words = [str(tmp_path / "bayesrnn")] if script else ["-m", "bayesrnn"]
    done = interrupt([*words, "evaluate", "run"], tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_a_program_that_imports_the_library_is_left_alone(tmp_path: Path) -> None:
    done = interrupt(["-c", "import bayesrnn"], tmp_path)
    assert done.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in done.stderr


@pytest.mark.parametrize(
    ("words", "given", "expected"),
    [
        (["-m", "bayesrnn", "--version"], {}, "1000"),
        (["-m", "bayesrnn", "--version"], {"GOMP_SPINCOUNT": "7"}, "7"),
        (["-m", "bayesrnn", "--version"], {"OMP_WAIT_POLICY": "ACTIVE"}, "None"),
        (["-c", "import bayesrnn"], {}, "None"),
    ],
    ids=["command line", "asked otherwise", "other policy", "library"],
)
def test_threads_wait_briefly(
    words: list[str], given: dict[str, str], expected: str, tmp_path: Path
) -> None:
    """What torch finds when it is imported: so late, and no later, OpenMP looks."""
    (tmp_path / "torch.py").write_text(
        "import os, sys\nprint(os.environ.get('GOMP_SPINCOUNT'))\nsys.exit()\n"
    )
    env = environment()
    env = {name: env[name] for name in env if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    env |= {"PYTHONPATH": f"{tmp_path}:{env['PYTHONPATH']}", **given}
    done = subprocess.run([sys.executable, *words], env=env, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == (f"{expected}\n", "")
