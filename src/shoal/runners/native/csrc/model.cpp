// A model's memory: pages, weights, KV, recurrent state of sequences and checkpoints. And the check of plans.
#include "model.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
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

Pages::Pages(int descriptor, size_t bytes) : size_(bytes), mapped_(bytes) {
    base_ = mmap(nullptr, mapped_, PROT_READ, MAP_SHARED, descriptor, 0);
    if (base_ == MAP_FAILED) {
        base_ = nullptr;
        throw std::bad_alloc();
    }
    data_ = static_cast<uint8_t*>(base_);
}

void Pages::discard(size_t at, size_t bytes) const {
    const size_t page = 4096, first = (at + page - 1) / page * page, end = (at + bytes) / page * page;
#ifdef __linux__
    if (base_ && end > first) madvise(data_ + first, end - first, MADV_DONTNEED);
#else  // there it says that the contents may go, not that they are zero
    if (base_ && end > first) madvise(data_ + first, end - first, MADV_FREE);
#endif
}

Pages::~Pages() {
    if (base_) munmap(base_, mapped_);
}

Model::Model(Config config, const Packed& packed) : config_(std::move(config)) {
    const Config& c = config_;
    sizes_ = lay_out(c, layers_);
    if (c.blocks < 1 || c.threads < 1 || c.checkpoints < 0 || c.windows < 0 || (c.windows > 0 && !sizes_.window))
        throw FormatError("a size of the runner is out of range");
    kernels_ = choose_kernels(c.isa);
    weights_ = read_packed(packed, c.threads, c.map);
    load_layers(c, weights_, packed.entries, layers_, ends_, kernels_->inputs == Inputs::kBf16 ? &lifts_ : nullptr);
    kv_pages_ = Pages(sizes_.block * size_t(c.blocks));
    window_pages_ = Pages(sizes_.window_block * size_t(c.windows));
    written_.resize(size_t(c.blocks)), claimed_.resize(size_t(c.blocks));
    window_of_.resize(size_t(c.blocks)), window_written_.resize(size_t(c.windows)), block_of_.resize(size_t(c.windows));
    checkpoints_.resize(size_t(c.checkpoints));
    pool_ = std::make_unique<Pool>(c.threads, c.pin);
}

// -- blocks and states as bytes ---------------------------------------------------------------------------------------

void Model::check_block(int block) const {
    if (block < 0 || block >= config_.blocks)
        throw PlanError("block " + std::to_string(block) + " of " + std::to_string(config_.blocks));
}

void Model::check_window(int window) const {
    if (window < 0 || window >= config_.windows)
        throw PlanError("window block " + std::to_string(window) + " of " + std::to_string(config_.windows));
}

void Model::read_block(int block, int window, uint8_t* out) const {
    check_block(block);
    if (config_.windows) check_window(window);
    if (written_[size_t(block)] != ~uint32_t(0) || (config_.windows && window_written_[size_t(window)] != ~uint32_t(0)))
        throw PlanError("block " + std::to_string(block) + " has slots that nothing was written to");
    memcpy(out, kv_pages_.data() + size_t(block) * sizes_.block, sizes_.block);
    if (config_.windows)
        memcpy(out + sizes_.block, window_pages_.data() + size_t(window) * sizes_.window_block, sizes_.window_block);
}

void Model::write_block(int block, int window, const uint8_t* data) {
    check_block(block);
    if (window != -1) check_window(window);
    memcpy(kv_pages_.data() + size_t(block) * sizes_.block, data, sizes_.block);
    written_[size_t(block)] = ~uint32_t(0);
    if (window == -1) return;
    memcpy(window_pages_.data() + size_t(window) * sizes_.window_block, data + sizes_.block, sizes_.window_block);
    window_written_[size_t(window)] = ~uint32_t(0);
}

void Model::discard_blocks(const std::vector<int>& blocks, const std::vector<int>& windows) {
    for (int block : blocks) check_block(block);
    for (int window : windows) check_window(window);
    for (int block : blocks) {
        kv_pages_.discard(size_t(block) * sizes_.block, sizes_.block);
        written_[size_t(block)] = 0;
    }
    for (int window : windows) {
        window_pages_.discard(size_t(window) * sizes_.window_block, sizes_.window_block);
        window_written_[size_t(window)] = 0;
    }
}

