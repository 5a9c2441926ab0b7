// The block codecs as `blocks.py` and its codecs define them, top-k as `topk.py` does, the residual of `pseudograd.py`,
// and the outer step of `outer.Nesterov`, the same bits, in one pass over the values.
//
// Compiled on the machine where it runs (`build.py`). Every operation is rounded on its own: no -ffast-math, and no
// fused multiply-add (-ffp-contract=off). Only the sum of squares, which is for screens, is added up in any order.
// Sizes, and headers that are to be decoded, were checked by the caller. Bytes are little-endian, as the hosts are.

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define MAX_PACKED 1024  // values of a block of codes below 8 bits, at most; 4 KiB of fp32 stay in the first cache
#define MIN_MAGNITUDE 0x1p-100f
#define MIN_INT8_SCALE 0x1p-126f
#define MAX_HEADER 0x1p120f
#define FIXED_POINT 0x1p20f

INLINE uint32_t bits_of(float value) { uint32_t bits; memcpy(&bits, &value, 4); return bits; }
INLINE float float_of(uint32_t bits) { float value; memcpy(&value, &bits, 4); return value; }
INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// What comes `AHEAD` bytes behind these values is brought to the cache while they are worked on: an encoding pass takes
// half as long, for between its bursts of arithmetic the processor fetches too little by itself. Loops that only stream
// (the outer step) gain nothing. Asking for what is behind the end does no harm.
#define AHEAD 4096
#define LINE 64
INLINE void fetch(const void *values, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += LINE) __builtin_prefetch((const char *)values + AHEAD + i);
}
INLINE void fetch_to_write(void *values, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += LINE) __builtin_prefetch((char *)values + AHEAD + i, 1);
}

// ---------------------------------------------------------------- headers

INLINE float read_bf16(const uint8_t *at) {
    uint16_t half;
    memcpy(&half, at, 2);
    return float_of((uint32_t)half << 16);
}

INLINE void write_bf16(uint8_t *at, uint32_t bits) {
    uint16_t half = (uint16_t)(bits >> 16);
    memcpy(at, &half, 2);
}

INLINE float write_rounded_up(uint8_t *at, float scale) {
    uint32_t bits = bits_of(scale) + 0xFFFF;
    write_bf16(at, bits);
    return float_of(bits & 0xFFFF0000);
}

INLINE void write_nearest(uint8_t *at, float value) {
    uint32_t bits = bits_of(value);
    write_bf16(at, bits + 0x7FFF + (bits >> 16 & 1));
}

// ---------------------------------------------------------------- what is known of a block before it is encoded

typedef struct { float largest; uint32_t sum; } Survey;

// The largest absolute value (as integers floats keep their order, and nan is above all), and the sum of all bits.
INLINE Survey survey(const float *values, int64_t count) {
    uint32_t largest = 0, sum = 0;
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits = bits_of(values[i]), magnitude = bits & 0x7FFFFFFF;
        largest = magnitude > largest ? magnitude : largest;
        sum += bits;
    }
    return (Survey){float_of(largest), sum};
}

INLINE uint32_t mixed(uint32_t number) {
    number = (number ^ number >> 16) * 0x45D9F3B;
    number = (number ^ number >> 16) * 0x45D9F3B;
    return number ^ number >> 16;
}

INLINE float dither(uint32_t seed, int64_t column) {
    return (float)(int32_t)(mixed(seed + (uint32_t)column * 0x9E3779B9u) >> 8) * 0x1p-24f;
}

INLINE float divisor(float scale) { return scale == 0 ? INFINITY : scale; }

// ---------------------------------------------------------------- packing

INLINE int64_t packed_bytes(int64_t count, int bits) { return (count * bits + 7) / 8; }

