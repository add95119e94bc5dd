// One pass: its buffers, and the phases of all kinds of layers. step.cpp tells what a pass is.
#pragma once
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <functional>

#include "model.h"

namespace shoal {

inline void grow(Pages& pages, size_t bytes) {
    if (pages.size() < bytes) pages = Pages(bytes);
}
inline bool is_dense(const Matrix& w) { return w.data && int(w.codes) >= 16; }

enum Phase { kEmbed, kNorm, kQkv, kAttention, kMix, kRecur, kOut, kRoute, kGateUp, kDown, kHead, kPhases };
constexpr int kRowsAtOnce = 8;        // of attention: their state (3 heads x 64 floats each) and a span of KV fit L1
constexpr int kHeadWidth = 256;       // tokens of the vocabulary of one unit
constexpr int kFewRows = 8;           // that wait for memory with any kernels; with tiles of bf16 up to 32 do
constexpr int kMostStrips = 8;        // of one unit: see strips_of
constexpr int kChannelsAtOnce = 256;  // of a convolution, for one unit
constexpr int kTokensAtOnce =
    32;  // of a recurrence: their keys and queries stay in cache beside 32 columns of the state

// Rows of one width as the kernels take them, cut into tiles of at most max_rows, as even as can be. `dense`: the values themselves too.
class Acts {
  public:
    static int tiles_of(int rows, int max_rows) { return (rows + max_rows - 1) / max_rows; }
    void shape(int rows, int k, const Kernels& kernels, bool dense);
    // Several runs of rows, none of whose tiles go over a run's end; the memory of `rows` rows stays.
    void shape_runs(const std::vector<int>& runs, int rows, int k, const Kernels& kernels, bool dense);
    const Tile& of(int row) const { return tiles[size_t(tile_of[size_t(row)])]; }
    std::vector<Tile> tiles;
    std::vector<int> tile_of;

  private:
    Pages memory_;
};

struct QueryRow {
    int sequence, position, source;
};  // source: its row in the q buffer and in `all`
struct Span {
    int from, to;          // query rows that share their first block
    int sections, states;  // of the longest; before it in Batch::parts, for each KV head
};
struct Cut {
    int span, section;
};

// Rows that go through a layer together.
struct Batch {
    int rows = 0;
    Pages memory, delta_memory;
    float* x = nullptr;      // [rows][embd]
    float* delta = nullptr;  // [rows][embd]: what a block gives where it is not added to x at once
    Acts normed, attended, inner, experts_in, shared_in;  // the last two where a mixture norms its own inputs
    std::vector<QueryRow> queries;  // sorted so that shared blocks are neighbours; row i of x is queries[i]
    // Attention's units, each for every KV head: spans, or where those are too few for all threads, their sections. The sums of a
    // section then lie in `parts`, and whoever is the last of a span and head adds them in order.
    struct Counter {
        std::atomic<int> done{0};
    };
    std::vector<Span> spans;
    std::vector<Cut> pieces;  // empty: units are spans
    std::vector<Counter> finished;
    Pages parts;
};

// What a block left behind to be added to x: x = output_scale * (x + scale * norm(delta)).
enum class Of : int { kMixer, kFeed, kInput };
struct Pending {
    const Layer* layer = nullptr;  // null: nothing; x has it all
    Of of = Of::kMixer;            // what of the layer
};

// The rows of one expert: pairs first .. of the step, in tiles from .. to - 1.
struct Run {
    int expert, first, from, to;
};

struct Best {
    float value = -INFINITY;
    int token = -1;
    float bad = 0;
    Top top;  // largest first, of equals the lowest token
};

// Memory of one thread.
struct Scratch {
    std::vector<float> one, two, state, row, other, wide, keys;
    std::vector<Row> rows;
    std::vector<Best> best;
};

struct Step : Work {
    explicit Step(const Model& model);
    void prepare(const Plan& plan, float* logits);
    int open() override;
    void unit(int index, int thread) override { program[size_t(at)].unit(index, scratch[size_t(thread)]); }
    std::vector<Best> best() const;

