# SPDX-License-Identifier: Apache-2.0
"""What Gym's ``AsyncSandboxCompose`` and its checkpoints ask of a provider beyond single sandboxes.

Gym finds each of these by its methods, so on a Gym that does not know one its methods are simply there:
``SupportsSandboxNetwork``, ``SupportsSandboxPortForwarding``, ``SupportsSandboxSharedStorage``,
``SupportsSandboxRuntimeRequirements`` (0.7), ``SupportsSandboxSnapshot`` (after 0.7).

All stays closed that nobody asks for: a sandbox is in no network until it is introduced to others.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_gym.sandbox.providers.base import SandboxHandle, SandboxSpec

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.sandbox import snapshots
from nemo_gym_prorl.sandbox.arguments import check_path, check_port
from nemo_gym_prorl.sandbox.container import Container
from nemo_gym_prorl.sandbox.isolation import capabilities
from nemo_gym_prorl.sandbox.sessions import network, port_forward
from nemo_gym_prorl.sandbox.spec import check_fields
from nemo_gym_prorl.sandbox.supervisor.storage.volumes import ALL, Volume


CAPABILITIES, SHARED_MEMORY = "prorl.capabilities", "prorl.shm_size"
"""Metadata of a sandbox's specification that Gym carries from :meth:`GymCapabilities.validate_runtime_requirements` to
``create``."""

_MIB = 1 << 20

_BYTES = re.compile(r"[0-9]{1,15}")


def container_of(handle: SandboxHandle) -> Container:
    """Our own object behind Gym's handle.

    Raises:
        CallerError: it is another provider's.
    """
    container = handle.raw
    if not isinstance(container, Container):
        raise CallerError(f"{handle.sandbox_id} is not a sandbox of this provider", field="handle")
    return container


def required(metadata: Mapping[str, str]) -> dict[str, Any]:
    """The options of :class:`.spec.ContainerSpec` that a specification's metadata stands for.

    Raises:
        CallerError: it is none that :meth:`GymCapabilities.validate_runtime_requirements` gave.
    """
    found: dict[str, Any] = {}
    if named := metadata.get(CAPABILITIES):
        found["capabilities"] = tuple(str(named).split(","))
    if size := metadata.get(SHARED_MEMORY):
        if not _BYTES.fullmatch(str(size)):
            raise CallerError(f"must be a number of bytes, not {size!r}", field=f"metadata.{SHARED_MEMORY}")
        found["shared_memory_mib"] = -(-int(size) // _MIB)
    check_fields(found, inside="metadata")
    return found


class GymCapabilities:
    """See the module; a part of :class:`.provider.SingularityProvider`."""

    _kept: str | None
    """Folder of snapshots, if not the usual one."""

    def validate_networking(self) -> None:
        """Nothing needs to be set up; a kernel without the devices for it says so when the first network is made."""

    async def network_address(self, handle: SandboxHandle) -> str:
        """Where others find the sandbox once it is introduced to them; see :mod:`.sessions.network`."""
        return await network.address(container_of(handle))

    async def set_hosts(self, handle: SandboxHandle, hosts: Mapping[str, str]) -> None:
        """Introduce the sandbox to those behind the addresses, by these names. All of them are in one network then."""
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
        container = container_of(handle)
        return await snapshots.take(container, self._folder(), name)

    async def delete_snapshot(self, snapshot_id: str) -> None:
        """Delete a snapshot; one that is not there is deleted already."""
        try:
            snapshots.find(self._folder(), snapshot_id).unlink(missing_ok=True)
        except CallerError:
            return

    def snapshot_to_restore(self, spec: SandboxSpec) -> snapshots.Snapshot | None:
        """The snapshot that a specification names in place of an image.

        Raises:
            CallerError: there is none, or there is an image besides.
        """
        if (named := spec.provider_options.get(snapshots.FIELD)) is None:
            return None
        if spec.image:
            raise CallerError("a snapshot stands in place of an image; give one of both", field=snapshots.FIELD)
        return snapshots.read(snapshots.find(self._folder(), named))

    def _folder(self) -> Path:
        return Path(self._kept) if self._kept else snapshots.default_folder()
