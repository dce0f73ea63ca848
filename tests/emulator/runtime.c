// Stand-ins for the CUDA functions that a compiled launch calls. A launch calls the emulator.
#include <stddef.h>
#include <stdint.h>

typedef struct Attribute {
  uint32_t id, padding, value[16];
} Attribute;
typedef struct {
  uint32_t grid[3], block[3];
  size_t shared;
  void *stream;
  struct Attribute *attributes;
  uint32_t attribute_count;
} Config;
enum { CLUSTER = 4, PDL = 6 };
typedef int (*Launch)(const uint32_t *grid, uint32_t cluster, uint32_t pdl, uint32_t threads,
                      size_t shared, void **parameters);

static Launch launch;
void emulator_set(Launch function) { launch = function; }

int cuda_dialect_init_library_once(void **library, int (*init)(void **), int (*load)(void **, int),
                                   void *unused) {
  int error = *library ? 0 : init(library);
  return error || !load ? error : load(library, 0);
}
void cuda_dialect_unload_library_once(void **library) { *library = 0; }
const void *emulator_code;  // the last machine code or PTX that was loaded
int _cudaLibraryLoadData(void **library, void *code) {
  emulator_code = *library = code;
  return 0;
}
int _cudaLibraryGetKernel(void **kernel, void *library, const char *name) {
  *kernel = library;
  return 0;
}
int _cuKernelGetAttribute(int *value, int attribute, void *kernel, int device) {
  *value = 0;
  return 0;
}
int _cudaDeviceGetAttribute(int *value, int attribute, int device) {
  *value = 232448;  // bytes of shared memory
  return 0;
}
int _cudaFuncSetAttribute(void *kernel, int attribute, int value) { return 0; }
int _cudaKernelSetAttributeForDevice(void *kernel, int attribute, int value, int device) {
  return 0;
}
int _cudaGetDevice(int *device) {
  *device = 0;
  return 0;
}
void CuteDSLRT_TVMFFISetRaisedCudaError(int error) {}
int _cudaLaunchKernelEx(const Config *config, void *kernel, void **parameters) {
  uint32_t cluster = 1, pdl = 0;  // blocks along x
  for (uint32_t i = 0; i < config->attribute_count; i++) {
    if (config->attributes[i].id == CLUSTER) cluster = config->attributes[i].value[0];
    if (config->attributes[i].id == PDL) pdl = config->attributes[i].value[0];
  }
  return launch(config->grid, cluster, pdl, config->block[0], config->shared, parameters);
}
