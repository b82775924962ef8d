"""Energy of a device, read from its own counter; never estimated without one.

For a GPU this is NVML's counter (Volta and later), of the whole board; for a CPU it is RAPL's, of the whole packages
with everything that runs on them. Both advance in steps of some milliseconds, and RAPL's wraps around to zero
occasionally.
"""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_RAPL = Path("/sys/class/powercap")
_NVML = "libnvidia-ml.so.1"


class EnergyCounter:
    """Energy counter of one device, relative to an arbitrary start.

    Attributes:
        of: Description of the counted device.
        identity: Identifies the counter: two processes may share one, or have one each. Empty without one.
        unavailable_reason: Why it cannot be read; empty if it can.
    """

    def __init__(self, device: torch.device, *, rapl: Path = _RAPL) -> None:
        self.of, self.identity, self.unavailable_reason = "", "", ""
        self._zones: list[Path] = []
        self._nvml: ctypes.CDLL | None = None
        self._handle = ctypes.c_void_p()
        if device.type == "cpu":
            self._find_packages(rapl)
        elif device.type == "cuda":
            self._find_board(device)
        else:
            self.unavailable_reason = f"no counter of {device.type} devices is known"
        self._last = [0] * len(self._zones)
        self._wrapped = [0] * len(self._zones)

    def joules(self) -> float | None:
        """Return the counter's state; only differences are meaningful. None if it cannot be read."""
        try:
            if self._nvml is not None:
                millijoules = ctypes.c_ulonglong()
                failed = self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle, ctypes.byref(millijoules))
                return None if failed else millijoules.value / 1e3
            return sum(map(self._read, range(len(self._zones)))) / 1e6 if self._zones else None
        except (OSError, ValueError):
            return None

    def _read(self, index: int) -> int:
        """Return the microjoules of one package, corrected for wraparound of its counter."""
        zone = self._zones[index]
        now = int((zone / "energy_uj").read_text())
        if now < self._last[index]:
            self._wrapped[index] += int((zone / "max_energy_range_uj").read_text())
        self._last[index] = now
        return now + self._wrapped[index]

    def _find_packages(self, rapl: Path) -> None:
        # Zones of complete packages only: nested zones are parts of the same energy.
        zones = sorted(zone for zone in rapl.glob("*-rapl:*") if zone.name.count(":") == 1)
        if not zones:
            self.unavailable_reason = "this machine has no RAPL counter (/sys/class/powercap)"
            return
        try:
            for zone in zones:
                int((zone / "energy_uj").read_text())
        except (OSError, ValueError):
            self.unavailable_reason = "the RAPL counter can be read by root only (/sys/class/powercap)"
            return
        self._zones, self.of, self.identity = zones, "processor packages (RAPL)", str(rapl)

    def _find_board(self, device: torch.device) -> None:
        import torch

        self.unavailable_reason = "NVML reports no energy for this device"
        # Whatever a driver lacks, the measurement continues without it.
        with contextlib.suppress(OSError, AttributeError):
            library = ctypes.CDLL(_NVML)
            # By its UUID: NVML also counts devices that CUDA_VISIBLE_DEVICES hides.
            identity = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
            if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByUUID(identity, ctypes.byref(self._handle)):
                return
            self._nvml = library
            if self.joules() is None:
                self._nvml = None
                return
            self.of, self.identity, self.unavailable_reason = "the GPU's board (NVML)", identity.decode(), ""
