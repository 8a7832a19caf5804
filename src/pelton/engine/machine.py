"""What this process may take of its machine, under the limits of its container: memory and processor cores."""

from __future__ import annotations

import math
import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_CPUS = Path("/sys/devices/system/cpu")


def free_memory() -> int:
    """Bytes that can be taken without swapping, as the kernel and the container's limit see it."""
    available = _meminfo("MemAvailable:")
    if available is None:
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit, used = _read(_CGROUP / "memory.max"), _read(_CGROUP / "memory.current")
    if limit is not None and used is not None and limit != "max":
        available = min(available, max(0, int(limit) - int(used) + _file_cache()))
    return available


def private_memory(pid: int | None) -> int:
    """Bytes of a process that are in memory and no file's; 0 where there is none or that cannot be seen."""
    for line in (_read(Path(f"/proc/{pid}/status")) or "").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def num_cores() -> int:
    """Physical cores that this process may run on: threads of one core count once. No more than its container's
    share of processor time keeps busy."""
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cores = {_read(_CPUS / f"cpu{cpu}" / "topology" / "thread_siblings_list") or str(cpu) for cpu in cpus}
    quota, _, period = (_read(_CGROUP / "cpu.max") or "max").partition(" ")
    if quota == "max":
        return len(cores)
    return min(len(cores), max(1, math.ceil(int(quota) / int(period))))


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
