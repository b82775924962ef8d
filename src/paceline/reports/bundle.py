"""`paceline report RUN --bundle`: a file for a bug report, without data, weights, secrets or names of files."""

from __future__ import annotations

import itertools
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
from paceline.parsing.units import format_bytes
from paceline.records.run_directory import encode_json, existing_run, file_operation

_PARTS = ("recipe.yaml", "plan.json", "run.json", "environment.json", "events.jsonl", "summary.json")
_MARK = "\0"  # for a known path, of which more may follow: "\0/more"
_ADDRESS = re.compile(r"\b[A-Za-z][\w+.-]{0,20}://[^\s\"'<>]+|[\w.+-]{1,64}@[\w-]+(?:\.[\w-]+)+")
_QUOTED = re.compile(r"""(?<!\w)"([^"\n]*)"|(?<!\w)'((?:[^'\n]|'(?=\w))*)'""")
_WORD = re.compile(r"""[^\s"',;()\[\]{}<>|]+""")
# What follows a whole path is its next words, as in "/home/me/My photos/a.png", if one of them is a path or a file.
_SPACED = re.compile(
    r"(?<!\S)((?:[A-Za-z]:[/\\]|[/\\~\0])[^\s\"',;|]*)"
    r"((?: [^\s\"',;|/\\~\0]+){0,3} [^\s\"',;|/\\~\0]+[/\\][^\s\"',;|]*)+"
)
_FILE = re.compile(
    r"(?<![\w.+/\\-])[\w.+-]*\w\.(?:jpe?g|png|gif|bmp|tiff?|webp|heic|dcm|nii|svg|[ct]sv|parquet|arrow|txt|pdf|docx?|xlsx?"
    r"|np[yz]|h5|hdf5|pkl|pt|pth|onnx|safetensors|tar|t?gz|zip|zst|wav|mp[34]|flac|py|ipynb|ya?ml|jsonl?|log)(?!\w)",
    re.IGNORECASE,
)
# Of a path within a package, the module stays: bug reports are read for it.
_MODULE = re.compile(r".*?((?:site-packages/|/src/(?=paceline))[\w./-]+\.py)$")
_KEY = re.compile(r"[\w.]+=")
_COUNTS = re.compile(r"[\d.]+[/\\][\d.]+|samples/s|n/a")
_HOME = re.compile(r"""(?:/home|/Users|\\Users)[/\\]([^/\\\s"']+)""")
_SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSW|KEY|CREDENTIAL|AUTH|COOKIE", re.IGNORECASE)
_SECRET_KEY = re.compile(r"(?:.*_)?(?:token|secret|passw(?:or)?d|(?:api|access)_?key|credentials?)", re.IGNORECASE)
_SECRET_SHAPE = re.compile(
    r"\b(?:hf_|sk-|gh[oprsu]_|github_pat_|glpat-|AKIA|xox[abp]-|wandb_v1_|eyJ)[\w.-]{8,}"
    r"|(?<=Bearer )\S+"
    r"|(?i:(?<=token[=:])|(?<=secret[=:])|(?<=password[=:])|(?<=api_key[=:])|(?<=access_key[=:]))\s?[^\s\"']{8,}"
)
_TOKEN = re.compile(r"(?<!\w)[0-9a-f]{40}(?!\w)")  # a key of Weights & Biases; also a revision, which stays
_NAMED = {"host", "directory", "command", "program", "user", "path", "file", "files", "folder"}
_NAMED |= {"annotations", "initialize_from", "teacher"}
_OWN = {*_PARTS, "first_batch.json", "manifest.json", "best.json", "mirror.json", "model.safetensors"}
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
        here = [name for name in _PARTS if (root / name).is_file()]
        texts = {name: (root / name).read_text(encoding="utf-8", errors="replace") for name in here}
    kept = _Private()
    documents = {name: list(_documents(name, text)) for name, text in texts.items()}
    for each in documents.values():
        kept.learn(each)
    files = {name: "".join(_written(name, kept.without(each)) for each in documents[name]).encode() for name in texts}
    for name, content in files.items():
        log(f"{name}  {format_bytes(len(content))}")
    log("Paths, addresses, hosts, commands and secrets are replaced; other values stay: look before you send it.")
    with file_operation("write", path), zipfile.ZipFile(path, "x", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(f"{path.stem}/{name}", content)
    size = path.stat().st_size
    document = {"bundle": str(path), "bytes": size, "files": {name: len(content) for name, content in files.items()}}
    return Document(document=document, shown=Shown(blocks=[f"{path} ({format_bytes(size)})"]))


def _documents(name: str, text: str) -> Iterator[Any]:
    """Yield what a file holds; of a part that cannot be read, as a kill or a damage leaves it, how long it is."""
    for part in text.rstrip("\n").split("\n") if name.endswith(".jsonl") else [text]:
        try:
            yield yaml.load(part, Loader=BoundedLoader) if name.endswith(".yaml") else load_json(part)
        except (ValueError, yaml.YAMLError, RecursionError):
            yield {"unreadable_characters": len(part)}


def _written(name: str, document: Any) -> str:
    if name.endswith(".yaml"):
        return yaml.safe_dump(document, sort_keys=False)
    return encode_json(document) + "\n"


@dataclass
class _Private:
    """What must not be in the bundle."""

    secrets: dict[str, str] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    keys: set[str] = field(default_factory=set)  # a folder named as one of these stays: sentences are full of them

    def __post_init__(self) -> None:
        for name, value in os.environ.items():
            if len(value) >= _LEAST and _SECRET_NAME.search(name):
                self.secrets[value] = "(secret)"
            elif len(value) >= _LEAST and name in ("USER", "LOGNAME"):
                self.texts[value] = "(user)"

    def learn(self, document: Any, key: str = "") -> None:
        """Find values whose key says that they name a file, a folder, a host or a command, and names of users."""
        if isinstance(document, dict):
            self.keys.update(map(str, document))
            for name, value in document.items():
                self.learn(value, str(name))
        elif isinstance(document, list):
            for value in document:
                self.learn(value, key)
        elif isinstance(document, str):
            self.texts |= {name: "(user)" for name in _HOME.findall(document) if len(name) >= _LEAST}
            if _is_private(key, document):
                names = {document, re.split(r"[/\\]", document.rstrip("/\\"))[-1]}
                self.texts |= {name: f"({key})" for name in names if len(name) >= _LEAST}

    def without(self, document: Any, key: str = "") -> Any:
        """Return a document with names in the place of what is private."""
        if isinstance(document, dict):
            result: dict[str, Any] = {}
            for name, value in document.items():
                shown = first = str(name) if str(name) in _OWN else self._clean(str(name))
                for number in itertools.count(2):
                    if shown not in result:
                        break
                    shown = f"{first} {number}"
                result[shown] = self.without(value, str(name))
            return result
        if isinstance(document, list):
            return [self.without(value, key) for value in document]
        if not isinstance(document, str):
            return document
        if _is_private(key, document):
            return f"({key})"
        return self._clean(document if key == "revision" else _TOKEN.sub("(secret)", document))

    def _clean(self, text: str) -> str:
        names = {each: new for each, new in self.texts.items() if each not in self.keys}
        text = _replaced(_ADDRESS.sub("(address)", text), self.secrets)
        text = _replaced(text, {each: _MARK for each in names if re.search(r"[/\\]", each)})
        text = _SECRET_SHAPE.sub("(secret)", text)
        text = _SPACED.sub(_MARK, _QUOTED.sub(_quoted, text))
        text = _FILE.sub(_file, _WORD.sub(_short, text)).replace(_MARK, "(path)")
        for each in sorted(names, key=len, reverse=True):
            if each in text:
                text = re.sub(rf"(?<![^\W_]){re.escape(each)}(?![^\W_])", names[each].replace("\\", r"\\"), text)
        return text


def _replaced(text: str, private: dict[str, str]) -> str:
    for each in sorted(private, key=len, reverse=True):
        text = text.replace(each, private[each])
    return text


def _is_private(key: str, value: str) -> bool:
    named = key in _NAMED or key.endswith(("_path", "_file", "_dir", "_folder")) or _SECRET_KEY.fullmatch(key)
    return bool(named) and value not in ("", "off", "auto")


def _quoted(found: re.Match[str]) -> str:
    mark, inside = found[0][0], found[0][1:-1]
    has_path = " " in inside and any(_is_path(word) for word in inside.split())
    return f"{mark}{_marked(inside)}{mark}" if has_path else found[0]


def _short(found: re.Match[str]) -> str:
    """Return a word without its path; in "key=path", the key stays."""
    key, separator, path = found[0].partition("=") if _KEY.match(found[0]) else ("", "", found[0])
    return f"{key}{separator}{_marked(path)}" if _is_path(path) else found[0]


def _is_path(word: str) -> bool:
    return re.search(r"[/\\]", word) is not None and not _COUNTS.fullmatch(word.rstrip(".:"))


def _marked(path: str) -> str:
    module = _MODULE.match(path)
    return f"{_MARK}/{module[1].lstrip('/')}" if module else _MARK


def _file(found: re.Match[str]) -> str:
    return found[0] if found[0] in _OWN else "(file)"
