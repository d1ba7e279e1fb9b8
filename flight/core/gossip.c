#include "gossip.h"

#include <string.h>

#include "checks.h"
#include "handover.h"

/* A notice is at most this old: it is held back for 0.05 s and crosses the box. A writer repeats its RETAIN each half second,
 * so what it is still writing is younger, too. */
#define OLDEST_NOTICE_US 1000000
#define REMEMBERED_NOTICES 4096U
#define MOST_GROUND_HOSTS 8U

/* A rectangle of satellites: rows and columns to each side of `centre`. */
typedef struct {
    uint32_t centre;
    uint16_t north, south, west, east;
    bool announced; /* of handle_timer: this entry is done */
} sky_region;

struct sky_gossip {
    sky_us due;
    uint32_t number;
    sky_keymap seen; /* notices: origin and number, zeros */
    sky_region *regions; /* scratch, by entry of the memory's `evicted` */
    uint32_t doubtful, last_doubtful; /* cases to be proved now */
    uint8_t *body;   /* of the NOTICE that is being made */
    uint8_t *ground; /* and of the GONE */
};

#define BODY_BYTES (SKY_NOTICE_HEAD + SKY_MOST_DEAD * SKY_DEAD_BYTES)
#define GROUND_BYTES (SKY_LIST_HEAD + SKY_MOST_DEAD * SKY_DEAD_BYTES)

sky_gossip *sky_gossip_new(sky_arena *arena, const sky_config *config, sky_us now) {
    sky_keymap counted;
    (void)memset(&counted, 0, sizeof counted);
    sky_gossip *gossip = sky_take(arena, 1, sizeof *gossip);
    sky_region *regions = sky_take_shared(arena, config->gossip ? config->most_evicted + 1U : 1U, sizeof *regions);
    uint8_t *body = sky_take_shared(arena, BODY_BYTES, 1);
    uint8_t *ground = sky_take_shared(arena, GROUND_BYTES, 1);
    const bool whole = sky_keymap_new(gossip != NULL ? &gossip->seen : &counted, arena, REMEMBERED_NOTICES);
    if (gossip == NULL || regions == NULL || body == NULL || ground == NULL || !whole) {
        return NULL;
    }
    gossip->regions = regions;
    gossip->body = body;
    gossip->ground = ground;
    gossip->due = SKY_NEVER;
    /* A restarted satellite must not repeat numbers that others have seen of it. */
    gossip->number = (uint32_t)((uint64_t)(now / 1000) & UINT32_MAX);
    return gossip;
}

static bool has_copies(const sky_satellite *satellite) { return satellite->config.replicas > 1U; }

/* By how many rows and columns chunks may be off their box: one while a handover is under way. */
static uint32_t margin(const sky_satellite *satellite) { return sky_handover_at_rest(satellite) ? 0U : 1U; }

static void dead_of(const uint8_t *ref, uint8_t dead[SKY_DEAD_BYTES]) {
    (void)memcpy(dead, ref, SKY_KEY_BYTES);
    sky_ref_setting(ref, dead + SKY_KEY_BYTES);
}

/* --- Dropping dead values: also for the sweep --- */

bool sky_gossip_purge(sky_satellite *satellite, const uint8_t *dead, sky_us now) {
    if (sky_history_was_written_since(&satellite->history, dead, now - OLDEST_NOTICE_US)) {
        return false;
    }
    sky_count(&satellite->counters, SKY_chunks_purged,
              sky_memory_remove_setting(&satellite->memory, dead, dead + SKY_KEY_BYTES, SKY_EVICTED_FOR_ROOM));
    if (has_copies(satellite)) {
        sky_history_dropped(&satellite->history, dead, 1);
    }
    return true;
}

bool sky_gossip_notify_ground(sky_satellite *satellite, const uint8_t *dead, uint32_t count, sky_us now) {
    uint8_t *body = satellite->gossip->ground;
    const size_t bytes = (size_t)count * SKY_DEAD_BYTES;
    sky_records_head(body, count);
    (void)memcpy(body + SKY_LIST_HEAD, dead, bytes);
    return sky_notify_ground(&satellite->outbox, SKY_GONE, body, SKY_LIST_HEAD + bytes, MOST_GROUND_HOSTS, now) != 0U;
}

