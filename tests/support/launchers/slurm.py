"""A launcher for tests, `python slurm.py N COMMAND…`: N copies of a command with srun's variables.
When one fails it ends the others, as `srun -K` does."""

from __future__ import annotations

import os
import subprocess
import sys
import time


def main() -> int:
    """Start the ranks and wait for them; returns the first exit code that is not 0."""
    number, command = int(sys.argv[1]), sys.argv[2:]
    step = str(os.getpid())
    ranks = [
        subprocess.Popen(command, env={
            **os.environ, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank),
            "SLURM_NTASKS": str(number), "SLURM_NODEID": "0", "SLURM_NNODES": "1",
            "SLURM_STEP_TASKS_PER_NODE": str(number), "SLURM_STEP_NODELIST": "localhost",
            "SLURM_JOB_ID": step, "SLURM_STEP_ID": "0",
            "NCCL_HOSTID": str(rank),  # NCCL refuses two ranks of one host on one GPU
        })
        for rank in range(number)
    ]
    failed = 0
    while any(rank.poll() is None for rank in ranks):
        bad = [code for rank in ranks if (code := rank.poll())]
        if bad and not failed:
            failed = bad[0]
            for rank in ranks:
                rank.terminate()
        time.sleep(0.05)
    return failed or next((rank.returncode for rank in ranks if rank.returncode), 0)


if __name__ == "__main__":
    sys.exit(main())
