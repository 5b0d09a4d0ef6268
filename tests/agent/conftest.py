# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""No test of a handler is about how long a pause is."""

import pytest

from nemo_gym_prorl.agent import agent_service, conversation


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_service, "_CLEANUP_TIMEOUT_S", 0.5)
    monkeypatch.setattr(conversation, "_FETCH_PAUSE_S", 0.01)
