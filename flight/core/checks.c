#include "checks.h"

#include <string.h>

#include "handover.h"

#define MOST_QUESTIONS_OF_PROOFS 128U
#define MOST_PLACEMENTS 32U
#define MOST_CHUNKS 0xFFFFU /* a CHECK cannot name a single chunk of a larger value */

sky_checks *sky_checks_new(sky_arena *arena, const sky_config *config, sky_us now) {
    (void)now;
    sky_questions counted; /* while the arena only counts */
    (void)memset(&counted, 0, sizeof counted);
    const uint32_t satellites = (uint32_t)config->planes * config->slots;
    sky_checks *checks = sky_take(arena, 1, sizeof *checks);
    sky_known_places *known = sky_take_shared(arena, SKY_MOST_KNOWN_PLACES, sizeof *known);
    sky_moves_since *since = sky_take_shared(arena, 1, sizeof *since);
    uint32_t *places = sky_take_shared(arena, 4U * (size_t)satellites, sizeof *places);
    uint8_t *marks = sky_take_shared(arena, satellites, 1);
    uint16_t *servers = sky_take_shared(arena, (size_t)satellites + 1U, sizeof *servers);
    const bool whole = sky_questions_new(checks != NULL ? &checks->questions : &counted, arena, config);
    if (checks == NULL || since == NULL || known == NULL || places == NULL || marks == NULL || servers == NULL ||
        !whole) {
        return NULL;
    }
    checks->since = since;
    checks->known = known;
    checks->places = places;
    checks->most_places = 4U * satellites;
    checks->marks = marks;
    checks->servers = servers;
    return checks;
}

/* --- Shares --- */

uint32_t sky_expected(uint32_t chunks, uint32_t servers, uint32_t server) {
    return server >= chunks ? 0U : (chunks - server - 1U) / servers + 1U;
}

sky_check sky_check_of(const uint8_t *ref, uint32_t server, uint8_t setting[SKY_SETTING_BYTES]) {
    sky_ref value;
    sky_check check;
    (void)memset(&value, 0, sizeof value);
    (void)sky_ref_parse(ref, &value); /* it was checked when it was stored */
    sky_ref_setting(ref, setting);
    check.key = ref;
    check.setting = setting;
    check.servers = value.servers;
    check.server = (uint16_t)server;
    check.chunks = value.chunks;
    check.length = value.length;
    return check;
}

static bool is_held_by(const sky_chunk *chunk, const sky_check *check) {
    const uint32_t index = sky_chunk_index(chunk);
    return index % check->servers == check->server && index < check->chunks &&
           sky_ref_has_setting(chunk->ref, check->setting);
}

uint32_t sky_held(const sky_satellite *satellite, const sky_check *check) {
    const sky_memory *memory = &satellite->memory;
    const uint32_t share = sky_memory_share(memory, check->key);
    uint32_t held = 0, chunk = share != 0U ? memory->shares[share].lowest : 0U;
    for (; chunk != 0U; chunk = memory->chunks[chunk].higher) {
        held += is_held_by(&memory->chunks[chunk], check) ? 1U : 0U;
    }
    return held;
}

uint32_t sky_missing(const sky_satellite *satellite, const uint8_t *ref, uint32_t server, uint32_t *indices,
                     uint32_t most) {
    const sky_memory *memory = &satellite->memory;
    uint8_t setting[SKY_SETTING_BYTES];
    const sky_check check = sky_check_of(ref, server, setting);
    const uint32_t share = sky_memory_share(memory, check.key);
    uint32_t count = 0;
    for (uint64_t index = server; index < check.chunks && count < most; index += check.servers) {
        const uint32_t chunk = share != 0U ? sky_memory_chunk(memory, share, (uint32_t)index) : 0U;
        if (chunk == 0U || !sky_ref_has_setting(memory->chunks[chunk].ref, setting)) {
            indices[count++] = (uint32_t)index;
        }
    }
    return count;
}

