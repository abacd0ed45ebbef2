// y[t, o] = sum_i x[t, i] * w[o, i] for a few rows t: the weight is streamed from memory once, whatever T is.
//
// XLA's CPU backend packs the weight at every call when T > 1, which costs as much as two passes over it. The order
// of additions within one (t, o) does not depend on T, so a row's result is the same bits whoever rides along.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>

#if defined(__FMA__)
#include <immintrin.h>
#endif

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#else
constexpr int kLanes = 8;
#endif
typedef float Vec __attribute__((vector_size(kLanes * sizeof(float))));

inline Vec Load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

// a * b + c, rounded the same way wherever it is inlined: the compiler's own contraction is not.
inline Vec MulAdd(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

inline Vec LoadPart(const float* p, int64_t count) {
  Vec v = {};
  std::memcpy(&v, p, count * sizeof(float));
  return v;
}

// Rows ahead that are fetched early: the hardware prefetcher alone reaches two thirds of the bandwidth.
constexpr int kAhead = 8;

// R weight rows against T input rows, all sums in registers.
template <int T, int R>
inline void Tile(const float* x, const float* w, float* y, int64_t in, int64_t out) {
  Vec sum[R][T] = {};
  int64_t i = 0;
  for (; i + kLanes <= in; i += kLanes) {
    for (int r = 0; r < R; ++r) __builtin_prefetch(w + (r + kAhead) * in + i);
    Vec weight[R];
    for (int r = 0; r < R; ++r) weight[r] = Load(w + r * in + i);
    for (int t = 0; t < T; ++t) {
      const Vec input = Load(x + t * in + i);
      for (int r = 0; r < R; ++r) sum[r][t] = MulAdd(weight[r], input, sum[r][t]);
    }
  }
  if (i < in) {  // What is left of the rows, padded with zeros: the same additions for every T and R.
    Vec weight[R];
    for (int r = 0; r < R; ++r) weight[r] = LoadPart(w + r * in + i, in - i);
    for (int t = 0; t < T; ++t) {
      const Vec input = LoadPart(x + t * in + i, in - i);
      for (int r = 0; r < R; ++r) sum[r][t] = MulAdd(weight[r], input, sum[r][t]);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int t = 0; t < T; ++t) {
      float total = 0;
      for (int lane = 0; lane < kLanes; ++lane) total += sum[r][t][lane];
      y[t * out + r] = total;
    }
  }
}

template <int T, int R>
inline void Rows(const float* x, const float* w, float* y, int64_t in, int64_t out, int64_t rows) {
  int64_t o = 0;
  for (; o + R <= rows; o += R) Tile<T, R>(x, w + o * in, y + o, in, out);
  for (; o < rows; ++o) Tile<T, 1>(x, w + o * in, y + o, in, out);
}

// `rows` weight rows, few enough to stay in cache, against all T inputs in groups of at most eight.
void Block(const float* x, const float* w, float* y, int64_t in, int64_t out, int64_t rows, int64_t tokens) {
  while (tokens > 0) {
    const int64_t group = tokens > 8 ? 8 : tokens;
    switch (group) {
      case 1: Rows<1, 4>(x, w, y, in, out, rows); break;
      case 2: Rows<2, 1>(x, w, y, in, out, rows); break;
      case 3: Rows<3, 1>(x, w, y, in, out, rows); break;
      case 4: Rows<4, 1>(x, w, y, in, out, rows); break;
      case 5: Rows<5, 1>(x, w, y, in, out, rows); break;
      case 6: Rows<6, 1>(x, w, y, in, out, rows); break;
      case 7: Rows<7, 1>(x, w, y, in, out, rows); break;
      default: Rows<8, 1>(x, w, y, in, out, rows); break;
    }
    x += group * in;
    y += group * out;
    tokens -= group;
  }
}

struct Work {
  const float *x, *w;
  float* y;
  int64_t tokens, in, out, rows, blocks;
  std::atomic<int64_t> next{0}, finished{0};

  // Takes blocks until none is left. A helper that starts late finds none and touches nothing.
  void Run() {
    for (int64_t b; (b = next.fetch_add(1)) < blocks;) {
      const int64_t first = b * rows;
      const int64_t count = first + rows > out ? out - first : rows;
      Block(x, w + first * in, y + first, in, out, count, tokens);
      finished.fetch_add(1, std::memory_order_release);
    }
  }
};

ffi::Error SkinnyMatmul(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> w,
                        ffi::ResultBuffer<ffi::F32> y) {
  const auto x_dims = x.dimensions();
  const auto w_dims = w.dimensions();
  if (x_dims.size() != 2 || w_dims.size() != 2 || x_dims[1] != w_dims[1]) {
    return ffi::Error::InvalidArgument("skinny_matmul expects x [rows, in] and w [out, in]");
  }
  auto work = std::make_shared<Work>();
  work->x = x.typed_data();
  work->w = w.typed_data();
  work->y = y->typed_data();
  work->tokens = x_dims[0];
  work->in = x_dims[1];
  work->out = w_dims[0];
  const int64_t fit = (128 << 10) / (work->in * static_cast<int64_t>(sizeof(float)));
  work->rows = fit < 8 ? 8 : fit - fit % 4;
  work->blocks = (work->out + work->rows - 1) / work->rows;
  const int64_t helpers = std::min<int64_t>(pool.num_threads(), work->blocks) - 1;
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule([work] { work->Run(); });
  work->Run();
  // Only blocks that a running helper holds are waited for: no deadlock when the pool is busy.
  while (work->finished.load(std::memory_order_acquire) < work->blocks) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(specjax_skinny_matmul, SkinnyMatmul,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
