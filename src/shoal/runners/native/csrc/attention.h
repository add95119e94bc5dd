// Attention of query rows over one span of 64 tokens (two KV blocks) of one KV head.
//
// A row's arithmetic knows nothing of other rows: for spans 0, 1, 2, .. of a section in this order, scores, a new maximum, one rescale
// of its sums, then the weighted values added token pair by token pair; then the sections' sums are added, in order. Spans
// begin at multiples of 64 by position and sections at multiples of 512, so neither the batch nor the chunking moves them. Rows that share blocks are handed over together: the span's K and V
// (8 KB each for 64 dimensions) come from memory once and stay in L1 for all of them.
//
//   K block [dim/2][32 tokens][2]        scores of 16 tokens: dpbf16(acc, 64 B of K, one pair of q in all lanes)
//   V block [16 token pairs][dim][2]     16 outputs:          dpbf16(acc, 64 B of V, one pair of weights in all lanes)
//
// Neither needs a sum across lanes. Per row, head and span: 256 dpbf16 at 64 dimensions (32 multiply-adds each), and about 90
// instructions of softmax. A lone row reads 16 KB for 3 heads x 256 dpbf16: bound by memory beyond the cache; 16
// rows sharing it are bound by dpbf16.
#pragma once
#include "kernels.h"
#include "simd.h"

namespace shoal {
namespace {

constexpr int kHeadsAtOnce = kMaxRows > 4 ? 4 : 1;
inline I broadcast_word(const void* p) {
    int32_t x;
    memcpy(&x, p, 4);
    return iset(x);
}

// Four cache lines; a block and head of dim d is d / 2 times that, or d / 4 and one more.
inline void fetch(const uint8_t* p) {
    for (int i = 0; i < 4; i++) __builtin_prefetch(p + i * 64, 0, 2);
}

inline const float* scales_at(const uint8_t* kv, const Heads& h) {
    return reinterpret_cast<const float*>(kv + (h.dim + h.v_dim) * kBlock);
}

// scores[h][16 * v ..] of kVectors x 16 tokens; vectors 0, 1 are of block kv0 and 2, 3 of kv1.
// On the way, all lines of the block at `ahead` are asked for.
template <int kHeads, int kVectors>
inline void scores(const uint8_t* kv0, const uint8_t* kv1, const uint8_t* q, const Heads& heads, float (*out)[kSpan],
                   const uint8_t* ahead) {
    const int dim = heads.dim;
    F acc[kHeads][kVectors];
    for (int h = 0; h < kHeads; h++)
        for (int v = 0; v < kVectors; v++) acc[h][v] = set(0.f);
    for (int d = 0; d < dim; d += 2) {
        if (ahead) fetch(ahead + d * 128);
        I pair[kHeads];
#pragma GCC unroll 4
        for (int h = 0; h < kHeads; h++) pair[h] = broadcast_word(q + (h * dim + d) * 2);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; v++) {  // outside: each vector of K is loaded once
            const I k = iload((v < 2 ? kv0 : kv1) + d * kBlock * 2 + (v % 2) * 64);
#pragma GCC unroll 4
            for (int h = 0; h < kHeads; h++) acc[h][v] = dotbf(acc[h][v], k, pair[h]);
        }
    }
    for (int h = 0; h < kHeads; h++)
        for (int v = 0; v < kVectors; v++) store(out[h] + 16 * v, acc[h][v]);
}

// The same of codes: an exact integer times both scales.
template <int kHeads, int kVectors>
inline void scores_of_codes(const uint8_t* kv0, const uint8_t* kv1, const uint8_t* q, const Heads& heads,
                            float (*out)[kSpan], const uint8_t* ahead) {
    const int dim = heads.dim;
    Scaled row[kHeads];
    I acc[kHeads][kVectors];
    for (int h = 0; h < kHeads; h++) {
        memcpy(&row[h], q + h * dim * 2 + dim, sizeof(Scaled));
        for (int v = 0; v < kVectors; v++) acc[h][v] = iset(row[h].sum128);
    }
    if (ahead) fetch(ahead + dim * 64);
    for (int d = 0; d < dim; d += 4) {
        if (ahead) fetch(ahead + d * 64);
        I quad[kHeads];
#pragma GCC unroll 4
        for (int h = 0; h < kHeads; h++) quad[h] = broadcast_word(q + h * dim * 2 + d);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; v++) {
            const I k = iload((v < 2 ? kv0 : kv1) + d * kBlock + (v % 2) * 64);
#pragma GCC unroll 4
            for (int h = 0; h < kHeads; h++) acc[h][v] = dot<true>(acc[h][v], k, quad[h]);
        }
    }
    for (int v = 0; v < kVectors; v++) {
        const F scale = load(scales_at(v < 2 ? kv0 : kv1, heads) + (v % 2) * 16);
        for (int h = 0; h < kHeads; h++)
            store(out[h] + 16 * v, mul(to_float(acc[h][v]), mul(scale, set(row[h].scale))));
    }
}

