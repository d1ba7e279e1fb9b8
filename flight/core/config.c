#include "config.h"

#include <string.h>

#include "checks.h"
#include "wire/packet.h"

void sky_config_defaults(sky_config *config) {
    (void)memset(config, 0, sizeof *config);
    config->typical_chunk_bytes = 6144;
    config->cell_bytes = 1024;
    config->replacement = SKY_LRFU;
    config->credit_bytes = 1U << 20;
    config->backlog_bytes = 64U << 20;
    config->outbox_bytes = 512U << 10;
    config->sweep = 30 * 1000000;
    config->notice_hold = 50000;
    config->confirm = 2 * 1000000;
    config->pin_share = 1U << 15;
    config->replicas = 1;
    config->slot_link_ps = 1000000000000U; /* a second: the twin's, where nothing is known */
    config->plane_link_ps = 1000000000000U;
    config->neighbour_timeout = 50000;
    config->handover_window = 32;
    config->handover_timeout = 100000;
    config->handover_grace = 1000000;
    config->handover_gap = 2000;
    config->most_written = 1U << 16;
    config->most_deleted = 1U << 14;
    config->most_dead = 4096;
    config->most_departed = 16384;
    config->most_evicted = 4096;
    config->most_leases = 16384;
    config->most_expiries = 1U << 16;
    config->most_back_offs = 4096; /* the twin's are 65,536 */
    config->most_conflicts = 1024;
    config->most_transfers = 1024;
    config->most_ground_hosts = 4096;
    config->most_runs = 2048;
    config->postponed_bytes = 1U << 20;
    config->most_senders = 256;
    config->most_forgotten = 4096;
    config->remembered = 2048;
}

uint32_t sky_config_chunks(const sky_config *config) {
    uint32_t chunks = config->most_chunks;
    if (chunks == 0U) {
        const uint64_t each = (uint64_t)config->typical_chunk_bytes + SKY_REF_BYTES;
        const uint64_t fit = config->memory_bytes / each + 1024U;
        chunks = fit < INT32_MAX ? (uint32_t)fit : (uint32_t)INT32_MAX;
    }
    return chunks;
}

uint32_t sky_config_keys(const sky_config *config) {
    return config->most_keys != 0U ? config->most_keys : sky_config_chunks(config);
}

/* Microseconds that fit every sum and product that is made of them: 11 days. */
static bool is_time(sky_us time) { return time >= 0 && time <= INT64_C(1000000000000); }

sky_torus sky_config_torus(const sky_config *config) {
    const sky_torus torus = {config->planes,     config->slots, config->most_planes,
                             config->most_slots, config->seam,  config->gaps};
    return torus;
}

static const char *place_error(const sky_config *config) {
    const uint32_t plane = config->address >> 12, slot = config->address & 0xFFFU;
    const char *error = NULL;
    if (config->planes < 1U || config->planes > 4096U || config->slots < 1U || config->slots > 4096U) {
        error = "planes and slots: expected 1 to 4096";
    } else if (plane >= config->planes || slot >= config->slots) {
        error = "the address is not on the torus";
    } else if (config->gaps != NULL && config->gaps[plane * config->slots + slot] != 0U) {
        error = "address: expected a satellite, not a gap";
    } else if (config->centre_plane >= config->planes || config->centre_slot >= config->slots) {
        error = "the centre is not on the torus";
    } else if (config->slot_link_ps < 1U || config->plane_link_ps < 1U ||
               config->slot_link_ps > (uint64_t)1 << 46 || config->plane_link_ps > (uint64_t)1 << 46) {
        error = "link delays: expected 1 ps to 70 s";
    } else {
        /* sound */
    }
    return error;
}

static const char *store_error(const sky_config *config) {
    const char *error = NULL;
    if (config->memory_bytes > (uint64_t)1 << 40) {
        error = "memory: expected 1 TiB at most";
    } else if (config->cell_bytes < 64U || config->cell_bytes > 65536U) {
        error = "cells: expected 64 to 65536 bytes";
    } else if (config->memory_bytes / config->cell_bytes > (uint64_t)INT32_MAX / 2U ||
               sky_config_chunks(config) > (uint32_t)INT32_MAX / 4U) {
        error = "memory: too many cells or chunks, expected 2^30 at most";
    } else if (config->typical_chunk_bytes < 1U || config->typical_chunk_bytes > SKY_MAX_CHUNK_BYTES) {
        error = "typical chunk: expected 1 to 65375 bytes";
    } else if (config->replacement > SKY_LRFU) {
        error = "replacement: expected lru, lfuda or lrfu";
    } else if (config->pin_share > 65536U) {
        error = "pin share: expected at most 65536, which is all";
    } else if (config->replicas < 1U || 2U * config->replicas > SKY_MOST_PLACES) { /* all are asked, now and before a move */
        error = "replicas: expected 1 to 32";
    } else {
        /* sound */
    }
    return error;
}

static const char *time_error(const sky_config *config) {
    const char *error = NULL;
    if (!is_time(config->sweep) || config->sweep == 0 || !is_time(config->notice_hold) || !is_time(config->confirm) ||
        !is_time(config->neighbour_timeout) || !is_time(config->handover_timeout) ||
        !is_time(config->handover_grace) || config->handover_grace == 0 || !is_time(config->handover_gap)) {
        error = "times: expected 11 days at most, and 1 us or more for the sweep and the grace period of a handover";
    } else if (config->handover_window < 2U || config->handover_window > 65536U) { /* it is never cut to less than 2 */
        error = "handover window: expected 2 to 65536 bursts";
    } else {
        /* sound */
    }
    return error;
}

static bool is_count(uint32_t count, uint32_t most) { return count >= 1U && count <= most; }

static const char *pool_error(const sky_config *config) {
    const char *error = NULL;
    if (config->ring.count > SKY_MOST_KEYS_IN_RING) {
        error = "keys in a ring: expected 16 at most";
    } else if (!is_count(config->most_back_offs, UINT16_MAX) || !is_count(config->most_conflicts, UINT16_MAX) ||
               !is_count(config->most_transfers, UINT16_MAX - 1U) ||
               !is_count(config->most_ground_hosts, UINT16_MAX - 1U) || !is_count(config->most_runs, UINT16_MAX)) {
        error = "back-offs, conflicts, transfers, ground hosts and runs: expected 1 to 65534 of each";
    } else if (config->outbox_bytes < 16384U || config->postponed_bytes < 65536U ||
               config->postponed_bytes > (uint32_t)1 << 30) {
        error = "outbox: expected 16384 bytes or more; postponed: 65536 bytes to 1 GiB";
    } else if (config->most_written < 1U || config->most_deleted < 1U || config->most_dead < 1U ||
               config->most_departed < 1U || !is_count(config->most_senders, UINT16_MAX) ||
               config->most_forgotten < 1U || !is_count(config->remembered, UINT16_MAX)) {
        error = "what is remembered: expected 1 or more of each, 65535 senders and numbers at most";
    } else {
        /* sound */
    }
    return error;
}

const char *sky_config_error(const sky_config *config) {
    const char *error = place_error(config);
    error = error != NULL ? error : store_error(config);
    error = error != NULL ? error : time_error(config);
    return error != NULL ? error : pool_error(config);
}
