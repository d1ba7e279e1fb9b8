#include "sweep.h"

#include <string.h>

#include "checks.h"
#include "gossip.h"
#include "handover.h"

#define MOST_QUESTIONS 8U /* HAS packets of one sweep or handover */
#define SWEPT_KEYS (8U * SKY_MOST_KEYS)
#define REPAIRED_KEYS (8U * SKY_MOST_CHECKS)
#define REPAIRED_BYTES (INT64_C(16) << 20) /* of one repair sweep */
#define MOST_ATTEMPTS 4U
#define DEFAULT_SUSPECTS 4096U
#define MOST_HELD_BACK 4096U /* the twin's are 16,384 */
#define SHARES_OF_A_SERVER 256U /* as which copy: one byte */

typedef struct {
    uint32_t server; /* whose share is not whole */
    sky_us due;
    sky_moves moves;
    bool nothing; /* nothing of the key is where that share belongs: so any of its chunks is missing there */
    uint8_t attempts;
} sky_suspect;

/* How far a sweep over all keys has come. */
typedef struct {
    uint8_t key[SKY_KEY_BYTES];
    bool some; /* false: it begins again */
} sky_swept;

struct sky_sweep {
    sky_keymap suspected;
    sky_suspect *suspects;
    sky_keymap held_back; /* settings of keys, the oldest first, and at which moves */
    sky_moves *held_back_at;
    sky_us next_sweep;
    uint32_t sweeps;
    sky_swept swept;
    sky_moves swept_moves;
    /* Repair: */
    sky_us next_repair;
    sky_swept repaired;
    sky_moves repaired_moves;
    int64_t left_bytes;
};

sky_sweep *sky_sweep_new(sky_arena *arena, const sky_config *config, sky_us now) {
    sky_keymap counted;
    (void)memset(&counted, 0, sizeof counted);
    const uint32_t most = config->most_suspects != 0U ? config->most_suspects : DEFAULT_SUSPECTS;
    sky_sweep *sweep = sky_take(arena, 1, sizeof *sweep);
    const bool suspected = sky_keymap_new(sweep != NULL ? &sweep->suspected : &counted, arena, most);
    const bool held_back = sky_keymap_new(sweep != NULL ? &sweep->held_back : &counted, arena, MOST_HELD_BACK + 1U);
    sky_suspect *suspects = sky_take(arena, (size_t)most + 1U, sizeof *suspects);
    sky_moves *held_back_at = sky_take(arena, MOST_HELD_BACK + 2U, sizeof *held_back_at);
    if (sweep == NULL || !suspected || !held_back || held_back_at == NULL) {
        return NULL;
    }
    sweep->suspects = suspects;
    sweep->held_back_at = held_back_at;
    sweep->next_sweep = config->periodic ? now + config->sweep : SKY_NEVER;
    sweep->next_repair = config->replicas > 1U ? now + config->sweep : SKY_NEVER;
    const sky_counted counted_now = config->clock != NULL ? config->clock(config->clock_context, now)
                                                          : (sky_counted){0, 0, SKY_NEVER};
    sweep->swept_moves.slot = counted_now.slot_moves + config->pushed_slot;
    sweep->swept_moves.plane = counted_now.plane_moves + config->pushed_plane;
    sweep->repaired_moves = sweep->swept_moves;
    return sweep;
}

/* --- Suspicions --- */

static void suspect(sky_satellite *satellite, const uint8_t *key, uint32_t server, sky_us now, bool nothing) {
    sky_sweep *sweep = satellite->sweep;
    if (sky_keymap_find(&sweep->suspected, key) != 0U) {
        return;
    }
    const uint32_t entry = sky_keymap_add(&sweep->suspected, key);
    if (entry == 0U) {
        sky_count(&satellite->counters, SKY_pools_full, 1);
        return;
    }
    const sky_suspect fresh = {server, now + satellite->config.confirm, satellite->locator.moves, nothing, 0};
    sweep->suspects[entry] = fresh;
}

/* The share was found: end the suspicion. */
static void clear(sky_satellite *satellite, const uint8_t *key, uint32_t server) {
    sky_sweep *sweep = satellite->sweep;
    const uint32_t entry = sky_keymap_find(&sweep->suspected, key);
    if (entry != 0U && sweep->suspects[entry].server == server) {
        sky_keymap_remove(&sweep->suspected, entry);
    }
}

