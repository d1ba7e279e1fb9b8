/* The machine: which handler deals with which packet, and which timers there are. Twin of
 * skymemory.protocol.satellite.machine. */

#include "satellite.h"

#include <string.h>

#include "checks.h"
#include "gossip.h"
#include "handover.h"
#include "migration.h"
#include "state.h"
#include "sweep.h"

#define OVERLOAD_CHECK_US 250000 /* how often an overloaded satellite looks whether its host is on time again */
#define MOST_ADMITTED 1280U      /* the shortest packets that one run of 65,535 bytes can have */
#define SCRATCH_BYTES 65536U

/* The handlers know those below them alone: the events of chunks and checks are for handlers above. */
static const sky_events events = {
    .on_stored = sky_migration_stored,
    .on_checked = {[SKY_FOR_SWEEP] = sky_sweep_checked,
                   [SKY_FOR_GOSSIP] = sky_gossip_checked,
                   [SKY_FOR_REPAIR] = sky_repair_checked},
    .on_proved = {[SKY_FOR_SWEEP] = sky_sweep_proved, [SKY_FOR_GOSSIP] = sky_gossip_proved},
};

/* --- The start --- */

/* All parts from the arena; NULL while that only counts, or where it is too small. `counted` stands in for the satellite
 * while there is none. */
static sky_satellite *place(sky_arena *arena, sky_satellite *counted, const sky_config *config, sky_us now) {
    sky_satellite *taken = sky_take(arena, 1U, sizeof *taken);
    sky_satellite *satellite = taken != NULL ? taken : counted;
    bool whole = true;
    satellite->config = *config;
    satellite->events = &events;
    config = &satellite->config;
    satellite->here = config->address;
    satellite->user = sky_take_shared(arena, 1U, sizeof *satellite->user);
    satellite->scratch = sky_take_shared(arena, SCRATCH_BYTES, 1U);
    satellite->sifted = sky_take_shared(arena, MOST_ADMITTED, sizeof *satellite->sifted);
    if (config->ring.count > 0U) {
        satellite->admitted = sky_take_shared(arena, MOST_ADMITTED, sizeof *satellite->admitted);
        satellite->gate =
            sky_gate_new(arena, config, &satellite->counters, sky_send_refusal, &satellite->outbox, now);
    }
    whole = sky_memory_new(&satellite->memory, arena, config) && whole;
    whole = sky_history_new(&satellite->history, arena, config) && whole;
    whole = sky_locator_new(&satellite->locator, arena, config, now) && whole;
    whole = sky_router_new(&satellite->router, arena, config) && whole;
    whole = sky_outbox_new(&satellite->outbox, arena, config) && whole;
    whole = sky_postponed_new(&satellite->postponed, arena, config) && whole;
    whole = sky_neighbours_new(&satellite->neighbours, arena, config) && whole;
    whole = sky_retention_new(&satellite->retention, arena, config) && whole;
    whole = sky_chunks_new(&satellite->chunks, arena, config) && whole;
    satellite->handover = sky_handover_new(arena, config, now);
    satellite->migration = sky_migration_new(arena, config, now);
    satellite->gossip = sky_gossip_new(arena, config, now);
    satellite->checks = sky_checks_new(arena, config, now);
    satellite->sweep = sky_sweep_new(arena, config, now);
    return taken != NULL && whole && arena->used <= arena->bytes && arena->shared_used <= arena->shared_bytes ? taken : NULL;
}

static void count_bytes(const sky_config *config, sky_arena *arena) {
    sky_satellite counted;
    (void)memset(&counted, 0, sizeof counted);
    (void)place(arena, &counted, config, 0);
}

size_t sky_satellite_bytes(const sky_config *config) {
    sky_arena arena = {NULL, 0U, 0U, 0U, {0U, 0U}, config->shared != NULL, NULL, 0U, 0U};
    if (sky_config_error(config) != NULL) {
        return 0U;
    }
    count_bytes(config, &arena);
    return arena.used < SIZE_MAX / 4U ? arena.used : 0U;
}

size_t sky_shared_bytes(const sky_config *config) {
    sky_arena arena = {NULL, 0U, 0U, 0U, {0U, 0U}, true, NULL, 0U, 0U};
    if (sky_config_error(config) != NULL) {
        return 0U;
    }
    count_bytes(config, &arena);
    return arena.used < SIZE_MAX / 4U ? arena.shared_used : 0U;
}

