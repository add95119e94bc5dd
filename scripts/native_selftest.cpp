// Every kernel of every instruction set this CPU has against exact numbers or the plain ones, and each row alone against its tile: for machines
// without Python, as aarch64 under user-mode emulation (scripts/native_cross). Prints a line per set; exits 1 on a difference.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <tuple>
#include <vector>

#include "model.h"

using namespace shoal;

static std::mt19937 rng(1);
static float uniform(float low, float high) { return std::uniform_real_distribution<float>(low, high)(rng); }
static int failures = 0;

static void expect(bool ok, const char* isa, const char* what, double value) {
    if (!ok) failures++, printf("  %s: %s differs by %g\n", isa, what, value);
}

static uint16_t half_bits(float x) {  // of normal numbers
    uint32_t u;
    memcpy(&u, &x, 4);
    return uint16_t((u >> 16 & 0x8000) | (((u >> 23 & 255) - 112) << 10) | (u >> 13 & 1023));
}

struct Acts {
    std::vector<uint8_t> memory;
    Tile tile;
    Acts(const Kernels& k, int rows, int inputs) : memory(tile_bytes(k.inputs, rows, inputs, true) + 64) {
        uint8_t* at = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64;
        tile = place_tile(k.inputs, rows, inputs, true, at);
    }
};

static double distance(const std::vector<float>& a, const std::vector<float>& b) {
    double d = 0, n = 1e-20;
    for (size_t i = 0; i < a.size(); i++) d += (a[i] - b[i]) * (a[i] - b[i]), n += b[i] * b[i];
    return std::isfinite(d) ? std::sqrt(d / n) : 1e9;
}

static void products(const Kernels& k, const Kernels& plain, Codes codes, Scales scales, int offset, int inputs) {
    Entry e;
    e.name = "w", e.n = 64, e.k = inputs, e.codes = int(codes), e.scales = int(scales), e.offset_log2 = offset;
    if (codes == Codes::kTable) e.unit_log2 = scales == Scales::kByte16 ? -3 : 0;
    for (int i = 0; codes == Codes::kTable && i < 16; i++) e.table.push_back(int(rng() % 256));
    Matrix w = form_of(e);
    std::vector<uint8_t> data(w.strip_bytes * 2 + 16384);
    const bool dense = is_dense(codes);
    for (size_t i = 0; i < w.strip_bytes * 2; i++) data[i] = uint8_t(rng());
    for (size_t i = 0; dense && i < size_t(64 * inputs); i++) {
        const float v = uniform(-1, 1) + 2;
        const uint32_t u = bits_of(v);
        const uint16_t h = codes == Codes::kHalf ? half_bits(v) : uint16_t(u >> 16);
        if (codes == Codes::kFloat) memcpy(data.data() + 4 * i, &v, 4);
        else memcpy(data.data() + 2 * i, &h, 2);
    }
    const size_t block = dense ? w.strip_bytes : size_t(block_bytes(codes, scales));
    for (size_t at = 0; !dense && at < w.strip_bytes * 2; at += block)
        for (size_t i = 0; i < size_t(kStrip) * (has_min(scales) ? 2 : 1); i++) {
            const uint16_t h = half_bits(uniform(0.5f, 1.5f) * (i >= size_t(kStrip) ? -8.f : 1.f));
            if (scales == Scales::kPower) data[at + i] = uint8_t(126 + rng() % 4);
            else memcpy(data.data() + at + 2 * i, &h, 2);
        }
    w.data = data.data();
    Lifts lifts;
    if (!dense && k.inputs == Inputs::kBf16) lift(w, lifts);
    std::vector<float> values, weights;
    values.resize(size_t(k.max_rows * inputs)), weights.resize(size_t(inputs));
    for (auto& v : values) v = uniform(-2, 2);
    // Each row in a tile of its own: near the exact products of the exact weights. Numbers in 8 bits or in bf16 are that much off.
    std::vector<std::vector<float>> alone;
    for (int r = 0; r < k.max_rows; r++) {
        Acts one(k, 1, inputs);
        alone.emplace_back(64, 1.f);
        k.quantise(values.data() + r * inputs, inputs, one.tile, 0, 0);
        k.product(w, 0, 2, one.tile, alone.back().data(), 64, true);
        if (k.inputs != plain.inputs) continue;  // else the plain ones have the same sums but for the order of additions
        std::vector<float> other(64, 1.f);
        plain.quantise(values.data() + r * inputs, inputs, one.tile, 0, 0);
        plain.product(w, 0, 2, one.tile, other.data(), 64, true);
        expect(distance(alone.back(), other) < 1e-5, k.name, "product beside plain", distance(alone.back(), other));
    }
    std::vector<float> exact, all;
    for (int n = 0; n < 64; n++) {
        unpack_row(w, n, weights.data());
        for (int r = 0; r < k.max_rows; r++) {
            double sum = 1;
            for (int i = 0; i < inputs; i++) sum += double(weights[size_t(i)]) * values[size_t(r * inputs + i)];
            exact.push_back(float(sum)), all.push_back(alone[size_t(r)][size_t(n)]);
        }
    }
    expect(distance(all, exact) < (dense ? 1e-5 : 2e-2), k.name, "product", distance(all, exact));
    for (int rows = 1; rows <= k.max_rows; rows += rows < 40 ? 1 : 11) {
        Acts mine(k, rows, inputs);
        std::vector<float> out(size_t(rows) * 64, 1.f);
        for (int r = 0; r < rows; r++) k.quantise(values.data() + r * inputs, inputs, mine.tile, r, 0);
        k.product(w, 0, 2, mine.tile, out.data(), 64, true);
        for (int r = 0; r < rows; r++) {
            const std::vector<float> row(out.begin() + r * 64, out.begin() + r * 64 + 64);
            expect(row == alone[size_t(r)], k.name, "a row of a tile", distance(row, alone[size_t(r)]));
        }
    }
}

