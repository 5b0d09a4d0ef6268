# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The process that compares answers: ``python -m nemo_gym_prorl.tasks.math.worker``, asked by :mod:`.checker`.

It has everything imported and does nothing itself. For each pair of answers it forks a child, which has bounds on CPU
time and memory, may write no file, and ends with its word: so a pair can neither hang or fill the process, nor leave
anything behind for the next one. Questions and answers are JSON lines on standard input and output. Ends with its
input, so never outlives whoever started it by more than a child's CPU time.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import sys
from typing import Any

from nemo_gym_prorl.tasks.math import comparison
from nemo_gym_prorl.tasks.math.verdicts import Verdict


READY = {"ready": True}

MAX_REPLY = 1 << 16
"""Bytes of a child's word that are read."""

_WARM_UP = (
    (r"\frac{1}{2}", "0.25"),
    ("x^2-1", "(x-1)(x+1)"),
    (r"\{1,2\}", r"(1,3]\cup\{5\}"),
    ("x=1,y=2", "2,1"),
    ("x>3", r"(3,\infty)"),
    ("y=2x+1", "2y=x"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\3\end{pmatrix}"),
    (r"\sqrt{2}\pi", r"\ln 3 + \sin 2"),
)
"""Sympy imports on first use; a child should find it done."""


def main() -> None:
    """Serve until the input ends."""
    for expected, said in _WARM_UP:
        comparison.judge(expected, said)
    gc.freeze()
    _reply(READY)
    for line in sys.stdin.buffer:
        _reply(_asked(json.loads(line)))


def _asked(job: dict[str, Any]) -> dict[str, Any]:
    receiving, sending = os.pipe()
    child = os.fork()
    if not child:
        os.close(receiving)
        try:
            _compare(job, sending)
        finally:
            os._exit(1)
    os.close(sending)
    with os.fdopen(receiving, "rb") as word:
        said = word.read(MAX_REPLY)
    _pid, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return json.loads(said) if not code and said else {"died": code, "why": said.decode(errors="replace")}


def _compare(job: dict[str, Any], sending: int) -> None:
    """The child: says what came out, or why nothing did, and ends."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(nothing, descriptor)
    memory = job["memory_mib"] << 20
    used = resource.getrusage(resource.RUSAGE_SELF)
    cpu = int(used.ru_utime + used.ru_stime) + job["cpu_s"]
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + 1))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        if job["control"] and (unread := comparison.try_out(job["expected"])):
            verdict, why = Verdict.UNREADABLE, f"can't read {unread}"
        else:
            verdict, why = comparison.judge(job["expected"], job["said"], job["question"])
    except Exception as error:  # whatever sympy raises of an answer: it is looked into by who asked
        os.write(sending, type(error).__name__.encode())
        os._exit(1)
    os.write(sending, json.dumps({"verdict": verdict, "why": why}).encode())
    os._exit(0)


def _reply(word: dict[str, Any]) -> None:
    sys.stdout.buffer.write(json.dumps(word).encode() + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
