/* libFuzzer: a whole satellite. The input is its configuration and a sequence of events: packets by some link, time that
 * passes, timers, background work, an overloaded host, keys that change. All that it sends is read, and sent back to it now
 * and then as another's. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "config.h"
#include "satellite.h"
#include "wire/crc.h"
#include "wire/packet.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { MEMORY = 24 << 20, MOST_PACKET = 4096, MOST_EVENTS = 400, RETURNED = 8192 };

typedef struct {
    const uint8_t *at, *end;
} input;

static uint32_t take(input *in, unsigned bytes) {
    uint32_t value = 0;
    while (bytes-- > 0)
        value = value << 8 | (in->at < in->end ? *in->at++ : 0U);
    return value;
}

static sky_counted counted(void *context, sky_us now) {
    const sky_us period = *(const sky_us *)context;
    const sky_counted found = {(int32_t)(now / period), (int32_t)(now / (4 * period)), (now / period + 1) * period};
    return found;
}

/* So that what leaves is really read. */
extern uint8_t fuzz_sink;
uint8_t fuzz_sink;

/* Reads all that leaves; keeps the last packets in `back`, whose bytes it returns. */
static size_t drain(sky_satellite *satellite, sky_us now, uint8_t *back, size_t *segment) {
    uint8_t sum = 0;
    size_t used = 0;
    sky_run run;
    sky_gather(satellite, now);
    while (sky_next_run(satellite, &run)) {
        used = 0;
        *segment = 0;
        for (uint32_t i = 0; i < run.count; i++) {
            const size_t at = (size_t)i * run.header_bytes;
            const size_t left = run.headers_bytes - at;
            const size_t bytes = left < run.header_bytes ? left : run.header_bytes;
            const size_t begin = used;
            for (size_t byte = 0; byte < bytes; byte++)
                sum ^= run.headers[at + byte];
            if (used + bytes <= RETURNED) {
                memcpy(back + used, run.headers + at, bytes);
                used += bytes;
            }
            uint32_t cell = run.payloads != NULL ? run.payloads[i].first_cell : 0;
            for (uint32_t rest = run.payloads != NULL ? run.payloads[i].bytes : 0; rest > 0;) {
                uint32_t here = 0;
                const uint8_t *payload = sky_payload_cell(satellite, cell, rest, &here, &cell);
                for (uint32_t byte = 0; byte < here; byte++)
                    sum ^= payload[byte];
                if (used + here <= RETURNED) {
                    memcpy(back + used, payload, here);
                    used += here;
                }
                rest -= here;
            }
            if (i == 0)
                *segment = used - begin;
        }
    }
    fuzz_sink = sum;
    return used;
}

