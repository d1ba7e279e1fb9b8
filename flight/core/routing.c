#include "routing.h"

#include <string.h>

#include "store/hash.h"

#define LIFETIME_MS 200000  /* a declaration not repeated for this long is forgotten: its origin may be dead */
#define MOST_AHEAD_MS 60000 /* those from further ahead are refused: no later one would ever be newer */

static void remember_ways(sky_router *router, uint8_t *ways, uint16_t *away);

/* --- Ground hosts: an LRU list, hashed by number --- */

bool sky_router_new(sky_router *router, sky_arena *arena, const sky_config *config) {
    const size_t cells = (size_t)config->planes * config->slots;
    sky_buckets buckets;
    const bool whole = sky_buckets_new(&buckets, arena, config->most_ground_hosts);
    uint8_t *hops = sky_take(arena, cells, 3U);
    sky_known_ground *grounds = sky_take(arena, config->most_ground_hosts, sizeof *grounds);
    sky_declared *declared = sky_take(arena, cells, sizeof *declared);
    uint32_t *edge = sky_take(arena, cells, 2U * sizeof *edge);
    uint8_t *ways = config->gaps != NULL ? sky_take(arena, cells, sizeof *ways) : NULL;
    uint16_t *away = config->gaps != NULL ? sky_take(arena, cells, sizeof *away) : NULL;
    if (!whole || edge == NULL) {
        return false;
    }
    (void)memset(router, 0, sizeof *router);
    router->torus = sky_config_torus(config);
    router->here = config->address;
    router->alternate = config->routing == SKY_ALTERNATE;
    router->hash_seed[0] = config->hash_seed[0];
    router->hash_seed[1] = config->hash_seed[1];
    router->grounds = grounds;
    router->most = (uint16_t)config->most_ground_hosts;
    router->buckets = buckets;
    router->hops = hops;
    router->links.torus = router->torus;
    router->links.here = router->here;
    router->links.declared = declared;
    router->links.edge[0] = edge;
    router->links.edge[1] = edge + cells;
    router->links.expiry_known = true;
    router->links.next_expiry = SKY_NEVER;
    sky_throttle_begin(&router->links.growing, SKY_AT_ONCE, SKY_SHORT_HOLD_US);
    if (ways != NULL) {
        remember_ways(router, ways, away);
    }
    return true;
}

static uint32_t *bucket_of(const sky_router *router, uint32_t ground) {
    return sky_bucket(&router->buckets, sky_hash_word(router->hash_seed, ground));
}

static void chain_up(sky_router *router, uint32_t at) {
    sky_known_ground *host = sky_ground_at(router, at);
    uint32_t *bucket = bucket_of(router, host->ground);
    host->chain = *bucket;
    *bucket = at;
}

static uint16_t find_ground(const sky_router *router, uint32_t ground) {
    uint32_t at = router->latest; /* nearly always */
    if (at != 0U && sky_ground_at(router, at)->ground != ground) {
        at = *bucket_of(router, ground);
        while (at != 0U && sky_ground_at(router, at)->ground != ground) {
            at = sky_ground_at(router, at)->chain;
        }
    }
    return (uint16_t)at;
}

static void unchain(sky_router *router, uint16_t at) {
    uint32_t *link = bucket_of(router, sky_ground_at(router, at)->ground);
    while (*link != at) {
        link = &sky_ground_at(router, *link)->chain;
    }
    *link = sky_ground_at(router, at)->chain;
}

static void unlist(sky_router *router, uint16_t at) {
    const sky_known_ground *host = sky_ground_at(router, at);
    if (host->older != 0U) {
        sky_ground_at(router, host->older)->newer = host->newer;
    } else {
        router->oldest = host->newer;
    }
    if (host->newer != 0U) {
        sky_ground_at(router, host->newer)->older = host->older;
    } else {
        router->latest = host->older;
    }
}

static void list_latest(sky_router *router, uint16_t at) {
    sky_known_ground *host = sky_ground_at(router, at);
    host->older = router->latest;
    host->newer = 0U;
    if (router->latest != 0U) {
        sky_ground_at(router, router->latest)->newer = at;
    } else {
        router->oldest = at;
    }
    router->latest = at;
}

void sky_router_remember(sky_router *router, uint32_t ground, sky_link link) {
    uint16_t at = find_ground(router, ground);
    if (at == 0U) {
        if (router->count < router->most) {
            at = ++router->count;
            uint32_t parted = sky_buckets_part(&router->buckets, router->count);
            while (parted != 0U) {
                const uint32_t next = sky_ground_at(router, parted)->chain;
                chain_up(router, parted);
                parted = next;
            }
        } else {
            at = router->oldest;
            unchain(router, at);
            unlist(router, at);
        }
        sky_known_ground *host = sky_ground_at(router, at);
        host->ground = ground;
        chain_up(router, at);
        list_latest(router, at);
    } else if (at != router->latest) {
        unlist(router, at);
        list_latest(router, at);
    } else {
        /* it is the latest already */
    }
    sky_ground_at(router, at)->link = link;
}

