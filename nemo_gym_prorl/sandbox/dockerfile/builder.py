# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Build images from Dockerfiles, without Docker, a daemon or root.

Each stage on which the target depends becomes an image in the store. The runtime builds a stage from its base's root
folder by one shell script with all steps of the stage. A base is an earlier stage, the image that the Dockerfile
names, or a replacement that the user names: another base can change a verdict, so the builder replaces none by itself.

A stage's key is a hash of its base, its steps and the files that it copies, so an unchanged stage is built once and
shared by all Dockerfiles with this stage. An unchanged file of a base is stored as a hard link. Differences from
Docker:

- If the builder has one user id, every file belongs to that user, and ``RUN`` after ``USER`` runs as that user.
- Otherwise ``RUN`` after ``USER`` needs the ``chroot`` of coreutils in the image, or a ``su`` that knows the user.
- If ``ADD`` unpacks a folder over a symlink to a folder, such as ``/bin``, the symlink stays.
- ``apt`` is configured to keep its user id (``APT::Sandbox::User``), since a sandbox has one user id by default.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path

from nemo_gym_prorl.failures import CallerError, InfrastructureError
from nemo_gym_prorl.sandbox.dockerfile.build_steps import (
    CopyStep,
    FolderStep,
    RunStep,
    Stage,
    Step,
    find_stage,
    plan,
    split_stages,
)
from nemo_gym_prorl.sandbox.dockerfile.context import (
    CopyPlan,
    CopySource,
    plan_copy,
    read_ignore_rules,
    text_of,
    write_archive,
)
from nemo_gym_prorl.sandbox.dockerfile.instructions import parse
from nemo_gym_prorl.sandbox.images import build_tools
from nemo_gym_prorl.sandbox.images.builder import (
    BUILD_TIMEOUT_S,
    BUILTIN_IMAGES,
    KEY_LENGTH,
    check_space,
    open_base_root,
)
from nemo_gym_prorl.sandbox.images.entries import Format, Progress, machine
from nemo_gym_prorl.sandbox.images.oci_config import OciConfig, is_settable
from nemo_gym_prorl.sandbox.images.pull import Puller
from nemo_gym_prorl.sandbox.images.reference import Reference, RegistryImage, check_name, parse_registry
from nemo_gym_prorl.sandbox.images.reference import parse as parse_reference
from nemo_gym_prorl.sandbox.images.rootfs import check_usable
from nemo_gym_prorl.sandbox.images.store import ImageInfo, ImageStore, config_of
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime


_WORK = "/.prorl-build"
"""Folder in the image with the script and the archives of a build; the script removes the folder at the end."""

_FOLDER_MODE = "755"

