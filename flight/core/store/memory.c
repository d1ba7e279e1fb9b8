#include "store/memory.h"

#include <string.h>

#include "store/hash.h"

enum { HELD_CELL_BYTES = 80 * 1024, VERSION_AT = SKY_REF_VALUE_BYTES_AT, VERSION_BYTES = 8 };

bool sky_memory_new(sky_memory *memory, sky_arena *arena, const sky_config *config) {
    const uint32_t chunks = sky_config_chunks(config), keys = sky_config_keys(config);
    /* Each chunk fills all of its cells but the last: so many can never be too few for the budget. */
    const uint64_t cells = config->memory_bytes / config->cell_bytes + chunks + HELD_CELL_BYTES / config->cell_bytes + 1U;
    bool whole;
    memory->limit_bytes = config->memory_bytes;
    memory->pin_limit_bytes = config->memory_bytes * config->pin_share >> 16;
    memory->most_chunks = chunks;
    memory->cell_bytes = config->cell_bytes;
    memory->most_cells = cells < INT32_MAX ? (uint32_t)cells : (uint32_t)INT32_MAX;
    memory->most_leases = config->most_leases;
    memory->most_expiries = config->most_expiries;
    memory->most_conflicts = config->most_conflicts;
    memory->record_evicted = config->gossip;
    whole = sky_keymap_new(&memory->keys, arena, keys);
    memory->shares = sky_take(arena, (size_t)keys + 1U, sizeof *memory->shares);
    memory->by_key = sky_take(arena, (size_t)keys + 1U, sizeof *memory->by_key);
    memory->chunks = sky_take(arena, (size_t)chunks + 1U, sizeof *memory->chunks);
    whole = sky_buckets_new(&memory->buckets, arena, chunks) && whole;
    memory->next_cell = sky_take(arena, (size_t)memory->most_cells + 1U, sizeof *memory->next_cell);
    memory->leases = sky_take(arena, (size_t)config->most_leases + 1U, sizeof *memory->leases);
    memory->conflicts = sky_take(arena, config->most_conflicts, sizeof *memory->conflicts);
    whole = sky_eviction_new(&memory->eviction, arena, config, &memory->keys) && whole;
    if (memory->record_evicted) {
        whole = sky_keymap_new(&memory->evicted, arena, config->most_evicted) && whole;
        memory->evicted_refs = sky_take(arena, (size_t)config->most_evicted + 1U, SKY_REF_BYTES);
        whole = whole && memory->evicted_refs != NULL;
    }
    memory->cells = sky_take(arena, memory->most_cells, memory->cell_bytes);
    return whole && memory->shares != NULL && memory->by_key != NULL && memory->chunks != NULL &&
           memory->next_cell != NULL && memory->leases != NULL &&
           memory->conflicts != NULL && memory->cells != NULL;
}

/* --- Cells --- */

static uint32_t cells_of(const sky_memory *memory, uint32_t bytes) {
    return (bytes + memory->cell_bytes - 1U) / memory->cell_bytes;
}

static uint8_t *cell_at(const sky_memory *memory, uint32_t cell) {
    return memory->cells + (size_t)(cell - 1U) * memory->cell_bytes;
}

/* How many could be had now. */
static uint32_t free_cells(const sky_memory *memory) { return memory->most_cells - memory->used_cells; }

/* A cell that is free, of which there is one. */
static uint32_t take_cell(sky_memory *memory) {
    uint32_t cell = memory->freed_cells;
    if (cell != 0U) {
        memory->freed_cells = memory->next_cell[cell];
    } else {
        memory->touched_cells++;
        cell = memory->touched_cells;
    }
    memory->used_cells++;
    return cell;
}

/* A payload to cells, of which there are enough; the first, or 0 for none. What goes to cells side by side is copied at once. */
static uint32_t fill_cells(sky_memory *memory, const uint8_t *payload, uint32_t bytes) {
    uint32_t begin = 0, first = 0, last = 0;
    size_t from = 0, at = 0; /* of the payload: what goes to cells from `begin` to `last` */
    while (at < bytes) {
        const uint32_t cell = take_cell(memory);
        if (last != 0U) {
            memory->next_cell[last] = cell;
        } else {
            first = cell;
        }
        if (last == 0U || cell != last + 1U) {
            if (last != 0U) {
                (void)memcpy(cell_at(memory, begin), payload + from, at - from);
            }
            begin = cell;
            from = at;
        }
        last = cell;
        at += memory->cell_bytes;
    }
    if (last != 0U) {
        memory->next_cell[last] = 0;
        (void)memcpy(cell_at(memory, begin), payload + from, bytes - from);
    }
    return first;
}

