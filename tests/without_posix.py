"""Runs commands as on a system without fork, flock, POSIX signals and limits: ``python without_posix.py A "B C" …``.

Each argument is a command line. The modules, functions and signals that Windows lacks are taken away before Paceline is
imported. Names of files, spawned processes and torch's build for Windows are not rehearsed by it.
"""

import importlib
import importlib.abc
import multiprocessing
import os
import shlex
import shutil
import signal
import sys

LOADED = "asyncio concurrent.futures.process multiprocessing.pool shutil socketserver subprocess tempfile zipfile"
MODULES = {"fcntl", "grp", "posix", "pwd", "resource", "termios"}
SIGNALS = "SIGALRM SIGCHLD SIGCONT SIGHUP SIGKILL SIGSTOP SIGUSR1 SIGUSR2 SIGXCPU alarm pthread_sigmask setitimer"
FUNCTIONS = (
    "O_DIRECTORY O_NOFOLLOW O_NONBLOCK fork getegid geteuid getgid getloadavg getpgid getuid killpg mkfifo nice "
    "posix_fadvise pread pwrite register_at_fork sched_getaffinity sched_setaffinity setsid statvfs sysconf uname wait4"
)


class Absent(importlib.abc.MetaPathFinder):
    """Refuses the modules that are taken away."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name in MODULES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def take_away() -> None:
    os.supports_dir_fd.clear()
    importlib.reload(shutil)  # which reads it when it is imported
    # Python's own modules and torch have builds for each system: they take what they need first.
    for name in (*LOADED.split(), "numpy", "PIL.Image", "torch.distributed", "torch.multiprocessing"):
        importlib.import_module(name)
    for name in MODULES:
        sys.modules.pop(name, None)
    sys.meta_path.insert(0, Absent())
    for name in SIGNALS.split():
        delattr(signal, name)
    for name in FUNCTIONS.split():
        delattr(os, name)
    fork = type(multiprocessing.get_context("fork"))

    def refuse(self: object) -> None:
        raise ValueError("cannot find context for 'fork'")

    fork._check_available = refuse


if __name__ == "__main__":
    take_away()
    from paceline.cli.main import run

    for line in sys.argv[1:]:
        code = run(shlex.split(line))
        print(f"exit code {code}", flush=True)