_PRELUDE = f"""\
set -e
umask 022
cd {_WORK}
touch probe
# Variables of this machine and of the runtime are not the image's.
for name in $(env | sed -n '/^[A-Za-z_][A-Za-z0-9_]*=/s/=.*//p'); do
    case $name in PATH | *_proxy | *_PROXY | SSL_CERT_* | PRORL_*) ;; *) unset "$name" ;; esac
done
# Where the build has one user id, files cannot be given to another user, nor commands run as one.
if chown 1:1 probe 2> /dev/null; then owners=-p; else owners=-po; fi
# A copied folder bin must not take the place of a link from /bin to /usr/bin.
if tar --keep-directory-symlink --version > /dev/null 2>&1; then links=--keep-directory-symlink; else links=; fi
if [ -d /etc/apt/apt.conf.d ]; then
    echo 'APT::Sandbox::User "root";' > /etc/apt/apt.conf.d/99prorl-one-user
fi
failed() {{
    echo "Dockerfile: line $1 failed with exit code $2" >&2
    exit 1
}}
home_of() {{
    while IFS=: read -r name _ uid _ _ home _ || [ -n "$name" ]; do
        if [ "$name" = "$1" ] || [ "$uid" = "$1" ]; then echo "${{home:-/}}"; return; fi
    done < /etc/passwd
    echo /
}}
as_user() {{
    user=${{1%%:*}} group=
    case $1 in *:*) group=${{1#*:}} ;; esac
    shift
    unset OLDPWD
    home=$(home_of "${{user:-0}}")
    if [ -z "$user" ] || [ "$owners" != -p ]; then exec env HOME="$home" "$@" < /dev/null; fi
    own_group=$(id -g "$user" 2> /dev/null || echo 0)
    case $(chroot --help 2>&1) in *--userspec*)
        others=
        if [ -n "$group" ] || ! id -u "$user" > /dev/null 2>&1; then others=--groups=; fi
        exec chroot $others --userspec="$user:${{group:-$own_group}}" / \
            /bin/sh -c 'cd "$0" && exec env "$@"' "$PWD" HOME="$home" "$@" < /dev/null
    esac
    # Alpine's chroot knows no users, and its su no groups and no numbers.
    name=$(id -nu "$user" 2> /dev/null)
    if [ -n "$name" ] && [ "${{group:-$own_group}}" = "$own_group" ] && command -v su > /dev/null; then
        exec su -m -s /bin/sh "$name" -c "exec $(quoted env HOME="$home" "$@")" < /dev/null
    fi
    echo "USER $user${{group:+:$group}}: needs coreutils in the image, or su and an entry in /etc/passwd" >&2
    return 1
}}
quoted() {{
    for word; do printf "'" && printf %s "$word" | sed "s/'/'\\"'\\"'/g" && printf "' "; done
}}
processes=$(cd /proc && echo [0-9]*)
# Processes that a command leaves behind end with it, as those of a container would.
end_processes() {{
    found=
    for process in $(cd /proc && echo [0-9]*); do
        case " $processes $$ " in *" $process "*) continue ;; esac
        if [ "/proc/$process/ns/mnt" -ef /proc/self/ns/mnt ]; then found=1; kill -KILL "$process"; fi
    done 2> /dev/null
    if [ -n "$found" ]; then end_processes; fi
}}
make_folder() {{
    if [ -d "$1" ]; then return; fi
    make_folder "$(dirname "$1")" "$2" "$3" && mkdir "$1" && chmod "$3" "$1" || return
    if [ -n "$2" ] && [ "$owners" = -p ]; then chown "$2" "$1"; fi
}}
unpack() {{
    make_folder "$2" "$3" "$4" && tar -x $owners $links -f "$1" -C "$2"
}}
unpack_one() {{
    if [ -d "$2" ]; then unpack "$@"; return; fi
    rm -rf single
    unpack "$1" {_WORK}/single "" 755 && make_folder "$(dirname "$2")" "$3" "$4" || return
    mv "single/$5" "$(readlink -f "$2" || echo "$2")"
}}
"""


@dataclass(frozen=True, slots=True)
class DockerfileRequest:
    """Request to build an image from a Dockerfile.

    Attributes:
        path: the Dockerfile, or the folder with the Dockerfile; the folder is the build context.
        name: short name of the built image.
        replaced: image to use (address, path or name) by the reference in ``FROM`` or ``--from`` that it replaces.
        timeout_s: seconds for building one stage.
    """

    path: Path
    name: str
    replaced: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = BUILD_TIMEOUT_S

    @property
    def dockerfile(self) -> Path:
        return self.path / "Dockerfile" if self.path.is_dir() else self.path

    @property
    def context(self) -> Path:
        """Folder from which ``COPY`` and ``ADD`` take files."""
        return self.dockerfile.parent


def is_dockerfile(path: Path) -> bool:
    """Return whether a path is a folder with a ``Dockerfile``, or a file with ``dockerfile`` in its name."""
    return (path / "Dockerfile").is_file() or (path.is_file() and "dockerfile" in path.name.lower())


