"""Start ``python -m paceline …``, ``python -c …`` and ``python FILE.py`` without importing torch again, for tests.

A process that trains spends four to five processor seconds on imports, and the tests start hundreds. Here each pytest
worker has one server: a process that has imported torch and all of Paceline, has a single thread, and has run nothing
else. For each command it forks a child, so that nothing one command remembers reaches the next.

To its test, such a child is an ordinary process: a ``subprocess.Popen`` with its own working directory, environment (in
``/proc`` too), streams, session and exit code, whose parent is the test. Ranks that ``--processes`` starts are
forked from the launcher in the same way, where it has one thread. With ``REAL_PROCESSES=1`` nothing is forked.

A command is really started, by ``subprocess``, whenever what a fork cannot reproduce matters to it: other options of
the interpreter, other programs, ``preexec_fn``, and variables that Python or a library reads as it starts
(``_READ_AT_START``). Tests about start-up itself, such as what is imported, how long it takes, or limits on memory, use
``subprocess`` directly. Children share the hash seed of their server.
See docs/decisions/0074-packages-commands-and-tests.md.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import pkgutil
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import warnings
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

SOURCES = Path(__file__).parents[1] / "src"
# Variables that are read when Python starts or a library is imported. A command is forked where it has the server's.
_READ_AT_START = (
    "PYTHON", "LC_", "LANG", "LD_", "TZ", "MALLOC_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "CUDA_",
)  # fmt: skip
_READ_AT_START += ("ATEN_", "TORCH_", "PYTORCH_", "DNNL_", "ONEDNN_", "NUMEXPR_", "GLIBC_")
# Of these, a child does itself what they ask for, or what they ask for makes no difference to it.
_ARRANGED = ("PYTHONPATH", "PYTHONFAULTHANDLER", "PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED")
# scikit-learn sets them in whoever imports it, for a library that torch does not use.
_ARRANGED += ("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK")
_PR_SET_CHILD_SUBREAPER = 36
# Bytes of the server's own arguments and environment, where a child's are shown in /proc.
_ROOM = 60_000
# Descriptors that stay open when a child closes what it has inherited: it writes its id to one, and waits at the other.
_KEPT, _HELD = 900, 901
_OPTIONS = {"preexec_fn": None, "pass_fds": (), "shell": False, "executable": None}

# --------------------------------------------------------------------------------------- in a test's process


class Popen(subprocess.Popen[Any]):
    """``subprocess.Popen``, of which a command that can be forked from the server is forked."""

    def __init__(self, args: Any, **options: Any) -> None:
        self._forked = _can_be_forked(args, options)
        super().__init__(args, **options)

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, *rest: Any) -> None:
        if not self._forked:
            return super()._execute_child(args, executable, preexec_fn, *rest)
        # As CPython 3.11 to 3.14 call it: close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell, pipes, …
        _, _, cwd, env, _, _, _, *pipes = rest[:13]
        start_new_session = rest[-2]
        reads, writes = (pipes[0], pipes[3], pipes[5]), pipes
        command = {
            "words": [os.fsdecode(word) for word in args[1:]],
            "directory": os.fsdecode(cwd or os.getcwd()),
            "environment": dict(os.environ if env is None else env),
            "new_session": bool(start_new_session),
        }
        try:
            streams = [given if given != -1 else number for number, given in enumerate(reads)]
            self.pid = _start(command, streams)
            self._child_created = True
        finally:
            self._close_pipe_fds(*writes)
        return None


def run(args: Any, *, timeout: float | None = None, check: bool = False, **options: Any) -> Any:
    """``subprocess.run`` of such a command."""
    if options.pop("capture_output", False):
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Popen(args, **options) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(process.args, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


def _can_be_forked(args: Any, options: dict[str, Any]) -> bool:
    if sys.platform != "linux" or "REAL_PROCESSES" in os.environ:
        return False
    if __name__ == "__main__" and len(os.listdir("/proc/self/task")) > 1:
        return False  # a launcher that has threads cannot fork
    if any(options.get(name, usual) != usual for name, usual in _OPTIONS.items()):
        return False
    if options.get("process_group", -1) not in (None, -1) or isinstance(args, str | bytes) or args[0] != sys.executable:
        return False
    filters, words = _after_options([os.fsdecode(word) for word in args[1:]])
    if not words or not {"error", "ignore"}.issuperset(filters):
        return False
    is_command = words[0] == "-c" or words[0].endswith(".py") or (words[0] == "-m" and words[1].startswith("paceline"))
    return is_command and _starts_like_server(dict(os.environ if options.get("env") is None else options["env"]))


def _after_options(words: list[str]) -> tuple[list[str], list[str]]:
    """The filters of warnings (``-W``) that a command begins with, and what follows them and ``-P``."""
    filters = []
    while words[:1] in (["-P"], ["-W"]):
        filters += words[1:2] * (words[0] == "-W")
        words = words[1 + (words[0] == "-W") :]
    return filters, words


def _starts_like_server(environment: dict[str, str]) -> bool:
    if str(SOURCES) not in environment.get("PYTHONPATH", "").split(os.pathsep):
        return False  # another copy of Paceline is meant
    servers = {**os.environ, "OMP_NUM_THREADS": "1"}
    differing = {name for name in servers | environment if servers.get(name) != environment.get(name)}
    # Without a word about language, Python chooses UTF-8 by itself.
    differing -= {name for name in differing if name.startswith(("LC_", "LANG")) and name not in environment}
    return not any(name.startswith(_READ_AT_START) and name not in _ARRANGED for name in differing)


_lock = threading.Lock()
_servers: dict[int, socket.socket] = {}


def _start(command: dict[str, Any], streams: list[int]) -> int:
    """Have the server fork a child of this process, and return its id."""
    if __name__ == "__main__":  # in what the server has forked
        return _fork_here(command, streams)
    with _lock:
        server = _servers.get(os.getpid()) or _start_server()
        message = json.dumps(command).encode()
        # The child is orphaned at once, and comes to the nearest ancestor that asks for orphans.
        _adopt_orphans(True)
        try:
            socket.send_fds(server, [len(message).to_bytes(4, "big")], streams)
            server.sendall(message)
            answer = server.recv(4)
        finally:
            _adopt_orphans(False)
    if len(answer) != 4:
        raise RuntimeError("the fork server of the tests has ended")
    return int.from_bytes(answer, "big")


def _adopt_orphans(expected: bool) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(expected), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def _start_server() -> socket.socket:
    ours, theirs = socket.socketpair()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SOURCES)}
    process = subprocess.Popen(
        [sys.executable, "-P", __file__, str(theirs.fileno()), " " * _ROOM],
        env={**environment, "ROOM": " " * _ROOM},
        pass_fds=(theirs.fileno(),),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    theirs.close()
    _servers[os.getpid()] = ours

    def end(pid: int = os.getpid()) -> None:
        if pid == os.getpid():
            ours.close()
            process.wait()

    atexit.register(end)
    return ours


# What a shell runs in place of a command: it hands its streams, directory and environment over, passes signals on, and
# ends as the command does.
_CLIENT = """#!{python} -IS
import json, os, signal, socket, sys

