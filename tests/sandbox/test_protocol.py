# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Messages between server and supervisor: whole or not at all, whoever gives up, and however large."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
from pathlib import Path

import pytest

from nemo_gym_prorl.sandbox.container import Container, ContainerSpec
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime
from nemo_gym_prorl.sandbox.supervisor import own_supervisor
from nemo_gym_prorl.sandbox.supervisor.connection import (
    LARGEST_INLINE,
    LARGEST_MESSAGE,
    MAX_FILES,
    Connection,
    PeerGone,
    close_all,
    pack,
    ready,
    receive,
    send,
    socket_pair,
)


LARGE = {"id": 1, "text": "x" * (3 * LARGEST_INLINE), "bytes": "\udcff"}


@pytest.mark.parametrize("message", [{"id": 1}, LARGE, {"id": 1, "text": "x" * (LARGEST_INLINE - 30)}])
def test_a_message_of_any_size_comes_as_it_was_sent_with_its_files(message: dict[str, object]) -> None:
    here, there = socket_pair()
    with here, there:
        given = [os.open("/dev/null", os.O_RDONLY) for _ in range(MAX_FILES)]
        send(here, pack(message, given))
        got, files = receive(there)
        assert got == message
        assert len(files) == MAX_FILES
        close_all(files)
        close_all(given)


def test_what_is_too_large_is_refused_before_anything_is_sent() -> None:
    with pytest.raises(OSError, match="at most"):
        pack({"text": "x" * LARGEST_MESSAGE})


def test_who_may_open_no_more_files_still_hears_whose_message_it_was() -> None:
    here, there = socket_pair()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with here, there:
        # All numbers below the limit that is set now are taken.
        taken = [os.open("/dev/null", os.O_RDONLY) for _ in range(8)]
        while taken[-1] < max(map(int, os.listdir("/proc/self/fd"))) - 1:  # noqa: PTH208
            taken.append(os.open("/dev/null", os.O_RDONLY))
        send(here, pack({**LARGE, "id": 7}))
        send(here, pack({"id": 8}, taken[:1]))
        resource.setrlimit(resource.RLIMIT_NOFILE, (taken[-1] + 1, before[1]))
        try:
            for number in (7, 8):
                message, files = receive(there)
                assert (message["id"], message["torn"], files) == (number, True, [])
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
            close_all(taken)


NOT_READ_AT = [b'{"size": 5}', b'{"size": -1}', b'{"size": -99999999999999999999}', b'{"size": "5"}']
"""With a pipe in place of a file of memory."""


@pytest.mark.parametrize(
    ("garbage", "with_pipe"),
    [(text, False) for text in (b"{", b"\xff\xfe", b'{"size": 5}', b"[" * 50_000)]
    + [(text, True) for text in (*NOT_READ_AT, b"[]", b'"size"')],
)
def test_what_is_no_message_ends_the_connection_and_leaves_no_file(garbage: bytes, with_pipe: bool) -> None:
    here, there = socket_pair()
    pipe = os.pipe() if with_pipe else ()
    with here, there:
        before = os.listdir("/proc/self/fd")  # noqa: PTH208
        socket.send_fds(here, [garbage], pipe)
        with pytest.raises(PeerGone):
            receive(there)
        assert os.listdir("/proc/self/fd") == before  # noqa: PTH208
    close_all([*pipe])


async def test_what_waits_for_room_comes_later_in_order_unless_its_sender_gives_up() -> None:
    here, there = socket_pair()
    with there:
        here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        connection = Connection(here, print, print)
        sending = [asyncio.create_task(connection.send({"id": number, "text": "x" * 2000})) for number in range(20)]
        await asyncio.sleep(0.01)
        assert sending[0].done()
        sending[-2].cancel()
        got = []
        while len(got) < 19:
            await ready(there)
            got.append(receive(there)[0]["id"])
        assert got == [*range(18), 19]
        connection.close()


async def test_an_exception_of_one_connection_reaches_no_other_and_is_not_met_all_the_time() -> None:
    reads: list[str] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _loop, context: reads.append(type(context["exception"]).__name__))

    def fail(_end: socket.socket) -> tuple[()]:
        raise MemoryError

    pairs = [socket_pair() for _ in range(3)]
    handlers = [lambda *_: reads.append("heard"), lambda *_: reads[len(reads) + 1], lambda *_: None]
    takers = [receive, receive, fail]
    connections = [
        Connection(ours, heard, print, take)  # type: ignore[arg-type]
        for (ours, _theirs), heard, take in zip(pairs, handlers, takers, strict=True)
    ]
    for _ours, theirs in pairs:
        send(theirs, pack({"id": 1}))
        send(theirs, pack({"id": 2}))
    await asyncio.sleep(0.1)
    assert sorted(reads) == ["IndexError", "IndexError", "MemoryError", "heard", "heard"]
    for connection, (_ours, theirs) in zip(connections, pairs, strict=True):
        connection.close()
        theirs.close()


@pytest.mark.sandbox
async def test_who_gives_up_while_sending_disturbs_nobody(image: Path, runtime: Runtime) -> None:
    """A command with 1.2 MB of variables, and six of 90 kB, are cancelled while the supervisor takes nothing."""
    large = {f"V{number}": "x" * 100_000 for number in range(12)}
    spec = ContainerSpec(image=image)
    async with await Container.start(spec, runtime) as victim, await Container.start(spec, runtime) as other:
        assert own_supervisor._current
        supervisor = own_supervisor._current.popen.pid
        for commands in ([victim.run("true", env=large)], [victim.run(f": {'x' * 90_000}") for _ in range(6)]):
            os.kill(supervisor, signal.SIGSTOP)
            tasks = [asyncio.create_task(command) for command in commands]
            await asyncio.sleep(0.1)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            os.kill(supervisor, signal.SIGCONT)
            async with asyncio.timeout(30):
                assert (await other.run("echo alive")).stdout == "alive\n"
                assert (await victim.run("echo alive")).stdout == "alive\n"
        shown = await victim.run('echo "${#V3}"', env=large)
        assert shown.stdout == "100000\n", shown
