// For kernels that make bf16 of packed weights by way of half precision, whose numbers reach from 2^-14 to 2^16: each output gets a power
// of two that brings its largest scale to the top of that range, and the reciprocal for its sums.
#include <algorithm>
#include <cmath>

#include "model.h"

namespace shoal {

namespace {

// A weight is at most 255 * scale, made as (code / 2^24) * (16 scale): 16 times the largest scale stays below 65504.
constexpr float kMostScale = 4080, kMostMinimum = 60000;
constexpr int kCodesLog2 = 20;        // the scale is multiplied by code / 2^20
constexpr int kPairsLog2 = 112 - 96;  // bits of a half as bf16 count 2^-112; activations are times 2^96
// Half to bf16 drops three bits, 0 to 7 units of 2^-10 of numbers in [1, 2): this much on average. Whole steps of bf16 stay what they are.
constexpr float kDropped = 1 + 3.5f / 1024 * 0.69f;

float of_power(int e) { return std::ldexp(1.f, std::clamp(e, -126, 126)); }

// Of 32 outputs, the largest |d| and |m| of all blocks of a strip.
struct Largest {
    uint16_t d[kStrip] = {}, m[kStrip] = {};
};
void largest_of(const Matrix& w, const uint8_t* strip, Largest& most) {
    const int step = block_bytes(w.codes, w.scales), blocks = w.k / kGroup / groups_of_block(w.scales);
    for (int b = 0; b < blocks; b++) {
        const uint8_t* at = strip + size_t(b) * size_t(step);
        if (w.scales == Scales::kPower) {
            for (int i = 0; i < kStrip; i++) most.d[i] = std::max<uint16_t>(most.d[i], at[i]);
            continue;
        }
        uint16_t half[2][kStrip] = {};
        memcpy(half, at, has_min(w.scales) ? sizeof half : sizeof half[0]);
        for (int i = 0; i < kStrip; i++) {
            most.d[i] = std::max<uint16_t>(most.d[i], half[0][i] & 0x7fff);
            most.m[i] = std::max<uint16_t>(most.m[i], half[1][i] & 0x7fff);
        }
    }
}

float largest_factor(Scales s) {  // of what is multiplied by d
    switch (s) {
        case Scales::kSix:
            return 63;
        case Scales::kByte:
        case Scales::kByte16:
            return 128;
        case Scales::kNibbles:
            return 15;
        default:
            return 1;
    }
}

// The largest e with x * 2^e <= most; x is 0 or more.
int room(float x, float most) { return x > 0 ? int(std::floor(std::log2(double(most) / double(x)))) : 126; }

}  // namespace

void lift(Matrix& w, Lifts& lifts) {
    const size_t n = size_t(w.strips) * kStrip;
    const int unit = w.codes == Codes::kTable ? w.unit_log2 : 0;
    std::vector<float> of(2 * n);
    for (int s = 0; s < w.strips; s++) {
        Largest most;
        largest_of(w, w.data + size_t(s) * w.strip_bytes, most);
        for (int i = 0; i < kStrip; i++) {
            const float d = w.scales == Scales::kPower ? std::ldexp(1.f, most.d[i] - 128) : from_half(most.d[i]),
                        m = from_half(most.m[i]);
            float &up = of[size_t(s * kStrip + i)], &down = of[n + size_t(s * kStrip + i)];
            up = 1, down = NAN;  // an output with a scale that is not finite is not finite
            if (!std::isfinite(d) || !std::isfinite(m)) continue;
            const int e = std::clamp(
                std::min(room(d * of_power(unit) * largest_factor(w.scales), kMostScale), room(m, kMostMinimum)), -100,
                100);
            up = of_power(e + unit) * kDropped, down = of_power(kCodesLog2 + kPairsLog2 - e);
        }
    }
    lifts.push_back(std::move(of));
    w.lift = lifts.back().data(), w.lower = w.lift + n;
}

}  // namespace shoal
