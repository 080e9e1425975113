// Our own declarations of the part of CANN's C interface that the bridge uses, written from the tables of the Ascend
// specification (sections 3, 4 and 5). Nothing here comes from a CANN header.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

extern "C" {
struct aclTensor;
struct aclTensorList;
struct aclIntArray;
struct aclOpExecutor;
}

using aclError = int32_t;
using aclnnStatus = int32_t;
using aclrtStream = void*;
using aclrtEvent = void*;
using HcclComm = void*;
using HcclResult = int32_t;

namespace deepinfer::ascend {

// Element types (spec: ascend 3.1); only the ones that the bridge carries.
enum class DataType : int32_t {
  kFloat = 0,
  kFloat16 = 1,
  kInt8 = 2,
  kInt32 = 3,
  kUint8 = 4,
  kInt16 = 6,
  kUint16 = 7,
  kUint32 = 8,
  kInt64 = 9,
  kUint64 = 10,
  kDouble = 11,
  kBool = 12,
  kBf16 = 27,
  kInt4 = 29,
  kHifloat8 = 34,
  kFloat8E5m2 = 35,
  kFloat8E4m3 = 36,
  kFloat8E8m0 = 37,
  kFloat4E2m1 = 40,
  kFloat4E1m2 = 41,
};

// Storage formats (spec: ascend 3.2).
enum class Format : int32_t { kNd = 2, kFractalNz = 29 };

// Directions of a copy and allocation policy (spec: ascend 3.3).
enum class MemcpyKind : int32_t { kHostToDevice = 1, kDeviceToHost = 2, kDeviceToDevice = 3 };
inline constexpr int32_t kMallocHugeFirst = 0;
inline constexpr uint32_t kEventSync = 1;
inline constexpr int32_t kEventComplete = 1;
inline constexpr int32_t kOptionDeterministic = 0;

// Name and type of each function that must exist in the runtime library (spec: ascend 3.5).
#define DEEPINFER_RUNTIME_FUNCTIONS(X)                                                    \
  X(aclInit, aclError(const char*))                                                       \
  X(aclFinalize, aclError())                                                              \
  X(aclrtGetDeviceCount, aclError(uint32_t*))                                             \
  X(aclrtSetDevice, aclError(int32_t))                                                    \
  X(aclrtResetDevice, aclError(int32_t))                                                  \
  X(aclrtGetSocName, const char*())                                                       \
  X(aclrtCreateStreamWithConfig, aclError(aclrtStream*, uint32_t, uint32_t))              \
  X(aclrtDestroyStream, aclError(aclrtStream))                                            \
  X(aclrtStreamAbort, aclError(aclrtStream))                                              \
  X(aclrtSynchronizeStreamWithTimeout, aclError(aclrtStream, int32_t))                    \
  X(aclrtMalloc, aclError(void**, size_t, int32_t))                                       \
  X(aclrtFree, aclError(void*))                                                           \
  X(aclrtMemcpyAsync, aclError(void*, size_t, const void*, size_t, int32_t, aclrtStream)) \
  X(aclrtCreateEventExWithFlag, aclError(aclrtEvent*, uint32_t))                          \
  X(aclrtDestroyEvent, aclError(aclrtEvent))                                              \
  X(aclrtRecordEvent, aclError(aclrtEvent, aclrtStream))                                  \
  X(aclrtQueryEventStatus, aclError(aclrtEvent, int32_t*))                                \
  X(aclrtSetSysParamOpt, aclError(int32_t, int64_t))                                      \
  X(aclGetRecentErrMsg, const char*())                                                    \
  X(aclsysGetVersionStr, aclError(char*, char*))

// The same for the objects of operator calls, which an operator library provides (spec: ascend 3.6).
#define DEEPINFER_OBJECT_FUNCTIONS(X)                                                                                 \
  X(aclCreateTensor,                                                                                                  \
    aclTensor*(const int64_t*, uint64_t, int32_t, const int64_t*, int64_t, int32_t, const int64_t*, uint64_t, void*)) \
  X(aclDestroyTensor, aclnnStatus(const aclTensor*))                                                                  \
  X(aclCreateTensorList, aclTensorList*(const aclTensor* const*, uint64_t))                                           \
  X(aclDestroyTensorList, aclnnStatus(const aclTensorList*))                                                          \
  X(aclCreateIntArray, aclIntArray*(const int64_t*, uint64_t))                                                        \
  X(aclDestroyIntArray, aclnnStatus(const aclIntArray*))                                                              \
  X(aclSetAclOpExecutorRepeatable, aclnnStatus(aclOpExecutor*))                                                       \
  X(aclDestroyAclOpExecutor, aclnnStatus(aclOpExecutor*))

// Collectives (spec: ascend 5.5). The library is loaded when a group of devices is made.
#define DEEPINFER_COLLECTIVE_FUNCTIONS(X)                                                       \
  X(HcclCommInitAll, HcclResult(uint32_t, int32_t*, HcclComm*))                                 \
  X(HcclCommDestroy, HcclResult(HcclComm))                                                      \
  X(HcclAllReduce, HcclResult(void*, void*, uint64_t, int32_t, int32_t, HcclComm, aclrtStream)) \
  X(HcclAllGather, HcclResult(void*, void*, uint64_t, int32_t, HcclComm, aclrtStream))          \
  X(HcclReduceScatter, HcclResult(void*, void*, uint64_t, int32_t, int32_t, HcclComm, aclrtStream))

// Element types and reductions of collectives, whose numbers are not those of DataType (spec: ascend 3.4).
enum class HcclType : int32_t { kInt8 = 0, kInt32 = 2, kFloat16 = 3, kFloat = 4, kUint8 = 7, kBf16 = 11 };
inline constexpr int32_t kHcclSum = 0;

using PhaseTwo = aclnnStatus(void* workspace, uint64_t bytes, aclOpExecutor* executor, aclrtStream stream);

// The spelling of one argument type in the notation of the specification (section 5).
template <class T>
struct ArgumentKind;
#define DEEPINFER_ARGUMENT_KIND(type, text)    \
  template <>                                  \
  struct ArgumentKind<type> {                  \
    static constexpr const char* kText = text; \
  }
DEEPINFER_ARGUMENT_KIND(const aclTensor*, "T");
DEEPINFER_ARGUMENT_KIND(aclTensor*, "T");
DEEPINFER_ARGUMENT_KIND(const aclTensorList*, "TL");
DEEPINFER_ARGUMENT_KIND(aclTensorList*, "TL");
DEEPINFER_ARGUMENT_KIND(const aclIntArray*, "IA");
DEEPINFER_ARGUMENT_KIND(int64_t, "i");
DEEPINFER_ARGUMENT_KIND(int32_t, "int32");
DEEPINFER_ARGUMENT_KIND(int8_t, "int8");
DEEPINFER_ARGUMENT_KIND(bool, "b");
DEEPINFER_ARGUMENT_KIND(double, "f64");
DEEPINFER_ARGUMENT_KIND(float, "f32");
DEEPINFER_ARGUMENT_KIND(char*, "s");
DEEPINFER_ARGUMENT_KIND(const char*, "s");
#undef DEEPINFER_ARGUMENT_KIND

// "T T f64 T T" for a list of argument types.
template <class... Arguments>
std::string SignatureText() {
  std::string text;
  ((text += text.empty() ? "" : " ", text += ArgumentKind<Arguments>::kText), ...);
  return text;
}

}  // namespace deepinfer::ascend
