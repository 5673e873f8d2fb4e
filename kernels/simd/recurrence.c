// Ops with a state of each sequence, one token after another: a row's results do not depend on how rows are divided into
// steps.
#include "level.h"

void ISA(convolve)(const quire_convolution *c, const float *x, int64_t position, float *out) {
  const float *before[QUIRE_MAX_TAPS];  // inputs of the tokens that the row sees, oldest first; NULL before the first token
  for (int64_t i = 0; i < c->taps; i++) {
    const int64_t at = position - c->taps + 1 + i;
    before[i] = at < 0 ? 0 : c->ring + at % c->rows * c->stride;
  }
  float *now = c->ring + position % c->rows * c->stride;
  for (int64_t j = 0; j < c->columns; j += 16) {
    const vf gate = columns_of(x, j, c->columns, vf_zero()), value = columns_of(x + 2 * c->part, j, c->columns, vf_zero());
    vf_store(now + j, vf_mul(gate, value));
    vf sum = c->bias ? vf_load(c->bias + j) : vf_zero();
    for (int64_t i = 0; i < c->taps; i++)
      if (before[i]) sum = vf_fma(vf_load(c->weight + i * c->stride + j), vf_load(before[i] + j), sum);
    vf_store(out + j, vf_mul(columns_of(x + c->part, j, c->columns, vf_zero()), sum));
  }
}
