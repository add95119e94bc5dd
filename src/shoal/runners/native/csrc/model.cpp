// Loading: pages, the packed file's tensors checked against the configuration, the choice of kernels. And the check of plans.
#include "model.h"

#include <sys/mman.h>

#include <cstdio>
#include <cstring>
#include <map>
#include <new>

namespace shoal {

Pages::Pages(size_t bytes) : size_(bytes) {
    const size_t huge = size_t(2) << 20;
    mapped_ = bytes + huge;
    base_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base_ == MAP_FAILED) {
        base_ = nullptr;
        throw std::bad_alloc();
    }
    data_ = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(base_) + huge - 1) & ~(huge - 1));
#ifdef MADV_HUGEPAGE
    if (bytes >= huge) madvise(data_, bytes & ~(huge - 1), MADV_HUGEPAGE);
#endif
}

Pages::~Pages() {
    if (base_) munmap(base_, mapped_);
}

namespace {

class Loader {
  public:
    Loader(const Pages& pages, const std::vector<Entry>& entries) : pages_(pages) {
        for (const auto& e : entries) entries_.emplace(e.name, e);
    }
    const float* vector(const std::string& name, int n, bool optional = false) const {
        const Entry* e = find(name, optional);
        if (!e) return nullptr;
        if (e->codes != 0 || e->n != n) fail(name, "is not a vector of " + std::to_string(n));
        return reinterpret_cast<const float*>(range(*e, size_t(n) * 4));
    }
    Matrix matrix(const std::string& name, int n, int k) const {
        const Entry& e = *find(name, false);
        Matrix w = form_of(e);
        if (e.n != n || e.k != k) fail(name, "is " + std::to_string(e.n) + " x " + std::to_string(e.k) + ", not " + std::to_string(n) + " x " + std::to_string(k));
        w.data = range(e, w.strip_bytes * size_t(w.strips) * size_t(w.count));
        w.bias = vector(name.substr(0, name.size() - 6) + "bias", w.strips * kStrip, true);
        return w;
    }
    bool has(const std::string& name) const { return entries_.count(name) > 0; }

  private:
    [[noreturn]] static void fail(const std::string& name, const std::string& what) { throw FormatError("tensor " + name + " " + what); }
    const Entry* find(const std::string& name, bool optional) const {
        auto at = entries_.find(name);
        if (at != entries_.end()) return &at->second;
        if (!optional) fail(name, "is missing");
        return nullptr;
    }
    const uint8_t* range(const Entry& e, size_t bytes) const {
        if (e.offset % 64 || e.offset > pages_.size() || bytes > pages_.size() - e.offset) fail(e.name, "lies outside the file");
        return pages_.data() + e.offset;
    }
    const Pages& pages_;
    std::map<std::string, Entry> entries_;
};

void check_config(const Config& c) {
    const bool positive = c.layers > 0 && c.embd > 0 && c.heads > 0 && c.kv_heads > 0 && c.dim > 0 && c.ff > 0 && c.vocab > 0 &&
                          c.context > 0 && c.blocks > 0 && c.threads > 0 && c.rope_dim > 0;
    if (!positive || c.layers > 4096 || c.heads > 1024 || c.dim > 256 || c.embd > 1 << 20 || c.ff > 1 << 20 || c.vocab > 1 << 24)
        throw FormatError("a size of the model is out of range");
    if (c.heads % c.kv_heads || c.dim % kGroup || c.embd % kGroup || c.ff % kGroup || c.rope_dim % 2 || c.rope_dim > c.dim || (c.kv_bits != 16 && c.kv_bits != 8))
        throw FormatError("the sizes of the model do not fit the kernels");
    if (c.frequencies.size() != size_t(c.rope_dim / 2)) throw FormatError("wrong number of rotary frequencies");
}

}  // namespace

