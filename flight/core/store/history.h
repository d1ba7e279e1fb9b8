/* Recent writes and deletions of keys, by which a satellite recognises handovers and notices that come too late. Twin of
 * KeyHistory in skymemory.protocol.satellite.memory. */
#ifndef SKY_HISTORY_H
#define SKY_HISTORY_H

#include <stdbool.h>
#include <stdint.h>

#include "arena.h"
#include "config.h"
#include "store/keymap.h"

typedef struct {
    sky_us until;
    bool all; /* every setting */
    uint8_t setting[12];
} sky_deletion;

typedef struct {
    sky_keymap deleted;
    sky_deletion *deletions;
    sky_keymap written;
    sky_us *written_at;
    sky_us complete_since; /* since when `written` has every key */
    sky_keymap dead;       /* settings that were dropped last as dead */
    uint8_t (*dead_settings)[12];
    uint32_t most_dead;
} sky_history;

bool sky_history_new(sky_history *history, sky_arena *arena, const sky_config *config);

/* To be called once before the sky_history_deleted of one packet. */
void sky_history_forget_deletions(sky_history *history, sky_us now);
/* Deleted by command: a key, and a setting of it (NULL: all). */
void sky_history_deleted(sky_history *history, const uint8_t *key, const uint8_t *setting, sky_us now);
/* Dropped as dead: records of 44 bytes, key and setting. */
void sky_history_dropped(sky_history *history, const uint8_t *dead, uint32_t count);
/* The setting of this key that was dropped as dead; NULL: none. */
const uint8_t *sky_history_dead(const sky_history *history, const uint8_t *key);
/* A writer stored chunks of the key here. */
void sky_history_written(sky_history *history, const uint8_t *key, sky_us now);
/* A writer is still storing chunks of it, here or elsewhere. */
void sky_history_still_written(sky_history *history, const uint8_t *key, sky_us now);
/* Whether a writer has stored chunks of the key since then; true where that is not known. */
bool sky_history_was_written_since(const sky_history *history, const uint8_t *key, sky_us since);
bool sky_history_is_being_written(const sky_history *history, const uint8_t *key, sky_us now);
/* Whether to drop a handed-over chunk that came at this time: its key or setting was just deleted. */
bool sky_history_is_deleted(const sky_history *history, const uint8_t *ref, sky_us came);

#endif
