# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The tiny model's tokenizer and chat template, as a folder that a model server loads like any other model's.

A byte-level BPE over the demonstrations. It may merge across words, so that the constant part of a tool call is a few
tokens; codes and names, being random, stay in pieces. Tool calls are written as Qwen's models write them; which tools
there are is not said, since there is one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers


USER, ASSISTANT, TOOL, END = SPECIAL = ("<|user|>", "<|assistant|>", "<|tool|>", "<|end|>")
VOCABULARY = 384
TEMPLATE = """
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


def call(command: str) -> str:
    """A call of the shell, as the template writes it. The command needs no escaping in JSON."""
    return f'<tool_call>{{"name": "bash", "arguments": {{"command": "{command}"}}}}</tool_call>'


def make_tokenizer(texts: Iterable[str], folder: Path) -> Tokenizer:
    """Learn the merges from texts of turns, and write the folder."""
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


def policy_mask(ids: Sequence[int], tokenizer: Tokenizer) -> list[bool]:
    """Which tokens of a conversation the policy wrote: those behind an opening of its turn, the end included."""
    opening, end = tokenizer.token_to_id(ASSISTANT), tokenizer.token_to_id(END)
    mask, writes = [], False
    for token in ids:
        mask.append(writes)
        writes = (writes and token != end) or token == opening
    return mask
