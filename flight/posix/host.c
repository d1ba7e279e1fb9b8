#define _GNU_SOURCE
#include "host.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include "arena.h"
#include "endpoints.h"
#include "faults.h"
#include "key_file.h"
#include "link_queues.h"
#include "outages.h"
#include "overload.h"
#include "parcels.h"
#include "udp.h"
#include "wall_clock.h"
#include "wire/packet.h"

enum {
    RECEIVE_ROUNDS = 4, /* batches taken from one socket before the others get their turn; one if the host is late */
    BACKLOGS = 4, /* at this many times its bound, a satellite's backlog takes no more */
    EVENTS = 256,
    ERRORS_KEPT = 8192,
    FAULTS_INJECTED = 18, /* numbers of fields of PONG */
    DELAY_ERROR_P99_US = 19,
    LINK_LOST = 42, /* by class of links */
    LINK_QUEUED_BYTES = 45,
    FROM_GROUND = 4, /* rows of faults: 0 to 3 are a satellite's neighbours */
    TO_GROUND,
    FAULT_ROWS,
};
#define BEAT_US 100000
#define ALONE_US 5000000 /* a wall clock set forward is not followed within this time of a command by the old time */
#define LOOK_US 250000          /* for changed keys, and to bind again what could not be bound */
#define FIGURES_US 500000
#define GRAIN_US 10000          /* packets of a run that a link ends to send within this time go on together, with the last */
#define LEAST_SLICE_US 1000     /* of background work at a time: a request that comes meanwhile waits this long */
#define MOST_SLICE_US 20000
#define MOST_PARCEL_BYTES ((size_t)256 << 20) /* in memory between satellites, and as many again held for their delay */

/* The delay of a satellite's beam, which holds for a second's flight. */
typedef struct {
    bool known, placed;
    int32_t slot_moves, plane_moves;
    double second;
    orbits_place place;
    sky_us delay;
} beam_delay;

typedef struct {
    sky_satellite *core; /* NULL: disabled */
    void *memory;
    size_t memory_bytes;
    const share_satellite *is;
    int fd;
    unsigned life;
    bool works; /* waits for a slice of background work */
    sky_us full_since; /* since when its socket always had more than one batch; SKY_NEVER */
    sky_us timer, alarm; /* what the core asked for, and when that is due */
    size_t place;        /* in the heap of timers */
    parcel_queue backlog;
    uint64_t dropped; /* packets, for want of room */
    bool lived;
    sky_past past;
    fault_row rows[FAULT_ROWS];
    beam_delay beam; /* as last asked for */
} satellite;

typedef struct {
    share *its;
    int epoll, timer, signals, line;
    wall_clock clock;
    sky_us wall_shift; /* as the satellites know it */
    sky_us armed; /* when the timer fires, by the running clock */
    satellite *all;
    unsigned count;
    int32_t *index; /* of a satellite of this host, by address, + 1; 0: it is another host's */
    const udp_endpoint **peers; /* of the others, by address */
    endpoints *endpoints;
    unsigned *heap; /* satellites by timer */
    size_t timers;
    parcel_queue arriving;
    delay_line held;
    link_queues *queues; /* NULL: links carry everything */
    sky_us beat, look, figures, rested;
    unsigned *working; /* ring of satellites with background work, each once */
    unsigned work_first, work_count;
    bool retry; /* a satellite that should come back could not be bound */
    char trouble[256];
    file_state keys_seen;
    sky_ring ring;
    void *shared; /* memory that the satellites use by turns */
    size_t shared_bytes;
    int64_t pushed_at_ms;
    int32_t pushed_slot, pushed_plane; /* as satellites that died here knew it: with all dead nobody is left to ask */
    uint32_t errors_us[ERRORS_KEPT];
    uint64_t released;
    bool faulty; /* each packet by itself then, on every link */
    uint64_t faults;
    bool stop;
} host;

/* What a host says, for its log. */
static void say(const host *h, const char *words) {
    (void)printf("%s: %s\n", h->its->name, words);
    (void)fflush(stdout);
}

static sky_us now_us(const host *h) {
    return wall_clock_now(&h->clock);
}

/* --- Timers of satellites: a heap, in which each knows its place --- */

static bool sooner(const host *h, unsigned a, unsigned b) {
    return h->all[a].alarm < h->all[b].alarm;
}

static void put(host *h, size_t at, unsigned which) {
    h->heap[at] = which;
    h->all[which].place = at;
}

static void settle(host *h, size_t at) {
    const unsigned which = h->heap[at];
    for (; at > 0 && sooner(h, which, h->heap[(at - 1) / 2]); at = (at - 1) / 2)
        put(h, at, h->heap[(at - 1) / 2]);
    for (size_t child = 2 * at + 1; child < h->timers; child = 2 * at + 1) {
        if (child + 1 < h->timers && sooner(h, h->heap[child + 1], h->heap[child]))
            child++;
        if (!sooner(h, h->heap[child], which))
            break;
        put(h, at, h->heap[child]);
        at = child;
    }
    put(h, at, which);
}

static void set_timer(host *h, unsigned which, sky_us due, sky_us now) {
    satellite *s = &h->all[which];
    if (due == s->timer)
        return;
    s->timer = due;
    s->alarm = due == SKY_NEVER || due > now ? due : now;
    settle(h, s->place);
}

/* --- How late the host is --- */

static void measured(host *h, sky_us late, sky_us now) {
    for (unsigned i = 0; i < h->count; i++) {
        if (h->all[i].core != NULL)
            sky_host_late(h->all[i].core, late, now);
    }
}