/* --- Regions, and the way of a notice --- */

static bool holds(const sky_notice *area, sky_torus torus, uint32_t place) {
    const uint32_t row = sky_modulo((int64_t)sky_plane_of(place) - (int64_t)sky_plane_of(area->centre) + area->north,
                                    torus.planes);
    const uint32_t column = sky_modulo((int64_t)sky_slot_of(place) - (int64_t)sky_slot_of(area->centre) + area->west,
                                       torus.slots);
    return row <= (uint32_t)area->north + area->south && column <= (uint32_t)area->west + area->east;
}

/* Where the other chunks of an evicted one are: the box of its placement, or one plane of it. */
static sky_region region_of(const sky_satellite *satellite, const uint8_t *ref) {
    sky_region region = {satellite->here, 0, 0, 0, 0, false};
    const uint8_t *tag = ref + SKY_REF_TAG_AT;
    const sky_moves set = {sky_load32s(ref + SKY_REF_MOVES_AT), sky_load32s(ref + SKY_REF_MOVES_AT + 4)};
    const sky_layout *layout = sky_layout_of(satellite->locator.placements, tag[4], sky_load16(tag));
    const uint16_t more = (uint16_t)margin(satellite);
    if (layout != NULL) {
        const sky_box box = layout->box;
        const bool one_plane = satellite->config.plane_only;
        region.centre = sky_centre_of(satellite->locator.placements, layout, set, satellite->locator.moves);
        region.north = (uint16_t)((one_plane ? 0U : box.north) + more);
        region.south = (uint16_t)((one_plane ? 0U : box.height - 1U - box.north) + more);
        region.west = (uint16_t)(box.west + more);
        region.east = (uint16_t)(box.width - 1U - box.west + more);
    }
    return region;
}

static bool is_same_region(const sky_region *a, const sky_region *b) {
    return a->centre == b->centre && a->north == b->north && a->south == b->south && a->west == b->west &&
           a->east == b->east;
}

/* Passes a notice on, with one hop less: within its rectangle to all neighbours, outside towards its centre. `source`: the
 * neighbour that it came from, or SKY_NOWHERE. The records are in gossip->body already. */
static void forward(sky_satellite *satellite, const sky_notice *notice, uint32_t source, sky_us now) {
    const sky_torus torus = satellite->locator.placements->torus;
    const uint32_t here = satellite->here;
    sky_notice passed = *notice;
    uint32_t targets[4], count = 0;
    if (notice->hops == 0U) {
        return;
    }
    passed.hops = (uint8_t)(notice->hops - 1U);
    sky_notice_build(satellite->gossip->body, &passed);
    if (holds(notice, torus, here)) {
        for (uint32_t direction = SKY_NORTH; direction <= SKY_WEST; direction++) {
            const uint32_t neighbour = sky_neighbour(torus, here, (sky_direction)direction);
            bool known = !holds(notice, torus, neighbour);
            for (uint32_t i = 0; i < count; i++) {
                known = known || targets[i] == neighbour;
            }
            if (!known) {
                targets[count++] = neighbour;
            }
        }
    } else if (notice->centre >> 24 == 0U && sky_plane_of(notice->centre) < torus.planes &&
               sky_slot_of(notice->centre) < torus.slots) {
        targets[count++] = sky_router_next(&satellite->router, sky_living(torus, notice->centre), false, SKY_NO_AXIS);
    } else {
        /* it is for a place that does not exist */
    }
    for (uint32_t i = 0; i < count; i++) {
        if (targets[i] != source && targets[i] != here) {
            sky_count(&satellite->counters, SKY_notices_sent, 1);
            sky_command(&satellite->outbox, SKY_NOTICE, targets[i], notice->number, satellite->gossip->body,
                        SKY_NOTICE_HEAD + (size_t)notice->count * SKY_DEAD_BYTES, now);
        }
    }
}

