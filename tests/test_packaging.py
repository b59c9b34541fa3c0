"""What is handed on as an archive of the source."""

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BUILD = "from setuptools import build_meta; build_meta.build_sdist('dist')"


def test_an_archive_of_the_source_has_what_the_documents_and_the_tests_need(tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    needed = [ROOT / name for name in ("constraints.txt", "Makefile", "src/bayesrnn/__init__.py")]
    for folder in ("recipes", "docs", "examples", "benchmarks", "tests"):
        needed += [path for path in (ROOT / folder).rglob("*.*") if path.suffix != ".pyc"]
    names = {path.relative_to(ROOT).as_posix() for path in needed if path.is_file()}
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    shutil.copy(ROOT / "src/bayesrnn/__init__.py", tmp_path / "src/bayesrnn")
    without_sources = {**os.environ, "PYTHONPATH": ""}
    subprocess.run(
        [sys.executable, "-c", BUILD],
        cwd=tmp_path,
        env=without_sources,
        check=True,
        timeout=120,
        capture_output=True,
    )
    with tarfile.open(next((tmp_path / "dist").iterdir())) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    assert names - packed == set()
