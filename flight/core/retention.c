#include "retention.h"

#include <string.h>

#include "state.h"

#define REPEAT_US 250000
#define MOST_ATTEMPTS 8
#define LONGEST_LEASE_US INT64_C(60000000)
#define MOST_HOLDERS 64U /* of one key: while any of them has a lease, no other ground host needs its own */
#define LATEST_MS UINT64_C(1000000000000000) /* some 30,000 years on: later times are reduced to it */
#define FIRST_REQUEST_ID 0x40000000U

bool sky_retention_new(sky_retention *retention, sky_arena *arena, const sky_config *config) {
    sky_transfer *transfers = sky_take(arena, config->most_transfers, sizeof *transfers);
    if (transfers == NULL) {
        return false;
    }
    (void)memset(retention, 0, sizeof *retention);
    retention->lease_bytes = config->memory_bytes / 4U;
    retention->next = SKY_NEVER;
    retention->transfers = transfers;
    retention->most = (uint16_t)config->most_transfers;
    retention->next_request_id = FIRST_REQUEST_ID | (config->first_request_id & (FIRST_REQUEST_ID - 1U));
    return true;
}

static sky_us time_of(uint64_t until_ms) { return (sky_us)((until_ms < LATEST_MS ? until_ms : LATEST_MS) * 1000U); }

/* Rounded as the twin does: halves to the even one. */
static uint64_t ms_of(sky_us until) {
    const uint64_t whole = (uint64_t)until / 1000U, rest = (uint64_t)until % 1000U;
    return whole + (rest > 500U || (rest == 500U && (whole & 1U) != 0U) ? 1U : 0U);
}

static void ends(sky_retention *retention, sky_us until) {
    retention->next = until < retention->next ? until : retention->next;
}

/* --- Promises --- */

static void lease(sky_satellite *satellite, uint32_t share, uint32_t ground, sky_us until, sky_us now) {
    sky_memory *memory = &satellite->memory;
    const sky_share *its = &memory->shares[share];
    bool full;
    sky_us latest = until;
    if (until <= now || its->pinned) {
        return;
    }
    if (!its->leased) {
        full = memory->leased_bytes + its->bytes > satellite->retention.lease_bytes;
    } else {
        uint32_t holders = 0U;
        const sky_lease *known = sky_memory_find_lease(memory, share, ground, &holders);
        full = holders >= MOST_HOLDERS && known == NULL;
        latest = known != NULL && known->until > until ? known->until : until;
    }
    if (full || !sky_memory_lease(memory, share, ground, latest)) {
        sky_count(&satellite->counters, SKY_leases_refused, 1U);
        return;
    }
    ends(&satellite->retention, until);
}

static uint8_t pin(sky_satellite *satellite, uint32_t share, sky_us until, sky_us now) {
    sky_memory *memory = &satellite->memory;
    if (until <= now) {
        sky_memory_unpin(memory, share);
        return SKY_DONE;
    }
    if (!memory->shares[share].pinned) {
        if (memory->pinned_bytes + memory->shares[share].bytes > memory->pin_limit_bytes) {
            sky_count(&satellite->counters, SKY_pins_refused, 1U);
            return SKY_KEEP_REFUSED;
        }
        sky_memory_end_lease(memory, share);
    }
    sky_memory_pin(memory, share, until);
    ends(&satellite->retention, until);
    return SKY_DONE;
}

static void delete_share(sky_satellite *satellite, uint32_t share) {
    uint8_t key[SKY_KEY_BYTES];
    (void)memcpy(key, sky_memory_key(&satellite->memory, share), sizeof key);
    sky_count(&satellite->counters, SKY_chunks_expired, sky_memory_remove_key(&satellite->memory, key, SKY_DELETED));
}

static uint8_t expire(sky_satellite *satellite, uint32_t share, sky_us until, sky_us now) {
    if (until == 0) {
        (void)sky_memory_expire(&satellite->memory, share, SKY_NEVER);
    } else if (until <= now) {
        delete_share(satellite, share);
    } else if (!sky_memory_expire(&satellite->memory, share, until)) {
        return SKY_KEEP_REFUSED;
    } else {
        ends(&satellite->retention, until);
    }
    return SKY_DONE;
}

/* The keys of a touch: the first becomes the most recently used, the last the least of them. */
static void touch(sky_satellite *satellite, const sky_retain *retain) {
    for (uint32_t left = retain->count; left > 0U; left--) {
        const uint32_t share =
            sky_memory_share(&satellite->memory, retain->keys + (left - 1U) * (size_t)SKY_KEY_BYTES);
        if (share != 0U) {
            sky_memory_refresh(&satellite->memory, share);
        }
    }
}

