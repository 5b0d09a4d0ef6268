# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""An image for each task, as one file (SIF), of which all but the repository is made once.

The image that tasks share is built as any other and packed once. A squashfs can be added to: a task's image is a copy
of the packed one with its repository added, and costs what copying costs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from nemo_gym_prorl.failures import InfrastructureError
from nemo_gym_prorl.sandbox.images import rootfs
from nemo_gym_prorl.sandbox.images.builder import DEFAULT, BuildRequest, build, ensure_image
from nemo_gym_prorl.sandbox.images.entries import Entries, Progress, machine
from nemo_gym_prorl.sandbox.images.store import ImageStore
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime


WHEELS = ("pytest==9.0.2",)

TIMEOUT_S = 1800.0

TEMPLATE = Path(__file__).with_name("base.def.j2")

# Numbers of the format: a partition, of squashfs, with the root file system, for a processor.
_SIF_ADD = ("--datatype", "4", "--parttype", "2", "--partfs", "1", "--groupid", "1")
_PROCESSORS = {"i686": "1", "x86_64": "2", "armv7l": "3", "aarch64": "4", "ppc64le": "6", "s390x": "11"}


def ensure_base(runtime: Runtime, progress: Progress) -> Path:
    """The root folder of the image that all tasks share: the default image with pytest.

    Raises:
        InfrastructureError: it can't be built.
    """
    base = ensure_image(DEFAULT, progress)
    order = BuildRequest(str(TEMPLATE), str(base), "swe-tasks", wheels=WHEELS, format="folder")
    return build(order, ImageStore(), runtime, progress)


class Stack:
    """Makes images of the one that tasks share and a repository each.

    Args:
        base: the root folder of the former.
        folder: where the packed one is kept.
        runtime: its programs are used.
    """

    def __init__(self, base: Path, folder: Path, runtime: Runtime) -> None:
        self._base = base
        self._packed = folder / f"{base.parent.name}.squashfs"
        self._packing = Entries(folder / "packing")
        self._runtime = runtime

    def add(self, tree: Path, target: Path, work: Path) -> None:
        """Make the image ``target``, which has the contents of the folder ``tree`` besides the shared ones; none of
        its entries may be there already.

        Args:
            tree: what is added.
            target: the image.
            work: an empty folder on its disk.

        Raises:
            InfrastructureError: a program failed; with its words.
        """
        self.pack()
        packed, made = work / "packed", work / "made.sif"
        shutil.copyfile(self._packed, packed)
        self._squash(tree, packed, "-no-recovery")
        runtime = str(self._runtime.path)
        self._run([runtime, "sif", "new", str(made)])
        self._run([runtime, "sif", "add", *_SIF_ADD, "--partarch", _PROCESSORS[machine()], str(made), str(packed)])
        rootfs.read_sif(made, machine())
        made.rename(target)

    def pack(self) -> None:
        """Pack what is shared, unless that was done."""
        if self._packed.exists():
            return
        self._packing.sweep()
        with self._packing.making(self._packed.name) as work:
            assert work is not None, "nothing is published there"
            if not self._packed.exists():
                part = work / self._packed.name
                # It is packed once and copied often, but read more often still.
                self._squash(self._base, part, "-noappend", "-comp", "gzip", "-Xcompression-level", "4")
                part.rename(self._packed)

    def _squash(self, tree: Path, target: Path, *options: str) -> None:
        program = shutil.which("mksquashfs", path=os.pathsep.join(self._folders()))
        if program is None:
            raise InfrastructureError("there is no mksquashfs (package squashfs-tools)")
        self._run([program, str(tree), str(target), "-all-root", "-no-progress", "-no-xattrs", "-quiet", *options])

    def _folders(self) -> list[str]:
        prefix = self._runtime.path.resolve().parents[1]
        own = [*prefix.glob("lib/*/apptainer/bin"), prefix / "libexec/apptainer/bin", prefix / "utils/bin"]
        return [*os.environ.get("PATH", "").split(os.pathsep), *map(str, own)]

    def _run(self, command: list[str]) -> None:
        try:
            done = subprocess.run(
                command,
                env=self._runtime.environ(),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise InfrastructureError(f"{command[0]} was not done after {TIMEOUT_S:g} s") from error
        if done.returncode:
            raise InfrastructureError(f"{Path(command[0]).name} failed: {(done.stderr or done.stdout).strip()[-600:]}")
