// The Python face: one class, `Core`. A step releases the interpreter lock.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
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
    e.codes = get<int>(d, "codes"), e.group = get<int>(d, "group"), e.offset_log2 = get<int>(d, "offset_log2");
    e.has_min = get<bool>(d, "has_min"), e.wide_scales = get<bool>(d, "wide_scales");
    return e;
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
    nb::exception<FormatError>(m, "FormatError", PyExc_ValueError);
    m.def("isas", [] {
        std::vector<std::string> names;
        for (const Kernels* kernels : supported_kernels()) names.push_back(kernels->name);
        return names;
    });
    m.def("cpus", &available_cpus, "CPUs this process may run on.");
    m.def("block_bytes", [](int layers, int kv_heads, int dim, int kv_bits) {
        Config c;
        c.layers = layers, c.kv_heads = kv_heads, c.dim = dim, c.kv_bits = kv_bits;
        return Model::block_bytes(c);
    });
    nb::class_<Model>(m, "Core")
        .def("__init__",
             [](Model* self, const nb::dict& config, const std::string& path, const nb::list& entries) {
                 std::vector<Entry> list;
                 for (nb::handle e : entries) list.push_back(entry_of(nb::cast<nb::dict>(e)));
                 Config c = config_of(config);
                 nb::gil_scoped_release release;
                 new (self) Model(std::move(c), path, list);
             })
        .def("step", &step)
        .def("profile", &Model::profile)
        .def_prop_ro("isa", [](const Model& model) { return std::string(model.kernels().name); })
        .def_prop_ro("threads", &Model::threads);
}
