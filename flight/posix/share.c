#define _GNU_SOURCE
#include "share.h"

#include <arpa/inet.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "placement/torus.h"

enum { MOST_WORDS = 10, FORMAT_VERSION = 1, MOST_SATELLITES = 1 << 24 };

typedef struct {
    share *its;
    char *words[MOST_WORDS];
    int count; /* with the first */
    bool failed;
    unsigned mine_room, others_room, knot_room, way_room, outage_room, elevation_room;
    bool clock_is_set;
    sa_family_t family; /* of all addresses, from the first on */
} line_reader;

/* Room for one more of a list, whose entries may move; false: the line fails. */
static bool grow(line_reader *line, void **list, unsigned count, unsigned *room, size_t bytes) {
    if (count < *room)
        return true;
    const unsigned more = *room > 0 ? 2 * *room : 128;
    void *larger = realloc(*list, more * bytes);
    line->failed = line->failed || larger == NULL;
    if (larger == NULL)
        return false;
    *list = larger;
    *room = more;
    return true;
}

static double number(line_reader *line, int which) {
    char *end = NULL;
    if (which >= line->count) {
        line->failed = true;
        return 0.0;
    }
    const double value = strtod(line->words[which], &end);
    if (*line->words[which] == '\0' || *end != '\0')
        line->failed = true;
    return value;
}

static int64_t whole(line_reader *line, int which, int64_t least, int64_t most) {
    char *end = NULL;
    if (which >= line->count) {
        line->failed = true;
        return least;
    }
    errno = 0;
    const long long value = strtoll(line->words[which], &end, 10);
    if (errno != 0 || *line->words[which] == '\0' || *end != '\0' || value < least || value > most) {
        line->failed = true;
        return least;
    }
    return value;
}

/* Finite, and within bounds. */
static double within(line_reader *line, int which, double least, double most) {
    const double value = number(line, which);
    if (!(value >= least && value <= most)) {
        line->failed = true;
        return least;
    }
    return value;
}

static bool flag(line_reader *line, int which) {
    return whole(line, which, 0, 1) == 1;
}

static void text(line_reader *line, char *room, size_t bytes) {
    if (line->count != 2 || strlen(line->words[1]) >= bytes) {
        line->failed = true;
        return;
    }
    memcpy(room, line->words[1], strlen(line->words[1]) + 1);
}

/* IPv4 and IPv6 do not reach each other, so all addresses are of one. */
static void read_endpoint(line_reader *line, int which, udp_endpoint *one) {
    if (inet_pton(AF_INET, line->words[which], &one->v4.sin_addr) == 1)
        one->any.sa_family = AF_INET;
    else if (inet_pton(AF_INET6, line->words[which], &one->v6.sin6_addr) == 1)
        one->any.sa_family = AF_INET6;
    one->v4.sin_port = htons((uint16_t)whole(line, which + 1, 1, 65535));
    line->failed = line->failed || one->any.sa_family == 0 || (line->family != 0 && line->family != one->any.sa_family);
    line->family = one->any.sa_family;
}

/* PLANE SLOT IP PORT */
static void read_satellite(line_reader *line, share_satellite **all, unsigned *count, unsigned *room) {
    share_satellite one;
    const sky_config *config = &line->its->config;
    memset(&one, 0, sizeof one);
    if (line->count != 5 || config->planes == 0) {
        line->failed = true;
        return;
    }
    one.address = (sky_link)whole(line, 1, 0, config->planes - 1) << 12;
    one.address |= (sky_link)whole(line, 2, 0, config->slots - 1);
    line->failed = line->failed || sky_is_gap(sky_config_torus(config), one.address);
    read_endpoint(line, 3, &one.endpoint);
    void *list = *all;
    if (grow(line, &list, *count, room, sizeof one)) {
        *all = list;
        (*all)[(*count)++] = one;
    }
}

