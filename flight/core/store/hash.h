/* SipHash-1-3 of whole words: where a key has its bucket. Clients choose keys, numbers of chunks and of ground hosts; by a
 * secret seed (sky_config.hash_seed) nobody can choose them so that chains grow long.
 */
#ifndef SKY_HASH_H
#define SKY_HASH_H

#include <stdint.h>

#include "wire/bytes.h"

typedef struct {
    uint64_t v0, v1, v2, v3;
} sky_sip;

static inline uint64_t sky_rotated(uint64_t word, uint32_t by) { return word << by | word >> (64U - by); }

static inline void sky_sip_round(sky_sip *sip) {
    sip->v0 += sip->v1;
    sip->v2 += sip->v3;
    sip->v1 = sky_rotated(sip->v1, 13U) ^ sip->v0;
    sip->v3 = sky_rotated(sip->v3, 16U) ^ sip->v2;
    sip->v0 = sky_rotated(sip->v0, 32U) + sip->v3;
    sip->v2 += sip->v1;
    sip->v1 = sky_rotated(sip->v1, 17U) ^ sip->v2;
    sip->v3 = sky_rotated(sip->v3, 21U) ^ sip->v0;
    sip->v2 = sky_rotated(sip->v2, 32U);
}

static inline void sky_sip_take(sky_sip *sip, uint64_t word) {
    sip->v3 ^= word;
    sky_sip_round(sip);
    sip->v0 ^= word;
}

static inline sky_sip sky_sip_begin(const uint64_t seed[2]) {
    const sky_sip sip = {seed[0] ^ 0x736F6D6570736575U, seed[1] ^ 0x646F72616E646F6DU, seed[0] ^ 0x6C7967656E657261U,
                         seed[1] ^ 0x7465646279746573U};
    return sip;
}

static inline uint64_t sky_sip_end(sky_sip *sip, uint32_t words) {
    sky_sip_take(sip, (uint64_t)words << 59); /* bytes, in the last word's highest byte */
    sip->v2 ^= 0xFFU;
    sky_sip_round(sip);
    sky_sip_round(sip);
    sky_sip_round(sip);
    return sip->v0 ^ sip->v1 ^ sip->v2 ^ sip->v3;
}

static inline uint32_t sky_hash_word(const uint64_t seed[2], uint64_t word) {
    sky_sip sip = sky_sip_begin(seed);
    sky_sip_take(&sip, word);
    return (uint32_t)(sky_sip_end(&sip, 1U) & 0xFFFFFFFFU);
}

/* Of a key and a number beside it. */
static inline uint32_t sky_hash_key(const uint64_t seed[2], const uint8_t *key, uint32_t more) {
    sky_sip sip = sky_sip_begin(seed);
    for (uint32_t at = 0; at < 32U; at += 8U) {
        sky_sip_take(&sip, sky_load64(key + at));
    }
    sky_sip_take(&sip, more);
    return (uint32_t)(sky_sip_end(&sip, 5U) & 0xFFFFFFFFU);
}

#endif
