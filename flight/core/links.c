/* An idle link costs nothing: a neighbour is asked only when a packet is sent to it and it has been silent for a while.
 * One that does not answer TRIES questions is declared down, the declaration is flooded, and it is asked again now and
 * then until it answers. */

#include "links.h"

#include "state.h"

#define FRESH_US 200000 /* a neighbour heard this recently is not asked */
#define TRIES 4         /* unanswered questions after which the link counts as down */
#define MOST_AHEAD_US INT64_C(60000000) /* pushes and declarations from further ahead are not believed */
#define REFRESH_US INT64_C(60000000)    /* how often a satellite with a dead link repeats its declaration */
#define REPORTED_LATE_US 2000000 /* how long a neighbour's word counts that its host is late */
#define MOST_LATE_US 1000000     /* by which lateness prolongs a timeout; beyond it a silence does not count at all */
#define FIRST_RETRY_US 1000000   /* a link that is down is asked after 1, 2, 4, 8, 8 ... s */
#define LAST_RETRY_US 8000000
#define LATE_STEP_US 10000
#define NEVER_HEARD (INT64_MIN / 4)

bool sky_neighbours_new(sky_neighbours *neighbours, sky_arena *arena, const sky_config *config) {
    const size_t cells = (size_t)config->planes * config->slots;
    const sky_torus torus = sky_config_torus(config);
    sky_news *news = sky_take(arena, cells, sizeof *news);
    uint32_t *news_at = sky_take(arena, cells, sizeof *news_at);
    uint8_t *body = sky_take_shared(
        arena, 1U, (size_t)SKY_LINKS_HEAD + (size_t)SKY_MOST_DECLARATIONS * (size_t)SKY_DECLARATION_BYTES);
    if (news == NULL || news_at == NULL || body == NULL) {
        return false;
    }
    neighbours->body = body;
    neighbours->news = news;
    neighbours->news_at = news_at;
    neighbours->refresh = SKY_NEVER;
    sky_throttle_begin(&neighbours->flooding, SKY_AT_ONCE, SKY_SHORT_HOLD_US);
    for (unsigned direction = 0U; direction < 4U; direction++) {
        const uint32_t name = sky_neighbour(torus, config->address, (sky_direction)direction);
        uint32_t at = 0U;
        if (name == config->address) {
            continue;
        }
        while (at < neighbours->count && neighbours->of[at].name != name) {
            at++;
        }
        sky_link_end *found = &neighbours->of[at];
        if (at == neighbours->count) {
            neighbours->count++;
            found->name = name;
            found->heard = NEVER_HEARD;
            found->deadline = SKY_NEVER;
            found->retry = FIRST_RETRY_US;
            found->late_until = NEVER_HEARD;
        }
        found->bits = (uint8_t)(found->bits | 1U << direction);
    }
    return true;
}

static sky_link_end *find(sky_neighbours *neighbours, uint32_t name) {
    for (uint32_t at = 0U; at < neighbours->count; at++) {
        if (neighbours->of[at].name == name) {
            return &neighbours->of[at];
        }
    }
    return NULL;
}

/* --- Messages --- */

/* LINKS to a neighbour, with `count` declarations that are in place already. */
static void send(sky_satellite *satellite, uint32_t name, uint32_t count, bool answer_me, sky_us now) {
    sky_neighbours *neighbours = &satellite->neighbours;
    const sky_us late = (sky_lateness_at(&satellite->lateness, now) + LATE_STEP_US / 2) / LATE_STEP_US;
    const sky_links links = {answer_me,
                             (uint8_t)(late < UINT8_MAX ? late : UINT8_MAX),
                             satellite->locator.pushed.slot,
                             satellite->locator.pushed.plane,
                             (uint64_t)neighbours->pushed_at_ms,
                             count,
                             NULL};
    uint8_t *body = neighbours->body;
    sky_links_build(body, &links);
    sky_send_links(&satellite->outbox, name, body, SKY_LINKS_HEAD + count * (size_t)SKY_DECLARATION_BYTES, now);
}

static uint8_t *record(sky_neighbours *neighbours, uint32_t number) {
    return neighbours->body + SKY_LINKS_HEAD + number * (size_t)SKY_DECLARATION_BYTES;
}