sky_us sky_sweep_next_confirmation(const sky_satellite *satellite) {
    const sky_sweep *sweep = satellite->sweep;
    sky_us soonest = SKY_NEVER;
    for (uint32_t entry = sweep->suspected.first; entry != 0U; entry = sky_keymap_newer(&sweep->suspected, entry)) {
        soonest = sweep->suspects[entry].due < soonest ? sweep->suspects[entry].due : soonest;
    }
    return soonest;
}

static const uint8_t *latest_ref(const sky_satellite *satellite, uint32_t share) {
    return satellite->memory.chunks[sky_memory_latest(&satellite->memory, share)].ref;
}

void sky_sweep_confirm_suspicions(sky_satellite *satellite, sky_us now) {
    sky_sweep *sweep = satellite->sweep;
    bool any = false;
    uint32_t entry = sweep->suspected.first;
    while (entry != 0U) {
        const uint32_t next = sky_keymap_newer(&sweep->suspected, entry);
        sky_suspect *it = &sweep->suspects[entry];
        if (it->due <= now) {
            const uint32_t share = sky_memory_share(&satellite->memory, sky_keymap_key(&sweep->suspected, entry));
            uint32_t missing[SKY_MOST_CHECKS], count = 0;
            if (share != 0U) { /* one suffices where nothing of the share is in its place */
                count = sky_missing(satellite, latest_ref(satellite, share), it->server, missing,
                                    it->nothing ? 1U : SKY_MOST_CHECKS);
            }
            if (count == 0U || !sky_moves_equal(it->moves, satellite->locator.moves) || it->attempts == MOST_ATTEMPTS) {
                sky_keymap_remove(&sweep->suspected, entry);
            } else {
                it->due = now + satellite->config.confirm;
                it->attempts += 1U;
                if (!any) {
                    sky_proofs_begin(satellite);
                }
                any = true;
                sky_proofs_add(satellite, latest_ref(satellite, share), missing, count, SKY_FOR_SWEEP, now);
            }
        }
        entry = next;
    }
    if (any) {
        sky_proofs_send(satellite, now);
    }
}

void sky_sweep_proved(sky_satellite *satellite, const uint8_t *ref, bool lost, sky_us now) {
    sky_sweep *sweep = satellite->sweep;
    const uint32_t entry = sky_keymap_find(&sweep->suspected, ref);
    const uint32_t share = sky_memory_share(&satellite->memory, ref);
    if (entry == 0U) {
        return;
    }
    sky_keymap_remove(&sweep->suspected, entry);
    if (lost && share != 0U) {
        uint8_t dead[SKY_DEAD_BYTES];
        (void)memcpy(dead, ref, SKY_KEY_BYTES);
        sky_ref_setting(latest_ref(satellite, share), dead + SKY_KEY_BYTES);
        (void)sky_gossip_purge(satellite, dead, now);
        (void)sky_gossip_notify_ground(satellite, dead, 1, now);
    }
}

/* --- Questions: is the rest of a block there? --- */

/* A server of whose chunks we hold some, but not all; UINT32_MAX: none. Leftovers of an earlier value or placement of the key
 * do not count. */
static uint32_t incomplete_server(const sky_satellite *satellite, uint32_t share, const sky_ref *value,
                                  const uint8_t *latest) {
    const sky_memory *memory = &satellite->memory;
    uint32_t server = UINT32_MAX;
    uint64_t last = 0; /* servers below it are done */
    do {
        uint32_t held = 0;
        server = UINT32_MAX;
        for (uint32_t chunk = memory->shares[share].lowest; chunk != 0U; chunk = memory->chunks[chunk].higher) {
            const uint8_t *ref = memory->chunks[chunk].ref;
            const uint32_t its = sky_ref_index(ref) % value->servers;
            if (its >= last && sky_ref_same_setting(ref, latest)) {
                held = its < server ? 1U : held + (its == server ? 1U : 0U);
                server = its < server ? its : server;
            }
        }
        if (server == UINT32_MAX || held < sky_expected(value->chunks, value->servers, server)) {
            return server;
        }
        last = (uint64_t)server + 1U;
    } while (server != UINT32_MAX);
    return UINT32_MAX;
}

