#!/bin/sh
# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
# Make the environment in .venv at the root of the repository: find a Python, get uv, install this package into it.
#
#   scripts/bootstrap.sh          what running needs
#   scripts/bootstrap.sh dev      also what the tests, the linter and the type checker need
#   scripts/bootstrap.sh bench    also what the benchmarks measure beside us
#
# PYTHON=/path/to/python chooses the interpreter; else it is one on which the newest NeMo Gym installs, if the machine
# has one or uv can get it, and any from 3.12 if not. Only .venv, the user's cache folder and uv's for Pythons are
# written. A second run finds its stamp and returns at once; a changed pyproject.toml, launcher or interpreter makes it
# work again.
#
# The package is installed editable. NeMo Gym looks for the folders of servers beside its own package, which an
# editable install leaves out, so they are linked there: they are found from any working directory.
set -eu
cd "$(dirname "$0")/.."

extra=${1:-}
venv=.venv
cache=${PRORL_CACHE:-${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/nemo-gym-prorl}
any='(3, 12)'
newest='(3, 13, 14)' # NeMo Gym 0.5 to 0.7; Gym 0.4 is the last for any below
started=$(date +%s)

say() { echo "==> $*"; }
fail() { echo "bootstrap: $*" >&2; exit 1; }

# The real interpreter behind a name, if it is at least of a version. Version managers' shims are seen through, since
# they work in some folders only.
interpreter() {
    "$1" -c "import sys; sys.exit(sys.version_info < $2)" </dev/null >/dev/null 2>&1 &&
        "$1" -c 'import os, sys; print(os.path.realpath(sys._base_executable or sys.executable))' </dev/null
}

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        interpreter "$PYTHON" "$any" || fail "PYTHON=$PYTHON is not a Python 3.12 or newer"
        return
    fi
    look_for "$newest" 3.13 3.14 || get_python || look_for "$any" 3.12 3.13 3.14 || interpreter python3 "$any" || true
}

# One of these versions, as packages, version managers and uv install them.
look_for() {
    least=$1; shift
    for version; do
        for candidate in "python$version" \
            "${PYENV_ROOT:-${HOME:-/nonexistent}/.pyenv}"/versions/"$version".*/bin/python \
            "${XDG_DATA_HOME:-${HOME:-/nonexistent}/.local/share}"/uv/python/cpython-"$version".*/bin/python; do
            if interpreter "$candidate" "$least"; then return; fi
        done
    done
    return 1
}

# What uv brings (30 MB), where it can reach it; else the machine's own will do.
get_python() {
    uv=$(find_uv) || return
    UV_HTTP_TIMEOUT=10 UV_HTTP_RETRIES=0 "$uv" python install --quiet --no-bin 3.13 </dev/null >/dev/null 2>&1 || return
    interpreter "$("$uv" python find --no-project --managed-python 3.13)" "$newest"
}

# uv on PATH, or a copy of its own in the cache.
find_uv() {
    if command -v uv; then return; fi
    if [ -x "$cache/uv/bin/uv" ]; then echo "$cache/uv/bin/uv"; return; fi
    with=${1:-$(command -v python3)} || fail "no Python at all: install python3"
    fresh=$cache/uv.$$
    mkdir -p "$cache"
    say "Getting uv into $cache/uv" >&2
    "$with" -m venv "$fresh" >&2 || { rm -rf "$fresh"; fail "'$with -m venv' failed: install uv, or python3-venv"; }
    "$fresh/bin/python" -m pip install --quiet --disable-pip-version-check uv >&2 ||
        { rm -rf "$fresh"; fail "pip could not install uv"; }
    # Another bootstrap may have been quicker; uv itself is one program that runs from anywhere.
    mv -T "$fresh" "$cache/uv" 2>/dev/null || rm -rf "$fresh"
    echo "$cache/uv/bin/uv"
}

# What an installation depends on: the interpreter, the project, and the program that is compiled for it.
stamp_text() {
    "$venv/bin/python" -c 'import sys; print(sys.version, sys.base_prefix)' && cat pyproject.toml || return
    cat setup.py nemo_gym_prorl/sandbox/launcher/*.c 2>/dev/null || true
}

is_current() {
    [ -f "$1" ] && stamp_text 2>/dev/null | cmp -s - "$1"
}

link_servers() {
    site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    for kind in resources_servers responses_api_agents responses_api_models environments hydra_plugins; do
        for folder in "$kind"/prorl_*/; do
            [ -d "$folder" ] || continue
            mkdir -p "$site/$kind"
            ln -sfn "$PWD/${folder%/}" "$site/${folder%/}"
        done
        # Those that are gone from the repository.
        for link in "$site/$kind"/prorl_*; do
            if [ -L "$link" ] && [ ! -e "$link" ]; then rm "$link"; fi
        done
    done
}

stamp=$venv/.prorl-stamp${extra:+-$extra}
python=
if [ -n "${PYTHON:-}" ]; then
    python=$(find_python)
    [ "$(interpreter "$venv/bin/python" "$any" || true)" = "$python" ] || rm -f "$venv"/.prorl-stamp*
fi
stamps=$stamp
# Any of them holds what running needs.
[ -n "$extra" ] || stamps="$stamp $stamp-dev $stamp-bench"
for present in $stamps; do
    if is_current "$present"; then
        link_servers
        exit 0
    fi
done

# An environment that is there keeps its interpreter unless another was asked for.
[ -n "$python" ] || python=$(interpreter "$venv/bin/python" "$any" || find_python)
uv=$(find_uv "$python")
if [ -n "$python" ]; then
    export UV_PYTHON_DOWNLOADS=never
else
    say "No Python 3.12 or newer found: uv downloads one"
    python=3.13
fi
if [ -e "$venv" ] && [ "$(interpreter "$venv/bin/python" "$any" || true)" != "$python" ]; then
    rm -rf "$venv"
fi
if [ ! -e "$venv" ]; then
    say "Making $venv with $python"
    "$uv" venv --quiet --seed --python "$python" "$venv" ||
        fail "uv could not make $venv with Python $python, see above; PYTHON=/path/to/python names another"
fi
say "Installing nemo-gym-prorl${extra:+ with the extra '$extra'} (1.4 GB the first time)"
# Built anew each time: uv does not know of the launcher, which an editable install has beside its source.
"$uv" pip install --python "$venv/bin/python" --reinstall-package nemo-gym-prorl --editable ".${extra:+[$extra]}"
link_servers
stamp_text > "$stamp"
say "$venv is ready after $(($(date +%s) - started)) s"
