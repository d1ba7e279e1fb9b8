/* What a satellite tells of itself: the figures that PONG carries, and its state as bytes, for comparison with the twin. */

#include "checks.h"
#include "handover.h"
#include "state.h"
#include "wire/crc.h"

#define WORD_VERSIONS 0x0101 /* versions 1 to 1 */
#define WORD_OPERATIONS 0x3FFE
#define WORD_CODECS 0x701

/* The place of each counter in PONG. */
static const struct {
    uint8_t number;
    sky_counter counter;
} COUNTED[] = {
    {4, SKY_packets_received},   {5, SKY_packets_malformed},  {6, SKY_packets_forwarded},   {7, SKY_packets_unroutable},
    {8, SKY_chunks_set},         {9, SKY_chunks_replaced},    {10, SKY_chunks_refused},     {11, SKY_chunks_served},
    {12, SKY_chunks_missed},     {13, SKY_chunks_evicted},    {14, SKY_chunks_deleted},     {15, SKY_chunks_migrated_in},
    {16, SKY_chunks_migrated_out}, {29, SKY_chunks_purged},   {30, SKY_chunks_expired},     {31, SKY_notices_sent},
    {33, SKY_packets_refused},   {34, SKY_packets_replayed},  {35, SKY_copies_mended},      {39, SKY_packets_unsupported},
};

void sky_housekeeping(const sky_satellite *satellite, int64_t figures[SKY_HOUSEKEEPING_FIELDS], sky_us now) {
    const sky_memory *memory = &satellite->memory;
    for (uint32_t number = 0U; number < SKY_HOUSEKEEPING_FIELDS; number++) {
        figures[number] = 0;
    }
    for (size_t each = 0U; each < sizeof COUNTED / sizeof *COUNTED; each++) {
        figures[COUNTED[each].number] = (int64_t)satellite->counters.of[COUNTED[each].counter];
    }
    figures[0] = (int64_t)memory->used_bytes;
    figures[1] = (int64_t)memory->limit_bytes;
    figures[2] = (int64_t)memory->count;
    figures[3] = (int64_t)satellite->config.credit_bytes;
    figures[17] = (int64_t)satellite->handover->retransmitted;
    figures[20] = satellite->locator.pushed.slot;
    figures[21] = satellite->locator.pushed.plane;
    figures[22] = (int64_t)memory->ledger.set;
    figures[23] = (int64_t)memory->ledger.migrated_in;
    figures[24] = (int64_t)memory->ledger.went[SKY_REPLACED];
    figures[25] = (int64_t)memory->ledger.went[SKY_EVICTED_FOR_ROOM];
    figures[26] = (int64_t)memory->ledger.went[SKY_DELETED];
    figures[27] = (int64_t)memory->ledger.went[SKY_MIGRATED_OUT];
    figures[28] = (int64_t)memory->ledger.went[SKY_LOST];
    figures[32] = (int64_t)memory->pinned_bytes;
    figures[36] = WORD_VERSIONS;
    figures[37] = WORD_OPERATIONS;
    figures[38] = WORD_CODECS;
    figures[40] = (int64_t)satellite->postponed.dropped;
    figures[41] = sky_lateness_at(&satellite->lateness, now);
    figures[48] = (int64_t)(sky_pools_full(satellite) + satellite->counters.of[SKY_outbox_full]);
    for (uint32_t number = 0U; number < SKY_HOUSEKEEPING_FIELDS; number++) {
        if ((satellite->is_figure >> number & 1U) != 0U) {
            figures[number] = satellite->figures[number];
        }
    }
}

uint64_t sky_pools_full(const sky_satellite *satellite) {
    return satellite->counters.of[SKY_pools_full] + satellite->memory.pools_full + satellite->handover->pools_full +
           satellite->checks->questions.pools_full;
}

/* --- The state as bytes --- */

typedef struct {
    sky_sink sink;
    void *context;
} sink_to;

static void put_bytes(const sink_to *out, const uint8_t *bytes, size_t count) { out->sink(out->context, bytes, count); }

static void put(const sink_to *out, uint64_t value) {
    uint8_t bytes[8];
    sky_store64(bytes, value);
    put_bytes(out, bytes, sizeof bytes);
}

static void put_moves(const sink_to *out, sky_moves moves) {
    put(out, (uint64_t)(int64_t)moves.slot);
    put(out, (uint64_t)(int64_t)moves.plane);
}

static void tell_counters(const sky_satellite *satellite, const sink_to *out) {
    for (unsigned each = 0U; each < (unsigned)SKY_outbox_full; each++) {
        const uint64_t more = each == (unsigned)SKY_pins_refused ? satellite->memory.pins_refused : 0U;
        put(out, satellite->counters.of[each] + more);
    }
}

static void tell_figures(const sky_memory *memory, const sink_to *out) {
    put(out, memory->used_bytes);
    put(out, memory->pinned_bytes);
    put(out, memory->leased_bytes);
    put(out, memory->count);
    put(out, memory->ledger.set);
    put(out, memory->ledger.migrated_in);
    for (unsigned cause = 0U; cause < (unsigned)SKY_CAUSES; cause++) {
        put(out, memory->ledger.went[cause]);
    }
}

static void tell_chunks(const sky_memory *memory, const sink_to *out) {
    for (uint32_t n = 0U; n < sky_memory_keys(memory); n++) {
        const uint32_t share = sky_memory_key_at(memory, n);
        put_bytes(out, sky_memory_key(memory, share), SKY_KEY_BYTES);
        for (uint32_t chunk = memory->shares[share].lowest; chunk != 0U; chunk = memory->chunks[chunk].higher) {
            put_bytes(out, memory->chunks[chunk].ref, SKY_REF_BYTES);
        }
    }
}

