// The layers of a model: sizes checked against what the kernels can do, then the packed file's tensors against the sizes.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "model.h"

namespace shoal {

namespace {

constexpr int kMostHeads = 4096, kMostDim = 512, kMostWidth = 1 << 20, kMostExperts = 1 << 14;

[[noreturn]] void fail(const std::string& what) { throw FormatError(what); }

int padded(int n) { return (n + kStrip - 1) / kStrip * kStrip; }

class Loader {
  public:
    Loader(const Pages& pages, const std::vector<Entry>& entries, Lifts* lifts) : pages_(pages), lifts_(lifts) {
        for (const auto& e : entries) entries_.emplace(e.name, e);
    }
    bool has(const std::string& name) const { return entries_.count(name) > 0; }
    const float* vector(const std::string& name, int n, bool optional = false) const {
        const Entry* e = find(name, optional);
        if (!e) return nullptr;
        if (e->codes != 0 || e->n != n) fail("tensor " + name + " is not a vector of " + std::to_string(n));
        return reinterpret_cast<const float*>(range(*e, size_t(n) * 4));
    }
    // `name`.weight with `name`.bias where there is one. n counts the outputs of all experts.
    Matrix matrix(const std::string& name, int n, int k) const {
        return matrix(name + ".weight", name + ".bias", n, k);
    }
    Matrix matrix(const std::string& name, const std::string& bias, int n, int k) const {
        const Entry& e = *find(name, false);
        if (e.n != n || e.k != k)
            fail("tensor " + name + " is " + std::to_string(e.n) + " x " + std::to_string(e.k) + ", not " +
                 std::to_string(n) + " x " + std::to_string(k));
        Matrix w = form_of(e);
        w.data = range(e, w.strip_bytes * size_t(w.strips));
        w.bias = vector(bias, w.strips * kStrip, true);
        if (lifts_ && !is_dense(w.codes)) lift(w, *lifts_);
        return w;
    }
    Norm norm(const std::string& at, const std::string& name, const std::map<std::string, NormFacts>& facts,
              int n) const {
        const auto found = facts.find(name);
        if (found == facts.end()) return {};
        return norm(at + name, found->second, n);
    }
    Norm norm(const std::string& name, const NormFacts& facts, int n) const {
        return {vector(name + ".weight", n), vector(name + ".bias", n, true), facts.eps, facts.layer};
    }

