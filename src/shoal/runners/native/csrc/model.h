// A loaded model, its KV, and what a step is asked to do.
#pragma once
#include <algorithm>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include "kernels.h"
#include "pool.h"

namespace shoal {

// What is wrong with a plan or a model file; nothing was computed or changed.
struct PlanError : std::runtime_error {
    using std::runtime_error::runtime_error;
};
struct FormatError : std::runtime_error {
    using std::runtime_error::runtime_error;
};
struct DamagedError : FormatError {
    using FormatError::FormatError;
};  // to be packed again

// Zeroed pages of their own, taken when first touched, in 2 MB pages where the system gives them (a quarter more bandwidth on
// Zen 4: its prefetchers stop at page ends). Throws std::bad_alloc.
class Pages {
  public:
    Pages() = default;
    explicit Pages(size_t bytes);
    // The file behind `descriptor`, read only as its bytes are touched; the system may drop them again. Throws std::bad_alloc.
    Pages(int descriptor, size_t bytes);
    ~Pages();
    Pages(Pages&& other) noexcept { swap(other); }
    Pages& operator=(Pages&& other) noexcept {
        swap(other);
        return *this;
    }
    uint8_t* data() const { return data_; }
    size_t size() const { return size_; }
    // Give whole pages of these bytes back to the system; they are zero when next touched. What shares a page stays.
    void discard(size_t at, size_t bytes) const;

