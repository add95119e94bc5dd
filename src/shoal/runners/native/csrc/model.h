// A loaded model, its KV, and what a step is asked to do.
#pragma once
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels.h"
#include "pool.h"

namespace shoal {

// What is wrong with a plan or a model file; nothing was computed or changed.
struct PlanError : std::runtime_error { using std::runtime_error::runtime_error; };
struct FormatError : std::runtime_error { using std::runtime_error::runtime_error; };
struct DamagedError : FormatError { using FormatError::FormatError; };  // to be packed again

// Zeroed pages of their own, taken when first touched, in 2 MB pages where the system gives them (a quarter more bandwidth on
// Zen 4: its prefetchers stop at page ends). Throws std::bad_alloc.
class Pages {
  public:
    Pages() = default;
    explicit Pages(size_t bytes);
    ~Pages();
    Pages(Pages&& other) noexcept { swap(other); }
    Pages& operator=(Pages&& other) noexcept { swap(other); return *this; }
    uint8_t* data() const { return data_; }
    size_t size() const { return size_; }

  private:
    void swap(Pages& other) { std::swap(data_, other.data_), std::swap(size_, other.size_), std::swap(mapped_, other.mapped_), std::swap(base_, other.base_); }
    uint8_t* data_ = nullptr;
    void* base_ = nullptr;
    size_t size_ = 0, mapped_ = 0;
};

struct Config {
    int layers = 0, embd = 0, heads = 0, kv_heads = 0, dim = 0, ff = 0, vocab = 0, rope_dim = 0, context = 0, blocks = 0, threads = 0, kv_bits = 16;
    bool pin = false;
    float eps = 0;
    std::vector<float> frequencies;  // [rope_dim / 2], radians a position
    std::string isa;                 // "" or "auto": the best this CPU has
};

// Where a tensor lies in the packed file, and its form: see Matrix. `codes` 0 is a vector of n float32.
struct Entry {
    std::string name;
    size_t offset = 0;
    int n = 0, k = 0, count = 1, codes = 0, scales = 0, offset_log2 = -1, unit_log2 = 0;
    std::vector<int> table;
};

// A packed file: its tensors, and the hashes of the pieces that it consists of from `start` to its end, in order.
struct Piece { size_t bytes = 0; uint64_t hash = 0; };
struct Packed {
    std::string path;
    size_t start = 0;
    std::vector<Entry> entries;
    std::vector<Piece> pieces;
};

struct Layer {
    const float *attn_norm, *ffn_norm, *q_norm, *k_norm;  // the last two may be null
    Matrix q, k, v, o, gate, up, down;
};

enum class Want : int { kNothing = 0, kArgmax = 1, kLogits = 2, kTop = 3 };
struct Sequence {
    std::vector<int> tokens, table;
    int start = 0, top = 0;  // top: how many kTop wants
    Want want = Want::kNothing;
};
struct Plan {
    std::vector<Sequence> sequences;
    std::vector<std::pair<int, int>> copies;
    int chain = 1;
};

using Top = std::vector<std::pair<float, int>>;  // (logit, token), largest first
// In plan order: chain tokens for each sequence that wants its arg-max, the best few for each that wants those.
struct Answer {
    std::vector<std::vector<int>> tokens;
    std::vector<Top> tops;
};

struct Step;  // buffers of one pass, in step.cpp

class Model {
  public:
    Model(Config config, const Packed& packed);

    // One pass, or plan.chain of them. `logits` has room for a row of vocab floats per sequence that wants them. Returns
    // chain tokens for each sequence that wants its arg-max, in plan order. Throws PlanError before anything changes.
    Answer run(const Plan& plan, float* logits);
    const Kernels& kernels() const { return *kernels_; }
    const Config& config() const { return config_; }
    int threads() const { return pool_->size(); }
    uint8_t* kv(int block, int layer, int head) const {
        return kv_pages_.data() + ((size_t(block) * config_.layers + layer) * config_.kv_heads + head) * kv_head_bytes(config_.dim, config_.kv_bits);
    }
    static size_t block_bytes(const Config& c) { return size_t(c.layers) * c.kv_heads * kv_head_bytes(c.dim, c.kv_bits); }
    const Layer& layer(int i) const { return layers_[size_t(i)]; }
    const Matrix& embedding() const { return embedding_; }
    const Matrix& head() const { return head_; }
    const float* output_norm() const { return output_norm_; }
    bool dense() const { return dense_; }  // some weight is f16 or bf16
    Pool& pool() const { return *pool_; }
    std::vector<std::pair<std::string, double>> profile() const;

  private:
    void check(const Plan& plan) const;
    Config config_;
    const Kernels* kernels_;
    Pages weights_, kv_pages_;
    std::vector<Layer> layers_;
    Matrix embedding_, head_;
    const float* output_norm_ = nullptr;
    bool dense_ = false;
    mutable std::vector<uint32_t> written_, claimed_;  // a bit per slot of each block; claimed_ is check()'s scratch
    std::unique_ptr<Pool> pool_;
    std::shared_ptr<Step> step_;  // shared: its type is only known in step.cpp
};

std::vector<const Kernels*> supported_kernels();              // best first
const Kernels* choose_kernels(const std::string& isa);        // the first whose name is or begins with `isa`

// In pack.cpp. Offsets of entries count from the start of the file.
Matrix form_of(const Entry& e);                         // without data; FormatError when it has no kernel
Pages read_packed(const Packed& file, int threads);     // DamagedError when it cannot be read or a hash differs
uint64_t hash_of(const uint8_t* data, size_t bytes);
void unpack_row(const Matrix& w, int row, float* out);  // one output's weights, exact
// Strips first .. first + count - 1 of one matrix of this form, from rows of blocks of a GGML type to `out`; its row i is row
// order[i] of `raw`, or i without an order. FormatError for a type that is not known.
void pack_strips(const Matrix& form, const std::string& type, const uint8_t* raw, const int64_t* order, int first, int count, uint8_t* out);
size_t row_bytes(const std::string& type, int k);  // of that type in a GGUF file

}  // namespace shoal
