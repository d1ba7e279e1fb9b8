/* The parts of the core as functions of plain numbers and bytes, for tests from Python: packets, placement, memory, eviction,
 * history, authentication, clock. Each handle is one allocation that begins with the part itself. */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "config.h"
#include "counters.h"
#include "placement/clock.h"
#include "placement/locator.h"
#include "placement/placement.h"
#include "store/history.h"
#include "store/memory.h"
#include "wire/auth.h"
#include "wire/crc.h"
#include "wire/packet.h"
#include "wire/sha.h"

/* Memory as the daemon gives it: zeroed pages that are there once touched. */
static void *pages(size_t bytes, size_t *mapped) {
    void *found = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    *mapped = bytes;
    return found == MAP_FAILED ? NULL : found;
}

/* --- Packets --- */

int64_t parts_parse(const uint8_t *packet, size_t bytes, int64_t *fields) {
    sky_header h;
    const uint8_t *body = packet;
    size_t body_bytes = 0;
    sky_verdict verdict = sky_packet_parse(packet, bytes, &h, &body, &body_bytes);
    int64_t found[] = {h.op, h.flags, h.status, h.hop_limit, h.hop_count, h.congestion, h.credit, h.key_id, h.destination,
                       h.source, h.ground, h.request_id, h.timestamp_us, h.slot_moves, h.plane_moves,
                       (int64_t)(body - packet), (int64_t)body_bytes};
    if (verdict == SKY_SOUND)
        memcpy(fields, found, sizeof found);
    return verdict;
}

/* A packet made again from what its parsers say; its bytes, or 0. */
size_t parts_rebuild(const uint8_t *packet, size_t bytes, sky_us time, uint8_t *out) {
    sky_header h;
    const uint8_t *body, *records;
    size_t n, at, end, written;
    uint32_t count, other, step = 0, index, indices[1024], found = 0;
    int32_t slot, plane;
    if (sky_packet_verify(packet, bytes) != SKY_SOUND || sky_packet_parse(packet, bytes, &h, &body, &n) != SKY_SOUND)
        return 0;
    at = sky_packet_begin(out, &h, n, sky_load16(packet + 2) & 0x3FFF, time);
    end = at + n;
    uint8_t *to = out + at;
    memset(to, 0xEE, n);
    switch (h.op) {
    case SKY_SET:
    case SKY_MIGRATE:
    case SKY_DATA:
        memcpy(to, body, n); /* references and payloads are sent as they came */
        end = at + SKY_REF_BYTES;
        break;
    case SKY_GET:
    case SKY_ACK:
    case SKY_MISS:
    case SKY_BUSY: {
        sky_selection s;
        if (!sky_selection_parse(body, n, &s))
            return 0;
        while (found < 1024 && sky_selection_next(&s, &step, &index))
            indices[found++] = index;
        if (sky_selection_build(to, n, s.key, indices, found, s.stride, &written) != found || written != n)
            return 0;
        break;
    }
    case SKY_HAS:
    case SKY_EVICT:
        if (!sky_keys_parse(body, n, &records, &count))
            return 0;
        sky_records_head(to, count);
        memcpy(to + 4, records, 32 * count);
        break;
    case SKY_LIST:
        if (!sky_list_parse(body, n, &records, &count))
            return 0;
        memcpy(to, body, n);
        break;
    case SKY_ADVANCE:
    case SKY_ADVANCED:
        if (!sky_moves_parse(body, n, &slot, &plane))
            return 0;
        sky_moves_build(to, slot, plane);
        break;
    case SKY_NOTICE: {
        sky_notice notice;
        if (!sky_notice_parse(body, n, &notice))
            return 0;
        sky_notice_build(to, &notice);
        memcpy(to + SKY_NOTICE_HEAD, notice.dead, notice.count * SKY_DEAD_BYTES);
        break;
    }
    case SKY_LINKS: {
        sky_links links;
        if (!sky_links_parse(body, n, &links))
            return 0;
        sky_links_build(to, &links);
        for (uint32_t i = 0; i < links.count; i++) {
            sky_declaration d;
            sky_declaration_at(links.declarations, i, &d);
            sky_declaration_build(to + SKY_LINKS_HEAD + 16 * i, &d);
        }
        break;
    }
    case SKY_RETAIN: {
        sky_retain r;
        if (!sky_retain_parse(body, n, &r))
            return 0;
        sky_retain_build(to, r.what, r.until_ms, r.count);
        memcpy(to + SKY_RETAIN_HEAD, r.keys, 32 * r.count);
        break;
    }
    case SKY_CHECK:
        if (!sky_checks_parse(body, n, &count))
            return 0;
        sky_records_head(to, count);
        for (uint32_t i = 0; i < count; i++) {
            sky_check c;
            sky_check_at(body, i, &c);
            sky_check_build(to + 4 + SKY_CHECK_BYTES * i, &c);
        }
        break;
    case SKY_FORGET:
        if (!sky_forget_parse(body, n, &records, &count, &other))
            return 0;
        sky_store16(to, count);
        sky_store16(to + 2, other);
        memcpy(to + 4, records, SKY_DEAD_BYTES * count);
        break;
    case SKY_GONE:
        if (!sky_dead_parse(body, n, &records, &count))
            return 0;
        sky_records_head(to, count);
        memcpy(to + 4, records, SKY_DEAD_BYTES * count);
        break;
    case SKY_PRESENCE:
    case SKY_LISTED: {
        size_t key = h.op == SKY_LISTED ? 32 : 0, width = key + SKY_PRESENCE_BYTES;
        if (!sky_records_parse(body, n, width, 0, UINT16_MAX, &count))
            return 0;
        sky_records_head(to, count);
        for (uint32_t i = 0; i < count; i++) {
            sky_presence p;
            if (!sky_presence_parse(body + 4 + i * width + key, &p))
                return 0;
            memcpy(to + 4 + i * width, body + 4 + i * width, key);
            sky_presence_build(to + 4 + i * width + key, &p);
        }
        break;
    }
    case SKY_RETAINED:
    case SKY_CHECKED:
        if (!sky_verdicts_parse(body, n, &records, &count))
            return 0;
        sky_records_head(to, count);
        memcpy(to + 4, records, count);
        break;
    case SKY_UNSUPPORTED:
        sky_unsupported_build(to, body[0], sky_load64(body + 4), sky_load64(body + 12));
        to[1] = body[1], to[2] = body[2]; /* another release's versions */
        break;
    default: /* EVICTED, PONG, PING, UNREACHABLE: numbers, or nothing */
        if (!sky_body_check(h.op, body, n))
            return 0;
        memcpy(to, body, n);
    }
    sky_packet_seal(out, end);
    return bytes;
}