/* Whether a copy of a server's share belongs here. */
static bool belongs_here(sky_satellite *satellite, const sky_layout *layout, const sky_ref *value, uint32_t server) {
    const sky_moves set = {value->slot_moves, value->plane_moves};
    for (uint32_t replica = 0; replica < satellite->config.replicas; replica++) {
        const uint32_t place = sky_locate(satellite->locator.placements, layout, server, set, satellite->locator.moves,
                                          replica);
        if (place == satellite->here || place == SKY_NOWHERE) {
            return place == satellite->here;
        }
    }
    return false;
}

static bool is_here_in_part(const sky_satellite *satellite, uint32_t share, uint32_t servers, uint32_t server) {
    const sky_memory *memory = &satellite->memory;
    uint32_t chunk = share != 0U ? memory->shares[share].lowest : 0U;
    while (chunk != 0U && sky_chunk_index(&memory->chunks[chunk]) % servers != server) {
        chunk = memory->chunks[chunk].higher;
    }
    return chunk != 0U;
}

uint32_t sky_replicas_not_whole(sky_satellite *satellite, const uint8_t *ref, bool ours) {
    sky_ref value;
    uint8_t setting[SKY_SETTING_BYTES];
    uint32_t count = 0;
    (void)memset(&value, 0, sizeof value);
    (void)sky_ref_parse(ref, &value);
    const sky_layout *layout = sky_layout_of(satellite->locator.placements, value.strategy, value.servers);
    const uint32_t share = sky_memory_share(&satellite->memory, ref);
    if (layout == NULL) {
        return 0;
    }
    for (uint32_t server = 0; server < value.servers && server < value.chunks; server++) {
        if (is_here_in_part(satellite, share, value.servers, server) ||
            (ours && belongs_here(satellite, layout, &value, server))) {
            const sky_check check = sky_check_of(ref, server, setting);
            const uint32_t held = sky_held(satellite, &check);
            if (held < sky_expected(value.chunks, value.servers, server) && (held != 0U || ours)) {
                satellite->checks->servers[count++] = (uint16_t)server;
            }
        }
    }
    return count;
}

uint32_t sky_replicas_to_ask(sky_satellite *satellite, uint32_t share, uint32_t distance, const sky_moves *before) {
    const uint8_t *ref = satellite->memory.chunks[sky_memory_latest(&satellite->memory, share)].ref;
    uint16_t *servers = satellite->checks->servers;
    uint32_t count = sky_replicas_not_whole(satellite, ref, before == NULL), index;
    sky_ref value;
    (void)memset(&value, 0, sizeof value);
    (void)sky_ref_parse(ref, &value);
    const uint32_t ring = value.servers < value.chunks ? value.servers : value.chunks;
    const uint16_t further = (uint16_t)((value.server + distance) % ring);
    bool known = sky_missing(satellite, ref, further, &index, 1) == 0U;
    for (uint32_t i = 0; i < count; i++) {
        known = known || servers[i] == further;
    }
    if (!known) {
        servers[count++] = further;
    }
    return count;
}

uint32_t sky_replicas_others(sky_satellite *satellite, const uint8_t *ref, uint32_t server, const sky_moves *before,
                             uint32_t *places) {
    uint32_t count = 0;
    sky_ref value;
    (void)memset(&value, 0, sizeof value);
    (void)sky_ref_parse(ref, &value);
    const sky_moves set = {value.slot_moves, value.plane_moves}, now = satellite->locator.moves;
    const sky_layout *layout = sky_layout_of(satellite->locator.placements, value.strategy, value.servers);
    const uint32_t counts = before == NULL || sky_moves_equal(*before, now) ? 1U : 2U;
    for (uint32_t i = 0; i < counts && layout != NULL; i++) {
        for (uint32_t replica = 0; replica < satellite->config.replicas && count < SKY_MOST_PLACES; replica++) {
            const uint32_t place = sky_locate(satellite->locator.placements, layout, server, set, i == 0U ? now : *before,
                                              replica);
            if (place == SKY_NOWHERE) { /* a box too small for all copies */
                break;
            }
            bool known = place == satellite->here;
            for (uint32_t at = 0; at < count && !known; at++) {
                known = places[at] == place;
            }
            if (!known) {
                places[count++] = place;
            }
        }
    }
    return count;
}

