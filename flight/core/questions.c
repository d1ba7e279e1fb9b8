#include "questions.h"

#include <string.h>

#include "checks.h"
#include "state.h"

#define FIRST_CHECK 0xC0000000U
#define FIRST_PRESENCE 0x80000000U
#define REQUEST_IDS 0x3FFFFFFFU
#define DEFAULT_QUESTIONS 2048U
#define DEFAULT_SUBJECTS 8192U
#define DEFAULT_ASKED 32768U
#define BODY_BYTES (SKY_LIST_HEAD + SKY_MOST_KEYS * SKY_KEY_BYTES) /* no CHECK is longer */

static bool is_presence(sky_purpose purpose) { return purpose == SKY_FOR_PRESENCE; }

/* --- Subjects and cases --- */

uint32_t sky_case_begin(sky_questions *questions, const uint8_t *ref, sky_purpose owner, sky_us now) {
    uint32_t id = questions->free_case;
    if (id != 0U) {
        questions->free_case = sky_case_of(questions, id)->next;
    } else if (questions->used_cases < questions->most_cases) {
        id = ++questions->used_cases;
    } else {
        questions->pools_full += 1U;
        return 0;
    }
    sky_case *begun = sky_case_of(questions, id);
    (void)memset(begun, 0, sizeof *begun);
    (void)memcpy(begun->ref, ref, SKY_REF_BYTES);
    begun->asked = now;
    begun->owner = owner;
    return id;
}

void sky_case_give_back(sky_questions *questions, uint32_t id) {
    sky_case *ended = sky_case_of(questions, id);
    if (ended->references != 0U) {
        return;
    }
    while (ended->first != 0U) {
        const uint32_t subject = ended->first;
        ended->first = sky_subject_of(questions, subject)->next;
        sky_subject_of(questions, subject)->next = questions->free_subject;
        questions->free_subject = subject;
    }
    ended->next = questions->free_case;
    questions->free_case = id;
}

uint32_t sky_subject_begin(sky_questions *questions, const sky_check *check, uint32_t of_case) {
    uint32_t id = questions->free_subject;
    if (id != 0U) {
        questions->free_subject = sky_subject_of(questions, id)->next;
    } else if (questions->used_subjects < questions->most_subjects) {
        id = ++questions->used_subjects;
    } else {
        questions->pools_full += 1U;
        return 0;
    }
    sky_subject *begun = sky_subject_of(questions, id);
    (void)memset(begun, 0, sizeof *begun);
    (void)memcpy(begun->key, check->key, SKY_KEY_BYTES);
    (void)memcpy(begun->setting, check->setting, SKY_SETTING_BYTES);
    begun->servers = check->servers;
    begun->server = check->server;
    begun->chunks = check->chunks;
    begun->length = check->length;
    begun->of_case = of_case;
    if (of_case != 0U) {
        begun->next = sky_case_of(questions, of_case)->first;
        sky_case_of(questions, of_case)->first = id;
        sky_case_of(questions, of_case)->open += 1U;
    }
    return id;
}

void sky_subject_give_back(sky_questions *questions, uint32_t id) {
    sky_subject *ended = sky_subject_of(questions, id);
    if (ended->of_case != 0U) {
        sky_case_give_back(questions, ended->of_case); /* with all its subjects, if nothing speaks of them any more */
    } else if (ended->references == 0U) {
        ended->next = questions->free_subject;
        questions->free_subject = id;
    } else {
        /* other places have not answered yet */
    }
}

static void refer(sky_questions *questions, uint32_t id) {
    sky_subject *subject = sky_subject_of(questions, id);
    subject->references += 1U;
    if (subject->of_case != 0U) {
        sky_case_of(questions, subject->of_case)->references += 1U;
    }
}

/* Gives a chain of entries back, with their references. */
static void give_back(sky_questions *questions, uint32_t first, uint32_t count) {
    uint32_t entry = first;
    for (uint32_t i = 0; i < count && entry != 0U; i++) {
        sky_asked *asked = &questions->asked[entry - 1U];
        sky_subject *subject = sky_subject_of(questions, asked->subject);
        const uint32_t next = asked->next;
        subject->references -= 1U;
        if (subject->of_case != 0U) {
            sky_case_of(questions, subject->of_case)->references -= 1U;
        }
        sky_subject_give_back(questions, asked->subject);
        asked->next = questions->free_asked;
        questions->free_asked = entry;
        entry = next;
    }
}

/* --- Batches --- */