/* TIME PLANE SLOT: of the track that the clock counts by. */
static void read_knot(line_reader *line) {
    share *its = line->its;
    void *list = its->knots;
    const sky_knot one = {within(line, 1, -1e12, 1e12), within(line, 2, -1e12, 1e12), within(line, 3, -1e12, 1e12)};
    const bool later = its->knot_count == 0 || one.time_s > its->knots[its->knot_count - 1].time_s;
    line->failed = line->failed || line->count != 4 || !later || line->clock_is_set;
    if (grow(line, &list, its->knot_count, &line->knot_room, sizeof one)) {
        its->knots = list;
        its->knots[its->knot_count++] = one;
    }
}

/* PLANE SLOT: a cell without a satellite. */
static void read_gap(line_reader *line) {
    share *its = line->its;
    const size_t cells = (size_t)its->config.planes * its->config.slots;
    if (its->gaps == NULL && cells > 0)
        its->gaps = calloc(cells, 1);
    if (its->gaps == NULL || line->count != 3) {
        line->failed = true;
        return;
    }
    const int64_t plane = whole(line, 1, 0, its->config.planes - 1);
    its->gaps[plane * its->config.slots + whole(line, 2, 0, its->config.slots - 1)] = 1;
    its->config.gaps = its->gaps;
}

static void read_clock(line_reader *line) {
    share *its = line->its;
    const char *by = line->count > 1 ? line->words[1] : "";
    its->config.clock = sky_clock_counted;
    if (strcmp(by, "periods") == 0 && line->count == 6) {
        sky_clock_by_periods(&its->clock, number(line, 2), number(line, 3), number(line, 4), number(line, 5));
    } else if (strcmp(by, "track") == 0 && line->count == 6 && its->knot_count > 0) { /* after its knots */
        sky_clock_by_track(&its->clock, number(line, 2), number(line, 3), its->knots, its->knot_count, number(line, 4),
                           number(line, 5));
    } else if (strcmp(by, "preset") == 0 && line->count == 8 && its->knot_count == 0) {
        its->knots = calloc(1, sizeof *its->knots);
        line->failed = its->knots == NULL ||
                       sky_clock_by_preset(&its->clock, its->knots, line->words[2], (int)whole(line, 3, 1, 2),
                                           number(line, 4), number(line, 5), number(line, 6), number(line, 7)) != NULL;
        its->knot_count = 1; /* no others may follow */
        line->knot_room = 1;
    } else {
        line->failed = true;
    }
    line->clock_is_set = true;
}

/* --- Orbits --- */

/* RADIUS_M INCLINATION_RAD PERIOD_S NODE_RAD_S SPAN_RAD EPOCH_NODE_RAD EPOCH_SLOTS */
static void read_orbit(line_reader *line) {
    orbits *sky = &line->its->sky;
    const sky_config *config = &line->its->config;
    line->failed = line->count != 8 || config->planes == 0 || sky->plane != NULL;
    sky->planes = config->planes;
    sky->slots = config->slots;
    sky->radius_m = within(line, 1, 6e6, 1e8);
    sky->inclination_rad = within(line, 2, 1e-9, 3.2);
    sky->period_s = within(line, 3, 1.0, 1e9);
    sky->node_rad_s = within(line, 4, -1.0, 1.0);
    sky->span_rad = within(line, 5, 1e-3, 7.0);
    sky->epoch_node_rad = within(line, 6, -1e3, 1e3);
    sky->epoch_slots = within(line, 7, -1e4, 1e4);
    if (!line->failed)
        sky->plane = calloc(config->planes, sizeof *sky->plane);
    line->failed = line->failed || sky->plane == NULL;
}

/* PLANE NODE_RAD AHEAD_SLOTS */
static void read_plane_orbit(line_reader *line) {
    orbits *sky = &line->its->sky;
    if (line->count != 4 || sky->plane == NULL) {
        line->failed = true;
        return;
    }
    orbits_plane *one = &sky->plane[whole(line, 1, 0, (int64_t)sky->planes - 1)];
    one->node_rad = within(line, 2, -1e3, 1e3);
    one->ahead_slots = within(line, 3, -1e4, 1e4);
}

