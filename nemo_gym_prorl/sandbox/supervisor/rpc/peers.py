# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Who may ask a supervisor for something: processes of its own user, in its own namespaces, and nobody else.

Whoever can speak to a supervisor can have anything done as its user. Its socket lies in a folder that no sandbox is
shown (:mod:`..binds`), and this is the second wall: a process inside a sandbox is in other namespaces, whatever it was
shown, and root's sandboxes run as other users besides.
"""

from __future__ import annotations

import os
import select
import socket
import struct


_CREDENTIALS = struct.Struct("3i")
_PEER_PIDFD = 77
"""``SO_PEERPIDFD``, from Linux 6.5 on."""

NAMESPACES = ("pid", "user")


def peer(connection: socket.socket) -> tuple[int, int]:
    """Number and user of the process at the other end, as the kernel noted them down when it connected."""
    pid, uid, _gid = _CREDENTIALS.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return pid, uid


def trusted(connection: socket.socket, owner: int) -> bool:
    """Whether the process that connected is a trusted one.

    Where the kernel can (Linux 6.5), it also tells whether that process still lives, so that what is read of it is not
    another's who got its number. The owner, whose number is its own as long as we live, may have changed its user in
    a way that closes its part of /proc to us.
    """
    pid, uid = peer(connection)
    if pid == owner:
        return True
    if uid not in (os.geteuid(), 0) or pid <= 0:
        return False
    try:
        same = all(os.stat(f"/proc/{pid}/ns/{name}") == _own(name) for name in NAMESPACES)
    except OSError:
        return False
    return same and _lives(connection)


def _own(name: str) -> os.stat_result:
    return os.stat(f"/proc/self/ns/{name}")


def _lives(connection: socket.socket) -> bool:
    try:
        process = connection.getsockopt(socket.SOL_SOCKET, _PEER_PIDFD)
    except OSError:
        return True
    try:
        poll = select.poll()
        poll.register(process, select.POLLIN)
        return not poll.poll(0)
    finally:
        os.close(process)