/* The satellites of a server now and before, without repeats; none if this satellite is one of them. Room for 2. */
static uint32_t places_of(const sky_satellite *satellite, const sky_ref *value, uint32_t server, const sky_moves *before,
                          uint32_t *places) {
    const sky_moves set = {value->slot_moves, value->plane_moves};
    const sky_layout *layout = sky_layout_of(satellite->locator.placements, value->strategy, value->servers);
    if (layout == NULL) {
        return 0;
    }
    places[0] = sky_locate(satellite->locator.placements, layout, server, set, satellite->locator.moves, 0);
    places[1] = before == NULL ? places[0] : sky_locate(satellite->locator.placements, layout, server, set, *before, 0);
    if (places[0] == satellite->here || places[1] == satellite->here) {
        return 0;
    }
    return places[0] == places[1] ? 1U : 2U;
}

/* Examines one key by HAS. `packets`: that were needed so far. False: beyond the limit of questions. */
static bool examine_key(sky_satellite *satellite, uint32_t share, uint32_t distance, const sky_moves *before,
                        uint32_t *packets, sky_us now) {
    sky_questions *questions = &satellite->checks->questions;
    const uint8_t *latest = latest_ref(satellite, share);
    uint32_t places[2], fresh = 0;
    sky_ref value;
    if (!sky_ref_parse(latest, &value)) {
        return true;
    }
    const uint32_t own = incomplete_server(satellite, share, &value, latest);
    if (own != UINT32_MAX) {
        suspect(satellite, latest, own, now, false);
        return true;
    }
    const uint32_t ring = value.servers < value.chunks ? value.servers : value.chunks;
    const uint32_t server = (value.server + distance) % ring;
    const uint32_t count = server != value.server ? places_of(satellite, &value, server, before, places) : 0U;
    if (count == 0U) {
        return true;
    }
    for (uint32_t i = 0; i < count; i++) { /* a full packet of keys already needs another one */
        fresh += sky_batch_asked(questions, &questions->others, places[i]) % SKY_MOST_KEYS == 0U ? 1U : 0U;
    }
    if (*packets + fresh > MOST_QUESTIONS) {
        return false;
    }
    *packets += fresh;
    const sky_check asked = {latest, latest, 0, (uint16_t)server, sky_expected(value.chunks, value.servers, server), 0};
    const uint32_t subject = sky_subject_begin(questions, &asked, 0);
    if (subject == 0U) {
        return true;
    }
    sky_subject_of(questions, subject)->left = (int32_t)count;
    for (uint32_t i = 0; i < count; i++) {
        (void)sky_batch_ask(questions, &questions->others, places[i], subject);
    }
    sky_subject_give_back(questions, subject); /* if there was room for none */
    return true;
}

/* The same by CHECK, where there are copies: also of shares that are not whole here. `asked`: satellites so far. */
static bool examine_copies(sky_satellite *satellite, uint32_t share, uint32_t distance, const sky_moves *before,
                           uint32_t *asked) {
    sky_checks *checks = satellite->checks;
    sky_questions *questions = &checks->questions;
    const uint8_t *latest = latest_ref(satellite, share);
    const uint32_t count = sky_replicas_to_ask(satellite, share, distance, before);
    uint32_t places[SKY_MOST_PLACES];
    for (uint32_t i = 0; i < count; i++) {
        uint8_t setting[SKY_SETTING_BYTES];
        const sky_check check = sky_check_of(latest, checks->servers[i], setting);
        const uint32_t others = sky_replicas_others(satellite, latest, check.server, before, places);
        if (others == 0U) {
            continue;
        }
        if (*asked + others > MOST_QUESTIONS * SKY_MOST_CHECKS) {
            return false;
        }
        *asked += others;
        const uint32_t subject = sky_subject_begin(questions, &check, 0);
        if (subject == 0U) {
            continue;
        }
        sky_subject_of(questions, subject)->left = (int32_t)others;
        for (uint32_t at = 0; at < others; at++) {
            (void)sky_batch_ask(questions, &questions->others, places[at], subject);
        }
        sky_subject_give_back(questions, subject);
    }
    return true;
}