/* Makes lengths and checksums those of the packet, which a fuzzer seldom guesses; `how` leaves some of it out. */
static void make_sound(uint8_t *packet, size_t bytes, uint32_t here, unsigned how) {
    if ((how & 1U) != 0U || bytes < 1)
        return;
    const size_t sky = sky_header_start(packet);
    if (bytes < sky + SKY_HEADER_BYTES)
        return;
    const uint8_t op = packet[sky + SKY_OP_AT];
    size_t end = bytes;
    packet[0] = (uint8_t)(op < 0x40U ? 0x18U : 0x08U);
    if (sky_header_start(packet) != sky)
        return;
    packet[1] = 0xC0;
    packet[2] |= 0xC0U;
    sky_store16(packet + 4, (uint16_t)(bytes - 7U));
    if (sky == SKY_COMMAND_BYTES)
        sky_store16(packet + 6, (uint16_t)(op << 8));
    packet[sky] = SKY_WIRE_VERSION;
    packet[sky + SKY_FLAGS_AT] &= 0x02U;
    if ((how & 2U) == 0U)
        sky_store32(packet + sky + SKY_DESTINATION_AT, here);
    if (sky_op_carries(op) && bytes >= sky + SKY_HEADER_BYTES + SKY_REF_BYTES) {
        uint8_t *ref = packet + sky + SKY_HEADER_BYTES;
        const size_t payload = bytes - (sky + SKY_HEADER_BYTES + SKY_REF_BYTES);
        end = bytes - payload;
        sky_store32(ref + SKY_REF_LENGTH_AT, (uint32_t)payload);
        if ((how & 4U) == 0U)
            sky_store32(ref + SKY_REF_CRC_AT, sky_crc32(0, ref + SKY_REF_BYTES, payload));
    }
    sky_packet_seal(packet, end);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static uint8_t *memory;
    static uint8_t back[RETURNED];
    input in = {data, data + size};
    sky_config config;
    sky_us period = 1 + (sky_us)take(&in, 1) * 20000;
    sky_us now = 1800000000000000;
    sky_ring other;
    size_t back_bytes = 0;
    size_t back_segment = 1;
    const uint32_t flags = take(&in, 2);
    sky_config_defaults(&config);
    config.planes = 5;
    config.slots = 19;
    config.address = 2U << 12 | 9U;
    config.centre_plane = 2;
    config.centre_slot = 9;
    config.memory_bytes = 1000 + (uint64_t)take(&in, 1) * 256;
    config.typical_chunk_bytes = 256;
    config.cell_bytes = 64;
    config.most_chunks = 64;
    config.most_keys = 48;
    config.outbox_bytes = 64U << 10;
    config.replacement = (sky_replacement)(flags & 3U) % 3;
    config.gossip = (flags & 4U) != 0U;
    config.plane_only = (flags & 8U) != 0U;
    config.periodic = (flags & 16U) != 0U;
    config.migration = (flags & 32U) != 0U;
    config.replicas = 1 + (flags >> 6 & 1U);
    config.clock = (flags & 128U) != 0U ? counted : NULL;
    config.clock_context = &period;
    config.sweep = 200000;
    config.most_written = config.most_deleted = config.most_dead = config.most_departed = 64;
    config.most_evicted = config.most_leases = config.most_expiries = 32;
    config.most_senders = 4;
    config.most_forgotten = 8;
    config.remembered = 16;
    if ((flags & 512U) != 0U) { /* pools that fill at once */
        config.most_departures = 4;
        config.most_questions = config.most_suspects = config.most_conflicts = config.most_transfers = 1;
        config.most_subjects = config.most_asked = config.most_ground_hosts = config.most_back_offs = 2;
        config.most_evicted = config.most_leases = config.most_expiries = 1;
        config.most_chunks = 6;
        config.most_keys = 3;
        config.most_runs = 3;
        config.outbox_bytes = 16384;
        config.postponed_bytes = 65536;
    }
    if ((flags & 256U) != 0U) {
        config.ring.count = 1;
        config.ring.keys[0].id = 1;
    }
    other = config.ring;
    const size_t needed = sky_satellite_bytes(&config);
    /* Pages that read as zeros until they are written: most of the pools is not used by one input. */
    if (memory == NULL)
        memory = mmap(NULL, MEMORY, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED || needed == 0 || needed > MEMORY || madvise(memory, MEMORY, MADV_DONTNEED) != 0)
        return 0;
    sky_satellite *satellite = sky_satellite_begin(memory, needed, &config, now);
    if (satellite == NULL)
        return 0;
    sky_greet(satellite, now);
    back_bytes = drain(satellite, now, back, &back_segment);
    for (unsigned event = 0; event < MOST_EVENTS && in.at < in.end; event++) {
        const uint32_t what = take(&in, 1);
        static const uint32_t neighbours[4] = {1U << 12 | 9U, 2U << 12 | 10U, 3U << 12 | 9U, 2U << 12 | 8U};
        const sky_link source = (what & 0x10U) != 0U ? neighbours[what >> 5 & 3U] : SKY_BEAM | (what >> 5);
        now += (sky_us)take(&in, 1) * ((what & 0x80U) != 0U ? 5000 : 50);
        if ((what & 15U) < 9U) {
            /* A packet, or a run of copies of it with other request ids. */
            const size_t bytes = take(&in, 2) % MOST_PACKET;
            const size_t there = (size_t)(in.end - in.at) < bytes ? (size_t)(in.end - in.at) : bytes;
            const size_t copies = (what & 15U) == 8U ? 3 : 1;
            uint8_t *run = malloc(there * copies + 1);
            if (run == NULL)
                return 0;
            for (size_t copy = 0; copy < copies && there > 0; copy++) {
                memcpy(run + copy * there, in.at, there);
                if (there >= 60)
                    run[copy * there + SKY_COMMAND_BYTES + SKY_REQUEST_AT + 3] ^= (uint8_t)copy;
                make_sound(run + copy * there, there, config.address, what & 7U);
            }
            in.at += there;
            sky_receive(satellite, run, there * copies, there > 0 ? there : 1, source, now);
            back_bytes = drain(satellite, now, back, &back_segment);
            free(run);
            continue;
        }
        if ((what & 15U) == 9U && back_bytes > 0) {
            /* What it sent comes back, as from a neighbour or a ground host, for it. */
            uint8_t *run = malloc(back_bytes);
            if (run == NULL)
                return 0;
            memcpy(run, back, back_bytes);
            const size_t bytes = back_bytes;
            const size_t segment = back_segment > 0 ? back_segment : 1;
            for (size_t at = 0; at < bytes; at += segment) {
                const size_t one = bytes - at < segment ? bytes - at : segment;
                const size_t sky = sky_header_start(run + at);
                if (one < sky + SKY_HEADER_BYTES)
                    continue;
                sky_store32(run + at + sky + SKY_DESTINATION_AT, config.address);
                if (sky_op_carries(run[at + sky + SKY_OP_AT]) && one >= sky + SKY_HEADER_BYTES + SKY_REF_BYTES)
                    sky_packet_seal(run + at, sky + SKY_HEADER_BYTES + SKY_REF_BYTES);
                else
                    sky_packet_seal(run + at, one);
            }
            sky_receive(satellite, run, bytes, segment, source, now);
            back_bytes = drain(satellite, now, back, &back_segment);
            free(run);
            continue;
        }
        switch (what & 15U) {
        case 10:
            sky_host_late(satellite, (sky_us)take(&in, 2) * 100, now);
            break;
        case 11:
            sky_set_backlog(satellite, (uint64_t)take(&in, 2) << 12);
            break;
        case 12:
            other.count = other.count > 0 ? 1 + (what >> 7) : 0;
            other.keys[1].id = 2;
            other.keys[1].from = now;
            sky_set_keys(satellite, &other);
            break;
        case 13:
            if (sky_wants_work(satellite))
                sky_work(satellite, now);
            break;
        default:
            if (sky_next_timer(satellite) != SKY_NEVER && sky_next_timer(satellite) > now)
                now = sky_next_timer(satellite);
            sky_handle_timer(satellite, now);
            break;
        }
        back_bytes = drain(satellite, now, back, &back_segment);
    }
    (void)sky_digest(satellite);
    int64_t figures[SKY_HOUSEKEEPING_FIELDS];
    sky_housekeeping(satellite, figures, now);
    return 0;
}
