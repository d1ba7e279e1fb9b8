#include "wire/crc.h"

#ifndef SKY_CRC_ELSEWHERE

/* slices[k][b]: the remainder of byte b followed by k zero bytes. It is linear in b, so eight remainders, those of the
 * bytes 1, 2, 4 ... 128, give a row: the compiler computes it, and nothing is set up at the start. */
#define OF(b, r0, r1, r2, r3, r4, r5, r6, r7)                                                                    \
    (((((b) >> 0) & 1U) * (r0)) ^ ((((b) >> 1) & 1U) * (r1)) ^ ((((b) >> 2) & 1U) * (r2)) ^                         \
     ((((b) >> 3) & 1U) * (r3)) ^ ((((b) >> 4) & 1U) * (r4)) ^ ((((b) >> 5) & 1U) * (r5)) ^                         \
     ((((b) >> 6) & 1U) * (r6)) ^ ((((b) >> 7) & 1U) * (r7)))
#define OF4(b, ...) OF(b, __VA_ARGS__), OF((b) + 1U, __VA_ARGS__), OF((b) + 2U, __VA_ARGS__), OF((b) + 3U, __VA_ARGS__)
#define OF16(b, ...) OF4(b, __VA_ARGS__), OF4((b) + 4U, __VA_ARGS__), OF4((b) + 8U, __VA_ARGS__), OF4((b) + 12U, __VA_ARGS__)
#define OF64(b, ...) OF16(b, __VA_ARGS__), OF16((b) + 16U, __VA_ARGS__), OF16((b) + 32U, __VA_ARGS__), OF16((b) + 48U, __VA_ARGS__)
#define ROW(...) {OF64(0U, __VA_ARGS__), OF64(64U, __VA_ARGS__), OF64(128U, __VA_ARGS__), OF64(192U, __VA_ARGS__)}

static const uint32_t slices[8][256] = {
    ROW(0x77073096U, 0xEE0E612CU, 0x076DC419U, 0x0EDB8832U, 0x1DB71064U, 0x3B6E20C8U, 0x76DC4190U, 0xEDB88320U), /* 0 */
    ROW(0x191B3141U, 0x32366282U, 0x646CC504U, 0xC8D98A08U, 0x4AC21251U, 0x958424A2U, 0xF0794F05U, 0x3B83984BU), /* 1 */
    ROW(0x01C26A37U, 0x0384D46EU, 0x0709A8DCU, 0x0E1351B8U, 0x1C26A370U, 0x384D46E0U, 0x709A8DC0U, 0xE1351B80U), /* 2 */
    ROW(0xB8BC6765U, 0xAA09C88BU, 0x8F629757U, 0xC5B428EFU, 0x5019579FU, 0xA032AF3EU, 0x9B14583DU, 0xED59B63BU), /* 3 */
    ROW(0x3D6029B0U, 0x7AC05360U, 0xF580A6C0U, 0x30704BC1U, 0x60E09782U, 0xC1C12F04U, 0x58F35849U, 0xB1E6B092U), /* 4 */
    ROW(0xCB5CD3A5U, 0x4DC8A10BU, 0x9B914216U, 0xEC53826DU, 0x03D6029BU, 0x07AC0536U, 0x0F580A6CU, 0x1EB014D8U), /* 5 */
    ROW(0xA6770BB4U, 0x979F1129U, 0xF44F2413U, 0x33EF4E67U, 0x67DE9CCEU, 0xCFBD399CU, 0x440B7579U, 0x8816EAF2U), /* 6 */
    ROW(0xCCAA009EU, 0x4225077DU, 0x844A0EFAU, 0xD3E51BB5U, 0x7CBB312BU, 0xF9766256U, 0x299DC2EDU, 0x533B85DAU), /* 7 */
};

static uint32_t little(const uint8_t *at) {
    return (uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

/* Eight bytes a step. */
uint32_t sky_crc32(uint32_t crc, const uint8_t *data, size_t size) {
    uint32_t rest = ~crc;
    size_t at = 0;
    for (; size - at >= 8U; at += 8U) {
        const uint32_t low = rest ^ little(data + at), high = little(data + at + 4U);
        rest = slices[7][low & 0xFFU] ^ slices[6][low >> 8 & 0xFFU] ^ slices[5][low >> 16 & 0xFFU] ^
               slices[4][low >> 24] ^ slices[3][high & 0xFFU] ^ slices[2][high >> 8 & 0xFFU] ^
               slices[1][high >> 16 & 0xFFU] ^ slices[0][high >> 24];
    }
    for (; at < size; at++) {
        rest = rest >> 8 ^ slices[0][(rest ^ data[at]) & 0xFFU];
    }
    return ~rest;
}

#endif
