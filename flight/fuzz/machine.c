/* libFuzzer: a whole satellite. The input is its configuration and a sequence of events: packets by some link, time that
 * passes, timers, background work, an overloaded host, keys that change.
 *
 * Most packets are composed of a few bytes of the input: requests about a few keys, chunks of values that fit each other,
 * answers to what the satellite has asked, with their lengths, checksums and MACs. So a short input is a long story. Others
 * are bytes as they come, or composed ones with bytes changed. All that the satellite sends is read.
 */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "arena.h"
#include "config.h"
#include "placement/clock.h"
#include "placement/placement.h"
#include "satellite.h"
#include "state.h"
#include "wire/auth.h"
#include "wire/crc.h"
#include "wire/packet.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum {
    MEMORY = 4 << 20,
    MOST_EVENTS = 300,
    ROOM = 65536, /* of a run of packets */
    KEYS = 6,
    ASKED = 16, /* commands of the satellite that can still be answered */
    ASKED_BYTES = 512,
    GROUNDS = 3
};

typedef struct {
    const uint8_t *at, *end;
} input;

static uint32_t take(input *in, unsigned bytes) {
    uint32_t value = 0;
    while (bytes-- > 0)
        value = value << 8 | (in->at < in->end ? *in->at++ : 0U);
    return value;
}

/* The box moves by a period of the input. As orbits have it: see fly. */
static sky_counted counted(void *context, sky_us now) {
    const sky_us period = *(const sky_us *)context;
    const sky_counted found = {(int32_t)(now / period), (int32_t)(now / (4 * period)), (now / period + 1) * period};
    return found;
}

/* What its packets speak of: a value of each key. */
typedef struct {
    uint32_t chunks, chunk_bytes, last_bytes, crc;
    uint16_t servers;
    uint8_t strategy;
    int32_t slot_moves, plane_moves;
} value;

typedef struct {
    uint32_t bytes;
    uint8_t packet[ASKED_BYTES];
} asked;

typedef struct {
    sky_satellite *satellite;
    sky_config config;
    sky_us now, period;
    sky_move_clock flown;
    sky_knot knots[3];
    uint8_t gaps[16 * 19];
    bool others_sign; /* clients and other satellites have its keys */
    sky_authority authority;
    sky_ring ring;
    uint16_t sequence;
    uint32_t request;
    value values[KEYS];
    asked asked[ASKED];
    uint32_t asked_count, sent_count;
    uint8_t last[2048]; /* of what it has sent last */
    size_t last_bytes, last_segment;
} world;

static uint8_t runs[ROOM + 1024]; /* what is given to it; it lies until all was sent */
static uint8_t payload[2048];
/* CRC of all that it has sent, and of its state in the end: the same on every processor (replay.c). */
extern uint32_t fuzz_said;
uint32_t fuzz_said;

/* --- What it sends --- */

static void keep(world *w, const uint8_t *packet, size_t bytes) {
    const size_t sky = sky_header_start(packet);
    if (bytes < sky + SKY_HEADER_BYTES || (packet[0] & SKY_COMMAND_BIT) == 0U ||
        sky_load32(packet + sky + SKY_SOURCE_AT) != w->config.address)
        return;
    asked *const its = &w->asked[w->asked_count++ % ASKED];
    its->bytes = (uint32_t)(bytes < ASKED_BYTES ? bytes : ASKED_BYTES);
    memcpy(its->packet, packet, its->bytes);
}

static void drain(world *w) {
    sky_run run;
    sky_gather(w->satellite, w->now);
    while (sky_next_run(w->satellite, &run)) {
        w->last_bytes = 0;
        for (uint32_t i = 0; i < run.count; i++) {
            const size_t at = (size_t)i * run.header_bytes;
            const size_t left = run.headers_bytes - at;
            const size_t bytes = left < run.header_bytes ? left : run.header_bytes;
            size_t total = bytes;
            keep(w, run.headers + at, bytes);
            if (w->last_bytes + bytes <= sizeof w->last)
                memcpy(w->last + w->last_bytes, run.headers + at, bytes);
            fuzz_said = sky_crc32(fuzz_said, run.headers + at, bytes);
            uint32_t cell = run.payloads != NULL ? run.payloads[i].first_cell : 0;
            for (uint32_t rest = run.payloads != NULL ? run.payloads[i].bytes : 0; rest > 0;) {
                uint32_t here = 0;
                const uint8_t *part = sky_payload_cell(w->satellite, cell, rest, &here, &cell);
                fuzz_said = sky_crc32(fuzz_said, part, here);
                if (w->last_bytes + total + here <= sizeof w->last)
                    memcpy(w->last + w->last_bytes + total, part, here);
                total += here;
                rest -= here;
            }
            if (i == 0)
                w->last_segment = total;
            if (w->last_bytes + total <= sizeof w->last)
                w->last_bytes += total;
        }
    }
}

/* --- Packets for it --- */

