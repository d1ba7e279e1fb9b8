/* CRC-32 without Python: the helper has it, and so has the satellite in C (flight/). */
#ifndef SKYMEMORY_CRC_H
#define SKYMEMORY_CRC_H

#include <stddef.h>
#include <stdint.h>

#define SKY_POLYNOMIAL 0xEDB88320u
#define SKY_ONE 0x80000000u /* the polynomial 1: bit 31 is the coefficient of x^0 */
uint32_t sky_multiply(uint32_t a, uint32_t b);
uint32_t sky_power_of_x(uint64_t exponent);
void sky_crc_init(void);
const char *sky_crc_kind(void);
int sky_crc_select(const char *kind);
uint32_t sky_crc32(uint32_t crc, const uint8_t *data, size_t size);

#endif