static void attention(const Kernels& k, const Kernels& plain, Heads heads, int tokens, bool eight) {
    const size_t bytes = kv_head_bytes(heads.dim, heads.v_dim, eight ? 8 : 16), width = size_t(heads.dim) * 2;
    std::vector<uint8_t> kv(2 * bytes), q(size_t(heads.group) * width);
    const auto bf16 = [](std::vector<uint8_t>& to) {
        for (size_t i = 0; i < to.size(); i += 2) {
            const uint16_t x = uint16_t(0x3c00 + (rng() & 0x81ff));
            memcpy(to.data() + i, &x, 2);
        }
    };
    if (eight) {
        for (auto& x : kv) x = uint8_t(rng() % 255 + 1);
        for (size_t block = 0; block < 2; block++)
            for (size_t i = 0; i < 64; i++) {
                const float scale = uniform(0.01f, 0.02f);
                memcpy(kv.data() + block * bytes + size_t(heads.dim) * 64 + 4 * i, &scale, 4);
            }
        for (int h = 0; h < heads.group; h++) {
            std::vector<float> x(size_t(heads.dim));
            for (auto& v : x) v = uniform(-1, 1);
            int8_t* codes = reinterpret_cast<int8_t*>(q.data()) + size_t(h) * width;
            std::vector<int8_t> other(x.size());
            const Scaled row = plain.to_codes(x.data(), heads.dim, codes), same = k.to_codes(x.data(), heads.dim, other.data());
            expect(row.scale == same.scale && row.sum128 == same.sum128 && !memcmp(codes, other.data(), x.size()), k.name, "to_codes", same.scale);
            memcpy(codes + heads.dim, &row, sizeof row);
        }
    } else {
        bf16(kv), bf16(q);
    }
    std::vector<float> outs[2];
    for (const Kernels* which : {&k, &plain}) {
        std::vector<float> state(size_t(state_floats(heads))), out(size_t(heads.group * heads.dim));
        Row row = {q.data(), state.data(), tokens, 0};
        which->start_row(state.data(), heads, nullptr);
        for (int first = 0; first < tokens; first += kSpan)
            which->attend[eight](kv.data(), kv.data() + bytes, nullptr, kv.data(), &row, 1, first, heads);
        which->finish_row(state.data(), heads, out.data());
        outs[which == &plain] = out;
    }
    expect(distance(outs[0], outs[1]) < 2e-3, k.name, eight ? "attention in 8 bits" : "attention", distance(outs[0], outs[1]));
}

static void rows(const Kernels& k, const Kernels& plain) {
    std::vector<float> x(192), w(192), a(192), b(192);
    for (int i = 0; i < 192; i++) x[size_t(i)] = uniform(-9, 9), w[size_t(i)] = uniform(0, 2);
    k.rms_norm(x.data(), w.data(), 192, 1e-5f, a.data()), plain.rms_norm(x.data(), w.data(), 192, 1e-5f, b.data());
    expect(distance(a, b) < 1e-6, k.name, "rms_norm", distance(a, b));
    a = b = x;
    k.activate(Activation::kSilu, a.data(), w.data(), 192, 0, 0), plain.activate(Activation::kSilu, b.data(), w.data(), 192, 0, 0);
    for (int i = 0; i < 192; i++) x[size_t(i)] = x[size_t(i)] / (1 + std::exp(-x[size_t(i)])) * w[size_t(i)];
    expect(distance(a, b) < 1e-6 && distance(a, x) < 1e-6, k.name, "silu", distance(a, x));
    for (int half : {16, 24, 32}) {
        std::vector<float> c(x.begin(), x.begin() + 32), s(x.begin() + 32, x.begin() + 64);
        a = b = w;
        k.rotate(a.data(), c.data(), s.data(), half), plain.rotate(b.data(), c.data(), s.data(), half);
        expect(distance(a, b) < 1e-6 && a[0] == w[0] * c[0] - w[size_t(half)] * s[0], k.name, "rotate", distance(a, b));
    }
    float best = -INFINITY, bad = 0;
    int index = 0;
    x[100] = x[131] = 50;
    k.best_of(x.data(), 190, 1000, best, index, bad);
    expect(index == 1100 && best == 50 && bad == 0, k.name, "best_of", index);
    x[3] = NAN;
    k.best_of(x.data(), 190, 0, best, index, bad);
    expect(bad != 0, k.name, "best_of with NaN", bad);
}

