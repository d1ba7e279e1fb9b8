/* libFuzzer: any bytes as one datagram, as they are and with their lengths and checksum made sound, so that bodies are
 * reached. */
#include <stdlib.h>
#include <string.h>

#include "wire/packet.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* Makes length and header CRC those of the packet: a fuzzer seldom guesses 32 bits. */
static void make_sound(uint8_t *packet, size_t bytes) {
    const size_t sky = sky_header_start(packet);
    if (bytes < sky + SKY_HEADER_BYTES)
        return;
    const uint8_t op = packet[sky + SKY_OP_AT];
    size_t end = bytes;
    if (sky_op_carries(op) && bytes >= sky + SKY_HEADER_BYTES + SKY_REF_BYTES)
        end = sky + SKY_HEADER_BYTES + SKY_REF_BYTES;
    sky_store16(packet + 4, (uint16_t)(bytes - 7U));
    sky_packet_seal(packet, end);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size == 0 || size > SKY_MAX_PACKET_BYTES)
        return 0;
    uint8_t *packet = malloc(size); /* of its own size, so that a byte too far is seen */
    if (packet == NULL)
        return 0;
    memcpy(packet, data, size);
    (void)sky_packet_check(packet, size);
    make_sound(packet, size);
    (void)sky_packet_check(packet, size);
    free(packet);
    return 0;
}
