#include "wire/packet.h"

#include <string.h>

#include "wire/crc.h"

enum {
    PRIMARY_WORD = 0x08C0, /* version 0, secondary header, our APID; without the type bit */
    TYPE_BIT = 0x1000,
    UNSEGMENTED = 3,
    PRIMARY_BYTES = 6,
    JOURNEY_BYTES = 16 /* of the SKY header: version, operation, flags, status, both addresses, ground host */
};

/* --- Runs --- */

/* Whether every packet of a run has a whole SKY header. */
static bool has_headers(const uint8_t *packets, size_t bytes, size_t segment_bytes) {
    size_t least, last;
    if (bytes == 0U || segment_bytes == 0U) {
        return false;
    }
    least = sky_header_start(packets) + SKY_HEADER_BYTES;
    last = bytes % segment_bytes;
    return (bytes < segment_bytes ? bytes : segment_bytes) >= least &&
           (last == 0U || bytes < segment_bytes || last >= least);
}

bool sky_same_journey(const uint8_t *packets, size_t bytes, size_t segment_bytes) {
    bool same = true;
    if (bytes > segment_bytes) {
        same = has_headers(packets, bytes, segment_bytes);
        if (same) {
            const size_t sky = sky_header_start(packets);
            for (size_t at = segment_bytes; at < bytes && same; at += segment_bytes) {
                same = packets[at] == packets[0] && memcmp(packets + at + sky, packets + sky, JOURNEY_BYTES) == 0;
            }
        }
    }
    return same;
}

bool sky_count_hops(uint8_t *packets, size_t bytes, size_t segment_bytes) {
    bool may_go_on = has_headers(packets, bytes, segment_bytes);
    if (may_go_on) {
        const size_t sky = sky_header_start(packets);
        for (size_t at = sky; at < bytes && may_go_on; at += segment_bytes) {
            may_go_on = packets[at + SKY_HOP_LIMIT_AT] != 0U;
        }
        for (size_t at = sky; at < bytes && may_go_on; at += segment_bytes) {
            packets[at + SKY_HOP_LIMIT_AT] = (uint8_t)(packets[at + SKY_HOP_LIMIT_AT] - 1U);
            packets[at + SKY_HOP_COUNT_AT] = (uint8_t)((packets[at + SKY_HOP_COUNT_AT] + 1U) & 0xFFU);
        }
    }
    return may_go_on;
}

/* --- Headers --- */

uint32_t sky_header_crc(const uint8_t *packet, size_t sky, size_t end) {
    uint8_t copy[SKY_TELEMETRY_BYTES + SKY_CRC_AT + SKY_REF_BYTES];
    const size_t head = sky + SKY_CRC_AT, rest = end - sky - SKY_HEADER_BYTES;
    uint32_t crc;
    (void)memcpy(copy, packet, head);
    (void)memset(copy + sky + SKY_HOP_LIMIT_AT, 0, SKY_MUTABLE_END - SKY_HOP_LIMIT_AT);
    if (rest <= SKY_REF_BYTES) { /* nearly always: one call is faster */
        (void)memcpy(copy + head, packet + sky + SKY_HEADER_BYTES, rest);
        crc = sky_crc32(0, copy, head + rest);
    } else {
        crc = sky_crc32(sky_crc32(0, copy, head), packet + sky + SKY_HEADER_BYTES, rest);
    }
    return crc;
}

/* Primary header: ours, whole, of this length. */
static bool is_ours(const uint8_t *packet, size_t bytes) {
    return bytes >= SKY_COMMAND_BYTES && (sky_load16(packet) & ~(uint32_t)TYPE_BIT) == PRIMARY_WORD &&
           sky_load16(packet + 2) >> 14 == UNSEGMENTED && (size_t)sky_load16(packet + 4) + PRIMARY_BYTES + 1U == bytes &&
           bytes >= sky_header_start(packet) + SKY_HEADER_BYTES;
}

static size_t mac_bytes(const uint8_t *sky) { return (sky[SKY_FLAGS_AT] & SKY_FLAG_AUTHENTICATED) != 0U ? SKY_MAC_BYTES : 0U; }

