// What a small model on a CPU needs beside torch's operations: attention in training, and of a decoding step everything: products
// of a few rows, norms, rotary positions, attention of one new token a row, sampling.
//
// Built by kernels.py for the processor at hand. The file includes itself once for each type of number; sums are float32.
#ifndef TYPE

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#define JOIN_(name, type) name##_##type
#define JOIN(name, type) JOIN_(name, type)
#define NAME(name) JOIN(name, TYPE)

typedef uint16_t bfloat;
typedef float lanes __attribute__((vector_size(64)));
typedef uint32_t wide_bits __attribute__((vector_size(64)));
typedef uint16_t half_bits __attribute__((vector_size(32)));

static inline float widen_float(float x) { return x; }
static inline float narrow_float(float x) { return x; }

static inline float widen_bfloat(bfloat x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline bfloat narrow_bfloat(float value) {  // to nearest, ties to even; a quiet NaN stays one
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return (bfloat)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static inline lanes load_float(const float *from) {
    lanes loaded;
    memcpy(&loaded, from, sizeof loaded);
    return loaded;
}

static inline lanes load_bfloat(const bfloat *from) {
    half_bits loaded;
    memcpy(&loaded, from, sizeof loaded);
    return (lanes)(__builtin_convertvector(loaded, wide_bits) << 16);
}

#ifdef __AVX512BF16__
// out[k] = query · rows[k] for four rows one after another, dim a multiple of 32: partial sums are added across in one go.
static inline void four_dots(float *out, const bfloat *query, const bfloat *rows, int64_t dim) {
    __m512 part[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
    for (int64_t d = 0; d < dim; d += 32) {
        __m512bh q = (__m512bh)_mm512_loadu_si512(query + d);
        for (int k = 0; k < 4; k++)
            part[k] = _mm512_dpbf16_ps(part[k], q, (__m512bh)_mm512_loadu_si512(rows + k * dim + d));
    }
    __m512d ab = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(part[0], part[1]), _mm512_unpackhi_ps(part[0], part[1])));
    __m512d cd = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(part[2], part[3]), _mm512_unpackhi_ps(part[2], part[3])));
    __m512 all = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)), _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)));
    __m128 left = _mm_add_ps(_mm512_extractf32x4_ps(all, 0), _mm512_extractf32x4_ps(all, 1));
    __m128 right = _mm_add_ps(_mm512_extractf32x4_ps(all, 2), _mm512_extractf32x4_ps(all, 3));
    _mm_storeu_ps(out, _mm_add_ps(left, right));
}
#define FOUR_DOTS_bfloat 1
#else
#define FOUR_DOTS_bfloat 0
static inline void four_dots(float *out, const void *query, const void *rows, int64_t dim) {}
#endif
#define FOUR_DOTS_float 0

static inline void *room(int64_t bytes) { return malloc(bytes > 0 ? bytes : 1); }

// Scores become their softmax. What is not a number stays so: -ffast-math would clip it away.
static inline void softmax(float *scores, int64_t count) {
    float largest = -FLT_MAX, total = 0;
    uint32_t strange = 0;
    for (int64_t t = 0; t < count; t++) {
        uint32_t bits;
        memcpy(&bits, scores + t, 4);
        strange |= (bits & 0x7fffffff) > 0x7f800000;
    }
    if (strange) {
        for (int64_t t = 0; t < count; t++) memcpy(scores + t, &(uint32_t){0x7fc00000}, 4);
        return;
    }
    for (int64_t t = 0; t < count; t++) largest = scores[t] > largest ? scores[t] : largest;
    for (int64_t t = 0; t < count; t++) {
        // What float32 cannot add to 1 is exactly 0: the hidden stay hidden, and no gradient becomes a subnormal number, which an
        // Intel core multiplies ten times more slowly.
        float below = scores[t] - largest;
        total += scores[t] = below < -40 ? 0 : expf(below < -40 ? -40 : below);
    }
    for (int64_t t = 0; t < count; t++) scores[t] /= total;
}

