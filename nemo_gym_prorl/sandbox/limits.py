# SPDX-License-Identifier: Apache-2.0
"""Which limits of a sandbox hold on this machine, and by what: one pure function, for the doctor and for the log."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from nemo_gym_prorl.sandbox import cgroup


LOGGER = logging.getLogger(__name__)

COUNTED_PER_NAMESPACE = (5, 14)
"""The Linux from which on a user's processes are counted in each user namespace apart."""

DELEGATE = "start the server with: systemd-run --user --scope -p Delegate=yes COMMAND (needs cgroups v2)"


class By(StrEnum):
    """How a limit is kept."""

    KERNEL = "enforced"
    WATCHED = "watched"
    """Looked at every now and then; overrun in between."""
    NOTHING = "not enforced"


@dataclass(frozen=True, slots=True)
class Facts:
    """What decides.

    Attributes:
        controllers: of control groups, those that bound each sandbox.
        kernel: the version of Linux.
    """

    controllers: frozenset[str]
    kernel: tuple[int, int]

    @classmethod
    def here(cls, controllers: frozenset[str]) -> Self:
        """This machine's, with these controllers."""
        major, minor = re.findall(r"\d+", os.uname().release)[:2]
        return cls(controllers, (int(major), int(minor)))


@dataclass(frozen=True, slots=True)
class Limit:
    """How one limit is kept.

    Attributes:
        name: what is bounded.
        by: how well.
        how: by what, in a few words.
    """

    name: str
    by: By
    how: str


def limits(facts: Facts) -> tuple[Limit, ...]:
    """Every limit of a sandbox, and how it is kept."""
    return (
        Limit("memory", By.KERNEL, "memory.max, no swap")
        if "memory" in facts.controllers
        else Limit("memory", By.WATCHED, "twice a second, the largest process is killed"),
        Limit("cpu", By.KERNEL, "cpu.max")
        if "cpu" in facts.controllers
        else Limit("cpu", By.NOTHING, "no cpu controller"),
        _processes(facts),
        Limit("disk", By.WATCHED, "every 2 s, the sandbox is ended"),
        Limit("file size", By.KERNEL, "RLIMIT_FSIZE"),
        Limit("shared memory", By.KERNEL, "size of each memory file system"),
    )


def _processes(facts: Facts) -> Limit:
    if "pids" in facts.controllers:
        return Limit("processes", By.KERNEL, "pids.max")
    if facts.kernel >= COUNTED_PER_NAMESPACE:
        return Limit("processes", By.KERNEL, "RLIMIT_NPROC in each user namespace")
    return Limit("processes", By.WATCHED, "RLIMIT_NPROC, over all sandboxes of a user together")


def shortcomings(found: Sequence[Limit]) -> str:
    """The limits that the kernel does not keep, in one line; empty if there are none."""
    parts = []
    for by in (By.WATCHED, By.NOTHING):
        if weak := [f"{limit.name} ({limit.how})" for limit in found if limit.by is by]:
            parts.append(f"{by}: {', '.join(weak)}")
    return "; ".join(parts)


_said = False


def say_once(controllers: frozenset[str]) -> None:
    """Log what does not hold, the first time that this process starts a sandbox."""
    global _said
    if not _said:
        _said = True
        if weak := shortcomings(limits(Facts.here(controllers))):
            more = "" if controllers == cgroup.CONTROLLERS else f"; for more, {DELEGATE}"
            LOGGER.warning("sandbox limits on this machine: %s%s", weak, more)
