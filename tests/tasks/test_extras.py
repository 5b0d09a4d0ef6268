# SPDX-License-Identifier: Apache-2.0
"""What a server says whose extra is not installed, and that it says so before anything else."""

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest

from nemo_gym_prorl.failures import InfrastructureError
from nemo_gym_prorl.tasks import extras
from nemo_gym_prorl.tasks.math.checker import MathChecker
from nemo_gym_prorl.tasks.swe import testing
from nemo_gym_prorl.tasks.swe.grading import GradingLimits
from nemo_gym_prorl.tasks.swe.repository import PatchLimits
from nemo_gym_prorl.tasks.swe.task import SoftwareEngineering
from nemo_gym_prorl.tasks.workbench.workspace import ToolLimits
from resources_servers.prorl_stem.app import ProRLStemServer


def without(module: str) -> Callable[[str], Any]:
    """``find_spec`` where this module is not installed."""
    found = importlib.util.find_spec
    return lambda name: None if name == module else found(name)


def test_a_checker_without_its_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras.importlib.util, "find_spec", without("math_verify"))
    with pytest.raises(InfrastructureError, match=r"math_verify\. pip install 'nemo-gym-prorl\[math\]'"):
        MathChecker()


@pytest.mark.parametrize("module", ["math_verify", "bm25s", "pint", "Stemmer"])
def test_a_server_asks_for_its_own_extra_before_anything_else(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras.importlib.util, "find_spec", without(module))
    with pytest.raises(InfrastructureError, match=rf"{module}\. pip install 'nemo-gym-prorl\[stem\]'"):
        ProRLStemServer.make_task(None)  # type: ignore[arg-type]  # nothing of the server is looked at before


def test_software_engineering_without_log_parsers_says_how_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras.importlib.util, "find_spec", without("swebench"))
    with pytest.raises(InfrastructureError, match=r"swebench\. pip install 'nemo-gym-prorl\[swe\]'"):
        SoftwareEngineering(ToolLimits(), PatchLimits(), GradingLimits(testing.TestLimits()))
