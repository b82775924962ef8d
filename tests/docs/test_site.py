"""The pages as a site: built without a warning, complete, and loading nothing from elsewhere."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from calls import command_names

import paceline

pytestmark = [pytest.mark.needs("material", "mkdocstrings"), pytest.mark.thorough]

ROOT = Path(__file__).parents[2]
# What people type into the search, and the page that has the answer.
PHRASES = json.loads(Path(__file__).with_name("phrases.json").read_text(encoding="utf-8"))
# What a browser fetches by itself, by element and attribute; links that a reader may follow are not among them.
FETCHED = {"script": ("src",), "img": ("src",), "iframe": ("src",), "source": ("src",), "video": ("src",)}
FETCHED_LINKS = {"stylesheet", "icon", "preload", "preconnect", "modulepreload", "dns-prefetch", "manifest"}


class Addresses(HTMLParser):
    """What a page fetches, what it links to, and the places in it that can be linked to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.linked: list[str] = []
        self.places: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.places |= {given[name] for name in ("id", "name") if name in given}
        self.fetched += [given[name] for name in FETCHED.get(tag, ()) if name in given]
        if tag == "link" and FETCHED_LINKS & set(given.get("rel", "").split()):
            self.fetched.append(given["href"])
        if tag == "a" and "href" in given:
            self.linked.append(given["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    (folder / "0.1.9").mkdir()
    # Where a link leads nowhere, or to no place in its page, mkdocs warns, and fails.
    words = [sys.executable, "-W", "ignore", "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    own = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(words, cwd=ROOT, env=own, capture_output=True, text=True, check=False, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stderr, done.stderr
    return folder / paceline.__version__


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Addresses]:
    return {path: Addresses(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}


def test_nothing_is_loaded_from_elsewhere(site: Path, pages: dict[Path, Addresses]) -> None:
    for path, page in pages.items():
        assert [link for link in page.fetched if urlsplit(link).netloc or urlsplit(link).scheme == "http"] == [], path
    for style in site.rglob("*.css"):
        fetched = re.findall(r"(?:@import|url\()\s*['\"]?(?:https?:)?//[^'\")]+", style.read_text(encoding="utf-8"))
        assert fetched == [], style


def test_the_first_page_leads_to_the_newest_version(site: Path) -> None:
    assert f'url={paceline.__version__}/index.html"' in (site.parent / "index.html").read_text(encoding="utf-8")
    listed = json.loads((site.parent / "versions.json").read_text(encoding="utf-8"))
    assert [each["version"] for each in listed] == [paceline.__version__, "0.1.9"]


def test_every_page_command_and_public_name_is_there(pages: dict[Path, Addresses], site: Path) -> None:
    sources = {path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")}
    written = {path.with_name(path.name.replace("README", "index")).with_suffix(".html") for path in sources}
    assert {path.relative_to(site) for path in pages} >= written
    reached = {(site / unquote(urlsplit(link).path)).resolve() for link in pages[site / "index.html"].linked}
    assert {site / page for page in written} <= reached, "the navigation on every page leaves them out"
    assert set(command_names()) <= pages[site / "commands.html"].places
    names = {f"paceline.{name}" for name in dir(paceline) if not name.startswith("__")}
    assert names <= pages[site / "python.html"].places
    assert "paceline.Task.loss" in pages[site / "python.html"].places
    assert "optimizer" in pages[site / "recipe-reference.html"].places


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node, which runs the site's own search")
def test_the_search_answers_what_people_type(site: Path) -> None:
    words = ["node", str(Path(__file__).with_name("search.js")), str(site), *PHRASES]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr == ""  # a search that fails finds nothing
    found = {phrase: list(dict.fromkeys(pages))[:3] for phrase, pages in json.loads(done.stdout).items()}
    missed = {phrase: found[phrase] for phrase, page in PHRASES.items() if page not in found[phrase]}
    assert len(missed) <= len(PHRASES) // 20, missed


def test_the_answers_are_within_two_clicks_of_the_readme() -> None:
    def links(page: Path) -> set[Path]:
        found = re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
        return {(page.parent / link).resolve() for link in found if "://" not in link}

    one_click = links(ROOT / "README.md")
    two_clicks = one_click.union(*(links(page) for page in one_click if page.suffix == ".md"))
    answers = {ROOT / "docs" / page.replace(".html", ".md") for page in PHRASES.values()}
    assert answers - two_clicks == set()
