# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What dpkg would know of packages that were unpacked without it, so that dpkg and apt go on from there inside.

A root folder that is made by unpacking archives has programs and no memory of where they came from: ``dpkg -i`` finds
every dependency missing, and ``apt-get install`` would install the system once more. Here is written what dpkg would
have written (``/var/lib/dpkg``): status, lists of files, checksums, triggers and the packages' own scripts.

No script is run. A package is recorded as *installed* where what its scripts do has been done by other means or does
not matter, and as *unpacked* otherwise: then ``dpkg --configure -a`` runs them, where there are users to run them for.
"""

from __future__ import annotations

import hashlib
import io
import subprocess
import tarfile
from collections.abc import Container, Mapping, Sequence
from pathlib import Path

from nemo_gym_prorl.failures import InfrastructureError


DATABASE = "var/lib/dpkg"

_NOT_KEPT = ("control", "conffiles")
"""Files of a package's control area that dpkg keeps in its status file instead."""


def write(root: Path, unpacked: Mapping[Path, Sequence[str]], configured: Container[str]) -> None:
    """Record packages that lie unpacked in ``root``.

    Args:
        root: the root folder.
        unpacked: each archive, and what it has: paths that begin with ``./``.
        configured: names of packages that count as installed; all others are only unpacked.

    Raises:
        InfrastructureError: an archive can't be read.
    """
    database = root / DATABASE
    for name in ("info", "updates", "parts", "triggers"):
        (database / name).mkdir(parents=True, exist_ok=True)
    (database / "info" / "format").write_text("1\n")
    # Without it dpkg takes all triggers for pulled, and makes every list and cache anew.
    (database / "triggers" / "Unincorp").touch()
    stanzas = []
    for archive, files in unpacked.items():
        control = _control_area(archive)
        fields = _fields(control["control"].decode())
        name = fields["Package"]
        # Packages of several architectures can be there together, if they say so.
        of_many = fields.get("Multi-Arch") == "same"
        stem = database / "info" / (f"{name}:{fields['Architecture']}" if of_many else name)
        Path(f"{stem}.list").write_text("".join(f"{_listed(file)}\n" for file in files))
        for kind, data in control.items():
            if kind not in _NOT_KEPT:
                kept = Path(f"{stem}.{kind}")
                kept.write_bytes(data)
                kept.chmod(0o755 if data.startswith(b"#!") else 0o644)
        state = "installed" if name in configured else "unpacked"
        conffiles = control.get("conffiles", b"").decode().splitlines()
        stanzas.append(_stanza(control["control"].decode(), state, _sums(root, conffiles)))
        _record_triggers(database / "triggers", name, control.get("triggers", b"").decode())
    (database / "status").write_text("\n".join(stanzas))


def _control_area(archive: Path) -> dict[str, bytes]:
    done = subprocess.run(["dpkg-deb", "--ctrl-tarfile", archive], capture_output=True, check=False)
    if done.returncode:
        raise InfrastructureError(f"{archive.name} can't be read: {done.stderr.decode(errors='replace').strip()}")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as tar:
        files = {member.name.removeprefix("./"): tar.extractfile(member) for member in tar if member.isfile()}
        return {name: file.read() for name, file in files.items() if file}


def _fields(control: str) -> dict[str, str]:
    """The fields of one line; of longer ones their first line."""
    lines = (line.partition(":") for line in control.splitlines() if line[:1] not in ("", " ", "\t"))
    return {name: value.strip() for name, _, value in lines}


def _listed(file: str) -> str:
    return "/." if file == "./" else file.removeprefix(".").rstrip("/")


def _sums(root: Path, conffiles: Sequence[str]) -> dict[str, str]:
    """Settings that users may change, and what they are as shipped."""
    there = [name for name in conffiles if name.startswith("/") and (root / name[1:]).is_file()]
    return {name: hashlib.md5((root / name[1:]).read_bytes(), usedforsecurity=False).hexdigest() for name in there}


def _stanza(control: str, state: str, sums: Mapping[str, str]) -> str:
    first, _, rest = control.strip().partition("\n")
    conffiles = "".join(f"\n {name} {value}" for name, value in sums.items())
    # Where a package's scripts were never run, there is no version that they could be told to go on from.
    return f"{first}\nStatus: install ok {state}\n{rest}\n" + (f"Conffiles:{conffiles}\n" if conffiles else "")


def _record_triggers(folder: Path, name: str, triggers: str) -> None:
    """Who is to be told when others put files somewhere, such as ldconfig of libraries."""
    for line in triggers.splitlines():
        words = line.split("#")[0].split()
        if len(words) != 2 or not words[0].startswith("interest"):
            continue
        who = name + ("/noawait" if words[0] == "interest-noawait" else "")
        if words[1].startswith("/"):
            with (folder / "File").open("a") as file:
                file.write(f"{words[1]} {who}\n")
        else:
            with (folder / words[1]).open("a") as file:
                file.write(f"{who}\n")
