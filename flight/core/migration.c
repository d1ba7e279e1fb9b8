#include "migration.h"

#include "handover.h"
#include "sweep.h"

#include <string.h>

#define SANE_ROUND_TRIP_US 60000000U
#define CONFLICTS_AT_ONCE 16U

struct sky_migration {
    sky_throttle planning; /* of pushes, which may be forged; the clock's own moves are rare */
    bool urgent;
    uint32_t *due; /* request ids of the bursts to send */
};

sky_migration *sky_migration_new(sky_arena *arena, const sky_config *config, sky_us now) {
    (void)now;
    sky_migration *migration = sky_take(arena, 1, sizeof *migration);
    uint32_t *due = sky_take(arena, config->handover_window, sizeof *due);
    if (migration == NULL || due == NULL) {
        return NULL;
    }
    migration->due = due;
    sky_throttle_begin(&migration->planning, SKY_AT_ONCE, SKY_SHORT_HOLD_US);
    return migration;
}

static const uint8_t *tag_of(const sky_satellite *satellite, uint32_t chunk) {
    return satellite->memory.chunks[chunk].ref + SKY_REF_TAG_AT;
}

static uint8_t replica_of(const sky_satellite *satellite, uint32_t chunk) {
    return satellite->memory.chunks[chunk].ref[SKY_REF_REPLICA_AT];
}

/* Where a chunk belongs as this copy of it. */
static uint32_t home_as(const sky_satellite *satellite, uint32_t chunk, uint8_t replica) {
    return sky_locate_copy(satellite->locator.placements, tag_of(satellite, chunk), satellite->locator.moves, replica);
}

/* Whether the chunk belongs elsewhere, and where. */
static bool is_away(sky_satellite *satellite, uint32_t chunk, uint32_t *home) {
    *home = sky_locator_home(&satellite->locator, satellite->memory.chunks[chunk].ref);
    return *home != satellite->here && *home != SKY_NOWHERE;
}

/* --- Chunks arrive --- */

/* Chunks were stored in place of other copies of them: what came and belongs elsewhere leaves at `due`. */
static void resolve_conflicts(sky_satellite *satellite, sky_us due) {
    sky_conflict conflicts[CONFLICTS_AT_ONCE];
    uint32_t count;
    while ((count = sky_memory_take_conflicts(&satellite->memory, conflicts, CONFLICTS_AT_ONCE)) != 0U) {
        for (uint32_t i = 0; i < count; i++) {
            const uint32_t chunk = conflicts[i].chunk;
            const uint8_t *ref = satellite->memory.chunks[chunk].ref;
            const uint8_t came = ref[SKY_REF_REPLICA_AT], before = conflicts[i].replica_before;
            if (home_as(satellite, chunk, before) == satellite->here) { /* what was here stays, the new one leaves */
                sky_memory_relabel(&satellite->memory, chunk, before);
                sky_handover_stray(satellite->handover, ref, sky_ref_index(ref), came, due);
            } else {
                sky_handover_leave_as(satellite->handover, ref, sky_ref_index(ref), before);
            }
        }
    }
}

void sky_migration_stored(sky_satellite *satellite, const uint8_t *ref, const sky_header *header, sky_us now) {
    const sky_moves theirs = {header->slot_moves, header->plane_moves};
    const uint32_t home = sky_locator_home(&satellite->locator, ref);
    /* A satellite that handed it over may know of a move that is not known here yet: then it stays for a while. */
    const bool at_once = header->op != SKY_MIGRATE || sky_locator_is_past(&satellite->locator, theirs);
    const sky_us due = at_once ? now : now + satellite->handover->grace;
    resolve_conflicts(satellite, due);
    sky_handover_keep(satellite->handover, ref, sky_ref_index(ref));
    if (home != satellite->here && home != SKY_NOWHERE) {
        sky_handover_stray(satellite->handover, ref, sky_ref_index(ref), SKY_AS_IT_IS, due);
    }
}

/* --- The box moves: plan, send, delete --- */

void sky_migration_box_moved(sky_satellite *satellite, bool urgent) {
    satellite->handover->moved = true;
    satellite->migration->urgent = satellite->migration->urgent || urgent;
}

/* When the next plan may be made. */
static sky_us plan_from(const sky_migration *migration) { return migration->urgent ? migration->planning.open_us : 0; }

sky_us sky_migration_next_timer(const sky_satellite *satellite) {
    const sky_us soonest = sky_handover_next_timer(satellite->handover), planned = plan_from(satellite->migration);
    return satellite->handover->moved && planned < soonest ? planned : soonest;
}

