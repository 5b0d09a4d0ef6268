# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Import the plugin for unittest, whose runners load no plugins, then the ``sitecustomize`` that this file shadows."""

import importlib
import os
import sys


_starts = os.environ.get("PRORL_STARTS")
if _starts:
    importlib.import_module(_starts)

_here = os.path.dirname(os.path.abspath(__file__))
sys.modules.pop("sitecustomize", None)
_path, sys.path = sys.path, [entry for entry in sys.path if os.path.abspath(entry or ".") != _here]
try:
    importlib.import_module("sitecustomize")
except ImportError:
    pass
finally:
    sys.path = _path
