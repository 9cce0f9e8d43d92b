// The worker threads of a step: a fixed team of which the caller is one, and one way to use it: `run` hands out the
// numbers 0 .. count - 1, in order, to whoever is free, and returns when all are done.
//
// A worker that finds nothing to do spins for at most 50 us and then sleeps; with one thread nothing is started.
#pragma once

#include <cstddef>
#include <cstdint>

namespace headrace {

class Pool {
 public:
  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return threads_; }

  using Task = void (*)(void* context, int64_t item, int thread);
  // Calls task(context, item, thread) for every item; thread is 0 .. threads() - 1, the caller 0. Not re-entrant.
  void run(int64_t count, Task task, void* context);

  // At least `bytes` of memory aligned to 64, kept between calls but not its content from one operation to the next.
  // A thread's own, or shared by the items of an operation: level 0 for one that calls no other, level 1 for one that
  // does. Call `shared` outside of `run` only. Null when memory is short.
  void* scratch(int thread, size_t bytes);
  void* shared(int level, size_t bytes);

 private:
  struct State;
  State* state_;
  int threads_;
};

}  // namespace headrace
