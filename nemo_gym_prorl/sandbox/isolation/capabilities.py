# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Which of the kernel's capabilities a sandbox has, and which it may be given when a task asks for them.

All of them are good in the sandbox's own user namespace only. A few open something there; most are asked of the
machine's own namespace, where nothing in a sandbox ever has any, so granting them would be an empty promise.
"""

from __future__ import annotations

from collections.abc import Iterable

from nemo_gym_prorl.failures import CallerError


KEPT = {
    "CHOWN": 0,
    "DAC_OVERRIDE": 1,
    "FOWNER": 3,
    "FSETID": 4,
    "KILL": 5,
    "SETGID": 6,
    "SETUID": 7,
    "SETPCAP": 8,
    "NET_BIND_SERVICE": 10,
    "NET_RAW": 13,
    "SYS_CHROOT": 18,
    "MKNOD": 27,
    "AUDIT_WRITE": 29,
    "SETFCAP": 31,
}
"""Those that root has in every sandbox, as is customary for containers. Without SYS_ADMIN nothing can be mounted,
without SYS_PTRACE nothing that has more rights can be looked into, and without SYS_RESOURCE limits can't be lifted."""

GRANTED = {"NET_ADMIN": 12, "SYS_PTRACE": 19}
"""Those that are added when asked for: all of one's own network devices, and looking into all processes of one's own.
The supervisor's helpers stay closed even to that: their memory belongs to the namespace that they came from."""

_REFUSED = {
    "ALL": "name those that are needed",
    "SYS_ADMIN": "it would let the sandbox mount file systems and undo its walls",
    "SYS_RESOURCE": "it would let the sandbox lift its limits",
    "DAC_READ_SEARCH": "it would let the sandbox open files by number, past its root folder",
    "SYS_RAWIO": "there are no devices in a sandbox",
    "CHECKPOINT_RESTORE": "it would let the sandbox choose the numbers of its processes",
    "BPF": "programs in the kernel would be shared with the machine",
    "PERFMON": "what it measures belongs to the machine",
}
_WITHOUT_EFFECT = "the kernel asks for it in the machine's own user namespace, so in a sandbox it has no effect"


def numbers(names: Iterable[str], *, root: bool, host_network: bool) -> frozenset[int]:
    """The numbers of capabilities that are to be added, by names as in Compose files, with or without ``CAP_``.

    Raises:
        CallerError: one can't be had; says why.
    """
    found = set()
    for given in names:
        name = given.upper().removeprefix("CAP_")
        if name in KEPT:
            continue
        if name not in GRANTED:
            reason = _REFUSED.get(name, _WITHOUT_EFFECT)
            raise CallerError(f"{given} is not given to sandboxes: {reason}", field="capabilities")
        if not root:
            raise CallerError(f"{given} is for root inside; the sandbox has root: false", field="capabilities")
        if name == "NET_ADMIN" and host_network:
            raise CallerError(f"{given} is for a network of one's own, not for network: true", field="capabilities")
        found.add(GRANTED[name])
    return frozenset(found)
