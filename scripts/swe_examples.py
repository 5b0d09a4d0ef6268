# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Build the images of the example rows of ``prorl_swe`` from source distributions, without a registry.

A row contains the patch that fixes the bug and the patch that adds the hidden tests. The repository of a row is the
published package with both patches reverted, as one commit with a fixed identity and date.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import uv

from nemo_gym_prorl.failures import InfrastructureError, RolloutError
from nemo_gym_prorl.sandbox.dockerfile.builder import DockerfileRequest, build_dockerfile
from nemo_gym_prorl.sandbox.images.builder import DEFAULT, ensure_image, unpack_wheels
from nemo_gym_prorl.sandbox.images.store import ImageStore
from nemo_gym_prorl.sandbox.runtime.apptainer import require_runtime
from nemo_gym_prorl.tasks.swe.instance import SweInstance, SweRow


EXAMPLES = Path(__file__).parents[1] / "resources_servers/prorl_swe/data/example.jsonl"

SHA256 = {
    "humanize": "1d6a36c453dbfbb3f0b34601d2e0b4ce5d48d780305cd45714843f0068fde6ac",
    "inflection": "1a29730d366e996aaacffb2f1f1cb9593dc38e2ddd30c91250c6dde09ea9b417",
    "parse": "706d458feed5a81b02768d3156e8070baf6cee7d150a3a3c0cd43101a875c3b5",
    "simpleeval": "b417f869c11f2de034eb919820a825f35d12ce99f63a43971947ce73679eb9ba",
    "tabulate": "e2cfde8f79420f6deeffdeda9aaec3b6bc5abce947655d17ac662b126e48a60d",
}
"""SHA-256 of the source distributions by package."""

TIMEOUT_S = 900.0  # seconds for one command, such as a download over a slow connection

_PACKAGING = re.compile(r"PKG-INFO|.*\.egg-info|\.git.*")
"""Files that packaging adds to a source distribution."""

_WHO = {
    f"GIT_{whose}_{what}": value
    for whose in ("AUTHOR", "COMMITTER")
    for what, value in (("NAME", "prorl"), ("EMAIL", "prorl@localhost"), ("DATE", "2025-01-01T00:00:00Z"))
}

DOCKERFILE = """\
FROM base AS tools
COPY wheels /opt/prorl/wheels
RUN target=$(python3 -c 'import sysconfig; print(sysconfig.get_path("purelib"))') \\
    && mkdir -p "$target" && mv /opt/prorl/wheels/* "$target" && rmdir /opt/prorl/wheels \\
    && printf '/testbed/src\\n/testbed\\n' > "$target/testbed.pth"
FROM tools
COPY testbed /testbed
"""


def rows() -> list[dict[str, object]]:
    """Return the example rows."""
    return [json.loads(line) for line in EXAMPLES.read_text().splitlines()]


def download(package: str, version: str, folder: Path) -> Path:
    """Download a package's source distribution with the user's pip settings, and return the archive.

    Raises:
        InfrastructureError: the download failed, or the archive has another hash.
    """
    wanted = folder / "wanted.txt"
    wanted.write_text(f"{package}=={version} --hash=sha256:{SHA256[package]}\n")
    command = [uv.find_uv_bin(), "tool", "run", "--quiet", "pip", "download", "--quiet", "--no-deps"]
    command += ["--disable-pip-version-check", "--no-binary=:all:", f"--requirement={wanted}", f"--dest={folder}"]
    _run(command, folder)
    archive = folder / f"{package}-{version}.tar.gz"
    if not archive.is_file() or hashlib.sha256(archive.read_bytes()).hexdigest() != SHA256[package]:
        raise InfrastructureError(f"{archive.name} has another hash than expected")
    return archive


def make_repository(archive: Path, swe: SweInstance, target: Path) -> None:
    """Create the repository of a row in the new folder ``target``.

    Raises:
        InfrastructureError: git failed, or the commit is not the row's.
    """
    around = target.with_name("unpacked")
    with tarfile.open(archive) as members:
        members.extractall(around, filter="data")
    [top] = around.iterdir()
    for entry in top.iterdir():
        if _PACKAGING.fullmatch(entry.name):
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    top.rename(target)
    _git(target, "init", "--quiet", "--initial-branch=main")
    (target / ".git/info/exclude").write_text("__pycache__/\n*.pyc\n.pytest_cache/\n")
    shutil.rmtree(target / ".git/hooks")
    _git(target, "apply", "--reverse", "-", text=swe.patch + swe.test_patch)
    # --force: files that the package's .gitignore matches are part of the base commit.
    _git(target, "add", "--all", "--force")
    _git(target, "commit", "--quiet", "--message=The package as it is")
    if (made := _git(target, "rev-parse", "HEAD").strip()) != swe.base_commit:
        raise InfrastructureError(f"{archive.name} gives the commit {made}, not the row's {swe.base_commit}")


def _git(repository: Path, *arguments: str, text: str = "") -> str:
    environ = {
        "PATH": os.environ.get("PATH", ""),
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "GIT_CONFIG_NOSYSTEM": "1",
        **_WHO,
    }
    return _run(["git", "-c", "core.autocrlf=false", *arguments], repository, text, environ)


def _run(command: list[str], cwd: Path, text: str = "", environ: dict[str, str] | None = None) -> str:
    try:
        done = subprocess.run(
            command, cwd=cwd, env=environ, input=text, capture_output=True, text=True, timeout=TIMEOUT_S, check=True
        )
    except subprocess.TimeoutExpired as error:
        raise InfrastructureError(f"{command[0]} exceeded {TIMEOUT_S:g} s") from error
    except subprocess.CalledProcessError as error:
        raise InfrastructureError(f"{' '.join(command[:3])} failed: {error.stderr.strip()[-600:]}") from error
    return done.stdout


def build_image(row: dict[str, object], base: Path) -> Path:
    """Build the image of a row on the default sandbox image ``base``, unless the image exists.

    Raises:
        InfrastructureError: a download, git or the build failed.
    """
    asked = SweRow.parse(row)
    with tempfile.TemporaryDirectory(prefix="prorl-swe-") as folder:
        context = Path(folder, "context")
        context.mkdir()
        (context / "Dockerfile").write_text(DOCKERFILE)
        unpack_wheels(["pytest==9.0.2"], base, context / "wheels")
        package = asked.instance_id.removeprefix("made__").rpartition("-")[0]
        make_repository(download(package, asked.swe.version, Path(folder)), asked.swe, context / "testbed")
        request = DockerfileRequest(context, str(asked.image), replaced={"base": str(base)})
        return build_dockerfile(request, ImageStore(), require_runtime(), print)


def main() -> int:
    """Build the images of all example rows; return the exit code."""
    try:
        base = ensure_image(DEFAULT, print)
        for row in rows():
            print(f"{row['instance_id']}: {build_image(row, base)}")
    except RolloutError as error:
        print(error.reason, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
