# SPDX-License-Identifier: Apache-2.0
"""The benchmarks, which nobody runs every day, at least find what they need."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

import benchmarks


@pytest.mark.parametrize("name", sorted(path.stem for path in Path(benchmarks.__file__).parent.glob("[a-z]*.py")))
def test_a_benchmark_imports(name: str) -> None:
    importlib.import_module(f"benchmarks.{name}")