// acc[h][d ..] += weights x V for 16 * kVectors outputs from d, of tokens `from` to n - 1: an odd first and last one are masked.
template <int kHeads, int kVectors>
inline void values(const uint8_t* v0, const uint8_t* v1, const uint16_t (*p)[kSpan], const float*, int from, int n,
                   int dim, int d, float* out, const uint8_t* ahead) {
    F acc[kHeads][kVectors];
    for (int h = 0; h < kHeads; h++)
        for (int v = 0; v < kVectors; v++) acc[h][v] = load(out + h * dim + d + 16 * v);
    const int pairs = n / 2;
    const auto at = [&](int t) { return (t < 16 ? v0 + t * dim * 4 : v1 + (t - 16) * dim * 4) + d * 4; };
    int t = from / 2;
    if (from % 2) {  // the slot before the first token may hold anything, NaN included
        for (int h = 0; h < kHeads; h++)
            for (int v = 0; v < kVectors; v++)
                acc[h][v] = dotbf(acc[h][v], iand(iload(at(t) + v * 64), iset(int(0xffff0000))),
                                  iset(int(uint32_t(p[h][2 * t + 1]) << 16)));
        t++;
    }
    for (; t < pairs; t++) {
        if (ahead) fetch(ahead + t * 256);
        I w[kVectors];
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; v++) w[v] = iload(at(t) + v * 64);
#pragma GCC unroll 4
        for (int h = 0; h < kHeads; h++) {
            const I pair = broadcast_word(p[h] + 2 * t);
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; v++) acc[h][v] = dotbf(acc[h][v], w[v], pair);
        }
    }
    if (n % 2 && t == pairs) {  // so may the one behind the last token
        for (int h = 0; h < kHeads; h++)
            for (int v = 0; v < kVectors; v++)
                acc[h][v] = dotbf(acc[h][v], iand(iload(at(pairs) + v * 64), iset(0xffff)), iset(p[h][2 * pairs]));
    }
    for (int h = 0; h < kHeads; h++)
        for (int v = 0; v < kVectors; v++) store(out + h * dim + d + 16 * v, acc[h][v]);
}

// The same of codes: the weights (times V's scales) are codes too, times by[h] / 255 of the span; those of other tokens are 0.
template <int kHeads, int kVectors>
inline void values_of_codes(const uint8_t* v0, const uint8_t* v1, const uint16_t (*p)[kSpan], const float* by, int from,
                            int n, int dim, int d, float* out, const uint8_t* ahead) {
    I acc[kHeads][kVectors];
    for (int h = 0; h < kHeads; h++)
        for (int v = 0; v < kVectors; v++) acc[h][v] = iset(0);
    for (int t = from / 4; t < (n + 3) / 4; t++) {
        const uint8_t* at = (t < 8 ? v0 + t * dim * 4 : v1 + (t - 8) * dim * 4) + d * 4;
        if (ahead) fetch(ahead + t * 256);
        I quad[kHeads];
#pragma GCC unroll 4
        for (int h = 0; h < kHeads; h++) quad[h] = broadcast_word(p[h] + 2 * t);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; v++) {
            const I w = iload(at + v * 64);
#pragma GCC unroll 4
            for (int h = 0; h < kHeads; h++) acc[h][v] = dot<true>(acc[h][v], quad[h], w);
        }
    }
    for (int h = 0; h < kHeads; h++)
        for (int v = 0; v < kVectors; v++) {
            float* to = out + h * dim + d + 16 * v;
            store(to, fma(to_float(acc[h][v]), set(by[h]), load(to)));
        }
}

