"""What an installation brings: locked by hashes, and as small as it was measured."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_the_lock_holds_core_and_vision_in_the_tested_versions_with_hashes_and_no_address() -> None:
    text = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    assert "://" not in text
    locked = {}
    for line in text.splitlines()[1:]:
        match = re.fullmatch(r"(\S+)==(\S+)(?: --hash=sha256:[0-9a-f]{64})+", line)
        assert match is not None, line
        locked[normal(match[1])] = match[2]
    tested = {normal(name): version for name, _, version in constraints()}
    assert {name: tested.get(name, version) for name, version in locked.items()} == locked
    needed = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["vision"]]
    assert {normal(Requirement(each).name) for each in needed} <= locked.keys()


def constraints() -> list[tuple[str, str, str]]:
    return [line.partition("==") for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()]


def test_the_core_without_torch_stays_small() -> None:
    left, sizes = [Requirement(each).name for each in PROJECT["dependencies"]], {"torch": 0}
    while left:
        if (name := normal(left.pop())) not in sizes:
            files = metadata.distribution(name).files or []
            paths = [Path(str(each.locate())) for each in files if each.suffix != ".pyc"]
            sizes[name] = sum(path.stat().st_size for path in paths if path.is_file())
            needed = map(Requirement, metadata.distribution(name).requires or [])
            left += [each.name for each in needed if each.marker is None or each.marker.evaluate({"extra": ""})]
    assert sum(sizes.values()) < 105e6, sizes  # 57 of them numpy, 20 Pillow
