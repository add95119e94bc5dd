// Sixteen lanes of float (F) or of int32 / 64 bytes (I), on every instruction set. The kernels are written once over
// these; each instruction set compiles them in a translation unit of its own (isa.cpp) with its own flags.
//
//            F, I are          dot(): u8 x s8 -> s32               dotbf(): bf16 pairs
//   avx512   one zmm           vpdpbusd                            vdpbf16ps, or shift + fma without AVX512-BF16
//   avx2     two ymm           vpdpbusd (AVX-VNNI) or vpmaddubsw   shift + fma
//   neon     four q registers  usdot (i8mm) or sdot                shift + fma
//   plain    arrays            a loop                              a loop
//
// Nothing here may instantiate a function of the standard library: the linker keeps one copy of those for all
// translation units, and it could be the one that this CPU cannot run. Contraction is off: a*b+c is fma() or two roundings.
#pragma once
#include <cstdint>
#include <cstring>
#if !defined(SHOAL_PLAIN) && (defined(__AVX512F__) || defined(__AVX2__))
#include <immintrin.h>
#elif !defined(SHOAL_PLAIN) && defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace shoal {
namespace {

#if !defined(SHOAL_PLAIN) && defined(__AVX512F__)
constexpr int kMaxRows = 8;  // of 32 outputs: 16 sums + 8 partial sums + weights + scales = 28 to 30 of 32 registers
struct F {
    __m512 v;
};
struct I {
    __m512i v;
};
inline F set(float x) { return {_mm512_set1_ps(x)}; }
inline F load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, F a) { _mm512_storeu_ps(p, a.v); }
inline F load_half(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
inline F load_bf16(const uint16_t* p) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16))};
}
inline F add(F a, F b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F sub(F a, F b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F mul(F a, F b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F div(F a, F b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F fma(F a, F b, F c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F max2(F a, F b) { return {_mm512_max_ps(a.v, b.v)}; }  // b where either is NaN
inline F round_even(F a) { return {_mm512_roundscale_ps(a.v, 0)}; }
inline F scale2(F a, F r) { return {_mm512_scalef_ps(a.v, r.v)}; }  // a * 2^r for whole r in [-126, 127]
inline float hmax(F a) { return _mm512_reduce_max_ps(a.v); }
inline float hadd(F a) { return _mm512_reduce_add_ps(a.v); }
inline F first_lanes(F a, int n, F rest) {
    return {_mm512_mask_mov_ps(rest.v, n >= 16 ? 0xffff : __mmask16((1u << (n < 0 ? 0 : n)) - 1), a.v)};
}
inline F to_float(I a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline I to_int(F a) { return {_mm512_cvtps_epi32(a.v)}; }  // to nearest even
inline I as_int(F a) { return {_mm512_castps_si512(a.v)}; }
inline I iset(int x) { return {_mm512_set1_epi32(x)}; }
inline I iload(const void* p) { return {_mm512_loadu_si512(p)}; }
inline I iand(I a, I b) { return {_mm512_and_si512(a.v, b.v)}; }
inline I high_nibbles(I a) { return iand({_mm512_srli_epi16(a.v, 4)}, {_mm512_set1_epi8(15)}); }
inline I low_nibbles(I a) { return iand(a, {_mm512_set1_epi8(15)}); }
inline I shift_left(I a, int n) { return {_mm512_sll_epi32(a.v, _mm_cvtsi32_si128(n))}; }
inline I shift_right(I a, int n) { return {_mm512_srl_epi32(a.v, _mm_cvtsi32_si128(n))}; }  // zeros come in
inline I ior(I a, I b) { return {_mm512_or_si512(a.v, b.v)}; }
inline I iadd(I a, I b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline F as_float(I a) { return {_mm512_castsi512_ps(a.v)}; }
inline I load_bytes(const uint8_t* p) { return {_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p))}; }
inline I load_signed(const uint8_t* p) { return {_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p))}; }
inline I load_table(const uint8_t* p) { return {_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)p))}; }
inline I look_up(I table, I codes) { return {_mm512_shuffle_epi8(table.v, codes.v)}; }  // codes 0 to 15
inline I imax(I a, I b) { return {_mm512_max_epi32(a.v, b.v)}; }
inline int himax(I a) { return _mm512_reduce_max_epi32(a.v); }
inline int hisum(I a) { return _mm512_reduce_add_epi32(a.v); }
inline void store_bytes(int8_t* p, I a) { _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(a.v)); }
inline void store_codes(uint8_t* p, I a) { _mm_storeu_si128((__m128i*)p, _mm512_cvtusepi32_epi8(a.v)); }  // of a >= 0
template <bool kWide>
inline I dot(I c, I w, I a) {
    return {_mm512_dpbusd_epi32(c.v, w.v, a.v)};
}
#ifdef __AVX512BF16__
inline F dotbf(F c, I a, I b) { return {_mm512_dpbf16_ps(c.v, (__m512bh)a.v, (__m512bh)b.v)}; }
inline void store_bf16(uint16_t* p, F a) { _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(a.v)); }
#else
inline F dotbf(F c, I a, I b) {
    const __m512i high = _mm512_set1_epi32(int(0xffff0000));
    F t = fma({_mm512_castsi512_ps(_mm512_slli_epi32(a.v, 16))}, {_mm512_castsi512_ps(_mm512_slli_epi32(b.v, 16))}, c);
    return fma({_mm512_castsi512_ps(_mm512_and_si512(a.v, high))}, {_mm512_castsi512_ps(_mm512_and_si512(b.v, high))},
               t);
}
#endif

