"""How do a run's weights become one file that other programs open?"""

from __future__ import annotations

import contextlib
from pathlib import Path

from paceline.checkpoint.durable import reporting_disk_errors
from paceline.checkpoint.tensor_file import write_tensor_file
from paceline.checkpoint.weights import SavedWeights, read_weights
from paceline.errors import CheckpointError


def export_safetensors(target: Path, output: Path, *, weights: str = "auto", best: bool = False) -> SavedWeights:
    """Write one set of weights to a new safetensors file, on the CPU.

    Parts that processes hold are put together, and low-rank adapters are merged into the network's own weights.

    Args:
        target: A run directory, a checkpoint directory or a safetensors file.
        output: The new file; its name ends in ``.safetensors``.
        weights: ``auto``, ``model`` or ``ema``.
        best: In a run directory, take the best checkpoint instead of the newest.

    Returns:
        The weights that were written.

    Raises:
        CheckpointError: If there are no such weights, or the file exists or cannot be written.
    """
    if output.suffix != ".safetensors":
        raise CheckpointError(f"--output={output}: the name of such a file must end in .safetensors; change it.")
    if output.exists():
        raise CheckpointError(f"--output={output} exists already and is not written over; give another name.")
    saved = read_weights(target, weights, best=best)
    contiguous = {key: tensor.contiguous() for key, tensor in saved.plain.items()}
    with reporting_disk_errors("write the weights to", output):
        try:
            write_tensor_file(output, contiguous, {**saved.metadata, "weights": saved.weights, "format": "pt"})
        except FileExistsError:
            raise
        except BaseException:
            with contextlib.suppress(OSError):
                output.unlink(missing_ok=True)
            raise
    return saved
