"""The g++ and NVRTC back ends on tiny sources; neither needs a GPU."""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flashinfer_ar.errors import JitError
from flashinfer_ar.jit import cache, gxx, nvrtc

ENTRY = 'extern "C" __attribute__((visibility("default"))) '

try:
    nvrtc._identity()
    MISSING = ""
except JitError as error:
    MISSING = str(error)
needs_nvrtc = pytest.mark.skipif(bool(MISSING), reason=MISSING)


@pytest.fixture(autouse=True)
def include(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHINFER_AR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("FLASHINFER_AR_CXX", raising=False)
    monkeypatch.delenv("FLASHINFER_AR_CUDA_ARCHS", raising=False)
    monkeypatch.setattr(cache, "include_dir", lambda: tmp_path / "include")
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "answer.cuh").write_text("constexpr int kAnswer = 42;\n")
    return tmp_path / "include"


def load(name, source):
    return ctypes.CDLL(str(gxx.build_shared_object(name, source)))


def must_not_run(*arguments, **keywords):
    raise AssertionError("a warm start ran a compiler")


# g++


def test_gxx_builds_against_the_headers_and_hides_the_rest():
    library = load(
        "answer",
        f"""#include "answer.cuh"
        static_assert(__cplusplus >= 202002L);
        {ENTRY}int f() {{ return kAnswer; }}
        int g() {{ return 1; }}""",
    )
    assert library.f() == 42
    assert not any(hasattr(library, name) for name in ("g", "_Z1gv"))


def test_gxx_rounds_every_product():
    probe = """
#ifdef __x86_64__
    __attribute__((target("fma")))
#endif
    float multiply_add(float a, float b, float c) { return a * b + c; }
    """
    binary = gxx.build_shared_object("fma", f"{ENTRY}{probe}")
    code = subprocess.run(["objdump", "-d", binary], capture_output=True, text=True, check=True)
    assert "multiply_add" in code.stdout
    assert "fmadd" not in code.stdout


def test_gxx_instances_share_no_statics():
    source = f"""
    __attribute__((visibility("default"))) inline int count = 0;
    {ENTRY}int next() {{ return ++count; }}
    """
    first, second = load("one", source), load("two", source)
    assert [first.next(), first.next(), second.next()] == [1, 2, 1]


def test_gxx_warm_start_runs_no_compiler(monkeypatch):
    binary = gxx.build_shared_object("warm", "int x;")
    monkeypatch.setattr(subprocess, "run", must_not_run)
    assert gxx.build_shared_object("warm", "int x;") == binary


def test_gxx_find(monkeypatch):
    assert gxx.find_shared_object("found", "int x;") is None
    binary = gxx.build_shared_object("found", "int x;")
    assert gxx.find_shared_object("found", "int x;") == binary


def compiler_script(path, monkeypatch, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    monkeypatch.setenv("FLASHINFER_AR_CXX", str(path))


def test_gxx_another_compiler_rebuilds(tmp_path, monkeypatch):
    compiler_script(tmp_path / "cxx", monkeypatch, 'exec g++ "$@"')
    first = gxx.build_shared_object("same", "int x;")
    compiler_script(tmp_path / "cxx", monkeypatch, 'exec g++ "$@" -O1')
    assert gxx.build_shared_object("same", "int x;") != first


def test_gxx_compiler_named_relatively(tmp_path, monkeypatch):
    compiler_script(tmp_path / "cxx", monkeypatch, 'exec g++ "$@"')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLASHINFER_AR_CXX", "./cxx")
    assert gxx.build_shared_object("relative", "int x;").is_file()


def test_gxx_missing_compiler_is_named(monkeypatch):
    monkeypatch.setenv("FLASHINFER_AR_CXX", "no-such-g++")
    with pytest.raises(JitError, match=r"'no-such-g\+\+'.*apt-get install g\+\+"):
        gxx.build_shared_object("x", "int x;")


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo gone; exit 7", "ended with status 7"),
        ("exec sleep 30", "took more than"),
        ("kill -9 $$", "ended with status -9"),
    ],
)
def test_gxx_compiler_that_fails(tmp_path, monkeypatch, script, reason):
    compiler_script(tmp_path / "cxx", monkeypatch, script)
    monkeypatch.setattr(gxx, "_TIMEOUT_S", 0.3)
    with pytest.raises(JitError, match=reason):
        gxx.build_shared_object("x", "int x;")


def test_gxx_error_is_shown_and_its_command_runs_again(tmp_path):
    with pytest.raises(JitError) as caught:
        gxx.build_shared_object("broken", "int f() { return missing_name; }")
    lines = dict(line.split(":", 1) for line in str(caught.value).splitlines()[:4])
    assert "missing_name" in str(caught.value)
    source = Path(lines["source"].strip())
    assert source.read_text() == "int f() { return missing_name; }"
    again = subprocess.run(
        lines["command"], shell=True, cwd=source.parent, capture_output=True, text=True, check=False
    )
    assert again.returncode == 1
    assert "missing_name" in again.stderr


