/* What links carry: rates, other traffic, queues, planned outages, rain. Twin of skymemory.constellation.links: there is the
 * description; a Links of a plan is here a link_terms, numbers already. */
#ifndef SKY_POSIX_LINK_QUEUES_H
#define SKY_POSIX_LINK_QUEUES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "orbits.h"
#include "satellite.h"

/* A beam upwards, a beam downwards, and one direction between satellites. */
typedef enum { LINK_UP = 0, LINK_DOWN = 1, LINK_ISL = 2, LINK_CLASSES = 3 } link_class;

typedef struct {
    double from_s, to_s; /* since the epoch */
    unsigned classes;    /* 1 << link_class */
    unsigned named;      /* how many satellites: of links that end at all of these; 0: of any */
    uint32_t satellites[2];
} link_outage;

typedef struct {
    double least_deg, share;
} link_elevation;

typedef struct {
    double mm_h, share, spell_s, margin_db, height_km; /* mm_h 0: it never rains */
    double k[2], alpha[2];                             /* of LINK_UP and LINK_DOWN (ITU-R P.838) */
} link_rain;

typedef struct {
    bool given; /* else links carry everything */
    double epoch_s;
    double bytes_per_s[LINK_CLASSES]; /* beside other traffic; infinite: without a rate */
    double buffer_bytes;
    double altitude_m;
    char seed[32]; /* of the weather, a whole number as it is written */
    link_outage *outages;
    link_elevation *elevations; /* ascending; below the first a beam is out */
    unsigned outage_count, elevation_count;
    link_rain rain;
} link_terms;

/* One direction of a link: of a satellite, to or from the link's other end. A beam without a length (`onboard`) carries
 * everything. `place`: of a beam's host; NULL for the plan's host. */
typedef struct {
    link_class class;
    uint32_t satellite;
    sky_link other;
    bool onboard;
    const orbits_place *place;
} link_way;

/* How long light takes by a beam, at a time. */
typedef double (*link_beam_s)(const void *context, uint32_t satellite, const orbits_place *place, sky_us at);

typedef struct link_queues link_queues;

/* NULL: out of memory. `beam_s` is asked for elevations. */
link_queues *link_queues_new(const link_terms *terms, link_beam_s beam_s, const void *context);
/* When the last bit of a datagram that comes now is sent; SKY_NEVER: it is lost, and counted. `urgent` goes before all that
 * waits. */
sky_us link_queues_leave(link_queues *queues, const link_way *way, size_t datagram_bytes, sky_us now, bool urgent);
/* Of all links of a class: packets lost, and bytes that wait or are being sent. */
void link_queues_figures(const link_queues *queues, sky_us now, uint64_t lost[LINK_CLASSES], uint64_t waiting[LINK_CLASSES]);

#endif
