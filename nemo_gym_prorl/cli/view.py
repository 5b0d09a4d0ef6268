# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Command ``prorl view``: converts rollouts into Inspect's log format, and serves its viewer or writes a static site.

The log has turns with reasoning, tool calls, times, tool output, reward and failure. Other fields of a row become
metadata of its sample. Text of a policy or a sandbox is untrusted: the log is marked so that the viewer shows plain
text, because markup could load remote images. Neither the viewer nor the site needs the network.
"""

from __future__ import annotations

import re
import socket
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from nemo_gym_prorl.cli.json_lines import read_rollouts
from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.rollout.gym_rows import is_masked
from nemo_gym_prorl.rollout.turn_records import ROLLOUT_OPTIONS_KEY, ParsedTurn, items, part, read_turns, text_of
from nemo_gym_prorl.tasks import require_extras


if TYPE_CHECKING:  # functions import Inspect lazily, because the import is slow
    from inspect_ai.event import Event
    from inspect_ai.log import EvalLog, EvalSample
    from inspect_ai.model import ChatMessage, ChatMessageAssistant, ModelUsage


_SPAN = ("started_at", "completed_at")
_NO_METADATA = {"reward", "response", "responses_create_params", "rollout", "agent_ref", "ng_trajectory"}
_NO_METADATA |= {"training_traces"}
_REWARD = "reward"


def view(results: Path, bundle: Path | None, port: int) -> None:
    """Show the rollouts of a file of results.

    Args:
        results: JSONL file of ``prorl submit`` or of Gym.
        bundle: new folder for a static site; ``None`` serves the viewer on loopback until interrupted.
        port: port of the viewer; unused with ``bundle``.

    Raises:
        CallerError: the file is invalid or has no rollouts, ``bundle`` exists or cannot be made, or the port is used.
        InfrastructureError: Inspect is not installed; the error has the install command.
    """
    require_extras("view")
    _check_output(bundle, port)
    rows = [*read_rollouts(results).values()]
    if not rows:
        raise CallerError("has no rollouts", field=str(results))
    print(f"converting {len(rows)} rollouts for the viewer", file=sys.stderr, flush=True)
    from inspect_ai.log import bundle_log_dir, write_eval_log

    with tempfile.TemporaryDirectory(prefix="prorl-view-") as folder:
        name = re.sub(r"[^\w.-]", "_", results.stem)  # Inspect parses the path as a URL, where # and ? are special
        write_eval_log(inspect_log(rows, results.stem), f"{folder}/{name}.eval", format="eval")
        if bundle is not None:
            # Absolute, because Inspect uploads to the Hugging Face Hub for a relative path that starts with "hf/".
            bundle_log_dir(folder, str(bundle.absolute()))
            return
        from inspect_ai import view as serve

        try:
            serve(folder, port=port)
        except BaseExceptionGroup as group:  # an interrupt, wrapped by the task groups of Inspect's server
            while isinstance(first := group.exceptions[0], BaseExceptionGroup):
                group = first
            raise first from None


def _check_output(bundle: Path | None, port: int) -> None:
    """Check ``bundle``, or the port if ``bundle`` is ``None``, before the slow conversion."""
    if bundle is not None and bundle.exists():
        raise CallerError("exists already; choose a new folder", field="--bundle")
    try:
        if bundle is not None:
            bundle.parent.mkdir(parents=True, exist_ok=True)
        else:
            socket.create_server(("127.0.0.1", port)).close()
    except OSError as error:
        where = f"port {port}" if bundle is None else f"folder {bundle}"
        field = "--port" if bundle is None else "--bundle"
        raise CallerError(f"{where} is not available: {error.strerror}; choose another", field=field) from error


def inspect_log(rows: list[dict[str, Any]], name: str) -> EvalLog:
    """Convert rollouts into the log of a task ``name``: each rollout is a sample, the repeats of a row its epochs."""
    from inspect_ai.log import (
        EvalConfig,
        EvalDataset,
        EvalLog,
        EvalMetric,
        EvalResults,
        EvalScore,
        EvalSpec,
        EvalStats,
    )
    from inspect_ai.viewer import ViewerConfig

    epochs: Counter[str] = Counter()
    samples = []
    for row in rows:
        epochs[task := _task(row)] += 1
        samples.append(_sample(row, task, epochs[task]))
    # The viewer shows samples × epochs as the total, so epochs are set only if all rows have equally many rollouts.
    repeats = max(epochs.values()) if len({*epochs.values()}) == 1 else 1
    rewards = [sample.scores[_REWARD].as_float() for sample in samples if sample.scores]
    mean = {"mean": EvalMetric(name="mean", value=fmean(rewards))} if rewards else {}
    unscored = len(samples) - len(rewards)
    score = EvalScore(
        name=_REWARD, scorer=_REWARD, scored_samples=len(rewards), unscored_samples=unscored, metrics=mean
    )
    started, ended = ([getattr(each, at) for each in samples if getattr(each, at)] for at in _SPAN)
    return EvalLog(
        status="success",
        eval=EvalSpec(
            created=min(started, default=None) or datetime.now(UTC).isoformat(),
            task=name,
            dataset=EvalDataset(name=name, samples=len(samples) // repeats, sample_ids=[*epochs]),
            model=_model(rows[0]),
            config=EvalConfig(epochs=repeats),
            viewer=ViewerConfig(trust_content=False),
        ),
        results=EvalResults(total_samples=len(samples), completed_samples=len(rewards), scores=[score]),
        stats=EvalStats(started_at=min(started, default=""), completed_at=max(ended, default="")),
        samples=samples,
    )


def _sample(row: Mapping[str, Any], task: str, epoch: int) -> EvalSample:
    from inspect_ai.event import ErrorEvent, ScoreEvent
    from inspect_ai.log import EvalError, EvalSample
    from inspect_ai.model import ModelOutput
    from inspect_ai.scorer import Score

    about = _rollout_report(row)
    transcript = _Transcript(row)
    error = _failure(row)
    score = None
    if error is None and isinstance(reward := row.get(_REWARD), int | float):
        why = about.get("finish_reason")
        verdict = ": ".join(str(text) for name in ("verdict", "verdict_detail") if (text := row.get(name)))
        said = [f"the rollout ended with {why}" if why else "", verdict, str(row.get("verifier_output") or "")]
        score = Score(value=float(reward), explanation="\n\n".join(filter(None, said)) or None)
        transcript.events.append(ScoreEvent(score=score, scorer=_REWARD, timestamp=transcript.now, working_start=0.0))
    eval_error = None
    if error is not None:
        eval_error = EvalError(
            message=f"{error['kind']}: {error['reason']}", traceback=error["traceback"], traceback_ansi=""
        )
        transcript.events.append(ErrorEvent(error=eval_error, timestamp=transcript.now, working_start=0.0))
    stages = about.get("timings")
    worked = sum(stage["worked_s"] for stage in stages.values()) if isinstance(stages, dict) else None
    submitted, finished = about.get("submitted_at"), about.get("finished_at")
    metadata = {
        "masked": is_masked(row) or bool(about.get("masked")),
        "failure_kind": error["kind"] if error else None,
        **{name: value for name, value in row.items() if name not in _NO_METADATA and not name.startswith("_ng_")},
        "rollout": {name: value for name, value in about.items() if name != "steps"},
    }
    return EvalSample(
        id=task,
        epoch=epoch,
        input=transcript.prompt,
        target="",
        messages=transcript.messages,
        output=transcript.output or ModelOutput(),
        scores=None if score is None else {_REWARD: score},
        metadata=metadata,
        events=transcript.events,
        model_usage=transcript.usage,
        started_at=_iso(submitted or transcript.started_at),
        completed_at=_iso(finished),
        total_time=finished - submitted if submitted and finished else None,
        working_time=worked,
        error=eval_error,
        uuid=str(about.get("id") or "") or None,
    )


class _Transcript:
    """Prompt, messages, events and token usage of one rollout in Inspect's types."""

    def __init__(self, row: Mapping[str, Any]) -> None:
        self._model = _model(row)
        self.prompt: list[ChatMessage] = [*_prompt(row)]
        self.messages = [*self.prompt]
        self.events: list[Event] = []
        self.usage: dict[str, ModelUsage] = {}
        self.output: Any = None
        turns = read_turns(row)
        self.started_at = next((turn.step["started_at"] for turn in turns if turn.step), None)
        self._clock = self.started_at or 0.0
        for number, turn in enumerate(turns, 1):
            self._add_turn(turn, f"turn {number}")

    @property
    def now(self) -> datetime:
        return _datetime(self._clock)

    def _add_turn(self, turn: ParsedTurn, name: str) -> None:
        from inspect_ai.event import ModelEvent, ToolEvent
        from inspect_ai.model import ChatCompletionChoice, ChatMessageTool, GenerateConfig, ModelOutput, ModelUsage

        message = _assistant(turn, self._model)
        seconds = None
        usage = None
        if turn.step is not None:
            self._clock, seconds = turn.step["started_at"], turn.step["seconds"]
            read, wrote = turn.step["input_tokens"] or 0, turn.step["output_tokens"] or 0
            usage = ModelUsage(input_tokens=read, output_tokens=wrote, total_tokens=read + wrote)
            self.usage[self._model] = self.usage.get(self._model, ModelUsage()) + usage
        stop = "tool_calls" if turn.calls else "stop"
        self.output = ModelOutput(
            model=self._model,
            choices=[ChatCompletionChoice(message=message, stop_reason=stop)],
            usage=usage,
            time=seconds,
        )
        start = self.now
        self._clock += seconds or 0.0
        self.events.append(
            ModelEvent(
                timestamp=start,
                working_start=start.timestamp() - (self.started_at or 0.0),
                completed=self.now,
                working_time=seconds,
                metadata={"turn": name},
                model=self._model,
                input=[*self.messages],
                tools=[],
                tool_choice="auto",
                config=GenerateConfig(),
                output=self.output,
            )
        )
        self.messages.append(message)
        for call in turn.calls:
            if call.output is None:
                continue
            tool_seconds = None
            if call.time is not None:
                self._clock, tool_seconds = call.time["started_at"], call.time["seconds"]
            start = self.now
            self._clock += tool_seconds or 0.0
            self.events.append(
                ToolEvent(
                    timestamp=start,
                    working_start=start.timestamp() - (self.started_at or 0.0),
                    completed=self.now,
                    working_time=tool_seconds,
                    id=call.id,
                    function=call.name,
                    arguments=call.arguments or {},
                    result=call.output,
                )
            )
            self.messages.append(ChatMessageTool(content=call.output, tool_call_id=call.id, function=call.name))


