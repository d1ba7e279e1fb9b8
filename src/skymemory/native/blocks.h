/* The blocks of a radix index. Twin and contract: twin/blocks.py. */
#ifndef SKYMEMORY_BLOCKS_H
#define SKYMEMORY_BLOCKS_H

#include "fast.h"

enum { HASH_BYTES = 32, ROW_BYTES = 36, ROW_SIZE_AT = 4, ROW_GROUP_AT = 32, MOST_GROUPS = 1 << 24 };
#define NO_BLOCK UINT32_MAX

typedef struct {
    uint8_t hash[HASH_BYTES];
    uint32_t parent; /* or the next free block */
    uint32_t depth, children;
    uint32_t present; /* 0: only named as a parent */
    uint8_t row[ROW_BYTES];
} Block;

typedef struct {
    uint32_t tag, block; /* the upper half of the mixed hash; NO_BLOCK: empty */
} Slot;

/* Open addressing with linear probing: 2^bits slots, at most three quarters in use. */
typedef struct {
    Block *blocks;
    uint32_t used, room, free; /* of blocks: ever used, allocated, the first free one */
    Slot *slots;
    int bits;
    uint32_t named, present; /* blocks in the slots; those of them that are there */
    double *held;            /* by group */
    size_t groups;
    double capacity_bytes;
    uint64_t changes; /* counted, so that a walk that ran other code sees them */
} Blocks;

/* Rows and records are little-endian. */
static inline uint32_t le32(const uint8_t *p)
{
    return p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

static inline uint32_t group_of(const uint8_t *row)
{
    return le32(row + ROW_GROUP_AT);
}

static inline void set_group(uint8_t *row, uint32_t group)
{
    for (int byte = 0; byte < 4; byte++)
        row[ROW_GROUP_AT + byte] = (uint8_t)(group >> 8 * byte);
}

int sky_blocks_init(Blocks *table); /* 0: no memory */
void sky_blocks_free(Blocks *table);

/* Enter a chain. ``places``: per row, the number of its group, or NULL: as the row says. ``fresh``: how many are new, or
 * -1 where the chain contradicts what is known. 0: no memory. */
int sky_blocks_enter(Blocks *table, const uint8_t *hashes, const uint8_t *rows, const uint32_t *places, size_t count,
                     uint32_t start, const uint8_t *parent, int64_t *fresh);
int sky_blocks_remove(Blocks *table, const uint8_t *hash); /* 0: it was not there */
uint32_t sky_blocks_named(const Blocks *table, const uint8_t *hash); /* there, or only as a parent; or NO_BLOCK */
size_t sky_blocks_look_up(const Blocks *table, const uint8_t *const *keys, size_t count, uint32_t *found);

extern SkyType sky_block_table_type; /* block_calls.c */

#endif
