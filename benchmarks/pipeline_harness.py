"""How much processor time and how much time does a loader take? The same clock for every contender, whoever made it.

A contender is a function from a :class:`Setting` to an endless stream of batch lengths. It runs in a process of its
own, in whatever environment it needs: this file imports nothing but the standard library.

A file of contenders ends with ``main(CONTENDERS)``; ``python FILE NAME SETTING-AS-JSON`` then measures one of them and
prints one JSON object.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a contender is to do.

    Attributes:
        folder: FOLDER/CLASS/*.jpg.
        files: Where contenders may keep files of their own, from one process to the next.
        size: Height and width of the result, in pixels.
        batch: Images per batch.
        workers: Loader processes or threads beside the main one; 0: everything in the main one.
        images: How many images are timed.
        warm: How many come before.
    """

    folder: str
    files: str
    size: int
    batch: int = 64
    workers: int = 0
    images: int = 1000
    warm: int = 128


Contender = Callable[[Setting], Iterator[int]]


def processor_seconds() -> float:
    """User and system time of this process and of all its descendants, dead or alive."""
    ours = os.times()
    return ours.user + ours.system + ours.children_user + ours.children_system + _of_living_children(os.getpid())


def _of_living_children(parent: int) -> float:
    total, ticks = 0.0, os.sysconf("SC_CLK_TCK")
    for task in os.listdir(f"/proc/{parent}/task"):
        try:
            with open(f"/proc/{parent}/task/{task}/children", encoding="ascii") as file:
                children = file.read().split()
        except FileNotFoundError:  # a thread that has ended since
            continue
        for child in children:
            try:
                with open(f"/proc/{child}/stat", encoding="utf-8", errors="replace") as file:
                    numbers = file.read().rpartition(")")[2].split()
            except FileNotFoundError:
                continue
            total += sum(map(int, numbers[11:15])) / ticks + _of_living_children(int(child))
    return total


def measure(contender: Contender, setting: Setting) -> dict[str, float]:
    """Time a contender, after it has warmed up."""
    stream = contender(setting)
    done = 0
    while done < setting.warm:
        done += next(stream)
    done = 0
    begin, processor = time.perf_counter(), processor_seconds()
    while done < setting.images:
        done += next(stream)
    seconds, used = time.perf_counter() - begin, processor_seconds() - processor
    return {"cpu_ms_per_image": 1000 * used / done, "images_per_second": done / seconds, "images": done}


def main(contenders: Mapping[str, Contender]) -> None:
    """Measure the contender named on the command line."""
    name, described = sys.argv[1:3]
    setting = Setting(**json.loads(described))
    print(json.dumps(measure(contenders[name], setting)), flush=True)
    # Loaders of threads and processes end each in its own time: nothing is left to do for this process.
    os._exit(0)


def as_json(setting: Setting) -> str:
    """The setting as :func:`main` takes it."""
    values: dict[str, Any] = dataclasses.asdict(setting)
    return json.dumps(values)
