/* RETAIN: keys touched, pinned, leased, or to be deleted at a time.
 *
 * Twin of skymemory.protocol.satellite.retention.
 */
#ifndef SKY_RETENTION_H
#define SKY_RETENTION_H

#include <stdbool.h>

#include "arena.h"
#include "config.h"
#include "satellite.h"
#include "wire/packet.h"

/* A RETAIN on its way to the satellite that has the chunks now, repeated until acknowledged. */
typedef struct {
    uint32_t request_id;
    uint32_t there;
    uint64_t until_ms;
    sky_us due;
    uint8_t key[SKY_KEY_BYTES];
    uint8_t what, attempts;
    uint16_t older, newer; /* in the order of `due`, or `newer` of those that are free: index + 1; 0: none */
} sky_transfer;

typedef struct {
    uint64_t lease_bytes; /* that may be leased, beside what is pinned */
    sky_us next;          /* no pin, lease or expiry ends before */
    sky_transfer *transfers;
    uint16_t oldest, latest, free, touched, most;
    uint32_t next_request_id; /* not in the range of handovers: an UNREACHABLE for a RETAIN must end no burst */
} sky_retention;

bool sky_retention_new(sky_retention *retention, sky_arena *arena, const sky_config *config);

/* RETAIN, RETAINED, UNSUPPORTED; false: malformed. */
bool sky_retention_receive(sky_satellite *satellite, const sky_header *header, const uint8_t *body, size_t bytes,
                           sky_us now);
bool sky_retention_answered(sky_satellite *satellite, const sky_header *header, const uint8_t *body, size_t bytes,
                            sky_us now);
bool sky_retention_unsupported(sky_satellite *satellite, const sky_header *header, const uint8_t *body, size_t bytes,
                               sky_us now);
/* Another satellite has taken chunks of this key: it is sent the pin, the expiry and the leases. */
void sky_retention_handed_over(sky_satellite *satellite, uint32_t there, const uint8_t *key, sky_us now);
sky_us sky_retention_next_timer(const sky_satellite *satellite);
void sky_retention_handle_timer(sky_satellite *satellite, sky_us now);

#endif
