// Vectors of floats as wide as the processor's, and multiply-add that is rounded the same way everywhere.

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int kLanes = 16, kRegisters = 32;
#else
constexpr int kLanes = 8, kRegisters = 16;
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

// The lanes' sum: halves are added until one lane is left, in the same order on every processor.
inline float Sum(Vec v) {
#if defined(__AVX__)
#if defined(__AVX512F__)
  const __m256 half =
      _mm256_add_ps(_mm512_castps512_ps256((__m512)v), (__m256)_mm512_extractf64x4_pd((__m512d)v, 1));
#else
  const __m256 half = (__m256)v;
#endif
  __m128 rest = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  rest = _mm_add_ps(rest, _mm_movehl_ps(rest, rest));
  return _mm_cvtss_f32(_mm_add_ss(rest, _mm_shuffle_ps(rest, rest, 1)));
#else
  for (int half = kLanes / 2; half; half /= 2) {
    for (int lane = 0; lane < half; ++lane) v[lane] += v[lane + half];
  }
  return v[0];
#endif
}
