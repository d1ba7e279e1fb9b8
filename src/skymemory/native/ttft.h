/* Estimates of the time to a first token: prompts under way, queues, shares of requests, and the ranking by them.
 * The contracts are in twin/queues.py and twin/ttft.py. */
#ifndef SKYMEMORY_TTFT_H
#define SKYMEMORY_TTFT_H

#include "prefix.h"

/* under_way.c: a tree of the beginnings that chains under way have in common. */
typedef struct UnderWay UnderWay;
extern SkyType sky_under_way_type;
size_t sky_under_way_open(const UnderWay *self);
/* Raises ``depths[slot]``, where slot < slots, to the blocks of the chain that are under way there. */
void sky_under_way_walk(const UnderWay *self, const char *hashes, size_t count, uint32_t *depths, size_t slots);

/* queues.c. The query to one server: read once, before any decision, since reading may run arbitrary code. */
typedef struct {
    size_t slot;
    int reports;
    double at_s, waiting; /* of its report */
} Asked;

typedef struct Queues Queues;
extern SkyType sky_prefill_queues_type;
/* Fills one ``Asked`` for each entry of the tuple ``servers``, whose slots then have a queue's room. -1: an error. */
int sky_queues_read(Queues *self, PyObject *servers, Asked *asked);
/* Seconds until the server could begin. */
double sky_queues_wait_s(Queues *self, const Asked *asked, double now_s);
double sky_queues_usual_s(const Queues *self);
/* The report of a slot's server that was read last, borrowed; NULL: none was. */
PyObject *sky_queues_report(const Queues *self, size_t slot);
/* A slot that an argument gives: 0 and an error where it is none. */
int sky_slot_from(PyObject *number, size_t *slot);

/* guard.c. 1: over, 0: not, -1: no memory. */
typedef struct Guard Guard;
extern SkyType sky_share_guard_type;
int sky_guard_over(Guard *self, size_t slot, long long servers, double now_s);

/* delay_price.c */
extern SkyType sky_delay_price_type;

/* ttft.c */
extern SkyType sky_ttft_ranker_type;

/* fit.c */
PyObject *sky_py_fit_prefills(PyObject *self, PyObject *args);
PyObject *sky_py_fit_whole(PyObject *self, PyObject *points);

/* prefix_calls.c: the table of a ``PrefixTable``, or NULL. */
Table *sky_table_of(PyObject *object);

/* Pairs of numbers in a row, taken from both ends. ``size`` is a power of two, or 0. */
typedef struct {
    double first, second;
} Pair;

typedef struct {
    Pair *pairs;
    size_t size, begin, count;
} Ring;

static inline Pair *sky_ring_at(const Ring *ring, size_t at)
{
    return &ring->pairs[(ring->begin + at) & (ring->size - 1)];
}

static inline void sky_ring_drop_first(Ring *ring)
{
    ring->begin = (ring->begin + 1) & (ring->size - 1);
    ring->count--;
}

/* queues.c. -1: no memory, and nothing has changed. */
int sky_ring_push(Ring *ring, double first, double second);

#endif