/* Whether a notice is heard of for the first time; it is remembered. */
static bool is_news(sky_gossip *gossip, uint32_t origin, uint32_t number) {
    uint8_t name[SKY_KEY_BYTES] = {0};
    sky_store32(name, origin);
    sky_store32(name + 4, number);
    if (sky_keymap_find(&gossip->seen, name) != 0U) {
        return false;
    }
    if (gossip->seen.count >= REMEMBERED_NOTICES) {
        sky_keymap_remove(&gossip->seen, gossip->seen.first);
    }
    (void)sky_keymap_add(&gossip->seen, name);
    return true;
}

/* Floods a notice of the dead values whose records are in gossip->body. */
static void begin(sky_satellite *satellite, const sky_region *region, uint32_t count, sky_us now) {
    sky_gossip *gossip = satellite->gossip;
    const uint8_t *dead = gossip->body + SKY_NOTICE_HEAD;
    /* Enough to reach the centre and cross the rectangle, and two spare. */
    const uint32_t centre = sky_living(satellite->router.torus, region->centre);
    const uint32_t hops = sky_router_away(&satellite->router, centre) + region->north + region->south + region->west +
                          region->east + 2U;
    sky_notice notice;
    gossip->number += 1U;
    (void)is_news(gossip, satellite->here, gossip->number);
    notice.origin = satellite->here;
    notice.number = gossip->number;
    notice.centre = region->centre;
    notice.north = region->north;
    notice.south = region->south;
    notice.west = region->west;
    notice.east = region->east;
    notice.hops = (uint8_t)(hops < 255U ? hops : 255U);
    notice.count = count;
    notice.dead = dead;
    notice.notified = sky_gossip_notify_ground(satellite, dead, count, now);
    forward(satellite, &notice, SKY_NOWHERE, now);
}

/* --- Evictions of this satellite --- */

void sky_gossip_gather(sky_satellite *satellite, sky_us now) {
    if (satellite->memory.evicted.count != 0U && satellite->gossip->due == SKY_NEVER) {
        satellite->gossip->due = now + satellite->config.notice_hold;
    }
}

sky_us sky_gossip_next_timer(const sky_satellite *satellite) { return satellite->gossip->due; }

static const uint8_t *evicted_ref(const sky_satellite *satellite, uint32_t entry) {
    return satellite->memory.evicted_refs + (size_t)SKY_REF_BYTES * entry;
}

/* This value is dead: drop it here, notify our ground hosts and the satellites of its box. */
static void announce(sky_satellite *satellite, const uint8_t *ref, sky_us now) {
    const sky_region region = region_of(satellite, ref);
    uint8_t *dead = satellite->gossip->body + SKY_NOTICE_HEAD;
    dead_of(ref, dead);
    (void)sky_gossip_purge(satellite, dead, now);
    begin(satellite, &region, 1, now);
}

void sky_gossip_proved(sky_satellite *satellite, const uint8_t *ref, bool lost, sky_us now) {
    if (lost) {
        announce(satellite, ref, now);
    }
}

/* The same of all values of one region that were evicted where they belong; entries not yet announced, from `first` on. */
static void announce_region(sky_satellite *satellite, uint32_t first, sky_us now) {
    sky_gossip *gossip = satellite->gossip;
    const sky_keymap *evicted = &satellite->memory.evicted;
    const sky_region region = gossip->regions[first];
    uint8_t dead[SKY_DEAD_BYTES];
    uint32_t count = 0;
    for (uint32_t entry = first; entry != 0U; entry = sky_keymap_newer(evicted, entry)) {
        if (!gossip->regions[entry].announced && is_same_region(&gossip->regions[entry], &region)) {
            dead_of(evicted_ref(satellite, entry), dead);
            (void)sky_gossip_purge(satellite, dead, now);
        }
    }
    for (uint32_t entry = first; entry != 0U; entry = sky_keymap_newer(evicted, entry)) {
        if (!gossip->regions[entry].announced && is_same_region(&gossip->regions[entry], &region)) {
            gossip->regions[entry].announced = true;
            dead_of(evicted_ref(satellite, entry), gossip->body + SKY_NOTICE_HEAD + (size_t)count * SKY_DEAD_BYTES);
            count += 1U;
            if (count == SKY_MOST_DEAD) {
                begin(satellite, &region, count, now);
                count = 0;
            }
        }
    }
    if (count != 0U) {
        begin(satellite, &region, count, now);
    }
}