def _assistant(turn: ParsedTurn, model: str) -> ChatMessageAssistant:
    from inspect_ai.model import ChatMessageAssistant, ContentReasoning, ContentText
    from inspect_ai.tool import ToolCall

    thought = [ContentReasoning(reasoning=turn.thought)] if turn.thought else []
    said = [ContentText(text=turn.said)] if turn.said else []
    calls = [
        ToolCall(
            id=call.id,
            function=call.name,
            arguments=call.arguments or {},
            parse_error=None if call.arguments is not None else f"not a JSON object: {call.written}",
        )
        for call in turn.calls
    ]
    return ChatMessageAssistant(content=[*thought, *said], tool_calls=calls or None, source="generate", model=model)


def _prompt(row: Mapping[str, Any]) -> Iterator[ChatMessage]:
    from inspect_ai.model import ChatMessageSystem, ChatMessageUser

    given = part(row, "responses_create_params", "input")
    for item in items([{"role": "user", "content": given}] if isinstance(given, str) else given):
        kind, text = item.get("role", item.get("type")), text_of(item.get("content") or item.get("output"))
        if kind in ("system", "developer"):
            yield ChatMessageSystem(content=text, source="input")
        else:
            yield ChatMessageUser(content=text if kind == "user" else f"[{kind}]\n{text}", source="input")