sky_satellite *sky_satellite_begin(void *memory, size_t bytes, const sky_config *config, sky_us now) {
    sky_arena arena = {memory, bytes, 0U, 0U, {config->hash_seed[0], config->hash_seed[1]},
                       config->shared != NULL, config->shared, config->shared_bytes, 0U};
    if (sky_config_error(config) != NULL || sizeof(sky_satellite) > bytes) {
        return NULL;
    }
    sky_satellite *satellite = place(&arena, memory, config, now);
    if (satellite == NULL) {
        return NULL;
    }
    sky_lateness_begin(&satellite->lateness);
    satellite->outbox.locator = &satellite->locator;
    satellite->outbox.router = &satellite->router;
    satellite->outbox.counters = &satellite->counters;
    satellite->outbox.memory = &satellite->memory;
    satellite->outbox.authority = satellite->gate != NULL ? sky_gate_authority(satellite->gate) : NULL;
    satellite->check = now;
    return satellite;
}

/* Begins an event. False: another satellite's runs were not all taken yet, and they lie in the memory that both use. */
static bool begin_event(sky_satellite *satellite) {
    const bool may = *satellite->user == NULL || *satellite->user == satellite;
    if (may) {
        *satellite->user = satellite;
    } else {
        sky_count(&satellite->counters, SKY_pools_full, 1U);
    }
    return may;
}

void sky_greet(sky_satellite *satellite, sky_us now) {
    if (begin_event(satellite)) {
        sky_neighbours_greet(satellite, now);
    }
}

void sky_satellite_past(const sky_satellite *satellite, sky_past *past) {
    const sky_ledger *ledger = &satellite->memory.ledger;
    past->set = ledger->set;
    past->migrated_in = ledger->migrated_in;
    past->replaced = ledger->went[SKY_REPLACED];
    past->evicted = ledger->went[SKY_EVICTED_FOR_ROOM];
    past->deleted = ledger->went[SKY_DELETED];
    past->migrated_out = ledger->went[SKY_MIGRATED_OUT];
    past->lost = ledger->went[SKY_LOST] + satellite->memory.used_bytes;
    past->pushed_at_ms = satellite->neighbours.pushed_at_ms;
    past->pushed_slot = satellite->locator.pushed.slot;
    past->pushed_plane = satellite->locator.pushed.plane;
}

void sky_satellite_resume(sky_satellite *satellite, const sky_past *past, sky_us now) {
    sky_ledger *ledger = &satellite->memory.ledger;
    const sky_moves pushed = {past->pushed_slot, past->pushed_plane};
    ledger->set = past->set;
    ledger->migrated_in = past->migrated_in;
    ledger->went[SKY_REPLACED] = past->replaced;
    ledger->went[SKY_EVICTED_FOR_ROOM] = past->evicted;
    ledger->went[SKY_DELETED] = past->deleted;
    ledger->went[SKY_MIGRATED_OUT] = past->migrated_out;
    ledger->went[SKY_LOST] = past->lost;
    satellite->neighbours.pushed_at_ms = past->pushed_at_ms;
    sky_locator_push(&satellite->locator, pushed);
    (void)sky_locator_follow(&satellite->locator, now);
    satellite->locator.before = satellite->locator.moves;
}

void sky_set_keys(sky_satellite *satellite, const sky_ring *ring) {
    if (satellite->gate != NULL) {
        sky_gate_set_ring(satellite->gate, ring);
    }
}

void sky_set_wall(sky_satellite *satellite, sky_us shift) {
    if (satellite->gate != NULL) {
        sky_gate_set_wall(satellite->gate, shift);
    }
}

sky_us sky_heard(const sky_satellite *satellite, sky_us *by_wall) {
    *by_wall = 0;
    return satellite->gate != NULL ? sky_gate_heard(satellite->gate, by_wall) : 0;
}

/* --- What all handlers ask --- */

bool sky_is_late(const sky_satellite *satellite, sky_us now) {
    return sky_lateness_is_late(&satellite->lateness, now);
}

void sky_hand_over(sky_satellite *satellite, sky_us now) {
    if (sky_is_late(satellite, now)) {
        satellite->timers_wait = true;
    } else {
        sky_migration_send_due(satellite, now);
    }
}

static void hand_over_unless_idle(sky_satellite *satellite, sky_us now) {
    if (!sky_handover_idle(satellite)) {
        sky_hand_over(satellite, now);
    }
}

