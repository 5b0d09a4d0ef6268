# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""CheckpointStore of a rollout at Gym's servers: its session, its conversation and its tokens, each where it lives.

A server whose ``/seed_session`` names a ``checkpoint_path`` keeps a session when it is posted there, and begins one
from that when ``/resume`` below it is posted; the model server tells what turns it has sampled since the last time
(:meth:`~.conversation.Conversation.save`). The items of the response are kept as they are. Each checkpoint is what it
adds to the one before, so a rollout of n turns keeps O(n).

One is taken when a turn's tools have answered, before the policy is asked again: nobody acts then. A session that
can't be kept (too large, say) is no failure: that rollout has no further checkpoints.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Self

import orjson

from nemo_gym_prorl.agent.conversation import Conversation, SavedTurns
from nemo_gym_prorl.agent.gym_http import CookieJar, GymServer, json_of, require_ok
from nemo_gym_prorl.failures import CallerError, FailureKind
from nemo_gym_prorl.rollout.job import Checkpoint, Progress


LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GymCheckpoint:
    """The state of a checkpoint.

    Attributes:
        path: where the resources server keeps sessions.
        session: what it said when it kept this one.
        turns: what the model server keeps of the rollout.
        items: the output items in JSON, lists of those that came with each checkpoint.
        envelope: the response without them, in JSON.
        pending: how many of the items, at their end, the policy has not been shown.
        progress: turns, calls and steps, in JSON.
    """

    path: str
    session: dict[str, Any]
    turns: SavedTurns
    items: tuple[bytes, ...]
    envelope: bytes
    pending: int
    progress: bytes

    def output(self) -> list[dict[str, Any]]:
        """The output items, made anew."""
        return [item for items in self.items for item in orjson.loads(items)]

    def pack(self) -> bytes:
        """All of it, for other services."""
        parts = {
            "path": self.path,
            "session": self.session,
            "told": [orjson.Fragment(b"[%b]" % turns) for turns in self.turns.told],
            "began": self.turns.began,
            "answers": self.turns.answers,
            "waited_s": self.turns.waited_s,
            "items": [orjson.Fragment(items) for items in self.items],
            "envelope": orjson.Fragment(self.envelope),
            "pending": self.pending,
            "progress": orjson.Fragment(self.progress),
        }
        return orjson.dumps(parts)

    @classmethod
    def unpack(cls, packed: bytes) -> Self:
        """What was packed."""
        parts = orjson.loads(packed)
        told = tuple(orjson.dumps(turns)[1:-1] for turns in parts["told"])
        turns = SavedTurns(told, parts["began"], tuple(parts["answers"]), parts["waited_s"])
        items = tuple(map(orjson.dumps, parts["items"]))
        envelope, progress = orjson.dumps(parts["envelope"]), orjson.dumps(parts["progress"])
        return cls(parts["path"], parts["session"], turns, items, envelope, parts["pending"], progress)


class CheckpointRecorder:
    """Takes the checkpoints of one attempt, and has it begin from one.

    Args:
        server: the resources server.
        path: where it keeps sessions.
        cookies: of the session.
        conversation: with the policy.
        progress: of the rollout.
        every: a checkpoint is taken after so many turns; ``None`` for none.
        keep: takes it; when it returns, the rollout goes on.
        refused_s: seconds so far in which tools refused to work.
        begin: the checkpoint that the session began from.
    """

    def __init__(
        self,
        server: GymServer,
        path: str,
        cookies: CookieJar,
        conversation: Conversation,
        progress: Progress,
        every: int | None,
        keep: Callable[[Checkpoint], Awaitable[None]],
        refused_s: Callable[[], float],
        begin: Checkpoint | None,
    ) -> None:
        self._server = server
        self._path = path
        self._cookies = cookies
        self._conversation = conversation
        self._progress = progress
        self._every = every
        self._keep = keep
        self._refused_s = refused_s
        self._begin = begin
        self._begun_at = time.monotonic()
        self._items: tuple[bytes, ...] = begin.state.items if begin else ()
        self._kept = len(begin.state.output()) if begin else 0
        self._off = False

    async def restore(self, params: dict[str, Any], response: dict[str, Any]) -> list[dict[str, Any]] | None:
        """Have response, progress and conversation be where the checkpoint is, if there is one; what the policy has
        not been shown then.

        Raises:
            InfrastructureError: the model server fails.
        """
        if self._begin is None:
            return None
        state: GymCheckpoint = self._begin.state
        output = state.output()
        response.update(orjson.loads(state.envelope), output=output)
        for name, value in orjson.loads(state.progress).items():
            setattr(self._progress, name, value)
        seen = len(output) - state.pending
        await self._conversation.restore(state.turns, params["input"], output[:seen], self._progress.steps)
        return output[seen:]

    async def after_turn(self, response: dict[str, Any], pending: int) -> None:
        """Take one, if it is time for it.

        Raises:
            InfrastructureError: the session or the rollout is lost, or a server can't be reached.
        """
        if self._off or self._every is None or self._progress.turns % self._every:
            return
        what = f"{self._server.name} {self._path}"
        try:
            answer = await self._server.post(self._path, {}, self._cookies)
            require_ok(answer, what, FailureKind.SESSION_LOST)
            session = json_of(answer, what, FailureKind.SESSION_LOST)
            turns = await self._conversation.save()
        except CallerError as error:
            LOGGER.warning("no checkpoint after turn %d: %s", self._progress.turns, error.reason)
            self._off = True
            return
        output = response["output"]
        added = orjson.dumps(output[self._kept :])
        self._items, self._kept = (*self._items, added), len(output)
        progress = {name: getattr(self._progress, name) for name in ("turns", "tool_calls", "steps")}
        envelope = {name: value for name, value in response.items() if name != "output"}
        state = GymCheckpoint(
            self._path, session, turns, self._items, orjson.dumps(envelope), pending, orjson.dumps(progress)
        )
        spent_s = time.monotonic() - self._begun_at - turns.waited_s - self._refused_s()
        spent_s += self._begin.spent_s if self._begin else 0.0
        size = session["size"] + len(added) + len(turns.new)
        await self._keep(Checkpoint(self._progress.turns, state, size, spent_s, tuple(session["lost"])))