static void send_all_known(sky_satellite *satellite, uint32_t name, sky_us now) {
    const sky_link_state *links = &satellite->router.links;
    uint32_t at = sky_links_oldest(links), count = 0U;
    if (at == 0U) {
        send(satellite, name, 0U, false, now);
    }
    while (at != 0U) {
        sky_links_pack(links, at - 1U, record(&satellite->neighbours, count));
        count++;
        at = sky_links_after(links, at);
        if (count == SKY_MOST_DECLARATIONS || at == 0U) {
            send(satellite, name, count, false, now);
            count = 0U;
        }
    }
}

/* News to all neighbours whose links are up, but not back to where it came from. */
static void send_news(sky_satellite *satellite, sky_us now) {
    sky_neighbours *neighbours = &satellite->neighbours;
    const sky_link_state *links = &satellite->router.links;
    if (neighbours->news_count == 0U || !sky_throttle_is_open(&neighbours->flooding, now)) {
        return;
    }
    sky_throttle_done(&neighbours->flooding, now);
    for (uint32_t each = 0U; each < neighbours->count; each++) {
        const sky_link_end *neighbour = &neighbours->of[each];
        uint32_t count = 0U;
        for (uint32_t at = 0U; at < neighbours->news_count && !neighbour->down; at++) {
            const sky_news *news = &neighbours->news[at];
            const uint32_t index = sky_torus_index(links->torus, news->origin);
            if (news->source == neighbour->name || links->declared[index].made_ms == 0) {
                continue;
            }
            sky_links_pack(links, index, record(neighbours, count));
            count++;
            if (count == SKY_MOST_DECLARATIONS) {
                send(satellite, neighbour->name, count, false, now);
                count = 0U;
            }
        }
        if (count > 0U) {
            send(satellite, neighbour->name, count, false, now);
        }
    }
    for (uint32_t at = 0U; at < neighbours->news_count; at++) {
        neighbours->news_at[sky_torus_index(links->torus, neighbours->news[at].origin)] = 0U;
    }
    neighbours->news_count = 0U;
}

static void add_news(sky_satellite *satellite, uint32_t origin, uint32_t source) {
    sky_neighbours *neighbours = &satellite->neighbours;
    uint32_t *at = &neighbours->news_at[sky_torus_index(satellite->router.torus, origin)];
    if (*at == 0U) {
        neighbours->news[neighbours->news_count].origin = origin;
        neighbours->news_count++;
        *at = neighbours->news_count;
    }
    neighbours->news[*at - 1U].source = source;
}

static uint8_t our_bits(const sky_neighbours *neighbours) {
    uint8_t bits = 0U;
    for (uint32_t each = 0U; each < neighbours->count; each++) {
        if (neighbours->of[each].down) {
            bits = (uint8_t)(bits | neighbours->of[each].bits);
        }
    }
    return bits;
}

/* Floods which of our links are down now, with a time later than `outdo_ms` and all our earlier declarations, even if
 * the clock was set back. */
static void declare(sky_satellite *satellite, sky_us now, int64_t outdo_ms) {
    sky_link_state *links = &satellite->router.links;
    const uint8_t bits = our_bits(&satellite->neighbours);
    const int64_t known_ms = sky_links_made_ms(links, satellite->here);
    int64_t made_ms = now / 1000;
    made_ms = made_ms > known_ms ? made_ms : known_ms + 1;
    made_ms = made_ms > outdo_ms ? made_ms : outdo_ms + 1;
    satellite->neighbours.refresh = bits != 0U ? now + REFRESH_US : SKY_NEVER;
    if (sky_links_learn(links, satellite->here, bits, made_ms, now, true)) {
        add_news(satellite, satellite->here, SKY_NO_LINK);
        send_news(satellite, now);
    }
}

/* --- Traffic on the links --- */

static void probe(sky_satellite *satellite, sky_link_end *neighbour, sky_us now) {
    const sky_us late = sky_lateness_at(&satellite->lateness, now);
    neighbour->tries = (uint8_t)(neighbour->tries < UINT8_MAX ? neighbour->tries + 1 : UINT8_MAX);
    neighbour->our_late = late < MOST_LATE_US ? late : MOST_LATE_US;
    if (neighbour->down) {
        neighbour->deadline = now + neighbour->retry;
    } else {
        sky_us its_late = now < neighbour->late_until ? neighbour->late : 0;
        its_late = its_late < MOST_LATE_US ? its_late : MOST_LATE_US;
        neighbour->deadline = now + satellite->config.neighbour_timeout + 2 * (neighbour->our_late + its_late);
    }
    send(satellite, neighbour->name, 0U, true, now);
}