/* They go back as a chain, the first on top: handed out again they lie side by side as before. */
static void free_chain(sky_memory *memory, uint32_t first) {
    uint32_t last = first, count = 1;
    if (first != 0U) {
        while (memory->next_cell[last] != 0U) {
            last = memory->next_cell[last];
            count++;
        }
        if (memory->hold_freed) { /* still counted as used */
            memory->next_cell[last] = memory->held_first;
            if (memory->held_first == 0U) {
                memory->held_last = last;
            }
            memory->held_first = first;
            memory->held_cells += count;
        } else {
            memory->next_cell[last] = memory->freed_cells;
            memory->freed_cells = first;
            memory->used_cells -= count;
        }
    }
}

void sky_memory_release_freed(sky_memory *memory) {
    memory->hold_freed = false;
    if (memory->held_first != 0U) {
        memory->next_cell[memory->held_last] = memory->freed_cells;
        memory->freed_cells = memory->held_first;
        memory->used_cells -= memory->held_cells;
        memory->held_first = 0;
        memory->held_last = 0;
        memory->held_cells = 0;
    }
}

const uint8_t *sky_memory_cell(const sky_memory *memory, uint32_t cell, uint32_t left, uint32_t *bytes, uint32_t *next) {
    uint32_t last = cell, has = left < memory->cell_bytes ? left : memory->cell_bytes;
    while (has < left && memory->next_cell[last] == last + 1U) {
        last++;
        has = left - has < memory->cell_bytes ? left : has + memory->cell_bytes;
    }
    *bytes = has;
    *next = memory->next_cell[last];
    return cell_at(memory, cell);
}

void sky_memory_copy(const sky_memory *memory, uint32_t chunk, uint8_t *to) {
    uint32_t cell = memory->chunks[chunk].first_cell, at = 0;
    const uint32_t bytes = sky_chunk_bytes(&memory->chunks[chunk]);
    while (at < bytes) {
        uint32_t part, next;
        const uint8_t *const from = sky_memory_cell(memory, cell, bytes - at, &part, &next);
        (void)memcpy(to + at, from, part);
        at += part;
        cell = next;
    }
}

/* --- Finding --- */

uint32_t sky_memory_share(const sky_memory *memory, const uint8_t *key) { return sky_keymap_find(&memory->keys, key); }

static uint32_t *bucket_of(const sky_memory *memory, uint32_t share, uint32_t index) {
    return sky_bucket(&memory->buckets, sky_hash_word(memory->keys.seed, (uint64_t)share << 32 | index));
}

static void chain_up(sky_memory *memory, uint32_t chunk) {
    sky_chunk *const entry = &memory->chunks[chunk];
    uint32_t *const bucket = bucket_of(memory, entry->share, sky_chunk_index(entry));
    entry->chain = *bucket;
    *bucket = chunk;
}

uint32_t sky_memory_chunk(const sky_memory *memory, uint32_t share, uint32_t index) {
    uint32_t chunk = share == 0U ? 0U : *bucket_of(memory, share, index);
    while (chunk != 0U &&
           (memory->chunks[chunk].share != share || sky_chunk_index(&memory->chunks[chunk]) != index)) {
        chunk = memory->chunks[chunk].chain;
    }
    return chunk;
}

uint32_t sky_memory_find(const sky_memory *memory, const uint8_t *key, uint32_t index) {
    return sky_memory_chunk(memory, sky_memory_share(memory, key), index);
}

uint32_t sky_memory_after(const sky_memory *memory, const uint8_t *key) {
    uint32_t low = 0, high = memory->keys.count;
    while (low < high) {
        const uint32_t middle = low + (high - low) / 2U;
        if (memcmp(sky_memory_key(memory, memory->by_key[middle]), key, SKY_KEY_BYTES) <= 0) {
            low = middle + 1U;
        } else {
            high = middle;
        }
    }
    return low;
}

static uint64_t size_of(uint32_t payload_bytes) { return (uint64_t)payload_bytes + SKY_REF_BYTES; }

static uint64_t share_bytes(const sky_memory *memory, uint32_t share) {
    return share == 0U ? 0U : memory->shares[share].bytes;
}

/* --- Lists of pinned, leased and expiring shares, by arrival --- */

typedef enum { PINS, LEASES, EXPIRIES } which_list;

