"""Bugs for test_protocol.py to plant: each is some text of a header that a copy has otherwise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

FINDING = "overwrote unread data|wrong value|hang|left over|epoch of rank|in no ring"


class Edit(NamedTuple):
    """A replacement of text that stands in a header exactly once."""

    header: str
    old: str
    new: str


SENTINEL_TEST = """\
  return pack.words[0] == kSentinel || pack.words[1] == kSentinel || pack.words[2] == kSentinel ||
         pack.words[3] == kSentinel;"""
WAIT = "    t.wait_for_previous_grid();\n"
PREFETCH = "    epilogue.prefetch(rows.first());\n"
TURN = "    Turn<C> turn(t, params);\n"


@dataclass(frozen=True)
class Bug:
    """An error somebody could make, and the run of ``fibers`` that must catch it."""

    edits: tuple[Edit, ...]
    options: tuple[str, ...] = ()
    finding: str = FINDING


BUGS = {
    "one generation": Bug((Edit("lamport.cuh", "kNumGenerations = 2;", "kNumGenerations = 1;"),)),
    "one generation, a rank held": Bug(
        (Edit("lamport.cuh", "kNumGenerations = 2;", "kNumGenerations = 1;"),), ("hold=1",)
    ),
    "one word polled": Bug(
        (Edit("lamport.cuh", SENTINEL_TEST, "return pack.words[0] == kSentinel;"),)
    ),
    "words compared as floats": Bug(
        (
            Edit(
                "lamport.cuh",
                SENTINEL_TEST,
                """\
  for (uint32_t word : pack.words) {
    if (float_of(word) == 0.0f && word >> 31 != 0) return true;
  }
  return false;""",
            ),
        ),
        ("flush",),
        finding="hang",
    ),
    "-0.0 sent by one-shot": Bug(
        (Edit("oneshot.cuh", "    positive_zeros(packs);\n", ""),), finding="hang"
    ),
    "-0.0 sent by scatter": Bug(
        (
            Edit(
                "twoshot.cuh",
                "T::positive_zeros(packs[k])",
                "packs[k]",
            ),
        ),
        finding="hang",
    ),
    # Without flushing, no sum is -0.0: it starts at +0.0.
    "-0.0 sent by owners": Bug(
        (Edit("twoshot.cuh", "T::positive_zeros(sums[k])", "sums[k]"),), ("flush",), finding="hang"
    ),
    "no re-arm": Bug((Edit("lamport.cuh", "store_own_relaxed_system(ring +", "(void)(ring +"),)),
    "the other generation re-armed": Bug(
        (
            Edit(
                "lamport.cuh",
                " const {\n    if (expired_) return;\n"
                "    Pack* ring = params_.rings[rank()] + in_generation(0);",
                " const {\n    if (expired_) return;\n"
                "    Pack* ring = params_.rings[rank()] + params_.generation_packs"
                " - in_generation(0);",
            ),
        )
    ),
    "no re-arm of a row's results": Bug(
        (
            Edit(
                "twoshot.cuh",
                "turn.template rearm<C.packs_per_thread>(batch);\n        epilogue",
                "epilogue",
            ),
        )
    ),
    "no re-arm of a stripe's results": Bug(
        (
            Edit(
                "twoshot.cuh",
                "        turn.template rearm<C.packs_per_thread>(batch);\n      }\n    }\n  }",
                "      }\n    }\n  }",
            ),
        )
    ),
    "own multicast slot left alone": Bug(
        (
            Edit("oneshot.cuh", "sum_over_ranks<T, C.multicast>", "sum_over_ranks<T, false>"),
            Edit("oneshot.cuh", "packs_per_thread, C.multicast>", "packs_per_thread, false>"),
        )
    ),
    "own multicast slot re-armed, not awaited": Bug(
        (
            Edit(
                "reduce.cuh",
                "turn.await(batch, values);",
                """\
turn.await(Contributions<C, false, Place>{turn, place, first_pack, first_rank}, values);
      for (int i = 0; i < kPacks * kRanks; ++i) {
        if (batch.source(i) == turn.rank()) values[i] = own[batch.k(i)];
      }""",
            ),
        )
    ),
    "own result not awaited": Bug(
        (
            Edit(
                "twoshot.cuh",
                "return rows.has(row, k);",
                "return rows.has(row, k) && source(k) != 0;",
            ),
        )
    ),
    "own multicast result not awaited": Bug(
        (
            Edit(
                "twoshot.cuh",
                "kOwnersInRing && stripes.has(stripe(k));",
                "kOwnersInRing && stripes.has(stripe(k)) && source(k) != kNobody;",
            ),
        )
    ),
    "own result stored into the ring, where nobody reads it": Bug(
        (Edit("twoshot.cuh", "/*include_own=*/kOwnInRing", "/*include_own=*/true"),)
    ),
    "own result stored nowhere": Bug(
        (Edit("twoshot.cuh", "if (!kOwnInRing) store", "if (0) store"),)
    ),
    "epoch total short": Bug(
        (Edit("lamport.cuh", "kCallsUnit - (ctas - 1)", "kCallsUnit - ctas"),)
    ),
    "epoch total of one CTA": Bug((Edit("lamport.cuh", "kCallsUnit - (ctas - 1)", "kCallsUnit"),)),
    "epoch advanced before other threads read it": Bug(
        (Edit("lamport.cuh", "thread_.gather_warps(C.warps);  // every", "//"),)
    ),
    "one exchange table": Bug(
        (
            Edit("platform_host.hpp", "copy->values_[round % 2][entry]", "copy->values_[0][entry]"),
            Edit("platform_host.hpp", "return values_[round % 2];", "return values_[0];"),
        )
    ),
    "no wait for the previous grid in one-shot": Bug(
        (Edit("oneshot.cuh", WAIT, ""),), ("overlap",)
    ),
    "no wait for the previous grid in two-shot": Bug(
        (Edit("twoshot.cuh", WAIT, ""),), ("overlap",)
    ),
    "residual read before the previous grid ended": Bug(
        (
            Edit("twoshot.cuh", WAIT, PREFETCH + WAIT),
            Edit("twoshot.cuh", f"{PREFETCH}    scatter", "    scatter"),
        ),
        ("overlap",),
        finding="wrong value",
    ),
    "epoch read before the previous grid ended": Bug(
        (Edit("oneshot.cuh", WAIT + TURN, TURN + WAIT),), ("overlap",)
    ),
}

RACES = {
    "ordinary stores to rings": (
        Edit(
            "platform_host.hpp",
            "__atomic_store_n(&to->words[i], pack.words[i], __ATOMIC_RELAXED)",
            "to->words[i] = pack.words[i]",
        ),
    ),
    "arrivals without release": (
        Edit(
            "platform_host.hpp",
            "__atomic_fetch_add(&copy->arrivals_[round % 2], 1, __ATOMIC_RELEASE)",
            "__atomic_fetch_add(&copy->arrivals_[round % 2], 1, __ATOMIC_RELAXED)",
        ),
    ),
    "shuffle without its second barrier": (
        Edit(
            "platform_host.hpp",
            "    sync_warp();  // nobody overwrites",
            "    // nobody overwrites",
        ),
    ),
}
