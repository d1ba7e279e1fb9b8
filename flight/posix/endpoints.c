#include "endpoints.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "store/hash.h"

/* 16,384 hosts at once; a token's other 10 bits count the uses of its place, and are never all set: that is no link. */
enum { PLACE_BITS = 14, PLACES = 1 << PLACE_BITS, USES = (1 << (24 - PLACE_BITS)) - 1 };

typedef struct {
    udp_endpoint address; /* of no family: free */
    sky_link link;
} entry;

struct endpoints {
    entry *satellites; /* open addressing */
    unsigned mask;
    unsigned next;           /* the place that the next unknown host takes: that of the oldest */
    udp_endpoint hosts[PLACES]; /* the host in each place; of no family: none */
    uint16_t uses[PLACES];   /* how often the place was taken before */
    orbits_place ground[PLACES]; /* where each says that it is */
    bool is_placed[PLACES];
    uint16_t index[2 * PLACES]; /* hash table of places + 1 */
    uint64_t seed[2];
};

static bool is_known(const udp_endpoint *address) {
    return address->any.sa_family != 0;
}

static bool is_same(const udp_endpoint *one, const udp_endpoint *other) {
    if (one->v4.sin_port != other->v4.sin_port || one->any.sa_family != other->any.sa_family)
        return false;
    if (one->any.sa_family != AF_INET6)
        return one->v4.sin_addr.s_addr == other->v4.sin_addr.s_addr;
    return one->v6.sin6_scope_id == other->v6.sin6_scope_id &&
           memcmp(&one->v6.sin6_addr, &other->v6.sin6_addr, sizeof one->v6.sin6_addr) == 0;
}

/* By a secret seed: sources can be forged, and even the ports of one address would fill one place. */
static unsigned hash(const endpoints *all, const udp_endpoint *address) {
    uint64_t words[2];
    sky_sip sip = sky_sip_begin(all->seed);
    if (address->any.sa_family != AF_INET6) {
        sky_sip_take(&sip, (uint64_t)address->v4.sin_addr.s_addr << 16 | address->v4.sin_port);
        return (unsigned)(sky_sip_end(&sip, 1U) >> 32);
    }
    memcpy(words, &address->v6.sin6_addr, sizeof words);
    sky_sip_take(&sip, words[0]);
    sky_sip_take(&sip, words[1]);
    sky_sip_take(&sip, address->v6.sin6_port);
    return (unsigned)(sky_sip_end(&sip, 3U) >> 32);
}

endpoints *endpoints_new(unsigned satellites, const uint64_t seed[2]) {
    endpoints *all = calloc(1, sizeof *all);
    unsigned size = 16;
    while (size < 2 * satellites)
        size *= 2;
    if (all != NULL && (all->satellites = calloc(size, sizeof *all->satellites)) == NULL) {
        free(all);
        return NULL;
    }
    if (all != NULL) {
        all->mask = size - 1;
        memcpy(all->seed, seed, sizeof all->seed);
    }
    return all;
}

void endpoints_free(endpoints *all) {
    if (all != NULL)
        free(all->satellites);
    free(all);
}

void endpoints_add(endpoints *all, sky_link satellite, const udp_endpoint *address) {
    unsigned at = hash(all, address) & all->mask;
    while (is_known(&all->satellites[at].address))
        at = (at + 1) & all->mask;
    all->satellites[at] = (entry){*address, satellite};
}

static unsigned find(const endpoints *all, const udp_endpoint *address) {
    unsigned at = hash(all, address) % (2 * PLACES);
    while (all->index[at] != 0 && !is_same(&all->hosts[all->index[at] - 1U], address))
        at = (at + 1) % (2 * PLACES);
    return at;
}

/* Takes an entry out of the hash table, and moves up those behind it that would not be found any more. */
static void forget(endpoints *all, const udp_endpoint *address) {
    unsigned hole = find(all, address);
    if (all->index[hole] == 0)
        return;
    for (unsigned at = (hole + 1) % (2 * PLACES); all->index[at] != 0; at = (at + 1) % (2 * PLACES)) {
        const unsigned home = hash(all, &all->hosts[all->index[at] - 1U]) % (2 * PLACES);
        if ((at - home) % (2 * PLACES) >= (at - hole) % (2 * PLACES)) {
            all->index[hole] = all->index[at];
            hole = at;
        }
    }
    all->index[hole] = 0;
}

sky_link endpoints_link(endpoints *all, const udp_endpoint *address) {
    const unsigned first = hash(all, address) & all->mask;
    for (unsigned at = first; is_known(&all->satellites[at].address); at = (at + 1) & all->mask) {
        if (is_same(&all->satellites[at].address, address))
            return all->satellites[at].link;
    }
    unsigned at = find(all, address);
    unsigned place = all->index[at];
    if (place == 0) {
        place = ++all->next;
        if (place == PLACES)
            all->next = 0;
        udp_endpoint *host = &all->hosts[place - 1];
        if (is_known(host)) {
            forget(all, host);
            all->uses[place - 1] = (uint16_t)((all->uses[place - 1] + 1U) % USES);
        }
        *host = *address;
        all->is_placed[place - 1] = false;
        at = find(all, address);
        all->index[at] = (uint16_t)place;
    }
    return SKY_BEAM | (sky_link)all->uses[place - 1] << PLACE_BITS | (place - 1);
}

bool endpoints_satellite(const endpoints *all, sky_link satellite, udp_endpoint *address) {
    for (unsigned at = 0; at <= all->mask; at++) {
        if (is_known(&all->satellites[at].address) && all->satellites[at].link == satellite) {
            *address = all->satellites[at].address;
            return true;
        }
    }
    return false;
}

/* The host's place in the table; PLACES: it is known no more. */
static unsigned place_of(const endpoints *all, sky_link link) {
    const unsigned place = link & (PLACES - 1U);
    const bool known = is_known(&all->hosts[place]) && ((link & 0xFFFFFFU) >> PLACE_BITS) == all->uses[place];
    return known ? place : PLACES;
}

bool endpoints_ground(const endpoints *all, sky_link link, udp_endpoint *address) {
    const unsigned place = place_of(all, link);
    if (place == PLACES)
        return false;
    *address = all->hosts[place];
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
