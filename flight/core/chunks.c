/* Nearly all packets are one of two plain cases, which have a fast path each: a GET by this satellite's own beam of chunks
 * that are all here, and a run of sound SETs or MIGRATEs of one request. A fast path that does not apply changes nothing; the
 * packet then goes the general way. */

#include "chunks.h"

#include <string.h>

#include "handover.h"
#include "state.h"

enum { TAKEN = 0, REFUSED = 1 };
#define JOURNEY_BYTES 20U
#define BODY_BYTES (SKY_SELECTION_BYTES + (SKY_MAX_SELECTION_BITS + 7) / 8)
#define AT_COMMAND(field) ((size_t)SKY_COMMAND_BYTES + (size_t)(field))
#define REF_AT ((size_t)SKY_COMMAND_PREFIX_BYTES)
#define PAYLOAD_AT (REF_AT + (size_t)SKY_REF_BYTES)

bool sky_chunks_new(sky_chunks *chunks, sky_arena *arena, const sky_config *config) {
    const uint32_t held = sky_config_chunks(config);
    const uint32_t most = held < (uint32_t)SKY_MAX_SELECTION_BITS ? held : (uint32_t)SKY_MAX_SELECTION_BITS;
    chunks->requests = sky_take_shared(arena, SKY_MOST_UNANSWERED, sizeof *chunks->requests);
    chunks->chunks = sky_take_shared(arena, SKY_MOST_UNANSWERED_CHUNKS, sizeof *chunks->chunks);
    chunks->sorted = sky_take_shared(arena, SKY_MOST_UNANSWERED_CHUNKS, sizeof *chunks->sorted);
    chunks->incoming = sky_take_shared(arena, SKY_MOST_INCOMING, sizeof *chunks->incoming);
    chunks->wanted = sky_take_shared(arena, most, sizeof *chunks->wanted);
    chunks->most_wanted = most;
    chunks->body = sky_take_shared(arena, BODY_BYTES, 1U);
    chunks->missing = sky_take_shared(arena, (SKY_MAX_SELECTION_BITS + 7) / 8, 1U);
    return chunks->missing != NULL;
}

/* --- SET and MIGRATE --- */

/* The request of a packet: same operation, addresses, ground host, request id and key. NULL: its header is malformed. */
static sky_unanswered *request_of(sky_satellite *satellite, const uint8_t *packet, sky_us now) {
    sky_chunks *chunks = &satellite->chunks;
    const uint8_t *sky = packet + SKY_COMMAND_BYTES;
    const uint8_t *key = packet + REF_AT;
    for (uint32_t left = chunks->request_count; left > 0U; left--) {
        sky_unanswered *known = &chunks->requests[left - 1U];
        if (memcmp(known->journey, sky, JOURNEY_BYTES) == 0 && memcmp(known->key, key, SKY_KEY_BYTES) == 0) {
            return known;
        }
    }
    if (chunks->request_count == SKY_MOST_UNANSWERED) {
        sky_chunks_acknowledge(satellite, now);
    }
    sky_unanswered *found = &chunks->requests[chunks->request_count];
    (void)memset(found, 0, sizeof *found);
    if (sky_header_parse(sky, &found->header) != SKY_SOUND) {
        return NULL;
    }
    (void)memcpy(found->journey, sky, JOURNEY_BYTES);
    (void)memcpy(found->key, key, SKY_KEY_BYTES);
    chunks->request_count++;
    if (found->header.op == SKY_SET) {
        sky_credit_heard(&satellite->outbox.credit, found->header.ground, now);
    }
    return found;
}

static void note(sky_chunks *chunks, sky_unanswered *request, unsigned what, uint32_t index) {
    sky_unanswered_chunk *entry = &chunks->chunks[chunks->chunk_count];
    chunks->chunk_count++;
    entry->index = index;
    entry->next = 0U;
    if (request->first[what] == 0U) {
        request->first[what] = (uint16_t)chunks->chunk_count;
    } else {
        chunks->chunks[request->last[what] - 1U].next = (uint16_t)chunks->chunk_count;
    }
    request->last[what] = (uint16_t)chunks->chunk_count;
}

