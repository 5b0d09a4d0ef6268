# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Terminals that live in the sandbox rather than in who opened them, and what of them is kept for the next holder."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.sandbox.compose.terminal import SessionEnded, Terminal
from nemo_gym_prorl.sandbox.container import Container
from nemo_gym_prorl.sandbox.supervisor.pty_server import KEPT
from nemo_gym_prorl.sandbox.supervisor.scrollback import Window


pytestmark = pytest.mark.sandbox

REPOSITORY = Path(__file__).parents[2]


async def until(terminal: Terminal, mark: bytes) -> bytes:
    """Everything up to a mark, which must come."""
    seen = b""
    while mark not in seen:
        data = await terminal.read(timeout_s=60)
        assert data, seen
        seen += data
    return seen


async def test_a_terminal(container: Container) -> None:
    async with await Terminal.open(container, None, env={"PS1": "> "}, size=(30, 100)) as terminal:
        assert terminal.mode == "pty"
        await terminal.write(b"stty size; tty\n")
        await until(terminal, b"30 100\r\n/dev/pts/0\r\n")
        await terminal.resize(31, 101)
        await terminal.write(b"stty size; exit 5\n")
        assert b"31 101\r\n" in b"".join([chunk async for chunk in terminal])
        assert await terminal.wait_exit(timeout_s=60) == 5
        with pytest.raises(SessionEnded):
            await terminal.write(b"more\n")


async def test_a_session_on_pipes(container: Container) -> None:
    async with await Terminal.open(container, "echo err >&2; cat; echo gone", size=None) as session:
        assert session.mode == "pipe"
        assert await session.read_stderr(timeout_s=60) == b"err\n"
        await session.write(b"back\n")
        assert await session.read(timeout_s=60) == b"back\n"
        with pytest.raises(TimeoutError):
            await session.read(timeout_s=0.05)
        await session.send_signal("SIGTERM")
        assert await session.wait_exit(timeout_s=60) == 143
        assert await session.read(timeout_s=60) == b""
        assert await session.read_stderr(timeout_s=60) == b""
        with pytest.raises(CallerError, match="signal"):
            await session.send_signal("SIGNONE")


async def test_a_detached_command_runs_in_the_session(container: Container) -> None:
    for size in ((24, 80), None):
        async with await Terminal.open(container, None, cwd="/usr", env={"A": "1"}, size=size) as session:
            assert await session.run_detached("pwd; echo $A; (exit 3)") == (b"/usr\n1\n", 3)
            assert await session.run_detached("cd /etc; B='it'\\''s 100% \\\\ é\t!x'\ncat") == (b"", 0)
            assert await session.run_detached('pwd; printf %s "$B"') == ("/etc\nit's 100% \\\\ é\t!x".encode(), 0)
            assert (await session.run_detached("seq 200000"))[0].endswith(b"\n199999\n200000\n")
            with pytest.raises(SessionEnded):
                await session.run_detached("exit 1")


@pytest.mark.parametrize("size", [(24, 80), None])
@pytest.mark.parametrize("program", ["bash", "sh"])
async def test_no_program_forges_the_exit_code_of_a_detached_command(
    container: Container, monkeypatch: pytest.MonkeyPatch, program: str, size: tuple[int, int] | None
) -> None:
    """Whatever it knows of how its end is told among its output: here the shell's own ``printf`` says another."""
    forged = """printf() { case "$1" in %b) command printf "$@";; *) command printf '\\036%s 0\\n' "$2";; esac; }\n"""
    async with await Terminal.open(container, f"exec {program}", size=size) as session:
        assert await session.run_detached("(exit 4)") == (b"", 4)
        await session.write(forged.encode())
        assert (await session.run_detached("(exit 3)"))[1] == 3
        await session.write(b"exec 3>&-\n")
        monkeypatch.setattr("nemo_gym_prorl.sandbox.compose.terminal.WORD_S", 0.3)
        assert (await session.run_detached("true"))[1] is None


async def test_megabytes_in_and_out(container: Container) -> None:
    data = os.urandom(3 << 20).hex().encode()
    async with await Terminal.open(container, "cat", size=None) as session:
        typing = asyncio.create_task(session.write(data))
        back = b""
        while len(back) < len(data):
            back += await session.read(timeout_s=60)
        await typing
        assert back == data


