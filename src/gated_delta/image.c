// Linked into every kernel: a level's PTX, where it is set, in place of the kernel's machine code.
const char *gated_delta_image = 0;

int __real__cudaLibraryLoadData(void **, const void *, void *, void *, unsigned, void *, void *,
                                unsigned);

int __wrap__cudaLibraryLoadData(void **library, const void *code, void *options, void *values,
                                unsigned count, void *library_options, void *library_values,
                                unsigned library_count) {
  return __real__cudaLibraryLoadData(library, gated_delta_image ? gated_delta_image : code, options,
                                     values, count, library_options, library_values, library_count);
}
