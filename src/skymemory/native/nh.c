/* NH, in C that compilers turn into vector instructions by themselves: bytes composed to words, no intrinsics. */
#include "nh.h"

#include <string.h>

enum { GROUP = 32, HALF = GROUP / 2, LANES = HALF / 4 };

static inline uint32_t le32(const uint8_t *p)
{
    return p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

/* Add the products of whole groups of words to the sums of both passes. Their lanes are arrays of its own, which cannot lie in
 * the data: else they are no vectors. */
static void add_groups(const uint8_t *key, const uint8_t *data, size_t size, uint64_t sums[2])
{
    uint64_t first[LANES] = {0}, second[LANES] = {0};
    for (; size; key += GROUP, data += GROUP, size -= GROUP) {
#pragma GCC unroll 1 /* unrolled here, the loop is half as fast: gcc then no longer sees the vectors */
        for (int lane = 0; lane < LANES; lane++) {
            const uint8_t *k = key + 4 * lane;
            uint32_t low = le32(data + 4 * lane), high = le32(data + HALF + 4 * lane);
            first[lane] += (uint64_t)(low + le32(k)) * (uint32_t)(high + le32(k + HALF));
            second[lane] += (uint64_t)(low + le32(k + HALF)) * (uint32_t)(high + le32(k + GROUP));
        }
    }
    for (int lane = 0; lane < LANES; lane++)
        sums[0] += first[lane], sums[1] += second[lane];
}

size_t sky_nh(const uint8_t *key, const uint8_t *payload, size_t size, uint8_t *out)
{
    size_t hashed = 0;
    for (size_t at = 0; at < size; at += NH_BLOCK, hashed += NH_HASH_BYTES) {
        size_t bytes = size - at < NH_BLOCK ? size - at : NH_BLOCK, whole = bytes - bytes % GROUP;
        uint64_t sums[2] = {0};
        add_groups(key, payload + at, whole, sums);
        if (whole < bytes) {
            uint8_t last[GROUP] = {0};
            memcpy(last, payload + at + whole, bytes - whole);
            add_groups(key + whole, last, GROUP, sums);
        }
        for (int i = 0; i < NH_HASH_BYTES; i++)
            out[hashed + (size_t)i] = (uint8_t)(sums[i / 8] >> 8 * (i % 8));
    }
    return hashed;
}