uint32_t sky_router_heard_last(const sky_router *router, uint32_t *grounds, uint32_t most) {
    uint32_t count = 0U;
    for (uint16_t at = router->latest; at != 0U && count < most; at = sky_ground_at(router, at)->older) {
        grounds[count++] = sky_ground_at(router, at)->ground;
    }
    return count;
}

static sky_link beam(const sky_router *router, uint32_t destination, uint32_t ground) {
    const uint16_t at = destination >> 24 == SKY_GROUND_SHELL ? find_ground(router, ground) : 0U;
    return at != 0U ? sky_ground_at(router, at)->link : SKY_NO_LINK;
}

/* --- The shortest-path tree from here --- */

static bool is_cut(const sky_link_state *links, uint32_t from, unsigned direction) {
    return (links->declared[from].cut >> direction & 1U) != 0U;
}

/* Breadth-first: a satellite is reached by every link that reaches a nearer neighbour. `away`, if it is not NULL, gets how
 * many links lead to each. */
static void grow(sky_link_state *links, uint16_t *away) {
    const uint32_t cells = (uint32_t)links->torus.planes * links->torus.slots;
    const uint32_t here = sky_torus_index(links->torus, links->here);
    uint32_t count = 1U, visited = 1U;
    uint16_t far = 0U;
    unsigned level = 0U;
    for (uint32_t each = 0U; each < cells; each++) {
        links->declared[each].reached = 0U;
        links->declared[each].ways = 0U;
    }
    links->declared[here].reached = 1U;
    links->edge[0][0] = here;
    while (count > 0U) {
        uint32_t *next = links->edge[1U - level];
        uint32_t found = 0U;
        for (uint32_t each = 0U; each < count; each++) {
            const uint32_t at = links->edge[level][each];
            const uint32_t address = sky_torus_at(links->torus, at);
            const uint8_t ways = links->declared[at].ways;
            for (unsigned direction = 0U; direction < 4U; direction++) {
                const uint32_t other =
                    sky_torus_index(links->torus, sky_neighbour(links->torus, address, (sky_direction)direction));
                sky_declared *there = &links->declared[other];
                if (there->reached == 1U || is_cut(links, at, direction)) {
                    continue;
                }
                if (there->reached == 0U) {
                    there->reached = 2U;
                    next[found++] = other;
                }
                there->ways = (uint8_t)(there->ways | (ways != 0U ? ways : 1U << direction));
            }
        }
        far++;
        for (uint32_t each = 0U; each < found; each++) {
            links->declared[next[each]].reached = 1U;
            if (away != NULL) {
                away[next[each]] = far;
            }
        }
        visited += found;
        count = found;
        level = 1U - level;
    }
    links->searched += visited;
    links->tree_holds = true;
}

/* The tree while all links are up: it decides between paths that are equally short. */
static void remember_ways(sky_router *router, uint8_t *ways, uint16_t *away) {
    const uint32_t cells = (uint32_t)router->torus.planes * router->torus.slots;
    router->ways = ways;
    router->away = away;
    grow(&router->links, away);
    for (uint32_t each = 0U; each < cells; each++) {
        ways[each] = router->links.declared[each].ways;
    }
    router->links.searched = 0U; /* work of the start, which the twin does elsewhere */
    router->links.tree_holds = false;
}

uint32_t sky_router_away(const sky_router *router, uint32_t there) {
    return router->away != NULL ? router->away[sky_torus_index(router->torus, there)]
                                : sky_hops(router->torus, router->here, there);
}

uint32_t sky_router_next(const sky_router *router, uint32_t there, bool alternate, sky_axis came) {
    const uint32_t usual = sky_next_hop(router->torus, router->here, there, alternate, came);
    uint32_t found = usual;
    if (router->ways != NULL) {
        const uint8_t ways = router->ways[sky_torus_index(router->torus, there)];
        bool chosen = false;
        found = router->here;
        for (unsigned direction = 0U; direction < 4U && !chosen; direction++) {
            const uint32_t neighbour = sky_neighbour(router->torus, router->here, (sky_direction)direction);
            if ((ways >> direction & 1U) != 0U) {
                found = found == router->here || neighbour == usual ? neighbour : found;
                chosen = neighbour == usual;
            }
        }
    }
    return found;
}

