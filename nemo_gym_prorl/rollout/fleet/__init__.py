# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Many rollout services as one: where they are, which of them a rollout goes to, and what carries it there."""
