/* Conversions of bf16, rounded to the nearest, ties to even. NaN stays NaN. */
#include <stdint.h>
#include <string.h>

static float wide(uint16_t x) {
    const uint32_t bits = uint32_t(x) << 16;
    float value;
    return memcpy(&value, &bits, 4), value;
}
static uint16_t narrow(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return x != x ? 0x7fff : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