/* Reports lateness only: that the loop is on time is reported by its regular beat. */
static void late_by(host *h, sky_us late, sky_us now) {
    if (late > SKY_LATE_US)
        measured(h, late, now);
}

/* --- Links --- */

/* How long light takes between a satellite and a ground host, from where it says it is. */
static sky_us beam_us(host *h, satellite *s, sky_link ground, sky_us now) {
    const orbits_place *place = endpoints_place(h->endpoints, ground);
    beam_delay asked = {.known = true, .placed = place != NULL, .second = floor(sky_clock_elapsed_s(&h->its->clock, now))};
    if (!h->its->delayed)
        return 0;
    if (place != NULL)
        asked.place = *place;
    sky_satellite_moves(s->core, &asked.slot_moves, &asked.plane_moves);
    const beam_delay *last = &s->beam;
    if (!last->known || last->second != asked.second || last->slot_moves != asked.slot_moves ||
        last->plane_moves != asked.plane_moves || last->placed != asked.placed ||
        last->place.latitude_deg != asked.place.latitude_deg || last->place.longitude_deg != asked.place.longitude_deg) {
        const double beam_s = share_beam_s(h->its, s->is->address, place, asked.slot_moves, asked.plane_moves, now);
        asked.delay = share_scaled_us(h->its, beam_s);
        s->beam = asked;
    }
    return s->beam.delay;
}

/* The same for the queues, which ask at times to come: by the box's moves as they were planned. */
static double planned_beam_s(const void *context, uint32_t satellite, const orbits_place *place, sky_us at) {
    const share *its = context;
    int32_t slot_moves = 0;
    int32_t plane_moves = 0;
    sky_clock_moves(&its->clock, at, &slot_moves, &plane_moves);
    slot_moves += its->config.pushed_slot;
    plane_moves += its->config.pushed_plane;
    return share_beam_s(its, satellite, place, slot_moves, plane_moves, at);
}

static bool is_blocked(const host *h, const satellite *s, sky_link to, sky_us now) {
    int32_t slot_moves = 0;
    int32_t plane_moves = 0;
    if (!(h->its->sky.blocked_m > 0.0))
        return false;
    sky_satellite_moves(s->core, &slot_moves, &plane_moves);
    return share_blocked(h->its, s->is->address, to, slot_moves, plane_moves, now);
}

/* Notes the place that a host announces, which may have come behind other packets of it, and takes it off. It is no packet
 * of the protocol: only who simulates the length of beams needs it (skymemory.transport.udp_socket.PLACE). */
static void hear_place(host *h, udp_arrival *arrival, sky_link source) {
    enum { MARK_BYTES = 8, PLACE_BYTES = 24 };
    const size_t segment = arrival->segment_bytes;
    const size_t at = arrival->bytes > 0 && segment > 0 ? (arrival->bytes - 1) / segment * segment : 0;
    const uint8_t *last = arrival->packets + at;
    if (arrival->bytes - at != PLACE_BYTES || memcmp(last, "SKYPLACE", MARK_BYTES) != 0)
        return;
    double degrees[2];
    for (unsigned i = 0; i < 2; i++) {
        uint64_t bits = 0;
        for (unsigned byte = 0; byte < 8; byte++)
            bits = bits << 8 | last[MARK_BYTES + 8 * i + byte];
        memcpy(&degrees[i], &bits, sizeof bits);
    }
    const orbits_place place = {degrees[0], degrees[1]};
    if (orbits_place_is_on_earth(&place))
        endpoints_set_place(h->endpoints, source, &place);
    arrival->bytes = at;
}

/* --- Out --- */

static void after(host *h, unsigned which, sky_us now);

static void watch(const host *h, const satellite *s, bool writable) {
    struct epoll_event event = {.events = EPOLLIN | (writable ? EPOLLOUT : 0U)};
    event.data.u64 = (uint64_t)(s - h->all);
    (void)epoll_ctl(h->epoll, EPOLL_CTL_MOD, s->fd, &event);
}

static parcel *new_parcel(const host *h, unsigned to, size_t bytes, size_t segment_bytes) {
    parcel *one = malloc(sizeof *one + bytes);
    if (one == NULL)
        return NULL;
    one->next = NULL;
    one->to = to;
    one->life = h->all[to].life;
    one->leaves = false;
    one->queues = false;
    one->source = 0;
    one->bytes = bytes;
    one->segment_bytes = segment_bytes;
    return one;
}

/* Copies packets of `out` from `first` on, which one run can carry. NULL: no memory. */
static parcel *copy(const host *h, unsigned to, const udp_outgoing *out, size_t first, size_t count) {
    size_t bytes = 0;
    for (size_t i = first; i < first + count; i++)
        bytes += udp_packet_bytes(out, i);
    parcel *one = new_parcel(h, to, bytes, udp_packet_bytes(out, first));
    if (one != NULL)
        (void)udp_flatten(out, first, count, one->packets);
    return one;
}

/* Queues what the kernel did not take. Beyond a bound it is dropped, as on any full link, and retransmitted. */
static void wait_to_send(host *h, unsigned which, const udp_outgoing *out, size_t first, const udp_endpoint *to) {
    satellite *s = &h->all[which];
    for (size_t count = 0; first < out->count; first += count) {
        parcel *one = NULL;
        count = udp_run_length(out, first);
        if (s->backlog.bytes <= BACKLOGS * h->its->config.backlog_bytes)
            one = copy(h, which, out, first, count);
        if (one == NULL) {
            s->dropped += out->count - first;
            break;
        }
        if (s->backlog.first == NULL)
            watch(h, s, true);
        one->endpoint = *to;
        parcels_add(&s->backlog, one);
    }
    sky_set_backlog(s->core, s->backlog.bytes);
}

