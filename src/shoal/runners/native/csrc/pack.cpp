// From the blocks of GGML types to strips (kernels.h draws both sides' codes) and back to floats; and a packed file into memory.
#include <atomic>
#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <thread>
#include <unistd.h>

#include "model.h"

namespace shoal {

namespace {

// One block of one row, taken apart. `sc` and `sm` are scales and minima of its parts, as the scales of the form have them.
struct Block {
    alignas(64) uint8_t codes[256];
    uint8_t sc[16], sm[16];
    uint16_t d, m;
};

uint16_t half_at(const uint8_t* p) {
    uint16_t h;
    memcpy(&h, p, 2);
    return h;
}
uint32_t word_at(const uint8_t* p) {
    uint32_t u;
    memcpy(&u, p, 4);
    return u;
}
void nibbles(const uint8_t* q, int n, uint8_t* codes) {  // n low ones, then n high ones
    for (int i = 0; i < n; i++) codes[i] = q[i] & 15, codes[n + i] = q[i] >> 4;
}
void fifth_bits(const uint8_t* p, uint8_t* codes) {
    const uint32_t bits = word_at(p);
    for (int i = 0; i < 32; i++) codes[i] = uint8_t(codes[i] | (bits >> i & 1) << 4);
}
void two_bits(const uint8_t* q, uint8_t* codes) {  // 64 bytes: of every 32 the lowest bits first
    for (int h = 0; h < 2; h++)
        for (int j = 0; j < 4; j++)
            for (int i = 0; i < 32; i++) codes[128 * h + 32 * j + i] = q[32 * h + i] >> 2 * j & 3;
}
void six_bit_scales(const uint8_t* s, Block& b) {
    for (int j = 0; j < 4; j++) {
        b.sc[j] = s[j] & 63, b.sm[j] = s[j + 4] & 63;
        b.sc[j + 4] = uint8_t((s[j + 8] & 15) | s[j] >> 6 << 4),
                 b.sm[j + 4] = uint8_t(s[j + 8] >> 4 | s[j + 4] >> 6 << 4);
    }
}

void q4_0(const uint8_t* p, Block& b) { b.d = half_at(p), nibbles(p + 2, 16, b.codes); }
void q4_1(const uint8_t* p, Block& b) { b.d = half_at(p), b.m = half_at(p + 2), nibbles(p + 4, 16, b.codes); }
void q5_0(const uint8_t* p, Block& b) { b.d = half_at(p), nibbles(p + 6, 16, b.codes), fifth_bits(p + 2, b.codes); }
void q5_1(const uint8_t* p, Block& b) {
    b.d = half_at(p), b.m = half_at(p + 2), nibbles(p + 8, 16, b.codes), fifth_bits(p + 4, b.codes);
}
void q8_0(const uint8_t* p, Block& b) {
    b.d = half_at(p);
    for (int i = 0; i < 32; i++) b.codes[i] = p[2 + i] ^ 0x80;
}
void q2_k(const uint8_t* p, Block& b) {
    for (int i = 0; i < 16; i++) b.sc[i] = p[i] & 15, b.sm[i] = p[i] >> 4;
    two_bits(p + 16, b.codes);
    b.d = half_at(p + 80), b.m = half_at(p + 82) ^ 0x8000;
}
void q3_k(const uint8_t* p, Block& b) {
    two_bits(p + 32, b.codes);
    for (int j = 0; j < 8; j++)
        for (int i = 0; i < 32; i++) b.codes[32 * j + i] = uint8_t(b.codes[32 * j + i] | (p[i] >> j & 1) << 2);
    const uint8_t* s = p + 96;
    for (int i = 0; i < 16; i++)
        b.sc[i] = uint8_t(((i < 8 ? s[i] & 15 : s[i - 8] >> 4) | (s[8 + i % 4] >> 2 * (i / 4) & 3) << 4) - 32);
    b.d = half_at(p + 108);
}
void q4_k(const uint8_t* p, Block& b) {
    b.d = half_at(p), b.m = half_at(p + 2) ^ 0x8000;
    six_bit_scales(p + 4, b);
    for (int j = 0; j < 4; j++) nibbles(p + 16 + 32 * j, 32, b.codes + 64 * j);
}
void q5_k(const uint8_t* p, Block& b) {
    b.d = half_at(p), b.m = half_at(p + 2) ^ 0x8000;
    six_bit_scales(p + 4, b);
    for (int j = 0; j < 4; j++) nibbles(p + 48 + 32 * j, 32, b.codes + 64 * j);
    for (int j = 0; j < 8; j++)
        for (int i = 0; i < 32; i++) b.codes[32 * j + i] = uint8_t(b.codes[32 * j + i] | (p[16 + i] >> j & 1) << 4);
}
void q6_k(const uint8_t* p, Block& b) {
    for (int h = 0; h < 2; h++) {
        uint8_t* codes = b.codes + 128 * h;
        const uint8_t *low = p + 64 * h, *upper = p + 128 + 32 * h;
        nibbles(low, 64, codes);
        for (int j = 0; j < 4; j++)
            for (int i = 0; i < 32; i++) codes[32 * j + i] = uint8_t(codes[32 * j + i] | (upper[i] >> 2 * j & 3) << 4);
    }
    memcpy(b.sc, p + 192, 16);
    b.d = half_at(p + 208);
}
void iq4_xs(const uint8_t* p, Block& b) {
    b.d = half_at(p);
    const int upper = half_at(p + 2);
    for (int j = 0; j < 8; j++) {
        b.sc[j] = uint8_t(((p[4 + j / 2] >> j % 2 * 4 & 15) | (upper >> 2 * j & 3) << 4) - 32);
        nibbles(p + 8 + 16 * j, 16, b.codes + 32 * j);
    }
}
void mxfp4(const uint8_t* p, Block& b) { b.sc[0] = p[0], nibbles(p + 1, 16, b.codes); }
// What pack.py makes of the types whose values come from a grid: d, 16 scales, codes two by two.
void grid(const uint8_t* p, Block& b) {
    b.d = half_at(p);
    memcpy(b.sc, p + 2, 16);
    for (int i = 0; i < 128; i++) b.codes[2 * i] = p[18 + i] & 15, b.codes[2 * i + 1] = p[18 + i] >> 4;
}

struct Type {
    const char* name;
    int weights, bytes;  // of a block
    void (*take)(const uint8_t*, Block&);
};
constexpr Type kTypes[] = {{"Q4_0", 32, 18, q4_0},       {"Q4_1", 32, 20, q4_1},   {"Q5_0", 32, 22, q5_0},
                           {"Q5_1", 32, 24, q5_1},       {"Q8_0", 32, 34, q8_0},   {"Q2_K", 256, 84, q2_k},
                           {"Q3_K", 256, 110, q3_k},     {"Q4_K", 256, 144, q4_k}, {"Q5_K", 256, 176, q5_k},
                           {"Q6_K", 256, 210, q6_k},     {"IQ4_NL", 32, 18, q4_0}, {"MXFP4", 32, 17, mxfp4},
                           {"IQ4_XS", 256, 136, iq4_xs}, {"GRID", 256, 146, grid}, {"F16", 1, 2, nullptr},
                           {"BF16", 1, 2, nullptr},      {"F32", 1, 4, nullptr}};

const Type& type_of(const std::string& name) {
    for (const Type& type : kTypes)
        if (name == type.name) return type;
    throw FormatError("type " + name + " has no kernel");
}

// Codes of one output and group, as words of four inputs, to their places: `low` and `upper` are of its half, `lane` its place there.
void put_codes(Codes codes, const uint32_t* q, int lane, uint8_t* low, uint8_t* upper) {
    const auto put = [lane](uint8_t* at, int vector, uint32_t word) { memcpy(at + vector * 64 + lane * 4, &word, 4); };
    if (codes == Codes::kEight) {
        for (int j = 0; j < 8; j++) put(low, j, q[j]);
        return;
    }
    uint32_t two[2] = {}, one = 0;  // planes of the low, or of the upper bits
    const int from = codes <= Codes::kThree ? 0 : 4, bit = codes == Codes::kThree ? 2 : 4;
    for (int j = 0; j < 8; j++) {
        two[j / 4] |= (q[j] >> from & 0x03030303) << j % 4 * 2;
        one |= (q[j] >> bit & 0x01010101) << j;
    }
    if (codes <= Codes::kThree)
        put(low, 0, two[0]), put(low, 1, two[1]);
    else
        for (int j = 0; j < 4; j++) put(low, j, (q[2 * j] & 0x0f0f0f0f) | (q[2 * j + 1] & 0x0f0f0f0f) << 4);
    if (codes == Codes::kSix) put(upper, 0, two[0]), put(upper, 1, two[1]);
    if (codes == Codes::kThree || codes == Codes::kFive) put(upper, 0, one);
}

void put_scales(Scales scales, const Block* rows, uint8_t* out) {
    const auto put = [&](int at, auto value) {  // a byte of each row
        for (int r = 0; r < kStrip; r++) out[at + r] = uint8_t(value(rows[r]));
    };
    if (scales == Scales::kPower) return put(0, [](const Block& b) { return b.sc[0]; });
    for (int r = 0; r < kStrip; r++) {
        memcpy(out + 2 * r, &rows[r].d, 2);
        if (has_min(scales)) memcpy(out + 64 + 2 * r, &rows[r].m, 2);
    }
    const int parts = scales == Scales::kByte16 || scales == Scales::kNibbles ? 16
                      : scales == Scales::kByte || scales == Scales::kSix     ? 8
                                                                              : 0;
    const int at = has_min(scales) ? 128 : 64;
    for (int i = 0; i < parts; i++)
        put(at + i * kStrip, [&](const Block& b) {
            return scales >= Scales::kSix && has_min(scales) ? (b.sc[i] & 15) | (b.sm[i] & 15) << 4 : b.sc[i];
        });
    for (int i = 0; scales == Scales::kSix && i < 4; i++)
        put(384 + i * kStrip, [&](const Block& b) {
            return b.sc[2 * i] >> 4 | b.sm[2 * i] >> 4 << 2 | b.sc[2 * i + 1] >> 4 << 4 | b.sm[2 * i + 1] >> 4 << 6;
        });
}

void pack_dense(const Matrix& w, const uint8_t* raw, uint8_t* out) {
    const size_t size = w.codes == Codes::kFloat ? 4 : 2, row = size * size_t(w.k);
    for (int s = 0; s < w.strips; s++, out += w.strip_bytes)
        for (int r = 0; r < kStrip; r++) {
            const int i = s * kStrip + r;
            const uint8_t* from = i < w.n ? raw + size_t(i) * row : nullptr;
            for (size_t k = 0; k < size_t(w.k); k++)
                if (from)
                    memcpy(out + (k * kStrip + size_t(r)) * size, from + k * size, size);
                else
                    memset(out + (k * kStrip + size_t(r)) * size, 0, size);
        }
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
    if (!type.take) return pack_dense(w, raw, out);
    const size_t row = row_bytes(name, w.k), size = size_t(block_bytes(w.codes, w.scales));
    const int low = low_bytes(w.codes), upper = upper_bytes(w.codes);
    std::vector<Block> rows(kStrip);
    for (int s = 0; s < w.strips; s++)
        for (int b = 0; b < w.k / type.weights; b++, out += size) {
            for (int r = 0; r < kStrip; r++) {
                const int i = s * kStrip + r;
                if (i < w.n)
                    type.take(raw + size_t(i) * row + size_t(b) * size_t(type.bytes), rows[size_t(r)]);
                else
                    rows[size_t(r)] = {};
            }
            put_scales(w.scales, rows.data(), out);
            uint8_t* group = out + scale_bytes(w.scales);
            for (int g = 0; g < type.weights / kGroup; g++, group += group_bytes(w.codes))
                for (int r = 0; r < kStrip; r++) {
                    uint32_t q[8];
                    memcpy(q, rows[size_t(r)].codes + g * kGroup, 32);
                    put_codes(w.codes, q, r % 16, group + r / 16 * low, group + 2 * low + r / 16 * upper);
                }
        }
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
            out[k] = w.codes == Codes::kFloat  ? float_of(word_at(p))
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

// Eight sums of 64 bits, so that none waits for its own multiplication; every input bit goes into the result.
uint64_t hash_of(const uint8_t* data, size_t bytes) {
    constexpr uint64_t kPrime = 0x9e3779b97f4a7c15, kOther = 0xc2b2ae3d27d4eb4f;
    uint64_t h[8];
    for (int i = 0; i < 8; i++) h[i] = kPrime * uint64_t(i + 1) ^ bytes;
    const auto mix = [](uint64_t sum, uint64_t word) {
        sum = (sum ^ word) * kPrime;
        return sum ^ sum >> 29;
    };
    size_t at = 0;
    for (; at + 64 <= bytes; at += 64)
        for (int i = 0; i < 8; i++) {
            uint64_t word;
            memcpy(&word, data + at + size_t(i) * 8, 8);
            h[i] = mix(h[i], word);
        }
    uint64_t out = bytes;
    for (; at < bytes; at++) out = mix(out, data[at]);
    for (uint64_t x : h) out = (mix(out, x) ^ x >> 32) * kOther;
    return out ^ out >> 32;
}

Pages read_packed(const Packed& file, int threads, bool map) {
    struct Descriptor {
        int fd;
        ~Descriptor() {
            if (fd >= 0) close(fd);
        }
    } source{open(file.path.c_str(), O_RDONLY | O_CLOEXEC)};
    const off_t size = source.fd < 0 ? -1 : lseek(source.fd, 0, SEEK_END);
    if (size < 0) throw DamagedError(file.path + " cannot be read");
    std::vector<size_t> starts = {file.start};
    for (const Piece& piece : file.pieces) starts.push_back(starts.back() + std::min(piece.bytes, size_t(size) + 1));
    if (starts.back() != size_t(size)) throw DamagedError(file.path + " does not end where its pieces do");
    if (map) return Pages(source.fd, size_t(size));  // unchecked: to hash it would read it all
    Pages pages{size_t(size)};
    std::atomic<size_t> next{0};
    std::atomic<int> unread{0}, wrong{0};
    const auto work = [&] {
        for (size_t i; (i = next.fetch_add(1)) < file.pieces.size();) {
            for (size_t at = starts[i]; at < starts[i + 1];) {
                const ssize_t got = pread(source.fd, pages.data() + at, starts[i + 1] - at, off_t(at));
                if (got <= 0) {
                    unread++;
                    return;
                }
                at += size_t(got);
            }
            if (hash_of(pages.data() + starts[i], file.pieces[i].bytes) != file.pieces[i].hash) wrong++;
        }
    };
    {
        std::vector<std::jthread> others;
        for (int i = 1; i < threads; i++) others.emplace_back(work);
        work();
    }
    if (unread) throw DamagedError(file.path + " cannot be read");
    if (wrong) throw DamagedError(file.path + " is damaged: what it holds is not what was written");
    return pages;
}

}  // namespace shoal
