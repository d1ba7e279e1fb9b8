/* Inputs of the fuzzed machine from standard input, each behind its length (16 bits); for each a line about what it led to.
 * Built for another processor, it says whether the satellite is the same there: tests/flight/test_processors.py. */
#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>

#include "wire/bytes.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
extern uint32_t fuzz_said;

int main(void) {
    static uint8_t input[65536];
    uint8_t length[2];
    while (fread(length, 1, sizeof length, stdin) == sizeof length) {
        const size_t bytes = sky_load16(length);
        if (fread(input, 1, bytes, stdin) != bytes)
            return 1;
        (void)LLVMFuzzerTestOneInput(input, bytes);
        (void)printf("%08" PRIx32 "\n", fuzz_said);
    }
    return 0;
}