static void transmit(host *h, unsigned which, const udp_outgoing *out, const udp_endpoint *to) {
    satellite *s = &h->all[which];
    const size_t sent = s->backlog.first != NULL ? 0 : udp_send(s->fd, to, out);
    if (sent < out->count)
        wait_to_send(h, which, out, sent, to);
}

static udp_outgoing outgoing_of(const parcel *one) {
    const udp_outgoing out = {one->packets, one->bytes, one->segment_bytes, NULL, NULL,
                              (one->bytes + one->segment_bytes - 1) / one->segment_bytes};
    return out;
}

static void writable(host *h, unsigned which) {
    satellite *s = &h->all[which];
    while (s->backlog.first != NULL) {
        parcel *one = s->backlog.first;
        const udp_outgoing out = outgoing_of(one);
        const size_t sent = udp_send(s->fd, &one->endpoint, &out);
        if (sent < out.count) {
            /* What is left begins at a later packet. */
            const size_t gone = sent * one->segment_bytes;
            memmove(one->packets, one->packets + gone, one->bytes - gone);
            one->bytes -= gone;
            s->backlog.bytes -= gone;
            break;
        }
        free(parcels_take(&s->backlog));
    }
    if (s->backlog.first == NULL)
        watch(h, s, false);
    sky_set_backlog(s->core, s->backlog.bytes);
}

/* --- Faults: of every link where it arrives, and of a beam downwards where it begins --- */

static unsigned row_from(const host *h, sky_link here, sky_link source) {
    const sky_torus torus = sky_config_torus(&h->its->config);
    unsigned direction = 0;
    if ((source & SKY_BEAM) == SKY_BEAM)
        return FROM_GROUND;
    while (direction < 3 && sky_neighbour(torus, here, (sky_direction)direction) != source)
        direction++;
    return direction;
}

static void enter_queue(host *h, parcel *run, sky_us now);

/* What becomes of each packet of a parcel, whose last may be shorter; each leaves or arrives at `due` or a little later.
 * Frees it. */
static void inject(host *h, parcel *run, fault_row *row, sky_us due, sky_us now) {
    satellite *s = &h->all[run->to];
    for (size_t at = 0; at < run->bytes; at += run->segment_bytes) {
        const size_t left = run->bytes - at;
        const size_t bytes = left < run->segment_bytes ? left : run->segment_bytes;
        fault_copy copies[2];
        const unsigned count = faults_apply(&h->its->faults, row, copies, &h->faults);
        for (unsigned i = 0; i < count; i++) {
            const sky_us when = due + copies[i].extra_us;
            parcel *one = NULL;
            if ((when > now ? h->held.bytes : h->arriving.bytes) < MOST_PARCEL_BYTES)
                one = new_parcel(h, run->to, bytes, bytes);
            if (one == NULL) {
                s->dropped++;
                continue;
            }
            one->leaves = run->leaves;
            one->queues = run->queues;
            one->source = run->source;
            one->endpoint = run->endpoint;
            memcpy(one->packets, run->packets + at, bytes);
            if (copies[i].damaged)
                one->bytes = faults_damage(row, one->packets, bytes);
            if (when > now) {
                if (!delay_hold(&h->held, one, when))
                    s->dropped++;
            } else if (one->queues) {
                enter_queue(h, one, now);
            } else if (one->leaves) {
                const udp_outgoing out = outgoing_of(one);
                transmit(h, one->to, &out, &one->endpoint);
                free(one);
            } else {
                parcels_add(&h->arriving, one);
            }
        }
    }
    free(run);
}

/* --- The way of a run: its turn on a link with a rate, the time of light, its faults --- */

/* Into satellite `which` of this host from `source`, or out by its socket to `endpoint`. */
typedef struct {
    unsigned which;
    bool leaves, queues; /* as of a parcel */
    sky_link source;
    udp_endpoint endpoint;
    sky_us hold;    /* for light */
    fault_row *row; /* NULL: no faults */
} journey;

/* Whether packets wait for their time. */
static bool holds(const host *h) {
    return h->its->delayed || h->queues != NULL;
}

static link_way way_of(const host *h, link_class class, sky_link here, sky_link other) {
    const bool beam = class != LINK_ISL;
    const link_way way = {class, here, other, beam && h->its->onboard && here == h->its->onboard_at,
                          beam ? endpoints_place(h->endpoints, other) : NULL};
    return way;
}

/* A part of a run that one parcel can carry sets out, and arrives or leaves at `due`. */
static void set_out(host *h, const journey *its, const udp_outgoing *out, size_t first, size_t count, sky_us due, sky_us now) {
    parcel *one = NULL;
    if ((holds(h) ? h->held.bytes : h->arriving.bytes) < MOST_PARCEL_BYTES)
        one = copy(h, its->which, out, first, count);
    if (one == NULL) {
        h->all[its->which].dropped += count;
        return;
    }
    one->leaves = its->leaves;
    one->queues = its->queues;
    one->source = its->source;
    one->endpoint = its->endpoint;
    if (its->row != NULL)
        inject(h, one, its->row, due, now);
    else if (!holds(h))
        parcels_add(&h->arriving, one);
    else if (!delay_hold(&h->held, one, due))
        h->all[its->which].dropped += count;
}

/* Without a rate nothing waits. */
static void travel(host *h, const journey *its, const udp_outgoing *out, sky_us now) {
    size_t count = 0;
    for (size_t first = 0; first < out->count; first += count) {
        count = udp_run_length(out, first);
        set_out(h, its, out, first, count, now + its->hold, now);
    }
}

