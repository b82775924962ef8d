"""Copies of what lies at an address: whole, up to date, evicted in order, and never while somebody reads them."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import StorageError
from paceline.storage.cache import Cache, local_copy
from paceline.storage.remote import Remote, Retries


def quiet(_: str) -> None:
    """Say nothing."""


def names(cache: Cache) -> set[str]:
    return {path.name for path in cache.copies.iterdir()}


def test_a_folder_is_copied_once_and_anew_when_it_has_changed(s3: Any, put: Any, tmp_path: Path) -> None:
    put("photos/train/cat/1.bin", b"one")
    put("photos/train/cat/sub/2.bin", b"two")
    cache, lines = Cache(tmp_path / "cache"), list[str]()
    copy = local_copy("s3://bucket/photos", cache=cache, log=lines.append)
    assert copy.name == "photos"
    assert (copy / "train/cat/1.bin").read_bytes() == b"one"
    assert (copy / "train/cat/sub/2.bin").read_bytes() == b"two"
    assert "2 files" in lines[0]
    before = len(s3.log)
    assert local_copy("s3://bucket/photos", cache=cache, log=lines.append) == copy
    assert not any("/1.bin" in path for _, path in s3.log[before:])
    put("photos/train/cat/1.bin", b"uno")  # of the same length
    again = local_copy("s3://bucket/photos", cache=cache, log=quiet)
    assert again != copy
    assert (again / "train/cat/1.bin").read_bytes() == b"uno"


def test_a_single_file_keeps_its_name(s3: Any, put: Any, tmp_path: Path) -> None:
    put("sets/a.tar", b"x" * 1000)
    copy = local_copy("s3://bucket/sets/a.tar", cache=Cache(tmp_path), log=quiet)
    assert (copy.name, copy.read_bytes()) == ("a.tar", b"x" * 1000)


def test_over_http_a_single_file_is_read_and_a_folder_refused(moto_port: int, put: Any, tmp_path: Path) -> None:
    put("open/a.bin", b"content")
    address = f"http://127.0.0.1:{moto_port}/bucket/open/a.bin"
    assert local_copy(address, cache=Cache(tmp_path), log=quiet).read_bytes() == b"content"


class Failing(SimpleHTTPRequestHandler):
    """Serves the files of a folder, without tags; the first requests fail."""

    left = 2

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        """Fail a few times; fsspec asks by GET too."""
        self.send_error(501)

    def do_GET(self) -> None:
        """Fail a few times."""
        Failing.left -= 1
        if Failing.left >= 0:
            self.send_error(503)
        else:
            super().do_GET()


@pytest.mark.needs("aiohttp")
def test_a_web_server_that_fails_is_asked_again_and_a_changed_file_is_fetched_again(tmp_path: Path) -> None:
    (tmp_path / "www").mkdir()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Failing, directory=str(tmp_path / "www"))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address, file = f"http://127.0.0.1:{server.server_port}/a.csv", tmp_path / "www" / "a.csv"
        for number, content in enumerate((b"cat", b"dog")):
            file.write_bytes(content)
            os.utime(file, (number, number))
            assert local_copy(address, cache=Cache(tmp_path), log=quiet).read_bytes() == content
        file.unlink()
        with pytest.raises(StorageError, match="there is nothing at"):
            local_copy(address, cache=Cache(tmp_path), log=quiet)
        server.shutdown()


@pytest.mark.needs("aiohttp")
def test_a_web_server_that_never_answers_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.storage.remote._MIN_READ_TIMEOUT", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server:  # the system accepts the connections
        remote = Remote(f"http://127.0.0.1:{server.getsockname()[1]}/x", Retries(patience_seconds=0.1))
        for call in (remote.stat_file, partial(remote.read, "a"), partial(remote.download, "a", tmp_path / "a")):
            with pytest.raises(StorageError, match="the server sent nothing in time"):
                call()


def test_a_disk_without_locks_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a").write_bytes(b"a")

    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", none)
    with pytest.raises(StorageError, match="file system without locks"):
        local_copy(f"file://{tmp_path}/data", cache=Cache(tmp_path / "cache"), log=quiet)


def test_a_disk_keeps_no_empty_folders_of_what_was_deleted(tmp_path: Path) -> None:
    remote = Remote(f"file://{tmp_path}/copy")
    for name in ("a/b/1", "a/b/2", "a/c/3"):
        remote.write(name, b"x")
    remote.delete(["a/b/1", "a/b/2", "gone/4"])
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == [
        "copy",
        "copy/a",
        "copy/a/c",
        "copy/a/c/3",
    ]


def test_what_is_not_there_is_refused(s3: Any, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="there is nothing at s3://bucket/nowhere"):
        local_copy("s3://bucket/nowhere", cache=Cache(tmp_path), log=quiet)


def test_a_download_that_breaks_off_is_never_taken_for_whole(s3: Any, put: Any, tmp_path: Path) -> None:
    for number in range(4):
        put(f"broken/{number}.bin", bytes([number]) * 200_000)
    cache = Cache(tmp_path)
    s3.share, s3.only = 1.0, "GET /bucket/broken/2.bin"
    with pytest.raises(StorageError, match=r"cannot read s3://bucket/broken/2\.bin"):
        cache.copy_of(Remote("s3://bucket/broken", Retries(patience_seconds=0.5)), quiet)
    assert all(name.startswith(".part-") for name in names(cache))
    s3.share, before = 0.0, len(s3.log)
    copy = cache.copy_of(Remote("s3://bucket/broken"), quiet)
    assert [(copy / f"{n}.bin").read_bytes() for n in range(4)] == [bytes([n]) * 200_000 for n in range(4)]
    # What had come before is not fetched again.
    assert not any("/0.bin" in path for _, path in s3.log[before:])


def test_requests_that_fail_now_and_then_are_tried_again_and_told(s3: Any, put: Any, tmp_path: Path) -> None:
    for number in range(30):
        put(f"shaky/{number}.bin", bytes([number]) * 50_000)
    s3.share, lines = 0.3, list[str]()
    copy = Cache(tmp_path).copy_of(Remote("s3://bucket/shaky", Retries(log=lines.append)), quiet)
    assert all((copy / f"{n}.bin").read_bytes() == bytes([n]) * 50_000 for n in range(30))
    assert s3.failed > 5


def test_the_copy_unused_for_longest_goes_first(s3: Any, put: Any, tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path\n"
        "from paceline.storage.cache import Cache; from paceline.storage.cache import local_copy\n"
        f"cache = Cache(Path({str(tmp_path)!r}), 2500)\n"
        "for each in sys.argv[1:]: local_copy('s3://bucket/' + each, cache=cache, log=lambda _: None)\n"
    )
    for name in "abc":
        put(f"{name}/x.bin", name.encode() * 1000)
    cache = Cache(tmp_path, 2500)
    subprocess.run([sys.executable, "-c", program, "a", "b"], check=True)  # lets go of them when it ends
    os.utime(next(copy for copy in cache.copies.iterdir() if (copy / "a").exists()))
    subprocess.run([sys.executable, "-c", program, "c"], check=True)
    kept = {path.name for copy in cache.copies.iterdir() for path in copy.iterdir() if path.is_dir()}
    assert kept == {"a", "c"}


def test_a_copy_that_is_read_is_not_evicted(s3: Any, put: Any, tmp_path: Path) -> None:
    put("held/x.bin", b"h" * 1000)
    put("new/x.bin", b"n" * 1000)
    cache = Cache(tmp_path, 1500)
    copy = local_copy("s3://bucket/held", cache=cache, log=quiet)
    with pytest.raises(StorageError, match="PACELINE_CACHE_GB"):
        local_copy("s3://bucket/new", cache=cache, log=quiet)
    assert (copy / "x.bin").exists()


def test_two_that_make_room_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache", 3000)
    for number in range(200):
        (cache.copies / f"old-{number}" / "deep").mkdir(parents=True)
        (cache.copies / f"old-{number}" / "deep" / "x").write_bytes(bytes(1000))
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").write_bytes(bytes(1000))
    with ThreadPoolExecutor(2) as pool:
        copies = list(pool.map(lambda name: cache.copy_of(Remote(f"file://{tmp_path}/{name}"), quiet), "ab"))
    assert [(copy / "x").stat().st_size for copy in copies] == [1000, 1000]
    assert cache._evict(cache.copies / "gone")


def test_several_processes_copy_once(s3: Any, put: Any, tmp_path: Path) -> None:
    for number in range(5):
        put(f"shared/{number}.bin", bytes([number]) * 10_000)
    program = "from paceline.storage.cache import local_copy; print(local_copy('s3://bucket/shared'))"
    started = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        for _ in range(3)
    ]
    lines = {process.communicate(timeout=120)[0] for process in started}
    assert len(lines) == 1
    assert len(list(Path(lines.pop().strip()).iterdir())) == 5
    assert sum(method == "GET" and path.startswith("/bucket/shared/3.bin") for method, path in s3.log) == 1


def test_the_environment_says_where_and_how_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: 1 / 0)  # of a container's user without a home
    found = Cache.from_environment({"PACELINE_CACHE": str(tmp_path), "PACELINE_CACHE_GB": "1.5"})
    assert (found.root, found.limit_bytes) == (tmp_path, 1_500_000_000)
    assert Cache.from_environment({"XDG_CACHE_HOME": "/x"}).root == Path("/x/paceline/storage")
    with pytest.raises(StorageError, match="PACELINE_CACHE_GB=lots"):
        Cache.from_environment({"PACELINE_CACHE": "/x", "PACELINE_CACHE_GB": "lots"})


def test_a_file_that_was_cut_short_here_is_fetched_again(s3: Any, put: Any, tmp_path: Path) -> None:
    put("cut/x.bin", b"whole" * 100)
    cache = Cache(tmp_path)
    copy = local_copy("s3://bucket/cut", cache=cache, log=quiet)
    os.truncate(copy / "x.bin", 7)
    assert (local_copy("s3://bucket/cut", cache=cache, log=quiet) / "x.bin").read_bytes() == b"whole" * 100
