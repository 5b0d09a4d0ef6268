# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Python runs this first in each process of a model server that a benchmark starts.

No Ray cluster for each of them: Gym is told that there is one. And a sampling profiler that costs nothing until it is
asked: SIGUSR1 begins it, SIGUSR2 ends it and writes ``$PRORL_SAMPLES/samples-PID.json``. Time in compiled code counts
where Python called it.
"""

from __future__ import annotations

import collections
import json
import os
import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any


INTERVAL_S = 0.002
"""Asked for; a kernel that counts in ticks makes it one."""
OURS = ("nemo_gym_prorl", "responses_api_models", "nemo_gym")
_packages: collections.Counter[str] = collections.Counter()
_functions: collections.Counter[str] = collections.Counter()


def _place(frame: FrameType) -> tuple[str, str]:
    """The package of a frame's code, and the code's name."""
    path = frame.f_code.co_filename
    parts = path.rpartition("/site-packages/")[2].strip("/").split("/")
    for name in OURS:
        if name in parts:
            inside = "/".join(parts[parts.index(name) :])
            return name, f"{inside}:{frame.f_code.co_qualname}"
    package = parts[0] if "/site-packages/" in path else f"python: {parts[-2] if len(parts) > 1 else parts[-1]}"
    return package, f"{package}:{frame.f_code.co_qualname}"


def _note(_number: int, frame: FrameType | None) -> None:
    if frame is None:
        return
    package, _ = _place(frame)
    _packages[package] += 1
    seen: FrameType | None = frame
    while seen is not None:
        whose, name = _place(seen)
        if whose in OURS:
            _functions[name] += 1
            return
        seen = seen.f_back
    _functions[f"({package}, for nobody of ours)"] += 1


def _begin(*_: Any) -> None:
    signal.signal(signal.SIGPROF, _note)
    signal.setitimer(signal.ITIMER_PROF, INTERVAL_S, INTERVAL_S)


def _end(*_: Any) -> None:
    signal.setitimer(signal.ITIMER_PROF, 0)
    found = {"packages": _packages, "functions": _functions}
    Path(os.environ["PRORL_SAMPLES"], f"samples-{os.getpid()}.json").write_text(json.dumps(found))


if "PRORL_SAMPLES" in os.environ and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGUSR1, _begin)
    signal.signal(signal.SIGUSR2, _end)

import ray  # noqa: E402 - after the handlers, for a signal may come early


ray.is_initialized = lambda: True