/* The first of the links `ways` that is up and leads to `greedy`, else the first that is up; 4: none is. */
static unsigned living(const sky_link_state *links, uint8_t ways, uint32_t greedy) {
    const uint32_t here = sky_torus_index(links->torus, links->here);
    unsigned first = 4U;
    for (unsigned direction = 0U; direction < 4U; direction++) {
        if ((ways >> direction & 1U) == 0U || is_cut(links, here, direction)) {
            continue;
        }
        if (sky_neighbour(links->torus, links->here, (sky_direction)direction) == greedy) {
            return direction;
        }
        first = first < 4U ? first : direction;
    }
    return first;
}

static unsigned direction_of(sky_torus torus, uint32_t here, uint32_t neighbour) {
    unsigned direction = 0U;
    while (direction < 3U && sky_neighbour(torus, here, (sky_direction)direction) != neighbour) {
        direction++;
    }
    return direction;
}

/* The direction from here to another satellite; 4: no route. Where no path is known the link state may be outdated: then
 * the greedy way, if its link is up. */
static unsigned around(sky_link_state *links, uint32_t there, uint32_t greedy) {
    const uint32_t index = sky_torus_index(links->torus, there);
    const unsigned usual = direction_of(links->torus, links->here, greedy);
    unsigned found;
    if (links->cut_pairs == 0U) {
        return usual;
    }
    if (!links->tree_holds) {
        grow(links, NULL);
    }
    const uint8_t ways = links->declared[index].ways;
    found = living(links, ways, greedy);
    if (ways != 0U && found == 4U) { /* all links of the tree have just gone down */
        grow(links, NULL);
        found = living(links, links->declared[index].ways, greedy);
    }
    if (found == 4U && !is_cut(links, sky_torus_index(links->torus, links->here), usual)) {
        found = usual;
    }
    return found;
}

static sky_link onward(sky_router *router, uint32_t there, sky_axis came) {
    const size_t cells = (size_t)router->torus.planes * router->torus.slots;
    uint8_t *hop = &router->hops[(size_t)sky_torus_index(router->torus, there) * 3U + (size_t)came];
    if (router->changes != router->links.changes) {
        router->changes = router->links.changes;
        (void)memset(router->hops, 0, cells * 3U);
    }
    if (*hop == 0U) {
        const uint32_t greedy = sky_router_next(router, there, router->alternate, came);
        const unsigned direction = greedy == router->here ? 4U : around(&router->links, there, greedy);
        if (direction == 4U) {
            return SKY_NO_LINK;
        }
        *hop = (uint8_t)(direction + 1U);
    }
    return sky_neighbour(router->torus, router->here, (sky_direction)(*hop - 1U));
}

sky_link sky_router_exit(sky_router *router, uint32_t destination, uint32_t ground) {
    const uint32_t there = destination & 0xFFFFFFU;
    if (there == router->here) {
        return beam(router, destination, ground);
    }
    return sky_on_torus(router->torus, there) ? onward(router, there, SKY_NO_AXIS) : SKY_NO_LINK;
}

sky_link sky_router_onward(sky_router *router, uint32_t destination, uint32_t ground, sky_link source) {
    const uint32_t there = destination & 0xFFFFFFU;
    sky_axis came = SKY_NO_AXIS;
    if (there == router->here) {
        return beam(router, destination, ground);
    }
    if (source < SKY_BEAM) {
        came = sky_plane_of(source) == sky_plane_of(router->here) ? SKY_SLOT_AXIS : SKY_PLANE_AXIS;
    }
    return sky_on_torus(router->torus, there) ? onward(router, there, came) : SKY_NO_LINK;
}

/* --- Link state ---
 *
 * Every satellite declares its own dead links; the time of a declaration orders those of one satellite. One is dead to
 * the others when all its neighbours have declared their links to it down. A link that nobody declares counts as up. */

int64_t sky_links_made_ms(const sky_link_state *links, uint32_t origin) {
    return links->declared[sky_torus_index(links->torus, origin)].made_ms;
}

void sky_links_discard_tree(sky_link_state *links, sky_us now) {
    if (links->stale) {
        links->stale = false;
        sky_throttle_done(&links->growing, now);
        links->tree_holds = false;
        links->changes++;
    }
}

/* The links of a satellite that lead to another, as bits: two on a ring of two. */
static uint8_t links_to(sky_torus torus, uint32_t from, uint32_t to) {
    uint8_t bits = 0U;
    for (unsigned direction = 0U; direction < 4U; direction++) {
        if (sky_neighbour(torus, from, (sky_direction)direction) == to) {
            bits = (uint8_t)(bits | 1U << direction);
        }
    }
    return bits;
}