/* Where its header CRC ends. */
static size_t header_end(const uint8_t *packet, size_t bytes) {
    const size_t sky = sky_header_start(packet);
    return sky_op_carries(packet[sky + SKY_OP_AT])
               ? sky + (size_t)SKY_HEADER_BYTES + (size_t)SKY_REF_BYTES + mac_bytes(packet + sky)
               : bytes;
}

sky_verdict sky_packet_verify_headers(const uint8_t *packet, size_t bytes) {
    size_t sky, body, end;
    if (!is_ours(packet, bytes)) {
        return SKY_MALFORMED;
    }
    sky = sky_header_start(packet);
    body = sky + SKY_HEADER_BYTES;
    end = header_end(packet, bytes);
    if (packet[sky] != SKY_WIRE_VERSION || end > bytes || end < body + mac_bytes(packet + sky)) {
        return SKY_MALFORMED;
    }
    if (sky_header_crc(packet, sky, end) != sky_load32(packet + sky + SKY_CRC_AT)) {
        return SKY_BAD_HEADER_CRC;
    }
    return sky_op_carries(packet[sky + SKY_OP_AT]) && sky_ref_length(packet + body) != bytes - end ? SKY_MALFORMED
                                                                                                   : SKY_SOUND;
}

sky_verdict sky_packet_verify(const uint8_t *packet, size_t bytes) {
    const sky_verdict verdict = sky_packet_verify_headers(packet, bytes);
    if (verdict == SKY_SOUND) {
        const size_t sky = sky_header_start(packet), end = header_end(packet, bytes);
        if (sky_op_carries(packet[sky + SKY_OP_AT]) &&
            sky_crc32(0, packet + end, bytes - end) != sky_load32(packet + sky + SKY_HEADER_BYTES + SKY_REF_CRC_AT)) {
            return SKY_BAD_PAYLOAD_CRC;
        }
    }
    return verdict;
}

static bool is_known(uint8_t op) { return (op >= SKY_SET && op <= SKY_FORGET) || (op >= SKY_ACK && op <= SKY_UNSUPPORTED); }

static bool few_moves(int32_t moves) { return moves >= -SKY_MAX_MOVES && moves <= SKY_MAX_MOVES; }

sky_verdict sky_header_parse(const uint8_t *sky, sky_header *header) {
    header->op = sky[SKY_OP_AT];
    header->flags = sky[SKY_FLAGS_AT];
    header->status = sky[SKY_STATUS_AT];
    header->destination = sky_load32(sky + SKY_DESTINATION_AT);
    header->source = sky_load32(sky + SKY_SOURCE_AT);
    header->ground = sky_load32(sky + SKY_GROUND_AT);
    header->request_id = sky_load32(sky + SKY_REQUEST_AT);
    header->hop_limit = sky[SKY_HOP_LIMIT_AT];
    header->hop_count = sky[SKY_HOP_COUNT_AT];
    header->congestion = sky_load16(sky + SKY_HOP_COUNT_AT + 1);
    header->timestamp_us = sky_load32(sky + SKY_TIMESTAMP_AT);
    header->slot_moves = sky_load32s(sky + SKY_SLOT_MOVES_AT);
    header->plane_moves = sky_load32s(sky + SKY_PLANE_MOVES_AT);
    header->credit = sky_load16(sky + SKY_CREDIT_AT);
    header->key_id = sky_load16(sky + SKY_KEY_ID_AT);
    if (sky[0] != SKY_WIRE_VERSION || !few_moves(header->slot_moves) || !few_moves(header->plane_moves) ||
        header->status > SKY_REFUSED) {
        return SKY_MALFORMED;
    }
    if (is_known(header->op)) {
        return SKY_SOUND;
    }
    return sky_op_is_command(header->op) ? SKY_UNKNOWN_OPERATION : SKY_MALFORMED;
}

sky_verdict sky_packet_parse(const uint8_t *packet, size_t bytes, sky_header *header, const uint8_t **body,
                             size_t *body_bytes) {
    sky_verdict verdict;
    size_t sky;
    if (!is_ours(packet, bytes)) {
        return SKY_MALFORMED;
    }
    sky = sky_header_start(packet);
    verdict = sky_header_parse(packet + sky, header);
    if (verdict != SKY_MALFORMED && sky_op_is_command(header->op) != (sky == SKY_COMMAND_BYTES)) {
        verdict = SKY_MALFORMED;
    }
    *body = packet + sky + SKY_HEADER_BYTES;
    *body_bytes = bytes - sky - SKY_HEADER_BYTES;
    return verdict;
}

