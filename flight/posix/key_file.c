#define _GNU_SOURCE
#include "key_file.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "json.h"

enum { MOST_BYTES = 65536, FORMAT_VERSION = 1 };

static int digit(char c) {
    if (c >= '0' && c <= '9')
        return c - '0';
    if (c >= 'a' && c <= 'f')
        return c - 'a' + 10;
    return c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

static bool unhex(const char *text, uint8_t secret[32]) {
    if (strlen(text) != 64)
        return false;
    for (unsigned i = 0; i < 32; i++) {
        const int high = digit(text[2 * i]);
        const int low = digit(text[2 * i + 1]);
        if (high < 0 || low < 0)
            return false;
        secret[i] = (uint8_t)(high << 4 | low);
    }
    return true;
}

/* {"id": 1, "key": "64 hexadecimal digits", "from_s": 0.0}, in any order. */
static bool read_key(json *text, sky_secret *key) {
    char name[16];
    char digits[80];
    unsigned seen = 0;
    memset(key, 0, sizeof *key);
    if (!json_take(text, '{'))
        return false;
    do {
        json_string(text, name, sizeof name);
        if (!json_take(text, ':'))
            return false;
        if (strcmp(name, "id") == 0) {
            key->id = (uint16_t)json_whole(text, 65535);
            seen |= key->id != 0 ? 1U : 0U;
        } else if (strcmp(name, "key") == 0) {
            json_string(text, digits, sizeof digits);
            seen |= unhex(digits, key->secret) ? 2U : 0U;
            memset(digits, 0, sizeof digits);
        } else if (strcmp(name, "from_s") == 0) {
            const double from_s = json_number(text);
            if (!(fabs(from_s) < 9.0e12))
                return false;
            key->from = (sky_us)llround(from_s * 1e6);
            seen |= 4U;
        } else {
            return false;
        }
    } while (json_take(text, ','));
    return json_take(text, '}') && seen == 7U && !text->failed;
}

static bool read_ring(json *text, sky_ring *ring) {
    char name[16];
    bool versioned = false;
    if (!json_take(text, '{'))
        return false;
    do {
        json_string(text, name, sizeof name);
        if (!json_take(text, ':'))
            return false;
        if (strcmp(name, "version") == 0) {
            versioned = json_whole(text, 1000) == FORMAT_VERSION;
        } else if (strcmp(name, "keys") == 0) {
            if (!json_take(text, '['))
                return false;
            do {
                if (ring->count == SKY_MOST_KEYS_IN_RING || !read_key(text, &ring->keys[ring->count]))
                    return false;
                ring->count++;
            } while (json_take(text, ','));
            if (!json_take(text, ']'))
                return false;
        } else {
            return false;
        }
    } while (json_take(text, ','));
    if (!json_take(text, '}') || !json_ended(text) || !versioned || ring->count == 0)
        return false;
    for (uint32_t i = 1; i < ring->count; i++) {
        if (ring->keys[i].from < ring->keys[i - 1].from)
            return false;
        for (uint32_t j = 0; j < i; j++) {
            if (ring->keys[i].id == ring->keys[j].id)
                return false;
        }
    }
    return true;
}

bool key_file_read(const char *path, sky_auth auth, sky_ring *ring, char reason[256]) {
    static char data[MOST_BYTES];
    const long bytes = json_read_file(path, data, sizeof data, true);
    memset(ring, 0, sizeof *ring);
    if (bytes < 0) {
        (void)snprintf(reason, 256, errno == EPERM ? "%s is readable by others: `chmod 600 %s`" : "cannot read the keys in %s: %s",
                       path, errno == EPERM ? path : strerror(errno));
        return false;
    }
    json text = {data, data + bytes, false};
    const bool sound = read_ring(&text, ring);
    memset(data, 0, sizeof data);
    ring->auth = auth;
    if (!sound)
        (void)snprintf(reason, 256, "%s: not a key file of version %d: `skymemory keys new FILE` makes one", path,
                       FORMAT_VERSION);
    return sound;
}

bool file_changed(const char *path, file_state *seen) {
    struct stat status;
    file_state now;
    memset(&now, 0, sizeof now);
    if (stat(path, &status) == 0) {
        now.seconds = status.st_mtim.tv_sec;
        now.nanoseconds = status.st_mtim.tv_nsec;
        now.inode = status.st_ino;
        now.bytes = status.st_size;
    }
    const bool changed = now.seconds != seen->seconds || now.nanoseconds != seen->nanoseconds ||
                         now.inode != seen->inode || now.bytes != seen->bytes;
    *seen = now;
    return changed;
}
