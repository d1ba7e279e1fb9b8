#include "wire/auth.h"

#include <string.h>

#include "store/keymap.h"
#include "wire/crc.h"

static const uint8_t PURPOSE[] = "skymemory packets 1", PAYLOADS_PURPOSE[] = "skymemory payloads 1";
static const sky_us MAX_SKEW_US = 30 * 1000000, START_GRACE_US = 1000000, REFUSAL_US = 1000000 / 100;
enum { MOST_PACKETS = SKY_MAX_PACKET_BYTES / SKY_COMMAND_PREFIX_BYTES + 2, SEQUENCE_BITS = 14, LARGEST_SIGNED_CHUNK = SKY_MAX_CHUNK_BYTES - SKY_MAC_BYTES };

/* --- MACs --- */

static void derive(const sky_hmac_key *by_secret, const uint8_t *purpose, size_t bytes, uint8_t derived[SKY_SHA_BYTES]) {
    sky_sha inner = by_secret->inner;
    sky_sha_take(&inner, purpose, bytes);
    sky_hmac_end(by_secret, &inner, derived);
}

/* The beginning of what is derived for the purpose and a number, from 0. */
static void derive_payload_key(const sky_hmac_key *by_secret, uint8_t key[SKY_NH_KEY_BYTES]) {
    uint8_t purpose[sizeof PAYLOADS_PURPOSE], derived[SKY_SHA_BYTES];
    (void)memcpy(purpose, PAYLOADS_PURPOSE, sizeof purpose);
    for (size_t at = 0; at < (size_t)SKY_NH_KEY_BYTES; at += sizeof derived) {
        const size_t left = (size_t)SKY_NH_KEY_BYTES - at;
        purpose[sizeof purpose - 1U] = (uint8_t)(at / sizeof derived); /* in the place of the 0 that ends it */
        derive(by_secret, purpose, sizeof purpose, derived);
        (void)memcpy(key + at, derived, left < sizeof derived ? left : sizeof derived);
    }
}

void sky_authority_begin(sky_authority *authority, const sky_ring *ring) {
    (void)memset(authority, 0, sizeof *authority);
    authority->count = ring->count;
    authority->auth = ring->auth;
    for (uint32_t i = 0; i < ring->count; i++) {
        sky_hmac_key by_secret;
        uint8_t derived[SKY_SHA_BYTES];
        sky_hmac_begin(&by_secret, ring->keys[i].secret);
        derive(&by_secret, PURPOSE, sizeof PURPOSE - 1U, derived);
        if (ring->auth == SKY_AUTH_ANSWERS) {
            derive_payload_key(&by_secret, authority->keys[i].payload_key);
        }
        authority->keys[i].id = ring->keys[i].id;
        authority->keys[i].from = ring->keys[i].from;
        sky_hmac_begin(&authority->keys[i].hmac, derived);
    }
}

bool sky_authority_signs(const sky_authority *authority, uint8_t op, uint32_t destination) {
    const bool to_ground = destination >> 24 == (uint32_t)SKY_GROUND_SHELL;
    return authority->count != 0U && (sky_op_is_command(op) || authority->auth == SKY_AUTH_EVERY ||
                                      (authority->auth == SKY_AUTH_ANSWERS && to_ground && op != SKY_DATA));
}

/* Over the high half of the time and the packet up to the MAC, with its CRC and what forwarders change as zero; then over the
 * payload's hash, if MACs of this operation cover payloads. */
static void mac_begin(sky_signing *its, const sky_authority *authority, const sky_mac_key *key, uint32_t time_high,
                      const uint8_t *packet, size_t end) {
    uint8_t head[4 + SKY_TELEMETRY_PREFIX_BYTES];
    const size_t sky = sky_header_start(packet), prefix = sky + SKY_HEADER_BYTES;
    its->key = key;
    its->inner = key->hmac.inner;
    its->covers_payload = authority->auth == SKY_AUTH_ANSWERS && (packet[0] & SKY_COMMAND_BIT) != 0U &&
                          sky_op_carries(packet[sky + SKY_OP_AT]);
    sky_store32(head, time_high);
    (void)memcpy(head + 4, packet, prefix);
    (void)memset(head + 4 + sky + SKY_HOP_LIMIT_AT, 0, SKY_MUTABLE_END - SKY_HOP_LIMIT_AT);
    (void)memset(head + 4 + sky + SKY_CRC_AT, 0, SKY_HEADER_BYTES - SKY_CRC_AT);
    sky_sha_take(&its->inner, head, 4U + prefix);
    sky_sha_take(&its->inner, packet + prefix, end - prefix);
    sky_nh_begin(&its->payload, key->payload_key);
}

