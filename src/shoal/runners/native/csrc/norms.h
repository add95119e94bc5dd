// What happens to a row between products: root-mean-square norm, SiLU, quantisation, the search for the best logit.
// All are one pass over a few kilobytes in L1; the floor is the number of instructions, about one per lane group.
#pragma once
#include "kernels.h"
#include "simd.h"

namespace shoal {
namespace {

void rms_norm(const float* x, const float* weight, int n, float eps, float* out) {
    F sum = set(0.f);
    for (int i = 0; i < n; i += 16) sum = fma(load(x + i), load(x + i), sum);
    const F scale = set(1.f / __builtin_sqrtf(hadd(sum) / float(n) + eps));
    for (int i = 0; i < n; i += 16) store(out + i, mul(mul(load(x + i), scale), load(weight + i)));
}

void silu_mul(float* gate, const float* up, int n) {
    for (int i = 0; i < n; i += 16) {
        // e = exp(-|g|) cannot overflow: silu(g) = g / (1 + e) for g >= 0, g * e / (1 + e) below; each the larger of the two.
        const F g = load(gate + i), minus = sub(set(0.f), g), size = max2(minus, g);
        const F e = exp2_of(mul(size, set(-1.44269504f))), share = div(g, add(set(1.f), e));
        store(gate + i, mul(max2(share, mul(share, e)), load(up + i)));
    }
}

// The mean is taken away first; then as rms_norm, plus the bias.
void layer_norm(const float* x, const float* weight, const float* bias, int n, float eps, float* out) {
    F sum = set(0.f), squares = set(0.f);
    for (int i = 0; i < n; i += 16) sum = add(load(x + i), sum);
    const F mean = set(hadd(sum) / float(n));
    for (int i = 0; i < n; i += 16) {
        const F d = sub(load(x + i), mean);
        squares = fma(d, d, squares);
    }
    const F scale = set(1.f / __builtin_sqrtf(hadd(squares) / float(n) + eps));
    for (int i = 0; i < n; i += 16) {
        const F y = mul(mul(sub(load(x + i), mean), scale), load(weight + i));
        store(out + i, bias ? add(y, load(bias + i)) : y);
    }
}

template <class F1>
inline void each(float* gate, const float* up, int n, F1 f) {
    for (int i = 0; i < n; i += 16) {
        const F y = f(load(gate + i));
        store(gate + i, up ? mul(y, load(up + i)) : y);
    }
}

void activate(Activation kind, float* gate, const float* up, int n, float alpha, float limit) {
    switch (kind) {
        case Activation::kSilu:
            if (up) return silu_mul(gate, up, n);
            return each(gate, up, n, [](F g) { return mul(g, sigmoid(g)); });
        case Activation::kGelu:  // by tanh: 0.5 g (1 + tanh y) = g sigmoid(2 y)
            return each(gate, up, n, [](F g) {
                const F inner = fma(mul(mul(g, g), g), set(0.044715f), g);
                return mul(g, sigmoid(mul(inner, set(2.f * 0.79788456f))));
            });
        case Activation::kRelu2:
            return each(gate, up, n, [](F g) {
                const F positive = max2(set(0.f), g);
                return mul(positive, positive);
            });
        case Activation::kClipped:
            for (int i = 0; i < n; i += 16) {
                const F low = set(-limit), g = sub(set(0.f), max2(low, sub(set(0.f), load(gate + i))));
                const F u = sub(set(0.f), max2(low, sub(set(0.f), max2(low, load(up + i)))));
                store(gate + i, mul(mul(g, sigmoid(mul(g, set(alpha)))), add(u, set(1.f))));
            }
            return;
        case Activation::kGeluExact:  // g (1 + erf(g / sqrt 2)) / 2, erf by Abramowitz and Stegun 7.1.26: to 1.5e-7
            return each(gate, up, n, [](F g) {
                const F size = max2(sub(set(0.f), g), g);
                const F t = div(set(1.f), fma(size, set(0.3275911f * 0.70710678f), set(1.f)));
                F p = fma(set(1.061405429f), t, set(-1.453152027f));
                p = fma(fma(fma(p, t, set(1.421413741f)), t, set(-0.284496736f)), t, set(0.254829592f));
                const F tail = mul(mul(p, t), exp2_of(mul(mul(size, size), set(-0.5f * 1.44269504f))));
                return fma(mul(size, tail), set(-0.5f), max2(set(0.f), g));
            });
        case Activation::kCount:
            return;
    }
}

void gate_by(float* x, const float* gate, int n, bool silu) {
    for (int i = 0; i < n; i += 16) {
        const F g = load(gate + i), s = sigmoid(g);
        store(x + i, mul(load(x + i), silu ? mul(g, s) : s));
    }
}

void add_scaled(float* x, const float* y, float scale, int n) {
    for (int i = 0; i < n; i += 16) store(x + i, fma(load(y + i), set(scale), load(x + i)));
}

void soft_cap(float* x, int n, float scale, float cap) {
    if (cap == 0.f) {
        for (int i = 0; i < n; i += 16) store(x + i, mul(load(x + i), set(scale)));
        return;
    }
    for (int i = 0; i < n; i += 16) store(x + i, mul(tanh_of(mul(load(x + i), set(scale / cap))), set(cap)));
}

// Quantise x[0..k) into inputs first .. first + k - 1 of one row of a tile. A group that is not finite gets a scale that
// is not finite either, so that everything computed from it is NaN.
inline void quantise(const float* x, int k, const Tile& tile, int row, int first) {
    const I magnitude = iset(0x7fffffff);
    for (int i = 0; i < k; i += kGroup) {
        const F lo = load(x + i), hi = load(x + i + 16);
        const float largest = float_of(uint32_t(himax(imax(iand(as_int(lo), magnitude), iand(as_int(hi), magnitude)))));
        const float s = largest / 127.f, inverse = s > 0 ? 127.f / largest : s;
        const I first_half = to_int(mul(lo, set(inverse))), second_half = to_int(mul(hi, set(inverse)));
        int8_t q[kGroup];
        store_bytes(q, first_half);
        store_bytes(q + 16, second_half);
        const int sums[2] = {hisum(first_half), hisum(second_half)};
        const int g = (first + i) / kGroup;
        for (int j = 0; j < 8; j++) memcpy(tile.quad(8 * g + j, row), q + 4 * j, 4);
        tile.s[g * tile.rows + row] = s;
        tile.t[g * tile.rows + row] = s * (float(sums[0]) + float(sums[1]));
        tile.nsum[(2 * g) * tile.rows + row] = int32_t(0u - uint32_t(sums[0]));
        tile.nsum[(2 * g + 1) * tile.rows + row] = int32_t(0u - uint32_t(sums[1]));
        if (tile.x)
            for (int j = 0; j < kGroup; j++) tile.x[size_t(first + i + j) * tile.rows + row] = x[i + j];
    }
}

// Rotate the pairs (x[i], x[half + i]).
void rotate(float* x, const float* cosine, const float* sine, int half) {
    int i = 0;
    for (; i + 16 <= half; i += 16) {
        const F a = load(x + i), b = load(x + half + i), c = load(cosine + i), s = load(sine + i);
        store(x + i, sub(mul(a, c), mul(b, s)));
        store(x + half + i, add(mul(b, c), mul(a, s)));
    }
    for (; i < half; i++) {
        const float a = x[i], b = x[half + i];
        x[i] = a * cosine[i] - b * sine[i];
        x[half + i] = b * cosine[i] + a * sine[i];
    }
}

// One scale for the whole row.
Scaled to_codes(const float* x, int n, int8_t* out) {
    I top = iset(0);
    for (int i = 0; i < n; i += 16) top = imax(top, iand(as_int(load(x + i)), iset(0x7fffffff)));
    const float largest = float_of(uint32_t(himax(top))), inverse = largest > 0 ? 127.f / largest : largest;
    int total = 0;
    for (int i = 0; i < n; i += 16) {
        const I code = to_int(mul(load(x + i), set(inverse)));
        store_bytes(out + i, code);
        total = int(uint32_t(total) + uint32_t(hisum(code)));
    }
    return {largest / 127.f, int(0u - 128u * uint32_t(total))};
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
        if (x[j] == m) {
            best = m, index = first + j;
            return;
        }
}

}
}  // namespace shoal::(anonymous)
