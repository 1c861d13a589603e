#!/bin/bash
# A scenario on two nodes by torchrun, without a scheduler. Soon after one another:
#   on node-a:  bash torchrun.sh 0
#   on node-b:  bash torchrun.sh 1
# Node 0 then prints the verdict.
# Change: the name or address of node 0 that node 1 reaches, with a free port.
RENDEZVOUS=${RENDEZVOUS:-node-a:29500}
# Change: the scenario, of 2 x RANKS_PER_NODE ranks, at the same path on both nodes.
SCENARIO=${SCENARIO:-scenarios/mine.toml}
RANKS_PER_NODE=${RANKS_PER_NODE:-8}
# Change: a folder for results that both nodes see.
RESULTS=${RESULTS:-/shared/results}
BACKEND=${BACKEND:-nccl}  # gloo for nodes without GPUs
[ "$BACKEND" = nccl ] && DEVICE=cuda || DEVICE=cpu

torchrun --nnodes 2 --node-rank "$1" --nproc-per-node "$RANKS_PER_NODE" \
  --master-addr "${RENDEZVOUS%:*}" --master-port "${RENDEZVOUS##*:}" \
  -m zreal.worker "$SCENARIO" --device "$DEVICE" --timeout 600 \
  --results "$RESULTS/$(basename "$SCENARIO" .toml)"
code=$?
[ "$1" = 0 ] || exit $code

# Also after a failure: it names the rank at fault.
exec zsim validate "$SCENARIO" --against "$BACKEND" --save "$RESULTS" --launch gather
