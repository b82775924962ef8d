"""Each contender's own environment, with exact versions: made once, kept in the user's cache.

Below all of them lies one with torch and torchvision alone (5 GB), which a contender sees besides its own packages; one
that needs another torch gets an environment with nothing of that. Nothing else is there, since some import whatever
they find.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tomllib
import venv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
_CONSTRAINTS = ROOT / "constraints.txt"


@dataclass(frozen=True)
class Peer:
    """One contender.

    Attributes:
        title: As its authors write it.
        packages: What is installed beside torch, with exact versions.
        alone: Whether it gets a torch of its own, because it does not take the one that is pinned here.
        launcher: Whether several processes are started by torchrun; else it starts them itself.
        program: The contender whose program (``run_NAME.py``) it runs, if another.
        variables: Additional environment variables.
        extras: Of Paceline's, that are installed with it.
    """

    title: str
    packages: tuple[str, ...] = ()
    alone: bool = False
    launcher: bool = True
    program: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)
    extras: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """Its name with the versions that were measured."""
        versions = ", ".join(each.partition("==")[2] for each in self.packages[:1])
        return f"{self.title} {versions}".strip()


_TUNED = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**62), "TUNED": "1"}
PEERS: Mapping[str, Peer] = {
    "raw": Peer("PyTorch, by hand"),
    # What Paceline does by itself: freed memory is kept (docs/decisions/0069), and DDP copies and broadcasts less.
    "raw-tuned": Peer("by hand, tuned", program="raw", variables=_TUNED),
    "torchvision": Peer("torchvision's reference style"),
    "timm": Peer("timm", ("timm==1.0.31",)),
    "accelerate": Peer("Accelerate", ("accelerate==1.15.0",)),
    "lightning": Peer("Lightning", ("lightning==2.6.6",), launcher=False),
    "fastai": Peer("fastai", ("fastai==2.8.12",)),
    "fastai-timm": Peer("fastai", ("fastai==2.8.12", "timm==1.0.31")),
    "ultralytics": Peer("Ultralytics", ("ultralytics==8.4.190",)),
    "composer": Peer(
        "Composer", ("mosaicml==0.32.1", "torch==2.7.0", "torchvision==0.22.0", "setuptools==80.9.0"), alone=True
    ),
    "paceline": Peer("Paceline"),
    "paceline-packed": Peer("Paceline, packed", program="paceline", variables={"READ": "packed"}, extras=("pack",)),
    "paceline-dali": Peer("Paceline, DALI", program="paceline", variables={"READ": "dali"}, extras=("dali",)),
}


def cache() -> Path:
    """Where environments are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paceline" / "peers"


def python_of(name: str) -> Path:
    """The interpreter of a contender's environment, which is made if it is not there.

    Raises:
        SystemExit: If its packages cannot be installed.
    """
    peer = PEERS[name]
    if peer.alone:
        return _made("-".join(each.replace("==", "-") for each in peer.packages), peer.packages)
    pinned = _pinned()
    base = f"torch-{pinned['torch']}"
    below = _made(base, [f"{each}=={pinned[each]}" for each in ("torch", "torchvision")], "-c", str(_CONSTRAINTS))
    packages = _dependencies(peer.extras) if name.startswith("paceline") else peer.packages
    if not packages:
        return below
    folder = f"{base}-{name}-{hashlib.sha256(' '.join(packages).encode()).hexdigest()[:8]}"
    return _made(folder, packages, "-c", str(_CONSTRAINTS), below=below)


def installed(python: Path) -> list[str]:
    """Every package that the interpreter finds, with its version: those above pin nothing that they bring along."""
    script = "from importlib.metadata import distributions as d; [print(f'{x.name}=={x.version}') for x in d()]"
    done = subprocess.run([python, "-I", "-c", script], capture_output=True, text=True, check=True)
    return sorted(set(done.stdout.split()))


def _made(name: str, packages: Sequence[str], *options: str, below: Path | None = None) -> Path:
    folder = cache() / name
    python = folder / "bin" / "python"
    if not (folder / "made").exists():
        log = folder / "pip.log"
        print(f"Making the environment of {', '.join(packages)} in {folder} …", file=sys.stderr)
        venv.create(folder, with_pip=True, clear=True)
        if below is not None:
            (_packages_of(python) / "below.pth").write_text(f"{_packages_of(below)}\n")
        with log.open("w") as output:
            command = [python, "-m", "pip", "install", *packages, *options]
            done = subprocess.run(command, check=False, stdout=output, stderr=subprocess.STDOUT)
        if done.returncode:
            last = "\n".join(log.read_text().splitlines()[-5:])
            raise SystemExit(
                f"{', '.join(packages)} could not be installed in {folder}:\n{last}\nThe rest is in {log}."
            )
        (folder / "made").touch()
    return python


def _packages_of(python: Path) -> Path:
    script = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(subprocess.run([python, "-c", script], capture_output=True, text=True, check=True).stdout.strip())


def _pinned() -> dict[str, str]:
    lines = (line.partition("#")[0].strip() for line in _CONSTRAINTS.read_text().splitlines())
    return dict(line.split("==", 1) for line in lines if "==" in line)


def _dependencies(extras: Sequence[str]) -> list[str]:
    """What `pip install paceline[EXTRAS]` brings."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [*project["dependencies"], *(each for extra in extras for each in project["optional-dependencies"][extra])]
