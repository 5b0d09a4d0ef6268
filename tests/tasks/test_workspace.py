# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Editor, extracted files, and tools without sessions, in real sandboxes."""

import asyncio
import errno
import os
from collections.abc import AsyncIterator

import pytest
from nemo_gym.sandbox import AsyncSandbox

from nemo_gym_prorl.failures import FailureKind, InfrastructureError
from nemo_gym_prorl.servers.task_sandboxes import SandboxWithSessions
from nemo_gym_prorl.tasks.code.code_rows import SOLUTION_FILE
from nemo_gym_prorl.tasks.task import ExtractedFile
from nemo_gym_prorl.tasks.workbench.workspace import ToolLimits, Workspace
from tests.tasks import containers


pytestmark = pytest.mark.sandbox
LONGEST = 262144
LIMITS = ToolLimits(timeout_s=10, max_timeout_s=20, output_bytes=2000)
KEPT = "only files are kept for the next call"
ENDED = f"[exit code: 0; {KEPT}]"


@pytest.fixture
async def workspace(sandbox: AsyncSandbox) -> Workspace:
    made = Workspace(sandbox, "/sandbox/workspace", LIMITS)
    await made.write({SOLUTION_FILE: "def f():\n    return 1\n"})
    return made


@pytest.fixture(params=["by a program inside", "by the sandbox"])
async def either(request: pytest.FixtureRequest) -> AsyncIterator[Workspace]:
    """A workspace with each kind of file access."""
    sandbox = await (
        containers.start() if request.param == "by a program inside" else containers.start_with_sessions()
    )
    made = Workspace(sandbox, "/sandbox/workspace", LIMITS)
    await made.write({SOLUTION_FILE: "def f():\n    return 1\n"})
    yield made
    await sandbox.stop()
    await made.close()


async def edit(workspace: Workspace, command: str, path: str, **arguments: object) -> str:
    return await workspace.call("str_replace_editor", {"command": command, "path": path, **arguments})


async def bash(workspace: Workspace, command: str, **arguments: object) -> str:
    return await workspace.call("bash", {"command": command, **arguments})


async def test_bash(workspace: Workspace) -> None:
    assert await bash(workspace, "pwd; ls") == f"/sandbox/workspace\nsolution.py\n{ENDED}"
    assert await bash(workspace, "echo out; echo err >&2; exit 3") == f"out\nerr\n[exit code: 3; {KEPT}]"
    assert await bash(workspace, "printf 'q\"uo'\"'\"'te $X'") == f"q\"uo'te $X\n{ENDED}"
    assert await bash(workspace, "kill -9 $$") == f"[exit code: 137; {KEPT}]"
    assert await bash(workspace, "cat") == ENDED  # standard input is empty
    assert await workspace.call("bash", {"restart": True}) == f"[a new shell was started; {KEPT}]"
    assert await workspace.call("bash", {"input": "y"}) == "Error: no command is running that could take input."


async def test_slow_command_is_killed_and_keeps_its_output(workspace: Workspace) -> None:
    observation = await bash(workspace, "echo before; sleep 60 & wait", timeout_s=1)
    assert observation == f"before\n[timed out after 1 s; {KEPT}]"
    assert "sleep 60" not in await bash(workspace, "ps -eo args")


async def test_editor(either: Workspace) -> None:
    assert await edit(either, "create", "sub/a.txt", file_text="one\ntwo\n") == "Created sub/a.txt."
    assert await edit(either, "create", "sub/a.txt", file_text="one\ntwo\ntwo\n") == "Overwrote sub/a.txt."
    assert await edit(either, "view", "sub/a.txt") == "     1\tone\n     2\ttwo\n     3\ttwo"
    assert await edit(either, "view", "/sandbox/workspace/sub/a.txt", view_range=[3, 9]) == "     3\ttwo"
    assert await edit(either, "view", ".") == "solution.py\nsub/"
    assert await edit(either, "insert", "sub/a.txt", insert_line=0, new_str="zero\n") == (
        "Inserted 1 lines into sub/a.txt after line 0."
    )
    assert await edit(either, "str_replace", "sub/a.txt", old_str="one\ntwo", new_str="1\n2") == (
        "Replaced one occurrence in sub/a.txt."
    )
    assert (await bash(either, "cat sub/a.txt")).startswith("zero\n1\n2\ntwo\n[exit code: 0")