static void key_of(uint32_t which, uint8_t key[SKY_KEY_BYTES]) {
    memset(key, (int)(which * 41U), SKY_KEY_BYTES);
    key[31] = (uint8_t)which;
}

static void setting_of(const value *its, uint8_t setting[SKY_SETTING_BYTES]) {
    sky_store32(setting, its->crc);
    sky_store32(setting + 4, (uint32_t)its->slot_moves);
    sky_store32(setting + 8, (uint32_t)its->plane_moves);
}

/* Another value of a key. */
static void draw_value(world *w, input *in, uint32_t which) {
    static const uint16_t servers[8] = {1, 2, 3, 4, 9, 10, 30, 200};
    value *const its = &w->values[which];
    const uint32_t drawn = take(in, 3);
    sky_satellite_moves(w->satellite, &its->slot_moves, &its->plane_moves);
    its->chunks = 1U + (drawn & 31U);
    its->chunk_bytes = 1U + (drawn >> 5 & 7U) * 60U;
    its->last_bytes = 1U + (drawn >> 8 & 255U) % its->chunk_bytes;
    its->servers = servers[drawn >> 16 & 7U];
    its->strategy = (uint8_t)(1U + (drawn >> 19 & 7U) % 5U);
    its->slot_moves -= (int32_t)(drawn >> 22 & 1U) * 2;
    its->plane_moves += (int32_t)(drawn >> 23);
    its->crc = drawn;
}

static uint32_t chunk_bytes_of(const value *its, uint32_t index) {
    return index + 1U == its->chunks ? its->last_bytes : its->chunk_bytes;
}

static void ref_of(const world *w, uint32_t which, uint32_t index, uint8_t replica, uint8_t ref[SKY_REF_BYTES]) {
    const value *its = &w->values[which];
    const uint32_t bytes = chunk_bytes_of(its, index);
    memset(ref, 0, SKY_REF_BYTES);
    key_of(which, ref);
    sky_store32(ref + SKY_REF_NUMBER_AT, index + 1U);
    sky_store32(ref + SKY_REF_CHUNKS_AT, its->chunks);
    sky_store32(ref + SKY_REF_LENGTH_AT, bytes);
    sky_store32(ref + SKY_REF_CRC_AT, sky_crc32(0, payload, bytes));
    sky_store32(ref + SKY_REF_VALUE_BYTES_AT, (its->chunks - 1U) * its->chunk_bytes + its->last_bytes);
    sky_store32(ref + SKY_REF_VALUE_CRC_AT, its->crc);
    sky_store16(ref + SKY_REF_TAG_AT, its->servers);
    sky_store16(ref + SKY_REF_TAG_AT + 2, (uint16_t)(index % its->servers + 1U));
    ref[SKY_REF_TAG_AT + 4] = its->strategy;
    ref[SKY_REF_REPLICA_AT] = replica;
    sky_store32(ref + SKY_REF_MOVES_AT, (uint32_t)its->slot_moves);
    sky_store32(ref + SKY_REF_MOVES_AT + 4, (uint32_t)its->plane_moves);
}

static uint32_t neighbour(const world *w, uint32_t which) {
    const uint32_t planes = w->config.planes, slots = w->config.slots;
    uint32_t plane = w->config.address >> 12, slot = w->config.address & 0xFFFU;
    switch (which & 3U) {
    case 0:
        plane = (plane + planes - 1U) % planes;
        break;
    case 1:
        slot = (slot + 1U) % slots;
        break;
    case 2:
        plane = (plane + 1U) % planes;
        break;
    default:
        slot = (slot + slots - 1U) % slots;
        break;
    }
    return plane << 12 | slot;
}

static uint32_t any_satellite(const world *w, uint32_t drawn) {
    return (drawn >> 4 & 15U) % w->config.planes << 12 | (drawn & 15U) % w->config.slots;
}

/* Headers of a packet of `op`; `how` draws who sends it, and to whom. */
static sky_header header_of(world *w, uint8_t op, uint32_t how, sky_link *link) {
    sky_header header;
    memset(&header, 0, sizeof header);
    header.op = op;
    header.destination = w->config.address;
    header.hop_limit = (how & 0x3FU) == 0x3FU ? 0 : SKY_HOP_LIMIT;
    header.request_id = w->request;
    header.timestamp_us = (uint32_t)w->now;
    sky_satellite_moves(w->satellite, &header.slot_moves, &header.plane_moves);
    if ((how & 0x80U) != 0U) { /* between satellites */
        header.source = neighbour(w, how);
        *link = header.source;
    } else {
        header.ground = 7U + (how & 3U) % GROUNDS;
        if ((how & 0x0CU) == 0x0CU) { /* by another satellite's beam */
            header.source = (uint32_t)SKY_GROUND_SHELL << 24 | neighbour(w, how);
            *link = header.source & 0xFFFFFFU;
        } else {
            header.source = (uint32_t)SKY_GROUND_SHELL << 24 | w->config.address;
            *link = SKY_BEAM | header.ground;
        }
    }
    if ((how & 0x70U) == 0x70U) { /* in transit */
        header.destination = any_satellite(w, how * 7U + w->request);
        if ((w->request & 1U) != 0U)
            header.destination |= (uint32_t)SKY_GROUND_SHELL << 24;
    }
    return header;
}

