"""Ctrl-C before the command line has begun, while its modules are imported."""

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
