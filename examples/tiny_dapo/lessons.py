# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Demonstrations for the warm start, and the tokenizer of the policy.

Demonstrations are synthetic and include the sandbox's output, which tests compare with a real sandbox. At each
decision the demonstrator may make the typical mistake of the riddle's kind or confuse a name, so that about two of
five demonstrations succeed. After imitation the policy sometimes solves riddles and sometimes repeats the mistakes;
training with rewards removes the mistakes.

The tokenizer is a byte-level BPE over the demonstrations that merges across words, so the constant part of a tool call
is a few tokens. Tool calls have the format of Qwen models.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from examples.tiny_dapo.riddles import GAVE_UP, Riddle, draw_code, draw_name


SPECIAL = ("<|tools|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>")
TOOLS, USER, ASSISTANT, TOOL, END = SPECIAL
VOCABULARY = 384
TEXTS = 2000  # number of demonstrations from which the tokenizer learns its merges
TEMPLATE = """
{%- for tool in tools or [] %}{{ '<|tools|>' + tool.function.name + '<|end|>' }}{% endfor %}
{%- for message in messages %}
    {{- '<|' + message.role + '|>' }}{{ message.content or '' }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments | tojson }}{{ '}</tool_call>' }}
    {%- endfor %}
    {{- '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}
"""


@dataclass(frozen=True, slots=True)
class Carelessness:
    """Probabilities of the demonstrator's mistakes."""

    no_look: float = 0.35
    takes_name_for_code: float = 0.45
    gives_up: float = 0.5
    wrong_name: float = 0.05


@dataclass(frozen=True, slots=True)
class Demonstration:
    """Conversation: a question, and pairs of a turn and the tool output after the turn (empty after the last turn)."""

    question: str
    turns: list[tuple[str, str]]

    def text(self) -> str:
        """Return the conversation as the chat template writes it."""
        turns = (ASSISTANT + said + END + (TOOL + seen + END if seen else "") for said, seen in self.turns)
        return TOOLS + "bash" + END + USER + self.question + END + "".join(turns)


def demonstrate(riddle: Riddle, rng: random.Random, careless: Carelessness) -> Demonstration:
    """Return a demonstration of a riddle, with random mistakes."""
    turns: list[tuple[str, str]] = []

    def end(answer: str) -> Demonstration:
        turns.append((answer, ""))
        return Demonstration(riddle.question, turns)

    def run(command: str, output: str, status: int = 0) -> None:
        call = f'<tool_call>{{"name": "bash", "arguments": {{"command": "{command}"}}}}</tool_call>'
        turns.append((call, f"{output}\n[exit code: {status}]" if output else f"[exit code: {status}]"))

    if rng.random() < careless.no_look:
        return end(draw_code(rng))
    if rng.random() < careless.wrong_name:
        name = draw_name(rng)
        if riddle.kind == "repair":
            run(f"sh {name}", f"sh: 0: cannot open {name}: No such file", 2)
        else:
            run(f"cat {name}", f"cat: {name}: No such file or directory", 1)
        return end(GAVE_UP)
    if riddle.kind == "read":
        run(f"cat {riddle.name}", riddle.code)
        return end(riddle.code)
    if riddle.kind == "follow":
        run(f"cat {riddle.name}", riddle.other)
        if rng.random() < careless.takes_name_for_code:
            return end(riddle.other)
        run(f"cat {riddle.other}", riddle.code)
        return end(riddle.code)
    run(f"sh {riddle.name}", f"cat: {riddle.other}: No such file or directory", 1)
    if rng.random() < careless.gives_up:
        return end(GAVE_UP)
    run(f"mv {riddle.other}.bak {riddle.other}", "")
    run(f"sh {riddle.name}", riddle.code)
    return end(riddle.code)


def lesson(demonstration: Demonstration, tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
    """Return the token ids of a demonstration, and a mask that is true for the policy's turns and their end tokens."""
    ids: list[int] = tokenizer.encode(demonstration.text(), add_special_tokens=False).ids
    opening, end = tokenizer.token_to_id(ASSISTANT), tokenizer.token_to_id(END)
    mask, writes = [], False
    for token in ids:
        mask.append(writes)
        writes = (writes and token != end) or token == opening
    return ids, mask


def make_tokenizer(folder: Path) -> Tokenizer:
    """Train the tokenizer (the same for all seeds); write the tokenizer and the chat template to a folder."""
    rng, texts = random.Random("tokenizer"), list[str]()
    for _ in range(TEXTS):
        shown = demonstrate(Riddle.draw(rng), rng, Carelessness())
        texts += [shown.question, *filter(None, chain.from_iterable(shown.turns))]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY - len(SPECIAL), initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return tokenizer
