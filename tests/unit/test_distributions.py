"""The source distribution and the wheel hold what is needed and nothing else, and work outside the checkout."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

import paceline

pytest.importorskip("build", reason="needs build")
pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[2]
BUILT_FROM = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE", "constraints.txt")
LEFT_BEHIND = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info")
NAME = f"paceline-{paceline.__version__}"


@dataclass(frozen=True)
class Built:
    """Both distributions, and what they hold."""

    wheel: Path
    in_source: frozenset[str]
    in_wheel: frozenset[str]


def call(*command: object, cwd: Path, **environment: str) -> str:
    """Run a command that knows nothing of this checkout; return what it prints."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    own = {**inherited, "OMP_NUM_THREADS": "1", **environment}
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=own, **streams, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def copy_checkout(to: Path) -> Path:
    """The checkout with all that must not be in a distribution, and nothing that an earlier build left in it."""
    for name in BUILT_FROM:
        to.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, to)
    for name in ("src", "tests/docs", "docs/guide", "examples", "scripts"):
        shutil.copytree(ROOT / name, to / name, ignore=LEFT_BEHIND)
    return to


def build(source: Path, into: Path, **environment: str) -> Built:
    """Build the source distribution, and the wheel from it alone."""
    words = ("-W", "ignore", "-m", "build", "--no-isolation", "--outdir", into)
    output = call(sys.executable, *words, cwd=source, **environment)
    assert "is absent from the `packages` configuration" not in output
    (wheel,) = into.glob("*.whl")
    with tarfile.open(into / f"{NAME}.tar.gz") as archive, zipfile.ZipFile(wheel) as zipped:
        files = [member.name for member in archive.getmembers() if member.isfile()]
        in_source = frozenset(name.removeprefix(f"{NAME}/") for name in files)
        return Built(wheel, in_source, frozenset(zipped.namelist()))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("built")
    return build(copy_checkout(folder / "checkout"), folder / "dist")