def build_dockerfile(request: DockerfileRequest, store: ImageStore, runtime: Runtime, progress: Progress) -> Path:
    """Build an image from a Dockerfile unless the store has the image; return the path of its root folder or SIF.

    Raises:
        CallerError: the Dockerfile or an option is wrong; names line or option.
        InfrastructureError: a base cannot be pulled, or a step failed; quotes the step's last output.
    """
    if check_name(request.name) in BUILTIN_IMAGES:
        raise CallerError(f"{request.name!r} is the name of a shipped image; choose another", field="--name")
    stages = split_stages(parse(text_of(request.dockerfile)), machine())
    images = _images_named(stages)
    if unused := sorted(request.replaced.keys() - images):
        raise CallerError(f"no FROM names {unused[0]!r}, only {', '.join(sorted(images))}", field="--replace")
    for local in sorted(images - request.replaced.keys()):
        if local in BUILTIN_IMAGES or store.entry_named(local):
            raise CallerError(
                f"{local} is a registry's image and one of this machine: add --replace {local}={local} for this "
                f"machine's, or write FROM docker.io/library/{local}",
                field="FROM",
            )
    build = _Build(request, stages, store, runtime, progress)
    image = build.stage_image(len(stages) - 1, store.default_format())
    store.name(request.name, image.parent.name)
    return image


_UNKNOWN_FOLDER = "/.of-the-base"  # placeholder for the working folder of a base that was not read


def inspect_dockerfile(path: Path) -> tuple[frozenset[str], OciConfig]:
    """Return the images that a Dockerfile builds on or copies from, and the user and working folder that it sets.
    The user or the working folder is empty if a base image decides it. Pulls and builds no image.

    Raises:
        CallerError: the Dockerfile is wrong, or an instruction is not supported; names the line.
    """
    stages = split_stages(parse(text_of(path)), machine())
    configs: list[OciConfig] = []
    for number, stage in enumerate(stages):
        parent = find_stage(stages[:number], stage.base)
        base = OciConfig({}, _UNKNOWN_FOLDER) if parent is None else configs[parent]
        configs.append(plan(stage, base, machine())[1])
    workdir = configs[-1].workdir
    known = replace(configs[-1], workdir="" if workdir.startswith(_UNKNOWN_FOLDER) else workdir)
    return frozenset(_images_named(stages)), known


def _images_named(stages: Sequence[Stage]) -> set[str]:
    named = [(number, stage.base) for number, stage in enumerate(stages)]
    for number, stage in enumerate(stages):
        flags = [flag for one in stage.instructions for flag in one.flags]
        named += [(number, value) for name, value in flags if name == "from" and not value.isdecimal()]
    return {name for number, name in named if find_stage(stages[:number], name) is None}


