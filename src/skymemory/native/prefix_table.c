/* Rows and shelves together: whatever a shelf holds has its bit in a row, and no other bits are there. */
#include "prefix.h"

#include <stdlib.h>
#include <string.h>

enum { AHEAD = 12, MOST_INTERVAL = 1 << 20 }; /* blocks whose rows and entries are prefetched */

uint64_t sky_hash_at(const char *hashes, size_t at)
{
    uint64_t hash;
    memcpy(&hash, hashes + 8 * at, 8);
    return hash;
}

size_t sky_table_capacity(const Table *table, size_t slot)
{
    return slot < table->slots && table->shelves[slot].own_capacity ? table->shelves[slot].capacity : table->capacity;
}

Shelf *sky_table_shelf(Table *table, size_t slot)
{
    if (slot >= table->slots) {
        size_t slots = (slot / 64 + 1) * 64;
        uint32_t *depths = sky_realloc(table->depths, slots, sizeof(uint32_t));
        if (!depths)
            return NULL;
        table->depths = depths;
        Shelf *shelves = sky_realloc(table->shelves, slots, sizeof(Shelf));
        if (!shelves)
            return NULL;
        table->shelves = shelves;
        if (sky_rows_widen(&table->rows, slots) < 0)
            return NULL;
        memset(shelves + table->slots, 0, (slots - table->slots) * sizeof(Shelf));
        table->slots = slots;
    }
    return &table->shelves[slot];
}

/* The binary digits of the chains learnt since this block's last use. */
static unsigned age_of(const Table *table, const Entry *entry)
{
    uint32_t age = table->learned - entry->used;
    return age ? 32 - (unsigned)__builtin_clz(age) : 0;
}

static void count_age(Ages *ages, uint64_t *counts, unsigned age)
{
    counts[age]++;
    if (++ages->count < MOST_AGES)
        return;
    ages->count = 0;
    for (unsigned at = 0; at < AGES; at++) {
        ages->used[at] /= 2;
        ages->evicted[at] /= 2;
        ages->count += ages->used[at] + ages->evicted[at];
    }
}

static void note_use(const Table *table, Entry *entry)
{
    uint32_t age = table->learned - entry->used;
    int64_t last = (int64_t)(age < MOST_INTERVAL ? age : MOST_INTERVAL) * 16, mean = entry->interval ? entry->interval : last;
    entry->interval = (uint32_t)(mean + (last - mean) / 4);
    entry->used = table->learned;
}

static int is_used_every(const Table *table, const Entry *entry, uint64_t interval)
{
    return entry->interval && entry->interval <= 16 * interval && (uint32_t)(table->learned - entry->used) <= interval;
}

static void take_away(Table *table, size_t slot, uint32_t at)
{
    Shelf *shelf = &table->shelves[slot];
    sky_rows_take(&table->rows, shelf->entries[at].key, slot);
    sky_shelf_remove(shelf, table->rows.secret, at);
}

void sky_table_trim(Table *table, size_t slot, size_t capacity)
{
    Shelf *shelf = slot < table->slots ? &table->shelves[slot] : NULL;
    while (shelf && shelf->used > capacity)
        take_away(table, slot, shelf->oldest);
    if (shelf && shelf->size && !shelf->used)
        sky_shelf_free(shelf);
}

static void fetch(Rows *rows, uint64_t key)
{
    const RowPart *part = sky_part(rows, key);
    if (part->size)
        __builtin_prefetch(sky_row(rows, part, sky_home(rows, part, key)));
}

void sky_table_walk(Table *table, const char *hashes, size_t count, uint64_t *left)
{
    Rows *rows = &table->rows;
    size_t words = rows->words;
    int some = 1;
    for (size_t next = 0; next < count && next < AHEAD; next++)
        fetch(rows, sky_hash_at(hashes, next));
    for (size_t at = 0; at < count && some; at++) {
        if (at + AHEAD < count)
            fetch(rows, sky_hash_at(hashes, at + AHEAD));
        const uint64_t *bits = sky_bits(rows, sky_hash_at(hashes, at));
        some = 0;
        for (size_t word = 0; word < words; word++) {
            uint64_t still = bits ? left[word] & bits[word] : 0;
            for (uint64_t gone = left[word] & ~still; gone; gone &= gone - 1)
                table->depths[64 * word + (size_t)__builtin_ctzll(gone)] = (uint32_t)at;
            left[word] = still;
            some |= still != 0;
        }
    }
    for (size_t word = 0; word < words; word++)
        for (uint64_t held = left[word]; held; held &= held - 1)
            table->depths[64 * word + (size_t)__builtin_ctzll(held)] = (uint32_t)count;
}

