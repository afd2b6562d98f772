"""The command ``flashinfer-ar``: what it builds, what it says, what it refuses."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import click
import pytest
import torch
from harness import check, random_call
from typer.testing import CliRunner

from flashinfer_ar import jit
from flashinfer_ar.calls import Calls, Settings
from flashinfer_ar.cli import app
from flashinfer_ar.errors import JitError
from flashinfer_ar.jit import DType
from flashinfer_ar.launch.host import HostSubstrate
from flashinfer_ar.strategy import OneShotLimits

ONE_RANK = ("--world-size", "2", "--rank", "1", "--arch", "9.0a")


def run(*arguments: str, exit_code: int = 0) -> str:
    """All that ``flashinfer-ar build`` printed, on one line and without colors and frames."""
    result = CliRunner().invoke(app, ["build", *arguments])
    assert result.exit_code == exit_code, result.output
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", click.unstyle(result.output)).split())


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLASHINFER_AR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("FLASHINFER_AR_CUDA_ARCHS", raising=False)
    return tmp_path / "cache"


@pytest.fixture
def asked(cache: Path, monkeypatch: pytest.MonkeyPatch) -> list[jit.KernelSpec]:
    """The kernels that the command wanted; none is compiled."""
    specs = []

    def build(spec: jit.KernelSpec) -> Path:
        specs.append(spec)
        return cache / spec.name / "kernel"

    monkeypatch.setattr(jit, "build", build)
    return specs


def test_second_run_compiles_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = (*ONE_RANK, "--hidden-size", "4096", "--dtype", "bfloat16")
    said = run(*arguments)
    expected = rf"(\d+) kernels: \1 compiled, 0 already there; \d+\.\d s; in {cache}"
    num_kernels = int(re.fullmatch(expected, said)[1])
    built = [path.parent.name.rpartition("-")[0] for path in cache.glob("*/kernel.cubin")]
    assert len(built) == num_kernels
    assert {"oneshot_none_float16_w2_r1_hany", "twoshot_add_rms_norm_bfloat16_w2_r1_h4096"} < {
        *built
    }

    monkeypatch.setattr("flashinfer_ar.jit.nvrtc._compile", None)
    there = f"{num_kernels} already there;"
    assert run(*arguments).startswith(f"{num_kernels} kernels: 0 compiled, {there}")
    # One more shape of the same workspace: what is there is not counted as compiled.
    monkeypatch.undo()
    monkeypatch.setenv("FLASHINFER_AR_CACHE_DIR", str(cache))
    said = run(*arguments, "--hidden-size", "64", "--workers", "1")
    total, num_compiled = map(int, re.match(r"(\d+) kernels: (\d+) compiled,", said).groups())
    assert said.startswith(f"{total} kernels: {num_compiled} compiled, {there}")
    assert num_compiled == total - num_kernels > 0


# ---- What is built ------------------------------------------------------------------------------


class Loads:
    """A GPU's substrate and memory, as far as loading needs them."""

    target = "sm_90a"
    compiles_rank = True
    multicast = None

    def __init__(self) -> None:
        self.specs: list[jit.KernelSpec] = []

    def load(self, spec: jit.KernelSpec, binary: Path) -> Loads:
        assert binary == built(spec)
        self.specs.append(spec)
        return self

    def max_resident_clusters(self) -> int:
        return sys.maxsize


def built(spec: jit.KernelSpec) -> Path:
    return Path(spec.name, "kernel")


def loaded_by_workspaces(world_size: int, hidden_size: int | None, dtype: DType) -> set:
    loads = Loads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jit, "build_all", lambda specs: list(map(built, specs)))
        load_on_all_ranks(loads, world_size, hidden_size, dtype)
    return set(loads.specs)


def load_on_all_ranks(loads: Loads, world_size: int, hidden_size: int | None, dtype: DType) -> None:
    for rank in range(world_size):
        settings = Settings(
            world_size=world_size, rank=rank, hidden_size=hidden_size, dtype=dtype,
            generation_bytes=16, ranks_on_device=1, max_ctas=None, timeout_ns=1,
            one_shot_limits=OneShotLimits(0, 0),
        )  # fmt: skip
        Calls(settings, loads, loads).load_ahead()


@pytest.mark.parametrize("hidden_size", [None, 7168])
def test_builds_what_workspaces_on_gpus_load(
    hidden_size: int | None, asked: list[jit.KernelSpec]
) -> None:
    given = () if hidden_size is None else ("--hidden-size", str(hidden_size))
    run("--world-size", "3", "--arch", "9.0a", "--dtype", "float16", *given)
    assert set(asked) == loaded_by_workspaces(3, hidden_size, DType.FLOAT16)
    assert len(asked) == len(set(asked))
    own = [spec for spec in asked if spec.hidden_size is not None]
    assert len(asked) - len(own) == 3 * 12  # each kind, plain and fused, for three dtypes
    assert bool(own) == (hidden_size is not None)