/* Ends a packet whose body lies behind its headers: sealed and signed, and `payload_bytes` behind it. Its length. */
static size_t finish(world *w, uint8_t *packet, const sky_header *header, size_t body_bytes, size_t payload_bytes) {
    const size_t start = sky_packet_begin(packet, header, body_bytes + payload_bytes, w->sequence++ & 0x3FFFU, w->now);
    size_t end = start + body_bytes;
    sky_packet_seal(packet, end);
    sky_signing signing;
    if (w->others_sign && sky_authority_signs(&w->authority, header->op, header->destination) &&
        sky_signing_begin(&signing, &w->authority, packet, end, w->now)) {
        sky_signing_take(&signing, payload, payload_bytes);
        sky_signing_end(&signing);
        end += SKY_MAC_BYTES;
    }
    memcpy(packet + end, payload, payload_bytes);
    return end + payload_bytes;
}

static void give(world *w, size_t bytes, size_t segment, sky_link link) {
    sky_receive(w->satellite, runs, bytes, segment, link, w->now);
    drain(w);
}

/* Some or all chunks of a value, as one run: in their order, or in any, some twice. */
static void give_chunks(world *w, input *in, uint8_t op, uint32_t how) {
    const uint32_t what = take(in, 2);
    const uint32_t which = (what & 7U) % KEYS;
    if ((what & 8U) != 0U || w->values[which].chunks == 0U)
        draw_value(w, in, which);
    const value *its = &w->values[which];
    sky_link link;
    const sky_header header = header_of(w, op, how, &link);
    const uint8_t replica = (uint8_t)((what & 16U) != 0U ? w->config.replicas - 1U : 0U);
    const uint32_t step = (what & 32U) != 0U ? 1U : its->servers;
    uint32_t most = 1U + (what >> 8 & 15U);
    size_t at = 0, segment = 0;
    for (uint32_t next = (what >> 12) % its->chunks; next < its->chunks && most > 0U; next += step, most--) {
        const uint32_t index = (what & 128U) != 0U ? next * 5U % its->chunks : next;
        uint8_t *packet = runs + at;
        const size_t prefix = op < 0x40U ? SKY_COMMAND_PREFIX_BYTES : SKY_TELEMETRY_PREFIX_BYTES;
        ref_of(w, which, index, replica, packet + prefix);
        const size_t bytes = finish(w, packet, &header, SKY_REF_BYTES, chunk_bytes_of(its, index));
        if (segment != 0U && bytes > segment)
            break;
        at += bytes;
        if (segment == 0U)
            segment = bytes;
        else if (bytes < segment)
            break;
    }
    if ((what & 64U) != 0U && at > 0U) { /* damaged on its way */
        const uint32_t where = take(in, 2);
        runs[where % at] ^= (uint8_t)(1U + (where >> 8 & 15U));
    }
    if (at > 0U)
        give(w, at, segment, link);
}

static size_t keys_list(uint8_t *body, uint32_t drawn) {
    const uint32_t count = 1U + (drawn & 3U);
    sky_records_head(body, count);
    for (uint32_t i = 0; i < count; i++)
        key_of((drawn >> (2U + 3U * i) & 7U) % KEYS, body + SKY_LIST_HEAD + (size_t)i * SKY_KEY_BYTES);
    return SKY_LIST_HEAD + (size_t)count * SKY_KEY_BYTES;
}

static void dead_record(const world *w, uint32_t which, uint8_t *record) {
    key_of(which, record);
    setting_of(&w->values[which], record + SKY_KEY_BYTES);
}