/* Sends the chunk, if it is still here, to where its copy `replica` belongs. */
static void send_as(sky_satellite *satellite, const uint8_t *key, uint32_t index, uint8_t replica) {
    const uint32_t chunk = sky_memory_find(&satellite->memory, key, index);
    if (chunk == 0U || replica_of(satellite, chunk) == replica) {
        return;
    }
    const uint32_t home = home_as(satellite, chunk, replica);
    uint32_t its_home, in_burst = 0;
    if (home == SKY_NOWHERE) {
        return;
    }
    if (home != satellite->here) {
        sky_handover_enqueue(satellite->handover, home, key, index, replica, &in_burst);
    } else if (is_away(satellite, chunk, &its_home)) {
        const uint8_t was = replica_of(satellite, chunk);
        sky_memory_relabel(&satellite->memory, chunk, replica);
        sky_handover_leave_as(satellite->handover, key, index, was);
    } else {
        /* both belong here: one place is enough */
    }
}

/* Queues what must leave now, and forgets what was queued before. Keys in the order of eviction, so that chunks have the
 * same order where they arrive. */
static void plan(sky_satellite *satellite, sky_us now) {
    sky_handover *handover = satellite->handover;
    sky_migration *migration = satellite->migration;
    const bool urgent = migration->urgent;
    if (urgent) {
        sky_throttle_done(&migration->planning, now);
    }
    migration->urgent = false;
    uint32_t others = sky_handover_clear(handover), share, id;
    sky_memory_order order;
    handover->planned += satellite->memory.count;
    sky_memory_order_begin(&satellite->memory, &order);
    while ((share = sky_memory_order_next(&satellite->memory, &order)) != 0U) {
        uint32_t leaving = 0;
        for (uint32_t chunk = satellite->memory.shares[share].lowest; chunk != 0U;
             chunk = satellite->memory.chunks[chunk].higher) {
            const uint8_t *ref = satellite->memory.chunks[chunk].ref;
            uint32_t home;
            if (is_away(satellite, chunk, &home)) {
                sky_handover_list(handover, &leaving, ref, sky_ref_index(ref), home);
            } else {
                sky_handover_belongs(handover, ref, sky_ref_index(ref));
            }
        }
        sky_handover_enqueue_list(handover, leaving, true);
    }
    while ((id = sky_handover_pop(handover, &others)) != 0U) {
        const sky_departure *departure = sky_departure_of(handover, id);
        send_as(satellite, departure->key, departure->index, (uint8_t)departure->copy);
        sky_handover_release(handover, id);
    }
    sky_handover_spread(handover, now, sky_locator_interval(&satellite->locator, now), urgent);
}

static void enqueue_strays(sky_satellite *satellite, sky_us now) {
    sky_handover *handover = satellite->handover;
    uint32_t due = sky_handover_strays_due(handover, now), elsewhere = 0, last = 0, id;
    while ((id = sky_handover_pop(handover, &due)) != 0U) {
        sky_departure *departure = sky_departure_of(handover, id);
        if (departure->copy != SKY_AS_IT_IS) {
            send_as(satellite, departure->key, departure->index, (uint8_t)departure->copy);
            sky_handover_release(handover, id);
            continue;
        }
        const uint32_t chunk = sky_memory_find(&satellite->memory, departure->key, departure->index);
        if (chunk != 0U && is_away(satellite, chunk, &departure->home)) {
            sky_handover_append(handover, &elsewhere, &last, id);
        } else {
            sky_handover_release(handover, id);
        }
    }
    sky_handover_enqueue_list(handover, elsewhere, false);
}

static void send(sky_satellite *satellite, uint32_t request_id, sky_us now) {
    sky_handover *handover = satellite->handover;
    sky_leaving_chunk found[SKY_BURST_CHUNKS];
    uint32_t gone[SKY_BURST_CHUNKS], found_count = 0, gone_count = 0;
    sky_sweep_hold_back(satellite, request_id, now);
    sky_burst *burst = sky_handover_burst(handover, request_id);
    if (burst == NULL) {
        return;
    }
    const uint32_t destination = burst->destination;
    for (uint32_t i = 0; i < burst->count; i++) {
        const sky_departure *departure = sky_departure_of(handover, burst->departures[i]);
        const uint32_t chunk = sky_memory_find(&satellite->memory, departure->key, departure->index);
        if (chunk == 0U) {
            gone[gone_count++] = burst->departures[i];
        } else {
            found[found_count].chunk = chunk;
            found[found_count++].replica =
                departure->copy == SKY_AS_IT_IS ? replica_of(satellite, chunk) : (uint8_t)departure->copy;
        }
    }
    for (uint32_t i = 0; i < gone_count && burst != NULL; i++) {
        sky_handover_forget(handover, burst, gone[i]);
        burst = sky_handover_burst(handover, request_id);
    }
    if (found_count != 0U) {
        sky_send_migrate(&satellite->outbox, destination, request_id, found, found_count, now);
    }
}