void sky_signing_take(sky_signing *signing, const uint8_t *piece, size_t bytes) {
    if (signing->covers_payload) {
        sky_nh_take(&signing->payload, &signing->inner, piece, bytes);
    }
}

static void mac_end(sky_signing *its, uint8_t mac[SKY_MAC_BYTES]) {
    uint8_t digest[SKY_SHA_BYTES];
    sky_nh_end(&its->payload, &its->inner);
    sky_hmac_end(&its->key->hmac, &its->inner, digest);
    (void)memcpy(mac, digest, SKY_MAC_BYTES);
}

/* The key in use: the latest whose time has come; where none has, the first. */
static const sky_mac_key *active(const sky_authority *authority, sky_us now) {
    uint32_t at = authority->count - 1U;
    while (at > 0U && authority->keys[at].from > now) {
        at--;
    }
    return &authority->keys[at];
}

bool sky_signing_begin(sky_signing *signing, const sky_authority *authority, uint8_t *packet, size_t end, sky_us now) {
    const sky_mac_key *const key = active(authority, now + authority->wall_shift); /* by which keys are made */
    const bool command = (packet[0] & SKY_COMMAND_BIT) != 0U;
    const uint64_t time = command && now > 0 ? (uint64_t)now : 0U;
    const uint32_t length = sky_load16(packet + 4) + (uint32_t)SKY_MAC_BYTES;
    uint8_t *const sky = packet + sky_header_start(packet);
    if (length + 7U > SKY_MAX_PACKET_BYTES) {
        return false;
    }
    sky_store16(packet + 4, length);
    sky[SKY_FLAGS_AT] = (uint8_t)(sky[SKY_FLAGS_AT] | SKY_FLAG_AUTHENTICATED);
    sky_store16(sky + SKY_KEY_ID_AT, key->id);
    if (command) {
        sky_store32(sky + SKY_TIMESTAMP_AT, (uint32_t)(time & 0xFFFFFFFFU));
    }
    mac_begin(signing, authority, key, (uint32_t)(time >> 32), packet, end);
    signing->packet = packet;
    signing->end = end;
    return true;
}

void sky_signing_end(sky_signing *signing) {
    mac_end(signing, signing->packet + signing->end);
    sky_packet_seal(signing->packet, signing->end + SKY_MAC_BYTES);
}

bool sky_authority_sign(const sky_authority *authority, uint8_t *packet, size_t end, sky_us now) {
    sky_signing signing;
    const bool signs = sky_signing_begin(&signing, authority, packet, end, now);
    if (signs) {
        sky_signing_end(&signing);
    }
    return signs;
}

size_t sky_mac_end(const uint8_t *packet, size_t bytes) {
    const size_t sky = bytes > 0U ? sky_header_start(packet) : 0U, prefix = sky + SKY_HEADER_BYTES;
    size_t end = 0;
    if (bytes >= prefix + SKY_MAC_BYTES && (packet[sky + SKY_FLAGS_AT] & SKY_FLAG_AUTHENTICATED) != 0U) {
        end = bytes;
        if (sky_op_carries(packet[sky + SKY_OP_AT])) {
            end = prefix + SKY_REF_BYTES + SKY_MAC_BYTES;
            if (end > bytes || bytes - end > LARGEST_SIGNED_CHUNK) {
                end = 0;
            }
        }
    }
    return end;
}

