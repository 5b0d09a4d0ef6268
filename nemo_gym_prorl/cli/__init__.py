# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The ``prorl`` command. Commands are declared in ``app``, ``admin``, ``data``, ``harness`` and ``image.commands``."""
