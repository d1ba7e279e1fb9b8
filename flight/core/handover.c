#include "handover.h"

#include <string.h>

#include "store/hash.h"

#define SPREAD_PS 200000000000LL      /* when the last burst after a move is sent, if the usual pace allows */
#define SPREAD_SHARE_PS_IN_US 800000LL /* picoseconds for bursts in each microsecond between moves: 80 % */
#define MOST_GAP_PS 10000000000LL     /* longest gap: a few bursts need not take all the time there is */
#define GROUP_PS 8000000000LL         /* bursts that would leave more often than this leave together, */
#define MOST_GROUPED 4                /* up to this many */
#define MOST_REQUEST_ID 0x3FFFFFFFU /* other questions have the ids above: an UNREACHABLE for one of them must end no burst */
#define PS 1000000LL                  /* picoseconds in a microsecond */
#define MOST_ATTEMPTS 12U
#define RETRY_US 10000000LL
#define LEFT_OUT_US 1000000LL /* until what a full pool left out is planned again */
#define MOST_RETRY_US 160000000LL
#define DELETED_TOGETHER_US 50000LL
#define MOST_TIMEOUT_US 2000000LL
#define TARGET_DELAY_US 500000LL /* queueing delay of an answer above which fewer bursts are in flight */
#define MOST_DECREASE 16
#define ONE (INT64_C(1) << 32) /* of the window */
#define LEAST_WINDOW (2 * ONE)
#define LONGEST_TRIP_US 1000000000LL
/* Multiples of the golden ratio, in 1 / 2^52, keep the satellites of a row or column apart, whatever their number. */
#define GOLDEN UINT64_C(2783377641436328)
#define GOLDEN_SQUARED UINT64_C(1720221985934168)
#define PHASES (UINT64_C(1) << 52)

/* --- The pool of departures: found by key and index, so that all copies of a chunk are in one chain --- */

static bool is_named(const sky_departure *departure, const uint8_t *key, uint32_t index) {
    return departure->index == index && memcmp(departure->key, key, 32) == 0;
}

static uint32_t *bucket_of(const sky_handover *handover, const uint8_t *key, uint32_t index) {
    return &handover->buckets[sky_hash_key(handover->hash_seed, key, index) & handover->bucket_mask];
}

uint32_t sky_handover_find(const sky_handover *handover, const uint8_t *key, uint32_t index, int32_t copy) {
    uint32_t id = *bucket_of(handover, key, index);
    while (id != 0U && !(sky_departure_of(handover, id)->copy == copy && is_named(sky_departure_of(handover, id), key, index))) {
        id = sky_departure_of(handover, id)->chain;
    }
    return id;
}

static void leave_out(sky_handover *handover) {
    handover->left_out = true;
    handover->pools_full += 1U;
}

/* The departure of this name, perhaps a new one; 0: the pool is full, and the chunk is left out. */
static uint32_t obtain(sky_handover *handover, const uint8_t *key, uint32_t index, int32_t copy) {
    uint32_t id = sky_handover_find(handover, key, index, copy);
    if (id != 0U) {
        return id;
    }
    id = handover->free_departure;
    if (id != 0U) {
        handover->free_departure = sky_departure_of(handover, id)->chain;
    } else if (handover->used_departures < handover->most_departures) {
        id = ++handover->used_departures;
    } else {
        leave_out(handover);
        return 0;
    }
    sky_departure *departure = sky_departure_of(handover, id);
    uint32_t *bucket = bucket_of(handover, key, index);
    (void)memset(departure, 0, sizeof *departure);
    (void)memcpy(departure->key, key, 32);
    departure->index = index;
    departure->copy = copy;
    departure->stray = SKY_NEVER;
    departure->deletion = SKY_NEVER;
    departure->used = true;
    departure->chain = *bucket;
    *bucket = id;
    return id;
}

/* Frees a departure that nothing speaks of any more. */
static void tidy(sky_handover *handover, uint32_t id) {
    sky_departure *departure = sky_departure_of(handover, id);
    if (!departure->used || departure->references != 0U || departure->flights != 0U || departure->queued ||
        departure->renamed != 0U || departure->stray != SKY_NEVER || departure->deletion != SKY_NEVER ||
        departure->unanswered != 0U) {
        return;
    }
    uint32_t *link = bucket_of(handover, departure->key, departure->index);
    while (*link != id) {
        link = &sky_departure_of(handover, *link)->chain;
    }
    *link = departure->chain;
    departure->used = false;
    departure->chain = handover->free_departure;
    handover->free_departure = id;
}

void sky_handover_release(sky_handover *handover, uint32_t id) {
    sky_departure_of(handover, id)->references -= 1U;
    tidy(handover, id);
}

/* --- Passing lists of departures: each entry has a reference --- */

void sky_handover_push(sky_handover *handover, uint32_t *list, uint32_t id) {
    sky_departure_of(handover, id)->references += 1U;
    sky_departure_of(handover, id)->listed = *list;
    *list = id;
}

void sky_handover_append(sky_handover *handover, uint32_t *list, uint32_t *last, uint32_t id) {
    sky_departure_of(handover, id)->listed = 0;
    if (*last != 0U) {
        sky_departure_of(handover, *last)->listed = id;
    } else {
        *list = id;
    }
    *last = id;
}

uint32_t sky_handover_pop(sky_handover *handover, uint32_t *list) {
    const uint32_t id = *list;
    if (id != 0U) {
        *list = sky_departure_of(handover, id)->listed;
        sky_departure_of(handover, id)->listed = 0;
    }
    return id;
}

typedef enum { BY_NAME, BY_HOME, BY_KEY, BY_RANK } sky_order;

static int by_number(int64_t a, int64_t b) { return (a > b) - (a < b); }

static int by_name(const sky_departure *a, const sky_departure *b) {
    int order = memcmp(a->key, b->key, 32);
    order = order != 0 ? order : by_number(a->index, b->index);
    return order != 0 ? order : by_number(a->copy, b->copy);
}

