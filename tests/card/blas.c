// cuBLAS and cuBLASLt: what tells of itself, and the products, which are counted as launches.
#include "card.h"
#include <cublasLt.h>
#include <cublas_v2.h>
#include <string.h>

#define OK return CUBLAS_STATUS_SUCCESS
#define VERSION 130101

cublasStatus_t cublasCreate_v2(cublasHandle_t *handle) { *handle = card_handle(); OK; }
cublasStatus_t cublasDestroy_v2(cublasHandle_t handle) { OK; }
cublasStatus_t cublasGetMathMode(cublasHandle_t handle, cublasMath_t *mode) { *mode = CUBLAS_DEFAULT_MATH; OK; }
cublasStatus_t cublasSetMathMode(cublasHandle_t handle, cublasMath_t mode) { OK; }
cublasStatus_t cublasGetPointerMode_v2(cublasHandle_t handle, cublasPointerMode_t *mode) {
  *mode = CUBLAS_POINTER_MODE_HOST;
  OK;
}
cublasStatus_t cublasSetPointerMode_v2(cublasHandle_t handle, cublasPointerMode_t mode) { OK; }
cublasStatus_t cublasGetVersion_v2(cublasHandle_t handle, int *version) { *version = VERSION; OK; }
cublasStatus_t cublasGetStream_v2(cublasHandle_t handle, cudaStream_t *stream) { *stream = 0; OK; }
cublasStatus_t cublasSetStream_v2(cublasHandle_t handle, cudaStream_t stream) { OK; }
cublasStatus_t cublasSetWorkspace_v2(cublasHandle_t handle, void *at, size_t bytes) { OK; }
const char *cublasGetStatusString(cublasStatus_t status) { return "a status of the card without a GPU"; }
const char *cublasGetStatusName(cublasStatus_t status) { return "CUBLAS_STATUS"; }

static cublasStatus_t product(const char *name) { card_launched(name, NULL); OK; }

cublasStatus_t cublasGemmEx(cublasHandle_t h, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k,
    const void *alpha, const void *a, cudaDataType at, int lda, const void *b, cudaDataType bt, int ldb,
    const void *beta, void *c, cudaDataType ct, int ldc, cublasComputeType_t compute, cublasGemmAlgo_t algo) {
  return product("cublasGemmEx");
}
cublasStatus_t cublasSgemm_v2(cublasHandle_t h, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k,
    const float *alpha, const float *a, int lda, const float *b, int ldb, const float *beta, float *c, int ldc) {
  return product("cublasSgemm");
}
cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t h, cublasOperation_t ta, cublasOperation_t tb, int m, int n,
    int k, const void *alpha, const void *a, cudaDataType at, int lda, long long sa, const void *b, cudaDataType bt,
    int ldb, long long sb, const void *beta, void *c, cudaDataType ct, int ldc, long long sc, int count,
    cublasComputeType_t compute, cublasGemmAlgo_t algo) {
  return product("cublasGemmStridedBatchedEx");
}
cublasStatus_t cublasSgemmStridedBatched(cublasHandle_t h, cublasOperation_t ta, cublasOperation_t tb, int m, int n,
    int k, const float *alpha, const float *a, int lda, long long sa, const float *b, int ldb, long long sb,
    const float *beta, float *c, int ldc, long long sc, int count) {
  return product("cublasSgemmStridedBatched");
}

size_t cublasLtGetVersion(void) { return VERSION; }
size_t cublasLtGetCudartVersion(void) { return 13000; }
cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle) { *handle = card_handle(); OK; }
cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) { OK; }
cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *d, cublasComputeType_t compute, cudaDataType_t scale) {
  *d = card_handle();
  OK;
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t d) { OK; }
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t d, cublasLtMatmulDescAttributes_t attribute,
                                              const void *value, size_t bytes) { OK; }
cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *l, cudaDataType type, uint64_t rows, uint64_t columns,
                                          int64_t leading) { *l = card_handle(); OK; }
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t l) { OK; }
cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t l, cublasLtMatrixLayoutAttribute_t attribute,
                                                const void *value, size_t bytes) { OK; }
cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *p) { *p = card_handle(); OK; }
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t p) { OK; }
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t p,
    cublasLtMatmulPreferenceAttributes_t attribute, const void *value, size_t bytes) { OK; }
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t h, cublasLtMatmulDesc_t d, cublasLtMatrixLayout_t a,
    cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t e, cublasLtMatmulPreference_t p,
    int asked, cublasLtMatmulHeuristicResult_t *results, int *found) {
  memset(results, 0, sizeof *results);
  *found = 1;
  OK;
}
cublasStatus_t cublasLtMatmul(cublasLtHandle_t h, cublasLtMatmulDesc_t d, const void *alpha, const void *a,
    cublasLtMatrixLayout_t la, const void *b, cublasLtMatrixLayout_t lb, const void *beta, const void *c,
    cublasLtMatrixLayout_t lc, void *e, cublasLtMatrixLayout_t le, const cublasLtMatmulAlgo_t *algo, void *workspace,
    size_t bytes, cudaStream_t s) {
  return product("cublasLtMatmul");
}
