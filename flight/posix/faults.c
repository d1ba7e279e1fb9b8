#include "faults.h"

enum { MOST_BITS = 8 };

/* SplitMix64. */
static uint64_t draw(fault_row *row) {
    uint64_t x = row->state += 0x9E3779B97F4A7C15U;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9U;
    x = (x ^ x >> 27) * 0x94D049BB133111EBU;
    return x ^ x >> 31;
}

/* Of 0 to `count` - 1, where `count` is at most 2^32. */
static uint64_t below(fault_row *row, uint64_t count) {
    return (draw(row) >> 32) * count >> 32;
}

static bool happens(fault_row *row, uint64_t share) {
    return share > 0 && draw(row) >> 32 < share;
}

bool faults_any(const fault_rates *rates) {
    return rates->loss > 0 || rates->duplicate > 0 || rates->reorder > 0 || rates->corrupt > 0;
}

fault_row faults_row(const fault_rates *rates, uint64_t link) {
    fault_row seed = {rates->seed};
    fault_row row = {draw(&seed) + link};
    row.state = draw(&row); /* neighbours in number are far from each other in their rows */
    return row;
}

static fault_copy fly(const fault_rates *rates, fault_row *row, uint64_t *injected) {
    fault_copy copy = {0, false};
    if (happens(row, rates->reorder)) {
        (*injected)++;
        copy.extra_us = rates->reorder_us - (sky_us)below(row, (uint64_t)rates->reorder_us);
    }
    copy.damaged = happens(row, rates->corrupt);
    *injected += copy.damaged;
    return copy;
}

unsigned faults_apply(const fault_rates *rates, fault_row *row, fault_copy copies[2], uint64_t *injected) {
    if (happens(row, rates->loss)) {
        (*injected)++;
        return 0;
    }
    copies[0] = fly(rates, row, injected);
    if (!happens(row, rates->duplicate))
        return 1;
    (*injected)++;
    copies[1] = fly(rates, row, injected);
    return 2;
}

size_t faults_damage(fault_row *row, uint8_t *packet, size_t bytes) {
    uint64_t flipped[MOST_BITS];
    if (bytes == 0)
        return 0;
    if (below(row, 4) == 0)
        return (size_t)below(row, bytes);
    const uint64_t wanted = 1 + below(row, MOST_BITS);
    for (uint64_t count = 0; count < wanted;) {
        const uint64_t bit = below(row, 8 * (uint64_t)bytes);
        uint64_t i = 0;
        while (i < count && flipped[i] != bit)
            i++;
        if (i < count)
            continue; /* once more would undo it */
        packet[bit / 8] ^= (uint8_t)(1U << bit % 8);
        flipped[count++] = bit;
    }
    return bytes;
}
