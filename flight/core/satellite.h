/* One satellite as a pure state machine: packets and timers in, runs of packets out. No I/O, no allocation, no floating
 * point: memory and time come from the caller, as do the moves of the box (satellite_moves).
 *
 * The twin of skymemory.protocol.satellite: same packets and times in, same packets and state out.
 */
#ifndef SKY_SATELLITE_H
#define SKY_SATELLITE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef int64_t sky_us;
/* Unix time in microseconds. SKY_NEVER: no timer. */
#define SKY_NEVER INT64_MAX

/* The end of a link: a neighbour's address (shell 0: plane << 12 | slot), or SKY_BEAM | token for a ground host, where the
 * token (24 bits) is the caller's own name for where packets came from. */
typedef uint32_t sky_link;
#define SKY_BEAM 0xFF000000u

/* What moves the box: the count that the clock gives without what operators add, and when it next changes. */
typedef struct {
    int32_t slot_moves, plane_moves;
    sky_us next_us;
} sky_counted;
typedef sky_counted (*sky_clock)(void *context, sky_us now);

typedef struct sky_config sky_config; /* config.h */
typedef struct sky_ring sky_ring;
typedef struct sky_satellite sky_satellite;

/* Packets of one size (the last may be shorter) that leave by one link. Each is `header_bytes` of `headers` (of which there
 * are `headers_bytes` in all), followed, where the packet carries a chunk, by its payload. Valid until the next call of this
 * satellite that is not sky_next_run. */
typedef struct {
    sky_link link;
    uint32_t count;
    uint32_t header_bytes;
    uint32_t headers_bytes;
    const uint8_t *headers;
    const struct sky_payload *payloads; /* count of them, or NULL */
} sky_run;

/* A chunk's bytes, in the cells of the memory that holds it. */
struct sky_payload {
    uint32_t bytes;
    uint32_t first_cell;
};

/* Bytes of memory (aligned as malloc's) that a satellite of this configuration needs for its whole life. 0: impossible. */
size_t sky_satellite_bytes(const sky_config *config);
/* Bytes that all satellites of one thread can share (sky_config.shared), if their configurations differ in no bound. */
size_t sky_shared_bytes(const sky_config *config);
/* Begins in `memory`, which must be zeroed. NULL: too small, or an impossible configuration. */
sky_satellite *sky_satellite_begin(void *memory, size_t bytes, const sky_config *config, sky_us now);
/* Asks the neighbours for all they know: to be called once after the start (and sky_satellite_resume). Take its runs. */
void sky_greet(sky_satellite *satellite, sky_us now);

/* What a satellite that comes back empty goes on with: the account of its bytes, and how operators had moved the box. */
typedef struct sky_past {
    uint64_t set, migrated_in, replaced, evicted, deleted, migrated_out, lost;
    int64_t pushed_at_ms;
    int32_t pushed_slot, pushed_plane;
} sky_past;
/* What it holds counts as lost. */
void sky_satellite_past(const sky_satellite *satellite, sky_past *past);
/* Right after sky_satellite_begin. */
void sky_satellite_resume(sky_satellite *satellite, const sky_past *past, sky_us now);

/* Packets of `segment_bytes` each (the last may be shorter) that came by one link. Never fails: what is malformed is
 * counted. The bytes are changed (hops are counted, MACs taken off) and must stay where they are until sky_next_run has
 * said that there is nothing left: packets in transit leave from there, without a copy. */
void sky_receive(sky_satellite *satellite, uint8_t *packets, size_t bytes, size_t segment_bytes, sky_link source, sky_us now);

sky_us sky_next_timer(sky_satellite *satellite);
void sky_handle_timer(sky_satellite *satellite, sky_us now);
/* Background work that was put off while the host is late: one piece of it. Take its runs before the next. Bytes of packets
 * that were processed, if it was packets. */
bool sky_wants_work(const sky_satellite *satellite);
size_t sky_work(sky_satellite *satellite, sky_us now);
/* The host has handled something `late_us` after it was due: to be told of what was on time, too. */
void sky_host_late(sky_satellite *satellite, sky_us late_us, sky_us now);
/* Whether the host is overloaded: then background work waits. */
bool sky_is_late(const sky_satellite *satellite, sky_us now);
/* Bytes that were given to the caller and have not left yet. */
void sky_set_backlog(sky_satellite *satellite, uint64_t bytes);
/* The caller's own part of the housekeeping: a field of PONG by its number (wire.md). */
void sky_set_figure(sky_satellite *satellite, unsigned number, int64_t value);

/* What is to be sent now. Call sky_gather after each event, then sky_next_run until it says false: before the next event of
 * any satellite, where they share memory. (One that comes too early is lost, and counted by sky_pools_full.) */
void sky_gather(sky_satellite *satellite, sky_us now);
bool sky_next_run(sky_satellite *satellite, sky_run *run);
/* The bytes of one cell of a payload of which `left` are left, how many of them lie here, and the next cell. */
const uint8_t *sky_payload_cell(const sky_satellite *satellite, uint32_t cell, uint32_t left, uint32_t *bytes, uint32_t *next);

/* Its count of the moves of the box. */
void sky_satellite_moves(const sky_satellite *satellite, int32_t *slot_moves, int32_t *plane_moves);
/* Other keys from now on; nothing where there were none at the start. */
void sky_set_keys(sky_satellite *satellite, const sky_ring *ring);
/* By how much the wall clock is ahead of the time that this satellite is given (behind: negative); 0: not worth a word.
 * Commands of now by either are admitted. */
void sky_set_wall(sky_satellite *satellite, sky_us shift);
/* When it last admitted an authentic command of now, and when one of now by a wall clock that is ahead, and not otherwise; 0:
 * never. */
sky_us sky_heard(const sky_satellite *satellite, sky_us *by_wall);

/* All fields of PONG, by number. */
#define SKY_HOUSEKEEPING_FIELDS 49U
void sky_housekeeping(const sky_satellite *satellite, int64_t figures[SKY_HOUSEKEEPING_FIELDS], sky_us now);
/* How often a fixed pool was full, and something was therefore refused, left out, or put off. (`outbox_full` is a counter
 * of its own: packets.) Of the housekeeping `pools_full` is the sum of both. */
uint64_t sky_pools_full(const sky_satellite *satellite);
/* The state that the Python twin has too, part by part in a stated order (tests/flight/state.py), as bytes to a sink; and
 * the CRC-32 of all of them. */
enum {
    SKY_PART_MOVES,
    SKY_PART_COUNTERS,
    SKY_PART_FIGURES,
    SKY_PART_CHUNKS,
    SKY_PART_PROMISES,
    SKY_PART_ORDER,
    SKY_PART_LINKS,
    SKY_PART_OUTBOX,
    SKY_PART_HISTORY,
    SKY_PARTS
};
typedef void (*sky_sink)(void *context, const uint8_t *bytes, size_t count);
void sky_state(sky_satellite *satellite, unsigned part, sky_sink sink, void *context);
uint32_t sky_digest(sky_satellite *satellite);

#endif