void Model::read_checkpoint(int checkpoint, uint8_t* out) const {
    if (checkpoint < 0 || checkpoint >= config_.checkpoints || !checkpoints_[size_t(checkpoint)].seen)
        throw PlanError("checkpoint " + std::to_string(checkpoint) + ", to which nothing was saved");
    memcpy(out, checkpoints_[size_t(checkpoint)].memory.data(), state_bytes());
}

void Model::write_checkpoint(int checkpoint, int tokens, const uint8_t* data) {
    if (checkpoint < 0 || checkpoint >= config_.checkpoints || tokens < 1)
        throw PlanError("checkpoint " + std::to_string(checkpoint) + " of " + std::to_string(config_.checkpoints));
    State& to = checkpoints_[size_t(checkpoint)];
    if (!to.memory.size()) to.memory = Pages(state_bytes());
    memcpy(to.memory.data(), data, state_bytes());
    to.seen = tokens;
}

// -- recurrent state --------------------------------------------------------------------------------------------------

void Model::check_states(const Plan& plan) const {
    const auto fail = [](const std::string& what) { throw PlanError(what); };
    std::vector<int64_t> ids;
    for (const Sequence& seq : plan.sequences) {
        const std::string who = "sequence " + std::to_string(seq.id) + ": ";
        for (int checkpoint : {seq.load, seq.save})
            if (checkpoint < -1 || checkpoint >= config_.checkpoints)
                fail(who + "checkpoint " + std::to_string(checkpoint) + " of " + std::to_string(config_.checkpoints));
        if (seq.save >= 0 && seq.want != Want::kNothing) fail(who + "a chunk that wants output keeps no state");
        const auto own = states_.find(seq.id);
        const int seen = seq.load >= 0          ? checkpoints_[size_t(seq.load)].seen
                         : own == states_.end() ? 0
                                                : own->second.seen;
        if (seq.start > 0 && seen != seq.start)
            fail(who + "it goes on at " + std::to_string(seq.start) +
                 " without its recurrent state, which is that of " + std::to_string(seen) + " tokens");
        ids.push_back(seq.id);
    }
    std::sort(ids.begin(), ids.end());
    if (std::adjacent_find(ids.begin(), ids.end()) != ids.end()) fail("a sequence is there twice");
}

// Loads come before saves: checkpoints are read here, and written when the pass is done.
void Model::take_states(const Plan& plan) {
    const size_t bytes = state_bytes();
    for (const Sequence& seq : plan.sequences) {
        State& state = states_[seq.id];
        if (!state.memory.size()) state.memory = Pages(bytes);
        if (seq.load >= 0 && seq.start > 0)
            memcpy(state.memory.data(), checkpoints_[size_t(seq.load)].memory.data(), bytes);
        else if (seq.start == 0)
            memset(state.memory.data(), 0, bytes);
        state.seen = -1;  // until the pass is done
    }
}

void Model::keep_states(const Plan& plan) {
    const size_t bytes = state_bytes();
    for (const Sequence& seq : plan.sequences) {
        State& state = states_[seq.id];
        state.seen = seq.start + int(seq.tokens.size()) + plan.chain - 1;
        if (seq.save < 0) continue;
        State& to = checkpoints_[size_t(seq.save)];
        if (!to.memory.size()) to.memory = Pages(bytes);
        memcpy(to.memory.data(), state.memory.data(), bytes);
        to.seen = state.seen;
    }
}