/* LINKS between satellites goes before all that waits, as packets of routing protocols do: else a full queue would make a
 * neighbour look dead. */
static bool is_urgent(const udp_outgoing *out, size_t i) {
    const uint8_t *packet = out->headers + i * out->header_bytes;
    const size_t left = out->headers_bytes - i * out->header_bytes;
    const size_t at = sky_header_start(packet) + 1;
    return left > at && packet[at] == SKY_LINKS;
}

/* Each packet of a run has its turn on the link; those that end within GRAIN_US go on together. What is lost is left out. */
static void travel_by_turn(host *h, const journey *its, const link_way *way, const udp_outgoing *out, sky_us now) {
    size_t first = 0;
    size_t count = 0;
    size_t most = 0;
    sky_us begin = 0;
    sky_us end = 0;
    for (size_t i = 0; i < out->count; i++) {
        const bool urgent = way->class == LINK_ISL && is_urgent(out, i);
        const sky_us leaves = link_queues_leave(h->queues, way, udp_packet_bytes(out, i), now, urgent);
        const bool joins = count > 0 && count < most && leaves != SKY_NEVER && leaves - begin <= GRAIN_US;
        if (count > 0 && !joins) {
            set_out(h, its, out, first, count, end + its->hold, now);
            count = 0;
        }
        if (leaves == SKY_NEVER)
            continue;
        if (count == 0) {
            first = i;
            most = udp_run_length(out, i);
            begin = leaves;
        }
        count++;
        end = leaves;
    }
    if (count > 0)
        set_out(h, its, out, first, count, end + its->hold, now);
}

/* A packet downwards that has had its faults waits for its turn. Frees it. */
static void enter_queue(host *h, parcel *run, sky_us now) {
    satellite *s = &h->all[run->to];
    if (s->core != NULL && s->life == run->life) {
        const link_way way = way_of(h, LINK_DOWN, s->is->address, run->source);
        const udp_outgoing out = outgoing_of(run);
        const journey its = {.which = run->to, .leaves = true, .endpoint = run->endpoint,
                             .hold = beam_us(h, s, run->source, now)};
        travel_by_turn(h, &its, &way, &out, now);
    }
    free(run);
}

/* Sends one run of a satellite: by its socket, in memory to another of this host, or when its link lets it. */
static void depart(host *h, unsigned which, const sky_run *run, sky_us now) {
    satellite *s = &h->all[which];
    const udp_outgoing out = {run->headers, run->headers_bytes, run->header_bytes, run->payloads, s->core, run->count};
    const bool beam = (run->link & SKY_BEAM) == SKY_BEAM;
    journey its = {.which = which, .leaves = true};
    if (beam) {
        if (!endpoints_ground(h->endpoints, run->link, &its.endpoint)) {
            s->dropped += run->count;
            return;
        }
    } else {
        const int32_t local = h->index[run->link] - 1;
        if ((local >= 0 && h->all[local].core == NULL) || is_blocked(h, s, run->link, now))
            return; /* as to a socket that is closed; lost */
        if (local >= 0) {
            its.which = (unsigned)local;
            its.leaves = false;
            its.source = s->is->address;
        } else {
            its.endpoint = *h->peers[run->link];
        }
    }
    if (h->faulty && beam)
        its.row = &s->rows[TO_GROUND];
    else if (h->faulty && !its.leaves)
        its.row = &h->all[its.which].rows[row_from(h, run->link, s->is->address)];
    if (!holds(h) && its.leaves && its.row == NULL) {
        transmit(h, which, &out, &its.endpoint);
    } else if (h->queues != NULL && beam && its.row != NULL) {
        its.queues = true; /* its faults come first */
        its.source = run->link;
        travel(h, &its, &out, now);
    } else {
        its.hold = beam ? beam_us(h, s, run->link, now) : share_hop_us(h->its, s->is->address, run->link);
        if (h->queues != NULL) {
            const link_way way = way_of(h, beam ? LINK_DOWN : LINK_ISL, s->is->address, run->link);
            travel_by_turn(h, &its, &way, &out, now);
        } else {
            travel(h, &its, &out, now);
        }
    }
}

static void want_work(host *h, unsigned which) {
    if (h->all[which].works)
        return;
    h->all[which].works = true;
    h->working[(h->work_first + h->work_count++) % h->count] = which;
}

/* Sends the satellite's packets, and sets its timer. */
static void after(host *h, unsigned which, sky_us now) {
    satellite *s = &h->all[which];
    sky_run run;
    if (s->core == NULL)
        return;
    sky_gather(s->core, now);
    while (sky_next_run(s->core, &run))
        depart(h, which, &run, now);
    set_timer(h, which, sky_next_timer(s->core), now);
    if (sky_wants_work(s->core))
        want_work(h, which);
}

/* --- In --- */

/* Hands over what has arrived in memory, and what that makes, until nothing is left. */
static void deliver(host *h) {
    for (parcel *one = parcels_take(&h->arriving); one != NULL; one = parcels_take(&h->arriving)) {
        satellite *s = &h->all[one->to];
        if (s->core != NULL && s->life == one->life) {
            const sky_us now = now_us(h);
            sky_receive(s->core, one->packets, one->bytes, one->segment_bytes, one->source, now);
            after(h, one->to, now); /* packets in transit leave from the parcel */
        }
        free(one);
    }
}