// Products with a matrix that is laid out for them (products.Panels): panels of outputs, in each the inputs one after another, four
// bytes of every output at a time. A tile of rows by outputs stays in registers; meanwhile the next panel is fetched from memory.
#ifdef __AVX512F__
enum { LANE = 16, LANES = 3, TILE = 8 };
#else
enum { LANE = 8, LANES = 3, TILE = 4 };
#endif
enum { PANEL = LANE * LANES };
typedef float vector __attribute__((vector_size(4 * LANE)));
typedef uint32_t bits __attribute__((vector_size(4 * LANE)));

static inline vector load_vector(const void *from) {
    vector loaded;
    memcpy(&loaded, from, sizeof loaded);
    return loaded;
}

// sum + x * weights, over one input (float) or two (bfloat).
static inline vector step_float(vector sum, const float *x, vector weights) { return sum + *x * weights; }

static inline vector step_bfloat(vector sum, const bfloat *x, vector weights) {
#ifdef __AVX512BF16__
    int32_t pair;
    memcpy(&pair, x, sizeof pair);
    return (vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)weights);
#else
    return sum + widen_bfloat(x[0]) * (vector)((bits)weights << 16) + widen_bfloat(x[1]) * (vector)((bits)weights & 0xffff0000u);
#endif
}

static inline void store_float(float *out, vector sum, int64_t count) { memcpy(out, &sum, count * sizeof *out); }

static inline void store_bfloat(bfloat *out, vector sum, int64_t count) {
#ifdef __AVX512BF16__
    _mm256_mask_storeu_epi16(out, count < LANE ? (1 << count) - 1 : 0xffff, (__m256i)_mm512_cvtneps_pbh((__m512)sum));
#else
    typedef uint16_t halves __attribute__((vector_size(2 * LANE)));
    bits value = (bits)sum;
    halves rounded = __builtin_convertvector((value + 0x7fff + ((value >> 16) & 1)) >> 16, halves);
    memcpy(out, &rounded, count * sizeof *out);
#endif
}

// Outputs of a panel; 0 where `product` is not the thing to use: a processor with a matrix unit has better for bfloat, and torch
// knows it.
int64_t panel_width_float(void) {
#ifdef __AVX2__
    return PANEL;
#else
    return 0;
#endif
}

int64_t panel_width_bfloat(void) {
#if defined(__AVX2__) && !defined(__AMX_BF16__)
    return PANEL;
#else
    return 0;
#endif
}

#define TYPE float
#include "kernels.c"
#undef TYPE
#define TYPE bfloat
#include "kernels.c"

#else

#define WIDEN NAME(widen)
#define NARROW NAME(narrow)
#define LOAD NAME(load)

static inline __attribute__((always_inline)) void NAME(tile)(const int rows, int64_t steps, const TYPE *x, const TYPE *panel,
                                                             const char *ahead, const float *bias, TYPE *out, int64_t out_row,
                                                             int64_t columns) {
    enum { EACH = 4 / sizeof(TYPE) };
    vector sums[TILE][LANES];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < LANES; v++) sums[r][v] = bias ? load_vector(bias + LANE * v) : (vector){0};
    for (int64_t k = 0; k < steps; k++) {
        vector weights[LANES];
        __builtin_prefetch(ahead + 4 * LANE * k, 0, 2);
        for (int v = 0; v < LANES; v++) weights[v] = load_vector(panel + EACH * (PANEL * k + LANE * v));
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < LANES; v++) sums[r][v] = NAME(step)(sums[r][v], x + EACH * (r * steps + k), weights[v]);
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < LANES && LANE * v < columns; v++)
            NAME(store)(out + r * out_row + LANE * v, sums[r][v], columns - LANE * v < LANE ? columns - LANE * v : LANE);
}