    const Model& m;
    const Config& c;
    const Kernels& k;
    const Plan* plan = nullptr;
    Batch all, last;          // every fed row; those whose logits are wanted
    std::vector<int> tokens;  // of all.queries
    struct Fed {
        int first, count, sequence;
    };
    std::vector<Fed> fed;  // of each sequence, its rows in `all`
    Pages q;               // [rows][heads][dim * 2]: see Row
    Pages gates;           // [rows][heads * v_dim]: attention's output gates
    Pages mixed;   // [rows][columns]: inputs of a recurrent mixer; [rows][heads * dim] where norms go over all heads
    Pages inputs;  // [rows][layers * size]: per-layer embeddings
    std::vector<float> cosines, sines;  // [rotaries][rows][pairs]
    std::vector<size_t> angles_at;      // of each rotary, in cosines and sines
    std::vector<float*> logits_of;      // per row of `last`, null where only the best are wanted
    std::vector<size_t> top_of;         // per row of `last`, how many of them
    std::vector<Scratch> scratch;
    double seconds[kPhases] = {}, steps = 0;
    std::chrono::steady_clock::time_point since;

    // Of a mixture: router scores [rows][experts], choices and their weights [rows][used], where each pair went, and its rows.
    std::vector<float> scores, weights;
    std::vector<int> chosen, place;
    std::vector<Run> runs;
    std::vector<int> pair_row;  // of each pair, its row
    Acts pairs, pair_inner;
    Pages pair_out;  // [pairs][embd]

  private:
    // A phase of the pass, left out while `batch` has no rows. `open` runs alone, when all before it is done, and gives the number of
    // units.
    struct Part {
        Phase phase;
        const Batch* batch;
        std::function<int()> open;
        std::function<void(int, Scratch&)> unit;
    };
    std::vector<Part> program;  // of every pass of this model
    int at = 0;
    void add(Phase phase, const Batch& batch, std::function<int()> open, std::function<void(int, Scratch&)> unit) {
        program.push_back({phase, &batch, std::move(open), std::move(unit)});
    }
    void add_layers();
    // Strips of one unit: a few rows wait for memory, which wants long reads; many want all threads busy to the end.
    int strips_of(int rows, int width) const {
        const int strips = width / kStrip;
        return rows > std::max(kFewRows, std::min(k.max_rows, 32))
                   ? 1
                   : std::min(std::max(strips / (m.threads() * 4), 1), kMostStrips);
    }
    int units_of(int rows, int width) const {
        const int most = strips_of(rows, width);
        return (width / kStrip + most - 1) / most;
    }
    static int score_columns(const Layer& l) { return (l.router.strips + l.shared_gate.strips) * kStrip; }
    bool adds_at_once(const Norm& post, const Layer& l) const { return !post.weight && l.residual_scale == 1.f; }
    const float* cosines_of(int rotary, int row) const {
        return cosines.data() + angles_at[size_t(rotary)] + size_t(row) * c.rotaries[size_t(rotary)].frequencies.size();
    }
    const float* sines_of(int rotary, int row) const {
        return sines.data() + angles_at[size_t(rotary)] + size_t(row) * c.rotaries[size_t(rotary)].frequencies.size();
    }
    void form(Batch& batch, int rows);
    void take_last_rows();
    void embed(int row);
    void normalise(const Norm& norm, const float* x, int n, float* out) const;
    void settle(Phase phase, Batch& batch, Pending pending, Norm norm, const Layer* mixture = nullptr);
    void settle_rows(Batch& batch, const Tile& tile, int first, int end, const Pending& pending, const Norm& norm,
                     Scratch& s, const Layer* mixture);
    void add_pending(Batch& batch, int row, const Pending& pending, Scratch& s);
    void add_experts(const Layer& l, Batch& batch, int row, Scratch& s);
    void quantise_own(const Layer& l, Batch& batch, int row, const float* x, Scratch& s);
    bool norms_inputs(const Layer& l) const {
        return l.router_norm.weight || l.experts_norm.weight || l.shared_norm.weight;
    }
    void make_inputs();
    void take_input(const Layer& l, size_t layer, Batch& b);
    // out: to, called when a unit runs, for buffers grow
    void project(Phase phase, Batch& batch, const Acts& acts, const Matrix& w, std::function<float*()> out, int ld,
                 bool accumulate);
    void project_to_stream(Phase phase, Batch& batch, const Acts& acts, const Matrix& w, bool at_once) {
        project(phase, batch, acts, w, [&batch, at_once] { return at_once ? batch.x : batch.delta; }, c.embd, at_once);
    }
    void take_best(const float* x, int n, int first, size_t count, Best& best) const;
    void vocabulary(int unit, Scratch& s);

