# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What we lean on of NeMo RL: the table is held against our code, NeMo RL against the table, and both against a newer
NeMo RL, by stand-ins that have its signatures as they were read in its repository."""

import ast
import pickle
import re
from collections.abc import AsyncGenerator, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel

from nemo_gym_prorl.nemo_rl import train, upstream
from nemo_gym_prorl.nemo_rl.mini_batches import MiniBatches
from nemo_gym_prorl.nemo_rl.rollouts import ProrlRollouts
from nemo_gym_prorl.nemo_rl.upstream import Asks, Call, Has, Settings, StandIn
from tests.nemo_rl.test_recipes import ROOT, needs_nemo_rl


ROOM = Path(upstream.__file__).parent
TABLE = (*upstream.RECIPES, *upstream.BOTH, *upstream.SINGLE_CONTROLLER, *upstream.SYNCHRONOUS)
CODE = {str(file.relative_to(ROOM)): ast.parse(file.read_text()) for file in ROOM.rglob("*.py")}
del CODE["upstream.py"]
CONTROLLER = "nemo_rl.algorithms.single_controller:SingleControllerActor"
OBJECTS = {
    ("single_controller.py", "arguments"): "nemo_rl.algorithms.single_controller_utils:SingleControllerActorArgs",
    ("single_controller.py", "arguments.gen_handle"): "nemo_rl.models.generation.vllm:VllmGeneration",
    ("single_controller.py", "controller"): CONTROLLER,
    ("single_controller.py", "PY_EXECUTABLES"): "nemo_rl.distributed.virtual_cluster:PY_EXECUTABLES",
    ("single_controller.py", "actor"): "nemo_rl.environments.nemo_gym:NemoGym",
    ("services.py", "actor"): "nemo_rl.environments.nemo_gym:NemoGym",
    ("rollouts.py", "self._tq_buffer"): "nemo_rl.algorithms.async_utils.replay_buffer:TQReplayBuffer",
    ("rollouts.py", "self._synchronizer"): "nemo_rl.weight_sync.interfaces:WeightSynchronizer",
    ("rollouts.py", "self._estimator"): "nemo_rl.algorithms.advantage_estimator:GRPOAdvantageEstimator",
    ("rollouts.py", "RolloutOutcome"): "nemo_rl.experience.rollout_manager:RolloutOutcome",
    ("mini_batches.py", "self._trainer"): "nemo_rl.models.policy.tq_policy:TQPolicy",
    ("mini_batches.py", "meta"): "nemo_rl.data_plane:KVBatchMeta",
    ("synchronous.py", "state"): "nemo_rl.algorithms.grpo:GRPOSaveState",
}
"""How objects of NeMo RL's classes are called in our code."""
NO_MEMBERS = {"__ray_call__", "options", "remote", "advantage_actors"}
"""What Ray gives every actor, and what is set where newer versions have it."""
READ_BY_NEMO_RL = {
    "nemo_rl.algorithms.async_utils.staleness_sampler:CustomSamplerConfig",
    "nemo_rl.data.utils:load_dataloader_state",
}
PLACES = {
    "master": "",
    "config": "",
    "own": "",
    "grpo": "grpo",
    "generation": "policy.generation",
    "watchdog": "async_rl.stall_watchdog",
}
"""Which part of a configuration a name stands for."""
WRITTEN = re.compile(r"(async_rl|data|env|grpo|loss_fn|policy|token_capture)(\.[a-z_]+)+")
OPEN = ("data.train", "data.validation", "env")
"""Settings in which NeMo RL's models let stand anything."""


# Our code and the table


def imports() -> Iterator[tuple[str, str, str]]:
    """Each import of NeMo RL's: file, name there, and what it is."""
    for file, tree in CODE.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "nemo_rl":
                yield from ((file, one.asname or one.name, f"{node.module}:{one.name}") for one in node.names)
            if isinstance(node, ast.Import):
                assert not any(one.name.split(".")[0] == "nemo_rl" for one in node.names), file


def uses() -> Iterator[tuple[str, ast.Call | None]]:
    """Each use of something of NeMo RL's, with how it is called, if it is."""
    names = {(file, name): what for file, name, what in imports()}
    for file, tree in CODE.items():
        called = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and (file, node.id) in names:
                yield names[file, node.id], called.get(id(node))
            if not isinstance(node, ast.Attribute):
                continue
            call, owner = called.get(id(node)), (file, ast.unparse(node.value))
            if owner in OBJECTS and node.attr not in NO_MEMBERS:
                yield f"{OBJECTS[owner]}.{node.attr}", call
            # Through Ray: an actor's class or its method
            if call is not None and node.attr == "remote" and "__ray_call__" not in owner[1]:
                inner = node.value.func.value if isinstance(node.value, ast.Call) else node.value
                if isinstance(inner, ast.Name) and (file, inner.id) in names:
                    yield names[file, inner.id], call
                elif isinstance(inner, ast.Attribute) and (file, ast.unparse(inner.value)) in OBJECTS:
                    yield f"{OBJECTS[file, ast.unparse(inner.value)]}.{inner.attr}", call