INLINE void pack(uint8_t *codes, int64_t count, int bits, uint8_t *out) {
    int64_t width = packed_bytes(count, bits);
    memset(codes + count, 0, width * (8 / bits) - count);
    for (int64_t i = 0; i < width; i++) {
        uint8_t byte = 0;
        for (int plane = 0; plane < 8 / bits; plane++) byte |= codes[i + plane * width] << plane * bits;
        out[i] = byte;
    }
}

INLINE void unpack(const uint8_t *in, int64_t count, int bits, uint8_t *codes) {
    int64_t width = packed_bytes(count, bits);
    for (int plane = 0; plane < 8 / bits; plane++)
        for (int64_t i = 0; i < width; i++) codes[i + plane * width] = in[i] >> plane * bits & ((1 << bits) - 1);
}

// ---------------------------------------------------------------- one block of each codec: encode

#define ENCODER const float *values, int64_t count, Survey found, const uint32_t *seed, uint8_t *header, uint8_t *out

INLINE float grid_code(float ratio, float limit, const uint32_t *seed, int64_t column) {
    if (!seed) return rintf(ratio);
    float code = floorf(ratio + dither(*seed, column));
    return code < -limit ? -limit : code > limit ? limit : code;
}

INLINE void encode_int8(ENCODER) {
    float scale = found.largest / 127;
    if (scale < MIN_INT8_SCALE) scale = 0;
    memcpy(header, &scale, 4);
    float by = divisor(scale);
    for (int64_t i = 0; i < count; i++) out[i] = (uint8_t)(int32_t)grid_code(values[i] / by, 127, seed, i);
}

INLINE void encode_int4(ENCODER) {
    uint8_t codes[MAX_PACKED + 8];
    float by = divisor(write_rounded_up(header, found.largest < MIN_MAGNITUDE ? 0 : found.largest / 7));
    for (int64_t i = 0; i < count; i++) codes[i] = (uint8_t)(8 + (int32_t)grid_code(values[i] / by, 7, seed, i));
    pack(codes, count, 4, out);
}

INLINE void encode_e3m0(ENCODER) {
    uint8_t codes[MAX_PACKED + 8];
    float by = divisor(write_rounded_up(header, found.largest < MIN_MAGNITUDE ? 0 : found.largest));
    for (int64_t i = 0; i < count; i++) {
        float ratio = values[i] / by, size = fabsf(ratio);
        int32_t code = (int32_t)(bits_of(size) >> 23) - 120;
        code = code < 0 ? 0 : code;
        float step = float_of((uint32_t)((code < 1 ? 1 : code) + 120) << 23);
        float share = (size - (code > 0 ? step : 0)) / step;
        code += share > (seed ? dither(*seed, i) : 0.5f);
        codes[i] = (uint8_t)(code + (ratio < 0 && code > 0 ? 8 : 0));
    }
    pack(codes, count, 4, out);
}

INLINE void encode_sign(ENCODER) {
    uint8_t codes[MAX_PACKED + 8];
    float largest = found.largest < MIN_MAGNITUDE ? 0 : found.largest, factor = FIXED_POINT / divisor(largest);
    int32_t sum = 0;  // at most 2^10 values of 2^20
    for (int64_t i = 0; i < count; i++) {
        sum += (int32_t)fabsf(rintf(values[i] * factor));
        codes[i] = values[i] >= 0;
    }
    write_nearest(header, (float)((double)sum / (double)count * ((double)largest / FIXED_POINT)));
    pack(codes, count, 1, out);
    (void)seed;
}