    // attend.cpp
    void mix_attention(const Layer& l, Batch& b);
    void norm_over_heads(const Layer& l, int row);
    void project_head(const Layer& l, int unit, int part, int parts, Scratch& s);
    void finish_query(const Layer& l, int head, int row, float* x);
    void finish_key(const Layer& l, int head, int row, float* x);
    void finish_value(const Layer& l, int head, int row, float* x);
    void write_q(const Layer& l, const float* x, float scale, uint8_t* out) const;
    void write_kv(const Layer& l, int head, int row, const float* x, bool value);
    void attend(const Layer& l, Batch& batch, int unit, Scratch& s);
    void walk(const Layer& l, const Batch& batch, int head, int from, int to, int span, int end, int base, Scratch& s);
    void cut_attention(Batch& batch);
    void begin_rows(const Layer& l, const Batch& batch, const Span& span, int head, float* states, Scratch& s);
    void walk_section(const Layer& l, const Batch& batch, const Span& span, int head, int section, Scratch& s);
    void attend_section(const Layer& l, Batch& batch, int unit, Scratch& s);
    void finish_attention(const Layer& l, Batch& batch, int row, int head, const float* state, Scratch& s);
    const float* sinks_of(const Layer& l, int head) const {
        return l.sinks ? l.sinks + head * (l.heads / l.kv_heads) : nullptr;
    }
    static Heads heads_of(const Layer& l) { return {l.heads / l.kv_heads, l.dim, l.v_dim, l.cap * 1.44269504f}; }
    // Of a row, its first section. It is the row's last one too: nothing is added up.
    int first_section(const Layer& l, int position) const { return begin_of(l, position) / kSection; }
    bool in_one_section(const Layer& l, int position) const {
        return first_section(l, position) == position / kSection;
    }
    int begin_of(const Layer& l, int position) const {
        return l.window && position >= l.window ? position - l.window + 1 : 0;
    }
    uint8_t* query(const Layer& l, int row, int head) const {
        return q.data() + (size_t(row) * l.heads + head) * l.dim * 2;
    }

    // recur.cpp
    void mix_recurrent(const Layer& l, Batch& b);
    static int input_strips(const Layer& l) {
        int strips = 0;
        for (const Input& input : l.inputs) strips += input.w.strips;
        return strips;
    }
    void mix_columns(const Layer& l, int unit);
    void convolve_part(const Layer& l, const Fed& f, int from);
    void recur_head(const Layer& l, const Fed& fed, int head, Scratch& s);
    void finish_recurrent(const Layer& l, Batch& b, int row, Scratch& s);

    // feed.cpp
    void feed_forward(const Layer& l, Batch& b);
    void gate_up(const FeedForward& f, const Acts& in, const Acts& out, int from, int to, int expert, int unit,
                 int most, Scratch& s);
    void mixture(const Layer& l, Batch& b);
    struct Shares;
    Shares shares_of(int strips, int shared_strips, int shared_most) const;
    void choose(const Layer& l, int row);
    void group_pairs(const Layer& l, Batch& b, const Acts& in);
    void gather(const Acts& in, int unit);
};

}  // namespace shoal
