// Attention's phases: heads projected, their KV written, and rows attended in units of those that share blocks.
//
// Norms over each head are part of the projection's unit. A norm over all heads together (OLMo 2) needs the whole row: q and k go
// to `mixed` first, and a phase of their own finishes them.
#include <algorithm>
#include <cstring>

#include "step.h"

namespace shoal {

void Step::write_kv(const Layer& l, int head, int row, const float* x, bool value) {
    const QueryRow& at = all.queries[size_t(row)];
    const int slot = at.position % kBlock, dim = value ? l.v_dim : l.dim;
    uint8_t* bytes = m.kv(plan->sequences[size_t(at.sequence)].table[size_t(at.position / kBlock)], l, head);
    if (c.kv_bits == 8) {
        int8_t codes[512];
        float* scale = reinterpret_cast<float*>(bytes + (l.dim + l.v_dim) * kBlock) + (value ? kBlock : 0) + slot;
        *scale = k.to_codes(x, dim, codes).scale;
        for (int d = 0; d < dim; d++)
            if (value)
                bytes[l.dim * kBlock + slot / 4 * 4 * dim + d * 4 + slot % 4] = uint8_t(codes[d]);
            else
                bytes[d / 4 * kBlock * 4 + slot * 4 + d % 4] = uint8_t(codes[d] + 128);
        return;
    }
    uint16_t *kv = reinterpret_cast<uint16_t*>(bytes), rounded[512];
    k.to_bf16_row(x, dim, 1.f, rounded);
    if (value) {
        uint16_t* v = kv + l.dim * kBlock + slot / 2 * dim * 2 + slot % 2;
        for (int d = 0; d < dim; d++) v[2 * d] = rounded[d];
    } else {
        for (int d = 0; d < dim; d += 2) memcpy(kv + d * kBlock + slot * 2, rounded + d, 4);
    }
}

void Step::write_q(const Layer& l, const float* x, float scale, uint8_t* out) const {
    if (c.kv_bits == 16) return k.to_bf16_row(x, l.dim, scale, reinterpret_cast<uint16_t*>(out));
    Scaled codes = k.to_codes(x, l.dim, reinterpret_cast<int8_t*>(out));
    codes.scale *= scale;
    memcpy(out + l.dim, &codes, sizeof codes);
}

// x is turned in place and written where attention reads it; norms over the head come before.
void Step::finish_query(const Layer& l, int head, int row, float* x) {
    if (l.q_norm.weight && !l.norm_over_heads) normalise(l.q_norm, x, l.dim, x);
    if (l.rotary >= 0)
        k.rotate(x, cosines_of(l.rotary, row), sines_of(l.rotary, row),
                 int(c.rotaries[size_t(l.rotary)].frequencies.size()));
    double scale = 1.4426950408889634 * double(l.scale);
    if (l.query_beta != 0.f)
        scale *=
            1.0 + double(l.query_beta) * std::log(1.0 + double(all.queries[size_t(row)].position / l.query_length));
    write_q(l, x, float(scale), query(l, row, head));
}

void Step::finish_key(const Layer& l, int head, int row, float* x) {
    if (l.k_norm.weight && !l.norm_over_heads) normalise(l.k_norm, x, l.dim, x);
    if (l.rotary >= 0)
        k.rotate(x, cosines_of(l.rotary, row), sines_of(l.rotary, row),
                 int(c.rotaries[size_t(l.rotary)].frequencies.size()));
    write_kv(l, head, row, x, false);
}

void Step::finish_value(const Layer& l, int head, int row, float* x) {
    if (l.v_norm.weight) normalise(l.v_norm, x, l.v_dim, x);
    write_kv(l, head, row, x, true);
}

// Units: heads of q, then of k and of v where the layer has its own, then of the output's gate.
void Step::project_head(const Layer& l, int unit, int part, int parts, Scratch& s) {
    const int own = l.kv_layer < 0 ? l.kv_heads : 0;
    const bool is_q = unit < l.heads, is_k = !is_q && unit < l.heads + own,
               is_v = !is_q && !is_k && unit < l.heads + 2 * own;
    const int head = is_q ? unit : is_k ? unit - l.heads : is_v ? unit - l.heads - own : unit - l.heads - 2 * own;
    const Matrix& w = is_q ? l.q : is_k ? l.k : is_v ? l.v : l.gate;
    const int dim = is_q || is_k ? l.dim : l.v_dim, strips = dim / kStrip;
    const size_t wide = size_t(l.heads + l.kv_heads) * size_t(l.dim), tiles = all.normed.tiles.size();
    for (size_t t = tiles * size_t(part) / size_t(parts); t < tiles * size_t(part + 1) / size_t(parts); t++) {
        const Tile& tile = all.normed.tiles[t];
        if (!is_q && !is_k && !is_v) {
            k.product(w, head * strips, strips, tile,
                      reinterpret_cast<float*>(gates.data()) + size_t(tile.first) * l.inner() + head * dim, l.inner(),
                      false);
        } else if (l.norm_over_heads && !is_v) {
            k.product(w, head * strips, strips, tile,
                      reinterpret_cast<float*>(mixed.data()) + size_t(tile.first) * wide + unit * dim, int(wide),
                      false);
        } else {
            k.product(w, head * strips, strips, tile, s.one.data(), dim, false);
            for (int i = 0; i < tile.rows; i++) {
                float* x = s.one.data() + i * dim;
                if (is_q)
                    finish_query(l, head, tile.first + i, x);
                else if (is_k)
                    finish_key(l, head, tile.first + i, x);
                else
                    finish_value(l, head, tile.first + i, x);
            }
        }
    }
}

// Attention units of a step: runs of rows that start with the same block. Where these are too few for all threads and contexts long, they
// are cut into sections.
void Step::cut_attention(Batch& batch) {
    int kv_heads = 0, floats = 0, longest = 0;
    for (const Layer& l : m.layers()) {
        if (!l.attends()) continue;
        kv_heads = std::max(kv_heads, l.kv_heads), floats = std::max(floats, state_floats(heads_of(l)));
    }
    const auto& queries = batch.queries;
    for (const QueryRow& query : queries) longest = std::max(longest, query.position);
    const int rows = batch.rows, enough = m.threads() * 3;
    const int piece = longest >= kSection ? kRowsAtOnce : std::clamp(rows * kv_heads / enough, 1, kRowsAtOnce);
    batch.spans.clear(), batch.pieces.clear();
    for (int i = 0, j; i < rows; i = j) {
        const auto first = [&](int row) { return plan->sequences[size_t(queries[size_t(row)].sequence)].table[0]; };
        int last = queries[size_t(i)].position;
        for (j = i + 1; j < rows && j - i < piece && first(j) == first(i); j++)
            last = std::max(last, queries[size_t(j)].position);
        batch.spans.push_back({i, j, last / kSection + 1, 0});
    }
    const auto cost = [&](const Span& s) {
        int64_t sum = 0;
        for (int i = s.from; i < s.to; i++) sum += queries[size_t(i)].position;
        return sum;
    };
    std::stable_sort(batch.spans.begin(), batch.spans.end(),
                     [&](const Span& a, const Span& b) { return cost(a) > cost(b); });
    if (longest < kSection || int(batch.spans.size()) * kv_heads >= enough) return;
    int states = 0;
    for (Span& span : batch.spans) {
        for (int section = 0; section < span.sections; section++)
            batch.pieces.push_back({int(&span - batch.spans.data()), section});
        span.states = states, states += (span.to - span.from) * span.sections;
    }
    grow(batch.parts, size_t(states) * size_t(kv_heads) * size_t(floats) * 4);
    const size_t counters = batch.spans.size() * size_t(kv_heads);
    if (batch.finished.size() < counters) batch.finished = std::vector<Batch::Counter>(counters);
}

// Rows from .. to - 1 have the same blocks up to `span`; go on together as long as they do, then part. Ends before span `end`.
void Step::walk(const Layer& l, const Batch& batch, int head, int from, int to, int span, int end, int base,
                Scratch& s) {
    const Heads heads = heads_of(l);
    for (; span < end; span++) {
        while (from < to && batch.queries[size_t(from)].position < span * kSpan) from++;
        if (from == to) return;
        const auto table = [&](int row) -> const std::vector<int>& {
            return plan->sequences[size_t(batch.queries[size_t(row)].sequence)].table;
        };
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
            const bool same =
                other.first == blocks.first && (other.second == blocks.second || other.second < 0 || blocks.second < 0);
            if (!same) {
                walk(l, batch, head, from, i, span, end, base, s);
                from = i;
                blocks = other;
            } else if (blocks.second < 0) {
                blocks.second = other.second;
            }
        }
        // A half that no row sees may be anything: it is masked.
        const uint8_t* kv0 = m.kv(blocks.first, l, head);
        const uint8_t* kv1 = blocks.second < 0 ? kv0 : m.kv(blocks.second, l, head);
        kv0 = kv0 ? kv0 : kv1, kv1 = kv1 ? kv1 : kv0;
        const uint8_t *next0 = nullptr, *next1 = nullptr;
        const int ahead = batch.queries[size_t(to - 1)].position - (span + 1) * kSpan;
        if (ahead >= 0) next0 = m.kv(table(to - 1)[size_t(span) * 2 + 2], l, head);
        if (ahead >= kBlock) next1 = m.kv(table(to - 1)[size_t(span) * 2 + 3], l, head);
        // Rows whose last position lies before this span have dropped out, and a window may begin behind it; they may lie
        // between the others.
        const auto sees = [&](int row) {
            return batch.queries[size_t(row)].position >= span * kSpan &&
                   s.rows[size_t(row - base)].begin < (span + 1) * kSpan;
        };
        for (int i = from; i < to;) {
            int j = i;
            while (j < to && sees(j)) j++;
            if (j > i)
                k.attend[c.kv_bits == 8](kv0, kv1, next0, next1, s.rows.data() + (i - base), j - i, span * kSpan,
                                         heads);
            i = j + 1;
        }
    }
}

