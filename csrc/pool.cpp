// A job's number wakes the workers, a counter hands out its items. A worker that comes late, because it slept or had no
// core, finds the gate closed: the caller waits only for those who hold an item.
#include "pool.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace headrace {

namespace {

constexpr auto kSpin = std::chrono::microseconds(50);
constexpr size_t kAlignment = 64;
constexpr int kLevels = 2;

// Memory that grows and is never given back before the end.
struct Scratch {
  void* data = nullptr;
  size_t bytes = 0;

  ~Scratch() { std::free(data); }

  void* get(size_t wanted) {
    if (wanted > bytes) {
      size_t rounded = (wanted + wanted / 4 + kAlignment - 1) / kAlignment * kAlignment;
      void* larger = std::aligned_alloc(kAlignment, rounded);
      if (larger == nullptr) return nullptr;
      std::free(data);
      data = larger;
      bytes = rounded;
    }
#if defined(__SANITIZE_ADDRESS__)
    ASAN_UNPOISON_MEMORY_REGION(data, wanted);
    ASAN_POISON_MEMORY_REGION(static_cast<char*>(data) + wanted, bytes - wanted);
#endif
    return data;
  }
};

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

// The gate's bits: the job's number above, whether one may still join, how many have joined and not left.
constexpr uint64_t kTicket = uint64_t{1} << 32;
constexpr uint64_t kOpen = uint64_t{1} << 31;
constexpr uint64_t kInside = kOpen - 1;

struct Pool::State {
  alignas(64) std::atomic<uint64_t> gate{0};
  alignas(64) std::atomic<int64_t> next{0};
  alignas(64) std::atomic<int> asleep{0};
  int64_t count = 0;
  Task task = nullptr;
  void* context = nullptr;
  bool stopping = false;
  std::mutex mutex;
  std::condition_variable wake;
  std::vector<std::thread> workers;
  std::vector<Scratch> own;
  Scratch levels[kLevels];

  uint64_t ticket() const { return gate.load(std::memory_order_acquire) / kTicket; }

  void take(int thread) {
    int64_t item;
    while ((item = next.fetch_add(1, std::memory_order_relaxed)) < count) task(context, item, thread);
  }

  void work(int thread) {
    for (uint64_t seen = 0;;) {
      seen = wait(seen);
      if (stopping) return;
      if (join()) {
        take(thread);
        gate.fetch_sub(1, std::memory_order_release);
      }
    }
  }

  bool join() {
    uint64_t now = gate.load(std::memory_order_acquire);
    while (now & kOpen)
      if (gate.compare_exchange_weak(now, now + 1, std::memory_order_acquire)) return true;
    return false;
  }

  // The number of a job after `seen`.
  uint64_t wait(uint64_t seen) {
    auto until = std::chrono::steady_clock::now() + kSpin;
    for (int spins = 1; ticket() == seen; spins++) {
      pause();
      if (spins % 64 == 0 && std::chrono::steady_clock::now() > until) {
        std::unique_lock<std::mutex> lock(mutex);
        asleep.fetch_add(1);
        wake.wait(lock, [&] { return gate.load() / kTicket != seen; });
        asleep.fetch_sub(1);
      }
    }
    return ticket();
  }

  void publish() {
    gate.store((ticket() + 1) * kTicket | kOpen);
    if (asleep.load() > 0) {
      // Under the lock a worker is either before its last look at the gate or waiting.
      std::lock_guard<std::mutex> lock(mutex);
      wake.notify_all();
    }
  }

  // Whoever has not joined by now does not; returns when those inside have left.
  void close() {
    gate.fetch_and(~kOpen);
    auto until = std::chrono::steady_clock::now() + kSpin;
    for (int spins = 1; gate.load(std::memory_order_acquire) & kInside; spins++) {
      pause();
      // Somebody may wait for a core with an item in hand: let him have this one.
      if (spins % 64 == 0 && std::chrono::steady_clock::now() > until) std::this_thread::yield();
    }
  }
};

Pool::Pool(int threads) : state_(new State), threads_(threads < 1 ? 1 : threads) {
  state_->own.resize(threads_);
  for (int thread = 1; thread < threads_; thread++)
    state_->workers.emplace_back([state = state_, thread] { state->work(thread); });
}

Pool::~Pool() {
  state_->stopping = true;
  state_->publish();
  for (auto& worker : state_->workers) worker.join();
  delete state_;
}

void Pool::run(int64_t count, Task task, void* context) {
  if (count == 1 || threads_ == 1) {
    for (int64_t item = 0; item < count; item++) task(context, item, 0);
    return;
  }
  if (count <= 0) return;
  State& s = *state_;
  s.count = count;
  s.task = task;
  s.context = context;
  s.next.store(0, std::memory_order_relaxed);
  s.publish();
  s.take(0);
  s.close();
}

void* Pool::scratch(int thread, size_t bytes) { return state_->own[thread].get(bytes); }

void* Pool::shared(int level, size_t bytes) { return state_->levels[level].get(bytes); }

}  // namespace headrace
