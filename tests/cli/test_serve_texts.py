"""`paceline serve` of texts: classes, tags, masked words, and text that is written."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from calls import in_a_process
from serving import PATIENCE_SECONDS, Serving
from tiny_text import tagged, write_lines

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.needs("fastapi", "prometheus_client", "uvicorn", "python_multipart"),
]
SHORT = ("train.duration=3 steps", "evaluate.every=off", "telemetry.trackers=[]", "telemetry.report=false")


@pytest.fixture(scope="module")
def started(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Serving, list[str]]]:
    """A service of a short run of a recipe, and the command that the run's end names to try it."""
    root = tmp_path_factory.mktemp("texts")
    data = f"data.path={write_lines(root / 'tagged.jsonl', tagged(90))}"
    recipe, *more = {
        "tags": ("docs-topics", "task=token_classification", "data.dataset=text_table", data, "data.text.rows=single"),
    }.get(request.param, (request.param,))
    out = in_a_process("train", recipe, *SHORT, *more, "--run-dir", root / "run", cwd=root).ended(0).out
    _, *words = shlex.split(next(line for line in out.splitlines() if " predict " in line))
    service = Serving(root / "run", root, "--max-images", 4, "--max-seconds", 60, "--max-request-mb", 0.1)
    yield service, words
    assert service.stop() == 0


def ask(service: Serving, body: Any) -> tuple[int, Any]:
    return service.ask("POST", "/predict", body if isinstance(body, bytes) else json.dumps(body))[:2]


@pytest.mark.parametrize("started", ["docs-topics", "tags", "bert-tiny-docs", "gpt-small-docs"], indirect=True)
def test_it_answers_as_predict_does(started: tuple[Serving, list[str]]) -> None:
    service, words = started
    prompt = words[-1]
    wanted = in_a_process(*words, "--json", cwd=Path.cwd()).ended(0).document
    status, found = ask(service, {"texts": [prompt]})
    assert status == 200
    (answer,) = found["predictions"]
    if "written" in wanted:
        assert prompt + answer["text"] == wanted["text"]
    else:
        named = {key: wanted[key] for key in ("labels", "words", "entities", "text") if key in wanted}
        assert named == {key: answer[key] for key in named} != {}


@pytest.mark.parametrize("started", ["gpt-small-docs"], indirect=True)
def test_what_is_written_arrives_piece_by_piece(started: tuple[Serving, list[str]]) -> None:
    service, _ = started
    asked = {"texts": ["def "], "tokens": 40, "seed": 3}
    whole = ask(service, asked)[1]["predictions"][0]["text"]
    with closing(HTTPConnection(*service.address, timeout=PATIENCE_SECONDS)) as connection:
        connection.request("POST", "/predict", json.dumps({**asked, "stream": True}))
        *pieces, last = [json.loads(line) for line in connection.getresponse()]
    assert last == {"done": True}
    assert len(pieces) > 3
    assert "".join(piece["text"] for piece in pieces) == whole
    # Who leaves frees the network for the others.
    with closing(HTTPConnection(*service.address, timeout=PATIENCE_SECONDS)) as connection:
        connection.request("POST", "/predict", json.dumps({**asked, "tokens": 4096, "stream": True}))
        connection.getresponse().readline()
    assert ask(service, asked)[0] == 200


@pytest.mark.parametrize("started", ["docs-topics"], indirect=True)
@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"x", 422, "Invalid JSON"),
        (b'{"texts": ["\\ud800"]}', 422, "Invalid JSON"),
        ({"text": "a"}, 422, "Field required"),
        ({"texts": []}, 422, "at least 1"),
        ({"texts": ["a"] * 5}, 400, "at most 4"),
        ({"texts": ["a" * 200_000]}, 413, "larger than"),
        ({"texts": [" "]}, 422, "it is empty"),
        ({"texts": ["a"], "tokens": 3}, 422, "tokens has no effect"),
        ({"texts": ["a"], "stream": True}, 422, "models that write text"),
        ({"texts": ["a"], "top_k": 0}, 422, "greater than or equal to 1"),
    ],
)
def test_what_is_refused(started: tuple[Serving, list[str]], body: Any, status: int, said: str) -> None:
    service, _ = started
    found = ask(service, body)
    assert found[0] == status
    assert said in found[1]["error"]
    kept = ask(service, {"texts": ["a bird", " "], "top_k": 1})[1]["predictions"]
    assert [len(each["labels"]) for each in kept] == [1, 0]
    assert kept[1]["error"] == "it is empty"
