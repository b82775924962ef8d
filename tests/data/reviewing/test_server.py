"""The page answers its own address alone, shows names as text, and records decisions about what was seen."""

from __future__ import annotations

import http.client
import io
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from PIL import Image

from paceline_data.reviewing.apply import Applied
from paceline_data.reviewing.find import Doubt, Found
from paceline_data.reviewing.plan import Decision, ReviewPlan
from paceline_data.reviewing.server import ReviewServer

HOSTILE = "<script>alert(1)</script>\u202egpj.jpg"
SECRET = b"SECRET-OF-THE-CAMERA"


def picture(seed: int) -> bytes:
    content = io.BytesIO()
    exif = Image.Exif()
    exif[0x010F] = SECRET.decode()
    pixels = np.random.default_rng(seed).integers(0, 256, (40, 2000, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(content, "JPEG", exif=exif)
    return content.getvalue()


class Client:
    """Sends requests to the page's service."""

    def __init__(self, server: ReviewServer) -> None:
        url = urlsplit(server.url)
        self.host, self.token = url.netloc, url.path
        self.port = url.port
        self.headers: Any = {}

    def ask(self, place: str, body: Any = None, *, path: str | None = None, **headers: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        content = None if body is None else body if isinstance(body, bytes) else json.dumps(body)
        connection.request("GET" if body is None else "POST", path or self.token + place, body=content, headers=headers)
        response = connection.getresponse()
        self.headers = response.headers
        answer = response.status, response.read()
        connection.close()
        return answer

    def decide(self, file: int, action: str, **fields: Any) -> tuple[int, dict[str, Any]]:
        if "digest" not in fields:
            _, content = self.ask(f"pictures/{file}")
            fields["digest"] = self.headers["X-Digest"] or json.loads(content)["digest"]
        asked = {"file": file, "action": action, "to": None, "before": None, "since": 0} | fields
        status, told = self.ask("decide", asked)
        return status, json.loads(told)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for number, name in enumerate(("cat/1.jpg", f"cat/{HOSTILE}", "dog/2.jpg")):
        (tmp_path / "photos" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "photos" / name).write_bytes(picture(number))
    (tmp_path / "photos/cat/broken.jpg").write_bytes(b"no image")
    return tmp_path / "photos"


@pytest.fixture
def server(photos: Path) -> Iterator[ReviewServer]:
    doubts = (
        Doubt("contradiction", "cat/1.jpg", f"of {HOSTILE}", other="dog/2.jpg"),
        Doubt("flat end", f"cat/{HOSTILE}", "", suggested="dog"),
        Doubt("flat end", "cat/broken.jpg", ""),
    )

    def on_applied(applied: Applied) -> list[str]:
        return [f"moved {len(applied.moved)}"]

    plan = ReviewPlan(photos.parent / "photos-review" / "plan.jsonl")
    with ReviewServer(Found(photos, doubts, ()), plan, 0, on_applied) as served:
        thread = threading.Thread(target=served.serve_forever, args=(0.01,))
        thread.start()
        yield served
        served.shutdown()
        thread.join()


@pytest.fixture
def client(server: ReviewServer) -> Client:
    return Client(server)


def test_only_its_own_address_answers(client: Client) -> None:
    status, page = client.ask("")
    assert status == 200
    policy = client.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert client.headers["Referrer-Policy"] == "no-referrer"
    assert b"<script>alert" not in page
    for host in (f"localhost:{client.port}", "127.0.0.1"):  # without its number if it is 80
        assert client.ask("doubts", Host=host)[0] == 200
    for path in ("/", "/doubts", "/wrong/doubts", "/wrong/pictures/0", client.token[:-2] + "/doubts"):
        assert client.ask("", path=path)[0] == 404, path
    for host in ("evil.example", f"evil.example:{client.port}", "127.0.0.1.evil.example:80", ""):
        assert client.ask("doubts", Host=host)[0] == 403, host
    for origin in ("http://evil.example", "null", f"http://localhost:{client.port}"):
        assert client.ask("decide", {}, Origin=origin)[0] == 403, origin


def test_names_are_text_and_pictures_are_made_anew(client: Client, photos: Path) -> None:
    status, told = client.ask("doubts")
    assert status == 200
    assert client.headers["Content-Type"] == "application/json"
    found = json.loads(told)
    assert "\\u202e" in found["files"][2]
    assert not any("\u202e" in each for each in (*found["files"], *(one["why"] for one in found["doubts"])))
    assert SECRET in (photos / "cat/1.jpg").read_bytes()
    status, thumbnail = client.ask("pictures/0")
    assert status == 200
    assert client.headers["X-Content-Type-Options"] == "nosniff"
    assert SECRET not in thumbnail
    assert max(Image.open(io.BytesIO(thumbnail)).size) == 720
    assert client.ask("pictures/3")[0] == 415
    for number in ("9", "-1", "..", "0/../1", "%2e%2e", "x"):
        assert client.ask(f"pictures/{number}")[0] in (400, 404), number


def test_a_picture_that_would_fill_the_memory_is_not_decoded(client: Client, photos: Path) -> None:
    Image.new("1", (12_000, 7_000)).save(photos / "cat/1.jpg", "PNG")
    status, told = client.ask("pictures/0")
    assert (status, json.loads(told)["error"]) == (415, "12000x7000 pixels are too many to show")


def test_a_decision_is_in_the_plan_at_once(client: Client, server: ReviewServer) -> None:
    status, told = client.decide(1, "move", to=0)
    assert status == 200
    assert told["decisions"] == {"1": {"action": "move", "to": 0}}
    plan = ReviewPlan(server.plan.path)
    plan.refresh()
    assert plan.decisions["dog/2.jpg"].to == "cat"
    status, told = client.decide(1, "keep")  # by a page that does not know of it
    assert status == 409
    assert "Another reviewer" in told["error"]
    assert client.decide(1, "keep", before={"action": "move", "to": 0})[0] == 200


def test_what_cannot_be_shown_can_be_set_aside(client: Client, server: ReviewServer) -> None:
    assert client.ask("pictures/3")[0] == 415
    assert client.decide(3, "aside")[0] == 200
    server.plan.refresh()
    assert server.plan.decisions["cat/broken.jpg"].action == "aside"


def test_a_new_class_is_shown_to_all(client: Client, server: ReviewServer, photos: Path) -> None:
    status, told = client.decide(0, "move", to="new [b]cat")
    assert (status, told["new_classes"]) == (200, ["new [b]cat"])
    assert told["decisions"]["0"] == {"action": "move", "to": 2}
    assert client.decide(1, "move", to=2)[0] == 200
    assert {each.new for each in server.plan.decisions.values()} == {True}
    assert client.decide(2, "move", to="../x")[0] == 409
    assert client.decide(2, "move", to="dog")[0] == 200
    assert json.loads(client.ask("apply", {"version": 3})[1])["applied"] == ["moved 3"]
    assert len(list((photos / "new [b]cat").iterdir())) == 2


def test_decisions_of_others_are_counted_and_those_outside_not_shown(
    client: Client, server: ReviewServer, photos: Path, tmp_path: Path
) -> None:
    outside = tmp_path / "outside.jpg"
    outside.write_bytes(picture(7))
    (photos / "cat/late.jpg").write_bytes(picture(8))
    (photos / "cat/link.jpg").symlink_to(outside)
    assert json.loads(client.ask("doubts")[1])["not_shown"] == 0
    other = ReviewPlan(server.plan.path)
    for name in ("cat/late.jpg", "../outside.jpg", str(outside), "cat/link.jpg"):
        other.record(Decision(name, "aside", "0"), None)
    told = json.loads(client.ask("news?since=0")[1])
    assert (told["counts"]["aside"], told["not_shown"]) == (4, 4)
    found = json.loads(client.ask("doubts")[1])  # as a page that is loaded again
    assert found["files"][4:] == ["cat/late.jpg"]
    assert found["notes"][-1].startswith("the plan cannot be applied: 3 decisions")
    assert client.ask("pictures/4")[0] == 200
    assert client.ask("pictures/5")[0] == 400
    status, told = client.ask("apply", {"version": 4})
    assert (status, b"nothing was moved" in told) == (409, True)


def test_what_was_not_seen_is_not_decided(client: Client, photos: Path, server: ReviewServer) -> None:
    client.ask("pictures/0")
    digest = client.headers["X-Digest"]
    (photos / "cat/1.jpg").write_bytes(picture(9))
    assert "changed since it was shown" in client.decide(0, "aside", digest=digest)[1]["error"]
    (photos / "cat/1.jpg").unlink()
    os.mkfifo(photos / "cat/1.jpg")
    assert client.ask("pictures/0")[0] == 409
    assert not server.plan.path.exists()


@pytest.mark.parametrize(
    "body",
    [
        b"words",
        b"[]",
        {},
        {"file": 1},
        {"file": 0, "action": "delete", "to": None, "digest": "", "before": None, "since": 0},
        {"file": 0, "action": "keep", "to": 1, "digest": "", "before": None, "since": 0},
        {"file": 0, "action": "move", "to": None, "digest": "", "before": None, "since": 0},
        {"file": 0, "action": "move", "to": 99, "digest": "", "before": None, "since": 0},
        {"file": 99, "action": "keep", "to": None, "digest": "", "before": None, "since": 0},
        b"1" * 70_000,
    ],
)
def test_malformed_requests_change_nothing(body: Any, client: Client, server: ReviewServer) -> None:
    if isinstance(body, dict) and "digest" in body:
        client.ask("pictures/0")
        body = body | {"digest": client.headers["X-Digest"]}
    assert client.ask("decide", body)[0] in (400, 413)
    assert not server.plan.path.exists()


def test_a_plan_is_applied_as_it_was_shown(client: Client, server: ReviewServer, photos: Path) -> None:
    client.decide(0, "aside")
    status, told = client.ask("apply", {"version": 0})
    assert status == 409
    assert b"changed by another reviewer" in told
    status, told = client.ask("apply", {"version": 1})
    assert status == 200
    assert json.loads(told)["applied"] == ["moved 1"]
    assert not (photos / "cat/1.jpg").exists()
    assert client.decide(1, "keep")[0] == 409
