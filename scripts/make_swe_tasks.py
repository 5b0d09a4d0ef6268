# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Make software engineering tasks from well-known packages, without a registry; see docs/environments/swe.md.

Writes ``rows.jsonl`` (rows of ``prorl_swe``), ``partial.jsonl`` (patches that fix only a part of a bug and must earn
no reward) and an image per task.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path

from nemo_gym_prorl.failures import RolloutError
from nemo_gym_prorl.sandbox.runtime.apptainer import require_runtime
from scripts.swe_tasks.making import IMAGES, ROWS, default_folder, image_path, make
from scripts.swe_tasks.packages import PACKAGES


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    names = [package.name for package in PACKAGES]
    parser.add_argument("packages", nargs="*", metavar="PACKAGE", help=f"default: {' '.join(names)}")
    parser.add_argument("--singles", type=int, default=3, help="tasks per package with one mistake")
    parser.add_argument("--folder", type=Path, default=default_folder())
    options = parser.parse_args()
    wanted = options.packages or names
    if unknown := set(wanted) - set(names):
        parser.error(f"unknown package {min(unknown)}; choose from {', '.join(names)}")
    chosen = [package for package in PACKAGES if package.name in wanted]
    folder: Path = options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()

    def say(what: str) -> None:
        print(f"{time.monotonic() - started:7.1f} s  {what}", flush=True)

    try:
        made = asyncio.run(make(chosen, options.singles, folder, require_runtime(), say))
    except RolloutError as error:
        print(error.reason, file=sys.stderr)
        return 1
    rows = [row for tasks in made for row in tasks.rows]
    size = sum(image_path(row["instance_id"], folder).stat().st_size for row in rows)
    partial = sum(len(tasks.partial) for tasks in made)
    say(
        f"{len(rows)} tasks of {len(chosen)} packages, {partial} of them with two mistakes, from "
        f"{sum(tasks.tried for tasks in made)} mistakes; {size / 1e9:.2f} GB of images in {folder / IMAGES}; "
        f"rows in {folder / ROWS}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
