# SPDX-License-Identifier: Apache-2.0
"""What graders give up and hide before they run submitted source, which has their own user id."""

from __future__ import annotations

import ctypes


PR_SET_DUMPABLE = 4
PR_CAPBSET_DROP = 24
PR_SET_NO_NEW_PRIVS = 38
PR_CAP_AMBIENT = 47
PR_CAP_AMBIENT_CLEAR_ALL = 4
CAPABILITY_VERSION_3 = 0x20080522

LIBC = ctypes.CDLL(None, use_errno=True)


def hide() -> None:
    """Let no process of the same user, without capabilities, look into this one or its descendants.

    Raises:
        OSError: the kernel refuses.
    """
    if LIBC.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def drop_privileges() -> None:
    """Give up all capabilities for good: a sandbox may run as root of its own user namespace.

    Raises:
        OSError: the kernel refuses.
    """
    LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    LIBC.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    for capability in range(64):
        LIBC.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    nothing = (ctypes.c_uint32 * 6)(*[0] * 6)
    if LIBC.capset(header, nothing) != 0:
        raise OSError(ctypes.get_errno(), "capset")
