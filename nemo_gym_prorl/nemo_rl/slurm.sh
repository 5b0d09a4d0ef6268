#!/usr/bin/env bash
# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
# Submits a recipe to Slurm, by NeMo RL's own ray.sub; docs/train-nemo-rl.md says what must be there before.
#
#   slurm.sh RECIPE [arguments of nemo_gym_prorl.nemo_rl.train]
#
# NRL_ROOT          folder of the NeMo RL checkout, with its submodules, on a file system that all nodes share
# CONTAINER         image of NeMo RL
# SLURM_ACCOUNT     to charge
# SLURM_PARTITION   with GPUs
# NODES             of the job (4); cluster.num_nodes is set to it
# GPUS_PER_NODE     (8); cluster.gpus_per_node is set to it
# TIME              of the job (4:0:0)
# MOUNTS            of the container; default: NRL_ROOT, the folder this is called in, PRORL_CACHE, and PRORL_PACKAGE
# PRORL_PACKAGE     this package, as a folder or a wheel that all nodes see; default: the clone that this lies in
# PRORL_CACHE       images and linked environments, shared by all nodes (.prorl in the folder this is called in)
set -euo pipefail

if (($# < 1)); then
    sed -n '3,/^set -/{/^#/s/^# \{0,1\}//p}' "$0" >&2
    exit 2
fi
for name in NRL_ROOT CONTAINER SLURM_ACCOUNT SLURM_PARTITION; do
    if [[ -z "${!name:-}" ]]; then
        echo "$name is not set; $0 without arguments says what it is." >&2
        exit 2
    fi
done
for name in NODES GPUS_PER_NODE; do
    if [[ ! "${!name:-1}" =~ ^[1-9][0-9]*$ ]]; then
        echo "$name: ${!name} is no number from 1." >&2
        exit 2
    fi
done
NRL_ROOT=$(realpath -m -- "$NRL_ROOT")
if [[ ! -f "$NRL_ROOT/ray.sub" ]]; then
    echo "NRL_ROOT: there is no ray.sub in $NRL_ROOT." >&2
    exit 2
fi
if [[ ! -f "$NRL_ROOT/3rdparty/Gym-workspace/Gym/pyproject.toml" ]]; then
    echo "NRL_ROOT: NeMo Gym is not in $NRL_ROOT; git -C $NRL_ROOT submodule update --init --recursive." >&2
    exit 2
fi
package=${PRORL_PACKAGE:-$(cd "$(dirname "$0")/../.." && pwd)}
if [[ ! -f "$package" && ! -f "$package/pyproject.toml" ]]; then
    echo "PRORL_PACKAGE: $package is neither a clone of this package nor a wheel." >&2
    exit 2
fi

recipe=$1
shift
if [[ "$recipe" == -* ]]; then
    echo "The first argument is the recipe, not $recipe." >&2
    exit 2
fi
here=$PWD
nodes=${NODES:-4}
gpus=${GPUS_PER_NODE:-8}
cache=$(realpath -m -- "${PRORL_CACHE:-$here/.prorl}")
mkdir -p "$cache"

quoted() { printf '%q ' "$@"; }

# The Gym that this NeMo RL was made with, and this package, in the environment that starts everything.
SETUP_COMMAND="cd $(quoted "$NRL_ROOT") && uv pip install --python \"\${UV_PROJECT_ENVIRONMENT:-.venv}\" "
SETUP_COMMAND+="-e 3rdparty/Gym-workspace/Gym $(quoted "$package[math,stem,swe]")"
COMMAND="cd $(quoted "$here") && export NRL_ROOT=$(quoted "$NRL_ROOT")PRORL_CACHE=$(quoted "$cache")&& "
COMMAND+="uv run --no-sync --project $(quoted "$NRL_ROOT")python -m nemo_gym_prorl.nemo_rl.train "
COMMAND+="--config $(quoted "$recipe" "$@" "++cluster.num_nodes=$nodes" "++cluster.gpus_per_node=$gpus")"
MOUNTS=${MOUNTS:-$NRL_ROOT:$NRL_ROOT,$here:$here,$cache:$cache,$package:$package}
BASE_LOG_DIR=${BASE_LOG_DIR:-$here}
GPUS_PER_NODE=$gpus
export SETUP_COMMAND COMMAND CONTAINER MOUNTS BASE_LOG_DIR GPUS_PER_NODE

cd "$NRL_ROOT"
exec sbatch --nodes="$nodes" --account="$SLURM_ACCOUNT" --partition="$SLURM_PARTITION" --time="${TIME:-4:0:0}" \
    --gres="gpu:$gpus" --job-name="$(basename "$recipe" .yaml)" ray.sub