/* The clock or an operator (`pushed`) may have moved the box: a handover is planned if it has moved. */
static void follow_moves(sky_satellite *satellite, bool pushed, sky_us now) {
    if (sky_locator_follow(&satellite->locator, now)) {
        if (!sky_is_late(satellite, now)) {
            sky_sweep_before_handover(satellite, now);
        }
        sky_migration_box_moved(satellite, pushed);
    }
}

/* --- Packets for this satellite; false: malformed --- */

static bool receive_ping(sky_satellite *satellite, const sky_header *header, sky_us now) {
    int64_t figures[SKY_HOUSEKEEPING_FIELDS];
    uint8_t body[(size_t)SKY_LIST_HEAD + SKY_HOUSEKEEPING_FIELDS * 8U];
    sky_housekeeping(satellite, figures, now);
    sky_records_head(body, SKY_HOUSEKEEPING_FIELDS);
    for (uint32_t number = 0U; number < SKY_HOUSEKEEPING_FIELDS; number++) {
        sky_store64(body + SKY_LIST_HEAD + number * 8U, (uint64_t)figures[number]);
    }
    sky_reply(&satellite->outbox, header, SKY_PONG, body, sizeof body, now);
    return true;
}

/* An operator sets the moves that are added to the clock. */
static bool receive_advance(sky_satellite *satellite, const sky_header *header, const uint8_t *body, size_t bytes,
                            sky_us now) {
    sky_moves pushed;
    uint8_t answer[8];
    if (!sky_moves_parse(body, bytes, &pushed.slot, &pushed.plane)) {
        return false;
    }
    if (!sky_locator_may_push(&satellite->locator, pushed, now, SKY_MOST_PUSHED_AT_ONCE)) {
        sky_count(&satellite->counters, SKY_pushes_refused, 1U);
        sky_reply_as(&satellite->outbox, header, SKY_UNREACHABLE, NULL, 0U, now, SKY_REFUSED, 0U);
        return true;
    }
    sky_locator_push(&satellite->locator, pushed);
    satellite->neighbours.pushed_at_ms = now / 1000;
    follow_moves(satellite, true, now);
    sky_moves_build(answer, satellite->locator.pushed.slot, satellite->locator.pushed.plane);
    sky_reply(&satellite->outbox, header, SKY_ADVANCED, answer, sizeof answer, now);
    sky_hand_over(satellite, now);
    return true;
}

static bool receive_get(sky_satellite *satellite, const sky_header *header, const uint8_t *body, size_t bytes,
                        sky_us now) {
    if (satellite->backlog_bytes > satellite->config.backlog_bytes) {
        sky_reply(&satellite->outbox, header, SKY_BUSY, body, bytes, now);
        return true;
    }
    return sky_chunks_get(satellite, header, body, bytes, now);
}

static bool dispatch(sky_satellite *satellite, const sky_header *header, const uint8_t *body, size_t bytes, sky_us now) {
    bool sound = false;
    switch (header->op) {
    /* requests of clients */
    case SKY_GET:
        return receive_get(satellite, header, body, bytes, now);
    case SKY_HAS:
        return sky_chunks_has(satellite, header, body, bytes, now);
    case SKY_EVICT:
        return sky_chunks_evict(satellite, header, body, bytes, now);
    case SKY_FORGET:
        return sky_chunks_forget(satellite, header, body, bytes, now);
    case SKY_LIST:
        return sky_chunks_list(satellite, header, body, bytes, now);
    case SKY_RETAIN:
        return sky_retention_receive(satellite, header, body, bytes, now);
    case SKY_PING:
        return receive_ping(satellite, header, now);
    case SKY_ADVANCE:
        return receive_advance(satellite, header, body, bytes, now);
    /* requests of other satellites (which also send RETAIN and HAS) */
    case SKY_NOTICE:
        return sky_gossip_receive(satellite, header, body, bytes, now);
    case SKY_CHECK:
        return sky_checks_receive(satellite, header, body, bytes, now);
    /* answers of other satellites */
    case SKY_ACK:
        sound = sky_migration_acknowledged(satellite, header, body, bytes, now);
        break;
    case SKY_UNREACHABLE:
        sound = sky_migration_unreachable(satellite, header, body, bytes, now);
        break;
    case SKY_RETAINED:
        return sky_retention_answered(satellite, header, body, bytes, now);
    case SKY_UNSUPPORTED:
        return sky_retention_unsupported(satellite, header, body, bytes, now);
    case SKY_PRESENCE:
        return sky_sweep_answered(satellite, header, body, bytes, now);
    case SKY_CHECKED:
        sound = sky_checks_answered(satellite, header, body, bytes, now);
        if (sound) {
            sky_sweep_release_handover(satellite);
        }
        return sound;
    default:
        return false; /* not sent to satellites; SET, MIGRATE and LINKS do not come here */
    }
    if (sound) { /* more chunks may leave */
        sky_hand_over(satellite, now);
    }
    return sound;
}

