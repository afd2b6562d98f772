"""The multi-node path end to end: one ``mpirun`` over two hosts, memory by fabric handles."""

from __future__ import annotations

import re
import sys
import threading
from pathlib import Path

import hosts_worker
import pytest
from api_worker import assert_ok
from hosts import NoHostsError, two_hosts

TIMEOUT_S = 120
WORKER = (sys.executable, "-m", "mpi4py", hosts_worker.__file__)


@pytest.fixture
def hosts(tmp_path):
    try:
        with two_hosts(tmp_path) as made:
            yield made
    except NoHostsError as error:
        pytest.skip(f"no two hosts here: {error}")


@pytest.fixture
def room(tmp_path):
    """The machine room of the fake drivers; not in /dev/shm, which is each host's own."""
    folder = tmp_path / "room"
    folder.mkdir()
    return str(folder)


@pytest.mark.parametrize(
    ("ranks_per_host", "jobs"), [(2, ["apart", "on_fabric"]), (4, ["on_fabric"])]
)
def test_every_rank_is_right(hosts, room, ranks_per_host, jobs):
    run = hosts.mpirun(ranks_per_host, *WORKER, room, *jobs)
    output, _ = run.communicate(timeout=TIMEOUT_S)
    assert_ok((run.returncode, output), 2 * ranks_per_host, jobs)
    assert list(Path(room).iterdir()) == []


def test_a_host_that_is_cut_off_ends_in_the_deadlines_error(hosts, room):
    run = hosts.mpirun(2, *WORKER, room, "cut_off")
    # Without its peers mpirun never ends by itself: the test reads until it has what it needs.
    # Its output ends at the latest with its processes.
    give_up = threading.Timer(TIMEOUT_S, hosts.end_all)
    give_up.start()
    output = until(run, *(f"rank {rank} of 4: running" for rank in range(4)))
    hosts.cut_off("b")
    output += until(run, "rank 0 of 4: cut_off ok", "rank 1 of 4: cut_off ok")
    give_up.cancel()
    assert not re.search("rank [23] of 4: cut_off ok", output), output
    # Each waits for all; the one that stopped first of those on b is the one that is named.
    assert re.search("rank [01] waited 2 s .* for data of rank [23]: kernel oneshot", output), (
        output
    )


def until(run, *lines):
    """What ``run`` prints until it has printed all ``lines``."""
    output = ""
    while not all(line in output for line in lines):
        line = run.stdout.readline()
        assert line, output
        output += line
    return output
