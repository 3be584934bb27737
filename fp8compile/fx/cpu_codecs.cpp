// Codecs of groups on a CPU: numerics/scaling.py and numerics/codecs.py, bit for bit. Plain C++, compiled once a machine.
//
// A tensor is `rows` rows of `row` elements each, contiguous. Groups have `size` elements and end with their row. One inv_scale
// a group, FP32 or BF16. FORMAT is defined by cpu_codecs.py: Int8, E4M3 or E5M2.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace {

inline float as_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline uint32_t as_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float within(float value, float limit) {  // NaN stays
    value = value < -limit ? -limit : value;
    return value > limit ? limit : value;
}

struct Float32 {
    using Stored = float;
    static constexpr float limit = std::numeric_limits<float>::max();
    static float load(Stored x) { return x; }
    static Stored store(float x) { return x; }
};

struct BFloat16 {
    using Stored = uint16_t;
    static constexpr float limit = 3.38953139e38f;
    static float load(Stored x) { return as_float(uint32_t(x) << 16); }
    static Stored store(float x) {  // to nearest, ties to even
        uint32_t bits = as_bits(x);
        uint32_t near = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
        return Stored((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : near);
    }
};

struct Scales {  // one a group, FP32 or BF16; and amaxes, in the values' type, where they are asked for
    void* stored;
    bool are_bf16;
    void* amaxes;
    float load(int64_t group) const {
        return are_bf16 ? BFloat16::load(static_cast<uint16_t*>(stored)[group]) : static_cast<float*>(stored)[group];
    }
    float store(int64_t group, uint32_t amax_bits, float inverse_of_max) const {  // scaling.py, exact_inv_scale
        constexpr float smallest = 1.17549435e-38f;
        float amax = as_float(amax_bits), found = amax * inverse_of_max;
        found = found < smallest ? smallest : found;
        if (are_bf16) found = as_float((as_bits(found) + 0x8000) & 0xffff0000);  // ties away from 0
        found = amax < std::numeric_limits<float>::infinity() ? found : std::numeric_limits<float>::quiet_NaN();
        if (are_bf16) static_cast<uint16_t*>(stored)[group] = BFloat16::store(found);
        else static_cast<float*>(stored)[group] = found;
        return found;
    }
};

struct Int8 {
    using Code = int8_t;
    static constexpr float max = 127.0f;
    static constexpr float inverse = float(1.0 / 127.0);
    static Code code(float x) { return Code(int32_t(within(std::rint(x), max))); }
    static float value(Code code, const float*) { return float(code); }
};

// FP8 with M bits of mantissa and this bias; codes by rounding FP32's bits, as c10's conversions do.
template <int M, int BIAS, bool HAS_INF>
struct Float8 {
    using Code = uint8_t;
    static constexpr float max = HAS_INF ? 57344.0f : 448.0f;
    static constexpr float inverse = float(1.0 / (HAS_INF ? 57344.0 : 448.0));
    static Code code(float x) {
        uint32_t bits = as_bits(within(x, max)), sign = bits & 0x80000000;
        bits ^= sign;
        constexpr uint32_t shift = 23 - M, add = uint32_t(BIAS - 127) << 23, half = (1u << (shift - 1)) - 1;
        constexpr uint32_t magic = uint32_t(127 - BIAS + shift + 1) << 23, normal = uint32_t(128 - BIAS) << 23;
        uint32_t small = as_bits(as_float(bits) + as_float(magic)) - magic;
        uint32_t large = (bits + add + half + ((bits >> shift) & 1)) >> shift;
        uint32_t found = bits < normal ? small : large;
        return Code((bits > 0x7f800000 ? 0x7fu : found) | (sign >> 24));
    }
    static float value(Code code, const float* values) { return values[code]; }
    static void fill(float* values) {
        for (int code = 0; code < 256; ++code) {
            int exponent = (code & 0x7f) >> M, mantissa = code & ((1 << M) - 1), last = 0x7f >> M;
            float magnitude = exponent ? std::ldexp(float((1 << M) + mantissa), exponent - BIAS - M)
                                       : std::ldexp(float(mantissa), 1 - BIAS - M);
            bool is_last = exponent == last;
            if (HAS_INF && is_last) magnitude = std::numeric_limits<float>::infinity();
            if (HAS_INF ? is_last && mantissa : (code & 0x7f) == 0x7f) magnitude = std::numeric_limits<float>::quiet_NaN();
            values[code] = code & 0x80 ? -magnitude : magnitude;
        }
    }
};

using E4M3 = Float8<3, 7, false>;
using E5M2 = Float8<2, 15, true>;

template <class Format>
const float* values_of() {
    static const struct Table {
        float values[256];
        Table() { Format::fill(values); }
    } table;
    return table.values;
}
template <>
const float* values_of<Int8>() { return nullptr; }

template <class X>
uint32_t amax_bits(const typename X::Stored* x, int64_t n) {  // bits are ordered as magnitudes are, NaN last
    uint32_t most = 0;
    for (int64_t i = 0; i < n; ++i) most = std::max(most, as_bits(X::load(x[i])) & 0x7fffffff);
    return most;
}

template <class Format, class X>
void codes_of(const typename X::Stored* x, typename Format::Code* codes, int64_t n, float scale) {
    for (int64_t i = 0; i < n; ++i) codes[i] = Format::code(X::load(x[i]) * scale);
}

struct Shape {
    int64_t rows, row, size;
    int threads;
    int64_t in_row() const { return (row + size - 1) / size; }
    int64_t groups() const { return rows * in_row(); }
    int64_t begin(int64_t group) const { return group / in_row() * row + group % in_row() * size; }
    int64_t count(int64_t group) const { return std::min(size, row - group % in_row() * size); }
};

template <class Format, class X>
void encode(Shape s, const void* from, void* to, Scales scales) {
    auto x = static_cast<const typename X::Stored*>(from);
    auto amaxes = static_cast<typename X::Stored*>(scales.amaxes);
    auto codes = static_cast<typename Format::Code*>(to);
    if (s.groups() == 1) {  // one scale for the tensor: its threads share the work within the group
        constexpr int64_t chunk = 8192;
        uint32_t most = 0;
#pragma omp parallel for num_threads(s.threads) reduction(max : most)
        for (int64_t at = 0; at < s.row; at += chunk) most = std::max(most, amax_bits<X>(x + at, std::min(chunk, s.row - at)));
        if (amaxes) amaxes[0] = X::store(as_float(most));
        float scale = 1.0f / scales.store(0, most, Format::inverse);
#pragma omp parallel for num_threads(s.threads)
        for (int64_t at = 0; at < s.row; at += chunk)
            codes_of<Format, X>(x + at, codes + at, std::min(chunk, s.row - at), scale);
        return;
    }
#pragma omp parallel for num_threads(s.threads)
    for (int64_t group = 0; group < s.groups(); ++group) {
        int64_t at = s.begin(group), n = s.count(group);
        uint32_t most = amax_bits<X>(x + at, n);
        if (amaxes) amaxes[group] = X::store(as_float(most));
        float inv_scale = scales.store(group, most, Format::inverse);
        codes_of<Format, X>(x + at, codes + at, n, 1.0f / inv_scale);
    }
}

template <class Format, class X>
void decode(Shape s, const void* from, Scales scales, void* to) {
    auto codes = static_cast<const typename Format::Code*>(from);
    auto x = static_cast<typename X::Stored*>(to);
    const float* values = values_of<Format>();
    int64_t piece = s.groups() == 1 ? 8192 : s.size;  // of one group that is the tensor
    Shape by = s.groups() == 1 ? Shape{1, s.row, piece, s.threads} : s;
#pragma omp parallel for num_threads(s.threads)
    for (int64_t group = 0; group < by.groups(); ++group) {
        float inv_scale = scales.load(s.groups() == 1 ? 0 : group);
        int64_t at = by.begin(group), end = at + by.count(group);
        for (int64_t i = at; i < end; ++i) x[i] = X::store(within(Format::value(codes[i], values) * inv_scale, X::limit));
    }
}

template <class Format, class X>
void run(bool encodes, Shape s, void* x, void* codes, Scales scales) {
    encodes ? encode<Format, X>(s, x, codes, scales) : decode<Format, X>(s, codes, scales, x);
}

}  // namespace

extern "C" void codec_of_groups(
    bool encodes, bool bf16_scales, bool bf16_values, void* x, void* codes, void* scales, void* amaxes, int64_t rows,
    int64_t row, int64_t size, int threads) {
    Shape s{rows, row, size, threads};
    Scales kept{scales, bf16_scales, amaxes};
    bf16_values ? run<FORMAT, BFloat16>(encodes, s, x, codes, kept) : run<FORMAT, Float32>(encodes, s, x, codes, kept);
}
