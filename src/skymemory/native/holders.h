/* Rows by medium, and a walk along a chain through several of them. The contract is in twin/prefix.py. */
#ifndef SKYMEMORY_HOLDERS_H
#define SKYMEMORY_HOLDERS_H

#include "prefix.h"

enum { MAX_MEDIA = 16 };

/* A walk along a chain. ``words`` is enough for every slot that is asked about. */
typedef struct {
    size_t words, media;
    Rows *rows[MAX_MEDIA]; /* the best medium first */
    double weights[MAX_MEDIA];
    uint64_t *left;   /* words: requested slots that hold every block so far */
    uint64_t *here;   /* media x words: those of them that this run of blocks counts for */
    uint64_t *now;    /* the same, of one block */
    uint32_t *counts; /* media x 64 words: blocks counted */
    uint32_t *depths; /* 64 words */
} Walk;

/* holders_walk.c. ``left`` and the media are inputs, all else is zero; ``depths`` and ``counts`` are results. */
void sky_holders_walk(Walk *walk, const char *hashes, size_t count);

#endif