/* RADIUS_M ECCENTRICITY2 ANGLE_RAD ANGLE_RAD_S MASK_DEG BLOCKED_M */
static void read_earth(line_reader *line) {
    orbits *sky = &line->its->sky;
    line->failed = line->count != 7;
    sky->earth_m = within(line, 1, 1e6, 1e8);
    sky->eccentricity2 = within(line, 2, 0.0, 0.5);
    sky->angle_rad = within(line, 3, -1e6, 1e6);
    sky->angle_rad_s = within(line, 4, 0.0, 1.0);
    sky->mask_deg = within(line, 5, 0.0, 90.0);
    sky->blocked_m = within(line, 6, 0.0, 1e9);
}

/* TIME_S LATITUDE_DEG LONGITUDE_DEG */
static void read_waypoint(line_reader *line) {
    orbits *sky = &line->its->sky;
    void *list = sky->way;
    const orbits_waypoint one = {within(line, 1, -1e12, 1e12), {number(line, 2), number(line, 3)}};
    const bool later = sky->way_count == 0 || one.time_s > sky->way[sky->way_count - 1].time_s;
    line->failed = line->failed || line->count != 4 || !later || !orbits_place_is_on_earth(&one.at);
    if (grow(line, &list, sky->way_count, &line->way_room, sizeof one)) {
        sky->way = list;
        sky->way[sky->way_count++] = one;
    }
}

/* --- What links carry --- */

/* EPOCH_S BUFFER_BYTES ALTITUDE_M SEED */
static void read_links(line_reader *line) {
    link_terms *links = &line->its->links;
    line->failed = line->count != 5 || strlen(line->words[4]) >= sizeof links->seed;
    links->given = true;
    links->epoch_s = within(line, 1, -1e12, 1e12);
    links->buffer_bytes = within(line, 2, 65536.0, 1e15);
    links->altitude_m = within(line, 3, 1e4, 1e8);
    if (!line->failed)
        memcpy(links->seed, line->words[4], strlen(line->words[4]) + 1);
    for (unsigned class = 0; class < LINK_CLASSES; class++)
        links->bytes_per_s[class] = HUGE_VAL;
}

/* CLASS BYTES_PER_S */
static void read_rate(line_reader *line) {
    line->failed = line->count != 3;
    line->its->links.bytes_per_s[whole(line, 1, 0, LINK_CLASSES - 1)] = within(line, 2, 1e-3, 1e15);
}

/* FROM_S TO_S CLASSES [PLANE SLOT [PLANE SLOT]] */
static void read_link_outage(line_reader *line) {
    link_terms *links = &line->its->links;
    const sky_config *config = &line->its->config;
    void *list = links->outages;
    link_outage one = {number(line, 1), number(line, 2), (unsigned)whole(line, 3, 1, 7), 0, {0, 0}};
    line->failed = line->failed || config->planes == 0 || line->count > 8 || line->count % 2 != 0;
    for (int at = 4; at + 1 < line->count && !line->failed; at += 2) {
        one.satellites[one.named] = (uint32_t)whole(line, at, 0, config->planes - 1) << 12;
        one.satellites[one.named++] |= (uint32_t)whole(line, at + 1, 0, config->slots - 1);
    }
    if (grow(line, &list, links->outage_count, &line->outage_room, sizeof one)) {
        links->outages = list;
        links->outages[links->outage_count++] = one;
    }
}

/* LEAST_DEG SHARE */
static void read_elevation(line_reader *line) {
    link_terms *links = &line->its->links;
    void *list = links->elevations;
    const link_elevation one = {within(line, 1, 0.0, 90.0), within(line, 2, 0.0, 1.0)};
    const bool higher =
        links->elevation_count == 0 || one.least_deg > links->elevations[links->elevation_count - 1].least_deg;
    line->failed = line->failed || line->count != 3 || !higher;
    if (grow(line, &list, links->elevation_count, &line->elevation_room, sizeof one)) {
        links->elevations = list;
        links->elevations[links->elevation_count++] = one;
    }
}

