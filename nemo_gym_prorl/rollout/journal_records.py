# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Jobs and outcomes as the bytes that a journal keeps, and back.

What listings show (``about``) is kept apart from what is large and seldom read (``content``): row, result, tokens and
steps, byte for byte as they are served.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import orjson
import zstandard

from nemo_gym_prorl.failures import Failure, FailureKind, Origin, Stage
from nemo_gym_prorl.rollout.checkpoints import Begin
from nemo_gym_prorl.rollout.job import Budgets, Job, JobState, Outcome, Progress, StageTime
from nemo_gym_prorl.rollout.steps import NO_STEPS
from nemo_gym_prorl.rollout.tokens import NO_TOKENS


_ASKED = (
    *("environment", "handler", "submitted_at", "group", "client", "run", "priority", "budgets", "max_attempts"),
    "forked_from",
)


def job_record(job: Job) -> tuple[bytes, bytes]:
    """Return what was asked for with a new job, and its row."""
    return orjson.dumps(_asked(job)), orjson.dumps(job.stored_row)


def job_to_run(job_id: str, asked: bytes, row: bytes) -> Job:
    """Return the job of a :func:`job_record`."""
    return _job(job_id, orjson.loads(asked), orjson.loads(row))


def _asked(job: Job) -> dict[str, Any]:
    asked = {"digest": job.digest.hex(), **{name: getattr(job, name) for name in _ASKED}}
    return asked | {name: value for name in ("begin", "tries", "scope") if (value := getattr(job, name))}


def _job(job_id: str, told: dict[str, Any], row: dict[str, Any] | bytes) -> Job:
    asked = {name: told[name] for name in _ASKED} | {"budgets": Budgets(**told["budgets"])}
    job = Job(job_id, row, bytes.fromhex(told["digest"]), **asked)
    job.tries, job.scope = told.get("tries", []), told.get("scope")
    if (begin := told.get("begin")) is not None:
        job.begin = Begin(**begin | {name: tuple(begin[name]) for name in ("tries", "parents")})
    return job


def outcome_record(job: Job, outcome: Outcome, finished_at: float) -> tuple[bytes, bytes]:
    """Return ``about`` and ``content`` of a packed job and its outcome. A job that a connection held keeps no content:
    its caller has taken the answer."""
    row = job.stored_row if isinstance(job.stored_row, bytes) else b"{}"
    parts = () if job.held else (row, outcome.body, job.tokens, job.steps)
    about = _asked(job) | {
        "held": job.held,
        "number": job.number,
        "times": {stage.value: time for stage, time in job.times.items()},
        "failures": job.failures,
        "turns": job.progress.turns,
        "tool_calls": job.progress.tool_calls,
        "finish_reason": job.progress.finish_reason,
        "labels": job.progress.labels,
        "resumed": job.resumed,
        "kept_turns": job.kept_turns,
        "finished_at": finished_at,
        "state": outcome.state,
        "reward": outcome.reward,
        "failure": outcome.failure,
        "masked": outcome.masked,
        "sizes": [len(part) for part in parts],
    }
    return orjson.dumps(about), b"".join(parts)


def ended_job(job_id: str, about: bytes, content: bytes | None) -> Job:
    """Return the job of an :func:`outcome_record` whose content is compressed; without content it has neither row nor
    result.

    Raises:
        ZstdError, ValueError: the content is damaged.
    """
    told = orjson.loads(about)
    parts = [] if content is None else _parts(content, told["sizes"])
    row, body, tokens, steps = parts or (b"{}", b"{}", NO_TOKENS, NO_STEPS)
    job = _job(job_id, told, row)
    job.state, job.held, job.delivered = JobState(told["state"]), told["held"], told["held"]
    job.number, job.finished_at, job.resumed = told["number"], told["finished_at"], told["resumed"]
    job.kept_turns = told["kept_turns"]
    job.times = {Stage(stage): StageTime(**time) for stage, time in told["times"].items()}
    job.failures = [_failure(failure) for failure in told["failures"]]
    versions = [{"first": label, "last": label} for label in told["labels"]]
    job.progress = Progress(told["turns"], told["tool_calls"], told["finish_reason"], versions)
    failure = _failure(told["failure"]) if told["failure"] else None
    job.outcome = Outcome(job.state, body, told["reward"], failure, told["masked"])
    job.tokens, job.steps = tokens, steps
    return job


def _failure(told: dict[str, Any]) -> Failure:
    known = {field.name: told[field.name] for field in fields(Failure)}
    stage = Stage(told["stage"]) if told["stage"] else None
    return Failure(**known | {"kind": FailureKind(told["kind"]), "origin": Origin(told["origin"]), "stage": stage})


def _parts(content: bytes, sizes: Sequence[int]) -> list[bytes]:
    raw, parts, at = zstandard.decompress(content), [], 0
    if len(raw) != sum(sizes):
        raise ValueError(f"it has {len(raw)} bytes in place of {sum(sizes)}")
    for size in sizes:
        parts.append(raw[at : at + size])
        at += size
    return parts
