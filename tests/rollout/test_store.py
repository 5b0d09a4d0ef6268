# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What is kept of finished rollouts, for how long, and that nothing of it is forgotten in silence."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_gym_prorl.rollout.job import Job, JobState, Outcome
from nemo_gym_prorl.rollout.request import Cursor, RolloutForgotten, row_digest
from nemo_gym_prorl.rollout.storage.store import JobStore


START = Cursor.parse("0")


def end(store: JobStore, job_id: str, size: int) -> Job:
    """Put a job that has ended into a store."""
    job = Job(job_id, {}, row_digest({}), "planned", "planned", 0.0)
    store.add(job, 0.0)
    for state in (JobState.INITIALIZING, JobState.READY, JobState.RUNNING, JobState.EVALUATING):
        was = job.state
        job.move(state)
        store.record(job, 0.0, was)
    job.outcome = Outcome(JobState.SUCCEEDED, {"text": "x" * size}, reward=1.0)
    job.pack()
    job.move(JobState.SUCCEEDED)
    store.record(job, 0.0, JobState.EVALUATING)
    return job


@given(
    st.lists(
        st.tuples(st.sampled_from(["end", "deliver", "sleep"]), st.integers(0, 30), st.integers(0, 40_000)),
        max_size=60,
    )
)
def test_the_oldest_result_goes_first_and_the_books_are_right(steps: list[tuple[str, int, int]]) -> None:
    now = 0.0
    store = JobStore(retain_bytes=100_000, retain_s=10.0, clock=lambda: now)
    ended: dict[str, float] = {}
    for what, number, size in steps:
        job_id = f"r{number}"
        job = store.get(job_id)
        if what == "sleep":
            now += number / 10
        elif what == "end" and job_id not in ended:
            ended[job_id] = now
            end(store, job_id, size)
            assert all(store.get(known) is None for known, at in ended.items() if now - at >= 10.0)
        elif what == "deliver" and job is not None:
            store.deliver(job)
        left = [job for known in ended if (job := store.get(known)) is not None]
        assert [job.id for job in left] == [*ended][len(ended) - len(left) :]
        assert store.retained_bytes == sum(job.size for job in left) <= 100_000
        assert store.states[JobState.SUCCEEDED] == len(left) == len(store)
        for known in {*ended} - {job.id for job in left}:
            assert store.is_forgotten(known) or what == "deliver"
        if len(left) == len(ended):
            with pytest.raises(StopIteration) as answer:  # without a journal nothing is waited for
                store.ended_after(START, 100).send(None)
            assert [job.id for job in answer.value.value[0]] == [*ended], "a log without gaps, or an error"


def test_a_result_that_goes_for_want_of_room_is_told(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    store = JobStore(retain_bytes=12_000, retain_s=50.0, clock=lambda: now)
    end(store, "a", 1000)
    now = 60.0
    end(store, "b", 1000)
    assert (store.get("a"), store.lost, caplog.text) == (None, 0, ""), "its time was over"
    for name in "cde":
        now += 3.0
        end(store, name, 1000)
    assert store.lost == 2
    assert caplog.text.count("results fill retain_bytes") == 1
    with pytest.raises(RolloutForgotten, match="set a journal, or raise retain_bytes"):
        asyncio.run(store.fetch("b"))
