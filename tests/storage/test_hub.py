"""The Hugging Face hub, in the person of a stand-in server: the cache comes first, and what is missing is said."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from hub_server import HubServer
from PIL import Image

import paceline
from paceline.errors import ModelError, StorageError
from paceline.models.build import build_model
from paceline.recipe.model import ModelSection
from paceline.storage import hub as storage_hub
from paceline.storage.addresses import parse_address
from paceline.storage.cache import local_copy
from paceline.storage.hub import hub_copy

NET = "hf-hub:me/net"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What timm writes for the hub."""
    folder = tmp_path_factory.mktemp("published")
    torch.manual_seed(1)
    network = timm.create_model("test_vit", num_classes=5, global_pool="avg", class_token=False)
    timm.models.save_for_hf(
        network, folder, safe_serialization=True, model_args={"global_pool": "avg", "class_token": False}
    )
    return {each.name: each.read_bytes() for each in folder.iterdir() if each.suffix in (".json", ".safetensors")}


def built(name: str = NET, *, classes: int = 5, **more: Any) -> torch.nn.Module:
    return build_model(ModelSection(name=name, **more), num_classes=classes, in_channels=3)


def test_a_network_from_the_hub(hub: HubServer, published: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    hub.files["models/me/net"] = published | {"pytorch_model.bin": b"never opened"}
    assert built().global_pool == "avg", "its options are the folder's"
    assert not any("safetensors" in each for each in hub.requests), "weights are not fetched for their shapes"
    weights = built(pretrained=True).state_dict()
    expected = timm.create_model("test_vit", num_classes=5, global_pool="avg", class_token=False)
    assert weights.keys() == expected.state_dict().keys()
    from safetensors.torch import load

    for name, tensor in load(published["model.safetensors"]).items():
        assert torch.equal(weights[name], tensor), name
    assert not any(".bin" in each for each in hub.requests)
    hub.close()
    hub.requests.clear()
    for name, tensor in built(pretrained=True).state_dict().items():
        assert torch.equal(tensor, weights[name]), name
    assert built(pretrained=True, classes=7).get_classifier().out_features == 7
    assert not hub.requests, "what is in the cache is not asked for again"


def test_what_cannot_be_had_is_said_in_a_line(hub: HubServer, published: dict[str, bytes]) -> None:
    with pytest.raises(StorageError, match=r"hf://me/net \(there is none of this name, or it is private") as caught:
        built()
    assert "\n" not in str(caught.value)
    hub.files["models/me/net"] = {**published, "pytorch_model.bin": b""}
    del hub.files["models/me/net"]["model.safetensors"]
    with pytest.raises(ModelError, match=r"has no model\.safetensors"):
        built(pretrained=True)
    config = json.loads(published["config.json"])
    for changed, message in (
        ({"architecture": "no_such"}, "'no_such' is not in this timm"),
        ({"model_args": {"checkpoint_path": "/etc/passwd"}}, "checkpoint_path, which opens files"),
        ({"architecture": None, "model_args": 3}, "not in timm's format"),
    ):
        hub.files["models/me/other"] = {"config.json": json.dumps(config | changed).encode()}
        with pytest.raises(ModelError, match=message):
            built(f"hf-hub:me/other@{hub.commit('models/me/other')}")
    with pytest.raises(StorageError, match=r"hf://net is not an address on the Hugging Face hub"):
        built("hf-hub:net")


def test_without_a_network(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    hub.close()
    with pytest.raises(StorageError, match="the hub cannot be reached, and the cache has no complete copy"):
        built()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(StorageError, match="the hub cannot be reached, and the cache has no complete copy"):
        built()


def raw(answer: str) -> Callable[[BaseHTTPRequestHandler], bool]:
    """An answer in place of the hub's."""

    def reply(request: BaseHTTPRequestHandler) -> bool:
        text = f"HTTP/1.1 {answer}".replace("\n", "\r\n").replace("PATH", request.path)
        request.wfile.write(text.encode())
        return True

    return reply


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("429 Too Many Requests\nRetry-After: 3600\n\n", "answered 429 and asks to wait 3600 s"),
        ("429 Too Many Requests\n\n", "answered 429 (Too Many Requests)"),
        ("500 Internal Server Error\n\n", "answered 500 (Internal Server Error)"),
        ("503 Service Unavailable\nRetry-After: 31\n\n", "answered 503 and asks to wait 31 s"),
        ("200 OK\nContent-Type: text/html\n\n<html>Log in</html>", "perhaps the login page of a network"),
        ("200 OK\nContent-Length: 100\n\n{", "answer cannot be used (peer closed connection"),
        ("302 Found\nLocation: PATH\n\n", "answer cannot be used (Exceeded maximum allowed redirects"),
        ("nothing of HTTP", "answer cannot be used (Server disconnected"),
    ],
)
def test_a_hub_that_answers_wrongly(hub: HubServer, answer: str, reason: str) -> None:
    hub.fault = raw(answer)
    with pytest.raises(
        StorageError, match=r"^cannot read hf://me/net \(.*, and the cache has no complete copy"
    ) as caught:
        built()
    assert reason in str(caught.value)
    assert "cannot be reached" not in str(caught.value)


