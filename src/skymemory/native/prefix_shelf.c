/* The blocks of one slot, in the order of their last use, found by their hash. */
#include "prefix.h"

#include <stdlib.h>
#include <string.h>

enum { FIRST_ENTRIES = 64 };

static uint32_t *bucket_of(const Shelf *shelf, uint64_t secret, uint64_t key)
{
    return shelf->buckets + sky_place(secret, key, shelf->shift);
}

static int grow(Shelf *shelf, uint64_t secret, size_t size)
{
    size_t count = BUCKETS_PER_ENTRY * size;
    uint32_t *buckets = sky_realloc(NULL, count, sizeof(uint32_t));
    Entry *entries = buckets ? sky_realloc(shelf->entries, size, sizeof(Entry)) : NULL;
    if (!entries) {
        free(buckets);
        return -1;
    }
    free(shelf->buckets);
    shelf->buckets = buckets;
    shelf->entries = entries;
    if (!shelf->size)
        shelf->newest = shelf->oldest = shelf->vacant = NO_ENTRY;
    for (size_t at = size; at-- > shelf->size;) {
        entries[at].next = shelf->vacant;
        shelf->vacant = (uint32_t)at;
    }
    shelf->size = size;
    shelf->shift = sky_shift(count);
    memset(buckets, 0xFF, count * sizeof(uint32_t));
    for (uint32_t at = shelf->newest; at != NO_ENTRY; at = entries[at].older) {
        uint32_t *bucket = bucket_of(shelf, secret, entries[at].key);
        entries[at].next = *bucket;
        *bucket = at;
    }
    return 0;
}

int sky_shelf_reserve(Shelf *shelf, uint64_t secret, size_t blocks)
{
    size_t size = shelf->size ? shelf->size : FIRST_ENTRIES;
    if (blocks > MAX_CAPACITY)
        return -1;
    while (size < blocks)
        size *= 2;
    return size == shelf->size ? 0 : grow(shelf, secret, size);
}

void sky_shelf_fetch_bucket(const Shelf *shelf, uint64_t secret, uint64_t key)
{
    __builtin_prefetch(bucket_of(shelf, secret, key));
}

void sky_shelf_fetch_entry(const Shelf *shelf, uint64_t secret, uint64_t key)
{
    uint32_t at = *bucket_of(shelf, secret, key);
    if (at != NO_ENTRY)
        __builtin_prefetch(&shelf->entries[at]);
}

uint32_t sky_shelf_find(const Shelf *shelf, uint64_t secret, uint64_t key)
{
    if (!shelf->size)
        return NO_ENTRY;
    uint32_t at = *bucket_of(shelf, secret, key);
    while (at != NO_ENTRY && shelf->entries[at].key != key)
        at = shelf->entries[at].next;
    return at;
}

static void link_newest(Shelf *shelf, uint32_t at)
{
    Entry *entry = &shelf->entries[at];
    entry->newer = NO_ENTRY;
    entry->older = shelf->newest;
    if (shelf->newest != NO_ENTRY)
        shelf->entries[shelf->newest].newer = at;
    else
        shelf->oldest = at;
    shelf->newest = at;
}

static void unlink_use(Shelf *shelf, uint32_t at)
{
    Entry *entry = &shelf->entries[at];
    *(entry->newer == NO_ENTRY ? &shelf->newest : &shelf->entries[entry->newer].older) = entry->older;
    *(entry->older == NO_ENTRY ? &shelf->oldest : &shelf->entries[entry->older].newer) = entry->newer;
}

uint32_t sky_shelf_push(Shelf *shelf, uint64_t secret, uint64_t key, uint32_t used)
{
    uint32_t at = shelf->vacant, *bucket = bucket_of(shelf, secret, key);
    Entry *entry = &shelf->entries[at];
    shelf->vacant = entry->next;
    *entry = (Entry){.key = key, .parent = NO_ENTRY, .next = *bucket, .used = used};
    *bucket = at;
    link_newest(shelf, at);
    shelf->used++;
    return at;
}

void sky_shelf_use(Shelf *shelf, uint32_t at)
{
    if (shelf->newest != at) {
        unlink_use(shelf, at);
        link_newest(shelf, at);
    }
}

void sky_shelf_remove(Shelf *shelf, uint64_t secret, uint32_t at)
{
    uint32_t *from = bucket_of(shelf, secret, shelf->entries[at].key);
    while (*from != at)
        from = &shelf->entries[*from].next;
    *from = shelf->entries[at].next;
    unlink_use(shelf, at);
    shelf->entries[at].next = shelf->vacant;
    shelf->vacant = at;
    shelf->used--;
}

void sky_shelf_free(Shelf *shelf)
{
    free(shelf->entries);
    free(shelf->buckets);
    shelf->entries = NULL;
    shelf->buckets = NULL;
    shelf->size = shelf->used = 0;
}
