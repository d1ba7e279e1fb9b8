/* A satellite's chunk memory: chunks by key under a byte budget, with pins, leases and expiries. Twin of ChunkStore in
 * skymemory.protocol.satellite.memory.
 *
 * The chunks of one key that are here are its *share*; where room is needed, the share that the policy names is evicted
 * chunk by chunk, from its end. Shares and chunks are known by number, from 1; 0 is none. Numbers stay until the chunk or
 * share leaves, and are used again then.
 *
 * Payloads are in *cells* of one size, chained: no memory is lost to holes, whatever the sizes. A chunk's cells are handed
 * out as they lie (sky_memory_cell): nothing is copied to send it. Freed cells are handed out again in the order in which they
 * were, so that those of a chunk mostly lie side by side and are given as one. A cell has 1,024 bytes, a sixth of the default
 * chunk: larger ones cost memory where chunks are of any size (a quarter more at 2,048, three quarters at 6,144), and cells
 * that no chunk can ever fill; smaller ones only cost more pieces a packet, 0.05 us each.
 *
 * Pools: chunks, shares, cells (as many as the budget can need), leases, expiries. Where a pool is full the answer is that
 * of a full memory (FULL), or that of the twin's own bound (a lease or an expiry is refused).
 */
#ifndef SKY_MEMORY_H
#define SKY_MEMORY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "arena.h"
#include "config.h"
#include "placement/placement.h"
#include "store/eviction.h"
#include "store/keymap.h"
#include "wire/packet.h"

typedef enum { SKY_REPLACED, SKY_EVICTED_FOR_ROOM, SKY_DELETED, SKY_MIGRATED_OUT, SKY_LOST, SKY_CAUSES } sky_cause;

/* set + migrated in = held + all that went. */
typedef struct {
    uint64_t set, migrated_in, went[SKY_CAUSES];
} sky_ledger;

typedef struct {
    uint8_t ref[SKY_REF_BYTES]; /* as it came */
    uint32_t share;
    uint32_t first_cell; /* 0: an empty payload */
    uint32_t chain;      /* next in its bucket of the index; next free chunk */
    uint32_t lower, higher; /* in its share, by number */
} sky_chunk;

typedef struct {
    uint32_t lowest, highest; /* chunks, by number: from `lowest` on by `higher` */
    uint32_t count;
    uint32_t leases;      /* first lease of it */
    uint64_t bytes;       /* payloads and references */
    sky_us pinned_until;  /* where it is pinned */
    sky_us expires;       /* where it expires */
    uint32_t pin_older, pin_newer, expiry_older, expiry_newer, lease_older, lease_newer; /* lists, by arrival */
    bool pinned, leased, expiring;
    uint8_t mark;         /* free for a handler's own use within one call (0 outside) */
} sky_share;

typedef struct {
    uint32_t ground;
    uint32_t next; /* of this key; next free lease */
    sky_us until;
} sky_lease;

typedef struct {
    uint32_t first, last, count;
} sky_share_list;

/* A chunk that came, in the packet that brought it. */
typedef struct {
    const uint8_t *ref; /* SKY_REF_BYTES, checked by sky_ref_parse */
    const uint8_t *payload;
    uint32_t bytes; /* of the payload */
    uint32_t here;  /* for sky_memory_put_run itself: the chunk that is here in its place; 0: none */
} sky_incoming;

/* A chunk that was replaced by another copy of the same, and which copy was here: until sky_migration resolves it. */
typedef struct {
    uint32_t chunk;
    uint8_t replica_before;
} sky_conflict;

typedef struct {
    bool stored;
    uint32_t replaced, evicted; /* chunks */
} sky_put_outcome;

typedef struct {
    uint64_t limit_bytes, used_bytes, pinned_bytes, pin_limit_bytes, leased_bytes;
    sky_ledger ledger;
    uint64_t pins_refused; /* pins that ended since their keys grew too large */
    uint64_t pools_full;   /* chunks refused or evicted for want of a chunk, a share or cells; conflicts and evictions not noted */

    sky_keymap keys;    /* the shares, in the order in which their keys came */
    sky_share *shares;  /* by number in `keys` */
    uint32_t *by_key;   /* all shares, by ascending key */
    sky_share_list pins, leased, expiries;

    sky_chunk *chunks; /* 1 to most_chunks */
    sky_buckets buckets; /* index of chunks by share and number */
    uint32_t most_chunks, count, touched_chunks, freed_chunks;

    uint8_t *cells; /* cell n (from 1) at (n - 1) * cell_bytes */
    uint32_t *next_cell;
    uint32_t cell_bytes, most_cells, touched_cells, freed_cells, used_cells;
    /* While hold_freed is set freed cells are kept apart and not used again: what is queued to be sent must stay.
     * sky_memory_release_freed ends that. There are 80 KiB of cells beyond the budget for it. */
    bool hold_freed;
    uint32_t held_first, held_last, held_cells;

    sky_lease *leases;
    uint32_t most_leases, touched_leases, freed_leases;
    uint32_t most_expiries;

    sky_eviction eviction;

    sky_conflict *conflicts;
    uint32_t conflict_count, most_conflicts;

    /* Keys that lost chunks to eviction and were not stored since, with the reference of one chunk; empty without gossip. */
    bool record_evicted;
    sky_keymap evicted;
    uint8_t *evicted_refs; /* SKY_REF_BYTES each, by number in `evicted` */
} sky_memory;

bool sky_memory_new(sky_memory *memory, sky_arena *arena, const sky_config *config);