// out (rows, columns) = x (rows, steps of four bytes) · matrix (+ bias, a float for every output of the panels). All contiguous.
void NAME(product)(int64_t rows, int64_t steps, int64_t columns, const TYPE *x, const TYPE *panels, const float *bias, TYPE *out) {
    enum { EACH = 4 / sizeof(TYPE) };
    int64_t count = (columns + PANEL - 1) / PANEL, tiles = (rows + TILE - 1) / TILE, parts = 1;
    if (rows == 0) return;
#ifdef _OPENMP
    int64_t tasks = 2 * omp_get_max_threads();  // with fewer panels than these the rows are shared out as well
    if (count < tasks) parts = (tasks + count - 1) / count < tiles ? (tasks + count - 1) / count : tiles;
#endif
    int64_t stride = (tiles + parts - 1) / parts * TILE;
#pragma omp parallel for schedule(static) collapse(2)
    for (int64_t number = 0; number < count; number++)
        for (int64_t part = 0; part < parts; part++) {
            const TYPE *panel = panels + number * steps * EACH * PANEL;
            const char *ahead = (const char *)(panel + steps * EACH * PANEL);
            const float *added = bias ? bias + PANEL * number : 0;
            int64_t first = PANEL * number, end = (part + 1) * stride < rows ? (part + 1) * stride : rows;
            for (int64_t row = part * stride; row < end; row += TILE, ahead += 4 * LANE * steps)
                switch (end - row) {
#define ROWS(n)                                                                                                                \
    NAME(tile)(n < TILE ? n : TILE, steps, x + row * EACH * steps, panel, ahead, added, out + row * columns + first, columns, \
               columns - first)
                    case 1: ROWS(1); break;
                    case 2: ROWS(2); break;
                    case 3: ROWS(3); break;
                    case 4: ROWS(4); break;
                    case 5: ROWS(5); break;
                    case 6: ROWS(6); break;
                    case 7: ROWS(7); break;
                    default: ROWS(TILE);
#undef ROWS
                }
        }
}

// out[t] = query · rows[t]
static inline void NAME(dots)(float *out, const TYPE *query, const TYPE *rows, int64_t count, int64_t dim) {
    int64_t t = 0;
    if (NAME(FOUR_DOTS) && dim % 32 == 0)
        for (; t + 4 <= count; t += 4) four_dots(out + t, (const void *)query, (const void *)(rows + t * dim), dim);
    for (; t < count; t++) {
        float sum = 0;
        for (int64_t d = 0; d < dim; d++) sum += WIDEN(query[d]) * WIDEN(rows[t * dim + d]);
        out[t] = sum;
    }
}

// For each of n queries: out[q] = sum_t weights[q][t] values[t]; what is read of the values serves all of them.
static inline __attribute__((always_inline)) void NAME(mix_some)(TYPE *out, const float *weights, const TYPE *values,
                                                                 int64_t count, int64_t dim, const int n) {
    int64_t d = 0;
    for (; d + 64 <= dim; d += 64) {
        lanes sums[4][4] = {{{0}}};
        for (int64_t t = 0; t < count; t++)
            for (int part = 0; part < 4; part++) {
                lanes value = LOAD(values + t * dim + d + 16 * part);
                for (int q = 0; q < n; q++) sums[q][part] += weights[q * count + t] * value;
            }
        for (int q = 0; q < n; q++)
            for (int k = 0; k < 64; k++) out[q * dim + d + k] = NARROW(sums[q][k / 16][k % 16]);
    }
    for (; d < dim; d++)
        for (int q = 0; q < n; q++) {
            float sum = 0;
            for (int64_t t = 0; t < count; t++) sum += weights[q * count + t] * WIDEN(values[t * dim + d]);
            out[q * dim + d] = NARROW(sum);
        }
}

static inline void NAME(mix)(TYPE *out, const float *weights, const TYPE *values, int64_t count, int64_t dim, int64_t n) {
    switch (n) {
        case 1: NAME(mix_some)(out, weights, values, count, dim, 1); break;
        case 2: NAME(mix_some)(out, weights, values, count, dim, 2); break;
        case 3: NAME(mix_some)(out, weights, values, count, dim, 3); break;
        default: NAME(mix_some)(out, weights, values, count, dim, 4);
    }
}

