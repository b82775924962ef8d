"""What pyproject.toml cannot say: the optional decoder of JPEG files, written in C.

Built where a compiler and the headers of libjpeg-turbo 2.1 or newer are there (Debian: ``apt install gcc
libjpeg-dev``).
Where it cannot be built, installing goes on, and Pillow decodes.
"""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "paceline.data.image.jpeg_region",
            ["src/paceline/data/image/jpeg_region.c"],
            depends=["src/paceline/data/image/resize_uint8.h"],
            libraries=["jpeg"],
            # One rounding after each operation, as torch has it.
            extra_compile_args=["-O3", "-ffp-contract=off"],
            optional=True,
        )
    ],
)
