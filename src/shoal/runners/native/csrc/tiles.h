// Products on matrix registers: packed weights become bf16, activations are bf16, sums are float.
//
//   A  rows x 32 inputs of a tile      B  32 inputs x 16 outputs      C  rows x 16 sums, which stay in the register
//
// Output n of row r is the sum over groups of 32 inputs, in their order, of what the matrix unit gives for a group, and after each eighth
// group of what the minima times the activations' sums give. The unit computes a row of C from its row of A alone (c + (e + o), where e and
// o are chains of fma over the even and the odd inputs), so a row has the same bits in every tile; a lone row takes this way, too.
//
// A weight is (code * s) + m with s of either sign. As bf16 that is made in 16 lanes of two inputs:
//
//   code * s   half precision takes the code's bits as they lie for a number: c is c / 2^24. Times 2^20 |s| it is rounded to 11 bits, and,
//              shifted by 3, it is bf16 of 2^-112 times it, the last three bits cut (lift.cpp has the factor that evens this out).
//              Where s < 0 all bits of the code are turned over: c * s = (most - c) * |s| + most * s.
//   m          is multiplied by sums of 16 activations, once for 256 inputs, as one product more.
//
// Of 16 x 32 weights with 4 bits that is some 65 instructions (with 6 bits 95) and 16 stores into L1, for up to 128 rows, then 16 cycles
// of the matrix unit for each 16 rows. Up to 16 rows cost what one costs.
#pragma once
#include "products.h"

