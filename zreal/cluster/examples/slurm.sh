#!/bin/bash
# Every scenario of a folder on a Slurm cluster, a job step each: `sbatch slurm.sh`.
# Submitted again, it runs only what is not there yet.
# Change: nodes, GPUs and time, as the largest scenario's cluster has them; add your partition.
#SBATCH --job-name=zsim
#SBATCH --nodes=2
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=02:00:00
#SBATCH --output=zsim-%j.log
# Change: the environment with zsim[real], alike on all nodes.
source "${VENV:-$HOME/venv}/bin/activate"
# Change: scenarios, and a folder for results that all nodes see.
SCENARIOS=${SCENARIOS:-scenarios/mine}
RESULTS=${RESULTS:-results}
BACKEND=${BACKEND:-nccl}  # gloo for nodes without GPUs; then drop --gpus-per-node above and below

# Braces are filled per scenario. --kill-on-bad-exit ends the other ranks when one fails;
# --timeout is that of one scenario, in seconds.
exec zsim validate "$SCENARIOS" --against "$BACKEND" --save "$RESULTS" \
  --junit "$RESULTS/report.xml" --timeout 600 \
  --launch 'srun -N {nodes} --ntasks-per-node {ranks_per_node} --gpus-per-node {ranks_per_node}
            --cpu-bind none --kill-on-bad-exit {worker}'
