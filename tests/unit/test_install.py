"""Installing goes on without a compiler, and compiles the decoder where it can."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def build(to: Path, **environment: str) -> list[Path]:
    """Build what is compiled into a folder of its own; return what came of it."""
    folders = [f"--build-lib={to / 'lib'}", f"--build-temp={to / 'temp'}"]
    subprocess.run(
        [sys.executable, "-W", "ignore", "setup.py", "-q", "build_ext", *folders],
        cwd=ROOT,
        env={**os.environ, **environment},
        check=True,
        capture_output=True,
        timeout=120,
    )
    return list((to / "lib").rglob("jpeg_region*"))


@pytest.mark.thorough
def test_without_a_compiler_installing_goes_on(tmp_path: Path) -> None:
    assert build(tmp_path, CC="/bin/false") == []


@pytest.mark.thorough
def test_with_a_compiler_the_decoder_is_built(tmp_path: Path) -> None:
    if shutil.which("cc") is None or not Path("/usr/include/jpeglib.h").exists():
        pytest.skip("needs a C compiler and the headers of libjpeg-turbo")
    assert len(build(tmp_path)) == 1
