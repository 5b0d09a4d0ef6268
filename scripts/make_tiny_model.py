# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Create a tiny random model that real inference engines load, for tests of the protocol.

The model is a Qwen3-shaped decoder with under a million parameters. Its byte-level BPE is trained on Python's standard
library, so that token boundaries are as irregular as in a code model's vocabulary. The vocabulary contains the special
tokens of several chat template families. Weights are random, or trained on example turns (``--lessons``), so that the
model mostly writes well-formed tool calls.

Runs in the environment of ``setup_vllm.sh`` (torch, transformers, tokenizers):

    python make_tiny_model.py OUTPUT_FOLDER [--seed N] [--width N --layers N] [--experts N] [--lessons FILE --steps N]

A lesson is one JSON line: ``[prompt, expected output]``.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM


VOCABULARY = 4096
CONTEXT = 16_384
CHAT_TEMPLATE = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}
    {{- 'Tools:\\n' }}
    {%- for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in (messages[1:] if tools and messages[0].role == 'system' else messages) %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {{- message.content or '' }}
    {%- for call in message.tool_calls or [] %}
        {%- set said = {'name': call.function.name, 'arguments': call.function.arguments} %}
        {{- '\\n<tool_call>\\n' + (said | tojson) + '\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""ChatML with tools in the system message and calls in Hermes' format."""
BATCH = 16
WINDOW = 160
"""Maximum prompt tokens of a lesson, counted from the prompt's end; bounds the training time."""
SPECIAL = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eot_id|>", "<|eom_id|>", "<|python_tag|>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]"),
    *("[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "<|begin|>", "<|end|>", "<|user|>"),
    *("<|assistant|>", "<|tool|>", "<start_of_turn>", "<end_of_turn>"),
]
MARKERS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
"""Added tokens that are not special, so decoders do not skip them."""


def train_tokenizer() -> Tokenizer:
    """Train a byte-level BPE on sources of Python's standard library."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL) - len(MARKERS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:80]
    tokenizer.train([str(source) for source in sources], trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKERS])
    return tokenizer


def train(model: Qwen3ForCausalLM | Qwen3MoeForCausalLM, tokenizer: Tokenizer, lessons: Path, steps: int) -> float:
    """Train the model on the expected outputs of lessons; return the mean loss of the last 50 steps."""
    examples = []
    for line in lessons.read_text().splitlines():
        prompt, reply = (tokenizer.encode(part, add_special_tokens=False).ids for part in json.loads(line))
        examples.append((prompt[-WINDOW:] + reply, min(len(prompt), WINDOW)))
    examples.sort(key=lambda example: len(example[0]))
    batches = [examples[start : start + BATCH] for start in range(0, len(examples), BATCH)]
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, max_lr=4e-3, total_steps=steps)
    losses: list[float] = []
    for step in range(steps):
        batch = batches[torch.randint(len(batches), ()).item()]
        width = max(len(ids) for ids, _ in batch)
        ids = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in batch])
        trained = torch.tensor([[start <= at < len(ids) for at in range(1, width)] for ids, start in batch])
        # The output layer dominates the cost, so logits are computed for trained positions only.
        logits = model.lm_head(model.model(input_ids=ids).last_hidden_state[:, :-1][trained])
        loss = torch.nn.functional.cross_entropy(logits, ids[:, 1:][trained])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        optimiser.zero_grad()
        losses.append(loss.item())
        if step % 100 == 99:
            print(f"step {step + 1}: loss {sum(losses[-100:]) / 100:.3f}", flush=True)
    return sum(losses[-50:]) / 50


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lessons", type=Path)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--width", type=int, default=128, help="hidden size; a multiple of 64")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--experts", type=int, default=0, help="experts, two per token; 0: a dense model")
    arguments = parser.parse_args()
    output: Path = arguments.output
    output.mkdir(parents=True, exist_ok=True)

    tokenizer = train_tokenizer()
    tokenizer.save(str(output / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin_of_text|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (output / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))

    torch.manual_seed(arguments.seed)
    stops = [
        tokenizer.token_to_id(token)
        for token in ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "</s>", "<|end|>", "<end_of_turn>")
    ]
    shape = {
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": arguments.width,
        "intermediate_size": 2 * arguments.width,
        "num_hidden_layers": arguments.layers,
        "num_attention_heads": arguments.width // 32,
        "num_key_value_heads": arguments.width // 64,
        "head_dim": 32,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": True,
        "eos_token_id": stops,
        "initializer_range": 0.08,
    }
    if arguments.experts:
        mixture = {"num_experts": arguments.experts, "num_experts_per_tok": 2, "norm_topk_prob": True}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **mixture, moe_intermediate_size=arguments.width))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**shape))
    model = model.to(torch.float32)
    if arguments.lessons:
        torch.set_num_threads(1)  # more threads are slower for such small matrices
        train(model, tokenizer, arguments.lessons, arguments.steps)
    model.save_pretrained(output, safe_serialization=True)
    model.generation_config.eos_token_id = stops
    model.generation_config.save_pretrained(output)
    print(
        f"{sum(p.numel() for p in model.parameters()):,} parameters, {tokenizer.get_vocab_size()} tokens in {output}"
    )


if __name__ == "__main__":
    main()