async def test_editor_errors(either: Workspace) -> None:
    assert await edit(either, "view", "no.txt") == "Error: no.txt: No such file or directory"
    assert await edit(either, "view", SOLUTION_FILE, view_range=[5, 6]) == (
        "Error: solution.py: view_range must lie within the file's 2 lines"
    )
    assert await edit(either, "str_replace", SOLUTION_FILE, old_str="none", new_str="") == (
        "Error: solution.py: old_str occurs 0 times, it must occur exactly once"
    )
    assert await edit(either, "insert", SOLUTION_FILE, insert_line=9, new_str="x") == (
        "Error: solution.py: insert_line is 9, but the file has 2 lines"
    )
    await bash(either, "head -c 100 /dev/zero > binary; mkfifo pipe; yes | head -c 2000000 > long")
    assert await edit(either, "view", "binary") == "Error: binary: is not a text file"
    assert await edit(either, "view", "pipe") == "Error: pipe: is not a regular file"
    assert await edit(either, "view", "long") == "Error: long: is longer than 1048576 characters; use bash"
    assert (await edit(either, "view", "a\0b")).startswith("Error: a\0b: ")
    assert await edit(either, "create", "/proc/1/x", file_text="") == "Error: /proc/1/x: No such file or directory"


async def test_edited_file_keeps_permissions(either: Workspace) -> None:
    await bash(either, "echo 'echo old' > run.sh; chmod 750 run.sh; ln -s run.sh link")
    assert (
        await edit(either, "str_replace", "link", old_str="old", new_str="new") == "Replaced one occurrence in link."
    )
    assert (await bash(either, "./run.sh; stat -c %a run.sh; test -L link")).startswith("new\n750\n[exit code: 0")


async def test_extracted_files(either: Workspace) -> None:
    assert await either.extract_file(SOLUTION_FILE, limit=LONGEST) == ExtractedFile(b"def f():\n    return 1\n")
    await either.write({"data/binary": b"\x00\xff"})
    assert (await either.extract_file("data/binary", limit=LONGEST)).content == b"\x00\xff"
    await bash(either, "printf '\\xff' > solution.py")
    assert await either.extract_file(SOLUTION_FILE, limit=LONGEST) == ExtractedFile(b"\xff")
    await bash(either, "head -c 300000 /dev/zero > solution.py")
    assert await either.extract_file(SOLUTION_FILE, limit=LONGEST) == ExtractedFile(
        None, "solution.py is longer than 262144 bytes"
    )
    await bash(either, "rm -rf /sandbox/workspace; mkdir -p /sandbox/workspace/solution.py")
    assert await either.extract_file(SOLUTION_FILE, limit=LONGEST) == ExtractedFile(None, "solution.py is a folder")
    await bash(either, "cd /sandbox/workspace; rmdir solution.py; ln -s solution.py solution.py")
    assert await either.extract_file(SOLUTION_FILE, limit=LONGEST) == ExtractedFile(
        None, "solution.py is a link that leads to itself"
    )


@pytest.mark.parametrize("answer", ['{"content": 5}', '{"content": "%%"}', "[]", "[" * 50_000])
async def test_forged_toolbox_reply_is_no_machine_failure(workspace: Workspace, answer: str) -> None:
    """An agent that forges the reader's reply gets a verdict instead of a retry."""
    forger = (
        "#!/bin/sh\nfor last; do :; done\n"
        'mark=$(echo $last | base64 -d | sed \'s/.*"mark": "\\([0-9a-f]*\\)".*/\\1/\')\n'
        f"printf '\\n%s' $mark; cat <<'X'\n{answer}\nX\n"
    )
    await bash(workspace, f"cp /usr/bin/python3 /tmp; cat > /tmp/forger <<'Y'\n{forger}\nY")
    assert await bash(workspace, "chmod +x /tmp/forger; mv /tmp/forger /usr/bin/python3") == ENDED
    artefact = await workspace.extract_file(SOLUTION_FILE, limit=LONGEST)
    assert artefact.content is None
    assert "could not be read" in (artefact.problem or "")
    assert (await edit(workspace, "view", "x")).startswith("Error: ")


async def test_killing_all_processes_is_an_observation(workspace: Workspace) -> None:
    observation = await bash(workspace, "kill -9 -1; kill -9 $PPID; sleep 5")
    assert observation == "Error: the command killed the process that reports on it; its output is lost."
    assert await bash(workspace, "echo still here") == f"still here\n{ENDED}"


async def test_a_lost_sandbox_is_infrastructure() -> None:
    sandbox = await containers.start()
    workspace = Workspace(sandbox, "/sandbox/workspace", LIMITS)
    containers.kill_instance(sandbox._require_handle().sandbox_id)
    for work in (bash(workspace, "ls"), workspace.extract_file(SOLUTION_FILE, limit=LONGEST)):
        with pytest.raises(InfrastructureError) as caught:
            await asyncio.wait_for(work, 120)
        assert caught.value.kind is FailureKind.SESSION_LOST
    await sandbox.stop()


class Failing:
    """Sandbox whose file operations fail with a machine error."""

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
    async with containers.running_ours() as sandbox:
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


async def _there(sandbox: SandboxWithSessions, path: str) -> None:
    await sandbox.exec(f"until [ -e {path} ]; do sleep 0.01; done", timeout_s=60)