static int compare(const sky_departure *a, const sky_departure *b, sky_order by) {
    int order = 0;
    switch (by) {
    case BY_NAME:
        return by_name(a, b);
    case BY_HOME:
        order = by_number(a->home, b->home);
        return order != 0 ? order : by_number(a->position, b->position);
    case BY_KEY:
        order = by_number(a->rank_home, b->rank_home);
        order = order != 0 ? order : memcmp(a->key, b->key, 32);
        return order != 0 ? order : by_number(a->position, b->position);
    case BY_RANK:
    default:
        order = by_number(a->rank_home, b->rank_home);
        order = order != 0 ? order : by_number(a->rank_key, b->rank_key);
        return order != 0 ? order : by_name(a, b);
    }
}

/* Merge sort of a list, from runs of one upward: no recursion, no room beside the list. */
static uint32_t sorted(sky_handover *handover, uint32_t list, sky_order by) {
    for (uint32_t width = 1;; width *= 2U) {
        uint32_t rest = list, last = 0, merges = 0;
        list = 0;
        while (rest != 0U) {
            uint32_t left = rest, right = rest, left_count = 0, right_count = width;
            merges += 1U;
            while (right != 0U && left_count < width) {
                left_count += 1U;
                right = sky_departure_of(handover, right)->listed;
            }
            while (left_count > 0U || (right_count > 0U && right != 0U)) {
                uint32_t next;
                const bool none_right = right_count == 0U || right == 0U;
                if (none_right || (left_count > 0U && compare(sky_departure_of(handover, left),
                                                              sky_departure_of(handover, right), by) <= 0)) {
                    next = left;
                    left = sky_departure_of(handover, left)->listed;
                    left_count -= 1U;
                } else {
                    next = right;
                    right = sky_departure_of(handover, right)->listed;
                    right_count -= 1U;
                }
                if (last != 0U) {
                    sky_departure_of(handover, last)->listed = next;
                } else {
                    list = next;
                }
                last = next;
            }
            rest = right;
        }
        if (last != 0U) {
            sky_departure_of(handover, last)->listed = 0;
        }
        if (merges <= 1U) {
            return list;
        }
    }
}

/* --- The queue --- */

static bool append(sky_handover *handover, uint32_t id, uint32_t destination, bool begins_burst) {
    uint32_t place = handover->free_place;
    if (place != 0U) {
        handover->free_place = handover->places[place - 1U].next;
    } else if (handover->used_places < handover->most_departures) {
        place = ++handover->used_places;
    } else {
        leave_out(handover);
        return false;
    }
    const sky_queue_place filled = {id, destination, 0, begins_burst};
    handover->places[place - 1U] = filled;
    if (handover->last_place != 0U) {
        handover->places[handover->last_place - 1U].next = place;
    } else {
        handover->first_place = place;
    }
    handover->last_place = place;
    handover->queued_bursts += begins_burst ? 1U : 0U;
    sky_departure_of(handover, id)->references += 1U;
    sky_departure_of(handover, id)->queued = true;
    return true;
}

/* Takes the first place out of the queue; its departure keeps the reference. */
static uint32_t take_place(sky_handover *handover) {
    const uint32_t place = handover->first_place;
    sky_queue_place *taken = &handover->places[place - 1U];
    handover->first_place = taken->next;
    handover->last_place = taken->next != 0U ? handover->last_place : 0U;
    handover->queued_bursts -= taken->begins_burst ? 1U : 0U;
    taken->next = handover->free_place;
    handover->free_place = place;
    return taken->departure;
}

void sky_handover_enqueue_list(sky_handover *handover, uint32_t list, bool by_address) {
    uint32_t waiting = 0, last = 0, position = 0, id;
    while ((id = sky_handover_pop(handover, &list)) != 0U) {
        sky_departure *departure = sky_departure_of(handover, id);
        if (departure->queued) {
            sky_handover_release(handover, id);
            continue;
        }
        departure->position = position++;
        departure->rank_home = departure->home;
        departure->rank_key = 0;
        sky_handover_append(handover, &waiting, &last, id);
    }
    if (!by_address) { /* ranks: where the list has the first of a home, and of a key for it */
        waiting = sorted(handover, waiting, BY_HOME);
        const sky_departure *first = NULL;
        for (id = waiting; id != 0U; id = sky_departure_of(handover, id)->listed) {
            sky_departure *departure = sky_departure_of(handover, id);
            first = first != NULL && first->home == departure->home ? first : departure;
            departure->rank_home = first->position;
        }
        waiting = sorted(handover, waiting, BY_KEY);
        first = NULL;
        for (id = waiting; id != 0U; id = sky_departure_of(handover, id)->listed) {
            sky_departure *departure = sky_departure_of(handover, id);
            const bool same = first != NULL && first->home == departure->home &&
                              memcmp(first->key, departure->key, 32) == 0;
            first = same ? first : departure;
            departure->rank_key = first->position;
        }
    }
    waiting = sorted(handover, waiting, BY_RANK);
    uint32_t in_burst = 0;
    const sky_departure *before = NULL;
    while ((id = sky_handover_pop(handover, &waiting)) != 0U) {
        const sky_departure *departure = sky_departure_of(handover, id);
        const bool same = before != NULL && before->home == departure->home &&
                          memcmp(before->key, departure->key, 32) == 0 && in_burst < SKY_BURST_CHUNKS;
        if (append(handover, id, departure->home, !same)) {
            in_burst = same ? in_burst + 1U : 1U;
            before = departure;
        }
        sky_handover_release(handover, id);
    }
}

