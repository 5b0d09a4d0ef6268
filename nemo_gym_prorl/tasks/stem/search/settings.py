# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Which search engine a server has, as its configuration says it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Literal, Self

import orjson
from pydantic import BaseModel, ConfigDict, Field, model_validator

from nemo_gym_prorl.tasks.stem.search.engine import Passage, SearchEngine
from nemo_gym_prorl.tasks.stem.search.hosted import DIALECTS, HostedSearch
from nemo_gym_prorl.tasks.stem.search.index import Index, build
from nemo_gym_prorl.tasks.stem.search.offline import OfflineSearch
from nemo_gym_prorl.tasks.stem.search.tool import PageLimits


class SearchSettings(BaseModel):
    """See the comments in ``resources_servers/prorl_stem/configs/prorl_stem.yaml``."""

    model_config = ConfigDict(extra="forbid")

    engine: Literal["offline", "tavily", "serper"] = "offline"
    index: str | None = None
    api_key: str | None = Field(default=None, repr=False)
    url: str | None = None
    timeout_s: float = Field(default=20.0, gt=0)
    results: int = Field(default=5, ge=1, le=20)
    passage_chars: int = Field(default=1500, ge=100, le=20_000)

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.engine != "offline" and not self.api_key:
            raise ValueError(f"search.api_key: {self.engine} takes a key")
        return self

    @property
    def page(self) -> PageLimits:
        """Bounds of a page of results."""
        return PageLimits(self.results, self.passage_chars)


def engine_of(settings: SearchSettings, sample: Path) -> SearchEngine:
    """The engine that is configured.

    Args:
        settings: the configuration.
        sample: passages to search where no index is named, as JSON lines.
    """
    if settings.engine != "offline":
        assert settings.api_key is not None
        dialect = DIALECTS[settings.engine]
        return HostedSearch(dialect, settings.api_key, url=settings.url, timeout_s=settings.timeout_s)
    if settings.index is None:
        return OfflineSearch(lambda: _index_of(sample))
    folder = Path(settings.index).expanduser()
    return OfflineSearch(lambda: Index(folder))


def _index_of(sample: Path) -> Index:
    with tempfile.TemporaryDirectory(prefix="prorl-index-") as folder:
        build((Passage(**orjson.loads(line)) for line in sample.open("rb")), Path(folder) / "index")
        return Index(Path(folder) / "index")  # what is mapped stays, though its name goes
