"""What pyproject.toml cannot say: the optional decoder of JPEG files, written in C.

Built where a compiler and the headers of libjpeg-turbo 2.1 or newer are there (Debian: ``apt install gcc
libjpeg-dev``), for all versions of Python from 3.11 on.
If it cannot be built, Paceline installs without it, and Pillow decodes. PACELINE_PURE=1 leaves it out.
"""

import os
import sysconfig

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

setup(
    ext_modules=[] if os.environ.get("PACELINE_PURE") else [DECODER],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if LIMITED and not os.environ.get("PACELINE_PURE") else {},
)
