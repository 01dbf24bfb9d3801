/* Proofs of knowledge of a key. */
#ifndef FARANDOLE_AUTHENTICATION_H
#define FARANDOLE_AUTHENTICATION_H

#include <stdbool.h>
#include <stddef.h>

#define PROOF_BYTES 32

/* HMAC-SHA256 of `bytes` bytes of `data` under a key of FRD_KEY_BYTES. */
void hmac_sha256(const unsigned char *key, const void *data, size_t bytes, unsigned char proof[PROOF_BYTES]);

/* Compares two proofs in constant time. */
bool are_equal_proofs(const unsigned char *a, const unsigned char *b);

#endif
