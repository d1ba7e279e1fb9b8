/* What tests need of a satellite in C beside its own interface: settings as numbers, its state as bytes, memory from the
 * system. Compiled together with the whole core. */

#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "checks.h"
#include "handover.h"
#include "state.h"
#include "store/hash.h"
#include "wire/crc.h"

typedef void (*counted_in_python)(int64_t now, int64_t *counted);

/* Before the satellite's memory, in the same mapping: what shim_end takes. */
typedef struct {
    size_t mapped;
    counted_in_python counted;
    uint8_t room[48];
} head_t;

static sky_counted counted(void *context, sky_us now) {
    const head_t *head = context;
    int64_t found[3];
    head->counted(now, found);
    return (sky_counted){(int32_t)found[0], (int32_t)found[1], found[2]};
}

/* Bounds of the pools by number, 0: as they are by default; as machine.py's BOUNDS. */
static void bound(const int64_t *v, sky_config *c) {
    uint32_t *const bounds[] = {&c->most_departures, &c->most_questions, &c->most_subjects,  &c->most_asked,
                                &c->most_suspects,   &c->most_leases,    &c->most_expiries,  &c->most_evicted,
                                &c->most_conflicts,  &c->outbox_bytes,   &c->most_runs,      &c->most_transfers,
                                &c->most_ground_hosts, &c->most_back_offs, &c->postponed_bytes, &c->most_chunks,
                                &c->most_keys};
    for (unsigned each = 0; each < sizeof bounds / sizeof *bounds; each++) {
        *bounds[each] = v[each] != 0 ? (uint32_t)v[each] : *bounds[each];
    }
    c->hash_seed[0] = (uint64_t)v[sizeof bounds / sizeof *bounds];
}

/* Gaps that several satellites share, each set once: they live as long as the tests. */
static const uint8_t *gaps_of(const int64_t *v, uint32_t cells) {
    enum { SETS = 256 };
    static struct {
        uint32_t cells;
        uint8_t *gaps;
    } known[SETS];
    uint8_t *gaps = calloc(cells, 1);
    for (int64_t each = 0; each < v[0]; each++) {
        gaps[v[1 + each]] = 1;
    }
    for (unsigned set = 0; v[0] > 0 && set < SETS; set++) {
        if (known[set].gaps == NULL) {
            known[set].cells = cells;
            known[set].gaps = gaps;
            return gaps;
        }
        if (known[set].cells == cells && memcmp(known[set].gaps, gaps, cells) == 0) {
            free(gaps);
            return known[set].gaps;
        }
    }
    free(gaps);
    return NULL;
}

static void settings_of(const int64_t *v, const int64_t *keys, const uint8_t *secrets, uint32_t count, sky_config *c) {
    sky_config_defaults(c);
    c->address = (uint32_t)v[0];
    c->planes = (uint16_t)v[1];
    c->slots = (uint16_t)v[2];
    c->routing = (sky_routing_mode)v[3];
    c->memory_bytes = (uint64_t)v[4];
    c->most_chunks = (uint32_t)v[5];
    c->replacement = (sky_replacement)v[6];
    c->credit_bytes = (uint32_t)v[7];
    c->backlog_bytes = (uint64_t)v[8];
    c->outbox_bytes = (uint32_t)v[9];
    c->gossip = v[10] != 0;
    c->plane_only = v[11] != 0;
    c->periodic = v[12] != 0;
    c->migration = v[13] != 0;
    c->sweep = v[14];
    c->notice_hold = v[15];
    c->confirm = v[16];
    c->pin_share = (uint32_t)v[17];
    c->replicas = (uint32_t)v[18];
    c->centre_plane = (uint16_t)v[19];
    c->centre_slot = (uint16_t)v[20];
    c->slot_link_ps = (uint64_t)v[21];
    c->plane_link_ps = (uint64_t)v[22];
    c->pushed_slot = (int32_t)v[23];
    c->pushed_plane = (int32_t)v[24];
    c->neighbour_timeout = v[25];
    c->handover_window = (uint32_t)v[26];
    c->handover_timeout = v[27];
    c->handover_grace = v[28];
    c->handover_gap = v[29];
    c->ring.auth = (sky_auth)v[30];
    bound(v + 31, c);
    v += 31 + 18; /* behind the bounds */
    c->seam = v[0] != 0;
    c->most_planes = (uint16_t)v[1];
    c->most_slots = (uint16_t)v[2];
    c->gaps = gaps_of(v + 3, (uint32_t)c->planes * c->slots);
    c->ring.count = count;
    for (uint32_t each = 0; each < count; each++) {
        c->ring.keys[each].id = (uint16_t)keys[2 * each];
        c->ring.keys[each].from = keys[2 * each + 1];
        memcpy(c->ring.keys[each].secret, secrets + 32 * each, 32);
    }
}

