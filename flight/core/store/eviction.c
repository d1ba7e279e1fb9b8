#include "store/eviction.h"

#include <string.h>

/* Heaps are indexed: each share knows its place in the heap, so that a change costs O(log keys) and nothing stale is kept.
 *
 * LRFU's worths. The twin adds and compares doubles: a use counts 2^(half-lives since the start), which grows with each event
 * by the factor 2^(1 / half-life). Here a worth has a mantissa of 53 bits too, and sums and products are rounded to it half to
 * even, as IEEE 754 does: what is equal there is equal here. The factor is computed in 62 bits from a mean return in 2^-36
 * events, so it differs from the twin's by one unit in the last place at most, now and then: two keys whose worths differ by
 * less than about 10^-12 of themselves may go in the other order. Worths are not rescaled: exponents are large enough. */

enum { MANTISSA_BITS = 53, MEAN_BITS = 36, FACTOR_BITS = 62, FIRST_RETURN = 1000, FOLLOW = 1000, RECENT_PARTS = 4 };
#define LONGEST_RETURN ((uint64_t)1 << 26)
#define LN2 0xB17217F7D1CF79ABU /* in 2^-64 */

/* --- Numbers --- */

/* A whole number of any 64 bits times 2^exponent, of which some lower bits are lost already (`sticky`): rounded. */
static sky_worth rounded(uint64_t whole, int32_t exponent, bool sticky) {
    sky_worth worth = {0, 0};
    uint32_t shift = 0;
    while (whole >> shift >= (uint64_t)1 << MANTISSA_BITS) { /* 11 turns at most */
        shift++;
    }
    worth.mantissa = whole >> shift;
    worth.exponent = exponent + (int32_t)shift;
    if (shift != 0U) {
        const uint64_t half = (uint64_t)1 << (shift - 1U), rest = whole & (((uint64_t)1 << shift) - 1U);
        if (rest > half || (rest == half && (sticky || (worth.mantissa & 1U) != 0U))) {
            worth.mantissa++;
            if (worth.mantissa >> MANTISSA_BITS != 0U) {
                worth.mantissa >>= 1;
                worth.exponent++;
            }
        }
    }
    return worth;
}

static int32_t compare(sky_worth a, sky_worth b) {
    int32_t found = 0;
    if (a.mantissa == 0U || b.mantissa == 0U || a.exponent == b.exponent) {
        found = a.mantissa < b.mantissa ? -1 : (a.mantissa > b.mantissa ? 1 : 0);
    } else {
        found = a.exponent < b.exponent ? -1 : 1;
    }
    return found;
}

static sky_worth sum(sky_worth a, sky_worth b) {
    const sky_worth more = compare(a, b) < 0 ? b : a, less = compare(a, b) < 0 ? a : b;
    sky_worth found = more;
    if (less.mantissa != 0U && more.exponent - less.exponent <= MANTISSA_BITS) {
        const uint32_t down = (uint32_t)(more.exponent - less.exponent);
        const uint64_t high = more.mantissa << 10, low = less.mantissa << 10;
        const bool sticky = (low & (((uint64_t)1 << down) - 1U)) != 0U;
        found = rounded(high + (low >> down), more.exponent - 10, sticky);
    }
    return found;
}

static uint64_t product_high(uint64_t a, uint64_t b, uint64_t *low) {
    const uint64_t a0 = a & 0xFFFFFFFFU, a1 = a >> 32, b0 = b & 0xFFFFFFFFU, b1 = b >> 32;
    const uint64_t middle = a1 * b0 + (a0 * b0 >> 32), other = a0 * b1 + (middle & 0xFFFFFFFFU);
    *low = other << 32 | (a0 * b0 & 0xFFFFFFFFU);
    return a1 * b1 + (middle >> 32) + (other >> 32);
}

