# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The ``prorl`` command: ``app*.py`` declare commands and options, each other module does the work of one command."""
