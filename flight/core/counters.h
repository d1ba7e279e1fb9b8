/* The monotonic counters of a satellite, by the names of the Python twin. */
#ifndef SKY_COUNTERS_H
#define SKY_COUNTERS_H

#include <stdint.h>

/* clang-format off */
#define SKY_COUNTERS(X) \
    X(packets_received) X(packets_malformed) X(packets_forwarded) X(packets_unroutable) X(packets_unsupported) \
    X(packets_refused) X(packets_replayed) \
    X(chunks_set) X(chunks_replaced) X(chunks_refused) X(chunks_served) X(chunks_missed) X(chunks_evicted) \
    X(chunks_deleted) X(chunks_migrated_in) X(chunks_migrated_out) X(chunks_purged) X(chunks_expired) \
    X(copies_mended) X(notices_sent) X(notices_repeated) X(pushes_refused) X(leases_refused) X(pins_refused) \
    X(questions_asked) \
    /* What the twin does not have, since its lists have no end: packets not sent for want of room in the outbox, and
     * what was not noted for want of room in another pool. */ \
    X(outbox_full) X(pools_full)
/* clang-format on */

#define SKY_COUNTER_NAME(name) SKY_##name,
typedef enum { SKY_COUNTERS(SKY_COUNTER_NAME) SKY_COUNTER_COUNT } sky_counter;
#undef SKY_COUNTER_NAME

typedef struct {
    uint64_t of[SKY_COUNTER_COUNT];
} sky_counters;

static inline void sky_count(sky_counters *counters, sky_counter which, uint64_t amount) {
    counters->of[which] += amount;
}

#endif