/* Both with mantissas of 53 bits. */
static sky_worth product(sky_worth a, sky_worth b) {
    uint64_t low;
    const uint64_t high = product_high(a.mantissa << 11, b.mantissa, &low); /* 105 or 106 bits + 11: the low 53 or 52 in `low` */
    return rounded(high << 11 | low >> 53, a.exponent + b.exponent + 42, (low << 11) != 0U);
}

/* 2^(1 / (2 · mean)), by the series of e^t, t = ln 2 / (2 · mean). */
static sky_worth factor_of(uint64_t mean) {
    uint64_t share = ((uint64_t)1 << 63) / mean, rest = ((uint64_t)1 << 63) % mean, unused;
    uint64_t t, term = (uint64_t)1 << FACTOR_BITS, found = (uint64_t)1 << FACTOR_BITS;
    for (uint32_t bit = 0; bit < FACTOR_BITS + MEAN_BITS - 1U - 63U; bit++) { /* 2^97 / mean, digit by digit */
        rest <<= 1;
        share <<= 1;
        if (rest >= mean) {
            rest -= mean;
            share |= 1U;
        }
    }
    t = product_high(share, LN2, &unused);
    for (uint32_t n = 1; n <= 32U && term != 0U; n++) {
        const uint64_t high = product_high(term, t, &unused);
        term = (high << (64U - FACTOR_BITS) | unused >> FACTOR_BITS) / n;
        found += term;
    }
    return rounded(found, -FACTOR_BITS, false);
}

/* --- The heap, and sorted ranges of its array --- */

static bool goes_before(const sky_eviction *eviction, uint32_t a, uint32_t b) {
    const int32_t order = compare(eviction->ranked[a].rank, eviction->ranked[b].rank);
    return order != 0 ? order < 0 : eviction->ranked[a].stamp < eviction->ranked[b].stamp;
}

static void set(sky_eviction *eviction, uint32_t place, uint32_t share) {
    eviction->heap[place] = share;
    eviction->ranked[share].place = place;
}

static void rise(sky_eviction *eviction, uint32_t share, uint32_t from) {
    uint32_t place = from;
    while (place > 1U && goes_before(eviction, share, eviction->heap[place / 2U])) {
        set(eviction, place, eviction->heap[place / 2U]);
        place /= 2U;
    }
    set(eviction, place, share);
}

static void sink(sky_eviction *eviction, uint32_t share, uint32_t from) {
    uint32_t place = from;
    bool done = false;
    while (!done && 2U * place <= eviction->in_heap) {
        uint32_t below = 2U * place;
        if (below < eviction->in_heap && goes_before(eviction, eviction->heap[below + 1U], eviction->heap[below])) {
            below++;
        }
        done = !goes_before(eviction, eviction->heap[below], share);
        if (!done) {
            set(eviction, place, eviction->heap[below]);
            place = below;
        }
    }
    set(eviction, place, share);
}

static void take_out(sky_eviction *eviction, uint32_t share) {
    const uint32_t place = eviction->ranked[share].place;
    if (place != 0U) {
        const uint32_t last = eviction->heap[eviction->in_heap];
        eviction->in_heap--;
        eviction->ranked[share].place = 0;
        if (last != share) {
            rise(eviction, last, place);
            sink(eviction, last, eviction->ranked[last].place);
        }
    }
}

/* In the heap is what is ranked, neither recent nor held. */
static void settle(sky_eviction *eviction, uint32_t share) {
    sky_ranked *const ranked = &eviction->ranked[share];
    if (ranked->state != SKY_IS_RANKED) {
        take_out(eviction, share);
    } else if (ranked->place == 0U) {
        eviction->in_heap++;
        rise(eviction, share, eviction->in_heap);
    } else {
        const uint32_t place = ranked->place;
        rise(eviction, share, place);
        sink(eviction, share, ranked->place);
    }
}

