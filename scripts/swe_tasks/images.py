# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Build one SIF image per task on a shared base that is packed once.

The shared base is built and packed once as a squashfs. A task's image is a copy of the packed base with its repository
appended.
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

TIMEOUT_S = 1800.0  # for packing the base on a loaded machine

TEMPLATE = Path(__file__).with_name("base.def.j2")

# Codes of the SIF format: a squashfs partition with the root file system for one architecture.
_SIF_ADD = ("--datatype", "4", "--parttype", "2", "--partfs", "1", "--groupid", "1")
_PROCESSORS = {"i686": "1", "x86_64": "2", "armv7l": "3", "aarch64": "4", "ppc64le": "6", "s390x": "11"}


def ensure_base(runtime: Runtime, progress: Progress) -> Path:
    """Build the shared base image (the default image with pytest) and return its root folder.

    Raises:
        InfrastructureError: the image could not be built.
    """
    base = ensure_image(DEFAULT, progress)
    order = BuildRequest(str(TEMPLATE), str(base), "swe-tasks", wheels=WHEELS, format="folder")
    return build(order, ImageStore(), runtime, progress)


class LayeredImages:
    """Builds task images from the shared base and a repository.

    Args:
        base: root folder of the base.
        folder: folder of the packed base.
        runtime: container runtime with its programs.
    """

    def __init__(self, base: Path, folder: Path, runtime: Runtime) -> None:
        self._base = base
        self._packed = folder / f"{base.parent.name}.squashfs"
        self._packing = Entries(folder / "packing")
        self._runtime = runtime

    def add(self, tree: Path, target: Path, work: Path) -> None:
        """Build the image ``target`` from the base and the folder ``tree``, whose entries must be new.

        Args:
            tree: contents to add.
            target: path of the image.
            work: empty folder on the same disk.

        Raises:
            InfrastructureError: a program failed; contains its output.
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
        """Pack the base unless it is packed."""
        if self._packed.exists():
            return
        self._packing.sweep()
        with self._packing.making(self._packed.name) as work:
            assert work is not None, "making() returns None only for published entries"
            if not self._packed.exists():
                part = work / self._packed.name
                # A low compression level: the image is read more often than packed.
                self._squash(self._base, part, "-noappend", "-comp", "gzip", "-Xcompression-level", "4")
                part.rename(self._packed)

    def _squash(self, tree: Path, target: Path, *options: str) -> None:
        program = shutil.which("mksquashfs", path=os.pathsep.join(self._folders()))
        if program is None:
            raise InfrastructureError("mksquashfs is missing; install the package squashfs-tools")
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
            raise InfrastructureError(f"{command[0]} exceeded {TIMEOUT_S:g} s") from error
        if done.returncode:
            raise InfrastructureError(f"{Path(command[0]).name} failed: {(done.stderr or done.stdout).strip()[-600:]}")
