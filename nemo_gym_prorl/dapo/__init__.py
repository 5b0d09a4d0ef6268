# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Asynchronous dynamic sampling for DAPO (arXiv 2503.14476, section 3.2; arXiv 2603.18815, section 3.4)."""
