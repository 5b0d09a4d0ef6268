# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Control tokens that an observation spells stay the text that they are.

A tokenizer reads ``<|im_end|>`` in a web page or a file as the token that ends a turn, wherever it stands: whoever
writes the page could end the policy's turn and speak as its user. So where an observation spells a control token, that
is hidden from the template behind a made-up word, found again in what the template wrote, and encoded as the ordinary
characters that it consists of. Everything else is encoded in one go with the template's text, as it ever was.

Which contents are observations? Results of tools, and what others say after the policy's first answer, since many
agents report what they saw as a user. Rows of a data set are their author's own. Which tokens are controls? Special
ones; in results of tools also added tokens that the template itself writes, since some models do not mark all of
theirs as special. A user may wrap a result in such markers on purpose.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any


_RESULTS = ("tool", "function", "ipython")


class Spelled:
    """Control tokens in observations, each behind a word of its own.

    Attributes:
        messages: the messages with the words in place of the tokens.
    """

    def __init__(
        self,
        messages: Sequence[Mapping[str, Any]],
        special: re.Pattern[str],
        control: re.Pattern[str],
        *,
        answered: bool,
    ) -> None:
        """
        Args:
            messages: the conversation or its new end, contents as text.
            special: matches what is hidden in what others say.
            control: matches what is hidden in results of tools.
            answered: the policy has answered before the first of the messages.
        """
        self._texts: list[str] = []
        self._word = ""
        self.messages: list[Mapping[str, Any]] = []
        for message in messages:
            pattern = control if message["role"] in _RESULTS else special
            answered = answered or message["role"] == "assistant"
            observed = message["role"] in _RESULTS or (answered and message["role"] != "assistant")
            if observed and pattern.search(message["content"]):
                self._word = self._word or _absent_from(messages)
                message = {**message, "content": pattern.sub(self._hide, message["content"])}
            self.messages.append(message)

    def reveal(self, text: str) -> tuple[str, list[tuple[int, int]]]:
        """The text with the tokens back in their places, and where those are."""
        if not self._texts:
            return text, []
        plain, places, end = [], [], 0
        length = 0
        for found in re.finditer(rf"{self._word}(\d+)x", text):
            token = self._texts[int(found[1])]
            before = text[end : found.start()]
            plain += [before, token]
            places.append((length + len(before), length + len(before) + len(token)))
            length, end = places[-1][1], found.end()
        return "".join(plain) + text[end:], places

    def _hide(self, token: re.Match[str]) -> str:
        self._texts.append(token[0])
        return f"{self._word}{len(self._texts) - 1}x"


def _absent_from(messages: Sequence[Mapping[str, Any]]) -> str:
    text, word = json.dumps(messages, ensure_ascii=False, default=str), "Control"
    while word in text:
        word += "Z"
    return word
