/* Which slots hold which blocks: rows (block -> bits of slots) and shelves (slot -> blocks by last use).
 * The contract is in twin/prefix.py. */
#ifndef SKYMEMORY_PREFIX_H
#define SKYMEMORY_PREFIX_H

#include "fast.h"

/* With as many buckets as entries every other search would meet an entry that was not prefetched. */
enum { ROW_PARTS = 64, MAX_SLOTS = 65536, DUMP_ROW_BYTES = 16, BUCKETS_PER_ENTRY = 2 };
#define NO_ENTRY 0xFFFFFFFFu
#define MAX_CAPACITY ((size_t)1 << 28)

/* Rows of one part, open addressing with linear probing: a key and ``words`` words of bits. A row whose key is 0 is
 * free; the block whose hash is 0 has the row behind the last. Parts grow one by one, so that no call pays for all. */
typedef struct {
    uint64_t *cells;
    size_t size; /* a power of two, or 0 before the first row */
    size_t used; /* the extra row not counted */
    int shift;   /* 64 less the bits of a place */
} RowPart;

typedef struct {
    RowPart parts[ROW_PARTS];
    size_t words;
    size_t keys; /* different blocks that any slot holds */
    uint64_t secret;
} Rows;

/* A block of a slot. ``parent`` and the neighbours in the order of use are entries of the same shelf. */
typedef struct {
    uint64_t key;
    uint32_t newer, older;
    uint32_t parent;
    uint32_t next; /* in its bucket, or of the free entries */
    uint32_t used; /* ``Table.learned`` at its last use */
    uint32_t interval; /* recent mean of the chains from use to use, in sixteenths; 0: used once */
} Entry;

typedef struct {
    Entry *entries;
    uint32_t *buckets; /* ``BUCKETS_PER_ENTRY`` times the entries: the first of each chain */
    size_t size;       /* a power of two, or 0 before the first block */
    size_t used;
    int shift;
    uint32_t newest, oldest, vacant;
    size_t capacity;
    int own_capacity; /* set, not the table's */
} Shelf;

/* A place among 2 to the power of (64 - shift): the product's highest bits, which all bits of the key decide. */
static inline size_t sky_place(uint64_t secret, uint64_t key, int shift)
{
    return (size_t)(key * secret >> shift);
}

static inline int sky_shift(size_t size)
{
    int shift = 64;
    for (; size > 1; size /= 2)
        shift--;
    return shift;
}

static inline RowPart *sky_part(Rows *rows, uint64_t key)
{
    return &rows->parts[key % ROW_PARTS];
}

/* The first cell of the search for a key. */
static inline size_t sky_home(const Rows *rows, const RowPart *part, uint64_t key)
{
    return sky_place(rows->secret, key, part->shift);
}

static inline uint64_t *sky_row(const Rows *rows, const RowPart *part, size_t at)
{
    return part->cells + at * (1 + rows->words);
}

/* The bits of a block, or NULL where no slot holds it. */
static inline uint64_t *sky_bits(Rows *rows, uint64_t key)
{
    RowPart *part = sky_part(rows, key);
    if (!part->size)
        return NULL;
    if (!key)
        return sky_row(rows, part, part->size) + 1;
    for (size_t at = sky_home(rows, part, key);; at = (at + 1) & (part->size - 1)) {
        uint64_t *row = sky_row(rows, part, at);
        if (row[0] == key)
            return row + 1;
        if (!row[0])
            return NULL;
    }
}

/* prefix_rows.c. -1: no memory, and nothing has changed. */
int sky_rows_widen(Rows *rows, size_t slots);
int sky_rows_add(Rows *rows, uint64_t key, size_t slot);
void sky_rows_take(Rows *rows, uint64_t key, size_t slot);
void sky_rows_free(Rows *rows);
size_t sky_rows_bytes(const Rows *rows);

/* prefix_shelf.c */
/* Room for ``blocks``. -1: no memory, and nothing has changed. */
int sky_shelf_reserve(Shelf *shelf, uint64_t secret, size_t blocks);
uint32_t sky_shelf_find(const Shelf *shelf, uint64_t secret, uint64_t key);
/* For a shelf with room: prefetch for ``sky_shelf_find``. */
void sky_shelf_fetch_bucket(const Shelf *shelf, uint64_t secret, uint64_t key);
void sky_shelf_fetch_entry(const Shelf *shelf, uint64_t secret, uint64_t key);
/* Adds an absent block as the newest (there must be room), last used at the time ``used``; its entry. */
uint32_t sky_shelf_push(Shelf *shelf, uint64_t secret, uint64_t key, uint32_t used);
void sky_shelf_use(Shelf *shelf, uint32_t at);
void sky_shelf_remove(Shelf *shelf, uint64_t secret, uint32_t at);
void sky_shelf_free(Shelf *shelf);

/* prefix_table.c. Hashes are native-endian and need not be aligned. */
enum { AGES = 33, MOST_AGES = 1 << 20 };

/* Numbers of blocks by age, which counts chains learnt since: ``[a]`` has ages of ``a`` binary digits. All are halved once
 * there are ``MOST_AGES``, so that old ones count less. */
typedef struct {
    uint64_t used[AGES];    /* that were used again */
    uint64_t evicted[AGES]; /* that had to go */
    uint64_t count;
} Ages;

typedef struct {
    Rows rows;
    Shelf *shelves;
    size_t slots;     /* number of shelves, and words of bits for them */
    size_t capacity;  /* of a shelf without its own */
    uint32_t *depths; /* per slot: result of the last walk */
    unsigned long long changes;
    uint32_t learned; /* chains */
    Ages ages;
} Table;

uint64_t sky_hash_at(const char *hashes, size_t at);
size_t sky_table_capacity(const Table *table, size_t slot);
/* The shelf of a slot, created with all below it if missing; NULL: no memory. */
Shelf *sky_table_shelf(Table *table, size_t slot);
void sky_table_trim(Table *table, size_t slot, size_t capacity);
/* Fills ``depths`` for the slots whose bits are in ``left``, which it clears. */
void sky_table_walk(Table *table, const char *hashes, size_t count, uint64_t *left);
/* -1: no memory; the slot holds nothing then. */
int sky_table_learn(Table *table, size_t slot, const char *hashes, size_t count);
/* Leading blocks of those ``count`` that a slot uses at least every ``interval`` chains; it holds all of them. */
size_t sky_table_used_every(const Table *table, size_t slot, const char *hashes, size_t count, uint64_t interval);
/* Age of the block that a slot would evict next; -1: it has room. */
long long sky_table_oldest(const Table *table, size_t slot);
/* Number of removed blocks; -1: no memory, and nothing has changed. */
long long sky_table_drop(Table *table, size_t slot, uint64_t key);
/* Into ``out``, ``DUMP_ROW_BYTES`` per block of the slot. -1: no memory. */
int sky_table_dump(const Table *table, size_t slot, char *out);
/* NULL, or what is wrong with the dump ("" for no memory); the slot holds nothing then. */
const char *sky_table_load(Table *table, size_t slot, const char *dump, size_t count);
void sky_table_clear(Table *table);
size_t sky_table_bytes(const Table *table);

/* prefix_calls.c */
extern SkyType sky_prefix_table_type;
/* holders.c: rows alone, several of them. */
extern SkyType sky_holder_table_type;

#endif