def test_builds_what_ranks_on_the_host_use(
    asked: list[jit.KernelSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    run("--world-size", "2", "--arch", "host", "--hidden-size", "64", "--dtype", "bfloat16")
    assert {spec.rank for spec in asked} == {None}
    wanted = set(asked)
    assert len(wanted) == 2 * (3 + 1)  # kinds, each plain for every dtype and fused for this shape
    monkeypatch.undo()  # the real cache and build
    used = []
    load = HostSubstrate.load
    monkeypatch.setattr(
        HostSubstrate,
        "load",
        lambda self, spec, binary: used.append(spec) or load(self, spec, binary),
    )
    calls = [random_call(2, 3, 64, torch.bfloat16, fused=fused) for fused in (False, True)]
    check(2, calls, torch.device("cpu"), hidden_dim=64, dtype=torch.bfloat16)
    assert used and set(used) <= wanted


def test_a_hidden_size_too_large_for_rmsnorm_has_no_kernel_of_its_own() -> None:
    """A workspace takes it all the same, for plain allreduce."""
    assert loaded_by_workspaces(1, 2**19, DType.FLOAT16) == loaded_by_workspaces(
        1, None, DType.FLOAT16
    )


@pytest.mark.parametrize(
    ("variable", "given", "targets"),
    [
        ("", (), {"sm_90a", "sm_100a", "sm_103a"}),
        ("9.0a;10.0a", (), {"sm_90a", "sm_100a"}),
        ("9.0a", ("--arch", "10.3", "--arch", "host"), {"sm_103a", "host"}),
    ],
)
def test_targets(
    variable: str,
    given: tuple[str, ...],
    targets: set[str],
    asked: list[jit.KernelSpec],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FLASHINFER_AR_CUDA_ARCHS", variable)
    run("--world-size", "2", *given)
    assert {spec.target for spec in asked} == targets


def test_every_combination_once(asked: list[jit.KernelSpec]) -> None:
    line = "--world-size 2 --world-size 4 --rank 1 --rank 1 --arch 9.0a --arch sm_90a "
    line += "--hidden-size 64 --hidden-size 128 --dtype float16 --dtype bfloat16"
    run(*line.split())
    assert len(asked) == len(set(asked))
    assert {(spec.world_size, spec.rank) for spec in asked} == {(2, 1), (4, 1)}
    own = {(spec.hidden_size, spec.dtype) for spec in asked if spec.hidden_size}
    assert own == {(size, dtype) for size in (64, 128) for dtype in (DType.FLOAT16, DType.BFLOAT16)}


@pytest.mark.parametrize("option", [(), ("--multicast",)])
def test_multicast_kernels(option: tuple[str, ...], asked: list[jit.KernelSpec]) -> None:
    run("--world-size", "2", "--arch", "9.0a", *option)
    assert {spec.multicast for spec in asked} == {bool(option)}


# ---- What is refused, and failures --------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "Missing option '--world-size'"),
        ("--world-size 73", "'--world-size': '73'; allowed is a whole number from 1 to 72"),
        ("--world-size 0", "'--world-size': '0'; allowed is a whole number from 1 to 72"),
        ("--world-size two", "'--world-size': 'two'; allowed is a whole number from 1 to 72"),
        ("--world-size 2 --arch 8.9",
         "'--arch': arch='8.9' is not supported; allowed: 9.0a, 10.0a, 10.3a, host"),
        ("--world-size 4 --world-size 2 --rank 2",
         "'--rank': 2; allowed with --world-size 2 is 0 to 1"),
        ("--world-size 2 --rank -1", "'--rank': '-1'; allowed is a whole number from 0"),
        ("--world-size 2 --hidden-size 60 --dtype bfloat16",
         "'--hidden-size': 60; allowed with bfloat16 is a multiple of 8 up to 65536"),
        ("--world-size 2 --hidden-size 65536",
         "'--hidden-size': 65536; allowed with float32 is a multiple of 4 up to 32768"),
        ("--world-size 2 --hidden-size 0",
         "'--hidden-size': '0'; allowed is a whole number from 1"),
        ("--world-size 2 --multicast --arch host",
         "'--multicast': allowed for GPUs only, not for host"),
        ("--world-size 2 --workers 0", "'--workers': '0'; allowed is a whole number from 1"),
    ],
)  # fmt: skip
def test_refused_values(arguments: str, message: str, asked: list[jit.KernelSpec]) -> None:
    assert message in run(*arguments.split(), exit_code=2)
    assert not asked


def test_refused_dtype(asked: list[jit.KernelSpec]) -> None:
    said = run("--world-size", "2", "--dtype", "int8", exit_code=2)
    for part in ("'--dtype'", "int8", "float32", "float16", "bfloat16"):
        assert part in said


def test_refused_variable(asked: list[jit.KernelSpec], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHINFER_AR_CUDA_ARCHS", "9.0a;8.9")
    said = run("--world-size", "2", exit_code=2)
    assert "FLASHINFER_AR_CUDA_ARCHS: arch='8.9' is not supported; allowed: 9.0a" in said


def test_failed_build_ends_the_run(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def build(spec: jit.KernelSpec) -> Path:
        tried.append(spec)
        time.sleep(0.01)
        raise JitError(f"building {spec.name} failed")

    monkeypatch.setattr(jit, "build", build)
    said = run("--world-size", "72", "--arch", "9.0a", "--workers", "1", exit_code=1)
    assert said == "Error: building oneshot_none_float32_w72_r0_hany failed"
    assert len(tried) < 72  # of 864


def test_unusable_cache_folder(cache: Path, asked: list[jit.KernelSpec]) -> None:
    cache.write_text("a file")
    said = run(*ONE_RANK, exit_code=1)
    assert said.startswith("Error: FLASHINFER_AR_CACHE_DIR: ") and str(cache) in said
    assert not asked


def test_kernels_that_went_elsewhere(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the cache does with a folder that it cannot write: a temporary one, gone tomorrow."""
    monkeypatch.setattr(jit, "build", lambda spec: Path("/tmp/elsewhere", spec.name, "kernel"))
    said = run(*ONE_RANK, exit_code=1)
    assert said == f"Error: FLASHINFER_AR_CACHE_DIR: {cache} takes no kernels"


def test_help_names_every_option() -> None:
    said = run("--help")
    for option in ("--world-size", "--hidden-size", "--dtype", "--arch", "--rank", "--workers"):
        assert option in said
    assert "flashinfer-ar build" in click.unstyle(CliRunner().invoke(app, ["--help"]).output)