static void sift(sky_eviction *eviction, uint32_t *range, uint32_t from, uint32_t count) {
    uint32_t at = from;
    bool done = false;
    while (!done && 2U * at + 1U < count) {
        uint32_t larger = 2U * at + 1U;
        if (larger + 1U < count && goes_before(eviction, range[larger], range[larger + 1U])) {
            larger++;
        }
        done = !goes_before(eviction, range[at], range[larger]);
        if (!done) {
            const uint32_t other = range[at];
            range[at] = range[larger];
            range[larger] = other;
            at = larger;
        }
    }
}

/* The next victim first. What is sorted so is a heap as well. */
static void sort(sky_eviction *eviction, uint32_t *range, uint32_t count) {
    for (uint32_t at = count / 2U; at > 0U; at--) {
        sift(eviction, range, at - 1U, count);
    }
    for (uint32_t left = count; left > 1U; left--) {
        const uint32_t last = range[0];
        range[0] = range[left - 1U];
        range[left - 1U] = last;
        sift(eviction, range, 0, left - 1U);
    }
}

/* --- Recent keys of lrfu --- */

static void leave_recent(sky_eviction *eviction, uint32_t share) {
    sky_ranked *const ranked = &eviction->ranked[share];
    if ((ranked->state & SKY_IS_RECENT) != 0U) {
        if (ranked->earlier != 0U) {
            eviction->ranked[ranked->earlier].later = ranked->later;
        } else {
            eviction->recent_first = ranked->later;
        }
        if (ranked->later != 0U) {
            eviction->ranked[ranked->later].earlier = ranked->earlier;
        } else {
            eviction->recent_last = ranked->earlier;
        }
        ranked->state = (uint8_t)(ranked->state & ~(uint32_t)SKY_IS_RECENT);
        eviction->recent_count--;
    }
}

static void enter_recent(sky_eviction *eviction, uint32_t share) {
    sky_ranked *const ranked = &eviction->ranked[share];
    ranked->earlier = eviction->recent_last;
    ranked->later = 0;
    if (eviction->recent_last != 0U) {
        eviction->ranked[eviction->recent_last].later = share;
    } else {
        eviction->recent_first = share;
    }
    eviction->recent_last = share;
    ranked->state = (uint8_t)(ranked->state | SKY_IS_RECENT);
    eviction->recent_count++;
}

/* --- The policies --- */

bool sky_eviction_new(sky_eviction *eviction, sky_arena *arena, const sky_config *config, const sky_keymap *shares) {
    const size_t keys = (size_t)sky_config_keys(config) + 1U;
    bool whole = true;
    eviction->kind = config->replacement;
    eviction->shares = shares;
    eviction->ranked = sky_take(arena, keys, sizeof *eviction->ranked);
    eviction->heap = sky_take(arena, keys, sizeof *eviction->heap);
    if (config->replacement == SKY_LRFU) {
        const size_t departed = (size_t)config->most_departed + 1U;
        whole = sky_keymap_new(&eviction->departed, arena, config->most_departed);
        eviction->departed_worth = sky_take(arena, departed, sizeof *eviction->departed_worth);
        eviction->departed_event = sky_take(arena, departed, sizeof *eviction->departed_event);
        whole = whole && eviction->departed_worth != NULL && eviction->departed_event != NULL;
        eviction->now = rounded((uint64_t)1 << (MANTISSA_BITS - 1), 1 - MANTISSA_BITS, false);
        eviction->mean_return = (uint64_t)FIRST_RETURN << MEAN_BITS;
    }
    return whole && eviction->ranked != NULL && eviction->heap != NULL;
}

/* The newest of this rank. */
static void put(sky_eviction *eviction, uint32_t share, sky_worth rank) {
    sky_ranked *const ranked = &eviction->ranked[share];
    if ((ranked->state & SKY_IS_RANKED) == 0U) {
        ranked->state = (uint8_t)(ranked->state | SKY_IS_RANKED);
        eviction->count++;
    }
    eviction->stamp++;
    ranked->stamp = eviction->stamp;
    ranked->rank = rank;
    settle(eviction, share);
}