uint32_t parts_cover(const uint8_t *key, const uint32_t *indices, uint32_t count, uint32_t stride, uint8_t *out, size_t room,
                     size_t *written) {
    return sky_selection_build(out, room, key, indices, count, stride ? stride : sky_selection_stride(indices, count), written);
}

/* --- Torus and placement --- */

uint32_t parts_next_hop(uint32_t planes, uint32_t slots, uint32_t here, uint32_t there, int alternate, int came) {
    sky_torus torus = {(uint16_t)planes, (uint16_t)slots};
    return sky_next_hop(torus, here, there, alternate != 0, (sky_axis)came);
}
uint32_t parts_neighbour(uint32_t planes, uint32_t slots, uint32_t here, int direction) {
    sky_torus torus = {(uint16_t)planes, (uint16_t)slots};
    return sky_neighbour(torus, here, (sky_direction)direction);
}
uint32_t parts_hops(uint32_t planes, uint32_t slots, uint32_t here, uint32_t there) {
    sky_torus torus = {(uint16_t)planes, (uint16_t)slots};
    return sky_hops(torus, here, there);
}

typedef struct {
    sky_placements placements;
    sky_config config;
} placing;

static void *with_room(size_t size, bool (*begin)(void *part, sky_arena *arena), void (*prepare)(void *part, const void *from),
                       const void *from) {
    void *part = calloc(1, size);
    sky_arena arena = {0};
    size_t mapped;
    prepare(part, from);
    (void)begin(part, &arena);
    free(part);
    part = calloc(1, size);
    prepare(part, from);
    arena.bytes = arena.used;
    arena.used = arena.low = 0;
    arena.memory = pages(arena.bytes, &mapped);
    if (!begin(part, &arena))
        return NULL;
    return part;
}

