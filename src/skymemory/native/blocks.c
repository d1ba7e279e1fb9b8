/* The table of blocks, without Python. Twin and contract: twin/blocks.py. */
#include "blocks.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { LEAST_BITS = 4, FEW = 64, AHEAD = 16 };

/* Hashes are random in all their bits, but for those of tests. */
static uint32_t tag_of(const uint8_t *hash)
{
    uint64_t words[4];
    memcpy(words, hash, sizeof words);
    uint64_t mixed = words[0];
    for (int i = 1; i < 4; i++)
        mixed = ((mixed << 16) | (mixed >> 48)) ^ words[i];
    return (uint32_t)((mixed * 0x9E3779B97F4A7C15u) >> 32);
}

static size_t mask_of(const Blocks *table)
{
    return ((size_t)1 << table->bits) - 1;
}

static size_t home_of(const Blocks *table, uint32_t tag)
{
    return tag >> (32 - table->bits);
}

static int room_for_groups(Blocks *table, size_t groups)
{
    if (groups <= table->groups)
        return 1;
    double *held = sky_realloc(table->held, groups, sizeof *held);
    if (!held)
        return 0;
    for (size_t i = table->groups; i < groups; i++)
        held[i] = 0.0;
    table->held = held, table->groups = groups;
    return 1;
}

int sky_blocks_init(Blocks *table)
{
    *table = (Blocks){.free = NO_BLOCK, .bits = LEAST_BITS, .capacity_bytes = INFINITY};
    table->slots = malloc(sizeof(Slot) << LEAST_BITS);
    if (table->slots)
        memset(table->slots, 0xFF, sizeof(Slot) << LEAST_BITS);
    return table->slots != NULL;
}

void sky_blocks_free(Blocks *table)
{
    free(table->blocks);
    free(table->slots);
    free(table->held);
    *table = (Blocks){0};
}

static uint32_t find(const Blocks *table, const uint8_t *hash, uint32_t tag)
{
    size_t mask = mask_of(table);
    for (size_t at = home_of(table, tag);; at = (at + 1) & mask) {
        Slot slot = table->slots[at];
        if (slot.block == NO_BLOCK || (slot.tag == tag && !memcmp(table->blocks[slot.block].hash, hash, HASH_BYTES)))
            return slot.block;
    }
}

uint32_t sky_blocks_named(const Blocks *table, const uint8_t *hash)
{
    return find(table, hash, tag_of(hash));
}

static void settle(Slot *slots, size_t mask, size_t at, Slot slot)
{
    while (slots[at].block != NO_BLOCK)
        at = (at + 1) & mask;
    slots[at] = slot;
}

/* So that ``more`` blocks can be named without memory that may be missing. */
static int reserve(Blocks *table, size_t more)
{
    size_t wanted = table->named + more;
    if (more >= NO_BLOCK || wanted >= NO_BLOCK)
        return 0;
    if (wanted > table->room) { /* free ones are among those ever used: named blocks never need more room than this */
        size_t room = wanted + wanted / 2 + FEW;
        Block *blocks = sky_realloc(table->blocks, room, sizeof *blocks);
        if (!blocks)
            return 0;
        table->blocks = blocks, table->room = (uint32_t)(room < NO_BLOCK ? room : NO_BLOCK);
    }
    int bits = table->bits;
    while (wanted > ((size_t)3 << bits) / 4)
        bits++;
    if (bits == table->bits)
        return 1;
    if (bits > 32)
        return 0;
    Slot *slots = sky_realloc(NULL, (size_t)1 << bits, sizeof(Slot)), *old = table->slots;
    if (!slots)
        return 0;
    memset(slots, 0xFF, sizeof(Slot) << bits);
    size_t count = mask_of(table) + 1;
    table->slots = slots, table->bits = bits;
    for (size_t i = 0; i < count; i++)
        if (old[i].block != NO_BLOCK)
            settle(slots, mask_of(table), home_of(table, old[i].tag), old[i]);
    free(old);
    return 1;
}

/* Name a block that is not named; ``reserve`` has made room. */
static uint32_t name(Blocks *table, const uint8_t *hash, uint32_t tag, uint32_t depth)
{
    uint32_t at = table->free;
    if (at != NO_BLOCK)
        table->free = table->blocks[at].parent;
    else
        at = table->used++;
    Block *block = &table->blocks[at];
    memcpy(block->hash, hash, HASH_BYTES);
    block->parent = NO_BLOCK, block->depth = depth, block->children = block->present = 0;
    settle(table->slots, mask_of(table), home_of(table, tag), (Slot){tag, at});
    table->named++;
    return at;
}

static void forget(Blocks *table, uint32_t at)
{
    size_t mask = mask_of(table), hole = home_of(table, tag_of(table->blocks[at].hash));
    Slot *slots = table->slots;
    while (slots[hole].block != at)
        hole = (hole + 1) & mask;
    /* Those behind it that would no longer be found move up. */
    for (size_t next = (hole + 1) & mask; slots[next].block != NO_BLOCK; next = (next + 1) & mask)
        if (((next - home_of(table, slots[next].tag)) & mask) >= ((next - hole) & mask))
            slots[hole] = slots[next], hole = next;
    slots[hole] = (Slot){NO_BLOCK, NO_BLOCK};
    table->blocks[at].parent = table->free;
    table->blocks[at].present = 0;
    table->free = at;
    table->named--;
}