// Scores become weights 2^(score - max) in bf16; the row's sums and values are rescaled when the maximum rose. Over codes
// (`scales` are V's of both blocks) they become codes 0 to 255 of the weights times these scales, and the result is the unit.
template <bool kEight>
inline float soften(float* s, int from, int n, float cap, float& max, float* sum, float* acc, int dim, uint16_t* p,
                    const float* const* scales) {
    const int vectors = (n + 15) / 16;
    F top = set(max);
    for (int v = 0; v < vectors; v++) {
        F x = load(s + 16 * v);
        if (cap > 0.f) x = mul(tanh_of(mul(x, set(1.f / cap))), set(cap));
        x = first_lanes(x, n - 16 * v, set(-3e38f));
        if (from) x = first_lanes(set(-3e38f), from - 16 * v, x);
        store(s + 16 * v, x);
        top = max2(x, top);
    }
    const float now = hmax(top);
    F total = load(sum);
    if (now != max) {
        float scale[16];
        store(scale, exp2_of(set(max - now)));
        const F by = set(scale[0]);
        total = mul(total, by);
        for (int d = 0; d < dim; d += 16) store(acc + d, mul(load(acc + d), by));
        max = now;
    }
    I most = iset(0);
    for (int v = 0; v < vectors; v++) {
        const F x = exp2_of(sub(load(s + 16 * v), set(now)));
        total = add(total, x);
        if (!kEight) {
            store_bf16(p + 16 * v, x);
            continue;
        }
        F scaled = first_lanes(mul(x, load(scales[v / 2] + v % 2 * 16)), n - 16 * v, set(0.f));
        if (from) scaled = first_lanes(set(0.f), from - 16 * v, scaled);
        store(s + 16 * v, scaled);
        most = imax(most, iand(as_int(scaled), iset(0x7fffffff)));
    }
    store(sum, total);
    if (!kEight) return 0;
    const float largest = float_of(uint32_t(himax(most))), inverse = largest > 0 ? 255.f / largest : largest;
    uint8_t* codes = reinterpret_cast<uint8_t*>(p);
    for (int v = 0; v < vectors; v++) store_codes(codes + 16 * v, to_int(mul(load(s + 16 * v), set(inverse))));
    return largest / 255.f;
}

// Tokens `from` to n - 1 of the span.
template <int kHeads, bool kEight>
inline void attend_row(const uint8_t* kv0, const uint8_t* kv1, const uint8_t* next0, const uint8_t* next1,
                       const Row& row, int from, int n, int head, const Heads& heads) {
    alignas(64) float s[kHeads][kSpan];
    alignas(64) uint16_t p[kHeads][kSpan];
    float by[kHeads];
    const int dim = heads.v_dim, padded = (heads.group + 15) / 16 * 16, v_at = heads.dim * kBlock * (kEight ? 1 : 2);
    const uint8_t* q = row.q + head * heads.dim * 2;
    const float* scales[2] = {scales_at(kv0, heads) + kBlock, scales_at(kv1, heads) + kBlock};
    float *max = row.state + head, *sum = row.state + padded + head * 16,
          *acc = row.state + padded + heads.group * 16 + head * dim;
    const auto score = n > kBlock ? (kEight ? scores_of_codes<kHeads, 4> : scores<kHeads, 4>)
                                  : (kEight ? scores_of_codes<kHeads, 2> : scores<kHeads, 2>);
    score(kv0, kv1, q, heads, s, next0);
    for (int h = 0; h < kHeads; h++)
        by[h] = soften<kEight>(s[h], from, n, heads.cap, max[h], sum + 16 * h, acc + h * dim, dim, p[h], scales);
    for (int d = 0; d < dim; d += dim - d >= 64 ? 64 : 16) {
        const uint8_t* ahead = next1 && dim - d >= 64 ? next1 + d * (kEight ? 64 : 128) : nullptr;
        const auto add = dim - d >= 64 ? (kEight ? values_of_codes<kHeads, 4> : values<kHeads, 4>)
                                       : (kEight ? values_of_codes<kHeads, 1> : values<kHeads, 1>);
        add(kv0 + v_at, kv1 + v_at, p, by, from, n, dim, d, acc, ahead);
    }
}

