// The protocol: ranks hand each other data without flags, barriers or counters between them.
//
// Every rank owns a ring of two generations of 16-byte slots. Data is its own flag (Lamport): a
// slot holds the sentinel, 0x80000000 in each 32-bit word, until its payload lands, and no payload
// word can be the sentinel, since -0.0 is sent as +0.0 (as a word, 0x80000000 is fp32 -0.0, and the
// pair (+0.0, -0.0) of 16-bit elements).
//
//   publish   a payload goes into the slot of every rank that needs it
//   await     the reader polls its own memory until no word of the slot is the sentinel. Words are
//             compared as integers: as floats with subnormals flushed to zero, a negative subnormal
//             would equal the sentinel and spin for ever. All four words are looked at, because
//             memory promises atomicity of 4 bytes, not of 16.
//   re-arm    the reader writes the sentinel back into exactly the slots that it read, before its
//             grid ends. Nothing else ever clears, so after a call every slot is armed again,
//             whatever the call's shape, dtype or strategy was.
//
// Why two generations are enough. Call n uses generation n % 2 of every ring. Say rank A stores
// call n + 2 into B's ring: will it hit a slot that B has not read, or not re-armed, in call n? A
// is in call n + 2, so it finished call n + 1, and finishing a call needs the data of *every* rank,
// B's too. B sent its n + 1 data from a grid that started after B's grid of call n had ended, re-
// arms included. This rests on two rules: no store of a call before the full wait for the previous
// grid (the PDL trigger alone is too early), and no call that some rank could finish without
// another one's data (so zero tokens launch nothing, on any rank). With multicast a rank's own slot
// receives data too; it is awaited and re-armed like the others, else it would still be in flight
// two calls later.
//
// Why relaxed accesses are enough. Inside a call, values carry all the information: a word that is
// not the sentinel *is* the payload. Between calls, the end of a grid and the start of the next act
// as fences at system scope: B's re-arm (call n) -> fence -> B's publish (n + 1), which A's await
// reads -> fence -> A's publish (n + 2). A fence before a relaxed store that a relaxed load reads
// before a fence synchronises, so B's re-arm comes before A's store in the order of that slot.
// In a two-shot call with fewer stripes than ranks, A may read B's data only through the sum of an
// owner C, whose load and store have no fence between them: there the memory model alone orders
// nothing. The hardware does. B's re-arm has reached B's own memory before B's next grid starts,
// C's store cannot leave before the load that it depends on, and A's store has to travel to that
// memory. The same holds with multicast, where A stores through another address of that memory than
// the one that B re-arms through.
#pragma once

#include "flashinfer_ar/config.cuh"

namespace flashinfer_ar {

inline constexpr uint32_t kSentinel = 0x80000000u;
inline constexpr uint32_t kNumGenerations = 2;
inline constexpr uint32_t kCallsUnit = 65536;  // one finished call, in Control::epoch
inline constexpr uint32_t kPollsPerClockRead = 64;
inline constexpr int kNobody = -1;

FAR_DEVICE Pack uniform_pack(uint32_t word) { return {{word, word, word, word}}; }

FAR_DEVICE bool has_sentinel(const Pack& pack) {
  return pack.words[0] == kSentinel || pack.words[1] == kSentinel || pack.words[2] == kSentinel ||
         pack.words[3] == kSentinel;
}

// One rank's part in one call. Constructed after the wait for the previous grid; every thread of
// the grid makes its own and calls `advance` once.
template <Config C>
class Turn {
 public:
  FAR_DEVICE Turn(Thread t, const Params<C.world_size>& params)
      : thread_(t),
        params_(params),
        epoch_(load_relaxed_device(&params.control->epoch) / kCallsUnit),
        expired_(load_relaxed_device(&params.control->expired) != 0) {}

  FAR_DEVICE int rank() const { return C.rank == kAnyRank ? params_.rank : C.rank; }

  // Stores into one rank's ring; the caller has replaced -0.0. Nothing is sent any more once a wait
  // has outlived the deadline, in this grid or in one before it: calls that were queued behind that
  // one would overwrite what a late peer has still to read, and it would take their data for its
  // own.
  FAR_DEVICE void publish_to(int peer, uint32_t slot, const Pack& payload) const {
    if (expired_) return;
    store_relaxed_system(params_.rings[peer] + in_generation(slot), payload);
  }