/* MM_H SHARE SPELL_S MARGIN_DB HEIGHT_KM, then k and alpha of a beam upwards and of one downwards */
static void read_rain(line_reader *line) {
    link_rain *rain = &line->its->links.rain;
    line->failed = line->count != 10;
    rain->mm_h = within(line, 1, 1e-3, 1e3);
    rain->share = within(line, 2, 0.0, 1.0);
    rain->spell_s = within(line, 3, 1e-6, 1e9);
    rain->margin_db = within(line, 4, 0.0, 100.0);
    rain->height_km = within(line, 5, 0.1, 20.0);
    for (int class = LINK_UP; class <= LINK_DOWN; class++) {
        rain->k[class] = within(line, 6 + 2 * class, 0.0, 1e3);
        rain->alpha[class] = within(line, 7 + 2 * class, 0.0, 10.0);
    }
}

static sky_replacement replacement_of(line_reader *line) {
    static const char *const names[] = {"lru", "lfuda", "lrfu"};
    for (unsigned i = 0; line->count == 2 && i < 3; i++) {
        if (strcmp(line->words[1], names[i]) == 0)
            return (sky_replacement)i;
    }
    line->failed = true;
    return SKY_LRFU;
}

static sky_auth auth_of(line_reader *line) {
    static const char *const names[] = {"on", "answers", "every"};
    for (unsigned i = 0; line->count == 2 && i < 3; i++) {
        if (strcmp(line->words[1], names[i]) == 0)
            return (sky_auth)i;
    }
    line->failed = true;
    return SKY_AUTH_EVERY;
}

static void read_plane_delay(line_reader *line) {
    share *its = line->its;
    if (its->plane_delays_us == NULL && its->config.planes > 0)
        its->plane_delays_us = calloc(its->config.planes, sizeof *its->plane_delays_us);
    if (its->plane_delays_us == NULL) {
        line->failed = true;
        return;
    }
    its->plane_delays_us[whole(line, 1, 0, its->config.planes - 1)] = whole(line, 2, 0, INT32_MAX);
}

/* PLANES_SOUTH SLOTS_EAST SECONDS */
static void read_beam(line_reader *line) {
    share *its = line->its;
    const size_t cells = (size_t)its->config.planes * its->config.slots;
    if (its->beams_s == NULL && cells > 0)
        its->beams_s = calloc(cells, sizeof *its->beams_s);
    if (its->beams_s == NULL) {
        line->failed = true;
        return;
    }
    const int64_t south = whole(line, 1, 0, its->config.planes - 1);
    const int64_t east = whole(line, 2, 0, its->config.slots - 1);
    its->beams_s[south * its->config.slots + east] = within(line, 3, 0.0, 10.0);
}

/* LOSS DUPLICATE REORDER CORRUPT, in 1/2^32 of packets, then the longest delay of a reordered one, and the seed */
static void read_faults(line_reader *line) {
    fault_rates *faults = &line->its->faults;
    line->failed = line->count != 7;
    faults->loss = (uint64_t)whole(line, 1, 0, (int64_t)FAULTS_WHOLE);
    faults->duplicate = (uint64_t)whole(line, 2, 0, (int64_t)FAULTS_WHOLE);
    faults->reorder = (uint64_t)whole(line, 3, 0, (int64_t)FAULTS_WHOLE);
    faults->corrupt = (uint64_t)whole(line, 4, 0, (int64_t)FAULTS_WHOLE);
    faults->reorder_us = whole(line, 5, 1, INT32_MAX);
    faults->seed = (uint64_t)whole(line, 6, 0, INT64_MAX);
}

