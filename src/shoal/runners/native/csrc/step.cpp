// One pass: every thread runs the same phases, claims units of work in each, and meets the others at its end.
//
//   phase        unit                             reads                 writes
//   norm         the rows of a tile               x                     normed (8 bits)
//   qkv          one head of q, k or v            normed, weights       q (bf16), KV blocks
//   attention    one KV head x rows that share    q, KV blocks          attended (8 bits)
//   out          32 outputs                       attended, weights     x +=
//   norm         the rows of a tile               x                     normed
//   gate-up      32 inner values                  normed, weights       inner (8 bits)
//   down         32 outputs                       inner, weights        x +=
//   head         64 tokens of the vocabulary      normed, weights       logits or the best of them
//
// Units only choose who computes an output, never in which order it is summed. In the last layer only the rows whose
// logits are wanted go on after their K and V are written.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>

#include "model.h"

namespace shoal {

namespace {

enum Phase { kEmbed, kNorm, kQkv, kAttention, kOut, kGateUp, kDown, kHead, kPhases };
const char* const kPhaseNames[kPhases] = {"embed", "norm", "qkv", "attention", "out", "gate_up", "down", "head"};
constexpr int kRowsAtOnce = 8;    // of attention: their state (3 heads x 64 floats each) and a span of KV fit L1
constexpr int kHeadWidth = 64;
constexpr int kMostStrips = 8;    // of one unit: see strips_of

// Quantised rows of one width, cut into tiles of at most max_rows, as even as can be.
class Acts {
  public:
    void shape(int rows, int k, int max_rows, bool dense) {
        tiles.clear(), tile_of.clear();
        const int count = (rows + max_rows - 1) / max_rows;
        const size_t row = size_t(k) + size_t(k / kGroup) * 16 + (dense ? size_t(k) * 4 : 0);
        if (memory_.size() < row * size_t(rows) + size_t(count) * 64) memory_ = Pages(row * size_t(rows) + size_t(count) * 64);
        uint8_t* at = memory_.data();
        for (int i = 0; i < count; i++) {
            const int n = rows / count + (i < rows % count);
            Tile t;
            t.rows = n, t.first = int(tile_of.size());
            t.a = reinterpret_cast<int8_t*>(at), at += size_t(n) * size_t(k);
            t.s = reinterpret_cast<float*>(at), at += size_t(n) * size_t(k / kGroup) * 4;
            t.t = reinterpret_cast<float*>(at), at += size_t(n) * size_t(k / kGroup) * 4;
            t.nsum = reinterpret_cast<int32_t*>(at), at += size_t(n) * size_t(k / kGroup) * 8;
            if (dense) t.x = reinterpret_cast<float*>(at), at += size_t(n) * size_t(k) * 4;
            at = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(at) + 63) & ~uintptr_t(63));
            tile_of.insert(tile_of.end(), size_t(n), i);
            tiles.push_back(t);
        }
    }
    const Tile& of(int row) const { return tiles[size_t(tile_of[size_t(row)])]; }
    std::vector<Tile> tiles;
    std::vector<int> tile_of;

  private:
    Pages memory_;
};

struct QueryRow { int sequence, position, source; };  // source: its row in the q buffer
struct Span { int from, to; };                        // query rows that one attention unit takes

// Rows that go through a layer together.
struct Batch {
    int rows = 0;
    Pages memory;
    float* x = nullptr;  // [rows][embd]
    Acts normed, attended, inner;
    std::vector<QueryRow> queries;  // sorted so that shared blocks are neighbours; row i of x is queries[i]
    std::vector<Span> spans;
};

struct Best {
    float value = -INFINITY;
    int token = -1;
    float bad = 0;
    Top top;  // largest first, of equals the lowest token
};

// Memory of one thread.
struct Scratch {
    std::vector<float> one, two, state, row;
    std::vector<Row> rows;
    std::vector<Best> best;
};

}  // namespace

