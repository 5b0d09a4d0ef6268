# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Sandboxes for tasks: what a row asks for, in the words of Gym's sandbox API, of one provider.

A row that asks for what can't be had is refused in the row's own words. What is wrong with the server's configuration
is never put down to a row.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from nemo_gym.sandbox import SandboxSpec
from nemo_gym.sandbox.providers.base import SandboxResources

from nemo_gym_prorl.failures import CallerError, InfrastructureError
from nemo_gym_prorl.sandbox import spec as specs
from nemo_gym_prorl.sandbox.factory import SandboxFactory, StartedSandbox
from nemo_gym_prorl.sandbox.images.builder import DEFAULT, KERNEL, ensure_image
from nemo_gym_prorl.sandbox.runtime.apptainer import require_runtime
from nemo_gym_prorl.tasks.task import SandboxNeeds


PROGRESS = "prorl: "
"""How a line in a server's output begins that says what it is about."""

OURS = "singularity"
"""Our own provider."""

LOCAL_PROVIDERS = frozenset({"apptainer", OURS})
"""Providers that run Apptainer on this machine, and so can use the image that set-up builds."""

_OPTIONS = ("network", "processes")
"""Needs for which Gym's specification has no field; our own provider takes them as options."""

_NEEDS = {"cpus": "cpu", "disk_mib": "disk_gib"}
"""Needs by the field of a sandbox that they became, where that has another name."""


class TaskSandboxes:
    """See the module.

    Args:
        provider: as in Gym's configuration: one name with its options.
        image: for rows that name none; ``None`` for the image that set-up builds.
        rows_name_images: no row does without one of its own, so none is looked for at the start.
        own_image: which of those that set-up builds.

    Raises:
        CallerError: an option of the provider is unknown or wrong; names it.
        ValueError: no image is named, and the provider has no default.
    """

    def __init__(
        self, provider: Mapping[str, Any], image: str | None, *, rows_name_images: bool, own_image: str = KERNEL
    ) -> None:
        [self._name] = provider
        if self._name == OURS:
            specs.provider_options(provider[OURS] or {})  # refuses what every sandbox would be refused for
        if image is None and not rows_name_images and self._name not in LOCAL_PROVIDERS:
            raise ValueError(f"image: name one, the sandbox provider {self._name!r} has no default")
        self._provider = provider
        self._image = image
        self._rows_name_images = rows_name_images
        # Kernels are for the provider that has them.
        self._own_image = DEFAULT if own_image == KERNEL and self._name != OURS else own_image
        self._starter: SandboxFactory | None = None

    @property
    def keeps_files(self) -> bool:
        """Whether what was written in one can be kept for others."""
        return self._name == OURS

    async def get_ready(self) -> None:
        """Find the runtime, and build the default image if it will be wanted and is not there.

        Raises:
            InfrastructureError: either can't be had; says how to mend it.
        """
        if self._starter is not None:
            return
        if self._name in LOCAL_PROVIDERS:
            (await asyncio.to_thread(require_runtime)).activate()
        if self._image is None and not self._rows_name_images:
            self._image = str(await asyncio.to_thread(ensure_image, self._own_image, self._say))
        if self._starter is None:
            self._starter = SandboxFactory(self._provider)

    def _say(self, message: str) -> None:
        """Of what may take minutes before the server answers: into its output, where ``prorl serve`` finds it."""
        print(f"{PROGRESS}sandbox image {self._own_image}: {message}", flush=True)

    async def fetch_image(self, needs: SandboxNeeds) -> None:
        """Have the image here that a sandbox starts from.

        Raises:
            CallerError: there is none of the name that the row says; names its field.
            InfrastructureError: no image is named, neither by the row nor in the configuration.
            Exception: whatever the provider raises.
        """
        await self._of_row(needs, lambda starter, spec: starter.fetch_image(spec))

    async def start(self, needs: SandboxNeeds, snapshot: str | None = None) -> StartedSandbox:
        """Start a sandbox, fresh or with what was kept of another.

        Raises:
            CallerError: the row asks for what can't be had; names its field.
            InfrastructureError: no image is named, neither by the row nor in the configuration.
            Exception: whatever the provider raises.
        """
        try:
            return await self._of_row(needs, lambda starter, spec: starter.start(_from(spec, snapshot)))
        except Exception as error:
            if isinstance(cause := error.__cause__, CallerError) and cause.field == specs.SNAPSHOT:
                raise CallerError(cause.complaint, field="checkpoint.snapshot") from error
            raise

    async def delete_snapshot(self, name: str) -> None:
        """Delete what was kept of a sandbox."""
        assert self._starter is not None
        await self._starter.delete_snapshot(name)

    async def renew_snapshot(self, name: str) -> None:
        """Have what was kept of a sandbox count as new."""
        assert self._starter is not None
        await self._starter.renew_snapshot(name)

    async def delete_old_snapshots(self, name: str, age_s: float) -> None:
        """Delete what was kept of sandboxes under a name, or renewed, more than so many seconds ago."""
        if self._starter is not None:
            await self._starter.delete_old_snapshots(name, age_s)

    async def aclose(self) -> None:
        """Let go of what the provider holds; best when its sandboxes have ended."""
        if self._starter is not None:
            await self._starter.aclose()

    async def _of_row[T](self, needs: SandboxNeeds, ask: Callable[[SandboxFactory, SandboxSpec], Awaitable[T]]) -> T:
        """What the provider answers, where it refuses the row in the row's words."""
        await self.get_ready()
        assert self._starter is not None
        try:
            return await ask(self._starter, self._spec(needs))
        except Exception as error:
            if refusal := _refusal(error, needs):
                raise refusal from error
            raise

    def _spec(self, needs: SandboxNeeds) -> SandboxSpec:
        image = self._image if needs.image is None else needs.image
        if image is None:
            raise InfrastructureError("neither the row nor the server's configuration names one", field="image")
        options = {name: value for name in _OPTIONS if (value := getattr(needs, name)) is not None}
        if options and self._name != OURS:
            raise CallerError(
                f"the sandbox provider {self._name!r} can't be asked for it", field=needs.row_field(min(options))
            )
        resources = SandboxResources(cpu=needs.cpu, memory_mib=needs.memory_mib, disk_gib=needs.disk_gib)
        # Shell and kernel start in the working folder: one that no agent can remove.
        return SandboxSpec(image=image, workdir="/", resources=resources, provider_options=options)


def _from(spec: SandboxSpec, snapshot: str | None) -> SandboxSpec:
    """It belongs to the image that it was taken over, which so is not named."""
    if snapshot is None:
        return spec
    options = {**spec.provider_options, specs.SNAPSHOT: snapshot}
    return dataclasses.replace(spec, image=None, provider_options=options)


def _refusal(error: Exception, needs: SandboxNeeds) -> CallerError | None:
    """The row's mistake behind an error of the provider's, if it is one."""
    cause = error.__cause__
    if not isinstance(cause, CallerError) or cause.field is None:
        return None
    name = cause.field.rpartition(".")[2]
    need = _NEEDS.get(name, name)
    asked = {field.name for field in dataclasses.fields(needs) if getattr(needs, field.name) is not None}
    return CallerError(cause.complaint, field=needs.row_field(need)) if need in asked else None
