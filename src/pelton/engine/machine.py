"""What this process may use of its machine: cores and memory, under the limits of a container."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def num_cores() -> int:
    """Physical cores that this process may run on, at least 1. A second hardware thread of a core counts nothing."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    siblings = {
        _read(Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")) or str(cpu) for cpu in allowed
    }
    cores = len(siblings)
    quota, _, period = (_read(_CGROUP / "cpu.max") or "max").partition(" ")
    if quota != "max" and period:
        cores = min(cores, -(-int(quota) // int(period)))
    return max(1, cores)


def free_memory() -> int:
    """Bytes that can be taken without swapping, as the kernel and the container's limit see it."""
    available = _meminfo("MemAvailable:")
    if available is None:
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit, used = _read(_CGROUP / "memory.max"), _read(_CGROUP / "memory.current")
    if limit is not None and used is not None and limit != "max":
        available = min(available, max(0, int(limit) - int(used) + _file_cache()))
    return available


def _meminfo(field: str) -> int | None:
    for line in (_read(Path("/proc/meminfo")) or "").splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    return None


def _file_cache() -> int:
    """Page cache that the container's limit counts but that is given up on demand."""
    for line in (_read(_CGROUP / "memory.stat") or "").splitlines():
        if line.startswith("inactive_file "):
            return int(line.split()[1])
    return 0


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
