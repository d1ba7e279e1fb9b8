/* What this satellite has asked others (CHECK, HAS) and not heard of yet.
 *
 * A *subject* is one thing that several satellites are asked: all chunks of one server of a value. Subjects of one value may
 * share a *case*: what is concluded from all their answers. Questions are gathered in a *batch* by the satellite that they
 * go to, and leave in packets of up to 100 checks or 180 keys, the satellites in the order in which they were named first.
 *
 * Fixed pools. Where one is full a satellite is not asked, and is taken to have what it was not asked about: nothing is
 * proved then, and what is suspected is asked about again later (`pools_full` counts).
 */
#ifndef SKY_QUESTIONS_H
#define SKY_QUESTIONS_H

#include <stdbool.h>

#include "arena.h"
#include "config.h"
#include "satellite.h"
#include "wire/packet.h"

#define SKY_ANSWER_US 300000 /* how long to wait for an answer */
#define SKY_PROOF_US 800000  /* within which all answers that prove a loss must come */
#define SKY_FOUND (1 << 30)  /* some place has it: no count of the others brings this down to 0 */

typedef enum { SKY_FOR_PROOF, SKY_FOR_SWEEP, SKY_FOR_GOSSIP, SKY_FOR_REPAIR, SKY_FOR_PRESENCE, SKY_PURPOSES } sky_purpose;

/* Entries of all pools are named by index + 1; 0 is none. */
typedef struct {
    uint8_t key[SKY_KEY_BYTES];
    uint8_t setting[SKY_SETTING_BYTES];
    uint16_t servers, server; /* `server` from 0; of a single chunk: its index, and `servers` is `chunks` */
    uint32_t chunks, length;  /* of SKY_FOR_PRESENCE `chunks` is how many the server must hold */
    int32_t left;             /* places that may still have it; one that does not answer is taken to have it */
    bool closed;              /* of a proof: nothing more is concluded about it */
    uint32_t of_case;
    uint32_t next;            /* of the same case; or of the free ones */
    uint32_t references;      /* places that were asked and have not answered */
} sky_subject;

typedef struct {
    uint8_t ref[SKY_REF_BYTES]; /* packed reference of a chunk of the value */
    sky_us asked;
    int32_t slot_moves, plane_moves; /* when it was asked */
    sky_purpose owner;          /* SKY_FOR_SWEEP or SKY_FOR_GOSSIP: who learns of the proof */
    uint32_t first;             /* of its subjects */
    uint32_t open;              /* subjects that are not closed */
    uint32_t references;        /* those of its subjects, and of a passing list */
    uint32_t next;              /* of a passing list, or of the free ones */
    uint16_t doubtful;          /* of a passing list: the server whose loss is to be proved */
    bool doubted;
} sky_case;

typedef struct {
    uint32_t subject, next;
} sky_asked;

typedef struct {
    uint32_t request_id, place;
    sky_purpose purpose;
    sky_us until;
    uint32_t first, count; /* what is asked: entries of `asked` */
    uint32_t chain, older, newer;
} sky_question;

typedef struct {
    uint32_t place, first, last, count;
} sky_batch_place;

/* Questions that are being gathered. */
typedef struct {
    sky_batch_place *places;
    uint32_t *at; /* by torus index: which of them, + 1 */
    uint32_t count;
} sky_batch;

typedef struct {
    const sky_config *config;
    sky_subject *subjects;
    uint32_t most_subjects, used_subjects, free_subject;
    sky_case *cases;
    uint32_t most_cases, used_cases, free_case;
    sky_asked *asked;
    uint32_t most_asked, used_asked, free_asked;
    sky_question *questions;
    uint32_t most_questions, used_questions, free_question;
    uint32_t *buckets;
    uint32_t bucket_mask;
    uint32_t oldest, newest;
    uint32_t checks, presences; /* that are awaited */
    uint32_t next_check, next_presence; /* request ids */
    sky_batch proofs, others; /* two: proofs may be asked for while other questions are gathered */
    uint8_t *body;
    uint64_t pools_full; /* how often a case, a subject, a place or a question was left out */
} sky_questions;

bool sky_questions_new(sky_questions *questions, sky_arena *arena, const sky_config *config);

static inline sky_subject *sky_subject_of(const sky_questions *questions, uint32_t id) {
    return &questions->subjects[id - 1U];
}
static inline sky_case *sky_case_of(const sky_questions *questions, uint32_t id) { return &questions->cases[id - 1U]; }

/* New entries; 0: the pool is full. Whoever has named no place for a subject, or a case, gives it back. */
uint32_t sky_case_begin(sky_questions *questions, const uint8_t *ref, sky_purpose owner, sky_us now);
void sky_case_give_back(sky_questions *questions, uint32_t id);
uint32_t sky_subject_begin(sky_questions *questions, const sky_check *check, uint32_t of_case);
void sky_subject_give_back(sky_questions *questions, uint32_t id);

/* How many questions this place has in a batch. */
uint32_t sky_batch_asked(const sky_questions *questions, const sky_batch *batch, uint32_t place);
/* One more; false: no room. */
bool sky_batch_ask(sky_questions *questions, sky_batch *batch, uint32_t place, uint32_t subject);
/* Sends a batch, which is empty then. */
void sky_batch_send(sky_satellite *satellite, sky_batch *batch, sky_purpose purpose, sky_us answer_us, sky_us now);

/* Forgets questions that were not answered in time: CHECKs, or HAS. */
void sky_questions_purge(sky_questions *questions, bool presences, sky_us now);
/* Takes a question out: its answer is here. Its entries are given back by sky_question_end. False: it is not known. */
bool sky_question_take(sky_questions *questions, uint32_t request_id, bool presence, sky_question *question);
void sky_question_end(sky_questions *questions, const sky_question *question);

#endif
