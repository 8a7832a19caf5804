"""How much memory this process may take, under the limits of its machine and container."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


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