void sky_handover_enqueue(sky_handover *handover, uint32_t destination, const uint8_t *key, uint32_t index, int32_t copy,
                          uint32_t *in_burst) {
    handover->some_leave_as_others = handover->some_leave_as_others || copy != SKY_AS_IT_IS;
    const uint32_t id = obtain(handover, key, index, copy);
    if (id == 0U) {
        return;
    }
    if (!sky_departure_of(handover, id)->queued && append(handover, id, destination, *in_burst % SKY_BURST_CHUNKS == 0U)) {
        *in_burst += 1U;
    }
    tidy(handover, id);
}

/* --- Astray: a binary heap, the next to be examined first --- */

static bool is_sooner(const sky_departure *a, const sky_departure *b) {
    return a->stray != b->stray ? a->stray < b->stray : by_name(a, b) < 0;
}

static void put(sky_handover *handover, uint32_t at, uint32_t id) {
    handover->heap[at] = id;
    sky_departure_of(handover, id)->heap_at = at;
}

static void settle(sky_handover *handover, uint32_t at) {
    const uint32_t id = handover->heap[at];
    const sky_departure *departure = sky_departure_of(handover, id);
    while (at > 1U && is_sooner(departure, sky_departure_of(handover, handover->heap[at / 2U]))) {
        put(handover, at, handover->heap[at / 2U]);
        at /= 2U;
    }
    for (uint32_t below = 2U * at; below <= handover->strays; below = 2U * at) {
        if (below < handover->strays && is_sooner(sky_departure_of(handover, handover->heap[below + 1U]),
                                                  sky_departure_of(handover, handover->heap[below]))) {
            below += 1U;
        }
        if (!is_sooner(sky_departure_of(handover, handover->heap[below]), departure)) {
            break;
        }
        put(handover, at, handover->heap[below]);
        at = below;
    }
    put(handover, at, id);
}

static void found_again(sky_handover *handover, uint32_t id) { /* it is astray no longer */
    sky_departure *departure = sky_departure_of(handover, id);
    if (departure->stray == SKY_NEVER) {
        return;
    }
    const uint32_t at = departure->heap_at, moved = handover->heap[handover->strays];
    departure->stray = SKY_NEVER;
    departure->heap_at = 0;
    handover->strays -= 1U;
    if (moved != id) {
        put(handover, at, moved);
        settle(handover, at);
    }
}

void sky_handover_stray(sky_handover *handover, const uint8_t *key, uint32_t index, int32_t copy, sky_us due) {
    const uint32_t id = obtain(handover, key, index, copy);
    if (id == 0U) {
        return;
    }
    sky_departure *departure = sky_departure_of(handover, id);
    if (departure->stray == SKY_NEVER && !departure->queued) {
        handover->some_leave_as_others = handover->some_leave_as_others || copy != SKY_AS_IT_IS;
        departure->stray = due;
        handover->strays += 1U;
        put(handover, handover->strays, id);
        settle(handover, handover->strays);
    }
    tidy(handover, id);
}

static void answer_is_known(sky_handover *handover, uint32_t id) {
    sky_departure *departure = sky_departure_of(handover, id);
    handover->unanswered -= departure->unanswered != 0U ? 1U : 0U;
    departure->unanswered = 0;
}

static void retry(sky_handover *handover, sky_us now);

uint32_t sky_handover_strays_due(sky_handover *handover, sky_us now) {
    uint32_t list = 0, last = 0;
    if (handover->retry_waits) {
        retry(handover, now);
    }
    while (handover->strays > 0U && sky_departure_of(handover, handover->heap[1])->stray <= now) {
        const uint32_t id = handover->heap[1];
        sky_departure_of(handover, id)->references += 1U;
        found_again(handover, id);
        answer_is_known(handover, id);
        sky_handover_append(handover, &list, &last, id);
    }
    return list;
}

/* --- Copied: in the order of their deletion, since the grace period is constant --- */

static void end_copied(sky_handover *handover, uint32_t id) {
    sky_departure *departure = sky_departure_of(handover, id);
    if (departure->deletion == SKY_NEVER) {
        return;
    }
    if (departure->older != 0U) {
        sky_departure_of(handover, departure->older)->newer = departure->newer;
    } else {
        handover->oldest_copied = departure->newer;
    }
    if (departure->newer != 0U) {
        sky_departure_of(handover, departure->newer)->older = departure->older;
    } else {
        handover->newest_copied = departure->older;
    }
    departure->older = 0;
    departure->newer = 0;
    departure->deletion = SKY_NEVER;
}

static void begin_copied(sky_handover *handover, uint32_t id, sky_us deletion) {
    sky_departure *departure = sky_departure_of(handover, id);
    end_copied(handover, id);
    departure->deletion = deletion;
    departure->older = handover->newest_copied;
    if (handover->newest_copied != 0U) {
        sky_departure_of(handover, handover->newest_copied)->newer = id;
    } else {
        handover->oldest_copied = id;
    }
    handover->newest_copied = id;
}

static bool leaves_as_other(const sky_departure *departure) {
    return departure->used && departure->copy != SKY_AS_IT_IS &&
           (departure->queued || departure->stray != SKY_NEVER || departure->flights != 0U);
}

/* Whether any copy of this chunk has yet to leave as another one. */
static bool other_copy_leaves(const sky_handover *handover, const sky_departure *copied) {
    uint32_t id = *bucket_of(handover, copied->key, copied->index);
    while (id != 0U && !(leaves_as_other(sky_departure_of(handover, id)) &&
                         is_named(sky_departure_of(handover, id), copied->key, copied->index))) {
        id = sky_departure_of(handover, id)->chain;
    }
    return id != 0U;
}

/* All chunks that leave as another copy, listed and sorted; and whether there are any is noted. */
static uint32_t leaving_as_others(sky_handover *handover) {
    uint32_t list = 0;
    if (handover->some_leave_as_others) {
        for (uint32_t id = 1; id <= handover->used_departures; id++) {
            if (leaves_as_other(sky_departure_of(handover, id))) {
                sky_handover_push(handover, &list, id);
            }
        }
        handover->some_leave_as_others = list != 0U;
    }
    return sorted(handover, list, BY_NAME);
}