bool sky_retention_receive(sky_satellite *satellite, const sky_header *header, const uint8_t *body, size_t bytes,
                           sky_us now) {
    uint8_t answer[(size_t)SKY_LIST_HEAD + (size_t)SKY_MOST_KEYS];
    sky_retain retain;
    if (!sky_retain_parse(body, bytes, &retain)) {
        return false;
    }
    const sky_us until = time_of(retain.until_ms);
    if (retain.what == SKY_TOUCH) {
        touch(satellite, &retain);
        return true;
    }
    sky_records_head(answer, retain.count);
    for (uint32_t each = 0U; each < retain.count; each++) {
        const uint8_t *key = retain.keys + each * (size_t)SKY_KEY_BYTES;
        const uint32_t share = sky_memory_share(&satellite->memory, key);
        uint8_t *outcome = &answer[(uint32_t)SKY_LIST_HEAD + each];
        *outcome = SKY_ABSENT;
        if (retain.what == SKY_WRITING) {
            sky_history_still_written(&satellite->history, key, now);
        } else if (share == 0U) {
            /* nothing of it is here */
        } else if (retain.what == SKY_LEASE) {
            lease(satellite, share, header->ground, until < now + LONGEST_LEASE_US ? until : now + LONGEST_LEASE_US,
                  now);
        } else if (retain.what == SKY_PIN) {
            *outcome = pin(satellite, share, until, now);
        } else {
            *outcome = expire(satellite, share, until, now);
        }
    }
    if (retain.what == SKY_PIN || retain.what == SKY_EXPIRE) {
        sky_reply(&satellite->outbox, header, SKY_RETAINED, answer, (size_t)SKY_LIST_HEAD + retain.count, now);
    }
    return true;
}

/* --- Promises end --- */

static void end_due(sky_satellite *satellite, sky_us now) {
    sky_memory *memory = &satellite->memory;
    sky_us next = SKY_NEVER;
    uint32_t share = memory->pins.first;
    while (share != 0U) {
        const uint32_t newer = memory->shares[share].pin_newer;
        if (memory->shares[share].pinned_until <= now) {
            sky_memory_unpin(memory, share);
        }
        share = newer;
    }
    share = memory->expiries.first;
    while (share != 0U) {
        const uint32_t newer = memory->shares[share].expiry_newer;
        if (memory->shares[share].expires <= now) {
            delete_share(satellite, share);
        }
        share = newer;
    }
    share = memory->leased.first;
    while (share != 0U) {
        const uint32_t newer = memory->shares[share].lease_newer;
        uint32_t its = memory->shares[share].leases;
        while (its != 0U) {
            const sky_lease held = memory->leases[its];
            if (held.until <= now) {
                sky_memory_release(memory, share, held.ground);
            } else {
                next = held.until < next ? held.until : next;
            }
            its = held.next;
        }
        share = newer;
    }
    for (share = memory->pins.first; share != 0U; share = memory->shares[share].pin_newer) {
        next = memory->shares[share].pinned_until < next ? memory->shares[share].pinned_until : next;
    }
    for (share = memory->expiries.first; share != 0U; share = memory->shares[share].expiry_newer) {
        next = memory->shares[share].expires < next ? memory->shares[share].expires : next;
    }
    satellite->retention.next = next;
}

/* --- Promises follow the chunks --- */

static void append(sky_retention *retention, uint16_t at) {
    sky_transfer *added = &retention->transfers[at - 1U];
    added->older = retention->latest;
    added->newer = 0U;
    if (retention->latest != 0U) {
        retention->transfers[retention->latest - 1U].newer = at;
    } else {
        retention->oldest = at;
    }
    retention->latest = at;
}

static void detach(sky_retention *retention, uint16_t at) {
    const sky_transfer *gone = &retention->transfers[at - 1U];
    if (gone->older != 0U) {
        retention->transfers[gone->older - 1U].newer = gone->newer;
    } else {
        retention->oldest = gone->newer;
    }
    if (gone->newer != 0U) {
        retention->transfers[gone->newer - 1U].older = gone->older;
    } else {
        retention->latest = gone->older;
    }
}

static void release(sky_retention *retention, uint16_t at) {
    detach(retention, at);
    retention->transfers[at - 1U].newer = retention->free;
    retention->free = at;
}

static void send_retain(sky_satellite *satellite, uint32_t there, uint32_t request_id, uint8_t what, uint64_t until_ms,
                        const uint8_t *key, sky_us now) {
    uint8_t body[(size_t)SKY_RETAIN_HEAD + (size_t)SKY_KEY_BYTES];
    sky_retain_build(body, what, until_ms, 1U);
    (void)memcpy(body + SKY_RETAIN_HEAD, key, SKY_KEY_BYTES);
    sky_command(&satellite->outbox, SKY_RETAIN, there, request_id, body, sizeof body, now);
}