// Everything that the kernels take on trust. A slot counts as written once any pass has written it or a copy brought it.
void Model::check(const Plan& plan) const {
    const auto fail = [](const std::string& what) { throw PlanError(what); };
    std::vector<uint32_t> after;  // as the copies will leave it
    if (!plan.copies.empty()) after = written_;
    const std::vector<uint32_t>& written = plan.copies.empty() ? written_ : after;
    for (auto [from, to] : plan.copies) {
        if (from < 0 || from >= config_.blocks || to < 0 || to >= config_.blocks)
            fail("copy of block " + std::to_string(from) + " to " + std::to_string(to) + ": there are " +
                 std::to_string(config_.blocks));
        after[size_t(to)] = after[size_t(from)];
    }
    if (plan.chain < 1 || plan.chain > 64) fail("chain of " + std::to_string(plan.chain));
    std::fill(claimed_.begin(), claimed_.end(), 0);
    for (size_t s = 0; s < plan.sequences.size(); s++) {
        const Sequence& seq = plan.sequences[s];
        const std::string who = "sequence at place " + std::to_string(s) + ": ";
        const int64_t fed = int64_t(seq.tokens.size()) + plan.chain - 1, end = seq.start + fed;
        if (seq.tokens.empty()) fail(who + "no tokens");
        if (seq.rows < 1 || size_t(seq.rows) > std::max<size_t>(seq.tokens.size(), 1))
            fail(who + "the last " + std::to_string(seq.rows) + " rows");
        if (seq.rows > 1 && (plan.chain > 1 || seq.want == Want::kTop))
            fail(who + "several rows want their arg-max or all logits, unchained");
        if (seq.want == Want::kTop && (seq.top < 1 || seq.top > config_.vocab))
            fail(who + "the best " + std::to_string(seq.top) + " tokens");
        if (plan.chain > 1 && (seq.tokens.size() != 1 || seq.want != Want::kArgmax))
            fail(who + "a chained step feeds one token and wants the arg-max");
        if (seq.start < 0 || end > config_.context)
            fail(who + "position " + std::to_string(end - 1) + " of " + std::to_string(config_.context));
        if ((end + kBlock - 1) / kBlock > int64_t(seq.table.size()))
            fail(who + "its block table ends before position " + std::to_string(end - 1));
        for (int token : seq.tokens)
            if (token < 0 || token >= config_.vocab)
                fail(who + "token " + std::to_string(token) + " of " + std::to_string(config_.vocab));
        const int used = int((end + kBlock - 1) / kBlock);
        for (int b = 0; b < used; b++) {
            const int block = seq.table[size_t(b)];
            if (block < 0 || block >= config_.blocks)
                fail(who + "block " + std::to_string(block) + " of " + std::to_string(config_.blocks));
            // Slots [0, from) of this block are read, [from, to) written.
            const int64_t first = int64_t(b) * kBlock;
            const int from = int(std::min<int64_t>(std::max<int64_t>(seq.start - first, 0), kBlock)),
                      to = int(std::min<int64_t>(end - first, kBlock));
            const uint32_t reads = uint32_t((uint64_t(1) << from) - 1),
                           writes = uint32_t((uint64_t(1) << to) - 1) & ~reads;
            if (reads & ~written[size_t(block)])
                fail(who + "it reads slots of block " + std::to_string(block) + " that nothing was written to");
            if (writes & claimed_[size_t(block)])
                fail(who + "a slot of block " + std::to_string(block) + " would be written twice");
            claimed_[size_t(block)] |= writes;
        }
    }
    if (config_.windows || !plan.window_copies.empty()) check_windows(plan);
    if (sizes_.state_floats) check_states(plan);
}

// Where the window blocks of this pass lie goes to `window_of_`. What lies before the first one that a sequence sees is not read.
void Model::check_windows(const Plan& plan) const {
    const auto fail = [](const std::string& what) { throw PlanError(what); };
    std::vector<uint32_t> after;  // as the copies will leave it
    if (!plan.window_copies.empty()) after = window_written_;
    for (auto [from, to] : plan.window_copies) {
        check_window(from), check_window(to);
        after[size_t(to)] = after[size_t(from)];
    }
    const auto& written = plan.window_copies.empty() ? window_written_ : after;
    std::fill(window_of_.begin(), window_of_.end(), -1);
    std::fill(block_of_.begin(), block_of_.end(), -1);
    for (size_t s = 0; s < plan.sequences.size(); s++) {
        const Sequence& seq = plan.sequences[s];
        const std::string who = "sequence at place " + std::to_string(s) + ": ";
        const int end = seq.start + int(seq.tokens.size()) + plan.chain - 1, first = first_seen(seq.start);
        for (int b = first; b * kBlock < end; b++) {
            if (size_t(b - first) >= seq.windows.size())
                fail(who + "its window blocks end before position " + std::to_string(end - 1));
            const int block = seq.table[size_t(b)], window = seq.windows[size_t(b - first)];
            check_window(window);
            int &place = window_of_[size_t(block)], &owner = block_of_[size_t(window)];
            if ((place >= 0 && place != window) || (owner >= 0 && owner != block))
                fail(who + "window block " + std::to_string(window) + " is not that of block " + std::to_string(block) +
                     " alone");
            place = window, owner = block;
            const int from = std::min(std::max(seq.start - b * kBlock, 0), kBlock);
            if (uint32_t((uint64_t(1) << from) - 1) & ~written[size_t(window)])
                fail(who + "it reads slots of window block " + std::to_string(window) + " that nothing was written to");
        }
    }
}

}  // namespace shoal