/* The body of a request. */
static size_t body_of(world *w, input *in, uint8_t op, uint8_t *body) {
    const uint32_t drawn = take(in, 2);
    const uint32_t which = (drawn & 7U) % KEYS;
    switch (op) {
    case SKY_GET: {
        uint32_t indices[32];
        uint32_t count = 0;
        const uint32_t stride = (drawn & 8U) != 0U ? 1U : w->values[which].servers + 1U - (drawn >> 4 & 1U);
        uint8_t key[SKY_KEY_BYTES];
        size_t written = 0;
        key_of(which, key);
        for (uint32_t index = drawn >> 8 & 7U; count < 1U + (drawn >> 11); index += stride)
            indices[count++] = index;
        (void)sky_selection_build(body, 512, key, indices, count, sky_selection_stride(indices, count), &written);
        return written;
    }
    case SKY_HAS:
    case SKY_EVICT:
        return keys_list(body, drawn);
    case SKY_LIST:
        memset(body, 0, SKY_KEY_BYTES);
        if ((drawn & 8U) != 0U)
            key_of(which, body);
        sky_store16(body + SKY_KEY_BYTES, (uint16_t)(drawn >> 8));
        sky_store16(body + SKY_KEY_BYTES + 2, 0);
        return SKY_KEY_BYTES + 4;
    case SKY_ADVANCE:
        sky_moves_build(body, w->satellite->locator.pushed.slot + (int32_t)(drawn & 15U) - 7,
                        w->satellite->locator.pushed.plane + (int32_t)(drawn >> 4 & 15U) - 7);
        return 8;
    case SKY_NOTICE: {
        const uint32_t count = 1U + (drawn >> 3 & 1U);
        sky_notice notice = {neighbour(w, drawn >> 4), drawn >> 8 & 3U, any_satellite(w, take(in, 1)), 0, 0, 0, 0,
                             (uint8_t)(drawn >> 10 & 7U), (drawn & 0x80U) != 0U, count, NULL};
        notice.north = notice.south = (uint16_t)(drawn >> 13);
        notice.west = notice.east = (uint16_t)(drawn >> 14);
        sky_notice_build(body, &notice);
        for (uint32_t i = 0; i < count; i++)
            dead_record(w, (which + i) % KEYS, body + SKY_NOTICE_HEAD + (size_t)i * SKY_DEAD_BYTES);
        return SKY_NOTICE_HEAD + (size_t)count * SKY_DEAD_BYTES;
    }
    case SKY_RETAIN: {
        static const int32_t lasts_ms[8] = {-1000, 0, 1, 100, 2000, 30000, 90000, 1 << 30};
        const uint32_t more = take(in, 2);
        uint8_t list[SKY_LIST_HEAD + 4 * SKY_KEY_BYTES];
        const size_t bytes = keys_list(list, more) - SKY_LIST_HEAD;
        const int64_t until = w->now / 1000 + lasts_ms[drawn >> 3 & 7U];
        sky_retain_build(body, (uint8_t)((drawn & 7U) % 5U), (drawn & 0x40U) != 0U ? 0U : (uint64_t)until,
                         1U + (more & 3U));
        memcpy(body + SKY_RETAIN_HEAD, list + SKY_LIST_HEAD, bytes);
        return SKY_RETAIN_HEAD + bytes;
    }
    case SKY_CHECK: {
        const uint32_t count = 1U + (drawn >> 3 & 3U);
        sky_records_head(body, count);
        for (uint32_t i = 0; i < count; i++) {
            const uint32_t its = (which + i) % KEYS;
            const value *v = &w->values[its];
            uint8_t key[SKY_KEY_BYTES], setting[SKY_SETTING_BYTES];
            const uint32_t chunks = v->chunks > 0U ? v->chunks : 4U;
            const uint32_t servers = v->servers > 0U ? v->servers : 2U;
            key_of(its, key);
            setting_of(v, setting);
            const sky_check check = {key, setting, (uint16_t)servers,
                                     (uint16_t)((drawn >> 5 & 15U) % (servers < chunks ? servers : chunks)), chunks, 60};
            sky_check_build(body + SKY_LIST_HEAD + (size_t)i * SKY_CHECK_BYTES, &check);
        }
        return SKY_LIST_HEAD + (size_t)count * SKY_CHECK_BYTES;
    }
    case SKY_FORGET: {
        const uint32_t count = 1U + (drawn >> 3 & 1U);
        sky_records_head(body, count);
        sky_store16(body + 2, (uint16_t)((drawn >> 8) * 20U)); /* since_ms */
        for (uint32_t i = 0; i < count; i++)
            dead_record(w, (which + i) % KEYS, body + SKY_LIST_HEAD + (size_t)i * SKY_DEAD_BYTES);
        return SKY_LIST_HEAD + (size_t)count * SKY_DEAD_BYTES;
    }
    case SKY_LINKS: {
        const uint32_t count = drawn & 3U;
        sky_links links = {(drawn & 4U) != 0U, (uint8_t)(drawn >> 14 << 6), w->satellite->locator.pushed.slot,
                           w->satellite->locator.pushed.plane, (uint64_t)w->satellite->neighbours.pushed_at_ms, count, NULL};
        if ((drawn & 0x38U) == 0x38U) {
            links.pushed_slot += 1;
            links.pushed_at_ms = (uint64_t)(w->now / 1000);
        }
        sky_links_build(body, &links);
        for (uint32_t i = 0; i < count; i++) {
            const uint32_t more = take(in, 2);
            const sky_declaration declaration = {any_satellite(w, more), (uint8_t)(more >> 8 & 15U),
                                                 (uint64_t)(w->now / 1000 - 1000 + (more >> 12) * 100)};
            sky_declaration_build(body + SKY_LINKS_HEAD + (size_t)i * SKY_DECLARATION_BYTES, &declaration);
        }
        return SKY_LINKS_HEAD + (size_t)count * SKY_DECLARATION_BYTES;
    }
    default:
        return 0;
    }
}

