# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Riddles in sandboxes as a Gym resources server."""

from examples.tiny_dapo.riddles import RiddleServer


if __name__ == "__main__":
    RiddleServer.run_webserver()