static void tell_promises(const sky_memory *memory, const sink_to *out) {
    for (uint32_t n = 0U; n < sky_memory_keys(memory); n++) {
        const uint32_t share = sky_memory_key_at(memory, n);
        const sky_share *its = &memory->shares[share];
        uint32_t holders = 0U;
        uint64_t untils = 0U;
        if (!its->pinned && !its->expiring && !its->leased) {
            continue;
        }
        for (uint32_t held = its->leases; held != 0U; held = memory->leases[held].next) {
            holders++;
            untils += (uint64_t)memory->leases[held].until ^ memory->leases[held].ground;
        }
        put_bytes(out, sky_memory_key(memory, share), SKY_KEY_BYTES);
        put(out, its->pinned ? (uint64_t)its->pinned_until : 0U);
        put(out, its->expiring ? (uint64_t)its->expires : 0U);
        put(out, holders);
        put(out, untils);
    }
}

static void tell_order(sky_memory *memory, const sink_to *out) {
    sky_memory_order order;
    sky_memory_order_begin(memory, &order);
    for (uint32_t share = sky_memory_order_next(memory, &order); share != 0U;
         share = sky_memory_order_next(memory, &order)) {
        put_bytes(out, sky_memory_key(memory, share), SKY_KEY_BYTES);
    }
}

static void tell_links(const sky_satellite *satellite, const sink_to *out) {
    const sky_link_state *links = &satellite->router.links;
    const sky_router *router = &satellite->router;
    for (uint32_t each = 0U; each < satellite->neighbours.count; each++) {
        put(out, satellite->neighbours.of[each].name);
        put(out, satellite->neighbours.of[each].down ? 1U : 0U);
    }
    for (uint32_t at = sky_links_oldest(links); at != 0U; at = sky_links_after(links, at)) {
        uint8_t record[SKY_DECLARATION_BYTES];
        sky_links_pack(links, at - 1U, record);
        put_bytes(out, record, sizeof record);
    }
    for (uint16_t at = router->oldest; at != 0U; at = router->grounds[at - 1U].newer) {
        put(out, router->grounds[at - 1U].ground);
        put(out, router->grounds[at - 1U].link);
    }
    put(out, links->searched);
}

static void tell_history(const sky_history *history, const sink_to *out) {
    for (uint32_t at = history->written.first; at != 0U; at = sky_keymap_newer(&history->written, at)) {
        put_bytes(out, sky_keymap_key(&history->written, at), SKY_KEY_BYTES);
        put(out, (uint64_t)history->written_at[at]);
    }
    for (uint32_t at = history->deleted.first; at != 0U; at = sky_keymap_newer(&history->deleted, at)) {
        static const uint8_t ALL[SKY_SETTING_BYTES] = {0};
        put_bytes(out, sky_keymap_key(&history->deleted, at), SKY_KEY_BYTES);
        put(out, (uint64_t)history->deletions[at].until);
        put_bytes(out, history->deletions[at].all ? ALL : history->deletions[at].setting, SKY_SETTING_BYTES);
    }
    for (uint32_t at = history->dead.first; at != 0U; at = sky_keymap_newer(&history->dead, at)) {
        put_bytes(out, sky_keymap_key(&history->dead, at), SKY_KEY_BYTES);
        put_bytes(out, history->dead_settings[at], SKY_SETTING_BYTES);
    }
}

void sky_state(sky_satellite *satellite, unsigned part, sky_sink sink, void *context) {
    const sink_to out = {sink, context};
    switch (part) {
    case SKY_PART_MOVES:
        put_moves(&out, satellite->locator.moves);
        put_moves(&out, satellite->locator.before);
        put_moves(&out, satellite->locator.pushed);
        put(&out, (uint64_t)satellite->neighbours.pushed_at_ms);
        break;
    case SKY_PART_COUNTERS:
        tell_counters(satellite, &out);
        break;
    case SKY_PART_FIGURES:
        tell_figures(&satellite->memory, &out);
        break;
    case SKY_PART_CHUNKS:
        tell_chunks(&satellite->memory, &out);
        break;
    case SKY_PART_PROMISES:
        tell_promises(&satellite->memory, &out);
        break;
    case SKY_PART_ORDER:
        tell_order(&satellite->memory, &out);
        break;
    case SKY_PART_LINKS:
        tell_links(satellite, &out);
        break;
    case SKY_PART_OUTBOX:
        put(&out, satellite->outbox.sequence);
        put(&out, satellite->outbox.credit.each_bytes);
        put(&out, satellite->postponed.runs);
        put(&out, satellite->postponed.kept);
        put(&out, satellite->postponed.dropped);
        put(&out, satellite->handover->retransmitted);
        put(&out, satellite->handover->planned);
        put(&out, sky_handover_idle(satellite) ? 1U : 0U);
        put(&out, sky_handover_at_rest(satellite) ? 1U : 0U);
        put(&out, satellite->timers_wait ? 1U : 0U);
        break;
    case SKY_PART_HISTORY:
        tell_history(&satellite->history, &out);
        break;
    default:
        break;
    }
}

static void crc_sink(void *context, const uint8_t *bytes, size_t count) {
    uint32_t *crc = context;
    *crc = sky_crc32(*crc, bytes, count);
}

uint32_t sky_digest(sky_satellite *satellite) {
    uint32_t crc = 0U;
    for (unsigned part = 0U; part < (unsigned)SKY_PARTS; part++) {
        sky_state(satellite, part, crc_sink, &crc);
    }
    return crc;
}