/* Names of settings that are whole numbers, and where they go. */
static bool read_number(line_reader *line, const char *name) {
    sky_config *config = &line->its->config;
    const struct {
        const char *name;
        void *room;
        size_t bytes;
    } all[] = {
        {"memory-bytes", &config->memory_bytes, sizeof config->memory_bytes},
        {"chunk-bytes", &config->typical_chunk_bytes, sizeof config->typical_chunk_bytes},
        {"sweep-us", &config->sweep, sizeof config->sweep},
        {"notice-hold-us", &config->notice_hold, sizeof config->notice_hold},
        {"confirm-us", &config->confirm, sizeof config->confirm},
        {"pin-share", &config->pin_share, sizeof config->pin_share},
        {"replicas", &config->replicas, sizeof config->replicas},
        {"slot-link-ps", &config->slot_link_ps, sizeof config->slot_link_ps},
        {"plane-link-ps", &config->plane_link_ps, sizeof config->plane_link_ps},
        {"neighbour-timeout-us", &config->neighbour_timeout, sizeof config->neighbour_timeout},
        {"handover-timeout-us", &config->handover_timeout, sizeof config->handover_timeout},
        {"slot-delay-us", &line->its->slot_delay_us, sizeof line->its->slot_delay_us},
        {"unix-at-boot-us", &line->its->unix_at_boot_us, sizeof line->its->unix_at_boot_us},
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        if (strcmp(name, all[i].name) != 0)
            continue;
        const int64_t value = whole(line, 1, 0, all[i].bytes == 8 ? INT64_MAX : UINT32_MAX);
        const uint32_t narrow = (uint32_t)value;
        line->failed = line->failed || line->count != 2;
        memcpy(all[i].room, all[i].bytes == 8 ? (const void *)&value : (const void *)&narrow, all[i].bytes);
        return true;
    }
    return false;
}

static void read_line(line_reader *line) {
    share *its = line->its;
    sky_config *config = &its->config;
    const char *name = line->words[0];
    if (strcmp(name, "skymemory-flight") == 0) {
        (void)whole(line, 1, FORMAT_VERSION, FORMAT_VERSION);
    } else if (strcmp(name, "name") == 0) {
        text(line, its->name, sizeof its->name);
    } else if (strcmp(name, "torus") == 0) {
        config->planes = (uint16_t)whole(line, 1, 1, 4096);
        config->slots = (uint16_t)whole(line, 2, 1, 4096);
    } else if (strcmp(name, "gap") == 0) {
        read_gap(line);
    } else if (strcmp(name, "reach") == 0) { /* planes and slots that a link over gaps may span */
        config->most_planes = (uint16_t)whole(line, 1, 1, 4096);
        config->most_slots = (uint16_t)whole(line, 2, 1, 4096);
    } else if (strcmp(name, "centre") == 0) {
        config->centre_plane = (uint16_t)whole(line, 1, 0, 4095);
        config->centre_slot = (uint16_t)whole(line, 2, 0, 4095);
    } else if (strcmp(name, "pushed") == 0) {
        config->pushed_slot = (int32_t)whole(line, 1, INT32_MIN, INT32_MAX);
        config->pushed_plane = (int32_t)whole(line, 2, INT32_MIN, INT32_MAX);
    } else if (strcmp(name, "clock") == 0) {
        read_clock(line);
    } else if (strcmp(name, "replacement") == 0) {
        config->replacement = replacement_of(line);
    } else if (strcmp(name, "eviction") == 0) { /* gossip, of the plane only, periodic, migration */
        config->gossip = flag(line, 1);
        config->plane_only = flag(line, 2);
        config->periodic = flag(line, 3);
        config->migration = flag(line, 4);
    } else if (strcmp(name, "keys") == 0) {
        text(line, its->keys_path, sizeof its->keys_path);
    } else if (strcmp(name, "auth") == 0) {
        its->auth = auth_of(line);
    } else if (strcmp(name, "outages") == 0) {
        text(line, its->outages_path, sizeof its->outages_path);
    } else if (strcmp(name, "record") == 0) {
        text(line, its->record_path, sizeof its->record_path);
    } else if (strcmp(name, "onboard") == 0) {
        its->onboard = true; /* PLANE SLOT */
        its->onboard_at = (sky_link)whole(line, 1, 0, config->planes - 1) << 12;
        its->onboard_at |= (sky_link)whole(line, 2, 0, config->slots - 1);
    } else if (strcmp(name, "faults") == 0) {
        read_faults(line);
    } else if (strcmp(name, "plane-delay-us") == 0) {
        read_plane_delay(line);
    } else if (strcmp(name, "delay-scale") == 0) {
        its->delay_scale = within(line, 1, 0.0, 1000.0);
    } else if (strcmp(name, "beam-s") == 0) {
        read_beam(line);
    } else if (strcmp(name, "links") == 0) {
        read_links(line);
    } else if (strcmp(name, "rate") == 0) {
        read_rate(line);
    } else if (strcmp(name, "link-outage") == 0) {
        read_link_outage(line);
    } else if (strcmp(name, "elevation") == 0) {
        read_elevation(line);
    } else if (strcmp(name, "rain") == 0) {
        read_rain(line);
    } else if (strcmp(name, "knot") == 0) {
        read_knot(line);
    } else if (strcmp(name, "orbit") == 0) {
        read_orbit(line);
    } else if (strcmp(name, "plane-orbit") == 0) {
        read_plane_orbit(line);
    } else if (strcmp(name, "earth") == 0) {
        read_earth(line);
    } else if (strcmp(name, "waypoint") == 0) {
        read_waypoint(line);
    } else if (strcmp(name, "satellite") == 0) {
        read_satellite(line, &its->mine, &its->mine_count, &line->mine_room);
    } else if (strcmp(name, "peer") == 0) {
        read_satellite(line, &its->others, &its->others_count, &line->others_room);
    } else if (!read_number(line, name)) {
        line->failed = true;
    }
}