int sky_packet_check(const uint8_t *packet, size_t bytes) {
    sky_header header;
    const uint8_t *body;
    size_t body_bytes;
    sky_verdict verdict = sky_packet_verify(packet, bytes);
    if (verdict == SKY_SOUND) {
        verdict = sky_packet_parse(packet, bytes, &header, &body, &body_bytes);
    }
    if (verdict == SKY_SOUND) {
        if (sky_op_carries(header.op)) { /* the payload's length was verified */
            body_bytes = SKY_REF_BYTES;
        } else if ((header.flags & SKY_FLAG_AUTHENTICATED) != 0U) {
            body_bytes -= SKY_MAC_BYTES;
        } else {
            /* the whole of it */
        }
        if (!sky_body_check(header.op, body, body_bytes)) {
            verdict = SKY_BAD_BODY;
        }
    }
    return (int)verdict;
}

size_t sky_packet_begin(uint8_t *packet, const sky_header *header, size_t body_bytes, uint16_t sequence, sky_us now) {
    const bool command = sky_op_is_command(header->op);
    const size_t sky = command ? SKY_COMMAND_BYTES : SKY_TELEMETRY_BYTES, body = sky + SKY_HEADER_BYTES;
    uint8_t *const at = packet + sky;
    sky_store16(packet, command ? (uint32_t)PRIMARY_WORD | TYPE_BIT : (uint32_t)PRIMARY_WORD);
    sky_store16(packet + 2, (uint32_t)UNSEGMENTED << 14 | (sequence & 0x3FFFU));
    sky_store16(packet + 4, (uint32_t)(body + body_bytes - PRIMARY_BYTES - 1U));
    if (command) {
        packet[6] = header->op;
        packet[7] = 0;
    } else {
        const uint64_t us = now > 0 ? (uint64_t)now : 0U;
        sky_store32(packet + 6, (uint32_t)(us / 1000000U & 0xFFFFFFFFU));
        sky_store16(packet + 10, (uint32_t)((us % 1000000U << 16) / 1000000U));
        sky_store32(packet + 12, 0);
    }
    at[0] = SKY_WIRE_VERSION;
    at[SKY_OP_AT] = header->op;
    at[SKY_FLAGS_AT] = header->flags;
    at[SKY_STATUS_AT] = header->status;
    sky_store32(at + SKY_DESTINATION_AT, header->destination);
    sky_store32(at + SKY_SOURCE_AT, header->source);
    sky_store32(at + SKY_GROUND_AT, header->ground);
    sky_store32(at + SKY_REQUEST_AT, header->request_id);
    at[SKY_HOP_LIMIT_AT] = header->hop_limit;
    at[SKY_HOP_COUNT_AT] = header->hop_count;
    sky_store16(at + SKY_HOP_COUNT_AT + 1, header->congestion);
    sky_store32(at + SKY_TIMESTAMP_AT, header->timestamp_us);
    sky_store32s(at + SKY_SLOT_MOVES_AT, header->slot_moves);
    sky_store32s(at + SKY_PLANE_MOVES_AT, header->plane_moves);
    sky_store16(at + SKY_CREDIT_AT, header->credit);
    sky_store16(at + SKY_KEY_ID_AT, header->key_id);
    sky_store32(at + SKY_CRC_AT, 0);
    return body;
}

void sky_packet_seal(uint8_t *packet, size_t end) {
    const size_t sky = sky_header_start(packet);
    sky_store32(packet + sky + SKY_CRC_AT, sky_header_crc(packet, sky, end));
}

void sky_packet_renumber(uint8_t *packet, size_t end, size_t body_bytes, uint16_t sequence) {
    const size_t body = sky_header_start(packet) + SKY_HEADER_BYTES;
    sky_store16(packet + 2, (uint32_t)UNSEGMENTED << 14 | (sequence & 0x3FFFU));
    sky_store16(packet + 4, (uint32_t)(body + body_bytes - PRIMARY_BYTES - 1U));
    sky_packet_seal(packet, end);
}

