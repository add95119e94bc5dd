// From the blocks of GGML types to strips (kernels.h draws both sides' codes) and back to floats.
#include <algorithm>
#include <cstring>

#include "model.h"

namespace shoal {

namespace {

// One block of one row, taken apart: the codes (of 5 and 6 bits the low four, of 3 the low two, and `upper` has the others), and as
// `sc` and `sm` scales and minima of its parts, as the scales of the form have them.
struct Block {
    alignas(64) uint8_t codes[256];
    uint8_t upper[256];
    uint8_t sc[16], sm[16];
    uint16_t d, m;
};

template <class T>
T load(const uint8_t* p) {
    T x;
    memcpy(&x, p, sizeof x);
    return x;
}
uint16_t half_at(const uint8_t* p) { return load<uint16_t>(p); }

// Codes are cut out of and put into whole words of 64 bits, eight of them at once. Vectors of two are in every baseline, so this
// needs no flags, and no compiler that finds them.
typedef uint64_t Pair __attribute__((vector_size(16)));
constexpr uint64_t kBytes = 0x0101010101010101;  // times n: n in each byte

void put(uint8_t* p, Pair x) { memcpy(p, &x, sizeof x); }

template <int kCodes>
void nibbles(const uint8_t* q, uint8_t* codes) {  // so many low ones, then as many high ones
    for (int i = 0; i < kCodes; i += 16) {
        const Pair x = load<Pair>(q + i);
        put(codes + i, x & 15 * kBytes), put(codes + kCodes + i, x >> 4 & 15 * kBytes);
    }
}
// Bits kBits * j, and as many as that, of each of 32 bytes become codes 32 j + 0 .. 31, for so many j.
template <int kBits, int kTimes>
void planes(const uint8_t* p, uint8_t* codes) {
    for (int i = 0; i < 32; i += 16) {
        Pair x = load<Pair>(p + i);
        for (int j = 0; j < kTimes; j++, x >>= kBits) put(codes + 32 * j + i, x & ((1 << kBits) - 1) * kBytes);
    }
}
void bits(const uint8_t* p, uint8_t* codes) {  // bit i of 32 is code i
    for (int i = 0; i < 4; i++) {
        const uint64_t own = p[i] * kBytes & 0x8040201008040201, set = own + 0x7f * kBytes;  // its top bit, if any
        const uint64_t eight = set >> 7 & kBytes;
        memcpy(codes + 8 * i, &eight, 8);
    }
}
// Of four parts as they are; of four more the upper two bits above those.
void six_bit_scales(const uint8_t* s, Block& b) {
    const uint32_t sc = load<uint32_t>(s), sm = load<uint32_t>(s + 4), low = load<uint32_t>(s + 8);
    constexpr uint32_t k15 = uint32_t(15 * kBytes), k48 = uint32_t(48 * kBytes), k63 = uint32_t(63 * kBytes);
    const uint32_t scales[2] = {sc & k63, (low & k15) | (sc >> 2 & k48)};
    const uint32_t minima[2] = {sm & k63, (low >> 4 & k15) | (sm >> 2 & k48)};
    memcpy(b.sc, scales, 8), memcpy(b.sm, minima, 8);
}

void q4_0(const uint8_t* p, Block& b) { b.d = half_at(p), nibbles<16>(p + 2, b.codes); }
void q4_1(const uint8_t* p, Block& b) { b.d = half_at(p), b.m = half_at(p + 2), nibbles<16>(p + 4, b.codes); }
void q5_0(const uint8_t* p, Block& b) { b.d = half_at(p), nibbles<16>(p + 6, b.codes), bits(p + 2, b.upper); }
void q5_1(const uint8_t* p, Block& b) {
    b.d = half_at(p), b.m = half_at(p + 2), nibbles<16>(p + 8, b.codes), bits(p + 4, b.upper);
}
void q8_0(const uint8_t* p, Block& b) {
    b.d = half_at(p);
    for (int i = 0; i < 32; i += 16) put(b.codes + i, load<Pair>(p + 2 + i) ^ 0x80 * kBytes);
}
void q2_k(const uint8_t* p, Block& b) {
    for (int i = 0; i < 16; i++) b.sc[i] = p[i] & 15, b.sm[i] = p[i] >> 4;
    planes<2, 4>(p + 16, b.codes), planes<2, 4>(p + 48, b.codes + 128);
    b.d = half_at(p + 80), b.m = half_at(p + 82) ^ 0x8000;
}
void q3_k(const uint8_t* p, Block& b) {
    planes<2, 4>(p + 32, b.codes), planes<2, 4>(p + 64, b.codes + 128);
    planes<1, 8>(p, b.upper);
    const uint8_t* s = p + 96;
    for (int i = 0; i < 16; i++)
        b.sc[i] = uint8_t(((i < 8 ? s[i] & 15 : s[i - 8] >> 4) | (s[8 + i % 4] >> 2 * (i / 4) & 3) << 4) - 32);
    b.d = half_at(p + 108);
}
void q4_k(const uint8_t* p, Block& b) {
    b.d = half_at(p), b.m = half_at(p + 2) ^ 0x8000;
    six_bit_scales(p + 4, b);
    for (int j = 0; j < 4; j++) nibbles<32>(p + 16 + 32 * j, b.codes + 64 * j);
}
void q5_k(const uint8_t* p, Block& b) {
    b.d = half_at(p), b.m = half_at(p + 2) ^ 0x8000;
    six_bit_scales(p + 4, b);
    for (int j = 0; j < 4; j++) nibbles<32>(p + 48 + 32 * j, b.codes + 64 * j);
    planes<1, 8>(p + 16, b.upper);
}
void q6_k(const uint8_t* p, Block& b) {
    for (int h = 0; h < 2; h++) {
        nibbles<64>(p + 64 * h, b.codes + 128 * h);
        planes<2, 4>(p + 128 + 32 * h, b.upper + 128 * h);
    }
    memcpy(b.sc, p + 192, 16);
    b.d = half_at(p + 208);
}
void iq4_xs(const uint8_t* p, Block& b) {
    b.d = half_at(p);
    const int upper = half_at(p + 2);
    for (int j = 0; j < 8; j++) {
        b.sc[j] = uint8_t(((p[4 + j / 2] >> j % 2 * 4 & 15) | (upper >> 2 * j & 3) << 4) - 32);
        nibbles<16>(p + 8 + 16 * j, b.codes + 32 * j);
    }
}
void mxfp4(const uint8_t* p, Block& b) { b.sc[0] = p[0], nibbles<16>(p + 1, b.codes); }
// What pack.py makes of the types whose values come from a grid: d, 16 scales, codes two by two.
void grid(const uint8_t* p, Block& b) {
    b.d = half_at(p);
    memcpy(b.sc, p + 2, 16);
    for (int i = 0; i < 128; i++) b.codes[2 * i] = p[18 + i] & 15, b.codes[2 * i + 1] = p[18 + i] >> 4;
}

// Words of four codes, of one group and two outputs side by side, to their places. The low halves of a's and b's first numbers are
// eight bytes of one vector, those of their second numbers of the other.
void put_words(uint8_t* one, uint8_t* other, Pair a, Pair b) {
    const Pair both = (a & 0xffffffff) | b << 32;
    const uint64_t first = both[0], second = both[1];
    memcpy(one, &first, 8), memcpy(other, &second, 8);
}
Pair fours(const uint8_t* codes) {  // 16 codes of 4 bits: two words
    const Pair q = load<Pair>(codes);
    return q | q >> 28;
}
Pair twos(const uint8_t* codes) {  // 32 codes of 2 bits: two words
    const auto part = [codes](int i) { return Pair{load<uint64_t>(codes + i), load<uint64_t>(codes + 16 + i)}; };
    const Pair q = part(0) | part(8) << 4;
    return q | q >> 30;
}
uint32_t ones(const uint8_t* codes) {  // 32 codes of a bit: a word
    Pair q = load<Pair>(codes) | load<Pair>(codes + 16) << 4;
    q |= q >> 31;
    return uint32_t(q[0] | q[1] << 2);
}
template <Codes kCodes>
void put_codes(const Block& a, const Block& b, int from, uint8_t* low, uint8_t* upper) {
    constexpr int kVector = 64;
    for (int i = 0; kCodes > Codes::kThree && i < 2; i++) {
        const uint8_t *p = a.codes + from + 16 * i, *q = b.codes + from + 16 * i;
        if constexpr (kCodes == Codes::kEight) {
            uint8_t* at = low + 4 * kVector * i;
            put_words(at, at + 2 * kVector, load<Pair>(p), load<Pair>(q));
            put_words(at + kVector, at + 3 * kVector, load<Pair>(p) >> 32, load<Pair>(q) >> 32);
        } else
            put_words(low + 2 * kVector * i, low + 2 * kVector * i + kVector, fours(p), fours(q));
    }
    if constexpr (kCodes <= Codes::kThree) put_words(low, low + kVector, twos(a.codes + from), twos(b.codes + from));
    if constexpr (kCodes == Codes::kSix) put_words(upper, upper + kVector, twos(a.upper + from), twos(b.upper + from));
    if constexpr (kCodes == Codes::kThree || kCodes == Codes::kFive) {
        const uint32_t words[2] = {ones(a.upper + from), ones(b.upper + from)};
        memcpy(upper, words, 8);
    }
}

// Bytes of one output to their places, which are so far apart as a strip has outputs.
template <int kCount>
void put_bytes(uint8_t* at, const uint8_t* bytes, int step = 1) {
    for (int i = 0; i < kCount; i++) at[i * kStrip] = bytes[i * step];
}
template <Scales kScales>
void put_scales(const Block& b, uint8_t* out, int row) {
    if constexpr (kScales == Scales::kPower) return put_bytes<1>(out + row, b.sc);
    constexpr int at = has_min(kScales) ? 128 : 64, parts = 8 * kGroup / scale_inputs(kScales);
    memcpy(out + 2 * row, &b.d, 2);
    if (has_min(kScales)) memcpy(out + 64 + 2 * row, &b.m, 2);
    if constexpr (kScales == Scales::kByte || kScales == Scales::kByte16) put_bytes<parts>(out + at + row, b.sc);
    if constexpr (kScales == Scales::kNibbles || kScales == Scales::kSix) {
        const Pair sc = load<Pair>(b.sc), sm = load<Pair>(b.sm);
        uint8_t bytes[16];
        put(bytes, (sc & 15 * kBytes) | (sm & 15 * kBytes) << 4), put_bytes<parts>(out + at + row, bytes);
        if constexpr (kScales == Scales::kSix) {
            const Pair above = (sc >> 4 & 3 * kBytes) | (sm >> 4 & 3 * kBytes) << 2;
            put(bytes, above | above >> 4), put_bytes<4>(out + 384 + row, bytes, 2);  // of two parts, in every second
        }
    }
}

// Blocks of one GGML type, of so many bytes, to strips of its form. A block of the file is a block of the strip.
template <auto kTake, int kBlockBytes, Codes kCodes, Scales kScales>
void pack_blocks(const Matrix& w, const uint8_t* raw, uint8_t* out) {
    constexpr int groups = groups_of_block(kScales), low = low_bytes(kCodes), upper = upper_bytes(kCodes);
    const int blocks = w.k / kGroup / groups;
    const size_t row = size_t(blocks) * kBlockBytes;
    std::vector<Block> rows(kStrip);
    for (int first = 0; first < w.n; first += kStrip) {
        const int count = std::min(w.n - first, kStrip);
        std::fill(rows.begin() + count, rows.end(), Block{});
        for (int b = 0; b < blocks; b++, out += block_bytes(kCodes, kScales)) {
            for (int r = 0; r < count; r++)
                kTake(raw + size_t(first + r) * row + size_t(b) * kBlockBytes, rows[size_t(r)]);
            for (int r = 0; r < kStrip; r++) put_scales<kScales>(rows[size_t(r)], out, r);
            uint8_t* group = out + scale_bytes(kScales);
            for (int g = 0; g < groups; g++, group += group_bytes(kCodes))
                for (int r = 0; r < kStrip; r += 2)
                    put_codes<kCodes>(rows[size_t(r)], rows[size_t(r) + 1], g * kGroup,
                                      group + r / 16 * low + r % 16 * 4, group + 2 * low + r / 16 * upper + r % 16 * 4);
        }
    }
}

// Values of 16 or 32 bits: [32 rows][k] to [k][32 rows], in parts that stay in the first cache.
template <class T>
void pack_values(const Matrix& w, const uint8_t* raw, uint8_t* out) {
    constexpr int kPart = 64;
    const size_t row = size_t(w.k) * sizeof(T);
    for (int first = 0; first < w.n; first += kStrip) {
        const int count = std::min(w.n - first, kStrip);
        for (int from = 0; from < w.k; from += kPart) {
            const int part = std::min(w.k - from, kPart);
            if (count < kStrip) memset(out, 0, size_t(part) * kStrip * sizeof(T));
            for (int r = 0; r < count; r++)
                for (int k = 0; k < part; k++)
                    memcpy(out + size_t(k * kStrip + r) * sizeof(T),
                           raw + size_t(first + r) * row + size_t(from + k) * sizeof(T), sizeof(T));
            out += size_t(part) * kStrip * sizeof(T);
        }
    }
}

// How a GGML type becomes strips: `weights` in `bytes` are a block.
struct Type {
    const char* name;
    int weights, bytes;
    Codes codes;
    Scales scales;
    void (*pack)(const Matrix&, const uint8_t* raw, uint8_t* out);
};
template <auto kTake, int kBlockBytes, Codes kCodes, Scales kScales>
constexpr Type quantised(const char* name) {
    return {name,        groups_of_block(kScales) * kGroup,
            kBlockBytes, kCodes,
            kScales,     pack_blocks<kTake, kBlockBytes, kCodes, kScales>};
}
template <class T>
constexpr Type plain(const char* name, Codes codes) {
    return {name, 1, int(sizeof(T)), codes, Scales::kNone, pack_values<T>};
}
constexpr Type kTypes[] = {quantised<q4_0, 18, Codes::kFour, Scales::kHalf>("Q4_0"),
                           quantised<q4_1, 20, Codes::kFour, Scales::kHalfMin>("Q4_1"),
                           quantised<q5_0, 22, Codes::kFive, Scales::kHalf>("Q5_0"),
                           quantised<q5_1, 24, Codes::kFive, Scales::kHalfMin>("Q5_1"),
                           quantised<q8_0, 34, Codes::kEight, Scales::kHalf>("Q8_0"),
                           quantised<q2_k, 84, Codes::kTwo, Scales::kNibbles>("Q2_K"),
                           quantised<q3_k, 110, Codes::kThree, Scales::kByte16>("Q3_K"),
                           quantised<q4_k, 144, Codes::kFour, Scales::kSix>("Q4_K"),
                           quantised<q5_k, 176, Codes::kFive, Scales::kSix>("Q5_K"),
                           quantised<q6_k, 210, Codes::kSix, Scales::kByte16>("Q6_K"),
                           quantised<q4_0, 18, Codes::kTable, Scales::kHalf>("IQ4_NL"),
                           quantised<mxfp4, 17, Codes::kTable, Scales::kPower>("MXFP4"),
                           quantised<iq4_xs, 136, Codes::kTable, Scales::kByte>("IQ4_XS"),
                           quantised<grid, 146, Codes::kTable, Scales::kByte16>("GRID"),
                           plain<uint16_t>("F16", Codes::kHalf),
                           plain<uint16_t>("BF16", Codes::kBf16),
                           plain<uint32_t>("F32", Codes::kFloat)};

const Type& type_of(const std::string& name) {
    for (const Type& type : kTypes)
        if (name == type.name) return type;
    throw FormatError("type " + name + " has no kernel");
}

}  // namespace

Matrix form_of(const Entry& e) {
    Matrix w;
    w.n = e.n, w.k = e.k, w.strips = (e.n + kStrip - 1) / kStrip;
    w.codes = Codes(e.codes), w.scales = Scales(e.scales), w.offset_log2 = e.offset_log2, w.unit_log2 = e.unit_log2;
    const auto is = [&](Codes c, std::initializer_list<Scales> of) {
        bool found = false;
        for (Scales s : of) found |= w.codes == c && w.scales == s;
        return found;
    };
    using S = Scales;
    const bool dense = is_dense(w.codes) && e.codes <= int(Codes::kFloat) && w.scales == S::kNone;
    const bool known = dense || is(Codes::kTwo, {S::kNibbles}) || is(Codes::kThree, {S::kByte16}) ||
                       is(Codes::kSix, {S::kByte16}) || is(Codes::kEight, {S::kHalf}) ||
                       is(Codes::kFour, {S::kHalf, S::kHalfMin, S::kSix}) ||
                       is(Codes::kFive, {S::kHalf, S::kHalfMin, S::kSix}) ||
                       is(Codes::kTable, {S::kHalf, S::kByte, S::kByte16, S::kPower});
    const auto fail = [&](const char* what) { throw FormatError("tensor " + e.name + what); };
    if (!known || e.n < 1 || e.k < 1 || e.k % (groups_of_block(w.scales) * kGroup)) fail(" has no kernel");
    if (!dense && !has_min(w.scales) && (e.offset_log2 < 0 || e.offset_log2 > 7)) fail(" has a bad offset");
    if (e.unit_log2 < -8 || e.unit_log2 > 0 || e.table.size() != (w.codes == Codes::kTable ? 16 : 0))
        fail(" has a bad table");
    for (size_t i = 0; i < e.table.size(); i++) {
        if (e.table[i] < 0 || e.table[i] > 255) fail(" has a bad table");
        w.table[i] = uint8_t(e.table[i]);
    }
    w.strip_bytes = dense ? size_t(e.k) * kStrip * (w.codes == Codes::kFloat ? 4 : 2)
                          : size_t(e.k / kGroup / groups_of_block(w.scales)) * size_t(block_bytes(w.codes, w.scales));
    if (w.strip_bytes > (size_t(1) << 40) / size_t(w.strips)) fail(" is too large");
    return w;
}

size_t row_bytes(const std::string& name, int k) {
    const Type& type = type_of(name);
    if (k % type.weights) throw FormatError("rows of " + name + " do not have " + std::to_string(k) + " weights");
    return size_t(k / type.weights) * size_t(type.bytes);
}

void pack_strips(const Matrix& w, const std::string& name, const uint8_t* raw, uint8_t* out) {
    const Type& type = type_of(name);
    if (w.codes != type.codes || w.scales != type.scales) throw FormatError("type " + name + " has another form");
    type.pack(w, raw, out);
}

namespace {

int code_of(const Matrix& w, const uint8_t* group, int lane, int i) {
    const int half = lane / 16, byte = lane % 16 * 4 + i % 4, step = i / 4;
    const uint8_t *low = group + half * low_bytes(w.codes),
                  *upper = group + 2 * low_bytes(w.codes) + half * upper_bytes(w.codes);
    if (w.codes == Codes::kEight) return low[step * 64 + byte];
    if (w.codes <= Codes::kThree) {
        const int two = low[step / 4 * 64 + byte] >> step % 4 * 2 & 3;
        return w.codes == Codes::kTwo ? two : two | (upper[byte] >> step & 1) << 2;
    }
    const int four = low[step / 2 * 64 + byte] >> step % 2 * 4 & 15;
    if (w.codes == Codes::kFive) return four | (upper[byte] >> step & 1) << 4;
    if (w.codes == Codes::kSix) return four | (upper[step / 4 * 64 + byte] >> step % 4 * 2 & 3) << 4;
    return w.codes == Codes::kTable ? w.table[four] : four;
}

struct Affine {
    float d, m;
};
Affine scale_of(const Matrix& w, const uint8_t* p, int lane, int part) {  // part: of the block's parts
    const auto f16 = [&](int i) { return from_half(half_at(p + 2 * i)); };
    const uint8_t* bytes = p + (has_min(w.scales) ? 128 : 64) + part * kStrip + lane;
    switch (w.scales) {
        case Scales::kHalf:
            return {f16(lane), 0};
        case Scales::kHalfMin:
            return {f16(lane), f16(kStrip + lane)};
        case Scales::kPower:
            return {float_of(p[lane] < 2 ? 0x200000u << p[lane] : uint32_t(p[lane] - 1) << 23), 0};
        case Scales::kNibbles:
            return {f16(lane) * float(*bytes & 15), f16(kStrip + lane) * float(*bytes >> 4)};
        case Scales::kSix: {
            const int upper = p[384 + part / 2 * kStrip + lane] >> part % 2 * 4;
            return {f16(lane) * float((*bytes & 15) | (upper & 3) << 4),
                    f16(kStrip + lane) * float(*bytes >> 4 | (upper >> 2 & 3) << 4)};
        }
        default:
            return {f16(lane) * float_of(uint32_t(w.unit_log2 + 127) << 23) * float(int8_t(*bytes)), 0};
    }
}

}  // namespace

void unpack_row(const Matrix& w, int row, float* out) {
    const int lane = row % kStrip;
    const uint8_t* data = w.data + size_t(row / kStrip) * w.strip_bytes;
    if (is_dense(w.codes)) {
        for (int k = 0; k < w.k; k++) {
            const uint8_t* p = data + size_t(k * kStrip + lane) * (w.codes == Codes::kFloat ? 4 : 2);
            out[k] = w.codes == Codes::kFloat  ? float_of(load<uint32_t>(p))
                     : w.codes == Codes::kHalf ? from_half(half_at(p))
                                               : float_of(uint32_t(half_at(p)) << 16);
        }
        return;
    }
    const int groups = groups_of_block(w.scales), inputs = scale_inputs(w.scales),
              offset = has_min(w.scales) ? 0 : 1 << w.offset_log2;
    for (int g = 0; g < w.k / kGroup; g++) {
        const uint8_t* block = data + size_t(g / groups) * size_t(block_bytes(w.codes, w.scales));
        const uint8_t* group = block + scale_bytes(w.scales) + g % groups * group_bytes(w.codes);
        Affine a{};
        for (int i = 0; i < kGroup; i++) {
            if (i % inputs == 0) a = scale_of(w, block, lane, (g % groups * kGroup + i) / inputs);
            out[g * kGroup + i] = a.d * float(code_of(w, group, lane, i) - offset) + a.m;
        }
    }
}

}  // namespace shoal
