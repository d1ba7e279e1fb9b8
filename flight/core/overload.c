#include "overload.h"

#include <string.h>

#include "wire/packet.h"

#define PERSISTS_US 250000 /* late for this long without a break: overloaded */
#define MOST_LATE_US INT64_C(0x7FFFFFFF)

/* --- Lateness ---
 *
 * The longest wait decays by exp(-t / 0.5 s). FADES[b] is exp(-2^b us / 0.5 s) times 2^32: the product over the bits of t
 * is exact to about 2^-27. */

enum { FADE_BITS = 25 };
static const uint32_t FADES[FADE_BITS] = {
    0xFFFFDE72U, 0xFFFFBCE4U, 0xFFFF79C8U, 0xFFFEF391U, 0xFFFDE723U, 0xFFFBCE4BU, 0xFFF79CA7U, 0xFFEF3995U,
    0xFFDE7444U, 0xFFBCECEDU, 0xFF79EB6CU, 0xFEF41D12U, 0xFDE95276U, 0xFBD701A5U, 0xF7BF51CEU, 0xEFC2BED6U,
    0xE08D3479U, 0xC4F769B7U, 0x978BC8FEU, 0x59B63370U, 0x1F703171U, 0x03DC5D25U, 0x000EE7DFU, 0x000000DEU,
    0x00000000U,
};

void sky_lateness_begin(sky_lateness *lateness) {
    lateness->worst = 0;
    lateness->worst_at = INT64_MIN / 4;
    lateness->on_time = SKY_NEVER;
}

void sky_lateness_measured(sky_lateness *lateness, sky_us late, sky_us now) {
    if (late <= SKY_LATE_US) {
        lateness->on_time = now;
    } else if (lateness->on_time == SKY_NEVER) {
        lateness->on_time = now - late;
    } else {
        /* late already */
    }
    if (late > 0 && late >= sky_lateness_at(lateness, now)) {
        lateness->worst = late < MOST_LATE_US ? late : MOST_LATE_US;
        lateness->worst_at = now;
    }
}

sky_us sky_lateness_at(const sky_lateness *lateness, sky_us now) {
    if (lateness->worst == 0 || now <= lateness->worst_at) {
        return lateness->worst;
    }
    const uint64_t since = (uint64_t)(now - lateness->worst_at);
    if (since >> FADE_BITS != 0U) {
        return 0;
    }
    uint64_t share = UINT64_C(1) << 32;
    for (unsigned bit = 0; bit < (unsigned)FADE_BITS; bit++) {
        if ((since >> bit & 1U) != 0U) {
            share = share * FADES[bit] >> 32;
        }
    }
    return (sky_us)(((uint64_t)lateness->worst * share + (UINT64_C(1) << 31)) >> 32);
}

bool sky_lateness_is_late(const sky_lateness *lateness, sky_us now) {
    return lateness->on_time != SKY_NEVER && now - lateness->on_time > PERSISTS_US;
}

/* --- Postponed packets ---
 *
 * A ring of bytes: each run is a head and its packets, and may go over the end of the ring. */

typedef struct {
    sky_us came;
    uint32_t bytes, segment_bytes;
    sky_link source;
    uint32_t spare;
} run_head;

enum {
    LEAST_RUN_BYTES = 52, /* a header of a command: shorter packets are no background */
    MOST_RUN_BYTES = 65536
};
bool sky_postponed_new(sky_postponed *postponed, sky_arena *arena, const sky_config *config) {
    const size_t most = config->postponed_bytes;
    /* Runs are dropped beyond `most` bytes of packets, so heads need room for as many of the shortest. */
    const size_t bytes = most + (size_t)MOST_RUN_BYTES + (most / (size_t)LEAST_RUN_BYTES + 2U) * sizeof(run_head);
    uint8_t *ring = sky_take(arena, 1U, bytes);
    if (ring == NULL) {
        return false;
    }
    (void)memset(postponed, 0, sizeof *postponed);
    postponed->ring = ring;
    postponed->most = most;
    postponed->ring_bytes = bytes;
    return true;
}

