/* The files of a host arena as they lie in shared memory: a directory that the owner alone writes, and a page of leases for
 * each client. All fields are little-endian words of this computer. Contract: skymemory/store/host/layout.py. */
#ifndef SKYMEMORY_HOST_H
#define SKYMEMORY_HOST_H

#include "fast.h"

enum { HOST_HEAD_BYTES = 4096, HOST_KEY_WORDS = 4, HOST_MOST_TRIES = 64, HOST_MOST_SLOTS = 64, HOST_WAKE_AT = 16 };

#define HOST_MAGIC UINT64_C(0x3254534F48594B53)      /* "SKYHOST2" */
#define HOST_PAGE_MAGIC UINT64_C(0x32454741504B5348) /* "HSKPAGE2" */
#define HOST_CHECKED (UINT64_C(1) << 32)
#define HOST_EXPIRES (UINT64_C(1) << 33)

/* One value, a cache line. An odd version: it is being written. A version never returns. */
typedef struct {
    uint64_t version;
    uint64_t key[HOST_KEY_WORDS];
    uint64_t offset, bytes;
    uint64_t check; /* its CRC-32; HOST_CHECKED: the owner has compared it; HOST_EXPIRES: its end is in `ends` */
} HostEntry;

typedef struct {
    uint64_t magic, values_bytes, entries, buckets, seed;
    uint64_t changes; /* odd while buckets are moved: who finds nothing then looks again */
    uint64_t instance[2];
    uint64_t epoch; /* how many owners it has had: room that one of them gave out is void once the next has begun */
    uint64_t awake; /* not 0: the owner looks into slots from time to time, without being woken */
    uint64_t boot[2]; /* of the computer, by whose clock values expire */
} HostHead;

/* Of a client, who alone writes it but for the last field; the owner reads. */
typedef struct {
    uint64_t magic, holds, uses;
    uint64_t highest; /* no hold at this number or a higher one */
    uint64_t used;    /* how many uses were noted in all, in a ring */
    uint64_t slots;
    uint64_t posted; /* number of the value that was written to a slot last */
    uint64_t unused;
    uint64_t entered; /* number of the last of them that the owner has entered; it alone writes this */
} HostPage;

/* Room for one value of a client, which it fills without asking. Only the owner makes an empty slot room (with a new version) or
 * a full one empty; the owner takes room back, or the client fills it; the first of them wins. */
typedef struct {
    uint64_t state; /* version << 2 | HOST_EMPTY, HOST_ROOM or HOST_FULL */
    uint64_t offset, room_bytes;
    uint64_t number; /* from here on the client's: what it has stored */
    uint64_t key[HOST_KEY_WORDS];
    uint64_t bytes, check; /* CRC-32, and from bit 32 on the kind of its place in a chain */
    uint64_t at_ns; /* of the monotonic clock, which all processes share: the owner enters values in this order */
    uint64_t depth, parent[HOST_KEY_WORDS];
} HostSlot;

enum { HOST_UNIT = 64, HOST_LARGE_UNIT = 4096, HOST_LARGE_BYTES = 64 << 10 }; /* room for a value is a multiple, as in extents.py */
enum { HOST_EMPTY = 0, HOST_ROOM = 1, HOST_FULL = 2, HOST_KIND = 3 };

/* A directory that is mapped here. */
typedef struct {
    HostHead *head;
    uint32_t *buckets; /* entry + 1; 0: none */
    HostEntry *entries;
    uint64_t *ends; /* of each entry whose value expires: a time in ns of the monotonic clock, which all processes share */
    uint64_t count, mask, seed;
} HostMap;

typedef struct {
    HostEntry *entry;
    uint64_t version, offset, bytes, check;
    uint64_t end_ns; /* 0: it does not expire */
} HostFound;

/* Open the directory in a buffer. 0 with an exception if its numbers do not fit its size. */
int sky_host_open(HostMap *map, const Py_buffer *directory, int writes);
uint64_t sky_host_bucket(const HostMap *map, const uint64_t key[HOST_KEY_WORDS]);
/* Copy a key's entry as it is at one moment. 1 found, 0 absent, -1 the owner was changing it all the time. */
int sky_host_find(const HostMap *map, const uint64_t key[HOST_KEY_WORDS], HostFound *found);
uint64_t sky_host_now_ns(void); /* of the monotonic clock */
/* A page's slots, and how many; NULL if it has none, or is damaged. */
HostSlot *sky_host_slots(HostPage *page, uint64_t page_bytes, uint64_t *count);
/* The words of a key of 32 bytes; 0 with TypeError or ValueError. */
int sky_host_key(PyObject *given, uint64_t key[HOST_KEY_WORDS]);

#define HOST_LOAD(place) __atomic_load_n(&(place), __ATOMIC_ACQUIRE)
#define HOST_RELAXED(place) __atomic_load_n(&(place), __ATOMIC_RELAXED)
#define HOST_STORE(place, value) __atomic_store_n(&(place), (value), __ATOMIC_RELEASE)

extern SkyType sky_host_directory_type, sky_host_reader_type, sky_host_room_type, sky_host_view_type;

#endif
