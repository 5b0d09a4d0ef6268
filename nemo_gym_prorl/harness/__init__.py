# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Finished agent programs (harnesses) that run inside a row's sandbox: their descriptions and installed bundles."""
