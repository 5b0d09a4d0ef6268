# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of sessions: restored state, reported losses, refusals and clean-up."""

import os
import time
from typing import Any

import pytest

from nemo_gym_prorl.rollout.storage.checkpoints import ORPHAN_S
from nemo_gym_prorl.sandbox.snapshots import default_folder
from nemo_gym_prorl.servers import task_server
from tests.prorl_code.conftest import Client, row, serving


TASK = "HumanEval/2"


async def kept(client: Client) -> dict[str, Any]:
    status, checkpoint, _ = await client.post("/checkpoint_session")
    assert status == 200, checkpoint
    return dict(checkpoint)


async def resume(client: Client, checkpoint: dict[str, Any]) -> tuple[int, Any, str | None]:
    return await client.post("/checkpoint_session/resume", {"row": row(TASK), "checkpoint": checkpoint})


async def test_resumed_session_has_files_and_shell_state(client: Client, base_url: str) -> None:
    await client.seed(TASK)
    known = "set -u; alias l=ls; f() { echo f; }; readonly R=1; A=(1 2); export E=$'a\\nb'; umask 077; cd /"
    await client.tool("bash", command=f"{known}; shopt -s extglob; rm /etc/debian_version")
    await client.tool("bash", command="g() { [[ $1 == @(a|b) ]] && echo g; }")
    files = "mkfifo /root/pipe; ln -s /etc/shadow /root/link; truncate -s 1G /root/holes"
    await client.tool("bash", command=f"{files}; (exit 7)")
    checkpoint = await kept(client)
    assert checkpoint["lost"] == []
    assert checkpoint["size"] < 1 << 20, "holes are none of it"
    await client.tool("bash", command="touch /root/later; E=other")
    for _ in range(2):  # from one checkpoint as often as one likes
        async with Client(base_url) as other:
            assert (await resume(other, checkpoint))[0] == 200
            look = 'echo $? $R ${A[1]} "$E" $PWD $(umask); alias l; f; g b; echo $-'
            said = await other.tool("bash", command=f"{look}; ls /root /etc/debian_version; stat -c %s /root/holes")
            assert said.splitlines()[:5] == ["7 1 2 a", "b / 0077", "alias l='ls'", "f", "g"]
            assert "u" in said.splitlines()[5]
            assert "later" not in said
            assert {"pipe", "link", "1073741824"} <= {*said.split()}
            assert "cannot access '/etc/debian_version'" in said
            assert (await other.post("/release_session"))[0] == 200
            verdict = (await other.verify(TASK))[1]
            assert verdict["tool_use"]["bash"]["calls"] == 4, "calls before count as well"


async def test_lost_state_is_reported_by_its_tool(client: Client, base_url: str) -> None:
    await client.seed(TASK)
    await client.tool("bash", command="(setsid sleep 1000 >/dev/null 2>&1 &)")
    await client.tool("python", code="x = 1")
    checkpoint = await kept(client)
    assert checkpoint["lost"] == ["kernel", "programs"]
    assert "ok" in await client.tool("python", code="print(x)"), "the session itself goes on"
    async with Client(base_url) as other:
        assert (await resume(other, checkpoint))[0] == 200
        assert "programs that ran in the background have ended" in await other.tool("bash", command="pgrep sleep")
        assert "have ended" not in await other.tool("bash", command="true")
        assert "the kernel had ended and a new one was started" in await other.tool("python", code="1")
        assert "NameError" in await other.tool("python", code="x")
    waiting = await client.tool("bash", command="read line; echo got $line", timeout_s=30)
    assert "still running" in waiting
    checkpoint = await kept(client)
    assert checkpoint["lost"] == ["shell", "kernel", "programs"] or checkpoint["lost"] == ["shell", "kernel"]
    assert "got it" in await client.tool("bash", input="it"), "nor is its command disturbed"
    async with Client(base_url) as other:
        assert (await resume(other, checkpoint))[0] == 200
        assert "the shell had ended and a new one was started" in await other.tool("bash", command="true")


async def test_submission_survives_a_checkpoint(client: Client, base_url: str) -> None:
    await client.seed(TASK)
    await client.tool("submit")
    checkpoint = await kept(client)
    async with Client(base_url) as other:
        assert (await resume(other, checkpoint))[0] == 200
        assert "submitted already" in await other.tool("bash", command="true")


async def test_deleted_checkpoint_is_refused_by_field(client: Client) -> None:
    await client.seed(TASK)
    checkpoint = await kept(client)
    path = default_folder() / checkpoint["snapshot"]
    for name in ("../x", "other", "checkpoint-other-123456789abc"):
        await client.post("/checkpoint_session/forget", {"snapshots": [name]})
    assert path.stat().st_mode & 0o777 == 0o600
    assert (await client.post("/checkpoint_session/forget", {"snapshots": [checkpoint["snapshot"]]}))[0] == 200
    assert not path.exists()
    status, problem, _ = await resume(client, checkpoint)
    assert (status, problem["errors"][0]["field"]) == (422, "checkpoint.snapshot")
    status, problem, _ = await client.post("/checkpoint_session/resume", {"row": row(TASK), "checkpoint": {}})
    assert status == 422
    await client.post("/release_session")
    assert (await client.post("/checkpoint_session"))[2] == "session_lost"


async def test_only_old_unrenewed_snapshots_are_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Renewed snapshots and those of other servers are kept."""
    async with serving() as url, Client(url) as client:
        await client.seed(TASK)
        names = [(await kept(client))["snapshot"] for _ in range(3)]
        orphan, renewed, young = (default_folder() / name for name in names)
        stem = orphan.name.rpartition("-")[0]
        others = [default_folder() / f"{stem}-2-{'0' * 12}", default_folder() / f"{stem}-{'0' * 11}"]
        for other in others:
            other.touch()
        for path in (orphan, renewed, *others):
            os.utime(path, (time.time() - ORPHAN_S - 60,) * 2)
        os.utime(young, (time.time() - ORPHAN_S + 3600,) * 2)
        told = {"snapshots": [renewed.name, "checkpoint-of-none"]}
        assert (await client.post("/checkpoint_session/renew", told))[0] == 200
        told = {"snapshots": [path.name for path in others]}
        assert (await client.post("/checkpoint_session/forget", told))[0] == 200
    monkeypatch.setattr(task_server, "SNAPSHOT_SWEEP_S", 0.5)
    async with serving() as url, Client(url) as client:
        await client.seed(TASK)
        for _ in range(40):
            await client.tool("bash", command="sleep 0.1")
            if not orphan.exists():
                break
    assert [path.exists() for path in (orphan, renewed, young, *others)] == [False, True, True, True, True]
    for path in (renewed, young, *others):
        path.unlink()