/* Whether a chunk that is handed over was set before the one that is here in its place. A later value has more moves. At
 * equal moves, and where the box goes back and forth, the place decides: a writer brings chunks to where they belong at the
 * time, and nothing older can follow them to there. */
static bool is_outdated(sky_satellite *satellite, const uint8_t *ref) {
    const sky_memory *memory = &satellite->memory;
    const uint32_t chunk = sky_memory_find(memory, ref, sky_ref_index(ref));
    if (chunk == 0U || sky_ref_same_setting(ref, memory->chunks[chunk].ref)) {
        return false;
    }
    const uint8_t *held = memory->chunks[chunk].ref;
    const sky_moves moves = {sky_load32s(ref + SKY_REF_MOVES_AT), sky_load32s(ref + SKY_REF_MOVES_AT + 4)};
    const sky_moves its = {sky_load32s(held + SKY_REF_MOVES_AT), sky_load32s(held + SKY_REF_MOVES_AT + 4)};
    if ((sky_moves_equal(moves, its) || sky_moves_equal(its, satellite->locator.moves)) &&
        sky_locate_tag(satellite->locator.placements, held + SKY_REF_TAG_AT, its) == satellite->here) {
        return true;
    }
    return sky_moves_sum(its) > sky_moves_sum(moves);
}

static void count_stored(sky_satellite *satellite, const sky_put_outcome *outcome, uint8_t op, uint32_t chunks,
                         const uint8_t *key, sky_us now) {
    sky_counters *counters = &satellite->counters;
    sky_count(counters, SKY_chunks_evicted, outcome->evicted);
    if (!outcome->stored) {
        sky_count(counters, SKY_chunks_refused, chunks);
        return;
    }
    sky_count(counters, op == SKY_MIGRATE ? SKY_chunks_migrated_in : SKY_chunks_set, chunks);
    if (op == SKY_SET) {
        sky_history_written(&satellite->history, key, now);
        if (satellite->memory.expiries.count > 0U) { /* an expiry was of what the key held before */
            const uint32_t share = sky_memory_share(&satellite->memory, key);
            if (share != 0U && satellite->memory.shares[share].expiring) {
                (void)sky_memory_expire(&satellite->memory, share, SKY_NEVER);
            }
        }
    }
    sky_count(counters, SKY_chunks_replaced, outcome->replaced);
}

static void store_chunk(sky_satellite *satellite, sky_unanswered *request, const sky_incoming *chunk, sky_us now) {
    sky_chunks *chunks = &satellite->chunks;
    sky_memory *memory = &satellite->memory;
    const uint8_t op = request->header.op;
    const bool migrated = op == SKY_MIGRATE;
    const uint32_t index = sky_ref_index(chunk->ref);
    if (migrated && sky_history_is_deleted(&satellite->history, chunk->ref, now - chunks->waited)) {
        return;
    }
    if (migrated && is_outdated(satellite, chunk->ref)) {
        const sky_put_outcome dropped = {true, 1U, 0U};
        sky_memory_count_outdated(memory, chunk->bytes);
        count_stored(satellite, &dropped, op, 1U, request->key, now);
        note(chunks, request, TAKEN, index);
        return;
    }
    const sky_put_outcome outcome = sky_memory_put(memory, chunk, migrated);
    count_stored(satellite, &outcome, op, 1U, request->key, now);
    note(chunks, request, outcome.stored ? TAKEN : REFUSED, index);
    if (outcome.stored) {
        satellite->events->on_stored(satellite, chunk->ref, &request->header, now);
    }
}

static void make_room(sky_satellite *satellite, uint32_t count, sky_us now) {
    if (satellite->chunks.chunk_count + count > SKY_MOST_UNANSWERED_CHUNKS) {
        sky_chunks_acknowledge(satellite, now);
    }
}

