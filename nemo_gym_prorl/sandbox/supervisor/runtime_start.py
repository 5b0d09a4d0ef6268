# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What each sandbox has on disk, and how the container runtime starts one: up to its first process's word.

The same is done for a sandbox that is asked for its image's variables, and for nothing else (:mod:`.prepared_images`).
"""

from __future__ import annotations

import asyncio
import os
import socket
from functools import partial
from pathlib import Path

from nemo_gym_prorl.sandbox.isolation import mounts
from nemo_gym_prorl.sandbox.isolation.privilege import is_machine_root
from nemo_gym_prorl.sandbox.runtime import launch
from nemo_gym_prorl.sandbox.runtime.launch import become_runtime, runtime_command
from nemo_gym_prorl.sandbox.supervisor.processes.children import Children
from nemo_gym_prorl.sandbox.supervisor.rpc.answers import Refused
from nemo_gym_prorl.sandbox.supervisor.rpc.connection import drop, ready
from nemo_gym_prorl.sandbox.supervisor.rpc.protocol import Message
from nemo_gym_prorl.sandbox.supervisor.sandbox import Sandbox
from nemo_gym_prorl.sandbox.supervisor.storage import state_dir


def make_folder(path: Path, order: Message) -> None:
    """Make a folder of a sandbox's user."""
    path.mkdir(mode=0o700)
    if is_machine_root():
        os.chown(path, order["host_uid"], order["host_gid"])


def lay_out(sandbox: Sandbox) -> None:
    """Make what is on disk of it."""
    overlay = sandbox.folder / "overlay"
    for path in (overlay, overlay / "upper", overlay / "work"):
        make_folder(path, sandbox.order)
    (overlay / "upper").chmod(0o755)


def open_channel(sandbox: Sandbox, kind: int) -> socket.socket:
    """Make its channel, in place of one that there may be; returns the first process's end."""
    if sandbox.channel:
        drop(sandbox.channel)
    sandbox.channel, theirs = socket.socketpair(socket.AF_UNIX, kind)
    sandbox.channel.setblocking(False)
    return theirs


async def start(children: Children, sandbox: Sandbox) -> state_dir.Space:
    """Have the runtime start it; who is cancelled, or fails, leaves ``starter`` and ``space`` to be ended.

    Raises:
        Refused: it does not; says why.
    """
    with open_channel(sandbox, socket.SOCK_STREAM) as theirs:
        sandbox.log = launch.create_log()
        command = runtime_command(sandbox.order, sandbox.folder)
        uncovered = mounts.uncovered()
        program = partial(become_runtime, sandbox.order, command, sandbox.folder, theirs, sandbox.log, uncovered)
        starter = sandbox.starter = children.fork(program, [theirs.fileno(), sandbox.log, *uncovered], sandbox.group)
    state_dir.note_starter(sandbox.folder, starter.pid)
    # What the image runs may never say a word.
    while starter.alive and not look_for_first(sandbox):  # noqa: ASYNC110  # only the kernel knows
        await asyncio.sleep(state_dir.LOOK_S)
    assert sandbox.channel
    await ready(sandbox.channel, unless=starter.wait())
    if sandbox.space is None or not starter.alive or not sandbox.channel.recv(64):
        code = await starter.wait()
        raise Refused({"error": f"the runtime ended with {code}", "log": sandbox.take_log()})
    return sandbox.space


def look_for_first(sandbox: Sandbox) -> bool:
    """Note the namespace that the runtime has made down, if it has."""
    if sandbox.way == "runtime" and sandbox.starter and sandbox.starter.alive and sandbox.space is None:
        sandbox.space = state_dir.Space.below(sandbox.starter.pid)
        if sandbox.space:
            sandbox.space.note(sandbox.folder)
    return sandbox.space is not None
