"""The protocol of ``lamport.cuh`` as a model, checked in every interleaving of small worlds.

A message is in flight from its publication until it lands, at any time and in any order. Faults: it
lands on data that was not read, a reader takes another call's data, ranks wait for ever, or a slot
is still full after the last call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import pytest


@dataclass(frozen=True)
class Phase:
    """What a rank publishes at once, as (rank, slot), and then awaits and re-arms in any order."""

    sends: tuple[tuple[int, int], ...] = ()
    awaits: tuple[int, ...] = ()
    rearms_blindly: tuple[int, ...] = ()  # slots cleared at the phase's end, full or not


RankCall = tuple[Phase, ...]
Call = tuple[RankCall, ...]  # of each rank


def one_shot(num_ranks: int) -> Call:
    return tuple(
        (Phase(tuple((p, r) for p in peers), tuple(peers)),) for r, peers in _with_peers(num_ranks)
    )


def one_shot_multicast(num_ranks: int) -> Call:
    ranks = range(num_ranks)
    return tuple((Phase(tuple((p, r) for p in ranks), tuple(ranks)),) for r in ranks)


def one_shot_multicast_own_slot_not_awaited(num_ranks: int) -> Call:
    return tuple(
        (Phase(tuple((p, r) for p in range(num_ranks)), tuple(peers), (r,)),)
        for r, peers in _with_peers(num_ranks)
    )


def one_shot_multicast_own_slot_left_alone(num_ranks: int) -> Call:
    return tuple(
        (Phase(tuple((p, r) for p in range(num_ranks)), tuple(peers)),)
        for r, peers in _with_peers(num_ranks)
    )


def two_shot(num_ranks: int, owner: int = 0) -> Call:
    """With one stripe, so that most pairs of ranks exchange nothing directly."""
    results = Phase(awaits=(owner,))
    own = (
        Phase(awaits=tuple(r for r in range(num_ranks) if r != owner)),
        Phase(tuple((r, owner) for r in range(num_ranks)), (owner,)),
    )
    return tuple(own if r == owner else (Phase(((owner, r),)), results) for r in range(num_ranks))


def broadcast(num_ranks: int) -> Call:
    """A call that rank 0 finishes without anybody: what the protocol forbids."""
    root = (Phase(tuple((r, 0) for r in range(1, num_ranks))),)
    return (root, *[(Phase(awaits=(0,)),)] * (num_ranks - 1))


def _with_peers(num_ranks: int) -> Iterator[tuple[int, list[int]]]:
    for rank in range(num_ranks):
        yield rank, [peer for peer in range(num_ranks) if peer != rank]


class Step(NamedTuple):
    """A phase with its messages as sets of bits."""

    call: int
    sends: int
    awaits: int
    rearms_blindly: int


class State(NamedTuple):
    """Phases begun and ended by each rank, and sets of messages."""

    begun: tuple[int, ...]
    ended: tuple[int, ...]
    flying: int = 0
    landed: int = 0
    read: int = 0


class Fault(Exception):
    """What goes wrong in some interleaving."""


class Model:
    """Ranks that make the same calls one after the other, in every way in which time can pass."""

    def __init__(
        self, calls: Sequence[Call], num_generations: int = 2, *, early_stores: bool = False
    ) -> None:
        self.num_generations = num_generations
        self.early_stores = early_stores  # before the end of the rank's last call
        keys = (
            (index, rank, slot)
            for index, call in enumerate(calls)
            for phase in chain.from_iterable(call)
            for rank, slot in phase.sends
        )
        self.messages = {key: 1 << i for i, key in enumerate(keys)}
        self.rivals = {
            message: self._in_slots(index, rank, [slot])
            for (index, rank, slot), message in self.messages.items()
        }
        self.programs = [
            [
                self._step(index, rank, phase)
                for index, call in enumerate(calls)
                for phase in call[rank]
            ]
            for rank in range(len(calls[0]))
        ]

    def _in_slots(self, call: int, rank: int, slots: Sequence[int]) -> int:
        """Every message that may ever lie in these slots of the call's generation."""
        return sum(
            message
            for (other, to, slot), message in self.messages.items()
            if to == rank and slot in slots and (other - call) % self.num_generations == 0
        )

    def _step(self, call: int, rank: int, phase: Phase) -> Step:
        return Step(
            call=call,
            sends=sum(self.messages[call, to, slot] for to, slot in phase.sends),
            awaits=sum(self.messages[call, rank, slot] for slot in phase.awaits),
            rearms_blindly=self._in_slots(call, rank, phase.rearms_blindly),
        )

    def check(self) -> None:
        """Visit every state. Raises the first :class:`Fault`."""
        nothing = (0,) * len(self.programs)
        initial = State(nothing, nothing)
        seen, stack = {initial}, [initial]
        while stack:
            state = stack.pop()
            following = list(self._following(state))
            if not following:
                self._check_end(state)
            new = [state for state in following if state not in seen]
            seen.update(new)
            stack.extend(new)

    def _following(self, state: State) -> Iterator[State]:
        yield from self._landings(state)
        for rank in range(len(self.programs)):
            yield from self._begin(state, rank)
            yield from self._reads(state, rank)

    def _landings(self, state: State) -> Iterator[State]:
        for message in _each(state.flying):
            if state.landed & self.rivals[message]:
                raise Fault("overwrites unread data")
            yield state._replace(flying=state.flying ^ message, landed=state.landed | message)

    def _begin(self, state: State, rank: int) -> Iterator[State]:
        steps, begun = self.programs[rank], state.begun[rank]
        if begun < len(steps) and self._may_begin(steps, begun, state.ended[rank]):
            state = state._replace(
                begun=_next(state.begun, rank), flying=state.flying | steps[begun].sends
            )
            yield self._end_phases(state, rank)

    def _may_begin(self, steps: Sequence[Step], begun: int, ended: int) -> bool:
        if begun == ended:
            return True
        is_next_call = steps[begun].call == steps[ended].call + 1
        return self.early_stores and is_next_call and steps[begun - 1].call == steps[ended].call

    def _reads(self, state: State, rank: int) -> Iterator[State]:
        if state.ended[rank] == state.begun[rank]:
            return
        step = self.programs[rank][state.ended[rank]]
        for message in _each(step.awaits & ~state.read):
            found = state.landed & self.rivals[message]
            if found & ~message:
                raise Fault("reads another call's data")
            if found:
                after = state._replace(landed=state.landed ^ found, read=state.read | found)
                yield self._end_phases(after, rank)

    def _end_phases(self, state: State, rank: int) -> State:
        while state.ended[rank] < state.begun[rank]:
            step = self.programs[rank][state.ended[rank]]
            if step.awaits & ~state.read:
                break
            landed = state.landed & ~step.rearms_blindly
            state = state._replace(ended=_next(state.ended, rank), landed=landed)
        return state

    def _check_end(self, state: State) -> None:
        if any(done < len(steps) for done, steps in zip(state.ended, self.programs, strict=True)):
            raise Fault("waits for ever")
        if state.landed:
            raise Fault("leaves data behind")