#elif !defined(SHOAL_PLAIN) && defined(__AVX2__)
constexpr int kMaxRows = 3;  // 3 x (2 + 2) sums + 2 weights + 1 broadcast = 15 of 16 registers
struct F {
    __m256 a, b;
};
struct I {
    __m256i a, b;
};
#define SHOAL_BOTH(op, x, y) {op((x).a, (y).a), op((x).b, (y).b)}
inline F set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, F x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
inline F load_half(const uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)),
            _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
inline __m256 up8(const uint16_t* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
inline F load_bf16(const uint16_t* p) { return {up8(p), up8(p + 8)}; }
inline F add(F x, F y) { return SHOAL_BOTH(_mm256_add_ps, x, y); }
inline F sub(F x, F y) { return SHOAL_BOTH(_mm256_sub_ps, x, y); }
inline F mul(F x, F y) { return SHOAL_BOTH(_mm256_mul_ps, x, y); }
inline F div(F x, F y) { return SHOAL_BOTH(_mm256_div_ps, x, y); }
inline F fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline F max2(F x, F y) { return SHOAL_BOTH(_mm256_max_ps, x, y); }
inline F round_even(F x) { return {_mm256_round_ps(x.a, 8), _mm256_round_ps(x.b, 8)}; }
inline __m256 pow2(__m256 r) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(r), _mm256_set1_epi32(127)), 23));
}
inline F scale2(F x, F r) { return {_mm256_mul_ps(x.a, pow2(r.a)), _mm256_mul_ps(x.b, pow2(r.b))}; }
inline float hmax(F x) {
    __m256 m = _mm256_max_ps(x.a, x.b);
    __m128 h = _mm_max_ps(_mm256_castps256_ps128(m), _mm256_extractf128_ps(m, 1));
    h = _mm_max_ps(h, _mm_movehl_ps(h, h));
    return _mm_cvtss_f32(_mm_max_ss(h, _mm_shuffle_ps(h, h, 1)));
}
inline float hadd(F x) {
    __m256 m = _mm256_add_ps(x.a, x.b);
    __m128 h = _mm_add_ps(_mm256_castps256_ps128(m), _mm256_extractf128_ps(m, 1));
    h = _mm_add_ps(h, _mm_movehl_ps(h, h));
    return _mm_cvtss_f32(_mm_add_ss(h, _mm_shuffle_ps(h, h, 1)));
}
inline __m256 lanes_below(int n) {
    return _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)));
}
inline F first_lanes(F x, int n, F rest) {
    return {_mm256_blendv_ps(rest.a, x.a, lanes_below(n)), _mm256_blendv_ps(rest.b, x.b, lanes_below(n - 8))};
}
inline F to_float(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline I to_int(F x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
inline I as_int(F x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
inline I iset(int x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline I iload(const void* p) {
    return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)p + 1)};
}
inline I iand(I x, I y) { return SHOAL_BOTH(_mm256_and_si256, x, y); }
inline I low_nibbles(I x) { return iand(x, {_mm256_set1_epi8(15), _mm256_set1_epi8(15)}); }
inline I high_nibbles(I x) { return low_nibbles({_mm256_srli_epi16(x.a, 4), _mm256_srli_epi16(x.b, 4)}); }
inline I shift_left(I x, int n) {
    __m128i s = _mm_cvtsi32_si128(n);
    return {_mm256_sll_epi32(x.a, s), _mm256_sll_epi32(x.b, s)};
}
inline I shift_right(I x, int n) {
    __m128i s = _mm_cvtsi32_si128(n);
    return {_mm256_srl_epi32(x.a, s), _mm256_srl_epi32(x.b, s)};
}
inline I ior(I x, I y) { return SHOAL_BOTH(_mm256_or_si256, x, y); }
inline I iadd(I x, I y) { return SHOAL_BOTH(_mm256_add_epi32, x, y); }
inline F as_float(I x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
inline I load_bytes(const uint8_t* p) {
    return {_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)),
            _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8)))};
}
inline I load_signed(const uint8_t* p) {
    return {_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)),
            _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8)))};
}
inline I load_table(const uint8_t* p) {
    const __m256i t = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)p));
    return {t, t};
}
inline I look_up(I table, I codes) { return SHOAL_BOTH(_mm256_shuffle_epi8, table, codes); }
inline I imax(I x, I y) { return SHOAL_BOTH(_mm256_max_epi32, x, y); }
inline int himax(I x) {
    __m256i m = _mm256_max_epi32(x.a, x.b);
    __m128i h = _mm_max_epi32(_mm256_castsi256_si128(m), _mm256_extracti128_si256(m, 1));
    h = _mm_max_epi32(h, _mm_shuffle_epi32(h, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(h, _mm_shuffle_epi32(h, 0xb1)));
}
inline int hisum(I x) {
    __m256i s = _mm256_add_epi32(x.a, x.b);
    __m128i h = _mm_add_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1));
    h = _mm_add_epi32(h, _mm_shuffle_epi32(h, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(h, _mm_shuffle_epi32(h, 0xb1)));
}
inline __m256i to_words(I x) { return _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8); }
inline void store_bytes(int8_t* p, I x) {
    __m256i w = to_words(x);
    _mm_storeu_si128((__m128i*)p, _mm_packs_epi16(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1)));
}
inline void store_codes(uint8_t* p, I x) {
    __m256i w = to_words(x);
    _mm_storeu_si128((__m128i*)p, _mm_packus_epi16(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1)));
}
template <bool kWide>
inline __m256i dot8(__m256i c, __m256i w, __m256i a) {
#ifdef __AVXVNNI__
    return _mm256_dpbusd_avx_epi32(c, w, a);
#else
    const __m256i ones = _mm256_set1_epi16(1);
    if (!kWide) return _mm256_add_epi32(c, _mm256_madd_epi16(_mm256_maddubs_epi16(w, a), ones));
    // 2 x 255 x 127 would not fit 16 bits, 2 x 128 x 127 does: the top bit apart.
    __m256i top = _mm256_and_si256(w, _mm256_set1_epi8(int8_t(0x80))), low = _mm256_xor_si256(w, top);
    __m256i s = _mm256_madd_epi16(_mm256_maddubs_epi16(low, a), ones);
    return _mm256_add_epi32(_mm256_add_epi32(c, s), _mm256_madd_epi16(_mm256_maddubs_epi16(top, a), ones));
#endif
}
template <bool kWide>
inline I dot(I c, I w, I a) {
    return {dot8<kWide>(c.a, w.a, a.a), dot8<kWide>(c.b, w.b, a.b)};
}
inline __m256 dotbf8(__m256 c, __m256i a, __m256i b) {
    const __m256i high = _mm256_set1_epi32(int(0xffff0000));
    c = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(b, 16)),
                        c);
    return _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_and_si256(a, high)),
                           _mm256_castsi256_ps(_mm256_and_si256(b, high)), c);
}
inline F dotbf(F c, I a, I b) { return {dotbf8(c.a, a.a, b.a), dotbf8(c.b, a.b, b.b)}; }

