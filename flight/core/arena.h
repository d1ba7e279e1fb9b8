/* Memory for a satellite's whole life, handed out once at its start.
 *
 * A module's `..._new` takes its structure and its pools. With `memory` NULL nothing is handed out and every take gives
 * NULL: the same code then counts the bytes that it needs.
 */
#ifndef SKY_ARENA_H
#define SKY_ARENA_H

#include <stddef.h>
#include <stdint.h>

typedef struct {
    uint8_t *memory;
    size_t bytes, used;
} sky_arena;

/* Zeroed room for `count` times `size` bytes; NULL while counting, or where the arena is too small. */
static inline void *sky_take(sky_arena *arena, size_t count, size_t size) {
    const size_t room = (count * size + 15U) & ~(size_t)15U;
    const size_t at = arena->used;
    if (size != 0U && count > (SIZE_MAX / 4U - at) / size) {
        arena->used = SIZE_MAX / 2U; /* impossible: never fits */
        return NULL;
    }
    arena->used = at + room;
    return arena->memory == NULL || arena->used > arena->bytes ? NULL : arena->memory + at;
}

#endif