// totals[t] += sum over n queries of weights[q][t] rows[q]
static inline __attribute__((always_inline)) void NAME(spread_some)(float *totals, const float *weights, const TYPE *rows,
                                                                    int64_t count, int64_t dim, const int n) {
    int64_t d = 0;
    for (; d + 64 <= dim; d += 64) {
        lanes row[4][4];
        for (int q = 0; q < n; q++)
            for (int part = 0; part < 4; part++) row[q][part] = LOAD(rows + q * dim + d + 16 * part);
        for (int64_t t = 0; t < count; t++)
            for (int part = 0; part < 4; part++) {
                float *total = totals + t * dim + d + 16 * part;
                lanes sum = load_float(total);
                for (int q = 0; q < n; q++) sum += weights[q * count + t] * row[q][part];
                memcpy(total, &sum, sizeof sum);
            }
    }
    for (int64_t t = 0; t < count && d < dim; t++)
        for (int64_t e = d; e < dim; e++)
            for (int q = 0; q < n; q++) totals[t * dim + e] += weights[q * count + t] * WIDEN(rows[q * dim + e]);
}

static inline void NAME(spread)(float *totals, const float *weights, const TYPE *rows, int64_t count, int64_t dim, int64_t n) {
    switch (n) {
        case 1: NAME(spread_some)(totals, weights, rows, count, dim, 1); break;
        case 2: NAME(spread_some)(totals, weights, rows, count, dim, 2); break;
        case 3: NAME(spread_some)(totals, weights, rows, count, dim, 3); break;
        default: NAME(spread_some)(totals, weights, rows, count, dim, 4);
    }
}

// Probabilities of a tile's query over the keys that the tile sees.
static inline void NAME(probabilities)(float *out, const TYPE *query, const TYPE *keys, const float *mask, int64_t count,
                                       int64_t dim, float scale) {
    NAME(dots)(out, query, keys, count, dim);
    for (int64_t t = 0; t < count; t++) out[t] = scale * out[t] + mask[t];
    softmax(out, count);
}

static inline void NAME(gather)(TYPE *out, const TYPE *from, const int64_t *keys, int64_t count, int64_t heads, int64_t head,
                                int64_t dim) {
    for (int64_t t = 0; t < count; t++) memcpy(out + t * dim, from + (keys[t] * heads + head) * dim, dim * sizeof(TYPE));
}

// Attention of tiles: tile m's queries, (kv_heads, rows, dim) with rows = group * side, see the keys numbered
// keys[starts[m]] .. keys[starts[m + 1] - 1], as the additive mask (side, their number) at mask + side * starts[m] lets them.
// key, value (all keys, kv_heads, dim); out is like query. Returns 1, with some of it left out, where memory ran out.
int64_t NAME(attend)(int64_t tiles, int64_t kv_heads, int64_t group, int64_t side, int64_t dim, const int64_t *starts,
                  const int64_t *keys, const float *mask, const TYPE *query, const TYPE *key, const TYPE *value, TYPE *out,
                  float scale) {
    int64_t failed = 0;
#pragma omp parallel for schedule(dynamic, 1) collapse(2) reduction(| : failed)
    for (int64_t m = 0; m < tiles; m++)
        for (int64_t head = 0; head < kv_heads; head++) {
            int64_t rows = group * side, count = starts[m + 1] - starts[m], first = (m * kv_heads + head) * rows * dim;
            TYPE *some_keys = room(2 * count * dim * sizeof(TYPE)), *some_values = some_keys + count * dim;
            float *weights = room(4 * count * sizeof(float));
            if (!some_keys || !weights) {
                failed = 1, free(some_keys), free(weights);
                continue;
            }
            NAME(gather)(some_keys, key, keys + starts[m], count, kv_heads, head, dim);
            NAME(gather)(some_values, value, keys + starts[m], count, kv_heads, head, dim);
            for (int64_t row = 0; row < rows; row += 4) {
                int64_t n = rows - row < 4 ? rows - row : 4;
                for (int64_t q = 0; q < n; q++)
                    NAME(probabilities)(weights + q * count, query + first + (row + q) * dim, some_keys,
                                        mask + side * starts[m] + (row + q) % side * count, count, dim, scale);
                NAME(mix)(out + first + row * dim, weights, some_values, count, dim, n);
            }
            free(some_keys), free(weights);
        }
    return failed;
}

