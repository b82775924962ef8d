"""The processes of one variant, as the one that gives them turns sees them."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.distributed.local_launch import rank_variables
from paceline.machine import available_cores
from paceline_advisor.bench.interleaved_process import Orders, command_line

_LOOK_SECONDS = 0.2
_LEAVE_SECONDS = 10.0
# The others of a world learn late that one has failed, and say then only that they miss it.
_CAUSE_SECONDS = 1.0
_BY_A_SIGNAL = "ended by "
_OF_A_LAUNCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class MemberError(Exception):
    """A variant cannot go on.

    Attributes:
        out_of_memory: Whether for want of memory.
    """

    def __init__(self, message: str, *, out_of_memory: bool = False) -> None:
        super().__init__(message)
        self.out_of_memory = out_of_memory


class _Rank:
    """One process with its two pipes."""

    def __init__(self, orders: Callable[[int], Orders], environment: Mapping[str, str], errors: Path) -> None:
        self.answers, theirs = os.pipe()
        self._errors, self._read = errors, b""
        try:
            self.process = self._begun(orders(theirs), environment, theirs)
        except OSError as error:
            os.close(self.answers)
            raise MemberError(f"a process cannot be started ({error.strerror})") from error
        finally:
            os.close(theirs)

    def _begun(self, orders: Orders, environment: Mapping[str, str], theirs: int) -> subprocess.Popen[bytes]:
        with self._errors.open("wb") as err:
            # A session of its own: what a terminal's Ctrl-C ends is this process, which then ends the others.
            return subprocess.Popen(
                command_line(orders),
                stdin=subprocess.PIPE,
                stdout=err,
                stderr=err,
                pass_fds=(theirs,),
                start_new_session=True,
                env=environment,
            )

    def grant(self, lead: int, steps: int) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # its end is told where its answer is waited for
            self.process.stdin.write(json.dumps({"lead": lead, "steps": steps}).encode() + b"\n")
            self.process.stdin.flush()

    def line(self) -> dict[str, Any] | None:
        """What it says, if it has said something."""
        if b"\n" not in self._read and select.select([self.answers], [], [], 0)[0]:
            self._read += os.read(self.answers, 1 << 16)
        whole, newline, rest = self._read.partition(b"\n")
        if not newline:
            return None
        self._read = rest
        found: dict[str, Any] = json.loads(whole)
        return found

    @property
    def ending(self) -> str:
        """How it ended without a word of its own."""
        code = self.process.poll()
        if code is not None and code < 0:
            hint = " (the system may have been out of memory)" if code == -signal.SIGKILL else ""
            return f"{_BY_A_SIGNAL}{signal.Signals(-code).name}{hint}"
        said = self._errors.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return said[-1] if said else f"ended with exit code {code} and left no message"

    def leave(self) -> None:
        self.grant(0, 0)

    def kill(self) -> None:
        """End it with everything it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        os.close(self.answers)


