// Mixers with a state instead of KV: causal convolutions of few taps, and linear recurrences (gated delta net, Mamba-2).
//
// Tokens go one after the other and lanes are channels, so the order of every sum is that of the tokens: no cut of them into
// chunks shows. The cost of a token and head is two reads and a write of its state, from L1 where a call brings several tokens: 32
// columns of a state of 128 rows are 16 KB.
#pragma once
#include "kernels.h"
#include "simd.h"

namespace shoal {
namespace {

// Channels from .. to - 1 (multiples of 16) of `tokens` rows x, `step` floats apart, in place. `before` multiplies what goes in and
// `after` what comes out, where given, rows `step` apart too. `state` [taps - 1][channels] is what came in before, oldest first.
void convolve(const Convolution& c, float* x, const float* before, const float* after, int step, int tokens,
              float* state, int from, int to) {
    const int old = c.taps - 1;
    for (int i = from; i < to; i += 16) {
        F seen[kMostTaps], weight[kMostTaps];
        for (int j = 0; j < old; j++) seen[j] = load(state + j * c.channels + i);
        for (int j = 0; j < c.taps; j++) weight[j] = load(c.weight + j * c.channels + i);
        const F start = c.bias ? load(c.bias + i) : set(0.f);
        for (int t = 0; t < tokens; t++) {
            const size_t at = size_t(t) * size_t(step) + size_t(i);
            seen[old] = before ? mul(load(x + at), load(before + at)) : load(x + at);
            F sum = start;
            for (int j = 0; j < c.taps; j++) sum = fma(seen[j], weight[j], sum);
            if (c.silu) sum = mul(sum, sigmoid(sum));
            store(x + at, after ? mul(sum, load(after + at)) : sum);
            for (int j = 0; j < old; j++) seen[j] = seen[j + 1];
        }
        for (int j = 0; j < old; j++) store(state + j * c.channels + i, seen[j]);
    }
}

template <bool kDelta>
inline void recur_columns(const Recurrence& r, float* s, int column) {
    for (int t = 0; t < r.tokens; t++) {
        const float *q = r.q + size_t(t) * size_t(r.qk_step), *k = r.k + size_t(t) * size_t(r.qk_step);
        float* v = r.v + size_t(t) * size_t(r.v_step) + column;
        const F decay = set(r.decay[t]), beta = set(r.beta[t]), v0 = load(v), v1 = load(v + 16);
        F u0 = v0, u1 = v1;
        if (kDelta) {  // what the state says of k: even rows and odd ones apart
            F a0 = set(0.f), a1 = a0, b0 = a0, b1 = a0;
            for (int i = 0; i < r.dim; i += 2) {
                const F even = set(k[i]), odd = set(k[i + 1]);
                a0 = fma(load(s + i * 32), even, a0), a1 = fma(load(s + i * 32 + 16), even, a1);
                b0 = fma(load(s + i * 32 + 32), odd, b0), b1 = fma(load(s + i * 32 + 48), odd, b1);
            }
            u0 = sub(v0, mul(decay, add(a0, b0))), u1 = sub(v1, mul(decay, add(a1, b1)));
        }
        u0 = mul(u0, beta), u1 = mul(u1, beta);
        F a0 = set(0.f), a1 = a0, b0 = a0, b1 = a0;
        for (int i = 0; i < r.dim; i += 2) {
            const F even = set(k[i]), odd = set(k[i + 1]), q0 = set(q[i]), q1 = set(q[i + 1]);
            const F n0 = fma(u0, even, mul(load(s + i * 32), decay)),
                    n1 = fma(u1, even, mul(load(s + i * 32 + 16), decay));
            const F n2 = fma(u0, odd, mul(load(s + i * 32 + 32), decay)),
                    n3 = fma(u1, odd, mul(load(s + i * 32 + 48), decay));
            store(s + i * 32, n0), store(s + i * 32 + 16, n1), store(s + i * 32 + 32, n2), store(s + i * 32 + 48, n3);
            a0 = fma(n0, q0, a0), a1 = fma(n1, q0, a1), b0 = fma(n2, q1, b0), b1 = fma(n3, q1, b1);
        }
        store(v, fma(v0, set(r.skip), add(a0, b0)));
        store(v + 16, fma(v1, set(r.skip), add(a1, b1)));
    }
}

void recur(const Recurrence& r, float* state) {
    for (int column = 0; column < r.v_dim; column += 32) {
        if (r.delta)
            recur_columns<true>(r, state + size_t(column) * size_t(r.dim), column);
        else
            recur_columns<false>(r, state + size_t(column) * size_t(r.dim), column);
    }
}

}
}  // namespace shoal::(anonymous)