void sky_chunks_set(sky_satellite *satellite, const uint8_t *packet, size_t bytes, sky_us now) {
    sky_ref ref;
    make_room(satellite, 1U, now);
    sky_unanswered *request = sky_ref_parse(packet + REF_AT, &ref) ? request_of(satellite, packet, now) : NULL;
    if (request == NULL || sky_locator_home(&satellite->locator, packet + REF_AT) == SKY_NOWHERE) {
        sky_count(&satellite->counters, SKY_packets_malformed, 1U);
        return;
    }
    const sky_incoming chunk = {packet + REF_AT, packet + PAYLOAD_AT, (uint32_t)(bytes - PAYLOAD_AT), 0U};
    store_chunk(satellite, request, &chunk, now);
}

/* Whether two references are of one value on one server: all fields but number, length and CRC of the chunk. */
static bool same_value(const uint8_t *a, const uint8_t *b) {
    return memcmp(a, b, SKY_KEY_BYTES) == 0 && memcmp(a + SKY_REF_CHUNKS_AT, b + SKY_REF_CHUNKS_AT, 4U) == 0 &&
           memcmp(a + SKY_REF_VALUE_BYTES_AT, b + SKY_REF_VALUE_BYTES_AT,
                  (size_t)SKY_REF_BYTES - (size_t)SKY_REF_VALUE_BYTES_AT) == 0;
}

/* The chunks of a run whose packets are sound, of one request and one value on one server (those of `first`), and ascending
 * from `count` others on; gives how many there are then, or `count` if they are not all so. */
static uint32_t open_run(sky_incoming *incoming, uint32_t count, const sky_packets *run, const uint8_t *first) {
    uint32_t opened = count, last = count > 0U ? sky_ref_index(incoming[count - 1U].ref) + 1U : 0U;
    for (size_t at = 0U; at < run->bytes; at += run->segment_bytes) {
        const uint8_t *packet = run->packets + at;
        const size_t size = run->bytes - at < run->segment_bytes ? run->bytes - at : run->segment_bytes;
        const uint8_t *ref = packet + REF_AT;
        if (opened == SKY_MOST_INCOMING || sky_packet_verify(packet, size) != SKY_SOUND ||
            (packet[0] & SKY_COMMAND_BIT) == 0U || !sky_op_carries(packet[AT_COMMAND(SKY_OP_AT)]) ||
            (packet[AT_COMMAND(SKY_FLAGS_AT)] & SKY_FLAG_AUTHENTICATED) != 0U ||
            memcmp(packet + SKY_COMMAND_BYTES, first + SKY_COMMAND_BYTES, JOURNEY_BYTES) != 0 ||
            !same_value(ref, first + REF_AT)) {
            return count;
        }
        sky_ref parsed;
        if (!sky_ref_parse(ref, &parsed) || parsed.index + 1U <= last) {
            return count;
        }
        last = parsed.index + 1U;
        incoming[opened].ref = ref;
        incoming[opened].payload = packet + PAYLOAD_AT;
        incoming[opened].bytes = (uint32_t)(size - PAYLOAD_AT);
        opened++;
    }
    return opened;
}

static bool any_outdated(sky_satellite *satellite, const sky_incoming *incoming, uint32_t count) {
    for (uint32_t each = 0U; each < count; each++) {
        if (is_outdated(satellite, incoming[each].ref)) {
            return true;
        }
    }
    return false;
}