class Member:
    """One variant's processes.

    Args:
        recipe: The recipe's file.
        part: ``together``, ``compute`` or ``data``.
        processes: How many train together.
        folder: Where everything of it is written; it exists.
        scratch: What is to be removed if this process cannot do it any more.

    Raises:
        MemberError: If they cannot be started; none is left then.
    """

    def __init__(self, recipe: Path, part: str, *, processes: int, folder: Path, scratch: Path) -> None:
        self._ranks: list[_Rank] = []
        temporary = folder / "t"  # a short name: sockets of loader processes lie in it, whose paths have 108 bytes
        temporary.mkdir()
        meeting = folder / "m"
        meeting.mkdir()

        def orders(answers: int) -> Orders:
            return Orders(
                recipe=str(recipe),
                run_dir=str(folder / "run"),
                scratch=str(scratch),
                part=part,
                parent=os.getpid(),
                answers=answers,
            )

        ours = {name: value for name, value in os.environ.items() if name not in _OF_A_LAUNCH}
        try:
            for rank in range(processes):
                of_rank = rank_variables(rank, processes, meeting, cores=available_cores()) if processes > 1 else {}
                environment = {**ours, "TMPDIR": str(temporary), **of_rank}
                self._ranks.append(_Rank(orders, environment, folder / f"errors-{rank}"))
        except BaseException:
            self.kill()
            raise

    def opened(self, *, limit_seconds: float) -> dict[str, Any]:
        """Wait until all its processes stand before their first step; what the first one says of the run.

        Raises:
            MemberError: If it cannot be opened.
        """
        return self._answers(limit_seconds)[0]

    def turn(self, *, lead: int, steps: int, limit_seconds: float) -> dict[str, Any]:
        """Let it take some steps that are not timed, and then some that are; what the slowest process measured.

        The peak of memory is that of the process that needed most, and the energy that of all their devices.

        Raises:
            MemberError: If it fails.
        """
        for rank in self._ranks:
            rank.grant(lead, steps)
        return of_all(self._answers(limit_seconds))

    def leave(self) -> None:
        """Let its processes end in order, and see to it that they do."""
        for rank in self._ranks:
            rank.leave()
        deadline = time.monotonic() + _LEAVE_SECONDS
        with contextlib.suppress(subprocess.TimeoutExpired):
            for rank in self._ranks:
                rank.process.wait(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """End all its processes, with their loader processes."""
        ranks, self._ranks = self._ranks, []
        for rank in ranks:
            rank.kill()

    def _answers(self, limit_seconds: float) -> list[dict[str, Any]]:
        found: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + limit_seconds
        while len(found) < len(self._ranks):
            waiting = [index for index in range(len(self._ranks)) if index not in found]
            select.select([self._ranks[index].answers for index in waiting], [], [], _LOOK_SECONDS)
            for index in waiting:
                ended = self._ranks[index].process.poll() is not None
                answer = self._ranks[index].line()
                if answer is not None:
                    found[index] = answer
                if (answer is None and ended) or (answer is not None and "failed" in answer):
                    raise self._failure(found)
            if time.monotonic() > deadline:
                raise MemberError(f"it gave no answer within {limit_seconds:.0f} s")
        return [found[index] for index in range(len(self._ranks))]

    def _failure(self, found: Mapping[int, dict[str, Any]]) -> MemberError:
        """The cause: want of memory before anything else, and what a process says before its mere end."""
        deadline = time.monotonic() + (_CAUSE_SECONDS if len(self._ranks) > 1 else 0.0)
        said: list[dict[str, Any]] = [each for each in found.values() if "failed" in each]
        while time.monotonic() < deadline:
            said += [each for rank in self._ranks if (each := rank.line()) is not None and "failed" in each]
            time.sleep(_LOOK_SECONDS / 4)
        ended = [rank for rank in self._ranks if rank.process.poll() is not None]
        return _cause(said, [rank.ending for rank in ended])


def of_all(answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One answer for a block of steps that several processes took, each of which measured itself."""
    # A step is done when the last one has done it; where nothing is exchanged, as with `data`, they are not as fast.
    found = dict(max(answers, key=lambda each: float(each["seconds"])))
    peaks = [each["peak_memory_bytes"] for each in answers if each["peak_memory_bytes"] is not None]
    # Processes on one machine's processors read one counter; those with a GPU each, as many.
    used = {each["energy_counter"]: each["joules"] for each in answers}
    del found["energy_counter"]
    known = [each for each in used.values() if each is not None]
    return {
        **found,
        "peak_memory_bytes": max(peaks, default=None),
        "joules": sum(known) if len(known) == len(used) else None,
    }


def _cause(said: Sequence[dict[str, Any]], endings: Sequence[str]) -> MemberError:
    short = [each for each in said if each["out_of_memory"]]
    killed = [each for each in endings if each.startswith(_BY_A_SIGNAL)]
    if killed and not short:
        return MemberError(killed[0], out_of_memory=signal.SIGKILL.name in killed[0])
    if found := [*short, *said]:
        return MemberError(found[0]["failed"], out_of_memory=found[0]["out_of_memory"])
    return MemberError(endings[0] if endings else "it broke off")