/* Whether some chunk of a share belongs elsewhere. */
static bool leaves(sky_satellite *satellite, uint32_t share) {
    uint32_t chunk = satellite->memory.shares[share].lowest;
    while (chunk != 0U &&
           sky_locator_home(&satellite->locator, satellite->memory.chunks[chunk].ref) == satellite->here) {
        chunk = satellite->memory.chunks[chunk].higher;
    }
    return chunk != 0U;
}

/* Checks whether keys are whole: our own share, and the server `distance` on in the ring. Those are keys number `first` to
 * `end` of all, ascending; `leaving`: only those that must leave. The first key beyond the limit of questions; `end`:
 * none. */
static uint32_t examine(sky_satellite *satellite, uint32_t first, uint32_t end, bool leaving, uint32_t distance,
                        const sky_moves *before, sky_us now) {
    sky_questions *questions = &satellite->checks->questions;
    const bool copies = satellite->config.replicas > 1U;
    uint32_t asked = 0, left = end;
    if (!copies) {
        sky_questions_purge(questions, true, now);
    }
    for (uint32_t n = first; n < end; n++) {
        const uint32_t share = sky_memory_key_at(&satellite->memory, n);
        if (!leaving || leaves(satellite, share)) {
            const bool within = copies ? examine_copies(satellite, share, distance, before, &asked)
                                       : examine_key(satellite, share, distance, before, &asked, now);
            left = !within && left == end ? n : left;
        }
    }
    sky_batch_send(satellite, &questions->others, copies ? SKY_FOR_SWEEP : SKY_FOR_PRESENCE, SKY_ANSWER_US, now);
    return left;
}

void sky_sweep_checked(sky_satellite *satellite, const sky_question *question, const uint8_t *found, bool same_moves,
                    sky_us now) {
    sky_questions *questions = &satellite->checks->questions;
    uint32_t entry = question->first;
    for (uint32_t i = 0; i < question->count; i++) {
        sky_subject *subject = sky_subject_of(questions, questions->asked[entry - 1U].subject);
        entry = questions->asked[entry - 1U].next;
        if (found[i] == SKY_WHOLE) {
            subject->left = SKY_FOUND;
            clear(satellite, subject->key, subject->server);
        } else if (same_moves) {
            subject->left -= 1;
            if (subject->left == 0) {
                suspect(satellite, subject->key, subject->server, now, false);
            }
        } else {
            /* another place by its count of moves */
        }
    }
}

bool sky_sweep_answered(sky_satellite *satellite, const sky_header *header, const uint8_t *body, size_t bytes,
                        sky_us now) {
    sky_questions *questions = &satellite->checks->questions;
    sky_question question;
    sky_presence presence;
    uint32_t count = 0;
    const bool known = sky_question_take(questions, header->request_id, true, &question);
    bool sound = sky_records_parse(body, bytes, SKY_PRESENCE_BYTES, 0, UINT16_MAX, &count);
    for (uint32_t i = 0; sound && i < count; i++) {
        sound = sky_presence_parse(body + SKY_LIST_HEAD + (size_t)i * SKY_PRESENCE_BYTES, &presence);
    }
    if (known && sound && count == question.count) {
        const sky_moves theirs = {header->slot_moves, header->plane_moves};
        const bool same_moves = sky_moves_equal(theirs, satellite->locator.moves);
        uint32_t entry = question.first;
        for (uint32_t i = 0; i < count; i++) {
            sky_subject *subject = sky_subject_of(questions, questions->asked[entry - 1U].subject);
            entry = questions->asked[entry - 1U].next;
            (void)sky_presence_parse(body + SKY_LIST_HEAD + (size_t)i * SKY_PRESENCE_BYTES, &presence);
            if (presence.held != 0U && presence.held >= subject->chunks) {
                clear(satellite, subject->key, subject->server);
                subject->left = SKY_FOUND;
            } else if (same_moves) {
                subject->left -= 1;
                if (subject->left == 0) {
                    suspect(satellite, subject->key, subject->server, now, presence.held == 0U);
                }
            } else {
                /* another place by its count of moves */
            }
        }
    }
    if (known) {
        sky_question_end(questions, &question);
    }
    if (sound) {
        sky_sweep_release_handover(satellite);
    }
    return sound;
}

