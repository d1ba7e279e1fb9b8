/* Numbers as the wire has them: big-endian, at any address. */
#ifndef SKY_BYTES_H
#define SKY_BYTES_H

#include <stdint.h>

static inline uint16_t sky_load16(const uint8_t *at) {
    return (uint16_t)((uint16_t)at[0] << 8 | (uint16_t)at[1]);
}

static inline uint32_t sky_load32(const uint8_t *at) {
    return (uint32_t)at[0] << 24 | (uint32_t)at[1] << 16 | (uint32_t)at[2] << 8 | (uint32_t)at[3];
}

static inline uint64_t sky_load64(const uint8_t *at) {
    return (uint64_t)sky_load32(at) << 32 | (uint64_t)sky_load32(at + 4);
}

/* A signed number, without relying on how the compiler narrows: GCC, Clang and the standard agree on this one. */
static inline int32_t sky_load32s(const uint8_t *at) {
    const uint32_t word = sky_load32(at);
    return word <= (uint32_t)INT32_MAX ? (int32_t)word : -(int32_t)(UINT32_MAX - word) - 1;
}

static inline void sky_store16(uint8_t *at, uint32_t value) {
    at[0] = (uint8_t)(value >> 8 & 0xFFU);
    at[1] = (uint8_t)(value & 0xFFU);
}

static inline void sky_store32(uint8_t *at, uint32_t value) {
    sky_store16(at, value >> 16);
    sky_store16(at + 2, value & 0xFFFFU);
}

static inline void sky_store32s(uint8_t *at, int32_t value) { sky_store32(at, (uint32_t)value); }

static inline void sky_store64(uint8_t *at, uint64_t value) {
    sky_store32(at, (uint32_t)(value >> 32));
    sky_store32(at + 4, (uint32_t)(value & 0xFFFFFFFFU));
}

#endif