/* --- Chunk reference --- */

bool sky_ref_parse(const uint8_t *bytes, sky_ref *ref) {
    const uint32_t number = sky_load32(bytes + SKY_REF_NUMBER_AT);
    const uint16_t server = sky_load16(bytes + SKY_REF_TAG_AT + 2);
    ref->chunks = sky_load32(bytes + SKY_REF_CHUNKS_AT);
    ref->length = sky_load32(bytes + SKY_REF_LENGTH_AT);
    ref->crc = sky_load32(bytes + SKY_REF_CRC_AT);
    ref->value_bytes = sky_load32(bytes + SKY_REF_VALUE_BYTES_AT);
    ref->value_crc = sky_load32(bytes + SKY_REF_VALUE_CRC_AT);
    ref->servers = sky_load16(bytes + SKY_REF_TAG_AT);
    ref->strategy = bytes[SKY_REF_TAG_AT + 4];
    ref->replica = bytes[SKY_REF_REPLICA_AT];
    ref->slot_moves = sky_load32s(bytes + SKY_REF_MOVES_AT);
    ref->plane_moves = sky_load32s(bytes + SKY_REF_MOVES_AT + 4);
    if (number < 1U || number > ref->chunks || ref->servers == 0U || server != (number - 1U) % ref->servers + 1U) {
        return false;
    }
    ref->index = number - 1U;
    ref->server = (uint16_t)(server - 1U);
    return ref->length <= ref->value_bytes && ref->length <= SKY_MAX_CHUNK_BYTES &&
           ref->chunks <= (ref->value_bytes > 1U ? ref->value_bytes : 1U);
}

void sky_ref_setting(const uint8_t *ref, uint8_t setting[SKY_SETTING_BYTES]) {
    (void)memcpy(setting, ref + SKY_REF_VALUE_CRC_AT, 4);
    (void)memcpy(setting + 4, ref + SKY_REF_MOVES_AT, 8);
}

bool sky_ref_has_setting(const uint8_t *ref, const uint8_t *setting) {
    return memcmp(ref + SKY_REF_VALUE_CRC_AT, setting, 4) == 0 && memcmp(ref + SKY_REF_MOVES_AT, setting + 4, 8) == 0;
}

bool sky_ref_same_setting(const uint8_t *a, const uint8_t *b) {
    return memcmp(a + SKY_REF_VALUE_CRC_AT, b + SKY_REF_VALUE_CRC_AT, 4) == 0 &&
           memcmp(a + SKY_REF_MOVES_AT, b + SKY_REF_MOVES_AT, 8) == 0;
}

/* --- Selection --- */

bool sky_selection_parse(const uint8_t *body, size_t bytes, sky_selection *selection) {
    uint32_t number;
    uint8_t any = 0;
    if (bytes < SKY_SELECTION_BYTES) {
        return false;
    }
    number = sky_load32(body + 32);
    selection->key = body;
    selection->stride = sky_load32(body + 36);
    selection->count = sky_load32(body + 40);
    selection->bitmap = body + SKY_SELECTION_BYTES;
    if (number < 1U || selection->stride < 1U || selection->count < 1U || selection->count > SKY_MAX_SELECTION_BITS ||
        bytes != sky_selection_bytes(selection->count) ||
        (uint64_t)number + (uint64_t)selection->stride * (selection->count - 1U) > UINT32_MAX) {
        return false;
    }
    selection->first = number - 1U;
    for (size_t at = SKY_SELECTION_BYTES; at < bytes; at++) {
        any |= body[at];
    }
    return any != 0U;
}

bool sky_selection_next(const sky_selection *selection, uint32_t *step, uint32_t *index) {
    uint32_t at = *step;
    bool found = false;
    while (at < selection->count && !found) {
        const uint32_t rest = (uint32_t)selection->bitmap[at >> 3] >> (at & 7U);
        if (rest == 0U) {
            at = (at | 7U) + 1U; /* nothing more in this byte */
        } else {
            found = (rest & 1U) != 0U;
            if (found) {
                *index = selection->first + at * selection->stride;
            }
            at++;
        }
    }
    *step = at;
    return found;
}

