# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What Gym asks of a provider beyond single sandboxes: for ``AsyncSandboxCompose``, its checkpoints and its terminals.

Gym finds each of these by its methods (0.7: ``SupportsSandboxPtyAttach``, ``SupportsSandboxEndpoint``,
``SupportsSandboxNetwork``, ``SupportsSandboxPortForwarding``, ``SupportsSandboxSharedStorage``,
``SupportsSandboxRuntimeRequirements``; later ``SupportsSandboxSnapshot``), so on a Gym that does not know one its
methods are simply there.

All stays closed that nobody asks for: a sandbox is in no network until it is introduced to others. And what does the
work is imported when somebody asks, so single sandboxes neither wait for it nor depend on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_gym.sandbox.providers import base
from nemo_gym.sandbox.providers.base import SandboxHandle, SandboxSpec

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.sandbox.arguments import check_path, check_port, check_window
from nemo_gym_prorl.sandbox.gym.options import CAPABILITIES, SHARED_MEMORY, SNAPSHOT, container_of
from nemo_gym_prorl.sandbox.isolation import capabilities
from nemo_gym_prorl.sandbox.supervisor.storage.volumes import ALL, Volume


if TYPE_CHECKING:
    from nemo_gym_prorl.sandbox.compose import snapshots
    from nemo_gym_prorl.sandbox.compose.terminal import Terminal


_MIB = 1 << 20