# Targets


@pytest.mark.parametrize(
    ("arch", "target"),
    [
        ("9.0a", "sm_90a"),
        (" 9.0", "sm_90a"),
        ("sm_90a", "sm_90a"),
        ("10.0a", "sm_100a"),
        ("sm_100", "sm_100a"),
        ("10.3a", "sm_103a"),
    ],
)
def test_target_of_arch(arch, target):
    assert nvrtc.target_of_arch(arch) == target


@pytest.mark.parametrize("arch", ["8.9", "sm_89", "12.0a", "9.0b", "90", "9.0+PTX", "", "10.0f"])
def test_other_archs_are_refused_by_name(arch):
    with pytest.raises(ValueError, match=r"allowed: 9\.0a, 10\.0a, 10\.3a") as caught:
        nvrtc.target_of_arch(arch)
    assert repr(arch) in str(caught.value)


def test_target_of_device():
    assert [nvrtc.target_of_device(*c) for c in ((9, 0), (10, 0), (10, 3))] == [
        *nvrtc.SUPPORTED_TARGETS
    ]
    with pytest.raises(ValueError, match=r"compute capability 8\.9"):
        nvrtc.target_of_device(8, 9)


@pytest.mark.parametrize(
    ("listed", "targets"),
    [
        ("9.0a", ("sm_90a",)),
        ("9.0a;10.0a", ("sm_90a", "sm_100a")),
        ("10.0,9.0a;10.0a", ("sm_100a", "sm_90a")),
        ("", nvrtc.SUPPORTED_TARGETS),
        (";", nvrtc.SUPPORTED_TARGETS),
    ],
)
def test_requested_targets(monkeypatch, listed, targets):
    monkeypatch.setenv("FLASHINFER_AR_CUDA_ARCHS", listed)
    assert nvrtc.requested_targets() == targets


def test_requested_target_that_is_not_supported(monkeypatch):
    monkeypatch.setenv("FLASHINFER_AR_CUDA_ARCHS", "9.0a;8.9")
    with pytest.raises(ValueError, match=r"'8\.9'"):
        nvrtc.requested_targets()


# NVRTC

KERNEL = """#include "answer.cuh"
static_assert(__cplusplus >= 202002L);
struct Params { float* out; float factor; };
extern "C" __global__ void kernel(const __grid_constant__ Params p) {
  __shared__ float s[64];
  s[threadIdx.x] = p.out[threadIdx.x] * p.factor + kAnswer;
  __syncthreads();
  p.out[threadIdx.x] = s[threadIdx.x ^ 1];
}
"""

# An array that its index keeps out of registers.
GREEDY = """
extern "C" __global__ void kernel(int* x) {
  int a[100];
  for (int i = 0; i < 100; ++i) a[i] = x[i];
  x[0] = a[x[1] % 100];
}
extern "C" __global__ void other(int* x) { x[0] = 1; }
"""


@needs_nvrtc
@pytest.mark.parametrize("target", nvrtc.SUPPORTED_TARGETS)
def test_nvrtc_builds_every_target(target):
    binary = nvrtc.build_cubin("probe", KERNEL, target)
    assert binary.read_bytes()[:4] == b"\x7fELF"
    usage = nvrtc.resource_usage(binary)
    assert 0 < usage.registers < 40
    assert (usage.stack_frame_bytes, usage.spill_store_bytes, usage.spill_load_bytes) == (0, 0, 0)
    assert usage.shared_bytes >= 64 * 4


@needs_nvrtc
def test_nvrtc_reports_local_memory_and_spills():
    usage = nvrtc.resource_usage(nvrtc.build_cubin("greedy", GREEDY, "sm_90a"))
    assert usage.stack_frame_bytes == 400
    limited = GREEDY.replace("void kernel", "void __launch_bounds__(1024, 2) kernel").replace(
        "x[0] = a[x[1] % 100];", "__syncthreads(); for (int i = 0; i < 100; ++i) x[i + 1] = a[i];"
    )
    usage = nvrtc.resource_usage(nvrtc.build_cubin("spilling", limited, "sm_90a"))
    assert usage.registers == 32
    assert usage.spill_store_bytes > 0
    assert usage.spill_load_bytes > 0


@needs_nvrtc
def test_nvrtc_warm_start_runs_no_compiler(monkeypatch):
    binary = nvrtc.build_cubin("probe", KERNEL, "sm_90a")
    monkeypatch.setattr(nvrtc, "_compile", must_not_run)
    assert nvrtc.build_cubin("probe", KERNEL, "sm_90a") == binary


