/* The directory of a host arena, read without a lock: found, and seen whole, or not. */
#include "host.h"

#include <time.h>

static uint64_t rounded(uint64_t bytes) { return (bytes + 63) / 64 * 64; }

int sky_host_open(HostMap *map, const Py_buffer *directory, int writes)
{
    HostHead *head = directory->buf;
    uint64_t size = (uint64_t)directory->len;
    if (size < HOST_HEAD_BYTES || (uintptr_t)head % 64 || (writes && directory->readonly)) {
        PyErr_SetString(PyExc_ValueError, "a host directory: expected a mapping of at least 4096 bytes");
        return 0;
    }
    uint64_t count = head->entries, buckets = head->buckets;
    const uint64_t entry_bytes = sizeof(HostEntry) + sizeof(uint64_t); /* with its end */
    if (head->magic != HOST_MAGIC || count < 1 || count > UINT32_MAX - 1 || buckets <= count || buckets > UINT64_C(1) << 33 ||
        buckets & (buckets - 1) || size < HOST_HEAD_BYTES + rounded(buckets * sizeof(uint32_t)) + count * entry_bytes) {
        PyErr_SetString(PyExc_ValueError, "a host directory of another release, or a damaged one");
        return 0;
    }
    uint8_t *after = (uint8_t *)head + HOST_HEAD_BYTES;
    HostEntry *entries = (HostEntry *)(after + rounded(buckets * sizeof(uint32_t)));
    *map = (HostMap){head, (uint32_t *)after, entries, (uint64_t *)(entries + count), count, buckets - 1, head->seed};
    return 1;
}

uint64_t sky_host_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

HostSlot *sky_host_slots(HostPage *page, uint64_t page_bytes, uint64_t *count)
{
    if (page_bytes < HOST_HEAD_BYTES)
        return NULL;
    uint64_t words = (page_bytes - HOST_HEAD_BYTES) / 8, holds = page->holds, uses = page->uses;
    if (holds > words || uses > words - holds)
        return NULL;
    uint64_t at = HOST_HEAD_BYTES + rounded(8 * (holds + uses));
    *count = page->slots;
    if (!*count || *count > HOST_MOST_SLOTS || at > page_bytes || *count * sizeof(HostSlot) > page_bytes - at)
        return NULL;
    return (HostSlot *)((uint8_t *)page + at);
}

int sky_host_key(PyObject *given, uint64_t key[HOST_KEY_WORDS])
{
    char *bytes;
    Py_ssize_t size;
    if (PyBytes_AsStringAndSize(given, &bytes, &size) < 0)
        return 0;
    if (size != HOST_KEY_WORDS * 8) {
        PyErr_Format(PyExc_ValueError, "a key of %zd bytes: expected 32", size);
        return 0;
    }
    memcpy(key, bytes, (size_t)size);
    return 1;
}

uint64_t sky_host_bucket(const HostMap *map, const uint64_t key[HOST_KEY_WORDS])
{
    uint64_t mixed = map->seed;
    for (int at = 0; at < HOST_KEY_WORDS; at++) {
        mixed = (mixed ^ key[at]) * UINT64_C(0x9E3779B97F4A7C15);
        mixed ^= mixed >> 32;
    }
    return mixed & map->mask;
}

/* The entry with this number as it is at one moment: 1 it has the key, 0 it has another, -1 it was changed meanwhile. */
static int look_at(const HostMap *map, uint32_t number, const uint64_t key[HOST_KEY_WORDS], HostFound *found)
{
    HostEntry *entry = &map->entries[number];
    uint64_t version = HOST_LOAD(entry->version);
    if (version & 1)
        return -1;
    int same = 1;
    for (int at = 0; at < HOST_KEY_WORDS; at++)
        same &= HOST_RELAXED(entry->key[at]) == key[at];
    *found = (HostFound){entry, version, HOST_RELAXED(entry->offset), HOST_RELAXED(entry->bytes), HOST_LOAD(entry->check), 0};
    if (found->check & HOST_EXPIRES)
        found->end_ns = HOST_RELAXED(map->ends[number]);
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    return HOST_RELAXED(entry->version) == version ? same : -1;
}

static int probe(const HostMap *map, const uint64_t key[HOST_KEY_WORDS], HostFound *found)
{
    uint64_t bucket = sky_host_bucket(map, key);
    int changed = 0;
    for (uint64_t step = 0; step <= map->mask; step++) {
        uint32_t number = HOST_LOAD(map->buckets[(bucket + step) & map->mask]);
        if (!number)
            return changed ? -1 : 0;
        int looked = number <= map->count ? look_at(map, number - 1, key, found) : -1;
        if (looked == 1)
            return 1;
        changed |= looked < 0;
    }
    return -1;
}

int sky_host_find(const HostMap *map, const uint64_t key[HOST_KEY_WORDS], HostFound *found)
{
    for (int tries = 0; tries < HOST_MOST_TRIES; tries++) {
        uint64_t changes = HOST_LOAD(map->head->changes);
        int probed = probe(map, key, found);
        if (probed == 1)
            return 1;
        __atomic_thread_fence(__ATOMIC_ACQUIRE);
        if (!probed && !(changes & 1) && HOST_RELAXED(map->head->changes) == changes)
            return 0;
    }
    return -1;
}
