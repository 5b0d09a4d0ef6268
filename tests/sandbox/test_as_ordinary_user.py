# SPDX-License-Identifier: Apache-2.0
"""The tests of this folder once more, as a user without any right; in parts, that run beside each other.

``make test`` runs those of :data:`OTHER_FOR_A_USER` but :data:`SAME_FOR_A_USER`, ``make test-long`` all of them.
Whoever adds a branch on the user to the sandbox side names the file that tries it there.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from nemo_gym_prorl.failures import InfrastructureError
from nemo_gym_prorl.sandbox.images.cache import cache_dir
from nemo_gym_prorl.sandbox.isolation.user_domain import HELPERS
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime
from tests.sandbox.database import ensure_database_image


ACCOUNT = pwd.getpwnam("games")
USER = ACCOUNT.pw_uid
"""Somebody every system knows, since Apptainer wants to know its user, and nobody who runs anything."""

HERE = Path(__file__).parent

OTHER_FOR_A_USER = {
    # Which domain a sandbox gets, whose its processes and files are, what is hidden, what it may use up.
    "walls": ("abuse", "nothing_of_the_host", "users", "old_kernel", "kernel_shares", "cgroup"),
    # To a sandbox and out of it: moulds, mounts, networks, processes that end, files that are erased.
    "ways": ("bad_binds", "bad_input", "mould", "network", "life", "erase", "trouble", "supervisor_boundary"),
    # Who may build, unpack, own and remove them.
    "images": ("images_build", "images_confined", "images_entries", "images_start", "hostile_images"),
    # One of each that is used as root uses it: files and commands, a kernel (never forked), layers.
    "uses": ("container", "kernel", "snapshots"),
}
"""Of what the code branches on the user, the files that try it, without ``test_`` and ``.py``; parts that take about
as long as each other."""

SAME_FOR_A_USER = (
    # That an abuse succeeds where its wall is missing says something of the abuse.
    "unprotected",
    # What a kernel says is read as bytes by the server, and bounded there; a user's kernels are forked by nobody, and
    # so say it as root's do that aren't.
    "test_a_flood_of_messages_does_not_hide_the_end",
    "test_rich_results_and_tracebacks_are_bounded",
    "test_cells_take_turns_and_one_that_nobody_waits_for_is_interrupted",
    "test_what_is_no_message_harms_nobody",
    "test_a_message_of_too_many_values_holds_up_nobody_and_is_counted",
)
"""Tests of these files that say nothing of the user, by parts of their names."""

LONG = bool(os.environ.get("PRORL_TEST_LONG"))
PARTS = (*OTHER_FOR_A_USER, *(("others",) if LONG else ()))


def files_of(part: str) -> list[Path]:
    every = {file for file in HERE.glob("test_*.py") if file != Path(__file__)}
    named = {part: [HERE / f"test_{name}.py" for name in names] for part, names in OTHER_FOR_A_USER.items()}
    return named.get(part) or sorted(every.difference(*named.values()))


def test_what_root_skips_is_run_as_a_user() -> None:
    skipped = [file.stem for file in HERE.glob("test_*.py") if "skipif(os.geteuid() == 0" in file.read_text()]
    named = {f"test_{name}" for names in OTHER_FOR_A_USER.values() for name in names}
    assert set(skipped) - {Path(__file__).stem} <= named


def test_what_is_left_out_is_there() -> None:
    texts = [file.read_text() for part in OTHER_FOR_A_USER for file in files_of(part)]
    assert [name for name in SAME_FOR_A_USER if not any(name in text for text in texts)] == []


@pytest.mark.longer("all files, all of their tests")
@pytest.mark.sandbox
@pytest.mark.timeout(3600 if LONG else 900)
@pytest.mark.skipif(os.geteuid() != 0, reason="this is an ordinary user already")
@pytest.mark.parametrize("part", PARTS)
def test_everything_works_for_an_ordinary_user(image: Path, runtime: Runtime, part: str) -> None:
    chosen = () if LONG else ("-k", f"not ({' or '.join(SAME_FOR_A_USER)})")
    with contextlib.suppress(InfrastructureError):
        # The user can't make images in root's cache.
        ensure_database_image(runtime)
    _run_tests(runtime, *chosen, *map(str, files_of(part)))


@pytest.mark.sandbox
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give this user a range")
def test_a_user_with_a_range_and_without_the_programs_for_it_builds_images(runtime: Runtime, tmp_path: Path) -> None:
    """As Debian's ``useradd`` makes accounts, where the package ``uidmap`` is not installed."""
    table = tmp_path / "range"
    table.write_text(f"{ACCOUNT.pw_name}:100000:65536\n")
    covered = [f"mount --bind {table} /etc/sub{kind}" for kind in ("uid", "gid")]
    covered += [f"mount --bind /dev/null {found}" for name in HELPERS if (found := shutil.which(name))]
    first = ("unshare", "--mount", "sh", "-ec", "; ".join([*covered, 'exec "$@"']), "sh")
    test = "test_a_template_becomes_an_image_that_starts_by_its_name"
    _run_tests(runtime, f"{HERE / 'test_images_build.py'}::{test}", first=first)


def _run_tests(runtime: Runtime, *words: str, first: Sequence[str] = ()) -> None:
    """Run pytest with these words as the user, in a folder of his own; ``first`` is what starts that as root."""
    home = Path(tempfile.mkdtemp(prefix="prorl-u-"))
    # Who is in a sandbox with several users has no rights by a group that none of them is in.
    os.chown(home, USER, ACCOUNT.pw_gid)
    try:
        done = subprocess.run(
            [
                *first,
                *(sys.executable, str(HERE / "as_user.py"), str(USER)),
                *(sys.executable, "-m", "pytest", "-q", "-x", "--reruns=1", "-p", "no:cacheprovider"),
                *("--basetemp", str(home / "t")),
                *words,
            ],
            cwd=HERE.parents[1],
            env={
                "PATH": os.pathsep.join([str(runtime.path.parent), os.environ["PATH"]]),
                "HOME": str(home),
                "TMPDIR": str(home),
                "PRORL_CACHE": str(cache_dir()),
                "PYTHONPATH": str(HERE.parents[1]),
                "PYTHONDONTWRITEBYTECODE": "1",
                "HYPOTHESIS_STORAGE_DIRECTORY": str(home / "hypothesis"),
            },
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    finally:
        shutil.rmtree(home)