uint32_t sky_handover_to_delete(sky_handover *handover, sky_us now) {
    uint32_t list = 0, last = 0, id;
    bool any = false;
    while ((id = handover->oldest_copied) != 0U && sky_departure_of(handover, id)->deletion <= now) {
        sky_departure *departure = sky_departure_of(handover, id);
        any = true;
        if (handover->some_leave_as_others && other_copy_leaves(handover, departure)) {
            begin_copied(handover, id, now + handover->grace);
            continue;
        }
        end_copied(handover, id);
        departure->references += 1U;
        sky_handover_append(handover, &list, &last, id);
    }
    if (any && handover->some_leave_as_others) {
        bool some = false;
        for (id = 1; id <= handover->used_departures && !some; id++) {
            some = leaves_as_other(sky_departure_of(handover, id));
        }
        handover->some_leave_as_others = some;
    }
    return list;
}

/* --- Back-offs --- */

static sky_back_off *back_off_of(const sky_handover *handover, uint32_t id) { return &handover->back_offs[id - 1U]; }

static uint32_t *find_back_off(const sky_handover *handover, uint32_t destination, const uint8_t *key) {
    uint32_t *link = &handover->back_off_buckets[sky_hash_key(handover->hash_seed, key, destination) & handover->back_off_mask];
    while (*link != 0U && !(back_off_of(handover, *link)->destination == destination &&
                            memcmp(back_off_of(handover, *link)->key, key, 32) == 0)) {
        link = &back_off_of(handover, *link)->chain;
    }
    return link;
}

static void forget_back_offs(sky_handover *handover) {
    if (handover->used_back_offs != 0U) {
        (void)memset(handover->back_off_buckets, 0, ((size_t)handover->back_off_mask + 1U) * sizeof(uint32_t));
    }
    handover->used_back_offs = 0;
    handover->free_back_off = 0;
    handover->back_off_count = 0;
}

static void forget_back_off(sky_handover *handover, uint32_t destination, const uint8_t *key) {
    uint32_t *link = find_back_off(handover, destination, key);
    const uint32_t id = *link;
    if (id != 0U) {
        *link = back_off_of(handover, id)->chain;
        back_off_of(handover, id)->chain = handover->free_back_off;
        handover->free_back_off = id;
        handover->back_off_count -= 1U;
    }
}

/* When to try a satellite again with a key; a back-off that is over is followed by one twice as long. */
static sky_us back_off(sky_handover *handover, uint32_t destination, const uint8_t *key, sky_us now) {
    uint32_t *link = find_back_off(handover, destination, key);
    sky_us wait = RETRY_US / 2;
    if (*link != 0U) {
        if (back_off_of(handover, *link)->due > now) {
            return back_off_of(handover, *link)->due;
        }
        wait = back_off_of(handover, *link)->wait;
    }
    if (handover->back_off_count >= handover->most_back_offs) {
        forget_back_offs(handover);
        link = find_back_off(handover, destination, key);
    }
    if (*link == 0U) {
        uint32_t id = handover->free_back_off;
        if (id != 0U) {
            handover->free_back_off = back_off_of(handover, id)->chain;
        } else {
            id = ++handover->used_back_offs;
        }
        (void)memcpy(back_off_of(handover, id)->key, key, 32);
        back_off_of(handover, id)->destination = destination;
        back_off_of(handover, id)->chain = 0;
        *link = id;
        handover->back_off_count += 1U;
    }
    wait = 2 * wait < MOST_RETRY_US ? 2 * wait : MOST_RETRY_US;
    back_off_of(handover, *link)->wait = wait;
    back_off_of(handover, *link)->due = now + wait;
    return now + wait;
}

static void retry(sky_handover *handover, sky_us now) {
    handover->retry_waits = handover->unanswered != 0U && !sky_throttle_is_open(&handover->retrying, now);
    if (handover->retry_waits || handover->unanswered == 0U) {
        return;
    }
    sky_throttle_done(&handover->retrying, now);
    for (uint32_t id = 1; id <= handover->used_departures && handover->unanswered != 0U; id++) {
        sky_departure *departure = sky_departure_of(handover, id);
        if (!departure->used || departure->unanswered == 0U) {
            continue;
        }
        forget_back_off(handover, departure->unanswered - 1U, departure->key);
        if (departure->stray != SKY_NEVER) {
            departure->stray = now;
            settle(handover, departure->heap_at);
        }
        answer_is_known(handover, id);
        tidy(handover, id);
    }
}

void sky_handover_retry_unanswered(sky_satellite *satellite, sky_us now) { retry(satellite->handover, now); }

/* --- The pacer --- */

static sky_us pace_open(const sky_pacer *pacer) { return pacer->base + (pacer->next_ps + PS - 1) / PS; }

void sky_handover_spread(sky_handover *handover, sky_us now, sky_us interval, bool urgent) {
    sky_pacer *pacer = &handover->pacer;
    if (pacer->usual_gap_ps == 0) {
        return;
    }
    const int64_t bursts = handover->queued_bursts > 1U ? (int64_t)handover->queued_bursts : 1;
    int64_t gap = urgent ? 0 : SPREAD_PS / bursts;
    gap = gap > pacer->usual_gap_ps ? gap : pacer->usual_gap_ps;
    if (interval < INT64_C(1000000000000)) {
        const int64_t share = interval * SPREAD_SHARE_PS_IN_US / bursts;
        gap = gap < share ? gap : share;
    }
    gap = gap < MOST_GAP_PS ? gap : MOST_GAP_PS;
    gap = gap > 1 ? gap : 1;
    const int64_t grouped = GROUP_PS / gap < MOST_GROUPED ? GROUP_PS / gap : MOST_GROUPED;
    pacer->gap_ps = gap;
    pacer->group = grouped > 1 ? (uint32_t)grouped : 1U;
    pacer->left = pacer->group;
    pacer->step_ps = gap * bursts / ((bursts + pacer->group - 1) / pacer->group);
    pacer->base = now;
    pacer->next_ps = (int64_t)(pacer->phase >> 26) * pacer->step_ps / (INT64_C(1) << 26);
}