/* Applies what `origin` declares: a link is down if either end says so. */
static void changed(sky_link_state *links, uint32_t origin, sky_us now, bool at_once) {
    sky_declared *ours = &links->declared[sky_torus_index(links->torus, origin)];
    uint8_t seen = 0U;
    for (unsigned direction = 0U; direction < 4U; direction++) {
        const uint32_t other = sky_neighbour(links->torus, origin, (sky_direction)direction);
        sky_declared *theirs = &links->declared[sky_torus_index(links->torus, other)];
        const uint8_t there = links_to(links->torus, origin, other), back = links_to(links->torus, other, origin);
        if ((seen & there) != 0U) {
            continue;
        }
        seen = (uint8_t)(seen | there);
        const bool was = (ours->cut & there) != 0U;
        if ((ours->down & there) != 0U || (theirs->down & back) != 0U) {
            ours->cut = (uint8_t)(ours->cut | there);
            theirs->cut = (uint8_t)(theirs->cut | back);
            links->cut_pairs += was ? 0U : 1U;
        } else if (was) {
            ours->cut = (uint8_t)(ours->cut & ~there);
            theirs->cut = (uint8_t)(theirs->cut & ~back);
            links->cut_pairs--;
            links->healed++;
        } else {
            /* it was up before */
        }
    }
    links->stale = true;
    links->changes++;
    if (at_once || sky_throttle_is_open(&links->growing, now)) {
        sky_links_discard_tree(links, now);
    }
}

static void forget(sky_link_state *links, uint32_t index) {
    sky_declared *gone = &links->declared[index];
    if (gone->made_ms == 0) {
        return;
    }
    if (gone->older != 0U) {
        links->declared[gone->older - 1U].newer = gone->newer;
    } else {
        links->oldest = gone->newer;
    }
    if (gone->newer != 0U) {
        links->declared[gone->newer - 1U].older = gone->older;
    } else {
        links->latest = gone->older;
    }
    gone->older = 0U;
    gone->newer = 0U;
    gone->made_ms = 0;
    gone->down = 0U;
    links->known--;
}

bool sky_links_learn(sky_link_state *links, uint32_t origin, uint8_t down, int64_t made_ms, sky_us now, bool at_once) {
    if (!sky_on_torus(links->torus, origin)) {
        return false;
    }
    const uint32_t index = sky_torus_index(links->torus, origin);
    sky_declared *declared = &links->declared[index];
    /* In this order, so that no product overflows: nothing so far ahead is made. */
    if (made_ms <= declared->made_ms || made_ms > now / 1000 + MOST_AHEAD_MS + 1 ||
        made_ms * 1000 > now + MOST_AHEAD_MS * INT64_C(1000) || now - made_ms * 1000 >= LIFETIME_MS * INT64_C(1000)) {
        return false;
    }
    const uint8_t before = declared->down;
    forget(links, index);
    declared->made_ms = made_ms;
    declared->down = down;
    declared->older = links->latest;
    declared->newer = 0U;
    if (links->latest != 0U) {
        links->declared[links->latest - 1U].newer = index + 1U;
    } else {
        links->oldest = index + 1U;
    }
    links->latest = index + 1U;
    links->known++;
    links->expiry_known = false;
    if (before != down) {
        changed(links, origin, now, at_once);
    }
    return true;
}

static sky_us end_of(const sky_declared *declared) { return (declared->made_ms + LIFETIME_MS) * 1000; }

sky_us sky_links_next_expiry(sky_link_state *links) {
    if (!links->expiry_known) {
        links->expiry_known = true;
        links->next_expiry = SKY_NEVER;
        for (uint32_t at = links->oldest; at != 0U; at = links->declared[at - 1U].newer) {
            const sky_us end = end_of(&links->declared[at - 1U]);
            links->next_expiry = end < links->next_expiry ? end : links->next_expiry;
        }
    }
    return links->next_expiry;
}

uint32_t sky_links_oldest(const sky_link_state *links) { return links->oldest; }

uint32_t sky_links_after(const sky_link_state *links, uint32_t declaration) {
    return links->declared[declaration - 1U].newer;
}

void sky_links_pack(const sky_link_state *links, uint32_t index, uint8_t record[SKY_DECLARATION_BYTES]) {
    const sky_declared *declared = &links->declared[index];
    const sky_declaration declaration = {sky_torus_at(links->torus, index), declared->down, (uint64_t)declared->made_ms};
    sky_declaration_build(record, &declaration);
}

void sky_links_expire(sky_link_state *links, sky_us now) {
    uint32_t at = links->oldest;
    while (at != 0U) {
        const uint32_t index = at - 1U;
        at = links->declared[index].newer;
        if (end_of(&links->declared[index]) <= now) {
            forget(links, index);
            changed(links, sky_torus_at(links->torus, index), now, false);
            links->expiry_known = false;
        }
    }
}

sky_us sky_links_next_growth(const sky_link_state *links) { return links->stale ? links->growing.open_us : SKY_NEVER; }