// Its gradients, from grad (like query): grad_query; grad_key and grad_value, float32, are added to. Every tile's share of the
// latter waits in `shares`, 2 * kv_heads * dim floats a key of the tiles, and all are added up in one order. Returns 1, with
// nothing added to the latter, where memory ran out.
int64_t NAME(attend_back)(int64_t tiles, int64_t kv_heads, int64_t group, int64_t side, int64_t dim, const int64_t *starts,
                       const int64_t *keys, const float *mask, const TYPE *query, const TYPE *key, const TYPE *value,
                       const TYPE *grad, TYPE *grad_query, float *grad_key, float *grad_value, float *shares, float scale) {
    int64_t base = starts[0], failed = 0;
#pragma omp parallel for schedule(dynamic, 1) collapse(2) reduction(| : failed)
    for (int64_t m = 0; m < tiles; m++)
        for (int64_t head = 0; head < kv_heads; head++) {
            int64_t rows = group * side, count = starts[m + 1] - starts[m], first = (m * kv_heads + head) * rows * dim;
            TYPE *some_keys = room(2 * count * dim * sizeof(TYPE)), *some_values = some_keys + count * dim;
            float *weights = room(8 * count * sizeof(float)), *inner = weights + 4 * count;
            if (!some_keys || !weights) {
                failed = 1, free(some_keys), free(weights);
                continue;
            }
            float *key_share = shares + 2 * dim * (kv_heads * (starts[m] - base) + head * count), *value_share = key_share + count * dim;
            memset(key_share, 0, 2 * count * dim * sizeof(float));
            NAME(gather)(some_keys, key, keys + starts[m], count, kv_heads, head, dim);
            NAME(gather)(some_values, value, keys + starts[m], count, kv_heads, head, dim);
            for (int64_t row = 0; row < rows; row += 4) {
                int64_t n = rows - row < 4 ? rows - row : 4, at = first + row * dim;
                for (int64_t q = 0; q < n; q++) {
                    float *p = weights + q * count, *d = inner + q * count, sum = 0;
                    NAME(probabilities)(p, query + at + q * dim, some_keys, mask + side * starts[m] + (row + q) % side * count,
                                        count, dim, scale);
                    NAME(dots)(d, grad + at + q * dim, some_values, count, dim);
                    for (int64_t t = 0; t < count; t++) sum += p[t] * d[t];
                    for (int64_t t = 0; t < count; t++) d[t] = scale * p[t] * (d[t] - sum);
                }
                NAME(mix)(grad_query + at, inner, some_keys, count, dim, n);
                NAME(spread)(key_share, inner, query + at, count, dim, n);
                NAME(spread)(value_share, weights, grad + at, count, dim, n);
            }
            free(some_keys), free(weights);
        }
    if (failed) return failed;
    int64_t slices = (dim + 15) / 16;
#pragma omp parallel for schedule(static) collapse(2)
    for (int64_t head = 0; head < kv_heads; head++)
        for (int64_t slice = 0; slice < slices; slice++)
            for (int64_t m = 0; m < tiles; m++) {
                int64_t count = starts[m + 1] - starts[m], end = 16 * slice + 16 < dim ? 16 * slice + 16 : dim;
                const float *share = shares + 2 * dim * (kv_heads * (starts[m] - base) + head * count);
                for (int64_t t = 0; t < count; t++) {
                    int64_t to = (keys[starts[m] + t] * kv_heads + head) * dim;
                    for (int64_t d = 16 * slice; d < end; d++) {
                        grad_key[to + d] += share[t * dim + d];
                        grad_value[to + d] += share[(count + t) * dim + d];
                    }
                }
            }
    return failed;
}

// residual += delta (if there is one); out = residual / rms(residual) * weight. Rows are contiguous.
void NAME(add_norm)(int64_t rows, int64_t dim, TYPE *residual, const TYPE *delta, const TYPE *weight, float epsilon, TYPE *out) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        TYPE *x = residual + row * dim;
        float square = 0;
        if (delta)
            for (int64_t d = 0; d < dim; d++) x[d] = NARROW(WIDEN(x[d]) + WIDEN(delta[row * dim + d]));
        for (int64_t d = 0; d < dim; d++) square += WIDEN(x[d]) * WIDEN(x[d]);
        float factor = 1 / sqrtf(square / dim + epsilon);
        for (int64_t d = 0; d < dim; d++) out[row * dim + d] = NARROW(WIDEN(x[d]) * factor * WIDEN(weight[d]));
    }
}