INLINE void encode_binned(ENCODER, int bits, double sigmas, uint8_t *codes) {
    const int bins = 1 << bits;
    float largest = found.largest < MIN_MAGNITUDE ? 0 : found.largest, factor = FIXED_POINT / divisor(largest);
    int64_t sum = 0, squares = 0, sums[256] = {0}, counts[256] = {0};
    for (int64_t i = 0; i < count; i++) {
        int32_t number = (int32_t)rintf(values[i] * factor);
        sum += number;
        squares += (int64_t)number * number;
    }
    double mean = (double)sum / (double)count, variance = (double)squares / (double)count - mean * mean;
    double sigma = sqrt(variance < 0 ? 0 : variance), half = bins / 2;
    double slope = half / (sigmas * (sigma == 0 ? INFINITY : sigma));
    float a = (float)slope, b = (float)(half - mean * slope), last = (float)(bins - 1);
    for (int64_t i = 0; i < count; i++) {
        float bin = floorf(rintf(values[i] * factor) * a + b);
        codes[i] = (uint8_t)(int32_t)(bin < 0 ? 0 : bin > last ? last : bin);
    }
    for (int64_t i = 0; i < count; i++) {
        sums[codes[i]] += (int32_t)rintf(values[i] * factor);
        counts[codes[i]] += 1;
    }
    for (int i = 0; i < bins; i++) {
        double bin_mean = (double)sums[i] / (double)(counts[i] ? counts[i] : 1);
        write_nearest(header + 2 * i, (float)(bin_mean * ((double)largest / FIXED_POINT)));
    }
    if (bits < 8) pack(codes, count, bits, out);
    (void)seed;
}

INLINE void encode_binned8(ENCODER) { encode_binned(values, count, found, seed, header, out, 8, 6, out); }
INLINE void encode_binned4(ENCODER) {
    uint8_t codes[MAX_PACKED + 8];
    encode_binned(values, count, found, seed, header, out, 4, 2.5, codes);
}
INLINE void encode_binned2(ENCODER) {
    uint8_t codes[MAX_PACKED + 8];
    encode_binned(values, count, found, seed, header, out, 2, 2, codes);
}

// ---------------------------------------------------------------- one block, or a piece of it, of each codec: decode

#define DECODER const uint8_t *header, const uint8_t *in, int64_t count, float *values

INLINE void decode_int8(DECODER) {
    float scale;
    memcpy(&scale, header, 4);
    for (int64_t i = 0; i < count; i++) values[i] = (float)(int8_t)in[i] * scale;
}

INLINE void decode_int4(DECODER) {
    uint8_t codes[MAX_PACKED + 8];
    float scale = read_bf16(header);
    unpack(in, count, 4, codes);
    for (int64_t i = 0; i < count; i++) values[i] = (float)((int32_t)codes[i] - 8) * scale;
}

INLINE void decode_e3m0(DECODER) {
    uint8_t codes[MAX_PACKED + 8];
    float scale = read_bf16(header);
    unpack(in, count, 4, codes);
    for (int64_t i = 0; i < count; i++) {
        uint32_t code = codes[i], size = code & 7;
        values[i] = float_of((size ? (size + 120) << 23 : 0) | (code & 8) << 28) * scale;
    }
}

INLINE void decode_sign(DECODER) {
    uint8_t codes[MAX_PACKED + 8];
    float scale = read_bf16(header);
    unpack(in, count, 1, codes);
    for (int64_t i = 0; i < count; i++) values[i] = codes[i] ? scale : -scale;
}

INLINE void look_up(const uint8_t *header, const uint8_t *codes, int64_t count, int bins, float *values) {
    float book[256];
    for (int i = 0; i < bins; i++) book[i] = read_bf16(header + 2 * i);
    for (int64_t i = 0; i < count; i++) values[i] = book[codes[i]];
}

INLINE void decode_binned8(DECODER) { look_up(header, in, count, 256, values); }

INLINE void decode_binned4(DECODER) {
    uint8_t codes[MAX_PACKED + 8];
    unpack(in, count, 4, codes);
    look_up(header, codes, count, 16, values);
}

INLINE void decode_binned2(DECODER) {
    uint8_t codes[MAX_PACKED + 8];
    unpack(in, count, 2, codes);
    float zero = read_bf16(header), one = read_bf16(header + 2);
    float two = read_bf16(header + 4), three = read_bf16(header + 6);
    for (int64_t i = 0; i < count; i++)
        values[i] = codes[i] & 2 ? (codes[i] & 1 ? three : two) : (codes[i] & 1 ? one : zero);
}

