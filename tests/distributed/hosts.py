#!/usr/bin/env python3
"""Hosts on this one machine, each with a network, an address and a name of its own, for as long as a command runs.

    tests/distributed/hosts.py bash         # in a shell there: hosts.py's names and commands are printed first

A host is a network namespace with one interface, ``e0``, on a bridge that all of them share. Its programs see a host
name and an ``/etc/hosts`` of their own, in which all names are found. Processes, files, memory and the clock are those
of the machine. Nothing of the machine's own network is touched: the bridge lies in a namespace too.

It takes Linux, root and the programs ``ip`` (iproute2), ``nsenter`` and ``unshare`` (util-linux).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = ("ip", "nsenter", "unshare")
_SWITCH = "switch"
# Of documentation's own range (RFC 5737): no real host has it.
_ADDRESS = "192.0.2.{number}"
_INSIDE = 'mount --bind "$1" /etc/hosts && hostname "$2" && shift 2 && exec "$@"'


@dataclass(frozen=True)
class Host:
    """One of them.

    Attributes:
        name: Under which the others find it.
        address: What its name leads to.
        before: Words before a command that is to run there; the command takes their process's place.
    """

    name: str
    address: str
    before: tuple[str, ...]


class Network:
    """Hosts on one bridge.

    Args:
        names: Of the hosts.
        directory: For the list of names.
    """

    def __init__(self, names: Sequence[str], directory: Path) -> None:
        self._mark = f"paceline-{os.getpid()}-{secrets.token_hex(3)}"
        self._made: list[str] = []
        self._list = directory / "hosts"
        addresses = {name: _ADDRESS.format(number=number) for number, name in enumerate(names, start=1)}
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in addresses.items())]
        self._list.write_text("\n".join(lines) + "\n")
        self.hosts = {name: Host(name, address, self._before(name)) for name, address in addresses.items()}

    def __enter__(self) -> Network:
        try:
            self._make(_SWITCH)
            self._in(_SWITCH, "link", "add", "bridge", "type", "bridge")
            self._in(_SWITCH, "link", "set", "bridge", "up")
            for host in self.hosts.values():
                self._connect(host)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Remove all of it; interfaces go with their namespace, once no process is left in it."""
        for name in reversed(self._made):
            _ip("netns", "delete", name)
        self._made.clear()

    def cut(self, host: Host) -> None:
        """Take a host off the network. It keeps its address, and is told nothing: packets do not arrive."""
        self._in(_SWITCH, "link", "set", f"to-{host.name}", "down")

    def join(self, host: Host) -> None:
        """Bring it back."""
        self._in(_SWITCH, "link", "set", f"to-{host.name}", "up")

    def _before(self, name: str) -> tuple[str, ...]:
        enter = ("nsenter", f"--net=/run/netns/{self._mark}-{name}", "unshare", "--uts", "--mount")
        return (*enter, "sh", "-c", _INSIDE, "sh", str(self._list), name)

    def _connect(self, host: Host) -> None:
        self._make(host.name)
        there = f"{self._mark}-{host.name}"
        end = ("name", f"to-{host.name}")
        self._in(_SWITCH, "link", "add", *end, "type", "veth", "peer", "name", "e0", "netns", there)
        self._in(_SWITCH, "link", "set", f"to-{host.name}", "master", "bridge", "up")
        self._in(host.name, "link", "set", "lo", "up")
        self._in(host.name, "address", "add", f"{host.address}/24", "dev", "e0")
        self._in(host.name, "link", "set", "e0", "up")

    def _make(self, name: str) -> None:
        _ip("netns", "add", f"{self._mark}-{name}")
        self._made.append(f"{self._mark}-{name}")

    def _in(self, name: str, *words: str) -> None:
        _ip("-netns", f"{self._mark}-{name}", *words)


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False, timeout=30)
    if done.returncode:
        raise OSError(f"ip {shlex.join(words)}: {done.stderr.strip()}")


@contextlib.contextmanager
def network(*names: str) -> Iterator[Network]:
    """Hosts of these names.

    Raises:
        OSError: If this machine or this user cannot make them.
    """
    folder = tempfile.TemporaryDirectory(prefix="paceline-hosts-")
    with folder as directory, Network(names, Path(directory)) as made:
        yield made


def answers(host: Host, port: int) -> bool:
    """Whether somebody on a host takes connections."""
    seek = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 5).close()"
    command = [*host.before, sys.executable, "-c", seek, host.name, str(port)]
    return subprocess.run(command, capture_output=True, check=False, timeout=30).returncode == 0


def why_not() -> str | None:
    """What keeps hosts from being made here; None if nothing does."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        return f"no program {missing[0]}"
    try:
        with network("one", "two") as made:
            one, two = made.hosts.values()
            # The name is found in the list, so that both the network and the list are tried.
            seek = "import socket, sys; socket.create_server((sys.argv[1], 0)).close()"
            for host in (one, two):
                command = [*host.before, sys.executable, "-c", seek, host.name]
                done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
                if done.returncode:
                    return (done.stderr.strip().splitlines() or ["a program there failed"])[-1]
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return None


def main() -> int:
    """Run a command beside three hosts, and say how to start programs on them."""
    with network("host1", "host2", "store") as made:
        for host in made.hosts.values():
            print(f"{host.name} ({host.address}): {shlex.join(host.before)} COMMAND")
        return subprocess.run(sys.argv[1:] or ["bash"], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
