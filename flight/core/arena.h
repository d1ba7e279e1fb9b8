/* Memory for a satellite's whole life, handed out once at its start.
 *
 * A module's `..._new` takes its structure and its pools. With `memory` NULL nothing is handed out and every take gives
 * NULL: the same code then counts the bytes that it needs.
 */
#ifndef SKY_ARENA_H
#define SKY_ARENA_H

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
} sky_arena;

#define SKY_SMALL_POOL 2048U
#define SKY_SMALL_STRUCTURE 32768U

/* For builds with AddressSanitizer, which knows nothing of the parts of one allocation: bytes behind every part must not be
 * touched, so what reads or writes past the end of its pool is found. Memory is freed without guards. */
#ifdef SKY_ADDRESS_SANITIZER
#define SKY_GUARD_BYTES 32U
#define SKY_GUARD(at, bytes) __asan_poison_memory_region((at), (bytes))
#define SKY_UNGUARD(at, bytes) __asan_unpoison_memory_region((at), (bytes))
#else
#define SKY_GUARD_BYTES 0U
#define SKY_GUARD(at, bytes) ((void)0)
#define SKY_UNGUARD(at, bytes) ((void)0)
#endif

/* Zeroed room for `count` times `size` bytes; NULL while counting, or where the arena is too small. Small things lie together,
 * from below, and pools from above: a system whose memory comes by pages then gives few that are hardly used. */
static inline void *sky_take(sky_arena *arena, size_t count, size_t size) {
    const size_t room = ((count * size + 15U) & ~(size_t)15U) + SKY_GUARD_BYTES;
    size_t at;
    if (size != 0U && count > (SIZE_MAX / 4U - arena->used) / size) {
        arena->used = SIZE_MAX / 2U; /* impossible: never fits */
        return NULL;
    }
    arena->used += room;
    if (room <= SKY_SMALL_POOL || (count == 1U && room <= SKY_SMALL_STRUCTURE)) {
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

#endif
