#include "endpoints.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* 16,384 hosts at once; a token's other 10 bits count the uses of its place, and are never all set: that is no link. */
enum { PLACE_BITS = 14, PLACES = 1 << PLACE_BITS, USES = (1 << (24 - PLACE_BITS)) - 1 };

typedef struct {
    uint64_t key; /* 0: free */
    sky_link link;
} entry;

struct endpoints {
    entry *satellites; /* open addressing */
    unsigned mask;
    unsigned next;           /* the place that the next unknown host takes: that of the oldest */
    uint64_t hosts[PLACES];  /* key of the host in each place; 0: none */
    uint16_t uses[PLACES];   /* how often the place was taken before */
    orbits_place ground[PLACES]; /* where each says that it is */
    bool is_placed[PLACES];
    uint16_t index[2 * PLACES]; /* hash table of places + 1 */
};

static uint64_t key_of(const struct sockaddr_in *address) {
    return (uint64_t)address->sin_addr.s_addr << 16 | address->sin_port;
}

static unsigned hash(uint64_t key) {
    return (unsigned)((key * 0x9E3779B97F4A7C15U) >> 32);
}

endpoints *endpoints_new(unsigned satellites) {
    endpoints *all = calloc(1, sizeof *all);
    unsigned size = 16;
    while (size < 2 * satellites)
        size *= 2;
    if (all != NULL && (all->satellites = calloc(size, sizeof *all->satellites)) == NULL) {
        free(all);
        return NULL;
    }
    if (all != NULL)
        all->mask = size - 1;
    return all;
}

void endpoints_free(endpoints *all) {
    if (all != NULL)
        free(all->satellites);
    free(all);
}

void endpoints_add(endpoints *all, sky_link satellite, const struct sockaddr_in *address) {
    unsigned at = hash(key_of(address)) & all->mask;
    while (all->satellites[at].key != 0)
        at = (at + 1) & all->mask;
    all->satellites[at] = (entry){key_of(address), satellite};
}

static unsigned find(const endpoints *all, uint64_t key) {
    unsigned at = hash(key) % (2 * PLACES);
    while (all->index[at] != 0 && all->hosts[all->index[at] - 1U] != key)
        at = (at + 1) % (2 * PLACES);
    return at;
}

/* Takes an entry out of the hash table, and moves up those behind it that would not be found any more. */
static void forget(endpoints *all, uint64_t key) {
    unsigned hole = find(all, key);
    if (all->index[hole] == 0)
        return;
    for (unsigned at = (hole + 1) % (2 * PLACES); all->index[at] != 0; at = (at + 1) % (2 * PLACES)) {
        const unsigned home = hash(all->hosts[all->index[at] - 1U]) % (2 * PLACES);
        if ((at - home) % (2 * PLACES) >= (at - hole) % (2 * PLACES)) {
            all->index[hole] = all->index[at];
            hole = at;
        }
    }
    all->index[hole] = 0;
}

sky_link endpoints_link(endpoints *all, const struct sockaddr_in *address) {
    const uint64_t key = key_of(address);
    for (unsigned at = hash(key) & all->mask; all->satellites[at].key != 0; at = (at + 1) & all->mask) {
        if (all->satellites[at].key == key)
            return all->satellites[at].link;
    }
    unsigned at = find(all, key);
    unsigned place = all->index[at];
    if (place == 0) {
        place = ++all->next;
        if (place == PLACES)
            all->next = 0;
        uint64_t *host = &all->hosts[place - 1];
        if (*host != 0) {
            forget(all, *host);
            all->uses[place - 1] = (uint16_t)((all->uses[place - 1] + 1U) % USES);
        }
        *host = key;
        all->is_placed[place - 1] = false;
        at = find(all, key);
        all->index[at] = (uint16_t)place;
    }
    return SKY_BEAM | (sky_link)all->uses[place - 1] << PLACE_BITS | (place - 1);
}

static void write_address(uint64_t key, struct sockaddr_in *address) {
    memset(address, 0, sizeof *address);
    address->sin_family = AF_INET;
    address->sin_port = (in_port_t)(key & 0xFFFFU);
    address->sin_addr.s_addr = (in_addr_t)(key >> 16);
}

bool endpoints_satellite(const endpoints *all, sky_link satellite, struct sockaddr_in *address) {
    for (unsigned at = 0; at <= all->mask; at++) {
        if (all->satellites[at].key != 0 && all->satellites[at].link == satellite) {
            write_address(all->satellites[at].key, address);
            return true;
        }
    }
    return false;
}

/* The host's place in the table; PLACES: it is known no more. */
static unsigned place_of(const endpoints *all, sky_link link) {
    const unsigned place = link & (PLACES - 1U);
    const bool known = all->hosts[place] != 0 && ((link & 0xFFFFFFU) >> PLACE_BITS) == all->uses[place];
    return known ? place : PLACES;
}

bool endpoints_ground(const endpoints *all, sky_link link, struct sockaddr_in *address) {
    const unsigned place = place_of(all, link);
    if (place == PLACES)
        return false;
    write_address(all->hosts[place], address);
    return true;
}

void endpoints_set_place(endpoints *all, sky_link link, const orbits_place *place) {
    const unsigned at = place_of(all, link);
    if (at == PLACES)
        return;
    all->ground[at] = *place;
    all->is_placed[at] = true;
}

const orbits_place *endpoints_place(const endpoints *all, sky_link link) {
    const unsigned at = place_of(all, link);
    return at != PLACES && all->is_placed[at] ? &all->ground[at] : NULL;
}
