/* CRC-32 (zlib's, reflected 0xEDB88320): by carry-less multiplication where the processor has it, else by tables.
 *
 * Folding: 16 bytes of message followed by D bits may be replaced by their product with x^D modulo the polynomial,
 * added to what stands D bits further on. Sixteen bytes are left in the end; the tables finish them.
 * Source of the method: Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ", Intel 2009.
 */
#include "crc.h"

#include <string.h>

static uint32_t slices[8][256];
static uint32_t (*folded)(uint32_t, const uint8_t *, size_t);
static const char *kind = "tables";

uint32_t sky_multiply(uint32_t a, uint32_t b)
{
    uint32_t product = 0;
    for (; a; a <<= 1) {
        product ^= (a & SKY_ONE) ? b : 0;
        b = (b >> 1) ^ ((b & 1) ? SKY_POLYNOMIAL : 0);
    }
    return product;
}

/* x^exponent modulo the polynomial */
uint32_t sky_power_of_x(uint64_t exponent)
{
    uint32_t result = SKY_ONE, square = SKY_ONE >> 1;
    for (; exponent; exponent >>= 1) {
        if (exponent & 1)
            result = sky_multiply(square, result);
        square = sky_multiply(square, square);
    }
    return result;
}

static uint32_t load32(const uint8_t *p)
{
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

/* Eight bytes a step; takes and gives the running remainder without the inversions at the ends. */
static uint32_t by_tables(uint32_t crc, const uint8_t *p, size_t n)
{
    for (; n >= 8; p += 8, n -= 8) {
        uint32_t low = crc ^ load32(p), high = load32(p + 4);
        crc = slices[7][low & 255] ^ slices[6][low >> 8 & 255] ^ slices[5][low >> 16 & 255] ^ slices[4][low >> 24] ^
              slices[3][high & 255] ^ slices[2][high >> 8 & 255] ^ slices[1][high >> 16 & 255] ^ slices[0][high >> 24];
    }
    for (; n; p++, n--)
        crc = (crc >> 8) ^ slices[0][(crc ^ *p) & 255];
    return crc;
}

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

/* For a distance of D bits: x^(D+32) for the earlier eight bytes, x^(D-32) for the later, one place up. */
typedef struct {
    uint64_t earlier, later;
} Fold;
static Fold over_128, over_512, over_2048;

static Fold fold_over(unsigned bits)
{
    Fold fold = {(uint64_t)sky_power_of_x(bits + 32) << 1, (uint64_t)sky_power_of_x(bits - 32) << 1};
    return fold;
}

#define SSE __attribute__((target("sse4.1,pclmul")))
#define AVX512 __attribute__((target("avx512f,avx512vl,avx512dq,vpclmulqdq,pclmul")))

#define FOLD128(a, k, next) \
    _mm_xor_si128(_mm_xor_si128(_mm_clmulepi64_si128(a, k, 0x00), _mm_clmulepi64_si128(a, k, 0x11)), next)
#define FOLD512(a, k, next) \
    _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(a, k, 0x00), _mm512_clmulepi64_epi128(a, k, 0x11), next, 0x96)
#define LOAD128(p) _mm_loadu_si128((const __m128i *)(p))
#define LOAD512(p) _mm512_loadu_si512((const void *)(p))

SSE static uint32_t finish(__m128i rest, const uint8_t *p, size_t n)
{
    const __m128i k = _mm_set_epi64x((long long)over_128.later, (long long)over_128.earlier);
    uint8_t last[16];
    for (; n >= 16; p += 16, n -= 16)
        rest = FOLD128(rest, k, LOAD128(p));
    _mm_storeu_si128((__m128i *)last, rest);
    return by_tables(by_tables(0, last, sizeof last), p, n);
}

/* From 64 bytes. */
SSE static uint32_t by_128(uint32_t crc, const uint8_t *p, size_t n)
{
    const __m128i far = _mm_set_epi64x((long long)over_512.later, (long long)over_512.earlier);
    const __m128i near = _mm_set_epi64x((long long)over_128.later, (long long)over_128.earlier);
    __m128i a = _mm_xor_si128(LOAD128(p), _mm_cvtsi32_si128((int)crc));
    __m128i b = LOAD128(p + 16), c = LOAD128(p + 32), d = LOAD128(p + 48);
    for (p += 64, n -= 64; n >= 64; p += 64, n -= 64) {
        a = FOLD128(a, far, LOAD128(p));
        b = FOLD128(b, far, LOAD128(p + 16));
        c = FOLD128(c, far, LOAD128(p + 32));
        d = FOLD128(d, far, LOAD128(p + 48));
    }
    b = FOLD128(a, near, b);
    c = FOLD128(b, near, c);
    return finish(FOLD128(c, near, d), p, n);
}

