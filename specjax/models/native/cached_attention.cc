// Attention of a few new tokens over a KV cache. Keys and values are read once for all queries that share their head,
// and only the slots that a token sees are touched at all.
//
// XLA's CPU backend turns these batched products into plain loops, and pays for every token and row anew. Slots are
// taken in one order, whatever stands beside a token: its result is the same bits in every batch and every chain. Of a
// tree it may differ in the last bit: siblings stand between a token and what it sees, and move the bounds of blocks.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "parallel.h"
#include "vector.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

constexpr int64_t kBlock = 64;  // slots whose keys and values stay in the nearest cache

typedef int32_t IntVec __attribute__((vector_size(kLanes * sizeof(int32_t))));

// exp(x) for x <= 0, within 2 ulp; 0 far below.
inline Vec Exp(Vec x) {
  const Vec low = {} , floor = low - 87.0f;
  x = x > floor ? x : floor;
  const Vec shifted = x * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: what is behind the point is rounded away
  const Vec whole = shifted - 12582912.0f;
  Vec r = MulAdd(whole, low - 0.693359375f, x);
  r = MulAdd(whole, low + 2.12194440e-4f, r);
  Vec y = low + 1.9875691500e-4f;
  y = MulAdd(y, r, low + 1.3981999507e-3f);
  y = MulAdd(y, r, low + 8.3334519073e-3f);
  y = MulAdd(y, r, low + 4.1665795894e-2f);
  y = MulAdd(y, r, low + 1.6666665459e-1f);
  y = MulAdd(y, r, low + 5.0000001201e-1f);
  y = MulAdd(y, r * r, r + 1.0f);
  const IntVec power = (__builtin_convertvector(whole, IntVec) + 127) << 23;
  return x > floor ? y * (Vec)power : low;
}

struct Sizes {
  int64_t rows, tokens, kv_heads, group, width, slots, scratch;
};

struct Options {
  int64_t window;  // positions; 0 for all
  float softcap;   // 0 for none
};

// Adds up lanes that differ in one bit: of `a` where that bit of the lane is 0, of `b` where it is 1.
#if defined(__clang__)
template <int Bit, int... Lane>
inline Vec FoldLanes(Vec a, Vec b, std::integer_sequence<int, Lane...>) {
  return __builtin_shufflevector(a, b, ((Lane & Bit ? kLanes : 0) + Lane)...) +
         __builtin_shufflevector(a, b, ((Lane & Bit ? kLanes : 0) + (Lane ^ Bit))...);
}

template <int Bit>
inline Vec Fold(Vec a, Vec b) {
  return FoldLanes<Bit>(a, b, std::make_integer_sequence<int, kLanes>());
}
#else
template <int Bit>
inline Vec Fold(Vec a, Vec b) {
  IntVec stay, cross;
  for (int lane = 0; lane < kLanes; ++lane) {
    const int from = lane & Bit ? kLanes : 0;
    stay[lane] = from + lane;
    cross[lane] = from + (lane ^ Bit);
  }
  return __builtin_shuffle(a, b, stay) + __builtin_shuffle(a, b, cross);
}
#endif

// Lane i of the result is the sum over the lanes of v[i]; a tree, without leaving the registers.
template <int Count>
inline Vec Sums(Vec* v) {
  constexpr int half = Count / 2;
  for (int i = 0; i < half; ++i) v[i] = Fold<half>(v[i], v[i + half]);
  if constexpr (half > 1) return Sums<half>(v);
  return v[0];
}

// Scores of `count` slots against one query, written in whole vectors: there are that many pointers.
inline void Scores(const float* query, const float* const* keys, int64_t head, int64_t count, int64_t width,
                   float* scores) {
  for (int64_t s = 0; s < count; s += kLanes) {
    Vec sum[kLanes] = {};
    int64_t i = 0;
    for (; i + kLanes <= width; i += kLanes) {
      const Vec q = Load(query + i);
      for (int j = 0; j < kLanes; ++j) sum[j] = MulAdd(Load(keys[s + j] + head + i), q, sum[j]);
    }
    if (i < width) {
      const Vec q = LoadPart(query + i, width - i);
      for (int j = 0; j < kLanes; ++j) sum[j] = MulAdd(LoadPart(keys[s + j] + head + i, width - i), q, sum[j]);
    }
    const Vec found = Sums<kLanes>(sum);
    std::memcpy(scores + s, &found, sizeof(Vec));
  }
}