Model::Model(Config config, const Packed& packed) : config_(std::move(config)) {
    const Config& c = config_;
    check_config(c);
    kernels_ = choose_kernels(c.isa);
    weights_ = read_packed(packed, c.threads);
    const Loader load(weights_, packed.entries);
    const int q_width = c.heads * c.dim, kv_width = c.kv_heads * c.dim;
    for (int i = 0; i < c.layers; i++) {
        const std::string at = "blk." + std::to_string(i) + ".";
        Layer l;
        l.attn_norm = load.vector(at + "attn_norm.weight", c.embd);
        l.ffn_norm = load.vector(at + "ffn_norm.weight", c.embd);
        l.q_norm = load.vector(at + "attn_q_norm.weight", c.dim, true);
        l.k_norm = load.vector(at + "attn_k_norm.weight", c.dim, true);
        l.q = load.matrix(at + "attn_q.weight", q_width, c.embd);
        l.k = load.matrix(at + "attn_k.weight", kv_width, c.embd);
        l.v = load.matrix(at + "attn_v.weight", kv_width, c.embd);
        l.o = load.matrix(at + "attn_output.weight", c.embd, q_width);
        l.gate = load.matrix(at + "ffn_gate.weight", c.ff, c.embd);
        l.up = load.matrix(at + "ffn_up.weight", c.ff, c.embd);
        l.down = load.matrix(at + "ffn_down.weight", c.embd, c.ff);
        for (const Matrix* w : {&l.q, &l.k, &l.v, &l.o, &l.gate, &l.up, &l.down}) dense_ |= is_dense(w->codes);
        layers_.push_back(l);
    }
    output_norm_ = load.vector("output_norm.weight", c.embd);
    embedding_ = load.matrix("token_embd.weight", c.vocab, c.embd);
    head_ = load.has("output.weight") ? load.matrix("output.weight", c.vocab, c.embd) : embedding_;
    dense_ |= is_dense(head_.codes);
    kv_pages_ = Pages(block_bytes(c) * size_t(c.blocks));
    written_.resize(size_t(c.blocks)), claimed_.resize(size_t(c.blocks));
    pool_ = std::make_unique<Pool>(c.threads, c.pin);
}

// Everything that the kernels take on trust. A slot counts as written once any pass has written it or a copy brought it.
void Model::check(const Plan& plan) const {
    const auto fail = [](const std::string& what) { throw PlanError(what); };
    std::vector<uint32_t> after;  // as the copies will leave it
    if (!plan.copies.empty()) after = written_;
    const std::vector<uint32_t>& written = plan.copies.empty() ? written_ : after;
    for (auto [from, to] : plan.copies) {
        if (from < 0 || from >= config_.blocks || to < 0 || to >= config_.blocks)
            fail("copy of block " + std::to_string(from) + " to " + std::to_string(to) + ": there are " + std::to_string(config_.blocks));
        after[size_t(to)] = after[size_t(from)];
    }
    if (plan.chain < 1 || plan.chain > 64) fail("chain of " + std::to_string(plan.chain));
    std::fill(claimed_.begin(), claimed_.end(), 0);
    for (size_t s = 0; s < plan.sequences.size(); s++) {
        const Sequence& seq = plan.sequences[s];
        const std::string who = "sequence at place " + std::to_string(s) + ": ";
        const int64_t fed = int64_t(seq.tokens.size()) + plan.chain - 1, end = seq.start + fed;
        if (seq.tokens.empty()) fail(who + "no tokens");
        if (seq.want == Want::kTop && (seq.top < 1 || seq.top > config_.vocab)) fail(who + "the best " + std::to_string(seq.top) + " tokens");
        if (plan.chain > 1 && (seq.tokens.size() != 1 || seq.want != Want::kArgmax)) fail(who + "a chained step feeds one token and wants the arg-max");
        if (seq.start < 0 || end > config_.context) fail(who + "position " + std::to_string(end - 1) + " of " + std::to_string(config_.context));
        if ((end + kBlock - 1) / kBlock > int64_t(seq.table.size())) fail(who + "its block table ends before position " + std::to_string(end - 1));
        for (int token : seq.tokens)
            if (token < 0 || token >= config_.vocab) fail(who + "token " + std::to_string(token) + " of " + std::to_string(config_.vocab));
        const int used = int((end + kBlock - 1) / kBlock);
        for (int b = 0; b < used; b++) {
            const int block = seq.table[size_t(b)];
            if (block < 0 || block >= config_.blocks) fail(who + "block " + std::to_string(block) + " of " + std::to_string(config_.blocks));
            // Slots [0, from) of this block are read, [from, to) written.
            const int64_t first = int64_t(b) * kBlock;
            const int from = int(std::min<int64_t>(std::max<int64_t>(seq.start - first, 0), kBlock)), to = int(std::min<int64_t>(end - first, kBlock));
            const uint32_t reads = uint32_t((uint64_t(1) << from) - 1), writes = uint32_t((uint64_t(1) << to) - 1) & ~reads;
            if (reads & ~written[size_t(block)]) fail(who + "it reads slots of block " + std::to_string(block) + " that nothing was written to");
            if (writes & claimed_[size_t(block)]) fail(who + "a slot of block " + std::to_string(block) + " would be written twice");
            claimed_[size_t(block)] |= writes;
        }
    }
}

}  // namespace shoal
