"""How does a look into a user's task leave the process as it found it?"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import torch
from torch.backends import cudnn

from paceline.distributed.affinity import affinity_restored
from paceline.trainer.process_settings import restore_globals


@contextlib.contextmanager
def untouched() -> Iterator[None]:
    """Put back, at the end, every state of the process that a look into a task may change.

    Inside, cuDNN is set as a run on a GPU sets it, so that it shows when code of the user's own sets it otherwise.
    """
    with contextlib.ExitStack() as held:
        held.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # of code that is only looked at
        held.enter_context(restore_globals())
        held.enter_context(torch.enable_grad())
        held.enter_context(affinity_restored())
        cudnn.benchmark, cudnn.enabled, cudnn.deterministic = True, True, False
        yield
