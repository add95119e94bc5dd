// What happens to a row between products: root-mean-square norm, SiLU, quantisation, the search for the best logit.
// All are one pass over a few kilobytes in L1; the floor is the number of instructions, about one per lane group.
#pragma once
#include "kernels.h"
#include "simd.h"

namespace shoal { namespace {

void rms_norm(const float* x, const float* weight, int n, float eps, float* out) {
    F sum = set(0.f);
    for (int i = 0; i < n; i += 16) sum = fma(load(x + i), load(x + i), sum);
    const F scale = set(1.f / __builtin_sqrtf(hadd(sum) / float(n) + eps));
    for (int i = 0; i < n; i += 16) store(out + i, mul(mul(load(x + i), scale), load(weight + i)));
}

void silu_mul(float* gate, const float* up, int n) {
    for (int i = 0; i < n; i += 16) {
        // exp(-|g|) cannot overflow: silu(g) = g / (1 + e) for g >= 0, g * e / (1 + e) below.
        const F g = load(gate + i), minus = sub(set(0.f), g), size = max2(minus, g);
        const F e = exp2_of(mul(size, set(-1.44269504f))), share = div(g, add(set(1.f), e));
        const F low = mul(share, e);
        float s[16], l[16], v[16];
        store(s, share), store(l, low), store(v, g);
        for (int j = 0; j < 16; j++) s[j] = v[j] < 0 ? l[j] : s[j];
        store(gate + i, mul(load(s), load(up + i)));
    }
}

// Quantise x[0..k) into inputs first .. first + k - 1 of one row of a tile. A group that is not finite gets a scale that
// is not finite either, so that everything computed from it is NaN.
void quantise(const float* x, int k, const Tile& tile, int row, int first) {
    const I magnitude = iset(0x7fffffff);
    for (int i = 0; i < k; i += kGroup) {
        const F lo = load(x + i), hi = load(x + i + 16);
        const float largest = float_of(uint32_t(himax(iand(as_int(lo), magnitude), iand(as_int(hi), magnitude))));
        const float s = largest / 127.f, inverse = s > 0 ? 127.f / largest : s;
        int8_t q[kGroup];
        store_bytes(q, to_int(mul(lo, set(inverse))));
        store_bytes(q + 16, to_int(mul(hi, set(inverse))));
        int sums[2] = {0, 0};
        for (int j = 0; j < 16; j++) sums[0] += q[j], sums[1] += q[16 + j];
        const int g = (first + i) / kGroup;
        int8_t* a = tile.a + size_t(g) * kGroup * tile.rows + row * 4;
        for (int j = 0; j < 8; j++) memcpy(a + j * tile.rows * 4, q + 4 * j, 4);
        tile.s[g * tile.rows + row] = s;
        tile.t[g * tile.rows + row] = s * float(sums[0] + sums[1]);
        tile.nsum[(2 * g) * tile.rows + row] = -sums[0];
        tile.nsum[(2 * g + 1) * tile.rows + row] = -sums[1];
        if (tile.x)
            for (int j = 0; j < kGroup; j++) tile.x[size_t(first + i + j) * tile.rows + row] = x[i + j];
    }
}

void to_bf16_row(const float* x, int n, float scale, uint16_t* out) {
    for (int i = 0; i < n; i += 16) store_bf16(out + i, mul(load(x + i), set(scale)));
}

void best_of(const float* x, int n, int first, float& best, int& index, float& bad) {
    F top = set(-3.4e38f), check = set(0.f);
    int i = 0;
    for (; i + 16 <= n; i += 16) {
        top = max2(top, load(x + i));
        check = fma(load(x + i), set(0.f), check);
    }
    float m = hmax(top), c = hadd(check);
    for (int j = i; j < n; j++) m = x[j] > m ? x[j] : m, c += x[j] * 0.f;
    bad += c;
    if (!(m > best)) return;
    for (int j = 0; j < n; j++)
        if (x[j] == m) { best = m, index = first + j; return; }
}

}}  // namespace shoal::(anonymous)