def _failure(row: Mapping[str, Any]) -> dict[str, str] | None:
    failure = _rollout_report(row).get("failure")
    fields = failure if isinstance(failure, dict) else {}
    kind = fields.get("kind") or row.get("failure_kind")
    if kind is None:
        return None
    reason = fields.get("reason") or row.get("failure_reason")
    return {"kind": str(kind), "reason": str(reason), "traceback": str(fields.get("traceback") or "")}


def _rollout_report(row: Mapping[str, Any]) -> dict[str, Any]:
    about = row.get(ROLLOUT_OPTIONS_KEY)
    return about if isinstance(about, dict) else {}


def _task(row: Mapping[str, Any]) -> str:
    """Return a sample id that the repeats of a row share: the row's index, line or group, and its task id."""
    about = _rollout_report(row)
    names = (row.get("_ng_task_index"), part(about, "source", "line"), about.get("group"))
    index = next((str(name) for name in names if name is not None), "")
    task = next((str(row[name]) for name in ("task_id", "instance_id") if row.get(name) is not None), "")
    return ": ".join(filter(None, (index, task))) or "row"


def _model(row: Mapping[str, Any]) -> str:
    return str(part(row, "response", "model") or "none")


def _iso(timestamp: float | None) -> str | None:
    return _datetime(timestamp).isoformat() if timestamp else None


def _datetime(timestamp: float) -> datetime:
    return datetime.fromtimestamp(timestamp, UTC)
