"""Requests that a page of another site had a browser send.

Every page that the user's browser shows can reach what listens on the user's machine. Two headers, which such a page
cannot choose, give it away: Host names the site whose name was made to point to this machine (DNS rebinding), and
Origin the site that the page came from.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers

_SHOWN = 80


class SiteCheck:
    """Tells requests of programs and of the service's own page from those of other sites' pages.

    Args:
        names: Host names of the service, in addition to addresses in numbers; None if any is accepted.
        pages: Further sites whose pages may send requests.
    """

    def __init__(self, names: Iterable[str] | None, pages: Iterable[str] = ()) -> None:
        self._names = None if names is None else frozenset(map(str.lower, names))
        self._pages = frozenset(map(str.lower, pages))

    def problem(self, headers: Headers) -> str:
        """Return why a request is refused; empty if it is accepted."""
        host, origin = headers.get("host", ""), headers.get("origin")
        name = _name(host)
        if not self._is_known(name):
            return (
                f"this service is not called {name[:_SHOWN]}; ask for it by its address, or start it with --allow-host"
            )
        if origin is not None and origin.partition("//")[2] != (host or None) and _name(origin) not in self._pages:
            return (
                f"a page of {origin[:_SHOWN]} sent this request, and only this service's own page may; if that page "
                "is meant to, start the service with --allow-host"
            )
        return ""

    def _is_known(self, name: str) -> bool:
        if self._names is None or not name or name in self._names:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def _name(place: str) -> str:
    """Return the host of a ``host:port`` or a page's address, in small letters; empty if there is none."""
    try:
        found = urlsplit(place if "//" in place else f"//{place}").hostname
    except ValueError:
        return place
    return (found or "").rstrip(".")