class ComposeSupport:
    """See the module; a part of :class:`.provider.SingularityProvider`."""

    _kept: str | None
    """Folder of snapshots, if not the usual one."""

    async def create_pty(self, handle: SandboxHandle, spec: Any) -> Terminal:
        """Open a terminal, by Gym's ``SandboxPtySpec``; see :class:`.terminal.Terminal`."""
        from nemo_gym_prorl.sandbox.compose.terminal import Terminal

        if spec.pty:
            check_window(spec.rows, spec.cols)
        return await Terminal.open(
            container_of(handle),
            spec.command,
            cwd=spec.cwd,
            env=spec.env,
            size=(spec.rows, spec.cols) if spec.pty else None,
            user=spec.user,
        )

    async def attach_pty(
        self, handle: SandboxHandle, session_id: str, *, takeover: bool = True, since: int | None = None
    ) -> Terminal:
        """Hold a session that was opened before, here or by another process; see :meth:`.terminal.Terminal.attach`."""
        from nemo_gym_prorl.sandbox.compose.terminal import Terminal

        return await Terminal.attach(container_of(handle), session_id, takeover=takeover, since=since)

    async def endpoint(self, handle: SandboxHandle, port: int) -> Any:
        """Where a port of the sandbox's own loopback device can be reached, as Gym's ``SandboxEndpoint``.

        A port of this machine's loopback device, open for as long as the sandbox lives; see :mod:`.port_forward`.
        """
        from nemo_gym_prorl.sandbox.compose import port_forward

        check_port(port)
        return base.SandboxEndpoint(f"http://{port_forward.HOST}:{port_forward.expose(container_of(handle), port)}")

    def validate_networking(self) -> None:
        """Nothing needs to be set up; a kernel without the devices for it says so when the first network is made."""

    async def network_address(self, handle: SandboxHandle) -> str:
        """Where others find the sandbox once it is introduced to them; see :mod:`.network`."""
        from nemo_gym_prorl.sandbox.compose import network

        return await network.address(container_of(handle))

    async def set_hosts(self, handle: SandboxHandle, hosts: Mapping[str, str]) -> None:
        """Introduce the sandbox to those behind the addresses, by these names. All of them are in one network then."""
        from nemo_gym_prorl.sandbox.compose import network

        await network.set_hosts(container_of(handle), hosts)

    def validate_port_forwarding(self) -> None:
        """Nothing needs to be set up, in the sandbox neither."""

    async def forward_ports(
        self, handle: SandboxHandle, target_address: str, ports: tuple[int, ...], *, ready_file: str
    ) -> None:
        """Have ports of another sandbox on this one's loopback device until cancelled; see :mod:`.port_forward`.

        Raises:
            CallerError: what is no port, path or address.
        """
        from nemo_gym_prorl.sandbox.compose import network, port_forward

        for port in ports:
            check_port(port, "ports")
        check_path(ready_file, "ready_file")
        network.check_address(target_address, "target_address")
        await port_forward.forward(container_of(handle), target_address, ports, ready_file)

    def validate_runtime_requirements(self, *, cap_add: tuple[str, ...], shm_size: int | None) -> dict[str, str]:
        """What ``create`` has to know of a service's capabilities and shared memory.

        Raises:
            NotImplementedError: a capability that sandboxes are not given; says why.
        """
        try:
            capabilities.numbers(cap_add, root=True, host_network=False)
        except CallerError as error:
            raise NotImplementedError(error.reason) from error
        if shm_size is not None and (isinstance(shm_size, bool) or shm_size <= 0):
            raise ValueError(f"shm_size must be a positive number of bytes, not {shm_size!r}")
        found = {CAPABILITIES: ",".join(cap_add), SHARED_MEMORY: str(shm_size) if shm_size else ""}
        return {key: value for key, value in found.items() if value}

    async def configure_runtime(
        self, handle: SandboxHandle, *, cap_add: tuple[str, ...], shm_size: int | None
    ) -> None:
        """Make sure that the sandbox was created with what it needs: nothing can be added to one that runs.

        Raises:
            CallerError: it was not.
        """
        spec = container_of(handle).spec
        wanted = capabilities.numbers(cap_add, root=spec.root, host_network=spec.network)
        if missing := wanted - capabilities.numbers(spec.capabilities, root=spec.root, host_network=spec.network):
            raise CallerError(f"the sandbox was created without {sorted(missing)} of {cap_add}", field="cap_add")
        if shm_size is not None and shm_size > spec.shared_memory_mib * _MIB:
            raise CallerError(f"the sandbox was created with {spec.shared_memory_mib} MiB", field="shm_size")

    def shared_volume_options(self, source: str | None, target: str, *, read_only: bool = False) -> dict[str, Any]:
        """Options for a sandbox that has a volume; ``None`` for one that sets up and clears away others."""
        if ":" in f"{source}{target}":
            raise CallerError(f"{source!r} at {target!r}: neither may have a ':' in it", field="volumes")
        volume = f"{ALL if source is None else source}:{target}{':ro' if read_only else ''}"
        Volume.parse(volume)
        return {"volumes": [volume]}

    def shared_volume_metadata(self) -> dict[str, str]:
        """None is needed: all sandboxes of a server are on its machine."""
        return {}

    async def snapshot(self, handle: SandboxHandle, name: str = "snapshot") -> str:
        """Keep what the sandbox has written; it stands still meanwhile. ``create`` takes the result as the option
        ``snapshot_id``, in place of an image; see :mod:`.snapshots`."""
        from nemo_gym_prorl.sandbox.compose import snapshots

        return (await snapshots.take(container_of(handle), self._snapshots_folder(), name)).name

    async def checkpoint(self, handle: SandboxHandle, name: str) -> snapshots.Taken:
        """As :meth:`snapshot`, of one in which nobody has anything running but a shell that waits, unless that left
        something in the background; and what there is to tell of it."""
        from nemo_gym_prorl.sandbox.compose import snapshots

        return await snapshots.take(container_of(handle), self._snapshots_folder(), name, at_rest=True)

    async def delete_old_snapshots(self, name: str, age_s: float) -> None:
        """Delete the snapshots that were taken under that name, or renewed, more than so many seconds ago."""
        from nemo_gym_prorl.sandbox.compose import snapshots

        await asyncio.to_thread(snapshots.sweep, self._snapshots_folder(), name, age_s)

    async def delete_snapshot(self, snapshot_id: str) -> None:
        """Delete a snapshot; one that is not there is deleted already."""
        await self._with_snapshot(snapshot_id, lambda path: path.unlink(missing_ok=True))

    async def renew_snapshot(self, snapshot_id: str) -> None:
        """Have a snapshot count as new for :meth:`delete_old_snapshots`, if it is there."""
        await self._with_snapshot(snapshot_id, os.utime)

    async def _with_snapshot(self, snapshot_id: str, work: Callable[[Path], None]) -> None:
        from nemo_gym_prorl.sandbox.compose import snapshots

        with contextlib.suppress(CallerError, FileNotFoundError):
            path = await asyncio.to_thread(snapshots.find, self._snapshots_folder(), snapshot_id)
            await asyncio.to_thread(work, path)

    def snapshot_to_restore(self, spec: SandboxSpec) -> snapshots.Snapshot | None:
        """The snapshot that a specification names in place of an image.

        Raises:
            CallerError: there is none, or there is an image besides.
        """
        if (named := spec.provider_options.get(SNAPSHOT)) is None:
            return None
        if spec.image:
            raise CallerError("a snapshot stands in place of an image; give one of both", field=SNAPSHOT)
        from nemo_gym_prorl.sandbox.compose import snapshots

        return snapshots.read(snapshots.find(self._snapshots_folder(), named))

    def _snapshots_folder(self) -> Path:
        from nemo_gym_prorl.sandbox.compose import snapshots

        return Path(self._kept) if self._kept else snapshots.default_folder()