/* --- The periodic sweep, and around a handover --- */

sky_us sky_sweep_next_sweep(const sky_satellite *satellite) { return satellite->sweep->next_sweep; }

/* The number of the first key of the next page. */
static uint32_t page_begin(const sky_satellite *satellite, const sky_swept *swept) {
    return swept->some ? sky_memory_after(&satellite->memory, swept->key) : 0U;
}

/* A sweep has come to this key, by its number + 1; 0: it begins again. */
static void swept_to(const sky_satellite *satellite, sky_swept *swept, uint32_t end) {
    swept->some = end != 0U;
    if (end != 0U) {
        (void)memcpy(swept->key, sky_memory_key(&satellite->memory, sky_memory_key_at(&satellite->memory, end - 1U)),
               SKY_KEY_BYTES);
    }
}

void sky_sweep_sweep(sky_satellite *satellite, sky_us now) {
    sky_sweep *sweep = satellite->sweep;
    if (now < sweep->next_sweep) {
        return;
    }
    sweep->next_sweep = now + satellite->config.sweep;
    const bool still = sky_moves_equal(satellite->locator.moves, sweep->swept_moves) && sky_handover_at_rest(satellite);
    sweep->swept_moves = satellite->locator.moves;
    if (!still) {
        return;
    }
    const uint32_t keys = sky_memory_keys(&satellite->memory), first = page_begin(satellite, &sweep->swept);
    const uint32_t end = keys - first > SWEPT_KEYS ? first + SWEPT_KEYS : keys;
    /* Distances 1, 2, 4 ... 512, then again from 1. */
    const uint32_t left = examine(satellite, first, end, false, UINT32_C(1) << sweep->sweeps % 10U, NULL, now);
    const bool more = left != end || end - first == SWEPT_KEYS;
    swept_to(satellite, &sweep->swept, more && left != first ? left : 0U);
    sweep->sweeps += sweep->swept.some ? 0U : 1U;
}

static bool is_asking(const sky_satellite *satellite) {
    return satellite->checks->questions.checks != 0U || satellite->checks->questions.presences != 0U;
}

void sky_sweep_before_handover(sky_satellite *satellite, sky_us now) {
    const sky_moves moves = satellite->locator.moves, before = satellite->locator.before;
    const int64_t slots = (int64_t)moves.slot - before.slot, planes = (int64_t)moves.plane - before.plane;
    /* Only after a single step: after more the places before the move are not known to be one step off. */
    if (!satellite->config.migration || slots * slots + planes * planes != 1) {
        return;
    }
    for (uint32_t distance = 1; distance <= 8U; distance *= 2U) { /* which other servers are asked: so far on in the ring */
        (void)examine(satellite, 0, sky_memory_keys(&satellite->memory), true, distance, &before, now);
    }
    if (is_asking(satellite)) {
        satellite->handover->fresh_from = now + SKY_ANSWER_US;
    }
}

void sky_sweep_release_handover(sky_satellite *satellite) {
    if (!is_asking(satellite)) {
        satellite->handover->fresh_from = 0;
    }
}

/* Each setting is held back at one count of moves only. It arrives late at its place, so it looks dead from there at the next
 * move: held back again, it would never follow a box that moves as often as that. */
static bool may_hold_back(sky_satellite *satellite, const uint8_t *latest) {
    sky_sweep *sweep = satellite->sweep;
    uint8_t name[SKY_KEY_BYTES], setting[SKY_SETTING_BYTES];
    (void)memcpy(name, latest, SKY_KEY_BYTES);
    sky_ref_setting(latest, setting);
    for (uint32_t i = 0; i < SKY_SETTING_BYTES; i++) {
        name[i] ^= setting[i]; /* key and setting in one name: keys are hashes */
    }
    uint32_t entry = sky_keymap_find(&sweep->held_back, name);
    if (entry == 0U) {
        entry = sky_keymap_add(&sweep->held_back, name);
        sweep->held_back_at[entry] = satellite->locator.moves;
    }
    const bool may = sky_moves_equal(sweep->held_back_at[entry], satellite->locator.moves);
    while (sweep->held_back.count > MOST_HELD_BACK) {
        sky_keymap_remove(&sweep->held_back, sweep->held_back.first);
    }
    return may;
}