# What a fresh process finds, whether NVRTC is then in its memory, and both ways to identify it.
WARM_START = """
import json, sys
from pathlib import Path
from flashinfer_ar.jit import cache, nvrtc
cache.include_dir = lambda: Path(sys.argv[1])
told_by_wheel = nvrtc._wheel_identity()
found = str(nvrtc.build_cubin("probe", sys.argv[2], "sm_90a"))
loaded = "libnvrtc" in Path("/proc/self/maps").read_text()
print(json.dumps([found, loaded, told_by_wheel, nvrtc._identity()]))
"""


@needs_nvrtc
def test_nvrtc_warm_start_of_a_process_does_not_load_it(include):
    binary = nvrtc.build_cubin("probe", KERNEL, "sm_90a")
    done = subprocess.run(
        [sys.executable, "-c", WARM_START, str(include), KERNEL],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found, loaded, told_by_wheel, told_by_library = json.loads(done.stdout)
    assert found == str(binary)
    if told_by_wheel is None:
        pytest.skip("NVRTC comes from no wheel, or from several: only loading it tells which it is")
    assert told_by_wheel == told_by_library
    assert not loaded


# As a torch for CUDA does, something loads NVRTC first; then a kernel is found.
WARM_START_LOADED = """
import ctypes, sys
from pathlib import Path
ctypes.CDLL(sys.argv[3], mode=ctypes.RTLD_GLOBAL)
from flashinfer_ar.jit import cache, nvrtc
cache.include_dir = lambda: Path(sys.argv[1])
print(nvrtc.find_cubin("probe", sys.argv[2], "sm_90a"), "cuda.bindings.nvrtc" in sys.modules)
"""


@needs_nvrtc
def test_nvrtc_warm_start_asks_a_loaded_one_without_its_binding(include):
    binary = nvrtc.build_cubin("probe", KERNEL, "sm_90a")
    library = importlib.import_module("cuda.pathfinder").load_nvidia_dynamic_lib("nvrtc").abs_path
    done = subprocess.run(
        [sys.executable, "-c", WARM_START_LOADED, str(include), KERNEL, library],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(binary), "False"]


@needs_nvrtc
def test_nvrtc_that_is_loaded_already_is_asked_itself():
    nvrtc.library_facts()
    nvrtc._wheel_identity.cache_clear()
    nvrtc._identity_of_loaded.cache_clear()
    assert nvrtc._wheel_identity() is None
    assert nvrtc._identity_of_loaded() == nvrtc._identity()


@needs_nvrtc
def test_nvrtc_find():
    assert nvrtc.find_cubin("probe", KERNEL, "sm_90a") is None
    binary = nvrtc.build_cubin("probe", KERNEL, "sm_90a")
    assert nvrtc.find_cubin("probe", KERNEL, "sm_90a") == binary
    assert nvrtc.find_cubin("probe", KERNEL, "sm_100a") is None


@needs_nvrtc
def test_nvrtc_ptx_rounds_every_product_and_knows_its_lines():
    ptx = nvrtc.compile_ptx(KERNEL, "sm_90a")
    assert ".target sm_90a" in ptx
    assert ".loc" in ptx
    assert "mul.f32" in ptx or "mul.rn.f32" in ptx
    assert "fma" not in ptx


@needs_nvrtc
def test_nvrtc_includes_nothing_from_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "answer.cuh").write_text("#error found in the working directory\n")
    nvrtc.compile_ptx(KERNEL, "sm_90a")


@needs_nvrtc
@pytest.mark.parametrize("build", [nvrtc.compile_ptx, lambda *a: nvrtc.build_cubin("broken", *a)])
def test_nvrtc_error_is_shown(build, tmp_path):
    with pytest.raises(JitError) as caught:
        build("int f() { return missing_name; }", "sm_90a")
    for part in ("NVRTC_ERROR_COMPILATION", "missing_name", "-arch=sm_90a"):
        assert part in str(caught.value)


@needs_nvrtc
def test_nvrtc_log_without_a_report(tmp_path):
    (tmp_path / cache.LOG_NAME).write_text("nothing\n")
    with pytest.raises(JitError, match="no resource report"):
        nvrtc.resource_usage(tmp_path / "kernel.cubin")


@needs_nvrtc
def test_nvrtc_other_target_is_refused():
    with pytest.raises(ValueError, match="'sm_89'"):
        nvrtc.build_cubin("probe", KERNEL, "sm_89")


@pytest.mark.parametrize("module", ["cuda.bindings.nvrtc", "cuda.pathfinder"])
def test_nvrtc_missing_is_named(monkeypatch, module):
    monkeypatch.setitem(sys.modules, module, None)
    nvrtc.library_facts.cache_clear()
    with pytest.raises(JitError, match="pip install cuda-bindings nvidia-cuda-nvrtc"):
        nvrtc.build_cubin("probe", KERNEL, "sm_90a")