/* --- CHECK --- */

/* Whether chunks of another setting are in the places of these: which setting is later is not known. */
static bool is_taken_by_others(const sky_memory *memory, uint32_t share, const sky_check *check) {
    uint32_t chunk = share != 0U ? memory->shares[share].lowest : 0U;
    while (chunk != 0U && !(sky_chunk_index(&memory->chunks[chunk]) % check->servers == check->server &&
                            !sky_ref_has_setting(memory->chunks[chunk].ref, check->setting))) {
        chunk = memory->chunks[chunk].higher;
    }
    return chunk != 0U;
}

/* Whether the chunks of a check that are here are neither handed over nor being written. */
static bool is_settled(const sky_satellite *satellite, uint32_t share, const sky_check *check, sky_us now) {
    const sky_memory *memory = &satellite->memory;
    bool settled = sky_follows(satellite, check->key, now);
    if (settled && !sky_handover_at_rest(satellite)) {
        uint32_t chunk = share != 0U ? memory->shares[share].lowest : 0U;
        settled = sky_handover_settles_key(satellite, check->key);
        for (; settled && chunk != 0U; chunk = memory->chunks[chunk].higher) {
            settled = !is_held_by(&memory->chunks[chunk], check) ||
                      sky_handover_is_settled_chunk(satellite, check->key, sky_chunk_index(&memory->chunks[chunk]));
        }
    }
    return settled;
}

bool sky_checks_receive(sky_satellite *satellite, const sky_header *header, const uint8_t *body, size_t bytes,
                        sky_us now) {
    const sky_memory *memory = &satellite->memory;
    /* Free memory is offered once for each packet, not once for each check. */
    uint64_t room_bytes = memory->limit_bytes - memory->used_bytes;
    uint8_t answer[SKY_LIST_HEAD + SKY_MOST_CHECKS];
    uint32_t count;
    bool settled = true;
    if (!sky_checks_parse(body, bytes, &count)) {
        return false;
    }
    for (uint32_t i = 0; i < count; i++) {
        sky_check check;
        sky_check_at(body, i, &check);
        const uint32_t share = sky_memory_share(memory, check.key);
        const uint32_t held = sky_held(satellite, &check);
        const uint32_t expected = sky_expected(check.chunks, check.servers, check.server);
        const uint8_t *dead = sky_history_dead(&satellite->history, check.key);
        settled = settled && is_settled(satellite, share, &check, now);
        const uint64_t size_bytes = held < expected ? (uint64_t)(expected - held) * (check.length + SKY_REF_BYTES) : 0U;
        uint8_t found = SKY_WHOLE;
        if (held < expected) {
            const bool unwanted = size_bytes > room_bytes ||
                                  (dead != NULL && memcmp(dead, check.setting, SKY_SETTING_BYTES) == 0) ||
                                  is_taken_by_others(memory, share, &check);
            found = unwanted ? SKY_NO_ROOM : SKY_LACKING;
            room_bytes -= unwanted ? 0U : size_bytes;
        }
        answer[SKY_LIST_HEAD + i] = found;
    }
    sky_records_head(answer, count);
    sky_reply_as(&satellite->outbox, header, SKY_CHECKED, answer, SKY_LIST_HEAD + (size_t)count, now, SKY_OK,
                 settled ? SKY_FLAG_SETTLED : 0U);
    return true;
}

/* --- CHECKED --- */

static void proof_checked(sky_satellite *satellite, const sky_question *question, const uint8_t *found, bool same_moves,
                       bool settled, sky_us now);

bool sky_checks_answered(sky_satellite *satellite, const sky_header *header, const uint8_t *body, size_t bytes,
                         sky_us now) {
    sky_questions *questions = &satellite->checks->questions;
    sky_question question;
    const uint8_t *found;
    uint32_t count;
    const bool known = sky_question_take(questions, header->request_id, false, &question);
    const bool sound = sky_verdicts_parse(body, bytes, &found, &count);
    if (!known) {
        return sound;
    }
    if (sound && count == question.count) {
        const sky_moves theirs = {header->slot_moves, header->plane_moves};
        const bool same_moves = sky_moves_equal(theirs, satellite->locator.moves);
        const bool settled = (header->flags & SKY_FLAG_SETTLED) != 0U;
        if (question.purpose == SKY_FOR_PROOF) {
            proof_checked(satellite, &question, found, same_moves, settled, now);
        } else {
            satellite->events->on_checked[question.purpose](satellite, &question, found, same_moves, now);
        }
    }
    sky_question_end(questions, &question);
    return sound;
}

