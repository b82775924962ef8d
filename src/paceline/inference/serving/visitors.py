"""Is a request a program's or our own page's, or has a page of somebody else's had a browser send it?

What listens on a user's own machine is reached by every page that the user's browser shows. Two headers, which such a
page cannot choose, give it away: Host names the site whose name was made to point to this machine (DNS rebinding), and
Origin the site that the page came from.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.requests import Request

from paceline.inference.serving.limits import RefusedError

_SHOWN = 80


class Visitors:
    """Who is let in.

    Args:
        names: What the service may be called, beside addresses in numbers; None where nobody can tell.
        pages: Sites besides itself whose pages may send requests.
    """

    def __init__(self, names: Iterable[str] | None, pages: Iterable[str] = ()) -> None:
        self._names = None if names is None else frozenset(map(str.lower, names))
        self._pages = frozenset(map(str.lower, pages))

    async def check(self, request: Request) -> None:
        """Let a request in.

        Raises:
            RefusedError: If a page of somebody else's has sent it.
        """
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        name = _name(host)
        if not self._is_known(name):
            raise RefusedError(
                403,
                "host",
                f"this service is not called {name[:_SHOWN]}; ask for it by its address, or start it with --allow-host",
            )
        if origin is not None and origin.partition("//")[2] != (host or None) and _name(origin) not in self._pages:
            raise RefusedError(
                403,
                "origin",
                f"a page of {origin[:_SHOWN]} has sent this, and only this service's own page may; start it with "
                "--allow-host if that page is meant to",
            )

    def _is_known(self, name: str) -> bool:
        if self._names is None or not name or name in self._names:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def _name(place: str) -> str:
    """Of a ``host:port`` or an address of a page, the host, in small letters; empty if there is none."""
    try:
        found = urlsplit(place if "//" in place else f"//{place}").hostname
    except ValueError:
        return place
    return (found or "").rstrip(".")
