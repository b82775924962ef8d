"""Commands that tests start are forked, whatever a library has put into the environment meanwhile."""

from __future__ import annotations

import os

import fork_server
import pytest


def test_what_scikit_learn_sets_starts_no_new_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = {**os.environ, "PYTHONPATH": str(fork_server.SOURCES), "OMP_NUM_THREADS": "1"}
    monkeypatch.setenv("KMP_INIT_AT_FORK", "FALSE")
    monkeypatch.setenv("KMP_DUPLICATE_LIB_OK", "True")
    assert fork_server._starts_like_server(alone)
    assert not fork_server._starts_like_server({**alone, "OMP_NUM_THREADS": "2"})
