// The Python face: one class, `Core`. A step releases the interpreter lock.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cerrno>

#include "model.h"

namespace nb = nanobind;
using namespace shoal;

namespace {

// Missing keys and values of another kind are the file's fault.
template <class T>
T get(const nb::dict& d, const char* key) {
    T out{};
    if (!d.contains(key) || !nb::try_cast(d[key], out))
        throw FormatError(std::string("the model's ") + key + " is missing or no number");
    return out;
}
template <class T>
void take(const nb::dict& d, const char* key, T& to) {
    if (d.contains(key)) to = get<T>(d, key);
}
template <class E>
void take_kind(const nb::dict& d, const char* key, int kinds, E& to) {
    int kind = int(to);
    take(d, key, kind);
    if (kind < 0 || kind >= kinds) throw FormatError(std::string("the model's ") + key + " is unknown");
    to = E(kind);
}

NormFacts norm_of(const nb::dict& d) { return {get<float>(d, "eps"), get<bool>(d, "layer")}; }

// Every key must be one of those read: a setting that nothing honours would compute something else without a word.
LayerFacts layer_of(const nb::dict& d) {
    LayerFacts l;
    size_t known = 1;
    for (nb::handle item : get<nb::dict>(d, "norms").items()) {
        const auto pair = nb::cast<nb::tuple>(item);
        nb::dict facts;
        if (!nb::try_cast(pair[1], facts)) throw FormatError("the model's norms are no objects");
        l.norms[nb::cast<std::string>(pair[0])] = norm_of(facts);
    }
    take_kind(d, "mixer", 5, l.mixer), take_kind(d, "feed", 3, l.feed), take_kind(d, "routing", 3, l.routing);
    take_kind(d, "activation", int(Activation::kCount), l.activation);
    take_kind(d, "shared_activation", int(Activation::kCount), l.shared_activation);
    const std::pair<const char*, int*> integers[] = {{"heads", &l.heads},
                                                     {"kv_heads", &l.kv_heads},
                                                     {"dim", &l.dim},
                                                     {"v_dim", &l.v_dim},
                                                     {"window", &l.window},
                                                     {"rotary", &l.rotary},
                                                     {"kv_layer", &l.kv_layer},
                                                     {"query_length", &l.query_length},
                                                     {"taps", &l.taps},
                                                     {"norm_groups", &l.norm_groups},
                                                     {"ff", &l.ff},
                                                     {"experts", &l.experts},
                                                     {"used", &l.used},
                                                     {"shared", &l.shared},
                                                     {"groups", &l.groups},
                                                     {"groups_used", &l.groups_used}};
    const std::pair<const char*, float*> floats[] = {{"scale", &l.scale},
                                                     {"cap", &l.cap},
                                                     {"query_beta", &l.query_beta},
                                                     {"l2_eps", &l.l2_eps},
                                                     {"least_step", &l.least_step},
                                                     {"most_step", &l.most_step},
                                                     {"route_scale", &l.route_scale},
                                                     {"residual_scale", &l.residual_scale},
                                                     {"output_scale", &l.output_scale}};
    const std::pair<const char*, bool*> flags[] = {{"norm_over_heads", &l.norm_over_heads},
                                                   {"keys_are_values", &l.keys_are_values},
                                                   {"normalise", &l.normalise},
                                                   {"takes_input", &l.takes_input}};
    for (auto [key, to] : integers) take(d, key, *to), known += d.contains(key);
    for (auto [key, to] : floats) take(d, key, *to), known += d.contains(key);
    for (auto [key, to] : flags) take(d, key, *to), known += d.contains(key);
    take(d, "key_of", l.key_of);
    for (const char* key : {"mixer", "feed", "routing", "activation", "shared_activation", "key_of"})
        known += d.contains(key);
    if (known != d.size()) throw FormatError("a layer has settings that these kernels do not know");
    return l;
}

// The model's facts; what the runner adds comes apart.
Config config_of(const nb::dict& d) {
    Config c;
    c.embd = get<int>(d, "embd"), c.vocab = get<int>(d, "vocab"), c.context = get<int>(d, "context");
    c.embedding_scale = get<float>(d, "embedding_scale"), c.logit_scale = get<float>(d, "logit_scale"),
    c.cap = get<float>(d, "cap");
    c.norm = norm_of(get<nb::dict>(d, "norm"));
    for (nb::handle item : get<nb::list>(d, "rotaries")) {
        nb::dict rotary;
        if (!nb::try_cast(item, rotary)) throw FormatError("the model's rotaries are no objects");
        c.rotaries.push_back({get<std::vector<float>>(rotary, "frequencies"), get<float>(rotary, "factor")});
    }
    for (nb::handle item : get<nb::list>(d, "layers")) {
        nb::dict layer;
        if (!nb::try_cast(item, layer)) throw FormatError("the model's layers are no objects");
        c.layers.push_back(layer_of(layer));
    }
    if (const nb::dict inputs = get<nb::dict>(d, "inputs"); inputs.size())
        c.inputs = {get<int>(inputs, "size"), get<float>(inputs, "embedding_scale"),
                    get<float>(inputs, "project_scale"), get<float>(inputs, "scale"),
                    norm_of(get<nb::dict>(inputs, "norm"))};
    c.kv_bits = get<int>(d, "kv_bits");
    return c;
}

void set_runner(Config& c, const nb::dict& d) {
    c.blocks = get<int>(d, "blocks"), c.windows = get<int>(d, "windows");
    c.checkpoints = get<int>(d, "checkpoints"), c.threads = get<int>(d, "threads");
    c.pin = get<bool>(d, "pin"), c.map = get<bool>(d, "map"), c.isa = get<std::string>(d, "isa");
}

Entry entry_of(const nb::dict& d) {
    Entry e;
    e.name = get<std::string>(d, "name"), e.offset = get<size_t>(d, "offset"), e.n = get<int>(d, "n"),
    e.k = get<int>(d, "k");
    e.codes = get<int>(d, "codes"), e.scales = get<int>(d, "scales");
    e.offset_log2 = get<int>(d, "offset_log2"), e.unit_log2 = get<int>(d, "unit_log2"),
    e.table = get<std::vector<int>>(d, "table");
    return e;
}

Packed packed_of(const std::string& path, size_t start, const nb::list& entries,
                 const std::vector<std::pair<size_t, uint64_t>>& pieces) {
    Packed packed;
    packed.path = path, packed.start = start;
    for (nb::handle e : entries) packed.entries.push_back(entry_of(nb::cast<nb::dict>(e)));
    for (const auto& [bytes, hash] : pieces) packed.pieces.push_back({bytes, hash});
    return packed;
}

using Bytes = nb::ndarray<uint8_t, nb::numpy, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Source = nb::ndarray<const uint8_t, nb::numpy, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// The rows of a matrix into its strips.
void pack(const nb::dict& entry, const std::string& type, Source raw, Bytes out) {
    const Matrix form = form_of(entry_of(entry));
    if (raw.size() != row_bytes(type, form.k) * size_t(form.n) || out.size() != form.strip_bytes * size_t(form.strips))
        throw FormatError("what is packed does not have the size of its form");
    nb::gil_scoped_release release;
    pack_strips(form, type, raw.data(), out.data());
}

// A piece of the packed file to its place; gives its hash. OSError when the disk will not have it.
uint64_t write_with_hash(int descriptor, Source piece, size_t at) {
    uint64_t hash = 0;
    int failed = 0;
    {
        nb::gil_scoped_release release;
        hash = hash_of(piece.data(), piece.size());
        failed = write_piece(descriptor, piece.data(), piece.size(), at);
    }
    if (failed) {
        errno = failed;
        PyErr_SetFromErrno(PyExc_OSError);
        throw nb::python_error();
    }
    return hash;
}

// Row `row` of a packed matrix, as float32.
void unpack(const nb::dict& entry, Source packed, int row,
            nb::ndarray<float, nb::numpy, nb::ndim<1>, nb::c_contig, nb::device::cpu> out) {
    Matrix form = form_of(entry_of(entry));
    form.data = packed.data();
    if (row < 0 || row >= form.strips * kStrip || packed.size() != form.strip_bytes * size_t(form.strips) ||
        out.size() != size_t(form.k))
        throw FormatError("what is unpacked does not have the size of its form");
    unpack_row(form, row, out.data());
}

using Copies = std::vector<std::pair<int, int>>;

Plan plan_of(const nb::list& sequences, Copies copies, Copies window_copies, int chain) {
    Plan plan;
    plan.copies = std::move(copies), plan.window_copies = std::move(window_copies), plan.chain = chain;
    for (nb::handle item : sequences) {
        nb::tuple t = nb::cast<nb::tuple>(item);
        if (t.size() != 10)
            throw PlanError("a sequence is (tokens, start, table, want, top, rows, id, load, save, windows)");
        const int want = nb::cast<int>(t[3]);
        if (want < 0 || want > 3) throw PlanError("unknown want");
        plan.sequences.push_back({nb::cast<std::vector<int>>(t[0]), nb::cast<std::vector<int>>(t[2]),
                                  nb::cast<std::vector<int>>(t[9]), nb::cast<int>(t[1]), nb::cast<int>(t[4]),
                                  nb::cast<int>(t[5]), Want(want), nb::cast<int64_t>(t[6]), nb::cast<int>(t[7]),
                                  nb::cast<int>(t[8])});
    }
    return plan;
}

using Logits = nb::ndarray<float, nb::numpy, nb::c_contig, nb::device::cpu>;

std::pair<std::vector<std::vector<int>>, std::vector<Top>> step(Model& model, const nb::list& sequences, Copies copies,
                                                                Copies window_copies, int chain, Logits logits) {
    const Plan plan = plan_of(sequences, std::move(copies), std::move(window_copies), chain);
    size_t rows = 0;
    for (const auto& s : plan.sequences) rows += s.want == Want::kLogits ? size_t(std::max(s.rows, 0)) : 0;
    if (logits.ndim() != 2 || logits.shape(0) < rows || logits.shape(1) != size_t(model.config().vocab))
        throw PlanError("logits has the wrong shape");
    nb::gil_scoped_release release;
    Answer answer = model.run(plan, logits.data());
    return {std::move(answer.tokens), std::move(answer.tops)};
}

void check_size(size_t given, size_t bytes) {
    if (given != bytes) throw PlanError("what is read or written does not have the size of its block or state");
}

}  // namespace

