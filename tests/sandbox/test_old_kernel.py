# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Linux 4.18, simulated: a seccomp filter answers ENOSYS to every later system call.

The filter applies to the supervisor and the runtime, too. It can't undo features such as overlays of ordinary users
(5.11), for which the runtime has a program of its own.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from nemo_gym_prorl.sandbox.isolation.privilege import is_machine_root
from nemo_gym_prorl.sandbox.limits.rlimits import Enforcement, HostFacts, enforced_limits, process_limit
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime


ROLLOUT = """
import asyncio, os, sys
from pathlib import Path
from nemo_gym_prorl.failures import InfrastructureError
from nemo_gym_prorl.sandbox.container import Container, ContainerSpec
from nemo_gym_prorl import syscall_filter
from nemo_gym_prorl.sandbox.isolation import seccomp, syscalls
from nemo_gym_prorl.sandbox.sessions.shell import Shell
from nemo_gym_prorl.tasks.code.inside.process_hardening import filter_calls

table, last = {"x86_64": (seccomp.TABLES["x86_64"], 334), "aarch64": (seccomp.TABLES["aarch64"], 293)}[
    os.uname().machine
]
syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
filter_calls(syscall_filter.compile_filter(table.audit, {}, last))


async def main():
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        print("pidfd_open:", error.strerror)
    async with await Container.start(ContainerSpec(image=Path(sys.argv[1]))) as container:
        done = await container.run("echo written > /file; cat /file")
        late = await container.run("sleep 60", timeout_s=0.5)
        print(done.stdout, late.timed_out, (await container.run("echo later")).stdout)
        Path(sys.argv[2]).write_text("there and back")
        await container.files.upload(Path(sys.argv[2]), "/tmp/up")
        await container.files.download("/tmp/up", Path(sys.argv[2] + ".back"))
        async with await Shell.start(container) as shell:
            await shell.run("cd /tmp; export A=kept")
            print((await shell.run("echo $PWD $A")).output)
    print(Path(sys.argv[2] + ".back").read_text())


try:
    asyncio.run(main())
except InfrastructureError as error:
    print("refused:", error)
"""


@pytest.mark.sandbox
def test_a_sandbox_of_an_ordinary_user_lacks_nothing(image: Path, runtime: Runtime, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ROLLOUT, str(image), str(tmp_path / "file")],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert "pidfd_open: Function not implemented" in done.stdout, done.stderr
    if is_machine_root():
        # Sandboxes of root need idmapped mounts.
        assert "sandboxes of root need Linux 5.19; an ordinary user's do not" in done.stdout, done.stderr
    else:
        expected = ["written", "True later", "/tmp kept", "there and back"]
        assert [line.strip() for line in done.stdout.splitlines()[1:] if line.strip()] == expected, (
            done.stdout + done.stderr
        )


@pytest.mark.parametrize(
    ("kernel", "limit", "enforcement"),
    [((4, 18), 3000, Enforcement.NONE), ((5, 13), 3000, Enforcement.NONE), ((5, 14), 512, Enforcement.KERNEL)],
)
def test_before_5_14_a_fourth_of_the_users_processes_is_out_of_reach(
    kernel: tuple[int, int], limit: int, enforcement: Enforcement
) -> None:
    """Those kernels compare the limit with all processes of the user, so a lower one would forbid every fork."""
    assert process_limit(512, kernel, 4000) == limit
    found = {each.name: each.enforcement for each in enforced_limits(HostFacts(frozenset(), kernel))}
    assert found["processes"] is enforcement


def test_a_process_limit_never_exceeds_the_hard_limit_of_the_user() -> None:
    code = "from nemo_gym_prorl.sandbox.limits import rlimits; print(rlimits.process_limit_here(512))"
    limited = ["bash", "-c", f'ulimit -SHu 300; exec "{sys.executable}" -c "{code}"']
    assert int(subprocess.check_output(limited)) <= 300