// mixed = mixed * decay + sum of weights[s] * values[s], from `first` on, as far as N vectors go.
template <int N>
inline int64_t Mix(const float* weights, const float* const* values, int64_t head, int64_t count, float decay,
                   float* mixed, int64_t first, int64_t width) {
  int64_t i = first;
  for (; i + N * kLanes <= width; i += N * kLanes) {
    Vec sum[N];
    for (int j = 0; j < N; ++j) sum[j] = Load(mixed + i + j * kLanes) * decay;
    for (int64_t s = 0; s < count; ++s) {
      const Vec weight = Vec{} + weights[s];
      const float* value = values[s] + head + i;
      for (int j = 0; j < N; ++j) sum[j] = MulAdd(weight, Load(value + j * kLanes), sum[j]);
    }
    for (int j = 0; j < N; ++j) std::memcpy(mixed + i + j * kLanes, &sum[j], sizeof(Vec));
  }
  return i;
}

// A query's running softmax: the highest score so far, the sum of weights below it, the weighted sum of values.
struct Running {
  float top = -INFINITY, total = 0;

  // Takes `count` scores, written in whole vectors, and turns them into weights.
  float Take(float* scores, int64_t count, float softcap) {
    if (softcap) {
      for (int64_t s = 0; s < count; ++s) scores[s] = softcap * std::tanh(scores[s] / softcap);
    }
    float highest = top;
    for (int64_t s = 0; s < count; ++s) highest = scores[s] > highest || std::isnan(scores[s]) ? scores[s] : highest;
    for (int64_t s = count; s % kLanes; ++s) scores[s] = -INFINITY;
    Vec sum = {};
    for (int64_t s = 0; s < count; s += kLanes) {
      const Vec weight = Exp(Load(scores + s) - highest);
      std::memcpy(scores + s, &weight, sizeof(Vec));
      sum += weight;
    }
    const float decay = std::exp(top - highest);
    total = total * decay + Sum(sum);
    top = highest;
    return decay;
  }
};

// One row: all queries of the given heads of keys and values.
void Row(const float* q, const float* k, const float* v, int64_t prefix, const bool* mask, const int32_t* depths,
         int64_t first_head, int64_t heads, const Sizes& n, const Options& options, float* out) {
  const int64_t stride = n.kv_heads * n.width, token = stride * n.group;
  std::vector<Running> running(heads * n.tokens * n.group);
  std::vector<float> mixed(running.size() * n.width, 0.0f);
  const float *keys[kBlock], *values[kBlock];
  float weights[kBlock];
  const int64_t end = std::min(prefix + n.scratch, n.slots);
  for (int64_t block = 0; block < end; block += kBlock) {
    const int64_t stop = std::min(block + kBlock, end);
    const bool alike = stop <= prefix && !options.window;  // every token sees the whole block
    int64_t count = 0;
    for (int64_t t = 0; t < n.tokens; ++t) {
      if (!t || !alike) {
        const bool* sees = mask + t * n.scratch;
        const int64_t position = prefix + depths[n.scratch - n.tokens + t];
        count = 0;
        for (int64_t s = block; s < stop; ++s) {
          if (s >= prefix && !sees[s - prefix]) continue;
          const int64_t at = s < prefix ? s : prefix + depths[s - prefix];
          if (options.window && at <= position - options.window) continue;
          keys[count] = k + s * stride;
          values[count++] = v + s * stride;
        }
        for (int64_t s = count; s % kLanes; ++s) keys[s] = keys[0];  // read, and then not counted
      }
      if (!count) continue;
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t head = (first_head + h) * n.width;
        for (int64_t g = 0; g < n.group; ++g) {
          const int64_t i = (h * n.tokens + t) * n.group + g;
          Scores(q + t * token + head * n.group + g * n.width, keys, head, count, n.width, weights);
          const float decay = running[i].Take(weights, count, options.softcap);
          float* sum = mixed.data() + i * n.width;
          int64_t done = Mix<8>(weights, values, head, count, decay, sum, 0, n.width);
          done = Mix<1>(weights, values, head, count, decay, sum, done, n.width);
          for (; done < n.width; ++done) {
            sum[done] *= decay;
            for (int64_t s = 0; s < count; ++s) sum[done] += weights[s] * values[s][head + done];
          }
        }
      }
    }
  }
  for (int64_t h = 0; h < heads; ++h) {
    for (int64_t t = 0; t < n.tokens; ++t) {
      for (int64_t g = 0; g < n.group; ++g) {
        const int64_t i = (h * n.tokens + t) * n.group + g;
        float* at = out + t * token + ((first_head + h) * n.group + g) * n.width;
        for (int64_t w = 0; w < n.width; ++w) at[w] = mixed[i * n.width + w] / running[i].total;
      }
    }
  }
}