static bool is_ranked(const sky_eviction *eviction, uint32_t share) {
    return (eviction->ranked[share].state & SKY_IS_RANKED) != 0U;
}

/* Lrfu: worth as of now. The latest quarter of the keys is safe. */
static void came(sky_eviction *eviction, uint32_t share, sky_worth worth) {
    leave_recent(eviction, share);
    enter_recent(eviction, share);
    put(eviction, share, worth);
    while (eviction->recent_count > 1U && RECENT_PARTS * (uint64_t)eviction->recent_count > eviction->count) {
        const uint32_t older = eviction->recent_first;
        leave_recent(eviction, older);
        settle(eviction, older);
    }
}

static void used_lrfu(sky_eviction *eviction, uint32_t share) {
    sky_ranked *const ranked = &eviction->ranked[share];
    sky_worth before = {0, 0};
    uint64_t at = 0;
    bool known = is_ranked(eviction, share);
    eviction->events++;
    eviction->now = product(eviction->now, factor_of(eviction->mean_return));
    if (known) {
        before = ranked->rank;
        at = ranked->uses;
    } else {
        const uint32_t departed = sky_keymap_find(&eviction->departed, sky_keymap_key(eviction->shares, share));
        known = departed != 0U;
        if (known) {
            before = eviction->departed_worth[departed];
            at = eviction->departed_event[departed];
            sky_keymap_remove(&eviction->departed, departed);
        }
    }
    if (known) {
        uint64_t since = eviction->events - at;
        since = (since < LONGEST_RETURN ? since : LONGEST_RETURN) << MEAN_BITS;
        if (since >= eviction->mean_return) {
            eviction->mean_return += (since - eviction->mean_return + FOLLOW / 2U) / FOLLOW;
        } else {
            eviction->mean_return -= (eviction->mean_return - since + FOLLOW / 2U) / FOLLOW;
        }
    }
    ranked->before = before;
    ranked->uses = eviction->events;
    came(eviction, share, sum(before, eviction->now));
}

static void rank_lfuda(sky_eviction *eviction, uint32_t share, uint64_t uses) {
    const sky_worth rank = {eviction->age + uses, 0};
    eviction->ranked[share].uses = uses;
    put(eviction, share, rank);
}

void sky_eviction_noted(sky_eviction *eviction, uint32_t share) {
    const sky_worth none = {0, 0};
    if (eviction->kind == SKY_LRU) {
        put(eviction, share, none);
    } else if (eviction->kind == SKY_LFUDA) {
        rank_lfuda(eviction, share, is_ranked(eviction, share) ? eviction->ranked[share].uses : 1U);
    } else if (is_ranked(eviction, share)) {
        came(eviction, share, sum(eviction->ranked[share].before, eviction->now));
    } else {
        used_lrfu(eviction, share);
    }
}

void sky_eviction_used(sky_eviction *eviction, uint32_t share) {
    if (eviction->kind == SKY_LRFU) {
        used_lrfu(eviction, share);
    } else if (eviction->kind == SKY_LFUDA) {
        rank_lfuda(eviction, share, (is_ranked(eviction, share) ? eviction->ranked[share].uses : 0U) + 1U);
    } else {
        sky_eviction_noted(eviction, share);
    }
}

void sky_eviction_arrived(sky_eviction *eviction, uint32_t share) {
    if (eviction->kind == SKY_LRFU && !is_ranked(eviction, share)) {
        const sky_worth none = {0, 0};
        const uint32_t departed = sky_keymap_find(&eviction->departed, sky_keymap_key(eviction->shares, share));
        if (departed != 0U) {
            sky_keymap_remove(&eviction->departed, departed);
        }
        eviction->ranked[share].before = none;
        eviction->ranked[share].uses = eviction->events;
        came(eviction, share, eviction->now);
    } else {
        sky_eviction_noted(eviction, share);
    }
}

