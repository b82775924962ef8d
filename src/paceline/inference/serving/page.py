"""The page at the service's address, which needs nothing from elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from html import escape
from importlib.resources import files
from string import Template

from paceline.inference.serving.service import Limits
from paceline.pages.page import script_digest


@dataclass(frozen=True)
class PageFacts:
    """What the page says of the service.

    Attributes:
        model: What is served.
        digest: SHA-256 of its weights.
        limits: Of a request.
        classes: How many there are.
    """

    model: str
    digest: str
    limits: Limits
    classes: int


def page(facts: PageFacts) -> str:
    """The page as HTML."""
    return Template(_part("page.html")).substitute(
        style=_part("page.css"),
        script=_part("page.js"),
        model=escape(facts.model),
        digest=escape(facts.digest),
        short=escape(facts.digest[:12]),
        classes=facts.classes,
        most=min(facts.classes, 10),
        images=facts.limits.images,
        bytes=facts.limits.request_bytes,
        megabytes=f"{facts.limits.request_bytes / 2**20:.0f}",
    )


def content_policy() -> str:
    """What the page may do: run its own script, show what is chosen, ask this service; nothing else."""
    style, script = (script_digest(_part(name).encode()) for name in ("page.css", "page.js"))
    return (
        f"default-src 'none'; script-src 'sha256-{script}'; style-src 'sha256-{style}'; img-src blob: data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


@cache
def _part(name: str) -> str:
    return files("paceline.inference.serving").joinpath(name).read_text(encoding="utf-8")
