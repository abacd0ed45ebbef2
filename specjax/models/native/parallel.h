// Blocks of work over XLA's own threads.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "xla/ffi/api/ffi.h"

// Calls `block(b)` once for each b < blocks, and returns when all are done. Which thread takes which is left open.
inline void ForBlocks(xla::ffi::ThreadPool& pool, int64_t blocks, std::function<void(int64_t)> block) {
  struct Work {
    std::function<void(int64_t)> block;
    int64_t blocks;
    std::atomic<int64_t> next{0}, finished{0};

    // Takes blocks until none is left. A helper that starts late finds none and touches nothing.
    void Run() {
      for (int64_t b; (b = next.fetch_add(1)) < blocks;) {
        block(b);
        finished.fetch_add(1, std::memory_order_release);
      }
    }
  };
  auto work = std::make_shared<Work>();
  work->block = std::move(block);
  work->blocks = blocks;
  const int64_t helpers = std::min<int64_t>(pool.num_threads(), blocks) - 1;
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule([work] { work->Run(); });
  work->Run();
  // Only blocks that a running helper holds are waited for: no deadlock when the pool is busy.
  while (work->finished.load(std::memory_order_acquire) < blocks) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
}
