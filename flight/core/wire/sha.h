/* SHA-256 (FIPS 180-4), and the HMAC of it whose key is 32 bytes (RFC 2104). */
#ifndef SKY_SHA_H
#define SKY_SHA_H

#include <stddef.h>
#include <stdint.h>

enum { SKY_SHA_BYTES = 32, SKY_SHA_BLOCK = 64, SKY_SECRET_BYTES = 32 };

typedef struct {
    uint32_t words[8];
    uint64_t bytes; /* that were taken so far */
    uint8_t block[SKY_SHA_BLOCK];
} sky_sha;

void sky_sha_begin(sky_sha *sha);
void sky_sha_take(sky_sha *sha, const uint8_t *data, size_t size);
void sky_sha_end(sky_sha *sha, uint8_t digest[SKY_SHA_BYTES]);

/* Takes one block. A build may bring its own, with the processor's instructions: compile with SKY_SHA_ELSEWHERE. */
void sky_sha_block(uint32_t words[8], const uint8_t block[SKY_SHA_BLOCK]);

/* The two states that depend on the key alone: to keep them halves the time of a MAC. */
typedef struct {
    sky_sha inner, outer;
} sky_hmac_key;

void sky_hmac_begin(sky_hmac_key *hmac, const uint8_t secret[SKY_SECRET_BYTES]);
/* Of what a copy of `inner` has taken. */
void sky_hmac_end(const sky_hmac_key *hmac, sky_sha *inner, uint8_t digest[SKY_SHA_BYTES]);

#endif