static sky_share_list *list_of(sky_memory *memory, which_list which) {
    return which == PINS ? &memory->pins : (which == LEASES ? &memory->leased : &memory->expiries);
}
static uint32_t *older_of(sky_share *share, which_list which) {
    return which == PINS ? &share->pin_older : (which == LEASES ? &share->lease_older : &share->expiry_older);
}
static uint32_t *newer_of(sky_share *share, which_list which) {
    return which == PINS ? &share->pin_newer : (which == LEASES ? &share->lease_newer : &share->expiry_newer);
}

static void enlist(sky_memory *memory, which_list which, uint32_t share) {
    sky_share_list *const list = list_of(memory, which);
    *older_of(&memory->shares[share], which) = list->last;
    *newer_of(&memory->shares[share], which) = 0;
    if (list->last != 0U) {
        *newer_of(&memory->shares[list->last], which) = share;
    } else {
        list->first = share;
    }
    list->last = share;
    list->count++;
}

static void strike(sky_memory *memory, which_list which, uint32_t share) {
    sky_share_list *const list = list_of(memory, which);
    const uint32_t older = *older_of(&memory->shares[share], which), newer = *newer_of(&memory->shares[share], which);
    if (older != 0U) {
        *newer_of(&memory->shares[older], which) = newer;
    } else {
        list->first = newer;
    }
    if (newer != 0U) {
        *older_of(&memory->shares[newer], which) = older;
    } else {
        list->last = older;
    }
    list->count--;
}

/* --- Accounts --- */

/* A share has grown by `more` and shrunk by `less`. */
static void grow(sky_memory *memory, uint32_t share, uint64_t more, uint64_t less) {
    sky_share *const its = &memory->shares[share];
    its->bytes = its->bytes + more - less;
    memory->used_bytes = memory->used_bytes + more - less;
    if (its->pinned) {
        memory->pinned_bytes = memory->pinned_bytes + more - less;
    }
    if (its->leased) {
        memory->leased_bytes = memory->leased_bytes + more - less;
    }
}

/* `grow` by chunks that came: where the pinned have become too many the pin ends. */
static void came(sky_memory *memory, uint32_t share, uint64_t more, uint64_t less) {
    grow(memory, share, more, less);
    if (memory->shares[share].pinned && memory->pinned_bytes > memory->pin_limit_bytes) {
        sky_memory_unpin(memory, share);
        memory->pins_refused++;
    }
}

/* Whether chunks came by a handover: others count as set. */
static void count_came(sky_memory *memory, uint64_t bytes, bool migrated) {
    if (migrated) {
        memory->ledger.migrated_in += bytes;
    } else {
        memory->ledger.set += bytes;
    }
}

static void note(sky_memory *memory, uint32_t share, bool migrated) {
    if (memory->record_evicted && memory->evicted.count != 0U) {
        const uint32_t entry = sky_keymap_find(&memory->evicted, sky_memory_key(memory, share));
        if (entry != 0U) {
            sky_keymap_remove(&memory->evicted, entry);
        }
    }
    if (!memory->shares[share].pinned) {
        if (migrated) {
            sky_eviction_arrived(&memory->eviction, share);
        } else {
            sky_eviction_noted(&memory->eviction, share);
        }
    }
}

/* Bytes of other keys that may not be evicted. */
static uint64_t kept_beside(const sky_memory *memory, uint32_t share) {
    const bool kept = share != 0U && (memory->shares[share].pinned || memory->shares[share].leased);
    return memory->pinned_bytes + memory->leased_bytes - (kept ? memory->shares[share].bytes : 0U);
}

/* --- Shares --- */

/* A new share; 0: no room. */
static uint32_t add_share(sky_memory *memory, const uint8_t *key) {
    const uint32_t place = sky_memory_after(memory, key), count = memory->keys.count;
    const uint32_t share = sky_keymap_add(&memory->keys, key);
    if (share != 0U) {
        (void)memset(&memory->shares[share], 0, sizeof memory->shares[share]);
        (void)memmove(memory->by_key + place + 1U, memory->by_key + place, (count - place) * sizeof *memory->by_key);
        memory->by_key[place] = share;
    }
    return share;
}

/* An empty share leaves, with its pin, leases and expiry: chunks that come later bring their own. */
static void tidy(sky_memory *memory, uint32_t share, bool evicted) {
    sky_share *const its = &memory->shares[share];
    if (its->count == 0U) {
        const uint32_t place = sky_memory_after(memory, sky_memory_key(memory, share));
        (void)memmove(memory->by_key + place - 1U, memory->by_key + place,
                      (memory->keys.count - place) * sizeof *memory->by_key);
        if (its->pinned) {
            strike(memory, PINS, share);
        }
        if (its->expiring) {
            strike(memory, EXPIRIES, share);
        }
        if (its->leased) {
            strike(memory, LEASES, share);
            while (its->leases != 0U) {
                const uint32_t lease = its->leases;
                its->leases = memory->leases[lease].next;
                memory->leases[lease].next = memory->freed_leases;
                memory->freed_leases = lease;
            }
        }
        sky_eviction_gone(&memory->eviction, share, evicted);
        sky_keymap_remove(&memory->keys, share);
    }
}

