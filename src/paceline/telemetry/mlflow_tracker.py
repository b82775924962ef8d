"""MLflow: records as metrics, the recipe as parameters, the environment as tags.

Without ``MLFLOW_TRACKING_URI`` everything is in the run directory's folder ``mlflow``: in a SQLite database, as MLflow
recommends; or as files, if the packages for that are not installed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.telemetry.async_tracker import flatten, read_tracker_state, save_tracker_state, scalars

_STATUS = {"completed": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
_MAX_PARAMETERS = 100
# MLflow accepts no more in one call.
_MAX_METRICS = 1000
_MAX_PARAMETER_LENGTH = 6000
_MAX_TAG_LENGTH = 5000
_DATABASE = ("sqlalchemy", "alembic")
# Placeholder for a server's name.
_IN_DATABASE, _IN_FILES = "database", "here"


def _valid_name(name: str) -> str:
    """Return a name that MLflow accepts; a pattern of ``optimizer.groups`` contains other characters too."""
    return re.sub(r"[^\w\-. :/]", "_", name)


def _local_storage(recorded: str | None) -> str:
    """Choose the storage of a run without a server: the existing one, else a database if available."""
    if recorded in (_IN_DATABASE, _IN_FILES):
        return recorded
    return _IN_DATABASE if all(map(importlib.util.find_spec, _DATABASE)) else _IN_FILES


class MlflowTracker:
    """A run in MLflow; continues the one that the directory names.

    Args:
        directory: The tracker's folder in the run directory.
        name: The run's name.
        recipe: The recipe, nested.
        environment: As in ``environment.json``.
    """

    def __init__(self, directory: Path, name: str, recipe: Mapping[str, Any], environment: Mapping[str, Any]) -> None:
        server = os.environ.get("MLFLOW_TRACKING_URI", "")
        # MLflow requires the first since it recommends a database. The others disable its telemetry and keep library
        # messages off the terminal.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
        from mlflow.tracking import MlflowClient

        directory.mkdir(exist_ok=True)
        note = read_tracker_state(directory)
        # An address may contain a password. Without an address, the folder may have been moved with its run.
        storage = hashlib.sha256(server.encode()).hexdigest() if server else _local_storage(note.get("server"))
        folder = directory.resolve()
        self._artifacts = None if server or storage == _IN_FILES else (folder / "artifacts").as_uri()
        if storage == _IN_DATABASE and not note:
            # A launch killed while MLflow created its database has left a partial one that MLflow cannot open.
            for part in {*folder.glob("mlflow.db*")} - {*folder.glob("*.incomplete")}:
                part.replace(part.with_name(f"{part.name}.incomplete"))
        local = f"sqlite:///{folder / 'mlflow.db'}" if storage == _IN_DATABASE else folder.as_uri()
        self._client = MlflowClient(tracking_uri=server or local)
        self._last: dict[str, int] = {}
        if note.get("server") == storage:
            self._run = str(note["run_id"])
            self._resume(flatten(recipe))
        else:
            self._run = self._create(name, flatten(recipe), flatten(environment))
            save_tracker_state(directory, {"server": storage, "run_id": self._run})

    def write(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Log the values of events, except those already logged."""
        from mlflow.entities import Metric

        metrics = [
            Metric(_valid_name(name), float(value), int(1000 * float(event["time"])), int(event["step"]))
            for event in events
            for name, value in scalars(event).items()
            if int(event["step"]) > self._last.get(_valid_name(name), -1)
        ]
        for first in range(0, len(metrics), _MAX_METRICS):
            self._client.log_batch(self._run, metrics=metrics[first : first + _MAX_METRICS])

    def close(self, status: str) -> None:
        """Set how the run ended; ``KILLED`` if unknown."""
        self._client.set_terminated(self._run, _STATUS.get(status, "KILLED"))

    def _create(self, run_name: str, recipe: Mapping[str, Any], environment: Mapping[str, Any]) -> str:
        from mlflow.entities import Param

        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "paceline")
        existing = self._client.get_experiment_by_name(name)
        experiment = (
            self._client.create_experiment(name, self._artifacts) if existing is None else existing.experiment_id
        )
        tags = {_valid_name(name): str(value)[:_MAX_TAG_LENGTH] for name, value in environment.items()}
        run = self._client.create_run(experiment, run_name=run_name, tags=tags).info.run_id
        params = [Param(_valid_name(key), str(value)[:_MAX_PARAMETER_LENGTH]) for key, value in recipe.items()]
        for first in range(0, len(params), _MAX_PARAMETERS):
            self._client.log_batch(run, params=params[first : first + _MAX_PARAMETERS])
        return str(run)

    def _resume(self, recipe: Mapping[str, Any]) -> None:
        """Find out what is already logged: MLflow would store a step's value twice, and cannot remove it."""
        self._client.update_run(self._run, status="RUNNING")
        data = self._client.get_run(self._run).data
        for name in data.metrics:
            self._last[name] = max(each.step for each in self._client.get_metric_history(self._run, name))
        for name, value in recipe.items():
            key, text = _valid_name(name), str(value)[:_MAX_PARAMETER_LENGTH]
            if data.params.get(key) != text:
                # A parameter cannot be changed.
                self._client.set_tag(self._run, f"recipe.{key}", text[:_MAX_TAG_LENGTH])