/* What came by a beam waits for its turn and as long as light takes; what came by a faulty link has its faults. */
static void hold(host *h, unsigned which, const udp_arrival *arrival, sky_link source, sky_us now) {
    satellite *s = &h->all[which];
    const bool beam = (source & SKY_BEAM) == SKY_BEAM;
    const udp_outgoing run = {arrival->packets, arrival->bytes, arrival->segment_bytes, NULL, NULL,
                              (arrival->bytes + arrival->segment_bytes - 1) / arrival->segment_bytes};
    const journey its = {.which = which, .source = source, .hold = beam ? beam_us(h, s, source, now) : 0,
                         .row = h->faulty ? &s->rows[row_from(h, s->is->address, source)] : NULL};
    if (beam && h->queues != NULL) {
        const link_way way = way_of(h, LINK_UP, s->is->address, source);
        travel_by_turn(h, &its, &way, &run, now);
    } else {
        travel(h, &its, &run, now);
    }
}

static void readable(host *h, unsigned which) {
    satellite *s = &h->all[which];
    udp_arrival arrivals[UDP_SLOTS];
    const sky_us now = now_us(h);
    const unsigned rounds = sky_is_late(s->core, now) ? 1 : RECEIVE_ROUNDS;
    for (unsigned round = 0; round < rounds; round++) {
        const unsigned count = udp_receive(s->fd, arrivals);
        for (unsigned i = 0; i < count; i++) {
            udp_arrival *arrival = &arrivals[i];
            const sky_link source = endpoints_link(h->endpoints, &arrival->from);
            const bool beam = (source & SKY_BEAM) == SKY_BEAM;
            if (beam && h->its->sky.plane != NULL) {
                hear_place(h, arrival, source);
                if (arrival->bytes == 0)
                    continue;
            }
            if (h->faulty || (holds(h) && beam))
                hold(h, which, arrival, source, now_us(h));
            else
                sky_receive(s->core, arrival->packets, arrival->bytes, arrival->segment_bytes, source, now_us(h));
        }
        /* Before the buffer is used again: packets in transit leave from it. */
        after(h, which, now_us(h));
        if (count == 0 || (count == 1 && arrivals[0].bytes <= arrivals[0].segment_bytes)) {
            s->full_since = SKY_NEVER; /* nothing, or a single datagram and no stream: answer at once */
            return;
        }
    }
    if (s->full_since != SKY_NEVER)
        late_by(h, now - s->full_since, now);
    if (!udp_has_more(s->fd))
        s->full_since = SKY_NEVER;
    else if (s->full_since == SKY_NEVER)
        s->full_since = now;
}

static void release_due(host *h) {
    const sky_us first = delay_next(&h->held);
    sky_us now = now_us(h);
    if (first > now)
        return;
    late_by(h, now - first, now);
    for (sky_us due = first; due <= now; due = delay_next(&h->held)) {
        parcel *one = delay_take(&h->held);
        const satellite *s = &h->all[one->to];
        now = now_us(h);
        h->errors_us[h->released++ % ERRORS_KEPT] = now - due < UINT32_MAX ? (uint32_t)(now - due) : UINT32_MAX;
        if (one->queues) {
            enter_queue(h, one, now);
            continue;
        }
        if (!one->leaves) {
            parcels_add(&h->arriving, one);
            deliver(h);
            continue;
        }
        if (s->core != NULL && s->life == one->life) {
            const udp_outgoing out = outgoing_of(one);
            transmit(h, one->to, &out, &one->endpoint);
        }
        free(one);
    }
}

/* --- Satellites that begin, die, and come back --- */

static void unmap(const satellite *s) {
    SKY_UNGUARD(s->memory, s->memory_bytes);
    (void)munmap(s->memory, s->memory_bytes);
}

/* Zeros that take no memory before they are touched; huge pages would take it all at once. */
static void *zeros(size_t bytes) {
    void *memory = bytes == 0 ? MAP_FAILED
                              : mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory != MAP_FAILED)
        (void)madvise(memory, bytes, MADV_NOHUGEPAGE);
    return memory;
}

static bool launch(host *h, unsigned which) {
    satellite *s = &h->all[which];
    sky_config config = h->its->config;
    uint32_t receive_bytes = 0;
    uint32_t send_bytes = 0;
    const int fd = udp_open(&s->is->endpoint, &receive_bytes, &send_bytes);
    if (fd < 0)
        return false;
    if (which == 0 && receive_bytes < 2U * UDP_BUFFER_BYTES && !s->lived)
        say(h, "the kernel grants smaller receive buffers than 4 MiB: raise net.core.rmem_max; bursts may be lost and "
               "retransmitted");
    config.address = s->is->address;
    config.credit_bytes = receive_bytes / 2;
    config.neighbour_timeout = share_timeout_us(h->its, s->is->address);
    config.ring = h->ring;
    config.shared = h->shared;
    config.shared_bytes = h->shared_bytes;
    s->memory_bytes = sky_satellite_bytes(&config);
    s->memory = zeros(s->memory_bytes);
    const sky_us now = now_us(h);
    if (s->memory != MAP_FAILED)
        s->core = sky_satellite_begin(s->memory, s->memory_bytes, &config, now);
    struct epoll_event event = {.events = EPOLLIN, .data.u64 = which};
    if (s->core == NULL || epoll_ctl(h->epoll, EPOLL_CTL_ADD, fd, &event) < 0) {
        if (s->memory != MAP_FAILED)
            unmap(s);
        s->core = NULL;
        (void)close(fd);
        errno = ENOMEM;
        return false;
    }
    sky_set_wall(s->core, h->wall_shift);
    s->fd = fd;
    s->life++;
    s->full_since = SKY_NEVER;
    parcels_begin(&s->backlog);
    if (h->pushed_at_ms != 0 && h->pushed_at_ms > s->past.pushed_at_ms) {
        s->past.pushed_at_ms = h->pushed_at_ms;
        s->past.pushed_slot = h->pushed_slot;
        s->past.pushed_plane = h->pushed_plane;
    }
    if (s->lived)
        sky_satellite_resume(s->core, &s->past, now);
    return true;
}

