"""Turn the pages of the repository into a site; mkdocs calls this (`hooks` in mkdocs.yml).

Generated pages: the commands (their `--help`), the Python interface (`dir(paceline)`), and whatever outside `docs/`
a page links to, shown unchanged. The search leaves out the landing page, and pages for those who change the code.
Each version has a folder, and the others' are kept: index.html leads to the newest, versions.json lists all.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
import yaml
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import paceline
from paceline.cli.commands import listing, reference_of
from paceline.cli.main import cli
from paceline.plugins.registry import built_in

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
SHOWN_AS_CODE = {
    ".py": "python",
    ".ipynb": "json",
    ".sh": "bash",
    ".yaml": "yaml",
    ".json": "json",
    ".txt": "text",
    ".toml": "toml",
    "": "text",
}
_LINK = re.compile(r"(\]\()([^)\s]+)(\))")
_CONSOLE = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)
_ROLE = re.compile(r":(?:meth|class|func|attr|data|mod):(<code>)~?")
_PARTS = ("order.BatchOrder", "checkpoints.Checkpoints", "ledger.Ledger", "scores.ExactMean", "scores.collect")
_SEARCH_WORDS = yaml.safe_load((ROOT / "scripts" / "search_words.yaml").read_text(encoding="utf-8"))
_UNSEARCHED = ("index.md", "tour.md", "decisions/", "repository/")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List every decision at the end of the navigation; write to the folder of this version."""
    config.site_dir = os.path.join(config.site_dir, paceline.__version__)
    assert config.nav is not None
    decisions = next(entry["Decisions"] for entry in config.nav[-1]["Project"] if "Decisions" in entry)
    decisions.extend(path.relative_to(DOCS).as_posix() for path in sorted((DOCS / "decisions").glob("0*.md")))
    return config


def on_post_build(config: MkDocsConfig) -> None:
    """Lead to the newest version, and list all for the theme's menu."""
    site = Path(config.site_dir).parent
    found = [each.name for each in site.iterdir() if re.fullmatch(r"\d+\.\d+\.\d+", each.name)]
    found.sort(key=lambda name: [int(part) for part in name.split(".")], reverse=True)
    listed = [{"version": name, "title": name, "aliases": []} for name in found]
    (site / "versions.json").write_text(json.dumps(listed), encoding="utf-8")
    links = "".join(f'<li><a href="{name}/index.html">{name}</a></li>\n' for name in found)
    head = '<!doctype html>\n<html lang="en">\n<meta charset="utf-8"><title>Paceline</title>\n'
    lead = f'<meta http-equiv="refresh" content="0; url={found[0]}/index.html">\n'
    page = f"{head}{lead}<ul>\n{links}</ul>\n</html>\n"
    (site / "index.html").write_text(page, encoding="utf-8")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that nobody writes."""
    made = {
        "commands.md": "\n".join(_commands()),
        "python.md": "\n".join(_python()),
    }
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    waiting = [*DOCS.rglob("*.md"), *(ROOT / name for name in _wanted(config))]
    while waiting:
        for target in _linked(waiting.pop()):
            name = _place(target)
            if files.get_file_from_path(name) is None:
                files.append(_shown(target, name, config))
                waiting += [target] if target.suffix == ".md" else []
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links lead to where the site has what the repository has there."""
    name = page.file.src_uri
    if name.startswith(_UNSEARCHED):
        page.meta["search"] = {"exclude": True}
    elif words := _SEARCH_WORDS.get(name):
        page.meta["tags"] = [words]
    origin = ROOT / (name.removeprefix("repository/") if "repository/" in name else f"docs/{name}")
    here = posixpath.dirname(name)

    def led(match: re.Match[str]) -> str:
        target, anchor = _target(origin, match[2])
        if target is None:
            return match[0]
        return f"{match[1]}{posixpath.relpath(_place(target), here or '.')}{anchor}{match[3]}"

    return _CONSOLE.sub(_as_shell, _LINK.sub(led, markdown))


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Leave out what kind of thing a docstring names: the site shows it as code."""
    return _ROLE.sub(r"\1", html) if page.file.src_uri == "python.md" else html


def _as_shell(match: re.Match[str]) -> str:
    """A console block without a prompt holds commands alone, which would be coloured as output."""
    return match[0] if re.search(r"^\$ ", match[1], re.MULTILINE) else f"```bash\n{match[1]}```"


def _named(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    for inner in nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else ():
        yield from _named(inner)


def _wanted(config: MkDocsConfig) -> list[str]:
    """Files of the repository that the navigation names."""
    return [name.removeprefix("repository/") for name in _named(config.nav) if name.startswith("repository/")]


def _target(origin: Path, link: str) -> tuple[Path | None, str]:
    """The file or folder of the repository that a page's link leads to, if it is one, and the anchor in it."""
    split = urlsplit(link)
    if split.scheme or not split.path or link.startswith("/"):
        return None, ""
    target = Path(os.path.normpath(origin.parent / split.path))
    inside = target.is_relative_to(ROOT) and target.exists()
    return (target, f"#{split.fragment}" if split.fragment else "") if inside else (None, "")