void sky_neighbour_heard(sky_satellite *satellite, uint32_t neighbour, sky_us now) {
    sky_link_end *found = find(&satellite->neighbours, neighbour);
    if (found == NULL) {
        return;
    }
    found->heard = now;
    found->deadline = SKY_NEVER;
    if (found->down) {
        found->down = false;
        declare(satellite, now, 0);
        send_all_known(satellite, neighbour, now);
    }
}

void sky_neighbour_used(sky_satellite *satellite, sky_link link, sky_us now) {
    sky_link_end *found = find(&satellite->neighbours, link);
    if (found != NULL && found->deadline == SKY_NEVER && found->heard + FRESH_US <= now) {
        found->tries = 0U;
        probe(satellite, found, now);
    }
}

void sky_neighbours_greet(sky_satellite *satellite, sky_us now) {
    for (uint32_t each = 0U; each < satellite->neighbours.count; each++) {
        send(satellite, satellite->neighbours.of[each].name, 0U, true, now);
    }
}

/* Asks our neighbours near satellites that are declared silent: a dead satellite is rarely dead alone. */
static void probe_around(sky_satellite *satellite, uint32_t origin, uint8_t down, sky_us now) {
    const sky_torus torus = satellite->router.torus;
    for (unsigned direction = 0U; direction < 4U; direction++) {
        if ((down >> direction & 1U) != 0U) {
            const uint32_t silent = sky_neighbour(torus, origin, (sky_direction)direction);
            sky_neighbour_used(satellite, silent, now);
            for (unsigned next = 0U; next < 4U; next++) {
                sky_neighbour_used(satellite, sky_neighbour(torus, silent, (sky_direction)next), now);
            }
        }
    }
}

/* Replaces a declaration in our name that still circulates, from before a restart or forged. One so far ahead that no
 * satellite believes it is ignored. */
static void contradict(sky_satellite *satellite, uint8_t down, int64_t made_ms, sky_us now) {
    const int64_t known_ms = sky_links_made_ms(&satellite->router.links, satellite->here);
    if (down != our_bits(&satellite->neighbours) && known_ms < made_ms && made_ms <= INT64_MAX / 1000 &&
        made_ms * 1000 < now + MOST_AHEAD_US) {
        declare(satellite, now, made_ms);
    }
}

/* The latest push wins; one that would move the box too far or too often is ignored. */
static void follow_push(sky_satellite *satellite, sky_moves pushed, uint64_t at_ms, sky_link source, sky_us now) {
    sky_neighbours *neighbours = &satellite->neighbours;
    const bool later =
        at_ms <= (uint64_t)((now + MOST_AHEAD_US) / 1000) && neighbours->pushed_at_ms < (int64_t)at_ms;
    const bool moved = later && !sky_moves_equal(pushed, satellite->locator.pushed);
    if (!later || (moved && !sky_locator_may_push(&satellite->locator, pushed, now, SKY_MOST_PUSHED))) {
        return;
    }
    neighbours->pushed_at_ms = (int64_t)at_ms;
    if (!moved) {
        return;
    }
    sky_locator_push(&satellite->locator, pushed);
    for (uint32_t each = 0U; each < neighbours->count; each++) {
        if (neighbours->of[each].name != source && !neighbours->of[each].down) {
            send(satellite, neighbours->of[each].name, 0U, false, now);
        }
    }
}

