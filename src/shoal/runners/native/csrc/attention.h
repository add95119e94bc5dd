// Attention of query rows over one span of 64 tokens (two KV blocks) of one KV head.
//
// A row's arithmetic knows nothing of other rows: for spans 0, 1, 2, .. in this order, scores, a new maximum, one rescale
// of its sums, then the weighted values added token pair by token pair. Spans begin at multiples of 64 by position, so
// neither the batch nor the chunking moves them. Rows that share blocks are handed over together: the span's K and V
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

namespace shoal { namespace {

constexpr int kHeadsAtOnce = kMaxRows > 4 ? 4 : 1;
inline I broadcast2(const uint16_t* p) { int32_t x; memcpy(&x, p, 4); return iset(x); }

// Four cache lines; a block and head of dim d is d / 2 times that.
inline void fetch(const uint16_t* p) {
    for (int i = 0; i < 4; i++) __builtin_prefetch(p + i * 32, 0, 2);
}

// scores[h][16 * v ..] of kVectors x 16 tokens; vectors 0, 1 are of block k0 and 2, 3 of k1.
// On the way, all lines of the block at `ahead` are asked for.
template <int kHeads, int kVectors>
inline void scores(const uint16_t* k0, const uint16_t* k1, const uint16_t* q, int dim, float (*out)[kSpan], const uint16_t* ahead) {
    F acc[kHeads][kVectors];
    for (int h = 0; h < kHeads; h++)
        for (int v = 0; v < kVectors; v++) acc[h][v] = set(0.f);
    for (int d = 0; d < dim; d += 2) {
        if (ahead) fetch(ahead + d * 64);
        I k[kVectors];
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; v++) k[v] = iload((v < 2 ? k0 : k1) + d * kBlock + (v % 2) * 32);
#pragma GCC unroll 4
        for (int h = 0; h < kHeads; h++) {
            const I pair = broadcast2(q + h * dim + d);
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; v++) acc[h][v] = dotbf(acc[h][v], k[v], pair);
        }
    }
    for (int h = 0; h < kHeads; h++)
        for (int v = 0; v < kVectors; v++) store(out[h] + 16 * v, acc[h][v]);
}

// acc[h][d ..] += weights x V for 16 * kVectors outputs from d; `n` tokens, of which an odd last one is masked.
template <int kHeads, int kVectors>
inline void values(const uint16_t* v0, const uint16_t* v1, const uint16_t (*p)[kSpan], int n, int dim, int d, float* out,
                   const uint16_t* ahead) {
    F acc[kHeads][kVectors];
    for (int h = 0; h < kHeads; h++)
        for (int v = 0; v < kVectors; v++) acc[h][v] = load(out + h * dim + d + 16 * v);
    const int pairs = n / 2;
    for (int t = 0; t < pairs; t++) {
        const uint16_t* at = (t < 16 ? v0 + t * dim * 2 : v1 + (t - 16) * dim * 2) + d * 2;
        if (ahead) fetch(ahead + t * 128);
        I w[kVectors];
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; v++) w[v] = iload(at + v * 32);
#pragma GCC unroll 4
        for (int h = 0; h < kHeads; h++) {
            const I pair = broadcast2(p[h] + 2 * t);
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; v++) acc[h][v] = dotbf(acc[h][v], w[v], pair);
        }
    }
    if (n % 2) {  // the slot behind the last token may hold anything, NaN included
        const uint16_t* at = (pairs < 16 ? v0 + pairs * dim * 2 : v1 + (pairs - 16) * dim * 2) + d * 2;
        for (int h = 0; h < kHeads; h++)
            for (int v = 0; v < kVectors; v++)
                acc[h][v] = dotbf(acc[h][v], iand(iload(at + v * 32), iset(0xffff)), iset(p[h][2 * pairs]));
    }
    for (int h = 0; h < kHeads; h++)
        for (int v = 0; v < kVectors; v++) store(out + h * dim + d + 16 * v, acc[h][v]);
}

