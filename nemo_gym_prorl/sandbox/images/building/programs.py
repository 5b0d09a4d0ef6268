# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Running the programs that make images and the private runtime, so that nothing of them outlives whoever wanted that.

They start helpers and containers of their own, and a builder may be killed. So they run under a reaper
(:mod:`nemo_gym_prorl.processes`), which ends everything that they started when they end, and when we do; and what
root runs has no right of root's (:mod:`.build_namespace`).
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Container, Mapping, Sequence
from pathlib import Path

from nemo_gym_prorl.failures import InfrastructureError
from nemo_gym_prorl.processes import ProcessMark, reaper_command
from nemo_gym_prorl.sandbox.images.building import build_namespace
from nemo_gym_prorl.sandbox.isolation.privilege import is_machine_root
from nemo_gym_prorl.sandbox.supervisor.state_dir import remove_tree


WORDS_KEPT = 800
"""Characters of a failed program's last words that become part of the error."""

_live: set[subprocess.Popen[str]] = set()


def stop_all() -> None:
    """End whatever :meth:`run` runs, in whichever threads; they raise."""
    for reaper in list(_live):
        reaper.terminate()


def run(
    command: Sequence[str],
    environ: Mapping[str, str] | None,
    timeout_s: float,
    cwd: Path | None = None,
    *,
    fine: Container[int] = (0,),
    reads: Sequence[Path] | None = None,
) -> str:
    """Run a program; returns what it printed.

    Args:
        command: the program and its arguments.
        environ: its environment; ours if not given.
        timeout_s: how long it may take.
        cwd: the folder to run in, where its temporary files are, too.
        fine: the exit codes that are no failure.
        reads: if strangers have a hand in what it does: what it needs besides ``cwd`` and what all may read. For root
            it runs without root's rights then, and what it makes there has to be settled (:func:`.rootfs.settle`).

    Raises:
        InfrastructureError: it failed or was not done in time; with its last words.
    """
    what = " ".join([Path(command[0]).name, *(word for word in command[1:2] if not word.startswith("-"))])
    environ = os.environ if environ is None else environ
    mark = ProcessMark("PRORL_IMAGE_TOOL", secrets.token_hex(8))
    # Who has become another user may not reach the interpreter any more, and has to do without a reaper.
    kept = os.access(sys.executable, os.X_OK)
    scratch = Path(tempfile.mkdtemp(prefix="tool-", dir=cwd))
    # The two with prefixes are passed on to what runs in containers.
    marked = {f"{prefix}{mark.name}": mark.value for prefix in ("", "APPTAINERENV_", "SINGULARITYENV_")}
    temporary = {f"{prefix}TMPDIR": str(scratch) for prefix in ("", "APPTAINER_", "SINGULARITY_")}
    given = cwd if reads is not None and is_machine_root() else None
    if given and reads is not None:
        command = build_namespace.confined(command, given, reads)
        # There is no home folder for it, and no capability is missing.
        environ = {name: value for name, value in environ.items() if not name.endswith("_USERNS")} | {"HOME": "/"}
    try:
        with subprocess.Popen(
            reaper_command(mark, list(command), sys.executable, scratch) if kept else command,
            env={**environ, **temporary, **marked},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        ) as reaper:
            _live.add(reaper)
            try:
                output, errors = reaper.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired as error:
                reaper.terminate()
                raise InfrastructureError(f"{what} was not done after {timeout_s:g} s") from error
            except BaseException:
                reaper.terminate()
                raise
            finally:
                _live.discard(reaper)
    finally:
        if given:
            build_namespace.take_back(given)
        remove_tree(scratch)
    if reaper.returncode not in fine:
        said = " / ".join(line.strip() for line in (errors or output).splitlines() if _is_news(line))
        raise InfrastructureError(f"{what} failed: {said[-WORDS_KEPT:] or f'exit code {reaper.returncode}'}")
    return output.strip()


def _is_news(line: str) -> bool:
    return bool(line.strip()) and not line.startswith(("INFO:", "WARNING:", "+ "))