uint32_t sky_selection_stride(const uint32_t *indices, uint32_t count) {
    uint32_t stride = 0;
    for (uint32_t i = 1; i < count && stride != 1U; i++) {
        uint32_t rest = indices[i] - indices[0];
        while (rest != 0U) { /* Euclid: at most 47 steps */
            const uint32_t next = stride % rest;
            stride = rest;
            rest = next;
        }
    }
    return stride == 0U ? 1U : stride;
}

uint32_t sky_selection_build(uint8_t *body, size_t room, const uint8_t *key, const uint32_t *indices, uint32_t count,
                             uint32_t stride, size_t *written) {
    uint64_t most = SKY_MAX_SELECTION_BITS;
    uint32_t taken = 0, steps;
    *written = 0;
    if (room <= SKY_SELECTION_BYTES || count == 0U) {
        return 0;
    }
    if ((room - SKY_SELECTION_BYTES) * 8U < most) {
        most = (room - SKY_SELECTION_BYTES) * 8U;
    }
    while (taken < count && (indices[taken] - indices[0]) / stride < most) {
        taken++;
    }
    steps = (indices[taken - 1U] - indices[0]) / stride + 1U;
    (void)memcpy(body, key, SKY_KEY_BYTES);
    sky_store32(body + 32, indices[0] + 1U);
    sky_store32(body + 36, stride);
    sky_store32(body + 40, steps);
    *written = sky_selection_bytes(steps);
    (void)memset(body + SKY_SELECTION_BYTES, 0, *written - SKY_SELECTION_BYTES);
    for (uint32_t i = 0; i < taken; i++) {
        const uint32_t step = (indices[i] - indices[0]) / stride;
        uint8_t *const at = body + SKY_SELECTION_BYTES + (step >> 3);
        *at = (uint8_t)(*at | 1U << (step & 7U));
    }
    return taken;
}

/* --- Lists --- */

bool sky_records_parse(const uint8_t *body, size_t bytes, size_t width, uint32_t least, uint32_t most, uint32_t *count) {
    if (bytes < SKY_LIST_HEAD) {
        return false;
    }
    *count = sky_load16(body);
    return *count >= least && *count <= most && bytes == SKY_LIST_HEAD + *count * width;
}

bool sky_keys_parse(const uint8_t *body, size_t bytes, const uint8_t **keys, uint32_t *count) {
    *keys = body + SKY_LIST_HEAD;
    return sky_records_parse(body, bytes, SKY_KEY_BYTES, 1, SKY_MOST_KEYS, count);
}

bool sky_list_parse(const uint8_t *body, size_t bytes, const uint8_t **after, uint32_t *limit) {
    if (bytes != 36U) {
        return false;
    }
    *after = body;
    *limit = sky_load16(body + 32);
    if (*limit > SKY_MOST_LISTED) {
        *limit = SKY_MOST_LISTED;
    }
    return true;
}

bool sky_moves_parse(const uint8_t *body, size_t bytes, int32_t *slot_moves, int32_t *plane_moves) {
    if (bytes != 8U) {
        return false;
    }
    *slot_moves = sky_load32s(body);
    *plane_moves = sky_load32s(body + 4);
    return few_moves(*slot_moves) && few_moves(*plane_moves);
}

void sky_moves_build(uint8_t body[8], int32_t slot_moves, int32_t plane_moves) {
    sky_store32s(body, slot_moves);
    sky_store32s(body + 4, plane_moves);
}

bool sky_presence_parse(const uint8_t *record, sky_presence *presence) {
    const uint32_t number = sky_load32(record);
    const uint16_t server = sky_load16(record + 22);
    presence->held = 0;
    if (number == 0U) {
        return true;
    }
    presence->index = number - 1U;
    presence->chunks = sky_load32(record + 4);
    presence->length = sky_load32(record + 8);
    presence->value_bytes = sky_load32(record + 12);
    presence->value_crc = sky_load32(record + 16);
    presence->servers = sky_load16(record + 20);
    presence->strategy = record[24];
    presence->held = sky_load16(record + 26);
    presence->slot_moves = sky_load32s(record + 28);
    presence->plane_moves = sky_load32s(record + 32);
    if (number > presence->chunks || server < 1U || server > presence->servers) {
        return false;
    }
    presence->server = (uint16_t)(server - 1U);
    return true;
}

