// The Python face: one class, `Core`. A step releases the interpreter lock.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "model.h"

namespace nb = nanobind;
using namespace shoal;

namespace {

template <class T> T get(const nb::dict& d, const char* key) { return nb::cast<T>(d[key]); }

Config config_of(const nb::dict& d) {
    Config c;
    c.layers = get<int>(d, "layers"), c.embd = get<int>(d, "embd"), c.heads = get<int>(d, "heads");
    c.kv_heads = get<int>(d, "kv_heads"), c.dim = get<int>(d, "dim"), c.ff = get<int>(d, "ff"), c.vocab = get<int>(d, "vocab");
    c.rope_dim = get<int>(d, "rope_dim"), c.context = get<int>(d, "context"), c.blocks = get<int>(d, "blocks");
    c.threads = get<int>(d, "threads"), c.kv_bits = get<int>(d, "kv_bits"), c.pin = get<bool>(d, "pin"), c.eps = get<float>(d, "eps");
    c.frequencies = get<std::vector<float>>(d, "frequencies"), c.isa = get<std::string>(d, "isa");
    return c;
}

Entry entry_of(const nb::dict& d) {
    Entry e;
    e.name = get<std::string>(d, "name"), e.offset = get<size_t>(d, "offset"), e.n = get<int>(d, "n"), e.k = get<int>(d, "k");
    e.count = get<int>(d, "count"), e.codes = get<int>(d, "codes"), e.scales = get<int>(d, "scales");
    e.offset_log2 = get<int>(d, "offset_log2"), e.unit_log2 = get<int>(d, "unit_log2"), e.table = get<std::vector<int>>(d, "table");
    return e;
}

Packed packed_of(const std::string& path, size_t start, const nb::list& entries, const std::vector<std::pair<size_t, uint64_t>>& pieces) {
    Packed packed;
    packed.path = path, packed.start = start;
    for (nb::handle e : entries) packed.entries.push_back(entry_of(nb::cast<nb::dict>(e)));
    for (const auto& [bytes, hash] : pieces) packed.pieces.push_back({bytes, hash});
    return packed;
}

using Bytes = nb::ndarray<uint8_t, nb::numpy, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Source = nb::ndarray<const uint8_t, nb::numpy, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Order = nb::ndarray<const int64_t, nb::numpy, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Strips first .. first + count - 1 of one matrix into `out`; returns their hash.
uint64_t pack(const nb::dict& entry, const std::string& type, Source raw, std::optional<Order> order, int first, int count, Bytes out) {
    const Matrix form = form_of(entry_of(entry));
    const bool inside = first >= 0 && count >= 0 && first <= form.strips && count <= form.strips - first;
    bool sized = inside && raw.size() == row_bytes(type, form.k) * size_t(form.n) && out.size() == form.strip_bytes * size_t(count);
    if (order) {
        sized &= order->size() == size_t(form.n);
        for (size_t i = 0; sized && i < order->size(); i++) sized &= order->data()[i] >= 0 && order->data()[i] < form.n;
    }
    if (!sized) throw FormatError("what is packed does not have the size of its form");
    const int64_t* rows = order ? order->data() : nullptr;
    nb::gil_scoped_release release;
    pack_strips(form, type, raw.data(), rows, first, count, out.data());
    return hash_of(out.data(), out.size());
}

// Row `row` of a packed matrix, as float32.
void unpack(const nb::dict& entry, Source packed, int row, nb::ndarray<float, nb::numpy, nb::ndim<1>, nb::c_contig, nb::device::cpu> out) {
    Matrix form = form_of(entry_of(entry));
    form.data = packed.data();
    if (row < 0 || row >= form.strips * form.count * kStrip || packed.size() != form.strip_bytes * size_t(form.strips * form.count) || out.size() != size_t(form.k))
        throw FormatError("what is unpacked does not have the size of its form");
    unpack_row(form, row, out.data());
}

Plan plan_of(const nb::list& sequences, std::vector<std::pair<int, int>> copies, int chain) {
    Plan plan;
    plan.copies = std::move(copies), plan.chain = chain;
    for (nb::handle item : sequences) {
        nb::tuple t = nb::cast<nb::tuple>(item);
        if (t.size() != 5) throw PlanError("a sequence is (tokens, start, table, want, top)");
        const int want = nb::cast<int>(t[3]);
        if (want < 0 || want > 3) throw PlanError("unknown want");
        plan.sequences.push_back({nb::cast<std::vector<int>>(t[0]), nb::cast<std::vector<int>>(t[2]), nb::cast<int>(t[1]), nb::cast<int>(t[4]), Want(want)});
    }
    return plan;
}

using Logits = nb::ndarray<float, nb::numpy, nb::c_contig, nb::device::cpu>;

std::pair<std::vector<std::vector<int>>, std::vector<Top>> step(Model& model, const nb::list& sequences, std::vector<std::pair<int, int>> copies, int chain, Logits logits) {
    const Plan plan = plan_of(sequences, std::move(copies), chain);
    size_t rows = 0;
    for (const auto& s : plan.sequences) rows += s.want == Want::kLogits;
    if (logits.ndim() != 2 || logits.shape(0) < rows || logits.shape(1) != size_t(model.config().vocab)) throw PlanError("logits has the wrong shape");
    nb::gil_scoped_release release;
    Answer answer = model.run(plan, logits.data());
    return {std::move(answer.tokens), std::move(answer.tops)};
}

}  // namespace

NB_MODULE(_core, m) {
    nb::set_leak_warnings(false);  // an engine still open when the interpreter ends is no bug of ours
    nb::exception<PlanError>(m, "PlanError", PyExc_ValueError);
    auto format = nb::exception<FormatError>(m, "FormatError", PyExc_ValueError);
    nb::exception<DamagedError>(m, "DamagedError", format);
    m.def("isas", [] {
        std::vector<std::string> names;
        for (const Kernels* kernels : supported_kernels()) names.push_back(kernels->name);
        return names;
    });
    m.def("cpus", &available_cpus, "CPUs this process may run on.");
    m.def("strips_of", [](const nb::dict& entry) {
        const Matrix form = form_of(entry_of(entry));
        return std::pair<size_t, size_t>(form.strip_bytes, size_t(form.strips) * size_t(form.count));
    }, "Bytes of a strip, and how many strips there are. FormatError when there is no kernel for the form.");
    m.def("pack", &pack, nb::arg("entry"), nb::arg("type"), nb::arg("raw"), nb::arg("order").none(), nb::arg("first"), nb::arg("count"), nb::arg("out"));
    m.def("unpack", &unpack);
    m.def("hash", [](Source data) { return hash_of(data.data(), data.size()); });
    m.def("block_bytes", [](int layers, int kv_heads, int dim, int kv_bits) {
        Config c;
        c.layers = layers, c.kv_heads = kv_heads, c.dim = dim, c.kv_bits = kv_bits;
        return Model::block_bytes(c);
    });
    nb::class_<Model>(m, "Core")
        .def("__init__",
             [](Model* self, const nb::dict& config, const std::string& path, size_t start, const nb::list& entries, const std::vector<std::pair<size_t, uint64_t>>& pieces) {
                 const Packed packed = packed_of(path, start, entries, pieces);
                 Config c = config_of(config);
                 nb::gil_scoped_release release;
                 new (self) Model(std::move(c), packed);
             })
        .def("step", &step)
        .def("profile", &Model::profile)
        .def_prop_ro("isa", [](const Model& model) { return std::string(model.kernels().name); })
        .def_prop_ro("threads", &Model::threads);
}
