/* Routing: the link that a packet leaves by, on a shortest path around links that are down.
 *
 * Twin of skymemory.protocol.satellite.routing. The link state of all satellites is one entry for each of the torus, by
 * its index (plane-major): what it has declared, and which of its links lie on shortest paths from here.
 */
#ifndef SKY_ROUTING_H
#define SKY_ROUTING_H

#include <stdbool.h>

#include "arena.h"
#include "config.h"
#include "placement/torus.h"
#include "satellite.h"
#include "store/buckets.h"
#include "throttle.h"
#include "wire/packet.h"

#define SKY_NO_LINK UINT32_MAX

typedef struct {
    int64_t made_ms;       /* of its last declaration; 0: none is known */
    uint32_t older, newer; /* in the order in which declarations were learned: index + 1; 0: none */
    uint8_t down;          /* as declared: bit i is the link to neighbour i */
    uint8_t cut;           /* its links that are down by the word of either end */
    uint8_t ways;          /* our links on which shortest paths to it begin, as bits */
    uint8_t reached;       /* by the search: 0 not, 1 on an earlier level, 2 on the next one */
} sky_declared;

typedef struct {
    sky_torus torus;
    uint32_t here;
    sky_declared *declared; /* one for each satellite of the torus */
    uint32_t *edge[2];      /* of the search: one entry for each satellite */
    uint32_t oldest, latest; /* declarations: index + 1; 0: none */
    uint32_t known;
    uint32_t cut_pairs; /* of neighbours whose link is down; 0: the greedy path is shortest */
    bool tree_holds, stale;
    sky_throttle growing;
    bool expiry_known;
    sky_us next_expiry;
    uint64_t changes;  /* whenever this differs, routes may, too */
    uint64_t searched; /* satellites visited by searches so far */
    uint64_t healed;   /* how often a link came up again */
} sky_link_state;

typedef struct {
    uint32_t ground;
    sky_link link;
    uint16_t older, newer; /* numbers; 0: none */
    uint32_t chain;
} sky_known_ground;

typedef struct {
    sky_torus torus;
    uint32_t here;
    bool alternate;
    sky_link_state links;
    /* With gaps, of each cell: our links on which shortest paths to it begin while all links are up, as bits, and how many
     * links lead there. NULL: without gaps both follow from the address. */
    uint8_t *ways;
    uint16_t *away;
    uint64_t changes; /* of the links, when the next hops were found */
    uint8_t *hops;    /* by destination and axis by which packets come: direction + 1; 0: not found yet */
    uint64_t hash_seed[2];
    sky_known_ground *grounds; /* from the one heard longest ago to the latest, and hashed by number */
    sky_buckets buckets;
    uint16_t oldest, latest, count, most;
} sky_router;

/* The next satellite of a packet for `there` while all links are up, planes first or alternating; `here` where it has arrived
 * or none leads there. With gaps: the one that the rule names if it is on a shortest path, else the first that is. */
uint32_t sky_router_next(const sky_router *router, uint32_t there, bool alternate, sky_axis came);
/* How many links lead to a satellite. */
uint32_t sky_router_away(const sky_router *router, uint32_t there);

bool sky_router_new(sky_router *router, sky_arena *arena, const sky_config *config);
/* A ground host by its number, from 1. The first ones lie at the end, beside the first buckets. */
static inline sky_known_ground *sky_ground_at(const sky_router *router, uint32_t number) {
    return &router->grounds[router->most - number];
}

/* A ground host was heard by a link: answers leave by it. */
void sky_router_remember(sky_router *router, uint32_t ground, sky_link link);
/* The `most` ground hosts that were heard last, the latest first; how many. */
uint32_t sky_router_heard_last(const sky_router *router, uint32_t *grounds, uint32_t most);
/* The link for our own packet to an address, `ground` being the header's; SKY_NO_LINK: there is no route. */
sky_link sky_router_exit(sky_router *router, uint32_t destination, uint32_t ground);
/* The next link of a packet in transit that came by `source`; SKY_NO_LINK. */
sky_link sky_router_onward(sky_router *router, uint32_t destination, uint32_t ground, sky_link source);

/* When the last known declaration of a satellite was made; 0: none is known. */
int64_t sky_links_made_ms(const sky_link_state *links, uint32_t origin);
/* Takes a declaration; false if it is of no satellite here, known, too old, or from the future. `at_once`: our own. */
bool sky_links_learn(sky_link_state *links, uint32_t origin, uint8_t down, int64_t made_ms, sky_us now, bool at_once);
sky_us sky_links_next_expiry(sky_link_state *links);
/* The oldest declaration, and the next after one: index + 1; 0: there is none. */
uint32_t sky_links_oldest(const sky_link_state *links);
uint32_t sky_links_after(const sky_link_state *links, uint32_t declaration);
/* A declaration (index of its satellite) as in LINKS. */
void sky_links_pack(const sky_link_state *links, uint32_t index, uint8_t record[SKY_DECLARATION_BYTES]);
void sky_links_expire(sky_link_state *links, sky_us now);
sky_us sky_links_next_growth(const sky_link_state *links);
void sky_links_discard_tree(sky_link_state *links, sky_us now);

#endif
