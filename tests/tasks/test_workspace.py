# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Editor, extracted files, and ``python`` without IPython, in real sandboxes."""

import asyncio
import errno
import os
from collections.abc import AsyncIterator

import pytest

from nemo_gym_prorl.failures import FailureKind, InfrastructureError
from nemo_gym_prorl.tasks.code.code_rows import SOLUTION_FILE
from nemo_gym_prorl.tasks.sandbox import Sandbox
from nemo_gym_prorl.tasks.task import ExtractedFile
from nemo_gym_prorl.tasks.workbench.workspace import ToolLimits, Workspace
from tests.tasks import containers


pytestmark = pytest.mark.sandbox
LONGEST = 262144
LIMITS = ToolLimits(timeout_s=10, max_timeout_s=20, output_bytes=2000)
KEPT = "only files are kept for the next call"


@pytest.fixture
async def workspace(sandbox: Sandbox) -> AsyncIterator[Workspace]:
    made = Workspace(sandbox, "/sandbox/workspace", LIMITS)
    await made.write({SOLUTION_FILE: "def f():\n    return 1\n"})
    yield made
    await made.close()


async def edit(workspace: Workspace, command: str, path: str, **arguments: object) -> str:
    return await workspace.call("str_replace_editor", {"command": command, "path": path, **arguments})


async def bash(workspace: Workspace, command: str, **arguments: object) -> str:
    return await workspace.call("bash", {"command": command, **arguments})


async def test_python_without_ipython_keeps_nothing(workspace: Workspace) -> None:
    async def python(code: str, **arguments: object) -> str:
        return await workspace.call("python", {"code": code, **arguments})

    assert await python("import os\nx = 1\nprint(os.getcwd())") == f"/sandbox/workspace\n[ok; {KEPT}]"
    assert "NameError: name 'x' is not defined" in (said := await python("print('out', flush=True)\nx"))
    assert said.startswith("out\nTraceback")
    assert said.endswith(f"\n[error; {KEPT}]")
    assert "EOFError" in await python("input()")
    slow = "import time\nprint('before', flush=True)\ntime.sleep(60)"
    assert await python(slow, timeout_s=1) == f"before\n[timed out after 1 s; {KEPT}]"
    assert (await python("import os\nos.kill(os.getpid(), 9)")).endswith(f"[error; {KEPT}]")
    assert await python("1\0") == "Error: the code must not hold a NUL character."
    assert await workspace.call("python", {"restart": True}) == f"[a new kernel was started; {KEPT}]"


async def test_folder_is_listed(workspace: Workspace) -> None:
    await bash(workspace, "mkdir -p d/.hidden d/sub 'd/a b' empty many; touch d/B d/a")
    await bash(workspace, "ln -s sub d/link; ln -s no d/broken")
    assert await edit(workspace, "view", "d") == ".hidden/\nB\na\na b/\nbroken\nlink/\nsub/"
    assert await edit(workspace, "view", "empty") == "[empty folder]"
    await bash(workspace, "cd many; touch $(seq 100 700)")
    assert (await edit(workspace, "view", "many")).endswith("\n599\n[... 101 more ...]")


async def test_editor(workspace: Workspace) -> None:
    assert await edit(workspace, "create", "sub/a.txt", file_text="one\ntwo\n") == "Created sub/a.txt."
    assert await edit(workspace, "create", "sub/a.txt", file_text="one\ntwo\ntwo\n") == "Overwrote sub/a.txt."
    assert await edit(workspace, "view", "sub/a.txt") == "     1\tone\n     2\ttwo\n     3\ttwo"
    assert await edit(workspace, "view", "/sandbox/workspace/sub/a.txt", view_range=[3, 9]) == "     3\ttwo"
    assert await edit(workspace, "view", ".") == "solution.py\nsub/"


async def test_editor_errors(workspace: Workspace) -> None:
    assert await edit(workspace, "view", "no.txt") == "Error: no.txt: No such file or directory"
    assert await edit(workspace, "view", SOLUTION_FILE, view_range=[5, 6]) == (
        "Error: solution.py: view_range must lie within the file's 2 lines"
    )
    assert await edit(workspace, "insert", SOLUTION_FILE, insert_line=9, new_str="x") == (
        "Error: solution.py: insert_line is 9, but the file has 2 lines"
    )
    await bash(workspace, "mkfifo pipe; yes | head -c 2000000 > long")
    assert await edit(workspace, "view", "pipe") == "Error: pipe: is not a regular file"
    assert await edit(workspace, "view", "long") == "Error: long: is longer than 1048576 characters; use bash"
    assert (await edit(workspace, "view", "a\0b")).startswith("Error: a\0b: ")
    assert await edit(workspace, "create", "/proc/1/x", file_text="") == "Error: /proc/1/x: No such file or directory"


