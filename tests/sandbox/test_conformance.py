# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Our provider passes its own suite, and the suite can tell a provider that falls short."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from nemo_gym.sandbox.providers.apptainer import ApptainerProvider

from nemo_gym_prorl.sandbox.isolation.privilege import is_machine_root
from nemo_gym_prorl.sandbox.provider import SingularityProvider
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime
from tests.sandbox import conformance


pytestmark = pytest.mark.sandbox


@pytest.mark.usefixtures("way")
async def test_ours_passes_all(image: Path, runtime: Runtime) -> None:
    runtime.activate()
    outcomes = await conformance.run(SingularityProvider(), str(image))
    assert [outcome for outcome in outcomes if not outcome.passed] == []
    assert len(outcomes) == len(conformance.CHECKS) + 1


@pytest.mark.skipif(not is_machine_root(), reason="one peer is enough")
async def test_gyms_own_provider_falls_short_where_known(image: Path, runtime: Runtime) -> None:
    runtime.activate()
    options: dict[str, Any] = {"extra_start_args": ["--writable-tmpfs"]}
    provider = ApptainerProvider(create=options)
    checks = (conformance.no_network, conformance.a_command_of_a_mebibyte, conformance.output_errors_and_exit_code)
    outcomes = [await conformance._run_one(check, provider, str(image)) for check in checks]
    assert [outcome.passed for outcome in outcomes] == [False, False, True]
