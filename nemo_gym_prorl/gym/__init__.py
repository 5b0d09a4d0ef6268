# SPDX-License-Identifier: Apache-2.0
"""Gym's own command line, started, asked and ended from here."""