def _place(target: Path) -> str:
    """Where the site has a file or folder of the repository, as a source of mkdocs."""
    if target == ROOT / "README.md":
        return "index.md"
    if target == DOCS / "decisions":
        return "decisions/README.md"
    if target.is_relative_to(DOCS) and target.is_file():
        return target.relative_to(DOCS).as_posix()
    path = target.relative_to(ROOT).as_posix()
    return f"repository/{path}" if target.suffix in (".md", ".svg", ".png") else f"repository/{path}.md"


def _linked(origin: Path) -> Iterator[Path]:
    """What a page links to and the site does not have by itself; and a page that the navigation names."""
    if not origin.is_relative_to(DOCS):
        yield origin
    for match in _LINK.finditer(origin.read_text(encoding="utf-8")):
        target, _ = _target(origin, match[2])
        if target is not None and _place(target).startswith("repository/"):
            yield target


def _shown(target: Path, name: str, config: MkDocsConfig) -> File:
    """A file of the repository as a page, or as it is."""
    if target.is_dir():
        inside = "\n".join(f"- `{path.name}`" for path in sorted(target.iterdir()) if path.suffix in SHOWN_AS_CODE)
        return File.generated(config, name, content=f"# {target.relative_to(ROOT)}\n\n{inside}\n")
    if target.suffix not in SHOWN_AS_CODE:
        return File.generated(config, name, abs_src_path=str(target))
    fence = f"```{SHOWN_AS_CODE[target.suffix]}\n{target.read_text(encoding='utf-8')}\n```\n"
    return File.generated(config, name, content=f"# {target.relative_to(ROOT)}\n\n{fence}")


def _commands() -> Iterator[str]:
    yield "# Commands\n\nWhat `paceline COMMAND --help` says, command by command.\n"
    parent = click.Context(cli, info_name="paceline")
    for name, line in (each for commands in listing().values() for each in commands.items()):
        command = cli.get_command(parent, name)
        assert command is not None
        context = click.Context(command, info_name=name, parent=parent, terminal_width=100)
        yield f"## {name}\n\n{line}\n\n```text\n{command.get_help(context)}\n```\n"


def _python() -> Iterator[str]:
    yield "# Python\n\nThe public names: `dir(paceline)`, and [parts for other trainers](other-trainers.md)."
    yield "[Your own model, data and task](guide/own-code.md) tells how they are used.\n"
    # Functions of commands and of other packages are documented where they are written.
    functions = {name: str(reference_of(name)) for name in paceline.COMMANDS} | built_in("functions")
    for name in dir(paceline):
        if not name.startswith("__"):
            documented = functions.get(name, f"paceline:{name}").replace(":", ".")
            yield f'<a id="paceline.{name}"></a>\n' if name in functions else ""
            yield f"::: {documented}\n    options:\n      heading: paceline.{name}\n"
    yield from (f"::: paceline.{name}\n" for name in _PARTS)
