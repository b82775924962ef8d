"""What pyproject.toml cannot say: the course in the wheel, and the optional decoder of JPEG files, written in C.

Built where a compiler and the headers of libjpeg-turbo 2.1 or newer are there (Debian: ``apt install gcc
libjpeg-dev``).
Where it cannot be built, installing goes on, and Pillow decodes.
"""

import shutil
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_py import build_py


class BuildWithCourse(build_py):
    """Puts the labs, which lie beside the sources, into the package, where an installed `paceline labs` finds them."""

    def run(self):
        """Build, then copy them; from a checkout that is installed to be edited, they are found as they are."""
        super().run()
        if not self.editable_mode:
            shutil.rmtree(self._course(), ignore_errors=True)  # what an earlier build left there
            for origin, copy in self._labs().items():
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(origin, copy)

    def get_outputs(self, include_bytecode=True):
        """Name them among what was built."""
        return [
            *super().get_outputs(include_bytecode),
            *([] if self.editable_mode else map(str, self._labs().values())),
        ]

    def _course(self):
        return Path(self.build_lib, "paceline", "labs", "course")

    def _labs(self):
        labs = Path(__file__).resolve().parent / "labs"
        return {
            path: self._course() / path.relative_to(labs)
            for path in sorted(labs.rglob("*"))
            if path.suffix in (".py", ".md")
        }


setup(
    cmdclass={"build_py": BuildWithCourse},
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
