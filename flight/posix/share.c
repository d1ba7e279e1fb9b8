#define _GNU_SOURCE
#include "share.h"

#include <arpa/inet.h>
#include <errno.h>
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
    unsigned mine_room, others_room;
} line_reader;

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
    one.endpoint.sin_family = AF_INET;
    one.endpoint.sin_port = htons((uint16_t)whole(line, 4, 1, 65535));
    line->failed = line->failed || inet_pton(AF_INET, line->words[3], &one.endpoint.sin_addr) != 1;
    if (*count == *room) {
        *room = *room > 0 ? 2 * *room : 128;
        share_satellite *larger = realloc(*all, *room * sizeof *larger);
        if (larger == NULL) {
            line->failed = true;
            return;
        }
        *all = larger;
    }
    (*all)[(*count)++] = one;
}

static void read_clock(line_reader *line) {
    share *its = line->its;
    const char *by = line->count > 1 ? line->words[1] : "";
    its->config.clock = sky_clock_counted;
    if (strcmp(by, "periods") == 0 && line->count == 6)
        sky_clock_by_periods(&its->clock, number(line, 2), number(line, 3), number(line, 4), number(line, 5));
    else if (strcmp(by, "track") == 0 && line->count == 8)
        sky_clock_by_track(&its->clock, number(line, 2), number(line, 3), number(line, 4), number(line, 5),
                           number(line, 6), number(line, 7));
    else if (strcmp(by, "preset") == 0 && line->count == 8)
        line->failed = sky_clock_by_preset(&its->clock, line->words[2], (int)whole(line, 3, 1, 2), number(line, 4),
                                           number(line, 5), number(line, 6), number(line, 7)) != NULL;
    else
        line->failed = true;
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

static sky_us *delay_table(line_reader *line, sky_us **table, size_t count) {
    if (*table == NULL)
        *table = calloc(count > 0 ? count : 1, sizeof **table);
    if (*table == NULL || count == 0)
        line->failed = true;
    return line->failed ? NULL : *table;
}

static void read_plane_delay(line_reader *line) {
    share *its = line->its;
    sky_us *table = delay_table(line, &its->plane_delays_us, its->config.planes);
    if (table != NULL)
        table[whole(line, 1, 0, its->config.planes - 1)] = whole(line, 2, 0, INT32_MAX);
}

static void read_beam_delay(line_reader *line) {
    share *its = line->its;
    const size_t cells = (size_t)its->config.planes * its->config.slots;
    sky_us *table = delay_table(line, &its->beam_delays_us, cells);
    if (table == NULL)
        return;
    const int64_t south = whole(line, 1, 0, its->config.planes - 1);
    const int64_t east = whole(line, 2, 0, its->config.slots - 1);
    table[south * its->config.slots + east] = whole(line, 3, 0, INT32_MAX);
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
        {"slot-delay-us", &line->its->slot_delay_us, sizeof line->its->slot_delay_us},
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
    } else if (strcmp(name, "every-packet") == 0) {
        its->every_packet = flag(line, 1);
    } else if (strcmp(name, "outages") == 0) {
        text(line, its->outages_path, sizeof its->outages_path);
    } else if (strcmp(name, "record") == 0) {
        text(line, its->record_path, sizeof its->record_path);
    } else if (strcmp(name, "onboard") == 0) {
        its->onboard = flag(line, 1);
    } else if (strcmp(name, "faults") == 0) {
        read_faults(line);
    } else if (strcmp(name, "plane-delay-us") == 0) {
        read_plane_delay(line);
    } else if (strcmp(name, "beam-delay-us") == 0) {
        read_beam_delay(line);
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
    else if (its->mine_count + its->others_count != (unsigned)its->config.planes * its->config.slots)
        lacks = "peer or satellite for each place of the torus";
    its->delayed = its->plane_delays_us != NULL || its->beam_delays_us != NULL;
    if (its->delayed && (its->plane_delays_us == NULL || its->beam_delays_us == NULL))
        lacks = "plane-delay-us or beam-delay-us, which go together";
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
    free(its->plane_delays_us);
    free(its->beam_delays_us);
    memset(its, 0, sizeof *its);
}

sky_us share_beam_us(const share *its, sky_link address, int32_t slot_moves, int32_t plane_moves) {
    const sky_config *config = &its->config;
    const uint32_t south = sky_modulo((int64_t)(address >> 12) - config->centre_plane - plane_moves, config->planes);
    const uint32_t east = sky_modulo((int64_t)(address & 0xFFFU) - config->centre_slot + slot_moves, config->slots);
    if (its->onboard && address == ((uint32_t)config->centre_plane << 12 | config->centre_slot))
        return 0;
    return its->beam_delays_us[(size_t)south * config->slots + east];
}

sky_us share_hop_us(const share *its, sky_link here, sky_link there) {
    const uint32_t plane = here >> 12;
    if (plane == there >> 12)
        return its->slot_delay_us;
    return its->plane_delays_us[(plane + 1U) % its->config.planes == there >> 12 ? plane : there >> 12];
}
