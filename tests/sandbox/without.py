# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Supervisors that lack a protection: a step of the supervisor or its launcher is replaced.

Nothing in the product can switch a wall off, and a test of one that would pass without it says nothing.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from nemo_gym_prorl.sandbox import launcher
from nemo_gym_prorl.sandbox.launcher.compiling import compile_for
from nemo_gym_prorl.sandbox.supervisor import client


@dataclass(frozen=True)
class Off:
    """What switches a protection off.

    Attributes:
        supervisor: Python that it runs before it starts, with ``syscalls`` imported.
        launcher: texts of the launcher's source, and what stands in their places where it is compiled.
    """

    supervisor: str = ""
    launcher: tuple[tuple[str, str], ...] = ()


Without = Callable[..., None]
"""The next sandboxes of the test are those of a supervisor with these :class:`Off`."""


class Supervisors:
    """Those of one file of tests, each started once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: dict[frozenset[Off], client.SupervisorProcess] = {}

    def lacking(self, offs: Iterable[Off]) -> client.SupervisorProcess:
        """The supervisor that lacks all of these."""
        key = frozenset(offs)
        if key not in self._started or self._started[key].popen.poll() is not None:
            self._started[key] = self._start(key)
        return self._started[key]

    def end(self) -> None:
        for supervisor in self._started.values():
            supervisor.owner.close()
        assert {supervisor.popen.wait(20) for supervisor in self._started.values()} <= {0, -9}

    def _start(self, offs: Iterable[Off]) -> client.SupervisorProcess:
        real = subprocess.Popen
        steps = [off.supervisor for off in offs]
        if changes := [change for off in offs for change in off.launcher]:
            target = self._folder / f"launcher-{len(self._started)}"
            compiled_with(changes, target)
            steps.append(f"launcher.launcher_path = lambda: Path({str(target)!r})")

        def popen(argv: list[str], *rest: Any, **options: Any) -> subprocess.Popen[bytes]:
            imported = [
                "import os",
                "from pathlib import Path",
                "from nemo_gym_prorl.sandbox.isolation import syscalls",
                "from nemo_gym_prorl.sandbox import launcher",
            ]
            before = "\n".join([*imported, *steps, "server.main()"])
            return real([part.replace("server.main()", before) for part in argv], *rest, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(subprocess, "Popen", popen)
            patch.setattr(client, "own_supervisor", None)
            client.running_supervisor()
            assert client.own_supervisor
            return client.own_supervisor


def compiled_with(changes: Iterable[tuple[str, str]], target: Path) -> None:
    """The launcher with other texts in its source."""
    source = launcher.launcher_path().with_name("launcher.c").read_text()
    for text, other in changes:
        assert text in source, text
        source = source.replace(text, other)
    changed = target.with_suffix(".c")
    changed.write_text(source)
    compile_for(os.uname().machine, changed, target, target.with_name("compiled"))
