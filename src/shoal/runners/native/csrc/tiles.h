// Products of many rows on AMX: the integers of a group come out of matrix registers, everything else is as in products.h.
//
// The sum of a group is an exact integer however it is made, and what follows is the same order of the same operations: so a row has
// the same bits here as from the vector kernels, which keep the few rows that do not fill a matrix register.
//
//   A  rows x 32 inputs of a tile, signed      B  32 inputs x 16 outputs, codes less their offset, signed      C  rows x 16, int32
//
// For each 8 groups of a strip, codes become bytes and scales float once (12 KB, in L1) for all rows. Of a group of 16 x 16 x 32, C is
// stored and loaded again for its conversion, multiplication and one or two additions. Measured with Q4_K from L2: 2.2 ns a row, where the
// 8 dpbusd and the same rest take 3.6 on vectors.
#pragma once
#include "products.h"

#if defined(__AMX_INT8__) && !defined(SHOAL_PLAIN)
namespace shoal {
namespace {

constexpr int kSub = 16, kChunk = 8;  // rows of a matrix register; groups at once

struct alignas(64) TileShapes {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
};
// The compiler does not know that a load of a matrix register reads memory: stores that it needs come before this.
inline void settle_stores() { asm volatile("" ::: "memory"); }

// C in 0, 1; A in 2, 3; B in 4, 5, each of `inputs` inputs.
inline void shape_tiles(int rows, int inputs) {
    TileShapes t;
    for (int i = 0; i < 6; i++) {
        t.bytes[i] = uint16_t(i / 2 == 1 ? inputs : 64);
        t.rows[i] = uint8_t(i / 2 == 2 ? inputs / 4 : rows);
    }
    settle_stores();
    _tile_loadconfig(&t);
}

template <Scales kScales>
struct alignas(64) Unpacked {
    static constexpr int kParts = kGroup / scale_inputs(kScales);
    uint8_t codes[2][kChunk][8][64];
    float d[2][kChunk][kParts][16], m[2][kChunk][kParts][16];
};

inline F some(const float* p, int n) { return {_mm512_maskz_loadu_ps(__mmask16((1u << n) - 1), p)}; }
inline F each(const float* p) { return {_mm512_set1_ps(*p)}; }

// Groups from .. from + count - 1 of both halves of a strip.
template <Codes kCodes, Scales kScales>
inline void unpack(const Matrix& w, const uint8_t* data, int from, int count, Unpacked<kScales>& u) {
    constexpr bool kMin = has_min(kScales), kTable = kCodes == Codes::kTable;
    constexpr int kGroups = groups_of_block(kScales), kBytes = block_bytes(kCodes, kScales);
    const __m512i offset = _mm512_set1_epi8(int8_t(kMin ? 0 : 1 << w.offset_log2));
    const I table = kTable ? I{_mm512_sub_epi8(load_table(w.table).v, offset)} : iset(0);
    const F unit = set(float_of(uint32_t(w.unit_log2 + 127) << 23));
    for (int i = 0; i < count; i++) {
        const int g = from + i, within = g % kGroups;
        const uint8_t *block = data + size_t(g / kGroups) * kBytes,
                      *codes = block + scale_bytes(kScales) + within * group_bytes(kCodes);
        for (int half = 0; half < 2; half++) {
#pragma GCC unroll 8
            for (int step = 0; step < 8; step++) {
                I v = codes_at<kCodes>(codes, half, step, table);
                if (!kMin && !kTable) v.v = _mm512_sub_epi8(v.v, offset);
                _mm512_store_si512(u.codes[half][i][step], v.v);
            }
            for (int h = 0; h < Unpacked<kScales>::kParts; h++) {
                store(u.d[half][i][h], scale_at<kScales, kTable>(block, within, h, half * 16, unit));
                if (kMin) store(u.m[half][i][h], minimum_at<kScales>(block, within, h, half * 16));
            }
        }
    }
}

// Scales of up to kSub rows of a chunk; zeros behind the last.
struct alignas(64) RowScales {
    float s[kChunk][kSub], t[kChunk][2][kSub];
};

template <int kRows, Scales kScales>
inline void add_part(const int32_t* c, const float* d, const float* m, const float* s, const float* t, F* acc) {
    const F dv = load(d);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; r++) acc[r] = fma(to_float(iload(c + r * 16)), mul(dv, each(s + r)), acc[r]);
    if (!has_min(kScales)) return;
    const F mv = load(m);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; r++) acc[r] = fma(mv, each(t + r), acc[r]);
}

// `count` groups of one half for the rows r0 .. of a tile; sums[r] go on. For each pair of registers, `share` bytes of the weights at
// `ahead` are asked for: all at once, while codes are unpacked, they would wait for each other.
template <int kRows, Scales kScales>
void add_chunk(const Unpacked<kScales>& u, int half, const int8_t* a, int step, const RowScales& rows, int count,
               float (*sums)[16], const uint8_t* ahead, int share) {
    constexpr int kParts = Unpacked<kScales>::kParts;
    alignas(64) int32_t c[2][2][kSub * 16];
    F acc[kRows];
#pragma GCC unroll 16
    for (int r = 0; r < kRows; r++) acc[r] = load(sums[r]);
    // Two registers at a time, two groups or both parts of one; the next two are made while these are added.
    constexpr int kStep = kParts == 1 ? 2 : 1, kBytes = kParts == 1 ? 0 : 16;
    const auto make = [&](int i, int32_t (*to)[kSub* 16]) {
        const int j = kParts == 1 && i + 1 < count ? i + 1 : i;
        _tile_zero(0);
        _tile_loadd(2, a + size_t(i) * step, kGroup);
        _tile_loadd(4, u.codes[half][i], 64);
        _tile_dpbssd(0, 2, 4);
        _tile_zero(1);
        _tile_loadd(3, a + size_t(j) * step + kBytes, kGroup);
        _tile_loadd(5, u.codes[half][j][kBytes / 4], 64);
        _tile_dpbssd(1, 3, 5);
        _tile_stored(0, to[0], 64);
        _tile_stored(1, to[1], 64);
    };
    const auto add = [&](int i, int h, const int32_t* from) {
        add_part<kRows, kScales>(from, u.d[half][i][h], u.m[half][i][h], rows.s[i], rows.t[i][h], acc);
    };
    make(0, c[0]);
    for (int i = 0, now = 0; i < count; i += kStep, now ^= 1) {
        if (i + kStep < count) make(i + kStep, c[now ^ 1]);
        for (const uint8_t* end = ahead + share; ahead < end; ahead += 64) __builtin_prefetch(ahead, 0, 2);
        add(i, 0, c[now][0]);
        if (kParts == 2)
            add(i, 1, c[now][1]);
        else if (i + 1 < count)
            add(i + 1, 0, c[now][1]);
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; r++) store(sums[r], acc[r]);
}