/* --- Chunks --- */

/* Takes a new chunk's entry, with its place in the share and the index. There is room, as `has_entry` found. */
static uint32_t link_chunk(sky_memory *memory, uint32_t share, const uint8_t *ref) {
    sky_share *const its = &memory->shares[share];
    uint32_t chunk = memory->freed_chunks, below = its->highest, parted;
    sky_chunk *entry;
    if (chunk != 0U) {
        memory->freed_chunks = memory->chunks[chunk].chain;
    } else {
        memory->touched_chunks++;
        chunk = memory->touched_chunks;
    }
    entry = &memory->chunks[chunk];
    (void)memcpy(entry->ref, ref, SKY_REF_BYTES);
    entry->share = share;
    memory->count++;
    parted = sky_buckets_part(&memory->buckets, memory->count);
    while (parted != 0U) {
        const uint32_t next = memory->chunks[parted].chain;
        chain_up(memory, parted);
        parted = next;
    }
    chain_up(memory, chunk);
    if (below != 0U && sky_chunk_index(&memory->chunks[its->lowest]) > sky_ref_index(ref)) {
        below = 0; /* they come in descending order */
    }
    while (below != 0U && sky_chunk_index(&memory->chunks[below]) > sky_ref_index(ref)) { /* they mostly come in order */
        below = memory->chunks[below].lower;
    }
    entry->lower = below;
    entry->higher = below != 0U ? memory->chunks[below].higher : its->lowest;
    if (below != 0U) {
        memory->chunks[below].higher = chunk;
    } else {
        its->lowest = chunk;
    }
    if (entry->higher != 0U) {
        memory->chunks[entry->higher].lower = chunk;
    } else {
        its->highest = chunk;
    }
    its->count++;
    return chunk;
}

static bool has_entry(const sky_memory *memory) {
    return memory->freed_chunks != 0U || memory->touched_chunks < memory->most_chunks;
}

/* Takes a chunk out; its share stays, even empty. */
static void take(sky_memory *memory, uint32_t chunk, sky_cause cause) {
    sky_chunk *const entry = &memory->chunks[chunk];
    sky_share *const its = &memory->shares[entry->share];
    const uint64_t size = size_of(sky_chunk_bytes(entry));
    uint32_t *link = bucket_of(memory, entry->share, sky_chunk_index(entry));
    while (*link != chunk) {
        link = &memory->chunks[*link].chain;
    }
    *link = entry->chain;
    if (entry->lower != 0U) {
        memory->chunks[entry->lower].higher = entry->higher;
    } else {
        its->lowest = entry->higher;
    }
    if (entry->higher != 0U) {
        memory->chunks[entry->higher].lower = entry->lower;
    } else {
        its->highest = entry->lower;
    }
    its->count--;
    memory->count--;
    grow(memory, entry->share, 0, size);
    memory->ledger.went[cause] += size;
    free_chain(memory, entry->first_cell);
    entry->chain = memory->freed_chunks;
    memory->freed_chunks = chunk;
}

void sky_memory_remove(sky_memory *memory, uint32_t chunk, sky_cause cause) {
    const uint32_t share = memory->chunks[chunk].share;
    take(memory, chunk, cause);
    tidy(memory, share, cause == SKY_EVICTED_FOR_ROOM);
}

uint32_t sky_memory_remove_key(sky_memory *memory, const uint8_t *key, sky_cause cause) {
    const uint32_t share = sky_memory_share(memory, key);
    uint32_t count = 0;
    if (share != 0U) {
        count = memory->shares[share].count;
        while (memory->shares[share].lowest != 0U) {
            take(memory, memory->shares[share].lowest, cause);
        }
        tidy(memory, share, false);
    }
    return count;
}

uint32_t sky_memory_remove_setting(sky_memory *memory, const uint8_t *key, const uint8_t *setting, sky_cause cause) {
    const uint32_t share = sky_memory_share(memory, key);
    uint32_t count = 0, chunk = share != 0U ? memory->shares[share].lowest : 0U;
    while (chunk != 0U) {
        const uint32_t next = memory->chunks[chunk].higher;
        if (sky_ref_has_setting(memory->chunks[chunk].ref, setting)) {
            take(memory, chunk, cause);
            count++;
        }
        chunk = next;
    }
    if (share != 0U) {
        tidy(memory, share, cause == SKY_EVICTED_FOR_ROOM);
    }
    return count;
}

