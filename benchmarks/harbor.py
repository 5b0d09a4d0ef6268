# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Check that rows of Harbor tasks can be graded on this machine: once with their solution, once without any action.

``python -m benchmarks.harbor ROWS --tools FOLDER`` runs two rollouts per row through the environment's server. The
first copies and runs the task's solution by the tool ``bash``, like an agent. The second only submits. A sound task
gives reward 1 to the first rollout and 0 to the second. ``prorl image build-all ROWS`` builds the images. The file
``--output`` gets one line of JSON per rollout.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import shlex
import tarfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.prorl_code.conftest import RESPONSE, Client, build
from tests.rollout.serving import serve


CHUNK = 96 << 10
"""Characters of the packed solution per command; the kernel limits one argument to 128 KiB."""

LIMIT_S = 3600
"""Time limit of a solution in seconds."""

SETTINGS = {"tool_timeout_s": LIMIT_S, "max_tool_timeout_s": LIMIT_S, "tool_silence_s": LIMIT_S}
PLAYERS = ("solution", "nothing")
KEPT_OUTPUT = 4000  # characters of the tests' output in a line of ``--output``


def packed(folder: Path) -> str:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        archive.add(folder, ".")
    return base64.b64encode(buffer.getvalue()).decode()


def commands_of(row: Mapping[str, Any]) -> Iterator[str]:
    task = row["harbor"]
    text = packed(Path(task["folder"], "solution"))
    for start in range(0, len(text), CHUNK):
        yield f"echo {text[start : start + CHUNK]} >> /tmp/solution.b64"
    yield "mkdir -p /solution && base64 -d /tmp/solution.b64 | tar -xz -C /solution && rm /tmp/solution.b64"
    env = task.get("config", {}).get("solution", {}).get("env", {})
    words = [f"{name}={value}" for name, value in {"DEBIAN_FRONTEND": "noninteractive", **env}.items()]
    run = f"chmod +x /solution/solve.sh && env {shlex.join(words)} bash -c '(/solution/solve.sh)'"
    yield f"{run} < /dev/null > /tmp/solution.log 2>&1; s=$?; tail -c 2000 /tmp/solution.log; echo; echo exit code $s"


async def play(base_url: str, row: Mapping[str, Any], player: str) -> dict[str, Any]:
    began = time.monotonic()
    said = ""
    async with Client(base_url, timeout_s=None) as client:
        status, reply, kind = await client.post("/seed_session", row)
        if status == 200:
            try:
                for command in commands_of(row) if player == "solution" else ():
                    said = await client.tool("bash", command=command)
                played = time.monotonic()
                await client.tool("submit")
                await client.post("/release_session")
                status, reply, kind = await client.post("/verify", {**row, "response": RESPONSE})
            finally:
                await client.post("/close_session")
        else:
            played = began
    line = {"task": row["instance_id"], "player": player, "played_s": round(played - began, 1), "said": said[-2000:]}
    line["seconds"] = round(time.monotonic() - began, 1)
    if status != 200:
        return {**line, "reward": None, "verdict": kind, "why": str(reply)[:KEPT_OUTPUT]}
    output = reply.get("verifier_output", "")[-KEPT_OUTPUT:]
    return {**line, **{name: reply.get(name) for name in ("reward", "verdict", "grading_mode")}, "output": output}


async def measure(options: argparse.Namespace) -> None:
    rows = [json.loads(line) for line in options.rows.read_text().splitlines()]
    lines: list[dict[str, Any]] = []
    strict = options.strict if options.strict == "auto" else options.strict == "true"
    settings = SETTINGS | {"strict": strict, "verifier_tools": options.tools}
    async with serve(build("prorl_harbor", **settings).setup_webserver()) as base_url:
        for row in rows:
            if options.network:
                row["network"] = options.network
            for player in PLAYERS:
                lines.append(await play(base_url, row, player))
                with options.output.open("a") as file:
                    file.write(json.dumps(lines[-1]) + "\n")
    print(f"{'task':40} {'solution':>9} {'nothing':>9} {'mode':>9} {'seconds':>8}")
    for solution, nothing in zip(lines[::2], lines[1::2], strict=True):
        rewards = [str(one["verdict"] if one["reward"] is None else one["reward"]) for one in (solution, nothing)]
        mode, seconds = solution.get("grading_mode") or "", solution["seconds"] + nothing["seconds"]
        print(f"{solution['task'][:40]:40} {rewards[0]:>9.9} {rewards[1]:>9.9} {mode:>9} {seconds:8.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--tools", type=Path, help="folder that prorl image tools made")
    networks = ("none", "package-mirrors", "public")
    parser.add_argument("--network", choices=networks, help="network of all rows; theirs by default")
    parser.add_argument("--strict", default="auto", choices=("auto", "true", "false"))
    parser.add_argument("--output", type=Path, default=Path("harbor.jsonl"))
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