/* All at once; chunk by chunk where one is outdated or the memory must evict selectively. */
static void store_incoming(sky_satellite *satellite, sky_unanswered *request, uint32_t count, sky_us now) {
    sky_chunks *chunks = &satellite->chunks;
    sky_memory *memory = &satellite->memory;
    sky_incoming *incoming = chunks->incoming;
    const bool migrated = request->header.op == SKY_MIGRATE;
    sky_put_outcome outcome;
    if ((migrated && any_outdated(satellite, incoming, count)) ||
        !sky_memory_put_run(memory, incoming, count, migrated, &outcome)) {
        for (uint32_t each = 0U; each < count; each++) {
            store_chunk(satellite, request, &incoming[each], now);
        }
        return;
    }
    count_stored(satellite, &outcome, request->header.op, count, request->key, now);
    for (uint32_t each = 0U; each < count; each++) {
        note(chunks, request, TAKEN, sky_ref_index(incoming[each].ref));
        satellite->events->on_stored(satellite, incoming[each].ref, &request->header, now);
    }
}

uint32_t sky_chunks_store_runs(sky_satellite *satellite, const sky_packets *runs, uint32_t count, sky_link source,
                               sky_us now) {
    sky_chunks *chunks = &satellite->chunks;
    const uint8_t *packets = runs->packets;
    uint32_t taken = 0U, opened = 0U;
    if (runs->bytes < (size_t)SKY_COMMAND_PREFIX_BYTES || (packets[0] & SKY_COMMAND_BIT) == 0U ||
        (packets[AT_COMMAND(SKY_OP_AT)] != SKY_SET && packets[AT_COMMAND(SKY_OP_AT)] != SKY_MIGRATE) ||
        sky_load32(packets + AT_COMMAND(SKY_DESTINATION_AT)) != satellite->here) {
        return 0U;
    }
    while (taken < count && runs[taken].segment_bytes >= PAYLOAD_AT) {
        const uint32_t before = opened;
        opened = open_run(chunks->incoming, opened, &runs[taken], packets);
        if (opened == before) {
            break;
        }
        taken++;
    }
    if (taken == 0U) {
        return 0U;
    }
    if (source >= SKY_BEAM) { /* answers to this ground host leave by the link that it was heard on */
        sky_router_remember(&satellite->router, sky_load32(packets + AT_COMMAND(SKY_GROUND_AT)), source);
    }
    make_room(satellite, opened, now);
    const uint8_t *ref = packets + REF_AT;
    sky_unanswered *request = request_of(satellite, packets, now);
    if (request == NULL || sky_locator_home(&satellite->locator, ref) == SKY_NOWHERE) {
        sky_count(&satellite->counters, SKY_packets_malformed, opened);
    } else if (request->header.op != SKY_MIGRATE ||
               !sky_history_is_deleted(&satellite->history, ref, now - chunks->waited)) {
        store_incoming(satellite, request, opened, now);
    } else {
        /* deleted a moment ago: dropped without a word */
    }
    return taken;
}

/* --- Acknowledgements --- */

static void sift_down(uint32_t *heap, uint32_t at, uint32_t count) {
    while (2U * at + 1U < count) {
        uint32_t child = 2U * at + 1U;
        child += child + 1U < count && heap[child + 1U] > heap[child] ? 1U : 0U;
        if (heap[at] >= heap[child]) {
            return;
        }
        const uint32_t value = heap[at];
        heap[at] = heap[child];
        heap[child] = value;
        at = child;
    }
}

static void sort(uint32_t *values, uint32_t count) {
    for (uint32_t at = count / 2U; at > 0U; at--) {
        sift_down(values, at - 1U, count);
    }
    for (uint32_t left = count; left > 1U; left--) {
        const uint32_t greatest = values[0];
        values[0] = values[left - 1U];
        values[left - 1U] = greatest;
        sift_down(values, 0U, left - 1U);
    }
}

/* The indices of one list of a request, ascending, each once; how many. */
static uint32_t gather(const sky_chunks *chunks, uint16_t first) {
    uint32_t count = 0U, distinct = 0U;
    bool ascending = true;
    for (uint16_t at = first; at != 0U; at = chunks->chunks[at - 1U].next) {
        const uint32_t index = chunks->chunks[at - 1U].index;
        ascending = ascending && (count == 0U || index > chunks->sorted[count - 1U]);
        chunks->sorted[count++] = index;
    }
    if (ascending) {
        return count;
    }
    sort(chunks->sorted, count);
    for (uint32_t each = 0U; each < count; each++) {
        if (distinct == 0U || chunks->sorted[each] != chunks->sorted[distinct - 1U]) {
            chunks->sorted[distinct++] = chunks->sorted[each];
        }
    }
    return distinct;
}

