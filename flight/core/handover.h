/* The plan of a satellite's handover: copy, switch, delete. What leaves, when, and what may be deleted.
 *
 * Twin of skymemory.protocol.satellite.handover, where the states of a chunk that leaves are explained: queued, in
 * flight, copied, astray. Sends nothing itself: migration.h does.
 *
 * Three fixed pools, sized by the configuration: departures (a chunk by its name: key, index, and as which copy it
 * leaves), places in the queue, and back-offs. Where the first two are full, a chunk is left out: it stays here, is
 * answered from here, nothing counts as settled until the next plan, which is made after a second or when the box
 * moves (`pools_full` counts). Where the back-offs are full all are forgotten, as in the twin: retries come sooner.
 */
#ifndef SKY_HANDOVER_H
#define SKY_HANDOVER_H

#include <stdbool.h>

#include "state.h"

#define SKY_BURST_CHUNKS 10U
#define SKY_REMEMBERED_TRIPS 1024U
#define SKY_AS_IT_IS (-1) /* a chunk that leaves as the copy that it is here */

/* A chunk that leaves, is on its way, or awaits its deletion. Entries of pools are named by index + 1; 0 is none. */
typedef struct {
    uint8_t key[32];
    uint32_t index;       /* 0-based */
    int32_t copy;         /* SKY_AS_IT_IS, or the replica that it leaves as */
    uint32_t chain;       /* the next of its hash bucket, or of the free ones */
    uint32_t references;  /* places in the queue, bursts, and renamings that name it */
    uint32_t flights;     /* bursts in flight that carry it */
    bool queued;
    uint32_t renamed;     /* queued, and its place here was taken by another copy: as which departure it leaves */
    uint32_t heap_at;     /* astray: its place in the heap, from 1 */
    sky_us stray;         /* astray: when it is examined again; SKY_NEVER: it is not astray */
    sky_us deletion;      /* copied: when it is to be deleted; SKY_NEVER: it is not copied */
    uint32_t older, newer; /* copied: the neighbours in the order of `deletion` */
    uint32_t unanswered;  /* the satellite that did not answer, + 1; 0: it waits for none */
    uint32_t listed, home, rank_home, rank_key, position; /* of a passing list: next, and what it is sorted by */
    bool used;
} sky_departure;

/* One place in the queue: the chunks of one burst follow each other. */
typedef struct {
    uint32_t departure;
    uint32_t destination;
    uint32_t next;
    bool begins_burst;
} sky_queue_place;

/* One MIGRATE request in flight: chunks of one key for one satellite. */
typedef struct {
    uint32_t request_id;
    uint32_t destination;
    uint32_t plan; /* number of the plan by which its chunks belong at `destination` */
    uint32_t count;
    uint32_t departures[SKY_BURST_CHUNKS];
    sky_us sent, deadline, last_sent;
    uint8_t attempts;
    bool answered; /* some of its chunks have arrived */
    bool spared;   /* its deadline was extended because our host was late */
} sky_burst;

/* When to try a satellite again that was full or did not answer. */
typedef struct {
    uint8_t key[32];
    uint32_t destination;
    uint32_t chain;
    sky_us due, wait;
} sky_back_off;

typedef struct {
    uint32_t destination; /* + 1; 0: free */
    sky_us shortest;
} sky_shortest_trip;

/* When the next bursts leave: evenly. A token bucket of two groups of bursts. Times in picoseconds from `base`, since
 * steps are no whole microseconds. */
typedef struct {
    sky_us base;
    int64_t next_ps;       /* when the next burst may leave */
    int64_t gap_ps;        /* for each burst, on average; 0: no pacing */
    int64_t step_ps;       /* between groups */
    int64_t usual_gap_ps;
    uint64_t phase;        /* where in its gap this satellite begins, in 1 / 2^52 */
    uint32_t group, left;  /* bursts that leave together, and how many of them are left */
} sky_pacer;

struct sky_handover {
    uint64_t hash_seed[2];
    sky_departure *departures;
    uint32_t most_departures, used_departures, free_departure;
    uint32_t *buckets;
    uint32_t bucket_mask;
    uint32_t *heap; /* astray, the next to be examined first */
    uint32_t strays;
    uint32_t oldest_copied, newest_copied;
    uint32_t unanswered;

    sky_queue_place *places;
    uint32_t used_places, free_place, first_place, last_place, queued_bursts;

    sky_burst *bursts; /* in flight, in the order in which they were first sent */
    uint32_t in_flight, most_bursts;

    sky_back_off *back_offs;
    uint32_t used_back_offs, free_back_off, most_back_offs, back_off_count;
    uint32_t *back_off_buckets;
    uint32_t back_off_mask;

    sky_shortest_trip *trips;
    uint32_t trip_count;

    sky_pacer pacer;
    sky_throttle retrying;
    bool retry_waits; /* sky_handover_retry was called while throttled: repeat it later */

    bool moved;       /* the box has moved since the last plan */
    bool left_out;    /* a pool was full: see above */
    sky_us replan;    /* when a plan is tried again for what was left out */
    bool some_leave_as_others; /* any chunk may leave as another copy: most satellites never see one */
    sky_us fresh_from; /* nothing is sent for the first time before: the sweep still asks whether it is complete */
    uint32_t plans;
    uint32_t next_request_id;
    int64_t window;    /* bursts that may be in flight, in 1 / 2^32 */
    sky_us heard, cut_until;
    int64_t smoothed_ps; /* round trip */
    bool measured;
    sky_us timeout, grace;
    uint64_t retransmitted, planned; /* chunks so far */
    uint64_t pools_full; /* how often a chunk was left out */
};

sky_handover *sky_handover_new(sky_arena *arena, const sky_config *config, sky_us now);