static bool begin_placing(void *part, sky_arena *arena) {
    placing *its = part;
    return sky_placements_new(&its->placements, arena, &its->config);
}
static void prepare_placing(void *part, const void *from) {
    const int64_t *v = from;
    placing *its = part;
    sky_config_defaults(&its->config);
    its->config.planes = (uint16_t)v[0];
    its->config.slots = (uint16_t)v[1];
    its->config.centre_plane = (uint16_t)v[2];
    its->config.centre_slot = (uint16_t)v[3];
    its->config.slot_link_ps = (uint64_t)v[4];
    its->config.plane_link_ps = (uint64_t)v[5];
}
void *parts_placing(const int64_t *numbers) { return with_room(sizeof(placing), begin_placing, prepare_placing, numbers); }

/* set and now: slot, plane each */
uint32_t parts_locate(placing *its, const uint8_t *tag, int32_t now_slot, int32_t now_plane) {
    sky_moves now = {now_slot, now_plane};
    return sky_locate_tag(&its->placements, tag, now);
}
int parts_layout(placing *its, uint32_t strategy, uint32_t servers, int16_t *cells, int32_t *box) {
    const sky_layout *layout = sky_layout_of(&its->placements, strategy, servers);
    if (!layout)
        return 0;
    memcpy(cells, layout->cells, servers * sizeof *layout->cells);
    box[0] = layout->box.width, box[1] = layout->box.height, box[2] = layout->box.west, box[3] = layout->box.north;
    return 1;
}
uint32_t parts_all_places(placing *its, uint32_t strategy, uint32_t servers, int32_t slot, int32_t plane, int32_t *out) {
    const sky_layout *layout = sky_layout_of(&its->placements, strategy, servers);
    sky_moves set = {slot, plane};
    uint32_t count = sky_all_places(&its->placements, layout);
    for (uint32_t n = 0; n < count; n++) {
        sky_moves found = sky_all_places_at(&its->placements, layout, set, n);
        out[2 * n] = found.slot, out[2 * n + 1] = found.plane;
    }
    return count;
}

/* --- Clock and locator --- */

void *parts_clock(const char *preset, int version, const double *v) { /* epoch, scale, then latitude, longitude or periods */
    sky_move_clock *clock = calloc(1, sizeof *clock);
    sky_knot *knot = calloc(1, sizeof *knot);
    if (preset[0]) {
        if (sky_clock_by_preset(clock, knot, preset, version, v[0], v[1], v[2], v[3]))
            return NULL;
    } else {
        sky_clock_by_periods(clock, v[0], v[1], v[2], v[3]);
    }
    return clock;
}
void parts_counted(void *clock, sky_us now, int64_t *out) {
    sky_counted counted = sky_clock_counted(clock, now);
    out[0] = counted.slot_moves, out[1] = counted.plane_moves, out[2] = counted.next_us;
}

