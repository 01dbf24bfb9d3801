/* HMAC-SHA256: FIPS 180-4, sections 5 and 6.2, and RFC 2104. */
#include <stdint.h>
#include <string.h>

#include "authentication.h"
#include "core.h"

#define BLOCK 64

struct sha256 {
    uint32_t state[8];
    uint64_t bytes;
    unsigned char block[BLOCK];
};

static const uint32_t round_constants[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

static uint32_t rotate(uint32_t x, int bits) { return x >> bits | x << (32 - bits); }

static void process_block(struct sha256 *s)
{
    uint32_t w[64], v[8];
    for (int t = 0; t < 16; t++) {
        const unsigned char *b = s->block + 4 * t;
        w[t] = (uint32_t)b[0] << 24 | (uint32_t)b[1] << 16 | (uint32_t)b[2] << 8 | b[3];
    }
    for (int t = 16; t < 64; t++) {
        const uint32_t a = w[t - 15], b = w[t - 2];
        w[t] = w[t - 16] + (rotate(a, 7) ^ rotate(a, 18) ^ a >> 3) + w[t - 7] + (rotate(b, 17) ^ rotate(b, 19) ^ b >> 10);
    }
    memcpy(v, s->state, sizeof v);
    for (int t = 0; t < 64; t++) {
        const uint32_t e = v[4], a = v[0];
        const uint32_t t1 = v[7] + (rotate(e, 6) ^ rotate(e, 11) ^ rotate(e, 25)) + ((e & v[5]) ^ (~e & v[6])) +
                            round_constants[t] + w[t];
        const uint32_t t2 = (rotate(a, 2) ^ rotate(a, 13) ^ rotate(a, 22)) + ((a & v[1]) ^ (a & v[2]) ^ (v[1] & v[2]));
        memmove(v + 1, v, 7 * sizeof *v);
        v[4] += t1;
        v[0] = t1 + t2;
    }
    for (int i = 0; i < 8; i++) s->state[i] += v[i];
}

static void start(struct sha256 *s)
{
    *s = (struct sha256){.state = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                   0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19}};
}

static void add(struct sha256 *s, const void *data, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++) {
        s->block[s->bytes++ % BLOCK] = ((const unsigned char *)data)[i];
        if (s->bytes % BLOCK == 0) process_block(s);
    }
}

static void finish_hash(struct sha256 *s, unsigned char digest[PROOF_BYTES])
{
    const uint64_t bits = 8 * s->bytes;
    unsigned char length[8];
    for (int i = 0; i < 8; i++) length[i] = (unsigned char)(bits >> (56 - 8 * i));
    add(s, "\x80", 1);
    while (s->bytes % BLOCK != BLOCK - sizeof length) add(s, "", 1);
    add(s, length, sizeof length);
    for (int i = 0; i < PROOF_BYTES; i++) digest[i] = (unsigned char)(s->state[i / 4] >> (24 - 8 * (i % 4)));
}

void hmac_sha256(const unsigned char *key, const void *data, size_t bytes, unsigned char proof[PROOF_BYTES])
{
    unsigned char inner[BLOCK], outer[BLOCK];
    for (int i = 0; i < BLOCK; i++) {
        const unsigned char k = i < FRD_KEY_BYTES ? key[i] : 0;
        inner[i] = k ^ 0x36;
        outer[i] = k ^ 0x5c;
    }
    struct sha256 s;
    start(&s);
    add(&s, inner, BLOCK);
    add(&s, data, bytes);
    finish_hash(&s, proof);
    start(&s);
    add(&s, outer, BLOCK);
    add(&s, proof, PROOF_BYTES);
    finish_hash(&s, proof);
}

bool are_equal_proofs(const unsigned char *a, const unsigned char *b)
{
    unsigned char difference = 0;
    for (int i = 0; i < PROOF_BYTES; i++) difference |= a[i] ^ b[i];
    return difference == 0;
}
