#!/bin/bash
# A training on the nodes of a Slurm job, of whatever devices: sbatch --nodes 2 examples/launchers/slurm.sh train.py
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --signal=TERM@120 # so many seconds before the end; with WHALE_RUNTIME_SAVE_ON_SIGTERM=DIR the training saves
set -euo pipefail

# One launcher per node; the first node's holds the rendezvous. Nodes may have unlike numbers of GPUs.
launch() {
    srun bash -c 'exec whale run --nnodes "$SLURM_NNODES" --node-rank "$SLURM_NODEID" \
        --rdzv-backend static --rdzv-endpoint "$0" --nproc-per-node "${RANKS:-gpu}" "$@"' "$endpoint" "$@"
}
endpoint="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):${PORT:-29500}"

# What devices and links there are, once for each set of nodes; the file must be where all nodes see it.
cluster="${CLUSTER:-cluster-$SLURM_JOB_NODELIST.yaml}"
[ -e "$cluster" ] || launch -m whale probe --output "$cluster"

export WHALE_CLUSTER_FILE="$cluster"
launch "$@" || {
    code=$?
    [ "$code" -ne 143 ] || scontrol requeue "$SLURM_JOB_ID" # it was told to end, and goes on from its checkpoint
    exit "$code"
}