/* Other keys from now on. */
void shim_set_keys(sky_satellite *satellite, const int64_t *keys, const uint8_t *secrets, uint32_t count) {
    sky_ring ring = satellite->config.ring;
    ring.count = count;
    for (uint32_t each = 0; each < count; each++) {
        ring.keys[each].id = (uint16_t)keys[2 * each];
        ring.keys[each].from = keys[2 * each + 1];
        memcpy(ring.keys[each].secret, secrets + 32 * each, 32);
    }
    sky_set_keys(satellite, &ring);
}

const char *shim_error(const int64_t *values) {
    sky_config config;
    settings_of(values, NULL, NULL, 0, &config);
    return sky_config_error(&config);
}

size_t shim_bytes(const int64_t *values) {
    sky_config config;
    settings_of(values, NULL, NULL, 0, &config);
    return sky_satellite_bytes(&config);
}

sky_satellite *shim_begin(const int64_t *values, const int64_t *keys, const uint8_t *secrets, uint32_t count,
                          counted_in_python clock, int64_t now, void **mapping) {
    sky_config config;
    settings_of(values, keys, secrets, count, &config);
    const size_t bytes = sky_satellite_bytes(&config);
    if (bytes == 0) {
        return NULL;
    }
    uint8_t *memory = mmap(NULL, bytes + sizeof(head_t), PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
        return NULL;
    }
    head_t *head = (head_t *)memory;
    head->mapped = bytes + sizeof(head_t);
    head->counted = clock;
    if (clock != NULL) {
        config.clock = counted;
        config.clock_context = head;
    }
    sky_satellite *satellite = sky_satellite_begin(memory + sizeof(head_t), bytes, &config, now);
    if (satellite == NULL) {
        munmap(memory, head->mapped);
    }
    *mapping = head;
    return satellite;
}

void shim_end(void *mapping) {
    const size_t mapped = ((head_t *)mapping)->mapped;
    SKY_UNGUARD(mapping, mapped);
    munmap(mapping, mapped);
}

void shim_set_lateness(sky_satellite *satellite, int64_t worst, int64_t worst_at, int64_t on_time) {
    satellite->lateness.worst = worst;
    satellite->lateness.worst_at = worst_at;
    satellite->lateness.on_time = on_time;
}

int64_t shim_late(const sky_satellite *satellite, int64_t now) { return sky_lateness_at(&satellite->lateness, now); }

/* All runs that wait, packet after packet, into `out`; of each run link, packets, bytes of one packet, bytes of all. Gives
 * the number of runs. A run that has no more room is left out (and counted by the caller, which gives room enough). */
