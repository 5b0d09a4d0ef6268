# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Statuses of tests out of logs, by the parsers of the ``swebench`` package, and what the dataset's own harness makes
of them, in a process of its own.

Logs are what a policy's code printed, and parsers search them with regular expressions that a hostile log can make
run for ever; so a parser has a process with a time limit, off the event loop: :mod:`.parser_process`.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from nemo_gym_prorl.failures import CallerError, FailureKind, InfrastructureError
from nemo_gym_prorl.processes import interpreter_environ
from nemo_gym_prorl.tasks.swe import parser_process
from nemo_gym_prorl.tasks.swe.instance import SweInstance


class ParserTimeout(Exception):
    """The log is such that its parser does not come to an end."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """What logs say.

    Attributes:
        maps: test to status, of each.
        resolved: the dataset's own harness would say of the first that all is as it should be.
    """

    maps: Sequence[Mapping[str, str]]
    resolved: bool


async def parse(
    instance: SweInstance, logs: Sequence[str], timeout_s: float, *, exit_code: int = 0, instance_id: str = "a__b-1"
) -> Parsed:
    """Read what runners printed.

    Args:
        instance: the task.
        logs: of one run: what it printed, and what else tells of it, in the same words.
        timeout_s: for all of them.
        exit_code: of the test command.
        instance_id: the task's name, by which some parsers go.

    Raises:
        ParserTimeout: they took longer.
        CallerError: there is no such parser; names the row's field.
        InfrastructureError: the process failed.
    """
    job = job_of(instance, logs, exit_code, instance_id)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-I",
        parser_process.__file__,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=interpreter_environ(),
    )
    try:
        async with asyncio.timeout(timeout_s):
            out, err = await process.communicate((await asyncio.to_thread(json.dumps, job)).encode())
    except TimeoutError as error:
        raise ParserTimeout(f"{instance.log_parser} did not read the log within {timeout_s:g} s") from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode == parser_process.UNKNOWN_PARSER:
        raise CallerError(f"swebench has no parser {instance.log_parser!r:.100}", field="swe.log_parser")
    if process.returncode:
        reason = f"the log parser ended with {process.returncode}: {err.decode(errors='replace')[-500:]}"
        raise InfrastructureError(reason, kind=FailureKind.VERIFIER_ERROR)
    return Parsed(**orjson.loads(out))


def job_of(instance: SweInstance, logs: Sequence[str], exit_code: int, instance_id: str) -> dict[str, Any]:
    """What :mod:`.parser_process` is asked."""
    fields = {"repo", "version", "FAIL_TO_PASS", "PASS_TO_PASS", "log_parser", "eval_type", "expected_output"}
    task = {"instance_id": instance_id} | instance.model_dump(mode="json", include=fields)
    return {"task": task, "exit_code": exit_code, "logs": list(logs)}