void sky_memory_relabel(sky_memory *memory, uint32_t chunk, uint8_t replica) {
    memory->chunks[chunk].ref[SKY_REF_REPLICA_AT] = replica;
}

void sky_memory_count_outdated(sky_memory *memory, uint32_t payload_bytes) {
    memory->ledger.migrated_in += size_of(payload_bytes);
    memory->ledger.went[SKY_REPLACED] += size_of(payload_bytes);
}

/* --- Room --- */

static bool same_version(const uint8_t *a, const uint8_t *b) {
    return memcmp(a + VERSION_AT, b + VERSION_AT, VERSION_BYTES) == 0;
}

/* Bytes of the chunks of a server's part that are neither `ref`'s own nor here (of the same value: `share`). */
static uint64_t coming_bytes(const sky_memory *memory, uint32_t share, const uint8_t *ref) {
    const uint64_t chunks = sky_load32(ref + SKY_REF_CHUNKS_AT), value = sky_load32(ref + SKY_REF_VALUE_BYTES_AT);
    const uint64_t length = sky_ref_length(ref), last = chunks - 1U, index = sky_ref_index(ref);
    const uint64_t servers = sky_load16(ref + SKY_REF_TAG_AT), first = index % servers;
    uint64_t missing = (chunks - first + servers - 1U) / servers - 1U, full, shorter = 0;
    bool last_is_here = false;
    for (uint32_t chunk = share != 0U ? memory->shares[share].lowest : 0U; chunk != 0U;
         chunk = memory->chunks[chunk].higher) {
        const uint64_t at = sky_chunk_index(&memory->chunks[chunk]);
        if (at != index && same_version(memory->chunks[chunk].ref, ref)) {
            if (at < chunks && at % servers == first) {
                if (missing == 0U) {
                    return 0;
                }
                missing--;
            }
            last_is_here = last_is_here || at == last;
        }
    }
    if (missing == 0U) {
        return 0;
    }
    full = index < last ? length : (value > length ? value - length : 0U) / last;
    if (last % servers == first && last != index && !last_is_here) {
        shorter = full * chunks > value ? full * chunks - value : 0U;
        shorter = shorter < full ? shorter : full;
    }
    return missing * (full + SKY_REF_BYTES) - shorter;
}

/* Whether a chunk fits, once everything that may be evicted for it is gone. If something would have to be evicted, the server's
 * whole part of the value must fit: what of it is here, and what is still to come. */
static bool has_room(const sky_memory *memory, uint32_t share, const uint8_t *ref, uint64_t size) {
    const uint32_t old = sky_memory_chunk(memory, share, sky_ref_index(ref));
    const uint64_t replaced = old != 0U ? size_of(sky_chunk_bytes(&memory->chunks[old])) : 0U;
    uint64_t same = 0;
    if (memory->used_bytes - replaced + size <= memory->limit_bytes) {
        return true;
    }
    for (uint32_t chunk = share != 0U ? memory->shares[share].lowest : 0U; chunk != 0U;
         chunk = memory->chunks[chunk].higher) {
        if (chunk != old && same_version(memory->chunks[chunk].ref, ref)) {
            same += size_of(sky_chunk_bytes(&memory->chunks[chunk]));
        }
    }
    return kept_beside(memory, share) + same + size + coming_bytes(memory, share, ref) <= memory->limit_bytes;
}

/* Evicts one chunk for a chunk of this key: never one of the same value. False: there is none. */
static bool evict(sky_memory *memory, const uint8_t *ref) {
    const uint32_t share = sky_memory_share(memory, ref);
    const uint32_t victim = sky_eviction_victim(&memory->eviction, share);
    uint32_t chunk = victim != 0U ? memory->shares[victim].highest : 0U;
    uint8_t key[SKY_KEY_BYTES], gone[SKY_REF_BYTES];
    if (victim == 0U && share != 0U) {
        chunk = memory->shares[share].highest;
        while (chunk != 0U && same_version(memory->chunks[chunk].ref, ref)) {
            chunk = memory->chunks[chunk].lower;
        }
    }
    if (chunk == 0U) {
        return false;
    }
    (void)memcpy(gone, memory->chunks[chunk].ref, SKY_REF_BYTES);
    (void)memcpy(key, gone, SKY_KEY_BYTES);
    sky_memory_remove(memory, chunk, SKY_EVICTED_FOR_ROOM);
    if (memory->record_evicted) {
        uint32_t entry = sky_keymap_find(&memory->evicted, key);
        if (entry == 0U) {
            entry = sky_keymap_add(&memory->evicted, key);
        }
        if (entry != 0U) {
            (void)memcpy(memory->evicted_refs + (size_t)entry * SKY_REF_BYTES, gone, SKY_REF_BYTES);
        } else {
            memory->pools_full++;
        }
    }
    return true;
}