uint32_t shim_take(sky_satellite *satellite, uint8_t *out, size_t room, int64_t *runs, uint32_t most) {
    sky_run run;
    uint32_t count = 0;
    size_t used = 0;
    while (sky_next_run(satellite, &run)) {
        const size_t begin = used;
        size_t total = run.headers_bytes;
        for (uint32_t each = 0; run.payloads != NULL && each < run.count; each++) {
            total += run.payloads[each].bytes;
        }
        if (count == most || total > room - used) {
            continue;
        }
        for (uint32_t each = 0; each < run.count; each++) {
            const size_t at = (size_t)each * run.header_bytes;
            const size_t head =
                run.headers_bytes - at < run.header_bytes ? run.headers_bytes - at : run.header_bytes;
            memcpy(out + used, run.headers + at, head);
            used += head;
            uint32_t left = run.payloads != NULL ? run.payloads[each].bytes : 0;
            uint32_t cell = left > 0 ? run.payloads[each].first_cell : 0;
            while (left > 0) {
                uint32_t bytes, next;
                const uint8_t *part = sky_payload_cell(satellite, cell, left, &bytes, &next);
                memcpy(out + used, part, bytes);
                used += bytes;
                left -= bytes;
                cell = next;
            }
        }
        runs[4 * count] = run.link;
        runs[4 * count + 1] = run.count;
        runs[4 * count + 2] = run.payloads != NULL ? run.header_bytes + run.payloads[0].bytes : run.header_bytes;
        runs[4 * count + 3] = (int64_t)(used - begin);
        count++;
    }
    return count;
}

int64_t shim_value(sky_satellite *s, uint32_t which) {
    switch (which) {
    case 0: return (int64_t)s->memory.used_bytes;
    case 1: return (int64_t)s->memory.limit_bytes;
    case 2: return (int64_t)s->memory.pinned_bytes;
    case 3: return (int64_t)s->memory.leased_bytes;
    case 4: return (int64_t)s->memory.count;
    case 5: return sky_handover_idle(s) ? 1 : 0;
    case 6: return sky_handover_at_rest(s) ? 1 : 0;
    case 7: return (int64_t)s->handover->planned;
    case 8: return (int64_t)s->handover->retransmitted;
    case 9: return (int64_t)s->router.links.searched;
    case 10: return (int64_t)s->postponed.kept;
    case 11: return s->neighbours.pushed_at_ms;
    case 12: return s->locator.pushed.slot;
    case 13: return s->locator.pushed.plane;
    case 14: return s->locator.moves.slot;
    case 15: return s->locator.moves.plane;
    case 16: return s->router.links.cut_pairs == 0 ? 1 : 0;
    case 17: return s->outbox.count;
    case 18: return s->timers_wait ? 1 : 0;
    case 19: return s->outbox.sequence;
    case 20: return s->retention.oldest;
    case 21: return s->router.count;
    case 22: return (int64_t)s->postponed.dropped;
    case 23: return s->handover->back_off_count;
    default: return 0;
    }
}

int64_t shim_counter(const sky_satellite *satellite, uint32_t which) {
    const uint64_t more = which == SKY_pins_refused ? satellite->memory.pins_refused : 0;
    return which == SKY_pools_full     ? (int64_t)sky_pools_full(satellite)
           : which < SKY_COUNTER_COUNT ? (int64_t)(satellite->counters.of[which] + more)
                                       : -1;
}

const char *shim_counter_name(uint32_t which) {
#define NAME(name) #name,
    static const char *const NAMES[] = {SKY_COUNTERS(NAME)};
#undef NAME
    return which < SKY_COUNTER_COUNT ? NAMES[which] : NULL;
}

void shim_ledger(sky_satellite *satellite, uint64_t *values, bool set) {
    sky_ledger *ledger = &satellite->memory.ledger;
    uint64_t *const fields[7] = {&ledger->set,
                                 &ledger->migrated_in,
                                 &ledger->went[SKY_REPLACED],
                                 &ledger->went[SKY_EVICTED_FOR_ROOM],
                                 &ledger->went[SKY_DELETED],
                                 &ledger->went[SKY_MIGRATED_OUT],
                                 &ledger->went[SKY_LOST]};
    for (unsigned each = 0; each < 7; each++) {
        *(set ? fields[each] : &values[each]) = *(set ? &values[each] : fields[each]);
    }
}

typedef struct {
    uint8_t *out;
    size_t used, room;
} sink_t;

