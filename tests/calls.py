"""How tests call a command, and what they ask of how it ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fork_server

Call = Callable[..., Any]
SOURCES = Path(__file__).parents[1] / "src"
LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def strict_json(text: str) -> Any:
    """One JSON document and nothing else, without the words JSON does not have."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


def command_names() -> list[str]:
    """The commands of Paceline's packages, in the order of `paceline help all`."""
    from paceline.cli.commands import listing

    return [name for commands in listing().values() for name in commands]


@dataclass
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """The one JSON document that it printed."""
        return strict_json(self.out)

    def ended(self, code: int) -> Done:
        """The same, which must have ended with this code."""
        assert self.code == code, f"exit code {self.code}:\n{self.out}\n{self.err}"
        return self

    def refused(self, *words: str) -> Done:
        """The same, which must have ended as a mistake does: a message with these words, and nothing else."""
        assert (self.code, self.out) == (2, ""), f"exit code {self.code}:\n{self.out}\n{self.err}"
        assert self.err.startswith("paceline: "), self.err
        for word in words:
            assert word in self.err, f"{word!r} is not in: {self.err}"
        assert "Traceback" not in self.err
        return self


def in_a_process(
    *arguments: object, cwd: Path, timeout: float = 120, interpreter: tuple[str, ...] = (), real: bool = False
) -> Done:
    """Run ``python -m paceline ARGUMENTS``, forked from a warm server unless ``real``, as nobody's rank."""
    inherited = {name: value for name, value in os.environ.items() if name not in LAUNCH_VARIABLES}
    done = (subprocess.run if real else fork_server.run)(
        [sys.executable, *interpreter, "-m", "paceline", *map(str, arguments)],
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        env=inherited | {"PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1"},
    )
    return Done(done.returncode, done.stdout, done.stderr)


def output_of(command: type[Any], *words: object, code: int = 0) -> str:
    """What a command prints in this process, which must end with this code; errors are not caught."""
    from click.testing import CliRunner

    from paceline.cli.derive import click_command

    done = CliRunner().invoke(click_command(command), [str(each) for each in words], catch_exceptions=False)
    assert done.exit_code == code, done.output
    return done.output