static void greet(host *h, unsigned which) {
    sky_greet(h->all[which].core, now_us(h));
    after(h, which, now_us(h));
}

static void kill_satellite(host *h, unsigned which) {
    satellite *s = &h->all[which];
    sky_satellite_past(s->core, &s->past);
    s->lived = true;
    if (s->past.pushed_at_ms >= h->pushed_at_ms) {
        h->pushed_at_ms = s->past.pushed_at_ms;
        h->pushed_slot = s->past.pushed_slot;
        h->pushed_plane = s->past.pushed_plane;
    }
    (void)close(s->fd);
    s->fd = -1;
    for (parcel *one = parcels_take(&s->backlog); one != NULL; one = parcels_take(&s->backlog))
        free(one);
    s->core = NULL;
    s->life++;
    unmap(s);
    set_timer(h, which, SKY_NEVER, 0);
}

typedef struct {
    const host *h;
    bool *dead;
} dead_set;

static void mark_dead(void *context, sky_link address) {
    const dead_set *set = context;
    const unsigned planes = set->h->its->config.planes;
    const unsigned slots = set->h->its->config.slots;
    if (address >> 12 < planes && (address & 0xFFFU) < slots && set->h->index[address] > 0)
        set->dead[set->h->index[address] - 1] = true;
}

/* Applies the file of disabled satellites. One that should come back and whose port is taken is tried again: a search for
 * free ports binds each of them for a moment. */
static void follow_outages(host *h) {
    char trouble[256] = "";
    dead_set set = {h, calloc(h->count, sizeof(bool))};
    h->retry = false;
    if (set.dead == NULL)
        return;
    if (h->its->outages_path[0] == '\0' || outages_read(h->its->outages_path, mark_dead, &set, trouble)) {
        for (unsigned i = 0; i < h->count; i++) {
            if (h->all[i].core != NULL && set.dead[i])
                kill_satellite(h, i);
        }
        for (unsigned i = 0; i < h->count; i++) {
            if (h->all[i].core != NULL || set.dead[i])
                continue;
            if (launch(h, i))
                greet(h, i);
            else
                (void)snprintf(trouble, sizeof trouble, "port %u: %s", (unsigned)ntohs(h->all[i].is->endpoint.v4.sin_port),
                               strerror(errno));
        }
    }
    free(set.dead);
    h->retry = trouble[0] != '\0';
    if (h->retry && strcmp(trouble, h->trouble) != 0) {
        char words[300];
        (void)snprintf(words, sizeof words, "%s; trying again", trouble);
        say(h, words);
    }
    (void)snprintf(h->trouble, sizeof h->trouble, "%s", trouble);
}

static void follow_keys(host *h) {
    char reason[256];
    sky_ring ring;
    if (h->its->keys_path[0] == '\0' || !file_changed(h->its->keys_path, &h->keys_seen))
        return;
    if (!key_file_read(h->its->keys_path, h->its->auth, &ring, reason)) {
        char words[300];
        (void)snprintf(words, sizeof words, "%s; still using the previous keys", reason);
        say(h, words);
        return;
    }
    h->ring = ring;
    for (unsigned i = 0; i < h->count; i++) {
        if (h->all[i].core != NULL)
            sky_set_keys(h->all[i].core, &h->ring);
    }
}

/* --- Time --- */

static int ascending(const void *a, const void *b) {
    const uint32_t one = *(const uint32_t *)a;
    const uint32_t other = *(const uint32_t *)b;
    return one < other ? -1 : one > other;
}

static void report_figures(host *h) {
    static uint32_t sorted[ERRORS_KEPT];
    const size_t count = h->released < ERRORS_KEPT ? (size_t)h->released : ERRORS_KEPT;
    for (unsigned i = 0; h->faulty && i < h->count; i++) {
        if (h->all[i].core != NULL)
            sky_set_figure(h->all[i].core, FAULTS_INJECTED, (int64_t)h->faults);
    }
    if (h->queues != NULL) {
        uint64_t lost[LINK_CLASSES];
        uint64_t waiting[LINK_CLASSES];
        link_queues_figures(h->queues, now_us(h), lost, waiting);
        for (unsigned i = 0; i < h->count * LINK_CLASSES; i++) {
            sky_satellite *core = h->all[i / LINK_CLASSES].core;
            if (core == NULL)
                continue;
            sky_set_figure(core, LINK_LOST + i % LINK_CLASSES, (int64_t)lost[i % LINK_CLASSES]);
            sky_set_figure(core, LINK_QUEUED_BYTES + i % LINK_CLASSES, (int64_t)waiting[i % LINK_CLASSES]);
        }
    }
    if (!holds(h) || count == 0)
        return;
    memcpy(sorted, h->errors_us, count * sizeof *sorted);
    qsort(sorted, count, sizeof *sorted, ascending);
    for (unsigned i = 0; i < h->count; i++) {
        if (h->all[i].core != NULL)
            sky_set_figure(h->all[i].core, DELAY_ERROR_P99_US, sorted[(count - 1) * 99 / 100]);
    }
}

/* Follows a wall clock that was set forward: with MACs only once an authentic command says the same time, and none has
 * lately said another. */
