# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Why a sandbox did not start, in words that say what to do: what the runtime or the kernel said, and the fix."""

from __future__ import annotations

import re

from nemo_gym_prorl.failures import FailureKind, InfrastructureError
from nemo_gym_prorl.sandbox.images.rootfs import UNPACK
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime
from nemo_gym_prorl.sandbox.spec import ContainerSpec
from nemo_gym_prorl.sandbox.supervisor.errors import SandboxRefused


KNOWN_CAUSES = {
    "no user namespaces": "'prorl doctor' says what an administrator can do",
    "function not implemented": "sandboxes of root need Linux 5.19; an ordinary user's do not",
    "no space left|disk quota": "make room where PRORL_STATE is, or set it to a folder on another local disk",
    "it can't be prepared": "set PRORL_STATE to a folder of yours on a local disk",
    "squashfuse|squashfs|/dev/fuse": "the image is damaged, or FUSE is not to be had here: build it "
    f"again, or unpack it with '{UNPACK} IMAGE' and name FOLDER",
    "other owners|value too large": "the file system of the image can't show other owners: copy it to a local disk",
    "overlay": "PRORL_STATE must be a folder on a local disk that can carry an overlay (ext4, xfs, tmpfs; not NFS)",
}
"""What the runtime's words, by regular expression, ask to be done; the first that fits counts."""


def start_error(error: SandboxRefused, spec: ContainerSpec, runtime: Runtime) -> InfrastructureError:
    """What the runtime said when it did not start, with what to do about the causes that are known."""
    said = "; ".join(line for line in error.log.splitlines() if line.strip())[-800:] or error.reason
    fix = next((f"; {fix}" for sign, fix in KNOWN_CAUSES.items() if re.search(sign, said, re.IGNORECASE)), "")
    kind = error.kind if error.kind is FailureKind.PROVIDER_QUOTA_EXHAUSTED else None
    return InfrastructureError(f"{runtime.flavor} could not start a sandbox of {spec.image}: {said}{fix}", kind=kind)