// The rows of a span for one KV head, their sums one after the other from `states`.
void Step::begin_rows(const Layer& l, const Batch& batch, const Span& span, int head, float* states, Scratch& s) {
    const Heads heads = heads_of(l);
    for (int i = span.from; i < span.to; i++) {
        const QueryRow& at = batch.queries[size_t(i)];
        float* state = states + (i - span.from) * state_floats(heads);
        k.start_row(state, heads, in_one_section(l, at.position) ? sinks_of(l, head) : nullptr);
        s.rows[size_t(i - span.from)] = {query(l, at.source, head * heads.group), state, at.position + 1,
                                         begin_of(l, at.position)};
    }
}

void Step::walk_section(const Layer& l, const Batch& batch, const Span& span, int head, int section, Scratch& s) {
    constexpr int kSpans = kSection / kSpan;
    int begin = INT32_MAX;
    for (int i = span.from; i < span.to; i++) begin = std::min(begin, s.rows[size_t(i - span.from)].begin);
    walk(l, batch, head, span.from, span.to, std::max(section * kSpans, begin / kSpan), (section + 1) * kSpans,
         span.from, s);
}

void Step::finish_attention(const Layer& l, Batch& batch, int row, int head, const float* state, Scratch& s) {
    const Heads heads = heads_of(l);
    const Tile& tile = batch.attended.of(row);
    const int width = heads.group * l.v_dim;
    k.finish_row(state, heads, s.row.data());
    if (l.gate.data)
        k.gate_by(s.row.data(),
                  reinterpret_cast<const float*>(gates.data()) + size_t(batch.queries[size_t(row)].source) * l.inner() +
                      head * width,
                  width, false);
    k.quantise(s.row.data(), width, tile, row - tile.first, head * width);
}

