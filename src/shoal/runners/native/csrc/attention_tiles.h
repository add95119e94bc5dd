// Attention on matrix registers: all heads of all rows that share a span are the rows of one product.
//
//   scores   A  16 of (row, head) x dim      B  K of 16 tokens      C  16 x 16, four of them a span
//   values   A  16 weights x 32 tokens       B  V of 16 outputs     C  16 x 16, added to the row's sums
//
// KV lies as B wants it. What a row of C comes to depends on its row of A alone, so no other row can show; the order of its sums is
// not that of attention.h in 16 bits (even and odd products apart), and the same integers in 8. Of a row, head and span of 64 dimensions
// the vectors' 256 dpbf16 become 16 cycles, and the softmax is what is left.
#pragma once
#include "attention.h"
#include "tiles.h"

#if defined(__AMX_BF16__) && !defined(SHOAL_PLAIN)
namespace shoal {
namespace {

constexpr int kMostDim = 512;

struct alignas(64) Pairs {  // of one product
    uint8_t q[kSub][kMostDim * 2];
    float s[kSub][kSpan], out[kSub][kSpan], by[kSub];
    uint16_t p[kSub][kSpan];
    const Row* row[kSub];
    int head[kSub];
};

// C in 0 to 3; A and B of scores in 4, 5, of `inputs` bytes a step; of values in 6, 7, of 32 tokens.
inline void shape_attention(int pairs, int inputs, bool eight) {
    TileShapes t;
    const int weights = eight ? 32 : 64;
    for (int i = 0; i < 8; i++) {
        t.bytes[i] = uint16_t(i == 4 ? inputs : i == 6 ? weights : 64);
        t.rows[i] = uint8_t(i == 5 ? inputs / 4 : i == 7 ? weights / 4 : pairs);
    }
    settle_stores();
    _tile_loadconfig(&t);
}

#define SHOAL_SCORES(c, at)    \
    _tile_loadd(5, at, 128);   \
    if constexpr (kEight)      \
        _tile_dpbsud(c, 4, 5); \
    else                       \
        _tile_dpbf16ps(c, 4, 5);
// Of 16 * columns tokens.
template <bool kEight>
inline void tile_scores(const uint8_t* kv0, const uint8_t* kv1, Pairs& x, int inputs, int width, int columns,
                        const uint8_t* ahead) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int d = 0; d < width; d += inputs) {
        for (int i = 0; ahead && i < inputs; i += 4) fetch(ahead + (d + i) * 64);
        const uint8_t *k0 = kv0 + d * kBlock, *k1 = kv1 + d * kBlock;
        _tile_loadd(4, x.q[0] + d, sizeof x.q[0]);
        SHOAL_SCORES(0, k0)
        if (columns == 1) continue;
        SHOAL_SCORES(1, k0 + 64)
        if (columns == 2) continue;
        SHOAL_SCORES(2, k1)
        if (columns == 3) continue;
        SHOAL_SCORES(3, k1 + 64)
    }
    _tile_stored(0, x.s[0], sizeof x.s[0]);
    _tile_stored(1, x.s[0] + 16, sizeof x.s[0]);
    _tile_stored(2, x.s[0] + 32, sizeof x.s[0]);
    _tile_stored(3, x.s[0] + 48, sizeof x.s[0]);
}

#define SHOAL_VALUES(c)                    \
    _tile_loadd(7, v + (c) * 64, dim * 4); \
    if constexpr (kEight)                  \
        _tile_dpbusd(c, 6, 7);             \
    else                                   \
        _tile_dpbf16ps(c, 6, 7);
// Outputs d .. d + 63, or + 31 where `four` is not set, to x.out.
template <bool kEight>
inline void tile_values(const uint8_t* v0, const uint8_t* v1, Pairs& x, int dim, int d, bool four) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int half = 0; half < 2; half++) {
        const uint8_t* v = (half ? v1 : v0) + d * 4;
        _tile_loadd(6, reinterpret_cast<const uint8_t*>(x.p[0]) + half * (kEight ? 32 : 64), sizeof x.p[0]);
        SHOAL_VALUES(0)
        SHOAL_VALUES(1)
        if (!four) continue;
        SHOAL_VALUES(2)
        SHOAL_VALUES(3)
    }
    _tile_stored(0, x.out[0], sizeof x.out[0]);
    _tile_stored(1, x.out[0] + 16, sizeof x.out[0]);
    if (!four) return;
    _tile_stored(2, x.out[0] + 32, sizeof x.out[0]);
    _tile_stored(3, x.out[0] + 48, sizeof x.out[0]);
}

// Scores of codes: exact integers times both scales, as in scores_of_codes.
inline void scale_scores(const uint8_t* kv0, const uint8_t* kv1, Pairs& x, int pairs, const Heads& heads) {
    for (int m = 0; m < pairs; m++) {
        Scaled row;
        memcpy(&row, x.row[m]->q + x.head[m] * heads.dim * 2 + heads.dim, sizeof row);
        for (int v = 0; v < 4; v++) {
            const F scale = load(scales_at(v < 2 ? kv0 : kv1, heads) + (v % 2) * 16);
            const I sum = iadd(iload(x.s[m] + 16 * v), iset(row.sum128));
            store(x.s[m] + 16 * v, mul(to_float(sum), mul(scale, set(row.scale))));
        }
    }
}

