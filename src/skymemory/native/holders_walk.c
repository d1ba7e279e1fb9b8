/* How far along a chain each slot holds every block, and in which medium. */
#include "holders.h"

#include <string.h>

enum { AHEAD = 12 }; /* blocks whose rows are prefetched */

static void fetch(const Walk *walk, uint64_t key)
{
    for (size_t medium = 0; medium < walk->media; medium++) {
        const RowPart *part = sky_part(walk->rows[medium], key);
        if (part->size)
            __builtin_prefetch(sky_row(walk->rows[medium], part, sky_home(walk->rows[medium], part, key)));
    }
}

/* Adds the run that ends here to each of its slots. */
static void count_run(Walk *walk, uint32_t run)
{
    for (size_t medium = 0; medium < walk->media; medium++)
        for (size_t word = 0; word < walk->words; word++)
            for (uint64_t held = walk->here[medium * walk->words + word]; held; held &= held - 1)
                walk->counts[(medium * walk->words + word) * 64 + (size_t)__builtin_ctzll(held)] += run;
}

/* Fills ``now`` for one block: every slot in the best medium that has it. Returns whether any slot has it. */
static int look_at(Walk *walk, uint64_t key, uint32_t at)
{
    const uint64_t *bits[MAX_MEDIA];
    int some = 0;
    for (size_t medium = 0; medium < walk->media; medium++)
        bits[medium] = sky_bits(walk->rows[medium], key);
    for (size_t word = 0; word < walk->words; word++) {
        uint64_t still = 0;
        for (size_t medium = 0; medium < walk->media; medium++) {
            uint64_t held = bits[medium] && word < walk->rows[medium]->words ? bits[medium][word] : 0;
            held &= walk->left[word] & ~still;
            walk->now[medium * walk->words + word] = held;
            still |= held;
        }
        for (uint64_t gone = walk->left[word] & ~still; gone; gone &= gone - 1)
            walk->depths[64 * word + (size_t)__builtin_ctzll(gone)] = at;
        walk->left[word] = still;
        some |= still != 0;
    }
    return some;
}

void sky_holders_walk(Walk *walk, const char *hashes, size_t count)
{
    size_t bytes = walk->media * walk->words * sizeof(uint64_t), at = 0;
    uint32_t run = 0;
    int some = 1;
    for (size_t next = 0; next < count && next < AHEAD; next++)
        fetch(walk, sky_hash_at(hashes, next));
    for (; at < count && some; at++) {
        if (at + AHEAD < count)
            fetch(walk, sky_hash_at(hashes, at + AHEAD));
        some = look_at(walk, sky_hash_at(hashes, at), (uint32_t)at);
        if (run && memcmp(walk->here, walk->now, bytes)) {
            count_run(walk, run);
            run = 0;
        }
        if (!run)
            memcpy(walk->here, walk->now, bytes);
        run++;
    }
    count_run(walk, run);
    for (size_t word = 0; word < walk->words; word++)
        for (uint64_t held = walk->left[word]; held; held &= held - 1)
            walk->depths[64 * word + (size_t)__builtin_ctzll(held)] = (uint32_t)count;
}
