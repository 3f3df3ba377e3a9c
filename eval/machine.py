"""What the figures were measured on: the processor's name, and the most memory that a call took there."""

from __future__ import annotations

import platform
import re
from pathlib import Path

import torch

PEAK = Path("/proc/self/status")
FORGET = Path("/proc/self/clear_refs")  # 5 sets the peak back to what is held now (Linux)


def processor() -> str:
    """The name of this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else processor()


def forget_peak(device: torch.device) -> bool:
    """The peak counts from now on; False where this system keeps the peak of the whole process."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        FORGET.write_text("5")
    except OSError:
        return False
    return True


def peak_bytes(device: torch.device) -> int:
    """The most that was held since `forget_peak`: torch's tensors on a GPU, else all of the process. 0 where nobody tells."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        told = re.search(r"VmHWM:\s+(\d+) kB", PEAK.read_text())
    except OSError:
        return 0
    return 1024 * int(told[1]) if told else 0
