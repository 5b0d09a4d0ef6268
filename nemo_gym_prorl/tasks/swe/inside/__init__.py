# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Plugins that run beside a repository's tests in the image's Python: standard library only, Python 3.5 or later."""
