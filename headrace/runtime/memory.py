"""How much memory a device offers and how much of it is taken already, before any weight is loaded."""

from __future__ import annotations

from headrace.planner import host


def device_memory_bytes(device: str) -> tuple[int, int]:
    """(offered, taken). `device` is cpu or cuda.

    On a CPU what others and this process hold is not offered in the first place, so nothing counts as taken. On
    a GPU the whole is offered, and what others and the driver hold is taken.
    """
    if device == "cpu":
        return host.available_memory_bytes(), 0
    import torch

    free, total = torch.cuda.mem_get_info()
    return total, total - free