  private:
    const Entry* find(const std::string& name, bool optional) const {
        auto at = entries_.find(name);
        if (at != entries_.end()) return &at->second;
        if (!optional) fail("tensor " + name + " is missing");
        return nullptr;
    }
    const uint8_t* range(const Entry& e, size_t bytes) const {
        if (e.offset % 64 || e.offset > pages_.size() || bytes > pages_.size() - e.offset)
            fail("tensor " + e.name + " lies outside the file");
        return pages_.data() + e.offset;
    }
    const Pages& pages_;
    Lifts* lifts_;
    std::map<std::string, Entry> entries_;
};

void check_norms(const std::map<std::string, NormFacts>& norms) {
    for (const auto& [name, norm] : norms)
        if (!(norm.eps >= 0 && norm.eps < 1)) fail("norm " + name + " is out of range");
}

void check_mixer(const Config& c, const LayerFacts& l) {
    if (l.heads < 1 || l.heads > kMostHeads || l.kv_heads < 1 || l.kv_heads > l.heads || l.v_dim < 1 || l.dim < 0)
        fail("a mixer's sizes are out of range");
    if (l.mixer == Mixer::kConvolution) {
        if (l.heads != 1 || l.dim || l.v_dim != c.embd) fail("a mixer's sizes do not fit the kernels");
    } else if (l.dim < kGroup || l.dim > kMostDim || l.v_dim > kMostDim || l.dim % kGroup || l.v_dim % kGroup ||
               l.heads * l.v_dim > kMostWidth || l.heads * l.dim > kMostWidth) {
        fail("the sizes of a mixer's heads do not fit the kernels");
    }
    if (l.mixer == Mixer::kAttention) {
        if (l.heads % l.kv_heads || l.window < 0 || l.rotary < -1 || l.rotary >= int(c.rotaries.size()) ||
            !std::isfinite(l.scale) || !(l.cap >= 0) || l.query_length < 1)
            fail("attention's settings are out of range");
        if (l.rotary >= 0 && c.rotaries[size_t(l.rotary)].frequencies.size() * 2 > size_t(l.dim))
            fail("more rotary frequencies than a head has pairs");
        if (l.keys_are_values && l.dim != l.v_dim) fail("the sizes of a mixer's heads do not fit the kernels");
        return;
    }
    if (l.taps < 2 || l.taps > kMostTaps || l.norm_groups < 1 || l.heads * l.v_dim % l.norm_groups ||
        l.heads * l.v_dim / l.norm_groups % 16)
        fail("a recurrent mixer's settings are out of range");
    if (l.mixer == Mixer::kConvolution) return;
    if (l.key_of.size() != size_t(l.heads)) fail("a recurrent mixer has no key for some head");
    for (int key : l.key_of)
        if (key < 0 || key >= l.kv_heads)
            fail("a recurrent mixer's key " + std::to_string(key) + " of " + std::to_string(l.kv_heads));
}

void check_feed(const LayerFacts& l) {
    const auto width = [](int n) { return n > 0 && n <= kMostWidth && n % kGroup == 0; };
    if (!width(l.ff)) fail("feed-forward size " + std::to_string(l.ff) + " does not fit the kernels");
    if (l.feed == Feed::kDense) return;
    if (l.experts < 1 || l.experts > kMostExperts || l.used < 1 || l.used > l.experts || (l.shared && !width(l.shared)))
        fail("a mixture's sizes are out of range");
    if (int64_t(l.experts) * l.ff > INT32_MAX / 2) fail("a mixture's sizes are out of range");
    if (l.groups < 1 || l.experts % l.groups || l.groups_used < 1 || l.groups_used > l.groups ||
        l.used > l.experts / l.groups * l.groups_used)
        fail("a mixture's groups are out of range");
}

void load_feed(const Loader& load, const std::string& at, FeedForward& f, Activation activation, int width, int experts,
               int embd) {
    f.activation = activation, f.width = width;
    if (load.has(at + "gate.weight")) f.gate = load.matrix(at + "gate", experts * width, embd);
    if (activation == Activation::kClipped && !f.gate.data) fail("tensor " + at + "gate.weight is missing");
    f.up = load.matrix(at + "up", experts * width, embd);
    f.down = load.matrix(at + "down", experts * embd, width);
}

void load_attention(const Loader& load, const std::string& at, Layer& l, int embd) {
    const int keys = l.norm_over_heads ? l.kv_heads * l.dim : l.dim,
              queries = l.norm_over_heads ? l.heads * l.dim : l.dim;
    l.q = load.matrix(at + "q", l.heads * l.dim, embd);
    if (l.kv_layer < 0) {
        l.k = load.matrix(at + "k", l.kv_heads * l.dim, embd);
        l.v = l.keys_are_values ? l.k : load.matrix(at + "v", l.kv_heads * l.v_dim, embd);
    }
    if (load.has(at + "gate.weight")) l.gate = load.matrix(at + "gate", l.inner(), embd);
    l.q_norm = load.norm(at, "q_norm", l.norms, queries), l.k_norm = load.norm(at, "k_norm", l.norms, keys);
    l.v_norm = load.norm(at, "v_norm", l.norms, l.v_dim);
    l.sinks = load.vector(at + "sinks", l.heads, true);
}

void load_recurrent(const Loader& load, const std::string& at, Layer& l, int embd) {
    int column = 0;
    const auto take = [&](const char* name, int n) {
        l.inputs.push_back({load.matrix(at + name, n, embd), column});
        column += padded(n);
    };
    const int keys = l.kv_heads * l.dim, values = l.inner();
    if (l.mixer == Mixer::kDelta) take("q", keys), take("k", keys), take("v", values);
    if (l.mixer == Mixer::kMamba) take("x", values), take("b", keys), take("c", keys);
    if (l.mixer == Mixer::kConvolution) take("x", values);
    l.convolution = {load.vector(at + "conv", column * l.taps), load.vector(at + "conv_bias", column, true), column,
                     l.taps, l.mixer != Mixer::kConvolution};
    l.z_at = column;
    take(l.mixer == Mixer::kConvolution ? "c" : "z", values);
    l.a_at = column;
    if (l.mixer == Mixer::kDelta) take("alpha", l.heads);
    if (l.mixer == Mixer::kMamba) take("dt", l.heads);
    l.b_at = column;
    if (l.mixer == Mixer::kDelta) take("beta", l.heads);
    if (l.mixer == Mixer::kConvolution) take("b", values);
    l.columns = column;
    if (l.mixer == Mixer::kConvolution) return;
    l.decay = load.vector(at + "decay", l.heads), l.step_bias = load.vector(at + "dt_bias", l.heads);
    if (l.mixer == Mixer::kMamba) l.skip = load.vector(at + "skip", l.heads);
    l.state_norm = load.norm(at, "norm", l.norms, l.mixer == Mixer::kDelta ? l.v_dim : values);
}

// Whether a layer that keeps KV and all who read it have a window.
bool seen_by_windows(const Config& c, size_t layer) {
    bool all = c.layers[layer].window > 0;
    for (const LayerFacts& l : c.layers)
        if (l.mixer == Mixer::kAttention && l.kv_layer == int(layer)) all &= l.window > 0;
    return all;
}

}  // namespace

Sizes lay_out(const Config& c, std::vector<Layer>& layers) {
    if (c.embd < kGroup || c.embd > kMostWidth || c.embd % kGroup || c.vocab < 1 || c.vocab > 1 << 24 ||
        c.context < 1 || c.layers.empty() || c.layers.size() > 4096)
        fail("a size of the model is out of range");
    if (c.kv_bits != 16 && c.kv_bits != 8) fail("the sizes of the model do not fit the kernels");
    if (c.inputs.size < 0 || c.inputs.size % kGroup || int64_t(c.inputs.size) * int64_t(c.layers.size()) > kMostWidth)
        fail("the size of per-layer embeddings is out of range");
    for (const Rotary& rotary : c.rotaries)
        if (!std::isfinite(rotary.factor)) fail("a rotary factor is not finite");
    Sizes sizes;
    layers.clear();
    for (const LayerFacts& facts : c.layers) {
        Layer l{};
        static_cast<LayerFacts&>(l) = facts;
        check_norms(l.norms);
        if (l.mixer != Mixer::kNone) check_mixer(c, l);
        if (l.feed != Feed::kNone) check_feed(l);
        if (l.takes_input && !c.inputs.size) fail("a layer takes an input that the model does not have");
        if (l.recurs()) {
            l.state_at = sizes.state_floats;
            l.convolution.channels = l.mixer == Mixer::kConvolution ? l.v_dim : l.inner() + l.kv_heads * l.dim * 2;
            sizes.state_floats += size_t(l.taps - 1) * l.convolution.channels + size_t(l.heads) * l.dim * l.v_dim;
        }
        if (l.attends() && l.kv_layer >= 0) {
            const Layer* of = size_t(l.kv_layer) < layers.size() ? &layers[size_t(l.kv_layer)] : nullptr;
            if (!of || !of->attends() || of->kv_layer >= 0 || of->kv_heads != l.kv_heads || of->dim != l.dim ||
                of->v_dim != l.v_dim)
                fail("a layer reads KV that is not there");
            l.kv_at = of->kv_at, l.head_bytes = of->head_bytes, l.in_window = of->in_window;
        } else if (l.attends()) {
            l.in_window = c.windows && seen_by_windows(c, layers.size());
            size_t& bytes = l.in_window ? sizes.window_block : sizes.block;
            l.kv_at = bytes, l.head_bytes = kv_head_bytes(l.dim, l.v_dim, c.kv_bits);
            bytes += l.head_bytes * size_t(l.kv_heads);
        }
        if (l.in_window) sizes.window = std::max(sizes.window, l.window);
        layers.push_back(std::move(l));
    }
    if (sizes.block + sizes.window_block == 0) fail("no layer has attention");
    return sizes;
}

void load_layers(const Config& c, const Pages& file, const std::vector<Entry>& entries, std::vector<Layer>& layers,
                 Ends& ends, Lifts* lifts) {
    const Loader load(file, entries, lifts);
    for (size_t i = 0; i < layers.size(); i++) {
        Layer& l = layers[i];
        const std::string at = "layers." + std::to_string(i) + ".", mixer = at + "mixer.", feed = at + "feed_forward.";
        l.mixer_norm = load.norm(at, "mixer_norm", l.norms, c.embd),
        l.mixer_post_norm = load.norm(at, "mixer_post_norm", l.norms, c.embd);
        l.ff_norm = load.norm(at, "ff_norm", l.norms, c.embd),
        l.ff_post_norm = load.norm(at, "ff_post_norm", l.norms, c.embd);
        if (l.attends()) load_attention(load, mixer, l, c.embd);
        if (l.recurs()) load_recurrent(load, mixer, l, c.embd);
        if (l.mixer != Mixer::kNone) l.o = load.matrix(mixer + "out", c.embd, l.inner());
        if (l.feed == Feed::kDense) load_feed(load, feed, l.dense, l.activation, l.ff, 1, c.embd);
        if (l.takes_input) {
            l.input_gate = load.matrix(at + "layer_input.gate", c.inputs.size, c.embd),
            l.input_project = load.matrix(at + "layer_input.project", c.embd, c.inputs.size);
            l.input_norm = load.norm(at + "layer_input.", "norm", {{"norm", c.inputs.norm}}, c.embd);
        }
        if (l.feed != Feed::kMixture) continue;
        l.router_norm = load.norm(feed, "router_norm", l.norms, c.embd),
        l.experts_norm = load.norm(feed, "experts_norm", l.norms, c.embd);
        l.experts_post_norm = load.norm(feed, "experts_post_norm", l.norms, c.embd);
        l.shared_norm = load.norm(feed, "shared_norm", l.norms, c.embd),
        l.shared_post_norm = load.norm(feed, "shared_post_norm", l.norms, c.embd);
        load_feed(load, feed, l.expert, l.activation, l.ff, l.experts, c.embd);
        l.router = load.matrix(feed + "router", l.experts, c.embd);
        l.selection_bias = load.vector(feed + "selection_bias", l.experts, true),
        l.expert_scales = load.vector(feed + "expert_scales", l.experts, true);
        if (!l.shared) continue;
        load_feed(load, feed + "shared.", l.dense, l.shared_activation, l.shared, 1, c.embd);
        if (load.has(feed + "shared_gate.weight")) l.shared_gate = load.matrix(feed + "shared_gate", 1, c.embd);
    }
    ends.norm = load.norm("norm", c.norm, c.embd);
    ends.embedding = load.matrix("embedding", "", c.vocab, c.embd);
    ends.head = load.has("head.weight") ? load.matrix("head", c.vocab, c.embd) : ends.embedding;
    if (!load.has("head.weight")) ends.head.bias = load.vector("head.bias", ends.head.strips * kStrip, true);
    if (!c.inputs.size) return;
    const int all = c.inputs.size * int(layers.size());
    ends.input_embedding = load.matrix("layer_inputs.embedding", "", c.vocab, all);
    ends.input_project = load.matrix("layer_inputs.project", all, c.embd);
    ends.input_norm = load.norm("layer_inputs.norm", c.inputs.norm, c.inputs.size);
}

}  // namespace shoal
