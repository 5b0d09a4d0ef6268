# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What bash does not get of what is sent to it. Bash is played: for whom of many a line is, the kernel draws."""

from __future__ import annotations

import asyncio
import os

from nemo_gym_prorl.sandbox.sessions.bash_commands import PROBES, BashCommands
from nemo_gym_prorl.sandbox.sessions.bash_status import BashStatus


async def test_an_end_that_a_subshell_took_is_noticed_at_once() -> None:
    """Of a line that bash threw away; nothing is told for want of patience with one that still runs."""
    told, over = list[int](), asyncio.Event()
    status = BashStatus(told.append, lambda: commands.ask_again(), over.set)
    commands = BashCommands(status)
    taker = commands.theirs.dup()
    says = status.theirs.dup()
    try:
        status.listen_to(os.getpid(), "/dev/pts/0")
        commands.send(status.line("false"))
        mark = taker.recv(4096).split(b'"')[1]
        says.send(b"bash: %s: No such file or directory" % mark)
        await asyncio.sleep(0.5)
        assert not over.is_set()
        says.send(b"$ ")
        for _ in range(1 + PROBES):
            taken = await asyncio.to_thread(taker.recv, 4096)
            assert mark.replace(b"begin", b"") in taken
        await asyncio.wait_for(over.wait(), 30)
        assert not told
    finally:
        for end in (taker, says, status, commands):
            end.close()