struct Step {
    struct alignas(64) Counter { std::atomic<int> next{0}; };
    Step(const Model& model) : m(model), c(model.config()), k(model.kernels()), counters(size_t(c.layers) * 7 + 3) {
        scratch.resize(size_t(m.threads()));
        heads = {c.heads / c.kv_heads, c.dim};
        const size_t wide = size_t(k.max_rows) * std::max({c.dim, kHeadWidth, kMostStrips * kStrip});
        for (auto& s : scratch) {
            s.one.resize(wide), s.two.resize(wide);
            s.state.resize(size_t(kRowsAtOnce) * state_floats(heads));
            s.row.resize(size_t(std::max(c.heads * c.dim, c.embd)));
            s.rows.resize(kRowsAtOnce);
        }
    }

    void prepare(const Plan& plan, float* logits);
    void pass(int thread);
    std::vector<Best> best() const;

    const Model& m;
    const Config& c;
    const Kernels& k;
    Heads heads;
    const Plan* plan = nullptr;
    Batch all, last;              // every fed row; those whose logits are wanted
    std::vector<int> tokens;      // of all.queries
    Pages q;                      // [rows][heads][dim * 2]: see Row
    std::vector<float> cosines, sines;  // [rows][rope_dim / 2]
    std::vector<float*> logits_of;      // per row of `last`, null where only the best are wanted
    std::vector<size_t> top_of;         // per row of `last`, how many of them
    std::vector<Counter> counters;
    std::vector<Scratch> scratch;
    double seconds[kPhases] = {}, steps = 0;
    std::chrono::steady_clock::time_point since;

  private:
    template <class F> void share(size_t counter, int units, F f) {
        for (int u; (u = counters[counter].next.fetch_add(1, std::memory_order_relaxed)) < units;) f(u);
    }
    void meet(int thread, Phase phase) {
        m.pool().barrier();
        if (thread) return;
        const auto now = std::chrono::steady_clock::now();
        seconds[phase] += std::chrono::duration<double>(now - since).count();
        since = now;
    }
    // Strips of one unit: a few rows wait for memory, which wants long reads; many want all threads busy to the end.
    int strips_of(const Batch& batch, int width) const {
        const int strips = width / kStrip;
        return batch.rows > 8 ? 1 : std::clamp(strips / (m.threads() * 4), 1, kMostStrips);
    }
    int units_of(const Batch& batch, int width) const {
        const int most = strips_of(batch, width);
        return (width / kStrip + most - 1) / most;
    }
    void form(Batch& batch, int rows);
    void embed(int row);
    void normalise(Batch& batch, size_t counter, const float* weight, Scratch& s);
    void project_head(int layer, int unit, int part, int parts, Scratch& s);
    void write_q(const float* x, float scale, uint8_t* out) const;
    void write_kv(int layer, int head, int row, const float* x, bool value);
    void attend(Batch& batch, int layer, int unit, Scratch& s);
    void walk(const Batch& batch, int layer, int head, int from, int to, int span, int base, Scratch& s);
    void gate_up(Batch& batch, const Layer& layer, int unit, Scratch& s);
    void project(Batch& batch, const Acts& acts, const Matrix& w, size_t counter);
    void take_best(const float* x, int n, int first, size_t count, Best& best) const;
    void vocabulary(int unit, Scratch& s);
};

// -- before the pass, on the calling thread -----------------------------------------------------------------------

void Step::form(Batch& batch, int rows) {
    batch.rows = rows;
    const size_t bytes = size_t(rows) * size_t(c.embd) * 4;
    if (batch.memory.size() < bytes) batch.memory = Pages(bytes);
    batch.x = reinterpret_cast<float*>(batch.memory.data());
    batch.normed.shape(rows, c.embd, k.max_rows, m.dense());
    batch.attended.shape(rows, c.heads * c.dim, k.max_rows, m.dense());
    batch.inner.shape(rows, c.ff, k.max_rows, m.dense());
    // Attention units: runs of rows that start with the same block, in pieces small enough to keep all threads busy.
    batch.spans.clear();
    const int piece = std::clamp(rows * c.kv_heads / (m.threads() * 3), 1, kRowsAtOnce);
    for (int i = 0; i < rows;) {
        int j = i + 1;
        const int block = plan->sequences[size_t(batch.queries[size_t(i)].sequence)].table[0];
        while (j < rows && j - i < piece && plan->sequences[size_t(batch.queries[size_t(j)].sequence)].table[0] == block) j++;
        batch.spans.push_back({i, j});
        i = j;
    }
    auto cost = [&](const Span& s) {
        int64_t sum = 0;
        for (int i = s.from; i < s.to; i++) sum += batch.queries[size_t(i)].position;
        return sum;
    };
    std::stable_sort(batch.spans.begin(), batch.spans.end(), [&](const Span& a, const Span& b) { return cost(a) > cost(b); });
}