#elif !defined(SHOAL_PLAIN) && defined(__ARM_NEON)
constexpr int kMaxRows = 3;  // 3 x (4 + 4) sums + 4 weights + 1 broadcast = 29 of 32 registers
struct F {
    float32x4_t v[4];
};
struct I {
    int32x4_t v[4];
};
#define SHOAL_EACH(type, expr)                        \
    {                                                 \
        type each;                                    \
        for (int i = 0; i < 4; i++) each.v[i] = expr; \
        return each;                                  \
    }
inline F set(float x) SHOAL_EACH(F, vdupq_n_f32(x)) inline F load(const float* p)
    SHOAL_EACH(F, vld1q_f32(p + 4 * i)) inline void store(float* p, F a) {
    for (int i = 0; i < 4; i++) vst1q_f32(p + 4 * i, a.v[i]);
}
inline F load_half(const uint16_t* p) SHOAL_EACH(F, vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i)))) inline F
    load_bf16(const uint16_t* p) SHOAL_EACH(F, vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16))) inline F
    add(F a, F b) SHOAL_EACH(F, vaddq_f32(a.v[i], b.v[i])) inline F sub(F a, F b)
        SHOAL_EACH(F, vsubq_f32(a.v[i], b.v[i])) inline F mul(F a, F b)
            SHOAL_EACH(F, vmulq_f32(a.v[i], b.v[i])) inline F div(F a, F b)
                SHOAL_EACH(F, vdivq_f32(a.v[i], b.v[i])) inline F fma(F a, F b, F c)
                    SHOAL_EACH(F, vfmaq_f32(c.v[i], a.v[i], b.v[i])) inline F max2(F a, F b)
                        SHOAL_EACH(F, vbslq_f32(vcgtq_f32(a.v[i], b.v[i]), a.v[i], b.v[i])) inline F
    round_even(F a) SHOAL_EACH(F, vrndnq_f32(a.v[i])) inline F scale2(F a, F r)
        SHOAL_EACH(F, vmulq_f32(a.v[i],
                                vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(r.v[i]), vdupq_n_s32(127)),
                                                                  23)))) inline float hmax(F a) {
    return vmaxvq_f32(vmaxq_f32(vmaxq_f32(a.v[0], a.v[1]), vmaxq_f32(a.v[2], a.v[3])));
}
inline float hadd(F a) { return vaddvq_f32(vaddq_f32(vaddq_f32(a.v[0], a.v[1]), vaddq_f32(a.v[2], a.v[3]))); }
inline F first_lanes(F a, int n, F rest) {
    const int32_t at[4] = {0, 1, 2, 3};
    F r;
    for (int i = 0; i < 4; i++) r.v[i] = vbslq_f32(vcltq_s32(vld1q_s32(at), vdupq_n_s32(n - 4 * i)), a.v[i], rest.v[i]);
    return r;
}
inline F to_float(I a) SHOAL_EACH(F, vcvtq_f32_s32(a.v[i])) inline I to_int(F a)
    SHOAL_EACH(I, vcvtnq_s32_f32(a.v[i])) inline I as_int(F a) SHOAL_EACH(I, vreinterpretq_s32_f32(a.v[i])) inline I
    iset(int x) SHOAL_EACH(I, vdupq_n_s32(x)) inline I iload(const void* p)
        SHOAL_EACH(I, vreinterpretq_s32_u8(vld1q_u8((const uint8_t*)p + 16 * i))) inline I iand(I a, I b)
            SHOAL_EACH(I, vandq_s32(a.v[i], b.v[i])) inline I
    low_nibbles(I a) SHOAL_EACH(I, vandq_s32(a.v[i], vdupq_n_s32(0x0f0f0f0f))) inline I high_nibbles(I a)
        SHOAL_EACH(I, vreinterpretq_s32_u8(vshrq_n_u8(vreinterpretq_u8_s32(a.v[i]), 4))) inline I shift_left(I a, int n)
            SHOAL_EACH(I, vshlq_s32(a.v[i], vdupq_n_s32(n))) inline I shift_right(I a, int n)
                SHOAL_EACH(I, vreinterpretq_s32_u32(vshlq_u32(vreinterpretq_u32_s32(a.v[i]), vdupq_n_s32(-n)))) inline I
    ior(I a, I b) SHOAL_EACH(I, vorrq_s32(a.v[i], b.v[i])) inline I iadd(I a, I b)
        SHOAL_EACH(I, vaddq_s32(a.v[i], b.v[i])) inline F as_float(I a)
            SHOAL_EACH(F, vreinterpretq_f32_s32(a.v[i])) inline I load_bytes(const uint8_t* p) {
    const uint8x16_t b = vld1q_u8(p);
    const uint16x8_t low = vmovl_u8(vget_low_u8(b)), high = vmovl_u8(vget_high_u8(b));
    return {{vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(low))), vreinterpretq_s32_u32(vmovl_u16(vget_high_u16(low))),
             vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(high))),
             vreinterpretq_s32_u32(vmovl_u16(vget_high_u16(high)))}};
}
inline I load_signed(const uint8_t* p) {
    const int8x16_t b = vreinterpretq_s8_u8(vld1q_u8(p));
    const int16x8_t low = vmovl_s8(vget_low_s8(b)), high = vmovl_s8(vget_high_s8(b));
    return {{vmovl_s16(vget_low_s16(low)), vmovl_s16(vget_high_s16(low)), vmovl_s16(vget_low_s16(high)),
             vmovl_s16(vget_high_s16(high))}};
}
inline I load_table(const uint8_t* p) SHOAL_EACH(I, vreinterpretq_s32_u8(vld1q_u8(p))) inline I
    look_up(I table, I codes) SHOAL_EACH(I, vreinterpretq_s32_u8(vqtbl1q_u8(vreinterpretq_u8_s32(table.v[i]),
                                                                            vreinterpretq_u8_s32(codes.v[i])))) inline I
    imax(I a, I b) SHOAL_EACH(I, vmaxq_s32(a.v[i], b.v[i])) inline int himax(I a) {
    return vmaxvq_s32(vmaxq_s32(vmaxq_s32(a.v[0], a.v[1]), vmaxq_s32(a.v[2], a.v[3])));
}
inline int hisum(I a) { return vaddvq_s32(vaddq_s32(vaddq_s32(a.v[0], a.v[1]), vaddq_s32(a.v[2], a.v[3]))); }
inline void store_bytes(int8_t* p, I a) {
    int16x8_t low = vcombine_s16(vqmovn_s32(a.v[0]), vqmovn_s32(a.v[1])),
              high = vcombine_s16(vqmovn_s32(a.v[2]), vqmovn_s32(a.v[3]));
    vst1q_s8(p, vcombine_s8(vqmovn_s16(low), vqmovn_s16(high)));
}
inline void store_codes(uint8_t* p, I a) {
    int16x8_t low = vcombine_s16(vqmovn_s32(a.v[0]), vqmovn_s32(a.v[1])),
              high = vcombine_s16(vqmovn_s32(a.v[2]), vqmovn_s32(a.v[3]));
    vst1q_u8(p, vcombine_u8(vqmovun_s16(low), vqmovun_s16(high)));
}
template <bool kWide>
inline int32x4_t dot4(int32x4_t c, int32x4_t w, int32x4_t a) {
    const int8x16_t x = vreinterpretq_s8_s32(a);
#if defined(__ARM_FEATURE_MATMUL_INT8)
    return vusdotq_s32(c, vreinterpretq_u8_s32(w), x);
#else
    if (!kWide) return vdotq_s32(c, vreinterpretq_s8_s32(w), x);
    c = vdotq_s32(c, vreinterpretq_s8_u8(veorq_u8(vreinterpretq_u8_s32(w), vdupq_n_u8(0x80))), x);  // w - 128
    return vaddq_s32(c, vshlq_n_s32(vdotq_s32(vdupq_n_s32(0), vdupq_n_s8(1), x), 7));               // + 128 x sum
#endif
}
template <bool kWide>
inline I dot(I c, I w, I a) SHOAL_EACH(I, dot4<kWide>(c.v[i], w.v[i], a.v[i])) inline float32x4_t even(int32x4_t a) {
    return vreinterpretq_f32_s32(vshlq_n_s32(a, 16));
}
inline float32x4_t odd(int32x4_t a) { return vreinterpretq_f32_s32(vandq_s32(a, vdupq_n_s32(int(0xffff0000)))); }
inline F dotbf(F c, I a, I b)
    SHOAL_EACH(F, vfmaq_f32(vfmaq_f32(c.v[i], even(a.v[i]), even(b.v[i])), odd(a.v[i]), odd(b.v[i])))