static void handle(sky_satellite *satellite, const uint8_t *packet, size_t bytes, sky_us now) {
    sky_header header;
    const uint8_t *body;
    size_t body_bytes;
    const sky_verdict verdict = sky_packet_parse(packet, bytes, &header, &body, &body_bytes);
    if (verdict == SKY_UNKNOWN_OPERATION) {
        sky_count(&satellite->counters, SKY_packets_unsupported, 1U);
        sky_unsupported(&satellite->outbox, packet, now);
    } else if (verdict != SKY_SOUND || !dispatch(satellite, &header, body, body_bytes, now)) {
        sky_count(&satellite->counters, SKY_packets_malformed, 1U);
    } else {
        /* it was handled */
    }
}

/* LINKS: a neighbour says which links are dead, and how far operators have moved the box. */
static void receive_links(sky_satellite *satellite, const sky_packets *run, sky_link source, sky_us now) {
    const sky_moves before = satellite->locator.pushed;
    for (size_t at = 0U; at < run->bytes; at += run->segment_bytes) {
        const size_t size = run->bytes - at < run->segment_bytes ? run->bytes - at : run->segment_bytes;
        sky_header header;
        const uint8_t *body;
        size_t body_bytes;
        if (sky_packet_parse(run->packets + at, size, &header, &body, &body_bytes) != SKY_SOUND ||
            !sky_neighbours_receive(satellite, &header, body, body_bytes, source, now)) {
            sky_count(&satellite->counters, SKY_packets_malformed, 1U);
        }
    }
    if (!sky_moves_equal(before, satellite->locator.pushed)) {
        follow_moves(satellite, true, now);
        sky_hand_over(satellite, now);
    }
}

/* Sound packets of one operation for this satellite: chunks to the memory, all else to its handler. */
static void deliver(sky_satellite *satellite, const sky_packets *run, sky_us now) {
    const size_t sky = sky_header_start(run->packets);
    const uint8_t op = run->packets[sky + (size_t)SKY_OP_AT];
    const bool carries = op == SKY_SET || op == SKY_MIGRATE;
    if ((run->packets[sky + (size_t)SKY_FLAGS_AT] & SKY_FLAG_AUTHENTICATED) != 0U ||
        (carries && sky != (size_t)SKY_COMMAND_BYTES)) { /* a gate takes MACs off */
        sky_count(&satellite->counters, SKY_packets_malformed, sky_run_count(run->bytes, run->segment_bytes));
        return;
    }
    for (size_t at = 0U; at < run->bytes; at += run->segment_bytes) {
        const size_t size = run->bytes - at < run->segment_bytes ? run->bytes - at : run->segment_bytes;
        if (carries) {
            sky_chunks_set(satellite, run->packets + at, size, now);
        } else {
            handle(satellite, run->packets + at, size, now);
        }
    }
    if (carries) {
        hand_over_unless_idle(satellite, now);
    }
}

/* --- Packets in transit --- */

static void unroutable(sky_satellite *satellite, const sky_packets *run, uint8_t status, sky_us now) {
    const size_t size = run->bytes < run->segment_bytes ? run->bytes : run->segment_bytes;
    sky_header header;
    const uint8_t *body;
    size_t body_bytes;
    sky_count(&satellite->counters, SKY_packets_unroutable, 1U);
    if (sky_packet_parse(run->packets, size, &header, &body, &body_bytes) != SKY_SOUND) {
        sky_count(&satellite->counters, SKY_packets_malformed, 1U);
    } else if (sky_op_is_command(header.op)) {
        sky_reply_as(&satellite->outbox, &header, SKY_UNREACHABLE, NULL, 0U, now, status, 0U);
    } else {
        /* nobody waits for word of an answer */
    }
}