def in_table() -> set[str]:
    """All names in the table, of members, too."""
    stands = {entry.what for entry in TABLE if not isinstance(entry, Asks)}
    return stands | {f"{one.what}.{name}" for one in TABLE if isinstance(one, Has) for name in one.members.split()}


def test_nothing_is_used_that_is_not_in_the_table() -> None:
    assert {what for what, _ in uses()} - in_table() == set()
    assert {what for *_, what in imports()} - in_table() == set()


def test_nothing_is_in_the_table_that_is_not_used() -> None:
    used = {what for what, _ in uses()} | {what for *_, what in imports()} | {*OBJECTS.values()}
    called_by_nemo_rl = {entry.what for entry in TABLE if isinstance(entry, StandIn)}
    models = {entry.what for entry in TABLE if isinstance(entry, Settings)}
    left = in_table() - used - called_by_nemo_rl - models - READ_BY_NEMO_RL
    assert {what for what in left if what.rpartition(".")[0] not in READ_BY_NEMO_RL} == set()


def test_what_is_called_is_called_as_the_table_says() -> None:
    calls = {entry.what: entry for entry in TABLE if isinstance(entry, Call)}
    seen = set()
    for what, call in uses():
        if call is None:
            continue
        seen |= {what} & {*calls}
        if any(one.arg is None for one in call.keywords):  # with what it was given
            continue
        if what in calls:
            names = {one.arg for one in call.keywords}
            assert (len(call.args), names) == (len(calls[what].places.split()), {*calls[what].names.split()}), what
        else:
            assert not [*call.args, *call.keywords], f"{what} is called, and the table does not say how"
    # NeMo RL makes our sampler of its own.
    assert {*calls} - seen == {"nemo_rl.algorithms.async_utils.staleness_sampler:WindowedSampler"}


def settings_used() -> Iterator[str]:
    """Paths of settings in our code: written out in the checks, and walked elsewhere."""
    for file, tree in CODE.items():
        places = {**PLACES, "own": "env.nemo_gym"} if file == "checks/servers.py" else PLACES
        walked = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute | ast.Subscript | ast.Call)]
        inner = {id(one) for node in walked for one in ast.walk(node) if one is not node}
        yield from (found for node in walked if id(node) not in inner and (found := place_of(node, places)))
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and WRITTEN.fullmatch(str(node.value)):
                yield node.value
            yield from (found for one in ast.iter_child_nodes(node) if (found := place_of(one, places)))


def place_of(node: ast.AST, places: Mapping[str, str]) -> str | None:
    """Where an expression is in a configuration: ``""`` is all of it, and ``None`` no place at all."""
    match node:
        case ast.Name(id=name):
            return places.get(name)
        case ast.BoolOp(values=[first, *_]):
            return place_of(first, places)
        case ast.Attribute(value=ast.Name(id="config" | "own")):
            return None
        case ast.Attribute(value=value, attr=key) if key not in ("get", "items"):
            pass
        case ast.Subscript(value=value, slice=ast.Constant(value=str(key))):
            pass
        case ast.Call(func=ast.Attribute(value=value, attr="get"), args=[ast.Constant(value=str(key)), *_]):
            pass
        case _:
            return None
    above = place_of(value, places)
    return None if above is None else f"{above}.{key}".lstrip(".")


def test_settings_in_the_table_are_those_that_are_read() -> None:
    paths = {path for entry in TABLE if isinstance(entry, Settings) for path in entry.paths.split()}
    paths = {f"policy.generation.{path}" if path.startswith("vllm_cfg") else path for path in paths}
    paths |= {*upstream.NEWER.split()}
    used = {path for path in settings_used() if path.split(".")[0] not in ("", "prorl")}
    unknown = {
        path
        for path in used
        if not any(f"{known}.".startswith(f"{path}.") for known in paths)
        and not any(f"{path}.".startswith(f"{known}.") for known in OPEN)
    }
    assert unknown == set()
    assert {path for path in paths if not any(f"{one}.".startswith(f"{path}.") for one in used)} == set()