static void give_request(world *w, input *in, uint8_t op, uint32_t how) {
    sky_link link;
    w->request = w->request * 5U + 1U;
    sky_header header = header_of(w, op, op == SKY_LINKS || op == SKY_NOTICE || op == SKY_CHECK ? how | 0x80U : how, &link);
    uint8_t *const body = runs + (op < 0x40U ? SKY_COMMAND_PREFIX_BYTES : SKY_TELEMETRY_PREFIX_BYTES);
    const size_t body_bytes = body_of(w, in, op, body);
    const size_t bytes = finish(w, runs, &header, body_bytes, 0);
    give(w, bytes, bytes, link);
}

/* Answers one of the commands that it has sent lately, more or less truly. */
static void answer(world *w, input *in, uint32_t how) {
    if (w->asked_count == 0U)
        return;
    const uint32_t back = how & 15U;
    const asked *its = &w->asked[(w->asked_count - 1U - (back < w->asked_count ? back : 0U)) % ASKED];
    sky_header header;
    const uint8_t *const sky = its->packet + SKY_COMMAND_BYTES;
    const uint8_t *const body = sky + SKY_HEADER_BYTES;
    const uint32_t drawn = take(in, 2);
    uint8_t *const out = runs + SKY_TELEMETRY_PREFIX_BYTES;
    size_t bytes = 0;
    if (its->bytes < SKY_COMMAND_PREFIX_BYTES + 4U || sky_header_parse(sky, &header) != SKY_SOUND)
        return;
    const uint8_t op = header.op;
    const uint32_t there = header.destination;
    const uint32_t count = sky_load16(body);
    const sky_link link = (how & 0x10U) != 0U ? neighbour(w, how >> 5) : (there >> 24 == 0U ? there : neighbour(w, 0));
    header.destination = w->config.address;
    header.source = there;
    header.hop_limit = SKY_HOP_LIMIT;
    header.flags = (drawn & 7U) != 0U ? SKY_FLAG_SETTLED : 0U;
    header.status = SKY_OK;
    if ((drawn & 0xE000U) == 0xE000U)
        header.slot_moves += 1;
    switch (op) {
    case SKY_MIGRATE: {
        const uint32_t chunks = sky_load32(body + SKY_REF_CHUNKS_AT), first = sky_ref_index(body);
        const uint32_t servers = sky_load16(body + SKY_REF_TAG_AT);
        uint32_t indices[64];
        uint32_t found = 0;
        header.op = (drawn & 0x78U) == 0x78U ? SKY_UNREACHABLE : SKY_ACK;
        header.status = (drawn & 0x780U) == 0x780U ? SKY_FULL : SKY_OK;
        if (header.op == SKY_UNREACHABLE || servers == 0U) /* a damaged one, which it has only forwarded */
            break;
        const uint32_t from = (drawn & 0x800U) != 0U ? first : first % servers;
        for (uint32_t index = from; index < chunks && found < 64U; index += servers)
            indices[found++] = index;
        if ((drawn & 0x1000U) != 0U)
            found = found < 2U ? found : 2U;
        (void)sky_selection_build(out, 512, body, indices, found, sky_selection_stride(indices, found), &bytes);
        break;
    }
    case SKY_HAS: {
        header.op = SKY_PRESENCE;
        sky_records_head(out, count);
        for (uint32_t i = 0; i < count && i < 12U; i++) {
            sky_presence presence;
            memset(&presence, 0, sizeof presence);
            const uint32_t which = (body[SKY_LIST_HEAD + i * SKY_KEY_BYTES + 31U]) % KEYS;
            const value *v = &w->values[which];
            if ((drawn >> i & 1U) != 0U && v->chunks > 0U) {
                presence.chunks = v->chunks;
                presence.index = (drawn >> 8) % v->chunks;
                presence.length = chunk_bytes_of(v, presence.index);
                presence.value_bytes = (v->chunks - 1U) * v->chunk_bytes + v->last_bytes;
                presence.value_crc = v->crc;
                presence.held = 1U + (drawn >> 4 & 15U) % v->chunks;
                presence.servers = v->servers;
                presence.server = (uint16_t)(presence.index % v->servers);
                presence.strategy = v->strategy;
                presence.slot_moves = v->slot_moves;
                presence.plane_moves = v->plane_moves;
            }
            sky_presence_build(out + SKY_LIST_HEAD + (size_t)i * SKY_PRESENCE_BYTES, &presence);
        }
        bytes = SKY_LIST_HEAD + (size_t)(count < 12U ? count : 12U) * SKY_PRESENCE_BYTES;
        break;
    }
    case SKY_RETAIN: {
        const uint32_t keys = sky_load16(body + SKY_RETAIN_HEAD - 2);
        if ((drawn & 0x18U) == 0x18U) {
            header.op = SKY_UNSUPPORTED;
            sky_unsupported_build(out, SKY_RETAIN, 7, 1);
            bytes = SKY_UNSUPPORTED_BYTES;
            break;
        }
        header.op = SKY_RETAINED;
        sky_records_head(out, keys < 64U ? keys : 64U);
        bytes = SKY_LIST_HEAD;
        for (uint32_t i = 0; i < keys && i < 64U; i++)
            out[bytes++] = (uint8_t)((drawn >> (i & 7U)) % 3U);
        break;
    }
    case SKY_CHECK:
        header.op = SKY_CHECKED;
        sky_records_head(out, count < 64U ? count : 64U);
        bytes = SKY_LIST_HEAD;
        for (uint32_t i = 0; i < count && i < 64U; i++)
            out[bytes++] = (uint8_t)((drawn >> 3) * (i + 1U) % 3U);
        break;
    case SKY_LINKS: {
        sky_links links;
        if (!sky_links_parse(body, its->bytes - SKY_COMMAND_PREFIX_BYTES, &links))
            return;
        links.answer_me = false;
        links.count = 0;
        header.op = SKY_LINKS;
        sky_links_build(runs + SKY_COMMAND_PREFIX_BYTES, &links);
        bytes = SKY_LINKS_HEAD;
        break;
    }
    default:
        return;
    }
    const size_t whole = finish(w, runs, &header, bytes, 0);
    give(w, whole, whole, link);
}