/* --- Store --- */

/* Whether `coming` is another copy of the chunk that is here, and nothing else. */
static bool is_other_copy(const uint8_t *here, const uint8_t *coming) {
    return here[SKY_REF_REPLICA_AT] != coming[SKY_REF_REPLICA_AT] && memcmp(here, coming, SKY_REF_REPLICA_AT) == 0 &&
           memcmp(here + SKY_REF_REPLICA_AT + 1, coming + SKY_REF_REPLICA_AT + 1,
                  SKY_REF_BYTES - SKY_REF_REPLICA_AT - 1) == 0;
}

static void note_conflict(sky_memory *memory, uint32_t chunk, uint8_t before) {
    if (memory->conflict_count < memory->most_conflicts) {
        memory->conflicts[memory->conflict_count].chunk = chunk;
        memory->conflicts[memory->conflict_count].replica_before = before;
        memory->conflict_count++;
    } else {
        memory->pools_full++;
    }
}

uint32_t sky_memory_take_conflicts(sky_memory *memory, sky_conflict *conflicts, uint32_t most) {
    const uint32_t count = memory->conflict_count < most ? memory->conflict_count : most;
    (void)memcpy(conflicts, memory->conflicts, count * sizeof *conflicts);
    memory->conflict_count -= count;
    (void)memmove(memory->conflicts, memory->conflicts + count, memory->conflict_count * sizeof *conflicts);
    return count;
}

/* Whether a pool has no room for a chunk of so many bytes of a share (0: a new one). */
static bool lacks(const sky_memory *memory, uint32_t share, uint32_t bytes) {
    return !has_entry(memory) || free_cells(memory) < cells_of(memory, bytes) ||
           (share == 0U && memory->keys.count == memory->keys.capacity);
}

sky_put_outcome sky_memory_put(sky_memory *memory, const sky_incoming *chunk, bool migrated) {
    const uint64_t size = size_of(chunk->bytes);
    const uint8_t *const ref = chunk->ref;
    sky_put_outcome outcome = {false, 0, 0};
    uint32_t share = sky_memory_share(memory, ref), old = sky_memory_chunk(memory, share, sky_ref_index(ref)), entry;
    bool conflicts = false, room = true;
    uint8_t before = 0;
    if (!has_room(memory, share, ref, size)) {
        return outcome;
    }
    if (old == 0U && !has_entry(memory) && sky_eviction_victim(&memory->eviction, share) == 0U) {
        memory->pools_full++;
        return outcome;
    }
    if (old != 0U) {
        conflicts = is_other_copy(memory->chunks[old].ref, ref);
        before = memory->chunks[old].ref[SKY_REF_REPLICA_AT];
        take(memory, old, SKY_REPLACED);
        outcome.replaced = 1;
    }
    while (memory->used_bytes + size > memory->limit_bytes && room) {
        room = evict(memory, ref);
        outcome.evicted += room ? 1U : 0U;
    }
    /* The twin has no end of chunks, keys and cells: where ours ends the memory is full. */
    share = sky_memory_share(memory, ref);
    while (room && lacks(memory, share, chunk->bytes)) {
        /* While freed cells are held nothing that is evicted gives any. */
        room = !(memory->hold_freed && free_cells(memory) < cells_of(memory, chunk->bytes)) && evict(memory, ref);
        outcome.evicted += room ? 1U : 0U;
        memory->pools_full++;
        share = sky_memory_share(memory, ref);
    }
    if (!room) {
        if (share != 0U) {
            tidy(memory, share, false);
        }
        return outcome;
    }
    if (share == 0U) {
        share = add_share(memory, ref);
    }
    entry = link_chunk(memory, share, ref);
    memory->chunks[entry].first_cell = fill_cells(memory, chunk->payload, chunk->bytes);
    if (conflicts) {
        note_conflict(memory, entry, before);
    }
    came(memory, share, size, 0);
    count_came(memory, size, migrated);
    note(memory, share, migrated);
    outcome.stored = true;
    return outcome;
}

