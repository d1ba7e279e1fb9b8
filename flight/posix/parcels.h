/* Packets on their way within this process: copies of runs that wait for their turn, their delay, or room in a socket. */
#ifndef SKY_POSIX_PARCELS_H
#define SKY_POSIX_PARCELS_H

#include <stdbool.h>
#include <stddef.h>

#include "endpoint.h"
#include "satellite.h"

/* A run, end to end. Arrives at satellite `to`, unless `leaves`: then it leaves by that satellite's socket. */
typedef struct parcel {
    struct parcel *next;
    unsigned to;          /* index of a satellite of this host */
    unsigned life;        /* of that satellite: one that has died meanwhile gets nothing */
    bool leaves;
    bool queues;          /* it has had its faults, and waits for its turn on the link next */
    sky_link source;      /* whom it came from; of one that leaves and queues, whom it goes to */
    udp_endpoint endpoint; /* where it leaves to */
    size_t bytes, segment_bytes;
    uint8_t packets[];
} parcel;

/* First in, first out. */
typedef struct {
    parcel *first, **last;
    size_t bytes;
} parcel_queue;

void parcels_begin(parcel_queue *queue);
void parcels_add(parcel_queue *queue, parcel *one);
parcel *parcels_take(parcel_queue *queue);

/* By time: the earliest first, of one time the first that came. */
typedef struct {
    sky_us due;
    uint64_t order;
    parcel *its;
} held_parcel;

typedef struct {
    held_parcel *heap;
    size_t count, room;
    uint64_t order;
    size_t bytes;
} delay_line;

/* Holds it until `due`; false: out of memory, and it is dropped. */
bool delay_hold(delay_line *line, parcel *one, sky_us due);
/* When the first is due; SKY_NEVER: none. */
sky_us delay_next(const delay_line *line);
parcel *delay_take(delay_line *line);

#endif
