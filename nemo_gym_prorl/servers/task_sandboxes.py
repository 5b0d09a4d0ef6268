# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Sandboxes of tasks through Gym's sandbox API.

An unsupported requirement of a row is refused with the row's field name. Errors of the server's configuration are
never attributed to a row.

Gym's own ``AsyncSandbox`` hides the provider and the handle, which a shell needs, and creates a provider per sandbox.

:func:`run_program` runs an agent program in a session's sandbox, in place of the policy's tool calls. The program has
the same user, folder and variables as the policy's commands, and reaches only its rollout's policy. The program's
process group ends with the call, also if the call is cancelled; other processes end with the sandbox.
"""

from __future__ import annotations

import asyncio
import dataclasses
import posixpath
import shlex
import signal
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

from nemo_gym.sandbox.providers import create_provider
from nemo_gym.sandbox.providers.base import SandboxResources, SandboxSpec

from nemo_gym_prorl.failures import CallerError, FailureKind, InfrastructureError, RolloutError
from nemo_gym_prorl.sandbox import spec as specs
from nemo_gym_prorl.sandbox.images.builder import KERNEL, ensure_image
from nemo_gym_prorl.sandbox.runtime.apptainer import require_runtime
from nemo_gym_prorl.tasks.sandbox import Sandbox
from nemo_gym_prorl.tasks.task import OpenTools, SandboxNeeds


PROGRESS = "prorl: "
"""Prefix of progress lines in a server's output, which ``prorl serve`` parses."""

OWN_PROVIDER = "singularity"
"""Name of this project's provider, whose shells, files and snapshots the tasks need."""

_OPTIONS = ("network", "processes", "binds", "snapshot_paths")
"""Fields of :class:`.SandboxNeeds` that Gym's specification lacks; the provider accepts them as options."""

_NEED_OF_PROVIDER_FIELD = {"cpus": "cpu", "disk_mib": "disk_gib"}
"""Field of :class:`.SandboxNeeds` by the provider's name of the field, where the names differ."""


class TaskSandboxes:
    """Sandboxes of this project's provider for tasks.

    Args:
        provider: one provider name with its options, as in Gym's configuration.
        image: image of rows that name none; ``None`` for the shipped image ``own_image``.
        rows_name_images: whether all rows name their own image, so that no default image is built.
        own_image: name of the shipped image that is built if ``image`` is ``None``.

    Raises:
        CallerError: the provider is another one, or an option is unknown or invalid; names the option.
    """

    def __init__(
        self, provider: Mapping[str, Any], image: str | None, *, rows_name_images: bool, own_image: str = KERNEL
    ) -> None:
        if [*provider] != [OWN_PROVIDER]:
            raise CallerError(f"must be {OWN_PROVIDER}, not {', '.join(provider)}", field="sandbox_provider")
        specs.provider_options(provider[OWN_PROVIDER] or {})  # raises now if an option is invalid
        self._settings = provider
        self._image = image
        self._rows_name_images = rows_name_images
        self._own_image = own_image
        self._provider: Any = None

    async def get_ready(self) -> None:
        """Find the container runtime, and build the default image if it is required and missing.

        Raises:
            InfrastructureError: the runtime or the image is unavailable; the message contains the fix.
        """
        if self._provider is not None:
            return
        (await asyncio.to_thread(require_runtime)).activate()
        if self._image is None and not self._rows_name_images:
            self._image = str(await asyncio.to_thread(ensure_image, self._own_image, self._print_progress))
        if self._provider is None:
            self._provider = create_provider(self._settings)

    def _print_progress(self, message: str) -> None:
        print(f"{PROGRESS}sandbox image {self._own_image}: {message}", flush=True)

    async def fetch_image(self, needs: SandboxNeeds) -> None:
        """Pull the image of a sandbox before the sandbox starts; errors as of :meth:`start`."""
        await self._of_row(needs, lambda spec: self._provider.fetch_image(spec))

    async def start(self, needs: SandboxNeeds, snapshot: str | None = None) -> Sandbox:
        """Start a sandbox from an image, or from the snapshot of this name.

        Raises:
            CallerError: the snapshot or a requirement of the row is not supported; names the field.
            InfrastructureError: the runtime is missing, or there is no image for a row without one.
            Exception: any error of the provider.
        """
        try:
            handle = await self._of_row(needs, lambda spec: self._provider.create(_from(spec, snapshot)))
            return Sandbox(self._provider, handle)
        except Exception as error:
            if isinstance(cause := error.__cause__, CallerError) and cause.field == specs.SNAPSHOT:
                raise CallerError(cause.complaint, field="checkpoint.snapshot") from error
            raise

    async def delete_snapshot(self, name: str) -> None:
        await self._provider.delete_snapshot(name)

    async def renew_snapshot(self, name: str) -> None:
        await self._provider.renew_snapshot(name)

    async def delete_old_snapshots(self, name: str, age_s: float) -> None:
        """Delete snapshots taken as ``name`` that were neither taken nor renewed in the last ``age_s`` seconds."""
        if self._provider is not None:
            await self._provider.delete_old_snapshots(name, age_s)

    async def aclose(self) -> None:
        """Release the provider's resources; to be called after the sandboxes have ended."""
        if self._provider is not None:
            await self._provider.aclose()

    async def _of_row(self, needs: SandboxNeeds, ask: Callable[[SandboxSpec], Awaitable[Any]]) -> Any:
        """Call the provider, and convert its refusal of a requirement to an error with the row's field."""
        await self.get_ready()
        try:
            return await ask(self._spec(needs))
        except Exception as error:
            if refusal := _refusal(error, needs):
                raise refusal from error
            raise

    def _spec(self, needs: SandboxNeeds) -> SandboxSpec:
        image = self._image if needs.image is None else needs.image
        if image is None:
            raise InfrastructureError(
                "missing: neither the row nor the server's configuration names an image", field="image"
            )
        options = {name: value for name in _OPTIONS if (value := getattr(needs, name)) is not None}
        resources = SandboxResources(cpu=needs.cpu, memory_mib=needs.memory_mib, disk_gib=needs.disk_gib)
        # Shell and kernel start in "/", because an agent can remove any other folder.
        env = dict(needs.env or {})
        return SandboxSpec(image=image, workdir="/", env=env, resources=resources, provider_options=options)


