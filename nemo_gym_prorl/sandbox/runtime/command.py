# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The container runtime's command lines and variables: made by the supervisor itself, from an order's plain values.

So no order can have anything else executed.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_gym_prorl.sandbox.isolation import network
from nemo_gym_prorl.sandbox.isolation.privilege import is_machine_root, is_machine_root_outside
from nemo_gym_prorl.sandbox.launcher.requests import MOST_VARIABLES
from nemo_gym_prorl.sandbox.supervisor.state_dir import OWNER_VARIABLE


if TYPE_CHECKING:
    from nemo_gym_prorl.sandbox.supervisor.messages import CreateRequest


_OF_THE_RUNTIME = re.compile(r"(APPTAINER|SINGULARITY)_.*|PS1|PROMPT_COMMAND|PWD|OLDPWD|SHLVL|HOME|_", re.DOTALL)
"""Names of variables that say something of the runtime, or of the host, and are not the image's."""

LOCKED = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger", "/sys")
"""What the machine's root, whom the kernel sees in root of a user namespace that he has made himself, could change
there: until the sandbox has its own, and an image's first process is its maker's."""

_EXEC = ("exec", "--userns", "--containall", "--cleanenv", "--no-init", "--no-mount", "home,tmp,bind-paths")


def runtime_command(order: CreateRequest, folder: Path) -> list[str]:
    """What starts a sandbox, less the image and the program in it.

    Args:
        order: what it is to be, its binds checked.
        folder: the sandbox's own.
    """
    command = [order.runtime, *_EXEC, "--hostname", "sandbox", "--overlay", str(folder / "overlay")]
    if not order.network:
        command += network.NONE_BY_THE_RUNTIME
    locked = [f"{path}:{path}:ro" for path in LOCKED if Path(path).exists()] if is_machine_root_outside() else []
    # Root shows them itself, with other owners.
    for bind in (*([] if is_machine_root() else order.binds), *locked):
        command += ["--bind", bind]
    return command


def runtime_environment(folder: Path) -> dict[str, str]:
    """The runtime's own variables; ``folder`` is the owner's, by which its helpers are known."""
    return {"PATH": os.environ.get("PATH", os.defpath), "HOME": "/", OWNER_VARIABLE: str(folder)}


def image_variables(reported: Mapping[str, str]) -> dict[str, str]:
    """The variables of a waiting shell that are the image's; ``LANG`` is ``C`` where the image sets none."""
    found = {name: value for name, value in reported.items() if not _OF_THE_RUNTIME.fullmatch(name)}
    return {name: value for name, value in found.items() if (name, value) != ("LANG", "C")}


def read_environment(path: str) -> dict[str, str]:
    """The variables in a file, as the kernel has a process's.

    Raises:
        OSError: they are more than :data:`MOST_VARIABLES`.
    """
    with Path(path).open("rb") as file:
        variables = file.read(MOST_VARIABLES + 1)
    if len(variables) > MOST_VARIABLES:
        raise OSError(errno.E2BIG, f"the image sets more than {MOST_VARIABLES >> 20} MiB of variables")
    pairs = variables.decode("utf-8", "surrogateescape").split("\0")
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)