void Step::prepare(const Plan& p, float* logits) {
    plan = &p;
    std::vector<int> order(p.sequences.size());
    for (size_t i = 0; i < order.size(); i++) order[i] = int(i);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return p.sequences[size_t(a)].table < p.sequences[size_t(b)].table; });
    std::vector<float*> rows_out(p.sequences.size(), nullptr);
    for (size_t i = 0, n = 0; i < p.sequences.size(); i++)
        if (p.sequences[i].want == Want::kLogits) rows_out[i] = logits + c.vocab * n++;
    all.queries.clear(), last.queries.clear(), tokens.clear(), logits_of.clear(), top_of.clear();
    for (int s : order) {
        const Sequence& seq = p.sequences[size_t(s)];
        for (size_t i = 0; i < seq.tokens.size(); i++) {
            const int row = int(all.queries.size());
            all.queries.push_back({s, seq.start + int(i), row});
            tokens.push_back(seq.tokens[i]);
        }
        if (seq.want == Want::kNothing) continue;
        last.queries.push_back(all.queries.back());
        logits_of.push_back(rows_out[size_t(s)]);
        top_of.push_back(seq.want == Want::kTop ? size_t(seq.top) : 0);
    }
    const int rows = int(all.queries.size());
    form(all, rows);
    form(last, int(last.queries.size()));
    const size_t half = size_t(c.rope_dim / 2);
    const size_t wide = size_t(rows) * size_t(c.heads * c.dim) * 2;
    if (q.size() < wide) q = Pages(wide);
    if (cosines.size() < size_t(rows) * half) cosines.resize(size_t(rows) * half), sines.resize(size_t(rows) * half);
    for (auto& counter : counters) counter.next.store(0, std::memory_order_relaxed);
    for (auto& s : scratch) s.best.assign(size_t(last.rows), {});
    since = std::chrono::steady_clock::now();
    steps += 1;
}

// -- the phases -----------------------------------------------------------------------------------------------------

void Step::embed(int row) {
    unpack_row(m.embedding(), tokens[size_t(row)], all.x + size_t(row) * size_t(c.embd));
    const size_t half = size_t(c.rope_dim / 2);
    for (size_t i = 0; i < half; i++) {
        const double angle = double(all.queries[size_t(row)].position) * double(c.frequencies[i]);
        cosines[size_t(row) * half + i] = float(std::cos(angle));
        sines[size_t(row) * half + i] = float(std::sin(angle));
    }
}

void Step::normalise(Batch& batch, size_t counter, const float* weight, Scratch& s) {
    share(counter, int(batch.normed.tiles.size()), [&](int unit) {  // rows of a tile share cache lines: one thread's
        const Tile& tile = batch.normed.tiles[size_t(unit)];
        for (int r = 0; r < tile.rows; r++) {
            k.rms_norm(batch.x + size_t(tile.first + r) * size_t(c.embd), weight, c.embd, c.eps, s.row.data());
            k.quantise(s.row.data(), c.embd, tile, r, 0);
        }
    });
}

void Step::write_kv(int layer, int head, int row, const float* x, bool value) {
    const QueryRow& at = all.queries[size_t(row)];
    const int slot = at.position % kBlock, dim = c.dim;
    uint8_t* bytes = m.kv(plan->sequences[size_t(at.sequence)].table[size_t(at.position / kBlock)], layer, head);
    if (c.kv_bits == 8) {
        int8_t codes[256];
        float* scale = reinterpret_cast<float*>(bytes + dim * kBlock * 2) + (value ? kBlock : 0) + slot;
        *scale = k.to_codes(x, dim, codes).scale;
        for (int d = 0; d < dim; d++)
            if (value) bytes[(kBlock + slot / 4 * 4) * dim + d * 4 + slot % 4] = uint8_t(codes[d]);
            else bytes[d / 4 * kBlock * 4 + slot * 4 + d % 4] = uint8_t(codes[d] + 128);
        return;
    }
    uint16_t *kv = reinterpret_cast<uint16_t*>(bytes), rounded[256];
    k.to_bf16_row(x, dim, 1.f, rounded);
    if (value) {
        uint16_t* v = kv + dim * kBlock + slot / 2 * dim * 2 + slot % 2;
        for (int d = 0; d < dim; d++) v[2 * d] = rounded[d];
    } else {
        for (int d = 0; d < dim; d += 2) memcpy(kv + d * kBlock + slot * 2, rounded + d, 4);
    }
}

