// A stand-in for a CUDA driver that is older than the kernels' CUDA runtime.

extern "C" int cuDriverGetVersion(int* version) {
  *version = 12050;
  return 0;
}

extern "C" int cuInit(unsigned) { return 0; }