void sky_chunks_acknowledge(sky_satellite *satellite, sky_us now) {
    sky_chunks *chunks = &satellite->chunks;
    for (uint32_t each = 0U; each < chunks->request_count; each++) {
        const sky_unanswered *request = &chunks->requests[each];
        for (unsigned what = TAKEN; what <= (unsigned)REFUSED; what++) {
            const uint32_t count = gather(chunks, request->first[what]);
            const uint32_t stride = count > 0U ? sky_selection_stride(chunks->sorted, count) : 1U;
            uint32_t done = 0U;
            while (done < count) {
                size_t bytes = 0U;
                const uint32_t covered = sky_selection_build(chunks->body, BODY_BYTES, request->key,
                                                             chunks->sorted + done, count - done, stride, &bytes);
                if (covered == 0U) {
                    break;
                }
                sky_reply_as(&satellite->outbox, &request->header, SKY_ACK, chunks->body, bytes, now,
                             what == (unsigned)TAKEN ? SKY_OK : SKY_FULL, 0U);
                done += covered;
            }
        }
    }
    chunks->request_count = 0U;
    chunks->chunk_count = 0U;
}

/* --- GET --- */

bool sky_chunks_answer_get(sky_satellite *satellite, const uint8_t *packet, size_t bytes, sky_link source, sky_us now) {
    sky_chunks *chunks = &satellite->chunks;
    sky_memory *memory = &satellite->memory;
    const uint8_t *sky = packet + SKY_COMMAND_BYTES;
    if (bytes <= (size_t)SKY_COMMAND_PREFIX_BYTES || (packet[0] & SKY_COMMAND_BIT) == 0U || source < SKY_BEAM ||
        sky[SKY_OP_AT] != SKY_GET || sky[SKY_STATUS_AT] != SKY_OK ||
        sky_load32(sky + SKY_DESTINATION_AT) != satellite->here ||
        sky_load32(sky + SKY_SOURCE_AT) != ((uint32_t)SKY_GROUND_SHELL << 24 | satellite->here) ||
        (sky[SKY_FLAGS_AT] & SKY_FLAG_AUTHENTICATED) != 0U || sky_packet_verify(packet, bytes) != SKY_SOUND) {
        return false;
    }
    sky_selection selection;
    if (!sky_selection_parse(packet + SKY_COMMAND_PREFIX_BYTES, bytes - (size_t)SKY_COMMAND_PREFIX_BYTES, &selection)) {
        return false;
    }
    const uint32_t share = sky_memory_share(memory, selection.key);
    uint32_t step = 0U, index = 0U, count = 0U, chunk = 0U;
    while (share != 0U && sky_selection_next(&selection, &step, &index)) {
        chunk = sky_memory_chunk_after(memory, share, chunk, index);
        if (chunk == 0U || count == chunks->most_wanted) {
            return false;
        }
        chunks->wanted[count++] = chunk;
    }
    if (count == 0U) {
        return false;
    }
    sky_header header;
    (void)memset(&header, 0, sizeof header);
    header.source = sky_load32(sky + SKY_SOURCE_AT);
    header.ground = sky_load32(sky + SKY_GROUND_AT);
    header.request_id = sky_load32(sky + SKY_REQUEST_AT);
    header.timestamp_us = sky_load32(sky + SKY_TIMESTAMP_AT);
    (void)sky_reply_chunks(&satellite->outbox, &header, chunks->wanted, count, source, now);
    if (memory->leased.count > 0U) { /* the lease has served its purpose */
        sky_memory_release(memory, share, header.ground);
    }
    sky_memory_touch(memory, share);
    sky_count(&satellite->counters, SKY_chunks_served, count);
    sky_router_remember(&satellite->router, header.ground, source);
    return true;
}