static void paced(sky_pacer *pacer, sky_us now) { /* a burst has left */
    if (pacer->gap_ps == 0) {
        return;
    }
    pacer->left -= 1U;
    if (pacer->left != 0U) {
        return;
    }
    pacer->left = pacer->group;
    /* A timer may be late by a millisecond or two: what was missed is made up for, but never more than a group. */
    const sky_us since = now - pacer->base;
    if (since > INT64_C(1000000000) || since * PS - pacer->step_ps > pacer->next_ps) {
        pacer->base = now;
        pacer->next_ps = 0;
    } else {
        pacer->next_ps += pacer->step_ps;
        pacer->base += pacer->next_ps / PS;
        pacer->next_ps %= PS;
    }
}

static void relax(sky_pacer *pacer) {
    if (pacer->gap_ps != pacer->usual_gap_ps) {
        pacer->gap_ps = pacer->usual_gap_ps;
        pacer->step_ps = pacer->usual_gap_ps;
        pacer->group = 1;
        pacer->left = 1;
    }
}

/* --- Bursts and their answers --- */

static sky_us fresh_from(const sky_handover *handover) {
    const sky_us open = pace_open(&handover->pacer);
    return handover->fresh_from > open ? handover->fresh_from : open;
}

static uint32_t window_bursts(const sky_handover *handover) { return (uint32_t)(handover->window / ONE); }

/* Timeout of a burst in picoseconds: longer where answers came late. */
static int64_t burst_timeout_ps(const sky_handover *handover) {
    int64_t slow = 2 * handover->smoothed_ps;
    slow = slow < MOST_TIMEOUT_US * PS ? slow : MOST_TIMEOUT_US * PS;
    return slow > handover->timeout * PS ? slow : handover->timeout * PS;
}

static sky_us after(sky_us now, int64_t ps) { return now + (ps + PS - 1) / PS; }

sky_burst *sky_handover_burst(sky_handover *handover, uint32_t request_id) {
    for (uint32_t i = 0; i < handover->in_flight; i++) {
        if (handover->bursts[i].request_id == request_id) {
            return &handover->bursts[i];
        }
    }
    return NULL;
}

static void carry_no_more(sky_handover *handover, uint32_t id) {
    sky_departure_of(handover, id)->flights -= 1U;
    tidy(handover, id);
}

void sky_handover_end(sky_handover *handover, sky_burst *burst) {
    for (uint32_t i = 0; i < burst->count; i++) {
        carry_no_more(handover, burst->departures[i]);
    }
    const size_t at = (size_t)(burst - handover->bursts);
    handover->in_flight -= 1U;
    (void)memmove(burst, burst + 1, (handover->in_flight - at) * sizeof *burst);
}

static void take_out(sky_handover *handover, sky_burst *burst, uint32_t id) {
    uint32_t kept = 0;
    for (uint32_t i = 0; i < burst->count; i++) {
        if (burst->departures[i] != id) {
            burst->departures[kept++] = burst->departures[i];
        } else {
            sky_departure_of(handover, id)->flights -= 1U;
        }
    }
    burst->count = kept;
}

void sky_handover_forget(sky_handover *handover, sky_burst *burst, uint32_t id) {
    take_out(handover, burst, id);
    tidy(handover, id);
    if (burst->count == 0U) {
        sky_handover_end(handover, burst);
    }
}

void sky_handover_refused(sky_handover *handover, uint32_t request_id, bool full, sky_us now) {
    sky_burst *burst = sky_handover_burst(handover, request_id);
    if (burst == NULL) {
        return;
    }
    if (burst->count != 0U) {
        const sky_us due = back_off(handover, burst->destination, sky_departure_of(handover, burst->departures[0])->key, now);
        for (uint32_t i = 0; i < burst->count; i++) {
            sky_departure *departure = sky_departure_of(handover, burst->departures[i]);
            sky_handover_stray(handover, departure->key, departure->index, departure->copy, due);
            if (!full) {
                handover->unanswered += departure->unanswered == 0U ? 1U : 0U;
                departure->unanswered = burst->destination + 1U;
            }
        }
    }
    sky_handover_end(handover, burst);
}

/* Decides what becomes of a burst that was not answered in time; whether it is sent again. */
static bool is_sent_again(sky_handover *handover, sky_burst *burst, sky_us late, sky_us now) {
    if (late > SKY_LATE_US && !burst->spared) { /* its answer may wait in our host's queue */
        burst->spared = true;
        burst->deadline = now + late;
        return false;
    }
    if (burst->attempts == MOST_ATTEMPTS || burst->count == 0U) {
        sky_handover_refused(handover, burst->request_id, false, now);
        return false;
    }
    if (burst->plan != handover->plans) { /* planned for the box before it moved */
        for (uint32_t i = 0; i < burst->count; i++) {
            const sky_departure *departure = sky_departure_of(handover, burst->departures[i]);
            sky_handover_stray(handover, departure->key, departure->index, departure->copy, now);
        }
        sky_handover_end(handover, burst);
        return false;
    }
    if (now < pace_open(&handover->pacer)) {
        burst->deadline = pace_open(&handover->pacer);
        return false;
    }
    paced(&handover->pacer, now);
    if (handover->heard < burst->last_sent && now >= handover->cut_until) { /* no answer since it was sent */
        handover->window = handover->window / 2 > LEAST_WINDOW ? handover->window / 2 : LEAST_WINDOW;
        handover->cut_until = after(now, burst_timeout_ps(handover));
    }
    burst->last_sent = now;
    burst->deadline = after(now, burst_timeout_ps(handover) * (burst->attempts == 1U ? 2 : 4)) + 2 * late;
    burst->spared = false;
    burst->attempts += 1U;
    handover->retransmitted += burst->count;
    return true;
}

