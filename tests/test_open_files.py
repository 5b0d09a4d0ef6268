# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The limit of open files: raised where that is allowed, and never taken for another's fault."""

import errno
import os
import resource
import subprocess
import sys

import pytest

from nemo_gym_prorl.failures import FailureKind, Origin, Stage, classify
from nemo_gym_prorl.http.server_process import descriptor_exhaustion, open_files_needed


def test_a_server_raises_its_soft_limit_to_the_hard_one() -> None:
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 200))\n"
        "from nemo_gym_prorl.http import server_process as o\n"
        "print(o.raise_open_file_limit(), resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).split() == ["200", "(200,", "200)"]
    assert open_files_needed(1000) > 4000


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_our_own_want_of_descriptors_is_named_as_such(number: int) -> None:
    failure = classify(OSError(number, os.strerror(number)), Stage.INIT)
    assert failure.kind is FailureKind.PROVIDER_QUOTA_EXHAUSTED
    assert failure.origin is Origin.INFRASTRUCTURE
    assert "ulimit -n" in failure.reason
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert str(limit) in descriptor_exhaustion().reason
