// What the kernels of all instruction sets share: the layouts they read and the table they are called through.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace shoal {

// Static: each translation unit keeps its own, compiled for its own instruction set.
static inline uint32_t bits_of(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    return u;
}
static inline float float_of(uint32_t u) {
    float x;
    memcpy(&x, &u, 4);
    return x;
}
static inline uint16_t to_bf16(float x) {  // to nearest even; NaN stays NaN
    uint32_t u = bits_of(x);
    uint32_t rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16, nan = (u >> 16) | 0x40;
    return uint16_t((u & 0x7fffffff) > 0x7f800000 ? nan : rounded);
}
static inline float from_half(uint16_t h) {
    uint32_t sign = uint32_t(h & 0x8000) << 16, exp = (h >> 10) & 31, man = h & 1023;
    if (exp == 0) return float_of(sign | bits_of(float(man) * 0x1p-24f));
    return float_of(sign | (exp == 31 ? 0x7f800000u : (exp + 112) << 23) | man << 13);
}

constexpr int kStrip = 32;   // outputs that lie side by side in a packed weight: two halves of 16 lanes
constexpr int kGroup = 32;   // inputs that share the scale of an activation
constexpr int kChunk = 256;  // inputs whose sums lie together, where activations are bf16
constexpr int kBlock = 32;   // token slots of a KV block
constexpr int kSpan = 64;    // tokens that one softmax update takes: two blocks, always split at multiples of 64
constexpr int kSection =
    512;  // tokens whose spans are summed by themselves, then added to those of the sections before

// A packed weight of n outputs x k inputs: strips of 32 outputs, one after the other, read from front to back. A strip is a row of
// blocks of 32 inputs, or of 256 where scales nest; a block has its scales, then the codes of each group of 32 inputs:
//
//   +--------+------------------+------------------+------------------+------------------+--- next group
//   | scales | codes, out 0-15  | codes, out 16-31 | upper, out 0-15  | upper, out 16-31 |
//   +--------+------------------+------------------+------------------+------------------+---
//
//   codes   4 bits: [4][64 B]   64 B = 16 outputs x 4 inputs, low nibbles inputs 8j..8j+3, high 8j+4..8j+7
//           8 bits: [8][64 B]   64 B = 16 outputs x 4 inputs, inputs 4j..4j+3 (step j)
//           2 bits: [2][64 B]   bits 2i, 2i+1 of a byte: step 4v + i of vector v
//   upper   the fifth bit of 5 (or third of 3): [64 B], bit j of a byte is of step j
//           the fifth and sixth bit of 6:       [2][64 B], as 2 bits are above
//   table   4 bits that are looked up in 16 bytes of the matrix
//
//   scales, each [32 outputs]:                                                                          a weight is, q = code - offset
//     kHalf     d f16                                                                                   d q
//     kHalfMin  d f16, m f16                                                                            d code + m
//     kSix      d f16, m f16, 8 x (low 4 bits of sc | of sm << 4), 4 x (upper bits of two groups)       (d sc) code + (m sm)
//     kByte     d f16, 8 x sc int8                                                                      (d sc unit) q
//     kByte16   d f16, 16 x sc int8, one for 16 inputs                                                  (d sc unit) q
//     kNibbles  d f16, m f16, 16 x (sc | sm << 4), one for 16 inputs                                    (d sc) code + (m sm)
//     kPower    e, a byte                                                                               2^(e - 128) q
//
// or, for f16, bf16 and float, nothing but [k][32] values. Products in parentheses are rounded to float. Each form takes the bytes
// that its type has in a GGUF file, but for IQ4_XS (1.015 of them), Q3_K (1.04) and the IQ1, IQ2 and IQ3 types, which become 4
// bits of a table with scales of 16: 146 bytes for 256.
//
// `offset` is a power of two, or 0 where there is a minimum.
enum class Codes : int {
    kTwo = 2,
    kThree = 3,
    kFour = 4,
    kFive = 5,
    kSix = 6,
    kEight = 8,
    kTable = 12,
    kHalf = 16,
    kBf16 = 17,
    kFloat = 18
};
enum class Scales : int {
    kNone = 0,
    kHalf = 1,
    kHalfMin = 2,
    kSix = 3,
    kByte = 4,
    kByte16 = 5,
    kNibbles = 6,
    kPower = 7
};

