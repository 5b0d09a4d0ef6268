# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What the engines' fixture starts does not outlive a pytest that is killed."""

import contextlib
import os
import select
import signal
import subprocess
import sys
from pathlib import Path


STARTS = """
import os, sys, time
from pathlib import Path
from tests.policy.engines import begin
print(begin(["sleep", "600"], Path(sys.argv[1]), os.environ).pid, flush=True)
time.sleep(600)
"""


def test_an_engine_ends_with_a_process_that_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", STARTS, str(tmp_path / "engine.log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]) as starter:
        assert starter.stdout is not None
        engine = os.pidfd_open(int(starter.stdout.readline()))
        try:
            assert select.select([engine], [], [], 0)[0] == [], "the engine lives"
            starter.kill()
            assert select.select([engine], [], [], 30)[0] == [engine], "the engine outlived its pytest"
        finally:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(engine, signal.SIGKILL)
            os.close(engine)
