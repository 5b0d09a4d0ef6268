# SPDX-License-Identifier: Apache-2.0
"""``as_user.py UID COMMAND...``: become an ordinary user who can read the tools and the cache, then run a command.

Root's own folders are closed to everybody else, and the interpreter, the runtime and the image may lie there. So the
command runs in a mount namespace where just these are to be seen.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from nemo_gym_prorl.sandbox.cache import cache_dir
from nemo_gym_prorl.sandbox.linux import expose


def main() -> None:
    uid, command = int(sys.argv[1]), sys.argv[2:]
    repository = Path(__file__).parents[2]
    expose([Path(sys.prefix), Path(sys.base_prefix), repository, cache_dir()])
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    os.execvp(command[0], command)


main()
