#!/usr/bin/env bash
# What takes a GPU for each rank: the tests between processes, then times, on the GPUs of one host.
# Full logs go to the folder given as argument. On one GPU this is a rehearsal: two processes take turns.
set -u -o pipefail
cd "$(dirname "$0")/.."
logs=$(realpath -m "${1:-build/gpus-logs}")
mkdir -p "$logs"

# NVLink multicast stays off: our own code honours the switches of the others.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
export FLASHINFER_AR_TIMEOUT_S=20
export FLASHINFER_AR_STRESS_CALLS=${FLASHINFER_AR_STRESS_CALLS:-20000}

num_gpus=$(nvidia-smi --list-gpus | wc -l)
num_ranks=$num_gpus
rounds=21 tokens=1,4,16,32,128,512
if [ "$num_gpus" -lt 2 ]; then
  echo "one GPU: a rehearsal with two processes on it, whose times mean nothing"
  export FLASHINFER_AR_ALLOW_SHARED_DEVICE=1
  num_ranks=2 rounds=2 tokens=1
fi
ranks() { # seconds, name, command
  local seconds=$1 name=$2
  shift 2
  echo "== $name"
  timeout "$seconds" mpirun --allow-run-as-root --oversubscribe --bind-to none -np "$num_ranks" "$@" \
    >"$logs/$name.log" 2>&1 || { status=1; echo "failed, see $name.log"; }
  tail -n 25 "$logs/$name.log"
}

status=0
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
nvidia-smi topo -m >"$logs/topology.log" 2>&1
echo "== tests"
timeout 400 python3 -m pytest -q -p no:cacheprovider tests/test_mpirun.py tests/test_torchrun.py \
  tests/test_cuda_processes.py -k "not host" >"$logs/tests.log" 2>&1 || status=1
grep -E '^(FAILED|ERROR|E  )' "$logs/tests.log" | head -20
tail -n 1 "$logs/tests.log"
ranks 60 doctor python3 -m flashinfer_ar.cli doctor
ranks 120 bench-fused python3 -m flashinfer_ar.cli bench --tokens "$tokens" --rounds "$rounds"
ranks 120 bench-plain python3 -m flashinfer_ar.cli bench --plain --tokens "$tokens" --rounds "$rounds"
if [ "$num_gpus" -gt 1 ]; then
  ranks 180 tune python3 -m flashinfer_ar.cli tune --out "$logs/sm_90a.json"
else
  echo "== tune: refuses processes that share a GPU, so it is not rehearsed"
fi
exit $status