def _each(messages: int) -> Iterator[int]:
    while messages:
        lowest = messages & -messages
        yield lowest
        messages ^= lowest


def _next(counts: tuple[int, ...], rank: int) -> tuple[int, ...]:
    return (*counts[:rank], counts[rank] + 1, *counts[rank + 1 :])


CALLS = {
    "one-shot": (one_shot,),
    "one-shot multicast": (one_shot_multicast,),
    "two-shot": (two_shot,),
    "both": (one_shot, two_shot),
    "both, of other lengths": (two_shot, two_shot, one_shot, one_shot_multicast),
}


@pytest.mark.parametrize(("num_ranks", "num_calls"), [(2, 6), (3, 4)])
@pytest.mark.parametrize("kinds", CALLS.values(), ids=CALLS)
def test_protocol_holds(kinds, num_ranks, num_calls):
    calls = [kinds[i % len(kinds)](num_ranks) for i in range(num_calls)]
    Model(calls).check()


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        pytest.param(one_shot, {"num_generations": 1}, id="one generation"),
        pytest.param(one_shot, {"early_stores": True}, id="stores before the last call ended"),
        pytest.param(one_shot_multicast_own_slot_not_awaited, {}, id="own slot not awaited"),
        pytest.param(one_shot_multicast_own_slot_left_alone, {}, id="own slot left alone"),
        pytest.param(broadcast, {}, id="a call that one rank ends alone"),
    ],
)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_rule_is_needed(kind, how, num_ranks):
    with pytest.raises(Fault):
        Model([kind(num_ranks)] * 4, **how).check()
