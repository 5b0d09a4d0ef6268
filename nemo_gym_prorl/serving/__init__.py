# SPDX-License-Identifier: Apache-2.0
"""What all of our servers do alike, whatever they serve."""