// ---------------------------------------------------------------- all blocks

// Returns 0, and nothing is encoded, when a value is not finite or has to saturate: those are the caller's.
INLINE int encode_all(void encode(ENCODER), int bits, int header_bytes, float largest, const float *values,
                      int64_t elements, int64_t block, int stochastic, uint8_t *out) {
    int64_t blocks = (elements + block - 1) / block;
    uint8_t *header = out, *codes = out + blocks * header_bytes;
    for (int64_t i = 0; i < blocks; i++, header += header_bytes) {
        const float *from = values + i * block;
        int64_t count = least(block, elements - i * block);
        fetch(from, 4 * count);
        Survey found = survey(from, count);
        if (!(found.largest <= largest)) return 0;
        uint32_t seed = mixed(found.sum + (uint32_t)i * 0x9E3779B9u);
        encode(from, count, found, stochastic ? &seed : 0, header, codes);
        codes += packed_bytes(count, bits);
    }
    return 1;
}

// All values of a payload, piece by piece: the `count` from `at` on are `codes` of the block that `header` is of.
#define EACH_PIECE                                                                                                     \
    const uint8_t *header = payload, *codes = payload + (elements + block - 1) / block * header_bytes;                 \
    for (int64_t start = 0; start < elements; start += block, header += header_bytes)                                  \
        for (int64_t at = start, stop = least(start + block, elements), count; count = least(MAX_PACKED, stop - at),   \
                     at < stop; at += count, codes += packed_bytes(count, bits))

INLINE void decode_all(void decode(DECODER), int bits, int header_bytes, const uint8_t *payload, int64_t elements,
                       int64_t block, float *out) {
    EACH_PIECE {
        fetch(codes, count * bits / 8);
        fetch_to_write(out + at, 4 * count);
        decode(header, codes, count, out + at);
    }
}

INLINE double fold_all(void decode(DECODER), int bits, int header_bytes, const uint8_t *payload, int64_t elements,
                       int64_t block, float weight, float *total) {
    float values[MAX_PACKED];
    double all_squares = 0;
    EACH_PIECE {
        float squares = 0;
        fetch(codes, count * bits / 8);
        fetch_to_write(total + at, 4 * count);
        decode(header, codes, count, values);
#pragma omp simd reduction(+ : squares)
        for (int64_t i = 0; i < count; i++) {
            squares += values[i] * values[i];
            total[at + i] += weight * values[i];
        }
        all_squares += squares;
    }
    return all_squares;
}

