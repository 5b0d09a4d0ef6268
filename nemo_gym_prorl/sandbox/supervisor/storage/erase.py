# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Deleting what sandboxes left, however it was made: deep, long, closed to its owner, changed meanwhile.

The launcher's program does it (``launcher/files.c``), here as one of its own, for whoever is no supervisor. Files of
users that exist only in a sandbox with several of them an ordinary user removes as the root of them all.
"""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path

from nemo_gym_prorl.sandbox.isolation import user_ids
from nemo_gym_prorl.sandbox.isolation.privilege import is_machine_root
from nemo_gym_prorl.sandbox.launcher import program


OTHERS = frozenset({errno.EPERM, errno.EACCES})
"""What an ordinary user is told of files of users that are not he."""


def remove_tree(folder: Path) -> None:
    """As ``rm -rf``. Blocks.

    Raises:
        OSError: something can't be removed.
    """
    number = _erase(folder)
    if number in OTHERS and not is_machine_root():
        parent, one_user = user_ids.make_parent_namespace()
        try:
            number = number if one_user else _erase(folder, parent)
        finally:
            os.close(parent)
    if number:
        raise OSError(number, os.strerror(number), str(folder))


def _erase(folder: Path, *parent: int) -> int:
    """The number of the error, or 0."""
    arguments = [program.ERASER, os.fspath(folder), *map(str, parent)]
    ended = subprocess.run(arguments, executable=program.path(), pass_fds=parent, env={}, check=False).returncode
    return ended if ended >= 0 else errno.EINTR