def _from(spec: SandboxSpec, snapshot: str | None) -> SandboxSpec:
    if snapshot is None:
        return spec
    options = {**spec.provider_options, specs.SNAPSHOT: snapshot}
    return dataclasses.replace(spec, image=None, provider_options=options)


def _refusal(error: Exception, needs: SandboxNeeds) -> CallerError | None:
    """Return an error with the row's field if a provider's error was caused by a requirement that the row names."""
    cause = error.__cause__
    if not isinstance(cause, CallerError) or cause.field is None:
        return None
    name = cause.field.rpartition(".")[2]
    need = _NEED_OF_PROVIDER_FIELD.get(name, name)
    asked = {field.name for field in dataclasses.fields(needs) if getattr(needs, field.name) is not None}
    return CallerError(cause.complaint, field=need) if need in asked else None


OUTPUT_TAIL_CHARS = 4_000
"""Number of characters that are kept of the end of a program's output: enough for an error with its traceback."""

_PROBE = """\
home=$HOME
[ -d "$home" ] && [ -w "$home" ] || home=$(mktemp -d) || exit 1
for loader in /lib64/ld-linux-* /lib/ld-linux-*; do [ -e "$loader" ] && echo glibc && break; done || echo musl
printf %s "$home\""""
_PROBE_TIMEOUT_S = 30.0  # enough to start a shell on a loaded machine


async def run_program(tools: OpenTools, sandbox: Sandbox | None, launcher: Any) -> dict[str, Any]:
    """Run the agent program of a :class:`.ProgramRequest` until the program ends, or until its time limit.

    Returns:
        ``exit_code``, ``None`` after the time limit; ``seconds``; ``output``, the end of both streams. If a signal
        ended the program, also ``killed``: the signal's name and the limits that the sandbox has reached.

    Raises:
        CallerError: the session has no sandbox for programs, or the row does not fit the program.
        AgentError: the program exceeded a limit of its sandbox.
        InfrastructureError: the sandbox failed, or the machine ran out of memory and killed a process.
    """
    probed = await tools.run_script(_PROBE, timeout_s=_PROBE_TIMEOUT_S)
    assert sandbox is not None  # as the script has run
    if probed.return_code:
        raise InfrastructureError(f"the sandbox runs no shell: {(probed.stderr or '')[-500:]}")
    libc, _, home = (probed.stdout or "").partition("\n")
    origin = await sandbox.open_policy(launcher.url, launcher.key)
    try:
        script = script_of(launcher.launch(origin=origin, home=home, libc=libc))
        start = time.monotonic()
        done = await tools.run_script(script, timeout_s=launcher.timeout_s)
        seconds = round(time.monotonic() - start, 3)
    finally:
        with suppress(RolloutError):  # if the sandbox has ended, no call is possible anyway
            await sandbox.close_policy()
    if done.error_type == "sandbox":
        raise InfrastructureError(f"the program did not run: {done.stderr}", kind=FailureKind.SESSION_LOST)
    output = (done.stdout or "")[-OUTPUT_TAIL_CHARS:]
    end = {"exit_code": None if done.error_type else done.return_code, "seconds": seconds, "output": output}
    if done.return_code - 128 in signal.valid_signals() and not done.error_type:
        end["killed"] = "; ".join((signal.Signals(done.return_code - 128).name, *await sandbox.check()))
    return end


def script_of(program: Any) -> str:
    """Return the shell script that sets a program's variables, writes its files and executes the program."""
    lines = [f"export {name}={shlex.quote(text)}" for name, text in program.env.items()]
    for path, text in program.files.items():
        folder = shlex.quote(posixpath.dirname(path))
        lines.append(f"mkdir -p -- {folder} && printf %s {shlex.quote(text)} > {shlex.quote(path)} || exit 126")
    return "\n".join(["exec 2>&1", *lines, f"exec {shlex.join(program.command)}"])
