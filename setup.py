"""What pyproject.toml cannot say: the optional decoder of JPEG files, written in C, and links that lead out of README.

Built where a compiler and the headers of libjpeg-turbo 2.1 or newer are there (Debian: ``apt install gcc
libjpeg-dev``), for all versions of Python from 3.11 on.
If it cannot be built, Paceline installs without it, and Pillow decodes. PACELINE_PURE=1 leaves it out.
"""

import os
import re
import sysconfig
import tomllib
from pathlib import Path

from setuptools import Extension, setup

LIMITED = not sysconfig.get_config_var("Py_GIL_DISABLED")  # Python without a global lock has no limited interface
DECODER = Extension(
    "paceline.data.image.jpeg_region",
    ["src/paceline/data/image/jpeg_region.c"],
    depends=["src/paceline/data/image/resize_uint8.h"],
    libraries=["jpeg"],
    # One rounding after each operation, as torch has it.
    # No debugging data: they hold the folder, and two builds would differ.
    extra_compile_args=["-O3", "-ffp-contract=off", "-g0"],
    define_macros=[("Py_LIMITED_API", "0x030B0000")] if LIMITED else [],
    py_limited_api=LIMITED,
    optional=True,
)
PROJECT = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))
REPOSITORY = PROJECT["tool"]["paceline"]["repository"]


def absolute(match: re.Match[str]) -> str:
    """Return a README link as an absolute address: of the file in this version, or of a picture's raw content."""
    place = "raw" if match[1].endswith((".png", ".svg")) else "blob"
    return f"]({REPOSITORY}/{place}/v{PROJECT['project']['version']}/{match[1]})"


setup(
    long_description=re.sub(r"\]\((?![a-z]+:|#)([^)]+)\)", absolute, Path("README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
    project_urls={
        "Repository": REPOSITORY,
        "Issues": f"{REPOSITORY}/issues",
        "Changelog": f"{REPOSITORY}/blob/main/CHANGELOG.md",
        "Security": f"{REPOSITORY}/blob/main/SECURITY.md",
    },
    ext_modules=[] if os.environ.get("PACELINE_PURE") else [DECODER],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if LIMITED and not os.environ.get("PACELINE_PURE") else {},
)
