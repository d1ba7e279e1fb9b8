#include "wire/nh.h"

#include <string.h>

static uint32_t load(const uint8_t *at) {
    return (uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

/* Whole groups, all of one block. Compilers make vector instructions of it: the sums are in arrays of their own for that. */
static void add_groups(sky_nh *nh, const uint8_t *data, size_t size) {
    uint64_t first[SKY_NH_LANES], second[SKY_NH_LANES];
    (void)memcpy(first, nh->sums[0], sizeof first);
    (void)memcpy(second, nh->sums[1], sizeof second);
    for (size_t at = 0; at < size; at += (size_t)SKY_NH_GROUP) {
        const uint8_t *const words = data + at, *const key = nh->key + nh->at + at;
        for (uint32_t lane = 0; lane < (uint32_t)SKY_NH_LANES; lane++) {
            const uint32_t low = load(words + 4U * lane), high = load(words + 16U + 4U * lane);
            const uint32_t middle = load(key + 16U + 4U * lane);
            first[lane] += (uint64_t)(low + load(key + 4U * lane)) * (uint64_t)(high + middle);
            second[lane] += (uint64_t)(low + middle) * (uint64_t)(high + load(key + 32U + 4U * lane));
        }
    }
    (void)memcpy(nh->sums[0], first, sizeof first);
    (void)memcpy(nh->sums[1], second, sizeof second);
    nh->at += (uint32_t)size;
}

static void end_block(sky_nh *nh, sky_sha *sha) {
    uint8_t hash[16];
    for (uint32_t turn = 0; turn < 2U; turn++) {
        uint64_t sum = 0;
        for (uint32_t lane = 0; lane < (uint32_t)SKY_NH_LANES; lane++) {
            sum += nh->sums[turn][lane];
        }
        for (uint32_t i = 0; i < 8U; i++) {
            hash[8U * turn + i] = (uint8_t)(sum >> 8U * i & 0xFFU);
        }
    }
    sky_sha_take(sha, hash, sizeof hash);
    (void)memset(nh->sums, 0, sizeof nh->sums);
    nh->at = 0;
}

/* Whole groups, of however many blocks. */
static void add_blocks(sky_nh *nh, sky_sha *sha, const uint8_t *data, size_t size) {
    size_t at = 0;
    while (at < size) {
        const size_t room = (size_t)SKY_NH_BLOCK - nh->at, part = size - at < room ? size - at : room;
        add_groups(nh, data + at, part);
        at += part;
        if (nh->at == (uint32_t)SKY_NH_BLOCK) {
            end_block(nh, sha);
        }
    }
}

void sky_nh_begin(sky_nh *nh, const uint8_t *key) {
    (void)memset(nh, 0, sizeof *nh);
    nh->key = key;
}

void sky_nh_take(sky_nh *nh, sky_sha *sha, const uint8_t *data, size_t size) {
    size_t at = 0, whole;
    if (nh->filled != 0U) {
        at = (size_t)SKY_NH_GROUP - nh->filled;
        at = at < size ? at : size;
        (void)memcpy(nh->group + nh->filled, data, at);
        nh->filled += (uint32_t)at;
        if (nh->filled < (uint32_t)SKY_NH_GROUP) {
            return;
        }
        add_blocks(nh, sha, nh->group, sizeof nh->group);
    }
    whole = (size - at) - (size - at) % (size_t)SKY_NH_GROUP;
    add_blocks(nh, sha, data + at, whole);
    nh->filled = (uint32_t)(size - at - whole);
    (void)memcpy(nh->group, data + at + whole, nh->filled);
}

void sky_nh_end(sky_nh *nh, sky_sha *sha) {
    if (nh->filled != 0U) {
        (void)memset(nh->group + nh->filled, 0, sizeof nh->group - nh->filled);
        add_blocks(nh, sha, nh->group, sizeof nh->group);
    }
    if (nh->at != 0U) {
        end_block(nh, sha);
    }
}
