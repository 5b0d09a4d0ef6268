# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Gym resources server of riddles."""

from examples.tiny_dapo.riddles import RiddleServer


if __name__ == "__main__":
    RiddleServer.run_webserver()