template <bool kEight>
void attend(const uint8_t* kv0, const uint8_t* kv1, const uint8_t* next0, const uint8_t* next1, const Row* rows,
            int count, int first, const Heads& heads) {
    constexpr int kTwo = kHeadsAtOnce >= 2 ? 2 : 1, kThree = kHeadsAtOnce >= 3 ? 3 : 1;
    for (int r = 0; r < count; r++) {
        const int left = rows[r].limit - first, n = left < kSpan ? left : kSpan,
                  from = rows[r].begin > first ? rows[r].begin - first : 0;
        int h = 0;
        const uint8_t *n0 = r ? nullptr : next0,
                      *n1 = r ? nullptr : next1;  // the first row fetches what comes next for all
        for (; kHeadsAtOnce >= 4 && h + 4 <= heads.group; h += 4)
            attend_row<kHeadsAtOnce, kEight>(kv0, kv1, n0, n1, rows[r], from, n, h, heads);
        if (kThree == 3 && heads.group - h == 3)
            attend_row<kThree, kEight>(kv0, kv1, n0, n1, rows[r], from, n, h, heads), h += 3;
        if (kTwo == 2 && heads.group - h == 2)
            attend_row<kTwo, kEight>(kv0, kv1, n0, n1, rows[r], from, n, h, heads), h += 2;
        for (; h < heads.group; h++) attend_row<1, kEight>(kv0, kv1, n0, n1, rows[r], from, n, h, heads);
    }
}

// A sink is a score that takes its share of the weights and has no value.
void start_row(float* state, const Heads& heads, const float* sinks) {
    const int padded = (heads.group + 15) / 16 * 16;
    for (int i = 0; i < state_floats(heads); i++) state[i] = i < padded ? -3e38f : 0.f;
    for (int h = 0; sinks && h < heads.group; h++) state[h] = sinks[h] * 1.44269504f, state[padded + 16 * h] = 1.f;
}

// Both sums are brought to the larger maximum, then added.
void merge_row(float* state, const float* later, const Heads& heads) {
    const int padded = (heads.group + 15) / 16 * 16;
    for (int h = 0; h < heads.group; h++) {
        const float a = state[h], b = later[h], now = a > b ? a : b;
        float by[2][16];
        store(by[0], exp2_of(set(a - now))), store(by[1], exp2_of(set(b - now)));
        const F mine = set(by[0][0]), other = set(by[1][0]);
        const auto add_to = [&](int at) {
            store(state + at, fma(load(later + at), other, mul(load(state + at), mine)));
        };
        state[h] = now;
        add_to(padded + 16 * h);
        for (int d = 0; d < heads.v_dim; d += 16) add_to(padded + heads.group * 16 + h * heads.v_dim + d);
    }
}

void finish_row(const float* state, const Heads& heads, float* out) {
    const float* sum = state + (heads.group + 15) / 16 * 16;
    for (int h = 0; h < heads.group; h++) {
        const F by = set(1.f / hadd(load(sum + 16 * h)));
        const float* acc = sum + heads.group * 16 + h * heads.v_dim;
        for (int d = 0; d < heads.v_dim; d += 16) store(out + h * heads.v_dim + d, mul(load(acc + d), by));
    }
}

}
}  // namespace shoal::(anonymous)
