# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Sandboxes of a server in a user namespace, as in containers of enroot and Pyxis on Slurm.

They start in both ways, and their protections hold.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_gym_prorl.cli.doctor import container_check
from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.sandbox.container import Container, ContainerSpec
from nemo_gym_prorl.sandbox.isolation.privilege import is_machine_root
from nemo_gym_prorl.sandbox.limits.rlimits import HostFacts, enforced_limits
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime
from nemo_gym_prorl.sandbox.supervisor import state_dir
from tests.sandbox import as_user, nested


pytestmark = [
    pytest.mark.sandbox,
    pytest.mark.timeout(120),
    pytest.mark.skipif(not is_machine_root(), reason="only root can be each of those who make a namespace"),
]

CLOSED = "/proc/sys/kernel/core_pattern /proc/sysrq-trigger /proc/sys/vm/swappiness /proc/irq/default_smp_affinity"

COVERED = ("/proc/driver", "/sys/class/mem")

SYSTEMS = "/sys/kernel/mm/ksm/run"

PROBE = f"""
id -u
set /proc/[0-9]*; [ $# -lt 20 ] && echo few
ls /sys/class/net
for file in {CLOSED} {SYSTEMS}; do (: >>$file) 2>/dev/null && echo $file can be set; done
chmod 606 /dev/null 2>/dev/null && echo the mode of a device can be set
touch /etc/here; chown 1 /etc/here 2>/dev/null; [ -O /etc/here ] && echo own
"""

MOST = 40

BOMB = f"i=0; while [ $i -lt {2 * MOST} ]; do sleep 1 >&- 2>&- & i=$((i+1)); done"


async def probe(image: Path) -> None:
    """Start a sandbox in each way, and try its protections; runs in the namespace."""
    for way in ("direct", "runtime"):
        async with await Container.start(ContainerSpec(image=image, start=way, processes=MOST)) as container:
            tried = await container.run(PROBE)
            assert (tried.exit_code, tried.stdout.split()) == (0, ["0", "few", "lo", "own"]), (way, tried)
            bounded = (await container.run(BOMB)).exit_code != 0
            print(way, "bounded" if bounded else "unbounded", container.environment.get("CAN_SET"))
    try:
        await Container.start(ContainerSpec(image=image, users=True))
    except CallerError as error:
        print(error.reason)
    print(container_check(), enforced_limits(HostFacts.of_host(frozenset())), [state_dir.state_root()])


def tried_in(runtime: Runtime, image: Path, *options: str, user: bool = True) -> str:
    """Return the output of :func:`probe` in a namespace of an ordinary user or of machine root."""
    command = [*nested.command(*options), sys.executable, "-m", "tests.sandbox.test_nested", str(image)]
    if user:
        return as_user.run(runtime, *command)
    done = subprocess.run(command, cwd=nested.HERE.parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("inside", [("--root",), ()], ids=["its root", "himself"])
@pytest.mark.parametrize(
    "rootfs",
    [
        pytest.param(True, id="in a root folder"),
        pytest.param(False, id="on the host", marks=pytest.mark.long("a sandbox sees no more of it")),
    ],
)
def test_sandboxes_start_in_a_users_namespace_and_their_walls_stand(
    image: Path, runtime: Runtime, inside: tuple[str, ...], rootfs: bool
) -> None:
    """Inside, the user is root or not. A root folder has no time zone and nothing of the machine."""
    said = tried_in(runtime, image, *inside, *(("--enter", str(image)) if rootfs else ()))
    assert said.count(" bounded") == 2
    assert f"/prorl-{as_user.USER}'" in said, "it is told from other users', who may be root in theirs"
    assert "has one id: leave users: true out" in said
    assert "Level.OK" in said


def test_what_drivers_cover_is_taken_away_by_who_is_root_there(image: Path, runtime: Runtime) -> None:
    said = tried_in(runtime, image, "--root", "--enter", str(image), *(f"--covered={place}" for place in COVERED))
    assert said.count(" bounded") == 2
    assert "Level.OK" in said


@pytest.mark.parametrize(("place", "level"), [(COVERED[0], "MISSING"), (COVERED[1], "WARN")])
def test_who_may_not_is_told_what_to_ask_for(image: Path, runtime: Runtime, place: str, level: str) -> None:
    told = "from nemo_gym_prorl.cli.doctor import examine; print([one for one in examine()])"
    options = nested.command("--enter", str(image), "--covered", place)
    said = as_user.run(runtime, *options, sys.executable, "-c", told)
    assert re.search(f"'Container', level=<Level.{level}: [^)]*covers {place}: .*--container-remap-root", said)
    assert ("'Sandbox'" in said) is (level == "WARN"), "it is not tried where it is known to fail"


def test_the_machines_root_has_its_walls_there_but_for_the_number_of_processes(
    tiny_root: Path, runtime: Runtime, tmp_path: Path
) -> None:
    """The kernel treats root inside as the machine's root user, who may write kernel settings, also before a sandbox
    is ready."""
    other = tmp_path / "hostile"
    shutil.copytree(tiny_root, other, symlinks=True)
    (other / ".singularity.d/env").mkdir(parents=True)
    set_all = f"for file in {CLOSED} {SYSTEMS}; do (: >>$file) 2>/dev/null && export CAN_SET=$file; done"
    (other / ".singularity.d/env/95-own.sh").write_text(f"{set_all}\n")
    said = tried_in(runtime, other, "--root", user=False)
    assert said.count("unbounded None") == 2
    assert "Level.WARN" in said
    assert "exempts the machine's root user" in said
    assert "as an unprivileged user" in said


if __name__ == "__main__":
    asyncio.run(probe(Path(sys.argv[1])))
