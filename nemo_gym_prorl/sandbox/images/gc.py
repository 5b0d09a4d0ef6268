# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What is removed when there is too much. Pure."""

from __future__ import annotations

from collections.abc import Container, Iterable

from nemo_gym_prorl.sandbox.images.info import Image


def least_used(
    images: Iterable[Image],
    protected: Container[str] = (),
    *,
    max_bytes: int | None = None,
    before: float | None = None,
) -> list[Image]:
    """What goes, the least recently used first: all that was last used before ``before``, and then as much as it takes
    for the rest to fit into ``max_bytes``. What is used or ``protected``, by the name of its entry, stays and counts.
    """
    everything = sorted(images, key=lambda image: (image.entry.last_use, image.entry.name))
    total = sum(image.info.bytes for image in everything)
    doomed = []
    for image in everything:
        old = before is not None and image.entry.last_use < before
        kept = image.entry.used or image.entry.name in protected
        if kept or not (old or (max_bytes is not None and total > max_bytes)):
            continue
        doomed.append(image)
        total -= image.info.bytes
    return doomed
