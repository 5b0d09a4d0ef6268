# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""``prorl image`` and ``prorl harness``: sandbox images, tools for verifiers, and agent programs."""