agent = socket.socket(socket.AF_UNIX)
agent.connect({address!r})
message = json.dumps(dict(words={words!r} + sys.argv[1:], cwd=os.getcwd(), env=dict(os.environ))).encode()
socket.send_fds(agent, [len(message).to_bytes(4, "big")], [0, 1, 2])
agent.sendall(message)
pid = int.from_bytes(agent.recv(4), "big")
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, lambda number, _: os.kill(pid, number))
code = int.from_bytes(agent.recv(4), "big", signed=True)
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""


@contextlib.contextmanager
def commands_for_shells(folder: Path, commands: Mapping[str, list[str]]) -> Iterator[None]:
    """Write programs into a folder that start ``python WORDS ARGUMENTS`` by :class:`Popen`, for scripts of a shell.

    Args:
        folder: To be put into the shell's ``PATH``.
        commands: Names of the programs, each with its words.
    """
    with tempfile.TemporaryDirectory(prefix="agent-") as place, socket.socket(socket.AF_UNIX) as listening:
        address = f"{place}/socket"
        listening.bind(address)
        listening.listen(64)
        for name, words in commands.items():
            (folder / name).write_text(_CLIENT.format(python=sys.executable, address=address, words=words))
            (folder / name).chmod(0o755)
        threading.Thread(target=_accept, args=(listening,), name="agent of shells", daemon=True).start()
        yield
        listening.shutdown(socket.SHUT_RDWR)


def _accept(listening: socket.socket) -> None:
    with contextlib.suppress(OSError):  # that it is closed
        while True:
            threading.Thread(target=_attend, args=(listening.accept()[0],), daemon=True).start()


def _attend(client: socket.socket) -> None:
    """Start what a client asks for, tell it the process id and, in the end, the exit code."""
    with client:
        length, streams, _, _ = socket.recv_fds(client, 4, 3)
        message = b""
        while len(message) < int.from_bytes(length, "big"):
            message += client.recv(1 << 20)
        command = json.loads(message)
        named = dict(zip(("stdin", "stdout", "stderr"), streams, strict=True))
        process = Popen([sys.executable, *command["words"]], cwd=command["cwd"], env=command["env"], **named)
        for descriptor in streams:
            os.close(descriptor)
        client.sendall(process.pid.to_bytes(4, "big"))
        while process.poll() is None:
            if select.select([client], [], [], 0.01)[0]:
                process.kill()  # as its client was
        with contextlib.suppress(OSError):
            client.sendall(process.returncode.to_bytes(4, "big", signed=True))


# ------------------------------------------------------------------------------------------- in the server