typedef struct {
    sky_locator locator;
    sky_config config;
    sky_us now;
} locating;
static bool begin_locating(void *part, sky_arena *arena) {
    locating *its = part;
    return sky_locator_new(&its->locator, arena, &its->config, its->now);
}
static void prepare_locating(void *part, const void *from) {
    const int64_t *v = from;
    locating *its = part;
    prepare_placing(&(placing){0}, from);
    sky_config_defaults(&its->config);
    its->config.planes = (uint16_t)v[0];
    its->config.slots = (uint16_t)v[1];
    its->config.centre_plane = (uint16_t)v[2];
    its->config.centre_slot = (uint16_t)v[3];
    its->config.pushed_slot = (int32_t)v[6];
    its->config.pushed_plane = (int32_t)v[7];
    its->config.clock = v[8] ? sky_clock_counted : NULL;
    its->config.clock_context = (void *)(intptr_t)v[8];
    its->now = v[9];
}
void *parts_locator(const int64_t *numbers) {
    return with_room(sizeof(locating), begin_locating, prepare_locating, numbers);
}
uint32_t parts_moves_since(locating *its, uint32_t strategy, uint32_t servers, int32_t slot, int32_t plane, sky_us now,
                           int32_t *out, uint32_t most) {
    static sky_moves_since since;
    sky_moves set = {slot, plane}, found;
    uint32_t count = 0;
    const sky_layout *layout = sky_layout_of(its->locator.placements, strategy, servers);
    sky_moves_since_begin(&since, &its->locator, layout, set, now);
    while (count < most && sky_moves_since_next(&since, &its->locator, &found)) {
        out[2 * count] = found.slot, out[2 * count + 1] = found.plane;
        count++;
    }
    return count;
}
/* follow, then: moves, before, next, interval, and whether they changed */
void parts_follow(locating *its, sky_us now, int64_t *out) {
    out[6] = sky_locator_follow(&its->locator, now);
    out[0] = its->locator.moves.slot, out[1] = its->locator.moves.plane;
    out[2] = its->locator.before.slot, out[3] = its->locator.before.plane;
    out[4] = its->locator.next_move, out[5] = sky_locator_interval(&its->locator, now);
}
int parts_push(locating *its, int32_t slot, int32_t plane, sky_us now, int32_t most) {
    sky_moves pushed = {slot, plane};
    int may = sky_locator_may_push(&its->locator, pushed, now, most);
    if (may)
        sky_locator_push(&its->locator, pushed);
    return may;
}
uint32_t parts_home(locating *its, const uint8_t *ref) { return sky_locator_home(&its->locator, ref); }

/* --- Memory --- */

typedef struct {
    sky_memory memory;
    sky_config config;
    uint8_t *pool;
    size_t bytes;
} storing;