static void count(Blocks *table, const uint8_t *row, int there)
{
    uint64_t size_bytes = le32(row + ROW_SIZE_AT) | (uint64_t)le32(row + ROW_SIZE_AT + 4) << 32;
    uint32_t group = group_of(row);
    if (there && table->capacity_bytes < INFINITY) {
        double fade = exp(-(double)size_bytes / table->capacity_bytes);
        for (size_t i = 0; i < table->groups; i++)
            table->held[i] *= fade;
    }
    double held = table->held[group] + (there ? (double)size_bytes : -(double)size_bytes);
    table->held[group] = held > 0.0 ? held : 0.0;
}

/* Find or name each block; NO_BLOCK ends the list where one contradicts what is known. ``named``: those that are new. */
static int resolve(Blocks *table, const uint8_t *hashes, size_t count, uint32_t start, const uint8_t *parent, uint32_t *at,
                   uint32_t *named, size_t *news)
{
    uint32_t previous = NO_BLOCK;
    for (size_t i = parent ? 0 : 1; i <= count; i++) { /* the parent first */
        const uint8_t *hash = i ? hashes + (i - 1) * HASH_BYTES : parent;
        uint32_t depth = (uint32_t)(start + i - 1), tag = tag_of(hash), found = find(table, hash, tag);
        if (found == NO_BLOCK) {
            found = name(table, hash, tag, depth);
            named[(*news)++] = found;
        } else {
            const Block *block = &table->blocks[found];
            if (block->depth != depth || (i && block->present && block->parent != previous))
                return 0;
        }
        at[i] = previous = found;
    }
    return 1;
}

int sky_blocks_enter(Blocks *table, const uint8_t *hashes, const uint8_t *rows, const uint32_t *places, size_t blocks,
                     uint32_t start, const uint8_t *parent, int64_t *fresh)
{
    uint32_t few[2 * (FEW + 1)], most = 0;
    *fresh = 0;
    if (!blocks)
        return 1;
    for (size_t i = 0; i < blocks; i++) {
        uint32_t group = group_of(rows + i * ROW_BYTES);
        group = places ? places[group] : group;
        most = group > most ? group : most;
    }
    uint32_t *at = blocks <= FEW ? few : sky_realloc(NULL, blocks + 1, 2 * sizeof *at);
    size_t news = 0;
    if (!at || !reserve(table, blocks + 1)) {
        if (at != few)
            free(at);
        return 0;
    }
    if (!resolve(table, hashes, blocks, start, parent, at, at + blocks + 1, &news))
        *fresh = -1;
    int remembered = *fresh < 0 || room_for_groups(table, (size_t)most + 1);
    if (*fresh < 0 || !remembered) {
        while (news)
            forget(table, at[blocks + 1 + --news]);
        blocks = 0;
    } else {
        table->changes++;
    }
    for (size_t i = 1; i <= blocks; i++) {
        Block *block = &table->blocks[at[i]];
        if (block->present) {
            count(table, block->row, 0);
        } else {
            block->present = 1, table->present++, ++*fresh;
            if (i > 1 || parent) {
                block->parent = at[i - 1];
                table->blocks[at[i - 1]].children++;
            }
        }
        memcpy(block->row, rows + (i - 1) * ROW_BYTES, ROW_BYTES);
        if (places)
            set_group(block->row, places[group_of(block->row)]);
        count(table, block->row, 1);
    }
    if (at != few)
        free(at);
    return remembered;
}

int sky_blocks_remove(Blocks *table, const uint8_t *hash)
{
    uint32_t at = find(table, hash, tag_of(hash));
    if (at == NO_BLOCK || !table->blocks[at].present)
        return 0;
    Block *block = &table->blocks[at];
    uint32_t parent = block->parent;
    table->changes++;
    count(table, block->row, 0);
    table->present--;
    block->present = 0, block->parent = NO_BLOCK;
    if (!block->children)
        forget(table, at);
    if (parent != NO_BLOCK && !--table->blocks[parent].children && !table->blocks[parent].present)
        forget(table, parent);
    return 1;
}

/* Find each key, up to the first that is not there; a NULL is never there. Returns how many were found, but all are
 * looked up where ``found`` is given. Nearly all of the time would be waiting for memory: slots, then blocks, are fetched
 * ahead. */
size_t sky_blocks_look_up(const Blocks *table, const uint8_t *const *keys, size_t count, uint32_t *found)
{
    size_t leading = 0, open = 1;
    for (size_t first = 0; first < count && (open || found); first += AHEAD) {
        size_t some = count - first < AHEAD ? count - first : AHEAD;
        uint32_t tags[AHEAD];
        for (size_t i = 0; i < some; i++) {
            tags[i] = keys[first + i] ? tag_of(keys[first + i]) : 0;
            __builtin_prefetch(&table->slots[home_of(table, tags[i])]);
        }
        for (size_t i = 0; some > 1 && i < some; i++) {
            uint32_t likely = table->slots[home_of(table, tags[i])].block;
            if (likely != NO_BLOCK)
                __builtin_prefetch(&table->blocks[likely]), __builtin_prefetch(&table->blocks[likely].row);
        }
        for (size_t i = 0; i < some && (open || found); i++) {
            uint32_t at = keys[first + i] ? find(table, keys[first + i], tags[i]) : NO_BLOCK;
            if (at != NO_BLOCK && !table->blocks[at].present)
                at = NO_BLOCK;
            if (found)
                found[first + i] = at;
            open = open && at != NO_BLOCK;
            leading += open;
        }
    }
    return leading;
}
