"""Runs of a described program: undisturbed, killed at a chosen moment, and resumed."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import paceline.conform
from paceline.errors import PacelineError
from paceline_advisor import frozen
from paceline_advisor.conform.description import Description
from paceline_advisor.conform.trace import Trace, read_trace, stopped_process
from paceline_advisor.launches import CommandProcess, OverdueError

Weights = dict[str, Any]
_LONGEST = 300  # characters of a message


class ProgramError(PacelineError):
    """The program does not train, even undisturbed."""


@frozen
class LaunchedRun:
    """One start of the program.

    Attributes:
        code: Exit code; negative after a signal.
        message: The last line of its error output.
        trace: What it told.
        folder: Its working directory.
        shown: How to start it by hand.
    """

    code: int
    message: str
    trace: Trace
    folder: Path
    shown: str


@frozen
class Kill:
    """A run that was killed and resumed.

    Attributes:
        moment: When it was killed, in words.
        before: The killed run.
        resumed: The run that continued it.
        steps: The steps in the names of its checkpoints at the kill.
        is_torn: Whether the kill was to be within a save.
        torn: The file that it cut short; None if it hit none.
    """

    moment: str
    before: LaunchedRun
    resumed: LaunchedRun
    steps: tuple[int, ...] = ()
    is_torn: bool = False
    torn: str | None = None

    @property
    def repeat(self) -> str:
        """One line that does the same in an empty directory."""
        return f"{self.before.shown}; {self.resumed.shown}"


@frozen
class Program:
    """A described program, and where its runs take place."""

    description: Description
    here: Path
    python: Path
    scratch: Path

    def run(
        self, name: str, processes: int, *, resumes: LaunchedRun | None = None, stop: dict[str, Any] | None = None
    ) -> LaunchedRun:
        """Run the program to its end, or to where it has to stop, where all its processes are killed at once."""
        description = self.description
        folder = self.scratch / name if resumes is None else resumes.folder
        told = self.scratch / f"{name}-told"
        folder.mkdir(exist_ok=True)
        words = description.command(
            description.start if resumes is None else description.resume, self.here, self.python, processes
        )
        variables = {"PACELINE_CONFORM": str(told), "PACELINE_CONFORM_SAVES": description.pattern}
        shown = {**variables, "PACELINE_CONFORM": name, "PACELINE_CONFORM_STOP": json.dumps(stop) if stop else ""}
        if stop:
            variables["PACELINE_CONFORM_STOP"] = json.dumps(stop)
        shown = {key: text for key, text in shown.items() if text}
        with CommandProcess(
            [],
            self.scratch / f"{name}-log",
            limit_seconds=description.limit_seconds,
            variables={**variables, **self._lent()},
            folder=folder,
            program=words,
        ) as launch:
            overdue: list[str] = []
            try:
                if stop and launch.wait_until(lambda: stopped_process(told) is not None):
                    if "tear" in stop:  # it ends by itself, within its next save
                        launch.wait_until(lambda: stopped_process(told) not in launch.family())
                    launch.kill()
                code = launch.wait()
            except OverdueError as error:
                if resumes is None:
                    message = f"{error}: {shlex.join(words)}. Give a shorter training, or a higher limit_seconds."
                    raise ProgramError(message) from None
                code, overdue = -signal.SIGKILL, [str(error)]
            lines = overdue or launch.err.strip().splitlines()
        call = " ".join([*(f"{key}={shlex.quote(text)}" for key, text in shown.items()), shlex.join(words)])
        return LaunchedRun(
            code=code,
            message=lines[-1][:_LONGEST] if lines else "no error output",
            trace=read_trace(told),
            folder=folder,
            shown=call,
        )

    def checkpoint_steps(self, run: LaunchedRun) -> tuple[int, ...]:
        """Return the steps in the names of a run's checkpoints, in order."""
        pattern = re.compile(
            re.escape(self.description.checkpoints).replace(r"\{step\}", r"(\d+)").replace(r"\*", ".*")
        )
        names = (path.relative_to(run.folder).as_posix() for path in run.folder.glob(self.description.pattern))
        return tuple(sorted(int(found[1]) for name in names if pattern.groups and (found := pattern.fullmatch(name))))

    def checkpoint_bytes(self, run: LaunchedRun) -> int:
        """Return the size of the largest file of a run's checkpoints."""
        tops = list(run.folder.glob(self.description.pattern))
        files = [path for top in tops for path in (top, *top.rglob("*")) if path.is_file()]
        return max((file.stat().st_size for file in files), default=0)

    def weights(self, run: LaunchedRun) -> Weights | None:
        """Return the final weights of a run, by name; None if none are described or written.

        Raises:
            ValueError: If they cannot be read; the message says why.
        """
        if self.description.weights is None or not (file := run.folder / self.description.weights).is_file():
            return None
        import torch
        from safetensors.torch import load_file

        try:
            if file.suffix == ".safetensors":
                found = dict(_flat(load_file(file)))
            else:
                found = dict(_flat(torch.load(file, map_location="cpu", weights_only=True)))
        except Exception as error:  # noqa: BLE001  # the readers raise many kinds of errors for a damaged file
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise ValueError(f"{self.description.weights} cannot be read ({reason[:200]})") from None
        if not found:
            raise ValueError(f"{self.description.weights} has no tensors by name")
        return found

    def _lent(self) -> dict[str, str]:
        """Return variables that let another environment import ``paceline.conform``, and nothing else of Paceline."""
        has_conform = [str(self.python), "-c", "import paceline.conform"]
        if (
            self.python == Path(sys.executable)
            or not subprocess.run(has_conform, cwd=self.scratch, capture_output=True, check=False).returncode
        ):
            return {}
        package = self.scratch / "lent" / "paceline"
        package.mkdir(parents=True, exist_ok=True)
        (package / "__init__.py").touch()
        shutil.copy(paceline.conform.__file__, package / "conform.py")
        return {"PYTHONPATH": os.pathsep.join(filter(None, (str(package.parent), os.environ.get("PYTHONPATH"))))}


def torn_file(run: LaunchedRun, size: int) -> str | None:
    """Return the file that was cut at ``size`` bytes; None if the run did not end within a save."""
    if run.code not in (-signal.SIGXFSZ, -signal.SIGKILL, 1):
        return None
    found = (path for path in run.folder.rglob("*") if path.is_file() and path.stat().st_size == size)
    return next((path.relative_to(run.folder).as_posix() for path in found), None)


def _flat(tree: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """Return the tensors of nested dicts, as NumPy arrays, by their path."""
    if isinstance(tree, dict):
        return [each for name, part in tree.items() for each in _flat(part, f"{prefix}{name}.")]
    if not hasattr(tree, "detach"):
        return []
    import torch

    # NumPy has no bfloat16.
    tensor = tree.detach().to(torch.promote_types(tree.dtype, torch.float32))
    return [(prefix.rstrip("."), tensor.numpy())]
