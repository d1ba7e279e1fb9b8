/* Which links to neighbours are alive; declared to all satellites, and learned from them (LINKS).
 *
 * Twin of skymemory.protocol.satellite.links.
 */
#ifndef SKY_LINKS_H
#define SKY_LINKS_H

#include <stdbool.h>

#include "arena.h"
#include "config.h"
#include "routing.h"
#include "satellite.h"
#include "throttle.h"
#include "wire/packet.h"

typedef struct {
    uint32_t name;
    uint8_t bits; /* on a ring of two one neighbour is at the end of two links */
    bool down;
    uint8_t tries;
    sky_us heard;
    sky_us deadline; /* when its answer is overdue; of one that is down, when it is asked again */
    sky_us retry;
    sky_us late, late_until; /* how late it said that its host is, and until when that counts */
    sky_us our_late;         /* how late our host was when it was last asked */
} sky_link_end;

typedef struct {
    uint32_t origin;
    uint32_t source; /* the neighbour that has it already, or UINT32_MAX */
} sky_news;

typedef struct {
    int64_t pushed_at_ms; /* when operators last moved the box, as far as known */
    sky_link_end of[4];
    uint32_t count;
    sky_throttle flooding;
    sky_news *news;    /* declarations still to be flooded, in order: one for each satellite at most */
    uint32_t *news_at; /* by index of the satellite: place in `news` + 1; 0: not there */
    uint32_t news_count;
    sky_us refresh; /* when our own declaration is repeated; SKY_NEVER: no link of ours is down */
    uint8_t *body; /* of the LINKS that is being made */
} sky_neighbours;

bool sky_neighbours_new(sky_neighbours *neighbours, sky_arena *arena, const sky_config *config);

/* A packet came from a satellite, perhaps a neighbour: its link is up. */
void sky_neighbour_heard(sky_satellite *satellite, uint32_t neighbour, sky_us now);
/* A packet leaves by this link: its neighbour is asked, unless it was heard lately. */
void sky_neighbour_used(sky_satellite *satellite, sky_link link, sky_us now);
/* All neighbours are asked for what they know, after a start. */
void sky_neighbours_greet(sky_satellite *satellite, sky_us now);
/* One LINKS, whose body follows its header; false: it is malformed or not of this neighbour. */
bool sky_neighbours_receive(sky_satellite *satellite, const sky_header *header, const uint8_t *body, size_t bytes,
                            sky_link source, sky_us now);
sky_us sky_neighbours_next_timer(sky_satellite *satellite);
void sky_neighbours_handle_timer(sky_satellite *satellite, sky_us now);
/* Our host is on time again: those that are down are asked again. */
void sky_neighbours_probe_down(sky_satellite *satellite, sky_us now);

#endif
