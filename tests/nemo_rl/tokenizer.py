# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What NeMo RL asks of a tokenizer, for tokens that are bytes."""

from collections.abc import Sequence
from typing import Any

from nemo_gym_prorl.cli.scripted import text


class ByteTokenizer:
    """Of the tokens of the stand-in engine."""

    eos_token_id = text.END_OF_TURN
    pad_token_id = 0

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")

    def batch_decode(self, many: Sequence[Sequence[int]]) -> list[str]:
        return [self.decode(ids) for ids in many]

    def apply_chat_template(self, messages: list[dict[str, Any]], tokenize: bool = True) -> list[int]:
        return list(text.render_prompt(messages))