/* The key that a packet which has a MAC names, if it is known and the packet of now; else NULL. */
static const sky_mac_key *key_of(const sky_authority *authority, const uint8_t *packet, sky_us now, sky_us skew,
                                 sky_us *sent) {
    const sky_mac_key *key = NULL;
    uint32_t id;
    *sent = 0;
    if ((packet[0] & SKY_COMMAND_BIT) != 0U) { /* the low half of the time is sent; the high half is that nearest to now */
        const uint32_t low = sky_load32(packet + SKY_COMMAND_BYTES + SKY_TIMESTAMP_AT) - (uint32_t)((uint64_t)now & 0xFFFFFFFFU);
        const sky_us ahead = (sky_us)low - (low >= 1U << 31 ? (sky_us)1 << 32 : 0);
        if ((ahead < 0 ? -ahead : ahead) > skew) {
            return NULL;
        }
        *sent = now + ahead;
    }
    id = sky_load16(packet + sky_header_start(packet) + SKY_KEY_ID_AT);
    for (uint32_t i = 0; i < authority->count; i++) {
        if (authority->keys[i].id == id) {
            key = &authority->keys[i];
        }
    }
    return key;
}

bool sky_authority_check(const sky_authority *authority, const uint8_t *packet, size_t bytes, sky_us now, sky_us skew,
                         sky_us *sent) {
    const size_t end = sky_mac_end(packet, bytes);
    const sky_mac_key *key;
    sky_signing its;
    uint8_t expected[SKY_MAC_BYTES], wrong = 0;
    *sent = 0;
    /* The headers here, because a packet whose MAC is taken off gets another length and another CRC. */
    if (end == 0U || sky_packet_verify_headers(packet, bytes) != SKY_SOUND) {
        return false;
    }
    key = key_of(authority, packet, now, skew, sent);
    if (key == NULL) {
        return false;
    }
    mac_begin(&its, authority, key, (uint32_t)((uint64_t)*sent >> 32 & 0xFFFFFFFFU), packet, end - SKY_MAC_BYTES);
    sky_signing_take(&its, packet + end, bytes - end);
    mac_end(&its, expected);
    for (uint32_t i = 0; i < SKY_MAC_BYTES; i++) { /* all of it, whatever differs: the time tells nothing */
        wrong |= (uint8_t)(expected[i] ^ packet[end - SKY_MAC_BYTES + i]);
    }
    return wrong == 0U;
}

void sky_mac_strip(uint8_t *packet, size_t bytes) {
    const size_t end = sky_mac_end(packet, bytes), head = end - SKY_MAC_BYTES;
    uint8_t *const sky = packet + sky_header_start(packet);
    (void)memmove(packet + head, packet + end, bytes - end);
    sky_store16(packet + 4, (uint32_t)(bytes - SKY_MAC_BYTES - 7U));
    sky[SKY_FLAGS_AT] = (uint8_t)(sky[SKY_FLAGS_AT] & ~(uint32_t)SKY_FLAG_AUTHENTICATED);
    sky_store16(sky + SKY_KEY_ID_AT, 0);
    sky_packet_seal(packet, head);
}

/* --- Replays ---
 *
 * A command's number is its time, counted from the receiver's start, and its sequence count. Of each sender two generations of
 * numbers are remembered, ascending: when one is full the other is forgotten, and its greatest number becomes the floor up to
 * which all counts as seen. Numbers nearly always come in order: then nothing is searched or moved. They lie in blocks that a
 * generation takes as it grows: most senders have said little. */

enum { MOST_BLOCKS = 32, LEAST_IN_BLOCK = 8 };

typedef struct {
    uint32_t count;
    uint32_t blocks[MOST_BLOCKS]; /* names of them, from 1 */
} generation;

typedef struct {
    uint64_t floor, newest;
    generation of[2];
    uint32_t recent; /* which of them is being filled */
} seen;

struct sky_replay {
    sky_us start;
    uint64_t floor;
    uint32_t remembered; /* numbers in a generation */
    sky_keymap senders;  /* by key id, ground host and source, padded to a key */
    seen *seen;
    uint64_t *numbers; /* blocks of `in_block`: enough for all senders; handed out from the end, beside `seen` */
    uint32_t in_block, most_blocks, touched_blocks, freed_blocks; /* a freed one names the next in its first number */
    sky_keymap forgotten;
    uint64_t *newest; /* of each forgotten one */
};

