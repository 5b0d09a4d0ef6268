#!/bin/sh
# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
# Create the Python environment .venv at the root of the repository, with Python, uv and this package.
#
#   scripts/bootstrap.sh          packages for running
#   scripts/bootstrap.sh dev      and packages for tests, linter and type checker
#   scripts/bootstrap.sh bench    and packages that the benchmarks compare with
#
# PYTHON=/path/to/python selects the interpreter. Default: a Python for the newest NeMo Gym, from this machine or from
# uv, else any Python from 3.12. The script writes only to .venv, the user's cache folder and uv's folder of Pythons. A
# stamp file makes later runs return at once, until pyproject.toml, launcher or interpreter change.
#
# The package is installed editable. NeMo Gym searches servers next to its own package, so the script links this
# repository's server folders there.
set -eu
cd "$(dirname "$0")/.."

extra=${1:-}
venv=.venv
cache=${PRORL_CACHE:-${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/nemo-gym-prorl}
any='(3, 12)'
newest='(3, 13, 14)' # required by NeMo Gym 0.5 or later; Gym 0.4 runs on older versions
started=$(date +%s)

say() { echo "==> $*"; }
fail() { echo "bootstrap: $*" >&2; exit 1; }

# Print the path of the interpreter $1 if its version is at least $2. Shims of version managers are resolved, because
# they depend on the working directory.
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

# Print the first interpreter of the versions $2..., at least $1, among those of the distribution, pyenv and uv.
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

# Let uv download a Python (30 MB). Without a network this fails at once, and the caller falls back to any version.
get_python() {
    uv=$(find_uv) || return
    UV_HTTP_TIMEOUT=10 UV_HTTP_RETRIES=0 "$uv" python install --quiet --no-bin 3.13 </dev/null >/dev/null 2>&1 || return
    interpreter "$("$uv" python find --no-project --managed-python 3.13)" "$newest"
}

# Print the path of uv: from PATH, else from the cache, else installed into the cache with the Python $1.
find_uv() {
    if command -v uv; then return; fi
    if [ -x "$cache/uv/bin/uv" ]; then echo "$cache/uv/bin/uv"; return; fi
    with=${1:-$(command -v python3)} || fail "no Python found: install python3"
    fresh=$cache/uv.$$
    mkdir -p "$cache"
    say "Installing uv into $cache/uv" >&2
    "$with" -m venv "$fresh" >&2 || { rm -rf "$fresh"; fail "'$with -m venv' failed: install uv, or python3-venv"; }
    "$fresh/bin/python" -m pip install --quiet --disable-pip-version-check uv >&2 ||
        { rm -rf "$fresh"; fail "pip could not install uv; see above, or install uv yourself"; }
    # A parallel bootstrap may have created the folder meanwhile; then its uv is used.
    mv -T "$fresh" "$cache/uv" 2>/dev/null || rm -rf "$fresh"
    echo "$cache/uv/bin/uv"
}

# Print everything on which an installation depends: interpreter, project file and launcher sources.
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
        # Remove links to servers that were removed from the repository.
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
# An environment with an extra also contains the packages for running.
[ -n "$extra" ] || stamps="$stamp $stamp-dev $stamp-bench"
for present in $stamps; do
    if is_current "$present"; then
        link_servers
        exit 0
    fi
done

# An existing environment keeps its interpreter unless PYTHON selects another.
[ -n "$python" ] || python=$(interpreter "$venv/bin/python" "$any" || find_python)
uv=$(find_uv "$python")
if [ -n "$python" ]; then
    export UV_PYTHON_DOWNLOADS=never
else
    say "No Python 3.12 or newer found: downloading one with uv"
    python=3.13
fi
if [ -e "$venv" ] && [ "$(interpreter "$venv/bin/python" "$any" || true)" != "$python" ]; then
    rm -rf "$venv"
fi
if [ ! -e "$venv" ]; then
    say "Creating $venv with $python"
    "$uv" venv --quiet --seed --python "$python" "$venv" ||
        fail "uv could not create $venv with Python $python; see above, or set PYTHON=/path/to/python"
fi
say "Installing nemo-gym-prorl${extra:+ with the extra '$extra'} (first time: 1.4 GB)"
# --reinstall-package: uv does not detect that the launcher's sources of an editable install have changed.
"$uv" pip install --python "$venv/bin/python" --reinstall-package nemo-gym-prorl --editable ".${extra:+[$extra]}"
link_servers
stamp_text > "$stamp"
say "$venv is ready after $(($(date +%s) - started)) s"