def _serve(requests: socket.socket) -> None:
    """Fork a child for each request, until the test's process ends."""
    while True:
        length, streams, _, _ = socket.recv_fds(requests, 4, 3)
        if not length:
            os._exit(0)
        message = b""
        while len(message) < int.from_bytes(length, "big"):
            message += requests.recv(1 << 20)
        told, tell = os.pipe()
        held, hold = os.pipe()
        between = os.fork()
        if between == 0:
            if os.fork():
                os._exit(0)
            os.dup2(tell, _KEPT)
            os.dup2(held, _HELD)
            words = _be_started(json.loads(message), streams)
            # Only now: who looks for it in /proc finds its own environment.
            os.write(_KEPT, os.getpid().to_bytes(4, "big"))
            os.close(_KEPT)
            os.read(_HELD, 1)  # returns once the server has closed the other end: a run looks at who its parent is
            os.close(_HELD)
            _run(words)
        os.waitpid(between, 0)  # after which the child is the test's
        os.close(hold)
        os.close(tell)
        requests.sendall(os.read(told, 4))
        for descriptor in (told, held, *streams):
            os.close(descriptor)


def _load_everything() -> None:
    import torch  # noqa: F401  # so that each child has it

    import paceline

    for package in ("paceline", "paceline_recsys", "paceline_text", "paceline_vision"):
        for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
            if not module.name.endswith("__main__") and ".notebooks" not in module.name:
                with contextlib.suppress(ImportError):  # of a library that is not installed
                    importlib.import_module(module.name)
    paceline.records.environment.package_versions()  # which it remembers
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot be forked"
    gc.collect()
    gc.freeze()


# -------------------------------------------------------------------------------------- in what was forked

_python_path: list[str] = []


def _be_started(command: dict[str, Any], streams: list[int]) -> list[str]:
    """Take on the streams, directory, environment and session of a command; returns its words."""
    kept = [os.dup(each) for each in streams]  # none of which is a number that is taken below
    for number, descriptor in enumerate(kept):
        os.dup2(descriptor, number)
    os.closerange(3, _KEPT)
    if command["new_session"]:
        os.setsid()
    os.chdir(command["directory"])
    words, environment = command["words"], command["environment"]
    os.environ.clear()
    os.environ.update(environment)
    sys.orig_argv = [sys.executable, *words]
    _show("arg", sys.orig_argv)
    _show("env", [f"{name}={value}" for name, value in environment.items()])
    places = [place for place in environment.get("PYTHONPATH", "").split(os.pathsep) if place]
    sys.path[:] = places + [place for place in sys.path if place not in ("", *_python_path)]
    _python_path[:] = places
    tempfile.tempdir = None  # the server's
    sys.stdout.reconfigure(line_buffering=os.isatty(1))
    if environment.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    filters, words = _after_options(words)
    sys.warnoptions[:] = filters
    for action in filters:
        warnings.simplefilter(action)  # type: ignore[arg-type]  # Python checks the word
    return words


def _show(kind: str, words: list[str]) -> None:
    """Show words as this process's arguments or environment in /proc: the kernel reads them where they were."""
    # Fields 48 to 51 of proc(5) are the addresses of arg_start, arg_end, env_start and env_end.
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    first, last = (int(fields[number - 3]) for number in ((48, 49) if kind == "arg" else (50, 51)))
    block = os.fsencode("\0".join(words) + "\0")[: last - first - 1]
    ctypes.memset(first, 0, last - first)
    ctypes.memmove(first, block, len(block))


def _run(words: list[str]) -> NoReturn:
    """Run ``-m module …`` or ``-c program …`` as the main program, and end this process as an interpreter does.

    Only what remains in memory is not cleared object by object, which would take half a second for all of torch.
    """
    subprocess.Popen = Popen  # type: ignore[misc]  # for the ranks that it starts
    sys.modules["fork_server"] = sys.modules["__main__"]
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.argv = [words[0], *words[1 if words[0].endswith(".py") else 2 :]]
    code: Any = 0
    try:
        if words[0] == "-m":
            runpy._run_module_as_main(words[1])
        elif words[0] != "-c":
            sys.path.insert(0, str(Path(words[0]).parent))
            runpy.run_path(words[0], run_name="__main__")
        else:
            sys.path.insert(0, "")
            exec(compile(words[1], "<string>", "exec"), main.__dict__)
    except SystemExit as ended:
        code = ended.code or 0
        if not isinstance(code, int):
            code = print(code, file=sys.stderr) or 1
    except BaseException as error:  # noqa: BLE001  # the interpreter's last
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
        sys.last_value = error
        sys.excepthook(type(error), error, error.__traceback__)
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            code = code or 120
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)


def _fork_here(command: dict[str, Any], streams: list[int]) -> int:
    """Fork a rank from its launcher: a child of it like any other, which has read what the launcher has read."""
    if child := os.fork():
        return child
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    weakref.finalize._registry.clear()  # temporary folders are the launcher's to remove
    _run(_be_started(command, streams))


if __name__ == "__main__":
    _python_path[:] = [os.environ["PYTHONPATH"]]
    _load_everything()
    _serve(socket.socket(fileno=int(sys.argv[1])))