static uint32_t begin_burst(sky_handover *handover, sky_us late, sky_us now) {
    sky_burst *burst = &handover->bursts[handover->in_flight++];
    (void)memset(burst, 0, sizeof *burst);
    burst->request_id = handover->next_request_id;
    burst->destination = handover->places[handover->first_place - 1U].destination;
    burst->plan = handover->plans;
    burst->sent = now;
    burst->last_sent = now;
    burst->deadline = after(now, burst_timeout_ps(handover)) + 2 * late;
    burst->attempts = 1;
    handover->next_request_id = handover->next_request_id % MOST_REQUEST_ID + 1U;
    do {
        const uint32_t queued = take_place(handover);
        uint32_t id = queued;
        if (sky_departure_of(handover, queued)->renamed != 0U) {
            id = sky_departure_of(handover, queued)->renamed;
            sky_departure_of(handover, queued)->renamed = 0;
            sky_departure_of(handover, id)->references -= 1U;
        }
        sky_departure_of(handover, id)->flights += 1U;
        sky_departure_of(handover, id)->queued = false;
        burst->departures[burst->count++] = id;
        sky_handover_release(handover, queued);
    } while (handover->first_place != 0U && !handover->places[handover->first_place - 1U].begins_burst &&
             burst->count < SKY_BURST_CHUNKS);
    return burst->request_id;
}

uint32_t sky_handover_bursts_to_send(sky_handover *handover, uint32_t *due, sky_us late, sky_us now) {
    uint32_t count = 0;
    if (handover->left_out && handover->replan == SKY_NEVER) {
        handover->replan = now + LEFT_OUT_US;
    }
    late = late < MOST_TIMEOUT_US ? late : MOST_TIMEOUT_US;
    for (uint32_t i = 0; i < handover->in_flight;) {
        const uint32_t request_id = handover->bursts[i].request_id;
        if (handover->bursts[i].deadline <= now && is_sent_again(handover, &handover->bursts[i], late, now)) {
            due[count++] = request_id;
        }
        i += i < handover->in_flight && handover->bursts[i].request_id == request_id ? 1U : 0U; /* else it has ended */
    }
    while (handover->first_place != 0U && now >= fresh_from(handover) && handover->in_flight < window_bursts(handover)) {
        due[count++] = begin_burst(handover, late, now);
        paced(&handover->pacer, now);
    }
    if (handover->first_place == 0U) {
        relax(&handover->pacer);
    }
    return count;
}

/* Adapts the window to the queueing delay of an answer (LEDBAT): grows by up to 1 burst a window without queueing delay,
 * shrinks in proportion to the delay beyond it. */
static void adjust(sky_handover *handover, uint32_t destination, sky_us round_trip) {
    const uint32_t mask = 2U * SKY_REMEMBERED_TRIPS - 1U;
    if (handover->trip_count > SKY_REMEMBERED_TRIPS) {
        (void)memset(handover->trips, 0, 2U * SKY_REMEMBERED_TRIPS * sizeof *handover->trips);
        handover->trip_count = 0;
    }
    uint32_t at = sky_hash_word(handover->hash_seed, destination) & mask;
    while (handover->trips[at].destination != 0U && handover->trips[at].destination != destination + 1U) {
        at = (at + 1U) & mask;
    }
    sky_shortest_trip *trip = &handover->trips[at];
    if (trip->destination == 0U) {
        trip->destination = destination + 1U;
        trip->shortest = round_trip;
        handover->trip_count += 1U;
    }
    trip->shortest = trip->shortest < round_trip ? trip->shortest : round_trip;
    const sky_us delay = round_trip - trip->shortest;
    const int64_t off = delay > (MOST_DECREASE + 1) * TARGET_DELAY_US ? -MOST_DECREASE * ONE
                                                                      : ONE - delay * ONE / TARGET_DELAY_US;
    int64_t window = handover->window + off * (INT64_C(1) << 26) / (handover->window / 64);
    window = window > LEAST_WINDOW ? window : LEAST_WINDOW;
    const int64_t most = (int64_t)handover->most_bursts * ONE;
    handover->window = window < most ? window : most;
}

void sky_handover_heard(sky_handover *handover, sky_burst *burst, sky_us sent, sky_us now) {
    sky_us round_trip = now - (burst->sent > sent ? burst->sent : sent);
    round_trip = round_trip < LONGEST_TRIP_US ? round_trip : LONGEST_TRIP_US;
    handover->heard = now;
    if (handover->measured) {
        handover->smoothed_ps += (round_trip * PS - handover->smoothed_ps) / 8;
    } else {
        handover->smoothed_ps = round_trip * PS;
        handover->measured = true;
    }
    if (!burst->answered) {
        adjust(handover, burst->destination, round_trip);
    }
    burst->answered = true;
}

void sky_handover_arrived(sky_handover *handover, sky_burst *burst, uint32_t id, sky_us now) {
    take_out(handover, burst, id);
    if (sky_departure_of(handover, id)->copy == SKY_AS_IT_IS) {
        begin_copied(handover, id, now + handover->grace);
    }
    tidy(handover, id);
}

/* --- What is stored, planned, renamed --- */

void sky_handover_keep(sky_handover *handover, const uint8_t *key, uint32_t index) {
    if (handover->oldest_copied == 0U && handover->strays == 0U && handover->in_flight == 0U) {
        return;
    }
    const uint32_t id = sky_handover_find(handover, key, index, SKY_AS_IT_IS);
    if (id == 0U) {
        return;
    }
    end_copied(handover, id);
    found_again(handover, id);
    answer_is_known(handover, id);
    for (uint32_t i = 0; i < handover->in_flight && sky_departure_of(handover, id)->flights != 0U; i++) {
        take_out(handover, &handover->bursts[i], id);
    }
    tidy(handover, id);
}

