/* CRC-32 of zlib and Ethernet.
 *
 * crc.c has it by tables. A build for a machine with carry-less multiplication may have it from the project's native helper
 * instead (src/skymemory/native/crc.c, whose sky_crc_init must then be called first): compile with SKY_CRC_ELSEWHERE.
 */
#ifndef SKY_CRC_H
#define SKY_CRC_H

#include <stddef.h>
#include <stdint.h>

/* Goes on from `crc`, which is 0 at the start. */
uint32_t sky_crc32(uint32_t crc, const uint8_t *data, size_t size);

#endif