// `pairs` of x over the tokens of a span: K in kv0, kv1, V in v0, v1.
template <bool kEight>
inline void attend_pairs(const uint8_t* kv0, const uint8_t* kv1, const uint8_t* v0, const uint8_t* v1, Pairs& x,
                         int pairs, int first, const Heads& heads, const uint8_t* next0, const uint8_t* next1) {
    const int width = heads.dim * (kEight ? 1 : 2), inputs = width % 64 ? 32 : 64, dim = heads.v_dim,
              padded = (heads.group + 15) / 16 * 16;
    const float* scales[2] = {scales_at(kv0, heads) + kBlock, scales_at(kv1, heads) + kBlock};
    shape_attention(pairs, inputs, kEight);
    for (int m = 0; m < pairs; m++) memcpy(x.q[m], x.row[m]->q + x.head[m] * heads.dim * 2, size_t(width));
    settle_stores();
    int most = 0;
    for (int m = 0; m < pairs; m++) most = x.row[m]->limit - first > most ? x.row[m]->limit - first : most;
    tile_scores<kEight>(kv0, kv1, x, inputs, width, most >= kSpan ? 4 : (most + 15) / 16, next0);
    if (kEight) scale_scores(kv0, kv1, x, pairs, heads);
    const auto sums = [&](int m) { return x.row[m]->state + padded + heads.group * 16 + x.head[m] * dim; };
    for (int m = 0; m < pairs; m++) {
        const int left = x.row[m]->limit - first, n = left < kSpan ? left : kSpan, h = x.head[m],
                  from = x.row[m]->begin > first ? x.row[m]->begin - first : 0;
        float* state = x.row[m]->state;
        const int bytes = (n + 15) / 16 * 16 * (kEight ? 1 : 2), all = kSpan * (kEight ? 1 : 2);
        memset(reinterpret_cast<uint8_t*>(x.p[m]) + bytes, 0, size_t(all - bytes));
        x.by[m] =
            soften<kEight>(x.s[m], from, n, heads.cap, state[h], state + padded + 16 * h, sums(m), dim, x.p[m], scales);
    }
    settle_stores();
    const int bytes_ahead = (heads.dim + dim) * kBlock * (kEight ? 1 : 2);
    for (int d = 0; d < dim; d += 64) {
        for (int i = 0; next1 && i < bytes_ahead / dim * 64; i += 256) fetch(next1 + d * (bytes_ahead / dim) + i);
        const bool four = dim - d >= 64;
        tile_values<kEight>(v0, v1, x, dim, d, four);
        for (int m = 0; m < pairs; m++)
            for (int i = 0; i < (four ? 64 : 32); i += 16) {
                float* to = sums(m) + d + i;
                if (kEight)
                    store(to, fma(to_float(iload(x.out[m] + i)), set(x.by[m]), load(to)));
                else
                    store(to, add(load(to), load(x.out[m] + i)));
            }
    }
}

// V of a span with zeros where a row does not see: weights of 0 do not hide what is not finite. `seen` tokens are there already.
inline void copy_seen(const uint8_t* v0, const uint8_t* v1, int dim, int from, int n, int& seen, uint8_t* to) {
    if (from || n < seen || seen == 0) memset(to, 0, size_t(dim) * kSpan * 2), seen = from;
    for (int t = seen / 2; t < (n + 1) / 2; t++) {
        const uint8_t* pair = t < 16 ? v0 + t * dim * 4 : v1 + (t - 16) * dim * 4;
        const uint32_t mask = (2 * t < from ? 0xffff0000u : 0xffffffffu) & (2 * t + 1 < n ? 0xffffffffu : 0x0000ffffu);
        for (int d = 0; d < dim; d += 16)
            _mm512_storeu_si512(to + (t * dim + d) * 4, iand(iload(pair + d * 4), iset(int(mask))).v);
    }
    seen = from ? 0 : n;  // what begins later is made anew
}

template <bool kEight>
void attend_tiles(const uint8_t* kv0, const uint8_t* kv1, const uint8_t* next0, const uint8_t* next1, const Row* rows,
                  int count, int first, const Heads& heads) {
    Pairs x;
    alignas(64) uint8_t masked[kEight ? 1 : kMostDim * kSpan * 2];
    const int v_at = heads.dim * kBlock * (kEight ? 1 : 2);
    const auto whole = [&](const Row& row) { return kEight || (row.limit - first >= kSpan && row.begin <= first); };
    int pairs = 0, seen = 0;
    const auto attend_now = [&](const uint8_t* v0, const uint8_t* v1) {
        if (pairs) attend_pairs<kEight>(kv0, kv1, v0, v1, x, pairs, first, heads, next0, next1);
        pairs = 0, next0 = next1 = nullptr;
    };
    for (int r = 0; r < count; r++) {
        const bool all = whole(rows[r]);
        const int left = rows[r].limit - first;
        if (!all)
            copy_seen(kv0 + v_at, kv1 + v_at, heads.v_dim, rows[r].begin > first ? rows[r].begin - first : 0,
                      left < kSpan ? left : kSpan, seen, masked);
        for (int h = 0; h < heads.group; h++) {
            x.row[pairs] = rows + r, x.head[pairs] = h, pairs++;
            const bool last = h == heads.group - 1 && (r + 1 == count || !all || !whole(rows[r + 1]));
            if (pairs < kSub && !last) continue;
            if (all)
                attend_now(kv0 + v_at, kv1 + v_at);
            else
                attend_now(masked, masked + heads.v_dim * kBlock * 2);
        }
    }
    _tile_release();
}

}
}  // namespace shoal::(anonymous)
#endif
