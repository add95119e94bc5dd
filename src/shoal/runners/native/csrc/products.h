// Products of packed weights with quantised activations. kernels.h draws the layouts of both.
//
// One sum, one order: output n of row r is, for g = 0, 1, .. k/32-1 in this order and in float,
//     acc = fma(float(c), d[g] * s[g], acc); acc = fma(m[g], t[g], acc)      c: exact integer dot of the group
// which does not mention how many rows there are: kRows only says how many such sums share a load of weights.
//
// Cost of a group of 16 x 32 weights (4 bits): 320 bytes, and per row 8 dpbusd, a conversion, a multiplication and two
// additions. One row is bound by memory (1.6 multiply-adds a byte against the 6 or so that two cores take from DRAM),
// a tile of 12 by the multipliers: at best 8 of 11 of their cycles are dpbusd.
#pragma once
#include "kernels.h"
#include "simd.h"

namespace shoal { namespace {

constexpr int kAhead = 8192;  // bytes, into L2: the 24 misses that L1 can have in flight would bound a core to 15 GB/s

inline F load_scales(const float* p) { return load(p); }
inline F load_scales(const uint16_t* p) { return load_half(p); }
inline I broadcast4(const int8_t* p) { int32_t x; memcpy(&x, p, 4); return iset(x); }

// `half` is the first of kHalves halves of the strip; both at once share the loads of a few rows' activations.
template <Codes kCodes, bool kMin, class Scale, int kGroupSize, int kRows, int kHalves>
inline void strip(const Matrix& w, const uint8_t* data, int half, const Tile& x, float* out, int ld, bool accumulate, const F* first) {
    constexpr bool kWide = kCodes == Codes::kEight;
    constexpr int kBytes = kWide ? 512 : 256, kParts = kGroup / kGroupSize;
    constexpr int kShare = 2 * kBytes + kParts * kStrip * int(sizeof(Scale)) * (kMin ? 2 : 1);  // bytes of a group
    const int groups = w.k / kGroup;
    F acc[kHalves][kRows];
    for (int p = 0; p < kHalves; p++)
        for (int i = 0; i < kRows; i++) acc[p][i] = first[p];
    for (int g = 0; g < groups; g++) {
        const int8_t* a = x.a + size_t(g) * kGroup * kRows;
        const int32_t* nsum = x.nsum + size_t(g) * 2 * kRows;
        const uint8_t* at = data + size_t(g) * kShare;
        const Scale* scales = reinterpret_cast<const Scale*>(at + 2 * kBytes);
#pragma GCC unroll 32
        for (int line = 0; line < kShare; line += 64) __builtin_prefetch(at + kAhead + line, 0, 2);
#pragma GCC unroll 2
        for (int h = 0; h < kParts; h++) {
            I c[kHalves][kRows];
#pragma GCC unroll 6
            for (int i = 0; i < kRows; i++) {
                I start = iset(0);
                if (!kMin) start = shift_left(iset(kParts == 2 ? nsum[h * kRows + i] : nsum[i] + nsum[kRows + i]), w.offset_log2);
#pragma GCC unroll 4
                for (int p = 0; p < kHalves; p++) c[p][i] = start;
            }
#pragma GCC unroll 8
            for (int j = 0; j < 8 / kParts; j++) {
                const int step = h * (8 / kParts) + j;
                I v[kHalves];
#pragma GCC unroll 4
                for (int p = 0; p < kHalves; p++) {
                    const uint8_t* codes = at + (half + p) * kBytes;
                    if (kWide) v[p] = iload(codes + step * 64);
                    else v[p] = step % 2 ? high_nibbles(iload(codes + step / 2 * 64)) : low_nibbles(iload(codes + step / 2 * 64));
                }
#pragma GCC unroll 6
                for (int i = 0; i < kRows; i++) {
                    const I four = broadcast4(a + (step * kRows + i) * 4);
#pragma GCC unroll 4
                    for (int p = 0; p < kHalves; p++) c[p][i] = dot<kWide>(c[p][i], v[p], four);
                }
            }
#pragma GCC unroll 4
            for (int p = 0; p < kHalves; p++) {
                const F dv = load_scales(scales + h * kStrip + (half + p) * 16);
#pragma GCC unroll 6
                for (int i = 0; i < kRows; i++) acc[p][i] = fma(to_float(c[p][i]), mul(dv, set(x.s[g * kRows + i])), acc[p][i]);
                if (!kMin) continue;
                const F mv = load_scales(scales + kStrip + (half + p) * 16);
#pragma GCC unroll 6
                for (int i = 0; i < kRows; i++) acc[p][i] = fma(mv, set(x.t[g * kRows + i]), acc[p][i]);
            }
        }
    }
#pragma GCC unroll 4
    for (int p = 0; p < kHalves; p++)
#pragma GCC unroll 6
        for (int i = 0; i < kRows; i++) {
            float* to = out + size_t(i) * ld + p * 16;
            store(to, accumulate ? add(load(to), acc[p][i]) : acc[p][i]);
        }
}

template <Codes kCodes> inline F load_dense(const uint8_t* p) {
    if (kCodes == Codes::kFloat) return load(reinterpret_cast<const float*>(p));
    return kCodes == Codes::kHalf ? load_half(reinterpret_cast<const uint16_t*>(p)) : load_bf16(reinterpret_cast<const uint16_t*>(p));
}

// f16, bf16 and float weights times float activations x[k * step]. Four interleaved sums hide the latency of fma; their order is
// fixed too.
template <Codes kCodes>
inline void dense_row(const Matrix& w, const uint8_t* data, const float* x, int step, float* out, bool accumulate, F first) {
    constexpr int kLine = kStrip * (kCodes == Codes::kFloat ? 4 : 2);
    F acc[4] = {first, set(0.f), set(0.f), set(0.f)};
    for (int k = 0; k < w.k; k += 4) {
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            const F v = load_dense<kCodes>(data + size_t(k + j) * kLine);
            acc[j] = fma(v, set(x[size_t(k + j) * step]), acc[j]);
        }
    }
    const F sum = add(add(acc[0], acc[1]), add(acc[2], acc[3]));
    store(out, accumulate ? add(load(out), sum) : sum);
}

using StripFn = void (*)(const Matrix&, const uint8_t*, int, const Tile&, float*, int, bool, const F*);

template <int kRows, int kHalves> StripFn choose(const Matrix& w) {
    constexpr Codes four = Codes::kFour, eight = Codes::kEight;
    const bool wide = w.codes == eight;
    if (w.has_min && !w.wide_scales) return wide ? strip<eight, true, uint16_t, 32, kRows, kHalves> : strip<four, true, uint16_t, 32, kRows, kHalves>;
    if (w.has_min) return wide ? strip<eight, true, float, 32, kRows, kHalves> : strip<four, true, float, 32, kRows, kHalves>;
    if (w.group == 16) return strip<eight, false, float, 16, kRows, kHalves>;
    return wide ? strip<eight, false, uint16_t, 32, kRows, kHalves> : strip<four, false, uint16_t, 32, kRows, kHalves>;
}

constexpr int kBoth = kMaxRows > 4 ? 2 : 1;  // halves at once: needs the registers

inline StripFn choose(const Matrix& w, int rows) {
    switch (rows) {
        case 1: return choose<1, kBoth>(w);
        case 2: return choose<2, kBoth>(w);
        case 3: return choose<3, kBoth>(w);
#if !defined(SHOAL_PLAIN) && defined(__AVX512F__)
        case 5: return choose<5, 2>(w);
        case 6: return choose<6, 2>(w);
#endif
        default: return choose<4, kBoth>(w);
    }
}

inline void dense_strip(const Matrix& w, const uint8_t* data, int half, const Tile& x, float* out, int ld, bool accumulate, const F* first) {
    for (int r = 0; r < x.rows; r++) {
        float* at = out + size_t(r) * ld;
        if (w.codes == Codes::kFloat) dense_row<Codes::kFloat>(w, data + half * 64, x.x + r, x.rows, at, accumulate, *first);
        else if (w.codes == Codes::kHalf) dense_row<Codes::kHalf>(w, data + half * 32, x.x + r, x.rows, at, accumulate, *first);
        else dense_row<Codes::kBf16>(w, data + half * 32, x.x + r, x.rows, at, accumulate, *first);
    }
}

void product(const Matrix& w, int from, int count, const Tile& x, float* out, int ld, bool accumulate) {
    const bool dense = int(w.codes) >= 16;
    const StripFn fn = dense ? dense_strip : choose(w, x.rows);
    const int step = dense ? 1 : kBoth;
    for (int s = 0; s < count; s++) {
        const uint8_t* data = w.data + size_t(from + s) * w.strip_bytes;
        const float* bias = w.bias ? w.bias + (from + s) * kStrip : nullptr;
        const F first[2] = {bias ? load(bias) : set(0.f), bias ? load(bias + 16) : set(0.f)};
        for (int half = 0; half < 2; half += step) fn(w, data, half, x, out + s * kStrip + half * 16, ld, accumulate, first + half);
    }
}

}}  // namespace shoal::(anonymous)
