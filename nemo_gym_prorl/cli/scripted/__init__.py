# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Scripted policy: an OpenAI-compatible server that replays scripts, and the demo that uses this server."""