@pytest.fixture(scope="module")
def installed(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of a fresh environment that holds the wheel, and sees this Python's libraries behind it."""
    return install(built.wheel, tmp_path_factory.mktemp("installed"))


def install(wheel: Path, folder: Path) -> Path:
    call(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    programs = folder / "venv" / "bin"
    pip = (sys.executable, "-m", "pip", "--python", programs / "python", "--disable-pip-version-check")
    call(*pip, "install", "--quiet", "--no-index", "--no-deps", wheel, cwd=folder)
    own = call(programs / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip()
    # Behind its own: what is installed there, an editable Paceline among it, is found only where the wheel has nothing.
    Path(own, "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return programs


def package_files() -> set[str]:
    """Every file of the packages in this checkout, but what was compiled: one that is new must be shipped too."""
    packages = [each.parent for each in (ROOT / "src").glob("*/__init__.py")]
    files = [path for package in packages for path in package.rglob("*") if path.is_file()]
    made = (".pyc", ".so", ".pyd")
    return {path.relative_to(ROOT / "src").as_posix() for path in files if path.suffix not in made}


def test_the_source_distribution_holds_what_is_built_and_the_licence(built: Built) -> None:
    assert {f"src/{name}" for name in package_files()} | set(BUILT_FROM) <= built.in_source
    others = {name.split("/")[0] for name in built.in_source}
    assert others == {"src", "PKG-INFO", "setup.cfg", *BUILT_FROM}, "tests, guides and figures stay in the repository"


def test_the_wheel_holds_the_package_its_recipes_pages_and_the_licence(built: Built) -> None:
    needed = {name for name in package_files() if not name.endswith((".c", ".h"))}
    described = f"{NAME}.dist-info"
    assert needed | {f"{described}/licenses/LICENSE"} <= built.in_wheel
    compiled = {name for name in built.in_wheel if name.startswith("paceline/data/image/jpeg_region.")} - needed
    about = {name for name in built.in_wheel if name.startswith(f"{described}/")}
    assert built.in_wheel == needed | compiled | about, "nothing that is not needed to run"
    assert not any(name.endswith(".c") for name in compiled)
    with zipfile.ZipFile(built.wheel) as zipped:
        assert b"](docs/" not in zipped.read(f"{described}/METADATA"), "an index has no files beside the description"


def test_the_decoder_is_in_the_wheel_where_it_can_be_compiled(built: Built) -> None:
    if shutil.which("cc") is None or not Path("/usr/include/jpeglib.h").exists():
        pytest.skip("needs a C compiler and the headers of libjpeg-turbo")
    limited = not sysconfig.get_config_var("Py_GIL_DISABLED")
    suffix = ".abi3.so" if limited else sysconfig.get_config_var("EXT_SUFFIX")
    assert f"paceline/data/image/jpeg_region{suffix}" in built.in_wheel


def test_the_installed_command_trains_outside_the_checkout(installed: Path, tmp_path: Path) -> None:
    command = installed / "paceline"
    assert call(command, "--version", cwd=tmp_path) == f"paceline, version {paceline.__version__}\n"
    home = call(installed / "python", "-c", "import paceline; print(paceline.__file__)", cwd=tmp_path)
    assert Path(home.strip()).is_relative_to(installed.parent)
    run = tmp_path / "run"
    call(command, "train", "digits", "train.duration=2 steps", "--run-dir", run, cwd=tmp_path)
    assert (run / "summary.json").is_file()
    assert (run / "report.html").is_file(), "the style and script of its pages are installed too"
    assert "cifar10" in call(command, "recipes", cwd=tmp_path)


def test_the_wheel_trains_predicts_and_exports_without_a_compiler_and_its_libraries_are_listed(
    built: Built, tmp_path: Path
) -> None:
    for name in ("torchvision", "cyclonedx_py"):
        pytest.importorskip(name, reason=f"needs {name}")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    words = (built.wheel, "--python", sys.executable, "--torch", "here", "--sbom", "sbom.json")
    assert "passed in" in call(sys.executable, ROOT / "scripts" / "matrix", *words, cwd=tmp_path, PATH=path)
    listed = {each["name"]: each for each in json.loads((tmp_path / "sbom.json").read_text())["components"]}
    assert "BSD-3-Clause" in json.dumps(listed["torch"]["licenses"])
    assert listed["paceline"]["licenses"] == [{"license": {"acknowledgement": "declared", "id": "Apache-2.0"}}]


def test_the_installed_command_has_the_course(installed: Path, tmp_path: Path) -> None:
    pytest.importorskip("jupytext", reason="needs jupytext")
    command = installed / "paceline"
    listed = json.loads(call(command, "labs", "list", "--json", cwd=tmp_path))
    call(command, "labs", "start", listed[0]["number"], cwd=tmp_path)
    assert json.loads(call(command, "labs", "list", "--json", cwd=tmp_path))[0]["started"]


def test_without_a_compiler_the_wheel_reads_pictures_with_pillow(tmp_path: Path) -> None:
    built = build(copy_checkout(tmp_path / "checkout"), tmp_path / "dist", CC="/bin/false")
    assert not any(name.endswith((".so", ".pyd")) for name in built.in_wheel)
    code = "from paceline.data.image.decode import describe_decoder; print(describe_decoder())"
    output = call(install(built.wheel, tmp_path) / "python", "-c", code, cwd=tmp_path)
    assert "the compiled decoder is not available" in output


def test_two_builds_give_the_same_bytes_and_an_index_takes_them(tmp_path: Path) -> None:
    for name in ("auditwheel", "twine"):
        pytest.importorskip(name, reason=f"needs {name}")
    if shutil.which("cc") is None or not Path("/usr/include/jpeglib.h").exists():
        pytest.skip("needs a C compiler and the headers of libjpeg-turbo")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for name in ("first", "second"):
        call(sys.executable, ROOT / "scripts" / "wheels", tmp_path / name, cwd=tmp_path, PATH=path)
    first, second = (
        {file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} for name in ("first", "second")
    )
    assert first == second
    assert sorted(name.split("-", 2)[-1].partition("_2")[0] for name in first) == [
        f"{paceline.__version__}.tar.gz",
        "cp311-abi3-manylinux2014_x86_64.manylinux",
        "py3-none-any.whl",
    ]
