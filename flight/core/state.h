/* The state of one satellite, which its handlers share. A handler acts on it, and sends through `outbox`.
 *
 * Every part is taken from one arena by its `..._new` when the satellite begins; nothing is allocated later.
 */
#ifndef SKY_STATE_H
#define SKY_STATE_H

#include <stdbool.h>

#include "chunks.h"
#include "config.h"
#include "counters.h"
#include "links.h"
#include "outbox.h"
#include "overload.h"
#include "placement/locator.h"
#include "questions.h"
#include "retention.h"
#include "routing.h"
#include "satellite.h"
#include "store/history.h"
#include "store/memory.h"
#include "throttle.h"
#include "wire/auth.h"

/* The parts of `handover`: their structures are their own affair. Each has
 *     sky_X *sky_X_new(sky_arena *arena, const sky_config *config, sky_us now);
 * which gives NULL while the arena only counts. */
typedef struct sky_handover sky_handover;
typedef struct sky_migration sky_migration;
typedef struct sky_gossip sky_gossip;
typedef struct sky_checks sky_checks;
typedef struct sky_sweep sky_sweep;

/* What a handler reports to the handlers that stand above it, which it does not know. satellite.c sets them at the start. */
typedef struct {
    /* A chunk of this packed reference was stored by SET or MIGRATE (`header`). */
    void (*on_stored)(sky_satellite *satellite, const uint8_t *ref, const sky_header *header, sky_us now);
    /* The verdicts `found` on a question, in the order of its subjects; by purpose. `same_moves`: the satellite that answered
     * has the box where this one has it. */
    void (*on_checked[SKY_PURPOSES])(sky_satellite *satellite, const sky_question *question, const uint8_t *found,
                                     bool same_moves, sky_us now);
    /* A chunk of the value of this packed reference is lost, or all in question exist; by the purpose of the proof's owner. */
    void (*on_proved[SKY_PURPOSES])(sky_satellite *satellite, const uint8_t *ref, bool lost, sky_us now);
} sky_events;

struct sky_satellite {
    sky_config config;
    uint32_t here; /* its address */
    const sky_events *events;
    sky_counters counters;
    sky_memory memory;
    sky_history history;
    sky_locator locator;
    sky_router router; /* with the link state */
    sky_outbox outbox;
    sky_lateness lateness;
    sky_postponed postponed;
    sky_gate *gate; /* NULL: any command is obeyed */
    sky_neighbours neighbours;
    sky_retention retention;
    sky_chunks chunks;
    sky_handover *handover;
    sky_migration *migration;
    sky_gossip *gossip;
    sky_checks *checks;
    sky_sweep *sweep; /* with the repair of copies */

    uint64_t backlog_bytes; /* given to the caller, and not sent yet */
    int64_t figures[SKY_HOUSEKEEPING_FIELDS]; /* the transport's own */
    uint64_t is_figure;                       /* which of them are set, as bits */
    bool timers_wait;  /* background timers have expired while the host was late: sky_work runs them */
    bool packets_next; /* whether sky_work does packets next: they and timers alternate */
    bool was_late;     /* whether the host was overloaded when last looked at; `check` is the next time */
    sky_us check;
    uint64_t healed;  /* the link state's, when packets were last taken: a change means that a link came up */
    const sky_satellite **user; /* who uses the shared memory: NULL, once all that it made was taken */
    uint8_t *scratch; /* a postponed run while it is processed, and until what it made was taken */
    sky_packets *admitted; /* runs that the gate has let pass, */
    sky_packets *sifted;   /* and those of them that need not wait, until they are processed */
};

/* An event may let more chunks leave: they are sent now, or later if the host is late. */
void sky_hand_over(sky_satellite *satellite, sky_us now);

#endif
