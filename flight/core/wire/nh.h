/* The keyed hash of payloads that MACs cover: NH of UMAC (RFC 4418, 5.2.2) of blocks of 1,024 bytes in two Toeplitz passes.
 * Twin of skymemory.native.twin.nh. */
#ifndef SKY_NH_H
#define SKY_NH_H

#include <stddef.h>
#include <stdint.h>

#include "wire/sha.h"

enum { SKY_NH_BLOCK = 1024, SKY_NH_GROUP = 32, SKY_NH_LANES = 4, SKY_NH_KEY_BYTES = SKY_NH_BLOCK + SKY_NH_GROUP / 2 };

/* Of a payload that comes in pieces. */
typedef struct {
    const uint8_t *key; /* SKY_NH_KEY_BYTES */
    uint64_t sums[2][SKY_NH_LANES];
    uint32_t at, filled; /* in the block, whole groups; in the group after them */
    uint8_t group[SKY_NH_GROUP];
} sky_nh;

void sky_nh_begin(sky_nh *nh, const uint8_t *key);
/* Hands 16 bytes to `sha` for each block that ends. */
void sky_nh_take(sky_nh *nh, sky_sha *sha, const uint8_t *data, size_t size);
void sky_nh_end(sky_nh *nh, sky_sha *sha);

#endif
