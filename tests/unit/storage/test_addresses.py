"""Addresses are read, credentials in them refused and never repeated."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.errors import RecipeError, StorageError
from paceline.recipe.load import load_recipe
from paceline.storage.addresses import Address, check_library, is_address, parse_address, redact_secrets

SECRET = "wJalrXUtnFEMIK7MDENG"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("s3://bucket/a/b/", Address("s3", "bucket/a/b")),
        ("S3://bucket", Address("s3", "bucket")),
        ("http://host:8080/a.tar", Address("http", "host:8080/a.tar")),
        ("file:///data/x", Address("file", "/data/x")),
        ("az://container/x", Address("az", "container/x")),
    ],
)
def test_read(text: str, found: Address) -> None:
    assert is_address(text)
    assert parse_address(text) == found


@pytest.mark.parametrize(
    "text", ["ftp://h/x", "memory://x", "s3://", "s3:///x/", "file://relative", "photos", "s3://b/..", "file:///a/../b"]
)
def test_what_is_none_is_refused(text: str) -> None:
    with pytest.raises(StorageError):
        parse_address(text) if text != "s3:///x/" else parse_address("s3:///")


@pytest.mark.parametrize(
    "text",
    [
        f"s3://AKIA:{SECRET}@bucket/x",
        f"s3://AKIA:{SECRET[:5]}/{SECRET}@bucket/x",
        f"https://user:{SECRET}@host/x",
        f"https://host/x?X-Amz-Signature={SECRET}",
        f"az://{SECRET}@container/x",
    ],
)
@pytest.mark.parametrize("key", ["data.path", "checkpoint.mirror", "model.initialize_from"])
def test_credentials_are_refused_and_not_repeated(text: str, key: str) -> None:
    with pytest.raises(StorageError, match="not shown here") as caught:
        load_recipe("image_folder", [f"{key}={text}"])
    assert SECRET not in str(caught.value)
    assert key in str(caught.value)


def test_a_mirror_is_writable_and_its_keys_need_one() -> None:
    with pytest.raises(RecipeError, match="it is not writable"):
        load_recipe("digits", ["checkpoint.mirror=https://host/x"])
    with pytest.raises(RecipeError, match=r"needs checkpoint\.mirror"):
        load_recipe("digits", ["checkpoint.mirror_wait=1 minute"])
    with pytest.raises(StorageError, match="is not an address"):
        load_recipe("digits", ["checkpoint.mirror=backup"])
    recipe = load_recipe("digits", ["checkpoint.mirror=s3://bucket/x", "checkpoint.mirror_patience=1 hour"]).recipe
    assert recipe.checkpoint.mirror == "s3://bucket/x"


def test_an_address_stays_as_it_is_where_paths_become_absolute() -> None:
    assert load_recipe("image_folder", ["data.path=s3://bucket/photos"]).recipe.data.path == "s3://bucket/photos"


def test_a_missing_library_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "s3fs", None)
    with pytest.raises(StorageError, match=r"pip install 'paceline\[s3\]'"):
        check_library(parse_address("s3://bucket/x"))


def test_texts_lose_their_secrets() -> None:
    environment = {"AWS_SECRET_ACCESS_KEY": SECRET, "SHORT_KEY": "abc", "HOME": "/home/me", "KEY_FILE": "/etc/key.json"}
    text = f"failed with {SECRET} at https://me:pw@host/a?sig=123 in /home/me, abc, /etc/key.json"
    cleaned = redact_secrets(text, environment)
    assert cleaned == "failed with *** at https://***@host/a?*** in /home/me, abc, /etc/key.json"


@pytest.mark.parametrize(
    ("value", "text", "hidden"),
    [
        ("/bcdefghijk/lmn+o", "wrong: /bcdefghijk/lmn+o", "/bcdefghijk"),
        ("abcdefghijk/lmn+o", "at http://host/x%3Dabcdefghijk%2Flmn%2Bo/y", "abcdefghijk"),
        ("AccountName=acc;AccountKey=c2VjcmV0c2Vj;Suffix=net", "bad key c2VjcmV0c2Vj", "c2VjcmV0c2Vj"),
        ("", "AccountKey=c2VjcmV0c2Vj;Suffix=net", "c2VjcmV0c2Vj"),
        ("", "at https://host/x#sig=hushhush", "hushhush"),
        ("", "at https://user:pa ss@host/x", "pa ss"),
        ("", "at https://user:p@ss@host/x", "ss@"),
    ],
)
def test_secrets_in_other_forms_are_hidden_too(value: str, text: str, hidden: str) -> None:
    assert hidden in text
    assert hidden not in redact_secrets(text, {"AZURE_STORAGE_CONNECTION_STRING": value})


def test_paths_and_ports_are_no_secrets(tmp_path: Path) -> None:
    values = {"AWS_TOKEN_FILE": "/nowhere/token", "MY_CREDENTIALS": str(tmp_path)}
    text = f"no such file: /nowhere/token; {tmp_path}; http://127.0.0.1:9000 of me@here; tokens=512"
    assert redact_secrets(text, values) == text