# NeMo RL and the table


@pytest.fixture
def nemo_rl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.setenv("NO_VCS_VERSION", "1")


@needs_nemo_rl
@pytest.mark.usefixtures("nemo_rl")
def test_this_nemo_rl_has_everything() -> None:
    assert [*upstream.complaints_of(TABLE)] == []


class RenamedInPlace:
    def reserve(self, *, version: int, target_step: int | None = None) -> str: ...


class Asking:
    async def pump(self) -> None:
        await self._rollout_manager.generate_one()  # type: ignore[attr-defined]


class OtherSettings(BaseModel):
    grpo: int = 0


def grown(master_config: Any, tokenizer: Any, dataset: Any, val_dataset: Any) -> tuple[int, str, bytes]: ...


def renamed(path: str, *, strict: bool) -> None: ...


async def generate_and_push(
    self: Any, input_sample: Any, *, target_step: Any, deadline_s: float | None = None
) -> None: ...


MUTATIONS: list[tuple[str, Any, str]] = [
    (
        "nemo_rl.utils.config:load_config",
        renamed,
        r"load_config: its first arguments are path, and not config_path\n.*: missing a required .*: 'strict'",
    ),
    ("nemo_rl.utils.config:parse_hydra_overrides", None, "parse_hydra_overrides: module .* has no attribute"),
    ("nemo_rl.algorithms.grpo:setup", grown, "setup: it gives 3 things, and not 13"),
    (
        "nemo_rl.algorithms.async_utils.replay_buffer:TQReplayBuffer.reserve",
        RenamedInPlace.reserve,
        "TQReplayBuffer.reserve: missing a required .*argument: 'version'",
    ),
    ("nemo_rl.algorithms.async_utils.replay_buffer:TQReplayBuffer.remove_group", None, "TQReplayBuffer.*remove_group"),
    ("nemo_rl.experience.rollout_manager:RolloutOutcome", OtherSettings, "RolloutOutcome: it has no COMMITTED"),
    ("nemo_rl.weight_sync.interfaces:WeightSynchronizer", None, "WeightSynchronizer.sync_weights: module .* has no"),
    ("nemo_rl.data.utils:load_dataloader_state", renamed, "load_dataloader_state: it has no train_dataloader"),
    (
        "nemo_rl.experience.rollout_manager:RolloutManager.generate_and_push",
        generate_and_push,
        "rollouts:ProrlRollouts.generate_and_push: got an unexpected keyword argument 'deadline_s'",
    ),
    (CONTROLLER, Asking, "it asks self._rollout_manager for generate_one, which ours does not have"),
    ("nemo_rl.algorithms.grpo:MasterConfig", OtherSettings, "MasterConfig: it has no setting grpo.seed"),
]


def mutate(monkeypatch: pytest.MonkeyPatch, what: str, by: Any) -> None:
    """Another NeMo RL: something is by another, or gone."""
    above, _, name = what.replace(":", ".").rpartition(".")
    owner = upstream.found(what.rpartition(".")[0]) if "." in what.partition(":")[2] else upstream.resolve_name(above)
    if by is None:
        monkeypatch.delattr(owner, name)
    else:
        monkeypatch.setattr(owner, name, by)


@needs_nemo_rl
@pytest.mark.usefixtures("nemo_rl")
@pytest.mark.parametrize(("what", "by", "says"), MUTATIONS, ids=[what.rpartition(":")[2] for what, *_ in MUTATIONS])
def test_another_nemo_rl_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, what: str, by: Any, says: str) -> None:
    mutate(monkeypatch, what, by)
    told = "\n".join(upstream.complaints_of(TABLE))
    assert re.search(says, told), told


@needs_nemo_rl
@pytest.mark.usefixtures("nemo_rl")
def test_the_command_tells_all_that_is_other_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    import nemo_rl

    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"responses_create_params": {"input": []}}\n' * 64)
    for what, by, _ in MUTATIONS[3:5]:
        mutate(monkeypatch, what, by)
    monkeypatch.setenv("NRL_ROOT", ROOT)
    assert train.main(["--config", "dapo-swe-qwen3-4b", f"++data.train.data_path={rows}", "--check"]) == train.REFUSED
    told = capsys.readouterr().err
    assert told.count("error: ") == 1
    assert told.startswith(f"error: NRL_ROOT: the NeMo RL in {ROOT}/nemo_rl ({nemo_rl.__version__}) is other than")
    for name in ("TQReplayBuffer.reserve", "TQReplayBuffer.remove_group"):
        assert name in told
    assert upstream.TRIED[0] in told