static void look_at_wall_clock(host *h, sky_us now) {
    bool follow = h->its->keys_path[0] == '\0';
    sky_us heard = 0, heard_by_wall = 0;
    for (unsigned i = 0; i < h->count; i++) {
        if (h->all[i].core != NULL) {
            sky_us by_wall;
            const sky_us last = sky_heard(h->all[i].core, &by_wall);
            heard = last > heard ? last : heard;
            heard_by_wall = by_wall > heard_by_wall ? by_wall : heard_by_wall;
        }
    }
    follow = follow || (heard_by_wall >= now - ALONE_US && now > heard + ALONE_US);
    if (follow)
        (void)wall_clock_follow(&h->clock);
    const int64_t shift = wall_clock_shift(&h->clock);
    for (unsigned i = 0; i < h->count && shift != h->wall_shift; i++) {
        if (h->all[i].core != NULL)
            sky_set_wall(h->all[i].core, shift);
    }
    h->wall_shift = shift;
}

static void alarms(host *h) {
    sky_us now = now_us(h);
    while (h->timers > 0 && h->all[h->heap[0]].alarm <= now) {
        const unsigned which = h->heap[0];
        satellite *s = &h->all[which];
        late_by(h, now - s->alarm, now);
        s->timer = s->alarm = SKY_NEVER;
        settle(h, 0);
        sky_handle_timer(s->core, now);
        after(h, which, now);
        deliver(h);
        /* Each once a turn: a timer that is due again at once must not keep sockets waiting. */
        if (s->alarm <= now) {
            s->alarm = now + 1;
            settle(h, s->place);
        }
        if (h->heap[0] == which)
            break;
    }
    now = now_us(h);
    if (now >= h->beat) {
        look_at_wall_clock(h, now);
        now = now_us(h);
        measured(h, now - h->beat, now);
        h->beat = now + BEAT_US;
    }
    if (now >= h->look) {
        follow_keys(h);
        if (h->retry)
            follow_outages(h);
        h->look = now + LOOK_US;
    }
    if ((holds(h) || h->faulty) && now >= h->figures) {
        report_figures(h);
        h->figures = now + FIGURES_US;
    }
}

/* A slice of background work: a fifth of the time since the last one, within bounds. */
static void work(host *h) {
    const sky_us began = running_us();
    sky_us slice = (began - h->rested) / 4;
    slice = slice < LEAST_SLICE_US ? LEAST_SLICE_US : slice > MOST_SLICE_US ? MOST_SLICE_US : slice;
    while (h->work_count > 0 && running_us() < began + slice) {
        const unsigned which = h->working[h->work_first];
        h->work_first = (h->work_first + 1) % h->count;
        h->work_count--;
        h->all[which].works = false;
        if (h->all[which].core == NULL)
            continue;
        sky_work(h->all[which].core, now_us(h));
        after(h, which, now_us(h));
        deliver(h);
    }
    h->rested = running_us();
}

static void arm(host *h) {
    sky_us due = h->beat < h->look ? h->beat : h->look;
    if (h->timers > 0 && h->all[h->heap[0]].alarm < due)
        due = h->all[h->heap[0]].alarm;
    if (delay_next(&h->held) < due)
        due = delay_next(&h->held);
    sky_us at = due - h->clock.offset_us;
    at = at < 1 ? 1 : at;
    if (at == h->armed)
        return;
    h->armed = at;
    const struct itimerspec setting = {.it_value = {.tv_sec = at / 1000000, .tv_nsec = at % 1000000 * 1000}};
    (void)timerfd_settime(h->timer, TFD_TIMER_ABSTIME, &setting, NULL);
}

/* --- The process --- */

enum { TIMER_EVENT = 1 << 30, SIGNAL_EVENT, LINE_EVENT };

static bool watch_fd(const host *h, int fd, unsigned name) {
    struct epoll_event event = {.events = EPOLLIN, .data.u64 = name};
    return fd >= 0 && epoll_ctl(h->epoll, EPOLL_CTL_ADD, fd, &event) == 0;
}

static void hear_supervisor(host *h) {
    char words[8] = "";
    const ssize_t got = recv(h->line, words, sizeof words, 0);
    if (got != 5 || memcmp(words, "stay\n", 5) != 0)
        h->stop = true;
    (void)close(h->line);
    h->line = -1;
}

static void hear_signals(host *h) {
    struct signalfd_siginfo info;
    while (read(h->signals, &info, sizeof info) == (ssize_t)sizeof info) {
        if (info.ssi_signo == SIGHUP)
            follow_outages(h);
        else
            h->stop = true;
    }
}