/* --- Store --- */

/* Stores a chunk; its key becomes the most recently used; others are evicted as needed. Not stored, and nothing changed:
 * it and the rest of its value that belongs here do not fit beside what is pinned and leased. */
sky_put_outcome sky_memory_put(sky_memory *memory, const sky_incoming *chunk, bool migrated);
/* The same for chunks of one value, ascending, at once. False, and nothing changed: each must be put by itself. */
bool sky_memory_put_run(sky_memory *memory, sky_incoming *chunks, uint32_t count, bool migrated,
                        sky_put_outcome *outcome);
/* A chunk that was handed over and dropped, since a later one is here: it came and went. */
void sky_memory_count_outdated(sky_memory *memory, uint32_t payload_bytes);
/* Makes a chunk another copy of the same. */
void sky_memory_relabel(sky_memory *memory, uint32_t chunk, uint8_t replica);
/* Takes up to `most` of the conflicts that were noted, the oldest first; how many. */
uint32_t sky_memory_take_conflicts(sky_memory *memory, sky_conflict *conflicts, uint32_t most);

/* --- Read --- */

uint32_t sky_memory_share(const sky_memory *memory, const uint8_t *key);
uint32_t sky_memory_chunk(const sky_memory *memory, uint32_t share, uint32_t index);
/* The same, where it is mostly the one that follows `before` in the share (0: the first). */
static inline uint32_t sky_memory_chunk_after(const sky_memory *memory, uint32_t share, uint32_t before, uint32_t index) {
    const uint32_t next = share == 0U ? 0U : (before != 0U ? memory->chunks[before].higher : memory->shares[share].lowest);
    return next != 0U && sky_ref_index(memory->chunks[next].ref) == index ? next : sky_memory_chunk(memory, share, index);
}
/* By key and index. */
uint32_t sky_memory_find(const sky_memory *memory, const uint8_t *key, uint32_t index);
static inline const uint8_t *sky_memory_key(const sky_memory *memory, uint32_t share) {
    return sky_keymap_key(&memory->keys, share);
}
static inline uint32_t sky_chunk_index(const sky_chunk *chunk) { return sky_ref_index(chunk->ref); }
static inline uint32_t sky_chunk_bytes(const sky_chunk *chunk) { return sky_ref_length(chunk->ref); }
/* One cell of a payload of which `left` bytes are left: its bytes, how many, and the cell that follows. Cells that lie side
 * by side are given as one. */
const uint8_t *sky_memory_cell(const sky_memory *memory, uint32_t cell, uint32_t left, uint32_t *bytes, uint32_t *next);
/* A whole payload, copied: for tests and where a packet must be one piece. */
void sky_memory_copy(const sky_memory *memory, uint32_t chunk, uint8_t *to);
/* A share was requested. */
void sky_memory_touch(sky_memory *memory, uint32_t share);
/* Makes it the most recent one, though it was not requested. */
void sky_memory_refresh(sky_memory *memory, uint32_t share);
/* The lowest chunk of the latest placement. */
uint32_t sky_memory_latest(const sky_memory *memory, uint32_t share);
/* What is held of a key; `held` 0: nothing. */
void sky_memory_presence(const sky_memory *memory, const uint8_t *key, sky_presence *presence);

/* --- Remove --- */

void sky_memory_remove(sky_memory *memory, uint32_t chunk, sky_cause cause);
/* Every chunk of a key; how many there were. */
uint32_t sky_memory_remove_key(sky_memory *memory, const uint8_t *key, sky_cause cause);
/* The chunks of one setting of a key; how many there were. */
uint32_t sky_memory_remove_setting(sky_memory *memory, const uint8_t *key, const uint8_t *setting, sky_cause cause);
void sky_memory_release_freed(sky_memory *memory);

/* --- List --- */

/* Number of keys, and the n-th (from 0) by ascending key: a share. */
static inline uint32_t sky_memory_keys(const sky_memory *memory) { return memory->keys.count; }
static inline uint32_t sky_memory_key_at(const sky_memory *memory, uint32_t n) { return memory->by_key[n]; }
/* How many keys are not greater than `key`: where a page after it begins. */
uint32_t sky_memory_after(const sky_memory *memory, const uint8_t *key);
/* All shares, the next to be evicted first, the pinned ones last by ascending key. Nothing may change meanwhile. */
typedef struct {
    sky_eviction_order ranked;
    uint32_t pinned;
} sky_memory_order;
void sky_memory_order_begin(sky_memory *memory, sky_memory_order *order);
uint32_t sky_memory_order_next(const sky_memory *memory, sky_memory_order *order);

/* --- Pins, leases, expiries --- */

void sky_memory_pin(sky_memory *memory, uint32_t share, sky_us until);
void sky_memory_unpin(sky_memory *memory, uint32_t share);
/* A share that is not pinned. False: no room for one more lease. */
bool sky_memory_lease(sky_memory *memory, uint32_t share, uint32_t ground, sky_us until);
/* The lease of this ground host; 0: none. Their number. */
const sky_lease *sky_memory_find_lease(const sky_memory *memory, uint32_t share, uint32_t ground, uint32_t *holders);
void sky_memory_release(sky_memory *memory, uint32_t share, uint32_t ground);
void sky_memory_end_lease(sky_memory *memory, uint32_t share);
/* SKY_NEVER ends the expiry. False: too many expire. */
bool sky_memory_expire(sky_memory *memory, uint32_t share, sky_us at);

#endif
