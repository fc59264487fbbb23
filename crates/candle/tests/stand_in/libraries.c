/* Stand-ins for cuBLAS and cuRAND that let candle open a device. They compute nothing, because the bridge calls neither. */
#include <stdlib.h>

enum { OK = 0, NOT_SUPPORTED = 15 };

int cublasCreate_v2(void** handle) { return *handle = malloc(1), OK; }
int cublasDestroy_v2(void* handle) { return free(handle), OK; }
int cublasSetStream_v2(void) { return OK; }
int cublasDgemmStridedBatched(void) { return NOT_SUPPORTED; }
int cublasGemmStridedBatchedEx(void) { return NOT_SUPPORTED; }

int curandCreateGenerator(void** generator, int kind) { return (void)kind, *generator = malloc(1), OK; }
int curandDestroyGenerator(void* generator) { return free(generator), OK; }
int curandSetPseudoRandomGeneratorSeed(void) { return OK; }
int curandSetStream(void) { return OK; }
int curandGenerateNormal(void) { return NOT_SUPPORTED; }
int curandGenerateNormalDouble(void) { return NOT_SUPPORTED; }
int curandGenerateUniform(void) { return NOT_SUPPORTED; }
int curandGenerateUniformDouble(void) { return NOT_SUPPORTED; }