void *parts_memory(const int64_t *v) {
    storing *its = calloc(1, sizeof *its);
    sky_arena arena = {0};
    sky_config_defaults(&its->config);
    its->config.memory_bytes = (uint64_t)v[0];
    its->config.replacement = (sky_replacement)v[1];
    its->config.pin_share = (uint32_t)v[2];
    its->config.gossip = v[3] != 0;
    its->config.most_chunks = (uint32_t)v[4];
    its->config.most_keys = (uint32_t)v[5];
    its->config.cell_bytes = (uint32_t)v[6];
    its->config.most_departed = (uint32_t)v[7];
    sky_memory counting;
    memset(&counting, 0, sizeof counting);
    (void)sky_memory_new(&counting, &arena, &its->config);
    arena.bytes = arena.used;
    arena.used = arena.low = 0;
    arena.memory = pages(arena.bytes, &its->bytes);
    its->pool = arena.memory;
    return its->pool && sky_memory_new(&its->memory, &arena, &its->config) ? its : NULL;
}
void parts_memory_end(storing *its) {
    SKY_UNGUARD(its->pool, its->bytes);
    munmap(its->pool, its->bytes);
    free(its);
}
size_t parts_memory_bytes(const storing *its) { return its->bytes; }
/* How many bytes of its pages are resident. */
size_t parts_memory_resident(const storing *its) {
    size_t page = 4096, count = (its->bytes + page - 1) / page, found = 0;
    unsigned char *there = malloc(count);
    mincore(its->pool, its->bytes, there);
    for (size_t i = 0; i < count; i++)
        found += (there[i] & 1) * page;
    free(there);
    return found;
}
void parts_put(storing *its, const uint8_t *ref, const uint8_t *payload, uint32_t bytes, int migrated, int64_t *out) {
    sky_incoming one = {ref, payload, bytes, 0};
    sky_put_outcome o = sky_memory_put(&its->memory, &one, migrated != 0);
    out[0] = o.stored, out[1] = o.replaced, out[2] = o.evicted;
}
int parts_put_run(storing *its, const uint8_t *refs, const uint8_t *payloads, uint32_t count, int migrated, int64_t *out) {
    sky_incoming run[512];
    sky_put_outcome o;
    for (uint32_t i = 0; i < count; i++) {
        run[i].ref = refs + i * SKY_REF_BYTES;
        run[i].bytes = sky_ref_length(run[i].ref);
        run[i].payload = payloads;
        payloads += run[i].bytes;
    }
    if (!sky_memory_put_run(&its->memory, run, count, migrated != 0, &o))
        return 0;
    out[0] = o.stored, out[1] = o.replaced, out[2] = o.evicted;
    return 1;
}
int64_t parts_get(storing *its, const uint8_t *key, uint32_t index, uint8_t *ref, uint8_t *payload) {
    uint32_t chunk = sky_memory_find(&its->memory, key, index);
    if (!chunk)
        return -1;
    memcpy(ref, its->memory.chunks[chunk].ref, SKY_REF_BYTES);
    sky_memory_copy(&its->memory, chunk, payload);
    return sky_chunk_bytes(&its->memory.chunks[chunk]);
}
/* One verb on a key; what it gives. */
int64_t parts_verb(storing *its, int verb, const uint8_t *key, int64_t a, int64_t b) {
    sky_memory *m = &its->memory;
    uint32_t share = sky_memory_share(m, key), chunk, holders;
    if (verb == 5)
        return sky_memory_remove_key(m, key, (sky_cause)a);
    if (!share)
        return -1;
    switch (verb) {
    case 0: sky_memory_touch(m, share); return 1;
    case 1: sky_memory_refresh(m, share); return 1;
    case 2:
        chunk = sky_memory_chunk(m, share, (uint32_t)a);
        if (!chunk)
            return 0;
        sky_memory_remove(m, chunk, (sky_cause)b);
        return 1;
    case 3: sky_memory_pin(m, share, a); return 1;
    case 4: sky_memory_unpin(m, share); return 1;
    case 6: return sky_memory_lease(m, share, (uint32_t)a, b);
    case 7: sky_memory_release(m, share, (uint32_t)a); return 1;
    case 8: sky_memory_end_lease(m, share); return 1;
    case 9: return sky_memory_expire(m, share, a);
    case 10:
        chunk = sky_memory_chunk(m, share, (uint32_t)a);
        if (chunk)
            sky_memory_relabel(m, chunk, (uint8_t)b);
        return chunk != 0;
    case 11: return sky_memory_find_lease(m, share, (uint32_t)a, &holders) ? holders : -(int64_t)holders;
    case 12: return sky_chunk_index(&m->chunks[sky_memory_latest(m, share)]);
    default: return -2;
    }
}
uint32_t parts_remove_setting(storing *its, const uint8_t *key, const uint8_t *setting, int cause) {
    return sky_memory_remove_setting(&its->memory, key, setting, (sky_cause)cause);
}
void parts_outdated(storing *its, uint32_t bytes) { sky_memory_count_outdated(&its->memory, bytes); }
void parts_hold(storing *its, int hold) {
    if (hold)
        its->memory.hold_freed = true;
    else
        sky_memory_release_freed(&its->memory);
}
void parts_presence(storing *its, const uint8_t *key, uint8_t *record) {
    sky_presence presence;
    sky_memory_presence(&its->memory, key, &presence);
    sky_presence_build(record, &presence);
}
void parts_figures(const storing *its, uint64_t *out) {
    const sky_memory *m = &its->memory;
    uint64_t found[] = {m->used_bytes, m->pinned_bytes, m->leased_bytes, m->count, m->keys.count, m->pins_refused,
                        m->pools_full, m->pins.count, m->leased.count, m->expiries.count, m->used_cells, m->ledger.set,
                        m->ledger.migrated_in, m->ledger.went[0], m->ledger.went[1], m->ledger.went[2], m->ledger.went[3],
                        m->ledger.went[4]};
    memcpy(out, found, sizeof found);
}
uint32_t parts_order(storing *its, uint8_t *keys) {
    sky_memory_order order;
    uint32_t count = 0, share;
    sky_memory_order_begin(&its->memory, &order);
    while ((share = sky_memory_order_next(&its->memory, &order)) != 0)
        memcpy(keys + 32 * count++, sky_memory_key(&its->memory, share), 32);
    return count;
}
/* A list: 0 keys ascending, 1 pins, 2 leases, 3 expiries, 4 arrivals, 5 evicted (with references of 72 after each key). */
uint32_t parts_list(storing *its, int which, uint8_t *out) {
    sky_memory *m = &its->memory;
    uint32_t count = 0, at;
    if (which == 0)
        for (; count < sky_memory_keys(m); count++)
            memcpy(out + 32 * count, sky_memory_key(m, sky_memory_key_at(m, count)), 32);
    else if (which == 5)
        for (at = m->evicted.first; at; at = sky_keymap_newer(&m->evicted, at), count++) {
            memcpy(out + 104 * count, sky_keymap_key(&m->evicted, at), 32);
            memcpy(out + 104 * count + 32, m->evicted_refs + 72 * (size_t)at, 72);
        }
    else if (which == 4)
        for (at = m->keys.first; at; at = sky_keymap_newer(&m->keys, at))
            memcpy(out + 32 * count++, sky_memory_key(m, at), 32);
    else {
        at = which == 1 ? m->pins.first : which == 2 ? m->leased.first : m->expiries.first;
        while (at) {
            sky_share *s = &m->shares[at];
            memcpy(out + 32 * count++, sky_memory_key(m, at), 32);
            at = which == 1 ? s->pin_newer : which == 2 ? s->lease_newer : s->expiry_newer;
        }
    }
    return count;
}
/* The references of a share, ascending by number. */
uint32_t parts_refs(storing *its, const uint8_t *key, uint8_t *out) {
    sky_memory *m = &its->memory;
    uint32_t share = sky_memory_share(m, key), count = 0;
    for (uint32_t chunk = share ? m->shares[share].lowest : 0; chunk; chunk = m->chunks[chunk].higher)
        memcpy(out + 72 * count++, m->chunks[chunk].ref, 72);
    return count;
}
uint32_t parts_conflicts(storing *its, uint8_t *out) { /* reference as it is, and the replica before */
    enum { MOST = 1024 };
    sky_conflict found[MOST];
    uint32_t count = sky_memory_take_conflicts(&its->memory, found, MOST);
    for (uint32_t i = 0; i < count; i++) {
        memcpy(out + 73 * i, its->memory.chunks[found[i].chunk].ref, 72);
        out[73 * i + 72] = found[i].replica_before;
    }
    return count;
}
/* How many parts (of cells side by side) a payload is given in. */
uint32_t parts_pieces(storing *its, const uint8_t *key, uint32_t index) {
    uint32_t chunk = sky_memory_find(&its->memory, key, index), count = 0;
    uint32_t left = sky_chunk_bytes(&its->memory.chunks[chunk]), cell = its->memory.chunks[chunk].first_cell, bytes;
    while (left) {
        sky_memory_cell(&its->memory, cell, left, &bytes, &cell);
        left -= bytes;
        count++;
    }
    return count;
}
uint32_t parts_after(storing *its, const uint8_t *key) { return sky_memory_after(&its->memory, key); }