#define CODEC(NAME, BITS, HEADER_BYTES, MAX_VALUE)                                                                     \
    int diloco_encode_##NAME(const float *values, int64_t elements, int64_t block, int stochastic, uint8_t *out) {     \
        if (stochastic)                                                                                                \
            return encode_all(encode_##NAME, BITS, HEADER_BYTES, MAX_VALUE, values, elements, block, 1, out);          \
        return encode_all(encode_##NAME, BITS, HEADER_BYTES, MAX_VALUE, values, elements, block, 0, out);              \
    }                                                                                                                  \
    void diloco_decode_##NAME(const uint8_t *payload, int64_t elements, int64_t block, float *out) {                   \
        decode_all(decode_##NAME, BITS, HEADER_BYTES, payload, elements, block, out);                                  \
    }                                                                                                                  \
    double diloco_fold_##NAME(const uint8_t *payload, int64_t elements, int64_t block, float weight, float *total) {   \
        return fold_all(decode_##NAME, BITS, HEADER_BYTES, payload, elements, block, weight, total);                   \
    }

CODEC(int8, 8, 4, 127 * MAX_HEADER)
CODEC(int4, 4, 2, 7 * MAX_HEADER)
CODEC(e3m0, 4, 2, MAX_HEADER)
CODEC(sign, 1, 2, MAX_HEADER)
CODEC(binned8, 8, 512, MAX_HEADER)
CODEC(binned4, 4, 32, MAX_HEADER)
CODEC(binned2, 2, 8, MAX_HEADER)

// ---------------------------------------------------------------- top-k: which values of a chunk are sent

#define MAX_CHUNK 4096  // values of a chunk, at most: an index has 12 bits

// How a part is cut into chunks, and how many values of each are sent: of the short one at the end fewer.
#define CUT int64_t elements, int64_t chunk, int64_t kept, int64_t kept_of_rest
#define EACH_CHUNK                                                                                                     \
    for (int64_t start = 0, width, count; width = least(chunk, elements - start),                                      \
                 count = width < chunk ? kept_of_rest : kept, start < elements; start += chunk)

// So many sizes reach a limit. Sizes are integers: so floats keep their order, and nan is above all.
typedef struct { int32_t limit, reached; } Count;

INLINE Count counted(const int32_t *sizes, int64_t width, int32_t limit) {
    Count found = {limit, 0};
    for (int64_t i = 0; i < width; i++) found.reached += sizes[i] >= limit;
    return found;
}

// Where to count next, strictly between `low` and `high`. The number of values falls with about the square of their
// size, which doubles in 2^23 steps: that leads from the `first` guess to another one, and between guesses it falls in
// proportion. Every third time it is the middle, so that this ends, whatever the values are.
INLINE int32_t next_limit(Count low, Count high, int32_t first, int64_t wanted, int turn) {
    int64_t between = (int64_t)high.limit - low.limit, step = between / 2;
    if (turn % 3 != 2) {
        if (low.limit == first) step = (low.reached - wanted) * (1 << 22) / wanted;
        else if (high.limit == first) step = between - (wanted - high.reached) * (1 << 22) / wanted;
        else step = (int64_t)((double)between * ((double)(low.reached - wanted) + 0.5) / (low.reached - high.reached));
    }
    return low.limit + (int32_t)(step < 1 ? 1 : step >= between ? between - 1 : step);
}

// The largest limit that `wanted` sizes reach, or more where several are just as large. `first`: a guess.
INLINE Count limit_of(const float *values, int64_t width, int64_t wanted, int32_t first, int32_t *sizes) {
    int32_t largest = 0;
    Count low = {0, (int32_t)width}, some = {1, 0}, guess = {first, 0};
    for (int64_t i = 0; i < width; i++) {
        int32_t size = (int32_t)(bits_of(values[i]) & 0x7FFFFFFF);
        size = size < 0x7FFFFFFE ? size : 0x7FFFFFFE;
        sizes[i] = size;
        largest = size > largest ? size : largest;
        some.reached += size >= 1;
        guess.reached += size >= first;
    }
    Count high = {largest + 1, 0}, known[] = {some, guess};
    for (int i = 0; i < 2; i++)
        if (known[i].limit > low.limit && known[i].limit < high.limit)
            *(known[i].reached >= wanted ? &low : &high) = known[i];
    for (int turn = 0; low.reached != wanted && high.limit - low.limit > 1; turn++) {
        Count found = counted(sizes, width, next_limit(low, high, first, wanted, turn));
        *(found.reached >= wanted ? &low : &high) = found;
    }
    return low;
}

// What is sent: all that reach the limit, but of those just as large as it only the first ones where they are too many.
INLINE void choose(const int32_t *sizes, int64_t width, Count limit, int64_t wanted, uint8_t *chosen) {
    memset(chosen + width, 0, 7);
    if (limit.reached == wanted) {
        for (int64_t i = 0; i < width; i++) chosen[i] = sizes[i] >= limit.limit;
        return;
    }
    int64_t room = wanted - counted(sizes, width, limit.limit + 1).reached;
    for (int64_t i = 0; i < width; i++) chosen[i] = sizes[i] > limit.limit || (sizes[i] == limit.limit && room-- > 0);
}

// By the eight bits of a byte: which of them are set, rising.
INLINE void list_bits(uint8_t set[256][8]) {
    memset(set, 0, 256 * 8);
    for (int byte = 0; byte < 256; byte++)
        for (int bit = 0, found = 0; bit < 8; bit++)
            if (byte >> bit & 1) set[byte][found++] = (uint8_t)bit;
}

// Their rising indices; room for eight more. Without a branch, which would be taken by chance.
INLINE void indices_of(const uint8_t *chosen, int64_t width, uint8_t set[256][8], uint16_t *indices) {
    for (int64_t i = 0; i < width; i += 8) {
        uint64_t eight;
        memcpy(&eight, chosen + i, 8);
        const uint8_t *places = set[eight * 0x0102040810204080u >> 56];
        for (int j = 0; j < 8; j++) indices[j] = (uint16_t)(i + places[j]);
        indices += eight * 0x0101010101010101u >> 56;
    }
}

// Two numbers of 12 bits in three bytes.
INLINE void pack_pairs(const uint16_t *indices, int64_t pairs, uint8_t *out) {
    for (int64_t i = 0; i < pairs; i++) {
        uint32_t both = indices[2 * i] | (uint32_t)indices[2 * i + 1] << 12;
        out[3 * i] = (uint8_t)both;
        out[3 * i + 1] = (uint8_t)(both >> 8);
        out[3 * i + 2] = (uint8_t)(both >> 16);
    }
}

// `count` numbers from the one at `first` on; room for one more.
INLINE void unpack_indices(const uint8_t *packed, int64_t first, int64_t count, uint16_t *indices) {
    const uint8_t *in = packed + first / 2 * 3;
    if (first & 1) {
        *indices++ = (uint16_t)(in[1] >> 4 | in[2] << 4);
        in += 3;
        count -= 1;
    }
    for (int64_t i = 0; i < (count + 1) / 2; i++) {
        uint32_t both = in[3 * i] | (uint32_t)in[3 * i + 1] << 8 | (uint32_t)in[3 * i + 2] << 16;
        indices[2 * i] = both & 0xFFF;
        indices[2 * i + 1] = (uint16_t)(both >> 12);
    }
}

// The packed indices of the largest values of each chunk, and these values: what is not finite is among them.
void diloco_topk_select(const float *values, CUT, uint8_t *packed, float *largest) {
    int32_t sizes[MAX_CHUNK];
    uint8_t chosen[MAX_CHUNK + 7], set[256][8];
    uint16_t indices[MAX_CHUNK + 9];
    int64_t waiting = 0;  // whether an index has no partner yet
    Count limit = {1, 0};
    list_bits(set);
    EACH_CHUNK {
        uint16_t *found = indices + waiting;
        limit = limit_of(values + start, width, count, limit.limit, sizes);
        choose(sizes, width, limit, count, chosen);
        indices_of(chosen, width, set, found);
        for (int64_t i = 0; i < count; i++) largest[i] = values[start + found[i]];
        int64_t pairs = (waiting + count) / 2;
        pack_pairs(indices, pairs, packed);
        waiting = (waiting + count) & 1;
        indices[0] = indices[2 * pairs];
        packed += 3 * pairs;
        largest += count;
    }
    indices[1] = 0;
    if (waiting) pack_pairs(indices, 1, packed);
}

// Whether the indices rise within every chunk, and none is beyond it.
int diloco_topk_good(const uint8_t *packed, CUT) {
    uint16_t indices[MAX_CHUNK + 1];
    int64_t first = 0;
    EACH_CHUNK {
        int falls = 0;
        unpack_indices(packed, first, count, indices);
        for (int64_t i = 1; i < count; i++) falls |= indices[i] <= indices[i - 1];
        if (falls || indices[count - 1] >= width) return 0;
        first += count;
    }
    return 1;
}

// What follows is given good indices.

void diloco_topk_decode(const uint8_t *packed, const float *sent, CUT, float *out) {
    uint16_t indices[MAX_CHUNK + 1];
    int64_t first = 0;
    EACH_CHUNK {
        unpack_indices(packed, first, count, indices);
        memset(out + start, 0, (size_t)width * 4);
        for (int64_t i = 0; i < count; i++) out[start + indices[i]] = sent[first + i];
        first += count;
    }
}

void diloco_topk_fold(const uint8_t *packed, const float *sent, CUT, float weight, float *total) {
    uint16_t indices[MAX_CHUNK + 1];
    int64_t first = 0;
    EACH_CHUNK {
        unpack_indices(packed, first, count, indices);
        for (int64_t i = 0; i < count; i++) total[start + indices[i]] += weight * sent[first + i];
        first += count;
    }
}

// Divided by `divisor`, or where that is negative by the weights of those who sent the value.
void diloco_topk_mean(int64_t terms, const uint8_t *const *packed, const float *const *sent, const float *weights,
                      float divisor, CUT, float *out) {
    uint16_t indices[MAX_CHUNK + 1];
    float sums[MAX_CHUNK], divisors[MAX_CHUNK];
    int64_t first = 0;
    EACH_CHUNK {
        memset(sums, 0, sizeof sums);
        for (int64_t i = 0; i < width; i++) divisors[i] = divisor < 0 ? 0 : divisor;
        for (int64_t term = 0; term < terms; term++) {
            const float *values = sent[term] + first;
            float weight = weights[term];
            unpack_indices(packed[term], first, count, indices);
            for (int64_t i = 0; i < count; i++) sums[indices[i]] += values[i] * weight;
            if (divisor < 0)
                for (int64_t i = 0; i < count; i++) divisors[indices[i]] += values[i] != 0 ? weight : 0;
        }
        for (int64_t i = 0; i < width; i++) {
            float mean = sums[i] / divisors[i];
            mean = mean > FLT_MAX ? FLT_MAX : mean < -FLT_MAX ? -FLT_MAX : mean;
            out[start + i] = mean == mean ? mean : 0;  // 0 / 0 where nobody sent anything
        }
        first += count;
    }
}

// ---------------------------------------------------------------- sizes

// The largest absolute value; nan where one is there, which is above all.
float diloco_magnitude(const float *values, int64_t elements) {
    int32_t largest = 0;
#pragma omp simd reduction(max : largest)
    for (int64_t i = 0; i < elements; i++) {
        int32_t size = (int32_t)(bits_of(values[i]) & 0x7FFFFFFF);
        largest = size > largest ? size : largest;
    }
    return float_of((uint32_t)largest);
}

// ---------------------------------------------------------------- error feedback

// gradient + residual * decay, and whether all of it is finite. `out` may be where the gradient is.
int diloco_with_residual(const float *gradient, const float *residual, int64_t elements, float decay, float *out) {
    int32_t largest = 0;
#pragma omp simd reduction(max : largest)
    for (int64_t i = 0; i < elements; i++) {
        float target = gradient[i] + residual[i] * decay;
        int32_t size = (int32_t)(bits_of(target) & 0x7FFFFFFF);
        out[i] = target;
        largest = size > largest ? size : largest;
    }
    return largest < 0x7F800000;
}

// ---------------------------------------------------------------- the outer step

// b = kept * momentum + share * mean;  anchor - (mu * b + mean) * rate. `next_*` may be where the others are.
void diloco_nesterov(const float *mean, const float *momentum, const float *anchor, int64_t elements, float kept,
                     float share, float mu, float rate, float *next_momentum, float *next_anchor) {
#pragma omp simd
    for (int64_t i = 0; i < elements; i++) {
        float b = momentum[i] * kept + mean[i] * share;  // * 1 changes no bit
        float update = (b * mu + mean[i]) * rate;
        next_momentum[i] = b;
        next_anchor[i] = anchor[i] - update;
    }
}
