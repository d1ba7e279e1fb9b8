/* SHA-256 from whatever libcrypto the system has, found when it is first needed: the package builds and runs without
 * its headers, and without it. */
#include "sha.h"

#include <dlfcn.h>

enum { BLOCK = 64, INNER_PAD = 0x36, OUTER_PAD = 0x5C };

typedef int (*Init)(void *);
typedef int (*Update)(void *, const void *, size_t);
typedef int (*Final)(uint8_t *, void *);

static struct {
    int looked, ready;
    Init init;
    Update update;
    Final final;
} sha;

static int knows_abc(void)
{
    static const uint8_t expected[] = {0xba, 0x78, 0x16, 0xbf, 0x8f, 0x01, 0xcf, 0xea}; /* FIPS 180-4's example */
    ShaState state;
    uint8_t digest[SHA_BYTES];
    sha.init(&state);
    sha.update(&state, "abc", 3);
    sha.final(digest, &state);
    return !memcmp(digest, expected, sizeof expected);
}

static void look(void)
{
    static const char *const names[] = {"libcrypto.so.3", "libcrypto.so.1.1", "libcrypto.so", "libcrypto.dylib"};
    sha.looked = 1;
    for (size_t i = 0; i < sizeof names / sizeof *names && !sha.ready; i++) {
        void *library = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
        if (!library)
            continue;
        *(void **)&sha.init = dlsym(library, "SHA256_Init");
        *(void **)&sha.update = dlsym(library, "SHA256_Update");
        *(void **)&sha.final = dlsym(library, "SHA256_Final");
        sha.ready = sha.init && sha.update && sha.final && knows_abc();
        if (!sha.ready)
            dlclose(library);
    }
}

int sky_sha_ready(void)
{
    if (!sha.looked)
        look();
    return sha.ready;
}

int sky_sha_select(int wanted)
{
    sha.looked = !wanted, sha.ready = 0;
    return sky_sha_ready();
}

void sky_sha256(const uint8_t *head, size_t head_bytes, const uint8_t *body, size_t body_bytes, uint8_t *digest)
{
    ShaState state;
    sha.init(&state);
    sha.update(&state, head, head_bytes);
    sha.update(&state, body, body_bytes);
    sha.final(digest, &state);
}

static void padded(ShaState *state, const uint8_t *key, uint8_t pad)
{
    uint8_t block[BLOCK];
    memset(block, pad, sizeof block);
    for (int i = 0; i < MAC_KEY_BYTES; i++)
        block[i] ^= key[i];
    sha.init(state);
    sha.update(state, block, sizeof block);
}

int sky_mac_key(MacKey *mac, const uint8_t *key, size_t size)
{
    if (size != MAC_KEY_BYTES && size != MAC_KEY_BYTES + NH_KEY_BYTES)
        return 0;
    padded(&mac->inner, key, INNER_PAD);
    padded(&mac->outer, key, OUTER_PAD);
    mac->covers_payloads = size > MAC_KEY_BYTES;
    if (mac->covers_payloads)
        memcpy(mac->payload_key, key + MAC_KEY_BYTES, NH_KEY_BYTES);
    return 1;
}

int sky_carries_payload(const uint8_t *packet, size_t sky)
{
    uint8_t op = packet[sky + 1];
    return op == OP_SET || op == OP_MIGRATE || op == OP_DATA;
}

int sky_mac_covers_payload(const MacKey *mac, const uint8_t *packet, size_t sky)
{
    return mac->covers_payloads && sky == COMMAND_BYTES && sky_carries_payload(packet, sky);
}

void sky_mac_of(const MacKey *mac, uint32_t time_high, const uint8_t *packet, size_t sky, size_t end, Payload payload,
                uint8_t *out)
{
    uint8_t head[4 + TELEMETRY_BYTES + SKY_BYTES], digest[SHA_BYTES];
    put32(head, time_high);
    memcpy(head + 4, packet, sky + SKY_BYTES);
    memset(head + 4 + sky + MUTABLE_AT, 0, MUTABLE_END - MUTABLE_AT); /* what forwarders change */
    memset(head + 4 + sky + CRC_AT, 0, SKY_BYTES - CRC_AT);
    ShaState state = mac->inner;
    sha.update(&state, head, 4 + sky + SKY_BYTES);
    sha.update(&state, packet + sky + SKY_BYTES, end - sky - SKY_BYTES);
    if (sky_mac_covers_payload(mac, packet, sky)) {
        uint8_t hashes[(LONGEST_PACKET / NH_BLOCK + 1) * NH_HASH_BYTES];
        sha.update(&state, hashes, sky_nh(mac->payload_key, payload.bytes, payload.size, hashes));
    }
    sha.final(digest, &state);
    state = mac->outer;
    sha.update(&state, digest, sizeof digest);
    sha.final(digest, &state);
    memcpy(out, digest, MAC_BYTES);
}