/* Prefetch for evicting this entry, and the next victim. A guess: an entry that is used meanwhile stays. */
static uint32_t fetch_victim(Table *table, const Shelf *shelf, uint32_t at)
{
    const Entry *entry = &shelf->entries[at];
    fetch(&table->rows, entry->key);
    sky_shelf_fetch_bucket(shelf, table->rows.secret, entry->key);
    if (entry->newer != NO_ENTRY)
        __builtin_prefetch(&shelf->entries[entry->newer]);
    return entry->newer;
}

/* From the last block to the first, so that the head is the newest. Tables are larger than caches, so nearly all of its
 * time would be waiting for memory: buckets and rows are prefetched, then the entries in the buckets. */
static int use_chain(Table *table, size_t slot, const char *hashes, size_t count, size_t capacity)
{
    Rows *rows = &table->rows;
    Shelf *shelf = &table->shelves[slot];
    uint32_t child = NO_ENTRY;
    size_t most = shelf->used + count < capacity ? shelf->used + count : capacity;
    if (!count || sky_shelf_reserve(shelf, rows->secret, most) < 0)
        return count ? -1 : 0;
    uint32_t victim = shelf->used + count > capacity ? shelf->oldest : NO_ENTRY;
    for (size_t early = 0; early < AHEAD && victim != NO_ENTRY; early++)
        victim = fetch_victim(table, shelf, victim);
    for (size_t next = count; next-- > 0 && next + 2 * AHEAD >= count;)
        sky_shelf_fetch_bucket(shelf, rows->secret, sky_hash_at(hashes, next));
    for (size_t next = count; next-- > 0 && next + AHEAD >= count;) {
        fetch(rows, sky_hash_at(hashes, next));
        sky_shelf_fetch_entry(shelf, rows->secret, sky_hash_at(hashes, next));
    }
    for (size_t at = count; at-- > 0;) {
        uint64_t key = sky_hash_at(hashes, at);
        if (at >= 2 * AHEAD)
            sky_shelf_fetch_bucket(shelf, rows->secret, sky_hash_at(hashes, at - 2 * AHEAD));
        if (at >= AHEAD) {
            fetch(rows, sky_hash_at(hashes, at - AHEAD));
            sky_shelf_fetch_entry(shelf, rows->secret, sky_hash_at(hashes, at - AHEAD));
        }
        uint32_t entry = sky_shelf_find(shelf, rows->secret, key);
        if (entry != NO_ENTRY) {
            count_age(&table->ages, table->ages.used, age_of(table, &shelf->entries[entry]));
            note_use(table, &shelf->entries[entry]);
            sky_shelf_use(shelf, entry);
        } else {
            if (shelf->used >= capacity) {
                if (victim != NO_ENTRY)
                    victim = fetch_victim(table, shelf, victim);
                count_age(&table->ages, table->ages.evicted, age_of(table, &shelf->entries[shelf->oldest]));
                take_away(table, slot, shelf->oldest);
            }
            if (sky_rows_add(rows, key, slot) < 0)
                return -1;
            entry = sky_shelf_push(shelf, rows->secret, key, table->learned);
        }
        if (child != NO_ENTRY)
            shelf->entries[child].parent = entry;
        child = entry;
    }
    return 0;
}

int sky_table_learn(Table *table, size_t slot, const char *hashes, size_t count)
{
    if (!sky_table_shelf(table, slot))
        return -1;
    size_t capacity = sky_table_capacity(table, slot);
    table->learned++;
    if (use_chain(table, slot, hashes, count < capacity ? count : capacity, capacity) == 0)
        return 0;
    sky_table_trim(table, slot, 0); /* half a chain would be one without its head */
    return -1;
}

