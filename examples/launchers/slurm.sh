#!/bin/bash
# A training on the nodes of a Slurm job, of whatever devices: sbatch --nodes 2 examples/launchers/slurm.sh train.py
# Of unlike nodes, as the components of a heterogeneous job:
#     sbatch --nodes 1 --gpus-per-node v100:2 : --nodes 1 --gpus-per-node t4:2 examples/launchers/slurm.sh train.py
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --signal=TERM@120 # so many seconds before the end; with WHALE_RUNTIME_SAVE_ON_SIGTERM=DIR the training saves
set -euo pipefail

# The nodes of the job, or of all its components, which srun takes together only where it is told to.
lists=() groups=()
for ((group = 0; group < ${SLURM_HET_SIZE:-0}; group++)); do
    list="SLURM_JOB_NODELIST_HET_GROUP_$group"
    lists+=("${!list}")
    groups=("--het-group=0-$group")
done
[ "${#lists[@]}" -gt 0 ] || lists=("$SLURM_JOB_NODELIST")
nodes="$(for list in "${lists[@]}"; do scontrol show hostnames "$list"; done)"

# One launcher per node; the first node's holds the rendezvous. Nodes may have unlike numbers of GPUs.
launch() {
    srun ${groups[@]+"${groups[@]}"} --ntasks-per-node=1 bash -c 'exec whale run --nnodes "$1" --node-rank "$SLURM_PROCID" \
        --rdzv-backend static --rdzv-endpoint "$0" --nproc-per-node "${RANKS:-gpu}" "${@:2}"' \
        "$(head -n 1 <<< "$nodes"):${PORT:-29500}" "$(wc -l <<< "$nodes")" "$@"
}

# What devices and links there are, once for each set of nodes; the file must be where all nodes see it.
cluster="${CLUSTER:-cluster-$(IFS=+ && echo "${lists[*]}").yaml}"
[ -e "$cluster" ] || launch -m whale probe --output "$cluster"

export WHALE_CLUSTER_FILE="$cluster"
launch "$@" || {
    code=$?
    [ "$code" -ne 143 ] || scontrol requeue "$SLURM_JOB_ID" # it was told to end, and goes on from its checkpoint
    exit "$code"
}
