"""Times both kernels and turns the times into a strategy table's entries."""

from __future__ import annotations

import dataclasses
import datetime
import math
import platform
import socket
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import flashinfer_ar
from flashinfer_ar import strategy_tables
from flashinfer_ar.bootstrap import CommBackend, agreed_step
from flashinfer_ar.doctor import nvml
from flashinfer_ar.jit import HOST_TARGET, DType, Epilogue
from flashinfer_ar.jit.cache import header_digest
from flashinfer_ar.launch import target_of
from flashinfer_ar.link_model import LINKS, over_link
from flashinfer_ar.strategy_tables import UNLIMITED, Entry, Point, Source, Table
from flashinfer_ar.timing import Rounds, shapes_of, time_both

EPILOGUES = (Epilogue.NONE, Epilogue.ADD_RMS_NORM)


@dataclasses.dataclass(frozen=True)
class Tuning:
    """What is timed, equal on all ranks; ``command`` is the line that asked for it."""

    hidden_size: int
    dtype: DType
    tokens: Sequence[int]
    num_rounds: int
    virtual: bool  # ranks are threads of one process
    command: str

    @property
    def num_shapes(self) -> int:
        """How many shapes each world size has."""
        return len(EPILOGUES) * len(self.tokens)


def tune(
    comm: CommBackend,
    device: torch.device,
    tuning: Tuning,
    path: Path,
    on_shape: Callable[[], None],
) -> list[Entry]:
    """The entries of this world size, and the table at ``path`` updated by them; collective.

    The file is written on every host of the ranks, as rank 0 would have it, so that later
    workspaces of these ranks agree. ``on_shape`` as in :func:`~flashinfer_ar.timing.time_both`.
    Raises as a workspace does, on all ranks alike, also for a file that cannot be read or written.
    """
    target = target_of(device)
    with agreed_step(comm, "read the strategy table"):
        before = strategy_tables.read(path, target) if path.exists() else Table(target, ())
    _require_own_gpus(comm, device, tuning)
    shapes = [
        shape
        for epilogue in EPILOGUES
        for shape in shapes_of(tuning.tokens, tuning.hidden_size, tuning.dtype, epilogue)
    ]
    timed = time_both(comm, device, shapes, tuning.num_rounds, on_shape)
    run = comm.bcast(_run(device, tuning), 0)
    entries = [
        entry_of(
            target,
            comm.Get_size(),
            [each for each in timed if each.shape.epilogue is epilogue],
            run,
            virtual=tuning.virtual,
        )
        for epilogue in EPILOGUES
    ]
    text = comm.bcast(strategy_tables.text_of(before.updated(entries)), 0)
    hosts = comm.allgather(socket.gethostname())
    with agreed_step(comm, "write the strategy table"):
        if hosts.index(hosts[comm.Get_rank()]) == comm.Get_rank():
            strategy_tables.write(path, text)
    return entries


def _require_own_gpus(comm: CommBackend, device: torch.device, tuning: Tuning) -> None:
    """``ValueError`` on all ranks if processes share a GPU: they take turns, in milliseconds."""
    if tuning.virtual or device.type == "cpu":
        return
    uuids = comm.allgather(str(torch.cuda.get_device_properties(device).uuid))
    if len(set(uuids)) < len(uuids):
        raise ValueError(
            f"{len(uuids)} ranks on {len(set(uuids))} GPUs: allowed is one process a GPU, or "
            f"--virtual-ranks"
        )


def _run(device: torch.device, tuning: Tuning) -> dict[str, Any]:
    """What a reader of the table may want to know about these times."""
    target = target_of(device)
    run: dict[str, Any] = {
        "device": platform.processor() or platform.machine(),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "command": tuning.command,
        "version": flashinfer_ar.__version__,
        "kernels": header_digest()[:12],
        "hidden_size": tuning.hidden_size,
        "dtype": tuning.dtype.value,
    }
    if target == HOST_TARGET:
        return run
    run["device"] = torch.cuda.get_device_name(device)
    try:
        run["driver"] = nvml.driver_version()
    except nvml.NvmlMissing as error:
        run["driver"] = f"unknown: {error}"
    if tuning.virtual:
        run["link"] = dataclasses.asdict(LINKS[target])
    return run


def entry_of(
    target: str,
    world_size: int,
    rounds: Sequence[Rounds],
    run: Mapping[str, Any],
    *,
    virtual: bool,
) -> Entry:
    """The entry for calls of one epilogue, timed at several sizes.

    ``virtual``: the ranks shared a GPU, so the link is modelled; except on the host, where memory
    is all the link that there is.
    """
    points = tuple(sorted(map(_point, rounds)))
    source, over = Source.MEASURED, list(points)
    if virtual and target != HOST_TARGET:
        source, over = Source.MEASURED_KERNELS, over_link(LINKS[target], world_size, points)
    epilogue = rounds[0].shape.epilogue
    return Entry(world_size, epilogue, limit_of(over, world_size), source, run, points)


def _point(rounds: Rounds) -> Point:
    return Point(
        rounds.shape.message_bytes,
        round(statistics.median(rounds.one_shot_us), 3),
        round(statistics.median(rounds.two_shot_us), 3),
    )


def limit_of(points: Sequence[Point], world_size: int) -> int:
    """The largest message in bytes for which one-shot is no slower; ``points`` are by size.

    Times scatter, and near the crossover the order may change more than once. So the sizes are
    parted where the ratios lost by a wrong choice multiply to the least, and the limit lies between
    the neighbours of that place where the line between their differences crosses zero. Where
    one-shot wins at all sizes it is for two ranks always right, since two-shot saves them no
    bytes, and for more up to the largest size timed. Where it never wins the limit is 0.
    """
    losses = [math.log(each.one_shot_us / each.two_shot_us) for each in points]

    def lost(num_one_shot: int) -> float:
        wrong = [max(each, 0.0) for each in losses[:num_one_shot]]
        return sum(wrong) + sum(max(-each, 0.0) for each in losses[num_one_shot:])

    # Of equals the largest: a tie goes one-shot.
    num_one_shot = min(range(len(points), -1, -1), key=lost)
    if num_one_shot == 0:
        return 0
    if num_one_shot == len(points):
        return UNLIMITED if world_size <= 2 else points[-1].message_bytes
    return _crossing(points[num_one_shot - 1], points[num_one_shot])


def _crossing(below: Point, above: Point) -> int:
    gain, loss = below.two_shot_us - below.one_shot_us, above.one_shot_us - above.two_shot_us
    part = gain / (gain + loss) if gain > 0 and loss > 0 else 0.0
    return below.message_bytes + int(part * (above.message_bytes - below.message_bytes))