void sky_handover_leave_as(sky_handover *handover, const uint8_t *key, uint32_t index, uint8_t replica) {
    const uint32_t id = sky_handover_find(handover, key, index, SKY_AS_IT_IS);
    handover->some_leave_as_others = true;
    if (id == 0U) {
        sky_handover_stray(handover, key, index, replica, 0);
        return;
    }
    sky_departure *departure = sky_departure_of(handover, id);
    if (departure->deletion != SKY_NEVER) { /* it has arrived already */
        end_copied(handover, id);
    } else if (departure->flights != 0U || (departure->queued && departure->renamed == 0U)) {
        const uint32_t other = obtain(handover, key, index, replica);
        if (other == 0U) {
            /* Left out: the repair makes that copy again. What is under way must not delete what is here now. */
            sky_handover_keep(handover, key, index);
            return;
        }
        if (departure->flights == 0U) {
            departure->queued = false;
            departure->renamed = other;
            sky_departure_of(handover, other)->queued = true;
            sky_departure_of(handover, other)->references += 1U;
            return;
        }
        for (uint32_t i = 0; i < handover->in_flight; i++) {
            sky_burst *burst = &handover->bursts[i];
            for (uint32_t j = 0; j < burst->count; j++) {
                if (burst->departures[j] == id) {
                    burst->departures[j] = other;
                    sky_departure_of(handover, other)->flights += 1U;
                    carry_no_more(handover, id);
                    return;
                }
            }
        }
    } else {
        const sky_us due = departure->stray != SKY_NEVER ? departure->stray : 0;
        found_again(handover, id);
        sky_handover_stray(handover, key, index, replica, due);
    }
    tidy(handover, id);
}

uint32_t sky_handover_clear(sky_handover *handover) {
    const uint32_t others = leaving_as_others(handover);
    for (uint32_t i = 0; others != 0U && i < handover->in_flight;) {
        sky_burst *burst = &handover->bursts[i];
        uint32_t kept = 0;
        for (uint32_t j = 0; j < burst->count; j++) {
            if (sky_departure_of(handover, burst->departures[j])->copy == SKY_AS_IT_IS) {
                burst->departures[kept++] = burst->departures[j];
            } else {
                sky_departure_of(handover, burst->departures[j])->flights -= 1U; /* the list keeps it */
            }
        }
        burst->count = kept;
        if (kept == 0U) {
            sky_handover_end(handover, burst);
        } else {
            i += 1U;
        }
    }
    handover->moved = false;
    handover->left_out = false;
    handover->replan = SKY_NEVER;
    handover->plans += 1U;
    while (handover->first_place != 0U) {
        sky_handover_release(handover, take_place(handover));
    }
    for (uint32_t id = 1; id <= handover->used_departures; id++) {
        sky_departure *departure = sky_departure_of(handover, id);
        if (!departure->used) {
            continue;
        }
        const uint32_t renamed = departure->renamed;
        departure->queued = false;
        departure->renamed = 0;
        departure->stray = SKY_NEVER;
        departure->heap_at = 0;
        departure->unanswered = 0;
        if (renamed != 0U) {
            sky_handover_release(handover, renamed);
        }
        tidy(handover, id);
    }
    handover->strays = 0;
    handover->unanswered = 0;
    forget_back_offs(handover);
    return others;
}

void sky_handover_belongs(sky_handover *handover, const uint8_t *key, uint32_t index) {
    if (handover->oldest_copied != 0U) {
        const uint32_t id = sky_handover_find(handover, key, index, SKY_AS_IT_IS);
        if (id != 0U) {
            end_copied(handover, id);
            tidy(handover, id);
        }
    }
}

void sky_handover_list(sky_handover *handover, uint32_t *list, const uint8_t *key, uint32_t index, uint32_t home) {
    const uint32_t id = obtain(handover, key, index, SKY_AS_IT_IS);
    if (id != 0U && sky_departure_of(handover, id)->flights == 0U && sky_departure_of(handover, id)->deletion == SKY_NEVER) {
        sky_departure_of(handover, id)->home = home;
        sky_handover_push(handover, list, id);
    }
}

/* --- Whether it is at rest; timers --- */

bool sky_handover_idle(const sky_satellite *satellite) {
    const sky_handover *handover = satellite->handover;
    return !(handover->moved || handover->left_out || handover->first_place != 0U || handover->in_flight != 0U ||
             handover->strays != 0U);
}

bool sky_handover_at_rest(const sky_satellite *satellite) {
    return sky_handover_idle(satellite) && satellite->handover->oldest_copied == 0U;
}

static bool settles(const sky_handover *handover, const uint8_t *key) {
    if (handover->moved || handover->left_out || handover->some_leave_as_others) {
        return false;
    }
    for (uint32_t i = 0; i < handover->in_flight; i++) {
        const sky_burst *burst = &handover->bursts[i];
        if (burst->count != 0U && memcmp(sky_departure_of(handover, burst->departures[0])->key, key, 32) == 0) {
            return false;
        }
    }
    return true;
}

static bool stays(const sky_handover *handover, const uint8_t *key, uint32_t index) {
    const uint32_t id = sky_handover_find(handover, key, index, SKY_AS_IT_IS);
    return id == 0U || !(sky_departure_of(handover, id)->queued || sky_departure_of(handover, id)->stray != SKY_NEVER ||
                         sky_departure_of(handover, id)->deletion != SKY_NEVER);
}

bool sky_handover_settles_key(const sky_satellite *satellite, const uint8_t *key) {
    return settles(satellite->handover, key);
}

bool sky_handover_is_settled_chunk(const sky_satellite *satellite, const uint8_t *key, uint32_t index) {
    return sky_handover_at_rest(satellite) || (settles(satellite->handover, key) && stays(satellite->handover, key, index));
}

