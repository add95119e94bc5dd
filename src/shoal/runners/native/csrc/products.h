// Products of packed weights with quantised activations. kernels.h draws the layouts of both.
//
// One sum, one order: output n of row r is, for g = 0, 1, .. k/32-1 in this order and in float,
//     acc = fma(float(c), d[g] * s[g], acc); acc = fma(m[g], t[g], acc)      c: exact integer dot of the group
// which does not mention how many rows there are: kRows only says how many such sums share a load of weights. (Where scales are
// of 16 inputs, the sum has both halves of a group in turn.)
//
// Cost of a group of 16 x 32 weights (4 bits): 288 or 320 bytes, and per row 8 dpbusd, a conversion, a multiplication and one or
// two additions. One row is bound by memory, a tile by the multipliers: at best 8 of 11 of their cycles are dpbusd.
#pragma once
#include "kernels.h"
#include "simd.h"

namespace shoal {
namespace {

constexpr int kAhead = 8192;  // bytes, into L2: the 24 misses that L1 can have in flight would bound a core to 15 GB/s

inline I broadcast4(const int8_t* p) {
    int32_t x;
    memcpy(&x, p, 4);
    return iset(x);
}
inline I shifted(I a, int n) { return n < 0 ? shift_left(a, -n) : n ? shift_right(a, n) : a; }  // to the right
inline const uint16_t* halves(const uint8_t* p) { return reinterpret_cast<const uint16_t*>(p); }

// The codes of 16 outputs x inputs 4 * step ..: a byte each.
template <Codes kCodes>
inline I codes_at(const uint8_t* group, int half, int step, I table) {
    const uint8_t *low = group + half * low_bytes(kCodes),
                  *upper = group + 2 * low_bytes(kCodes) + half * upper_bytes(kCodes);
    if (kCodes == Codes::kEight) return iload(low + step * 64);
    if (kCodes <= Codes::kThree) {
        const I two = iand(shifted(iload(low + step / 4 * 64), step % 4 * 2), iset(0x03030303));
        return kCodes == Codes::kTwo ? two : ior(two, iand(shifted(iload(upper), step - 2), iset(0x04040404)));
    }
    const I four = step % 2 ? high_nibbles(iload(low + step / 2 * 64)) : low_nibbles(iload(low + step / 2 * 64));
    if (kCodes == Codes::kFive) return ior(four, iand(shifted(iload(upper), step - 4), iset(0x10101010)));
    if (kCodes == Codes::kSix)
        return ior(four, iand(shifted(iload(upper + step / 4 * 64), step % 4 * 2 - 4), iset(0x30303030)));
    return kCodes == Codes::kTable ? look_up(table, four) : four;
}

// Scale and minimum of outputs lane .. lane + 15 for half `part` of the g-th group of a block that begins at p.
template <Scales kScales, bool kUnit>
inline F scale_at(const uint8_t* p, int g, int part, int lane, F unit) {
    if (kScales == Scales::kHalf || kScales == Scales::kHalfMin) return load_half(halves(p) + lane);
    if (kScales == Scales::kPower) {  // 2^(e - 128), down to subnormal numbers
        const I e = load_bytes(p + lane);
        return as_float(imax(shift_left(iadd(e, iset(-1)), 23), shift_left(iadd(e, iset(1)), 21)));
    }
    const F d = load_half(halves(p) + lane);
    if (kScales == Scales::kSix) {
        const I low = load_bytes(p + 128 + g * 32 + lane),
                upper = shift_right(load_bytes(p + 384 + g / 2 * 32 + lane), g % 2 * 4);
        return mul(d, to_float(ior(iand(low, iset(15)), iand(shift_left(upper, 4), iset(0x30)))));
    }
    if (kScales == Scales::kNibbles)
        return mul(d, to_float(iand(load_bytes(p + 128 + (2 * g + part) * 32 + lane), iset(15))));
    const F sc = to_float(load_signed(p + 64 + (kScales == Scales::kByte ? g : 2 * g + part) * 32 + lane));
    return kUnit ? mul(mul(d, unit), sc) : mul(d, sc);
}
template <Scales kScales>
inline F minimum_at(const uint8_t* p, int g, int part, int lane) {
    const F m = load_half(halves(p) + kStrip + lane);
    if (kScales == Scales::kHalfMin) return m;
    if (kScales == Scales::kNibbles)
        return mul(m, to_float(shift_right(load_bytes(p + 128 + (2 * g + part) * 32 + lane), 4)));
    const I low = load_bytes(p + 128 + g * 32 + lane),
            upper = shift_right(load_bytes(p + 384 + g / 2 * 32 + lane), g % 2 * 4);
    return mul(m, to_float(ior(shift_right(low, 4), iand(shift_left(upper, 2), iset(0x30)))));
}

// `half` is the first of kHalves halves of the strip: read once. Both at once share the loads of activations. (One after the other, with
// 7 or 8 rows, the compiler keeps the first one's activations on the stack for the second: a fifth slower.)
template <Codes kCodes, Scales kScales, int kRows, int kHalves>
inline void strip(const Matrix& w, const uint8_t* data, int half, const Tile& x, float* out, int ld, bool accumulate,
                  const F* first) {
    constexpr bool kMin = has_min(kScales), kTable = kCodes == Codes::kTable, kWide = kCodes == Codes::kEight || kTable;
    constexpr int kParts = kGroup / scale_inputs(kScales), kGroups = groups_of_block(kScales),
                  kBytes = block_bytes(kCodes, kScales);
    constexpr int kShare = kBytes / kGroups;
    const I table = kTable ? load_table(w.table) : iset(0);
    const F unit = set(float_of(uint32_t(w.unit_log2 + 127) << 23));
    F acc[kHalves][kRows];
    for (int p = 0; p < kHalves; p++)
        for (int i = 0; i < kRows; i++) acc[p][i] = first[p];
    for (int g = 0; g < w.k / kGroup; g++) {
        const int8_t* a = x.a + size_t(g) * kGroup * kRows;
        const int32_t* nsum = x.nsum + size_t(g) * 2 * kRows;
        const int within = g % kGroups;
        const uint8_t *block = data + size_t(g / kGroups) * kBytes,
                      *codes = block + scale_bytes(kScales) + within * group_bytes(kCodes);
        const uint8_t* ahead = block + within * kShare + kAhead;
#pragma GCC unroll 32
        for (int line = 0; line < kShare; line += 64) __builtin_prefetch(ahead + line, 0, 2);
#pragma GCC unroll 4
        for (int h = 0; h < kParts; h++) {  // parts of the group
            I c[kHalves][kRows];
#pragma GCC unroll 8
            for (int i = 0; i < kRows; i++) {
                I start = iset(0);
                if (!kMin)
                    start =
                        shift_left(iset(kParts == 2 ? nsum[h * kRows + i] : nsum[i] + nsum[kRows + i]), w.offset_log2);
#pragma GCC unroll 4
                for (int p = 0; p < kHalves; p++) c[p][i] = start;
            }
#pragma GCC unroll 8
            for (int j = 0; j < 8 / kParts; j++) {
                const int step = h * (8 / kParts) + j;
                I v[kHalves];
#pragma GCC unroll 4
                for (int p = 0; p < kHalves; p++) v[p] = codes_at<kCodes>(codes, half + p, step, table);
#pragma GCC unroll 8
                for (int i = 0; i < kRows; i++) {
                    const I four = broadcast4(a + (step * kRows + i) * 4);
#pragma GCC unroll 4
                    for (int p = 0; p < kHalves; p++) c[p][i] = dot<kWide>(c[p][i], v[p], four);
                }
            }
#pragma GCC unroll 4
            for (int p = 0; p < kHalves; p++) {
                const F d = scale_at<kScales, kTable>(block, within, h, (half + p) * 16, unit);
#pragma GCC unroll 8
                for (int i = 0; i < kRows; i++)
                    acc[p][i] = fma(to_float(c[p][i]), mul(d, set(x.s[g * kRows + i])), acc[p][i]);
                if (!kMin) continue;
                const F m = minimum_at<kScales>(block, within, h, (half + p) * 16);
#pragma GCC unroll 8
                for (int i = 0; i < kRows; i++) {
                    const float t = kParts == 1 ? x.t[g * kRows + i] : x.s[g * kRows + i] * -float(nsum[h * kRows + i]);
                    acc[p][i] = fma(m, set(t), acc[p][i]);
                }
            }
        }
    }
#pragma GCC unroll 4
    for (int p = 0; p < kHalves; p++)
#pragma GCC unroll 8
        for (int i = 0; i < kRows; i++) {
            float* to = out + size_t(i) * ld + p * 16;
            store(to, accumulate ? add(load(to), acc[p][i]) : acc[p][i]);
        }
}

template <Codes kCodes>
inline F load_dense(const uint8_t* p) {
    if (kCodes == Codes::kFloat) return load(reinterpret_cast<const float*>(p));
    return kCodes == Codes::kHalf ? load_half(halves(p)) : load_bf16(halves(p));
}

// f16, bf16 and float weights times float activations. Four interleaved sums hide the latency of fma; their order is fixed too.
template <Codes kCodes, int kRows>
inline void dense_rows(const Matrix& w, const uint8_t* data, const float* x, int step, float* out, int ld,
                       bool accumulate, F first) {
    constexpr int kLine = kStrip * (kCodes == Codes::kFloat ? 4 : 2);
    F acc[kRows][4];
    for (int i = 0; i < kRows; i++) acc[i][0] = first, acc[i][1] = acc[i][2] = acc[i][3] = set(0.f);
    for (int k = 0; k < w.k; k += 4) {
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            const uint8_t* at = data + size_t(k + j) * kLine;
            if (j % 2 == 0) __builtin_prefetch(at + kAhead, 0, 2);
            const F v = load_dense<kCodes>(at);
#pragma GCC unroll 4
            for (int i = 0; i < kRows; i++) acc[i][j] = fma(v, set(x[size_t(k + j) * step + i]), acc[i][j]);
        }
    }
    for (int i = 0; i < kRows; i++) {
        const F sum = add(add(acc[i][0], acc[i][1]), add(acc[i][2], acc[i][3]));
        float* to = out + size_t(i) * ld;
        store(to, accumulate ? add(load(to), sum) : sum);
    }
}

template <Codes kCodes>
inline void dense_strip(const Matrix& w, const uint8_t* data, int half, const Tile& x, float* out, int ld,
                        bool accumulate, const F* first) {
    data += half * 16 * (kCodes == Codes::kFloat ? 4 : 2);
    int r = 0;
    for (; r + kMaxRows / 2 <= x.rows; r += kMaxRows / 2)
        dense_rows<kCodes, kMaxRows / 2>(w, data, x.x + r, x.rows, out + size_t(r) * ld, ld, accumulate, *first);
    for (; r < x.rows; r++)
        dense_rows<kCodes, 1>(w, data, x.x + r, x.rows, out + size_t(r) * ld, ld, accumulate, *first);
}

using StripFn = void (*)(const Matrix&, const uint8_t*, int, const Tile&, float*, int, bool, const F*);

// The one of FN(codes, scales) for the form of w.
#define SHOAL_CHOOSE(FN)                                                               \
    switch (w.codes) {                                                                 \
        case Codes::kTwo:                                                              \
            return FN(kTwo, kNibbles);                                                 \
        case Codes::kThree:                                                            \
            return FN(kThree, kByte16);                                                \
        case Codes::kSix:                                                              \
            return FN(kSix, kByte16);                                                  \
        case Codes::kEight:                                                            \
            return FN(kEight, kHalf);                                                  \
        case Codes::kFive:                                                             \
            if (w.scales == Scales::kSix) return FN(kFive, kSix);                      \
            return w.scales == Scales::kHalf ? FN(kFive, kHalf) : FN(kFive, kHalfMin); \
        case Codes::kTable:                                                            \
            if (w.scales == Scales::kByte) return FN(kTable, kByte);                   \
            if (w.scales == Scales::kByte16) return FN(kTable, kByte16);               \
            return w.scales == Scales::kHalf ? FN(kTable, kHalf) : FN(kTable, kPower); \
        default:                                                                       \
            if (w.scales == Scales::kSix) return FN(kFour, kSix);                      \
            return w.scales == Scales::kHalf ? FN(kFour, kHalf) : FN(kFour, kHalfMin); \
    }

template <int kRows, int kHalves>
StripFn choose(const Matrix& w) {
#define SHOAL_STRIP(codes_, scales_) strip<Codes::codes_, Scales::scales_, kRows, kHalves>
    SHOAL_CHOOSE(SHOAL_STRIP)
}

constexpr int kBoth = kMaxRows > 4 ? 2 : 1;  // halves at once: needs the registers

inline StripFn choose(const Matrix& w, int rows) {
    switch (rows) {
        case 1:
            return choose<1, kBoth>(w);
        case 2:
            return choose<2, kBoth>(w);
        case 3:
            return choose<3, kBoth>(w);
#if !defined(SHOAL_PLAIN) && defined(__AVX512F__)
        case 5:
            return choose<5, 2>(w);
        case 6:
            return choose<6, 2>(w);
        case 7:
            return choose<7, 2>(w);
        case 8:
            return choose<8, 2>(w);
#endif
        default:
            return choose<4, kBoth>(w);
    }
}

// FN(strip's weights, half, where its outputs go, what they begin with) for `step` halves at a time.
template <class Fn>
inline void each_strip(const Matrix& w, int from, int count, float* out, int step, Fn fn) {
    for (int s = 0; s < count; s++) {
        const float* bias = w.bias ? w.bias + (from + s) * kStrip : nullptr;
        const F first[2] = {bias ? load(bias) : set(0.f), bias ? load(bias + 16) : set(0.f)};
        for (int half = 0; half < 2; half += step)
            fn(w.data + size_t(from + s) * w.strip_bytes, half, out + s * kStrip + half * 16, first + half);
    }
}

inline void dense_product(const Matrix& w, int from, int count, const Tile& x, float* out, int ld, bool accumulate) {
    const auto fn = w.codes == Codes::kFloat  ? dense_strip<Codes::kFloat>
                    : w.codes == Codes::kHalf ? dense_strip<Codes::kHalf>
                                              : dense_strip<Codes::kBf16>;
    each_strip(w, from, count, out, 1, [&](const uint8_t* data, int half, float* to, const F* first) {
        fn(w, data, half, x, to, ld, accumulate, first);
    });
}

// A template, since kernels with matrix registers have their sums from those (tiles.h): there nothing of it is compiled.
template <int = 0>
void product(const Matrix& w, int from, int count, const Tile& x, float* out, int ld, bool accumulate) {
    if (is_dense(w.codes)) return dense_product(w, from, count, x, out, ld, accumulate);
    const StripFn fn = choose(w, x.rows);
    each_strip(w, from, count, out, kBoth, [&](const uint8_t* data, int half, float* to, const F* first) {
        fn(w, data, half, x, to, ld, accumulate, first);
    });
}

}
}  // namespace shoal::(anonymous)