bool sky_neighbours_receive(sky_satellite *satellite, const sky_header *header, const uint8_t *body, size_t bytes,
                            sky_link source, sky_us now) {
    sky_neighbours *neighbours = &satellite->neighbours;
    sky_link_state *links = &satellite->router.links;
    uint32_t fresh[SKY_MOST_DECLARATIONS], fresh_count = 0U;
    sky_links links_body;
    if (!sky_links_parse(body, bytes, &links_body)) {
        return false;
    }
    if (source >= SKY_BEAM || header->source != source) {
        return false; /* only the neighbour at the other end of the link is believed */
    }
    sky_link_end *neighbour = find(neighbours, source);
    if (links_body.late != 0U && neighbour != NULL) {
        neighbour->late = (sky_us)links_body.late * LATE_STEP_US;
        neighbour->late_until = now + REPORTED_LATE_US;
    }
    for (uint32_t each = 0U; each < links_body.count; each++) {
        sky_declaration declared;
        sky_declaration_at(links_body.declarations, each, &declared);
        const uint32_t origin = declared.origin & 0xFFFFFFU;
        const uint8_t down = declared.down & 0x0FU;
        const int64_t made_ms = declared.made_ms <= (uint64_t)INT64_MAX ? (int64_t)declared.made_ms : INT64_MAX;
        if (origin == satellite->here) {
            contradict(satellite, down, made_ms, now);
        } else if (sky_links_learn(links, origin, down, made_ms, now, false)) {
            fresh[fresh_count++] = origin;
            probe_around(satellite, origin, down, now);
        } else {
            /* known, or not to be believed */
        }
    }
    const sky_moves pushed = {links_body.pushed_slot, links_body.pushed_plane};
    follow_push(satellite, pushed, links_body.pushed_at_ms, source, now);
    for (uint32_t each = 0U; each < fresh_count; each++) {
        add_news(satellite, fresh[each], source);
    }
    if (fresh_count > 0U) {
        send_news(satellite, now);
    }
    if (links_body.answer_me) {
        send_all_known(satellite, source, now);
    }
    return true;
}

/* --- Timers --- */

sky_us sky_neighbours_next_timer(sky_satellite *satellite) {
    sky_neighbours *neighbours = &satellite->neighbours;
    sky_us soonest = neighbours->refresh;
    const sky_us expiry = sky_links_next_expiry(&satellite->router.links);
    const sky_us growth = sky_links_next_growth(&satellite->router.links);
    soonest = expiry < soonest ? expiry : soonest;
    soonest = growth < soonest ? growth : soonest;
    if (neighbours->news_count > 0U && neighbours->flooding.open_us < soonest) {
        soonest = neighbours->flooding.open_us;
    }
    for (uint32_t each = 0U; each < neighbours->count; each++) {
        soonest = neighbours->of[each].deadline < soonest ? neighbours->of[each].deadline : soonest;
    }
    return soonest;
}

void sky_neighbours_handle_timer(sky_satellite *satellite, sky_us now) {
    sky_neighbours *neighbours = &satellite->neighbours;
    sky_link_state *links = &satellite->router.links;
    const sky_us late = sky_lateness_at(&satellite->lateness, now);
    bool lost = false;
    for (uint32_t each = 0U; each < neighbours->count; each++) {
        sky_link_end *neighbour = &neighbours->of[each];
        if (neighbour->deadline > now) {
            continue;
        }
        if (neighbour->down) {
            neighbour->retry = 2 * neighbour->retry < LAST_RETRY_US ? 2 * neighbour->retry : LAST_RETRY_US;
            probe(satellite, neighbour, now);
            continue;
        }
        if (late > neighbour->our_late + SKY_LATE_US) {
            neighbour->tries = 0U; /* our host has become late: answers may still wait here */
        }
        if (neighbour->tries < TRIES) {
            probe(satellite, neighbour, now);
        } else {
            neighbour->down = true;
            lost = true;
            neighbour->retry = FIRST_RETRY_US;
            neighbour->deadline = now + FIRST_RETRY_US;
        }
    }
    if (lost || neighbours->refresh <= now) {
        declare(satellite, now, 0);
    }
    if (sky_links_next_expiry(links) <= now) {
        sky_links_expire(links, now);
    }
    if (sky_links_next_growth(links) <= now) {
        sky_links_discard_tree(links, now);
    }
    send_news(satellite, now);
}

void sky_neighbours_probe_down(sky_satellite *satellite, sky_us now) {
    for (uint32_t each = 0U; each < satellite->neighbours.count; each++) {
        sky_link_end *neighbour = &satellite->neighbours.of[each];
        if (neighbour->down) {
            neighbour->retry = FIRST_RETRY_US / 2;
            neighbour->deadline = now;
        }
    }
}
