/* Read one call from a file, run the kernel of a library, and write its result and all arrays back (see emulated.py).
 * Arguments: library, request, answer. */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int64_t I;
typedef I (*Kernel)(I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I);
enum { MOST = 20 };

static void take(void *target, size_t size, FILE *file) {
    if (fread(target, 1, size, file) != size) exit(3);
}

int main(int argc, char **argv) {
    char name[40] = {0};
    int64_t count, values[MOST] = {0}, sizes[MOST] = {0};
    FILE *request = argc == 4 ? fopen(argv[2], "rb") : NULL;
    if (!request) return 2;
    take(name, 32, request);
    take(&count, sizeof count, request);
    if (count > MOST) return 2;
    for (int64_t i = 0; i < count; i++) {
        int64_t is_array, value;
        take(&is_array, sizeof is_array, request);
        take(&value, sizeof value, request);
        values[i] = value;
        if (!is_array) continue;
        sizes[i] = value;
        void *data = malloc(value ? (size_t)value : 1);
        if (!data) return 4;
        take(data, (size_t)value, request);
        values[i] = (int64_t)(intptr_t)data;
    }
    strcat(name, "_neon");
    void *library = dlopen(argv[1], RTLD_NOW);
    Kernel kernel = library ? (Kernel)dlsym(library, name) : NULL;
    if (!kernel) return 5;
    /* Kernels have fewer parameters. On AArch64, a callee ignores further arguments. */
    const int64_t *v = values;
    const int64_t result = kernel(v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7], v[8], v[9], v[10], v[11], v[12],
                                  v[13], v[14], v[15], v[16], v[17], v[18], v[19]);
    FILE *answer = fopen(argv[3], "wb");
    if (!answer) return 6;
    fwrite(&result, sizeof result, 1, answer);
    for (int64_t i = 0; i < count; i++)
        if (sizes[i]) fwrite((void *)(intptr_t)values[i], 1, (size_t)sizes[i], answer);
    return fclose(answer);
}
