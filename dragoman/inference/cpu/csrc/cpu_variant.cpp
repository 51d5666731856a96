// Which of the libraries compiled ahead of time this processor and its operating system can run.
#include <cstdint>

// Return an index into VARIANTS of kernel_compiler.py: baseline, AVX2, AVX-512, AVX-512 with VNNI.
extern "C" int64_t dragoman_cpu_variant() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("bmi2")) return 0;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512cd") ||
        !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl"))
        return 1;
    return __builtin_cpu_supports("avx512vnni") ? 3 : 2;
#else
    return 0;
#endif
}