/* Packets of one journey leave from where they are. */
static void forward(sky_satellite *satellite, const sky_packets *run, uint32_t destination, sky_link source, sky_us now) {
    const uint8_t *sky = run->packets + sky_header_start(run->packets);
    const sky_link link =
        sky_router_onward(&satellite->router, destination, sky_load32(sky + SKY_GROUND_AT), source);
    if (link == SKY_NO_LINK) {
        unroutable(satellite, run, SKY_NO_ROUTE, now);
    } else if ((destination & 0xFFFFFFU) != satellite->here &&
               !sky_count_hops(run->packets, run->bytes, run->segment_bytes)) {
        unroutable(satellite, run, SKY_HOP_LIMIT_USED, now);
    } else {
        sky_count(&satellite->counters, SKY_packets_forwarded, sky_run_count(run->bytes, run->segment_bytes));
        sky_send_by(&satellite->outbox, run->packets, run->bytes, run->segment_bytes, link);
    }
}

/* Leaves only the sound packets of a run, in their order; how many others there were. */
static size_t keep_sound(sky_packets *run) {
    size_t bad = 0U, kept = 0U;
    for (size_t at = 0U; at < run->bytes; at += run->segment_bytes) {
        const size_t size = run->bytes - at < run->segment_bytes ? run->bytes - at : run->segment_bytes;
        if (sky_packet_verify(run->packets + at, size) != SKY_SOUND) {
            bad++;
        } else {
            if (kept != at) {
                (void)memmove(run->packets + kept, run->packets + at, size);
            }
            kept += size;
        }
    }
    run->bytes = kept;
    return bad;
}

/* Packets that have one destination and operation: forwarded or delivered. */
static void receive_journey(sky_satellite *satellite, sky_packets run, sky_link source, sky_us now) {
    const size_t start = run.bytes > 0U ? sky_header_start(run.packets) : (size_t)SKY_TELEMETRY_BYTES;
    if (run.bytes < start + (size_t)SKY_HEADER_BYTES) {
        sky_count(&satellite->counters, SKY_packets_malformed, 1U);
        return;
    }
    const uint32_t destination = sky_load32(run.packets + start + SKY_DESTINATION_AT);
    const bool to_me = destination == satellite->here;
    if (source < SKY_BEAM && !to_me) { /* in transit: the destination verifies the checksums */
        forward(satellite, &run, destination, source, now);
        return;
    }
    sky_count(&satellite->counters, SKY_packets_malformed, keep_sound(&run));
    if (run.bytes == 0U) {
        return;
    }
    if (source >= SKY_BEAM) { /* answers to this ground host leave by the link that it was heard on */
        sky_router_remember(&satellite->router, sky_load32(run.packets + start + SKY_GROUND_AT), source);
        if (!to_me) {
            forward(satellite, &run, destination, source, now);
            return;
        }
    }
    if (run.packets[start + (size_t)SKY_OP_AT] == SKY_LINKS) {
        receive_links(satellite, &run, source, now);
    } else {
        deliver(satellite, &run, now);
    }
}

static void process_one(sky_satellite *satellite, const sky_packets *run, sky_link source, sky_us now) {
    const size_t count = run->segment_bytes > 0U ? sky_run_count(run->bytes, run->segment_bytes) : 1U;
    sky_count(&satellite->counters, SKY_packets_received, count);
    if (run->segment_bytes < (size_t)SKY_COMMAND_PREFIX_BYTES) {
        sky_count(&satellite->counters, SKY_packets_malformed, count > 0U ? count : 1U);
    } else if (run->bytes == run->segment_bytes && satellite->backlog_bytes <= satellite->config.backlog_bytes &&
               sky_chunks_answer_get(satellite, run->packets, run->bytes, source, now)) {
        /* it was answered */
    } else if (sky_same_journey(run->packets, run->bytes, run->segment_bytes)) {
        receive_journey(satellite, *run, source, now);
    } else {
        for (size_t at = 0U; at < run->bytes; at += run->segment_bytes) {
            const size_t left = run->bytes - at;
            const sky_packets one = {run->packets + at, left < run->segment_bytes ? left : run->segment_bytes,
                                     run->segment_bytes};
            receive_journey(satellite, one, source, now);
        }
    }
}