static void copy(void *context, const uint8_t *bytes, size_t count) {
    sink_t *sink = context;
    if (count <= sink->room - sink->used) {
        memcpy(sink->out + sink->used, bytes, count);
    }
    sink->used += count;
}

/* Bytes of a part of the state: more than `room` if it was not enough. */
size_t shim_state(sky_satellite *satellite, uint32_t part, uint8_t *out, size_t room) {
    sink_t sink = {out, 0, room};
    sky_state(satellite, part, copy, &sink);
    return sink.used;
}

/* The payload of a chunk and its reference; -1: it is not here. */
int64_t shim_chunk(const sky_satellite *satellite, const uint8_t *key, uint32_t index, uint8_t *ref, uint8_t *payload) {
    const uint32_t chunk = sky_memory_find(&satellite->memory, key, index);
    if (chunk == 0) {
        return -1;
    }
    memcpy(ref, satellite->memory.chunks[chunk].ref, 72);
    sky_memory_copy(&satellite->memory, chunk, payload);
    return sky_chunk_bytes(&satellite->memory.chunks[chunk]);
}

/* Indices of the chunks of a key, ascending; how many. */
uint32_t shim_indices(const sky_satellite *satellite, const uint8_t *key, uint32_t *indices, uint32_t most) {
    const sky_memory *memory = &satellite->memory;
    const uint32_t share = sky_memory_share(memory, key);
    uint32_t count = 0;
    for (uint32_t chunk = share != 0 ? memory->shares[share].lowest : 0; chunk != 0 && count < most;
         chunk = memory->chunks[chunk].higher) {
        indices[count++] = sky_chunk_index(&memory->chunks[chunk]);
    }
    return count;
}

int shim_put(sky_satellite *satellite, const uint8_t *ref, const uint8_t *payload, uint32_t bytes) {
    const sky_incoming chunk = {ref, payload, bytes, 0};
    return sky_memory_put(&satellite->memory, &chunk, false).stored ? 1 : 0;
}

/* As for want of room: what the memory does with its victim. */
int shim_evict(sky_satellite *satellite, const uint8_t *key, uint32_t index) {
    sky_memory *memory = &satellite->memory;
    const uint32_t chunk = sky_memory_find(memory, key, index);
    if (chunk != 0 && memory->record_evicted) {
        const uint32_t known = sky_keymap_find(&memory->evicted, key);
        const uint32_t entry = known != 0 ? known : sky_keymap_add(&memory->evicted, key);
        memcpy(memory->evicted_refs + (size_t)entry * SKY_REF_BYTES, memory->chunks[chunk].ref, SKY_REF_BYTES);
    }
    if (chunk != 0) {
        sky_memory_remove(memory, chunk, SKY_EVICTED_FOR_ROOM);
    }
    return chunk != 0 ? 1 : 0;
}

void shim_set_limit(sky_satellite *satellite, uint64_t bytes) { satellite->memory.limit_bytes = bytes; }

int shim_remove(sky_satellite *satellite, const uint8_t *key, uint32_t index) {
    const uint32_t chunk = sky_memory_find(&satellite->memory, key, index);
    if (chunk != 0) {
        sky_memory_remove(&satellite->memory, chunk, SKY_DELETED);
    }
    return chunk != 0 ? 1 : 0;
}

uint32_t shim_remove_key(sky_satellite *satellite, const uint8_t *key) {
    return sky_memory_remove_key(&satellite->memory, key, SKY_DELETED);
}

/* Pinned until, expires, and the latest end of a lease; 0: not so. */
void shim_promises(const sky_satellite *satellite, const uint8_t *key, int64_t *found) {
    const sky_memory *memory = &satellite->memory;
    const uint32_t share = sky_memory_share(memory, key);
    const sky_share *its = &memory->shares[share];
    memset(found, 0, 3 * sizeof *found);
    if (share == 0) {
        return;
    }
    found[0] = its->pinned ? its->pinned_until : 0;
    found[1] = its->expiring ? its->expires : 0;
    for (uint32_t held = its->leases; held != 0; held = memory->leases[held].next) {
        found[2] = memory->leases[held].until > found[2] ? memory->leases[held].until : found[2];
    }
}

