# SPDX-License-Identifier: Apache-2.0
"""The hands of the tools, inside the sandbox of a running agent.

It is passed as ``python3 -c SOURCE REQUEST`` with each call, so the agent finds no file that it could change, and
files are touched only from inside: a symlink that the agent plants leads nowhere outside its own sandbox. Output is
bounded here, before it reaches anybody's memory. The request is base64 of a JSON object with ``op``; the answer is one
JSON line on stdout behind the request's ``mark``.

What the editor does to a text (:func:`shown`, :func:`changed`) is done by the service itself where it can have the
file without a program inside.
"""

from __future__ import annotations

import base64
import contextlib
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


MAX_FILE_CHARS = 1 << 20
MAX_ENTRIES = 500


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Run ``argv`` with ``stdin`` text in ``cwd``; keep the head and tail of what it prints."""
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
        # A background process may hold the pipe open for ever: once the command is over, take only what is there.
        wait = 0 if ended else max(0.0, min(0.05, deadline - time.monotonic()))
        if select.select([reader], [], [], wait)[0]:
            chunk = os.read(reader, 65536)
            if not chunk:
                # It closed its output and works on: its end is still awaited.
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
    """Write ``files`` (path to text) below ``cwd``, which is made."""
    folder = Path(request["cwd"])
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in request["files"].items():
        save(folder / path, text)
    return {}


def read(request: dict[str, Any]) -> dict[str, Any]:
    """Return the regular file ``path`` as base64, or ``problem`` that says why not."""
    path = Path(request["cwd"], request["path"])
    if not path.is_file():
        return {"problem": "is not there"}
    with path.open("rb") as file:
        data = file.read(request["limit"] + 1)
    if len(data) > request["limit"]:
        return {"problem": f"is longer than {request['limit']} bytes"}
    return {"content": base64.b64encode(data).decode()}


def edit(request: dict[str, Any]) -> dict[str, Any]:
    """One command of the editor; ``text`` is what the model reads."""
    path = Path(request["cwd"], request["path"])
    try:
        return {"text": edited(path, request)}
    except UnicodeDecodeError:
        return {"text": f"Error: {request['path']} is not a text file."}
    except (OSError, ValueError) as error:
        return {"text": f"Error: {request['path']}: {getattr(error, 'strerror', None) or error}"}


def edited(path: Path, request: dict[str, Any]) -> str:
    """Do it, and say what was done."""
    if request["command"] == "create":
        existed = path.exists()
        path.parent.mkdir(parents=True, exist_ok=True)
        save(path, request["file_text"])
        return created(request["path"], existed)
    if request["command"] == "view":
        return listed(path) if path.is_dir() else shown(load(path), request)
    text, said = changed(load(path), request)
    save(path, text)
    return said


def listed(folder: Path) -> str:
    """The entries of a folder."""
    names = sorted(entry.name + "/" if entry.is_dir() else entry.name for entry in folder.iterdir())
    if len(names) > MAX_ENTRIES:
        names[MAX_ENTRIES:] = [f"[... {len(names) - MAX_ENTRIES} more ...]"]
    return "\n".join(names) or "[empty folder]"


def created(path: str, existed: bool) -> str:
    """What is said of a file that was written as a whole."""
    return f"{'Overwrote' if existed else 'Created'} {path}."


def shown(text: str, request: dict[str, Any]) -> str:
    """Numbered lines of a text.

    Raises:
        ValueError: there are no such lines.
    """
    lines = text.split("\n")
    count = len(lines) - (lines[-1] == "")
    first, last = request["view_range"] or (1, -1)
    last = count if last == -1 else min(last, count)
    if count == 0:
        return "[empty file]"
    if not 1 <= first <= last:
        raise ValueError(f"view_range must lie within the file's {count} lines")
    numbered = "\n".join(f"{number:6d}\t{line}" for number, line in enumerate(lines[first - 1 : last], start=first))
    half = request["limit"] // 2
    if len(numbered) > 2 * half:
        return f"{numbered[:half]}\n[... {len(numbered) - 2 * half} characters left out ...]\n{numbered[-half:]}"
    return numbered


def changed(text: str, request: dict[str, Any]) -> tuple[str, str]:
    """The text after ``str_replace`` or ``insert``, and what is said of it.

    Raises:
        ValueError: it can't be done.
    """
    if request["command"] == "str_replace":
        found = text.count(request["old_str"]) if request["old_str"] else 0
        if found != 1:
            raise ValueError(f"old_str occurs {found} times, it must occur exactly once")
        replaced = text.replace(request["old_str"], request["new_str"] or "")
        return replaced, f"Replaced one occurrence in {request['path']}."
    lines = text.split("\n")
    at, count = request["insert_line"], len(lines) - (lines[-1] == "")
    if at > count:
        raise ValueError(f"insert_line is {at}, but the file has {count} lines")
    added = request["new_str"].split("\n")
    if len(added) > 1 and added[-1] == "":
        added.pop()
    inserted = "\n".join(lines[:at] + added + lines[at:])
    return inserted, f"Inserted {len(added)} lines into {request['path']} after line {at}."


def checked(text: str) -> str:
    """The text of a file, if it is not too long for an editor.

    Raises:
        ValueError: it is.
    """
    if len(text) > MAX_FILE_CHARS:
        raise ValueError(f"is longer than {MAX_FILE_CHARS} characters; use bash")
    return text


def load(path: Path) -> str:
    """Read a text file of bounded size; newlines stay as they are."""
    if path.exists() and not path.is_file():
        raise ValueError("is not a regular file")
    with path.open(encoding="utf-8", newline="") as file:
        return checked(file.read(MAX_FILE_CHARS + 1))


def save(path: Path, text: str) -> None:
    """Write a text file; newlines stay as they are."""
    with path.open("w", encoding="utf-8", errors="replace", newline="") as file:
        file.write(text)


OPERATIONS = {"run": run, "write": write, "read": read, "edit": edit}


if __name__ == "__main__":
    asked = json.loads(base64.b64decode(sys.argv[1]))
    try:
        answer = OPERATIONS[asked["op"]](asked)
    except OSError as failure:
        answer = {"problem": str(failure)}
    sys.stdout.write("\n" + asked["mark"] + json.dumps(answer) + "\n")
