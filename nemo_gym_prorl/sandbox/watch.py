# SPDX-License-Identifier: Apache-2.0
"""Limits where the kernel keeps none for us: look, and act. Too much memory costs the largest process its life.

Control groups can be used only where an administrator delegated them, which few clusters do. So use is measured: the
sum of resident sizes, which is cheap but counts shared pages many times, and only where that is too much the sum of
proportional sizes, which is right but slow. Between two looks a sandbox may go over by what it can allocate in that
time; the limit is a fence against runaway programs, not an accounting.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from nemo_gym_prorl.sandbox.lease import process_ids


PAGE = os.sysconf("SC_PAGE_SIZE")

_PSS = re.compile(rb"^Pss:\s+(\d+) kB$", re.MULTILINE)


@dataclass(slots=True)
class Usage:
    """What one sandbox may use. 0 means no limit."""

    memory_limit: int = 0
    measuring: bool = False


def excess(sandboxes: Mapping[int, Usage]) -> Iterator[tuple[int, int, str]]:
    """The PID namespaces (keys of ``sandboxes``) that use too much: namespace, process to kill, reason."""
    if not any(usage.memory_limit for usage in sandboxes.values()):
        return
    resident: dict[int, dict[int, int]] = defaultdict(dict)
    for pid in process_ids():
        try:
            space = os.stat(f"/proc/{pid}/ns/pid").st_ino
            if space in sandboxes:
                resident[space][pid] = int(Path(f"/proc/{pid}/statm").read_bytes().split()[1]) * PAGE
        except OSError:
            # Ended meanwhile, or somebody else's.
            continue
    for space, processes in resident.items():
        limit = sandboxes[space].memory_limit
        if not limit or sum(processes.values()) <= limit:
            continue
        proportional = {pid: _proportional(pid) for pid in processes}
        total = sum(proportional.values())
        if total > limit:
            victim = max(proportional, key=lambda pid: proportional[pid])
            yield space, victim, f"memory: {total >> 20} MiB in use of {limit >> 20} MiB"


def _proportional(pid: int) -> int:
    try:
        found = _PSS.search(Path(f"/proc/{pid}/smaps_rollup").read_bytes())
    except OSError:
        return 0
    return int(found[1]) << 10 if found else 0


def disk_use(folder: Path) -> int:
    """Bytes on disk below ``folder``; what vanishes meanwhile does not count."""
    total = 0
    for path, _folders, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(f"{path}/{name}").st_blocks * 512
    return total
