# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Helper program of the tools, run inside the agent's sandbox.

Each call passes the source as ``python3 -c SOURCE REQUEST``, so the agent finds no file to modify. Files are accessed
in the sandbox, so a symlink of the agent cannot lead out of it. Output is truncated here to bound the memory of the
server. The request is base64 of a JSON object with ``op``; the reply is one JSON line on stdout after the request's
``mark``.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


MAX_ENTRIES = 500  # names in a folder's listing, to bound the observation


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Run ``argv`` with ``stdin`` text in ``cwd``. Return exit code, and head and tail of output (``limit`` bytes)."""
    Path(request["cwd"]).mkdir(parents=True, exist_ok=True)
    half = request["limit"] // 2
    head, tail, total = b"", b"", 0
    deadline = time.monotonic() + request["timeout_s"]
    with tempfile.TemporaryFile() as stdin:
        stdin.write(request["stdin"].encode("utf-8", "replace"))
        stdin.seek(0)
        reader, writer = os.pipe()
        process = subprocess.Popen(
            request["argv"], stdin=stdin, stdout=writer, stderr=writer, cwd=request["cwd"], start_new_session=True
        )
    os.close(writer)
    timed_out = False
    while True:
        ended = process.poll() is not None
        # A background process may hold the pipe open: after the command's end, read only what is available.
        wait = 0 if ended else max(0.0, min(0.05, deadline - time.monotonic()))
        if select.select([reader], [], [], wait)[0]:
            chunk = os.read(reader, 65536)
            if not chunk:
                # The command has closed its output, but may still run.
                try:
                    process.wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    timed_out = True
                break
            total += len(chunk)
            room = half - len(head)
            head += chunk[:room]
            tail = (tail + chunk[max(0, room) :])[-half:]
        elif ended:
            break
        if not ended and time.monotonic() >= deadline:
            timed_out = True
            break
    if timed_out:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return {
        "head": head.decode("utf-8", "replace"),
        "tail": tail.decode("utf-8", "replace"),
        "omitted": total - len(head) - len(tail),
        "exit_code": process.returncode,
        "timed_out": timed_out,
    }


def write(request: dict[str, Any]) -> dict[str, Any]:
    """Write or append (``more``) base64 data to ``path``, creating its folders; return whether the file existed."""
    path = Path(request["path"])
    existed = path.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab" if request["more"] else "wb") as file:
        file.write(base64.b64decode(request["content"]))
    return {"existed": existed}


def read(request: dict[str, Any]) -> dict[str, Any]:
    """Return at most ``size`` bytes of the regular file ``path``, starting at byte ``from``, as base64."""
    path = Path(request["path"])
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(errno.EINVAL, "is not a regular file")
    with path.open("rb") as file:
        file.seek(request["from"])
        return {"content": base64.b64encode(file.read(request["size"])).decode()}


def entries(request: dict[str, Any]) -> dict[str, Any]:
    names = sorted(entry.name + "/" if entry.is_dir() else entry.name for entry in Path(request["path"]).iterdir())
    if len(names) > MAX_ENTRIES:
        names[MAX_ENTRIES:] = [f"[... {len(names) - MAX_ENTRIES} more ...]"]
    return {"text": "\n".join(names) or "[empty folder]"}


OPERATIONS = {"run": run, "write": write, "read": read, "entries": entries}


if __name__ == "__main__":
    request = json.loads(base64.b64decode(sys.argv[1]))
    try:
        answer = OPERATIONS[request["op"]](request)
    except OSError as failure:
        answer = {"problem": failure.strerror or str(failure), "errno": failure.errno or 0}
    sys.stdout.write("\n" + request["mark"] + json.dumps(answer) + "\n")