/* --- Eviction alone --- */

typedef struct {
    sky_eviction eviction;
    sky_keymap keys;
    sky_config config;
} ranking;
static bool begin_ranking(void *part, sky_arena *arena) {
    ranking *its = part;
    return sky_keymap_new(&its->keys, arena, sky_config_keys(&its->config)) &
           sky_eviction_new(&its->eviction, arena, &its->config, &its->keys);
}
static void prepare_ranking(void *part, const void *from) {
    const int64_t *v = from;
    ranking *its = part;
    sky_config_defaults(&its->config);
    its->config.replacement = (sky_replacement)v[0];
    its->config.most_keys = (uint32_t)v[1];
    its->config.most_departed = (uint32_t)v[2];
}
void *parts_ranking(const int64_t *v) { return with_room(sizeof(ranking), begin_ranking, prepare_ranking, v); }
/* 0 noted, 1 used, 2 arrived, 3 gone, 4 gone and evicted, 5 hold, 6 free, 7 victim but this: its first 4 bytes, or -1 */
int64_t parts_rank(ranking *its, int verb, const uint8_t *key) {
    uint32_t share = sky_keymap_find(&its->keys, key);
    if (verb == 7) {
        share = sky_eviction_victim(&its->eviction, share);
        return share ? (int64_t)sky_load32(sky_keymap_key(&its->keys, share)) : -1;
    }
    if (!share && verb < 3)
        share = sky_keymap_add(&its->keys, key);
    switch (verb) {
    case 0: sky_eviction_noted(&its->eviction, share); break;
    case 1: sky_eviction_used(&its->eviction, share); break;
    case 2: sky_eviction_arrived(&its->eviction, share); break;
    case 3:
    case 4:
        sky_eviction_gone(&its->eviction, share, verb == 4);
        sky_keymap_remove(&its->keys, share);
        break;
    case 5: sky_eviction_hold(&its->eviction, share); break;
    case 6: sky_eviction_free(&its->eviction, share); break;
    }
    return 0;
}
uint32_t parts_ranked(ranking *its, uint32_t *out) {
    sky_eviction_order order;
    uint32_t count = 0, share;
    sky_eviction_order_begin(&its->eviction, &order);
    while ((share = sky_eviction_order_next(&its->eviction, &order)) != 0)
        out[count++] = sky_load32(sky_keymap_key(&its->keys, share));
    return count;
}
double parts_mean_return(const ranking *its) { return (double)its->eviction.mean_return / 68719476736.0; }

