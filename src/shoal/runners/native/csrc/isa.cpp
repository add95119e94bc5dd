// One instruction set's kernels; compiled once per set, with SHOAL_ISA naming it and the compiler's flags choosing simd.h's side.
#include "attention.h"
#include "attention_tiles.h"
#include "kernels.h"
#include "norms.h"
#include "products.h"
#include "recurrent.h"
#include "tiles.h"

#define SHOAL_JOIN(a, b) a##b
#define SHOAL_NAME(isa) SHOAL_JOIN(kernels_, isa)
#define SHOAL_TEXT(x) #x
#define SHOAL_STRING(x) SHOAL_TEXT(x)

namespace shoal {

#if defined(__AMX_BF16__) && !defined(SHOAL_PLAIN)
constexpr int kMostRows = kTileRows;
constexpr Inputs kInputs = Inputs::kBf16;
constexpr auto kProduct = tile_product;
constexpr auto kQuantise = to_pairs;
constexpr auto kAttend = attend_tiles<false>, kAttendEight = attend_tiles<true>;
#else
constexpr int kMostRows = kMaxRows;
constexpr Inputs kInputs = Inputs::kEightBits;
constexpr auto kProduct = product<>;
constexpr auto kQuantise = quantise;
constexpr auto kAttend = attend<false>, kAttendEight = attend<true>;
#endif

const Kernels* SHOAL_NAME(SHOAL_ISA)() {
    static constexpr Kernels table = {SHOAL_STRING(SHOAL_ISA),
                                      kMostRows,
                                      kInputs,
                                      kProduct,
                                      kQuantise,
                                      rms_norm,
                                      layer_norm,
                                      activate,
                                      gate_by,
                                      add_scaled,
                                      soft_cap,
                                      convolve,
                                      recur,
                                      rotate,
                                      to_bf16_row,
                                      start_row,
                                      to_codes,
                                      {kAttend, kAttendEight},
                                      merge_row,
                                      finish_row,
                                      best_of};
    return &table;
}

}  // namespace shoal