// Scores become weights 2^(score - max) in bf16; the row's sums and values are rescaled when the maximum rose.
inline void soften(float* s, int n, float& max, float* sum, float* acc, int dim, uint16_t* p) {
    const int vectors = (n + 15) / 16;
    F top = set(max);
    for (int v = 0; v < vectors; v++) {
        F x = first_lanes(load(s + 16 * v), n - 16 * v, set(-3e38f));
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
    for (int v = 0; v < vectors; v++) {
        const F x = exp2_of(sub(load(s + 16 * v), set(now)));
        total = add(total, x);
        store_bf16(p + 16 * v, x);
    }
    store(sum, total);
}

template <int kHeads>
inline void attend_row(const uint16_t* kv0, const uint16_t* kv1, const uint16_t* next0, const uint16_t* next1, const Row& row, int n,
                       int head, Heads heads) {
    alignas(64) float s[kHeads][kSpan];
    alignas(64) uint16_t p[kHeads][kSpan];
    const int dim = heads.dim, padded = (heads.group + 15) / 16 * 16;
    const uint16_t *v0 = kv0 + dim * kBlock, *v1 = kv1 + dim * kBlock;
    float *max = row.state + head, *sum = row.state + padded + head * 16, *acc = row.state + padded + heads.group * 16 + head * dim;
    if (n > kBlock) scores<kHeads, 4>(kv0, kv1, row.q + head * dim, dim, s, next0);
    else scores<kHeads, 2>(kv0, kv1, row.q + head * dim, dim, s, next0);
    for (int h = 0; h < kHeads; h++) soften(s[h], n, max[h], sum + 16 * h, acc + h * dim, dim, p[h]);
    int d = 0;
    for (; d + 64 <= dim; d += 64) values<kHeads, 4>(v0, v1, p, n, dim, d, acc, next1 ? next1 + d * 64 : nullptr);
    for (; d < dim; d += 16) values<kHeads, 1>(v0, v1, p, n, dim, d, acc, nullptr);
}

void attend(const uint16_t* kv0, const uint16_t* kv1, const uint16_t* next0, const uint16_t* next1, const Row* rows, int count,
            int first, Heads heads) {
    for (int r = 0; r < count; r++) {
        const int left = rows[r].limit - first, n = left < kSpan ? left : kSpan;
        int h = 0;
        const uint16_t *n0 = r ? nullptr : next0, *n1 = r ? nullptr : next1;  // the first row fetches what comes next for all
        for (; kHeadsAtOnce >= 4 && h + 4 <= heads.group; h += 4) attend_row<kHeadsAtOnce>(kv0, kv1, n0, n1, rows[r], n, h, heads);
        if (kHeadsAtOnce >= 3 && heads.group - h == 3) attend_row<kHeadsAtOnce >= 3 ? 3 : 1>(kv0, kv1, n0, n1, rows[r], n, h, heads), h += 3;
        if (kHeadsAtOnce >= 2 && heads.group - h == 2) attend_row<kHeadsAtOnce >= 2 ? 2 : 1>(kv0, kv1, n0, n1, rows[r], n, h, heads), h += 2;
        for (; h < heads.group; h++) attend_row<1>(kv0, kv1, n0, n1, rows[r], n, h, heads);
    }
}

void start_row(float* state, Heads heads) {
    const int padded = (heads.group + 15) / 16 * 16;
    for (int i = 0; i < state_floats(heads); i++) state[i] = i < padded ? -3e38f : 0.f;
}

void finish_row(const float* state, Heads heads, float* out) {
    const float* sum = state + (heads.group + 15) / 16 * 16;
    for (int h = 0; h < heads.group; h++) {
        const F by = set(1.f / hadd(load(sum + 16 * h)));
        const float* acc = sum + heads.group * 16 + h * heads.dim;
        for (int d = 0; d < heads.dim; d += 16) store(out + h * heads.dim + d, mul(load(acc + d), by));
    }
}

}}  // namespace shoal::(anonymous)