bool sky_memory_put_run(sky_memory *memory, sky_incoming *chunks, uint32_t count, bool migrated,
                        sky_put_outcome *outcome) {
    const uint8_t *const first = chunks[0].ref;
    uint32_t share = sky_memory_share(memory, first), cells = 0, before = 0;
    uint64_t size = 0, replaced = 0;
    outcome->stored = true;
    outcome->replaced = 0;
    outcome->evicted = 0;
    for (uint32_t i = 0; i < count; i++) {
        size += size_of(chunks[i].bytes);
        cells += cells_of(memory, chunks[i].bytes);
        chunks[i].here = sky_memory_chunk_after(memory, share, before, sky_ref_index(chunks[i].ref));
        if (chunks[i].here != 0U) {
            outcome->replaced++;
            before = chunks[i].here;
        }
    }
    /* Where one of our pools may end before the budget does: each by itself. */
    if (free_cells(memory) < cells || memory->most_chunks - memory->count < count ||
        (share == 0U && memory->keys.count == memory->keys.capacity)) {
        return false;
    }
    if (memory->used_bytes + size > memory->limit_bytes) {
        bool room = true; /* nothing that is replaced is evicted: there is nothing */
        if (outcome->replaced != 0U ||
            share_bytes(memory, share) + kept_beside(memory, share) + size > memory->limit_bytes ||
            !has_room(memory, share, first, size_of(chunks[0].bytes))) {
            return false;
        }
        while (memory->used_bytes + size > memory->limit_bytes && room) {
            room = evict(memory, first);
            outcome->evicted += room ? 1U : 0U;
        }
        share = sky_memory_share(memory, first); /* its last chunk may have been evicted */
    }
    if (share == 0U) {
        share = add_share(memory, first);
    }
    for (uint32_t i = 0; i < count; i++) {
        const sky_incoming *const chunk = &chunks[i];
        uint32_t entry = chunk->here;
        if (entry == 0U) {
            entry = link_chunk(memory, share, chunk->ref);
        } else {
            sky_chunk *const old = &memory->chunks[entry];
            if (is_other_copy(old->ref, chunk->ref)) {
                note_conflict(memory, entry, old->ref[SKY_REF_REPLICA_AT]);
            }
            replaced += size_of(sky_chunk_bytes(old));
            free_chain(memory, old->first_cell);
            (void)memcpy(old->ref, chunk->ref, SKY_REF_BYTES);
        }
        memory->chunks[entry].first_cell = fill_cells(memory, chunk->payload, chunk->bytes);
    }
    note(memory, share, migrated);
    came(memory, share, size, replaced);
    count_came(memory, size, migrated);
    memory->ledger.went[SKY_REPLACED] += replaced;
    return true;
}

/* --- Read --- */

void sky_memory_touch(sky_memory *memory, uint32_t share) {
    if (!memory->shares[share].pinned) {
        sky_eviction_used(&memory->eviction, share);
    }
}

void sky_memory_refresh(sky_memory *memory, uint32_t share) { note(memory, share, false); }

uint32_t sky_memory_latest(const sky_memory *memory, uint32_t share) {
    uint32_t found = memory->shares[share].lowest;
    int64_t most = INT64_MIN;
    for (uint32_t chunk = found; chunk != 0U; chunk = memory->chunks[chunk].higher) {
        const uint8_t *const moves = memory->chunks[chunk].ref + SKY_REF_MOVES_AT;
        const int64_t sum = (int64_t)sky_load32s(moves) + (int64_t)sky_load32s(moves + 4);
        if (sum > most) {
            most = sum;
            found = chunk;
        }
    }
    return found;
}

void sky_memory_presence(const sky_memory *memory, const uint8_t *key, sky_presence *presence) {
    const uint32_t share = sky_memory_share(memory, key);
    presence->held = 0;
    if (share != 0U) {
        sky_ref ref;
        (void)sky_ref_parse(memory->chunks[sky_memory_latest(memory, share)].ref, &ref);
        presence->index = ref.index;
        presence->chunks = ref.chunks;
        presence->length = ref.length;
        presence->value_bytes = ref.value_bytes;
        presence->value_crc = ref.value_crc;
        presence->held = memory->shares[share].count;
        presence->servers = ref.servers;
        presence->server = ref.server;
        presence->strategy = ref.strategy;
        presence->slot_moves = ref.slot_moves;
        presence->plane_moves = ref.plane_moves;
    }
}

void sky_memory_order_begin(sky_memory *memory, sky_memory_order *order) {
    sky_eviction_order_begin(&memory->eviction, &order->ranked);
    order->pinned = 0;
}