/* Makes lengths and checksums those of the packet, which a fuzzer seldom guesses; `how` leaves some of it out. */
static void make_sound(uint8_t *packet, size_t bytes, uint32_t here, unsigned how) {
    if ((how & 1U) != 0U || bytes < 1)
        return;
    const size_t sky = sky_header_start(packet);
    if (bytes < sky + SKY_HEADER_BYTES)
        return;
    const uint8_t op = packet[sky + SKY_OP_AT];
    size_t end = bytes;
    packet[0] = (uint8_t)(op < 0x40U ? 0x18U : 0x08U);
    if (sky_header_start(packet) != sky)
        return;
    packet[1] = 0xC0;
    packet[2] |= 0xC0U;
    sky_store16(packet + 4, (uint16_t)(bytes - 7U));
    if (sky == SKY_COMMAND_BYTES)
        sky_store16(packet + 6, (uint16_t)(op << 8));
    packet[sky] = SKY_WIRE_VERSION;
    packet[sky + SKY_FLAGS_AT] &= 0x02U;
    if ((how & 2U) == 0U)
        sky_store32(packet + sky + SKY_DESTINATION_AT, here);
    if (sky_op_carries(op) && bytes >= sky + SKY_HEADER_BYTES + SKY_REF_BYTES) {
        uint8_t *ref = packet + sky + SKY_HEADER_BYTES;
        const size_t rest = bytes - (sky + SKY_HEADER_BYTES + SKY_REF_BYTES);
        end = bytes - rest;
        sky_store32(ref + SKY_REF_LENGTH_AT, (uint32_t)rest);
        if ((how & 4U) == 0U)
            sky_store32(ref + SKY_REF_CRC_AT, sky_crc32(0, ref + SKY_REF_BYTES, rest));
    }
    sky_packet_seal(packet, end);
}

/* Bytes of the input as a run; or what it sent last, with bytes changed, back to it. */
static void give_bytes(world *w, input *in, bool back, uint32_t how) {
    const sky_link link = (how & 0x10U) != 0U ? neighbour(w, how >> 5) : SKY_BEAM | (7U + (how >> 5) % GROUNDS);
    size_t bytes = w->last_bytes, segment = w->last_segment;
    if (back) {
        memcpy(runs, w->last, bytes);
        for (uint32_t changes = how & 3U; changes > 0U && bytes > 0U; changes--) {
            const uint32_t where = take(in, 1);
            runs[where % bytes] = (uint8_t)take(in, 1);
        }
        if ((how & 12U) == 12U)
            segment = take(in, 1);
    } else {
        bytes = take(in, 1) * ((how & 8U) != 0U ? 4U : 1U);
        bytes = (size_t)(in->end - in->at) < bytes ? (size_t)(in->end - in->at) : bytes;
        memcpy(runs, in->at, bytes);
        in->at += bytes;
        segment = bytes;
    }
    for (size_t at = 0; segment > 0U && at < bytes && (how & 4U) == 0U; at += segment)
        make_sound(runs + at, bytes - at < segment ? bytes - at : segment, w->config.address, how);
    give(w, bytes, segment, link);
}

/* --- Its configuration --- */

/* The box follows a host: standing, or, for a while, moving against the satellites. */
static void fly(world *w) {
    const double now_s = (double)w->now / 1e6, cells_a_second = 1e6 / (double)w->period;
    w->knots[0] = (sky_knot){10.0, 2.4, -0.5};
    w->knots[1] = (sky_knot){40.0, 2.4 - 7.0 * cells_a_second, 3.0};
    w->knots[2] = (sky_knot){55.0, 1.0, 3.0};
    if (w->period % 3 == 0)
        sky_clock_by_periods(&w->flown, now_s - 20.0, 1.0, 1.0 / cells_a_second, 2.5 / cells_a_second);
    else if (w->period % 3 == 1)
        (void)sky_clock_by_preset(&w->flown, w->knots, "starlink-a", 2, now_s - 900.0, 200.0 * cells_a_second, 47.0, 8.0);
    else
        sky_clock_by_track(&w->flown, now_s - 20.0, 1.0, w->knots, 3, cells_a_second / 9.0, -cells_a_second);
}