void sky_presence_build(uint8_t record[SKY_PRESENCE_BYTES], const sky_presence *presence) {
    if (presence->held == 0U) {
        (void)memset(record, 0, SKY_PRESENCE_BYTES);
    } else {
        sky_store32(record, presence->index + 1U);
        sky_store32(record + 4, presence->chunks);
        sky_store32(record + 8, presence->length);
        sky_store32(record + 12, presence->value_bytes);
        sky_store32(record + 16, presence->value_crc);
        sky_store16(record + 20, presence->servers);
        sky_store16(record + 22, presence->server + 1U);
        record[24] = presence->strategy;
        record[25] = 0;
        sky_store16(record + 26, presence->held < 0xFFFFU ? presence->held : 0xFFFFU);
        sky_store32s(record + 28, presence->slot_moves);
        sky_store32s(record + 32, presence->plane_moves);
    }
}

bool sky_dead_parse(const uint8_t *body, size_t bytes, const uint8_t **dead, uint32_t *count) {
    *dead = body + SKY_LIST_HEAD;
    return sky_records_parse(body, bytes, SKY_DEAD_BYTES, 1, SKY_MOST_DEAD, count);
}

bool sky_forget_parse(const uint8_t *body, size_t bytes, const uint8_t **dead, uint32_t *count, uint32_t *since_ms) {
    if (!sky_dead_parse(body, bytes, dead, count)) {
        return false;
    }
    *since_ms = sky_load16(body + 2);
    return true;
}

bool sky_notice_parse(const uint8_t *body, size_t bytes, sky_notice *notice) {
    if (bytes < SKY_NOTICE_HEAD) {
        return false;
    }
    notice->origin = sky_load32(body);
    notice->number = sky_load32(body + 4);
    notice->centre = sky_load32(body + 8);
    notice->north = sky_load16(body + 12);
    notice->south = sky_load16(body + 14);
    notice->west = sky_load16(body + 16);
    notice->east = sky_load16(body + 18);
    notice->hops = body[20];
    notice->notified = (body[21] & 1U) != 0U;
    notice->count = sky_load16(body + 22);
    notice->dead = body + SKY_NOTICE_HEAD;
    return notice->count >= 1U && notice->count <= SKY_MOST_DEAD &&
           bytes == SKY_NOTICE_HEAD + notice->count * (size_t)SKY_DEAD_BYTES;
}

void sky_notice_build(uint8_t head[SKY_NOTICE_HEAD], const sky_notice *notice) {
    sky_store32(head, notice->origin);
    sky_store32(head + 4, notice->number);
    sky_store32(head + 8, notice->centre);
    sky_store16(head + 12, notice->north);
    sky_store16(head + 14, notice->south);
    sky_store16(head + 16, notice->west);
    sky_store16(head + 18, notice->east);
    head[20] = notice->hops;
    head[21] = notice->notified ? 1U : 0U;
    sky_store16(head + 22, notice->count);
}

bool sky_retain_parse(const uint8_t *body, size_t bytes, sky_retain *retain) {
    if (bytes < SKY_RETAIN_HEAD) {
        return false;
    }
    retain->count = sky_load16(body);
    retain->what = body[2];
    retain->until_ms = sky_load64(body + 4);
    retain->keys = body + SKY_RETAIN_HEAD;
    return retain->count >= 1U && retain->count <= SKY_MOST_KEYS && retain->what <= SKY_WRITING &&
           bytes == SKY_RETAIN_HEAD + retain->count * (size_t)SKY_KEY_BYTES;
}

void sky_retain_build(uint8_t head[SKY_RETAIN_HEAD], uint8_t what, uint64_t until_ms, uint32_t count) {
    sky_store16(head, count);
    head[2] = what;
    head[3] = 0;
    sky_store64(head + 4, until_ms);
}

bool sky_verdicts_parse(const uint8_t *body, size_t bytes, const uint8_t **verdicts, uint32_t *count) {
    bool sound = sky_records_parse(body, bytes, 1, 0, UINT16_MAX, count);
    if (sound) {
        *verdicts = body + SKY_LIST_HEAD;
        for (size_t at = SKY_LIST_HEAD; at < bytes && sound; at++) {
            sound = body[at] <= 2U;
        }
    }
    return sound;
}