// All sections of a span, one after the other: sums of the rows behind each other, those of a section behind them.
void Step::attend(const Layer& l, Batch& batch, int unit, Scratch& s) {
    if (!batch.pieces.empty()) return attend_section(l, batch, unit, s);
    const Span& span = batch.spans[size_t(unit / l.kv_heads)];
    const Heads heads = heads_of(l);
    const int head = unit % l.kv_heads, floats = state_floats(heads), n = span.to - span.from;
    float *sums = s.state.data(), *part = sums + kRowsAtOnce * floats;
    begin_rows(l, batch, span, head, sums, s);
    const auto position = [&](int i) { return batch.queries[size_t(span.from + i)].position; };
    int first = span.sections;
    for (int i = 0; i < n; i++) {
        first = std::min(first, first_section(l, position(i)));
        if (in_one_section(l, position(i))) continue;
        k.start_row(sums + i * floats, heads, sinks_of(l, head));
        s.rows[size_t(i)].state = part + i * floats;
    }
    for (int section = first; section < span.sections; section++) {
        for (int i = 0; i < n; i++)
            if (!in_one_section(l, position(i))) k.start_row(part + i * floats, heads, nullptr);
        walk_section(l, batch, span, head, section, s);
        for (int i = 0; i < n; i++)
            if (!in_one_section(l, position(i)) && section >= first_section(l, position(i)) &&
                section <= position(i) / kSection)
                k.merge_row(sums + i * floats, part + i * floats, heads);
    }
    for (int i = 0; i < n; i++) finish_attention(l, batch, span.from + i, head, sums + i * floats, s);
}