/* --- History --- */

typedef struct {
    sky_history history;
    sky_config config;
} remembering;
static bool begin_history(void *part, sky_arena *arena) {
    remembering *its = part;
    return sky_history_new(&its->history, arena, &its->config);
}
static void prepare_history(void *part, const void *from) {
    const int64_t *v = from;
    remembering *its = part;
    sky_config_defaults(&its->config);
    its->config.most_written = (uint32_t)v[0];
    its->config.most_deleted = (uint32_t)v[1];
    its->config.most_dead = (uint32_t)v[2];
}
void *parts_history(const int64_t *v) { return with_room(sizeof(remembering), begin_history, prepare_history, v); }
/* 0 written, 1 still written, 2 deleted (all), 3 deleted (setting), 4 dropped, 5 was written since, 6 is deleted (of a
 * reference), 7 whether this setting is dead */
int parts_recall(remembering *its, int verb, const uint8_t *key, const uint8_t *setting, sky_us time) {
    sky_history *h = &its->history;
    const uint8_t *dead;
    switch (verb) {
    case 0: sky_history_written(h, key, time); return 0;
    case 1: sky_history_still_written(h, key, time); return 0;
    case 2: sky_history_forget_deletions(h, time); sky_history_deleted(h, key, NULL, time); return 0;
    case 3: sky_history_forget_deletions(h, time); sky_history_deleted(h, key, setting, time); return 0;
    case 4: sky_history_dropped(h, key, 1); return 0;
    case 5: return sky_history_was_written_since(h, key, time);
    case 6: return sky_history_is_deleted(h, key, time);
    default: dead = sky_history_dead(h, key); return dead && !memcmp(dead, setting, 12);
    }
}

/* --- Authentication --- */

static void ring_of(sky_ring *ring, uint32_t count, const int64_t *ids, const uint8_t *secrets, int auth) {
    memset(ring, 0, sizeof *ring);
    ring->count = count;
    ring->auth = (sky_auth)auth;
    for (uint32_t i = 0; i < count; i++) {
        ring->keys[i].id = (uint16_t)ids[2 * i];
        ring->keys[i].from = ids[2 * i + 1];
        memcpy(ring->keys[i].secret, secrets + 32 * i, 32);
    }
}
/* With the payload in pieces of `piece` bytes. */
size_t parts_sign(uint32_t count, const int64_t *ids, const uint8_t *secrets, int auth, uint8_t *packet, size_t end,
                  const uint8_t *payload, size_t bytes, size_t piece, sky_us now) {
    sky_ring ring;
    sky_authority authority;
    sky_signing signing;
    ring_of(&ring, count, ids, secrets, auth);
    sky_authority_begin(&authority, &ring);
    if (!sky_signing_begin(&signing, &authority, packet, end, now))
        return 0;
    for (size_t at = 0; at < bytes; at += piece)
        sky_signing_take(&signing, payload + at, bytes - at < piece ? bytes - at : piece);
    sky_signing_end(&signing);
    return end + 16;
}
int64_t parts_mac(uint32_t count, const int64_t *ids, const uint8_t *secrets, int auth, const uint8_t *packet, size_t bytes,
                  sky_us now, sky_us skew) {
    sky_ring ring;
    sky_authority authority;
    sky_us sent;
    ring_of(&ring, count, ids, secrets, auth);
    sky_authority_begin(&authority, &ring);
    return sky_authority_check(&authority, packet, bytes, now, skew, &sent) ? sent : -1;
}
void parts_hmac(const uint8_t *secret, const uint8_t *data, size_t size, uint8_t *digest) {
    sky_hmac_key key;
    sky_hmac_begin(&key, secret);
    sky_sha inner = key.inner;
    sky_sha_take(&inner, data, size / 3);
    sky_sha_take(&inner, data + size / 3, size - size / 3);
    sky_hmac_end(&key, &inner, digest);
}