/* --- Proofs of loss --- */

/* Reports a loss, once, if no satellite is left that may have one of the chunks. */
static void judge(sky_satellite *satellite, uint32_t id, sky_us now) {
    sky_questions *questions = &satellite->checks->questions;
    sky_case *of = sky_case_of(questions, id);
    const sky_moves asked_at = {of->slot_moves, of->plane_moves};
    bool any = false, settled = true;
    for (uint32_t at = of->first; at != 0U; at = sky_subject_of(questions, at)->next) {
        const sky_subject *subject = sky_subject_of(questions, at);
        if (!subject->closed && subject->left == 0) {
            any = true;
            settled = settled && sky_handover_is_settled_chunk(satellite, of->ref, subject->server);
        }
    }
    if (any && settled && sky_moves_equal(asked_at, satellite->locator.moves) && sky_follows(satellite, of->ref, now)) {
        for (uint32_t at = of->first; at != 0U; at = sky_subject_of(questions, at)->next) {
            sky_subject_of(questions, at)->closed = true;
        }
        of->open = 0;
        satellite->events->on_proved[of->owner](satellite, of->ref, true, now);
    }
}

static void proof_checked(sky_satellite *satellite, const sky_question *question, const uint8_t *found, bool same_moves,
                       bool settled, sky_us now) {
    sky_questions *questions = &satellite->checks->questions;
    uint32_t entry = question->first;
    for (uint32_t i = 0; i < question->count; i++) {
        sky_subject *subject = sky_subject_of(questions, questions->asked[entry - 1U].subject);
        sky_case *of = sky_case_of(questions, subject->of_case);
        entry = questions->asked[entry - 1U].next;
        if (subject->closed) {
            continue;
        }
        if (found[i] == SKY_WHOLE) {
            subject->closed = true;
            of->open -= 1U;
            if (of->open == 0U) {
                satellite->events->on_proved[of->owner](satellite, of->ref, false, now);
            }
        } else if (same_moves && settled && now - of->asked <= SKY_PROOF_US) {
            subject->left -= 1;
            judge(satellite, subject->of_case, now);
        } else {
            /* nothing follows from it */
        }
    }
}

/* Computes every other satellite where chunks of a server can have been since their setting, as any copy: ascending, into
 * checks->places. */
static sky_known_places places_of(sky_satellite *satellite, const sky_layout *layout, const sky_ref *value,
                                  uint32_t server, sky_us now) {
    sky_checks *checks = satellite->checks;
    const sky_torus torus = satellite->locator.placements->torus;
    const uint32_t satellites = (uint32_t)torus.planes * torus.slots;
    const sky_moves set = {value->slot_moves, value->plane_moves};
    sky_known_places known;
    sky_moves moves;
    (void)memset(&known, 0, sizeof known);
    (void)memset(checks->marks, 0, satellites);
    sky_moves_since_begin(checks->since, &satellite->locator, layout, set, now);
    while (sky_moves_since_next(checks->since, &satellite->locator, &moves)) {
        for (uint32_t replica = 0; replica < satellite->config.replicas; replica++) {
            const uint32_t place = sky_locate(satellite->locator.placements, layout, server, set, moves, replica);
            if (place == SKY_NOWHERE) {
                break;
            }
            checks->marks[sky_torus_index(torus, place)] = 1;
        }
    }
    checks->marks[sky_torus_index(torus, satellite->here)] = 0;
    if (checks->places_count + satellites > checks->most_places) {
        checks->places_count = 0; /* those known before are computed again where they are needed */
        for (uint32_t i = 0; i < checks->known_count; i++) {
            checks->known[i].kept = false;
        }
    }
    known.first = checks->places_count;
    known.kept = true;
    for (uint32_t index = 0; index < satellites; index++) {
        if (checks->marks[index] != 0U) {
            checks->places[checks->places_count++] = sky_torus_at(torus, index);
        }
    }
    known.count = checks->places_count - known.first;
    return known;
}