// Two threads beside a busy process become one, try again later and later, and are two again once it has gone.
static void company() {
    Company two(2);
    const auto run = [&](double lost) { two.note(0.01, lost); };
    run(0.005), run(0.001);
    expect(two.threads() == 2, "pool", "one bad run", two.threads());
    run(0.005), run(0.005);
    expect(two.threads() == 1, "pool", "two bad runs", two.threads());
    int tries = 0;
    for (int i = 0; i < 2000; i++) {  // 20 s
        tries += two.threads() == 2;
        run(two.threads() == 2 ? 0.008 : 0.009);
    }
    expect(tries >= 4 && tries <= 8, "pool", "tries beside a busy process", tries);
    int alone = 0;
    for (int i = 0; i < 2000; i++) alone += two.threads() == 1, run(0);
    expect(two.threads() == 2 && alone <= 800, "pool", "runs until it comes back", alone);
    run(0.005), run(0.005);
    alone = 0;
    for (int i = 0; i < 100; i++) alone += two.threads() == 1, run(0);
    expect(two.threads() == 2 && alone <= 26, "pool", "the first rest", alone);
}

// Phases of many and of few units: each unit runs once, and none before the phase before has ended.
struct Counting : Work {
    std::vector<int> sizes;
    std::vector<std::vector<std::atomic<int>>> ran;
    std::atomic<int> running{0};
    int at = -1;
    bool good = true;
    int open() override {
        good &= running.load() == 0;
        for (auto& each : ran[size_t(std::max(at, 0))]) good &= at < 0 || each.load() == 1;
        return ++at < int(sizes.size()) ? sizes[size_t(at)] : 0;
    }
    void unit(int index, int) override {
        running++;
        ran[size_t(at)][size_t(index)]++;
        running--;
    }
};
static void phases() {
    Pool pool(4, false);
    for (int round = 0; round < 300; round++) {
        Counting work;
        for (int i = 0; i < 60; i++) work.sizes.push_back(1 + int(rng() % (i % 3 ? 4 : 40)));
        for (int size : work.sizes) work.ran.emplace_back(size_t(size));
        pool.run(work);
        expect(work.good && work.at == 60, "pool", "phases", work.at);
    }
}

int main() {
    company();
    phases();
    const Kernels& plain = *choose_kernels("plain");
    for (const Kernels* each : supported_kernels()) {
        const Kernels& k = *each;
        using C = Codes;
        using S = Scales;
        for (auto [codes, scales, offset] : std::initializer_list<std::tuple<C, S, int>>{
                 {C::kTwo, S::kNibbles, -1}, {C::kThree, S::kByte16, 2}, {C::kFour, S::kHalf, 3}, {C::kFour, S::kHalfMin, -1}, {C::kFour, S::kSix, -1},
                 {C::kFive, S::kHalf, 4}, {C::kFive, S::kHalfMin, -1}, {C::kFive, S::kSix, -1}, {C::kSix, S::kByte16, 5}, {C::kEight, S::kHalf, 7},
                 {C::kTable, S::kHalf, 7}, {C::kTable, S::kByte, 7}, {C::kTable, S::kByte16, 7}, {C::kTable, S::kPower, 7},
                 {C::kHalf, S::kNone, -1}, {C::kBf16, S::kNone, -1}, {C::kFloat, S::kNone, -1}})
            for (int inputs : {256, 512, 576, 2304})
                if (is_dense(codes) || inputs % (groups_of_block(scales) * kGroup) == 0) products(k, plain, codes, scales, offset, inputs);
        for (int dim : {32, 64, 96, 128})
            for (int group : {1, 2, 3, 4, 7})
                for (int tokens : {1, 2, 31, 33, 64})
                    for (bool eight : {false, true}) attention(k, plain, {group, dim, dim, 0}, tokens, eight);
        rows(k, plain);
        printf("%s: %s\n", k.name, failures ? "FAILED" : "as plain");
    }
    return failures > 0;
}
