"""The protocol on the host: an adversary that looks for faults, ThreadSanitizer, planted bugs.

``protocol/fibers.cpp`` and ``protocol/threads.cpp`` run the real kernels of all ranks in one
process. A planted bug is a few words of the headers replaced in a copy; each must be caught, while
the headers as they are pass the same seeds in the same mode.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from protocol_bugs import BUGS, RACES, Edit

from flashinfer_ar import env

INCLUDE = Path(__file__).parents[1] / "include"
PROGRAMS = Path(__file__).parent / "protocol"
FLAGS = (
    "-std=c++20",
    "-Og",  # compiles in half the time of -O1
    "-g1",
    "-pthread",
    "-ffp-contract=off",
    "-U_FORTIFY_SOURCE",  # its longjmp refuses to switch between the stacks of fibers
)
NUM_SEEDS = {2: 40, 3: 20, 4: 10}  # by world size
RACE = "WARNING: ThreadSanitizer: data race"


@dataclass(frozen=True)
class Build:
    """A program for one world size, against the headers with some edits."""

    program: str
    world_size: int
    edits: tuple[Edit, ...] = ()

    def compile(self, folder: Path) -> Path:
        shutil.copytree(INCLUDE, folder / "include")
        for edit in self.edits:
            header = folder / "include/flashinfer_ar" / edit.header
            text = header.read_text()
            assert text.count(edit.old) == 1, f"{edit.header} has changed: adapt {edit}"
            header.write_text(text.replace(edit.old, edit.new))
        binary = folder / self.program
        command = [
            env.host_compiler(),
            *FLAGS,
            f"-DWORLD_SIZE={self.world_size}",
            f"-I{folder / 'include'}",
        ]
        command += ["-fsanitize=thread"] if self.program == "threads" else []
        command += [str(PROGRAMS / f"{self.program}.cpp"), "-o", str(binary)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        return binary


@pytest.fixture(scope="module")
def programs(request, tmp_path_factory) -> Iterator[dict[Build, Future[Path]]]:
    """Every program that the selected tests need, compiled ahead of them on all cores."""
    selected = [item for item in request.session.items if item.path == request.path]
    builds = dict.fromkeys(item.callspec.params["build"] for item in selected)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        yield {
            build: pool.submit(build.compile, tmp_path_factory.mktemp("protocol"))
            for build in builds
        }
        pool.shutdown(cancel_futures=True)


@pytest.fixture
def run(programs, build) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the test's program with seeds FIRST ... FIRST + COUNT - 1 and options."""

    def run(first: int, count: int, *options: str) -> subprocess.CompletedProcess[str]:
        prefix = fixed_addresses() if build.program == "threads" else ()
        return subprocess.run(
            [*prefix, programs[build].result(), str(first), str(count), *options],
            env={**os.environ, "TSAN_OPTIONS": "halt_on_error=1"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return run


def fixed_addresses() -> tuple[str, ...]:
    """A command that runs another without random addresses, where there is one and it may.

    The ThreadSanitizer of g++ before 14 refuses some of the addresses that newer kernels hand out.
    """
    command = ("setarch", "-R")
    if shutil.which("setarch") is None:
        return ()
    tried = subprocess.run([*command, "true"], capture_output=True, check=False)
    return command if tried.returncode == 0 else ()


def adversary(
    world_size: int, *options: str, name: str = "", edits: tuple[Edit, ...] = ()
) -> object:
    name = "-".join(filter(None, (f"{world_size} ranks", name, *options)))
    return pytest.param(Build("fibers", world_size, edits), options, id=name)


SMALL_BATCHES = (Edit("reduce.cuh", "kMaxSlotsPerBatch = 8", "kMaxSlotsPerBatch = 2"),)


@pytest.mark.parametrize(
    ("build", "options"),
    [
        adversary(2),
        adversary(2, "flush"),
        adversary(2, "hold=1"),
        adversary(2, "overlap"),
        adversary(3),
        adversary(3, "flush"),
        adversary(3, "hold=0"),
        adversary(3, name="in batches of 2", edits=SMALL_BATCHES),
        adversary(4),
        adversary(4, "hold=2"),
    ],
)
def test_adversary_finds_nothing(build, options, run):
    count = NUM_SEEDS[build.world_size]
    done = run(0, count, *options)
    assert (done.returncode, done.stdout) == (0, f"{count} seeds\n"), done.stderr


@pytest.mark.parametrize(
    ("build", "bug"),
    [pytest.param(Build("fibers", 2, bug.edits), bug, id=name) for name, bug in BUGS.items()],
)
def test_planted_bug_is_caught(build, bug, run):
    done = run(0, NUM_SEEDS[build.world_size], *bug.options)
    found = re.search(rf"^seed (\d+): ({bug.finding}).*", done.stderr, re.MULTILINE)
    assert (done.returncode, bool(found)) == (1, True), done.stderr
    again = run(int(found[1]), 1, *bug.options)
    assert found[0] in again.stderr, "the seed alone must bring it back"


@pytest.mark.parametrize("build", [Build("threads", n) for n in (2, 3)], ids=["2 ranks", "3 ranks"])
def test_thread_sanitizer_finds_nothing(build, run):
    done = run(0, 2)
    assert (done.returncode, done.stdout) == (0, "2 seeds\n"), done.stderr


@pytest.mark.parametrize(
    "build", [pytest.param(Build("threads", 2, edits), id=name) for name, edits in RACES.items()]
)
def test_thread_sanitizer_finds_planted_race(build, run):
    assert RACE in run(0, 2).stderr