bool sky_checks_parse(const uint8_t *body, size_t bytes, uint32_t *count) {
    bool sound = sky_records_parse(body, bytes, SKY_CHECK_BYTES, 1, SKY_MOST_CHECKS, count);
    for (uint32_t n = 0; sound && n < *count; n++) {
        const uint8_t *const record = body + SKY_LIST_HEAD + (size_t)n * SKY_CHECK_BYTES;
        const uint32_t number = sky_load16(record + 46);
        sound = number >= 1U && number <= sky_load16(record + 44) && number <= sky_load32(record + 48) &&
                sky_load32(record + 52) <= SKY_MAX_CHUNK_BYTES;
    }
    return sound;
}

void sky_check_at(const uint8_t *body, uint32_t n, sky_check *check) {
    const uint8_t *const record = body + SKY_LIST_HEAD + (size_t)n * SKY_CHECK_BYTES;
    check->key = record;
    check->setting = record + SKY_KEY_BYTES;
    check->servers = sky_load16(record + 44);
    check->server = (uint16_t)(sky_load16(record + 46) - 1U);
    check->chunks = sky_load32(record + 48);
    check->length = sky_load32(record + 52);
}

void sky_check_build(uint8_t record[SKY_CHECK_BYTES], const sky_check *check) {
    (void)memcpy(record, check->key, SKY_KEY_BYTES);
    (void)memcpy(record + SKY_KEY_BYTES, check->setting, SKY_SETTING_BYTES);
    sky_store16(record + 44, check->servers);
    sky_store16(record + 46, check->server + 1U);
    sky_store32(record + 48, check->chunks);
    sky_store32(record + 52, check->length);
}

bool sky_links_parse(const uint8_t *body, size_t bytes, sky_links *links) {
    if (bytes < SKY_LINKS_HEAD) {
        return false;
    }
    links->count = sky_load16(body);
    links->answer_me = (body[2] & 1U) != 0U;
    links->late = body[3];
    links->pushed_slot = sky_load32s(body + 4);
    links->pushed_plane = sky_load32s(body + 8);
    links->pushed_at_ms = sky_load64(body + 12);
    links->declarations = body + SKY_LINKS_HEAD;
    return links->count <= SKY_MOST_DECLARATIONS &&
           bytes == SKY_LINKS_HEAD + links->count * (size_t)SKY_DECLARATION_BYTES && few_moves(links->pushed_slot) &&
           few_moves(links->pushed_plane);
}

void sky_links_build(uint8_t head[SKY_LINKS_HEAD], const sky_links *links) {
    sky_store16(head, links->count);
    head[2] = links->answer_me ? 1U : 0U;
    head[3] = links->late;
    sky_store32s(head + 4, links->pushed_slot);
    sky_store32s(head + 8, links->pushed_plane);
    sky_store64(head + 12, links->pushed_at_ms);
}

void sky_declaration_at(const uint8_t *declarations, uint32_t n, sky_declaration *declaration) {
    const uint8_t *const record = declarations + (size_t)n * SKY_DECLARATION_BYTES;
    declaration->origin = sky_load32(record);
    declaration->down = record[4] & 0xFU;
    declaration->made_ms = sky_load64(record + 8);
}

void sky_declaration_build(uint8_t record[SKY_DECLARATION_BYTES], const sky_declaration *declaration) {
    sky_store32(record, declaration->origin);
    record[4] = declaration->down;
    record[5] = 0;
    sky_store16(record + 6, 0);
    sky_store64(record + 8, declaration->made_ms);
}

bool sky_unsupported_parse(const uint8_t *body, size_t bytes) {
    (void)body;
    return bytes >= SKY_UNSUPPORTED_BYTES;
}

void sky_unsupported_build(uint8_t body[SKY_UNSUPPORTED_BYTES], uint8_t op, uint64_t operations, uint64_t codecs) {
    body[0] = op;
    body[1] = SKY_WIRE_VERSION;
    body[2] = SKY_WIRE_VERSION;
    body[3] = 0;
    sky_store64(body + 4, operations);
    sky_store64(body + 12, codecs);
}

