"""Start a program as N ranks: forks of this process, which wait for one another and end together."""

import multiprocessing
import os
import runpy
import sys

count, program, *sys.argv[1:] = sys.argv[1:]
barrier = multiprocessing.Barrier(int(count))
ranks = {}
for rank in range(int(count)):
    os.environ.update(RANK=str(rank), WORLD_SIZE=count)
    if not (pid := os.fork()):
        runpy.run_path(program, {"meet": barrier.wait}, run_name="__main__")
        os._exit(0)
    ranks[pid] = rank
while ranks:
    pid, status = os.wait()
    if status:
        for other in {*ranks} - {pid}:
            os.kill(other, 9)
        sys.exit(1)
    del ranks[pid]