@dataclass(slots=True)
class _Build:
    """One build of a Dockerfile; ``made`` has the image by number of each stage that is built or found."""

    request: DockerfileRequest
    stages: Sequence[Stage]
    store: ImageStore
    runtime: Runtime
    progress: Progress
    made: dict[int, Path] = field(default_factory=dict)

    def stage_image(self, index: int, kind: Format) -> Path:
        """Return the path of a stage's image; build the image and its dependencies unless the store has them."""
        stage = self.stages[index]
        base = self._image_of(stage.base, index)
        steps, config = plan(stage, config_of(base) or OciConfig({}), machine())
        with ExitStack() as held:
            copies = {
                number: plan_copy(step, self._source_of(step, index, held))
                for number, step in enumerate(steps)
                if isinstance(step, CopyStep)
            }
            key = _key(self.store.identity(base), steps, copies, config, kind)
            entry = f"dockerfile-{key}"
            with self.store.images.making(entry, self.progress) as work:
                if work is not None:
                    check_space(work)
                    root = open_base_root(base, self.store, self.runtime, held, self.progress)
                    self.progress(f"building stage {stage.name or index} on {stage.base}")
                    made = self._run(work, root, steps, copies, kind)
                    if kind == "folder":
                        config.rewrite_script(made)
                    about = f"{self.request.dockerfile.name} on {stage.base}"
                    info = ImageInfo("image", about, kind, 0, time.time(), config=config)
                    self.store.publish(work, made, entry, info, base=root)
        path = self.store.payload(entry)
        if path is None:
            raise InfrastructureError(f"{entry} was removed as soon as it was made")
        self.made[index] = path
        return path

    def _image_of(self, name: str, before: int) -> Path:
        if (index := find_stage(self.stages[:before], name)) is not None:
            return self.made.get(index) or self.stage_image(index, "folder")
        if name.isdecimal():
            raise CallerError(f"--from={name}: there is no such stage", field="Dockerfile")
        wanted: Reference
        if (replaced := self.request.replaced.get(name)) is not None:
            wanted = parse_reference(replaced, "replace")
        else:
            wanted = parse_registry(name, "FROM")
        path = self.store.locate(wanted)
        if path is None:
            assert isinstance(wanted, RegistryImage)
            path = Puller(self.store, self.runtime, "folder").pull(wanted, self.progress)
        return path

    def _source_of(self, step: CopyStep, index: int, held: ExitStack) -> CopySource:
        if step.origin is None:
            return CopySource(self.request.context, read_ignore_rules(self.request.context, self.request.dockerfile))
        start = self.store.open(self._image_of(step.origin, index), self.runtime, progress=self.progress)
        held.callback(start.release)
        return CopySource(start.path)

    def _run(
        self, work: Path, base: Path, steps: Sequence[Step], copies: Mapping[int, CopyPlan], kind: Format
    ) -> Path:
        given = work / "build"
        given.mkdir()
        script = [_PRELUDE]
        for number, step in enumerate(steps):
            if isinstance(step, CopyStep):
                write_archive(copies[number], step, given / f"{number}.tar")
            script.append(_script_of(number, step, copies.get(number)))
        (given / "steps.sh").write_text("".join([*script, f"cd /\nrm -rf {_WORK}\n"]))
        definition = work / "image.def"
        definition.write_text(
            f"Bootstrap: localimage\nFrom: {base}\n\n"
            f"%files\n    {given.name} {_WORK}\n\n%post\n    /bin/sh {_WORK}/steps.sh\n"
        )
        unpacked = kind == "folder"
        made = build_tools.build(
            self.runtime, work, str(definition), timeout_s=self.request.timeout_s, unpacked=unpacked, base=base
        )
        shutil.rmtree(given)
        if unpacked:
            check_usable(made)
        return made


def _script_of(number: int, step: Step, copied: CopyPlan | None) -> str:
    if isinstance(step, RunStep):
        # Passed as arguments, since exported variables of the image could override variables of the script.
        env = [f"{name}={value}" for name, value in step.env.items() if is_settable(name)]
        command = shlex.join([step.user, *env, *step.command])
        return f"( cd {shlex.quote(step.workdir)} && as_user {command} ) || failed {step.line} $?\nend_processes\n"
    if isinstance(step, FolderStep):
        command = shlex.join(["make_folder", step.path, step.owner, _FOLDER_MODE])
    else:
        assert copied is not None
        program = "unpack_one" if copied.single and not step.target.endswith("/") else "unpack"
        mode = _FOLDER_MODE if step.mode is None else f"{step.mode:o}"
        words = [f"{_WORK}/{number}.tar", step.target, step.owner, mode, copied.single]
        command = shlex.join([program, *words])
    return f"{command} || failed {step.line} $?\n"


def _key(base: str, steps: Sequence[Step], copies: Mapping[int, CopyPlan], config: OciConfig, kind: Format) -> str:
    """Return a hash of all inputs of a stage's image, without line numbers."""
    contents = [copies[number].digest() if number in copies else "" for number in range(len(steps))]
    parts = [[type(step).__name__, *astuple(step)[1:]] for step in steps]
    text = json.dumps([base, machine(), kind, _PRELUDE, parts, contents, config.to_json()], default=dict)
    return hashlib.sha256(text.encode()).hexdigest()[:KEY_LENGTH]
