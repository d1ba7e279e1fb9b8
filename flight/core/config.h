/* Configuration of one satellite: as skymemory.protocol.satellite.state.SatelliteConfig and what surrounds it there, and the
 * bounds of the pools. Times in microseconds.
 *
 * sky_config_defaults sets all that the Python twin has a default for; then the caller sets address, torus, memory, clock.
 */
#ifndef SKY_CONFIG_H
#define SKY_CONFIG_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "placement/torus.h"
#include "satellite.h"

enum { SKY_MOST_KEYS_IN_RING = 16 };

typedef enum { SKY_GREEDY = 0, SKY_ALTERNATE = 1 } sky_routing_mode;
typedef enum { SKY_LRU = 0, SKY_LFUDA = 1, SKY_LRFU = 2 } sky_replacement;

/* A key that commands are authentic by: accepted as long as it is in the ring, used for signing from `from` on. */
typedef struct {
    uint16_t id; /* from 1 */
    uint8_t secret[32];
    sky_us from;
} sky_secret;

/* Which packets get a MAC, by the plan's `auth`: commands; also answers to ground hosts, except DATA; or all. */
typedef enum { SKY_AUTH_ON = 0, SKY_AUTH_ANSWERS = 1, SKY_AUTH_EVERY = 2 } sky_auth;

/* By ascending time of use. */
struct sky_ring {
    uint32_t count; /* 0: no authentication */
    sky_auth auth;
    sky_secret keys[SKY_MOST_KEYS_IN_RING];
};

struct sky_config {
    /* Where it is, in which grid: see placement/torus.h. `gaps` stays the caller's as long as the satellite lives. */
    uint32_t address; /* plane << 12 | slot */
    uint16_t planes, slots;
    uint16_t most_planes, most_slots;
    bool seam;
    const uint8_t *gaps;
    sky_routing_mode routing;

    /* Its memory: `memory_bytes` counts payloads and references of 72 bytes, as the twin does. */
    uint64_t memory_bytes;
    uint32_t most_chunks; /* 0: as many as chunks of `typical_chunk_bytes` fit, and 1,024 more */
    uint32_t most_keys;   /* with chunks here; 0: as most_chunks */
    uint32_t typical_chunk_bytes;
    uint32_t cell_bytes; /* payloads are kept in cells of this size: see memory.h */
    sky_replacement replacement;
    uint32_t credit_bytes; /* what the transport's receive buffer really holds */
    uint64_t backlog_bytes; /* GETs are answered BUSY while the transport has more to send than this */
    uint32_t outbox_bytes; /* for headers that wait to be sent */

    /* Dead blocks, pins, copies. */
    bool gossip, plane_only, periodic, migration;
    sky_us sweep, notice_hold, confirm;
    uint32_t pin_share; /* of the memory, in 1/65,536 */
    uint32_t replicas;

    /* The box. Delays of the links, one way, are for the strategy `cost` alone. */
    uint16_t centre_plane, centre_slot;
    uint64_t slot_link_ps, plane_link_ps;
    sky_clock clock; /* NULL: the box stands still */
    void *clock_context;
    int32_t pushed_slot, pushed_plane; /* moves to begin with, as an operator's ADVANCE adds them */

    /* Neighbours and handovers. */
    sky_us neighbour_timeout;
    uint32_t handover_window;
    sky_us handover_timeout, handover_grace, handover_gap;

    sky_ring ring;

    /* Bounds of pools; the twin's are the defaults. */
    uint32_t most_written, most_deleted, most_dead; /* keys remembered: see history.h */
    uint32_t most_departed; /* evicted keys that lrfu remembers */
    uint32_t most_evicted;  /* keys evicted from and not announced yet, if `gossip` */
    uint32_t most_departures; /* chunks that leave at a time: see handover.h; 0: 1.5 times the chunks, and 64 */
    uint32_t most_questions, most_subjects, most_asked; /* see questions.h; 0: its defaults */
    uint32_t most_suspects; /* see sweep.h; 0: its default */
    uint32_t most_leases;   /* of ground hosts, for all keys */
    uint32_t most_expiries;
    uint32_t most_back_offs;  /* satellites not to be asked again yet, for a key each */
    uint32_t most_conflicts;  /* chunks replaced by another copy, in one run of packets */
    uint32_t most_transfers;  /* RETAINs under way to other satellites */
    uint32_t most_ground_hosts; /* heard lately; beyond it the one heard longest ago is forgotten */
    uint32_t most_runs;       /* of packets that wait to be sent */
    uint32_t postponed_bytes; /* of packets that wait while the host is late; beyond it the oldest are dropped */
    uint32_t most_senders, most_forgotten, remembered; /* see auth.h */

    /* Zeroed memory that satellites of one thread use by turns, of sky_shared_bytes; NULL: each has its own. They have the same
     * configuration but for `address`. */
    void *shared;
    size_t shared_bytes;

    /* Of all hashes of what clients choose: secret, drawn at the start, so that nobody makes chains long; 0 in tests. */
    uint64_t hash_seed[2];
    /* Of what satellites ask each other: where request ids begin, drawn at the start, so that a stranger guesses none and none
     * of an earlier life comes again; 0 in tests. */
    uint32_t first_request_id;
};

/* The defaults of the twin; the rest is zero. */
void sky_config_defaults(sky_config *config);
/* NULL: sound; else why not, for a person to read. */
const char *sky_config_error(const sky_config *config);
sky_torus sky_config_torus(const sky_config *config);
/* `most_chunks` and `most_keys` as they count. */
uint32_t sky_config_chunks(const sky_config *config);
uint32_t sky_config_keys(const sky_config *config);

#endif