// The first `queries` and the next `keys` heads of each row (row_stride apart, dim wide) are normalised where a weight is given,
// and their first `turned` numbers rotated in halves by angles (rows, turned): cosines, sines.
void NAME(rotate)(int64_t rows, int64_t queries, int64_t keys, int64_t dim, int64_t turned, int64_t row_stride, TYPE *heads,
                  const float *cosines, const float *sines, const TYPE *query_weight, const TYPE *key_weight, float epsilon) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t head = 0; head < queries + keys; head++) {
            TYPE *x = heads + row * row_stride + head * dim;
            const TYPE *weight = head < queries ? query_weight : key_weight;
            const float *cosine = cosines + row * turned, *sine = sines + row * turned;
            int64_t half = turned / 2;
            if (weight) {
                float square = 0;
                for (int64_t d = 0; d < dim; d++) square += WIDEN(x[d]) * WIDEN(x[d]);
                float factor = 1 / sqrtf(square / dim + epsilon);
                for (int64_t d = 0; d < dim; d++) x[d] = NARROW(WIDEN(x[d]) * factor * WIDEN(weight[d]));
            }
            for (int64_t d = 0; d < half; d++) {
                float a = WIDEN(x[d]), b = WIDEN(x[d + half]);
                x[d] = NARROW(a * cosine[d] - b * sine[d]);
                x[d + half] = NARROW(b * cosine[d + half] + a * sine[d + half]);
            }
        }
}

// out (rows, dim) = silu(a) * b, where a and b are the halves of each of the rows, (rows, 2 * dim).
void NAME(gate)(int64_t rows, int64_t dim, const TYPE *both, TYPE *out) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t start = 0; start < dim; start += 256) {  // in pieces of float: mixed widths beside expf are not vectorised
            const TYPE *restrict a = both + 2 * row * dim + start, *restrict b = a + dim;
            TYPE *restrict product = out + row * dim + start;
            int64_t count = dim - start < 256 ? dim - start : 256;
            float gated[256];
            for (int64_t d = 0; d < count; d++) gated[d] = WIDEN(a[d]);
            for (int64_t d = 0; d < count; d++) {
                float power = -gated[d];  // beyond +-80 it changes nothing, and would take expf's slow way
                power = power > 80 ? 80 : power < -80 ? -80 : power;
                gated[d] = 1 / (1 + expf(power));
            }
            for (int64_t d = 0; d < count; d++) product[d] = NARROW(gated[d] * WIDEN(a[d]) * WIDEN(b[d]));
        }
}