static size_t ring_at(const sky_postponed *postponed, size_t at) {
    return at < postponed->ring_bytes ? at : at - postponed->ring_bytes;
}

static void ring_write(sky_postponed *postponed, const void *from, size_t bytes) {
    const size_t at = ring_at(postponed, postponed->first + postponed->used);
    const size_t straight = bytes < postponed->ring_bytes - at ? bytes : postponed->ring_bytes - at;
    (void)memcpy(postponed->ring + at, from, straight);
    (void)memcpy(postponed->ring, (const uint8_t *)from + straight, bytes - straight);
    postponed->used += bytes;
}

static void ring_read(const sky_postponed *postponed, size_t at, void *to, size_t bytes) {
    const size_t straight = bytes < postponed->ring_bytes - at ? bytes : postponed->ring_bytes - at;
    (void)memcpy(to, postponed->ring + at, straight);
    (void)memcpy((uint8_t *)to + straight, postponed->ring, bytes - straight);
}

static uint64_t packets_of(const run_head *head) {
    return ((uint64_t)head->bytes + head->segment_bytes - 1U) / head->segment_bytes;
}

static void advance(sky_postponed *postponed, const run_head *head) {
    const size_t bytes = sizeof *head + head->bytes;
    postponed->first = ring_at(postponed, postponed->first + bytes);
    postponed->used -= bytes;
    postponed->bytes -= head->bytes;
    postponed->runs--;
}

static void drop_oldest(sky_postponed *postponed) {
    run_head head;
    ring_read(postponed, postponed->first, &head, sizeof head);
    postponed->dropped += packets_of(&head);
    advance(postponed, &head);
}

void sky_postponed_keep(sky_postponed *postponed, const uint8_t *packets, size_t bytes, size_t segment_bytes,
                        sky_link source, sky_us now) {
    const run_head head = {now, (uint32_t)bytes, (uint32_t)segment_bytes, source, 0U};
    if (bytes < LEAST_RUN_BYTES || bytes > MOST_RUN_BYTES) {
        return; /* no run of background packets */
    }
    postponed->kept += packets_of(&head);
    ring_write(postponed, &head, sizeof head);
    ring_write(postponed, packets, bytes);
    postponed->bytes += bytes;
    postponed->runs++;
    while (postponed->bytes > postponed->most && postponed->runs > 1U) {
        drop_oldest(postponed);
    }
}

size_t sky_postponed_take(sky_postponed *postponed, uint8_t *packets, size_t *segment_bytes, sky_link *source,
                          sky_us *came, sky_us now) {
    run_head head;
    while (postponed->runs > 0U) {
        ring_read(postponed, postponed->first, &head, sizeof head);
        if (head.came + SKY_MOST_POSTPONED_AGE_US >= now) {
            ring_read(postponed, ring_at(postponed, postponed->first + sizeof head), packets, head.bytes);
            *segment_bytes = head.segment_bytes;
            *source = head.source;
            *came = head.came;
            advance(postponed, &head);
            return head.bytes;
        }
        drop_oldest(postponed);
    }
    return 0U;
}

bool sky_is_background(const uint8_t *packet, size_t bytes) {
    const size_t start = bytes > 0U ? sky_header_start(packet) : 0U;
    if (bytes == 0U || bytes < start + SKY_HEADER_BYTES) {
        return false;
    }
    const uint8_t op = packet[start + 1U];
    if (op == SKY_MIGRATE || op == SKY_CHECK || op == SKY_NOTICE) {
        return true;
    }
    /* Of a ground host, which is named, somebody waits for the answer. */
    const uint8_t *ground = packet + start + 12U;
    return (op == SKY_HAS || op == SKY_RETAIN) && (ground[0] | ground[1] | ground[2] | ground[3]) == 0;
}