/* Ascends with time; above 0 from the start on. */
static uint64_t number_of(const sky_replay *replay, sky_us sent, uint16_t sequence) {
    return sent < replay->start ? 0U : ((uint64_t)(sent - replay->start) + 1U) << SEQUENCE_BITS | (sequence & 0x3FFFU);
}

sky_replay *sky_replay_new(sky_arena *arena, const sky_config *config, sky_us start) {
    sky_replay *const replay = sky_take(arena, 1, sizeof(sky_replay));
    sky_replay counting, *its = &counting;
    (void)memset(&counting, 0, sizeof counting);
    if (replay != NULL) {
        its = replay;
    }
    its->start = start;
    its->floor = ((uint64_t)1 << SEQUENCE_BITS) - 1U;
    its->remembered = config->remembered;
    (void)sky_keymap_new(&its->senders, arena, config->most_senders);
    (void)sky_keymap_new(&its->forgotten, arena, config->most_forgotten + 1U);
    its->seen = sky_take(arena, (size_t)config->most_senders + 1U, sizeof *its->seen);
    its->in_block = (config->remembered - 1U) / (uint32_t)MOST_BLOCKS + 1U;
    its->in_block = its->in_block > (uint32_t)LEAST_IN_BLOCK ? its->in_block : (uint32_t)LEAST_IN_BLOCK;
    its->most_blocks = config->most_senders * 2U * ((config->remembered - 1U) / its->in_block + 1U);
    its->numbers = sky_take(arena, its->most_blocks, its->in_block * sizeof *its->numbers);
    its->newest = sky_take(arena, (size_t)config->most_forgotten + 2U, sizeof *its->newest);
    return its->numbers != NULL ? replay : NULL;
}

static uint64_t *block(const sky_replay *replay, uint32_t name) {
    return &replay->numbers[(size_t)(replay->most_blocks - name) * replay->in_block];
}

static uint64_t *number_at(const sky_replay *replay, const generation *its, uint32_t at) {
    return &block(replay, its->blocks[at / replay->in_block])[at % replay->in_block];
}

/* Room for one number more, at the end. There is a block for as many as each generation can have. */
static void extend(sky_replay *replay, generation *its) {
    if (its->count % replay->in_block == 0U) {
        uint32_t name = replay->freed_blocks;
        if (name != 0U) {
            replay->freed_blocks = (uint32_t)*block(replay, name);
        } else {
            replay->touched_blocks++;
            name = replay->touched_blocks;
        }
        its->blocks[its->count / replay->in_block] = name;
    }
    its->count++;
}

static void empty(sky_replay *replay, generation *its) {
    for (uint32_t at = 0; at < its->count; at += replay->in_block) {
        const uint32_t name = its->blocks[at / replay->in_block];
        *block(replay, name) = replay->freed_blocks;
        replay->freed_blocks = name;
    }
    its->count = 0;
}

/* How many numbers of a generation are below this one. */
static uint32_t below(const sky_replay *replay, const generation *its, uint64_t number) {
    uint32_t low = 0, high = its->count;
    if (high != 0U && *number_at(replay, its, high - 1U) < number) {
        low = high; /* nearly always */
    }
    while (low < high) {
        const uint32_t middle = low + (high - low) / 2U;
        if (*number_at(replay, its, middle) < number) {
            low = middle + 1U;
        } else {
            high = middle;
        }
    }
    return low;
}

static bool has(const sky_replay *replay, const generation *its, uint64_t number) {
    const uint32_t at = below(replay, its, number);
    return at < its->count && *number_at(replay, its, at) == number;
}

static uint64_t greater(uint64_t a, uint64_t b) { return a > b ? a : b; }