void sky_sweep_hold_back(sky_satellite *satellite, uint32_t request_id, sky_us now) {
    sky_handover *handover = satellite->handover;
    sky_burst *burst = sky_handover_burst(handover, request_id);
    if (satellite->sweep->suspected.count == 0U || burst == NULL || burst->count == 0U) {
        return;
    }
    const uint8_t *key = sky_departure_of(handover, burst->departures[0])->key;
    const uint32_t share = sky_memory_share(&satellite->memory, key);
    if (share == 0U || sky_keymap_find(&satellite->sweep->suspected, key) == 0U ||
        !may_hold_back(satellite, latest_ref(satellite, share))) {
        return;
    }
    for (uint32_t i = 0; i < burst->count; i++) {
        const sky_departure *waiting = sky_departure_of(handover, burst->departures[i]);
        sky_handover_stray(handover, waiting->key, waiting->index, waiting->copy, now + 2 * satellite->config.confirm);
    }
    sky_handover_end(handover, burst);
}

/* --- Repair of copies ---
 *
 * A satellite asks, for each server's share that it holds whole, the satellite of the *next* copy (after the last comes the
 * first) whether that is whole too. So a satellite or plane that came back empty is filled again by those that stayed alive,
 * read or not. What was evicted for want of room is not pushed back in. During a handover nothing is asked or sent.
 */

/* One share that is whole here: of the latest setting of a key, the chunks of a server as one copy. */
typedef struct {
    uint32_t server;
    uint8_t replica;
    uint32_t first, count; /* the lowest of its chunks, and how many */
} sky_whole;

/* The next whole share after `at`, by server and copy; false: there is none. `rank` begins at 0. */
static bool next_whole(const sky_satellite *satellite, uint32_t share, uint64_t *rank, sky_whole *whole) {
    const sky_memory *memory = &satellite->memory;
    const uint8_t *latest = latest_ref(satellite, share);
    sky_ref value;
    if (!sky_ref_parse(latest, &value)) {
        return false;
    }
    for (;;) {
        uint64_t best = UINT64_MAX;
        (void)memset(whole, 0, sizeof *whole);
        for (uint32_t chunk = memory->shares[share].lowest; chunk != 0U; chunk = memory->chunks[chunk].higher) {
            const uint8_t *ref = memory->chunks[chunk].ref;
            const uint32_t server = sky_ref_index(ref) % value.servers;
            const uint64_t its = (uint64_t)server * SHARES_OF_A_SERVER + ref[SKY_REF_REPLICA_AT];
            if (its < *rank || its > best || !sky_ref_same_setting(ref, latest)) {
                continue;
            }
            if (its < best) {
                best = its;
                whole->server = server;
                whole->replica = ref[SKY_REF_REPLICA_AT];
                whole->first = chunk;
                whole->count = 0;
            }
            whole->count += 1U;
        }
        if (best == UINT64_MAX) {
            return false;
        }
        *rank = best + 1U;
        if (whole->count == sky_expected(value.chunks, value.servers, whole->server)) {
            return true;
        }
    }
}

static uint8_t next_copy(const sky_satellite *satellite, uint8_t replica) {
    return (uint8_t)((replica + 1U) % satellite->config.replicas);
}

/* Where the next copy of a whole share belongs; SKY_NOWHERE: the box is too small for it. */
static uint32_t place_of_next(const sky_satellite *satellite, const sky_whole *whole) {
    return sky_locate_copy(satellite->locator.placements, satellite->memory.chunks[whole->first].ref + SKY_REF_TAG_AT,
                           satellite->locator.moves, next_copy(satellite, whole->replica));
}

sky_us sky_repair_next_timer(const sky_satellite *satellite) { return satellite->sweep->next_repair; }