// One section of a span; the last to be done adds them all.
void Step::attend_section(const Layer& l, Batch& batch, int unit, Scratch& s) {
    const Cut& piece = batch.pieces[size_t(unit / l.kv_heads)];
    const Span& span = batch.spans[size_t(piece.span)];
    const Heads heads = heads_of(l);
    const int head = unit % l.kv_heads, floats = state_floats(heads), n = span.to - span.from;
    float* parts = reinterpret_cast<float*>(batch.parts.data()) +
                   (size_t(span.states) * size_t(l.kv_heads) + size_t(head * span.sections * n)) * size_t(floats);
    const auto part = [&](int section, int i) { return parts + (section * n + i) * floats; };
    begin_rows(l, batch, span, head, part(piece.section, 0), s);
    walk_section(l, batch, span, head, piece.section, s);
    std::atomic<int>& done = batch.finished[size_t(piece.span * l.kv_heads + head)].done;
    if (done.fetch_add(1, std::memory_order_acq_rel) + 1 < span.sections) return;
    done.store(0, std::memory_order_relaxed);
    for (int i = 0; i < n; i++) {
        const int position = batch.queries[size_t(span.from + i)].position, first = first_section(l, position);
        float* sum = part(first, i);
        if (!in_one_section(l, position)) {
            sum = s.state.data();
            k.start_row(sum, heads, sinks_of(l, head));
            for (int section = first; section <= position / kSection; section++)
                k.merge_row(sum, part(section, i), heads);
        }
        finish_attention(l, batch, span.from + i, head, sum, s);
    }
}

// What is left of a row's projections where norms go over all heads.
void Step::norm_over_heads(const Layer& l, int row) {
    float *x = reinterpret_cast<float*>(mixed.data()) + size_t(row) * size_t(l.heads + l.kv_heads) * size_t(l.dim),
          *key = x + l.heads * l.dim;
    if (l.q_norm.weight) normalise(l.q_norm, x, l.heads * l.dim, x);
    for (int h = 0; h < l.heads; h++) finish_query(l, h, row, x + h * l.dim);
    if (l.kv_layer >= 0) return;
    if (l.k_norm.weight) normalise(l.k_norm, key, l.kv_heads * l.dim, key);
    for (int h = 0; h < l.kv_heads; h++) finish_key(l, h, row, key + h * l.dim);
}

void Step::mix_attention(const Layer& l, Batch& b) {
    const int heads = l.heads + (l.kv_layer < 0 ? 2 * l.kv_heads : 0) + (l.gate.data ? l.heads : 0);
    const auto parts = [this] {
        return all.normed.tiles.size() < 16 ? 1 : 4;
    };  // of the rows: a head is too large a unit
    add(
        kQkv, all, [heads, parts] { return heads * parts(); },
        [this, &l, parts](int unit, Scratch& s) { project_head(l, unit / parts(), unit % parts(), parts(), s); });
    if (l.norm_over_heads)
        add(kQkv, all, [this] { return all.rows; }, [this, &l](int row, Scratch&) { norm_over_heads(l, row); });
    const auto open = [this, &l, &b] {
        if (&b == &last) take_last_rows();
        return int(b.pieces.empty() ? b.spans.size() : b.pieces.size()) * l.kv_heads;
    };
    add(kAttention, b, open, [this, &l, &b](int unit, Scratch& s) { attend(l, b, unit, s); });
}

}  // namespace shoal