async def test_edited_file_keeps_permissions(workspace: Workspace) -> None:
    await bash(workspace, "echo 'echo old' > run.sh; chmod 750 run.sh; ln -s run.sh link")
    assert (
        await edit(workspace, "str_replace", "link", old_str="old", new_str="new")
        == "Replaced one occurrence in link."
    )
    assert (await bash(workspace, "./run.sh; stat -c %a run.sh; test -L link")).startswith("new\n750\n[exit code: 0")


async def test_extracted_files(workspace: Workspace) -> None:
    assert await workspace.extract_file(SOLUTION_FILE, limit=LONGEST) == ExtractedFile(b"def f():\n    return 1\n")
    await workspace.write({"data/binary": b"\x00\xff"})
    assert (await workspace.extract_file("data/binary", limit=LONGEST)).content == b"\x00\xff"
    await bash(workspace, "printf '\\xff' > solution.py")
    assert await workspace.extract_file(SOLUTION_FILE, limit=LONGEST) == ExtractedFile(b"\xff")
    await bash(workspace, "head -c 300000 /dev/zero > solution.py")
    assert await workspace.extract_file(SOLUTION_FILE, limit=LONGEST) == ExtractedFile(
        None, "solution.py is longer than 262144 bytes"
    )
    await bash(workspace, "rm -rf /sandbox/workspace; mkdir -p /sandbox/workspace/solution.py")
    assert await workspace.extract_file(SOLUTION_FILE, limit=LONGEST) == ExtractedFile(None, "solution.py is a folder")
    await bash(workspace, "cd /sandbox/workspace; rmdir solution.py; ln -s solution.py solution.py")
    assert await workspace.extract_file(SOLUTION_FILE, limit=LONGEST) == ExtractedFile(
        None, "solution.py is a link that leads to itself"
    )


class Failing:
    def __init__(self, number: int) -> None:
        self._number = number

    async def read_file(self, path: str, *, limit: int) -> bytes:
        raise OSError(self._number, os.strerror(self._number))

    async def write_file(self, path: str, data: bytes) -> bool:
        raise OSError(self._number, os.strerror(self._number))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EMFILE, errno.EIO])
async def test_machine_file_error_is_infrastructure(number: int) -> None:
    workspace = Workspace(Failing(number), "/sandbox/workspace", LIMITS)  # type: ignore[arg-type]
    for work in (
        workspace.extract_file(SOLUTION_FILE, limit=LONGEST),
        edit(workspace, "view", SOLUTION_FILE),
        edit(workspace, "create", SOLUTION_FILE, file_text="x"),
    ):
        with pytest.raises(InfrastructureError, match=os.strerror(number)) as caught:
            await work
        assert caught.value.kind is FailureKind.SESSION_LOST


async def test_a_file_that_a_program_leases_is_unreadable() -> None:
    """A lease makes opening fail for a time, which is no machine failure."""
    workspace = Workspace(Failing(errno.EBUSY), "/sandbox/workspace", LIMITS)  # type: ignore[arg-type]
    problem = "solution.py can't be read: a program has it open"
    assert await workspace.extract_file(SOLUTION_FILE, limit=LONGEST) == ExtractedFile(None, problem)


TERMINAL = """
import fcntl, os, struct, time
master = os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY)
number = struct.unpack("I", fcntl.ioctl(master, 0x80045430, bytes(4)))[0]
link = "/sandbox/workspace/solution.py"
os.unlink(link)
os.symlink(f"/dev/pts/{number}", link)
try: os.open(link, os.O_RDONLY | os.O_NOCTTY)
except OSError as error: print(error.errno)
open("/tmp/linked", "w").close()
time.sleep(1000)
"""
"""Opening the slave of a locked pseudo-terminal fails with EIO."""


async def test_agent_cannot_fake_a_disk_error() -> None:
    """A faked machine error would cause retries and finally mask the rollout."""
    async with containers.running() as sandbox:
        workspace = Workspace(sandbox, "/sandbox/workspace", LIMITS)
        await workspace.write({SOLUTION_FILE: "x"})
        for target in ("/proc/self/mem", "/proc/1/mem", "/proc/sys/net/ipv4/route/flush", "/dev/tty", "/sys/kernel"):
            await sandbox.exec(f"ln -sfn {target} solution.py", cwd="/sandbox/workspace")
            assert (await workspace.extract_file(SOLUTION_FILE, limit=LONGEST)).content is None, target
        holding = asyncio.create_task(sandbox.exec(f"python3 -c '{TERMINAL}'", timeout_s=60))
        await _there(sandbox, "/tmp/linked")
        assert (await workspace.extract_file(SOLUTION_FILE, limit=LONGEST)) == ExtractedFile(
            None, "solution.py is no regular file"
        )
        holding.cancel()
        await asyncio.wait([holding])
        await workspace.close()


async def _there(sandbox: Sandbox, path: str) -> None:
    await sandbox.exec(f"until [ -e {path} ]; do sleep 0.01; done", timeout_s=60)
