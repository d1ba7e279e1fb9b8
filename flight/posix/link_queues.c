#include "link_queues.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "wire/sha.h"

#define PI 3.141592653589793
#define LIGHT_M_S 299792458.0
#define EARTH_RADIUS_M 6371000.0
#define LEAST_ELEVATION_DEG 5.0 /* below it the path through the rain is computed as at it */

enum { DATAGRAM_OVERHEAD_BYTES = 28, FIRST_ROOM = 1024 };

/* Its state is one number: when its transmitter is free again. */
typedef struct {
    uint64_t key; /* 0: free */
    double free_s;
} queue;

struct link_queues {
    const link_terms *terms;
    link_beam_s beam_s;
    const void *context;
    queue *all; /* open addressing */
    size_t room, count;
    uint64_t lost[LINK_CLASSES];
    /* The weather as last drawn. */
    bool drawn;
    double spell, mm_h;
    char place[64];
};

link_queues *link_queues_new(const link_terms *terms, link_beam_s beam_s, const void *context) {
    link_queues *queues = calloc(1, sizeof *queues);
    if (queues == NULL)
        return NULL;
    queues->terms = terms;
    queues->beam_s = beam_s;
    queues->context = context;
    queues->room = FIRST_ROOM;
    queues->all = calloc(queues->room, sizeof *queues->all);
    if (queues->all == NULL) {
        free(queues);
        return NULL;
    }
    return queues;
}

/* --- The table of queues --- */

/* Never 0; the class is in its lowest bits. */
static uint64_t key_of(const link_way *way) {
    return (uint64_t)way->other << 28 | (uint64_t)(way->satellite & 0xFFFFFFU) << 4 | ((uint64_t)way->class + 1U);
}

static queue *slot(queue *all, size_t room, uint64_t key) {
    size_t at = (size_t)((key * 0x9E3779B97F4A7C15U) >> 32) & (room - 1);
    while (all[at].key != 0 && all[at].key != key)
        at = (at + 1) & (room - 1);
    return &all[at];
}

/* A transmitter that is free has nothing to remember: such queues are left out of the new table. False: no memory. */
static bool rebuild(link_queues *queues, double now_s) {
    size_t busy = 0;
    for (size_t i = 0; i < queues->room; i++)
        busy += queues->all[i].key != 0 && queues->all[i].free_s > now_s;
    size_t room = queues->room;
    while (4 * busy >= room)
        room *= 2;
    queue *all = calloc(room, sizeof *all);
    if (all == NULL)
        return false;
    for (size_t i = 0; i < queues->room; i++) {
        const queue *one = &queues->all[i];
        if (one->key != 0 && one->free_s > now_s)
            *slot(all, room, one->key) = *one;
    }
    free(queues->all);
    queues->all = all;
    queues->room = room;
    queues->count = busy;
    return true;
}

static queue *queue_of(link_queues *queues, const link_way *way, double now_s) {
    const uint64_t key = key_of(way);
    queue *found = slot(queues->all, queues->room, key);
    if (found->key == key)
        return found;
    if (2 * queues->count >= queues->room && !rebuild(queues, now_s))
        return NULL;
    found = slot(queues->all, queues->room, key);
    *found = (queue){key, -HUGE_VAL};
    queues->count++;
    return found;
}

/* --- What lessens the rate --- */

static bool is_out(const link_terms *terms, const link_way *way, double at_s) {
    for (unsigned i = 0; i < terms->outage_count; i++) {
        const link_outage *outage = &terms->outages[i];
        bool hit = at_s >= outage->from_s && at_s < outage->to_s && (outage->classes >> way->class & 1U) != 0;
        for (unsigned n = 0; n < outage->named; n++)
            hit = hit && (outage->satellites[n] == way->satellite ||
                          (way->class == LINK_ISL && outage->satellites[n] == way->other));
        if (hit)
            return true;
    }
    return false;
}

/* Of a satellite at this height whose beam takes so long. */
static double elevation_deg(const link_terms *terms, double one_way_s) {
    const double slant_m = one_way_s * LIGHT_M_S;
    const double radius_m = EARTH_RADIUS_M + terms->altitude_m;
    const double sine = (radius_m * radius_m - EARTH_RADIUS_M * EARTH_RADIUS_M - slant_m * slant_m) /
                        (2.0 * EARTH_RADIUS_M * fmax(slant_m, 1.0));
    return asin(fmax(-1.0, fmin(1.0, sine))) * (180.0 / PI);
}

static double half_open(const uint8_t *bytes) {
    uint64_t bits = 0;
    for (unsigned i = 0; i < 8; i++)
        bits = bits << 8 | bytes[i];
    return ((double)bits + 0.5) / 18446744073709551616.0;
}