/* Further blocks of a chain are used more rarely. */
size_t sky_table_used_every(const Table *table, size_t slot, const char *hashes, size_t count, uint64_t interval)
{
    const Shelf *shelf = &table->shelves[slot];
    size_t low = 0, high = count;
    while (low < high) {
        size_t middle = (low + high + 1) / 2;
        uint32_t at = sky_shelf_find(shelf, table->rows.secret, sky_hash_at(hashes, middle - 1));
        if (at != NO_ENTRY && is_used_every(table, &shelf->entries[at], interval))
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

long long sky_table_oldest(const Table *table, size_t slot)
{
    const Shelf *shelf = slot < table->slots ? &table->shelves[slot] : NULL;
    if (!shelf || !shelf->used || shelf->used < sky_table_capacity(table, slot))
        return -1;
    return (long long)(uint32_t)(table->learned - shelf->entries[shelf->oldest].used);
}

/* A parent was used after its children, so from the newest to the oldest every parent is met before them. */
long long sky_table_drop(Table *table, size_t slot, uint64_t key)
{
    Shelf *shelf = slot < table->slots ? &table->shelves[slot] : NULL;
    uint32_t first = shelf ? sky_shelf_find(shelf, table->rows.secret, key) : NO_ENTRY;
    if (first == NO_ENTRY)
        return 0;
    uint8_t *gone = calloc(shelf->size, 1);
    if (!gone)
        return -1;
    long long count = 0;
    gone[first] = 1;
    for (uint32_t at = first, older; at != NO_ENTRY; at = older) {
        const Entry *entry = &shelf->entries[at];
        older = entry->older;
        if (gone[at] || (entry->parent != NO_ENTRY && gone[entry->parent])) {
            gone[at] = 1;
            count++;
            take_away(table, slot, at);
        }
    }
    free(gone);
    sky_table_trim(table, slot, shelf->used); /* gives the memory back if nothing is left */
    return count;
}

static void put(char *row, uint64_t key, uint32_t parent)
{
    memset(row, 0, DUMP_ROW_BYTES);
    memcpy(row, &key, 8);
    memcpy(row + 8, &parent, 4);
}

int sky_table_dump(const Table *table, size_t slot, char *out)
{
    const Shelf *shelf = &table->shelves[slot];
    uint32_t *places = sky_realloc(NULL, shelf->size, sizeof(uint32_t)), place = 0;
    if (!places)
        return -1;
    memset(places, 0xFF, shelf->size * sizeof(uint32_t));
    for (uint32_t at = shelf->newest; at != NO_ENTRY; at = shelf->entries[at].older) {
        const Entry *entry = &shelf->entries[at];
        put(out + (size_t)place * DUMP_ROW_BYTES, entry->key,
            entry->parent == NO_ENTRY ? NO_ENTRY : places[entry->parent]);
        places[at] = place++;
    }
    free(places);
    return 0;
}

/* Pushed from the oldest to the newest: so rows that do not fit are left out at the far end. */
const char *sky_table_load(Table *table, size_t slot, const char *dump, size_t count)
{
    Shelf *shelf = sky_table_shelf(table, slot);
    if (!shelf)
        return "";
    sky_table_trim(table, slot, 0);
    size_t capacity = sky_table_capacity(table, slot);
    size_t kept = count < capacity ? count : capacity;
    for (size_t place = 0; place < count; place++) {
        uint32_t parent;
        memcpy(&parent, dump + place * DUMP_ROW_BYTES + 8, 4);
        if (parent != NO_ENTRY && parent >= place)
            return "a dump that has a block before its parent";
    }
    if (!count)
        return NULL;
    /* All rows go on the shelf first, so that one that is there twice is found wherever it stands. */
    uint32_t *entries = sky_realloc(NULL, count, sizeof(uint32_t));
    const char *wrong = entries && sky_shelf_reserve(shelf, table->rows.secret, count) == 0 ? NULL : "";
    for (size_t place = count; !wrong && place-- > 0;) {
        uint64_t key;
        memcpy(&key, dump + place * DUMP_ROW_BYTES, 8);
        if (sky_shelf_find(shelf, table->rows.secret, key) != NO_ENTRY)
            wrong = "a dump that has a block twice";
        else if (sky_rows_add(&table->rows, key, slot) < 0)
            wrong = "";
        else
            entries[place] = sky_shelf_push(shelf, table->rows.secret, key, table->learned);
    }
    for (size_t place = 0; !wrong && place < count; place++) {
        uint32_t parent;
        memcpy(&parent, dump + place * DUMP_ROW_BYTES + 8, 4);
        shelf->entries[entries[place]].parent = parent == NO_ENTRY ? NO_ENTRY : entries[parent];
    }
    free(entries);
    sky_table_trim(table, slot, wrong ? 0 : kept);
    return wrong;
}

void sky_table_clear(Table *table)
{
    for (size_t slot = 0; slot < table->slots; slot++)
        sky_shelf_free(&table->shelves[slot]);
    sky_rows_free(&table->rows);
    free(table->shelves);
    free(table->depths);
    table->shelves = NULL;
    table->depths = NULL;
    table->slots = 0;
}

size_t sky_table_bytes(const Table *table)
{
    size_t bytes = sky_rows_bytes(&table->rows) + table->slots * (sizeof(Shelf) + sizeof(uint32_t));
    for (size_t slot = 0; slot < table->slots; slot++)
        bytes += table->shelves[slot].size * (sizeof(Entry) + BUCKETS_PER_ENTRY * sizeof(uint32_t));
    return bytes;
}