  // Stores into the ring of every rank that will await the slot: all but the own one, unless
  // `include_own`. Ranks start at different destinations, so that no ingress is hit by all at once.
  FAR_DEVICE void publish(uint32_t slot, const Pack& payload, bool include_own = false) const {
    if constexpr (C.multicast) {
      if (expired_) return;
      multimem_store_relaxed_system(params_.multicast + in_generation(slot), payload);
    } else {
      FAR_UNROLL
      for (int i = 1; i < C.world_size; ++i) {
        publish_to((rank() + i) % C.world_size, slot, payload);
      }
      if (include_own) publish_to(rank(), slot, payload);
    }
  }

  // Waits for up to `Count` slots as one batch: all loads in flight together, repeated until all
  // have arrived. `batch` tells for i < Count: has(i), slot(i), and for the timeout record pack(i)
  // and source(i), the rank that sends it or kNobody. After a timeout the values are NaN, and the
  // kernel runs on to its end without waiting, so that no thread is left at a barrier; the host
  // raises on the record.
  template <int Count, typename Batch>
  FAR_DEVICE void await(const Batch& batch, Pack (&values)[Count]) {
    const Pack* ring = params_.rings[rank()] + in_generation(0);
    uint32_t polls = 0;
    uint64_t start = 0;
    while (true) {
      bool arrived = true;
      FAR_UNROLL
      for (int i = 0; i < Count; ++i) {
        if (batch.has(i)) values[i] = load_relaxed_system(ring + batch.slot(i));
      }
      FAR_UNROLL
      for (int i = 0; i < Count; ++i) {
        if (batch.has(i) && has_sentinel(values[i])) arrived = false;
      }
      if (arrived) return;
      if (++polls % kPollsPerClockRead == 0 && out_of_time(start)) break;
      thread_.pause();
    }
    give_up(batch, values);
  }

  // Arms the slots of a batch that was awaited, for call n + 2. Nobody waits for it within the
  // call, so it comes after whatever somebody does wait for. A slot whose data did not come stays
  // as it is.
  template <int Count, typename Batch>
  FAR_DEVICE void rearm(const Batch& batch) const {
    if (expired_) return;
    Pack* ring = params_.rings[rank()] + in_generation(0);
    FAR_UNROLL
    for (int i = 0; i < Count; ++i) {
      if (batch.has(i)) store_own_relaxed_system(ring + batch.slot(i), uniform_pack(kSentinel));
    }
  }

  // Counts the call. Each CTA adds once, after its own reads of the epoch; the first CTA's share
  // makes the grid's total exactly one unit whatever the grid, and until the last CTA has added,
  // the upper half still shows this call. So there is no reset, and no CTA waits for another.
  FAR_DEVICE void advance() const {
    thread_.gather_warps(C.warps);  // every thread has read the epoch
    if (thread_.thread() != 0) return;
    const uint32_t ctas = thread_.num_ctas();
    add_relaxed_device(&params_.control->epoch, thread_.cta() == 0 ? kCallsUnit - (ctas - 1) : 1);
  }

 private:
  FAR_DEVICE uint64_t in_generation(uint32_t slot) const {
    return epoch_ % kNumGenerations * params_.generation_packs + slot;
  }

  // The clock starts at the first call, kPollsPerClockRead polls into the wait: a short wait never
  // reads it.
  FAR_DEVICE bool out_of_time(uint64_t& start) const {
    if (expired_ || load_relaxed_device(&params_.control->expired) != 0) return true;
    const uint64_t now = thread_.nanoseconds();
    if (start == 0) start = now;
    return now - start > params_.timeout_ns;
  }

  template <int Count, typename Batch>
  FAR_DEVICE void give_up(const Batch& batch, Pack (&values)[Count]) {
    expired_ = true;
    FAR_UNROLL
    for (int i = 0; i < Count; ++i) {
      if (!batch.has(i)) continue;
      if (has_sentinel(values[i])) record_timeout(batch.source(i), batch.pack(i));
      values[i] = uniform_pack(0xffffffffu);
    }
  }

  FAR_DEVICE void record_timeout(int peer, uint32_t pack) const {
    if (peer == kNobody) return;
    if (exchange_relaxed_device(&params_.control->expired, 1) != 0) return;
    TimeoutRecord* record = params_.timeout_record;
    record->rank = rank();
    record->peer = peer;
    record->call = params_.call;
    record->pack = pack;
    record->epoch = epoch_;
    store_release_system(&record->state, 1);
  }

  Thread thread_;
  const Params<C.world_size>& params_;
  uint32_t epoch_;
  bool expired_;
};

}  // namespace flashinfer_ar