#if defined(__AMX_BF16__) && !defined(SHOAL_PLAIN)
namespace shoal {
namespace {

constexpr int kSub = 16, kTileRows = 128;  // rows of a matrix register; of a tile
constexpr int kChunkGroups = kChunk / kGroup;

struct alignas(64) TileShapes {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
};
// The compiler does not know that a load of a matrix register reads memory: stores that it needs come before this.
inline void settle_stores() { asm volatile("" ::: "memory"); }

// -- 32 numbers of half precision -----------------------------------------------------------------------------------

using Halves = __m512i;
// By the names of the instructions: assemblers know them longer than compilers do. They take and give subnormal numbers at full speed.
#define SHOAL_HALVES(name, instruction)                            \
    inline Halves name(Halves a, Halves b) {                       \
        Halves c;                                                  \
        asm(instruction " %2, %1, %0" : "=v"(c) : "v"(a), "v"(b)); \
        return c;                                                  \
    }
SHOAL_HALVES(times, "vmulph")
SHOAL_HALVES(plus, "vaddph")
inline Halves of_unsigned(__m512i a) {
    Halves c;
    asm("vcvtuw2ph %1, %0" : "=v"(c) : "v"(a));
    return c;
}
inline Halves of_signed(__m512i a) {
    Halves c;
    asm("vcvtw2ph %1, %0" : "=v"(c) : "v"(a));
    return c;
}
inline Halves words(int bits) { return _mm512_set1_epi16(int16_t(bits)); }
// x where the bit of mask is set, else y; (x & mask) ^ flip; x | (y & mask).
inline __m512i choose_bits(__m512i x, __m512i y, __m512i mask) { return _mm512_ternarylogic_epi64(x, y, mask, 0xe4); }
inline __m512i cut_and_flip(__m512i x, __m512i mask, __m512i flip) {
    return _mm512_ternarylogic_epi64(x, mask, flip, 0x6a);
}
inline __m512i or_cut(__m512i x, __m512i y, __m512i mask) { return _mm512_ternarylogic_epi64(x, y, mask, 0xf8); }
inline __m512i unsigned_words(const uint8_t* p) {
    return _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline __m512i signed_words(const uint8_t* p) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
// Numbers 16 * half .. of 32, each twice.
inline Halves twice(Halves x, int half) {
    alignas(64) static constexpr uint16_t at[2][32] = {
        {0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7, 8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15},
        {16, 16, 17, 17, 18, 18, 19, 19, 20, 20, 21, 21, 22, 22, 23, 23,
         24, 24, 25, 25, 26, 26, 27, 27, 28, 28, 29, 29, 30, 30, 31, 31}};
    return _mm512_permutexvar_epi16(_mm512_load_si512(at[half]), x);
}
inline Halves halves_of(F low, F high) {
    const __m256i a = (__m256i)_mm512_cvtps_ph(low.v, 0), b = (__m256i)_mm512_cvtps_ph(high.v, 0);
    return _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1);
}
inline Halves lifted(const uint8_t* p, const float* lift) {
    return halves_of(mul(load_half(halves(p)), load(lift)), mul(load_half(halves(p) + 16), load(lift + 16)));
}

// -- a chunk of a strip ---------------------------------------------------------------------------------------------

constexpr int kMostParts = 2;
struct alignas(64) Chunk {
    uint8_t pairs[kChunkGroups][2][16][64];          // B of each group and half of the outputs
    uint8_t minima[2][16][64];                       // B of the sums: a line for each 16 inputs
    uint16_t scales[kChunkGroups * kMostParts][32];  // with their signs
};

// What codes become before they are multiplied, and their largest; offset: what of them is zero. Of a table the least entry is taken away,
// since what is cut off a product is a share of all of it.
struct Values {
    I table;
    int most, offset;
    Values(const Matrix& w, int most_code)
        : table(iset(0)), most(most_code), offset(w.offset_log2 < 0 ? 0 : 1 << w.offset_log2) {
        if (w.codes != Codes::kTable) return;
        int least = 255, largest = 0;
        for (int entry : w.table) least = entry < least ? entry : least, largest = entry > largest ? entry : largest;
        table.v = _mm512_sub_epi8(load_table(w.table).v, _mm512_set1_epi8(char(least)));
        most = largest - least, offset -= least;
    }
};
constexpr int most_code(Codes c) {
    return c == Codes::kTwo     ? 3
           : c == Codes::kThree ? 7
           : c == Codes::kFour  ? 15
           : c == Codes::kFive  ? 31
           : c == Codes::kSix   ? 63
                                : 255;
}

// Scale and minimum of one part: m, times 2^-20 as codes are, where the form has minima.
template <Codes kCodes, Scales kScales>
inline void put_part(Chunk& u, int part, const Values& values, Halves s, Halves m) {
    constexpr int kParts = kGroup / scale_inputs(kScales);
    const __mmask32 below = _mm512_movepi16_mask(s);
    if (!has_min(kScales)) {
        // -offset * s, and with codes turned over (most - offset) * s; times 2^-20, as the codes are
        const auto by = [](int n) { return words((n < 0 ? 0x8000 : 0) | 0x0010 * (n < 0 ? -n : n)); };
        m = times(s, _mm512_mask_blend_epi16(below, by(-values.offset), by(values.most - values.offset)));
    } else if (below) {
        m = plus(m, _mm512_maskz_mov_epi16(below, times(s, words(0x0010 * values.most))));
    }
    const __m512i sign = words(0x8000), size = _mm512_srli_epi16(_mm512_andnot_si512(sign, m), 3),
                  bf16 = or_cut(size, m, sign);
    _mm512_store_si512(u.scales[part], s);
    for (int half = 0; half < 2; half++) {
        const __m512i line = twice(bf16, half);
        _mm512_store_si512(u.minima[half][part * 2 / kParts], line);
        if (kParts == 1) _mm512_store_si512(u.minima[half][2 * part + 1], line);
    }
}

// Of the group at `within` of the block at p: its parts are parts `part` .. of the chunk.
template <Codes kCodes, Scales kScales>
inline void put_scales(const Values& values, const uint8_t* p, int within, const float* lift, Halves d, Halves m,
                       Chunk& u, int part) {
    const Halves k15 = words(15), upper_bits = words(0x30);
    const auto put = [&](int h, Halves s, Halves minimum) {
        put_part<kCodes, kScales>(u, part + h, values, s, minimum);
    };
    if constexpr (kScales == Scales::kHalf) {
        put(0, d, d);
    } else if constexpr (kScales == Scales::kHalfMin) {
        put(0, d, times(m, words(0x0010)));
    } else if constexpr (kScales == Scales::kSix) {
        const __m512i low = unsigned_words(p + 128 + within * 32), upper = unsigned_words(p + 384 + within / 2 * 32);
        const __m512i of_s = within % 2 ? upper : _mm512_slli_epi16(upper, 4),
                      of_m = within % 2 ? _mm512_slli_epi16(upper, 2) : _mm512_slli_epi16(upper, 6);
        put(0, times(of_unsigned(or_cut(_mm512_and_si512(low, k15), of_s, upper_bits)), d),
            times(or_cut(_mm512_and_si512(low, words(0xf0)), of_m, words(0x300)), m));
    } else if constexpr (kScales == Scales::kNibbles) {
        for (int h = 0; h < 2; h++) {
            const __m512i both = unsigned_words(p + 128 + (2 * within + h) * 32);
            put(h, times(of_unsigned(_mm512_and_si512(both, k15)), d), times(_mm512_and_si512(both, words(0xf0)), m));
        }
    } else if constexpr (kScales == Scales::kPower) {
        const F unit = set(1.f);
        d = halves_of(mul(scale_at<kScales, false>(p, 0, 0, 0, unit), load(lift)),
                      mul(scale_at<kScales, false>(p, 0, 0, 16, unit), load(lift + 16)));
        put(0, d, d);
    } else {
        constexpr int kParts = kGroup / scale_inputs(kScales);
        for (int h = 0; h < kParts; h++) {
            const Halves s = times(of_signed(signed_words(p + 64 + (kParts * within + h) * 32)), d);
            put(h, s, s);
        }
    }
}

// A line of B: codes at bit 0 with 16 times the scale, or at bit 4 with it.
inline void put_pairs(uint8_t* to, __m512i codes, Halves s) {
    _mm512_store_si512(to, _mm512_srli_epi16(times(codes, s), 3));
}

// B of inputs 8 j .. 8 j + 7 of a group. `flip` is all ones where the scale is negative.
template <Codes kCodes>
inline void put_eight(const uint8_t* group, int half, int j, const Values& values, __m512i flip, Halves s, Halves s16,
                      uint8_t (*to)[64]) {
    if constexpr (kCodes == Codes::kFour || kCodes == Codes::kSix) {
        constexpr int kMost = most_code(kCodes);
        const __m512i low_cut = words(kMost), high_cut = words(kMost << 4), low_flip = _mm512_and_si512(flip, low_cut),
                      high_flip = _mm512_and_si512(flip, high_cut);
        const __m512i v = iload(group + half * low_bytes(kCodes) + j * 64).v, w = _mm512_srli_epi16(v, 8);
        __m512i x0 = v, x1 = v, x2 = w, x3 = w;
        if constexpr (kCodes == Codes::kSix) {
            const __m512i u = iload(group + 2 * low_bytes(kCodes) + half * upper_bytes(kCodes) + j / 2 * 64).v;
            const __m512i low = words(0x0f), high = words(0xf0);
            const bool even = j % 2 == 0;
            x0 = choose_bits(v, even ? _mm512_slli_epi16(u, 4) : u, low);
            x1 = choose_bits(v, even ? _mm512_slli_epi16(u, 6) : _mm512_slli_epi16(u, 2), high);
            x2 = choose_bits(w, even ? _mm512_srli_epi16(u, 4) : _mm512_srli_epi16(u, 8), low);
            x3 = choose_bits(w, even ? _mm512_srli_epi16(u, 2) : _mm512_srli_epi16(u, 6), high);
        }
        put_pairs(to[4 * j], cut_and_flip(x0, low_cut, low_flip), s16);
        put_pairs(to[4 * j + 1], cut_and_flip(x1, high_cut, high_flip), s);
        put_pairs(to[4 * j + 2], cut_and_flip(x2, low_cut, low_flip), s16);
        put_pairs(to[4 * j + 3], cut_and_flip(x3, high_cut, high_flip), s);
    } else {
        const __m512i low = words(0xff), turned = _mm512_and_si512(flip, _mm512_set1_epi8(char(most_code(kCodes)))),
                      rest = _mm512_and_si512(flip, _mm512_set1_epi8(char(values.most + 1)));
        for (int i = 0; i < 2; i++) {
            __m512i v = _mm512_xor_si512(codes_at<kCodes>(group, half, 2 * j + i, values.table).v, turned);
            if (kCodes == Codes::kTable) v = _mm512_add_epi8(v, rest);  // most - v is not v turned over
            put_pairs(to[4 * j + i], _mm512_and_si512(v, low), s16);
            put_pairs(to[4 * j + 2 + i], _mm512_srli_epi16(v, 8), s16);
        }
    }
}

// Lines of weights that are asked for while a group is made, and while it is multiplied: spread, since a core has few misses in flight, and
// what waits behind them is the group's own weights. Of 8 bits a chunk is 8.7 KB: what is asked for is of the next but one.
constexpr int kTileAhead = 2 * kAhead;
template <int kFrom, int kTo>
inline void ask_for(const uint8_t* ahead) {
#pragma GCC unroll 32
    for (int line = kFrom; line < kTo; line += 64) __builtin_prefetch(ahead + line, 0, 2);
}

template <Codes kCodes, Scales kScales>
struct Form {
    static constexpr int kParts = kGroup / scale_inputs(kScales), kGroups = groups_of_block(kScales),
                         kBytes = block_bytes(kCodes, kScales), kShare = kBytes / kGroups,
                         kWhileMade = kShare / 4 / 64 * 64;
    static const uint8_t* block(const uint8_t* strip, int g) { return strip + size_t(g / kGroups) * kBytes; }
    static const uint8_t* ahead(const uint8_t* strip, int g) {
        return block(strip, g) + g % kGroups * kShare + kTileAhead;
    }
};

// Groups from .. from + count - 1 of a strip.
template <Codes kCodes, Scales kScales>
void make_chunk(const Matrix& w, const uint8_t* strip, const float* lift, int from, int count, Chunk& u) {
    using Of = Form<kCodes, kScales>;
    const Values values(w, most_code(kCodes));
    Halves d = words(0), m = words(0);
#pragma GCC unroll 8
    for (int i = 0; i < count; i++) {
        const uint8_t* block = Of::block(strip, from + i);
        if ((Of::kGroups == 1 || i == 0) && kScales != Scales::kPower) d = lifted(block, lift);
        if ((Of::kGroups == 1 || i == 0) && has_min(kScales)) m = lifted(block + 64, lift);
        put_scales<kCodes, kScales>(values, block, (from + i) % Of::kGroups, lift, d, m, u, i * Of::kParts);
    }
    const Halves sixteen = words(0x4c00), size = words(0x7fff);
    for (int i = 0; i < count; i++) {
        const uint8_t* codes =
            Of::block(strip, from + i) + scale_bytes(kScales) + (from + i) % Of::kGroups * group_bytes(kCodes);
        ask_for<0, Of::kWhileMade>(Of::ahead(strip, from + i));
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++)
#pragma GCC unroll 2
            for (int h = 0; h < Of::kParts; h++) {
                const Halves signed_s = twice(_mm512_load_si512(u.scales[i * Of::kParts + h]), half);
                const Halves s = _mm512_and_si512(signed_s, size), s16 = times(s, sixteen);
                const __m512i flip = _mm512_srai_epi16(signed_s, 15);
#pragma GCC unroll 4
                for (int j = h * (4 / Of::kParts); j < (h + 1) * (4 / Of::kParts); j++)
                    put_eight<kCodes>(codes, half, j, values, flip, s, s16, u.pairs[i][half]);
            }
    }
}

// -- products -------------------------------------------------------------------------------------------------------

// How the rows of a tile are cut: into blocks of `rows`, of which the matrix registers take `first` and the rest. The last block takes the
// last rows: those that the one before has taken, too, are computed twice.
struct Cut {
    int blocks, rows, first;
    explicit Cut(int all) : blocks((all + 2 * kSub - 1) / (2 * kSub)), rows((all + blocks - 1) / blocks) {
        first = rows > kSub ? (rows + 1) / 2 : rows;
    }
    int begin(int block, int all) const { return block * rows < all - rows ? block * rows : all - rows; }
};

// C in 0 to 3: two halves of the first rows, two of the rest. A in 4 and 5, B in 6 and 7.
inline void shape_products(const Cut& cut) {
    TileShapes t;
    const int rest = cut.rows > cut.first ? cut.rows - cut.first : 1;
    for (int i = 0; i < 8; i++) {
        t.bytes[i] = 64;
        t.rows[i] = uint8_t(i > 5 ? kSub : i == 0 || i == 1 || i == 4 ? cut.first : rest);
    }
    settle_stores();
    _tile_loadconfig(&t);
}

template <bool kTwo>
inline void multiply(const void* a, int first, const void* b0, const void* b1) {
    _tile_loadd(4, a, 64);
    _tile_loadd(6, b0, 64);
    _tile_dpbf16ps(0, 4, 6);
    if (kTwo) {
        _tile_loadd(5, static_cast<const uint8_t*>(a) + first * 64, 64);
        _tile_dpbf16ps(2, 5, 6);
    }
    _tile_loadd(7, b1, 64);
    _tile_dpbf16ps(1, 4, 7);
    if (kTwo) _tile_dpbf16ps(3, 5, 7);
}

constexpr int kLine = kStrip * 4;  // bytes
template <bool kTwo>
inline void take_sums(float (*sums)[kStrip], int first) {
    _tile_loadd(0, sums[0], kLine);
    _tile_loadd(1, sums[0] + 16, kLine);
    if (!kTwo) return;
    _tile_loadd(2, sums[first], kLine);
    _tile_loadd(3, sums[first] + 16, kLine);
}
template <bool kTwo>
inline void give_sums(float (*sums)[kStrip], int first) {
    _tile_stored(0, sums[0], kLine);
    _tile_stored(1, sums[0] + 16, kLine);
    if (!kTwo) return;
    _tile_stored(2, sums[first], kLine);
    _tile_stored(3, sums[first] + 16, kLine);
}
inline void no_sums() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

// Sums of the last chunk, where it has fewer than 8 groups: zeros in the place of what is behind them.
inline void cut_sums(const Tile& x, int chunk, int groups, uint16_t (*to)[32]) {
    const __mmask16 there = __mmask16((1u << 2 * groups) - 1);
    for (int r = 0; r < x.rows; r++) _mm512_store_si512(to[r], _mm512_maskz_loadu_epi32(there, x.sums_of(chunk, r)));
}

// Of a strip, by blocks of rows.
struct alignas(64) Sums {
    float of[kTileRows / (2 * kSub)][2 * kSub][kStrip];
};

// Groups from .. from + count - 1 for the rows begin .. of a tile. Where `strip` is not null, more of its weights are asked for.
template <class Of, bool kTwo>
inline void multiply_chunk(const Chunk& u, const Tile& x, int begin, int first, int from, int count, const void* sums,
                           const uint8_t* strip) {
    const uint16_t* a = x.group(from, begin);
    const auto* b = &u.pairs[0];
    for (int i = 0; i < count; i++, b++, a += x.rows * kGroup) {
        if (strip) ask_for<Of::kWhileMade, Of::kShare>(Of::ahead(strip, from + i));
        multiply<kTwo>(a, first, b[0][0], b[0][1]);
    }
    multiply<kTwo>(sums, first, u.minima[0], u.minima[1]);
}

// Chunks that are made before they are multiplied. One, in L1, while the sums of all rows fit the registers; else so many, in L2, since
// between two blocks of rows sums are stored and loaded.
constexpr int kChunks = 8;

template <Codes kCodes, Scales kScales, bool kTwo>
void tile_strip(const Matrix& w, int strip, const Tile& x, const Cut& cut, Sums& sums) {
    using Of = Form<kCodes, kScales>;
    Chunk u[kChunks];
    alignas(64) uint16_t last_sums[kTileRows][32];
    const uint8_t* data = w.data + size_t(strip) * w.strip_bytes;
    const int groups = w.k / kGroup, chunks = (groups + kChunkGroups - 1) / kChunkGroups,
              at_once = cut.blocks > 1 ? kChunks : 1;
    const auto count = [&](int chunk) {
        const int left = groups - chunk * kChunkGroups;
        return left < kChunkGroups ? left : kChunkGroups;
    };
    if (groups % kChunkGroups) cut_sums(x, chunks - 1, groups % kChunkGroups, last_sums);
    no_sums();
    for (int c = 0; c < chunks; c += at_once) {
        const int end = chunks - c < at_once ? chunks : c + at_once;
        for (int i = c; i < end; i++) {
            if (count(i) < kChunkGroups) memset(u[i - c].minima, 0, sizeof u[0].minima);
            make_chunk<kCodes, kScales>(w, data, w.lift + strip * kStrip, i * kChunkGroups, count(i), u[i - c]);
        }
        settle_stores();
        for (int b = 0; b < cut.blocks; b++) {
            const int begin = cut.begin(b, x.rows);
            if (cut.blocks > 1 && c) take_sums<kTwo>(sums.of[b], cut.first);
            if (cut.blocks > 1 && !c) no_sums();
            for (int i = c; i < end; i++) {
                const void* of = count(i) == kChunkGroups ? x.sums_of(i, begin) : last_sums[begin];
                multiply_chunk<Of, kTwo>(u[i - c], x, begin, cut.first, i * kChunkGroups, count(i), of,
                                         b ? nullptr : data);
            }
            if (cut.blocks > 1 || end == chunks) give_sums<kTwo>(sums.of[b], cut.first);
        }
        settle_stores();
    }
}

// The rows of a strip's sums go where they belong.
inline void finish_strip(const Matrix& w, int strip, const Tile& x, const Cut& cut, const Sums& sums, float* out,
                         int ld, bool accumulate) {
    for (int b = 0, r = 0; b < cut.blocks; b++)
        for (const int begin = cut.begin(b, x.rows); r < begin + cut.rows; r++)
            for (int i = 0; i < kStrip; i += 16) {
                F sum = mul(load(sums.of[b][r - begin] + i), load(w.lower + strip * kStrip + i));
                if (w.bias) sum = add(sum, load(w.bias + strip * kStrip + i));
                float* to = out + size_t(r) * ld + i;
                store(to, accumulate ? add(load(to), sum) : sum);
            }
}

using TileFn = void (*)(const Matrix&, int, const Tile&, const Cut&, Sums&);

template <bool kTwo>
TileFn choose_tiles(const Matrix& w) {
#define SHOAL_TILES(codes_, scales_) tile_strip<Codes::codes_, Scales::scales_, kTwo>
    SHOAL_CHOOSE(SHOAL_TILES)
}

void tile_product(const Matrix& w, int from, int count, const Tile& x, float* out, int ld, bool accumulate) {
    if (is_dense(w.codes)) return dense_product(w, from, count, x, out, ld, accumulate);
    const Cut cut(x.rows);
    const TileFn fn = cut.rows > cut.first ? choose_tiles<true>(w) : choose_tiles<false>(w);
    shape_products(cut);
    Sums sums
        [2];  // a strip's are read while the next one's are made: what matrix registers stored just now is slow to load
    const auto finish = [&](int s) {
        finish_strip(w, from + s, x, cut, sums[s % 2], out + s * kStrip, ld, accumulate);
    };
    for (int s = 0; s < count; s++) {
        fn(w, from + s, x, cut, sums[s % 2]);
        if (s) finish(s - 1);
    }
    finish(count - 1);
    _tile_release();  // registers in use are saved at every switch of threads
}

// -- activations ----------------------------------------------------------------------------------------------------

// A number as bf16 and what that is short of it, in one word of 32 bits.
inline uint32_t two_bf16(float x) {
    const uint32_t high = to_bf16(x);
    return high | uint32_t(to_bf16(x - float_of(high << 16))) << 16;
}

// x[0..k) becomes inputs first .. first + k - 1 of one row of a tile.
void to_pairs(const float* x, int k, const Tile& tile, int row, int first) {
    alignas(64) static constexpr uint16_t order[32] = {0,  2,  4,  6,  1,  3,  5,  7,  8,  10, 12, 14, 9,  11, 13, 15,
                                                       16, 18, 20, 22, 17, 19, 21, 23, 24, 26, 28, 30, 25, 27, 29, 31};
    const F times = set(0x1p96f);
    const __m512i high = _mm512_set1_epi32(int(0xffff0000));
    for (int i = 0; i < k; i += kGroup) {
        const int g = (first + i) / kGroup;
        const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(mul(load(x + i + 16), times).v, mul(load(x + i), times).v);
        const __m512i pairs = _mm512_permutexvar_epi16(_mm512_load_si512(order), both);
        _mm512_storeu_si512(tile.group(g, row), pairs);
        // 16 words of two inputs: the first eight are of the first 16 inputs
        const F sum = add(as_float({_mm512_slli_epi32(pairs, 16)}), as_float({_mm512_and_si512(pairs, high)}));
        const __m256 low = _mm512_castps512_ps256(sum.v), up = _mm512_extractf32x8_ps(sum.v, 1);
        const uint32_t sums[2] = {two_bf16(hadd({_mm512_zextps256_ps512(low)})),
                                  two_bf16(hadd({_mm512_zextps256_ps512(up)}))};
        memcpy(tile.sums_of(g / kChunkGroups, row) + g % kChunkGroups * 4, sums, 8);
        if (tile.x)
            for (int j = 0; j < kGroup; j++) tile.x[size_t(first + i + j) * size_t(tile.rows) + size_t(row)] = x[i + j];
    }
}

}
}  // namespace shoal::(anonymous)
#endif
