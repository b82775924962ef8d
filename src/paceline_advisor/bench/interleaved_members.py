"""The processes of one interleaved variant: start them, grant them steps, read what they measured."""

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
from paceline.processes import Child, ProcessGroup, without_rank
from paceline_advisor.bench.interleaved_process import Orders, command_line

_LOOK_SECONDS = 0.2
_LEAVE_SECONDS = 10.0
# The others of a world learn late that one has failed, and say then only that they miss it.
_CAUSE_SECONDS = 1.0


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

    def __init__(
        self, group: ProcessGroup, orders: Callable[[int], Orders], environment: Mapping[str, str], errors: Path
    ) -> None:
        self.answers, theirs = os.pipe()
        self._read = b""
        try:
            self.child = group.start(
                command_line(orders(theirs)),
                env=environment,
                stdin=subprocess.PIPE,
                stdout=errors,
                stderr=errors,
                pass_fds=(theirs,),
            )
        except OSError as error:
            os.close(self.answers)
            raise MemberError(f"a process cannot be started ({error.strerror})") from error
        finally:
            os.close(theirs)

    def grant(self, lead: int, steps: int) -> None:
        assert self.child.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # its end is told where its answer is waited for
            self.child.process.stdin.write(json.dumps({"lead": lead, "steps": steps}).encode() + b"\n")
            self.child.process.stdin.flush()

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

    def close(self) -> None:
        """Close its pipes."""
        assert self.child.process.stdin is not None
        with contextlib.suppress(OSError):
            self.child.process.stdin.close()
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
        self._group = ProcessGroup()
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

        ours = without_rank(os.environ)
        try:
            for rank in range(processes):
                of_rank = rank_variables(rank, processes, meeting, cores=available_cores()) if processes > 1 else {}
                environment = {**ours, "TMPDIR": str(temporary), **of_rank}
                self._ranks.append(_Rank(self._group, orders, environment, folder / f"errors-{rank}"))
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
            rank.grant(0, 0)
        self._group.wait(_LEAVE_SECONDS, after_failure=_LEAVE_SECONDS)
        self.kill()

    def kill(self) -> None:
        """End all its processes, with their loader processes."""
        self._group.kill()
        for rank in self._ranks:
            rank.close()
        self._ranks = []

    def _answers(self, limit_seconds: float) -> list[dict[str, Any]]:
        found: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + limit_seconds
        while len(found) < len(self._ranks):
            waiting = [index for index in range(len(self._ranks)) if index not in found]
            select.select([self._ranks[index].answers for index in waiting], [], [], _LOOK_SECONDS)
            for index in waiting:
                ended = self._ranks[index].child.code is not None
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
        return _cause(said, [rank.child for rank in self._ranks if rank.child.code is not None])


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


def _cause(said: Sequence[dict[str, Any]], ended: Sequence[Child]) -> MemberError:
    short = [each for each in said if each["out_of_memory"]]
    killed = [child for child in ended if (child.code or 0) < 0]
    if killed and not short:
        return MemberError(killed[0].ending, out_of_memory=killed[0].code == -signal.SIGKILL)
    if found := [*short, *said]:
        return MemberError(found[0]["failed"], out_of_memory=found[0]["out_of_memory"])
    return MemberError(ended[0].ending if ended else "it broke off")
