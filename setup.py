# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Compile the sandbox launcher for each architecture, into the wheel or, for an editable install, next to its source.

A wheel contains the compiled launchers, so its installation needs no compiler. A build from a source tree needs a
compiler unless every launcher is at least as new as its sources.
"""

from __future__ import annotations

import runpy
import shutil
from pathlib import Path

from setuptools import Command, setup
from setuptools.command.build import build


FOLDER = Path("nemo_gym_prorl/sandbox/launcher")
SOURCES = [FOLDER / name for name in ("launcher.c", "files.c", "compiling.py")]
COMPILING = runpy.run_path(str(FOLDER / "compiling.py"))
COMPILED = {machine: FOLDER / f"launcher-{machine}" for machine in COMPILING["KERNEL_HEADERS"]}
IS_CURRENT = all(
    path.exists() and path.stat().st_mtime >= max(source.stat().st_mtime for source in SOURCES)
    for path in COMPILED.values()
)
COMPILER = "ziglang==0.17.1"  # C cross compiler, installable with pip


class BuildLauncher(Command):
    """Setuptools command that ``build`` runs: compiles the launchers, or copies current ones into the wheel."""

    description = "compile the sandbox launcher"
    user_options: list[tuple[str, str, str]] = []  # noqa: RUF012  # setuptools reads a class attribute

    def initialize_options(self) -> None:
        self.build_lib: str | None = None
        self.editable_mode = False

    def finalize_options(self) -> None:
        self.set_undefined_options("build_py", ("build_lib", "build_lib"))

    def run(self) -> None:
        for machine, target in self._targets().items():
            target.parent.mkdir(parents=True, exist_ok=True)
            if not IS_CURRENT:
                COMPILING["compile_for"](machine, FOLDER / "launcher.c", target)
            elif target != COMPILED[machine]:
                shutil.copy2(COMPILED[machine], target)

    def _targets(self) -> dict[str, Path]:
        folder = FOLDER if self.editable_mode else Path(str(self.build_lib)) / FOLDER
        return {machine: folder / f"launcher-{machine}" for machine in COMPILING["KERNEL_HEADERS"]}

    def get_outputs(self) -> list[str]:
        return [str(target) for target in self._targets().values()]

    def get_output_mapping(self) -> dict[str, str]:
        return {}

    def get_source_files(self) -> list[str]:
        return [str(source) for source in SOURCES]


build.sub_commands.append(("build_launcher", None))
setup(cmdclass={"build_launcher": BuildLauncher}, setup_requires=[] if IS_CURRENT else [COMPILER])
