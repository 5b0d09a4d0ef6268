# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A tiny model that counts with a tool, as a folder that vLLM and a trainer load: taught for a minute, and then what
it writes is sampled. It calls ``add`` once or several times, with any number, and says so when it is done. Asked to
think, it does so before whatever it writes."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nemo_gym_prorl.policy.text.template import ChatTemplate


SCRIPTS = Path(__file__).parents[2] / "scripts"
TEMPLATE = (Path(__file__).parents[1] / "policy/templates/chatml.jinja").read_text()
CONTEXT = 2048


def question(number: int, *, thinks: bool = False) -> str:
    return f"{'Think, then count' if thinks else 'Count'} to ten. Attempt {number}."


def make(folder: Path, tool: dict[str, Any], *, experts: int = 0, steps: int = 1200, seed: int = 0) -> None:
    """Write a model and train it to call the tool.

    Args:
        folder: is created.
        tool: in the form of the Responses API.
        experts: of each layer; 0 gives a dense model.
        steps: optimizer steps.
        seed: of the first weights and of the order of lessons.
    """
    lessons = folder.with_suffix(".jsonl")
    chat_tool = {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}
    lessons.write_text("\n".join(json.dumps(lesson) for lesson in _lessons(chat_tool)))
    command = [sys.executable, SCRIPTS / "make_tiny_model.py", folder, "--experts", str(experts), "--seed", str(seed)]
    subprocess.run([*command, "--lessons", lessons, "--steps", str(steps)], check=True, capture_output=True)
    make_sure(folder)
    show_tools(folder)


def make_sure(folder: Path, factor: float = 2.0) -> None:
    """What it rarely does, by mistake, it hardly ever does then; what it does as often as another stays so."""
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] *= factor  # so all its logits are
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def show_tools(folder: Path) -> None:
    """Have its prompts say which tools there are, by our template."""
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": TEMPLATE}))


def _lessons(tool: dict[str, Any], seed: int = 0, conversations: int = 600) -> Iterator[tuple[str, str]]:
    """What somebody would say who can't count."""
    rng, template = random.Random(seed), ChatTemplate(TEMPLATE)
    for _ in range(conversations):
        thinks = rng.random() < 0.5
        thought = "<think>\nMore.\n</think>\n\n" if thinks else ""
        messages: list[dict[str, Any]] = [{"role": "user", "content": question(rng.randrange(100), thinks=thinks)}]
        total = 0
        while True:
            prompt = template.render(messages, [tool], prompt=True)
            if total and rng.random() < 0.6:
                yield prompt, f"{thought}That makes {total}.<|im_end|>"
                break
            number = rng.randrange(1, 6)
            total += number
            arguments = json.dumps({"number": number})
            yield (
                prompt,
                f'{thought}\n<tool_call>\n{{"name": "add", "arguments": {arguments}}}\n</tool_call><|im_end|>',
            )
            function = {"name": "add", "arguments": arguments}
            messages += [
                {"role": "assistant", "content": thought, "tool_calls": [{"id": "c", "function": function}]},
                {"role": "tool", "tool_call_id": "c", "content": json.dumps({"sum": total})},
            ]