void Step::write_q(const float* x, float scale, uint8_t* out) const {
    if (c.kv_bits == 16) return k.to_bf16_row(x, c.dim, scale, reinterpret_cast<uint16_t*>(out));
    Scaled codes = k.to_codes(x, c.dim, reinterpret_cast<int8_t*>(out));
    codes.scale *= scale;
    memcpy(out + c.dim, &codes, sizeof codes);
}

void Step::project_head(int layer, int unit, int part, int parts, Scratch& s) {
    const Layer& l = m.layer(layer);
    const bool is_q = unit < c.heads, is_v = unit >= c.heads + c.kv_heads;
    const int head = is_q ? unit : (unit - c.heads) % c.kv_heads, strips = c.dim / kStrip;
    const Matrix& w = is_q ? l.q : is_v ? l.v : l.k;
    const float* norm = is_q ? l.q_norm : is_v ? nullptr : l.k_norm;
    const float scale = float(1.4426950408889634 / std::sqrt(double(c.dim)));
    const size_t half = size_t(c.rope_dim / 2);
    const size_t tiles = all.normed.tiles.size();
    for (size_t t = tiles * size_t(part) / size_t(parts); t < tiles * size_t(part + 1) / size_t(parts); t++) {
        const Tile& tile = all.normed.tiles[t];
        k.product(w, head * strips, strips, tile, s.one.data(), c.dim, false);
        for (int i = 0; i < tile.rows; i++) {
            const int row = tile.first + i;
            float* x = s.one.data() + i * c.dim;
            if (norm) k.rms_norm(x, norm, c.dim, c.eps, x);
            if (!is_v) k.rotate(x, cosines.data() + size_t(row) * half, sines.data() + size_t(row) * half, int(half));
            if (is_q) write_q(x, scale, q.data() + (size_t(row) * c.heads + head) * c.dim * 2);
            else write_kv(layer, head, row, x, is_v);
        }
    }
}

// Rows from .. to - 1 have the same blocks up to `span`; go on together as long as they do, then part.
void Step::walk(const Batch& batch, int layer, int head, int from, int to, int span, int base, Scratch& s) {
    for (;; span++) {
        while (from < to && batch.queries[size_t(from)].position < span * kSpan) from++;
        if (from == to) return;
        const auto table = [&](int row) -> const std::vector<int>& { return plan->sequences[size_t(batch.queries[size_t(row)].sequence)].table; };
        const auto pair = [&](int row) {  // the two blocks of this span; the second may not be there
            const auto& t = table(row);
            const size_t at = size_t(span) * 2;
            const bool second = batch.queries[size_t(row)].position >= span * kSpan + kBlock;
            return std::pair<int, int>(t[at], second ? t[at + 1] : -1);
        };
        auto blocks = pair(from);
        for (int i = from + 1; i < to; i++) {
            if (batch.queries[size_t(i)].position < span * kSpan) continue;
            const auto other = pair(i);
            const bool same = other.first == blocks.first && (other.second == blocks.second || other.second < 0 || blocks.second < 0);
            if (!same) {
                walk(batch, layer, head, from, i, span, base, s);
                from = i;
                blocks = other;
            } else if (blocks.second < 0) {
                blocks.second = other.second;
            }
        }
        const uint8_t* kv0 = m.kv(blocks.first, layer, head);
        const uint8_t* kv1 = blocks.second < 0 ? kv0 : m.kv(blocks.second, layer, head);
        const uint8_t *next0 = nullptr, *next1 = nullptr;
        const int ahead = batch.queries[size_t(to - 1)].position - (span + 1) * kSpan;
        if (ahead >= 0) next0 = m.kv(table(to - 1)[size_t(span) * 2 + 2], layer, head);
        if (ahead >= kBlock) next1 = m.kv(table(to - 1)[size_t(span) * 2 + 3], layer, head);
        // Rows whose last position lies before this span have dropped out; they may lie between the others.
        for (int i = from; i < to;) {
            int j = i;
            while (j < to && batch.queries[size_t(j)].position >= span * kSpan) j++;
            if (j > i) k.attend[c.kv_bits == 8](kv0, kv1, next0, next1, s.rows.data() + (i - base), j - i, span * kSpan, heads);
            i = j + 1;
        }
    }
}

