# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Siblings that are scored together: which of them are there, and when they are enough.

Some verifiers compare the rollouts of a prompt with each other (Gym's ``genrm_compare``): ``/verify`` answers none of
a group before all of it have come. Were siblings scored as they come, those that wait for the others would hold the
slots that the others need. So they gather outside the queue, and go through EVAL as one.

A group has one cohort at a time in the queue or at work, since a verifier tells its cohorts apart by their prompt at
best. Who is scored again, after a failure, gathers anew.

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count


@dataclass(frozen=True, slots=True)
class Member:
    """A job's part in its cohort: the cohort's number, which no other has had, and the job's place in it from 0."""

    cohort: int
    index: int


@dataclass(slots=True)
class _Group:
    """The jobs of a group that have no outcome yet.

    Attributes:
        live: all of them.
        gathered: those that wait for siblings, in the order in which they came.
        complete: those that wait for a slot, the one that stands in the queue first.
        working: those that are being scored.
    """

    live: set[str] = field(default_factory=set)
    gathered: dict[str, None] = field(default_factory=dict)
    complete: tuple[str, ...] = ()
    working: dict[str, None] = field(default_factory=dict)


class Cohorts:
    """The groups of those environments whose verifiers score siblings together.

    Args:
        sizes: how many make a cohort, by environment; others are none of its business.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._sizes = {name: size for name, size in sizes.items() if size > 1}
        self._groups: dict[tuple[str, str], _Group] = {}
        self._keys: dict[str, tuple[str, str]] = {}
        self._numbers = count()

    def __contains__(self, job_id: str) -> bool:
        return job_id in self._keys

    @property
    def waiting(self) -> int:
        """Jobs that wait for siblings or with them, those in the queue left out."""
        return sum(len(group.gathered) + len(group.complete[1:]) for group in self._groups.values())

    def missing(self, job_id: str) -> tuple[int, frozenset[str]] | None:
        """How many siblings a waiting job lacks of which none is on its way, and those there are; ``None`` if it does
        not wait for any, nor for a slot with those that it had: they may be too few again before there is one."""
        if job_id not in self._keys:
            return None
        group, size = self._of(job_id)
        if job_id not in group.gathered and job_id not in group.complete:
            return None
        return max(0, size - len(group.live)), frozenset(group.live)

    # -- events: each that may complete a cohort gives the job that is to stand in the queue for it ---------------

    def join(self, job_id: str, environment: str, group: str | None) -> None:
        """A job begins; one of another environment, or without a group, is left alone."""
        if environment in self._sizes and group is not None:
            self._keys[job_id] = environment, group
            self._groups.setdefault((environment, group), _Group()).live.add(job_id)

    def leave(self, job_id: str) -> None:
        """A job has its outcome; it neither waits nor works."""
        key = self._keys.pop(job_id, None)
        if key is not None:
            self._groups[key].live.discard(job_id)
            if not self._groups[key].live:
                del self._groups[key]

    def gather(self, job_id: str) -> str | None:
        """A job is ready to be scored."""
        group, size = self._of(job_id)
        group.gathered[job_id] = None
        return self._completed(group, size)

    def withdraw(self, job_id: str) -> tuple[str | None, str | None]:
        """A job waits no more. Gives the one that stood in the queue for its cohort, which is incomplete now, if that
        was complete, and the one that is to stand there instead."""
        group, size = self._of(job_id)
        stood = None
        if job_id in group.complete:
            stood = group.complete[0]
            group.gathered = dict.fromkeys((*group.complete, *group.gathered))
            group.complete = ()
        group.gathered.pop(job_id, None)
        return stood, self._completed(group, size)

    def start(self, job_id: str) -> dict[str, Member]:
        """The job that stands in the queue has a slot: all of its cohort start, the job first."""
        group, _ = self._of(job_id)
        number = next(self._numbers)
        group.working, group.complete = dict.fromkeys(group.complete), ()
        return {member: Member(number, index) for index, member in enumerate(group.working)}

    def scored(self, job_id: str) -> tuple[str | None, str | None]:
        """A job is not worked on any more. Gives a sibling that still is, if there is one; else who is next."""
        group, size = self._of(job_id)
        del group.working[job_id]
        return next(iter(group.working), None), self._completed(group, size)

    def _of(self, job_id: str) -> tuple[_Group, int]:
        key = self._keys[job_id]
        return self._groups[key], self._sizes[key[0]]

    def _completed(self, group: _Group, size: int) -> str | None:
        if group.complete or group.working or len(group.gathered) < size:
            return None
        group.complete = tuple(group.gathered)[:size]
        group.gathered = dict.fromkeys(tuple(group.gathered)[size:])
        return group.complete[0]
