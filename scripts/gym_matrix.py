# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Test the wheel with Gym's command line on several versions of Gym and Python, and print the time of each step.

python scripts/gym_matrix.py                                  # Gym 0.4.0 on Python 3.12, 0.7.0 on Python 3.13
python scripts/gym_matrix.py 0.7.0=/path/to/python3.14 …      # other pairs GYM=PYTHON
"""

import argparse
import asyncio
import shutil
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table


sys.path.insert(0, str(Path(__file__).parents[1]))

from nemo_gym_prorl.sandbox.images.builder import KERNEL, ensure_image
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime
from nemo_gym_prorl.sandbox.runtime.install import ensure_runtime
from tests.deployment import journey
from tests.setup import test_readme


DEFAULT = ("0.4.0=python3.12", "0.7.0=python3.13")


def main() -> None:
    """Test all pairs of versions; exit with 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", nargs="*", default=DEFAULT, metavar="GYM=PYTHON")
    pairs = [pair.split("=", 1) for pair in parser.parse_args().pairs]
    console = Console(highlight=False)
    runtime = ensure_runtime(console.print)
    runtime.activate()
    ensure_image(KERNEL, console.print)
    results, failures = {}, {}
    for gym_version, python in pairs:
        title = f"nemo-gym {gym_version}, {python}"
        console.print(title, markup=False)
        folder = Path(tempfile.mkdtemp(prefix="prorl-matrix-"))
        folder.chmod(0o755)
        try:
            results[title] = asyncio.run(_one(gym_version, python, folder, runtime))
        except Exception as error:
            failures[title] = error
            console.print(f"  failed, files in {folder}: {error}", markup=False, style="red")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    table = Table("Step, seconds", *results)
    for step in dict.fromkeys(step for seconds in results.values() for step in seconds):
        # Gym 0.4 has no export.
        table.add_row(step, *(f"{seconds[step]:.1f}" if step in seconds else "-" for seconds in results.values()))
    console.print(table)
    sys.exit(bool(failures))


async def _one(gym_version: str, python: str, folder: Path, runtime: Runtime) -> dict[str, float]:
    start = time.monotonic()
    installed = await journey.install(python, gym_version, folder)
    seconds = {"install": time.monotonic() - start, **await journey.take(installed, folder)}
    start = time.monotonic()
    await test_readme.take(installed, runtime)
    return seconds | {"README's lines as an ordinary user": time.monotonic() - start}


if __name__ == "__main__":
    main()