void Step::attend(Batch& batch, int layer, int unit, Scratch& s) {
    const Span& span = batch.spans[size_t(unit / c.kv_heads)];
    const int head = unit % c.kv_heads, floats = state_floats(heads);
    for (int i = span.from; i < span.to; i++) {
        const QueryRow& at = batch.queries[size_t(i)];
        float* state = s.state.data() + (i - span.from) * floats;
        k.start_row(state, heads);
        s.rows[size_t(i - span.from)] = {q.data() + (size_t(at.source) * c.heads + head * heads.group) * c.dim * 2, state, at.position + 1};
    }
    walk(batch, layer, head, span.from, span.to, 0, span.from, s);
    for (int i = span.from; i < span.to; i++) {
        const Tile& tile = batch.attended.of(i);
        k.finish_row(s.rows[size_t(i - span.from)].state, heads, s.row.data());
        k.quantise(s.row.data(), heads.group * c.dim, tile, i - tile.first, head * heads.group * c.dim);
    }
}

void Step::gate_up(Batch& batch, const Layer& l, int unit, Scratch& s) {
    const int most = strips_of(batch, c.ff), first = unit * most, strips = std::min(most, c.ff / kStrip - first), width = strips * kStrip;
    for (size_t t = 0; t < batch.normed.tiles.size(); t++) {
        const Tile& tile = batch.normed.tiles[t];
        k.product(l.gate, first, strips, tile, s.one.data(), width, false);
        k.product(l.up, first, strips, tile, s.two.data(), width, false);
        k.silu_mul(s.one.data(), s.two.data(), tile.rows * width);
        for (int i = 0; i < tile.rows; i++) k.quantise(s.one.data() + i * width, width, batch.inner.tiles[t], i, first * kStrip);
    }
}

