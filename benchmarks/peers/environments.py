"""Each contender's own environment, with exact versions: made once, kept in the user's cache.

A contender whose requirements meet this project's pins sees this environment's packages (torch is 5 GB) and gets its
own on top; one that needs another torch gets an environment with nothing of ours.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Peer:
    """One contender.

    Attributes:
        title: As its authors write it.
        packages: What is installed beside torch, with exact versions.
        alone: Whether it gets a torch of its own, because it does not take the one that is pinned here.
        launcher: Whether several processes are started by torchrun; else it starts them itself.
        program: Whose program it runs (``run_NAME.py``), if not its own.
        variables: Environment variables that it gets besides.
    """

    title: str
    packages: tuple[str, ...] = ()
    alone: bool = False
    launcher: bool = True
    program: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Its name with the versions that were measured."""
        versions = ", ".join(each.partition("==")[2] for each in self.packages[:1])
        return f"{self.title} {versions}".strip()


_KEPT = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**62)}
PEERS: Mapping[str, Peer] = {
    "raw": Peer("PyTorch, by hand"),
    # How much of the difference is what the C library does with freed memory (docs/decisions/0069).
    "raw-kept": Peer("by hand, memory kept", program="raw", variables=_KEPT),
    "torchvision": Peer("torchvision's reference style"),
    "timm": Peer("timm", ("timm==1.0.31",)),
    "accelerate": Peer("Accelerate", ("accelerate==1.15.0",)),
    "lightning": Peer("Lightning", ("lightning==2.6.6",), launcher=False),
    "fastai": Peer("fastai", ("fastai==2.8.12",)),
    "composer": Peer(
        "Composer", ("mosaicml==0.32.1", "torch==2.7.0", "torchvision==0.22.0", "setuptools==80.9.0"), alone=True
    ),
    "paceline": Peer("Paceline"),
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
    if not peer.packages:
        return Path(sys.executable)
    folder = cache() / "-".join(each.replace("==", "-") for each in peer.packages)
    python = folder / "bin" / "python"
    if not (folder / "made").exists():
        print(f"Making the environment of {peer.label} in {folder} …", file=sys.stderr)
        venv.create(folder, with_pip=True, clear=True)
        if not peer.alone:
            _see_ours(python)
        done = subprocess.run([python, "-m", "pip", "install", "--quiet", *peer.packages, *_pins(peer)], check=False)
        if done.returncode:
            raise SystemExit(f"{', '.join(peer.packages)} could not be installed in {folder}; see above.")
        (folder / "made").touch()
    return python


def _see_ours(python: Path) -> None:
    script = "import sysconfig; print(sysconfig.get_path('purelib'))"
    theirs = subprocess.run([python, "-c", script], capture_output=True, text=True, check=True).stdout.strip()
    (Path(theirs) / "paceline_base.pth").write_text(sysconfig.get_path("purelib") + "\n")


def _pins(peer: Peer) -> list[str]:
    return [] if peer.alone else ["-c", str(ROOT / "constraints.txt")]
