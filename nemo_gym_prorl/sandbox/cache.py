# SPDX-License-Identifier: Apache-2.0
"""The user's cache folder: where everything lies that set-up builds and that can be built again.

Several set-ups may run at once (two shells, a test run beside a demo, nodes that share a home folder), and any of
them may be killed at any moment. Two rules keep the cache sound all the same:

- a thing is built under a lock of its own name, so nobody builds it twice;
- it is built beside its final place and renamed into it, so whatever has the final name is complete.
"""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from nemo_gym_prorl.failures import InfrastructureError
from nemo_gym_prorl.sandbox.lease import remove_tree


Progress = Callable[[str], None]
"""Told one short line, without a full stop, whenever a longer step begins."""


def silent(_message: str) -> None:
    """The :data:`Progress` of those who do not want to know."""


def cache_dir() -> Path:
    """The cache folder: ``$PRORL_CACHE``, else ``$XDG_CACHE_HOME/nemo-gym-prorl``, else ``~/.cache/nemo-gym-prorl``.

    A relative ``XDG_CACHE_HOME`` is ignored, as its specification asks. The folder need not exist yet.
    """
    if own := os.environ.get("PRORL_CACHE"):
        return Path(own).expanduser().absolute()
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(xdg) if Path(xdg).is_absolute() else Path("~/.cache").expanduser()
    return base / "nemo-gym-prorl"


def machine() -> str:
    """The processor architecture, e.g. ``x86_64``: part of every name, since unlike nodes may share a home folder."""
    return platform.machine()


@contextmanager
def locked(name: str) -> Iterator[None]:
    """Hold the cache's lock ``name``; waits for another holder, and is let go even if this process is killed.

    Raises:
        InfrastructureError: the cache folder can't be written.
    """
    path = cache_dir() / "locks" / f"{name}.lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise InfrastructureError(
            f"the cache folder {cache_dir()} can't be written ({error.strerror}): set PRORL_CACHE to a folder of yours"
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def staging(target: Path) -> Iterator[Path]:
    """An empty folder beside ``target`` to build in; gone, with all that is in it, at the end.

    What is to stay is moved out of it with :func:`publish`.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        folder.chmod(0o755)
        yield folder
    finally:
        remove_tree(folder)


def publish(built: Path, target: Path) -> None:
    """Give ``built`` its final name ``target`` in one step, in place of what an interrupted set-up may have left."""
    if target.exists():
        shutil.rmtree(target)
    built.rename(target)
