#!/usr/bin/env bash
# flashinfer_ar on one machine: a node with several GPUs, a workstation, or no GPU at all.
# Run without a GPU. NOT RUN ON SEVERAL GPUs.
#
#   examples/jobs/torchrun_node.sh [RANKS]
#
# RANKS, for doctor only, is the number of GPUs by default, and 3 without one.
set -euo pipefail

cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.."
export PATH="$PWD/.venv/bin:$PATH"

num_gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
ranks=${1:-$((num_gpus > 0 ? num_gpus : 3))}

# With fewer GPUs than ranks, ranks have to share one. Right results, some milliseconds a call.
if ((num_gpus > 0 && (num_gpus < 3 || num_gpus < ranks))); then
  export FLASHINFER_AR_ALLOW_SHARED_DEVICE=1
fi

# 1. What the machine can do, compared between the ranks.
torchrun --standalone --nproc-per-node "$ranks" --no-python flashinfer-ar doctor

# 2. The example. (The model has 9 attention heads and 3 key/value heads, so it takes 3 ranks.)
torchrun --standalone --nproc-per-node 3 examples/serve_smollm2.py
