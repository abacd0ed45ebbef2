// y[t, o] = sum_i x[t, i] * w[o, i] for a few rows t: the weight is streamed from memory once, whatever T is.
//
// XLA's CPU backend packs the weight at every call when T > 1, which costs as much as two passes over it. The order
// of additions within one (t, o) does not depend on T, so a row's result is the same bits whoever rides along.

#include <algorithm>
#include <cstdint>

#include "parallel.h"
#include "vector.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

// Bytes ahead that are fetched early, past the larger caches: the hardware prefetcher alone falls behind where several
// tokens are multiplied.
constexpr int64_t kAhead = 8 << 10;

// R weight rows against T input rows, all sums in registers.
template <int T, int R>
inline void Tile(const float* x, const float* w, float* y, int64_t in, int64_t out) {
  Vec sum[R][T] = {};
  int64_t i = 0;
  for (; i + kLanes <= in; i += kLanes) {
    for (int r = 0; r < R; ++r) __builtin_prefetch(w + r * in + i + kAhead / sizeof(float), 0, 0);
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
    for (int t = 0; t < T; ++t) y[t * out + r] = Sum(sum[r][t]);
  }
}

// Weight rows taken at once, so that sums, weights and an input fit in the registers.
constexpr int TileRows(int tokens) { return std::clamp((kRegisters - 1) / (tokens + 1), 1, 4); }

template <int T>
inline void Rows(const float* x, const float* w, float* y, int64_t in, int64_t out, int64_t rows) {
  constexpr int R = TileRows(T);
  int64_t o = 0;
  for (; o + R <= rows; o += R) Tile<T, R>(x, w + o * in, y + o, in, out);
  for (; o < rows; ++o) Tile<T, 1>(x, w + o * in, y + o, in, out);
}

// `rows` weight rows, few enough to stay in cache, against all T inputs in groups of at most eight.
void Block(const float* x, const float* w, float* y, int64_t in, int64_t out, int64_t rows, int64_t tokens) {
  while (tokens > 0) {
    const int64_t group = tokens > 8 ? 8 : tokens;
    switch (group) {
      case 1: Rows<1>(x, w, y, in, out, rows); break;
      case 2: Rows<2>(x, w, y, in, out, rows); break;
      case 3: Rows<3>(x, w, y, in, out, rows); break;
      case 4: Rows<4>(x, w, y, in, out, rows); break;
      case 5: Rows<5>(x, w, y, in, out, rows); break;
      case 6: Rows<6>(x, w, y, in, out, rows); break;
      case 7: Rows<7>(x, w, y, in, out, rows); break;
      default: Rows<8>(x, w, y, in, out, rows); break;
    }
    x += group * in;
    y += group * out;
    tokens -= group;
  }
}

ffi::Error SkinnyMatmul(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> w,
                        ffi::ResultBuffer<ffi::F32> y) {
  const auto x_dims = x.dimensions();
  const auto w_dims = w.dimensions();
  if (x_dims.size() != 2 || w_dims.size() != 2 || x_dims[1] != w_dims[1]) {
    return ffi::Error::InvalidArgument("skinny_matmul expects x [rows, in] and w [out, in]");
  }
  const int64_t tokens = x_dims[0], in = x_dims[1], out = w_dims[0];
  // A block's rows stay in a core's cache while groups of inputs pass over them; every thread gets its share.
  const int64_t fit = (256 << 10) / (in * static_cast<int64_t>(sizeof(float)));
  const int64_t threads = std::max<int64_t>(pool.num_threads(), 1), share = (out + threads - 1) / threads;
  const int64_t rows = (std::max<int64_t>(std::min(fit, share), 8) + 3) / 4 * 4;
  const float *inputs = x.typed_data(), *weights = w.typed_data();
  float* outputs = y->typed_data();
  ForBlocks(pool, (out + rows - 1) / rows, [=](int64_t b) {
    const int64_t first = b * rows;
    Block(inputs, weights + first * in, outputs + first, in, out, std::min(rows, out - first), tokens);
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(specjax_skinny_matmul, SkinnyMatmul,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
