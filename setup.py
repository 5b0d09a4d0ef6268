# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What pyproject.toml can't say: the launcher is compiled, for each architecture, into the wheel or beside its source
where the package is installed editable."""

from __future__ import annotations

import runpy
from pathlib import Path

from setuptools import Command, setup
from setuptools.command.build import build


FOLDER = Path("nemo_gym_prorl/sandbox/launcher")
COMPILING = runpy.run_path(str(FOLDER / "compiling.py"))


class BuildLauncher(Command):
    """``build_launcher``, a part of ``build``."""

    description = "compile the launcher of sandboxes"
    user_options: list[tuple[str, str, str]] = []  # noqa: RUF012  # as setuptools has it

    def initialize_options(self) -> None:
        self.build_lib: str | None = None
        self.editable_mode = False

    def finalize_options(self) -> None:
        self.set_undefined_options("build_py", ("build_lib", "build_lib"))

    def run(self) -> None:
        for machine, target in self._targets().items():
            target.parent.mkdir(parents=True, exist_ok=True)
            COMPILING["compile_for"](machine, FOLDER / "launcher.c", target)

    def _targets(self) -> dict[str, Path]:
        folder = FOLDER if self.editable_mode else Path(str(self.build_lib)) / FOLDER
        return {machine: folder / f"launcher-{machine}" for machine in COMPILING["HEADERS"]}

    def get_outputs(self) -> list[str]:
        return [str(target) for target in self._targets().values()]

    def get_output_mapping(self) -> dict[str, str]:
        return {}

    def get_source_files(self) -> list[str]:
        return [str(FOLDER / name) for name in ("launcher.c", "files.c")]


build.sub_commands.append(("build_launcher", None))
setup(cmdclass={"build_launcher": BuildLauncher})