# A newer NeMo RL


class NewerController:
    """What the controller asks of ours, by the names under which it does."""

    async def run(self) -> None:
        manager, stats = self._rollout_manager, self._rollout_manager.stats  # type: ignore[attr-defined]
        self._rollout_manager._tq_buffer = None  # type: ignore[attr-defined]
        self._ledger = self._rollout_manager.recovery_ledger  # type: ignore[attr-defined]
        self._rollout_manager.set_data_plane_checkpoint_barrier(manager)  # type: ignore[attr-defined]
        self._rollout_manager.suspend_request_deadlines()  # type: ignore[attr-defined]
        self._rollout_manager.resume_request_deadlines()  # type: ignore[attr-defined]
        self._rollout_manager.telemetry_snapshot()  # type: ignore[attr-defined]
        self._rollout_manager.pop_mask_rule_metrics()  # type: ignore[attr-defined]
        self._rollout_manager.set_weight_version(stats.committed)  # type: ignore[attr-defined]

    async def ping(self) -> None: ...

    def __init__(self, master_config: Any, actor_args: Any, setup_timing_metrics: Any) -> None: ...


class NewerManager:
    async def generate_and_push(
        self,
        input_sample: Any,
        *,
        target_step: int | None = None,
        inflight_registry: Any = None,
        lineage_group_id: str | None = None,
    ) -> Any: ...

    def set_weight_version(self, version: int) -> None: ...


class NewerBuffer:
    def reserve(
        self, *, weight_version: int, target_step: Any = None, group_id: Any = None, rollout_ids: Any = None
    ) -> str: ...

    async def commit(self, group_id: str, record: Any, start_weight_version: int, end_weight_version: int) -> Any: ...

    async def remove_group(self, group_id: str, *, remove_in_dp: bool = False) -> int: ...


class NewerTrainer:
    """Also tells what its split interface was called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, Any]] = []

    def begin_train_step(self, loss_fn: Any, gbs: int | None = None, mbs: int | None = None) -> None: ...

    def train_microbatches_from_meta(self, meta: Any, timer: Any = None, train_fields: Any = None) -> None:
        self.calls.append((len(meta.sample_ids), train_fields))

    def finish_train_step(self) -> dict[str, Any]:
        return {}

    def shutdown(self) -> None: ...


class NewerGym:
    node_ip, head_server_port = "", 0

    async def run_rollouts(
        self, nemo_gym_examples: list[Any], timer_prefix: str, deduplicate_multimodal_data: bool = False
    ) -> AsyncGenerator[tuple[int, dict[str, Any], dict[str, Any], dict[str, Any] | None], None]:
        yield 0, {}, {}, None

    def shutdown(self) -> None: ...


NEWER = [
    (CONTROLLER, NewerController),
    ("nemo_rl.experience.rollout_manager:RolloutManager", NewerManager),
    ("nemo_rl.algorithms.async_utils.replay_buffer:TQReplayBuffer", NewerBuffer),
    ("nemo_rl.models.policy.tq_policy:TQPolicy", NewerTrainer),
    ("nemo_rl.environments.nemo_gym:NemoGym", NewerGym),
]


@needs_nemo_rl
@pytest.mark.usefixtures("nemo_rl")
def test_a_newer_nemo_rl_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    for what, by in NEWER:
        mutate(monkeypatch, what, by)
    assert [*upstream.complaints_of(TABLE)] == []


def test_what_a_newer_trainer_is_given_is_given_with_each_mini_batch() -> None:
    class Meta(SimpleNamespace):
        def slice(self, start: int, stop: int) -> "Meta":
            return Meta(sample_ids=self.sample_ids[start:stop])

    trainer = NewerTrainer()
    parts = MiniBatches(trainer, 2)
    parts.begin_train_step(None)
    parts.train_microbatches_from_meta(Meta(sample_ids=["a", "b", "c"]), train_fields=("input_ids",))
    assert trainer.calls == [(1, ("input_ids",)), (2, ("input_ids",))]


def test_what_is_not_about_rollouts_is_answered_by_nemo_rls_own_manager() -> None:
    own = SimpleNamespace(recovery_ledger="a ledger", telemetry_snapshot=dict)
    plan: Any = None
    ours = pickle.loads(pickle.dumps(ProrlRollouts(plan, None, own)))
    assert (ours.recovery_ledger, ours.telemetry_snapshot()) == ("a ledger", {})
    assert ours.stats.committed == 0
    with pytest.raises(AttributeError, match="no_such"):
        _ = ours.no_such
