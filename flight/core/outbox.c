#include "outbox.h"

#include <string.h>

#include "store/hash.h"

#define SENDERS_PERIOD_US 500000
/* A header of telemetry, a chunk reference and a MAC: of each packet with a payload. */
#define MOST_BULK_BYTES ((size_t)SKY_TELEMETRY_PREFIX_BYTES + (size_t)SKY_REF_BYTES + (size_t)SKY_MAC_BYTES)

/* Commands 1 to 13, and the ids of codecs whose payloads a client on this computer can read: as the twin states them. */
#define OUR_OPERATIONS UINT64_C(0x3FFE)
#define OUR_CODECS UINT64_C(0x701)

/* --- Credit --- */

void sky_credit_heard(sky_credit *credit, uint32_t sender, sky_us now) {
    const uint32_t mask = 2U * SKY_MOST_SENDERS - 1U;
    uint32_t at = sky_hash_word(credit->hash_seed, sender) & mask;
    if (now >= credit->until) {
        credit->before = now < credit->until + SENDERS_PERIOD_US ? credit->count : 0U;
        credit->count = 0U;
        credit->until = now + SENDERS_PERIOD_US;
        credit->period++;
    }
    while (credit->periods[at] == credit->period && credit->senders[at] != sender) {
        at = (at + 1U) & mask;
    }
    if (credit->periods[at] == credit->period || credit->count == SKY_MOST_SENDERS) {
        return;
    }
    credit->periods[at] = credit->period;
    credit->senders[at] = sender;
    credit->count++;
    const uint32_t each = credit->buffer_bytes / (credit->count > credit->before ? credit->count : credit->before);
    credit->each_bytes = each > credit->least_bytes ? each : credit->least_bytes;
}

/* --- The queue --- */

bool sky_outbox_new(sky_outbox *outbox, sky_arena *arena, const sky_config *config) {
    const size_t limit = config->outbox_bytes;
    sky_queued *queue = sky_take_shared(arena, config->most_runs, sizeof *queue);
    uint8_t *bytes = sky_take_shared(arena, limit, 1U);
    uint32_t *senders = sky_take(arena, 2U * SKY_MOST_SENDERS, sizeof *senders);
    uint32_t *periods = sky_take(arena, 2U * SKY_MOST_SENDERS, sizeof *periods);
    if (queue == NULL || bytes == NULL || senders == NULL || periods == NULL) {
        return false;
    }
    outbox->here = config->address;
    outbox->queue = queue;
    outbox->most = config->most_runs;
    outbox->bytes = bytes;
    outbox->limit = limit;
    outbox->credit.hash_seed[0] = config->hash_seed[0];
    outbox->credit.hash_seed[1] = config->hash_seed[1];
    outbox->credit.senders = senders;
    outbox->credit.periods = periods;
    outbox->credit.buffer_bytes = config->credit_bytes;
    outbox->credit.each_bytes = config->credit_bytes;
    outbox->credit.least_bytes =
        SKY_LEAST_CREDIT_BYTES < config->credit_bytes ? SKY_LEAST_CREDIT_BYTES : config->credit_bytes;
    outbox->credit.until = INT64_MIN / 4;
    outbox->credit.period = 1U;
    return true;
}

static void *take_room(sky_outbox *outbox, size_t bytes) {
    const size_t at = (outbox->used + 7U) & ~(size_t)7U;
    if (at > outbox->limit || bytes > outbox->limit - at) {
        return NULL;
    }
    outbox->used = at + bytes;
    return outbox->bytes + at;
}

static void enqueue(sky_outbox *outbox, const sky_run *run, bool is_links) {
    if (outbox->count == outbox->most) {
        sky_count(outbox->counters, SKY_outbox_full, run->count);
        return;
    }
    outbox->queue[outbox->count].run = *run;
    outbox->queue[outbox->count].is_links = is_links;
    outbox->count++;
}