/* From 256 bytes; shorter goes to by_128. */
AVX512 static uint32_t by_512(uint32_t crc, const uint8_t *p, size_t n)
{
    if (n < 256)
        return by_128(crc, p, n);
    const __m512i far = _mm512_broadcast_i64x2(_mm_set_epi64x((long long)over_2048.later, (long long)over_2048.earlier));
    const __m512i mid = _mm512_broadcast_i64x2(_mm_set_epi64x((long long)over_512.later, (long long)over_512.earlier));
    const __m128i near = _mm_set_epi64x((long long)over_128.later, (long long)over_128.earlier);
    __m512i a = _mm512_xor_si512(LOAD512(p), _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)crc)));
    __m512i b = LOAD512(p + 64), c = LOAD512(p + 128), d = LOAD512(p + 192);
    for (p += 256, n -= 256; n >= 256; p += 256, n -= 256) {
        a = FOLD512(a, far, LOAD512(p));
        b = FOLD512(b, far, LOAD512(p + 64));
        c = FOLD512(c, far, LOAD512(p + 128));
        d = FOLD512(d, far, LOAD512(p + 192));
    }
    b = FOLD512(a, mid, b);
    c = FOLD512(b, mid, c);
    d = FOLD512(c, mid, d);
    for (; n >= 64; p += 64, n -= 64)
        d = FOLD512(d, mid, LOAD512(p));
    __m128i rest = _mm512_castsi512_si128(d);
    rest = FOLD128(rest, near, _mm512_extracti64x2_epi64(d, 1));
    rest = FOLD128(rest, near, _mm512_extracti64x2_epi64(d, 2));
    rest = FOLD128(rest, near, _mm512_extracti64x2_epi64(d, 3));
    return finish(rest, p, n);
}

static int has_pclmul(void)
{
    return __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
}

static int has_vpclmul(void)
{
    return has_pclmul() && __builtin_cpu_supports("vpclmulqdq") && __builtin_cpu_supports("avx512f") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
#endif

/* Choose "tables", "pclmul", "vpclmul" or "best"; 0 where this processor lacks it. */
int sky_crc_select(const char *wanted)
{
    int best = !strcmp(wanted, "best");
#if defined(__x86_64__) && defined(__GNUC__)
    if ((best || !strcmp(wanted, "vpclmul")) && has_vpclmul()) {
        folded = by_512, kind = "vpclmul";
        return 1;
    }
    if ((best || !strcmp(wanted, "pclmul")) && has_pclmul()) {
        folded = by_128, kind = "pclmul";
        return 1;
    }
#endif
    if (!best && strcmp(wanted, "tables"))
        return 0;
    folded = NULL, kind = "tables";
    return 1;
}

const char *sky_crc_kind(void)
{
    return kind;
}

void sky_crc_init(void)
{
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++)
            crc = (crc >> 1) ^ ((crc & 1) ? SKY_POLYNOMIAL : 0);
        slices[0][byte] = crc;
    }
    for (int slice = 1; slice < 8; slice++)
        for (int byte = 0; byte < 256; byte++)
            slices[slice][byte] = (slices[slice - 1][byte] >> 8) ^ slices[0][slices[slice - 1][byte] & 255];
#if defined(__x86_64__) && defined(__GNUC__)
    __builtin_cpu_init();
    over_128 = fold_over(128);
    over_512 = fold_over(512);
    over_2048 = fold_over(2048);
#endif
    sky_crc_select("best");
}

uint32_t sky_crc32(uint32_t crc, const uint8_t *data, size_t size)
{
    uint32_t (*fold)(uint32_t, const uint8_t *, size_t) = folded; /* once: another thread may choose another loop */
    crc = ~crc;
    return ~(fold && size >= 64 ? fold(crc, data, size) : by_tables(crc, data, size));
}