#else  // plain C++; the reference that the others are tested against
constexpr int kMaxRows = 4;
struct F {
    float v[16];
};
struct I {
    int32_t v[16];
};
#define SHOAL_EACH(type, expr)                         \
    {                                                  \
        type each;                                     \
        for (int i = 0; i < 16; i++) each.v[i] = expr; \
        return each;                                   \
    }
inline F set(float x) SHOAL_EACH(F, x) inline F load(const float* p)
    SHOAL_EACH(F, p[i]) inline void store(float* p, F a) {
    memcpy(p, a.v, sizeof a.v);
}
inline F load_half(const uint16_t* p) SHOAL_EACH(F, from_half(p[i])) inline F load_bf16(const uint16_t* p)
    SHOAL_EACH(F, float_of(uint32_t(p[i]) << 16)) inline F add(F a, F b) SHOAL_EACH(F, a.v[i] + b.v[i]) inline F
    sub(F a, F b) SHOAL_EACH(F, a.v[i] - b.v[i]) inline F mul(F a, F b) SHOAL_EACH(F, a.v[i] * b.v[i]) inline F
    div(F a, F b) SHOAL_EACH(F, a.v[i] / b.v[i]) inline F fma(F a, F b, F c)
        SHOAL_EACH(F, a.v[i] * b.v[i] + c.v[i]) inline F max2(F a, F b)
            SHOAL_EACH(F, a.v[i] > b.v[i] ? a.v[i] : b.v[i]) inline F round_even(F a)
                SHOAL_EACH(F, (a.v[i] + 0x1.8p23f) - 0x1.8p23f) inline F scale2(F a, F r)
                    SHOAL_EACH(F, r.v[i] == r.v[i] ? a.v[i] * float_of(uint32_t(int(r.v[i]) + 127) << 23)
                                                   : r.v[i]) inline float hmax(F a) {
    float m = a.v[0];
    for (int i = 1; i < 16; i++) m = a.v[i] > m ? a.v[i] : m;
    return m;
}
inline float hadd(F a) {
    float s = a.v[0];
    for (int i = 1; i < 16; i++) s += a.v[i];
    return s;
}
inline F first_lanes(F a, int n, F rest) SHOAL_EACH(F, i < n ? a.v[i] : rest.v[i]) inline F to_float(I a)
    SHOAL_EACH(F, float(a.v[i])) inline I to_int(F a)
        SHOAL_EACH(I, int32_t(a.v[i] > -1e9f && a.v[i] < 1e9f ? (a.v[i] + 0x1.8p23f) - 0x1.8p23f : -1e9f)) inline I
    as_int(F a) SHOAL_EACH(I, int32_t(bits_of(a.v[i]))) inline I iset(int x) SHOAL_EACH(I, x) inline I
    iload(const void* p) {
    I r;
    memcpy(r.v, p, 64);
    return r;
}
inline I iand(I a, I b) SHOAL_EACH(I, a.v[i] & b.v[i]) inline I low_nibbles(I a)
    SHOAL_EACH(I, a.v[i] & 0x0f0f0f0f) inline I high_nibbles(I a) SHOAL_EACH(I, (a.v[i] >> 4) & 0x0f0f0f0f) inline I
    shift_left(I a, int n) SHOAL_EACH(I, int32_t(uint32_t(a.v[i]) << n)) inline I shift_right(I a, int n)
        SHOAL_EACH(I, int32_t(uint32_t(a.v[i]) >> n)) inline I ior(I a, I b) SHOAL_EACH(I, a.v[i] | b.v[i]) inline I
    iadd(I a, I b) SHOAL_EACH(I, int32_t(uint32_t(a.v[i]) + uint32_t(b.v[i]))) inline F as_float(I a)
        SHOAL_EACH(F, float_of(uint32_t(a.v[i]))) inline I load_bytes(const uint8_t* p) SHOAL_EACH(I, p[i]) inline I
    load_signed(const uint8_t* p) SHOAL_EACH(I, int8_t(p[i])) inline I load_table(const uint8_t* p)
        SHOAL_EACH(I, (memcpy(&each.v[i], p + i % 4 * 4, 4), each.v[i])) inline I look_up(I table, I codes) {
    uint8_t t[64], c[64];
    memcpy(t, table.v, 64), memcpy(c, codes.v, 64);
    for (int i = 0; i < 64; i++) c[i] = t[c[i]];
    memcpy(codes.v, c, 64);
    return codes;
}
inline I imax(I a, I b) SHOAL_EACH(I, a.v[i] > b.v[i] ? a.v[i] : b.v[i]) inline int himax(I a) {
    int m = a.v[0];
    for (int i = 1; i < 16; i++) m = a.v[i] > m ? a.v[i] : m;
    return m;
}
inline int hisum(I a) {
    uint32_t s = 0;
    for (int i = 0; i < 16; i++) s += uint32_t(a.v[i]);
    return int(s);
}
inline void store_bytes(int8_t* p, I a) {
    for (int i = 0; i < 16; i++) p[i] = int8_t(a.v[i] > 127 ? 127 : a.v[i] < -128 ? -128 : a.v[i]);
}
inline void store_codes(uint8_t* p, I a) {
    for (int i = 0; i < 16; i++) p[i] = uint8_t(a.v[i] > 255 ? 255 : a.v[i] < 0 ? 0 : a.v[i]);
}
template <bool kWide>
inline I dot(I c, I w, I a) {
    uint8_t u[64];
    int8_t s[64];
    memcpy(u, w.v, 64);
    memcpy(s, a.v, 64);
    for (int i = 0; i < 16; i++)
        for (int b = 0; b < 4; b++) c.v[i] += int32_t(u[4 * i + b]) * s[4 * i + b];
    return c;
}
inline F dotbf(F c, I a, I b) {
    for (int i = 0; i < 16; i++) {
        c.v[i] += float_of(uint32_t(a.v[i]) << 16) * float_of(uint32_t(b.v[i]) << 16);
        c.v[i] += float_of(uint32_t(a.v[i]) & 0xffff0000u) * float_of(uint32_t(b.v[i]) & 0xffff0000u);
    }
    return c;
}
#endif