// Each row's new key and value go to place lengths[row] of its slot; then the row attends to that place and those before it.
// query (rows, kv_heads * group, dim), new_keys and new_values (rows, kv_heads, dim), each with its strides of row and head;
// keys, values (slots, kv_heads, capacity, dim) and out (rows, kv_heads * group, dim) contiguous. window 0: all places;
// softcap 0: none. Returns 1, with some of it left out, where memory ran out.
int64_t NAME(decode)(int64_t rows, int64_t kv_heads, int64_t group, int64_t dim, int64_t capacity, const int64_t *lengths,
                  const TYPE *query, int64_t query_row, int64_t query_head, const TYPE *new_keys, int64_t key_row,
                  int64_t key_head, const TYPE *new_values, int64_t value_row, int64_t value_head, TYPE *keys, TYPE *values,
                  TYPE *out, float scale, int64_t window, float softcap) {
    int64_t failed = 0;
#pragma omp parallel for schedule(dynamic, 4) collapse(2) reduction(| : failed)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t head = 0; head < kv_heads; head++) {
            int64_t end = lengths[row] + 1, from = window > 0 && end > window ? end - window : 0, count = end - from;
            TYPE *slot_keys = keys + (row * kv_heads + head) * capacity * dim;
            TYPE *slot_values = values + (row * kv_heads + head) * capacity * dim;
            memcpy(slot_keys + (end - 1) * dim, new_keys + row * key_row + head * key_head, dim * sizeof(TYPE));
            memcpy(slot_values + (end - 1) * dim, new_values + row * value_row + head * value_head, dim * sizeof(TYPE));
            // Every slot is a short stream of its own, too short for the processor to foresee the next one.
            for (int64_t d = from * dim; d < end * dim; d += 64 / sizeof(TYPE)) {
                __builtin_prefetch(slot_values + d);
                if (row + 1 < rows || head + 1 < kv_heads) __builtin_prefetch(slot_keys + capacity * dim + d);
            }
            float *all_weights = room((group < 4 ? group : 4) * count * sizeof(float));
            if (!all_weights) {
                failed = 1;
                continue;
            }
            for (int64_t first = head * group; first < (head + 1) * group; first += 4) {
                int64_t n = (head + 1) * group - first < 4 ? (head + 1) * group - first : 4;
                for (int64_t g = 0; g < n; g++) {
                    const TYPE *q = query + row * query_row + (first + g) * query_head;
                    float *weights = all_weights + g * count;
                    NAME(dots)(weights, q, slot_keys + from * dim, count, dim);
                    for (int64_t t = 0; t < count; t++) weights[t] *= scale;
                    if (softcap > 0)
                        for (int64_t t = 0; t < count; t++) weights[t] = softcap * tanhf(weights[t] / softcap);
                    softmax(weights, count);
                }
                NAME(mix)(out + (row * kv_heads * group + first) * dim, all_weights, slot_values + from * dim, count, dim, n);
            }
            free(all_weights);
        }
    return failed;
}

// One token a row by inverse CDF from logits (rows, vocab), and its log-probability, at the inverse temperature `scale`. Where a
// logit is NaN or infinite, or all are minus that, no token (-1) and NaN (asked of their bits: -ffast-math knows no such numbers).
void NAME(sample)(int64_t rows, int64_t vocab, int64_t row_stride, const TYPE *logits, float scale, const double *uniforms,
                  int64_t *tokens, float *logprobs) {
    enum { BLOCK = 256 };
    int64_t blocks = (vocab + BLOCK - 1) / BLOCK;
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        const TYPE *z = logits + row * row_stride;
        double sums[blocks], total = 0, passed = 0;
        float largest = -FLT_MAX, weight = 0;
        uint32_t strange = 0;
        for (int64_t j = 0; j < vocab; j++) {
            float value = WIDEN(z[j]);
            uint32_t bits;
            memcpy(&bits, &value, 4);
            strange |= ((bits & 0x7fffffff) >= 0x7f800000) & (bits != 0xff800000);
            largest = value > largest ? value : largest;
        }
        for (int64_t b = 0; b < blocks; b++) {
            int64_t end = (b + 1) * BLOCK < vocab ? (b + 1) * BLOCK : vocab;
            float sum = 0;
            for (int64_t j = b * BLOCK; j < end; j++) sum += expf(scale * (WIDEN(z[j]) - largest));
            total += sums[b] = sum;
        }
        double target = uniforms[row] * total;
        int64_t block = 0;
        while (block + 1 < blocks && passed + sums[block] <= target) passed += sums[block++];
        int64_t end = (block + 1) * BLOCK < vocab ? (block + 1) * BLOCK : vocab, drawn = block * BLOCK;
        for (int64_t j = block * BLOCK; j < end && passed <= target; j++) {
            float w = expf(scale * (WIDEN(z[j]) - largest));
            if (w > 0) drawn = j, weight = w;  // rounding must not reach a token of weight 0
            passed += w;
        }
        tokens[row] = drawn;
        logprobs[row] = (float)(log((double)weight) - log(total));
        if (strange || largest == -FLT_MAX) tokens[row] = -1, memcpy(logprobs + row, &(uint32_t){0x7fc00000}, 4);
    }
}

#undef WIDEN
#undef NARROW
#undef LOAD

#endif