constexpr bool is_dense(Codes c) { return int(c) >= 16; }
constexpr int low_bytes(Codes c) {
    return c <= Codes::kThree ? 128 : c == Codes::kEight ? 512 : 256;
}  // of 16 outputs x 32 inputs
constexpr int upper_bytes(Codes c) { return c == Codes::kThree || c == Codes::kFive ? 64 : c == Codes::kSix ? 128 : 0; }
constexpr int group_bytes(Codes c) { return 2 * (low_bytes(c) + upper_bytes(c)); }
constexpr bool has_min(Scales s) { return s == Scales::kHalfMin || s == Scales::kSix || s == Scales::kNibbles; }
constexpr int scale_inputs(Scales s) { return s == Scales::kByte16 || s == Scales::kNibbles ? 16 : kGroup; }
constexpr int groups_of_block(Scales s) { return s >= Scales::kSix && s <= Scales::kNibbles ? 8 : 1; }
constexpr int scale_bytes(Scales s) {  // of a block
    constexpr int of[] = {0, 64, 128, 512, 320, 576, 640, 32};
    return of[int(s)];
}
constexpr int block_bytes(Codes c, Scales s) { return scale_bytes(s) + groups_of_block(s) * group_bytes(c); }

struct Matrix {
    const uint8_t* data = nullptr;
    const float* bias = nullptr;  // [strips * 32] or null
    int n = 0, k = 0, strips = 0;
    Codes codes = Codes::kFour;
    Scales scales = Scales::kHalf;
    int offset_log2 = -1, unit_log2 = 0;
    uint8_t table[16] = {};
    size_t strip_bytes = 0;
    // [strips * 32], for kernels with activations in bf16: what d and m of an output are multiplied by, and what its sum is. See lift.cpp.
    const float *lift = nullptr, *lower = nullptr;
};

// Activations of up to max_rows rows, in what the kernels of this instruction set multiply: 8 bits in groups of 32, x = s * a,
//
//   a       [k/4][rows][4]    so that the four inputs of all rows of a tile lie side by side
//   s, t    [k/32][rows]      scale, and scale * sum of the group's a
//   nsum    [k/16][rows]      minus the sum of each half group; exact integers
//
// or bf16, times 2^96,
//
//   pairs   [k/32][rows][32]  of each 8 inputs 0 2, 4 6, 1 3, 5 7: so they come out of the bytes of packed codes
//   sums    [k/256][rows][16][2]  of each 16 inputs the sum, and what the first number is short of it
//
// and in both
//
//   x       [k][rows]         the values themselves, only where some weight of the model is not quantised
struct Tile {
    int rows = 0, first = 0;  // first: row of the batch
    int8_t* a = nullptr;
    float *s = nullptr, *t = nullptr, *x = nullptr;
    int32_t* nsum = nullptr;
    uint16_t *pairs = nullptr, *sums = nullptr;
    int8_t* quad(int j, int row) const { return a + (size_t(j) * size_t(rows) + size_t(row)) * 4; }
    uint16_t* group(int g, int row) const { return pairs + (size_t(g) * size_t(rows) + size_t(row)) * kGroup; }
    uint16_t* sums_of(int chunk, int row) const { return sums + (size_t(chunk) * size_t(rows) + size_t(row)) * 32; }
};
enum class Inputs : int { kEightBits, kBf16 };
// Bytes of such a tile, a multiple of 64, and the tile in memory that begins at a multiple of 64.
static inline size_t tile_bytes(Inputs inputs, int rows, int k, bool dense) {
    const size_t n = size_t(rows), each = size_t(k), groups = each / kGroup;
    const size_t of = inputs == Inputs::kBf16 ? each * 2 + (each + kChunk - 1) / kChunk * 64 : each + groups * 16;
    return (n * (of + (dense ? each * 4 : 0)) + 63) / 64 * 64;
}
static inline Tile place_tile(Inputs inputs, int rows, int k, bool dense, uint8_t* at) {
    Tile t;
    t.rows = rows;
    const size_t n = size_t(rows), each = size_t(k), groups = each / kGroup;
    const auto take = [&at](size_t bytes) {
        at += bytes;
        return static_cast<void*>(at - bytes);
    };
    if (inputs == Inputs::kBf16) {
        t.pairs = static_cast<uint16_t*>(take(n * each * 2));
        t.sums = static_cast<uint16_t*>(take(n * ((each + kChunk - 1) / kChunk) * 64));
    } else {
        t.a = static_cast<int8_t*>(take(n * each));
        t.s = static_cast<float*>(take(n * groups * 4)), t.t = static_cast<float*>(take(n * groups * 4));
        t.nsum = static_cast<int32_t*>(take(n * groups * 8));
    }
    if (dense) t.x = static_cast<float*>(take(n * each * 4));
    return t;
}

// One query row under attention, for one KV head. `state` is [group] maxima padded to 16, [group][16] sums, [group][v_dim].
struct Row {
    const uint8_t*
        q;  // [group][dim * 2 bytes], scaled by log2(e) and the scores' scale: bf16; or dim codes of 8 bits and their Scaled
    float* state;
    int limit;  // it sees positions begin .. limit - 1
    int begin;
};
// `dim` of queries and keys, `v_dim` of values. `cap` > 0: scores become cap * tanh(score / cap), in units of log2(e).
struct Heads {
    int group, dim, v_dim;
    float cap;
};
inline int state_floats(const Heads& h) { return (h.group + 15) / 16 * 16 + h.group * 16 + h.group * h.v_dim; }

