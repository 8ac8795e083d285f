#!/bin/bash
#SBATCH --job-name=rollout-workers
#SBATCH --array=0-31
#SBATCH --ntasks=1
#SBATCH --gpus=1
#SBATCH --cpus-per-task=8
#SBATCH --requeue
#SBATCH --signal=B:TERM@120
# More workers for a run that exists, on whatever GPUs are free for a while; each may start and end at any time.
set -euo pipefail
REDIS_URL=${REDIS_URL:-$(cat runs/server/url)}
export REDIS_URL
CONFIG=${CONFIG:-configs/my_run.toml}
PATH=$PWD/.venv/bin:$PATH
rolloutmq worker "$CONFIG" --id "slurm-$SLURM_JOB_ID" &
worker=$!
# SIGTERM drains: what runs is finished or released; a second `wait`, since the signal ends the first one
trap 'kill -TERM $worker' TERM
wait $worker || wait $worker