static uint32_t *place_in(const sky_questions *questions, const sky_batch *batch, uint32_t place) {
    const sky_torus torus = sky_config_torus(questions->config);
    return &batch->at[sky_torus_index(torus, place)];
}

uint32_t sky_batch_asked(const sky_questions *questions, const sky_batch *batch, uint32_t place) {
    const uint32_t at = *place_in(questions, batch, place);
    return at == 0U ? 0U : batch->places[at - 1U].count;
}

bool sky_batch_ask(sky_questions *questions, sky_batch *batch, uint32_t place, uint32_t subject) {
    uint32_t entry = questions->free_asked;
    if (entry != 0U) {
        questions->free_asked = questions->asked[entry - 1U].next;
    } else if (questions->used_asked < questions->most_asked) {
        entry = ++questions->used_asked;
    } else {
        questions->pools_full += 1U;
        return false;
    }
    questions->asked[entry - 1U].subject = subject;
    questions->asked[entry - 1U].next = 0;
    refer(questions, subject);
    uint32_t *at = place_in(questions, batch, place);
    if (*at == 0U) {
        const sky_batch_place fresh = {place, entry, entry, 1};
        batch->places[batch->count++] = fresh;
        *at = batch->count;
    } else {
        sky_batch_place *known = &batch->places[*at - 1U];
        questions->asked[known->last - 1U].next = entry;
        known->last = entry;
        known->count += 1U;
    }
    return true;
}

static uint32_t *bucket_of(const sky_questions *questions, uint32_t request_id) {
    return &questions->buckets[(request_id ^ request_id >> 15) & questions->bucket_mask];
}

static uint32_t next_request_id(uint32_t *next, uint32_t first) {
    const uint32_t request_id = *next;
    *next = first | ((request_id + 1U) & REQUEST_IDS);
    return request_id;
}

/* Asks one page of what a place is to be asked. */
static void ask(sky_satellite *satellite, sky_questions *questions, const sky_question *page, sky_us now) {
    uint8_t *record = questions->body + SKY_LIST_HEAD;
    const bool presence = is_presence(page->purpose);
    uint32_t id = questions->free_question;
    if (id != 0U) {
        questions->free_question = questions->questions[id - 1U].chain;
    } else if (questions->used_questions < questions->most_questions) {
        id = ++questions->used_questions;
    } else {
        questions->pools_full += 1U;
        give_back(questions, page->first, page->count);
        return;
    }
    sky_question *question = &questions->questions[id - 1U];
    *question = *page;
    question->request_id = presence ? next_request_id(&questions->next_presence, FIRST_PRESENCE)
                                    : next_request_id(&questions->next_check, FIRST_CHECK);
    uint32_t *bucket = bucket_of(questions, question->request_id);
    question->chain = *bucket;
    *bucket = id;
    question->older = questions->newest;
    question->newer = 0;
    if (questions->newest != 0U) {
        questions->questions[questions->newest - 1U].newer = id;
    } else {
        questions->oldest = id;
    }
    questions->newest = id;
    questions->presences += presence ? 1U : 0U;
    questions->checks += presence ? 0U : 1U;
    uint32_t entry = question->first;
    for (uint32_t i = 0; i < question->count; i++) {
        const sky_subject *subject = sky_subject_of(questions, questions->asked[entry - 1U].subject);
        if (presence) {
            (void)memcpy(record, subject->key, SKY_KEY_BYTES);
            record += SKY_KEY_BYTES;
        } else {
            const sky_check check = {subject->key, subject->setting, subject->servers, subject->server, subject->chunks,
                                     subject->length};
            sky_check_build(record, &check);
            record += SKY_CHECK_BYTES;
        }
        entry = questions->asked[entry - 1U].next;
    }
    sky_records_head(questions->body, question->count);
    sky_count(&satellite->counters, SKY_questions_asked, 1);
    sky_command(&satellite->outbox, presence ? SKY_HAS : SKY_CHECK, question->place, question->request_id,
                questions->body, (size_t)(record - questions->body), now);
}