/* Words are separated by blanks; the value of a line of two words may have blanks itself, since it may be a path. */
static void split(line_reader *line, char *at) {
    static const char *const paths[] = {"keys", "outages", "record"};
    line->count = 0;
    at += strspn(at, " \t");
    while (*at != '\0' && *at != '#') {
        if (line->count == MOST_WORDS) {
            line->failed = true;
            return;
        }
        line->words[line->count++] = at;
        for (unsigned i = 0; line->count == 2 && i < 3; i++) {
            if (strcmp(line->words[0], paths[i]) == 0)
                return;
        }
        at += strcspn(at, " \t");
        if (*at != '\0') {
            *at++ = '\0';
            at += strspn(at, " \t");
        }
    }
}

static bool check(share *its, char reason[512]) {
    const char *lacks = NULL;
    if (its->mine_count == 0)
        lacks = "satellite";
    else if (its->name[0] == '\0')
        lacks = "name";
    else if (its->mine_count + its->others_count != sky_satellites(sky_config_torus(&its->config)))
        lacks = "peer or satellite for each place of the torus, but for its gaps";
    its->delayed = its->delay_scale > 0.0;
    its->sky.centre_plane = its->config.centre_plane;
    its->sky.centre_slot = its->config.centre_slot;
    if (its->sky.plane != NULL && (!(its->sky.earth_m > 0.0) || its->sky.way_count == 0))
        lacks = "earth or waypoint, which belong to orbit";
    if (its->delayed && (its->plane_delays_us == NULL || (its->beams_s == NULL && its->sky.plane == NULL)))
        lacks = "plane-delay-us, or beam-s or orbit, which belong to delay-scale";
    if ((its->links.elevation_count > 0 || its->links.rain.mm_h > 0.0) && its->beams_s == NULL && its->sky.plane == NULL)
        lacks = "beam-s or orbit, which belong to elevation and rain";
    if (lacks != NULL)
        (void)snprintf(reason, 512, "it has no line `%s`", lacks);
    return lacks == NULL;
}