/* No plan is due, nothing is queued, in flight or astray. */
bool sky_handover_idle(const sky_satellite *satellite);
/* Idle, and nothing awaits deletion. */
bool sky_handover_at_rest(const sky_satellite *satellite);
/* Whether none of the chunks of a key that are here leaves or awaits deletion. */
bool sky_handover_is_settled(const sky_satellite *satellite, const uint8_t *key);
/* Whether chunks of a key can be settled one by one while this satellite is not at rest. */
bool sky_handover_settles_key(const sky_satellite *satellite, const uint8_t *key);
/* The same of one chunk, whether it is here or not. */
bool sky_handover_is_settled_chunk(const sky_satellite *satellite, const uint8_t *key, uint32_t index);
/* Our host is on time again, or a link came up: satellites that did not answer may do so now. */
void sky_handover_retry_unanswered(sky_satellite *satellite, sky_us now);
sky_us sky_handover_next_deletion(const sky_satellite *satellite);

/* --- For migration.c, sweep.c and checks.c --- */

static inline sky_departure *sky_departure_of(const sky_handover *handover, uint32_t id) {
    return &handover->departures[id - 1U];
}
uint32_t sky_handover_find(const sky_handover *handover, const uint8_t *key, uint32_t index, int32_t copy);
/* Empties the plan, of what is not under way. What was to leave as another copy comes first in the list that it
 * returns, sorted, each with a reference that the caller gives back (sky_handover_release). */
uint32_t sky_handover_clear(sky_handover *handover);
void sky_handover_release(sky_handover *handover, uint32_t departure);
/* Planning one chunk: it belongs here, */
void sky_handover_belongs(sky_handover *handover, const uint8_t *key, uint32_t index);
/* or elsewhere: then it joins the list, unless it is on its way or copied. */
void sky_handover_list(sky_handover *handover, uint32_t *list, const uint8_t *key, uint32_t index, uint32_t home);
/* Puts a departure, with a reference, at the front of a list. */
void sky_handover_push(sky_handover *handover, uint32_t *list, uint32_t departure);
/* The same at its end, of one that has a reference already. */
void sky_handover_append(sky_handover *handover, uint32_t *list, uint32_t *last, uint32_t departure);
/* Takes the first one of a list, with its reference; 0: it is empty. */
uint32_t sky_handover_pop(sky_handover *handover, uint32_t *list);
/* Queues a list, in bursts of one home and key each. Homes and keys come in the order in which the list has them first
 * or, `by_address`, homes by their addresses. The list is used up. */
void sky_handover_enqueue_list(sky_handover *handover, uint32_t list, bool by_address);
/* Queues a chunk for a satellite. `in_burst`: 0 for the first of a key and destination; the others of that key, ascending,
 * join its burst by the same counter. */
void sky_handover_enqueue(sky_handover *handover, uint32_t destination, const uint8_t *key, uint32_t index, int32_t copy,
                          uint32_t *in_burst);
/* Sets the pace of what is queued: the box moves again in `interval` (SKY_NEVER: it does not). */
void sky_handover_spread(sky_handover *handover, sky_us now, sky_us interval, bool urgent);
/* A chunk was stored here again: ACKs of the earlier one must not delete it. */
void sky_handover_keep(sky_handover *handover, const uint8_t *key, uint32_t index);
/* Another copy takes the place of this chunk: what was to leave under its name leaves as copy `replica`. */
void sky_handover_leave_as(sky_handover *handover, const uint8_t *key, uint32_t index, uint8_t replica);
/* The chunk is here and belongs elsewhere; examine it again at `due`. */
void sky_handover_stray(sky_handover *handover, const uint8_t *key, uint32_t index, int32_t copy, sky_us due);
/* Strays to examine now, each once: a list, each with a reference. */
uint32_t sky_handover_strays_due(sky_handover *handover, sky_us now);

/* Bursts that are due: those not acknowledged in time, and fresh ones while the window is open. Their request ids;
 * `due` has room for as many as may be in flight. `late`: how late our host is. */
uint32_t sky_handover_bursts_to_send(sky_handover *handover, uint32_t *due, sky_us late, sky_us now);
sky_burst *sky_handover_burst(sky_handover *handover, uint32_t request_id);
/* Takes a chunk out of a burst; the burst ends with its last one. */
void sky_handover_forget(sky_handover *handover, sky_burst *burst, uint32_t departure);
/* Ends a burst. */
void sky_handover_end(sky_handover *handover, sky_burst *burst);
/* An ACK has come for a burst. `sent`: when the acknowledged transmission was sent, if the ACK says so, else 0. */
void sky_handover_heard(sky_handover *handover, sky_burst *burst, sky_us sent, sky_us now);
/* A chunk of the burst has arrived. */
void sky_handover_arrived(sky_handover *handover, sky_burst *burst, uint32_t departure, sky_us now);
/* The destination did not take the burst (`full`; else no answer, or no route): try again later. */
void sky_handover_refused(sky_handover *handover, uint32_t request_id, bool full, sky_us now);
/* Copied chunks whose grace period is over, each once, except those that have yet to leave as another copy: a list. */
uint32_t sky_handover_to_delete(sky_handover *handover, sky_us now);

sky_us sky_handover_next_timer(const sky_handover *handover);

/* Whether this satellite has done all that is due: no move that it has not followed, no timers or packets that wait (one
 * may carry the very chunk), no lateness; and the key is not being written. */
bool sky_follows(const sky_satellite *satellite, const uint8_t *key, sky_us now);
/* Whether what is here of a key is neither being handed over nor being written still: only then does the absence of
 * other chunks count towards a proof that they are lost. */
bool sky_is_settled(const sky_satellite *satellite, const uint8_t *key, sky_us now);

#endif