bool sky_outbox_next(sky_outbox *outbox, sky_run *run) {
    for (;;) {
        while (outbox->next < outbox->count && outbox->queue[outbox->next].is_links != outbox->links_turn) {
            outbox->next++;
        }
        if (outbox->next < outbox->count) {
            *run = outbox->queue[outbox->next].run;
            outbox->next++;
            return true;
        }
        if (outbox->links_turn) {
            break;
        }
        outbox->links_turn = true;
        outbox->next = 0U;
    }
    outbox->links_turn = false;
    outbox->next = 0U;
    outbox->count = 0U;
    outbox->traffic = 0U;
    outbox->used = 0U;
    if (outbox->memory->hold_freed) {
        sky_memory_release_freed(outbox->memory);
    }
    return false;
}

void sky_send_by(sky_outbox *outbox, const uint8_t *packets, size_t bytes, size_t segment_bytes, sky_link link) {
    const size_t size = bytes < segment_bytes ? bytes : segment_bytes;
    const sky_run run = {link, (uint32_t)sky_run_count(bytes, size), (uint32_t)size, (uint32_t)bytes, packets, NULL};
    enqueue(outbox, &run, false);
}

/* --- Headers --- */

static sky_header header_of(const sky_outbox *outbox, uint8_t op, uint32_t destination, uint32_t request_id) {
    const uint32_t credit = outbox->credit.each_bytes / (uint32_t)SKY_CREDIT_UNIT_BYTES;
    sky_header header;
    (void)memset(&header, 0, sizeof header);
    header.op = op;
    header.hop_limit = SKY_HOP_LIMIT;
    header.destination = destination;
    header.source = outbox->here;
    header.request_id = request_id;
    header.slot_moves = outbox->locator->moves.slot;
    header.plane_moves = outbox->locator->moves.plane;
    header.credit = (uint16_t)(credit < (uint32_t)SKY_MOST_CREDIT ? credit : (uint32_t)SKY_MOST_CREDIT);
    return header;
}

static sky_header answer_to(const sky_outbox *outbox, const sky_header *request, uint8_t op) {
    sky_header header = header_of(outbox, op, request->source, request->request_id);
    header.timestamp_us = request->timestamp_us;
    header.ground = request->ground;
    return header;
}

static uint16_t take_sequence(sky_outbox *outbox, uint32_t count) {
    const uint16_t first = outbox->sequence;
    outbox->sequence = (uint16_t)((first + count) & 0x3FFFU);
    return first;
}

static bool signs(const sky_outbox *outbox, const sky_header *header) {
    return outbox->authority != NULL && sky_authority_signs(outbox->authority, header->op, header->destination);
}

/* One control packet by a link; SKY_NO_LINK: it has no route. */
static void send_one(sky_outbox *outbox, const sky_header *header, const uint8_t *body, size_t bytes, sky_link link,
                     bool is_links, sky_us now) {
    const uint16_t sequence = take_sequence(outbox, 1U);
    const bool with_mac = signs(outbox, header);
    if (link == SKY_NO_LINK) {
        sky_count(outbox->counters, SKY_packets_unroutable, 1U);
        return;
    }
    uint8_t *packet =
        take_room(outbox, (size_t)SKY_TELEMETRY_PREFIX_BYTES + bytes + (with_mac ? (size_t)SKY_MAC_BYTES : 0U));
    if (packet == NULL) {
        sky_count(outbox->counters, SKY_outbox_full, 1U);
        return;
    }
    size_t end = sky_packet_begin(packet, header, bytes, sequence, now);
    if (bytes > 0U) {
        (void)memcpy(packet + end, body, bytes);
    }
    end += bytes;
    sky_packet_seal(packet, end);
    if (with_mac) {
        if (!sky_authority_sign(outbox->authority, packet, end, now)) {
            return;
        }
        end += (size_t)SKY_MAC_BYTES;
    }
    const sky_run run = {link, 1U, (uint32_t)end, (uint32_t)end, packet, NULL};
    enqueue(outbox, &run, is_links);
}

static void send_routed(sky_outbox *outbox, const sky_header *header, const uint8_t *body, size_t bytes, sky_us now) {
    const sky_link link = sky_router_exit(outbox->router, header->destination, header->ground);
    send_one(outbox, header, body, bytes, link, false, now);
}

/* --- Packets with payloads --- */