void sky_batch_send(sky_satellite *satellite, sky_batch *batch, sky_purpose purpose, sky_us answer_us, sky_us now) {
    sky_questions *questions = &satellite->checks->questions;
    const uint32_t most = is_presence(purpose) ? SKY_MOST_KEYS : SKY_MOST_CHECKS;
    if (batch->count != 0U && !is_presence(purpose)) {
        sky_questions_purge(questions, false, now);
    }
    for (uint32_t i = 0; i < batch->count; i++) {
        const sky_batch_place *place = &batch->places[i];
        uint32_t entry = place->first, left = place->count;
        while (left != 0U) {
            sky_question page;
            (void)memset(&page, 0, sizeof page);
            page.place = place->place;
            page.purpose = purpose;
            page.until = now + answer_us;
            page.first = entry;
            page.count = left < most ? left : most;
            left -= page.count;
            for (uint32_t n = 0; n < page.count; n++) {
                entry = questions->asked[entry - 1U].next;
            }
            ask(satellite, questions, &page, now);
        }
        *place_in(questions, batch, place->place) = 0;
    }
    batch->count = 0;
}

/* --- Answers, and none --- */

static void take_out(sky_questions *questions, uint32_t id) {
    sky_question *question = &questions->questions[id - 1U];
    uint32_t *link = bucket_of(questions, question->request_id);
    while (*link != id) {
        link = &questions->questions[*link - 1U].chain;
    }
    *link = question->chain;
    if (question->older != 0U) {
        questions->questions[question->older - 1U].newer = question->newer;
    } else {
        questions->oldest = question->newer;
    }
    if (question->newer != 0U) {
        questions->questions[question->newer - 1U].older = question->older;
    } else {
        questions->newest = question->older;
    }
    questions->presences -= is_presence(question->purpose) ? 1U : 0U;
    questions->checks -= is_presence(question->purpose) ? 0U : 1U;
    question->chain = questions->free_question;
    questions->free_question = id;
}

void sky_questions_purge(sky_questions *questions, bool presences, sky_us now) {
    uint32_t id = questions->oldest;
    while (id != 0U) {
        const sky_question question = questions->questions[id - 1U];
        if (is_presence(question.purpose) == presences && question.until <= now) {
            take_out(questions, id);
            sky_question_end(questions, &question);
        }
        id = question.newer;
    }
}

bool sky_question_take(sky_questions *questions, uint32_t request_id, bool presence, sky_question *question) {
    uint32_t id = *bucket_of(questions, request_id);
    while (id != 0U && questions->questions[id - 1U].request_id != request_id) {
        id = questions->questions[id - 1U].chain;
    }
    if (id == 0U || is_presence(questions->questions[id - 1U].purpose) != presence) {
        return false;
    }
    *question = questions->questions[id - 1U];
    take_out(questions, id);
    return true;
}

void sky_question_end(sky_questions *questions, const sky_question *question) {
    give_back(questions, question->first, question->count);
}

/* --- The beginning --- */

static uint32_t or_default(uint32_t bound, uint32_t otherwise) { return bound != 0U ? bound : otherwise; }

static bool begin_batch(sky_batch *batch, sky_arena *arena, size_t satellites) {
    batch->places = sky_take(arena, satellites, sizeof *batch->places);
    batch->at = sky_take(arena, satellites, sizeof *batch->at);
    return batch->at != NULL;
}

bool sky_questions_new(sky_questions *questions, sky_arena *arena, const sky_config *config) {
    const size_t satellites = (size_t)config->planes * config->slots;
    const uint32_t most_questions = or_default(config->most_questions, DEFAULT_QUESTIONS);
    const uint32_t most_subjects = or_default(config->most_subjects, DEFAULT_SUBJECTS);
    const uint32_t most_asked = or_default(config->most_asked, DEFAULT_ASKED);
    uint32_t buckets = 16;
    while (buckets < most_questions) {
        buckets *= 2U;
    }
    questions->config = config;
    questions->subjects = sky_take(arena, most_subjects, sizeof *questions->subjects);
    questions->cases = sky_take(arena, most_subjects, sizeof *questions->cases);
    questions->asked = sky_take(arena, most_asked, sizeof *questions->asked);
    questions->questions = sky_take(arena, most_questions, sizeof *questions->questions);
    questions->buckets = sky_take(arena, buckets, sizeof *questions->buckets);
    questions->body = sky_take_shared(arena, BODY_BYTES, 1);
    const bool proofs = begin_batch(&questions->proofs, arena, satellites);
    const bool others = begin_batch(&questions->others, arena, satellites);
    questions->most_subjects = most_subjects;
    questions->most_cases = most_subjects;
    questions->most_asked = most_asked;
    questions->most_questions = most_questions;
    questions->bucket_mask = buckets - 1U;
    questions->next_check = FIRST_CHECK | (config->first_request_id & REQUEST_IDS);
    questions->next_presence = FIRST_PRESENCE | (config->first_request_id & REQUEST_IDS);
    return proofs && others && questions->body != NULL;
}
