"""`paceline report RUN --bundle`: a file for a bug report, without data, weights, secrets or names of files."""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from paceline.command import Log
from paceline.errors import RunDirectoryError
from paceline.pages.shown import Document, Result, Shown
from paceline.parsing.plain_text import load_json
from paceline.parsing.plain_yaml import BoundedLoader
from paceline.parsing.units import counted, format_bytes
from paceline.records.run_directory import encode_json, existing_run, file_operation

_PARTS = ("recipe.yaml", "plan.json", "run.json", "environment.json", "events.jsonl", "summary.json")
_PATH = re.compile(r"""[^\s"'=,;()\[\]{}<>|]*(?:/|\\)[^\s"',;()\[\]{}<>|]*""")
# Of a path within a package, the module stays: bug reports are read for it.
_MODULE = re.compile(r".*?((?:site-packages/|/src/)[\w./-]+\.py)$")
_SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSW|KEY|CREDENTIAL|AUTH|COOKIE", re.IGNORECASE)
_SECRET_SHAPE = re.compile(r"\b(?:hf_|sk-|gh[oprsu]_|github_pat_|glpat-|AKIA|xox[abp]-)[\w-]{8,}")
_NAMED = (
    "host",
    "directory",
    "command",
    "program",
    "user",
    "path",
    "file",
    "folder",
    "annotations",
    "initialize_from",
    "teacher",
)
_CODE = "code"  # digests of your source files, by their names
_LEAST = 4  # characters of a secret or name that is looked for in other texts


def write_bundle(run_dir: Path, output: Path | None, log: Log) -> Result:
    """Name the files, then write them into a new archive.

    Args:
        run_dir: The run.
        output: The archive; ``NAME-bundle.zip`` in the current directory by default.
        log: Gets a line for each file before anything is written.

    Raises:
        RunDirectoryError: If there is no run, or the archive exists.
    """
    root = existing_run(run_dir).root
    path = output or Path(f"{root.resolve().name}-bundle.zip")
    if path.exists():
        raise RunDirectoryError(f"{path} exists: remove it, or give another --output.")
    with file_operation("read", root):
        present = [root / name for name in _PARTS if (root / name).is_file()]
        texts = {path.name: path.read_text(encoding="utf-8", errors="replace") for path in present}
    documents = {name: list(_documents(name, text)) for name, text in texts.items()}
    kept = _Private(keys={*_keys(documents)})
    kept.learn(documents)
    files = {name: "".join(_written(name, kept.without(each)) for each in documents[name]).encode() for name in texts}
    for name, content in files.items():
        log(f"{name}  {format_bytes(len(content))}")
    log("Paths, addresses, hosts, commands and secrets are replaced; names of classes and your recipe's values stay.")
    with file_operation("write", path), zipfile.ZipFile(path, "x", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(f"{path.stem}/{name}", content)
    size = path.stat().st_size
    document = {"bundle": str(path), "bytes": size, "files": {name: len(content) for name, content in files.items()}}
    return Document(document=document, shown=Shown(blocks=[f"{path} ({format_bytes(size)})"]))


def _documents(name: str, text: str) -> Iterator[Any]:
    for part in text.splitlines() if name.endswith(".jsonl") else [text]:
        try:
            yield yaml.load(part, Loader=BoundedLoader) if name.endswith(".yaml") else load_json(part)
        except (yaml.YAMLError, ValueError):  # damaged, or cut off by a kill: others may still tell what happened
            yield {"unreadable_characters": len(part)}


def _keys(document: Any) -> Iterator[str]:
    if isinstance(document, dict):
        yield from map(str, document)
    for each in document.values() if isinstance(document, dict) else document if isinstance(document, list) else ():
        yield from _keys(each)


def _written(name: str, document: Any) -> str:
    if name.endswith(".yaml"):
        return yaml.safe_dump(document, sort_keys=False)
    return encode_json(document) + "\n"


@dataclass
class _Private:
    """What must not be in the bundle."""

    keys: set[str]  # a folder named as one of these stays: sentences are full of them
    secrets: dict[str, str] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value in os.environ.items():
            if len(value) >= _LEAST and _SECRET_NAME.search(name) and value.lower() not in ("true", "false"):
                self.secrets[value] = "(secret)"
            elif len(value) >= _LEAST and name in ("USER", "LOGNAME"):
                self.texts[value] = "(user)"

    def learn(self, document: Any, key: str = "") -> None:
        """Find values whose key says that they name a file, a folder, a host or a command."""
        if isinstance(document, dict):
            if key == _CODE:
                self.texts |= {name: "(file)" for name in document if name.endswith(".py")}
            for name, value in document.items():
                self.learn(value, str(name))
        elif isinstance(document, list):
            for value in document:
                self.learn(value, key)
        elif isinstance(document, str) and _is_private(key, document):
            for name in {document, re.split(r"[/\\]", document.rstrip("/\\"))[-1]}:
                if len(name) >= _LEAST and name not in self.keys:
                    self.texts[name] = f"({key})"

    def without(self, document: Any, key: str = "") -> Any:
        """Return a document with names in the place of what is private."""
        if isinstance(document, dict):
            if key == _CODE:
                return f"({counted(len(document), 'file')})"
            return {self._key(str(name)): self.without(value, str(name)) for name, value in document.items()}
        if isinstance(document, list):
            return [self.without(value, key) for value in document]
        if not isinstance(document, str):
            return document
        return f"({key})" if _is_private(key, document) else self._clean(document)

    def _key(self, name: str) -> str:
        return self.texts.get(name) or self._without_paths(name)

    def _clean(self, text: str) -> str:
        text = self._without_paths(text)
        for each in sorted(self.texts, key=len, reverse=True):
            if each in text:  # as a word: a folder named test is not in "latest"
                text = self.texts[each].join(re.split(rf"(?<![^\W_]){re.escape(each)}(?![^\W_])", text))
        return text

    def _without_paths(self, text: str) -> str:
        for each in sorted(self.secrets, key=len, reverse=True):
            text = text.replace(each, self.secrets[each])
        return _PATH.sub(_short, _SECRET_SHAPE.sub("(secret)", text))


def _is_private(key: str, value: str) -> bool:
    named = key in _NAMED or key.endswith(("_path", "_file", "_dir", "_folder"))
    return named and value not in ("", "off", "auto")


def _short(found: re.Match[str]) -> str:
    module = _MODULE.match(found[0])
    return f"(path)/{module[1].lstrip('/')}" if module else "(path)"
