// A network between ranks that delays, reorders and tears every store.
#pragma once

#include <queue>

#include "flashinfer_ar/host_fibers.hpp"
#include "world.hpp"

namespace flashinfer_ar::test {

// Each 4-byte word of a store arrives on its own, after a time of its own; the own ring is no
// nearer than a peer's. A word that arrives where the last one has not been cleared has destroyed
// data.
class AdverseFabric : public host::Fabric {
 public:
  AdverseFabric(World& world, Random& random) : world_(world), random_(random) {}

  void store(Pack* to, const Pack& pack) override {
    world_.rank_of(to);
    send(to, pack);
    maybe_let_others_run();
  }

  void multicast_store(Pack* to, const Pack& pack) override {
    for (int rank = 0; rank < kWorldSize; ++rank) send(world_.through_multicast(to, rank), pack);
    maybe_let_others_run();
  }

  // Returns how many words arrived.
  int deliver_until(uint64_t now) {
    now_ = now;
    int num_delivered = 0;
    for (; !flights_.empty() && flights_.top().arrival <= now; ++num_delivered) {
      deliver(flights_.top());
      flights_.pop();
    }
    return num_delivered;
  }

  std::size_t num_in_flight() const { return flights_.size(); }

 private:
  static constexpr uint32_t kMaxLatencyBits = 11;

  struct Flight {
    uint64_t arrival;
    Pack* slot;
    uint32_t word;
    uint32_t value;
    bool operator<(const Flight& other) const {
      return arrival > other.arrival;
    }  // earliest on top
  };

  void send(Pack* to, const Pack& pack) {
    for (uint32_t word = 0; word < kWordsPerPack; ++word) {
      flights_.push({now_ + latency(), to, word, pack.words[word]});
    }
  }

  // As often short as long, on a scale of powers of two.
  uint64_t latency() { return 1 + random_.below(1u << random_.below(kMaxLatencyBits + 1)); }

  void deliver(const Flight& flight) {
    uint32_t& word = flight.slot->words[flight.word];
    if (word != kSentinel) {
      const int rank = world_.rank_of(flight.slot);
      fail("overwrote unread data: %08x by %08x in slot %zu of rank %d", word, flight.value,
           world_.slot_of(flight.slot, rank), rank);
    }
    word = flight.value;
  }

  void maybe_let_others_run() {
    if (random_.one_in(4)) host::Fiber::suspend();
  }

  World& world_;
  Random& random_;
  uint64_t now_ = 0;
  std::priority_queue<Flight> flights_;
};

}  // namespace flashinfer_ar::test
