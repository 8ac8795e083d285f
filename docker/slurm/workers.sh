#!/bin/bash
#SBATCH --job-name=rollout-workers
#SBATCH --array=0-31
#SBATCH --gpus=1
#SBATCH --requeue
#SBATCH --signal=B:TERM@120
# More workers for a run that goes on elsewhere, on whatever GPUs are free for a while: they may come and go.
set -euo pipefail
: "${REDIS_URL:?the server of the run, for example redis://:PASSWORD@host:6379/0}"
CONFIG=${CONFIG:-configs/my_run.toml}
PATH=$PWD/.venv/bin:$PATH
rolloutmq worker "$CONFIG" --id "slurm-$SLURM_JOB_ID" &
worker=$!
# SIGTERM drains: what runs is finished or handed back
trap 'kill -TERM $worker' TERM
wait $worker || wait $worker
