/* SHA-256, and HMAC-SHA-256 of packets, by OpenSSL's libcrypto where that can be loaded: the hash is not ours. */
#ifndef SKYMEMORY_SHA_H
#define SKYMEMORY_SHA_H

#include "packet.h" /* Python's headers go first */

#include "nh.h"

enum { MAC_KEY_BYTES = 32, SHA_BYTES = 32, LONGEST_PACKET = 65507 };

/* A SHA256_CTX (112 bytes in every OpenSSL there is), with room. */
typedef struct {
    _Alignas(16) uint8_t bytes[128];
} ShaState;

/* The two hash states that depend on the key alone: caching them halves the time of a MAC. With a payload key, the MACs of
 * SETs and MIGRATEs cover their payloads. */
typedef struct {
    ShaState inner, outer;
    uint8_t payload_key[NH_KEY_BYTES];
    int covers_payloads;
} MacKey;

typedef struct {
    const uint8_t *bytes;
    size_t size;
} Payload;

/* Whether there is a library; looked for once. */
int sky_sha_ready(void);
/* For tests: disable the library (0), or look for it again (1). */
int sky_sha_select(int wanted);
/* Of ``head`` and then ``body``. */
void sky_sha256(const uint8_t *head, size_t head_bytes, const uint8_t *body, size_t body_bytes, uint8_t *digest);
/* Of MAC_KEY_BYTES, and NH_KEY_BYTES more where payloads are covered: whether it has one of these lengths. */
int sky_mac_key(MacKey *mac, const uint8_t *key, size_t size);
/* The MAC that stands at packet[end], over the packet up to there and, if it covers it, the payload; ``sky`` is where its
 * SKY header begins. */
void sky_mac_of(const MacKey *mac, uint32_t time_high, const uint8_t *packet, size_t sky, size_t end, Payload payload,
                uint8_t *out);

/* macs.c: the keys and the time to check against. ``keys``: as ``sky_mac_key`` takes them, by key id. */
typedef struct {
    PyObject *keys;
    long long now_us, skew_us;
    long key_id; /* of ``mac``; 0: none yet */
    MacKey mac;
} MacCheck;

/* Where the MAC of such a packet ends: 0 for one without, or too short, or too large. */
size_t sky_mac_end(const uint8_t *packet, size_t size, size_t sky);
/* 1 and when it was sent, in microseconds (0 in telemetry), for an authentic packet; 0 for any other; -1: exception. */
int sky_check_mac(MacCheck *check, const uint8_t *packet, size_t size, size_t sky, long long *sent_us);
/* Whether there is a key of this id, which is then the check's ``mac``: 1 or 0; -1: exception. */
int sky_find_mac_key(MacCheck *check, long key_id);
/* Whether the operation of this packet is followed by bytes of a chunk. */
int sky_carries_payload(const uint8_t *packet, size_t sky);
/* Whether MACs by this key cover the payload of such a packet. */
int sky_mac_covers_payload(const MacKey *mac, const uint8_t *packet, size_t sky);
/* Add a MAC to a plain packet of ``width`` bytes without its payload, which has room for 16 more, and seal it: 0 for one
 * too long. */
int sky_sign(uint8_t *row, size_t width, size_t sky, const MacKey *mac, unsigned key_id, unsigned long long time_us,
             Payload payload);
/* The plain packet of one whose MAC ends at ``end``: ``size`` - 16 bytes, sealed. */
void sky_strip_mac(const uint8_t *packet, size_t size, size_t sky, size_t end, uint8_t *out);

#endif
