# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""``with_fuse.py UID FOLDER COMMAND...``: run a command where ``/dev/fuse`` is that user's, as on most machines."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from nemo_gym_prorl.sandbox.isolation.syscalls import unshare_mounts
from nemo_gym_prorl.sandbox.runtime.launch import provide_fuse_device


if __name__ == "__main__":
    unshare_mounts()
    provide_fuse_device(Path(sys.argv[2]), int(sys.argv[1]), int(sys.argv[1]))
    os.execv(sys.argv[3], sys.argv[3:])
