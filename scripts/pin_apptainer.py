# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""List anew what the private Apptainer is made of: ``nemo_gym_prorl/sandbox/runtime/pinned.json``.

Apptainer itself comes from sid, the only suite that has it, and what it loads from stable, which changes least. Their
sums are those of the lists that Debian has signed. Needs a Debian machine and a mirror; then run the tests of
``tests/setup/test_install.py``, and raise ``PREFIX_RECIPE``.
"""

from __future__ import annotations

import email.utils
import json
import subprocess
import tempfile
from datetime import datetime, timedelta
from pathlib import Path

from nemo_gym_prorl.sandbox.runtime import debian, pinned


STABLE = "trixie"
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}

# Its programs and the libraries that these load, as ldd says. Dependencies for set-up scripts and setuid helpers are
# of no use in a folder.
PACKAGES = (
    *("apptainer", "containernetworking-plugins", "fuse-overlayfs", "fuse2fs", "squashfs-tools", "squashfuse"),
    *("libblkid1", "libc6", "libcom-err2", "libext2fs2t64", "libfuse3-4", "libgcc-s1", "liblz4-1", "liblzma5"),
    *("liblzo2-2", "libseccomp2", "libsqlite3-0", "libsquashfuse0", "libuuid1", "libxxhash0", "libzstd1", "zlib1g"),
)

DINSTALL = timedelta(hours=6)
"""How long a state of the archive lasts."""


def main() -> None:
    """Write the list."""
    sources = [debian.AptSource(pinned.ARCHIVE, suite) for suite in (STABLE, "sid")]
    packages: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for machine, architecture in ARCHITECTURES.items():
            work = Path(folder, machine)
            work.mkdir()
            config = debian.private_apt(sources, work, architecture)
            config.write_text(config.read_text() + f'APT::Default-Release "{STABLE}";\n')
            subprocess.run(["apt-get", "-q", "-c", str(config), "update"], check=True)
            packages[machine] = dict(sorted(_described(config, name) for name in PACKAGES))
        dates = [_date(file) for file in Path(folder).rglob("*Release")]
    listed = {"snapshot": f"{max(dates) + DINSTALL:%Y%m%dT%H%M%SZ}", "packages": packages}
    target = Path(pinned.__file__).with_name("pinned.json")
    target.write_text(json.dumps(listed, indent=1) + "\n")
    print(target)


def _described(config: Path, name: str) -> tuple[str, str]:
    """The path and the sum of what apt would install."""
    command = ["apt-cache", "-c", str(config), "show", "--no-all-versions", name]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    fields = dict(line.split(": ", 1) for line in text.splitlines() if ": " in line and not line.startswith(" "))
    return fields["Filename"], fields["SHA256"]


def _date(release: Path) -> datetime:
    line = next(line for line in release.read_text().splitlines() if line.startswith("Date: "))
    return email.utils.parsedate_to_datetime(line.removeprefix("Date: "))


if __name__ == "__main__":
    main()
