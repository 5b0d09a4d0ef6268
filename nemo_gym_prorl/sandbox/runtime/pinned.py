# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The packages that the private Apptainer is made of, each by its SHA-256.

They are Debian's, listed in ``pinned.json``: one version of each, from wherever it is
to be had. A mirror of the archive has them while they are current, and Debian's own snapshot of the day has them for
ever. What has another sum is not taken, so neither a mirror nor the way to it needs to be trusted, and neither apt nor
its keys are needed: this works on any machine that can unpack a package.
"""

from __future__ import annotations

import hashlib
import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from nemo_gym_prorl.failures import InfrastructureError
from nemo_gym_prorl.sandbox.images.cache import Progress, machine


ARCHIVE = "http://deb.debian.org/debian"
SNAPSHOT = "https://snapshot.debian.org/archive/debian"

TIMEOUT_S = 30.0
AT_A_TIME = 6  # downloads side by side: a mirror's latency, and not its bandwidth, is what is waited for
"""For a mirror to say something."""


@dataclass(frozen=True, slots=True)
class Pins:
    """What is listed for one architecture.

    Attributes:
        snapshot: a time at which the archive had all of it, as Debian's snapshots are named.
        packages: path in the archive to SHA-256.
    """

    snapshot: str
    packages: Mapping[str, str]

    def mirrors(self, first: Sequence[str] = ()) -> list[str]:
        """Where to look, in order: those given, the archive, its snapshot."""
        return list(dict.fromkeys([*first, ARCHIVE, f"{SNAPSHOT}/{self.snapshot}"]))


def pins() -> Pins:
    """What is listed for this machine's architecture.

    Raises:
        InfrastructureError: nothing is.
    """
    listed = json.loads((resources.files("nemo_gym_prorl.sandbox.runtime") / "pinned.json").read_text())
    if machine() not in listed["packages"]:
        raise InfrastructureError(f"no packages are listed for {machine()}")
    return Pins(listed["snapshot"], listed["packages"][machine()])


def fetch(wanted: Pins, mirrors: Sequence[str], work: Path, progress: Progress) -> list[Path]:
    """Download the packages into ``work``.

    Raises:
        InfrastructureError: one can't be had from any mirror as it is listed; with what each said.
    """
    progress(f"downloading {len(wanted.packages)} packages")
    found: list[Path] = []
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        asked = [pool.submit(_fetch, path, checksum, mirrors, work) for path, checksum in wanted.packages.items()]
        try:
            for done in as_completed(asked):
                found.append(done.result())
                size = sum(path.stat().st_size for path in found) / 1e6
                progress(f"downloading: {len(found)} of {len(asked)} packages, {size:.1f} MB")
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return found


def _fetch(path: str, checksum: str, mirrors: Sequence[str], work: Path) -> Path:
    reasons = []
    for mirror in mirrors:
        url = f"{mirror.rstrip('/')}/{path}"
        try:
            with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:  # checked by its sum
                data = answer.read()
        # What breaks off while it is read is an OSError as well.
        except (OSError, urllib.error.URLError) as error:
            reasons.append(f"{url}: {error}")
            continue
        if hashlib.sha256(data).hexdigest() != checksum:
            reasons.append(f"{url}: not the one that is listed")
            continue
        target = work / path.rpartition("/")[2]
        target.write_bytes(data)
        return target
    raise InfrastructureError(f"a package of Apptainer can't be had: {'; '.join(reasons)}")
