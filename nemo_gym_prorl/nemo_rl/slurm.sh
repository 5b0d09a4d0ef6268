#!/usr/bin/env bash
# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
# Submit a recipe to Slurm with NeMo RL's ray.sub. docs/train-nemo-rl.md lists the prerequisites.
#
#   slurm.sh RECIPE [arguments of nemo_gym_prorl.nemo_rl.train]
#
# NRL_ROOT          folder of the NeMo RL checkout, with its submodules, on a file system that all nodes share
# CONTAINER         image of NeMo RL
# SLURM_ACCOUNT     account to charge
# SLURM_PARTITION   partition with GPUs
# NODES             number of nodes (4); sets cluster.num_nodes
# GPUS_PER_NODE     GPUs of a node (8); sets cluster.gpus_per_node
# TIME              time limit of the job (4:0:0)
# MOUNTS            mounts of the container (NRL_ROOT, the working directory, PRORL_CACHE, and PRORL_PACKAGE)
# PRORL_PACKAGE     this package as a folder or a wheel that all nodes can read (the clone that contains this script)
# PRORL_CACHE       images and linked environments, shared by all nodes (.prorl in the working directory)
set -euo pipefail

if (($# < 1)); then
    sed -n '4,/^set -/{/^#/s/^# \{0,1\}//p}' "$0" >&2
    exit 2
fi
for name in NRL_ROOT CONTAINER SLURM_ACCOUNT SLURM_PARTITION; do
    if [[ -z "${!name:-}" ]]; then
        echo "$name is not set; run $0 without arguments for its description." >&2
        exit 2
    fi
done
for name in NODES GPUS_PER_NODE; do
    if [[ ! "${!name:-1}" =~ ^[1-9][0-9]*$ ]]; then
        echo "$name: ${!name} is not a positive integer." >&2
        exit 2
    fi
done
NRL_ROOT=$(realpath -m -- "$NRL_ROOT")
if [[ ! -f "$NRL_ROOT/ray.sub" ]]; then
    echo "NRL_ROOT: there is no ray.sub in $NRL_ROOT; set it to a NeMo RL checkout." >&2
    exit 2
fi
if [[ ! -f "$NRL_ROOT/3rdparty/Gym-workspace/Gym/pyproject.toml" ]]; then
    echo "NRL_ROOT: NeMo Gym is not in $NRL_ROOT; run: git -C $NRL_ROOT submodule update --init --recursive" >&2
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
    echo "The first argument must be a recipe, not $recipe." >&2
    exit 2
fi
here=$PWD
nodes=${NODES:-4}
gpus=${GPUS_PER_NODE:-8}
cache=$(realpath -m -- "${PRORL_CACHE:-$here/.prorl}")
mkdir -p "$cache"

quoted() { printf '%q ' "$@"; }

# Install the Gym of this NeMo RL checkout and this package in the environment of the driver.
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