/* A chunk that was evicted where it belongs is gone: announce it. One evicted elsewhere may have been handed over before:
 * have its loss proved. */
static void announce_evicted(sky_satellite *satellite, sky_us now) {
    sky_gossip *gossip = satellite->gossip;
    const sky_keymap *evicted = &satellite->memory.evicted;
    for (uint32_t entry = evicted->first; entry != 0U; entry = sky_keymap_newer(evicted, entry)) {
        const uint8_t *ref = evicted_ref(satellite, entry);
        gossip->regions[entry] = region_of(satellite, ref);
        gossip->regions[entry].announced = sky_locator_home(&satellite->locator, ref) != satellite->here;
    }
    sky_proofs_begin(satellite);
    for (uint32_t entry = evicted->first; entry != 0U; entry = sky_keymap_newer(evicted, entry)) {
        if (!gossip->regions[entry].announced) {
            announce_region(satellite, entry, now);
        }
    }
    for (uint32_t entry = evicted->first; entry != 0U; entry = sky_keymap_newer(evicted, entry)) {
        const uint8_t *ref = evicted_ref(satellite, entry);
        if (sky_locator_home(&satellite->locator, ref) != satellite->here) {
            const uint32_t index = sky_ref_index(ref);
            sky_proofs_add(satellite, ref, &index, 1, SKY_FOR_GOSSIP, now);
        }
    }
    sky_proofs_send(satellite, now);
}

/* --- With copies: another satellite may have it --- */

/* A share of this case is whole nowhere: have the loss proved, once for each value. */
static void doubt(sky_satellite *satellite, uint32_t id, uint32_t server) {
    sky_questions *questions = &satellite->checks->questions;
    sky_gossip *gossip = satellite->gossip;
    sky_case *of = sky_case_of(questions, id);
    uint32_t index;
    if (of->doubted || sky_missing(satellite, of->ref, server, &index, 1) == 0U) {
        return;
    }
    of->doubted = true;
    of->doubtful = (uint16_t)server;
    of->references += 1U; /* the list's */
    of->next = 0;
    if (gossip->last_doubtful != 0U) {
        sky_case_of(questions, gossip->last_doubtful)->next = id;
    } else {
        gossip->doubtful = id;
    }
    gossip->last_doubtful = id;
}

static void prove_doubtful(sky_satellite *satellite, sky_us now) {
    sky_questions *questions = &satellite->checks->questions;
    sky_gossip *gossip = satellite->gossip;
    if (gossip->doubtful == 0U) {
        return;
    }
    sky_proofs_begin(satellite);
    uint32_t id = gossip->doubtful;
    gossip->doubtful = 0;
    gossip->last_doubtful = 0;
    while (id != 0U) {
        sky_case *of = sky_case_of(questions, id);
        const uint32_t next = of->next;
        uint32_t missing[SKY_MOST_CHECKS];
        const uint32_t count = sky_missing(satellite, of->ref, of->doubtful, missing, SKY_MOST_CHECKS);
        sky_proofs_add(satellite, of->ref, missing, count, SKY_FOR_GOSSIP, now);
        of->references -= 1U;
        sky_case_give_back(questions, id);
        id = next;
    }
    sky_proofs_send(satellite, now);
}

void sky_gossip_checked(sky_satellite *satellite, const sky_question *question, const uint8_t *found, bool same_moves,
                     sky_us now) {
    sky_questions *questions = &satellite->checks->questions;
    uint32_t entry = question->first;
    for (uint32_t i = 0; i < question->count; i++) {
        sky_subject *subject = sky_subject_of(questions, questions->asked[entry - 1U].subject);
        entry = questions->asked[entry - 1U].next;
        subject->left -= found[i] != SKY_WHOLE && same_moves ? 1 : 0;
        if (subject->left == 0) {
            doubt(satellite, subject->of_case, subject->server);
        }
    }
    prove_doubtful(satellite, now);
}

/* Asks for the loss of values with a share that is whole in no copy. A satellite that does not answer is taken to have its
 * copy. */
