// One pass: phases, one after the other, each of units that threads claim. A model's phases are laid down once, in order.
//
//   phase        unit                             reads                 writes
//   norm         the rows of a tile               x (and delta)         normed (8 bits), x
//   qkv          one head of q, k or v            normed, weights       q (bf16), KV blocks
//   attention    one KV head x rows that share    q, KV blocks          attended (8 bits)
//   out          32 outputs                       attended, weights     x +=, or delta
//   norm         the rows of a tile               x (and delta)         normed, x
//   gate-up      32 inner values                  normed, weights       inner (8 bits)
//   down         32 outputs                       inner, weights        x +=, or delta
//   head         256 tokens of the vocabulary     normed, weights       logits or the best of them
//
// A recurrent mixer has other phases in the place of qkv and attention (recur.cpp), a mixture of experts in that of gate-up and
// down (feed.cpp). Where a norm or a scale stands between a block and the residual stream, its result goes to `delta` and the next
// norm phase adds it. Units only choose who computes an output, never in which order it is summed. Behind the last
// mixer only the rows whose logits are wanted go on, after their KV or state is written.
#include "step.h"

#include <algorithm>
#include <cstring>

namespace shoal {

namespace {

constexpr int kLeastSettled = 4;  // rows of a tile that one unit adds to and norms

const char* const kPhaseNames[kPhases] = {"embed", "norm",  "qkv",     "attention", "mix", "recur",
                                          "out",   "route", "gate_up", "down",      "head"};

// Which kinds of activations some product of the model takes as floats.
struct DenseInputs {
    bool normed = false, attended = false, inner = false, pair_inner = false;
    explicit DenseInputs(const Model& m) {
        normed = is_dense(m.head()) || is_dense(m.ends().input_project);
        for (const Layer& l : m.layers()) {
            for (const Matrix* w : {&l.q, &l.k, &l.v, &l.gate, &l.dense.gate, &l.dense.up, &l.expert.gate, &l.expert.up,
                                    &l.router, &l.shared_gate, &l.input_gate})
                normed |= is_dense(*w);
            for (const Input& input : l.inputs) normed |= is_dense(input.w);
            attended |= is_dense(l.o), inner |= is_dense(l.dense.down) || is_dense(l.input_project),
                pair_inner |= is_dense(l.expert.down);
        }
    }
};

}  // namespace

void Acts::shape(int rows, int k, const Kernels& kernels, bool dense) { shape_runs({rows}, rows, k, kernels, dense); }

void Acts::shape_runs(const std::vector<int>& runs, int rows, int k, const Kernels& kernels, bool dense) {
    tiles.clear(), tile_of.clear();
    grow(memory_, tile_bytes(kernels.inputs, 1, k, dense) * size_t(rows));  // rounded up for each row, so for each tile
    uint8_t* at = memory_.data();
    for (int run : runs) {
        const int count = tiles_of(run, kernels.max_rows);
        for (int i = 0; i < count; i++) {
            const int n = run / count + (i < run % count);
            tiles.push_back(place_tile(kernels.inputs, n, k, dense, at));
            tiles.back().first = int(tile_of.size());
            at += tile_bytes(kernels.inputs, n, k, dense);
            tile_of.insert(tile_of.end(), size_t(n), int(tiles.size()) - 1);
        }
    }
}

Step::Step(const Model& model) : m(model), c(model.config()), k(model.kernels()) {
    scratch.resize(size_t(m.threads()));
    int most_dim = kMostStrips * kStrip, row = c.embd, state = 0, keys = 0;
    for (const Layer& l : m.layers()) {
        most_dim = std::max({most_dim, l.attends() ? l.dim : 0, l.attends() ? l.v_dim : 0});
        row = std::max({row, l.inner(), l.heads * l.dim});
        if (l.mixer == Mixer::kDelta) keys = std::max(keys, l.dim);
        if (l.attends()) state = std::max(state, state_floats({l.heads / l.kv_heads, l.dim, l.v_dim, 0}));
    }
    for (auto& s : scratch) {
        s.one.resize(size_t(k.max_rows) * size_t(most_dim)), s.two.resize(s.one.size());
        s.state.resize(size_t(kRowsAtOnce) * 2 * size_t(state));
        s.row.resize(size_t(row)), s.other.resize(size_t(c.embd)),
            s.wide.resize(size_t(c.inputs.size) * m.layers().size());
        s.keys.resize(size_t(kTokensAtOnce) * 2 * size_t(keys));
        s.rows.resize(kRowsAtOnce);
    }
    add_layers();
}

// -- before the pass, on the calling thread -----------------------------------------------------------------------

void Step::form(Batch& batch, int rows) {
    const DenseInputs dense(m);
    int attended = 0, inner = c.inputs.size;
    bool delta = c.inputs.size > 0, own = false;
    for (const Layer& l : m.layers()) {
        attended = std::max(attended, l.inner()),
        inner = std::max({inner, l.feed == Feed::kDense ? l.ff : 0, l.shared});
        delta |=
            l.residual_scale != 1.f || l.mixer_post_norm.weight || l.ff_post_norm.weight || l.feed == Feed::kMixture;
        own |= norms_inputs(l);
    }
    batch.rows = rows;
    const size_t bytes = size_t(rows) * size_t(c.embd) * 4;
    grow(batch.memory, bytes);
    batch.x = reinterpret_cast<float*>(batch.memory.data());
    if (delta) grow(batch.delta_memory, bytes), batch.delta = reinterpret_cast<float*>(batch.delta_memory.data());
    batch.normed.shape(rows, c.embd, k, dense.normed);
    batch.attended.shape(rows, attended, k, dense.attended);
    batch.inner.shape(rows, inner, k, dense.inner);
    if (own)
        batch.experts_in.shape(rows, c.embd, k, dense.normed), batch.shared_in.shape(rows, c.embd, k, dense.normed);
    cut_attention(batch);
}

void Step::prepare(const Plan& p, float* logits) {
    plan = &p;
    std::vector<int> order(p.sequences.size());
    for (size_t i = 0; i < order.size(); i++) order[i] = int(i);
    std::stable_sort(order.begin(), order.end(),
                     [&](int a, int b) { return p.sequences[size_t(a)].table < p.sequences[size_t(b)].table; });
    std::vector<float*> rows_out(p.sequences.size(), nullptr);
    for (size_t i = 0, n = 0; i < p.sequences.size(); i++)
        if (p.sequences[i].want == Want::kLogits)
            rows_out[i] = logits + size_t(c.vocab) * n, n += size_t(p.sequences[i].rows);
    all.queries.clear(), last.queries.clear(), tokens.clear(), fed.clear(), logits_of.clear(), top_of.clear();
    for (int s : order) {
        const Sequence& seq = p.sequences[size_t(s)];
        const size_t count = seq.tokens.size(), wanted = seq.want == Want::kNothing ? 0 : size_t(seq.rows);
        fed.push_back({int(all.queries.size()), int(count), s});
        for (size_t i = 0; i < count; i++) {
            all.queries.push_back({s, seq.start + int(i), int(all.queries.size())});
            tokens.push_back(seq.tokens[i]);
            if (i + wanted < count) continue;
            last.queries.push_back(all.queries.back());
            logits_of.push_back(rows_out[size_t(s)] ? rows_out[size_t(s)] + size_t(c.vocab) * (i + wanted - count)
                                                    : nullptr);
            top_of.push_back(seq.want == Want::kTop ? size_t(seq.top) : 0);
        }
    }
    const int rows = int(all.queries.size());
    form(all, rows);
    form(last, int(last.queries.size()));
    size_t heads = 0, gated = 0, columns = 0, experts = 0, used = 0;
    for (const Layer& l : m.layers()) {
        if (l.attends()) heads = std::max(heads, size_t(l.heads * l.dim));
        if (l.gate.data) gated = std::max(gated, size_t(l.inner()));
        columns = std::max(columns, l.recurs()          ? size_t(l.columns)
                                    : l.norm_over_heads ? size_t(l.heads + l.kv_heads) * size_t(l.dim)
                                                        : 0);
        if (l.feed != Feed::kMixture) continue;
        experts = std::max(experts, size_t(score_columns(l))), used = std::max(used, size_t(l.used));
    }
    grow(q, size_t(rows) * heads * 2);
    if (gated) grow(gates, size_t(rows) * gated * 4);
    if (c.inputs.size) grow(inputs, size_t(rows) * m.layers().size() * size_t(c.inputs.size) * 4);
    if (columns) grow(mixed, size_t(rows) * columns * 4);
    if (experts) {
        const size_t pair_count = size_t(rows) * used;
        if (scores.size() < size_t(rows) * experts) scores.resize(size_t(rows) * experts);
        if (weights.size() < pair_count)
            weights.resize(pair_count), chosen.resize(pair_count), place.resize(pair_count),
                pair_row.resize(pair_count);
        grow(pair_out, pair_count * size_t(c.embd) * 4);
    }
    size_t angles = 0;
    angles_at.clear();
    for (const Rotary& rotary : c.rotaries)
        angles_at.push_back(angles), angles += size_t(rows) * rotary.frequencies.size();
    if (cosines.size() < angles) cosines.resize(angles), sines.resize(angles);
    for (auto& s : scratch) s.best.assign(size_t(last.rows), {});
    at = -1;
    steps += 1;
}

// -- the phases -----------------------------------------------------------------------------------------------------

void Step::embed(int row) {
    float* x = all.x + size_t(row) * size_t(c.embd);
    unpack_row(m.embedding(), tokens[size_t(row)], x);
    if (c.embedding_scale != 1.f)
        for (int i = 0; i < c.embd; i++) x[i] *= c.embedding_scale;
    for (size_t r = 0; r < c.rotaries.size(); r++) {
        const Rotary& rotary = c.rotaries[r];
        const size_t pairs = rotary.frequencies.size(), at = angles_at[r] + size_t(row) * pairs;
        for (size_t i = 0; i < pairs; i++) {
            const double angle = double(all.queries[size_t(row)].position) * double(rotary.frequencies[i]);
            cosines[at + i] = float(std::cos(angle)) * rotary.factor;
            sines[at + i] = float(std::sin(angle)) * rotary.factor;
        }
    }
}

void Step::normalise(const Norm& norm, const float* x, int n, float* out) const {
    if (norm.layer)
        k.layer_norm(x, norm.weight, norm.bias, n, norm.eps, out);
    else
        k.rms_norm(x, norm.weight, n, norm.eps, out);
}

// The chosen experts of a row, in the order of their choice, are added to the shared one's part in `delta`.
void Step::add_experts(const Layer& l, Batch& batch, int row, Scratch& s) {
    float* delta = batch.delta + size_t(row) * size_t(c.embd);
    if (!l.shared)
        memset(delta, 0, size_t(c.embd) * 4);
    else if (l.shared_gate.data)
        k.soft_cap(delta, c.embd, scores[size_t(row) * size_t(score_columns(l)) + size_t(l.router.strips * kStrip)],
                   0.f);
    if (l.shared_post_norm.weight) normalise(l.shared_post_norm, delta, c.embd, delta);
    float* sum = delta;
    if (l.experts_post_norm.weight) sum = s.other.data(), memset(sum, 0, size_t(c.embd) * 4);
    for (int j = 0; j < l.used; j++) {
        const size_t pair = size_t(row) * l.used + j;
        k.add_scaled(sum, reinterpret_cast<const float*>(pair_out.data()) + size_t(place[pair]) * c.embd, weights[pair],
                     c.embd);
    }
    if (sum == delta) return;
    normalise(l.experts_post_norm, sum, c.embd, sum);
    k.add_scaled(delta, sum, 1.f, c.embd);
}

void Step::add_pending(Batch& batch, int row, const Pending& pending, Scratch& s) {
    const Layer& l = *pending.layer;
    float *x = batch.x + size_t(row) * size_t(c.embd), *delta = batch.delta + size_t(row) * size_t(c.embd);
    const Norm& post = pending.of == Of::kInput  ? l.input_norm
                       : pending.of == Of::kFeed ? l.ff_post_norm
                                                 : l.mixer_post_norm;
    const bool mixture = pending.of == Of::kFeed && l.feed == Feed::kMixture;
    if (mixture) add_experts(l, batch, row, s);
    if (mixture || pending.of == Of::kInput || !adds_at_once(post, l)) {
        if (post.weight) normalise(post, delta, c.embd, delta);
        k.add_scaled(x, delta, pending.of == Of::kInput ? 1.f : l.residual_scale, c.embd);
    }
    const bool last_part = pending.of == (l.takes_input ? Of::kInput : Of::kFeed);
    if (last_part && l.output_scale != 1.f) k.soft_cap(x, c.embd, l.output_scale, 0.f);
}

// The residual stream of the rows whose logits are wanted.
void Step::take_last_rows() {
    const size_t width = size_t(c.embd);
    for (size_t r = 0; r < last.queries.size(); r++)
        memcpy(last.x + r * width, all.x + size_t(last.queries[r].source) * width, width * 4);
}

// What the router, the experts and the shared expert take of x, each through a norm of its own.
void Step::quantise_own(const Layer& l, Batch& batch, int row, const float* x, Scratch& s) {
    const std::pair<const Norm*, const Acts*> parts[] = {
        {&l.router_norm, &batch.normed}, {&l.experts_norm, &batch.experts_in}, {&l.shared_norm, &batch.shared_in}};
    for (const auto& [norm, acts] : parts) {
        const Tile& tile = acts->of(row);
        if (norm->weight) normalise(*norm, x, c.embd, s.other.data());
        k.quantise(norm->weight ? s.other.data() : x, c.embd, tile, row - tile.first, 0);
    }
}

void Step::settle_rows(Batch& batch, const Tile& tile, int first, int end, const Pending& pending, const Norm& norm,
                       Scratch& s, const Layer* mixture) {
    for (int r = first; r < end; r++) {
        const int row = tile.first + r;
        const float* x = batch.x + size_t(row) * size_t(c.embd);
        if (pending.layer) add_pending(batch, row, pending, s);
        if (norm.weight) normalise(norm, x, c.embd, s.row.data());
        if (mixture && norms_inputs(*mixture))
            quantise_own(*mixture, batch, row, norm.weight ? s.row.data() : x, s);
        else
            k.quantise(norm.weight ? s.row.data() : x, c.embd, tile, r, 0);
    }
}

// A unit is a tile, whose rows share cache lines. Tiles of bf16 are cut where there are fewer of them than threads: there each row has
// lines of its own.
void Step::settle(Phase phase, Batch& batch, Pending pending, Norm norm, const Layer* mixture) {
    const auto cut = [this, &batch](const Tile& tile) {  // rows of a unit
        const int parts = std::max(m.threads() / int(batch.normed.tiles.size()), 1);
        return tile.pairs ? std::max((tile.rows + parts - 1) / parts, kLeastSettled) : tile.rows;
    };
    const auto parts = [cut](const Tile& tile) { return (tile.rows + cut(tile) - 1) / cut(tile); };
    add(
        phase, batch,
        [&batch, parts] {
            int units = 0;
            for (const Tile& tile : batch.normed.tiles) units += parts(tile);
            return units;
        },
        [this, &batch, pending, norm, mixture, cut, parts](int unit, Scratch& s) {
            const Tile* tile = batch.normed.tiles.data();
            for (; unit >= parts(*tile); tile++) unit -= parts(*tile);
            const int first = unit * cut(*tile), end = std::min(first + cut(*tile), tile->rows);
            settle_rows(batch, *tile, first, end, pending, norm, s, mixture);
        });
}

// Per-layer embeddings of all rows: see InputFacts.
void Step::make_inputs() {
    const InputFacts& facts = c.inputs;
    const int parts = int(m.layers().size()), width = parts * facts.size;
    settle(kEmbed, all, {}, {});
    const auto out = [this] { return reinterpret_cast<float*>(inputs.data()); };
    project(kEmbed, all, all.normed, m.ends().input_project, out, width, false);
    add(
        kEmbed, all, [this] { return all.rows; },
        [this, &facts, parts, width, out](int row, Scratch& s) {
            float* x = out() + size_t(row) * width;
            k.soft_cap(x, width, facts.project_scale, 0.f);
            for (int i = 0; i < parts; i++)
                normalise(m.ends().input_norm, x + i * facts.size, facts.size, x + i * facts.size);
            unpack_row(m.ends().input_embedding, tokens[size_t(row)], s.wide.data());
            k.add_scaled(x, s.wide.data(), facts.embedding_scale, width);
            k.soft_cap(x, width, facts.scale, 0.f);
        });
}

// A layer's use of them, to `delta`.
void Step::take_input(const Layer& l, size_t layer, Batch& b) {
    const int size = c.inputs.size, width = size * int(m.layers().size());
    add(
        kGateUp, b, [size] { return size / kStrip; },
        [this, &l, layer, &b, size, width](int strip, Scratch& s) {
            for (size_t t = 0; t < b.normed.tiles.size(); t++) {
                const Tile& tile = b.normed.tiles[t];
                k.product(l.input_gate, strip, 1, tile, s.one.data(), kStrip, false);
                for (int i = 0; i < tile.rows; i++) {
                    const size_t source = size_t(b.queries[size_t(tile.first + i)].source);
                    const float* input = reinterpret_cast<const float*>(inputs.data()) + source * size_t(width) +
                                         layer * size_t(size) + size_t(strip * kStrip);
                    k.activate(Activation::kGelu, s.one.data() + i * kStrip, input, kStrip, 0.f, 0.f);
                    k.quantise(s.one.data() + i * kStrip, kStrip, b.inner.tiles[t], i, strip * kStrip);
                }
            }
        });
    project_to_stream(kDown, b, b.inner, l.input_project, false);
}

void Step::project(Phase phase, Batch& batch, const Acts& acts, const Matrix& w, std::function<float*()> out, int ld,
                   bool accumulate) {
    const int width = w.strips * kStrip;
    add(
        phase, batch, [this, &batch, width] { return units_of(batch.rows, width); },
        [this, &batch, &acts, &w, out, ld, accumulate, width](int unit, Scratch&) {
            const int most = strips_of(batch.rows, width), count = std::min(most, w.strips - unit * most);
            float* to = out() + unit * most * kStrip;
            for (const Tile& tile : acts.tiles)
                k.product(w, unit * most, count, tile, to + size_t(tile.first) * size_t(ld), ld, accumulate);
        });
}

void Step::take_best(const float* x, int n, int first, size_t count, Best& best) const {
    float largest = -INFINITY;
    int token = 0;
    k.best_of(x, n, first, largest, token, best.bad);
    if (largest > best.value) best.value = largest, best.token = token;
    Top& top = best.top;
    if (count == 0 || (top.size() == count && !(largest > top.back().first))) return;
    for (int i = 0; i < n; i++) {
        if (top.size() == count && !(x[i] > top.back().first)) continue;
        if (top.size() == count) top.pop_back();
        top.insert(std::upper_bound(top.begin(), top.end(), x[i], [](float a, const auto& b) { return a > b.first; }),
                   {x[i], first + i});
    }
}

void Step::vocabulary(int unit, Scratch& s) {
    const int first = unit * kHeadWidth, width = std::min(kHeadWidth, c.vocab - first);
    int row = 0;
    for (const Tile& tile : last.normed.tiles) {
        k.product(m.head(), unit * (kHeadWidth / kStrip), (width + kStrip - 1) / kStrip, tile, s.one.data(), kHeadWidth,
                  false);
        for (int i = 0; i < tile.rows; i++, row++) {
            float* x = s.one.data() + i * kHeadWidth;
            if (c.logit_scale != 1.f || c.cap != 0.f) k.soft_cap(x, kHeadWidth, c.logit_scale, c.cap);
            if (logits_of[size_t(row)])
                memcpy(logits_of[size_t(row)] + first, x, size_t(width) * 4);
            else
                take_best(x, width, first, top_of[size_t(row)], s.best[size_t(row)]);
        }
    }
}

// Lays down the phases of a pass. Behind the last mixer only the rows whose logits are wanted go on.
void Step::add_layers() {
    const std::vector<Layer>& layers = m.layers();
    size_t last_mixer = 0;
    for (size_t i = 0; i < layers.size(); i++)
        if (layers[i].mixer != Mixer::kNone) last_mixer = i;
    add(kEmbed, all, [this] { return all.rows; }, [this](int row, Scratch&) { embed(row); });
    if (c.inputs.size) make_inputs();
    Pending pending;
    for (size_t i = 0; i < layers.size(); i++) {
        const Layer& l = layers[i];
        Batch& b = i < last_mixer ? all : last;
        if (l.mixer != Mixer::kNone) {
            settle(kNorm, all, pending, l.mixer_norm);
            if (l.attends())
                mix_attention(l, b);
            else
                mix_recurrent(l, b);
            const bool at_once = adds_at_once(l.mixer_post_norm, l);
            project_to_stream(kOut, b, b.attended, l.o, at_once);
            pending = {at_once ? nullptr : &l, Of::kMixer};
        }
        if (l.feed != Feed::kNone) {
            settle(kNorm, b, pending, l.ff_norm, l.feed == Feed::kMixture ? &l : nullptr);
            feed_forward(l, b);
            const bool nothing = l.feed == Feed::kDense && adds_at_once(l.ff_post_norm, l) && l.output_scale == 1.f;
            pending = {nothing ? nullptr : &l, Of::kFeed};
        }
        if (!l.takes_input) continue;
        settle(kNorm, b, pending, {});
        take_input(l, i, b);
        pending = {&l, Of::kInput};
    }
    settle(kNorm, last, pending, m.norm());
    add(
        kHead, last, [this] { return (c.vocab + kHeadWidth - 1) / kHeadWidth; },
        [this](int unit, Scratch& s) { vocabulary(unit, s); });
}

int Step::open() {
    const auto now = std::chrono::steady_clock::now();
    if (at >= 0) seconds[program[size_t(at)].phase] += std::chrono::duration<double>(now - since).count();
    since = now;
    while (++at < int(program.size())) {
        const Part& part = program[size_t(at)];
        if (!part.batch->rows) continue;
        if (const int units = part.open(); units > 0) return units;
    }
    return 0;
}

// The most likely tokens of each row of `last`, of equals the lowest; -1 and none where a logit was not finite.
std::vector<Best> Step::best() const {
    std::vector<Best> out(size_t(last.rows));
    for (size_t r = 0; r < out.size(); r++) {
        Best& best = out[r];
        for (const auto& s : scratch) {
            const Best& b = s.best[r];
            best.bad += b.bad;
            if (b.value > best.value || (b.value == best.value && b.token < best.token))
                best.value = b.value, best.token = b.token;
            best.top.insert(best.top.end(), b.top.begin(), b.top.end());
        }
        if (best.bad != 0.f) best.token = -1, best.top.clear();
        std::sort(best.top.begin(), best.top.end(), [](const auto& a, const auto& b) {
            return a.first != b.first ? a.first > b.first : a.second < b.second;
        });
        best.top.resize(std::min(best.top.size(), top_of[r]));
    }
    return out;
}

// -- the model's face -----------------------------------------------------------------------------------------------

Answer Model::run(const Plan& plan, float* logits) {
    check(plan);
    for (auto [from, to] : plan.copies) {
        if (from != to)
            memcpy(kv_pages_.data() + size_t(to) * sizes_.block, kv_pages_.data() + size_t(from) * sizes_.block,
                   sizes_.block);
        written_[size_t(to)] = written_[size_t(from)];
    }
    for (auto [from, to] : plan.window_copies) {
        if (from != to)
            memcpy(window_pages_.data() + size_t(to) * sizes_.window_block,
                   window_pages_.data() + size_t(from) * sizes_.window_block, sizes_.window_block);
        window_written_[size_t(to)] = window_written_[size_t(from)];
    }
    Answer answer;
    auto& tokens = answer.tokens;
    for (const auto& seq : plan.sequences)
        if (seq.want == Want::kArgmax) tokens.emplace_back();
    if (plan.sequences.empty()) return answer;
    if (!step_) step_ = std::make_shared<Step>(*this);
    if (sizes_.state_floats) take_states(plan);
    Plan now = plan;
    for (int link = 0; link < plan.chain; link++) {
        step_->prepare(now, logits);
        pool_->run(*step_);
        auto best = step_->best();
        std::vector<std::vector<Best*>> of(plan.sequences.size());
        for (size_t r = 0; r < best.size(); r++) of[size_t(step_->last.queries[r].sequence)].push_back(&best[r]);
        size_t out = 0;
        for (size_t s = 0; s < now.sequences.size(); s++) {
            Sequence& seq = now.sequences[s];
            if (seq.want == Want::kTop) answer.tops.push_back(std::move(of[s].back()->top));
            if (seq.want != Want::kArgmax) continue;
            auto& row = tokens[out++];
            const bool ended = link > 0 && row.back() < 0;  // not finite: nothing that follows is
            for (const Best* b : of[s]) row.push_back(ended ? -1 : b->token);
            seq.start += int(seq.tokens.size());
            seq.tokens.assign(1, std::max(of[s].back()->token, 0));
        }
    }
    if (sizes_.state_floats) keep_states(plan);
    for (const auto& seq : plan.sequences)
        for (int i = 0; i < int(seq.tokens.size()) + plan.chain - 1; i++) {
            const int block = (seq.start + i) / kBlock;
            const uint32_t slot = 1u << ((seq.start + i) % kBlock);
            written_[size_t(seq.table[size_t(block)])] |= slot;
            if (config_.windows) window_written_[size_t(seq.windows[size_t(block - first_seen(seq.start))])] |= slot;
        }
    return answer;
}

std::vector<std::pair<std::string, double>> Model::profile() const {
    std::vector<std::pair<std::string, double>> out;
    if (!step_) return out;
    for (int i = 0; i < kPhases; i++) out.emplace_back(kPhaseNames[i], step_->seconds[i]);
    out.emplace_back("steps", step_->steps);
    return out;
}

}  // namespace shoal