/* Keep only the newest number of the sender heard longest ago; beyond the bound, raise the floor of all instead. */
static void forget_sender(sky_replay *replay) {
    static const uint64_t PASSED = (uint64_t)(2 * 30 * 1000000) << SEQUENCE_BITS;
    const uint32_t sender = replay->senders.first;
    const uint64_t newest = replay->seen[sender].newest, passed = newest > PASSED ? newest - PASSED : 0U;
    uint32_t entry = sky_keymap_find(&replay->forgotten, sky_keymap_key(&replay->senders, sender));
    if (entry == 0U) {
        entry = sky_keymap_add(&replay->forgotten, sky_keymap_key(&replay->senders, sender));
    }
    replay->newest[entry] = newest;
    empty(replay, &replay->seen[sender].of[0]);
    empty(replay, &replay->seen[sender].of[1]);
    sky_keymap_remove(&replay->senders, sender);
    while (replay->forgotten.count >= replay->forgotten.capacity || replay->newest[replay->forgotten.first] < passed) {
        replay->floor = greater(replay->floor, replay->newest[replay->forgotten.first]);
        sky_keymap_remove(&replay->forgotten, replay->forgotten.first);
    }
}

static seen *seen_of(sky_replay *replay, const uint8_t name[32]) {
    uint32_t sender = sky_keymap_find(&replay->senders, name);
    if (sender == 0U) {
        const uint32_t before = sky_keymap_find(&replay->forgotten, name);
        uint64_t floor = replay->floor;
        seen *its;
        if (before != 0U) {
            floor = greater(floor, replay->newest[before]);
            sky_keymap_remove(&replay->forgotten, before);
        }
        if (replay->senders.count == replay->senders.capacity) {
            forget_sender(replay);
        }
        sender = sky_keymap_add(&replay->senders, name);
        its = &replay->seen[sender];
        (void)memset(its, 0, sizeof *its);
        its->floor = floor;
        its->newest = floor;
    } else {
        sky_keymap_to_end(&replay->senders, sender);
    }
    return &replay->seen[sender];
}

bool sky_replay_first(sky_replay *replay, const sky_sender *sender, sky_us sent, uint16_t sequence) {
    const uint64_t number = number_of(replay, sent, sequence);
    uint8_t name[SKY_KEY_BYTES] = {0};
    seen *its;
    generation *recent, *other;
    uint32_t at;
    sky_store16(name, sender->key_id);
    sky_store32(name + 2, sender->ground);
    sky_store32(name + 6, sender->ground != 0U ? 0U : sender->source);
    its = seen_of(replay, name);
    recent = &its->of[its->recent];
    other = &its->of[1U - its->recent];
    if (number <= its->floor || has(replay, recent, number) || has(replay, other, number)) {
        return false;
    }
    at = below(replay, recent, number);
    extend(replay, recent);
    for (uint32_t later = recent->count - 1U; later > at; later--) {
        *number_at(replay, recent, later) = *number_at(replay, recent, later - 1U);
    }
    *number_at(replay, recent, at) = number;
    its->newest = greater(its->newest, number);
    if (recent->count >= replay->remembered) {
        if (other->count != 0U) {
            its->floor = greater(its->floor, *number_at(replay, other, other->count - 1U));
        }
        empty(replay, other);
        its->recent = 1U - its->recent;
    }
    return true;
}

/* --- The gate --- */

typedef struct {
    uint8_t *packets;
    size_t bytes, segment;
} admitted_run;

struct sky_gate {
    sky_authority *authority;
    sky_counters *counters;
    sky_refuse refuse;
    void *context;
    sky_replay *replay;
    uint32_t here, beam;
    sky_us began, heard, heard_by_wall;
    sky_us answered_to; /* when all refusals answered so far would have been sent, at 100 a second */
    bool commanded;
    /* What was admitted, and how much of that was given. */
    admitted_run *runs;
    uint32_t count, given;
    bool *keep, *ours; /* of the packets that are being judged */
    sky_us *sent;
};