/* Sends a promise until it is acknowledged; where no more can be remembered, once. */
static void transfer(sky_satellite *satellite, uint32_t there, uint8_t what, uint64_t until_ms, const uint8_t *key,
                     sky_us now) {
    sky_retention *retention = &satellite->retention;
    uint16_t at = retention->oldest;
    while (at != 0U) {
        const sky_transfer *known = &retention->transfers[at - 1U];
        if (known->there == there && known->what == what && known->until_ms == until_ms &&
            memcmp(known->key, key, SKY_KEY_BYTES) == 0) {
            return; /* on its way */
        }
        at = known->newer;
    }
    const uint32_t number = retention->next_request_id;
    retention->next_request_id = FIRST_REQUEST_ID | ((number + 1U) & (FIRST_REQUEST_ID - 1U));
    if (retention->free != 0U) {
        at = retention->free;
        retention->free = retention->transfers[at - 1U].newer;
    } else if (retention->touched < retention->most) {
        at = ++retention->touched;
    } else {
        sky_count(&satellite->counters, SKY_pools_full, 1U);
    }
    if (at != 0U) {
        sky_transfer *begun = &retention->transfers[at - 1U];
        begun->request_id = number;
        begun->there = there;
        begun->until_ms = until_ms;
        begun->due = now + REPEAT_US;
        (void)memcpy(begun->key, key, SKY_KEY_BYTES);
        begun->what = what;
        begun->attempts = 1U;
        append(retention, at);
    }
    send_retain(satellite, there, number, what, until_ms, key, now);
}

void sky_retention_handed_over(sky_satellite *satellite, uint32_t there, const uint8_t *key, sky_us now) {
    const sky_memory *memory = &satellite->memory;
    const uint32_t share = sky_memory_share(memory, key);
    if (share == 0U) {
        return;
    }
    const sky_share *its = &memory->shares[share];
    if (its->pinned) {
        transfer(satellite, there, SKY_PIN, ms_of(its->pinned_until), key, now);
    }
    if (its->expiring) {
        transfer(satellite, there, SKY_EXPIRE, ms_of(its->expires), key, now);
    }
    if (its->leased) { /* sent once: a lost lease costs at most a miss */
        sky_us until = 0;
        for (uint32_t held = its->leases; held != 0U; held = memory->leases[held].next) {
            until = memory->leases[held].until > until ? memory->leases[held].until : until;
        }
        send_retain(satellite, there, 0U, SKY_LEASE, ms_of(until), key, now);
    }
}

static void repeat(sky_satellite *satellite, uint16_t at, sky_us now) {
    sky_retention *retention = &satellite->retention;
    sky_transfer *due = &retention->transfers[at - 1U];
    if (due->attempts == MOST_ATTEMPTS) {
        release(retention, at);
        return;
    }
    detach(retention, at);
    due->attempts++;
    due->due = now + REPEAT_US;
    append(retention, at);
    send_retain(satellite, due->there, due->request_id, due->what, due->until_ms, due->key, now);
}

static void end_transfer(sky_retention *retention, uint32_t request_id) {
    for (uint16_t at = retention->oldest; at != 0U; at = retention->transfers[at - 1U].newer) {
        if (retention->transfers[at - 1U].request_id == request_id) {
            release(retention, at);
            return;
        }
    }
}

bool sky_retention_answered(sky_satellite *satellite, const sky_header *header, const uint8_t *body, size_t bytes,
                            sky_us now) {
    const uint8_t *verdicts;
    uint32_t count;
    (void)now;
    if (!sky_verdicts_parse(body, bytes, &verdicts, &count)) {
        return false;
    }
    end_transfer(&satellite->retention, header->request_id); /* whatever it says, the transfer has arrived */
    return true;
}

bool sky_retention_unsupported(sky_satellite *satellite, const sky_header *header, const uint8_t *body, size_t bytes,
                               sky_us now) {
    (void)now;
    if (!sky_unsupported_parse(body, bytes)) {
        return false;
    }
    end_transfer(&satellite->retention, header->request_id);
    return true;
}

/* --- Timers --- */

sky_us sky_retention_next_timer(const sky_satellite *satellite) {
    const sky_retention *retention = &satellite->retention;
    const sky_us due = retention->oldest != 0U ? retention->transfers[retention->oldest - 1U].due : SKY_NEVER;
    return due < retention->next ? due : retention->next;
}

void sky_retention_handle_timer(sky_satellite *satellite, sky_us now) {
    sky_retention *retention = &satellite->retention;
    if (now >= retention->next) {
        end_due(satellite, now);
    }
    while (retention->oldest != 0U && retention->transfers[retention->oldest - 1U].due <= now) {
        repeat(satellite, retention->oldest, now);
    }
}
