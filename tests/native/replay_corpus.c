/* Runs the inputs of a corpus file through a fuzz target, without libFuzzer.
 *
 * The file holds the inputs one after another, each after its length: 2 bytes, little-endian.
 */
#include <stdio.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const unsigned char *data, size_t bytes);

int main(int count, char **words)
{
    FILE *file = count == 2 ? fopen(words[1], "rb") : NULL;
    if (!file) {
        fprintf(stderr, "usage: replay CORPUS\n");
        return 2;
    }
    unsigned char length[2];
    int inputs = 0;
    while (fread(length, 1, 2, file) == 2) {
        const size_t bytes = length[0] | (size_t)length[1] << 8;
        unsigned char *data = malloc(bytes ? bytes : 1); /* of this size, so that reads beyond its end are found */
        if (!data || fread(data, 1, bytes, file) != bytes) return 2;
        LLVMFuzzerTestOneInput(data, bytes);
        free(data);
        inputs++;
    }
    fclose(file);
    fprintf(stderr, "inputs: %d\n", inputs);
    return 0;
}
