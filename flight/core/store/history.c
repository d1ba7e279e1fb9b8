#include "store/history.h"

#include <string.h>

#include "wire/packet.h"

/* How long a deleted key is not taken over: as long as a client needs to delete it on every satellite. */
static const sky_us DELETED_US = 1000000;
/* For how long deletions are kept beyond their end: a postponed packet may be judged by the time when it came. */
static const sky_us MOST_AGE_US = 2000000;
/* How long writes are remembered, and for how long after a writer's last word a key counts as being written. */
static const sky_us MOST_SINCE_US = 10000000, WRITING_US = 3000000;
/* `dropped` adds the dead values of one call before it forgets the earliest, as the twin does: room for so many. */
enum { DEAD_AT_ONCE = 1024 };

bool sky_history_new(sky_history *history, sky_arena *arena, const sky_config *config) {
    bool whole = sky_keymap_new(&history->deleted, arena, config->most_deleted);
    whole = sky_keymap_new(&history->written, arena, config->most_written) && whole;
    whole = sky_keymap_new(&history->dead, arena, config->most_dead + DEAD_AT_ONCE) && whole;
    history->deletions = sky_take(arena, (size_t)config->most_deleted + 1U, sizeof *history->deletions);
    history->written_at = sky_take(arena, (size_t)config->most_written + 1U, sizeof *history->written_at);
    history->dead_settings =
        sky_take(arena, (size_t)config->most_dead + DEAD_AT_ONCE + 1U, sizeof *history->dead_settings);
    history->most_dead = config->most_dead;
    history->complete_since = INT64_MIN;
    return whole && history->deletions != NULL && history->written_at != NULL && history->dead_settings != NULL;
}

void sky_history_forget_deletions(sky_history *history, sky_us now) {
    while (history->deleted.first != 0U && history->deletions[history->deleted.first].until <= now - MOST_AGE_US) {
        sky_keymap_remove(&history->deleted, history->deleted.first);
    }
}

static void remove_if_there(sky_keymap *map, const uint8_t *key) {
    const uint32_t entry = sky_keymap_find(map, key);
    if (entry != 0U) {
        sky_keymap_remove(map, entry);
    }
}

void sky_history_deleted(sky_history *history, const uint8_t *key, const uint8_t *setting, sky_us now) {
    sky_deletion *deletion;
    if (setting == NULL) {
        remove_if_there(&history->written, key);
    }
    remove_if_there(&history->deleted, key);
    if (history->deleted.count == history->deleted.capacity) {
        sky_keymap_remove(&history->deleted, history->deleted.first);
    }
    deletion = &history->deletions[sky_keymap_add(&history->deleted, key)];
    deletion->until = now + DELETED_US;
    deletion->all = setting == NULL;
    if (setting != NULL) {
        (void)memcpy(deletion->setting, setting, sizeof deletion->setting);
    }
}

void sky_history_dropped(sky_history *history, const uint8_t *dead, uint32_t count) {
    for (uint32_t i = 0; i < count; i++) {
        const uint8_t *const record = dead + (size_t)i * SKY_DEAD_BYTES;
        uint32_t entry = sky_keymap_find(&history->dead, record);
        if (entry == 0U) {
            if (history->dead.count == history->dead.capacity) { /* more at once than there is room for */
                sky_keymap_remove(&history->dead, history->dead.first);
            }
            entry = sky_keymap_add(&history->dead, record);
        }
        (void)memcpy(history->dead_settings[entry], record + SKY_KEY_BYTES, SKY_SETTING_BYTES);
    }
    while (history->dead.count > history->most_dead) {
        sky_keymap_remove(&history->dead, history->dead.first);
    }
}

const uint8_t *sky_history_dead(const sky_history *history, const uint8_t *key) {
    const uint32_t entry = sky_keymap_find(&history->dead, key);
    return entry != 0U ? history->dead_settings[entry] : NULL;
}

void sky_history_written(sky_history *history, const uint8_t *key, sky_us now) {
    remove_if_there(&history->deleted, key);
    remove_if_there(&history->dead, key);
    sky_history_still_written(history, key, now);
}

void sky_history_still_written(sky_history *history, const uint8_t *key, sky_us now) {
    uint32_t entry = sky_keymap_find(&history->written, key);
    if (entry != 0U) {
        sky_keymap_to_end(&history->written, entry);
    } else {
        if (history->written.count == history->written.capacity) {
            history->complete_since = history->written_at[history->written.first];
            sky_keymap_remove(&history->written, history->written.first);
        }
        entry = sky_keymap_add(&history->written, key);
    }
    history->written_at[entry] = now;
    while (history->written_at[history->written.first] < now - MOST_SINCE_US) {
        history->complete_since = history->written_at[history->written.first];
        sky_keymap_remove(&history->written, history->written.first);
    }
}

bool sky_history_was_written_since(const sky_history *history, const uint8_t *key, sky_us since) {
    const uint32_t entry = sky_keymap_find(&history->written, key);
    return since <= history->complete_since || (entry != 0U && history->written_at[entry] >= since);
}

bool sky_history_is_being_written(const sky_history *history, const uint8_t *key, sky_us now) {
    return sky_history_was_written_since(history, key, now - WRITING_US);
}

bool sky_history_is_deleted(const sky_history *history, const uint8_t *ref, sky_us came) {
    const uint32_t entry = sky_keymap_find(&history->deleted, ref);
    bool deleted = false;
    if (entry != 0U) {
        const sky_deletion *const deletion = &history->deletions[entry];
        deleted = deletion->until > came && (deletion->all || sky_ref_has_setting(ref, deletion->setting));
    }
    return deleted;
}
