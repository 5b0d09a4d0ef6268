# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Pull images from registries.

By default pulls are anonymous: no stored login is sent. An image in the store is not pulled again. Network and
registry errors are retried with exponential backoff and jitter; a denied access or an unknown image is not retried.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from pathlib import Path

from nemo_gym_prorl.failures import CallerError, InfrastructureError, RolloutError
from nemo_gym_prorl.sandbox.images import build_tools
from nemo_gym_prorl.sandbox.images.entries import Format, Progress, ignore_progress, machine
from nemo_gym_prorl.sandbox.images.oci_config import OciConfig, read_pulled_config
from nemo_gym_prorl.sandbox.images.reference import RegistryImage
from nemo_gym_prorl.sandbox.images.rootfs import check_usable
from nemo_gym_prorl.sandbox.images.store import ImageInfo, ImageStore
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime


PULL_TIMEOUT_S = 3600.0  # an image may have tens of gigabytes

FIRST_PAUSE_S = 1.0
"""Backoff before the second attempt, in seconds; doubled for each further one, with jitter."""
MAX_PAUSE_S = 60.0  # maximum backoff, without jitter

_DENIED = ("UNAUTHORIZED", "DENIED", "unauthorized", "denied: ")
_UNKNOWN = ("MANIFEST_UNKNOWN", "NAME_UNKNOWN", "manifest unknown", "no child with platform")


@dataclass(frozen=True, slots=True)
class Puller:
    """Registry client that pulls images into a store.

    Attributes:
        format: format to store; ``None`` for :meth:`.ImageStore.default_format`.
        credentials: whether to send the user's stored registry logins.
        tries: attempts for each image.
    """

    store: ImageStore
    runtime: Runtime
    format: Format | None = None
    credentials: bool = False
    tries: int = 4

    def pull(self, wanted: RegistryImage, progress: Progress = ignore_progress) -> Path:
        """Pull an image unless the store has it; return its path.

        Raises:
            CallerError: the registry has no such image for this machine or denies access, or the image is unusable.
            InfrastructureError: the image can't be pulled; quotes Apptainer.
        """
        entry = wanted.entry(machine())
        with self.store.images.making(entry, progress) as work:
            if work is not None:
                kind = self.format or self.store.default_format()
                made, config = self.fetch(wanted, work, kind, progress)
                info = ImageInfo("pulled", wanted.uri, kind, 0, time.time(), config=config)
                self.store.publish(work, made, entry, info)
        path = self.store.payload(entry)
        if path is None:
            raise InfrastructureError(f"{wanted.uri} was removed right after the pull: pull it again")
        return path

    def fetch(self, wanted: RegistryImage, work: Path, kind: Format, progress: Progress) -> tuple[Path, OciConfig]:
        """Pull an image into the folder ``work``; return the image's path and registry configuration.

        Raises:
            CallerError, InfrastructureError: as :meth:`pull`.
        """
        progress(f"pulling {wanted.uri}")
        for tried in range(self.tries):
            try:
                made = build_tools.build(
                    self.runtime,
                    work,
                    wanted.uri,
                    timeout_s=PULL_TIMEOUT_S,
                    unpacked=kind == "folder",
                    credentials=self.credentials,
                )
                break
            except InfrastructureError as error:
                if tried + 1 == self.tries or _says(error, (*_DENIED, *_UNKNOWN)):
                    raise _explained(wanted, error, self.credentials) from error
                progress(f"pulling {wanted.uri} again, after {error}")
                time.sleep(min(FIRST_PAUSE_S * 2**tried, MAX_PAUSE_S) + random.uniform(0, FIRST_PAUSE_S))
        check_usable(made)
        config = read_pulled_config(work / build_tools.DOWNLOADS_FOLDER)
        if kind == "folder":
            config.rewrite_script(made)
        return made, config


def _says(error: InfrastructureError, words: tuple[str, ...]) -> bool:
    return any(word in error.reason for word in words)


def _explained(wanted: RegistryImage, error: InfrastructureError, credentials: bool) -> RolloutError:
    if _says(error, _UNKNOWN):
        return CallerError(f"the registry has no {wanted.uri} for {machine()}: {error.reason}", field="image")
    if _says(error, _DENIED):
        hint = "your login has no access" if credentials else "if it is private, log in and pull with --credentials"
        return CallerError(f"the registry refuses {wanted.uri} ({hint}): {error.reason}", field="image")
    return InfrastructureError(f"{wanted.uri} could not be pulled: {error.reason}")
