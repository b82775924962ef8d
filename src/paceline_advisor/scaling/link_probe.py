"""One of several processes that time all-reduces among themselves: ``python -m ... FOLDER PROCESSES BYTES RANK``."""

from __future__ import annotations

import json
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]  # not in __all__

_SMALL_BYTES = 4096
_TIMES = 15
_WARM = 3


def main(folder: Path, processes: int, size: int, rank: int) -> None:
    """Time all-reduces of a small and a large message; rank 0 writes its median seconds to ``answer.json``."""
    store = FileStore(str(folder / "store"), processes)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=processes, timeout=timedelta(seconds=120))
    try:
        seconds = {"small": _median(_SMALL_BYTES), "large": _median(size)}
        if rank == 0:
            (folder / "answer.json").write_text(json.dumps(seconds))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _median(size: int) -> float:
    message = torch.zeros(max(1, size // 4))
    found = []
    for _ in range(_TIMES):
        dist.barrier()
        begun = time.perf_counter()
        dist.all_reduce(message)
        found.append(time.perf_counter() - begun)
    return statistics.median(found[_WARM:])


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
