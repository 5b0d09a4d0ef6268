# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""How the process that runs the tests tells their outcomes past its own output. Part of a program in the sandbox.

The secret comes through a pipe, which can be read once, before anything of the repository is imported; each record
bears a number and an authentication code, so that who merely writes to the channel, or prints what a runner prints,
says nothing. It is what the interpreter of any of the datasets' images can read: Python 3.5 and later.
"""

import hashlib
import hmac
import json
import os


_write, _getpid, _dumps, _sha256, _new = os.write, os.getpid, json.dumps, hashlib.sha256, hmac.new


class Channel:
    """One way, to whoever started the tests; silent in every process but the first.

    Args:
        named: ``SECRET:INODE:RECORDS``, two descriptors and what the first should be. The pipe has the secret, and on
            a line of its own the JSON of a list.
    """

    def __init__(self, named):
        self._pid = None
        try:
            secret, inode, records = [int(part) for part in named.split(":")]
            if os.fstat(secret).st_ino != inode:
                return
            self._secret = b""
            while True:
                part = os.read(secret, 4096)
                if not part:
                    break
                self._secret += part
            os.close(secret)
            if not self._secret:
                return
            self._records = os.dup(records)  # and closed when another program is started
            os.close(records)
        except (ValueError, OSError):
            return
        self._count = 0
        self._pid = _getpid()

    @property
    def open(self):
        """Somebody listens."""
        return self._pid == _getpid()

    def send(self, kind, *values):
        """One record."""
        if not self.open:
            return
        self._count += 1
        body = _dumps([self._count, kind] + list(values)).encode("ascii")
        _write(self._records, _new(self._secret, body, _sha256).hexdigest().encode("ascii") + b" " + body + b"\n")


CHANNEL = Channel(os.environ.pop("PRORL_CHANNEL", ""))