typedef struct {
    sky_gate *gate;
    sky_counters counters;
    uint8_t refused[1 << 16];
    uint32_t refused_bytes, refusals;
} gating;
static void refuse(void *context, const uint8_t *packet, size_t bytes, sky_link source, sky_us now) {
    gating *its = context;
    (void)source, (void)now;
    memcpy(its->refused, packet, bytes);
    its->refused_bytes = (uint32_t)bytes;
    its->refusals++;
}
void *parts_gate(uint32_t here, uint32_t count, const int64_t *ids, const uint8_t *secrets, int auth,
                 const int64_t *v, sky_us now) {
    gating *its = calloc(1, sizeof *its);
    sky_config *config = calloc(1, sizeof *config);
    sky_arena arena = {0};
    size_t mapped;
    sky_config_defaults(config);
    config->address = here;
    config->most_senders = (uint32_t)v[0];
    config->most_forgotten = (uint32_t)v[1];
    config->remembered = (uint32_t)v[2];
    ring_of(&config->ring, count, ids, secrets, auth);
    (void)sky_gate_new(&arena, config, &its->counters, refuse, its, now);
    arena.bytes = arena.used;
    arena.used = arena.low = 0;
    arena.memory = pages(arena.bytes, &mapped);
    its->gate = sky_gate_new(&arena, config, &its->counters, refuse, its, now);
    free(config);
    return its->gate ? its : NULL;
}
/* Runs as (offset, bytes, segment); packets change in place. */
uint32_t parts_admit(gating *its, uint8_t *packets, size_t bytes, size_t segment, uint32_t source, sky_us now, int64_t *runs) {
    uint32_t count = 0;
    uint8_t *at;
    size_t n, size;
    sky_gate_admit(its->gate, packets, bytes, segment, source, now);
    while (sky_gate_next(its->gate, &at, &n, &size)) {
        runs[3 * count] = at - packets, runs[3 * count + 1] = (int64_t)n, runs[3 * count + 2] = (int64_t)size;
        count++;
    }
    return count;
}
void parts_gated(const gating *its, int64_t *out) {
    out[0] = (int64_t)its->counters.of[SKY_packets_received];
    out[1] = (int64_t)its->counters.of[SKY_packets_refused];
    out[2] = (int64_t)its->counters.of[SKY_packets_malformed];
    out[3] = (int64_t)its->counters.of[SKY_packets_replayed];
    out[4] = its->refusals;
    out[5] = sky_gate_commanded(its->gate);
}

void *parts_replay(const int64_t *v) { /* start, senders, forgotten, remembered */
    sky_config *config = calloc(1, sizeof *config);
    sky_arena arena = {0};
    size_t mapped;
    sky_replay *replay;
    sky_config_defaults(config);
    config->most_senders = (uint32_t)v[1];
    config->most_forgotten = (uint32_t)v[2];
    config->remembered = (uint32_t)v[3];
    (void)sky_replay_new(&arena, config, v[0]);
    arena.bytes = arena.used;
    arena.used = arena.low = 0;
    arena.memory = pages(arena.bytes, &mapped);
    replay = sky_replay_new(&arena, config, v[0]);
    free(config);
    return replay;
}
int parts_first(sky_replay *replay, uint32_t key_id, uint32_t ground, uint32_t source, sky_us sent, uint32_t sequence) {
    sky_sender sender = {(uint16_t)key_id, ground, source};
    return sky_replay_first(replay, &sender, sent, (uint16_t)sequence);
}