bool sky_handover_is_settled(const sky_satellite *satellite, const uint8_t *key) {
    const sky_memory *memory = &satellite->memory;
    if (sky_handover_at_rest(satellite)) {
        return true;
    }
    bool settled = settles(satellite->handover, key);
    const uint32_t share = settled ? sky_memory_share(memory, key) : 0U;
    for (uint32_t chunk = share != 0U ? memory->shares[share].lowest : 0U; settled && chunk != 0U;
         chunk = memory->chunks[chunk].higher) {
        settled = stays(satellite->handover, key, sky_chunk_index(&memory->chunks[chunk]));
    }
    return settled;
}

sky_us sky_handover_next_deletion(const sky_satellite *satellite) {
    const sky_handover *handover = satellite->handover;
    return handover->oldest_copied == 0U
               ? SKY_NEVER
               : sky_departure_of(handover, handover->oldest_copied)->deletion + DELETED_TOGETHER_US;
}

static sky_us sooner(sky_us a, sky_us b) { return a < b ? a : b; }

sky_us sky_handover_next_timer(const sky_handover *handover) {
    sky_us soonest = SKY_NEVER;
    for (uint32_t i = 0; i < handover->in_flight; i++) {
        soonest = sooner(soonest, handover->bursts[i].deadline);
    }
    if (handover->oldest_copied != 0U) {
        soonest = sooner(soonest, sky_departure_of(handover, handover->oldest_copied)->deletion + DELETED_TOGETHER_US);
    }
    if (handover->strays != 0U) {
        soonest = sooner(soonest, sky_departure_of(handover, handover->heap[1])->stray);
    }
    if (handover->retry_waits) {
        soonest = sooner(soonest, handover->retrying.open_us);
    }
    if (handover->first_place != 0U && handover->in_flight < window_bursts(handover)) {
        soonest = sooner(soonest, fresh_from(handover));
    }
    if (handover->left_out) {
        soonest = sooner(soonest, handover->replan == SKY_NEVER ? 0 : handover->replan);
    }
    return soonest;
}

/* --- The beginning --- */

static uint32_t buckets_for(uint32_t entries) {
    uint32_t buckets = 16;
    while (buckets < entries && buckets < (UINT32_C(1) << 31)) {
        buckets *= 2U;
    }
    return buckets;
}

sky_handover *sky_handover_new(sky_arena *arena, const sky_config *config, sky_us now) {
    (void)now;
    const uint32_t chunks = sky_config_chunks(config);
    const uint32_t departures = config->most_departures != 0U ? config->most_departures : chunks + chunks / 2U + 64U;
    const uint32_t buckets = buckets_for(departures);
    const uint32_t back_offs = config->most_back_offs;
    const uint32_t back_off_buckets = buckets_for(back_offs);
    sky_handover *handover = sky_take(arena, 1, sizeof *handover);
    sky_departure *pool = sky_take(arena, departures, sizeof *pool);
    uint32_t *chains = sky_take(arena, buckets, sizeof *chains);
    uint32_t *heap = sky_take(arena, (size_t)departures + 1U, sizeof *heap);
    sky_queue_place *places = sky_take(arena, departures, sizeof *places);
    sky_burst *bursts = sky_take(arena, config->handover_window, sizeof *bursts);
    sky_back_off *waits = sky_take(arena, back_offs, sizeof *waits);
    uint32_t *wait_chains = sky_take(arena, back_off_buckets, sizeof *wait_chains);
    sky_shortest_trip *trips = sky_take(arena, 2U * SKY_REMEMBERED_TRIPS, sizeof *trips);
    if (trips == NULL || handover == NULL) {
        return NULL;
    }
    const uint32_t plane = sky_plane_of(config->address), slot = sky_slot_of(config->address);
    handover->hash_seed[0] = config->hash_seed[0];
    handover->hash_seed[1] = config->hash_seed[1];
    handover->departures = pool;
    handover->most_departures = departures;
    handover->buckets = chains;
    handover->bucket_mask = buckets - 1U;
    handover->heap = heap;
    handover->places = places;
    handover->bursts = bursts;
    handover->most_bursts = config->handover_window;
    handover->back_offs = waits;
    handover->most_back_offs = back_offs;
    handover->back_off_buckets = wait_chains;
    handover->back_off_mask = back_off_buckets - 1U;
    handover->trips = trips;
    handover->timeout = config->handover_timeout;
    handover->grace = config->handover_grace;
    handover->pacer.usual_gap_ps = config->handover_gap * PS;
    handover->pacer.gap_ps = handover->pacer.usual_gap_ps;
    handover->pacer.step_ps = handover->pacer.usual_gap_ps;
    handover->pacer.phase = (plane * GOLDEN + slot * GOLDEN_SQUARED) % PHASES;
    handover->pacer.group = 1;
    handover->pacer.left = 1;
    sky_throttle_begin(&handover->retrying, SKY_AT_ONCE, SKY_SHORT_HOLD_US);
    handover->replan = SKY_NEVER;
    handover->next_request_id = config->first_request_id % MOST_REQUEST_ID + 1U;
    handover->window = (int64_t)handover->most_bursts * ONE;
    handover->heard = INT64_MIN;
    handover->cut_until = INT64_MIN;
    return handover;
}

bool sky_follows(const sky_satellite *satellite, const uint8_t *key, sky_us now) {
    return now < satellite->locator.next_move && !satellite->timers_wait && satellite->postponed.runs == 0U &&
           !sky_lateness_is_late(&satellite->lateness, now) &&
           !sky_history_is_being_written(&satellite->history, key, now);
}

bool sky_is_settled(const sky_satellite *satellite, const uint8_t *key, sky_us now) {
    return sky_follows(satellite, key, now) && sky_handover_is_settled(satellite, key);
}