/* Cells without a satellite: some, a plane, most of them; and a seam. */
static void make_gaps(world *w, unsigned how) {
    sky_config *const config = &w->config;
    const uint32_t plane = config->address >> 12, slot = config->address & 0xFFFU;
    config->seam = (how & 8U) != 0U;
    if ((how & 3U) == 0U)
        return;
    for (uint32_t index = 0; index < (uint32_t)config->planes * config->slots; index++)
        w->gaps[index] = (how & 3U) == 1U   ? index % 7U == 3U
                         : (how & 3U) == 2U ? index / config->slots == (plane + 1U) % config->planes
                                            : index % 5U != 1U;
    w->gaps[plane * config->slots + slot] = 0;
    config->gaps = w->gaps;
    config->most_planes = config->most_slots = (how & 4U) != 0U ? 2 : 6;
}

static void configure(world *w, input *in) {
    static const struct {
        uint16_t planes, slots;
        uint32_t address;
        uint16_t centre_plane, centre_slot;
    } places[8] = {{5, 19, 2U << 12 | 9U, 2, 9}, {5, 19, 0, 4, 18}, {1, 1, 0, 0, 0},           {1, 7, 6, 0, 0},
                   {2, 2, 1U << 12, 0, 1},       {2, 9, 1U << 12 | 8U, 0, 0}, {16, 3, 15U << 12 | 2U, 0, 1}, {3, 3, 1, 1, 1}};
    static const uint32_t replicas[4] = {1, 2, 3, 32};
    sky_config *const config = &w->config;
    const uint32_t flags = take(in, 2), more = take(in, 1);
    w->period = (1 + (sky_us)take(in, 1)) * 20000;
    sky_config_defaults(config);
    config->planes = places[more & 7U].planes;
    config->slots = places[more & 7U].slots;
    config->address = places[more & 7U].address;
    config->centre_plane = places[more & 7U].centre_plane;
    config->centre_slot = places[more & 7U].centre_slot;
    config->memory_bytes = 1000 + (uint64_t)take(in, 1) * 64;
    config->typical_chunk_bytes = 128;
    config->cell_bytes = 64;
    config->most_chunks = 96;
    config->most_keys = 48;
    config->outbox_bytes = 32U << 10;
    config->postponed_bytes = 65536;
    config->replacement = (sky_replacement)((flags & 3U) % 3U);
    config->gossip = (flags & 4U) != 0U;
    config->plane_only = (flags & 8U) != 0U;
    config->periodic = (flags & 16U) != 0U;
    config->migration = (flags & 32U) != 0U;
    config->replicas = replicas[more >> 3 & 3U];
    config->routing = (more & 32U) != 0U ? SKY_ALTERNATE : SKY_GREEDY;
    config->clock = (flags & 128U) != 0U ? counted : NULL;
    config->clock_context = &w->period;
    if ((flags & 192U) == 192U) {
        fly(w);
        config->clock = sky_clock_counted;
        config->clock_context = &w->flown;
    }
    make_gaps(w, flags >> 12);
    config->sweep = 200000;
    config->confirm = (more & 64U) != 0U ? 300000 : config->confirm;
    config->slot_link_ps = 4000000000U;
    config->plane_link_ps = 7000000000U;
    config->most_written = config->most_deleted = config->most_dead = config->most_departed = 24;
    config->most_evicted = config->most_leases = config->most_expiries = 16;
    config->most_departures = 64;
    config->most_questions = 16;
    config->most_subjects = config->most_asked = 64;
    config->most_suspects = config->most_conflicts = config->most_transfers = 16;
    config->most_ground_hosts = config->most_back_offs = 16;
    config->most_runs = 64;
    config->most_senders = 4;
    config->most_forgotten = 8;
    config->remembered = 16;
    if ((flags & 512U) != 0U) { /* pools that fill at once */
        config->most_departures = 4;
        config->most_questions = config->most_suspects = config->most_conflicts = config->most_transfers = 1;
        config->most_subjects = config->most_asked = config->most_ground_hosts = config->most_back_offs = 2;
        config->most_evicted = config->most_leases = config->most_expiries = 1;
        config->most_written = config->most_deleted = config->most_dead = config->most_departed = 2;
        config->most_chunks = 6;
        config->most_keys = 3;
        config->most_runs = 3;
        config->outbox_bytes = 16384;
    }
    if ((flags & 256U) != 0U) {
        config->ring.count = 1;
        config->ring.keys[0].id = 1;
        config->ring.auth = (flags & 1024U) == 0U ? SKY_AUTH_ON : (flags & 4096U) == 0U ? SKY_AUTH_EVERY : SKY_AUTH_ANSWERS;
    }
    w->others_sign = config->ring.count > 0U && (flags & 2048U) == 0U;
    w->ring = config->ring;
    sky_authority_begin(&w->authority, &w->ring);
}