/* --- Any body --- */

/* Records with presences, from `at` of each; `held`: none may be absent. */
static bool presences_check(const uint8_t *body, size_t bytes, size_t width, size_t at, bool held) {
    uint32_t count = 0;
    bool sound = sky_records_parse(body, bytes, width, 0, UINT16_MAX, &count);
    for (uint32_t n = 0; sound && n < count; n++) {
        const uint8_t *const record = body + SKY_LIST_HEAD + n * width + at;
        sky_presence presence;
        sound = sky_presence_parse(record, &presence) && !(held && sky_load32(record) == 0U);
    }
    return sound;
}

static bool request_check(uint8_t op, const uint8_t *body, size_t bytes) {
    const uint8_t *records;
    uint32_t count, other;
    int32_t slot_moves, plane_moves;
    sky_selection selection;
    sky_notice notice;
    sky_retain retain;
    sky_links links;
    sky_ref ref;
    bool sound;
    switch (op) {
    case SKY_SET:
    case SKY_MIGRATE:
        sound = bytes >= SKY_REF_BYTES && sky_ref_parse(body, &ref);
        break;
    case SKY_GET:
        sound = sky_selection_parse(body, bytes, &selection);
        break;
    case SKY_HAS:
    case SKY_EVICT:
        sound = sky_keys_parse(body, bytes, &records, &count);
        break;
    case SKY_LIST:
        sound = sky_list_parse(body, bytes, &records, &count);
        break;
    case SKY_ADVANCE:
        sound = sky_moves_parse(body, bytes, &slot_moves, &plane_moves);
        break;
    case SKY_NOTICE:
        sound = sky_notice_parse(body, bytes, &notice);
        break;
    case SKY_LINKS:
        sound = sky_links_parse(body, bytes, &links);
        break;
    case SKY_RETAIN:
        sound = sky_retain_parse(body, bytes, &retain);
        break;
    case SKY_CHECK:
        sound = sky_checks_parse(body, bytes, &count);
        break;
    case SKY_FORGET:
        sound = sky_forget_parse(body, bytes, &records, &count, &other);
        break;
    default: /* PING: whatever follows is a later release's */
        sound = true;
        break;
    }
    return sound;
}

static bool answer_check(uint8_t op, const uint8_t *body, size_t bytes) {
    const uint8_t *records;
    uint32_t count;
    int32_t slot_moves, plane_moves;
    sky_selection selection;
    sky_ref ref;
    bool sound;
    switch (op) {
    case SKY_DATA:
        sound = bytes >= SKY_REF_BYTES && sky_ref_parse(body, &ref);
        break;
    case SKY_ACK:
    case SKY_MISS:
    case SKY_BUSY:
        sound = sky_selection_parse(body, bytes, &selection);
        break;
    case SKY_ADVANCED:
        sound = sky_moves_parse(body, bytes, &slot_moves, &plane_moves);
        break;
    case SKY_PRESENCE:
        sound = presences_check(body, bytes, SKY_PRESENCE_BYTES, 0, false);
        break;
    case SKY_LISTED:
        sound = presences_check(body, bytes, SKY_LISTED_BYTES, SKY_KEY_BYTES, true);
        break;
    case SKY_EVICTED:
        sound = bytes == 4U;
        break;
    case SKY_PONG:
        sound = sky_records_parse(body, bytes, 8, 0, UINT16_MAX, &count);
        break;
    case SKY_RETAINED:
    case SKY_CHECKED:
        sound = sky_verdicts_parse(body, bytes, &records, &count);
        break;
    case SKY_GONE:
        sound = sky_dead_parse(body, bytes, &records, &count);
        break;
    case SKY_UNSUPPORTED:
        sound = sky_unsupported_parse(body, bytes);
        break;
    default: /* UNREACHABLE: whatever follows is a later release's */
        sound = true;
        break;
    }
    return sound;
}

bool sky_body_check(uint8_t op, const uint8_t *body, size_t bytes) {
    return op < (uint8_t)SKY_ACK ? request_check(op, body, bytes) : answer_check(op, body, bytes);
}