/* The places of one server of a placement, as far as they are known, or computed. */
static sky_known_places lookup_places(sky_satellite *satellite, const sky_layout *layout, const sky_ref *value,
                                      const uint8_t *tag, uint32_t server, sky_us now) {
    sky_checks *checks = satellite->checks;
    uint32_t at = 0;
    while (at < checks->known_count && !(checks->known[at].server == server &&
                                         memcmp(checks->known[at].tag, tag, SKY_TAG_BYTES) == 0)) {
        at += 1U;
    }
    if (at < checks->known_count && checks->known[at].kept) {
        return checks->known[at];
    }
    sky_known_places found = places_of(satellite, layout, value, server, now);
    (void)memcpy(found.tag, tag, SKY_TAG_BYTES);
    found.server = server;
    if (at < SKY_MOST_KNOWN_PLACES) {
        checks->known[at] = found;
        checks->known_count += at == checks->known_count ? 1U : 0U;
    }
    return found;
}

void sky_proofs_begin(sky_satellite *satellite) {
    satellite->checks->asked_packets = 0;
    satellite->checks->known_count = 0;
    satellite->checks->places_count = 0;
}

void sky_proofs_add(sky_satellite *satellite, const uint8_t *ref, const uint32_t *indices, uint32_t count,
                    sky_purpose owner, sky_us now) {
    sky_checks *checks = satellite->checks;
    sky_questions *questions = &checks->questions;
    uint8_t setting[SKY_SETTING_BYTES];
    sky_ref value;
    if (!sky_ref_parse(ref, &value) || value.chunks > MOST_CHUNKS ||
        checks->asked_packets > MOST_QUESTIONS_OF_PROOFS || checks->known_count > MOST_PLACEMENTS) {
        return;
    }
    const sky_layout *layout = sky_layout_of(satellite->locator.placements, value.strategy, value.servers);
    const uint32_t id = layout != NULL ? sky_case_begin(questions, ref, owner, now) : 0U;
    if (id == 0U) {
        return;
    }
    uint32_t fresh = 0;
    sky_case_of(questions, id)->slot_moves = satellite->locator.moves.slot;
    sky_case_of(questions, id)->plane_moves = satellite->locator.moves.plane;
    sky_check check = sky_check_of(ref, 0, setting);
    check.servers = (uint16_t)value.chunks; /* of one chunk alone */
    for (uint32_t i = 0; i < count && i < SKY_MOST_CHECKS; i++) {
        const uint32_t server = indices[i] % value.servers;
        const sky_known_places places = lookup_places(satellite, layout, &value, ref + SKY_REF_TAG_AT, server, now);
        check.server = (uint16_t)indices[i];
        const uint32_t subject = sky_subject_begin(questions, &check, id);
        if (subject == 0U) {
            break; /* one chunk that is lost suffices */
        }
        sky_subject_of(questions, subject)->left = (int32_t)places.count;
        for (uint32_t at = 0; at < places.count; at++) {
            const uint32_t place = checks->places[places.first + at];
            const uint32_t before = sky_batch_asked(questions, &questions->proofs, place);
            if (sky_batch_ask(questions, &questions->proofs, place, subject)) {
                fresh += before % SKY_MOST_CHECKS == 0U ? 1U : 0U;
            }
        }
    }
    checks->asked_packets += checks->asked_packets != 0U || checks->known_count > 1U ? fresh : 1U;
    judge(satellite, id, now); /* for some chunk there may be no satellite to ask */
    sky_case_give_back(questions, id);
}

void sky_proofs_send(sky_satellite *satellite, sky_us now) {
    sky_batch_send(satellite, &satellite->checks->questions.proofs, SKY_FOR_PROOF, SKY_PROOF_US, now);
}