static bool prepare(host *h) {
    const share *its = h->its;
    const size_t addresses = (size_t)its->config.planes << 12;
    sigset_t signals;
    struct rlimit files;
    if (getrlimit(RLIMIT_NOFILE, &files) == 0 && files.rlim_cur < files.rlim_max) {
        files.rlim_cur = files.rlim_max; /* a socket each */
        (void)setrlimit(RLIMIT_NOFILE, &files);
    }
    h->count = its->mine_count;
    h->all = calloc(h->count, sizeof *h->all);
    h->heap = calloc(h->count, sizeof *h->heap);
    h->working = calloc(h->count, sizeof *h->working);
    h->index = calloc(addresses, sizeof *h->index);
    h->peers = calloc(addresses, sizeof *h->peers);
    h->endpoints = endpoints_new(its->mine_count + its->others_count, its->config.hash_seed);
    if (h->all == NULL || h->heap == NULL || h->working == NULL || h->index == NULL || h->peers == NULL ||
        h->endpoints == NULL)
        return false;
    for (unsigned i = 0; i < its->others_count; i++) {
        h->peers[its->others[i].address] = &its->others[i].endpoint;
        endpoints_add(h->endpoints, its->others[i].address, &its->others[i].endpoint);
    }
    for (unsigned i = 0; i < h->count; i++) {
        h->all[i].is = &its->mine[i];
        h->all[i].fd = -1;
        h->all[i].timer = h->all[i].alarm = SKY_NEVER;
        h->index[its->mine[i].address] = (int32_t)i + 1;
        endpoints_add(h->endpoints, its->mine[i].address, &its->mine[i].endpoint);
        put(h, i, i);
        for (unsigned row = 0; row < FAULT_ROWS; row++)
            h->all[i].rows[row] = faults_row(&its->faults, (uint64_t)its->mine[i].address * FAULT_ROWS + row);
    }
    h->faulty = faults_any(&its->faults);
    if (its->links.given && (h->queues = link_queues_new(&its->links, planned_beam_s, its)) == NULL)
        return false;
    h->timers = h->count;
    parcels_begin(&h->arriving);
    (void)sigemptyset(&signals);
    (void)sigaddset(&signals, SIGTERM);
    (void)sigaddset(&signals, SIGINT);
    (void)sigaddset(&signals, SIGHUP);
    if (sigprocmask(SIG_BLOCK, &signals, NULL) < 0 || signal(SIGPIPE, SIG_IGN) == SIG_ERR)
        return false;
    h->epoll = epoll_create1(EPOLL_CLOEXEC);
    h->timer = timerfd_create(CLOCK_BOOTTIME, TFD_NONBLOCK | TFD_CLOEXEC);
    h->signals = signalfd(-1, &signals, SFD_NONBLOCK | SFD_CLOEXEC);
    wall_clock_begin(&h->clock, h->its->unix_at_boot_us);
    return h->epoll >= 0 && watch_fd(h, h->timer, TIMER_EVENT) && watch_fd(h, h->signals, SIGNAL_EVENT) &&
           (h->line < 0 || watch_fd(h, h->line, LINE_EVENT));
}

static bool begin(host *h) {
    char words[300];
    const char *error = NULL;
    if (h->its->keys_path[0] != '\0') {
        (void)file_changed(h->its->keys_path, &h->keys_seen);
        if (!key_file_read(h->its->keys_path, h->its->auth, &h->ring, words)) {
            say(h, words);
            return false;
        }
    }
    sky_config config = h->its->config;
    config.address = h->its->mine[0].address;
    config.credit_bytes = UDP_BUFFER_BYTES;
    config.ring = h->ring;
    error = sky_config_error(&config);
    if (error != NULL) {
        say(h, error);
        return false;
    }
    h->shared_bytes = sky_shared_bytes(&config);
    h->shared = zeros(h->shared_bytes);
    if (h->shared == MAP_FAILED) {
        say(h, strerror(errno));
        return false;
    }
    for (unsigned i = 0; i < h->count; i++) {
        if (!launch(h, i)) {
            (void)snprintf(words, sizeof words, "cannot serve its satellites: port %u: %s",
                           (unsigned)ntohs(h->all[i].is->endpoint.v4.sin_port), strerror(errno));
            say(h, words);
            return false;
        }
    }
    for (unsigned i = 0; i < h->count; i++) /* once all are there to hear it */
        greet(h, i);
    deliver(h);
    follow_outages(h);
    (void)snprintf(words, sizeof words, "%u satellites listen", h->count);
    say(h, words);
    if (h->line >= 0)
        (void)send(h->line, "ready\n", 6, MSG_NOSIGNAL);
    return true;
}

static void turn(host *h) {
    static struct epoll_event events[EVENTS];
    arm(h);
    const int count = epoll_wait(h->epoll, events, EVENTS, h->work_count > 0 ? 0 : -1);
    for (int i = 0; i < count && !h->stop; i++) {
        const uint64_t name = events[i].data.u64;
        if (name == TIMER_EVENT) {
            uint64_t fired = 0;
            (void)!read(h->timer, &fired, sizeof fired);
            h->armed = 0;
        } else if (name == SIGNAL_EVENT) {
            hear_signals(h);
        } else if (name == LINE_EVENT) {
            hear_supervisor(h);
        } else if (h->all[name].core != NULL) {
            if (events[i].events & EPOLLOUT)
                writable(h, (unsigned)name);
            if (events[i].events & (EPOLLIN | EPOLLERR))
                readable(h, (unsigned)name);
        }
        deliver(h);
    }
    release_due(h);
    alarms(h);
    if (h->work_count > 0)
        work(h);
}

int host_serve(share *its, int supervisor_fd) {
    static host whole; /* for the life of the process */
    host *h = &whole;
    h->its = its;
    h->line = supervisor_fd;
    if (getrandom(its->config.hash_seed, sizeof its->config.hash_seed, 0) != (ssize_t)sizeof its->config.hash_seed ||
        getrandom(&its->config.first_request_id, sizeof its->config.first_request_id, 0) != (ssize_t)sizeof its->config.first_request_id) {
        say(h, "the system gives no random numbers: hashes need a secret seed");
        return 1;
    }
    if (!prepare(h)) {
        say(h, strerror(errno));
        return 1;
    }
    if (!begin(h))
        return 1;
    h->beat = now_us(h) + BEAT_US;
    h->rested = running_us();
    while (!h->stop)
        turn(h);
    /* After a crash the record stays, so that `status` can distinguish a crash from a stop. */
    if (its->record_path[0] != '\0')
        (void)unlink(its->record_path);
    return 0;
}