#if defined(SHOAL_PLAIN) || !defined(__AVX512BF16__)
inline void store_bf16(uint16_t* p, F a) {
    float x[16];
    store(x, a);
    for (int i = 0; i < 16; i++) p[i] = to_bf16(x[i]);
}
#endif

// 2^x for x <= 0 to a relative error of 3e-7; below -126 it stays 2^-126, NaN stays NaN.
inline F exp2_of(F x) {
    x = max2(set(-126.f), x);
    F r = round_even(x), f = sub(x, r), p = set(1.535336188e-4f);
    p = fma(p, f, set(1.339887440e-3f));
    p = fma(p, f, set(9.618437357e-3f));
    p = fma(p, f, set(5.550332548e-2f));
    p = fma(p, f, set(2.402264791e-1f));
    p = fma(p, f, set(6.931472028e-1f));
    return scale2(fma(p, f, set(1.f)), r);
}

// 1 / (1 + exp(-x)): exp(min(x, 0)) / (1 + exp(-|x|)) cannot overflow.
inline F sigmoid(F x) {
    const F minus = sub(set(0.f), x), size = max2(minus, x), below = sub(set(0.f), max2(set(0.f), minus));
    return div(exp2_of(mul(below, set(1.44269504f))), add(set(1.f), exp2_of(mul(size, set(-1.44269504f)))));
}

// To an absolute error of 1e-7.
inline F tanh_of(F x) {
    const F size = max2(set(1e-30f), max2(sub(set(0.f), x), x)), e = exp2_of(mul(size, set(-2.f * 1.44269504f)));
    return mul(x, div(div(sub(set(1.f), e), add(set(1.f), e)), size));
}

}
}  // namespace shoal::(anonymous)
