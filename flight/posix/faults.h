/* Faults of links from a seed: loss, duplication, reordering, damage of single packets. Twin of skymemory.transport.faults,
 * with numbers of its own: each link draws from its own row, so that what befalls its n-th packet depends on nothing else.
 */
#ifndef SKY_POSIX_FAULTS_H
#define SKY_POSIX_FAULTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "satellite.h"

#define FAULTS_WHOLE (1ULL << 32)

/* Shares of packets in 1/FAULTS_WHOLE. */
typedef struct {
    uint64_t loss, duplicate, reorder, corrupt;
    sky_us reorder_us; /* the longest extra delay of a reordered packet */
    uint64_t seed;
} fault_rates;

typedef struct {
    uint64_t state;
} fault_row;

typedef struct {
    sky_us extra_us;
    bool damaged;
} fault_copy;

bool faults_any(const fault_rates *rates);
/* The row of one direction of one link, by a number for each. */
fault_row faults_row(const fault_rates *rates, uint64_t link);
/* The copies of a packet that arrive, none to two. Adds the faults to `injected`. */
unsigned faults_apply(const fault_rates *rates, fault_row *row, fault_copy copies[2], uint64_t *injected);
/* Flips 1 to 8 bits, or in one case of four cuts the packet short. How many bytes are left. */
size_t faults_damage(fault_row *row, uint8_t *packet, size_t bytes);

#endif