/* Room for a run of `count` packets of `width` bytes and their payloads; as many as there is room for. */
static uint32_t take_rows(sky_outbox *outbox, uint32_t count, size_t width, uint8_t **rows,
                          struct sky_payload **payloads) {
    const size_t each = width + sizeof **payloads;
    const size_t room = outbox->limit - outbox->used;
    const size_t fits = room > 16U ? (room - 16U) / each : 0U;
    const uint32_t taken = fits < count ? (uint32_t)fits : count;
    *payloads = take_room(outbox, taken * sizeof **payloads);
    *rows = take_room(outbox, taken * width);
    return *rows != NULL && *payloads != NULL ? taken : 0U;
}

static void sign_chunk(const sky_outbox *outbox, uint8_t *row, size_t end, const sky_chunk *chunk, sky_us now) {
    sky_signing signing;
    if (sky_signing_begin(&signing, outbox->authority, row, end, now)) {
        uint32_t cell = chunk->first_cell, left = signing.covers_payload ? sky_chunk_bytes(chunk) : 0U;
        while (left > 0U) {
            uint32_t piece, next;
            const uint8_t *const bytes = sky_memory_cell(outbox->memory, cell, left, &piece, &next);
            sky_signing_take(&signing, bytes, piece);
            left -= piece;
            cell = next;
        }
        sky_signing_end(&signing);
    }
}

/* One packet for each chunk, in runs of equal length but the last packet of each. `replicas`: as which copies they go, or
 * NULL: as what they are. */
static uint32_t send_bulk(sky_outbox *outbox, const sky_header *header, const uint32_t *chunks,
                          const sky_leaving_chunk *copies, uint32_t count, sky_link link, sky_us now) {
    const sky_memory *memory = outbox->memory;
    const bool with_mac = signs(outbox, header);
    const size_t prefix = sky_op_is_command(header->op) ? (size_t)SKY_COMMAND_PREFIX_BYTES
                                                        : (size_t)SKY_TELEMETRY_PREFIX_BYTES;
    const size_t end = prefix + (size_t)SKY_REF_BYTES;
    const size_t width = end + (with_mac ? (size_t)SKY_MAC_BYTES : 0U);
    uint16_t sequence = take_sequence(outbox, count);
    uint8_t *rows;
    struct sky_payload *payloads;
    if (link == SKY_NO_LINK) {
        sky_count(outbox->counters, SKY_packets_unroutable, count);
        return 0U;
    }
    const uint32_t taken = take_rows(outbox, count, width, &rows, &payloads);
    uint8_t template[MOST_BULK_BYTES];
    uint32_t begun = 0U;
    (void)sky_packet_begin(template, header, (size_t)SKY_REF_BYTES, 0U, now);
    for (uint32_t each = 0U; each < taken; each++) {
        const sky_chunk *chunk = &memory->chunks[copies != NULL ? copies[each].chunk : chunks[each]];
        uint8_t *row = rows + each * width;
        (void)memcpy(row, template, prefix);
        (void)memcpy(row + prefix, chunk->ref, (size_t)SKY_REF_BYTES);
        if (copies != NULL) {
            row[prefix + (size_t)SKY_REF_REPLICA_AT] = copies[each].replica;
        }
        payloads[each].bytes = sky_chunk_bytes(chunk);
        payloads[each].first_cell = chunk->first_cell;
        sky_packet_renumber(row, end, (size_t)SKY_REF_BYTES + payloads[each].bytes, sequence);
        if (with_mac) {
            sign_chunk(outbox, row, end, chunk, now);
        }
        sequence = (uint16_t)((sequence + 1U) & 0x3FFFU);
        /* A run ends where the next payload is longer, or this one is shorter than the first. */
        const bool last = each + 1U == taken;
        const uint32_t next_bytes =
            last ? 0U : sky_chunk_bytes(&memory->chunks[copies != NULL ? copies[each + 1U].chunk : chunks[each + 1U]]);
        if (last || payloads[each].bytes < payloads[begun].bytes || next_bytes > payloads[begun].bytes) {
            const uint32_t packets = each + 1U - begun;
            const sky_run run = {link,        packets, (uint32_t)width, packets * (uint32_t)width, rows + begun * width,
                                 payloads + begun};
            enqueue(outbox, &run, false);
            begun = each + 1U;
        }
    }
    if (taken > 0U) {
        outbox->memory->hold_freed = true;
    }
    if (taken < count) {
        sky_count(outbox->counters, SKY_outbox_full, count - taken);
    }
    return taken;
}

