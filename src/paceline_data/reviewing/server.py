"""The review page over HTTP, for this machine only.

The address holds a random token, Host and Origin are checked, and the page may run its own script alone. File and class
names reach the page as JSON and are shown as text. Requests name files by number, so no path comes from outside.
"""

from __future__ import annotations

import hmac
import json
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from html import escape
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any, get_args
from urllib.parse import parse_qs, urlsplit

from paceline.data.image.decode import BrokenImageError
from paceline.errors import PacelineError
from paceline.pages.page import script_digest
from paceline.parsing.plain_text import load_json, one_line
from paceline.parsing.units import counted
from paceline_data.reviewing.apply import Applied, apply_plan, check_class_name, class_names, is_inside
from paceline_data.reviewing.find import EARLIER, Doubt, Found
from paceline_data.reviewing.plan import Action, ChangedError, Decision, ReviewPlan, content_digest
from paceline_data.reviewing.thumbnails import Thumbnails

_HOST = "127.0.0.1"
_NAMES = ("127.0.0.1", "localhost")  # also of the near end of an SSH tunnel
_SECONDS = 15  # for one request to arrive
_CONNECTIONS = 64
_BODY_BYTES = 65_536


class ReviewServer(ThreadingHTTPServer):
    """Serves one review.

    Attributes:
        url: The page's address, with its token.
        plan: The decisions.
        busy: Held while a plan is applied.
    """

    daemon_threads = True

    def __init__(self, found: Found, plan: ReviewPlan, port: int, on_applied: Callable[[Applied], list[str]]) -> None:
        """Listen on this machine.

        Args:
            found: What is to be reviewed.
            plan: The decisions.
            port: 0 for any free port.
            on_applied: Called after the plan was applied; returns what the page says then.

        Raises:
            PacelineError: If the port is not free, or the plan cannot be read.
        """
        plan.refresh()
        self.plan = plan
        self.busy = threading.Lock()
        self._found = found
        self._on_applied = on_applied
        self._said: list[str] = []
        self._thumbnails = Thumbnails()
        self._there = class_names(found.root)
        # Numbers stay valid on pages that are open: files, doubts and new classes are only added.
        self._classes = [*self._there]
        self._files: list[str] = []
        self._numbers: dict[str, int] = {}
        self._doubts: list[Doubt] = []
        for each in found.doubts:
            self._add(each)
        self._token = secrets.token_urlsafe(24)
        try:
            super().__init__((_HOST, port), _Handler)
        except OSError as error:
            reason = error.strerror or error
            raise PacelineError(f"--port={port}: cannot listen: {reason}; give a free port (0: any).") from error
        self.url = f"http://{_HOST}:{self.server_address[1]}/{self._token}/"

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Whether there are few enough connections."""
        return threading.active_count() < _CONNECTIONS

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a client that is gone."""

    @cached_property
    def page(self) -> tuple[bytes, str]:
        """The page, and what it is allowed to do."""
        parts = {name: files("paceline_data.reviewing").joinpath(f"page.{name}").read_text("utf-8") for name in _PARTS}
        style, script = (script_digest(parts[name].encode()) for name in ("css", "js"))
        title = escape(one_line(self._found.root.resolve().name))
        text = Template(parts["html"]).substitute(title=title, style=parts["css"], script=parts["js"])
        policy = (
            f"default-src 'none'; script-src 'sha256-{script}'; style-src 'sha256-{style}'; img-src blob: data:; "
            "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        return text.encode("utf-8", "replace"), policy

    def is_ours(self, token: str) -> bool:
        """Whether a token is that of this review."""
        return hmac.compare_digest(token.encode(), self._token.encode())

    def _add(self, doubt: Doubt) -> None:
        self._doubts.append(doubt)
        for name in filter(None, (doubt.file, doubt.other)):
            if name not in self._numbers:
                self._numbers[name] = len(self._files)
                self._files.append(name)

    def _read_plan(self) -> Iterator[str]:
        """Show what is decided about other files too; return a note about what lies outside the data."""
        self.plan.refresh()
        others = [name for name in self.plan.decisions if name not in self._numbers]
        inside = [name for name in others if is_inside(self._found.root, name)]
        for name in inside:
            self._add(Doubt(EARLIER, name, "it is in the plan"))
        if outside := len(others) - len(inside):
            yield f"the plan cannot be applied: {counted(outside, 'decision')} in it name no file in the data"

    def doubts(self) -> dict[str, Any]:
        """Return everything to review, with the names that are shown."""
        with self.plan.mutex:
            return self._shown_doubts([*self._found.notes, *self._read_plan()])

    def _shown_doubts(self, notes: Sequence[str]) -> dict[str, Any]:
        classes = {name: number for number, name in enumerate(self._classes)}
        kinds = list(dict.fromkeys(each.kind for each in self._doubts))
        return {
            "classes": list(map(one_line, self._there)),
            "notes": list(map(one_line, notes)),
            "kinds": kinds,
            "files": [one_line(name) for name in self._files],
            "class_of": [classes.get(Path(name).parent.name) for name in self._files],
            "doubts": [
                {
                    "kind": kinds.index(each.kind),
                    "files": [self._numbers[name] for name in (each.file, each.other) if name is not None],
                    "why": one_line(each.why),
                    "suggested": None if each.suggested is None else classes.get(each.suggested),
                    "aside": each.aside,
                }
                for each in self._doubts
            ],
            **self.news(0),
        }

    def news(self, since: int) -> dict[str, Any]:
        """Return the decisions that have changed since a version of the plan, by file, and its version."""
        with self.plan.mutex:
            changed, decisions = self.plan.changed[since:], self.plan.decisions
            new = (each.to for each in decisions.values() if each.new)
            self._classes += [name for name in dict.fromkeys(new) if name is not None and name not in self._classes]
            return {
                "version": since + len(changed),
                "new_classes": list(map(one_line, self._classes[len(self._there) :])),
                "counts": {action: sum(each.action == action for each in decisions.values()) for action in _COUNTED},
                "not_shown": sum(name not in self._numbers for name in decisions),
                "decisions": {
                    self._numbers[name]: _shown(decisions.get(name), self._classes)
                    for name in changed
                    if name in self._numbers
                },
                "applied": self._said,
            }

    def picture(self, number: int) -> tuple[str, bytes]:
        """Return the digest and the thumbnail of a file."""
        return self._thumbnails.get(self._path(number))

    def digest(self, number: int) -> str:
        """Return the digest of a file that cannot be shown."""
        return content_digest(self._path(number))

    def decide(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Record a decision, as the page sends it.

        Raises:
            ChangedError: If the file, or the decision about it, is not what the page shows.
        """
        if self._said:
            raise ChangedError("The plan has been applied: start the review again.")
        number, digest = int(asked["file"]), str(asked["digest"])
        name = self._files[number]
        if content_digest(self._path(number)) != digest:
            raise ChangedError("The file has changed since it was shown: look at it again.")
        to = asked.get("to")
        to = self._classes[to] if isinstance(to, int) else None if to is None else check_class_name(to)
        if asked["action"] not in get_args(Action) or (to is not None) != (asked["action"] == "move"):
            raise ValueError(asked)
        decision = Decision(name, asked["action"], digest, to, new=to is not None and to not in self._there)
        before = self.plan.decisions.get(name)
        if _shown(before, self._classes) != asked["before"]:
            self.plan.refresh()
            raise ChangedError("Another reviewer has decided about this file: look at it again.")
        self.plan.record(decision, before)
        return self.news(int(asked["since"]))

    def apply(self, version: int) -> dict[str, Any]:
        """Apply the plan, if it is still the version that the page shows."""
        with self.busy:
            self._said = self._on_applied(apply_plan(self.plan, self._found.root, version=version))
        return self.news(version)

    def _path(self, number: int) -> Path:
        return self._found.root / self._files[number]


_PARTS = ("html", "css", "js")
_COUNTED = ("move", "aside", "keep")


def _shown(decision: Decision | None, classes: Sequence[str]) -> dict[str, Any] | None:
    if decision is None:
        return None
    to = classes.index(decision.to) if decision.to in classes else None
    return {"action": decision.action, "to": to}


class _Handler(BaseHTTPRequestHandler):
    """Answers one connection."""

    protocol_version = "HTTP/1.1"
    timeout = _SECONDS
    server: ReviewServer

    def do_GET(self) -> None:
        """Send the page, what is to be reviewed, news of the plan, or a picture."""
        self._answer(self._get)

    def do_POST(self) -> None:
        """Record a decision, or apply the plan."""
        self._answer(self._post)

    def version_string(self) -> str:
        """Return nothing about this program."""
        return ""

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # the base class's name
        """Log nothing."""

    def _answer(self, route: Callable[[str, str], None]) -> None:
        url = urlsplit(self.path)
        token, _, place = url.path.removeprefix("/").partition("/")
        try:
            if (self.headers.get("host") or "").partition(":")[0] not in _NAMES:
                raise _RefusedError(HTTPStatus.FORBIDDEN, "use the address that `paceline review` printed")
            origin = self.headers.get("origin")
            if origin is not None and origin != f"http://{self.headers['host']}":
                raise _RefusedError(HTTPStatus.FORBIDDEN, "only the review page may ask")
            if not self.server.is_ours(token):
                raise _RefusedError(HTTPStatus.NOT_FOUND, "use the address that `paceline review` printed")
            route(place, url.query)
        except _RefusedError as error:
            self.close_connection = True
            self._send_json({"error": str(error)}, error.status)
        except ChangedError as error:
            self._send_json({"error": str(error)}, HTTPStatus.CONFLICT)
        except PacelineError as error:
            self._send_json({"error": "\n".join(map(one_line, map(str, error.args)))}, HTTPStatus.CONFLICT)
        except (ValueError, LookupError, TypeError):
            self.close_connection = True
            self._send_json({"error": "the request is malformed"}, HTTPStatus.BAD_REQUEST)

    def _get(self, place: str, query: str) -> None:
        kind, _, number = place.partition("/")
        if place == "":
            body, policy = self.server.page
            self._send(body, "text/html; charset=utf-8", {"Content-Security-Policy": policy})
        elif place == "doubts":
            self._send_json(self.server.doubts())
        elif place == "news":
            self.server.plan.refresh()
            self._send_json(self.server.news(int(parse_qs(query)["since"][0])))
        elif kind == "pictures" and number.isdecimal():
            try:
                digest, picture = self.server.picture(int(number))
            except BrokenImageError as error:  # it can be set aside
                told = {"error": error.reason, "digest": self.server.digest(int(number))}
                self._send_json(told, HTTPStatus.UNSUPPORTED_MEDIA_TYPE)
            else:
                self._send(picture, "image/jpeg", {"X-Digest": digest})
        else:
            raise _RefusedError(HTTPStatus.NOT_FOUND, "there is no such page")

    def _post(self, place: str, _: str) -> None:
        size = self.headers.get("content-length", "")
        if not size.isdecimal() or int(size) > _BODY_BYTES:
            raise _RefusedError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"send at most {_BODY_BYTES:,} bytes")
        asked = load_json(self.rfile.read(int(size)))
        if place == "decide":
            self._send_json(self.server.decide(asked))
        elif place == "apply":
            self._send_json(self.server.apply(int(asked["version"])))
        else:
            raise _RefusedError(HTTPStatus.NOT_FOUND, "there is no such page")

    def _send_json(self, document: dict[str, Any], status: HTTPStatus = HTTPStatus.OK) -> None:
        self._send(json.dumps(document).encode(), "application/json", status=status)

    def _send(
        self, body: bytes, kind: str, headers: dict[str, str] | None = None, status: HTTPStatus = HTTPStatus.OK
    ) -> None:
        self.send_response(status)
        fixed = {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            "Cache-Control": "no-store",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }
        for name, value in (fixed | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


class _RefusedError(Exception):
    """A request that is refused."""

    def __init__(self, status: HTTPStatus, reason: str) -> None:
        super().__init__(reason)
        self.status = status
