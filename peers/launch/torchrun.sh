#!/usr/bin/env bash
# One island under torchrun. Start it on each of its nodes, in the folder of the project; what follows is what
# `diloco peer` takes.
#
#   one node    peers/launch/torchrun.sh --join HOST:4000 --site peers/node-8gpu.toml
#   more        export NODES=2 NODE_RANK=0 MASTER_ADDR=node-a    # on node-b the same with NODE_RANK=1
#               peers/launch/torchrun.sh --join HOST:4000 --site peers/cluster-ib.toml
#   pipeline    ... --set mesh.pp=2 --set mesh.micro_batches=4    # a stage on each of two nodes
#   CPU         RANKS_PER_NODE=2 peers/launch/torchrun.sh configs/quick.toml --site peers/cpu.toml --insecure
#
# Node 0 has rank 0, which talks to the world: MASTER_ADDR is that node's name inside the cluster. Ctrl-C or SIGTERM
# reaches all ranks; torchrun then waits 30 s for them, so keep the site's timeouts.leave_s (25) below.
#
# Checked: run on a CPU (gloo), with two ranks of one node and with two "nodes" of one rank on one machine, these
# also sharing a GPU (NCCL, `scripts/gpu-check`). Not run: several GPUs, more than one machine.
set -euo pipefail

nodes=${NODES:-1}
if [ "$nodes" -gt 1 ]; then
    : "${NODE_RANK:?is 0 on the first node, 1 on the second, ...}"
    : "${MASTER_ADDR:?is the name or address of the first node}"
    place=(--nnodes "$nodes" --node-rank "$NODE_RANK")
    place+=(--master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}")
else
    # As --standalone, but torchrun keeps its state in a file: it unpickles it, and anybody may write to a port.
    place=(--rdzv-backend c10d --rdzv-conf store_type=file,keep_alive_interval=600)
fi
exec torchrun "${place[@]}" --nproc-per-node "${RANKS_PER_NODE:-gpu}" -m diloco peer "$@"