static void ask_others(sky_satellite *satellite, const uint8_t *ref, sky_us now) {
    sky_checks *checks = satellite->checks;
    sky_questions *questions = &checks->questions;
    const sky_moves before = satellite->locator.before;
    uint32_t places[SKY_MOST_PLACES];
    const uint32_t count = sky_replicas_not_whole(satellite, ref, true);
    const uint32_t id = count != 0U ? sky_case_begin(questions, ref, SKY_FOR_GOSSIP, now) : 0U;
    for (uint32_t i = 0; i < count && id != 0U; i++) {
        uint8_t setting[SKY_SETTING_BYTES];
        const sky_check check = sky_check_of(ref, checks->servers[i], setting);
        const uint32_t others = sky_replicas_others(satellite, ref, check.server,
                                                    margin(satellite) != 0U ? &before : NULL, places);
        const uint32_t subject = others != 0U ? sky_subject_begin(questions, &check, id) : 0U;
        if (others == 0U) {
            doubt(satellite, id, check.server);
        }
        if (subject != 0U) {
            sky_subject_of(questions, subject)->left = (int32_t)others;
        }
        for (uint32_t at = 0; at < others && subject != 0U; at++) {
            (void)sky_batch_ask(questions, &questions->others, places[at], subject);
        }
    }
    if (id != 0U) {
        sky_case_give_back(questions, id);
    }
}

void sky_gossip_handle_timer(sky_satellite *satellite, sky_us now) {
    sky_keymap *evicted = &satellite->memory.evicted;
    if (now < satellite->gossip->due) {
        return;
    }
    satellite->gossip->due = SKY_NEVER;
    if (has_copies(satellite)) {
        for (uint32_t entry = evicted->first; entry != 0U; entry = sky_keymap_newer(evicted, entry)) {
            ask_others(satellite, evicted_ref(satellite, entry), now);
        }
        prove_doubtful(satellite, now);
        sky_batch_send(satellite, &satellite->checks->questions.others, SKY_FOR_GOSSIP, SKY_ANSWER_US, now);
    } else {
        announce_evicted(satellite, now);
    }
    while (evicted->first != 0U) {
        sky_keymap_remove(evicted, evicted->first);
    }
}

/* --- Notices of others --- */

bool sky_gossip_receive(sky_satellite *satellite, const sky_header *header, const uint8_t *body, size_t bytes,
                        sky_us now) {
    sky_keymap *evicted = &satellite->memory.evicted;
    uint8_t *records = satellite->gossip->body + SKY_NOTICE_HEAD;
    sky_notice notice;
    uint32_t dropped = 0;
    if (!sky_notice_parse(body, bytes, &notice) || header->ground != 0U || header->source >> 24 != 0U) {
        return false; /* only satellites know what they evict */
    }
    notice.centre &= 0xFFFFFFU;
    if (!is_news(satellite->gossip, notice.origin, notice.number)) {
        sky_count(&satellite->counters, SKY_notices_repeated, 1);
        return true;
    }
    for (uint32_t i = 0; i < notice.count; i++) {
        const uint8_t *dead = notice.dead + (size_t)i * SKY_DEAD_BYTES;
        if (sky_gossip_purge(satellite, dead, now)) {
            (void)memcpy(records + (size_t)dropped * SKY_DEAD_BYTES, dead, SKY_DEAD_BYTES);
            dropped += 1U;
        }
    }
    for (uint32_t i = 0; i < notice.count; i++) { /* announced already: we need not */
        const uint8_t *dead = notice.dead + (size_t)i * SKY_DEAD_BYTES;
        const uint32_t entry = satellite->memory.record_evicted ? sky_keymap_find(evicted, dead) : 0U;
        if (entry != 0U && sky_ref_has_setting(evicted_ref(satellite, entry), dead + SKY_KEY_BYTES)) {
            sky_keymap_remove(evicted, entry);
        }
    }
    notice.notified = notice.notified ||
                      (dropped != 0U && sky_gossip_notify_ground(satellite, records, dropped, now));
    (void)memcpy(records, notice.dead, (size_t)notice.count * SKY_DEAD_BYTES);
    forward(satellite, &notice, header->source & 0xFFFFFFU, now);
    return true;
}