void sky_repair_handle_timer(sky_satellite *satellite, sky_us now) {
    sky_sweep *sweep = satellite->sweep;
    sky_questions *questions = &satellite->checks->questions;
    if (now < sweep->next_repair) {
        return;
    }
    sweep->next_repair = now + satellite->config.sweep;
    const bool still = sky_moves_equal(satellite->locator.moves, sweep->repaired_moves) &&
                       sky_handover_at_rest(satellite);
    sweep->repaired_moves = satellite->locator.moves;
    if (!still) {
        return;
    }
    sweep->left_bytes = REPAIRED_BYTES;
    const uint32_t keys = sky_memory_keys(&satellite->memory), first = page_begin(satellite, &sweep->repaired);
    const uint32_t end = keys - first > REPAIRED_KEYS ? first + REPAIRED_KEYS : keys;
    uint32_t asked = 0;
    swept_to(satellite, &sweep->repaired, end - first == REPAIRED_KEYS ? end : 0U);
    for (uint32_t n = first; n < end; n++) {
        const uint32_t share = sky_memory_key_at(&satellite->memory, n);
        uint64_t rank = 0;
        sky_whole whole;
        while (next_whole(satellite, share, &rank, &whole)) {
            const uint32_t place = place_of_next(satellite, &whole);
            uint8_t setting[SKY_SETTING_BYTES];
            const sky_check check = sky_check_of(latest_ref(satellite, share), whole.server, setting);
            if (place == SKY_NOWHERE || place == satellite->here ||
                sky_locator_home(&satellite->locator, satellite->memory.chunks[whole.first].ref) != satellite->here) {
                continue;
            }
            const uint32_t subject = sky_subject_begin(questions, &check, 0);
            if (subject != 0U) {
                (void)sky_batch_ask(questions, &questions->others, place, subject);
                sky_subject_give_back(questions, subject);
            }
            asked += 1U;
        }
        if (asked >= REPAIRED_KEYS) {
            swept_to(satellite, &sweep->repaired, n + 1U);
            break;
        }
    }
    sky_batch_send(satellite, &questions->others, SKY_FOR_REPAIR, SKY_ANSWER_US, now);
}

/* Queues the chunks of a whole share for the satellite of its next copy. */
static void mend(sky_satellite *satellite, uint32_t share, const sky_whole *whole, uint32_t place, uint32_t servers) {
    const sky_memory *memory = &satellite->memory;
    const uint8_t *latest = latest_ref(satellite, share);
    uint32_t in_burst = 0;
    for (uint32_t chunk = whole->first; chunk != 0U; chunk = memory->chunks[chunk].higher) {
        const uint8_t *ref = memory->chunks[chunk].ref;
        if (sky_ref_index(ref) % servers == whole->server && ref[SKY_REF_REPLICA_AT] == whole->replica &&
            sky_ref_same_setting(ref, latest)) {
            sky_handover_enqueue(satellite->handover, place, ref, sky_ref_index(ref),
                                 next_copy(satellite, whole->replica), &in_burst);
        }
    }
}

void sky_repair_checked(sky_satellite *satellite, const sky_question *question, const uint8_t *found, bool same_moves,
                        sky_us now) {
    (void)now;
    sky_questions *questions = &satellite->checks->questions;
    sky_sweep *sweep = satellite->sweep;
    uint32_t entry = question->first;
    for (uint32_t i = 0; same_moves && i < question->count; i++) {
        const sky_subject *subject = sky_subject_of(questions, questions->asked[entry - 1U].subject);
        const uint32_t share = sky_memory_share(&satellite->memory, subject->key);
        uint64_t rank = 0;
        sky_whole whole;
        entry = questions->asked[entry - 1U].next;
        if (found[i] != SKY_LACKING || sweep->left_bytes <= 0 || share == 0U) {
            continue;
        }
        while (next_whole(satellite, share, &rank, &whole)) {
            if (whole.server == subject->server &&
                sky_ref_has_setting(satellite->memory.chunks[whole.first].ref, subject->setting) &&
                place_of_next(satellite, &whole) == question->place) {
                sweep->left_bytes -= (int64_t)whole.count * ((int64_t)subject->length + SKY_REF_BYTES);
                sky_count(&satellite->counters, SKY_copies_mended, whole.count);
                mend(satellite, share, &whole, question->place, subject->servers);
            }
        }
    }
}