uint32_t sky_memory_order_next(const sky_memory *memory, sky_memory_order *order) {
    uint32_t found = sky_eviction_order_next(&memory->eviction, &order->ranked);
    if (found == 0U && memory->pins.count != 0U) {
        while (order->pinned < memory->keys.count && found == 0U) {
            const uint32_t share = memory->by_key[order->pinned];
            order->pinned++;
            found = memory->shares[share].pinned ? share : 0U;
        }
    }
    return found;
}

/* --- Pins, leases, expiries --- */

void sky_memory_pin(sky_memory *memory, uint32_t share, sky_us until) {
    sky_share *const its = &memory->shares[share];
    if (!its->pinned) {
        its->pinned = true;
        enlist(memory, PINS, share);
        memory->pinned_bytes += its->bytes;
        sky_eviction_gone(&memory->eviction, share, false);
    }
    its->pinned_until = until;
}

void sky_memory_unpin(sky_memory *memory, uint32_t share) {
    sky_share *const its = &memory->shares[share];
    if (its->pinned) {
        its->pinned = false;
        strike(memory, PINS, share);
        memory->pinned_bytes -= its->bytes;
        sky_eviction_noted(&memory->eviction, share);
    }
}

/* The link to the lease of a ground host, or to the end of the list. */
static uint32_t *lease_of(sky_memory *memory, uint32_t share, uint32_t ground) {
    uint32_t *link = &memory->shares[share].leases;
    while (*link != 0U && memory->leases[*link].ground != ground) {
        link = &memory->leases[*link].next;
    }
    return link;
}

const sky_lease *sky_memory_find_lease(const sky_memory *memory, uint32_t share, uint32_t ground, uint32_t *holders) {
    const sky_lease *found = NULL;
    *holders = 0;
    for (uint32_t lease = memory->shares[share].leases; lease != 0U; lease = memory->leases[lease].next) {
        (*holders)++;
        if (memory->leases[lease].ground == ground) {
            found = &memory->leases[lease];
        }
    }
    return found;
}

bool sky_memory_lease(sky_memory *memory, uint32_t share, uint32_t ground, sky_us until) {
    sky_share *const its = &memory->shares[share];
    uint32_t *const link = lease_of(memory, share, ground);
    uint32_t lease = *link;
    if (lease == 0U) {
        lease = memory->freed_leases;
        if (lease != 0U) {
            memory->freed_leases = memory->leases[lease].next;
        } else if (memory->touched_leases < memory->most_leases) {
            memory->touched_leases++;
            lease = memory->touched_leases;
        } else {
            return false;
        }
        memory->leases[lease].ground = ground;
        memory->leases[lease].next = 0;
        *link = lease;
    }
    memory->leases[lease].until = until;
    if (!its->leased) {
        its->leased = true;
        enlist(memory, LEASES, share);
        memory->leased_bytes += its->bytes;
        sky_eviction_hold(&memory->eviction, share);
    }
    return true;
}

void sky_memory_release(sky_memory *memory, uint32_t share, uint32_t ground) {
    if (memory->shares[share].leased) {
        uint32_t *const link = lease_of(memory, share, ground);
        const uint32_t lease = *link;
        if (lease != 0U) {
            *link = memory->leases[lease].next;
            memory->leases[lease].next = memory->freed_leases;
            memory->freed_leases = lease;
            if (memory->shares[share].leases == 0U) {
                sky_memory_end_lease(memory, share);
            }
        }
    }
}

void sky_memory_end_lease(sky_memory *memory, uint32_t share) {
    sky_share *const its = &memory->shares[share];
    if (its->leased) {
        while (its->leases != 0U) {
            const uint32_t lease = its->leases;
            its->leases = memory->leases[lease].next;
            memory->leases[lease].next = memory->freed_leases;
            memory->freed_leases = lease;
        }
        its->leased = false;
        strike(memory, LEASES, share);
        memory->leased_bytes -= its->bytes;
        sky_eviction_free(&memory->eviction, share);
    }
}

bool sky_memory_expire(sky_memory *memory, uint32_t share, sky_us at) {
    sky_share *const its = &memory->shares[share];
    bool done = true;
    if (at == SKY_NEVER) {
        if (its->expiring) {
            its->expiring = false;
            strike(memory, EXPIRIES, share);
        }
    } else if (its->expiring) {
        its->expires = at;
    } else if (memory->expiries.count < memory->most_expiries) {
        its->expiring = true;
        its->expires = at;
        enlist(memory, EXPIRIES, share);
    } else {
        done = false;
    }
    return done;
}