NB_MODULE(_core, m) {
    nb::set_leak_warnings(false);  // an engine still open when the interpreter ends is no bug of ours
    // Of which binding.cpp this was compiled: a hash.
    m.attr("binding") = SHOAL_BINDING;
    nb::exception<PlanError>(m, "PlanError", PyExc_ValueError);
    auto format = nb::exception<FormatError>(m, "FormatError", PyExc_ValueError);
    nb::exception<DamagedError>(m, "DamagedError", format);
    m.def("isas", [] {
        std::vector<std::string> names;
        for (const Kernels* kernels : supported_kernels()) names.push_back(kernels->name);
        return names;
    });
    m.def("cpus", &available_cpus, nb::arg("root") = "",
          "Cores this process may use: physical ones, within a container's quota.");
    m.def(
        "strips_of",
        [](const nb::dict& entry) {
            const Matrix form = form_of(entry_of(entry));
            return std::pair<size_t, size_t>(form.strip_bytes, size_t(form.strips));
        },
        "Bytes of a strip, and how many strips there are. FormatError when there is no kernel for the form.");
    m.def("pack", &pack);
    m.def("write", &write_with_hash);
    m.def("unpack", &unpack);
    m.def("hash", [](Source data) { return hash_of(data.data(), data.size()); });
    m.def(
        "sizes",
        [](const nb::dict& facts) {
            std::vector<Layer> layers;
            Config c = config_of(facts);
            c.windows = 1;
            const Sizes sizes = lay_out(c, layers);
            return std::make_tuple(sizes.block, sizes.window_block, sizes.window, sizes.state_floats * sizeof(float));
        },
        "Bytes of a block of KV and of a window block, the window, and bytes of a sequence's recurrent state. "
        "FormatError for "
        "what the kernels cannot do.");
    nb::class_<Model>(m, "Core")
        .def("__init__",
             [](Model* self, const nb::dict& facts, const nb::dict& runner, const std::string& path, size_t start,
                const nb::list& entries, const std::vector<std::pair<size_t, uint64_t>>& pieces) {
                 const Packed packed = packed_of(path, start, entries, pieces);
                 Config c = config_of(facts);
                 set_runner(c, runner);
                 nb::gil_scoped_release release;
                 new (self) Model(std::move(c), packed);
             })
        .def("step", &step)
        .def("release", &Model::release)
        .def("read_block",
             [](const Model& model, int block, int window, Bytes out) {
                 check_size(out.size(), model.stored_bytes());
                 nb::gil_scoped_release release;
                 model.read_block(block, window, out.data());
             })
        .def("write_block",
             [](Model& model, int block, int window, Source data) {
                 check_size(data.size(), model.stored_bytes());
                 nb::gil_scoped_release release;
                 model.write_block(block, window, data.data());
             })
        .def("discard_blocks", &Model::discard_blocks)
        .def("read_checkpoint",
             [](const Model& model, int checkpoint, Bytes out) {
                 check_size(out.size(), model.state_bytes());
                 model.read_checkpoint(checkpoint, out.data());
             })
        .def("write_checkpoint",
             [](Model& model, int checkpoint, int tokens, Source data) {
                 check_size(data.size(), model.state_bytes());
                 model.write_checkpoint(checkpoint, tokens, data.data());
             })
        .def("profile", &Model::profile)
        .def_prop_ro("isa", [](const Model& model) { return std::string(model.kernels().name); })
        .def_prop_ro("threads", &Model::threads)
        .def_prop_ro("stored_bytes", &Model::stored_bytes)
        .def_prop_ro("active_threads", [](const Model& model) { return model.pool().active(); });
}
