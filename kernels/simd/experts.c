// Mixtures of experts: the choice of a row's experts, and the weighted sum of their results.
#include <math.h>

#include "level.h"

// Keep the indices of the `chosen` largest scores, largest first; of equal ones the lower index comes first.
INLINE void choose(const float *scores, int64_t experts, int64_t chosen, int32_t *indices) {
  int64_t kept = 0;
  for (int64_t e = 0; e < experts; e++) {
    int64_t rank = kept;
    while (rank > 0 && scores[e] > scores[indices[rank - 1]]) rank--;
    if (rank == chosen) continue;
    if (kept < chosen) kept++;
    for (int64_t i = kept - 1; i > rank; i--) indices[i] = indices[i - 1];
    indices[rank] = (int32_t)e;
  }
}

// The sigmoids of all logits, or their exponentials below the largest one, `top`; return the sum of the latter.
INLINE float score(const quire_router *r, const float *logits, float top, float *scores) {
  vf sums = vf_zero();
  for (int64_t j = 0; j < r->experts; j += 16) {
    const vf x = columns_of(logits, j, r->experts, vf_zero());
    const vf y = r->sigmoid ? vf_swish(vf_set1(top), x) : vf_exp(vf_sub(x, vf_set1(top)));
    vf_store(scores + j, y);
    sums = vf_add(sums, columns_of(scores, j, r->experts, vf_zero()));
  }
  return vf_sum(sums);
}

// The experts of groups that are not kept cannot be chosen. The score of a group is the sum of its two largest ranks.
INLINE void keep_groups(const quire_router *r, float *ranks) {
  const int64_t size = r->experts / r->groups;
  float scores[QUIRE_MAX_EXPERTS];
  int32_t kept[QUIRE_MAX_EXPERTS], pair[2];
  uint8_t is_kept[QUIRE_MAX_EXPERTS] = {0};
  for (int64_t g = 0; g < r->groups; g++) {
    const float *group = ranks + g * size;
    choose(group, size, 2, pair);
    scores[g] = group[pair[0]] + group[pair[1]];
  }
  choose(scores, r->groups, r->kept_groups, kept);
  for (int64_t i = 0; i < r->kept_groups; i++) is_kept[kept[i]] = 1;
  for (int64_t e = 0; e < r->experts; e++)
    if (!is_kept[e / size]) ranks[e] = -INFINITY;
}

void ISA(route)(const quire_router *r, const float *logits, int32_t *indices, float *weights) {
  float scores[QUIRE_MAX_EXPERTS], ranks[QUIRE_MAX_EXPERTS];
  const int is_ranked = r->bias || r->groups > 1;
  choose(logits, r->experts, is_ranked ? 1 : r->chosen, indices);
  int nan = 0;
  for (int64_t j = 0; j < r->experts; j += 16) nan |= vf_any_nan(columns_of(logits, j, r->experts, vf_zero()));
  const float top = r->sigmoid ? 1.f : logits[indices[0]], total = score(r, logits, nan ? NAN : top, scores);
  const float all = r->sigmoid ? 1.f : total;
  if (is_ranked) {
    for (int64_t j = 0; j < r->experts; j += 16) {
      const vf rank = vf_div(vf_load(scores + j), vf_set1(all));
      vf_store(ranks + j, r->bias ? vf_add(rank, vf_load(r->bias + j)) : rank);
    }
    if (r->groups > 1) keep_groups(r, ranks);
    choose(ranks, r->experts, r->chosen, indices);
  }
  float sum = 0.f;
  for (int64_t i = 0; i < r->chosen; i++) sum += weights[i] = scores[indices[i]];
  const float divisor = r->normalized ? sum + r->eps * all : all;
  for (int64_t i = 0; i < r->chosen; i++) weights[i] = weights[i] / divisor * r->scale;
}

void ISA(combine)(const float *y, int64_t stride, const int32_t *places, const float *weights, int64_t chosen,
                  int64_t columns, float *out) {
  for (int64_t j = 0; j < columns; j += 16) {
    vf sum = vf_zero();
    for (int64_t i = 0; i < chosen; i++) sum = vf_fma(vf_set1(weights[i]), vf_load(y + places[i] * stride + j), sum);
    vf_store(out + j, vf_add(vf_load(out + j), sum));
  }
}