ffi::Error CachedAttention(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> q, ffi::Buffer<ffi::F32> k,
                           ffi::Buffer<ffi::F32> v, ffi::Buffer<ffi::S32> prefix, ffi::Buffer<ffi::PRED> mask,
                           ffi::Buffer<ffi::S32> depths, ffi::ResultBuffer<ffi::F32> out, int64_t window,
                           float softcap) {
  // Dimensions in front of these are rows too: `vmap` puts them there.
  const auto qd = q.dimensions(), kd = k.dimensions(), md = mask.dimensions();
  const size_t a = qd.size(), c = kd.size(), m = md.size();
  if (a < 5 || c < 4 || m < 3) return ffi::Error::InvalidArgument("cached_attention expects q [B, T, K, G, H]");
  const Sizes n = {static_cast<int64_t>(prefix.element_count()),
                   qd[a - 4], qd[a - 3], qd[a - 2], qd[a - 1], kd[c - 3], md[m - 1]};
  const auto fits = [](size_t found, int64_t expected) { return static_cast<int64_t>(found) == expected; };
  const int64_t queries = n.rows * n.tokens * n.kv_heads * n.group * n.width;
  const int64_t cached = n.rows * n.slots * n.kv_heads * n.width;
  if (!fits(q.element_count(), queries) || !fits(k.element_count(), cached) || !fits(v.element_count(), cached) ||
      !fits(mask.element_count(), n.rows * n.tokens * n.scratch) ||
      !fits(depths.element_count(), n.rows * n.scratch) || n.tokens > n.scratch) {
    return ffi::Error::InvalidArgument(
        "cached_attention expects q [B, T, K, G, H], k and v [B, S, K, H], prefix [B], mask [B, T, M], depths [B, M]");
  }
  const float *queries_at = q.typed_data(), *keys = k.typed_data(), *values = v.typed_data();
  const int32_t *prefixes = prefix.typed_data(), *depths_at = depths.typed_data();
  const bool* masks = mask.typed_data();
  float* result = out->typed_data();
  const Options options = {window, softcap};
  // A row's heads lie beside each other: together where there are rows enough for all threads.
  const int64_t heads = n.rows < static_cast<int64_t>(pool.num_threads()) ? 1 : n.kv_heads;
  const int64_t parts = n.kv_heads / heads;
  ForBlocks(pool, n.rows * parts, [=](int64_t b) {
    const int64_t row = b / parts, query = row * n.tokens * n.kv_heads * n.group * n.width;
    const int64_t cache = row * n.slots * n.kv_heads * n.width;
    Row(queries_at + query, keys + cache, values + cache, prefixes[row], masks + row * n.tokens * n.scratch,
        depths_at + row * n.scratch, b % parts * heads, heads, n, options, result + query);
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(specjax_cached_attention, CachedAttention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::PRED>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<int64_t>("window")
                                  .Attr<float>("softcap"));