sky_gate *sky_gate_new(sky_arena *arena, const sky_config *config, sky_counters *counters, sky_refuse refuse,
                       void *context, sky_us now) {
    sky_gate *const gate = sky_take(arena, 1, sizeof(sky_gate));
    sky_replay *const replay = sky_replay_new(arena, config, now - START_GRACE_US);
    sky_authority *const authority = sky_take_shared(arena, 1, sizeof *authority);
    admitted_run *const runs = sky_take_shared(arena, MOST_PACKETS, sizeof *runs);
    bool *const keep = sky_take_shared(arena, MOST_PACKETS, sizeof *keep);
    bool *const ours = sky_take_shared(arena, MOST_PACKETS, sizeof *ours);
    sky_us *const sent = sky_take_shared(arena, MOST_PACKETS, sizeof *sent);
    if (gate == NULL || replay == NULL || authority == NULL || runs == NULL || keep == NULL || ours == NULL || sent == NULL) {
        return NULL;
    }
    sky_authority_begin(authority, &config->ring);
    gate->authority = authority;
    gate->runs = runs;
    gate->keep = keep;
    gate->ours = ours;
    gate->sent = sent;
    gate->counters = counters;
    gate->refuse = refuse;
    gate->context = context;
    gate->replay = replay;
    gate->here = config->address;
    gate->beam = (uint32_t)SKY_GROUND_SHELL << 24 | config->address;
    gate->began = now;
    gate->answered_to = now;
    return gate;
}

void sky_gate_set_ring(sky_gate *gate, const sky_ring *ring) {
    const sky_us shift = gate->authority->wall_shift;
    sky_authority_begin(gate->authority, ring);
    gate->authority->wall_shift = shift;
}

void sky_gate_set_wall(sky_gate *gate, sky_us shift) { gate->authority->wall_shift = shift; }

sky_us sky_gate_heard(const sky_gate *gate, sky_us *by_wall) {
    *by_wall = gate->heard_by_wall;
    return gate->heard;
}

const sky_authority *sky_gate_authority(const sky_gate *gate) { return gate->authority; }

bool sky_gate_commanded(const sky_gate *gate) { return gate->commanded; }

/* --- Admission ---
 *
 * Packets are judged in groups of one journey: one operation from one sender for one destination. */

typedef struct {
    uint8_t *packets;
    size_t bytes, segment;
    sky_link source;
    sky_us now;
} group;

static size_t count_of(const group *its) { return sky_run_count(its->bytes, its->segment); }

static uint8_t *packet_of(const group *its, size_t n, size_t *bytes) {
    const size_t at = n * its->segment;
    *bytes = its->bytes - at < its->segment ? its->bytes - at : its->segment;
    return its->packets + at;
}

static bool is_beam(sky_link link) { return (link & SKY_BEAM) == SKY_BEAM; }

static void admit(sky_gate *gate, uint8_t *packets, size_t bytes, size_t segment) {
    if (gate->count < MOST_PACKETS) {
        gate->runs[gate->count].packets = packets;
        gate->runs[gate->count].bytes = bytes;
        gate->runs[gate->count].segment = segment;
        gate->count++;
    } else {
        sky_count(gate->counters, SKY_pools_full, 1);
    }
}

static bool may_answer(sky_gate *gate, sky_us now) {
    const sky_us to = (gate->answered_to > now ? gate->answered_to : now) + REFUSAL_US;
    const bool may = to <= now + 1000000;
    if (may) {
        gate->answered_to = to;
    }
    return may;
}

/* Counts a packet that is not authentic: damaged, or refused. */
static bool count_wrong(sky_gate *gate, const uint8_t *packet, size_t bytes) {
    const bool sound = sky_packet_verify(packet, bytes) == SKY_SOUND;
    sky_count(gate->counters, SKY_packets_received, 1);
    sky_count(gate->counters, sound ? SKY_packets_refused : SKY_packets_malformed, 1);
    return sound;
}

/* Whether a refused SET names a known key and is of now: then its payload may be what is wrong. It gets no answer, since one
 * would end the operation of a sender who need only repeat it. */
static bool may_be_exchanged(const sky_gate *gate, const uint8_t *packet, size_t bytes, sky_us now) {
    const sky_authority *const authority = gate->authority;
    sky_us sent;
    return authority->auth == SKY_AUTH_ANSWERS && sky_mac_end(packet, bytes) != 0U &&
           packet[sky_header_start(packet) + SKY_OP_AT] == SKY_SET &&
           (key_of(authority, packet, now, MAX_SKEW_US, &sent) != NULL ||
            key_of(authority, packet, now + authority->wall_shift, MAX_SKEW_US, &sent) != NULL);
}