  private:
    void swap(Pages& other) {
        std::swap(data_, other.data_), std::swap(size_, other.size_), std::swap(mapped_, other.mapped_),
            std::swap(base_, other.base_);
    }
    uint8_t* data_ = nullptr;
    void* base_ = nullptr;
    size_t size_ = 0, mapped_ = 0;
};

// What is said of one layer beside its tensors; fields of other kinds of mixers and feed-forwards stay as they are.
enum class Mixer : int { kNone, kAttention, kDelta, kMamba, kConvolution };
enum class Feed : int { kNone, kDense, kMixture };
enum class Routing : int { kSoftmax, kSigmoid, kChosen };
struct NormFacts {
    float eps = 0;
    bool layer = false;
};
struct LayerFacts {
    Mixer mixer = Mixer::kNone;
    // Attention: query heads, KV heads, sizes of a head's keys and values. Recurrent mixers: heads of values, heads or groups of
    // keys, sizes of a key (Mamba's state) and a value. A short convolution is one head of `embd` values.
    int heads = 0, kv_heads = 0, dim = 0, v_dim = 0;
    int window = 0, rotary = -1,
        kv_layer = -1;                         // rotary: index into Config::rotaries; kv_layer: whose K and V are read
    float scale = 0, cap = 0, query_beta = 0;  // queries at position p are multiplied by 1 + beta * log(1 + p / length)
    int query_length = 1;
    bool norm_over_heads = false, keys_are_values = false;
    int taps = 0, norm_groups = 1;
    float l2_eps = 0, least_step = 0, most_step = 0;
    std::vector<int> key_of;  // of each value head, the key head it reads
    Feed feed = Feed::kNone;
    int ff = 0, experts = 0, used = 0, shared = 0, groups = 1, groups_used = 1;
    Activation activation = Activation::kSilu, shared_activation = Activation::kSilu;
    Routing routing = Routing::kSoftmax;
    bool normalise = false;
    float route_scale = 1, residual_scale = 1, output_scale = 1;
    bool takes_input = false;  // of the per-layer embeddings
    std::map<std::string, NormFacts> norms;
};

struct Rotary {
    std::vector<float> frequencies;  // radians a position, of the pairs (i, pairs + i) of a head
    float factor = 1;                // of cosine and sine
};

// Per-layer embeddings: of a token, `size` elements for each layer, made once from the token and the first x as
//     (norm(project(x) * project_scale) + embedding[token] * embedding_scale) * scale
struct InputFacts {
    int size = 0;  // 0: the model has none
    float embedding_scale = 1, project_scale = 1, scale = 1;
    NormFacts norm;
};

struct Config {
    int embd = 0, vocab = 0, context = 0, blocks = 0, threads = 0, kv_bits = 16, checkpoints = 0;
    int windows = 0;                // window blocks; 0: KV of layers with a window lies in the blocks too
    bool pin = false, map = false;  // map: weights stay in the packed file and are paged from there
    InputFacts inputs;
    float embedding_scale = 1, logit_scale = 1, cap = 0;
    NormFacts norm;
    std::vector<Rotary> rotaries;
    std::vector<LayerFacts> layers;
    std::string isa;  // "" or "auto": the best this CPU has
};

// Where a tensor lies in the packed file, and its form: see Matrix. `codes` 0 is a vector of n float32.
struct Entry {
    std::string name;
    size_t offset = 0;
    int n = 0, k = 0, codes = 0, scales = 0, offset_log2 = -1, unit_log2 = 0;
    std::vector<int> table;
};

// A packed file: its tensors, and the hashes of the pieces that it consists of from `start` to its end, in order.
struct Piece {
    size_t bytes = 0;
    uint64_t hash = 0;
};
struct Packed {
    std::string path;
    size_t start = 0;
    std::vector<Entry> entries;
    std::vector<Piece> pieces;
};

struct Norm {  // absent where weight is null
    const float *weight = nullptr, *bias = nullptr;
    float eps = 0;
    bool layer = false;
};

struct FeedForward {
    Matrix gate, up, down;  // gate without data: none. Of experts: one under the other
    Activation activation = Activation::kSilu;
    int width = 0;
};

// A column range of what a recurrent mixer makes of its input, and the weight that makes it.
struct Input {
    Matrix w;
    int column = 0;
};

// A layer with its facts, its tensors and its places in a block of KV and in the state of a sequence.
struct Layer : LayerFacts {
    Norm mixer_norm, mixer_post_norm, ff_norm, ff_post_norm;
    Matrix o;
    // attention
    Norm q_norm, k_norm, v_norm;
    Matrix q, k, v, gate;
    const float* sinks = nullptr;
    size_t kv_at = 0, head_bytes = 0;  // kv_at: in a block, or where `in_window` is set in its window block
    bool in_window = false;
    // recurrent: columns [u | z | a | b], u going through the convolution. Delta net: q k v, z, alpha, beta; Mamba: x b c, z, dt;
    // short convolution: x, c, -, b.
    std::vector<Input> inputs;
    Convolution convolution;
    Norm state_norm;
    const float *decay = nullptr, *step_bias = nullptr, *skip = nullptr;
    int z_at = 0, a_at = 0, b_at = 0, columns = 0;
    size_t state_at = 0;  // floats: the convolution's last inputs, then the matrices of the heads
    // feed-forward
    FeedForward dense, expert;  // dense: of a mixture, the shared one
    Matrix router, shared_gate;
    const float *selection_bias = nullptr, *expert_scales = nullptr;
    Norm router_norm, experts_norm, experts_post_norm, shared_norm, shared_post_norm;  // a mixture's own
    // the part of the per-layer embeddings: x + norm(project(gelu(gate(x)) * input))
    Matrix input_gate, input_project;
    Norm input_norm;
    bool attends() const { return mixer == Mixer::kAttention; }
    bool recurs() const { return mixer > Mixer::kAttention; }
    int inner() const { return heads * v_dim; }  // width of what `o` takes
    size_t state_floats() const {
        return recurs() ? size_t(taps - 1) * convolution.channels + size_t(heads) * dim * v_dim : 0;
    }
};

enum class Want : int { kNothing = 0, kArgmax = 1, kLogits = 2, kTop = 3 };
struct Sequence {
    std::vector<int> tokens, table;
    std::vector<int> windows;  // window blocks of the table's blocks from the first one that position `start` sees
    int start = 0, top = 0,
        rows = 1;  // top: how many kTop wants; rows: of the last tokens, how many give what is wanted
    Want want = Want::kNothing;
    int64_t id = 0;            // whose recurrent state goes on
    int load = -1, save = -1;  // checkpoints
};
struct Plan {
    std::vector<Sequence> sequences;
    std::vector<std::pair<int, int>> copies, window_copies;
    int chain = 1;
};

using Top = std::vector<std::pair<float, int>>;  // (logit, token), largest first
// In plan order: chain or `rows` tokens for each sequence that wants its arg-max, the best few for each that wants those.
struct Answer {
    std::vector<std::vector<int>> tokens;
    std::vector<Top> tops;
};

// What stands before the first layer and behind the last.
struct Ends {
    Matrix embedding, head, input_embedding, input_project;
    Norm norm, input_norm;
};

// Recurrent state after `seen` tokens, of all layers.
struct State {
    Pages memory;
    int seen = 0;
    float* floats() const { return reinterpret_cast<float*>(memory.data()); }
};

// Bytes of a block of KV and of a window block, which holds what layers with a window keep of the same positions; the largest
// window of them, 0 where there are none; floats of a sequence's recurrent state.
struct Sizes {
    size_t block = 0, window_block = 0, state_floats = 0;
    int window = 0;
};

struct Step;  // buffers of one pass, in step.cpp
using Lifts = std::vector<std::vector<float>>;

class Model {
  public:
    Model(Config config, const Packed& packed);

