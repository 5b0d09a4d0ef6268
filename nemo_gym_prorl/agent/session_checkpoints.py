# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a rollout: the state of its session, its conversation and its tokens.

A resources server names a ``checkpoint_path`` in its answer to ``/seed_session``. A POST to this path saves the
session, and a POST to its subpath ``/resume`` starts a new session from the saved state. The model server returns the
turns sampled since the last checkpoint (:meth:`~.conversation.Conversation.save`). Output items are stored unchanged.

Checkpoints are incremental, so a rollout of n turns stores O(n) bytes.

A checkpoint is taken after a turn's tools have answered and before the next turn, when neither policy nor tools act.
If the server refuses to save a session, for example because of its size, the rollout continues without checkpoints.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Self

import orjson

from nemo_gym_prorl.agent.conversation import Conversation, SavedTurns
from nemo_gym_prorl.agent.gym_http import CookieJar, GymServer, require_json, require_ok
from nemo_gym_prorl.failures import CallerError, FailureKind
from nemo_gym_prorl.rollout.job import Checkpoint, Progress


LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GymCheckpoint:
    """State from which a rollout of a Gym environment resumes.

    Attributes:
        path: the resources server's ``checkpoint_path``.
        session: the resources server's answer to the request that saved the session.
        turns: turns that the model server has sampled.
        items: output items as JSON lists, one list per checkpoint.
        envelope: the response without ``output``, as JSON.
        pending: number of items at the end of ``items`` that the policy has not received.
        progress: JSON object with the fields ``turns``, ``tool_calls`` and ``steps`` of :class:`.Progress`.
    """

    path: str
    session: dict[str, Any]
    turns: SavedTurns
    items: tuple[bytes, ...]
    envelope: bytes
    pending: int
    progress: bytes

    def output(self) -> list[dict[str, Any]]:
        """Return the output items of all checkpoints; a new list on each call."""
        return [item for items in self.items for item in orjson.loads(items)]

    def pack(self) -> bytes:
        """Serialize the state as JSON, for other services."""
        parts = {
            "path": self.path,
            "session": self.session,
            "told": [orjson.Fragment(b"[%b]" % turns) for turns in self.turns.batches],
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
        """Deserialize a packed state; raise ``ValueError``, ``KeyError`` or ``TypeError`` for damaged bytes."""
        parts = orjson.loads(packed)
        batches = tuple(orjson.dumps(turns)[1:-1] for turns in parts["told"])
        turns = SavedTurns(batches, parts["began"], tuple(parts["answers"]), parts["waited_s"])
        items = tuple(map(orjson.dumps, parts["items"]))
        envelope, progress = orjson.dumps(parts["envelope"]), orjson.dumps(parts["progress"])
        return cls(parts["path"], parts["session"], turns, items, envelope, parts["pending"], progress)


class CheckpointRecorder:
    """Recorder of one attempt's checkpoints; first restores the checkpoint that the attempt resumes from.

    Args:
        path: the resources server's ``checkpoint_path``.
        every: turns between two checkpoints; ``None`` to take no checkpoints.
        keep: stores a checkpoint; the rollout waits until the checkpoint is stored.
        refused_s: returns the attempt's seconds of pauses so far after tools refused a call.
        resumed_from: checkpoint from which the session was resumed; ``None`` for a new session.
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
        resumed_from: Checkpoint | None,
    ) -> None:
        self._server = server
        self._path = path
        self._cookies = cookies
        self._conversation = conversation
        self._progress = progress
        self._every = every
        self._keep = keep
        self._refused_s = refused_s
        self._resumed_from = resumed_from
        self._started_at = time.monotonic()
        self._items: tuple[bytes, ...] = resumed_from.state.items if resumed_from else ()
        self._saved_items = len(resumed_from.state.output()) if resumed_from else 0
        self._disabled = False

    async def restore(self, params: dict[str, Any], response: dict[str, Any]) -> list[dict[str, Any]] | None:
        """Restore response, progress and conversation from the checkpoint, if the session was resumed from one.

        Returns:
            The items that the policy has not received; ``None`` without a checkpoint.

        Raises:
            InfrastructureError: the model server fails.
        """
        if self._resumed_from is None:
            return None
        state: GymCheckpoint = self._resumed_from.state
        output = state.output()
        response.update(orjson.loads(state.envelope), output=output)
        for name, value in orjson.loads(state.progress).items():
            setattr(self._progress, name, value)
        seen = len(output) - state.pending
        await self._conversation.restore(state.turns, params["input"], output[:seen], self._progress.steps)
        return output[seen:]

    async def after_turn(self, response: dict[str, Any], pending: int) -> None:
        """Take a checkpoint if one is due; take none after a server has refused one.

        Args:
            response: the response so far.
            pending: number of items at the end of its ``output`` that the policy has not received.

        Raises:
            InfrastructureError: the session or the rollout is lost, or a server cannot be reached.
        """
        if self._disabled or self._every is None or self._progress.turns % self._every:
            return
        what = f"{self._server.name} {self._path}"
        try:
            answer = await self._server.post(self._path, {}, self._cookies)
            require_ok(answer, what, FailureKind.SESSION_LOST)
            session = require_json(answer, what, FailureKind.SESSION_LOST)
            turns = await self._conversation.save()
        except CallerError as error:
            LOGGER.warning("no checkpoint after turn %d: %s", self._progress.turns, error.reason)
            self._disabled = True
            return
        output = response["output"]
        added = orjson.dumps(output[self._saved_items :])
        self._items, self._saved_items = (*self._items, added), len(output)
        progress = {name: getattr(self._progress, name) for name in ("turns", "tool_calls", "steps")}
        envelope = {name: value for name, value in response.items() if name != "output"}
        state = GymCheckpoint(
            self._path, session, turns, self._items, orjson.dumps(envelope), pending, orjson.dumps(progress)
        )
        spent_s = time.monotonic() - self._started_at - turns.waited_s - self._refused_s()
        spent_s += self._resumed_from.spent_s if self._resumed_from else 0.0
        size = session["size"] + len(added) + len(turns.new)
        await self._keep(Checkpoint(self._progress.turns, state, size, spent_s, tuple(session["lost"])))
