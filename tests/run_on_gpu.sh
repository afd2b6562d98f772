#!/usr/bin/env bash
# Every test that a GPU can run, its ranks virtual, each file under a timeout of its own: a kernel whose
# peers find no room on the device ends only at its deadline. Full logs go to the folder given as argument.
set -u -o pipefail
cd "$(dirname "$0")/.."
logs=$(realpath -m "${1:-build/gpu-logs}")
mkdir -p "$logs"

export FLASHINFER_AR_TIMEOUT_S=20
export FLASHINFER_AR_STRESS_CALLS=${FLASHINFER_AR_STRESS_CALLS:-20000}
# Every rank has a stream of its own; with fewer hardware queues two streams could wait in one.
export CUDA_DEVICE_MAX_CONNECTIONS=32

nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
python3 -c 'import torch, cuda.bindings as b; from cuda.bindings import nvrtc
print("torch", torch.__version__, " cuda-bindings", b.__version__, " NVRTC", *nvrtc.nvrtcVersion()[1:])'

status=0
run() { # seconds, name, pytest arguments
  local seconds=$1 name=$2
  shift 2
  if ! timeout "$seconds" python3 -m pytest -q -p no:cacheprovider "$@" >"$logs/$name.log" 2>&1; then
    status=1
    grep -E '^(FAILED|ERROR|E  )' "$logs/$name.log" | head -20
  fi
  printf '%-12s %s\n' "$name" "$(tail -n 1 "$logs/$name.log")"
}

run 150 allreduce tests/test_allreduce.py -k cuda
run 90 streams tests/test_cuda.py
run 120 graphs tests/test_cuda_graphs.py
run 90 pdl tests/test_cuda_pdl.py
run 60 checkpoint tests/test_cuda_checkpoint.py tests/test_workspace_state.py -k "not host"
run 120 stress tests/test_stress.py -k cuda
run 60 timeout tests/test_timeout.py -k cuda
run 60 first-call tests/test_first_call.py -k cuda
run 200 processes tests/test_mpirun.py tests/test_torchrun.py tests/test_cuda_processes.py -k "not host"
run 60 launch-path tests/test_launch_path.py -k cuda
run 60 tune tests/test_tune.py tests/test_bench.py -k gpu
run 90 workspace tests/test_workspace.py tests/test_workspace_sizes.py tests/test_arguments.py -k cuda
exit $status
