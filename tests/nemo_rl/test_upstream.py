# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The smoke check of NeMo RL, and adapters that pass through what newer versions of NeMo RL add."""

import ast
import pickle
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import ray

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.nemo_rl import configuration
from nemo_gym_prorl.nemo_rl.controller_replacements import ProrlRollouts, RolloutRows
from tests.nemo_rl.conftest import ROOT, needs_nemo_rl


ROOM = Path(configuration.__file__).parent
TABLE = {**configuration.RECIPE_NAMES, **configuration.TRAINING_NAMES}


def imported() -> Iterator[str]:
    """Yield each name that the package imports from NeMo RL."""
    for file in ROOM.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "nemo_rl":
                yield from (f"{node.module}.{one.name}" for one in node.names)
            if isinstance(node, ast.Import):
                assert not any(one.name.split(".")[0] == "nemo_rl" for one in node.names), file


def test_every_imported_name_is_checked() -> None:
    table = {place.replace(":", "."): names.split() for place, names in TABLE.items()}
    checked = {*table} | {f"{place}.{name}" for place, names in table.items() for name in names}
    assert {*imported()} - checked == set()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Install a module ``nemo_rl.fake`` with one member of each kind that the table has, and a ``nemo_rl.broken`` that
    cannot be imported."""

    class Actor:
        def run(self) -> None: ...

    @dataclass
    class Arguments:
        dataloader: int

    package, module = ModuleType("nemo_rl"), ModuleType("nemo_rl.fake")
    (tmp_path / "broken.py").write_text('raise AssertionError("transformers 5.24.0 detected")')
    package.__path__ = ["/checkout/nemo_rl", str(tmp_path)]
    vars(package).update(__version__="9.9", fake=module)
    vars(module).update(setup=print, Actor=ray.remote(Actor), Arguments=Arguments)
    monkeypatch.setitem(sys.modules, "nemo_rl", package)
    monkeypatch.setitem(sys.modules, "nemo_rl.fake", module)


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(
    ("place", "names", "missing"),
    [
        ("nemo_rl.fake", "setup renamed gone", ["nemo_rl.fake.renamed", "nemo_rl.fake.gone"]),
        ("nemo_rl.fake:Actor", "run", []),
        ("nemo_rl.fake:Actor", "run ping", ["nemo_rl.fake:Actor.ping"]),
        ("nemo_rl.gone", "run", ["nemo_rl.gone (ModuleNotFoundError: No module named 'nemo_rl.gone')"]),
        ("nemo_rl.broken", "run", ["nemo_rl.broken (AssertionError: transformers 5.24.0 detected)"]),
    ],
)
def test_missing_names_are_named(place: str, names: str, missing: list[str]) -> None:
    assert [*configuration.missing_names({place: names})] == missing
    if not missing:
        configuration.check_nemo_rl({place: names})
        return
    with pytest.raises(CallerError) as refused:
        configuration.check_nemo_rl({place: names})
    assert refused.value.field == "NRL_ROOT"
    for part in ("/checkout/nemo_rl (9.9)", configuration.TESTED_VERSION, *missing):
        assert part in refused.value.complaint


@needs_nemo_rl
def test_this_nemo_rl_has_every_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.setenv("NO_VCS_VERSION", "1")
    assert [*configuration.missing_names(TABLE)] == []


def test_what_is_not_about_rollouts_is_answered_by_nemo_rls_own_manager() -> None:
    own = SimpleNamespace(recovery_ledger="a ledger", telemetry_snapshot=dict)
    plan: Any = None
    ours = pickle.loads(pickle.dumps(ProrlRollouts(plan, None, own, RolloutRows(None))))
    assert (ours.recovery_ledger, ours.telemetry_snapshot()) == ("a ledger", {})
    assert ours.stats.committed == 0
    with pytest.raises(AttributeError, match="no_such"):
        _ = ours.no_such
