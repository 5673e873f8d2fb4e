// Mixtures of experts: the choice of a row's experts, and the weighted sum of their results.
#include <math.h>

#include "level.h"

// Keep the indices of the `chosen` largest logits, largest first; of equal ones the lower index comes first.
INLINE void choose(const float *logits, int64_t experts, int64_t chosen, int32_t *indices) {
  int64_t kept = 0;
  for (int64_t e = 0; e < experts; e++) {
    int64_t rank = kept;
    while (rank > 0 && logits[e] > logits[indices[rank - 1]]) rank--;
    if (rank == chosen) continue;
    if (kept < chosen) kept++;
    for (int64_t i = kept - 1; i > rank; i--) indices[i] = indices[i - 1];
    indices[rank] = (int32_t)e;
  }
}

void ISA(route)(const float *logits, int64_t experts, int64_t chosen, int normalized, int32_t *indices,
                float *weights) {
  choose(logits, experts, chosen, indices);
  int nan = 0;
  for (int64_t j = 0; j < experts; j += 16) nan |= vf_any_nan(columns_of(logits, j, experts, vf_zero()));
  const float top = nan ? NAN : logits[indices[0]];
  float sum = 0.f;
  for (int64_t i = 0; i < chosen; i++) sum += weights[i] = exp1(logits[indices[i]] - top);
  if (!normalized) {
    vf sums = vf_zero();
    for (int64_t j = 0; j < experts; j += 16) {
      const vf x = vf_exp(vf_sub(columns_of(logits, j, experts, vf_zero()), vf_set1(top)));
      sums = vf_add(sums, j + 16 <= experts ? x : vf_blend(x, vf_zero(), 0, (int)(experts - j)));
    }
    sum = vf_sum(sums);
  }
  for (int64_t i = 0; i < chosen; i++) weights[i] /= sum;
}

void ISA(combine)(const float *y, int64_t stride, const int32_t *places, const float *weights, int64_t chosen,
                  int64_t columns, float *out) {
  for (int64_t j = 0; j < columns; j += 16) {
    vf sum = vf_zero();
    for (int64_t i = 0; i < chosen; i++) sum = vf_fma(vf_set1(weights[i]), vf_load(y + places[i] * stride + j), sum);
    vf_store(out + j, vf_add(vf_load(out + j), sum));
  }
}