void sky_eviction_gone(sky_eviction *eviction, uint32_t share, bool evicted) {
    sky_ranked *const ranked = &eviction->ranked[share];
    if (is_ranked(eviction, share)) {
        leave_recent(eviction, share);
        take_out(eviction, share);
        eviction->count--;
        if (eviction->kind == SKY_LFUDA && evicted && ranked->rank.mantissa > eviction->age) {
            eviction->age = ranked->rank.mantissa;
        }
        if (eviction->kind == SKY_LRFU) {
            const uint8_t *const key = sky_keymap_key(eviction->shares, share);
            uint32_t departed = sky_keymap_find(&eviction->departed, key);
            if (departed == 0U) {
                if (eviction->departed.count == eviction->departed.capacity) {
                    sky_keymap_remove(&eviction->departed, eviction->departed.first);
                }
                departed = sky_keymap_add(&eviction->departed, key);
            }
            eviction->departed_worth[departed] = ranked->rank;
            eviction->departed_event[departed] = ranked->uses;
        }
    }
    (void)memset(ranked, 0, sizeof *ranked);
}

void sky_eviction_hold(sky_eviction *eviction, uint32_t share) {
    eviction->ranked[share].state = (uint8_t)(eviction->ranked[share].state | SKY_IS_HELD);
    settle(eviction, share);
}

void sky_eviction_free(sky_eviction *eviction, uint32_t share) {
    eviction->ranked[share].state = (uint8_t)(eviction->ranked[share].state & ~(uint32_t)SKY_IS_HELD);
    settle(eviction, share);
}

uint32_t sky_eviction_victim(const sky_eviction *eviction, uint32_t but) {
    const uint32_t *const heap = eviction->heap;
    uint32_t found = eviction->in_heap != 0U ? heap[1] : 0U;
    if (found != 0U && found == but) { /* then one of the two below it is next */
        found = eviction->in_heap > 1U ? heap[2] : 0U;
        if (eviction->in_heap > 2U && goes_before(eviction, heap[3], heap[2])) {
            found = heap[3];
        }
    }
    if (found == 0U) { /* only what is recent, or held */
        found = eviction->recent_first;
        while (found != 0U && (found == but || (eviction->ranked[found].state & SKY_IS_HELD) != 0U)) {
            found = eviction->ranked[found].later;
        }
    }
    return found;
}

void sky_eviction_order_begin(sky_eviction *eviction, sky_eviction_order *order) {
    uint32_t held = 0;
    sort(eviction, eviction->heap + 1, eviction->in_heap);
    for (uint32_t place = 1; place <= eviction->in_heap; place++) {
        eviction->ranked[eviction->heap[place]].place = place;
    }
    /* What is held, and not recent, behind the heap. */
    for (uint32_t share = eviction->shares->first; share != 0U; share = sky_keymap_newer(eviction->shares, share)) {
        if (eviction->ranked[share].state == (SKY_IS_RANKED | SKY_IS_HELD)) {
            held++;
            eviction->heap[eviction->in_heap + held] = share;
        }
    }
    sort(eviction, eviction->heap + eviction->in_heap + 1U, held);
    order->free_at = 1;
    order->held_at = eviction->in_heap + 1U;
    order->held_end = order->held_at + held;
    order->recent = eviction->recent_first;
}

uint32_t sky_eviction_order_next(const sky_eviction *eviction, sky_eviction_order *order) {
    const bool free_left = order->free_at <= eviction->in_heap, held_left = order->held_at < order->held_end;
    uint32_t found = 0;
    if (free_left && (!held_left ||
                      goes_before(eviction, eviction->heap[order->free_at], eviction->heap[order->held_at]))) {
        found = eviction->heap[order->free_at];
        order->free_at++;
    } else if (held_left) {
        found = eviction->heap[order->held_at];
        order->held_at++;
    } else {
        found = order->recent;
        if (found != 0U) {
            order->recent = eviction->ranked[found].later;
        }
    }
    return found;
}