void sky_migration_send_due(sky_satellite *satellite, sky_us now) {
    sky_handover *handover = satellite->handover;
    const sky_us late = sky_lateness_at(&satellite->lateness, now);
    uint32_t count;
    if (handover->left_out && now >= handover->replan) {
        handover->moved = true;
    }
    if (handover->moved && now >= plan_from(satellite->migration)) {
        plan(satellite, now);
    }
    enqueue_strays(satellite, now);
    /* Again: a burst that is held back leaves room in the window. */
    while ((count = sky_handover_bursts_to_send(handover, satellite->migration->due, late, now)) != 0U) {
        for (uint32_t i = 0; i < count; i++) {
            send(satellite, satellite->migration->due[i], now);
        }
    }
}

void sky_migration_delete_copied(sky_satellite *satellite, sky_us now) {
    sky_handover *handover = satellite->handover;
    uint32_t due = sky_handover_to_delete(handover, now), id;
    while ((id = sky_handover_pop(handover, &due)) != 0U) {
        const sky_departure *departure = sky_departure_of(handover, id);
        const uint32_t chunk = sky_memory_find(&satellite->memory, departure->key, departure->index);
        uint32_t home;
        if (chunk != 0U && is_away(satellite, chunk, &home)) {
            sky_memory_remove(&satellite->memory, chunk, SKY_MIGRATED_OUT);
        }
        sky_handover_release(handover, id);
    }
}

/* --- Answers --- */

static bool is_selected(const sky_selection *selection, uint32_t index) {
    const uint32_t distance = index - selection->first;
    if (index < selection->first || distance % selection->stride != 0U) {
        return false;
    }
    const uint32_t step = distance / selection->stride;
    return step < selection->count && (selection->bitmap[step / 8U] >> (step % 8U) & 1U) != 0U;
}

bool sky_migration_acknowledged(sky_satellite *satellite, const sky_header *header, const uint8_t *body, size_t bytes,
                                sky_us now) {
    sky_handover *handover = satellite->handover;
    sky_selection selection;
    uint32_t arrived[SKY_BURST_CHUNKS], count = 0;
    sky_burst *burst = sky_handover_burst(handover, header->request_id);
    if (burst == NULL || (header->source & 0xFFFFFFU) != burst->destination) {
        return true; /* nobody was asked, or another satellite */
    }
    if (header->status != SKY_OK) {
        sky_handover_refused(handover, header->request_id, true, now);
        return true;
    }
    if (!sky_selection_parse(body, bytes, &selection)) {
        return false;
    }
    /* The echo says which transmission was acknowledged: the first or a later one. */
    const uint32_t elapsed = (uint32_t)((uint64_t)now & UINT32_MAX) - header->timestamp_us;
    sky_handover_heard(handover, burst, elapsed != 0U && elapsed < SANE_ROUND_TRIP_US ? now - (sky_us)elapsed : 0, now);
    for (uint32_t i = 0; i < burst->count; i++) {
        const sky_departure *departure = sky_departure_of(handover, burst->departures[i]);
        if (memcmp(departure->key, selection.key, SKY_KEY_BYTES) == 0 && is_selected(&selection, departure->index)) {
            arrived[count++] = burst->departures[i];
        }
    }
    for (uint32_t i = 0; i < count; i++) {
        sky_handover_arrived(handover, burst, arrived[i], now);
    }
    if (burst->count == 0U) {
        sky_handover_end(handover, burst);
    }
    sky_count(&satellite->counters, SKY_chunks_migrated_out, count);
    if (count != 0U) {
        sky_retention_handed_over(satellite, header->source & 0xFFFFFFU, selection.key, now);
    }
    return true;
}

bool sky_migration_unreachable(sky_satellite *satellite, const sky_header *header, const uint8_t *body, size_t bytes,
                               sky_us now) {
    (void)body;
    (void)bytes;
    sky_count(&satellite->counters, SKY_packets_unroutable, 1);
    sky_handover_refused(satellite->handover, header->request_id, false, now);
    return true;
}
