# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Cheats against the verifier of Harbor tasks, as task folders for any runner of Harbor tasks.

``python -m benchmarks.harbor_cheats FOLDER`` writes a task for each cheat of :mod:`tests.tasks.harbor.cheats`. The
solution of such a task cheats, so a runner that plays the solution (Harbor's oracle agent) must get reward 0. The
task ``right-answer`` must get 1 and ``nothing`` 0; otherwise the tests do not work with that runner. The tests need
bash and Python, but no network.

``--play`` also plays each cheat on this package's server, as the agent of ``right-answer``, since the server refuses
tasks whose own solution gets no reward. The exit code is 1 if a cheat gets a reward or no grade.
"""

from __future__ import annotations

import argparse
import asyncio
import re
from pathlib import Path
from typing import Any

from tests.prorl_code.conftest import serving
from tests.tasks.harbor.cheats import CHEATS, CHECK, TEST, UVX
from tests.tasks.harbor.folders import ANSWER, make_task, play, row_of, shown


SOUND = {"right answer": ANSWER, "nothing": "true"}

INSTALL = """\
mkdir -p $HOME/.local/bin && install -m 755 /tests/uvx $HOME/.local/bin/uvx
echo 'export PATH="$HOME/.local/bin:$PATH"' > $HOME/.local/bin/env
"""
"""Shell lines that replace an installed uv, as uv's installer does where there is a network."""

AT_ONCE = 3
"""Concurrent plays."""


def write_suite(folder: Path, base: str, docker_image: str | None) -> dict[str, Path]:
    """Write the task folders, and return them by name.

    Args:
        folder: parent of the task folders.
        base: image with bash and Python that the tasks' Dockerfile starts from.
        docker_image: image of the tasks, for runners that build no images; ``None`` to name none.
    """
    toml = '[environment]\nworkdir = "/app"\n' + (f'docker_image = "{docker_image}"\n' if docker_image else "")
    files = {
        "environment/Dockerfile": f"FROM {base}\nWORKDIR /app\n",
        "tests/check.py": CHECK,
        "tests/uvx": UVX.encode().decode("unicode_escape"),
    }
    test = TEST.replace("source ", f"{INSTALL}source ", 1)
    return {
        name: make_task(
            folder / re.sub("[^a-z0-9]+", "-", name.lower()).strip("-"),
            toml=toml,
            test=test,
            solve=f"#!/bin/bash\ncd /app\n{command}\n",
            files=files,
        )
        for name, command in {**SOUND, **CHEATS}.items()
    }


async def play_suite(folders: dict[str, Path], strict: Any) -> bool:
    """Play the cheats, print a table, and return whether every cheat got reward 0 and the right answer 1.
    ``strict``: the server's setting of this name, ``True``, ``False`` or ``"auto"``."""
    row = row_of(folders["right answer"])
    slots = asyncio.Semaphore(AT_ONCE)

    async def earned(base_url: str, command: str) -> tuple[float | None, str, str]:
        async with slots:
            reply = await play(base_url, row, command)
        status, reward, verdict = shown(reply)
        return reward, verdict, reply[1].get("grading_mode", "-") if status == 200 else str(reply[1])[:200]

    async with serving("prorl_harbor", strict=strict) as base_url:
        commands = {**SOUND, **CHEATS}
        done = await asyncio.gather(*(earned(base_url, command) for command in commands.values()))
    print("| cheat | reward | verdict | mode |\n|---|---|---|---|")
    for name, (reward, verdict, mode) in zip(commands, done, strict=True):
        print(f"| {name} | {'none' if reward is None else f'{reward:g}'} | {verdict} | {mode} |")
    return [reward for reward, _, _ in done] == [1.0] + [0.0] * (len(commands) - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--base", default="python:3.13-slim-bookworm", help="image that the Dockerfiles start from")
    parser.add_argument("--docker-image", help="image for runners that build none, as a SIF file for Apptainer")
    parser.add_argument("--play", action="store_true", help="play the cheats on this package's server")
    parser.add_argument("--strict", default="auto", choices=("auto", "true", "false"), help="mode of the server")
    options = parser.parse_args()
    folders = write_suite(options.folder, options.base, options.docker_image)
    print(f"{len(folders)} tasks in {options.folder}")
    strict = options.strict if options.strict == "auto" else options.strict == "true"
    if options.play and not asyncio.run(play_suite(folders, strict)):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
