/* Memory for a satellite's whole life, handed out once at its start.
 *
 * A module's `..._new` takes its structure and its pools. With `memory` NULL nothing is handed out and every take gives
 * NULL: the same code then counts the bytes that it needs.
 */
#ifndef SKY_ARENA_H
#define SKY_ARENA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#ifdef SKY_ADDRESS_SANITIZER
#include <sanitizer/asan_interface.h>
#endif

typedef struct {
    uint8_t *memory;
    size_t bytes, used; /* of them, `low` from below */
    size_t low;
    uint64_t hash_seed[2]; /* of the maps that are taken from it */
    bool shares;     /* what is taken as shared lies in `shared`, */
    uint8_t *shared; /* NULL: only counted */
    size_t shared_bytes, shared_used;
} sky_arena;

#define SKY_SMALL_STRUCTURE 16384U

/* For builds with AddressSanitizer, which knows nothing of the parts of one allocation: bytes behind every part must not be
 * touched, so what reads or writes past the end of its pool is found. Whoever gives memory back takes them off. */
#ifdef SKY_ADDRESS_SANITIZER
#define SKY_GUARD_BYTES 32U
#define SKY_GUARD(at, bytes) __asan_poison_memory_region((at), (bytes))
#define SKY_UNGUARD(at, bytes) __asan_unpoison_memory_region((at), (bytes))
#else
#define SKY_GUARD_BYTES 0U
#define SKY_GUARD(at, bytes) ((void)0)
#define SKY_UNGUARD(at, bytes) ((void)0)
#endif

static inline size_t sky_room(size_t count, size_t size) {
    return ((count * size + 15U) & ~(size_t)15U) + SKY_GUARD_BYTES;
}

/* Zeroed room for `count` times `size` bytes; NULL while counting, or where the arena is too small. Structures, which every
 * satellite uses, lie together, from below; pools from above, used once they are needed: a system whose memory comes by pages
 * then gives few to a satellite that has nothing to do. */
static inline void *sky_take(sky_arena *arena, size_t count, size_t size) {
    const size_t room = sky_room(count, size);
    size_t at;
    if (size != 0U && count > (SIZE_MAX / 4U - arena->used) / size) {
        arena->used = SIZE_MAX / 2U; /* impossible: never fits */
        return NULL;
    }
    arena->used += room;
    if (count == 1U && room <= SKY_SMALL_STRUCTURE) {
        at = arena->low;
        arena->low += room;
    } else {
        at = (arena->bytes & ~(size_t)15U) - (arena->used - arena->low);
    }
    if (arena->memory == NULL || arena->used > arena->bytes) {
        return NULL;
    }
    SKY_GUARD(arena->memory + at + count * size, room - count * size);
    return arena->memory + at;
}

/* The same for what holds nothing of one satellite between its events: scratch, and what is computed from the configuration
 * alone. It may be dirty: another satellite has used it, with the same layout (sky_config.shared). */
static inline void *sky_take_shared(sky_arena *arena, size_t count, size_t size) {
    const size_t room = sky_room(count, size), at = arena->shared_used;
    if (!arena->shares) {
        return sky_take(arena, count, size);
    }
    if (size != 0U && count > (SIZE_MAX / 4U - at) / size) {
        arena->used = SIZE_MAX / 2U;
        return NULL;
    }
    arena->shared_used += room;
    if (arena->shared == NULL || arena->shared_used > arena->shared_bytes) {
        return NULL;
    }
    SKY_GUARD(arena->shared + at + count * size, room - count * size);
    return arena->shared + at;
}

#endif
