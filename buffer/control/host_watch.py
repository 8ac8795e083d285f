"""What the host of a process has to give: processor, memory, GPUs, disk.

GPUs are read by NVML (package nvidia-ml-py, which vLLM brings), and without it by torch, if this
process uses CUDA: torch knows their memory alone.
"""

from __future__ import annotations

import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from buffer.imports import is_there


class HostWatch:
    """Reads the numbers of this host; `folder` is on the disk that counts."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._gpus = _devices()
        psutil.cpu_percent()  # each reading is of the time since the one before

    def numbers(self) -> dict[str, Any]:
        """Return the fields of `HeartbeatNumbers` that are about the host, as far as known."""
        memory = psutil.virtual_memory()
        found = {
            "busy_percent": round(psutil.cpu_percent()),
            "memory_bytes": memory.total - memory.available,
            "memory_total_bytes": memory.total,
        }
        with suppress(OSError):  # it was deleted, or its disk is gone
            found["disk_free_bytes"] = shutil.disk_usage(self._folder).free
        return found | self._of_gpus()

    def _of_gpus(self) -> dict[str, int]:
        if not self._gpus:
            torch: Any = sys.modules.get("torch")
            if torch is None or not torch.cuda.is_initialized():
                return {}
            free, total = torch.cuda.mem_get_info()
            return {"gpu_memory_bytes": total - free, "gpu_memory_total_bytes": total}
        import pynvml

        memory = [pynvml.nvmlDeviceGetMemoryInfo(gpu) for gpu in self._gpus]
        found = {
            "gpu_memory_bytes": sum(int(each.used) for each in memory),
            "gpu_memory_total_bytes": sum(int(each.total) for each in memory),
        }
        try:
            busy = [int(pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu) for gpu in self._gpus]
        except pynvml.NVMLError:  # a GPU that is divided does not tell
            return found
        return found | {"gpu_busy_percent": round(sum(busy) / len(busy))}


def _devices() -> list[Any]:
    if not is_there("pynvml"):
        return []
    import pynvml

    try:
        pynvml.nvmlInit()
        return [pynvml.nvmlDeviceGetHandleByIndex(n) for n in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError:  # no driver
        return []
