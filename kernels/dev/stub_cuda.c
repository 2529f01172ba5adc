/* A CUDA driver that runs no kernel: it answers what Triton asks of libcuda.so.1, keeps the arguments of the last launch
   and hands each launch to stub_emulate, if that is set. Copies it makes. Pointers of the host pass for pointers of a
   device. The numbers are an H100's. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef int Result;
enum { MOST = 256, BYTES = 8 };

struct Config {
  unsigned grid[3], block[3], shared;
  void *stream, *attributes;
  unsigned count;
};

int stub_launches = 0, stub_expected = 0; /* the second: the number of the next launch's arguments, set by the test */
int stub_capacity = 232448; /* bytes of shared memory that a block may have */
unsigned stub_grid[3], stub_threads, stub_shared;
uint64_t stub_arguments[MOST];
/* Gets what was loaded as the kernel's module. */
void (*stub_emulate)(const struct Config *config, const char *image, void **arguments) = NULL;

Result cuLaunchKernelEx(const struct Config *config, void *function, void **arguments, void **extra) {
  if (function == NULL || extra != NULL || stub_expected > MOST) return 1;
  stub_launches++;
  memcpy(stub_grid, config->grid, sizeof stub_grid);
  stub_threads = config->block[0];
  stub_shared = config->shared;
  for (int i = 0; i < stub_expected; i++) memcpy(&stub_arguments[i], arguments[i], BYTES);
  if (stub_emulate != NULL) stub_emulate(config, function, arguments);
  return 0;
}

struct Attributes {
  int order, source[2], target[2];
  unsigned flags;
};

int stub_batches = 0, stub_refusal = 0; /* the second: what the next batches of copies return */
struct Attributes stub_attributes;
void *stub_stream;

Result cuMemcpyBatchAsync(uint64_t *targets, uint64_t *sources, size_t *sizes, size_t count, struct Attributes *all,
                          size_t *first, size_t kinds, size_t *failed, void *stream) {
  if (stub_refusal) return stub_refusal;
  if (kinds != 1 || first[0] != 0 || failed == NULL) return 1;
  stub_batches++;
  stub_attributes = all[0];
  stub_stream = stream;
  for (size_t i = 0; i < count; i++) memcpy((void *)targets[i], (void *)sources[i], sizes[i]);
  return 0;
}

Result cuDeviceGetAttribute(int *value, int attribute, int device) {
  switch (attribute) {
    case 10: *value = 32; return 0;      /* threads of a warp */
    case 12: *value = 65536; return 0;   /* registers of a block */
    case 16: *value = 132; return 0;     /* multiprocessors */
    case 75: *value = 9; return 0;       /* compute capability */
    case 76: *value = 0; return 0;
    case 97: *value = stub_capacity; return 0;
    default: *value = 1000; return 0;
  }
}

Result cuPointerGetAttribute(void *value, int attribute, uint64_t pointer) {
  memcpy(value, &pointer, sizeof pointer);
  return 0;
}

static Result some(void **handle) {
  *handle = handle;
  return 0;
}

Result cuCtxGetCurrent(void **context) { return some(context); }
Result cuCtxGetDevice(int *device) { *device = 0; return 0; }
Result cuCtxGetLimit(size_t *bytes, int limit) { *bytes = 0; return 0; }
Result cuCtxSetCurrent(void *context) { return 0; }
Result cuCtxSetLimit(int limit, size_t bytes) { return 0; }
Result cuDeviceGet(int *device, int index) { *device = index; return 0; }
Result cuDevicePrimaryCtxRetain(void **context, int device) { return some(context); }
Result cuDriverGetVersion(int *version) { *version = 13000; return 0; }
Result cuFuncGetAttribute(int *value, int attribute, void *function) { *value = attribute == 0 ? 1024 : 0; return 0; }
Result cuFuncSetAttribute(void *function, int attribute, int value) { return 0; }
Result cuFuncSetCacheConfig(void *function, int config) { return 0; }
Result cuGetErrorString(Result error, const char **text) { *text = "refused by the stub"; return 0; }
Result cuModuleGetFunction(void **function, void *module, const char *name) { *function = module; return 0; }
Result cuModuleLoadData(void **module, const void *image) {
  if (stub_emulate == NULL) return some(module);
  *module = strdup(image); /* text, kept for the life of the process */
  return *module == NULL;
}
Result cuModuleUnload(void *module) { return 0; }
Result cuOccupancyMaxActiveClusters(int *clusters, void *function, const void *config) { *clusters = 1; return 0; }
Result cuStreamIsCapturing(void *stream, int *status) { *status = 0; return 0; }
Result cuTensorMapEncodeIm2col(void) { return 0; }

/* A descriptor in the layout of ptx/tensor_copies.py, with PTX's numbers of the types of elements. What CUDA refuses of
   it without interleaving is refused here. */
Result cuTensorMapEncodeTiled(void *map, unsigned type, uint32_t rank, void *address, const uint64_t *sizes,
                              const uint64_t *strides, const uint32_t *box, const uint32_t *steps, unsigned interleave,
                              unsigned swizzle, unsigned promotion, unsigned fill) {
  static const uint32_t element[] = {0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 8, 11, 12};
  static const uint32_t bytes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};
  const uint64_t least = 16, wide = UINT64_C(1) << 40;
  if (type > 12 || rank < 1 || rank > 5 || interleave || swizzle > 3 || fill > 1) return 1;
  if ((uintptr_t)map % 64 || (uintptr_t)address % least) return 1;
  if (box[0] * bytes[type] % least || (swizzle && box[0] * bytes[type] > least << swizzle)) return 1;

  char *at = map;
  const uint32_t header[] = {rank - 1, element[type], interleave, swizzle, fill};
  memset(at, 0, 128);
  memcpy(at, &address, 8);
  memcpy(at + 8, header, sizeof header);
  for (uint32_t k = 0; k < rank; k++) {
    const uint32_t size = (uint32_t)sizes[k];
    if (sizes[k] < 1 || sizes[k] > UINT32_MAX || box[k] < 1 || box[k] > 256 || steps[k] < 1 || steps[k] > 8) return 1;
    memcpy(at + 28 + 4 * k, &box[k], 4);
    memcpy(at + 48 + 4 * k, &size, 4);
    memcpy(at + 68 + 4 * k, &steps[k], 4);
    if (k + 1 == rank) break;
    if (strides[k] % least || strides[k] >= wide) return 1;
    memcpy(at + 88 + 8 * k, &strides[k], 8);
  }
  return 0;
}