void Step::project(Batch& batch, const Acts& acts, const Matrix& w, size_t counter) {
    const int most = strips_of(batch, c.embd), all_strips = c.embd / kStrip;
    share(counter, units_of(batch, c.embd), [&](int unit) {
        float* x = batch.x + unit * most * kStrip;
        for (const Tile& tile : acts.tiles) {
            k.product(w, unit * most, std::min(most, all_strips - unit * most), tile, x, c.embd, true);
            x += size_t(tile.rows) * size_t(c.embd);
        }
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
        top.insert(std::upper_bound(top.begin(), top.end(), x[i], [](float a, const auto& b) { return a > b.first; }), {x[i], first + i});
    }
}

void Step::vocabulary(int unit, Scratch& s) {
    const int first = unit * kHeadWidth, width = std::min(kHeadWidth, c.vocab - first);
    int row = 0;
    for (const Tile& tile : last.normed.tiles) {
        k.product(m.head(), unit * (kHeadWidth / kStrip), (width + kStrip - 1) / kStrip, tile, s.one.data(), kHeadWidth, false);
        for (int i = 0; i < tile.rows; i++, row++) {
            const float* x = s.one.data() + i * kHeadWidth;
            if (logits_of[size_t(row)]) memcpy(logits_of[size_t(row)] + first, x, size_t(width) * 4);
            else take_best(x, width, first, top_of[size_t(row)], s.best[size_t(row)]);
        }
    }
}

void Step::pass(int thread) {
    Scratch& s = scratch[size_t(thread)];
    size_t counter = 0;
    const int parts = all.normed.tiles.size() < 16 ? 1 : 4;  // of the rows: a head is too large a unit for the end of a phase
    share(counter++, all.rows, [&](int row) { embed(row); });
    meet(thread, kEmbed);
    for (int i = 0; i < c.layers; i++) {
        const Layer& l = m.layer(i);
        normalise(all, counter++, l.attn_norm, s);
        meet(thread, kNorm);
        share(counter++, (c.heads + 2 * c.kv_heads) * parts, [&](int unit) { project_head(i, unit / parts, unit % parts, parts, s); });
        meet(thread, kQkv);
        Batch& b = i + 1 < c.layers ? all : last;
        if (!b.rows) return;
        if (&b == &last && thread == 0)
            for (int r = 0; r < last.rows; r++)
                memcpy(last.x + size_t(r) * size_t(c.embd), all.x + size_t(last.queries[size_t(r)].source) * size_t(c.embd), size_t(c.embd) * 4);
        share(counter++, int(b.spans.size()) * c.kv_heads, [&](int unit) { attend(b, i, unit, s); });
        meet(thread, kAttention);
        project(b, b.attended, l.o, counter++);
        meet(thread, kOut);
        normalise(b, counter++, l.ffn_norm, s);
        meet(thread, kNorm);
        share(counter++, units_of(b, c.ff), [&](int unit) { gate_up(b, l, unit, s); });
        meet(thread, kGateUp);
        project(b, b.inner, l.down, counter++);
        meet(thread, kDown);
    }
    normalise(last, counter++, m.output_norm(), s);
    meet(thread, kNorm);
    share(counter++, (c.vocab + kHeadWidth - 1) / kHeadWidth, [&](int unit) { vocabulary(unit, s); });
    meet(thread, kHead);
}

// The most likely tokens of each row of `last`, of equals the lowest; -1 and none where a logit was not finite.
std::vector<Best> Step::best() const {
    std::vector<Best> out(size_t(last.rows));
    for (size_t r = 0; r < out.size(); r++) {
        Best& best = out[r];
        for (const auto& s : scratch) {
            const Best& b = s.best[r];
            best.bad += b.bad;
            if (b.value > best.value || (b.value == best.value && b.token < best.token)) best.value = b.value, best.token = b.token;
            best.top.insert(best.top.end(), b.top.begin(), b.top.end());
        }
        if (best.bad != 0.f) best.token = -1, best.top.clear();
        std::sort(best.top.begin(), best.top.end(), [](const auto& a, const auto& b) { return a.first != b.first ? a.first > b.first : a.second < b.second; });
        best.top.resize(std::min(best.top.size(), top_of[r]));
    }
    return out;
}

// -- the model's face -----------------------------------------------------------------------------------------------

Answer Model::run(const Plan& plan, float* logits) {
    check(plan);
    const size_t block = block_bytes(config_);
    for (auto [from, to] : plan.copies) {
        if (from != to) memcpy(kv(to, 0, 0), kv(from, 0, 0), block);
        written_[size_t(to)] = written_[size_t(from)];
    }
    Answer answer;
    auto& tokens = answer.tokens;
    for (const auto& seq : plan.sequences)
        if (seq.want == Want::kArgmax) tokens.emplace_back();
    if (plan.sequences.empty()) return answer;
    if (!step_) step_ = std::make_shared<Step>(*this);
    Plan now = plan;
    for (int link = 0; link < plan.chain; link++) {
        step_->prepare(now, logits);
        pool_->run([](void* step, int thread) { static_cast<Step*>(step)->pass(thread); }, step_.get());
        auto best = step_->best();
        std::vector<Best*> of(plan.sequences.size(), nullptr);
        for (size_t r = 0; r < best.size(); r++) of[size_t(step_->last.queries[r].sequence)] = &best[r];
        size_t out = 0;
        for (size_t s = 0; s < now.sequences.size(); s++) {
            Sequence& seq = now.sequences[s];
            if (seq.want == Want::kTop) answer.tops.push_back(std::move(of[s]->top));
            if (seq.want != Want::kArgmax) continue;
            const bool ended = !tokens[out].empty() && tokens[out].back() < 0;  // not finite: nothing that follows is
            tokens[out++].push_back(ended ? -1 : of[s]->token);
            seq.start += int(seq.tokens.size());
            seq.tokens.assign(1, std::max(of[s]->token, 0));
        }
    }
    for (const auto& seq : plan.sequences)
        for (int i = 0; i < int(seq.tokens.size()) + plan.chain - 1; i++)
            written_[size_t(seq.table[size_t((seq.start + i) / kBlock)])] |= 1u << ((seq.start + i) % kBlock);
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