async def test_another_process_takes_a_terminal_over_and_gives_it_back(container: Container) -> None:
    terminal = await Terminal.open(container, None, env={"PS1": ""})
    await terminal.write(b"stty -echo; X=kept; echo first\n")
    await until(terminal, b"first\r\n")
    program = (
        "import asyncio, json, sys\n"
        "from nemo_gym_prorl.sandbox.container import Container\n"
        "from nemo_gym_prorl.sandbox.compose.terminal import Terminal\n"
        "async def main():\n"
        "    container = await Container.attach(json.loads(sys.argv[1]))\n"
        "    terminal = await Terminal.attach(container, sys.argv[2], since=0)\n"
        "    await terminal.write(b'echo $X$X; (sleep 0.2; echo later) &\\n')\n"
        "    seen = b''\n"
        "    while b'keptkept' not in seen: seen += await terminal.read(timeout_s=60)\n"
        "    print(seen.decode())\n"
        "    await terminal.close()\n"
        "asyncio.run(main())"
    )
    other = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", program, json.dumps(container.describe()), terminal.session_id),
        stdout=asyncio.subprocess.PIPE,
        cwd=REPOSITORY,
    )
    output, _ = await other.communicate()
    assert b"first" in output, "it was asked for what came before"
    assert b"keptkept" in output
    with pytest.raises(SessionEnded, match="taken over"):
        await until(terminal, b"never")
    back = await Terminal.attach(container, terminal.session_id, takeover=False)
    await until(back, b"later\r\n")
    with pytest.raises(SessionEnded, match="held"):
        await Terminal.attach(container, terminal.session_id, takeover=False)
    await back.close()
    await terminal.close()
    with pytest.raises(SessionEnded, match="no session"):
        await Terminal.attach(container, terminal.session_id)


async def test_what_nobody_reads_is_kept_and_then_waits(container: Container) -> None:
    """Whoever comes later gets all of it, and the program's exit code."""
    program = f"until [ -e /tmp/go ]; do sleep 0.05; done; head -c {3 * KEPT} /dev/zero | tr '\\0' x; exit 7"
    session = await Terminal.attach(container, (await Terminal.open(container, program, size=None)).session_id)
    await session.close()
    await container.run("touch /tmp/go")
    await asyncio.sleep(0.3)
    async with await Terminal.attach(container, session.session_id, own=True) as back:
        assert len(b"".join([chunk async for chunk in back])) == 3 * KEPT
        assert await back.wait_exit(timeout_s=60) == 7
    assert (await container.run("echo alive")).stdout == "alive\n"


async def test_a_closed_terminal_ends_its_program(container: Container) -> None:
    terminal = await Terminal.open(container, "sleep 4321")
    await terminal.close()
    await terminal.close()
    gone = "while ps -A -o args= | grep -q '[s]leep 4321'; do sleep 0.02; done"
    assert (await container.run(gone, timeout_s=60)).exit_code == 0
    with pytest.raises(SessionEnded):
        await terminal.read()


async def test_a_terminal_ends_with_its_sandbox(container: Container) -> None:
    terminal = await Terminal.open(container, None)
    await container.close()
    try:
        while await terminal.read(timeout_s=60):
            pass
        assert await terminal.wait_exit(timeout_s=60) == 137
    except SessionEnded:
        pass
    await terminal.close()


@pytest.mark.parametrize(("change", "field"), [({"cwd": "/none"}, "cwd"), ({"env": {"A=": "1"}}, "env")])
async def test_bad_requests_name_the_field(container: Container, change: dict[str, object], field: str) -> None:
    with pytest.raises(CallerError, match=field):
        await Terminal.open(container, None, **change)  # type: ignore[arg-type]


@given(st.data())
def test_the_window_gives_everything_once_and_keeps_its_bound(data: st.DataObject) -> None:
    limit = data.draw(st.integers(1, 20))
    window = Window(limit)
    written, read = b"", b""
    for _ in range(data.draw(st.integers(0, 30))):
        match data.draw(st.sampled_from(["add", "read", "back"])):
            case "add" if not window.full:
                more = data.draw(st.binary(max_size=8))
                window.add("o", more)
                written += more
            case "read" if piece := window.next():
                assert piece.begin == len(read)
                window.read(piece)
                read += piece.data
            case "back":
                wanted = data.draw(st.integers(0, 100))
                window.go_back(wanted)
                assert window.position == max(window.begin, min(wanted, len(written)))
                read = written[: window.position]
        assert read == written[: window.position]
        assert window.begin <= max(0, len(written) - limit) <= len(written)
        assert sum(len(piece.data) for piece in (*window._past, *window._waiting)) <= 3 * limit + 16
    while piece := window.next():
        window.read(piece)
        read += piece.data
    assert read == written


def test_a_window_holds_few_pieces_however_small_they_come() -> None:
    window = Window(100_000)
    for _ in range(100_000):
        window.add("o", b"x")
    assert len(window._waiting) < 100
    assert window.full