static bool begin(world *w, const sky_past *past) {
    static uint64_t memory[MEMORY / sizeof(uint64_t)];
    const size_t needed = sky_satellite_bytes(&w->config);
    if (needed == 0 || needed > MEMORY)
        return false;
    SKY_UNGUARD(memory, needed);
    memset(memory, 0, needed);
    w->satellite = sky_satellite_begin(memory, needed, &w->config, w->now);
    if (w->satellite == NULL)
        return false;
    if (past != NULL)
        sky_satellite_resume(w->satellite, past, w->now);
    sky_greet(w->satellite, w->now);
    drain(w);
    return true;
}

static void look(void *context, const uint8_t *bytes, size_t count) {
    *(uint32_t *)context = sky_crc32(*(uint32_t *)context, bytes, count);
}

/* What surrounds it: time, its host, its keys. */
static void happen(world *w, input *in, uint32_t what, uint32_t how) {
    switch (what) {
    case 0:
        sky_host_late(w->satellite, (sky_us)how * how * 40, w->now);
        break;
    case 1:
        sky_set_backlog(w->satellite, (uint64_t)how << 20);
        break;
    case 2:
        w->ring.count = w->ring.count > 0U ? 1U + (how & 1U) : 0U;
        w->ring.keys[1].id = 2;
        w->ring.keys[1].from = w->now;
        sky_set_keys(w->satellite, &w->ring);
        sky_authority_begin(&w->authority, &w->ring);
        break;
    case 3:
        w->now += (how & 0x80U) != 0U ? -(sky_us)how * 10000 : (sky_us)how * 1000000; /* the clock jumps */
        break;
    case 4: { /* it dies and comes back empty */
        sky_past past;
        sky_satellite_past(w->satellite, &past);
        (void)begin(w, &past);
        return;
    }
    case 5: {
        uint32_t crc = 0;
        sky_state(w->satellite, take(in, 1) % SKY_PARTS, look, &crc);
        sky_set_figure(w->satellite, how, crc);
        fuzz_said ^= (uint32_t)sky_pools_full(w->satellite);
        break;
    }
    default:
        for (uint32_t piece = 0; piece < 1U + how && sky_wants_work(w->satellite); piece++) {
            sky_work(w->satellite, w->now);
            drain(w);
        }
        break;
    }
    drain(w);
}

static void timers(world *w, uint32_t times) {
    for (uint32_t i = 0; i < times; i++) {
        const sky_us due = sky_next_timer(w->satellite);
        if (due != SKY_NEVER && due > w->now)
            w->now = due;
        sky_handle_timer(w->satellite, w->now);
        drain(w);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static const uint8_t requests[12] = {SKY_GET,    SKY_HAS,    SKY_EVICT, SKY_PING,   SKY_LIST,   SKY_ADVANCE,
                                         SKY_NOTICE, SKY_RETAIN, SKY_CHECK, SKY_FORGET, SKY_LINKS,  SKY_PONG};
    static world w;
    input in = {data, data + size};
    memset(&w, 0, sizeof w);
    w.now = 1800000000000000;
    fuzz_said = 0;
    configure(&w, &in);
    if (!begin(&w, NULL))
        return 0;
    for (unsigned event = 0; event < MOST_EVENTS && in.at < in.end; event++) {
        const uint32_t what = take(&in, 1), how = take(&in, 1);
        w.now += (sky_us)(what >> 5) * ((how & 1U) != 0U ? 20000 : 500);
        switch (what & 31U) {
        case 0:
        case 1:
        case 2:
            give_chunks(&w, &in, SKY_SET, how);
            break;
        case 3:
            give_chunks(&w, &in, SKY_MIGRATE, how | 0x80U);
            break;
        case 4:
            give_chunks(&w, &in, SKY_DATA, how | 0x70U);
            break;
        case 17:
        case 18:
        case 19:
        case 20:
        case 21:
            answer(&w, &in, how);
            break;
        case 22:
        case 23:
        case 24:
            timers(&w, 1U + (how & 15U));
            break;
        case 25:
            give_bytes(&w, &in, false, how);
            break;
        case 26:
            give_bytes(&w, &in, true, how);
            break;
        case 27:
            for (uint32_t times = 1U + (how & 7U); times > 0U; times--) { /* the world answers as it should */
                input truly = {(const uint8_t *)"\x01\x08", (const uint8_t *)"\x01\x08" + 2};
                answer(&w, &truly, how >> 4);
            }
            break;
        case 28:
        case 29:
        case 30:
        case 31:
            happen(&w, &in, (what + (what >> 5) * 4U) % 8U, how);
            break;
        default:
            give_request(&w, &in, requests[(what & 31U) - 5U], how);
            break;
        }
    }
    fuzz_said ^= sky_digest(w.satellite);
    int64_t figures[SKY_HOUSEKEEPING_FIELDS];
    sky_housekeeping(w.satellite, figures, w.now);
    for (unsigned each = 0; each < SKY_HOUSEKEEPING_FIELDS; each++)
        fuzz_said = fuzz_said * 31U + (uint32_t)figures[each];
    return 0;
}