static void process(sky_satellite *satellite, const sky_packets *runs, uint32_t count, sky_link source, sky_us now) {
    uint32_t at = 0U;
    while (at < count) {
        const uint32_t taken = sky_chunks_store_runs(satellite, &runs[at], count - at, source, now);
        for (uint32_t each = at; each < at + taken; each++) {
            sky_count(&satellite->counters, SKY_packets_received,
                      sky_run_count(runs[each].bytes, runs[each].segment_bytes));
        }
        if (taken > 0U) {
            hand_over_unless_idle(satellite, now);
        } else {
            process_one(satellite, &runs[at], source, now);
        }
        at += taken > 0U ? taken : 1U;
    }
}

/* A run, or the packets of one with several journeys: background packets are kept, the others are added to `sifted`. */
static uint32_t sift(sky_satellite *satellite, const sky_packets *run, uint32_t count, sky_link source, sky_us now) {
    const bool whole = run->segment_bytes < (size_t)SKY_COMMAND_PREFIX_BYTES ||
                       sky_same_journey(run->packets, run->bytes, run->segment_bytes);
    size_t at = 0U;
    do {
        const size_t left = run->bytes - at;
        const size_t size = whole || left < run->segment_bytes ? left : run->segment_bytes;
        const sky_packets part = {run->packets + at, size, whole ? run->segment_bytes : size};
        if (part.segment_bytes > 0U && sky_is_background(part.packets, size)) {
            sky_postponed_keep(&satellite->postponed, part.packets, size, part.segment_bytes, source, now);
        } else if (count < MOST_ADMITTED) {
            satellite->sifted[count] = part;
            count++;
        } else {
            sky_count(&satellite->counters, SKY_pools_full, 1U); /* more than a datagram's bytes can hold */
        }
        at += size;
    } while (at < run->bytes);
    return count;
}

static void process_all(sky_satellite *satellite, const sky_packets *runs, uint32_t count, sky_link source, sky_us now) {
    const bool late = sky_is_late(satellite, now);
    satellite->was_late = satellite->was_late || late;
    if (!late && satellite->postponed.runs == 0U) {
        process(satellite, runs, count, source, now);
        return;
    }
    uint32_t left = 0U;
    for (uint32_t each = 0U; each < count; each++) {
        left = sift(satellite, &runs[each], left, source, now);
    }
    process(satellite, satellite->sifted, left, source, now);
}

void sky_receive(sky_satellite *satellite, uint8_t *packets, size_t bytes, size_t segment_bytes, sky_link source,
                 sky_us now) {
    const sky_packets run = {packets, bytes, segment_bytes};
    if (!begin_event(satellite)) {
        return;
    }
    if (satellite->gate == NULL) {
        if (source < SKY_BEAM) {
            sky_neighbour_heard(satellite, source, now);
        }
        process_all(satellite, &run, 1U, source, now);
        return;
    }
    /* An address can be forged: with keys only an authentic packet is a sign of life. */
    uint32_t count = 0U;
    sky_gate_admit(satellite->gate, packets, bytes, segment_bytes, source, now);
    while (count < MOST_ADMITTED &&
           sky_gate_next(satellite->gate, &satellite->admitted[count].packets, &satellite->admitted[count].bytes,
                         &satellite->admitted[count].segment_bytes)) {
        count++;
    }
    if (source < SKY_BEAM && sky_gate_commanded(satellite->gate)) {
        sky_neighbour_heard(satellite, source, now);
    }
    process_all(satellite, satellite->admitted, count, source, now);
}

/* --- What is to be sent --- */

void sky_gather(sky_satellite *satellite, sky_us now) {
    sky_outbox *outbox = &satellite->outbox;
    if (!begin_event(satellite)) {
        return;
    }
    if (satellite->healed != satellite->router.links.healed) { /* a destination may be reachable again */
        satellite->healed = satellite->router.links.healed;
        sky_handover_retry_unanswered(satellite, now);
    }
    sky_chunks_acknowledge(satellite, now);
    sky_gossip_gather(satellite, now);
    while (outbox->traffic < outbox->count) {
        const sky_queued *queued = &outbox->queue[outbox->traffic];
        outbox->traffic++;
        if (!queued->is_links) {
            sky_neighbour_used(satellite, queued->run.link, now);
        }
    }
}

bool sky_next_run(sky_satellite *satellite, sky_run *run) {
    const bool more = sky_outbox_next(&satellite->outbox, run);
    if (!more && *satellite->user == satellite) {
        *satellite->user = NULL;
    }
    return more;
}

const uint8_t *sky_payload_cell(const sky_satellite *satellite, uint32_t cell, uint32_t left, uint32_t *bytes,
                                uint32_t *next) {
    return sky_memory_cell(&satellite->memory, cell, left, bytes, next);
}

