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
#include "satellite.h"
#include "throttle.h"

#define SKY_KNOWN_GROUND_HOSTS 4096U
#define SKY_NO_LINK UINT32_MAX
#define SKY_MAX_DECLARATIONS 360U
#define SKY_DECLARATION_BYTES 16U

typedef struct {
    int64_t made_ms;      /* 0: none is known */
    uint32_t older, newer; /* in the order in which declarations were learned: index + 1 */
    uint8_t down;         /* as declared: bit i is the link to neighbour i */
    uint8_t cut;          /* its links that are down by the word of either end */
    uint8_t ways;         /* on shortest paths from here to it: our links, as bits; while the tree holds */
    uint8_t reached;      /* depth marker of the search that found it, modulo 256; 0: not reached */
} sky_declared;

typedef struct {
    const sky_config *config;
    sky_declared *declared; /* one for each satellite of the torus */
    uint16_t *edge;         /* two queues of the search, one entry for each satellite */
    uint32_t first, last;   /* the oldest and the latest declaration: index + 1, 0: none */
    uint32_t known, cut_links;
    bool tree_holds, stale;
    sky_throttle growing;
    sky_us next_expiry; /* INT64_MIN: to be computed */
    uint64_t searched;  /* satellites visited by searches so far */
    uint64_t healed;    /* how often a link came up again */
} sky_link_state;

typedef struct {
    uint32_t ground;
    sky_link link;
    uint16_t older, newer, next; /* index + 1 */
} sky_known_ground;

typedef struct {
    const sky_config *config;
    sky_link_state links;
    sky_known_ground *grounds; /* an LRU list of SKY_KNOWN_GROUND_HOSTS, hashed by number */
    uint16_t *buckets;         /* index + 1 of the first of each chain */
    uint16_t oldest, newest, count;
} sky_router;

bool sky_router_new(sky_router *router, sky_arena *arena, const sky_config *config);

/* A ground host was heard by a link: answers leave by it. */
void sky_router_remember(sky_router *router, uint32_t ground, sky_link link);
/* The `most` ground hosts that were heard last, the latest first; how many. */
uint32_t sky_router_heard_last(const sky_router *router, uint32_t *grounds, uint32_t most);
/* The link for our own packet to an address, `ground` being the header's; SKY_NO_LINK: there is no way. */
sky_link sky_router_exit(sky_router *router, uint32_t destination, uint32_t ground);
/* The next link of a packet in transit that came by `source`; SKY_NO_LINK. */
sky_link sky_router_onward(sky_router *router, uint32_t destination, uint32_t ground, sky_link source);

/* When the last known declaration of a satellite was made; 0: none is known. */
int64_t sky_links_made_ms(const sky_link_state *links, uint32_t origin);
/* Takes a declaration; false if it is of no satellite here, known, too old, or from the future. `at_once`: our own. */
bool sky_links_learn(sky_link_state *links, uint32_t origin, uint8_t down, int64_t made_ms, sky_us now, bool at_once);
sky_us sky_links_next_expiry(sky_link_state *links);
void sky_links_expire(sky_link_state *links, sky_us now);
sky_us sky_links_next_growth(const sky_link_state *links);
void sky_links_discard_tree(sky_link_state *links, sky_us now);

#endif