/* Counts the packets from `first` to `end` that are not `kept`; answers the first sound command of a ground host. */
static void turn_away(sky_gate *gate, const group *its, size_t first, size_t end, const bool *kept) {
    bool answered = false;
    for (size_t n = first; n < end; n++) {
        if (!kept[n]) {
            size_t bytes;
            const uint8_t *const packet = packet_of(its, n, &bytes);
            if (count_wrong(gate, packet, bytes) && !answered && !may_be_exchanged(gate, packet, bytes, its->now)) {
                answered = true;
                if ((packet[0] & SKY_COMMAND_BIT) != 0U && is_beam(its->source) && may_answer(gate, its->now)) {
                    gate->refuse(gate->context, packet, bytes, its->source, its->now);
                }
            }
        }
    }
}

/* Keeps of the commands from `first` to `end` those that are authentic and new. */
static void keep_authentic(sky_gate *gate, const group *its, size_t first, size_t end) {
    const sky_us shift = gate->authority->wall_shift;
    bool all = true;
    for (size_t n = first; n < end; n++) {
        size_t bytes;
        const uint8_t *const packet = packet_of(its, n, &bytes);
        sky_us sent = 0;
        gate->keep[n] = sky_authority_check(gate->authority, packet, bytes, its->now, MAX_SKEW_US, &sent);
        /* Not by a wall clock from before our start, of which no command can be told from a replay. */
        if (!gate->keep[n] && shift != 0 && its->now + shift > gate->began) {
            gate->keep[n] = sky_authority_check(gate->authority, packet, bytes, its->now + shift, MAX_SKEW_US, &sent);
        }
        gate->sent[n] = sent;
        all = all && gate->keep[n];
    }
    if (!all) {
        turn_away(gate, its, first, end, gate->keep);
    }
    for (size_t n = first; n < end; n++) {
        if (gate->keep[n]) {
            size_t bytes;
            const uint8_t *const packet = packet_of(its, n, &bytes), *const sky = packet + SKY_COMMAND_BYTES;
            const sky_sender sender = {sky_load16(sky + SKY_KEY_ID_AT), sky_load32(sky + SKY_GROUND_AT),
                                       sky_load32(sky + SKY_SOURCE_AT)};
            gate->keep[n] = sky_replay_first(gate->replay, &sender, gate->sent[n], sky_load16(packet + 2));
            if (!gate->keep[n]) {
                sky_count(gate->counters, SKY_packets_received, 1);
                sky_count(gate->counters, SKY_packets_replayed, 1);
            } else if (gate->sent[n] >= its->now - MAX_SKEW_US && gate->sent[n] <= its->now + MAX_SKEW_US) {
                gate->heard = its->now;
            } else if (shift > 0) {
                gate->heard_by_wall = its->now;
            } else {
                /* by a wall clock that is behind */
            }
        }
    }
}

/* Commands by our beam. One made for another satellite's beam was overheard there: it is refused, since its answers would go
 * to the host that repeats it here. */
static void keep_from_ground(sky_gate *gate, const group *its, size_t count) {
    bool all = true;
    for (size_t n = 0; n < count; n++) {
        size_t bytes;
        const uint8_t *const packet = packet_of(its, n, &bytes);
        gate->ours[n] = sky_load32(packet + SKY_COMMAND_BYTES + SKY_SOURCE_AT) == gate->beam;
        all = all && gate->ours[n];
    }
    if (all) {
        keep_authentic(gate, its, 0, count);
    } else {
        for (size_t n = 0; n < count; n++) {
            if (gate->ours[n]) {
                keep_authentic(gate, its, n, n + 1U);
            } else {
                gate->keep[n] = false;
                turn_away(gate, its, n, n + 1U, gate->keep);
            }
        }
    }
}

static void keep_answers(sky_gate *gate, const group *its, size_t count) {
    for (size_t n = 0; n < count; n++) {
        size_t bytes;
        sky_us sent;
        const uint8_t *const packet = packet_of(its, n, &bytes);
        gate->keep[n] = sky_authority_check(gate->authority, packet, bytes, 0, 0, &sent);
        if (!gate->keep[n]) {
            (void)count_wrong(gate, packet, bytes);
        }
    }
}

