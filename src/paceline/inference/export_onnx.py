"""ONNX files that ONNX Runtime answers from as the network does."""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.errors import ModelError, PacelineError
from paceline.inference.exportable import OUTPUT, Exportable, parameter_bytes

_LARGEST_BYTES = 1_900_000_000  # protobuf's limit is 2 GiB, for one file with everything in it
_LIBRARIES = ("onnx", "onnxruntime", "onnxscript")


def need_onnx() -> None:
    """Look for the libraries.

    Raises:
        PacelineError: If one is missing; names the extra.
    """
    for name in _LIBRARIES:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise PacelineError(
                f"--format onnx needs {name} ({error}); install it with: pip install 'paceline[onnx]'."
            ) from error


def write_onnx(exportable: Exportable, path: Path, metadata: Mapping[str, str]) -> float:
    """Write a network as one ONNX file, and have ONNX Runtime answer from it in batches of several sizes.

    Args:
        exportable: The network.
        path: The new file.
        metadata: Kept in the file (``metadata_props``).

    Returns:
        The largest difference between ONNX Runtime's answers and the network's, in logits.

    Raises:
        ModelError: If the network cannot be written in ONNX's operators, or ONNX Runtime answers otherwise.
    """
    import onnx

    size = parameter_bytes(exportable.network)
    if size > _LARGEST_BYTES:
        raise ModelError(
            f"the network has {size / 2**30:.1f} GiB of weights, and an ONNX file holds at most 2; use --format "
            "safetensors or torch-export."
        )
    model = _translated(exportable)
    write_metadata(model, metadata)
    onnx.checker.check_model(model, full_check=True)
    path.write_bytes(model.SerializeToString())
    return exportable.compare(session(path), what="ONNX Runtime")


def _translated(exportable: Exportable) -> Any:
    try:
        with quiet():
            program = torch.onnx.export(
                exportable.network,
                exportable.examples(2),
                dynamo=True,
                dynamic_shapes=exportable.dynamic_shapes,
                input_names=[each.name for each in exportable.inputs],
                output_names=[OUTPUT],
                verbose=False,
            )
    except Exception as error:  # whatever tracing a network of any kind raises
        raise ModelError(
            f"{type(exportable.network).__name__} cannot be written as ONNX: {first_line(error)}; use --format "
            "safetensors or torch-export."
        ) from error
    assert program is not None  # as dynamo=True has it
    return program.model_proto


def first_line(error: BaseException) -> str:
    """The first line of an error that says something, shortened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200] if lines else 'no reason given'}"


def write_metadata(model: Any, metadata: Mapping[str, str]) -> None:
    """Put a description into an ONNX model, in place of the one it has."""
    del model.metadata_props[:]
    for key, value in metadata.items():
        entry = model.metadata_props.add()
        entry.key, entry.value = key, value


def session(path: Path) -> OnnxSession:
    """Open an ONNX file with ONNX Runtime on the CPU."""
    return OnnxSession(path)


class OnnxSession:
    """Answers from an ONNX file on the CPU.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # errors
        options.intra_op_num_threads = torch.get_num_threads()
        options.inter_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self._names = [each.name for each in self._session.get_inputs()]

    def __call__(self, inputs: Sequence[Tensor]) -> Tensor:
        """Float32 logits."""
        given = {name: each.numpy() for name, each in zip(self._names, inputs, strict=True)}
        return torch.from_numpy(self._session.run([OUTPUT], given)[0])


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the exporter and the quantiser: they warn of their own changes to come, and what counts is compared."""
    loggers = [logging.getLogger(name) for name in (None, "torch.onnx", "onnxscript", "onnx_ir")]
    before = [each.level for each in loggers]
    try:
        for each in loggers:
            each.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for each, level in zip(loggers, before, strict=True):
            each.setLevel(level)