/* Rain over a place, mm/h: drawn from the seed, the place and the spell. */
static double rain_mm_h(link_queues *queues, const orbits_place *at, double at_s) {
    const link_rain *rain = &queues->terms->rain;
    const double spell = floor(at_s / rain->spell_s);
    char place[64] = "";
    if (at != NULL)
        (void)snprintf(place, sizeof place, "%.4f,%.4f", at->latitude_deg, at->longitude_deg);
    if (queues->drawn && queues->spell == spell && strcmp(queues->place, place) == 0)
        return queues->mm_h;
    char words[160];
    uint8_t digest[SKY_SHA_BYTES];
    sky_sha sha;
    const int bytes =
        snprintf(words, sizeof words, "%s/%s/%.0f", queues->terms->seed, place, spell == 0.0 ? 0.0 : spell);
    sky_sha_begin(&sha);
    sky_sha_take(&sha, (const uint8_t *)words, (size_t)bytes);
    sky_sha_end(&sha, digest);
    const bool wet = half_open(digest) < rain->share;
    queues->drawn = true;
    queues->spell = spell;
    (void)snprintf(queues->place, sizeof queues->place, "%s", place);
    queues->mm_h = wet ? -rain->mm_h * log(half_open(digest + 8)) : 0.0;
    return queues->mm_h;
}

/* Share of a beam's rate that this much rain leaves. */
static double rain_share(const link_rain *rain, link_class class, double mm_h, double height_deg) {
    static const double steps[][2] = {{0.0, 1.0}, {3.0, 0.5}, {6.0, 0.25}, {9.0, 0.125}};
    const double elevation = fmax(height_deg, LEAST_ELEVATION_DEG) * (PI / 180.0);
    const double slant_km = rain->height_km / sin(elevation);
    const double reach_km = 35.0 * exp(-0.015 * fmin(mm_h, 100.0));
    const double path_km = slant_km / (1.0 + slant_km * cos(elevation) / reach_km);
    const double beyond_db = rain->k[class] * pow(mm_h, rain->alpha[class]) * path_km - rain->margin_db;
    for (unsigned i = 0; i < sizeof steps / sizeof *steps; i++) {
        if (beyond_db <= steps[i][0])
            return steps[i][1];
    }
    return 0.0;
}

/* Share of the rate that a link has: 1 clear, 0 out. */
static double share_at(link_queues *queues, const link_way *way, double now_s) {
    const link_terms *terms = queues->terms;
    const double at_s = now_s - terms->epoch_s;
    double share = 1.0;
    if (way->onboard)
        return share;
    if (is_out(terms, way, at_s))
        return 0.0;
    if (way->class == LINK_ISL || (terms->elevation_count == 0 && !(terms->rain.mm_h > 0.0)))
        return share;
    const double mm_h = terms->rain.mm_h > 0.0 ? rain_mm_h(queues, way->place, at_s) : 0.0;
    if (terms->elevation_count == 0 && !(mm_h > 0.0))
        return share;
    const double beam_s = queues->beam_s(queues->context, way->satellite, way->place, (sky_us)llround(now_s * 1e6));
    const double height_deg = elevation_deg(terms, beam_s);
    for (unsigned i = 0; i < terms->elevation_count; i++) {
        if (i == 0)
            share = 0.0;
        if (height_deg >= terms->elevations[i].least_deg)
            share = terms->elevations[i].share;
    }
    return mm_h > 0.0 && share > 0.0 ? share * rain_share(&terms->rain, way->class, mm_h, height_deg) : share;
}

/* --- Datagrams --- */

static sky_us lost(link_queues *queues, const link_way *way) {
    queues->lost[way->class]++;
    return SKY_NEVER;
}

sky_us link_queues_leave(link_queues *queues, const link_way *way, size_t datagram_bytes, sky_us now, bool urgent) {
    const link_terms *terms = queues->terms;
    const double now_s = (double)now / 1e6;
    queue *its = queue_of(queues, way, now_s);
    if (its == NULL)
        return lost(queues, way);
    /* The rate is that of the moment when its transmission begins: a packet is short. */
    const double start_s = its->free_s > now_s && !urgent ? its->free_s : now_s;
    const double share = share_at(queues, way, start_s);
    const double bytes_per_s = way->onboard ? HUGE_VAL : terms->bytes_per_s[way->class] * share;
    const double wait_s = start_s - now_s;
    if (!(share > 0.0))
        return lost(queues, way);
    if (!(bytes_per_s < HUGE_VAL))
        return now;
    if (wait_s > 0.0 && wait_s * bytes_per_s + (double)datagram_bytes > terms->buffer_bytes)
        return lost(queues, way);
    const double takes_s = (double)(datagram_bytes + DATAGRAM_OVERHEAD_BYTES) / bytes_per_s;
    its->free_s = (its->free_s > start_s ? its->free_s : start_s) + takes_s;
    return now + (sky_us)ceil((wait_s + takes_s) * 1e6);
}

void link_queues_figures(const link_queues *queues, sky_us now, uint64_t lost[LINK_CLASSES], uint64_t waiting[LINK_CLASSES]) {
    double bytes[LINK_CLASSES] = {0.0, 0.0, 0.0};
    const double now_s = (double)now / 1e6;
    for (size_t i = 0; i < queues->room; i++) {
        const queue *one = &queues->all[i];
        const unsigned class = one->key != 0 ? (unsigned)(one->key & 0xFU) - 1U : LINK_CLASSES;
        if (class < LINK_CLASSES && one->free_s > now_s)
            bytes[class] += (one->free_s - now_s) * queues->terms->bytes_per_s[class];
    }
    for (unsigned class = 0; class < LINK_CLASSES; class++) {
        lost[class] = queues->lost[class];
        waiting[class] = (uint64_t)llround(bytes[class]);
    }
}