/* MISS of the steps whose bits are set in `missing`, the first of them and the last. */
static void reply_missing(sky_satellite *satellite, const sky_header *header, const sky_selection *selection,
                          uint32_t first, uint32_t last, sky_us now) {
    sky_chunks *chunks = &satellite->chunks;
    const uint32_t steps = last - first + 1U;
    const size_t bytes = sky_selection_bytes(steps);
    uint8_t *body = chunks->body;
    (void)memset(body, 0, bytes);
    (void)memcpy(body, selection->key, SKY_KEY_BYTES);
    sky_store32(body + 32, selection->first + first * selection->stride + 1U);
    sky_store32(body + 36, selection->stride);
    sky_store32(body + 40, steps);
    for (uint32_t step = first; step <= last; step++) {
        if ((chunks->missing[step >> 3] >> (step & 7U) & 1U) != 0U) {
            uint8_t *bits = &body[(uint32_t)SKY_SELECTION_BYTES + ((step - first) >> 3)];
            *bits = (uint8_t)(*bits | 1U << ((step - first) & 7U));
        }
    }
    const uint8_t flags = sky_is_settled(satellite, selection->key, now) ? (uint8_t)SKY_FLAG_SETTLED : 0U;
    sky_reply_as(&satellite->outbox, header, SKY_MISS, body, bytes, now, SKY_OK, flags);
}

bool sky_chunks_get(sky_satellite *satellite, const sky_header *header, const uint8_t *body, size_t bytes, sky_us now) {
    sky_chunks *chunks = &satellite->chunks;
    sky_memory *memory = &satellite->memory;
    sky_selection selection;
    if (!sky_selection_parse(body, bytes, &selection)) {
        return false;
    }
    const uint32_t share = sky_memory_share(memory, selection.key);
    uint32_t step = 0U, index = 0U, count = 0U, missed = 0U, first = 0U, last = 0U;
    (void)memset(chunks->missing, 0, (selection.count + 7U) / 8U);
    while (sky_selection_next(&selection, &step, &index)) {
        const uint32_t at = step - 1U;
        const uint32_t chunk = share != 0U ? sky_memory_chunk(memory, share, index) : 0U;
        if (chunk != 0U && count < chunks->most_wanted) {
            chunks->wanted[count++] = chunk;
        } else {
            chunks->missing[at >> 3] = (uint8_t)(chunks->missing[at >> 3] | 1U << (at & 7U));
            first = missed == 0U ? at : first;
            last = at;
            missed++;
        }
    }
    if (share != 0U) {
        sky_memory_touch(memory, share);
    }
    if (count > 0U) {
        sky_count(&satellite->counters, SKY_chunks_served, count);
        sky_memory_release(memory, share, header->ground);
        (void)sky_reply_chunks(&satellite->outbox, header, chunks->wanted, count, SKY_NO_LINK, now);
    }
    if (missed > 0U) {
        sky_count(&satellite->counters, SKY_chunks_missed, missed);
        reply_missing(satellite, header, &selection, first, last, now);
    }
    return true;
}

/* --- All other requests --- */

bool sky_chunks_has(sky_satellite *satellite, const sky_header *header, const uint8_t *body, size_t bytes, sky_us now) {
    const uint8_t *keys;
    uint32_t count;
    uint8_t *answer = satellite->chunks.body;
    if (!sky_keys_parse(body, bytes, &keys, &count)) {
        return false;
    }
    sky_records_head(answer, count);
    for (uint32_t each = 0U; each < count; each++) {
        sky_presence presence;
        sky_memory_presence(&satellite->memory, keys + each * (size_t)SKY_KEY_BYTES, &presence);
        sky_presence_build(answer + SKY_LIST_HEAD + each * (size_t)SKY_PRESENCE_BYTES, &presence);
    }
    sky_reply(&satellite->outbox, header, SKY_PRESENCE, answer, (size_t)SKY_LIST_HEAD + count * (size_t)SKY_PRESENCE_BYTES,
              now);
    return true;
}

