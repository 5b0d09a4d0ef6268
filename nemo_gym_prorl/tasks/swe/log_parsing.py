# SPDX-License-Identifier: Apache-2.0
"""Statuses of tests out of logs, by the parsers of the ``swebench`` package, in a process of its own.

Logs are what a policy's code printed, and parsers search them with regular expressions that a hostile log can make
run for ever; so a parser has a process with a time limit, off the event loop: :mod:`.parser_process`.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping, Sequence

import orjson

from nemo_gym_prorl.failures import CallerError, FailureKind, InfrastructureError
from nemo_gym_prorl.tasks.swe import parser_process


class ParserTimeout(Exception):
    """The log is such that its parser does not come to an end."""


async def parse(parser: str, logs: Sequence[str], timeout_s: float) -> list[Mapping[str, str]]:
    """Statuses by test, for each of some logs.

    Args:
        parser: a name in swebench's registry, or :data:`.parser_process.R2E_PARSER`.
        logs: what runners printed.
        timeout_s: for all of them.

    Raises:
        ParserTimeout: they took longer.
        CallerError: there is no such parser; names the row's field.
        InfrastructureError: the process failed.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-I",
        parser_process.__file__,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={"PATH": os.environ.get("PATH", "")},
    )
    try:
        async with asyncio.timeout(timeout_s):
            job = await asyncio.to_thread(json.dumps, {"parser": parser, "logs": list(logs)})
            out, err = await process.communicate(job.encode())
    except TimeoutError as error:
        raise ParserTimeout(f"{parser} did not read the log within {timeout_s:g} s") from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode == parser_process.UNKNOWN_PARSER:
        raise CallerError(f"swebench has no parser {parser!r:.100}", field="swe.log_parser")
    if process.returncode:
        reason = f"the log parser ended with {process.returncode}: {err.decode(errors='replace')[-500:]}"
        raise InfrastructureError(reason, kind=FailureKind.VERIFIER_ERROR)
    maps: list[Mapping[str, str]] = orjson.loads(out)
    return maps