int shim_is_up(const sky_satellite *satellite, uint32_t here, uint32_t there) {
    const sky_link_state *links = &satellite->router.links;
    for (unsigned direction = 0; direction < 4; direction++) {
        if (sky_neighbour(links->torus, here, (sky_direction)direction) == there) {
            return (links->declared[sky_torus_index(links->torus, here)].cut >> direction & 1) == 0;
        }
    }
    return 1;
}

/* Where a chunk of the memory lies in tables of all buckets: by its key, and by itself. */
int64_t shim_bucket(const sky_satellite *satellite, const uint8_t *key, uint32_t index) {
    const sky_memory *memory = &satellite->memory;
    const uint32_t share = sky_memory_share(memory, key);
    const uint32_t of_key = sky_hash_key(memory->keys.seed, key, 0U) % memory->keys.buckets.most;
    return (int64_t)of_key << 32 | sky_hash_word(memory->keys.seed, (uint64_t)share << 32 | index) % memory->buckets.most;
}

static uint32_t longest(const sky_buckets *buckets, uint32_t (*next)(const void *, uint32_t), const void *of) {
    uint32_t most = 0;
    for (uint32_t each = 0; each < buckets->open; each++) {
        uint32_t length = 0;
        for (uint32_t at = buckets->first[each]; at != 0; at = next(of, at)) {
            length++;
        }
        most = length > most ? length : most;
    }
    return most;
}

static uint32_t next_key(const void *map, uint32_t at) { return ((const sky_keymap *)map)->nodes[at].chain; }
static uint32_t next_chunk(const void *memory, uint32_t at) { return ((const sky_memory *)memory)->chunks[at].chain; }

/* The longest chain of the memory's two tables. */
uint32_t shim_longest_chain(const sky_satellite *satellite) {
    const sky_memory *memory = &satellite->memory;
    const uint32_t keys = longest(&memory->keys.buckets, next_key, &memory->keys);
    const uint32_t chunks = longest(&memory->buckets, next_chunk, memory);
    return keys > chunks ? keys : chunks;
}

/* Two satellites that share memory: each in turn makes LINKS; then one begins while the other's runs wait. Gives 1 if the runs
 * are those of satellites that share nothing, and the early event is refused and counted. */
int shim_shared(const int64_t *values) {
    sky_config config;
    sky_run run;
    uint32_t made[2] = {0, 0};
    sky_satellite *of[3];
    settings_of(values, NULL, NULL, 0, &config);
    for (unsigned each = 0; each < 3; each++) { /* the last one shares nothing */
        if (each == 0) {
            config.shared_bytes = sky_shared_bytes(&config);
            config.shared = calloc(1, config.shared_bytes);
        } else if (each == 2) {
            config.shared = NULL;
        }
        const size_t bytes = sky_satellite_bytes(&config);
        of[each] = sky_satellite_begin(mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0),
                                       bytes, &config, 0);
        if (of[each] == NULL) {
            return 0;
        }
    }
    for (unsigned each = 0; each < 2; each++) {
        sky_satellite *one = each == 0 ? of[0] : of[2];
        sky_greet(one, 0);
        sky_gather(one, 0);
        while (sky_next_run(one, &run)) {
            made[each] = sky_crc32(made[each], run.headers, run.headers_bytes);
        }
    }
    sky_greet(of[0], 1);
    sky_greet(of[1], 1); /* too early */
    const bool refused = sky_pools_full(of[1]) == 1 && of[1]->outbox.count == 0;
    sky_gather(of[0], 1);
    while (sky_next_run(of[0], &run)) {
    }
    sky_greet(of[1], 1);
    return made[0] == made[1] && made[0] != 0 && refused && of[1]->outbox.count != 0;
}
