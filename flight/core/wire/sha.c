#include "wire/sha.h"

#include <string.h>

#include "wire/bytes.h"

static const uint32_t begin[8] = {0x6A09E667U, 0xBB67AE85U, 0x3C6EF372U, 0xA54FF53AU,
                                  0x510E527FU, 0x9B05688CU, 0x1F83D9ABU, 0x5BE0CD19U};

#ifndef SKY_SHA_ELSEWHERE

static const uint32_t rounds[64] = {
    0x428A2F98U, 0x71374491U, 0xB5C0FBCFU, 0xE9B5DBA5U, 0x3956C25BU, 0x59F111F1U, 0x923F82A4U, 0xAB1C5ED5U,
    0xD807AA98U, 0x12835B01U, 0x243185BEU, 0x550C7DC3U, 0x72BE5D74U, 0x80DEB1FEU, 0x9BDC06A7U, 0xC19BF174U,
    0xE49B69C1U, 0xEFBE4786U, 0x0FC19DC6U, 0x240CA1CCU, 0x2DE92C6FU, 0x4A7484AAU, 0x5CB0A9DCU, 0x76F988DAU,
    0x983E5152U, 0xA831C66DU, 0xB00327C8U, 0xBF597FC7U, 0xC6E00BF3U, 0xD5A79147U, 0x06CA6351U, 0x14292967U,
    0x27B70A85U, 0x2E1B2138U, 0x4D2C6DFCU, 0x53380D13U, 0x650A7354U, 0x766A0ABBU, 0x81C2C92EU, 0x92722C85U,
    0xA2BFE8A1U, 0xA81A664BU, 0xC24B8B70U, 0xC76C51A3U, 0xD192E819U, 0xD6990624U, 0xF40E3585U, 0x106AA070U,
    0x19A4C116U, 0x1E376C08U, 0x2748774CU, 0x34B0BCB5U, 0x391C0CB3U, 0x4ED8AA4AU, 0x5B9CCA4FU, 0x682E6FF3U,
    0x748F82EEU, 0x78A5636FU, 0x84C87814U, 0x8CC70208U, 0x90BEFFFAU, 0xA4506CEBU, 0xBEF9A3F7U, 0xC67178F2U};

static uint32_t turn(uint32_t word, uint32_t by) { return word >> by | word << (32U - by); }

void sky_sha_block(uint32_t words[8], const uint8_t block[SKY_SHA_BLOCK]) {
    uint32_t w[64];
    uint32_t a = words[0], b = words[1], c = words[2], d = words[3];
    uint32_t e = words[4], f = words[5], g = words[6], h = words[7];
    for (uint32_t i = 0; i < 16U; i++) {
        w[i] = sky_load32(block + 4U * i);
    }
    for (uint32_t i = 16; i < 64U; i++) {
        const uint32_t early = turn(w[i - 15U], 7) ^ turn(w[i - 15U], 18) ^ w[i - 15U] >> 3;
        const uint32_t late = turn(w[i - 2U], 17) ^ turn(w[i - 2U], 19) ^ w[i - 2U] >> 10;
        w[i] = w[i - 16U] + early + w[i - 7U] + late;
    }
    for (uint32_t i = 0; i < 64U; i++) {
        const uint32_t one = h + (turn(e, 6) ^ turn(e, 11) ^ turn(e, 25)) + ((e & f) ^ (~e & g)) + rounds[i] + w[i];
        const uint32_t two = (turn(a, 2) ^ turn(a, 13) ^ turn(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
        h = g;
        g = f;
        f = e;
        e = d + one;
        d = c;
        c = b;
        b = a;
        a = one + two;
    }
    words[0] += a;
    words[1] += b;
    words[2] += c;
    words[3] += d;
    words[4] += e;
    words[5] += f;
    words[6] += g;
    words[7] += h;
}

#endif

void sky_sha_begin(sky_sha *sha) {
    (void)memcpy(sha->words, begin, sizeof begin);
    sha->bytes = 0;
}

void sky_sha_take(sky_sha *sha, const uint8_t *data, size_t size) {
    size_t filled = (size_t)(sha->bytes % SKY_SHA_BLOCK), at = 0;
    sha->bytes += size;
    if (filled != 0U) {
        at = SKY_SHA_BLOCK - filled;
        if (at > size) {
            at = size;
        }
        (void)memcpy(sha->block + filled, data, at);
        filled += at;
        if (filled == SKY_SHA_BLOCK) {
            sky_sha_block(sha->words, sha->block);
            filled = 0;
        }
    }
    if (filled == 0U) {
        for (; size - at >= SKY_SHA_BLOCK; at += SKY_SHA_BLOCK) {
            sky_sha_block(sha->words, data + at);
        }
        (void)memcpy(sha->block, data + at, size - at);
    }
}

void sky_sha_end(sky_sha *sha, uint8_t digest[SKY_SHA_BYTES]) {
    const uint64_t bits = sha->bytes * 8U;
    size_t filled = (size_t)(sha->bytes % SKY_SHA_BLOCK);
    sha->block[filled] = 0x80;
    filled++;
    if (filled > SKY_SHA_BLOCK - 8U) {
        (void)memset(sha->block + filled, 0, SKY_SHA_BLOCK - filled);
        sky_sha_block(sha->words, sha->block);
        filled = 0;
    }
    (void)memset(sha->block + filled, 0, SKY_SHA_BLOCK - 8U - filled);
    sky_store64(sha->block + SKY_SHA_BLOCK - 8, bits);
    sky_sha_block(sha->words, sha->block);
    for (uint32_t i = 0; i < 8U; i++) {
        sky_store32(digest + 4U * i, sha->words[i]);
    }
}

static void padded(sky_sha *sha, const uint8_t secret[SKY_SECRET_BYTES], uint8_t pad) {
    uint8_t block[SKY_SHA_BLOCK];
    (void)memset(block, pad, sizeof block);
    for (uint32_t i = 0; i < SKY_SECRET_BYTES; i++) {
        block[i] ^= secret[i];
    }
    sky_sha_begin(sha);
    sky_sha_take(sha, block, sizeof block);
}

void sky_hmac_begin(sky_hmac_key *hmac, const uint8_t secret[SKY_SECRET_BYTES]) {
    padded(&hmac->inner, secret, 0x36);
    padded(&hmac->outer, secret, 0x5C);
}

void sky_hmac_end(const sky_hmac_key *hmac, sky_sha *inner, uint8_t digest[SKY_SHA_BYTES]) {
    sky_sha outer = hmac->outer;
    sky_sha_end(inner, digest);
    sky_sha_take(&outer, digest, SKY_SHA_BYTES);
    sky_sha_end(&outer, digest);
}