uint32_t sky_reply_chunks(sky_outbox *outbox, const sky_header *request, const uint32_t *chunks, uint32_t count,
                          sky_link link, sky_us now) {
    const sky_header header = answer_to(outbox, request, SKY_DATA);
    const sky_link by =
        link != SKY_NO_LINK ? link : sky_router_exit(outbox->router, header.destination, header.ground);
    return send_bulk(outbox, &header, chunks, NULL, count, by, now);
}

void sky_send_migrate(sky_outbox *outbox, uint32_t there, uint32_t request_id, const sky_leaving_chunk *chunks,
                      uint32_t count, sky_us now) {
    sky_header header = header_of(outbox, SKY_MIGRATE, there, request_id);
    header.timestamp_us = (uint32_t)((uint64_t)now & 0xFFFFFFFFU);
    (void)send_bulk(outbox, &header, NULL, chunks, count, sky_router_exit(outbox->router, there, 0U), now);
}

/* --- Answers --- */

void sky_reply_as(sky_outbox *outbox, const sky_header *request, uint8_t op, const uint8_t *body, size_t bytes,
                  sky_us now, uint8_t status, uint8_t flags) {
    sky_header header = answer_to(outbox, request, op);
    header.status = status;
    header.flags = flags;
    send_routed(outbox, &header, body, bytes, now);
}

void sky_reply(sky_outbox *outbox, const sky_header *request, uint8_t op, const uint8_t *body, size_t bytes,
               sky_us now) {
    sky_reply_as(outbox, request, op, body, bytes, now, SKY_OK, 0U);
}

void sky_send_refusal(void *outbox, const uint8_t *command, size_t bytes, sky_link link, sky_us now) {
    sky_outbox *box = outbox;
    sky_header request;
    if (bytes < (size_t)SKY_COMMAND_PREFIX_BYTES ||
        sky_header_parse(command + SKY_COMMAND_BYTES, &request) != SKY_SOUND) {
        return;
    }
    sky_header header = answer_to(box, &request, SKY_UNREACHABLE);
    header.status = SKY_REFUSED;
    send_one(box, &header, NULL, 0U, link, false, now);
}

void sky_unsupported(sky_outbox *outbox, const uint8_t *command, sky_us now) {
    uint8_t known[SKY_HEADER_BYTES], body[SKY_UNSUPPORTED_BYTES];
    sky_header request;
    (void)memcpy(known, command + SKY_COMMAND_BYTES, sizeof known);
    known[SKY_OP_AT] = SKY_PING; /* any known operation, so that the header can be parsed */
    if (sky_header_parse(known, &request) == SKY_SOUND) {
        sky_unsupported_build(body, command[SKY_COMMAND_BYTES + SKY_OP_AT], OUR_OPERATIONS, OUR_CODECS);
        sky_reply(outbox, &request, SKY_UNSUPPORTED, body, sizeof body, now);
    }
}

/* --- Commands and notifications of this satellite --- */

void sky_command(sky_outbox *outbox, uint8_t op, uint32_t there, uint32_t request_id, const uint8_t *body, size_t bytes,
                 sky_us now) {
    const sky_header header = header_of(outbox, op, there, request_id);
    send_routed(outbox, &header, body, bytes, now);
}

void sky_send_links(sky_outbox *outbox, uint32_t neighbour, const uint8_t *body, size_t bytes, sky_us now) {
    const sky_header header = header_of(outbox, SKY_LINKS, neighbour, 0U);
    send_one(outbox, &header, body, bytes, neighbour, true, now);
}

uint32_t sky_notify_ground(sky_outbox *outbox, uint8_t op, const uint8_t *body, size_t bytes, uint32_t most,
                           sky_us now) {
    enum { MOST_NOTIFIED = 16 };
    uint32_t grounds[MOST_NOTIFIED];
    const uint32_t count =
        sky_router_heard_last(outbox->router, grounds, most < (uint32_t)MOST_NOTIFIED ? most : (uint32_t)MOST_NOTIFIED);
    for (uint32_t each = 0U; each < count; each++) {
        sky_header header = header_of(outbox, op, (uint32_t)SKY_GROUND_SHELL << 24 | outbox->here, 0U);
        header.ground = grounds[each];
        send_routed(outbox, &header, body, bytes, now);
    }
    return count;
}