/* --- Timers --- */

static sky_us sooner(sky_us one, sky_us other) { return one < other ? one : other; }

sky_us sky_next_timer(sky_satellite *satellite) {
    sky_us soonest = sooner(satellite->locator.next_move, sky_neighbours_next_timer(satellite));
    if (satellite->was_late) {
        soonest = sooner(soonest, satellite->check);
    }
    if (satellite->timers_wait) {
        return soonest;
    }
    soonest = sooner(soonest, sky_handover_next_deletion(satellite));
    soonest = sooner(soonest, sky_gossip_next_timer(satellite));
    soonest = sooner(soonest, sky_retention_next_timer(satellite));
    soonest = sooner(soonest, sky_sweep_next_confirmation(satellite));
    soonest = sooner(soonest, sky_repair_next_timer(satellite));
    soonest = sooner(soonest, sky_sweep_next_sweep(satellite));
    return sooner(soonest, sky_migration_next_timer(satellite));
}

static void run_background(sky_satellite *satellite, sky_us now) {
    satellite->timers_wait = false;
    sky_migration_delete_copied(satellite, now); /* handed over and acknowledged: the grace period ends */
    sky_gossip_handle_timer(satellite, now);     /* announce what was evicted */
    sky_retention_handle_timer(satellite, now);  /* pins, leases and expiries end */
    sky_sweep_confirm_suspicions(satellite, now); /* incomplete blocks, lost copies */
    sky_repair_handle_timer(satellite, now);
    sky_sweep_sweep(satellite, now);
    sky_migration_send_due(satellite, now); /* plan a handover, send bursts and send them again */
}

/* Is the host overloaded? Once it is on time again, what did not answer meanwhile is tried again. */
static void check_overload(sky_satellite *satellite, sky_us now) {
    const bool late = sky_is_late(satellite, now), was_late = satellite->was_late;
    satellite->was_late = late;
    satellite->check = now + OVERLOAD_CHECK_US;
    if (was_late && !late) {
        sky_neighbours_probe_down(satellite, now);
        sky_handover_retry_unanswered(satellite, now);
    }
}

void sky_handle_timer(sky_satellite *satellite, sky_us now) {
    if (!begin_event(satellite)) {
        return;
    }
    if (now >= satellite->locator.next_move) {
        follow_moves(satellite, false, now);
    }
    sky_neighbours_handle_timer(satellite, now);
    check_overload(satellite, now);
    if (satellite->was_late) {
        satellite->timers_wait = true;
    } else {
        run_background(satellite, now);
    }
}

bool sky_wants_work(const sky_satellite *satellite) {
    return satellite->timers_wait || satellite->postponed.runs > 0U;
}

size_t sky_work(sky_satellite *satellite, sky_us now) {
    const bool packets_next = satellite->packets_next;
    sky_packets run = {satellite->scratch, 0U, 0U};
    sky_link source;
    sky_us came;
    if (!begin_event(satellite) || satellite->outbox.count > 0U) {
        return 0U; /* what was made of the run before may lie there still */
    }
    satellite->packets_next = !packets_next;
    if (satellite->timers_wait && !(packets_next && satellite->postponed.runs > 0U)) {
        run_background(satellite, now);
        return 0U;
    }
    run.bytes = sky_postponed_take(&satellite->postponed, run.packets, &run.segment_bytes, &source, &came, now);
    if (run.bytes > 0U) {
        satellite->chunks.waited = now - came;
        process(satellite, &run, 1U, source, now);
        satellite->chunks.waited = 0;
    }
    return run.bytes;
}

/* --- What the caller knows, and asks --- */

void sky_host_late(sky_satellite *satellite, sky_us late_us, sky_us now) {
    sky_lateness_measured(&satellite->lateness, late_us, now);
}

void sky_set_backlog(sky_satellite *satellite, uint64_t bytes) { satellite->backlog_bytes = bytes; }

void sky_set_figure(sky_satellite *satellite, unsigned number, int64_t value) {
    if (number < SKY_HOUSEKEEPING_FIELDS) {
        satellite->figures[number] = value;
        satellite->is_figure |= UINT64_C(1) << number;
    }
}

void sky_satellite_moves(const sky_satellite *satellite, int32_t *slot_moves, int32_t *plane_moves) {
    *slot_moves = satellite->locator.moves.slot;
    *plane_moves = satellite->locator.moves.plane;
}
