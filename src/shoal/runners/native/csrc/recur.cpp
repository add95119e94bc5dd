// The phases of mixers with a state of their own: gated delta net, Mamba-2, short convolution.
//
//   phase   unit                                   reads                    writes
//   mix     32 columns                             normed, weights          mixed: columns u, z, a, b of each row
//   recur   a sequence x 256 channels of u         mixed, state             u, through the convolution; its last inputs
//   recur   a sequence x one head of values        mixed, state             what the head gives, in place of its values; its matrix
//   recur   the rows of a tile                     mixed                    attended (8 bits): normed and gated
//
// A sequence's tokens go one after the other in one thread, so no chunk, batch or number of threads can show.
#include <algorithm>
#include <cstring>

#include "step.h"

namespace shoal {

namespace {

float softplus(float x) { return x > 20.f ? x : std::log1p(std::exp(x)); }

// Of one token: x / sqrt(sum of squares + eps) * scale.
void unit_length(const float* x, int n, float eps, float scale, float* out) {
    float sum = 0;
    for (int i = 0; i < n; i++) sum += x[i] * x[i];
    const float by = scale / std::sqrt(sum + eps);
    for (int i = 0; i < n; i++) out[i] = x[i] * by;
}

}  // namespace

void Step::recur_head(const Layer& l, const Fed& fed, int head, Scratch& s) {
    const bool delta = l.mixer == Mixer::kDelta;
    const int keys = l.kv_heads * l.dim, key = l.key_of[size_t(head)] * l.dim;
    const int v_at = (delta ? 2 * keys : 0) + head * l.v_dim, q_at = delta ? key : l.inner() + keys + key,
              k_at = delta ? keys + key : l.inner() + key;
    float* state = m.state(plan->sequences[size_t(fed.sequence)].id) + l.state_at +
                   size_t(l.taps - 1) * l.convolution.channels + size_t(head) * l.dim * l.v_dim;
    float *queries = s.keys.data(), *keyed = queries + kTokensAtOnce * l.dim;
    for (int done = 0; done < fed.count; done += kTokensAtOnce) {
        const int n = std::min(kTokensAtOnce, fed.count - done);
        float* row = reinterpret_cast<float*>(mixed.data()) + size_t(fed.first + done) * l.columns;
        float decay[kTokensAtOnce], beta[kTokensAtOnce];
        for (int t = 0; t < n; t++) {
            const float* at = row + size_t(t) * l.columns;
            float step = softplus(at[l.a_at + head] + l.step_bias[head]);
            if (!delta) step = std::min(std::max(step, l.least_step), l.most_step);
            decay[t] = std::exp(step * l.decay[head]);
            beta[t] = delta ? 1.f / (1.f + std::exp(-at[l.b_at + head])) : step;
            if (!delta) continue;
            unit_length(at + q_at, l.dim, l.l2_eps, 1.f / std::sqrt(float(l.dim)), queries + t * l.dim);
            unit_length(at + k_at, l.dim, l.l2_eps, 1.f, keyed + t * l.dim);
        }
        const Recurrence r{delta ? queries : row + q_at,
                           delta ? keyed : row + k_at,
                           decay,
                           beta,
                           row + v_at,
                           n,
                           delta ? l.dim : l.columns,
                           l.columns,
                           l.dim,
                           l.v_dim,
                           delta ? 0.f : l.skip[head],
                           delta};
        k.recur(r, state);
    }
}

// The mixer's output of a row of b to `attended`.
void Step::finish_recurrent(const Layer& l, Batch& b, int row, Scratch& s) {
    const bool delta = l.mixer == Mixer::kDelta;
    const int width = l.inner(), part = delta ? l.v_dim : width / l.norm_groups;
    const float* at = reinterpret_cast<const float*>(mixed.data()) + size_t(b.queries[size_t(row)].source) * l.columns;
    const Tile& tile = b.attended.of(row);
    float* x = s.row.data();
    memcpy(x, at + (delta ? 2 * l.kv_heads * l.dim : 0), size_t(width) * 4);
    if (l.mixer == Mixer::kMamba)
        k.gate_by(x, at + l.z_at, width, true);  // before the norm; the delta net gates after it
    if (l.state_norm.weight)
        for (int i = 0; i < width; i += part) {
            Norm norm = l.state_norm;
            if (!delta) norm.weight += i;
            normalise(norm, x + i, part, x + i);
        }
    if (delta) k.gate_by(x, at + l.z_at, width, true);
    k.quantise(x, width, tile, row - tile.first, 0);
}

// The columns of `mixed` that strips of one input give. A unit takes strips of one input only.
void Step::mix_columns(const Layer& l, int unit) {
    const int most = strips_of(all.rows, input_strips(l) * kStrip);
    for (const Input& input : l.inputs) {
        const int units = (input.w.strips + most - 1) / most, first = unit * most;
        if (unit >= units) {
            unit -= units;
            continue;
        }
        float* out = reinterpret_cast<float*>(mixed.data()) + input.column + first * kStrip;
        for (const Tile& tile : all.normed.tiles)
            k.product(input.w, first, std::min(most, input.w.strips - first), tile,
                      out + size_t(tile.first) * l.columns, l.columns, false);
        return;
    }
}

void Step::convolve_part(const Layer& l, const Fed& f, int from) {
    const Convolution& conv = l.convolution;
    float *x = reinterpret_cast<float*>(mixed.data()) + size_t(f.first) * l.columns,
          *state = m.state(plan->sequences[size_t(f.sequence)].id) + l.state_at;
    const bool gated = l.mixer == Mixer::kConvolution;
    k.convolve(conv, x, gated ? x + l.b_at : nullptr, gated ? x + l.z_at : nullptr, l.columns, f.count, state, from,
               std::min(from + kChannelsAtOnce, conv.channels));
}

void Step::mix_recurrent(const Layer& l, Batch& b) {
    const auto columns = [this, &l] {
        const int most = strips_of(all.rows, input_strips(l) * kStrip);
        int units = 0;
        for (const Input& input : l.inputs) units += (input.w.strips + most - 1) / most;
        return units;
    };
    add(kMix, all, columns, [this, &l](int unit, Scratch&) { mix_columns(l, unit); });
    const int pieces = (l.convolution.channels + kChannelsAtOnce - 1) / kChannelsAtOnce;
    add(
        kRecur, all, [this, pieces] { return int(fed.size()) * pieces; },
        [this, &l, pieces](int unit, Scratch&) {
            convolve_part(l, fed[size_t(unit / pieces)], unit % pieces * kChannelsAtOnce);
        });
    if (l.mixer != Mixer::kConvolution)
        add(
            kRecur, all, [this, &l] { return int(fed.size()) * l.heads; },
            [this, &l](int unit, Scratch& s) { recur_head(l, fed[size_t(unit / l.heads)], unit % l.heads, s); });
    const auto open = [this, &b] {
        if (&b == &last) take_last_rows();
        return int(b.attended.tiles.size());
    };
    add(kRecur, b, open, [this, &l, &b](int unit, Scratch& s) {
        const Tile& tile = b.attended.tiles[size_t(unit)];
        for (int r = 0; r < tile.rows; r++) finish_recurrent(l, b, tile.first + r, s);
    });
}

}  // namespace shoal