/* The kept packets as one run, without their MACs, moved together where they lie. */
static void admit_plain(sky_gate *gate, const group *its, size_t count) {
    const size_t segment = (its->segment < its->bytes ? its->segment : its->bytes) - SKY_MAC_BYTES;
    size_t written = 0;
    for (size_t n = 0; n < count; n++) {
        if (gate->keep[n]) {
            size_t bytes;
            uint8_t *const packet = packet_of(its, n, &bytes);
            sky_mac_strip(packet, bytes);
            (void)memmove(its->packets + written, packet, bytes - SKY_MAC_BYTES);
            written += bytes - SKY_MAC_BYTES;
        }
    }
    if (written != 0U) {
        admit(gate, its->packets, written, segment);
    }
}

/* The kept packets as they are. */
static void admit_kept(sky_gate *gate, const group *its, size_t count) {
    bool all = true;
    for (size_t n = 0; n < count; n++) {
        all = all && gate->keep[n];
    }
    if (all) {
        admit(gate, its->packets, its->bytes, its->segment);
    } else {
        for (size_t n = 0; n < count; n++) {
            if (gate->keep[n]) {
                size_t bytes;
                uint8_t *const packet = packet_of(its, n, &bytes);
                admit(gate, packet, bytes, bytes);
            }
        }
    }
}

static void judge(sky_gate *gate, const group *its) {
    const size_t count = count_of(its);
    bool to_me, command, kept = false;
    if (its->bytes < sky_header_start(its->packets) + SKY_HEADER_BYTES) {
        admit(gate, its->packets, its->bytes, its->segment); /* malformed: the machine counts it */
        return;
    }
    to_me = sky_load32(its->packets + sky_header_start(its->packets) + SKY_DESTINATION_AT) == gate->here;
    command = (its->packets[0] & SKY_COMMAND_BIT) != 0U;
    if (is_beam(its->source)) {
        if (command) {
            keep_from_ground(gate, its, count);
        } else { /* ground hosts send no answers: one that does would have them taken for another's */
            (void)memset(gate->keep, 0, count * sizeof *gate->keep);
            turn_away(gate, its, 0, count, gate->keep);
        }
    } else if (to_me && command) {
        keep_authentic(gate, its, 0, count);
        for (size_t n = 0; n < count; n++) {
            kept = kept || gate->keep[n];
        }
        gate->commanded = gate->commanded || kept;
    } else if (to_me && gate->authority->auth == SKY_AUTH_EVERY) {
        keep_answers(gate, its, count);
    } else {
        admit(gate, its->packets, its->bytes, its->segment);
        return;
    }
    if (to_me) {
        admit_plain(gate, its, count);
    } else {
        admit_kept(gate, its, count);
    }
}

void sky_gate_admit(sky_gate *gate, uint8_t *packets, size_t bytes, size_t segment_bytes, sky_link source, sky_us now) {
    group whole = {packets, bytes, segment_bytes, source, now};
    gate->commanded = false;
    gate->count = 0;
    gate->given = 0;
    if (segment_bytes < SKY_COMMAND_PREFIX_BYTES || bytes == 0U) { /* malformed: the machine counts it */
        admit(gate, packets, bytes, segment_bytes);
    } else if (bytes > SKY_MAX_PACKET_BYTES) { /* no transport gives so much at once */
        sky_count(gate->counters, SKY_packets_received, count_of(&whole));
        sky_count(gate->counters, SKY_packets_malformed, count_of(&whole));
    } else if (sky_same_journey(packets, bytes, segment_bytes)) {
        judge(gate, &whole);
    } else {
        for (size_t n = 0; n < count_of(&whole); n++) {
            group one = {NULL, 0, segment_bytes, source, now};
            one.packets = packet_of(&whole, n, &one.bytes);
            judge(gate, &one);
        }
    }
}

bool sky_gate_next(sky_gate *gate, uint8_t **packets, size_t *bytes, size_t *segment_bytes) {
    const bool more = gate->given < gate->count;
    if (more) {
        *packets = gate->runs[gate->given].packets;
        *bytes = gate->runs[gate->given].bytes;
        *segment_bytes = gate->runs[gate->given].segment;
        gate->given++;
    }
    return more;
}
