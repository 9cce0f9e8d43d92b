"""How much memory this process may still take: the machine, its control groups and its own limits, the least of them.

`/proc/meminfo` alone lies inside a container and under `ulimit`; each function reads one source and answers
None where that source sets no limit. `root` is the file system's root, a directory of fixtures in tests.
"""

from __future__ import annotations

import resource
from pathlib import Path

UNLIMITED = 1 << 60
"""Control group v1 writes "no limit" as a number just below 2**63."""


def available_memory_bytes(root: Path = Path("/")) -> int:
    """Bytes that can be allocated now before the kernel, a control group or a resource limit says no."""
    limits = (
        machine_available_bytes(root),
        cgroup_v2_available_bytes(root),
        cgroup_v1_available_bytes(root),
        resource_limit_available_bytes(root),
    )
    known = [limit for limit in limits if limit is not None]
    if not known:
        raise RuntimeError("cannot tell how much memory is available: set --kv-cache-memory-bytes")
    return max(0, min(known))


def machine_available_bytes(root: Path = Path("/")) -> int | None:
    """MemAvailable: free memory and what the kernel can take back without swapping."""
    fields = _fields(root / "proc/meminfo")
    return fields["MemAvailable"] * 1024 if "MemAvailable" in fields else None


def cgroup_v2_available_bytes(root: Path = Path("/")) -> int | None:
    """The tightest of this process's control group and the groups around it (cgroup v2)."""
    mount = root / "sys/fs/cgroup"
    if not (mount / "cgroup.controllers").exists():
        mount = mount / "unified"
    return _tightest(mount, _group_path(root, ""), "memory.max", "memory.current", "inactive_file")


def cgroup_v1_available_bytes(root: Path = Path("/")) -> int | None:
    """The same for the memory controller of cgroup v1."""
    mount = root / "sys/fs/cgroup/memory"
    group = _group_path(root, "memory")
    return _tightest(mount, group, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def resource_limit_available_bytes(root: Path = Path("/")) -> int | None:
    """What `ulimit -d` and `ulimit -v` leave. Linux counts untouched private mappings against both."""
    status = _fields(root / "proc/self/status")
    left = [
        limit - status.get(used, 0) * 1024
        for limit, used in (
            (resource.getrlimit(resource.RLIMIT_DATA)[0], "VmData"),
            (resource.getrlimit(resource.RLIMIT_AS)[0], "VmSize"),
        )
        if limit != resource.RLIM_INFINITY
    ]
    return min(left) if left else None


def resident_bytes(pid: int | str = "self") -> int | None:
    """Resident set of a process, None once it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
    except (OSError, IndexError, ValueError):
        return None


def _tightest(mount: Path, group: str, limit: str, used: str, reclaimable: str) -> int | None:
    # A container often sees its own group as the root of the mount, so a missing path means the mount itself.
    directory = mount / group.strip("/")
    if not directory.is_dir():
        directory = mount
    left: list[int] = []
    while True:
        maximum = _number(directory / limit)
        in_use = _number(directory / used)
        if maximum is not None and in_use is not None and maximum < UNLIMITED:
            left.append(maximum - in_use + _fields(directory / "memory.stat").get(reclaimable, 0))
        if directory == mount or mount not in directory.parents:
            return min(left) if left else None
        directory = directory.parent


def _group_path(root: Path, controller: str) -> str:
    """The path in `/proc/self/cgroup` for a v1 controller, or for v2 when `controller` is empty."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return path
    return ""


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # "max" is no number and no limit
        return None


def _fields(path: Path) -> dict[str, int]:
    """Files of lines like `Name:  123 kB` or `name 123`, numbers as written."""
    fields: dict[str, int] = {}
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return fields
    for line in lines:
        words = line.split()
        if len(words) >= 2 and words[1].isdigit():
            fields[words[0].rstrip(":")] = int(words[1])
    return fields