bool share_read(const char *path, share *its, char reason[512]) {
    line_reader line;
    char *room = NULL;
    size_t bytes = 0;
    unsigned number_of_line = 0;
    FILE *file = fopen(path, "re");
    memset(&line, 0, sizeof line);
    memset(its, 0, sizeof *its);
    line.its = its;
    sky_config_defaults(&its->config);
    if (file == NULL) {
        (void)snprintf(reason, 512, "%s", strerror(errno));
        return false;
    }
    while (!line.failed && getline(&room, &bytes, file) > 0) {
        number_of_line++;
        room[strcspn(room, "\n")] = '\0';
        split(&line, room);
        if (line.count > 0 && !line.failed)
            read_line(&line);
    }
    if (line.failed)
        (void)snprintf(reason, 512, "line %u (%.100s): not understood", number_of_line,
                       line.count > 0 ? line.words[0] : "");
    free(room);
    (void)fclose(file);
    its->config.clock_context = &its->clock;
    return !line.failed && check(its, reason);
}

void share_free(share *its) {
    free(its->mine);
    free(its->others);
    free(its->gaps);
    free(its->knots);
    free(its->plane_delays_us);
    free(its->beams_s);
    free(its->sky.plane);
    free(its->sky.way);
    free(its->links.outages);
    free(its->links.elevations);
    memset(its, 0, sizeof *its);
}

/* What operators add is what a satellite counts beyond the clock. */
static void split_moves(const share *its, int32_t slot_moves, int32_t plane_moves, sky_us now, orbits_moves *clocked,
                        orbits_moves *pushed) {
    sky_clock_moves(&its->clock, now, &clocked->slot, &clocked->plane);
    pushed->slot = slot_moves - clocked->slot;
    pushed->plane = plane_moves - clocked->plane;
}

double share_beam_s(const share *its, sky_link address, const orbits_place *place, int32_t slot_moves, int32_t plane_moves,
                    sky_us now) {
    const sky_config *config = &its->config;
    if (its->onboard && address == its->onboard_at)
        return 0.0;
    if (its->sky.plane != NULL) {
        orbits_moves clocked;
        orbits_moves pushed;
        split_moves(its, slot_moves, plane_moves, now, &clocked, &pushed);
        return orbits_beam_s(&its->sky, address, place, clocked, pushed, sky_clock_elapsed_s(&its->clock, now));
    }
    const uint32_t south = sky_modulo((int64_t)(address >> 12) - config->centre_plane - plane_moves, config->planes);
    const uint32_t east = sky_modulo((int64_t)(address & 0xFFFU) - config->centre_slot + slot_moves, config->slots);
    return its->beams_s[(size_t)south * config->slots + east];
}

bool share_blocked(const share *its, sky_link here, sky_link there, int32_t slot_moves, int32_t plane_moves, sky_us now) {
    orbits_moves clocked;
    orbits_moves pushed;
    split_moves(its, slot_moves, plane_moves, now, &clocked, &pushed);
    return orbits_blocked(&its->sky, here, there, pushed, sky_clock_elapsed_s(&its->clock, now));
}

sky_us share_scaled_us(const share *its, double seconds) {
    return (sky_us)ceil(seconds * its->delay_scale * 1e6);
}

sky_us share_hop_us(const share *its, sky_link here, sky_link there) {
    const unsigned planes = its->config.planes;
    int32_t east = 0;
    int32_t south = 0;
    sky_us found = 0;
    if (!its->delayed)
        return 0;
    /* Over a gap: as long as the links that its satellites would have. Of a ring of two the link from `here` on. */
    sky_delta(sky_config_torus(&its->config), here, there, &east, &south);
    south = planes == 2 && south != 0 && its->gaps == NULL ? 1 : south;
    found = its->slot_delay_us * (east < 0 ? -east : east);
    for (int32_t step = 0; step < (south < 0 ? -south : south); step++)
        found += its->plane_delays_us[sky_modulo((int64_t)(here >> 12) + (south < 0 ? -1 - step : step), planes)];
    return found;
}

sky_us share_timeout_us(const share *its, sky_link here) {
    const sky_torus torus = sky_config_torus(&its->config);
    sky_us longest = 0;
    for (unsigned direction = 0; torus.gaps != NULL && direction < 4; direction++) {
        const sky_us hop = share_hop_us(its, here, sky_neighbour(torus, here, (sky_direction)direction));
        longest = hop > longest ? hop : longest;
    }
    return its->config.neighbour_timeout + 2 * longest;
}
