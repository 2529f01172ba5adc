/* Preloaded, it answers MKL's question for Intel's processor, so that MKL runs its AVX-512 code on others.
   For benchmarks, as the fastest stock torch that there could be. */
int mkl_serv_intel_cpu_true(void) { return 1; }