def test_a_busy_hub_is_asked_again(hub: HubServer, published: dict[str, bytes]) -> None:
    busy = raw("429 Too Many Requests\nRetry-After: 0\n\n")
    hub.files["models/me/net"] = published
    listings: Counter[str] = Counter()

    def fault(request: BaseHTTPRequestHandler) -> bool:
        listings[request.path] += request.path.startswith("/api/models/")
        return listings[request.path] in (1, 2) and busy(request)

    hub.fault = fault
    built()
    assert {*listings.values()} == {0, 3}
    hub.files["models/me/new"] = published
    hub.fault = busy
    with pytest.raises(StorageError, match="answered 429"):
        built("hf-hub:me/new")


@pytest.mark.parametrize("sent", ["", "200 OK\nContent-Length: 100\n\n{"], ids=["silent", "half an answer"])
def test_a_hub_that_falls_silent(hub: HubServer, monkeypatch: pytest.MonkeyPatch, sent: str) -> None:
    from huggingface_hub import close_session

    asked, over = threading.Event(), threading.Event()

    def silent(request: BaseHTTPRequestHandler) -> bool:
        asked.set()
        return bool(sent and raw(sent)(request)) | over.wait(60)

    hub.fault = silent
    monkeypatch.setattr(storage_hub, "_WAIT_SECONDS", 0.2)
    close_session()
    try:
        with pytest.raises(StorageError, match="accepted the connection, but then sent nothing for several seconds"):
            built()
    finally:
        over.set()
        close_session()
    assert asked.is_set()


def pictures(count: int) -> dict[str, bytes]:
    """Two classes of pictures in parquet files, as data sets on the hub are stored."""
    datasets = pytest.importorskip("datasets", reason="needs datasets")
    draws = np.random.default_rng(0)
    rows: dict[str, list[Any]] = {"image": [], "label": []}
    for number in range(count):
        stored = BytesIO()
        pixels = draws.integers(0, 100, (8, 8, 3)) + 100 * (number % 2)
        Image.fromarray(pixels.astype(np.uint8)).save(stored, "PNG")
        rows["image"].append({"bytes": stored.getvalue(), "path": f"{number}.png"})
        rows["label"].append(number % 2)
    kinds = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["dark", "light"])})
    found = {"README.md": b"A data set.", ".gitattributes": b""}
    for split, chosen in (("train", slice(0, -10)), ("validation", slice(-10, None))):
        stored = BytesIO()
        part = {name: column[chosen] for name, column in rows.items()}
        datasets.Dataset.from_dict(part, features=kinds).to_parquet(stored)
        found[f"data/{split}-00000-of-00001.parquet"] = stored.getvalue()
    return found


RECIPE = [
    "model.name=small_resnet",
    "data.dataset=huggingface",
    "data.image_size=8",
    "model.options.width=4",
    "batch.global_size=10",
]


def test_a_run_on_a_data_set_by_its_name(hub: HubServer, runs: Path) -> None:
    hub.files["datasets/me/greys"] = pictures(50)
    overrides = [*RECIPE, "data.path=hf://datasets/me/greys", "train.duration=1 epoch", "parallel.device=cpu"]
    first = paceline.train("image_folder", overrides=overrides, run_dir=runs / "first", quiet=True)
    plan = json.loads((first.run_dir / "plan.json").read_text())
    assert (plan["train_samples"], plan["evaluation_samples"]) == (40, 10)
    assert json.loads(json.dumps(plan["data"]))["dataset"] == "huggingface"
    hub.close()
    again = paceline.train("image_folder", overrides=overrides, run_dir=runs / "again", quiet=True)
    assert again.summary.weights_sha256 == first.summary.weights_sha256


def test_a_data_set_is_used_when_all_of_it_is_there(hub: HubServer) -> None:
    hub.files["datasets/me/set"] = {"a/1.txt": b"one", "a/2.txt": b"two", "b.txt": b"three"}
    lines: list[str] = []
    part = local_copy("hf://datasets/me/set/a", log=lines.append)
    assert sorted(each.name for each in part.iterdir()) == ["1.txt", "2.txt"]
    assert lines == ["looking for hf://datasets/me/set/a on the Hugging Face hub …"]
    commit = hub.commit("datasets/me/set")
    whole = local_copy(f"hf://datasets/me/set@{commit}", log=lines.append)
    assert (whole / "b.txt").read_bytes() == b"three"
    (whole / "a" / "2.txt").unlink()
    assert (local_copy("hf://datasets/me/set", log=lines.append) / "a" / "2.txt").read_bytes() == b"two"
    (whole / "a" / "2.txt").unlink()
    hub.close()
    with pytest.raises(StorageError, match="the cache has no complete copy"):
        local_copy("hf://datasets/me/set", log=lines.append)
    for address, why in (
        ("hf://me/set", "a data set's address is hf://datasets/me/set"),
        ("hf://datasets/me/none", "there is none of this name"),
    ):
        server = HubServer()
        with pytest.MonkeyPatch.context() as patched:
            from huggingface_hub import constants

            patched.setattr(constants, "ENDPOINT", server.endpoint)
            with pytest.raises(StorageError, match=why):
                hub_copy(parse_address(address), lines.append)
        server.close()


def test_a_path_that_a_repository_does_not_have(hub: HubServer) -> None:
    hub.files["datasets/me/set"] = {"b.txt": b"three"}
    with pytest.raises(StorageError, match="has no 'a'"):
        hub_copy(parse_address("hf://datasets/me/set/a"), lambda _: None)