    // One pass, or plan.chain of them. `logits` has room for `rows` rows of vocab floats per sequence that wants them, in plan order.
    // Throws PlanError before anything changes.
    Answer run(const Plan& plan, float* logits);
    const Kernels& kernels() const { return *kernels_; }
    const Config& config() const { return config_; }
    int threads() const { return pool_->size(); }
    // Null for a layer with a window where no sequence of this pass sees the block.
    uint8_t* kv(int block, const Layer& l, int head) const {
        const size_t at = l.kv_at + size_t(head) * l.head_bytes;
        if (!l.in_window) return kv_pages_.data() + size_t(block) * sizes_.block + at;
        const int window = window_of_[size_t(block)];
        return window < 0 ? nullptr : window_pages_.data() + size_t(window) * sizes_.window_block + at;
    }
    const std::vector<Layer>& layers() const { return layers_; }
    float* state(int64_t id) const { return states_.at(id).floats(); }
    void release(const std::vector<int64_t>& ids) {
        for (int64_t id : ids) states_.erase(id);
    }
    const Matrix& embedding() const { return ends_.embedding; }
    const Matrix& head() const { return ends_.head; }
    const Norm& norm() const { return ends_.norm; }
    const Ends& ends() const { return ends_; }
    Pool& pool() const { return *pool_; }

    // Blocks and checkpoints as bytes, for those who keep them elsewhere: a block and behind it its window block, where there are
    // such; -1 writes none. PlanError for ids out of range and for what nothing was written to. Bytes that come back must be what
    // was read.
    size_t stored_bytes() const { return sizes_.block + (config_.windows ? sizes_.window_block : 0); }
    size_t state_bytes() const { return sizes_.state_floats * sizeof(float); }
    void read_block(int block, int window, uint8_t* out) const;
    void write_block(int block, int window, const uint8_t* data);
    void discard_blocks(const std::vector<int>& blocks, const std::vector<int>& windows);
    void read_checkpoint(int checkpoint, uint8_t* out) const;
    void write_checkpoint(int checkpoint, int tokens, const uint8_t* data);
    std::vector<std::pair<std::string, double>> profile() const;

  private:
    void check(const Plan& plan) const;
    void check_windows(const Plan& plan) const;
    void check_block(int block) const;
    void check_window(int window) const;
    // The first block of a table whose window block position `start` sees.
    int first_seen(int start) const { return std::max(start - sizes_.window + 1, 0) / kBlock; }
    void check_states(const Plan& plan) const;
    void take_states(const Plan& plan);
    void keep_states(const Plan& plan);
    Config config_;
    const Kernels* kernels_;
    Pages weights_, kv_pages_, window_pages_;
    Lifts lifts_;  // of kernels with activations in bf16
    std::vector<Layer> layers_;
    Ends ends_;
    Sizes sizes_;
    std::unordered_map<int64_t, State> states_;
    std::vector<State> checkpoints_;                   // seen 0: nothing was saved
    mutable std::vector<uint32_t> written_, claimed_;  // a bit per slot of each block; claimed_ is check()'s scratch
    std::vector<uint32_t> window_written_;             // the same of window blocks
    mutable std::vector<int> window_of_,
        block_of_;  // of each block and each window block in the plan checked last; or -1
    std::unique_ptr<Pool> pool_;
    std::shared_ptr<Step> step_;  // shared: its type is only known in step.cpp
};

// Sets w.lift and w.lower, of memory that `lifts` then holds. In lift.cpp.
void lift(Matrix& w, Lifts& lifts);

// Sets the layers' places in blocks, window blocks and states. FormatError for sizes that do not fit the kernels: nothing was read
// or taken before.
Sizes lay_out(const Config& c, std::vector<Layer>& layers);
void load_layers(const Config& c, const Pages& file, const std::vector<Entry>& entries, std::vector<Layer>& layers,
                 Ends& ends, Lifts* lifts);

std::vector<const Kernels*> supported_kernels();        // best first
const Kernels* choose_kernels(const std::string& isa);  // the first whose name is or begins with `isa`

// In packed_file.cpp. Offsets of entries count from the start of the file.
uint64_t hash_of(const uint8_t* data, size_t bytes);
// Writes all of it and lets the disk begin with it at once, so that an fsync has little to wait for. Returns errno, 0 when done.
int write_piece(int descriptor, const uint8_t* data, size_t bytes, size_t at);
Pages read_packed(const Packed& file, int threads, bool map);  // DamagedError when it cannot be read or a hash differs

// In pack.cpp.
Matrix form_of(const Entry& e);                         // without data; FormatError when it has no kernel
void unpack_row(const Matrix& w, int row, float* out);  // one output's weights, exact
// All rows of a matrix, blocks of a GGML type, to its strips. FormatError for a type that is not known.
void pack_strips(const Matrix& form, const std::string& type, const uint8_t* raw, uint8_t* out);
size_t row_bytes(const std::string& type, int k);  // of that type in a GGUF file

}  // namespace shoal
