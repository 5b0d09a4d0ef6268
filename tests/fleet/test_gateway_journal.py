# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A fleet whose gateway dies: what it had accepted runs on at its node, or again, and each has one outcome."""

from pathlib import Path

from nemo_gym_prorl.failures import FailureKind
from nemo_gym_prorl.fleet.gateway import FleetGateway
from nemo_gym_prorl.rollout.job import JobState
from nemo_gym_prorl.rollout.request import JobRequest
from nemo_gym_prorl.rollout.storage.journal import Journal
from tests.cli.command_line import prorl
from tests.fleet.fleets import Changing, Service, service
from tests.fleet.test_bad_nodes import Cut, hasty  # noqa: F401
from tests.fleet.test_gateway import HELD, until


def runs(node: Service) -> list[str]:
    """Ids, at the node, of what it has run, once for each time."""
    return [rollout for (rollout, what), times in node.handler.calls.items() if what == "run" for _ in range(times)]


async def test_an_end_leaves_rollouts_at_their_nodes_and_a_node_that_is_gone_loses_them(tmp_path: Path) -> None:
    async with service() as stays, service() as goes:
        gateway = FleetGateway(Changing([stays.joined, goes.joined]), journal=Journal(str(tmp_path)))
        await gateway.start()
        await until(lambda: len(gateway.dispatcher.statuses) == 2)
        jobs = [await gateway.accept(JobRequest(HELD, id=f"r{i}")) for i in range(6)]
        jobs.append(await gateway.accept(JobRequest(HELD, id="taken back")))
        await until(lambda: len(stays.handler.sessions) + len(goes.handler.sessions) == 6)
        await gateway.cancel(jobs[-1])
        await gateway.close()
        assert not any(job.state.terminal for job in jobs[:-1])
        assert len(stays.pipeline.store.live()) + len(goes.pipeline.store.live()) == 6
        ran = set(runs(stays))
        stays.handler.let_go.set()

        gateway = FleetGateway(Changing([stays.joined]), journal=Journal(str(tmp_path)))
        await gateway.start()
        await gateway.store.wait_for_recovery()
        assert {job.id for job in gateway.store.live()} == {f"r{i}" for i in range(6)}
        for job in gateway.store.live():
            assert await gateway.wait(job, 30)
        ended = {job.id: job for job in gateway.store.find(state=None, group=None)}
        assert {job.state for job in ended.values()} == {JobState.SUCCEEDED}
        notes = [failure for job in ended.values() for failure in job.failures]
        assert {note.kind for note in notes} == {FailureKind.SHUTDOWN}
        assert len(notes) == len(goes.pipeline.store.live()), "these began again"
        assert ran <= set(runs(stays)), "those went on"
        assert len(runs(stays)) == 6
        await gateway.close()


async def test_a_second_front_is_refused_by_name(tmp_path: Path) -> None:
    async with service() as node:
        journal = Journal(str(tmp_path))
        code, said = await prorl("fleet", node.url, "--port", "1", "--journal", str(tmp_path))
        await journal.close()
        assert (code, f"journal: {tmp_path} is in use by another process" in " ".join(said.split())) == (1, True)
        code, told = await prorl("fleet", node.url, "--port", "1", "--journal", "here")
        assert code == 1
        assert "relative" in told