static void reply_count(sky_satellite *satellite, const sky_header *header, uint32_t count, sky_us now) {
    uint8_t body[4];
    sky_store32(body, count);
    sky_count(&satellite->counters, SKY_chunks_deleted, count);
    sky_reply(&satellite->outbox, header, SKY_EVICTED, body, sizeof body, now);
}

bool sky_chunks_evict(sky_satellite *satellite, const sky_header *header, const uint8_t *body, size_t bytes, sky_us now) {
    const uint8_t *keys;
    uint32_t count, freed = 0U;
    if (!sky_keys_parse(body, bytes, &keys, &count)) {
        return false;
    }
    sky_history_forget_deletions(&satellite->history, now);
    for (uint32_t each = 0U; each < count; each++) {
        sky_history_deleted(&satellite->history, keys + each * (size_t)SKY_KEY_BYTES, NULL, now);
    }
    for (uint32_t each = 0U; each < count; each++) {
        freed += sky_memory_remove_key(&satellite->memory, keys + each * (size_t)SKY_KEY_BYTES, SKY_DELETED);
    }
    reply_count(satellite, header, freed, now);
    return true;
}

bool sky_chunks_forget(sky_satellite *satellite, const sky_header *header, const uint8_t *body, size_t bytes,
                       sky_us now) {
    sky_history *history = &satellite->history;
    const uint8_t *dead;
    uint32_t count, since_ms, freed = 0U;
    bool spared[SKY_MOST_DEAD];
    if (!sky_forget_parse(body, bytes, &dead, &count, &since_ms)) {
        return false;
    }
    /* Not what was stored since the client looked. */
    for (uint32_t each = 0U; each < count; each++) {
        const uint8_t *key = dead + each * (size_t)SKY_DEAD_BYTES;
        spared[each] = sky_history_was_written_since(history, key, now - (sky_us)since_ms * 1000);
    }
    sky_history_forget_deletions(history, now);
    for (uint32_t each = 0U; each < count; each++) {
        const uint8_t *key = dead + each * (size_t)SKY_DEAD_BYTES;
        if (!spared[each]) {
            sky_history_deleted(history, key, key + SKY_KEY_BYTES, now);
        }
    }
    for (uint32_t each = 0U; each < count; each++) {
        const uint8_t *key = dead + each * (size_t)SKY_DEAD_BYTES;
        if (!spared[each]) {
            freed += sky_memory_remove_setting(&satellite->memory, key, key + SKY_KEY_BYTES, SKY_DELETED);
        }
    }
    reply_count(satellite, header, freed, now);
    return true;
}

bool sky_chunks_list(sky_satellite *satellite, const sky_header *header, const uint8_t *body, size_t bytes, sky_us now) {
    const sky_memory *memory = &satellite->memory;
    const uint8_t *after;
    uint32_t limit, count = 0U;
    uint8_t *answer = satellite->chunks.body;
    if (!sky_list_parse(body, bytes, &after, &limit)) {
        return false;
    }
    for (uint32_t at = sky_memory_after(memory, after); at < sky_memory_keys(memory) && count < limit; at++) {
        const uint8_t *key = sky_memory_key(memory, sky_memory_key_at(memory, at));
        uint8_t *record = answer + SKY_LIST_HEAD + count * (size_t)SKY_LISTED_BYTES;
        sky_presence presence;
        sky_memory_presence(memory, key, &presence);
        (void)memcpy(record, key, SKY_KEY_BYTES);
        sky_presence_build(record + SKY_KEY_BYTES, &presence);
        count++;
    }
    sky_records_head(answer, count);
    sky_reply(&satellite->outbox, header, SKY_LISTED, answer, (size_t)SKY_LIST_HEAD + count * (size_t)SKY_LISTED_BYTES,
              now);
    return true;
}
