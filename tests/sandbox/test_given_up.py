# SPDX-License-Identifier: Apache-2.0
"""Who gives up in an unlucky moment leaves nothing behind: no sandbox, no program, no open file, nothing stopped."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from nemo_gym_prorl.sandbox.supervisor import creation, lifecycle, sandbox


pytestmark = pytest.mark.sandbox


async def test_an_end_that_is_asked_for_as_the_turn_comes_is_not_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be up, while its end waits for that of its first process for ever."""
    client: Any = Mock()
    box = sandbox.Sandbox("b-1", tmp_path, {}, [client], [])
    children = Mock(fork=Mock(side_effect=OSError))
    boxes = lifecycle.Sandboxes(tmp_path, children, None, AsyncMock())
    boxes._all[box.name], boxes._creation = box, AsyncMock()
    monkeypatch.setattr(boxes, "_accepted", lambda *_order: box)
    others = [boxes._turns.of(str(number)) for number in range(2 * creation.AT_ONCE)]
    for other in others:
        await other.__aenter__()
    creating = asyncio.create_task(boxes.create(client, {"image": "", "start_timeout_s": 9, "ttl_s": 0}, []))
    await asyncio.sleep(0.01)
    await others[0].__aexit__(None, None, None)
    closing = asyncio.create_task(boxes.destroy(box.name))
    boxes._close(box)
    with pytest.raises(sandbox.NoSandbox):
        await creating
    await closing
    boxes._creation.create.assert_not_called()