// A row of codes c: x = scale * c; sum128 is -128 times their sum.
struct Scaled {
    float scale;
    int32_t sum128;
};

// KV of one block and one head, in 16 or 8 bits:
//
//   bf16   | K [dim/2][32 tokens][2] | V [16 pairs of tokens][v_dim][2] |
//   8 bits | K [dim/4][32 tokens][4], codes + 128 | V [8 quads of tokens][v_dim][4] | scales of K [32] | of V [32], float |
inline size_t kv_head_bytes(int dim, int v_dim, int bits) {
    return size_t(dim + v_dim) * kBlock * size_t(bits / 8) + (bits == 8 ? kBlock * 8 : 0);
}

// What a feed-forward does between its products. kClipped is gpt-oss's: the gate is cut at `limit`, up at both ends of it, and
// the result is gate * sigmoid(alpha * gate) * (up + 1).
enum class Activation : int { kSilu, kGelu, kRelu2, kClipped, kGeluExact, kCount };

// A causal convolution over the tokens of a sequence, each channel alone. `weight` [taps][channels], the newest token last.
constexpr int kMostTaps = 8;
struct Convolution {
    const float *weight = nullptr, *bias = nullptr;
    int channels = 0, taps = 0;
    bool silu = false;  // applied to what comes out
};

// One head of a linear recurrence over `tokens` of a sequence. With S [dim][v_dim] the state, for one token after the other
//
//     u = beta * (v - decay * S'k)   (kDelta)      u = beta * v   (else)
//     S = decay * S + k u'           o = S'q + skip * v           o takes v's place
//
// `state` holds S as [v_dim/32][dim][32]. Each number is one sum in one order, however the tokens are cut into calls.
struct Recurrence {
    const float *q, *k, *decay, *beta;  // decay, beta: [tokens]
    float* v;
    int tokens, qk_step, v_step, dim, v_dim;  // steps: from one token to the next
    float skip;
    bool delta;
};

struct Kernels {
    const char* name;
    int max_rows;  // of a tile
    Inputs inputs;
    // out[r * ld + i] = (or += when `accumulate`) row r of the tile times output 32 * strip + i, for 32 * strips outputs.
    void (*product)(const Matrix&, int strip, int strips, const Tile&, float* out, int ld, bool accumulate);
    // x[0..k) becomes inputs first_input .. of a row of the tile.
    void (*quantise)(const float* x, int k, const Tile&, int row, int first_input);
    void (*rms_norm)(const float* x, const float* weight, int n, float eps, float* out);  // out may be x
    void (*layer_norm)(const float* x, const float* weight, const float* bias, int n, float eps,
                       float* out);  // bias may be null
    void (*activate)(Activation, float* gate, const float* up, int n, float alpha,
                     float limit);                                     // gate = f(gate) * up; up may be null
    void (*gate_by)(float* x, const float* gate, int n, bool silu);    // x *= sigmoid(gate), or silu(gate)
    void (*add_scaled)(float* x, const float* y, float scale, int n);  // x += scale * y
    void (*soft_cap)(float* x, int n, float scale, float cap);  // x = cap * tanh(scale * x / cap); cap 0: scale * x
    void (*convolve)(const Convolution&, float* x, const float* before, const float* after, int step, int tokens,
                     float* state, int from, int to);
    void (*recur)(const Recurrence&, float* state);
    void (*rotate)(float* x, const float* cosine, const float* sine, int half);  // pairs (x[i], x[half + i])
    void (*to_bf16_row)(const float* x, int n, float scale, uint16_t* out);
    void (*start_row)(float* state, const Heads&, const float* sinks);  // sinks: [group] scores of no token, or null
    Scaled (*to_codes)(const float* x, int n, int8_t* out);             // not finite: neither is the scale
    // Over KV in 16 bits and in 8.
    void (*attend[2])(const uint8_t* kv0, const uint8_t* kv1, const uint8_t* next0, const uint8_t* next1,
                      const Row* rows, int n, int first, const Heads&);
    void (*merge_row)(float* state, const float* later, const Heads&);  // adds the sums of a later section
    void (*finish_row)(const float* state, const Heads&, float* out);   // out [group][v_dim]
    // The largest of x[0..n) after `best`, lowest index first; `bad` becomes NaN once some x is not finite.
    void (*best_of)(const float* x, int n, int first, float& best, int& index, float& bad);
};

const Kernels *kernels_amx(), *kernels_avx512bf16(), *kernels_avx512vnni(), *kernels_avx2vnni(), *kernels_avx2base();
const Kernels *kernels_neon_i8mm(), *kernels_neon_dot(), *kernels_plain();

}  // namespace shoal
