// The feed-forwards' phases. Of a mixture of experts:
//
//   phase     unit                              reads                      writes
//   route     32 experts                        normed (float or 8 bits)   scores
//   route     a row                             scores                     its experts and their weights
//   route     (one thread)                      experts of all rows        runs: pairs of row and expert, sorted by expert
//   route     a tile of pairs                   normed                     pairs (8 bits)
//   gate-up   32 inner values of a run          pairs, weights             pair_inner (8 bits)
//   down      32 outputs of a run               pair_inner, weights        pair_out
//
// So each expert's weights are read once a step, whoever needs them. A row's experts are summed by the next norm phase, in the order of
// their choice, which is the row's own. The shared feed-forward goes with gate-up and down.
#include <algorithm>
#include <cstring>

#include "step.h"

namespace shoal {

// Strips unit * most .. of gate and up, of the tiles from .. to - 1.
void Step::gate_up(const FeedForward& f, const Acts& in, const Acts& out, int from, int to, int expert, int unit,
                   int most, Scratch& s) {
    const int all_strips = f.width / kStrip, first = unit * most, strips = std::min(most, all_strips - first),
              width = strips * kStrip;
    for (int t = from; t < to; t++) {
        const Tile& tile = in.tiles[size_t(t)];
        k.product(f.up, expert * all_strips + first, strips, tile, s.two.data(), width, false);
        if (f.gate.data) k.product(f.gate, expert * all_strips + first, strips, tile, s.one.data(), width, false);
        float* inner = f.gate.data ? s.one.data() : s.two.data();
        k.activate(f.activation, inner, f.gate.data ? s.two.data() : nullptr, tile.rows * width, 1.702f, 7.f);
        for (int i = 0; i < tile.rows; i++)
            k.quantise(inner + i * width, width, out.tiles[size_t(t)], i, first * kStrip);
    }
}

void Step::feed_forward(const Layer& l, Batch& b) {
    if (l.feed == Feed::kMixture) return mixture(l, b);
    add(
        kGateUp, b, [this, &l, &b] { return units_of(b.rows, l.ff); },
        [this, &l, &b](int unit, Scratch& s) {
            gate_up(l.dense, b.normed, b.inner, 0, int(b.normed.tiles.size()), 0, unit, strips_of(b.rows, l.ff), s);
        });
    project_to_stream(kDown, b, b.inner, l.dense.down, adds_at_once(l.ff_post_norm, l));
}

// The experts of a row, best first, and their weights. Scores that are not finite choose some expert and weigh it with NaN.
void Step::choose(const Layer& l, int row) {
    float* score = scores.data() + size_t(row) * size_t(score_columns(l));
    const int n = l.experts, per_group = n / l.groups;
    if (l.shared_gate.data) score[l.router.strips * kStrip] = 1.f / (1.f + std::exp(-score[l.router.strips * kStrip]));
    if (l.routing == Routing::kSoftmax) {
        float most = score[0], sum = 0;
        for (int e = 1; e < n; e++) most = std::max(most, score[e]);
        for (int e = 0; e < n; e++) sum += score[e] = std::exp(score[e] - most);
        for (int e = 0; e < n; e++) score[e] /= sum;
    } else if (l.routing == Routing::kSigmoid) {
        for (int e = 0; e < n; e++) score[e] = 1.f / (1.f + std::exp(-score[e]));
    }
    const auto rank = [&](int e) { return score[e] + (l.selection_bias ? l.selection_bias[e] : 0.f); };
    std::vector<char> taken(size_t(n), 0);
    if (l.groups > 1) {
        std::vector<std::pair<float, int>> groups;
        for (int g = 0; g < l.groups; g++) {
            float first = -INFINITY, second = -INFINITY;
            for (int e = g * per_group; e < (g + 1) * per_group; e++) {
                const float x = rank(e);
                if (x > first)
                    second = first, first = x;
                else if (x > second)
                    second = x;
            }
            groups.emplace_back(per_group > 1 ? first + second : first, g);
        }
        std::stable_sort(groups.begin(), groups.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
        for (int g = l.groups_used; g < l.groups; g++)
            std::fill_n(taken.begin() + groups[size_t(g)].second * per_group, per_group, 1);
    }
    int* choice = chosen.data() + size_t(row) * l.used;
    float *weight = weights.data() + size_t(row) * l.used, sum = 0;
    for (int j = 0; j < l.used; j++) {
        int best = -1;
        for (int e = 0; e < n; e++)
            if (!taken[size_t(e)] && (best < 0 || rank(e) > rank(best))) best = e;
        taken[size_t(best)] = 1, choice[j] = best, weight[j] = score[best];
    }
    if (l.routing == Routing::kChosen)
        for (int j = l.used - 1; j >= 0; j--) weight[j] = std::exp(weight[j] - weight[0]);
    for (int j = 0; j < l.used; j++) sum += weight[j];
    for (int j = 0; j < l.used; j++) {
        if (l.normalise || l.routing == Routing::kChosen) weight[j] /= sum;
        weight[j] *= l.route_scale * (l.expert_scales ? l.expert_scales[choice[j]] : 1.f);
    }
}

void Step::group_pairs(const Layer& l, Batch& b, const Acts& in) {
    const int pair_count = b.rows * l.used;
    std::vector<int> counts(size_t(l.experts), 0), at(size_t(l.experts), 0), sizes;
    for (int p = 0; p < pair_count; p++) counts[size_t(chosen[size_t(p)])]++;
    runs.clear();
    for (int e = 0, first = 0, tile = 0; e < l.experts; e++) {
        if (!counts[size_t(e)]) continue;
        const int tiles = Acts::tiles_of(counts[size_t(e)], k.max_rows);
        runs.push_back({e, first, tile, tile + tiles});
        sizes.push_back(counts[size_t(e)]);
        at[size_t(e)] = first, first += counts[size_t(e)], tile += tiles;
    }
    for (int row = 0, p = 0; row < b.rows; row++)
        for (int j = 0; j < l.used; j++, p++) {
            const int to = at[size_t(chosen[size_t(p)])]++;
            place[size_t(p)] = to, pair_row[size_t(to)] = row;
        }
    pairs.shape_runs(sizes, pair_count, c.embd, k, in.tiles[0].x != nullptr);
    pair_inner.shape_runs(sizes, pair_count, l.ff, k, is_dense(l.expert.down));
}

// What a tile of pairs takes of the rows of `in`.
void Step::gather(const Acts& in, int unit) {
    const Tile& to = pairs.tiles[size_t(unit)];
    const int groups = c.embd / kGroup;
    for (int i = 0; i < to.rows; i++) {
        const int row = pair_row[size_t(to.first + i)];
        const Tile& from = in.of(row);
        const int r = row - from.first;
        for (int g = 0; to.pairs && g < groups; g++) memcpy(to.group(g, i), from.group(g, r), kGroup * 2);
        for (int n = 0; to.pairs && n < (c.embd + kChunk - 1) / kChunk; n++)
            memcpy(to.sums_of(n, i), from.sums_of(n, r), 64);
        for (int j = 0; to.a && j < c.embd / 4; j++) memcpy(to.quad(j, i), from.quad(j, r), 4);
        for (int g = 0; to.a && g < groups; g++) {
            to.s[g * to.rows + i] = from.s[g * from.rows + r], to.t[g * to.rows + i] = from.t[g * from.rows + r];
            for (int half = 2 * g; half < 2 * g + 2; half++)
                to.nsum[half * to.rows + i] = from.nsum[half * from.rows + r];
        }
        for (int j = 0; to.x && j < c.embd; j++) to.x[size_t(j) * to.rows + i] = from.x[size_t(j) * from.rows + r];
    }
}

// Units of a mixture's products: those of the shared feed-forward first, then those of each run.
struct Step::Shares {
    int shared_most, shared, most, each;  // strips of a unit; units of the shared feed-forward, of a run
    int count(int runs) const { return shared + runs * each; }
};
Step::Shares Step::shares_of(int strips, int shared_strips, int shared_most) const {
    const int most = std::min(std::max(strips * int(runs.size()) / (m.threads() * 8), 1), kMostStrips);
    return {shared_most, (shared_strips + shared_most - 1) / shared_most, most, (strips + most - 1) / most};
}

void Step::mixture(const Layer& l, Batch& b) {
    const int columns = score_columns(l), strips = l.ff / kStrip, outputs = c.embd / kStrip;
    const Acts &in = norms_inputs(l) ? b.experts_in : b.normed, &shared_in = norms_inputs(l) ? b.shared_in : b.normed;
    add(
        kRoute, b, [columns] { return columns / kStrip; },
        [this, &l, &b, columns](int strip, Scratch&) {
            const bool gate = strip >= l.router.strips;
            for (const Tile& tile : b.normed.tiles)
                k.product(gate ? l.shared_gate : l.router, gate ? 0 : strip, 1, tile,
                          scores.data() + size_t(tile.first) * columns + strip * kStrip, columns, false);
        });
    add(kRoute, b, [&b] { return b.rows; }, [this, &l](int row, Scratch&) { choose(l, row); });
    const auto group = [this, &l, &b, &in] {
        group_pairs(l, b, in);
        return int(pairs.tiles.size());
    };
    add(kRoute, b, group, [this, &in](int unit, Scratch&) { gather(in, unit); });
    const auto inner = [this, &l, &b, strips] {
        return shares_of(strips, l.shared / kStrip, strips_of(b.rows, std::max(l.shared, kStrip)));
    };
    add(
        kGateUp, b, [this, inner] { return inner().count(int(runs.size())); },
        [this, &l, &b, &shared_in, inner](int unit, Scratch& s) {
            const Shares of = inner();
            if (unit < of.shared)
                return gate_up(l.dense, shared_in, b.inner, 0, int(shared_in.tiles.size()), 0, unit, of.shared_most, s);
            const Run& run = runs[size_t((unit - of.shared) / of.each)];
            gate_up(l.expert, pairs, pair_inner, run.from, run.to, run.expert, (unit - of.shared) % of.each, of.most,
                    s);
        });
    const auto outer = [this, &l, outputs] { return shares_of(outputs, l.shared ? outputs : 0, 1); };
    add(
        kDown, b, [this, outer] { return outer().count(int(runs.size())); },
        [this, &l, &b, outer, outputs](int unit, Scratch&) {
            const Shares of = outer();
            const bool shared = unit < of.shared;
            const Run run =
                shared ? Run{0, 0, 0, int(b.inner.tiles.size())} : runs[size_t((unit - of.shared) / of.each)];
            const int first = shared ? unit : (unit - of.shared) % of.each * of.most,
                      count = shared ? 1 : std::min(of.most, outputs - first);
            float* out = shared ? b.delta : reinterpret_cast<float*>(pair_out.data());
            for (int t = run.from; t < run.to; t++) {
                const Tile& tile = (shared ? b.inner : pair_inner).tiles[size_t(t)];
                k.product(shared ? l.dense.down : l.expert.down, run.expert * outputs + first, count, tile,
                          out + size_t(tile.first) * c.embd + first * kStrip, c.embd, false);
            }
        });
}

}  // namespace shoal