template <Scales kScales>
inline void take_scales(const Tile& x, int first, int n, int from, int count, RowScales& rows) {
    for (int i = 0; i < count; i++) {
        const size_t at = size_t(from + i) * size_t(x.rows) + size_t(first);
        const F s = some(x.s + at, n);
        store(rows.s[i], s);
        if (!has_min(kScales)) continue;
        if (scale_inputs(kScales) == kGroup) {
            store(rows.t[i][0], some(x.t + at, n));
            continue;
        }
        for (int h = 0; h < 2; h++) {
            const I sum = as_int(some(reinterpret_cast<const float*>(x.nsum) +
                                          (size_t(from + i) * 2 + size_t(h)) * size_t(x.rows) + size_t(first),
                                      n));
            store(rows.t[i][h], mul(s, sub(set(-0.f), to_float(sum))));
        }
    }
}

// One strip for a tile of at most two times kSub rows. Of two registers full, the second takes the last rows: those that the first
// took too are computed twice and left out.
template <Codes kCodes, Scales kScales>
void tile_strip(const Matrix& w, const uint8_t* data, const Tile& x, float* out, int ld, bool accumulate,
                const F* first) {
    Unpacked<kScales> u;
    RowScales rows;
    alignas(64) float sums[2][2][kSub][16];
    constexpr int kChunkBytes = kChunk / groups_of_block(kScales) * block_bytes(kCodes, kScales),
                  kPairs = kChunk / (Unpacked<kScales>::kParts == 1 ? 2 : 1);
    const int subs = x.rows > kSub ? 2 : 1, share = (kChunkBytes / (subs * 2 * kPairs) + 63) / 64 * 64,
              each_rows = (x.rows + subs - 1) / subs, groups = w.k / kGroup;
    for (auto& sub : sums)
        for (int half = 0; half < 2; half++)
            for (int r = 0; r < kSub; r++) store(sub[half][r], first[half]);
    for (int g = 0; g < groups; g += kChunk) {
        const int count = groups - g < kChunk ? groups - g : kChunk;
        unpack<kCodes>(w, data, g, count, u);
        settle_stores();
        const uint8_t* ahead = data + size_t(g / kChunk) * kChunkBytes + kAhead;
        for (int sub = 0; sub < subs; sub++) {
            const int r0 = sub ? x.rows - each_rows : 0, step = x.rows * kGroup;
            take_scales<kScales>(x, r0, each_rows, g, count, rows);
            const int8_t* a = x.a + size_t(g) * size_t(step) + r0 * kGroup;
            for (int half = 0; half < 2; half++, ahead += kPairs * share) {
                if (each_rows > 12)
                    add_chunk<16>(u, half, a, step, rows, count, sums[sub][half], ahead, share);
                else if (each_rows > 8)
                    add_chunk<12>(u, half, a, step, rows, count, sums[sub][half], ahead, share);
                else
                    add_chunk<8>(u, half, a, step, rows, count, sums[sub][half], ahead, share);
            }
        }
    }
    for (int r = 0; r < x.rows; r++)
        for (int half = 0; half < 2; half++) {
            const int sub = r >= each_rows;
            const F sum = load(sums[sub][half][sub ? r - (x.rows - each_rows) : r]);
            float* to = out + size_t(r) * ld + half * 16;
            store(to, accumulate ? add(load(to), sum) : sum);
        }
}

using TileFn = void (*)(const Matrix&, const uint8_t*, const Tile&, float*, int, bool, const F*);

inline TileFn choose_tiles(const Matrix& w) {
#define SHOAL_TILES(codes_, scales_) tile_strip<Codes::codes_, Scales::scales_>
    SHOAL_CHOOSE(SHOAL_TILES)
}

void product_of_many(const Matrix& w, int from, int count, const Tile& x, float* out, int ld, bool accumulate) {
    if (!x.by_row() || is_dense(w.codes)) return product(w, from, count, x, out, ld, accumulate);
    const int subs = x.rows > kSub ? 2 : 1;
    shape_tiles((x.rows + subs - 1) / subs, scale_inputs(w.scales));
    const TileFn fn = choose_tiles(w);
    for (int s = 0; s < count; s++) {
        const float* bias = w.bias ? w.bias + (from + s) * kStrip : nullptr;
        const F first[2] = {bias ? load(bias) : set(0.f), bias ? load(bias + 16) : set(0.f)};
        fn(w, w.data + size_t(from + s) * w.strip_bytes, x, out + s * kStrip, ld, accumulate, first);
    }
    _tile_release();  // registers in use are saved at every switch of threads
}

}
}  // namespace shoal::(anonymous)
#endif
